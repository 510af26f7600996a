"""Synchronisation of windows on real ranks: Lock and Unlock, and Post, Start, Complete, Wait and Test.

Windows hold MPI's own locks from their creation, so that they are accessible while their owner computes. MPI's
synchronisation calls are therefore not usable for them, and these would not respect deadlines anyway. The locks here
exclude each other as MPI's do. In active-target epochs, a target sends a token to the origins when it has posted, and
an origin sends a token to the targets when its accesses are complete. Each backend implements the acquisition of locks,
the transport of tokens, and the completion of accesses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from spawnsim.comm.constants import LOCK_EXCLUSIVE, LOCK_SHARED, MODE_NOSUCCEED
from spawnsim.comm.failures import ERR_GROUP, ERR_RMA_RANGE, ERR_RMA_SYNC, CallError
from spawnsim.comm.group import Group
from spawnsim.comm.handles import integer
from spawnsim.errors import ParameterError, Timeout, UsageError
from spawnsim.real.runtime.rank import RankComm

POST, COMPLETE = 1, 2
DUE = {POST: "Post", COMPLETE: "Complete"}


def window_comm(own: Any, given: Any) -> Any:
    """Return the communicator of a new window: the given one, otherwise the one that owns the `Win`."""
    if given is not None and not isinstance(given, RankComm):
        raise ParameterError(f"comm={given!r}: give a communicator of this job, such as {own!r}")
    return own if given is None else given


class WindowSync:
    """The locks that one rank holds on one window, and its active-target epochs there.

    Attributes:
        label: the name of the window in errors.
    """

    label: str

    _comm: Any
    _runtime: Any

    def _begin_sync(self) -> None:
        self._held: dict[int, int] = {}  # target → kind of lock
        self._tokens_of: Counter[tuple[int, int]] = (
            Counter()
        )  # (rank, POST or COMPLETE): tokens that have arrived
        self._started: tuple[int, ...] = ()
        self._exposed: tuple[int, ...] = ()
        self._fenced = False

    def Get_group(self) -> Group:
        group: Group = self._comm.Get_group()
        return group

    group = property(Get_group)

    # ------------------------------------------------------------------------------------------ of each backend
    Flush: Callable[[int], None]
    Sync: Callable[[], None]
    _acquire: Callable[
        [int, int, float, tuple[str, int, Any]], bool
    ]  # locks a rank's part, within a time limit
    _release: Callable[[int, int], None]
    _send_token: Callable[[int, int], None]  # to a rank of the window, without waiting

    def _count_tokens(self) -> None:
        """Count the tokens that have arrived."""

    # ------------------------------------------------------------------------------------------------- accesses
    # Libraries accept an access outside of any epoch, and MPICH accepts one beyond a part, into memory outside of the
    # window. Both are refused here before anything is sent, with the same errors as on virtual ranks.
    def _require_epoch(self, rank: int) -> None:
        if not (rank in self._held or self._fenced or rank in self._started):
            raise CallError(
                ERR_RMA_SYNC,
                f"rank {self._comm.rank}: access to rank {rank} of {self.label} outside an epoch: Lock, Fence or Start "
                "first",
            )

    def _require_inside(self, rank: int, start: int, nbytes: int, size: int) -> None:
        if start < 0 or start + nbytes > size:
            raise CallError(
                ERR_RMA_RANGE,
                f"rank {self._comm.rank}: access to bytes {start} to {start + nbytes} of {self.label}, of which rank "
                f"{rank} has {size}: pass a longer window or a smaller count",
            )

    def _fence(self, assertion: int) -> None:
        """Open the epoch of a Fence: accesses to all ranks, unless the program has asserted that none follow."""
        self._fenced = not assertion & MODE_NOSUCCEED

    # ------------------------------------------------------------------------------------------- passive target
    def Lock(self, rank: int, lock_type: int = LOCK_EXCLUSIVE, assertion: int = 0) -> None:
        rank = integer(rank)
        if lock_type not in (LOCK_EXCLUSIVE, LOCK_SHARED):
            raise ParameterError(
                f"lock_type={lock_type}: give LOCK_SHARED or LOCK_EXCLUSIVE of spawnsim.comm"
            )
        if rank in self._held:
            raise UsageError(
                f"rank {self._comm.rank}: Lock of rank {rank}, which it already holds; Unlock it first"
            )
        limit_s = self._runtime.clock.limit_s()
        if not self._acquire(rank, lock_type, limit_s, (f"Win.Lock of rank {rank}", -1, self._comm)):
            text = f"rank {self._comm.rank}: the lock of rank {rank}'s window part was not free for {limit_s:g} s"
            raise Timeout([rank], "Win.Lock", -1, f"{text}: its holder may be dead, or did not call Unlock")
        self._held[rank] = lock_type

    def Unlock(self, rank: int) -> None:
        rank = integer(rank)
        if rank not in self._held:
            raise UsageError(
                f"rank {self._comm.rank}: Unlock of rank {rank}, which it did not lock; call Lock first"
            )
        self.Flush(rank)
        self._release(rank, self._held.pop(rank))

    def Lock_all(self, assertion: int = 0) -> None:
        for rank in range(self._comm.size):
            self.Lock(rank, LOCK_SHARED)

    def Unlock_all(self) -> None:
        for rank in list(self._held):
            self.Unlock(rank)

    # -------------------------------------------------------------------------------------------- active target
    def Post(self, group: Group, assertion: int = 0) -> None:
        """Allow the ranks of a group to access this rank's part; does not wait."""
        self._exposed = self._places(group)
        self.Sync()
        for rank in self._exposed:
            self._send_token(rank, POST)

    def Start(self, group: Group, assertion: int = 0) -> None:
        """Begin to access the parts of a group's ranks; wait until they have posted."""
        places = self._places(group)
        self._expect(places, POST, "Start")
        self._started = places

    def Complete(self) -> None:
        """End the access epoch that Start began: all its calls are then complete at their targets."""
        for rank in self._started:
            self.Flush(rank)
            self._send_token(rank, COMPLETE)
        self._started = ()

    def Wait(self) -> bool:
        self._expect(self._exposed, COMPLETE, "Wait")
        return self._end_exposure()

    def Test(self) -> bool:
        if self._silent(self._exposed, COMPLETE):
            self._runtime.poll()
            return False
        self._tokens_of.subtract((rank, COMPLETE) for rank in self._exposed)
        return self._end_exposure()

    def _end_exposure(self) -> bool:
        self._exposed = ()
        self.Sync()
        return True

    def _silent(self, ranks: tuple[int, ...], token: int) -> list[int]:
        self._count_tokens()
        return [rank for rank in ranks if self._tokens_of[rank, token] < 1]

    def _expect(self, ranks: tuple[int, ...], token: int, operation: str) -> None:
        """Wait for a token of each rank and consume these tokens; past the deadline consume none."""
        runtime, comm, silent = self._runtime, self._comm, partial(self._silent, ranks, token)
        limit_s = runtime.clock.limit_s()
        if not runtime.wait(lambda: not silent(), limit_s, (f"Win.{operation}", -1, comm)) and (
            missing := silent()
        ):
            who = ", ".join(map(str, missing))
            text = f"rank {comm.rank} of {comm.label}: Win.{operation} {runtime.clock.met(limit_s)}"
            text += f"; missing: {DUE[token]} of rank {who}, with this rank in its group"
            raise Timeout(missing, f"Win.{operation}", -1, text)
        self._tokens_of.subtract((rank, token) for rank in ranks)

    def _places(self, group: Group) -> tuple[int, ...]:
        members = self._comm.members
        outside = [member for member in group.live() if member not in members]
        if outside:
            raise CallError(
                ERR_GROUP, f"rank {outside[0]} of the world is not in the window of {self._comm.label}"
            )
        return tuple(members.index(member) for member in group.live())
