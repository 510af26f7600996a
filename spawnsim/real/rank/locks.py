"""Lock and Unlock of windows on real ranks: who holds what, and the errors; how a lock is got is its building's.

They exclude as MPI's do, and meet deadlines. Knows ranks and kinds of locks; knows neither MPI nor torch.
"""

from __future__ import annotations

from typing import Any

from spawnsim.comm.constants import LOCK_EXCLUSIVE, LOCK_SHARED
from spawnsim.comm.integers import integer
from spawnsim.errors import ParameterError, Timeout, UsageError


class Locks:
    """The locks that one rank holds on one window."""

    _comm: Any
    _home: Any
    _held: dict[int, int]  # target → kind of lock

    def Flush(self, rank: int) -> None:
        """Complete all calls to one rank."""
        raise NotImplementedError

    def _acquire(self, rank: int, lock_type: int, limit_s: float, call: tuple[str, int, Any]) -> bool:
        """Get the lock of a rank's part; return whether that was possible within `limit_s`."""
        raise NotImplementedError

    def _release(self, rank: int, lock_type: int) -> None:
        """Give the lock of a rank's part back."""
        raise NotImplementedError

    def Lock(self, rank: int, lock_type: int = LOCK_EXCLUSIVE, assertion: int = 0) -> None:
        rank = integer(rank)
        if lock_type not in (LOCK_EXCLUSIVE, LOCK_SHARED):
            raise ParameterError(f"lock_type={lock_type}: give LOCK_SHARED or LOCK_EXCLUSIVE")
        if rank in self._held:
            raise UsageError(
                f"rank {self._comm.rank}: Lock of rank {rank}, which it holds already; Unlock it first"
            )
        limit_s = self._home.clock.limit_s()
        if not self._acquire(rank, lock_type, limit_s, (f"Win.Lock of rank {rank}", -1, self._comm)):
            text = f"rank {self._comm.rank}: the lock of rank {rank}'s window part was not free for {limit_s:g} s"
            raise Timeout([rank], "Win.Lock", -1, f"{text}: its holder may be dead, or has not called Unlock")
        self._held[rank] = lock_type

    def Unlock(self, rank: int) -> None:
        rank = integer(rank)
        if rank not in self._held:
            raise UsageError(
                f"rank {self._comm.rank}: Unlock of rank {rank}, which it has not locked; call Lock first"
            )
        self.Flush(rank)
        self._release(rank, self._held.pop(rank))

    def Lock_all(self, assertion: int = 0) -> None:
        for rank in range(self._comm.size):
            self.Lock(rank, LOCK_SHARED)

    def Unlock_all(self) -> None:
        for rank in list(self._held):
            self.Unlock(rank)
