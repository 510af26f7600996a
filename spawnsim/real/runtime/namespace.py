"""`MPI` as programs on wrapped ranks must see it: mpi4py's namespace, with spawnsim's numbers and classes.

Numbers, ops, types and statuses are spawnsim's (each MPI numbers them its own way); requests, windows and messages
are those that meet deadlines; all else is mpi4py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from spawnsim import comm as ours
from spawnsim.comm import constants
from spawnsim.comm.failures import ERR_COMM, CallError
from spawnsim.real.runtime.requests import RealRequest


class Win:
    """`MPI.Win.Allocate(…, comm=comm)` and the other makers: windows of the communicator that is given."""

    @staticmethod
    def Allocate(size: int, disp_unit: int = 1, info: Any = None, comm: Any = None) -> Any:
        """Return a window over new memory; collective over `comm`."""
        return comm.Win.Allocate(size, disp_unit, info)

    @staticmethod
    def Allocate_shared(size: int, disp_unit: int = 1, info: Any = None, comm: Any = None) -> Any:
        """Return a window over new memory that the ranks of one node share; collective over `comm`."""
        return comm.Win.Allocate_shared(size, disp_unit, info)

    @staticmethod
    def Create_dynamic(info: Any = None, comm: Any = None) -> Any:
        """Return a window without memory; collective over `comm`."""
        return comm.Win.Create_dynamic(info)

    @staticmethod
    def Create(memory: Any, disp_unit: int = 1, info: Any = None, comm: Any = None) -> Any:
        """Return a window over memory that exists; collective over `comm`."""
        return comm.Win.Create(memory, disp_unit, info)


class NullComm:
    """`MPI.COMM_NULL`: equal to None, which spawnsim's communicators return where a rank is in none."""

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return not other

    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        raise CallError(ERR_COMM, f"{name} of COMM_NULL: this rank is in no such communicator")


class CommKind(type):
    """A class of mpi4py's communicators by what they are: wrapped ones are all of one class."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return hasattr(instance, "Get_topology") and bool(vars(cls)["holds"](instance))


class CommHandles(type):
    """mpi4py's class of communicators: called without one it returns a null one, called with one it returns that."""

    kind: type

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.kind)

    def __call__(cls, comm: Any = None) -> Any:
        """Return the communicator, or a null one."""
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
        """Wait for a message and match it."""
        return comm.Mprobe(*args, **kwargs)

    @staticmethod
    def probe(comm: Any, *args: Any, **kwargs: Any) -> Any:
        """Wait for an object's message and match it."""
        return comm.mprobe(*args, **kwargs)

    @staticmethod
    def Iprobe(comm: Any, *args: Any, **kwargs: Any) -> Any:
        """Match a message if one is there."""
        return comm.Improbe(*args, **kwargs)

    @staticmethod
    def iprobe(comm: Any, *args: Any, **kwargs: Any) -> Any:
        """Match an object's message if one is there."""
        return comm.improbe(*args, **kwargs)


def namespace(world: Any, theirs: Mapping[str, Any] | None = None) -> SimpleNamespace:
    """Return `MPI` for programs on `world`: for code that expects `mpi4py.MPI` beside a spawnsim communicator.

    `theirs`: what the library beneath has beyond that (`vars(mpi4py.MPI)`).
    """
    kind = {"kind": type(world)}
    wrapped: dict[str, Any] = {
        "COMM_WORLD": world, "COMM_NULL": NullComm(), "WIN_NULL": None,
        "Comm": CommHandles("Comm", (), kind), "Intracomm": CommHandles("Intracomm", (), kind),
        "Request": RealRequest, "REQUEST_NULL": RealRequest(), "Win": Win, "Message": Message,
    }  # fmt: skip
    beneath = {name: value for name, value in (theirs or {}).items() if not name.startswith("__")}
    return SimpleNamespace(**beneath | ours.namespace() | wrapped)
