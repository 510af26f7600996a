"""Python's collector of cycles, told that a thousand ranks are no garbage, and watched while it works.

Its defaults look through all young objects after every 700 new ones, and a collective of 1,000 ranks makes ten times as
many that all live on: a third of the time would go into looking. So what is there before a run is frozen, and looks are
rare. But what was frozen counts as old for good, and a run that is over is a cycle: before the next run starts, all is
collected if there is half as much again as after the last time.

All ranks have one collector. It begins wherever an object is made, and runs the finalizers of any rank's garbage there:
in another rank, or in the middle of one of our own calls. This room knows the collector and nothing else.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

YOUNG = 20_000  # new objects between two looks
FEW = 200_000  # blocks of memory, of which nobody need look through for old runs
_after = [0]  # how many blocks there were after the last whole collection: a fact about this process


@contextmanager
def unhurried(collecting: Callable[[bool], None]) -> Iterator[None]:
    """Let the collector look less often within the block, and leave alone what was there before.

    `collecting` is told when it begins (True) and when it is done (False) in the thread of the block.
    """
    thread = threading.get_ident()

    def tell(phase: str, _counts: dict[str, int]) -> None:
        if threading.get_ident() == thread:
            collecting(phase == "start")

    gc.callbacks.append(tell)
    try:
        with _seldom():
            yield
    finally:
        gc.callbacks.remove(tell)


@contextmanager
def _seldom() -> Iterator[None]:
    before, frozen = gc.get_threshold(), gc.get_freeze_count() > 0  # somebody else's are not ours to thaw
    if not frozen:
        _freeze(collects=before[0] > 0)
    gc.set_threshold(max(before[0], YOUNG) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not frozen:
            gc.unfreeze()


def _freeze(*, collects: bool) -> None:
    """Freeze all that is there, after a collection if much has come since the last one.

    Blocks are counted, not the collector's objects: to count those takes longer than a small run.
    """
    if collects and sys.getallocatedblocks() > _after[0] * 3 // 2 + FEW:
        gc.collect()
        _after[0] = sys.getallocatedblocks()
    gc.freeze()
