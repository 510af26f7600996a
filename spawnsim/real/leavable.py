"""Collectives that a rank can leave when others are missing: non-blocking ones of the library, with a deadline.

Used with `Options(survive=True)`: their `Timeout` names who is missing and can be caught, to `recover()`. Objects
travel as bytes by the same calls and are combined in rank order. Knows the raw calls and the rank's home.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce as fold
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from spawnsim.comm.ops import SUM
from spawnsim.errors import Revoked, Timeout
from spawnsim.real.watchdog import verdict
from spawnsim.real.words import failure

if TYPE_CHECKING:
    from spawnsim.real.mpi import MPIComm


def leavable(comm: MPIComm, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one collective of `comm`; its number has been counted already."""
    home, number = comm._home, comm._sequence
    if home.revoked:
        raise Revoked(
            f"rank {comm.rank} of {comm.label}: {operation}: another rank recovers; call recover() too"
        )
    if operation[0].islower():
        return Objects(comm).call(operation, args, kwargs)
    try:
        request = getattr(comm._raw, "I" + operation.lower())(*args, **kwargs)
        limit_s, began = home.clock.limit_s(), perf_counter()
        if home.wait(request.Test, limit_s, (operation, number, comm)):
            return None
    except MPI.Exception as error:
        what = f"rank {comm.rank} of {comm.label}: {operation} number {number}"
        raise failure(error, comm._raw, what) from None
    home.abandoned.append((request, args, kwargs))  # it may still write to its buffers
    home.watchdog.active[-number] = call = (operation, number, comm, began, limit_s)
    everyone = home.watchdog.ask_all()
    home.watchdog.active.pop(-number, None)
    missing, text = verdict(call, [everyone[member] for member in comm.members])
    raise Timeout(missing, operation, number, text)


class Objects:
    """Object collectives by two collectives of bytes."""

    def __init__(self, comm: MPIComm) -> None:
        self._comm = comm

    def call(self, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call of this name."""
        method: Callable[..., Any] = getattr(self, operation)
        return method(*args, **kwargs)

    def barrier(self) -> None:
        """Wait for all."""
        self._comm.Barrier()

    def allgather(self, sendobj: Any) -> list[Any]:
        """Collect all objects at all ranks."""
        comm, own = self._comm, np.frombuffer(MPI.pickle.dumps(sendobj), np.uint8)
        sizes = np.empty(comm.size, np.int64)
        comm.Allgather(np.array([own.size], np.int64), sizes)
        whole = np.empty(int(sizes.sum()), np.uint8)
        ends = np.cumsum(sizes)
        comm.Allgatherv(own, [whole, sizes.tolist(), (ends - sizes).tolist(), MPI.BYTE])
        return [
            MPI.pickle.loads(whole[end - size : end].tobytes()) for size, end in zip(sizes, ends, strict=True)
        ]

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Give the root's object to all."""
        return self.allgather(obj if self._comm.rank == root else None)[root]

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Collect all objects at the root."""
        found = self.allgather(sendobj)
        return found if self._comm.rank == root else None

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        """Give each rank its object of the root's list."""
        return self.bcast(sendobj, root)[self._comm.rank]

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Give every rank its object of every list."""
        return [row[self._comm.rank] for row in self.allgather(list(sendobj))]

    def allreduce(self, sendobj: Any, op: Callable[[Any, Any], Any] = SUM) -> Any:
        """Combine all objects at all ranks."""
        return fold(op, self.allgather(sendobj))

    def reduce(self, sendobj: Any, op: Callable[[Any, Any], Any] = SUM, root: int = 0) -> Any:
        """Combine all objects at the root."""
        total = self.allreduce(sendobj, op)
        return total if self._comm.rank == root else None
