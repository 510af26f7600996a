"""Python's collector of cycles, told that a thousand ranks are no garbage.

Its defaults look through all young objects after every 700 new ones, and a collective of 1,000 ranks makes ten times as
many that all live on: a third of the time would go into looking. This room knows the collector and nothing else.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 20_000  # new objects between two looks


@contextmanager
def unhurried() -> Iterator[None]:
    """Let the collector look less often within the block, and leave alone what was there before."""
    before, frozen = gc.get_threshold(), gc.get_freeze_count() > 0  # somebody else's are not ours to thaw
    if not frozen:
        gc.freeze()
    gc.set_threshold(max(before[0], YOUNG) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not frozen:
            gc.unfreeze()
