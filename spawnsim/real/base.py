"""A backend built on a wire: the parts that a new backend provides, and the parts that are derived from them.

A backend provides

* a `Wire` (`runtime.wire`), which sends parcels and delivers arriving ones,
* a clock: `RankServices` has one, which starts when all ranks have met,
* `world()`, `wrap(group)`, `guarded(comm)`, `namespace(comm)`, as described in `spawnsim.backends`.

From these are derived probes and MPI's matching (`runtime.wire.Mailbox`), point-to-point calls and requests
(`runtime.messages`), collectives of buffers and objects (`runtime.collectives`), windows (`runtime.windows`), and in
this module the run of a rank (`WireRuntime`) and the communicator (`WireComm`). A backend overrides the parts that its
library implements better. For torch.distributed these are most collectives. mpi4py's communicators offer nearly
everything, so `real.mpi` uses `runtime` only for features that MPI lacks. `tests/real/test_smallest_backend.py` is a
backend of threads and queues.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import get_ident
from types import SimpleNamespace
from typing import Any, ClassVar, Self

from spawnsim import comm as ours
from spawnsim.comm import constants
from spawnsim.comm.constants import COMM_TYPE_SHARED, CONGRUENT, IDENT, SIMILAR, UNDEFINED, UNEQUAL
from spawnsim.comm.failures import ERR_COMM, CallError
from spawnsim.comm.group import Group
from spawnsim.comm.packing import Pickle
from spawnsim.errors import RankFailed, UnsupportedError
from spawnsim.real.runtime.collectives import DerivedCollectives
from spawnsim.real.runtime.messages import PointToPoint, missing_call
from spawnsim.real.runtime.rank import RankRuntime
from spawnsim.real.runtime.requests import RealRequest
from spawnsim.real.runtime.services import Options, RankServices
from spawnsim.real.runtime.windows import Windows, WindowServer
from spawnsim.real.runtime.wire import Bytes, Mailbox, Parcel, Receiver, Wire, as_payload

CONTROL, EXIT, MET = 3, 4, 7
POLL_S = 2e-3  # a wait on the condition also polls this often, for events that do not notify it


class ControlChannel(Receiver):
    """Small messages between watchdogs over the wire."""

    def __init__(self, wire: Wire) -> None:
        self.rank, self.size = wire.rank, wire.size
        self._wire = wire
        self._pickle = Pickle()
        self._inbox: deque[tuple[int, dict[str, Any]]] = deque()
        wire.receivers[CONTROL] = self

    def send(self, to: int, message: dict[str, Any]) -> None:
        """Send without waiting. A rank that has gone gets no message, since it will not answer."""
        with suppress(RankFailed):
            self._wire.send(to, Parcel(CONTROL), as_payload(self._pickle.dumps(message)))

    def receive(self) -> tuple[int, dict[str, Any]] | None:
        return self._inbox.popleft() if self._inbox else None

    def done(self, parcel: Parcel, payload: Bytes) -> None:
        self._inbox.append((parcel.source, self._pickle.loads(payload.tobytes())))


class AbortReceiver(Receiver):
    """Receives the order to exit: another rank has ended the job."""

    def done(self, parcel: Parcel, payload: Bytes) -> None:
        sys.stderr.flush()
        os._exit(parcel.tag)


class BarrierReceiver(Receiver):
    """Counts the ranks that have reached each derived barrier at the end of a run."""

    def __init__(self) -> None:
        self.came: Counter[int] = Counter()

    def done(self, parcel: Parcel, payload: Bytes) -> None:
        self.came[parcel.tag] += 1


class WireRuntime(RankRuntime):
    """One per rank and run, over a wire. All waits of this rank use `condition`.

    `over`: the name of the library in errors.
    """

    over = "a wire"

    def __init__(self, wire: Wire, services: RankServices, options: Options, condition: Any = None) -> None:
        self.wire, self.condition = wire, condition or threading.Condition()
        self.pickle, self._barriers, self._met = Pickle(), 0, BarrierReceiver()
        super().__init__(services, options, ControlChannel(wire), self.end_job)
        self.mailbox = Mailbox(self.condition, wire, self.counters)
        # Before the first window: an access may arrive as soon as the ranks have met to create the window.
        self.window_server = WindowServer(wire, self.condition)
        wire.receivers |= {EXIT: AbortReceiver(), MET: self._met}

    def begin(self) -> None:
        self.wire.start()
        self.watchdog.start()

    # --------------------------------------------------------------------------------------------- while running
    def poll(self) -> None:
        """Drop complete requests, and yield the interpreter to the wire's thread if it waits for it."""
        time.sleep(0)
        if self.registry:
            self.registry.sweep()

    def notify(self) -> None:
        with self.condition:
            self.condition.notify_all()

    def wait(
        self, done: Callable[[], bool], limit_s: float, call: tuple[str, int, Any], peer: int | None = None
    ) -> bool:
        """Wait as in every runtime; `peer` has no effect, since a dead rank ends all waits here."""
        # Waits use a condition, whereas MPI's ranks spin: the wire's thread does the awaited work, and a spinning
        # thread would hold the interpreter that it needs. A wait also polls periodically, since torch's own works
        # notify no condition when they are complete.
        if done():
            return True
        active, thread, began = self.watchdog.active, get_ident(), time.perf_counter()
        active[thread] = entry = (*call, began, float("inf"))
        try:
            with self.condition:
                while not done():
                    left = limit_s - (time.perf_counter() - began)
                    if self.wire.fault:
                        raise RankFailed((), f"{call[0]}: a rank has gone: {self.wire.fault}")
                    if left <= 0:
                        return False
                    if not self.condition.wait(min(left, POLL_S)):
                        self.poll()
            self.registry.sweep()
            return True
        finally:
            self.watchdog.last = entry
            active.pop(thread, None)

    # ------------------------------------------------------------------------------------------------ at the end
    def begin_barrier(self) -> Callable[[], bool]:
        self._barriers += 1
        number = self._barriers
        for rank in range(self.wire.size):
            self.wire.send(rank, Parcel(MET, tag=number))
        return lambda: self._met.came[number] == self.wire.size

    def take_leftovers(self) -> int:
        return self.mailbox.clear()

    def release(self) -> None:
        self.barrier()  # after `settle`, ranks merge their records and may still wait for each other
        self.watchdog.stop()
        self.wire.stop()

    def end_job(self, status: int) -> None:
        """End all ranks: send the exit status to reachable ranks and exit, upon which launchers end the other ranks."""
        for rank in range(self.wire.size):
            if rank != self.wire.rank:
                with suppress(RankFailed):
                    self.wire.send(rank, Parcel(EXIT, tag=status))
        time.sleep(0.05)
        sys.stderr.flush()
        os._exit(status)


class WireComm(DerivedCollectives):
    """A communicator over a wire. `INSTEAD`: alternatives to mpi4py calls that are not available."""

    INSTEAD: ClassVar[dict[str, str]] = {
        "Send_init": "Isend", "Recv_init": "Irecv", "Ssend_init": "Issend", "Bcast_init": "Ibcast",
        "Psend_init": "Isend", "Precv_init": "Irecv", "Attach_buffer": "bsend, which has its own", "Spawn": "torchrun",
        "Create_cart": "Split and rank arithmetic", "Create_graph": "Split", "Create_dist_graph": "Split",
        "Create_intercomm": "Split of one communicator",
    }  # fmt: skip

    def __init__(self, runtime: Any, members: tuple[int, ...], label: str) -> None:
        # The label is the same on all ranks, so they agree on the context without a message. Even numbers are for the
        # program's messages, the adjacent odd numbers for the communicator's internal exchanges.
        number = int.from_bytes(hashlib.blake2b(label.encode(), digest_size=7).digest(), "little") & ~1
        super().__init__(runtime, members, label, number)
        self._inner = PointToPoint(runtime, members, label, number ^ 1)
        self._made = Counter[str]()
        self.name = "MPI_COMM_WORLD" if label == "world" else label
        self.Win = Windows(self)

    # -------------------------------------------------------------------------------------- about the communicator
    def Get_rank(self) -> int:
        self._live()
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def Get_group(self) -> Group:
        return Group.of(self.members, self.runtime.wire.rank)

    group = property(Get_group)

    def Get_name(self) -> str:
        return self.name

    def Set_name(self, name: str) -> None:
        self.name = name

    def Is_inter(self) -> bool:
        return False

    def Compare(self, other: WireComm) -> int:
        if self is other:
            return IDENT
        if self.members == other.members:
            return CONGRUENT
        return SIMILAR if set(self.members) == set(other.members) else UNEQUAL

    # ------------------------------------------------------------------------------------------- making others
    def _another(self, kind: str, members: tuple[int, ...], more: str = "") -> Self:
        return type(self)(self.runtime, members, f"{self.label}/{kind}{self._made[kind]}{more}")

    def Split(self, color: int = 0, key: int = 0) -> Self | None:
        everyone = self.allgather((color, key, self.rank))
        self._made["Split"] += 1
        if color == UNDEFINED:
            return None
        chosen = sorted((key, rank) for other, key, rank in everyone if other == color)
        return self._another("Split", tuple(self.members[rank] for _, rank in chosen), f"({color})")

    def Split_type(self, split_type: int = COMM_TYPE_SHARED, key: int = 0, info: Any = None) -> Self | None:
        hosts = self.allgather(socket.gethostname())
        color = UNDEFINED if split_type == UNDEFINED else hosts.index(socket.gethostname())
        return self.Split(color, key)

    def Dup(self, info: Any = None) -> Self:
        self._made["Dup"] += 1
        return self._another("Dup", self.members)

    def Clone(self) -> Self:
        return self.Dup()

    def Create(self, group: Group) -> Self | None:
        self.Barrier()
        return self.Create_group(group)

    def Create_group(self, group: Group, tag: int = 0) -> Self | None:
        members = group.live()
        kind = f"Group{members}:{tag}"
        self._made[kind] += 1
        return self._another(kind, members) if self.runtime.wire.rank in members else None

    @staticmethod
    def Create_keyval(*_args: Any, **_kwargs: Any) -> int:
        raise UnsupportedError("Create_keyval: not on this backend; keep a dict by communicator")

    def Free(self) -> None:
        self._live()
        if self.label == "world":
            raise CallError(ERR_COMM, "the world cannot be freed: close() ends it")
        self._freed = True

    def Abort(self, errorcode: int = 0) -> None:
        self.runtime.end_job(errorcode)

    def __getattr__(self, name: str) -> Any:
        if not name[:1].isupper():
            raise AttributeError(name)
        raise missing_call(self, name, self.INSTEAD.get(name, ""))

    def __eq__(self, other: object) -> bool:
        return self is other or (self._freed and not other)

    def __hash__(self) -> int:
        return id(self)

    def __bool__(self) -> bool:
        return not self._freed

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.label}: rank {self.rank} of {self.size}>"


# ----------------------------------------------------------------------------------------- `MPI`, for programs
class Win:
    """`MPI.Win.Allocate(…, comm=comm)` and the other constructors: windows of the given communicator."""

    @staticmethod
    def Allocate(size: int, disp_unit: int = 1, info: Any = None, comm: Any = None) -> Any:
        return comm.Win.Allocate(size, disp_unit, info)

    @staticmethod
    def Allocate_shared(size: int, disp_unit: int = 1, info: Any = None, comm: Any = None) -> Any:
        """Return a window over new memory that the ranks of one node share; collective over `comm`."""
        return comm.Win.Allocate_shared(size, disp_unit, info)

    @staticmethod
    def Create_dynamic(info: Any = None, comm: Any = None) -> Any:
        return comm.Win.Create_dynamic(info)

    @staticmethod
    def Create(memory: Any, disp_unit: int = 1, info: Any = None, comm: Any = None) -> Any:
        """Return a window over existing memory; collective over `comm`."""
        return comm.Win.Create(memory, disp_unit, info)


class NullComm:
    """`MPI.COMM_NULL`: equal to None, which spawnsim's communicators return on ranks that are not members."""

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return not other

    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        raise CallError(ERR_COMM, f"{name} of COMM_NULL: this rank is not in the communicator")


class CommKind(type):
    """A class of mpi4py's communicators, tested by property: wrapped communicators all have one class."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return hasattr(instance, "Get_topology") and bool(vars(cls)["holds"](instance))


class CommHandles(type):
    """mpi4py's class of communicators: a call returns its argument, or a null communicator without an argument."""

    kind: type

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.kind)

    def __call__(cls, comm: Any = None) -> Any:
        return NullComm() if comm is None else comm

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.kind, name)


KINDS = {
    "Intercomm": CommKind("Intercomm", (), {"holds": lambda comm: comm.Is_inter()}),
    "Cartcomm": CommKind("Cartcomm", (), {"holds": lambda comm: comm.Get_topology() == constants.CART}),
    "Graphcomm": CommKind("Graphcomm", (), {"holds": lambda comm: comm.Get_topology() == constants.GRAPH}),
    "Distgraphcomm": CommKind(
        "Distgraphcomm", (), {"holds": lambda comm: comm.Get_topology() == constants.DIST_GRAPH}
    ),
}


class Message:
    """`MPI.Message`, whose class methods take wrapped communicators."""

    @staticmethod
    def Probe(comm: Any, *args: Any, **kwargs: Any) -> Any:
        return comm.Mprobe(*args, **kwargs)

    @staticmethod
    def probe(comm: Any, *args: Any, **kwargs: Any) -> Any:
        return comm.mprobe(*args, **kwargs)

    @staticmethod
    def Iprobe(comm: Any, *args: Any, **kwargs: Any) -> Any:
        return comm.Improbe(*args, **kwargs)

    @staticmethod
    def iprobe(comm: Any, *args: Any, **kwargs: Any) -> Any:
        return comm.improbe(*args, **kwargs)


def names_for(world: Any, theirs: Mapping[str, Any] | None = None) -> SimpleNamespace:
    """Return `MPI` for programs on `world`: for code that expects `mpi4py.MPI` together with a spawnsim communicator.

    `theirs`: further names of the underlying library (`vars(mpi4py.MPI)`).
    """
    kind = {"kind": type(world)}
    wrapped: dict[str, Any] = {
        "COMM_WORLD": world, "COMM_NULL": NullComm(), "WIN_NULL": None,
        "Comm": CommHandles("Comm", (), kind), "Intracomm": CommHandles("Intracomm", (), kind),
        "Request": RealRequest, "REQUEST_NULL": RealRequest(), "Win": Win, "Message": Message,
    }  # fmt: skip
    beneath = {name: value for name, value in (theirs or {}).items() if not name.startswith("__")}
    return SimpleNamespace(**beneath | ours.namespace() | wrapped)


class WireNamespace(SimpleNamespace):
    """A namespace in which a missing name raises an error that names the alternative."""

    def __getattr__(self, name: str) -> Any:
        raise missing_call(self.COMM_WORLD, f"MPI.{name}")


def namespace(comm: WireComm) -> SimpleNamespace:
    """Return `MPI` for programs on `comm`: mpi4py's names for spawnsim's numbers and classes.

    Args:
        comm: the program's `MPI.COMM_WORLD`.
    """
    return WireNamespace(**vars(names_for(comm)))
