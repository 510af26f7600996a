"""Locks of windows on MPI, by atomics on a small window of lock words.

They exclude as MPI's do, meet deadlines, and a `Get` under a shared lock costs no message of its own. MPI's own are
taken at a window's birth and held, so that it is reached while its owner computes. Knows the words and who holds what.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from spawnsim.comm.constants import LOCK_EXCLUSIVE, LOCK_SHARED
from spawnsim.errors import ParameterError, Timeout, UsageError

WRITER = 1 << 40  # added to a lock word by the one exclusive holder; shared holders add 1


class Locks:
    """Lock and Unlock of one rank's window."""

    _comm: Any
    _home: Any
    _words: Any  # mpi4py's window of a lock word per rank
    _held: dict[int, int]
    _one: NDArray[np.int64]
    _was: NDArray[np.int64]

    def Flush(self, rank: int) -> None:
        """Complete all calls to one rank."""
        raise NotImplementedError

    def Lock(self, rank: int, lock_type: int = LOCK_EXCLUSIVE, assertion: int = 0) -> None:
        if lock_type not in (LOCK_EXCLUSIVE, LOCK_SHARED):
            raise ParameterError(f"lock_type={lock_type}: give LOCK_SHARED or LOCK_EXCLUSIVE")
        if rank in self._held:
            raise UsageError(
                f"rank {self._comm.rank}: Lock of rank {rank}, which it holds already; Unlock it first"
            )
        home, share = self._home, WRITER if lock_type == LOCK_EXCLUSIVE else 1
        limit_s = home.clock.limit_s()
        if not home.wait(
            lambda: self._take(rank, share), limit_s, (f"Win.Lock of rank {rank}", -1, self._comm)
        ):
            raise self._locked(rank, limit_s)
        self._held[rank] = share

    def _take(self, rank: int, share: int) -> bool:
        """Try once to take a lock word: the writer needs it at zero, a reader needs it without a writer."""
        if share == WRITER:
            compare = np.zeros(1, np.int64)
            self._one[0] = WRITER
            self._words.Compare_and_swap(self._one, compare, self._was, rank)
            self._words.Flush(rank)
            return int(self._was[0]) == 0
        if self._add(rank, 1) < WRITER:
            return True
        self._add(rank, -1)
        return False

    def _add(self, rank: int, share: int) -> int:
        self._one[0] = share
        self._words.Fetch_and_op(self._one, self._was, rank)
        self._words.Flush(rank)
        return int(self._was[0])

    def _locked(self, rank: int, limit_s: float) -> Timeout:
        text = f"rank {self._comm.rank}: the lock of rank {rank}'s window part was not free for {limit_s:g} s"
        return Timeout([rank], "Win.Lock", -1, f"{text}: its holder may be dead, or has not called Unlock")

    def Unlock(self, rank: int) -> None:
        if rank not in self._held:
            raise UsageError(
                f"rank {self._comm.rank}: Unlock of rank {rank}, which it has not locked; call Lock first"
            )
        self.Flush(rank)
        self._add(rank, -self._held.pop(rank))

    def Lock_all(self, assertion: int = 0) -> None:
        for rank in range(self._comm.size):
            self.Lock(rank, LOCK_SHARED)

    def Unlock_all(self) -> None:
        for rank in list(self._held):
            self.Unlock(rank)
