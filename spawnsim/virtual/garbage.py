"""Python's collector of cycles, told that a thousand ranks are no garbage.

Its defaults look through all young objects after every 700 new ones, and a collective of 1,000 ranks makes ten times as
many that all live on: a third of the time would go into looking. So what is there before a run is frozen, and looks are
rare. But what was frozen counts as old for good, and a run that is over is a cycle: before the next run starts, all is
collected if there is half as much again as after the last time.

This room knows the collector and nothing else.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 20_000  # new objects between two looks
FEW = 100_000  # objects that nobody need look through for old runs
_after = [0]  # how many objects were there after the last whole collection: a fact about this process


@contextmanager
def unhurried() -> Iterator[None]:
    """Let the collector look less often within the block, and leave alone what was there before."""
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
    """Freeze all that is there, after a collection if much has come since the last one."""
    gc.freeze()
    if collects and gc.get_freeze_count() > _after[0] * 3 // 2 + FEW:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        _after[0] = gc.get_freeze_count()
