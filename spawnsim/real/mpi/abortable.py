"""Collectives that a rank can leave when ranks are missing: the library's non-blocking collectives, with a deadline.

They are used with `Options(survive=True)`: their `Timeout` names the missing ranks, and a program can catch it to call
`recover()`. Calls that the library offers only in a blocking form run in a thread that can be abandoned
(`run_detached`). Objects travel as bytes in the same calls and are combined in rank order.
"""

# Why calls are abandoned, not ended: MPI cannot end a collective in which a rank is missing. A non-blocking collective
# cannot be cancelled or freed (MPI 4.1, 6.12), and a blocking one does not return. So a call that exceeds its deadline
# stays inside the library, either forever or until a rank that was only stopped takes part and the call writes its
# result. This has two consequences. Results are received in separate memory (`BounceBuffers`) and copied to the
# program's buffer only when the call is complete; otherwise a late result would overwrite newer data of the program.
# And all memory that the library may still access is kept for the rest of the run (`survival.kept`): if it were freed
# and reused, the late write would corrupt an unrelated object.

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from time import perf_counter
from typing import Any, Generic, TypeVar

import numpy as np
from mpi4py import MPI

from spawnsim.errors import RankFailed, Revoked, SpawnsimError, Timeout, UnsupportedError, WorldError
from spawnsim.real.mpi.runtime import CommCore
from spawnsim.real.mpi.translation import DETECTED_S, ulfm
from spawnsim.real.runtime.collectives import ObjectCollectives
from spawnsim.real.runtime.requests import wait_until
from spawnsim.real.runtime.watchdog import verdict

T = TypeVar("T")


def abortable(comm: CommCore, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one collective of `comm`; the caller has already incremented the collective's number."""
    if operation[0].islower():
        return AbortableObjects(comm).call(operation, args, kwargs)
    buffers = BounceBuffers(operation, args, kwargs, comm.rank)
    runtime, number, began_s = comm.runtime, comm._sequence, perf_counter()
    limit_s, request = runtime.clock.limit_s(), None
    try:
        request = getattr(comm._raw, "I" + operation.lower())(*buffers.args, **buffers.kwargs)
        if runtime.wait(request.Test, limit_s, (operation, number, comm)):
            buffers.end()
            return None
    except MPI.Exception as error:
        runtime.survival.kept += [request, buffers]  # parts may still be in progress after an error
        raise _failure(error, comm, f"{operation} number {number}") from None
    except (Revoked, RankFailed):
        runtime.survival.kept += [request, buffers]
        raise
    late = _late(comm, (operation, number, comm, began_s, limit_s))
    if request.Test():  # the last rank arrived during the query
        buffers.end()
        return None
    runtime.survival.kept += [request, buffers]
    raise late


def _late(comm: CommCore, call: tuple[str, int, CommCore, float, float]) -> Exception:
    """Return the error of a call past its deadline; the watchdogs of all ranks report the missing ranks."""
    runtime, key = comm.runtime, -abs(id(call))
    # During the query, other ranks must see that this rank is in the call, but its own watchdog must not treat the call
    # as hanging and end the job. So the entry has a limit that never expires.
    runtime.watchdog.active[key] = (*call[:4], inf)
    everyone = runtime.watchdog.ask_all()
    runtime.watchdog.active.pop(key, None)
    if comm.revoked:  # meanwhile the other ranks have begun to recover, or have given this rank up
        return Revoked(f"{call[0]} {comm.revoked}")
    runtime.survival.agreement.suspects.update(where.rank for where in everyone if not where.answered)
    missing, text = verdict(call, [everyone[member] for member in comm.members])
    return Timeout(missing, call[0], call[1], text)


def run_detached(
    comm: CommCore, operation: str, function: Callable[[], T], awaited: Sequence[int] | None = None
) -> T:
    """Run a blocking call of the library in a thread, and abandon it there when it exceeds the deadline.

    The call waits for the ranks `awaited`; None: for all ranks, as a collective.
    """
    runtime, began_s, limit_s = comm.runtime, perf_counter(), comm.runtime.clock.limit_s()
    number = comm._sequence if awaited is None else -1
    detached = DetachedCall(function)
    if not runtime.wait(detached.over, limit_s, (operation, number, comm), awaited[0] if awaited else None):
        text = f"rank {comm.rank} of {comm.label}: {operation} missed its deadline of {limit_s:g} s"
        late: Exception = Timeout(awaited or (), operation, -1, text)
        if awaited is None:
            late = _late(comm, (operation, number, comm, began_s, limit_s))
        if not detached.over():
            raise late
    try:
        return detached.result()
    except MPI.Exception as error:
        raise _failure(error, comm, operation) from None


def _failure(error: MPI.Exception, comm: CommCore, what: str) -> SpawnsimError:
    """Return the error of a call; a death detected within `DETECTED_S` is its cause, whatever the library reports.

    For example, when a member dies, Open MPI reports an invalid window.
    """
    found = comm._error(error, what)
    survival = comm.runtime.survival
    if isinstance(found, WorldError) or not wait_until(lambda: survival.failed(comm), DETECTED_S):
        return found
    dead = survival.failed(comm)
    return RankFailed(dead, f"{found}; missing: rank {', '.join(map(str, dead))}")


def make_collectively(comm: CommCore, make: Callable[..., T], *args: Any) -> T:
    """Create a window by the collective `make(*args, communicator)`; it can be abandoned in a job that survives."""
    if comm.revoked:
        raise Revoked(f"a window {comm.revoked}")
    call: Callable[[], T] = partial(make, *args, comm._raw)
    return make_detached(comm, "making a window", call) if comm.runtime.abortable else call()


def make_detached(comm: CommCore, operation: str, call: Callable[[], T], *, meeting: bool = True) -> T:
    """Run a call that creates a communicator or window from `comm`, and abandon it when it exceeds the deadline.

    All ranks meet in a barrier first (unless not all take part: `meeting=False`). This makes a death inside the
    library's call, which the library tolerates least, unlikely.
    """
    if meeting:
        comm.Barrier()
    if ulfm():
        # Open MPI (`ompi_comm_nextcid`) creates one communicator at a time, the one of the lowest-numbered parent
        # first. A call that a death has ended, or that was abandoned, keeps its turn forever: every window of the
        # survivors exceeded its deadline. COMM_SELF has the lowest number, so a duplicate of it takes over the turn and
        # releases it. Revoking the old communicator did not help.
        comm.runtime.survival.settle()
        MPI.COMM_SELF.Dup().Free()
    return run_detached(comm, operation, call)


class DetachedCall(Generic[T]):
    """A call in a separate daemon thread. After a death it may never return; the process can still exit."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._found: list[T] = []
        self._error: BaseException | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, name="spawnsim-detached", daemon=True).start()

    def _run(self) -> None:
        try:
            self._found.append(self._function())
        except BaseException as error:  # noqa: BLE001  the waiting thread raises it
            self._error = error
        self._done.set()

    def over(self) -> bool:
        return self._done.is_set()

    def well(self) -> bool:
        return self.over() and self._error is None

    def result(self) -> T:
        """Return the call's result, or raise its exception."""
        if self._error is not None:
            raise self._error
        return self._found[0]


class BounceBuffers:
    """The arguments of a collective, with separate memory in place of the program's receive buffer."""

    def __init__(self, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any], rank: int) -> None:
        self.args, self.kwargs = args, kwargs
        self._theirs: Any
        self._own: Any
        self._theirs = self._own = None
        name, place = ("buf", 0) if operation == "Bcast" else ("recvbuf", 1)
        if operation == "Barrier" or (operation == "Bcast" and _root(args, kwargs) == rank):
            return
        given = kwargs.get(name) if name in kwargs else args[place] if len(args) > place else None
        instead = self._instead(given)
        if name in kwargs:
            self.kwargs = kwargs | {name: instead}
        elif len(args) > place:
            self.args = (*args[:place], instead, *args[place + 1 :])

    def _instead(self, given: Any) -> Any:
        """Return a buffer specification with other memory of the same type, shape and content."""
        many = isinstance(given, (list, tuple))
        memory = given[0] if many and given else given
        if memory is None or isinstance(memory, int):  # IN_PLACE and BOTTOM are integers
            return given
        self._theirs = memory
        own = self._own = memory.clone() if hasattr(memory, "clone") else np.array(memory, order="K")
        return [own, *given[1:]] if many else own

    def end(self) -> None:
        if self._own is not None:
            MPI.buffer.frombuffer(self._theirs)[:] = MPI.buffer.frombuffer(self._own)


def _root(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    root: int = kwargs.get("root", args[1] if len(args) > 1 else 0)
    return root


class AbortableObjects(ObjectCollectives):
    """Object collectives, each implemented by two collectives of bytes."""

    def __init__(self, comm: CommCore) -> None:
        self._comm, self.rank, self.size = comm, comm.rank, comm.size

    def call(self, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._comm._inter or not hasattr(self, operation):
            raise UnsupportedError(
                f"rank {self.rank} of {self._comm.label}: {operation} of Python objects is not available with "
                "Options(survive=True) between groups and on topologies: send the objects, or use the upper-case call"
            )
        method: Callable[..., Any] = getattr(self, operation)
        return method(*args, **kwargs)

    def barrier(self) -> None:
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
