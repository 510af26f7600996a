"""Locks of windows on MPI, by atomics on a small window of lock words.

A `Get` under a shared lock costs no message of its own. MPI's own locks are taken at a window's birth and held, so that
it is reached while its owner computes. Knows the words; who holds what is the business of all real ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from spawnsim.comm.constants import LOCK_EXCLUSIVE
from spawnsim.real.rank.locks import Locks

WRITER = 1 << 40  # added to a lock word by the one exclusive holder; shared holders add 1


class LockWords(Locks):
    """Lock and Unlock of one rank's window."""

    _words: Any  # mpi4py's window of a lock word per rank
    _one: NDArray[np.int64]
    _was: NDArray[np.int64]

    def _acquire(self, rank: int, lock_type: int, limit_s: float, call: tuple[str, int, Any]) -> bool:
        taken: bool = self._home.wait(lambda: self._take(rank, lock_type), limit_s, call)
        return taken

    def _take(self, rank: int, lock_type: int) -> bool:
        """Try once to take a lock word: the writer needs it at zero, a reader needs it without a writer."""
        if lock_type == LOCK_EXCLUSIVE:
            compare = np.zeros(1, np.int64)
            self._one[0] = WRITER
            self._words.Compare_and_swap(self._one, compare, self._was, rank)
            self._words.Flush(rank)
            return int(self._was[0]) == 0
        if self._add(rank, 1) < WRITER:
            return True
        self._add(rank, -1)
        return False

    def _release(self, rank: int, lock_type: int) -> None:
        self._add(rank, -(WRITER if lock_type == LOCK_EXCLUSIVE else 1))

    def _add(self, rank: int, share: int) -> int:
        self._one[0] = share
        self._words.Fetch_and_op(self._one, self._was, rank)
        self._words.Flush(rank)
        return int(self._was[0])
