"""`MPI`: what a program gets that imports `mpi4py.MPI` on virtual ranks.

A module with every name of mpi4py's, put together from the vocabulary (`spawnsim.comm`), the virtual communicators and
windows, and `functions`. It holds no state: each use means the calling rank. What is outside the simulation (files,
sessions, ports) is there, too, and refuses by name (`comm.calls`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn, Self

from spawnsim import comm as words
from spawnsim.comm.calls import refused
from spawnsim.comm.failures import ERR_FILE, CallError
from spawnsim.comm.handles import Attributed, Handle, same_kind
from spawnsim.comm.status import Status
from spawnsim.virtual.engine.completion import Completion
from spawnsim.virtual.engine.kernel import current_world
from spawnsim.virtual.engine.waiting import WaitingForAny
from spawnsim.virtual.mpi import functions
from spawnsim.virtual.mpi.comm import COMM_NULL, Comm
from spawnsim.virtual.mpi.communicators import COMM_SELF, COMM_WORLD, Intercomm, Intracomm
from spawnsim.virtual.mpi.payload import pickler
from spawnsim.virtual.mpi.point_to_point import MESSAGE_NO_PROC, MESSAGE_NULL, Message
from spawnsim.virtual.mpi.requests import Prequest, Request, request_for
from spawnsim.virtual.mpi.topology import Cartcomm, Distgraphcomm, Graphcomm, Topocomm
from spawnsim.virtual.mpi.windows import Win


class Grequest(Request):
    """A request that the program completes."""

    __slots__ = ("_over",)
    _over: tuple[Completion, list[Any]]

    def __new__(cls, request: Request | None = None) -> Self:
        """Return a null request, or a copy of the handle of another generalized one."""
        self = super().__new__(cls, request)
        # A null handle of any class may become one of another, as in mpi4py.
        if request:
            same_kind(Grequest, request)
            self._over = request._over  # type: ignore[attr-defined]
        return self

    @classmethod
    def Start(
        cls, query_fn: Callable[..., None] | None = None, free_fn: Callable[..., None] | None = None,
        cancel_fn: Callable[..., None] | None = None, args: tuple[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> Self:  # fmt: skip
        """Return an active request; `Complete` ends it. The callbacks are called as MPI says."""
        world = current_world()
        completion, held = Completion(world.kernel), [None]
        more, named = args or (), kwargs or {}

        def deliver(status: Status) -> Any:
            if query_fn is not None:
                query_fn(status, *more, **named)
            if free_fn is not None:
                free_fn(*more, **named)
            return held[0]

        about = WaitingForAny("generalized request", ())
        self = Request.__new__(cls, request_for(world, completion, about, deliver, writes=False))
        self._over = completion, held
        if cancel_fn is not None:
            self._withdraw = lambda request, now_s: cancel_fn(completion.finish_s is not None, *more, **named)
        return self

    def Complete(self) -> None:
        """End the operation."""
        self.complete()

    def complete(self, obj: Any = None) -> None:
        """End the operation with an object."""
        self._need()
        completion, held = self._over
        held[0] = obj
        completion.complete(completion.kernel.current.clock)


FILE_PROPERTIES = "size amode group group_size group_rank info atomicity"


def _null(owner: str, code: int) -> property:
    def refuse(self: Any) -> NoReturn:
        raise CallError(code, f"the {owner} is null")

    return property(refuse)


def _new(cls: Any, kind: Any, other: Any) -> Any:
    if other is not None:
        same_kind(kind, other)
    self = object.__new__(cls)
    self._identity = None
    return self


def _file_new(cls: Any, file: Any = None) -> Any:
    return _new(cls, File, file)


def _session_new(cls: Any, session: Any = None) -> Any:
    return _new(cls, Session, session)


File: Any = type(
    "File",
    (Handle,),
    {
        "__doc__": "MPI-IO: not simulated. Every call refuses.",
        "__slots__": (),
        "__new__": _file_new,
        **refused("File"),
        **{name: _null("file", ERR_FILE) for name in FILE_PROPERTIES.split()},
    },
)
Session: Any = type(
    "Session",
    (Attributed,),
    {
        "__doc__": "Sessions: not simulated. Every call refuses.",
        "__slots__": (),
        "__new__": _session_new,
        **refused("Session"),
    },
)


CLASSES = (
    Comm, Intracomm, Topocomm, Cartcomm, Graphcomm, Distgraphcomm, Intercomm, Request, Prequest, Grequest, Message, Win,
    File, Session,
)  # fmt: skip


def _own(source: ModuleType) -> dict[str, Any]:
    """Return the functions that a module defines."""
    return {
        name: value
        for name, value in vars(source).items()
        if callable(value)
        and getattr(value, "__module__", "") == source.__name__
        and not isinstance(value, type)
    }


def build() -> Any:
    """Return the module."""
    module: Any = ModuleType("mpi4py.MPI", "The virtual MPI of spawnsim, under mpi4py's names.")
    vars(module).update(words.namespace())
    vars(module).update({each.__name__: each for each in CLASSES})
    vars(module).update(refused("") | _own(functions))
    module.COMM_WORLD, module.COMM_SELF, module.COMM_NULL = COMM_WORLD, COMM_SELF, COMM_NULL
    module.REQUEST_NULL, module.WIN_NULL = Request(), Win()
    module.MESSAGE_NULL, module.MESSAGE_NO_PROC = MESSAGE_NULL, MESSAGE_NO_PROC
    module.FILE_NULL, module.SESSION_NULL = File(), Session()
    module.__pyx_capi__, module._typedict_c, module._typedict_f = {}, module._typedict, module._typedict
    module.pickle = pickler
    for name in ("_world", "_here"):
        delattr(module, name)
    return module


MPI = build()
