"""`MPI`: what a program gets that imports `mpi4py.MPI` on virtual ranks.

A module with every name of mpi4py's, put together from the vocabulary (`spawnsim.comm`), the virtual communicators and
windows, and `functions`. It holds no state: each use means the calling rank. What is outside the simulation (files,
sessions, ports) is there, too, and refuses by name: the tables are mpi4py's signatures, one call each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn, Self

from spawnsim import comm as words
from spawnsim.comm import constants, predefined
from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG
from spawnsim.comm.failures import ERR_FILE, CallError
from spawnsim.comm.handles import INFO_NULL, Attributed, Handle
from spawnsim.comm.status import Status
from spawnsim.errors import UnsupportedError
from spawnsim.virtual.engine.completion import Completion
from spawnsim.virtual.engine.kernel import current_world
from spawnsim.virtual.engine.waiting import WaitingForAny
from spawnsim.virtual.mpi import functions
from spawnsim.virtual.mpi import functions as insides
from spawnsim.virtual.mpi.communicators import COMM_NULL, COMM_SELF, COMM_WORLD, Comm, Intercomm, Intracomm
from spawnsim.virtual.mpi.payload import pickler
from spawnsim.virtual.mpi.point_to_point import MESSAGE_NO_PROC, MESSAGE_NULL, Message
from spawnsim.virtual.mpi.requests import Prequest, Request
from spawnsim.virtual.mpi.topology import Cartcomm, Distgraphcomm, Graphcomm, Topocomm
from spawnsim.virtual.mpi.windows import Win


class Grequest(Request):
    """A request that the program completes."""

    __slots__ = ("_over",)
    _over: tuple[Completion, list[Any]]

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

        self = cls.start(world, completion, WaitingForAny("generalized request", ()), deliver, writes=False)
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


FILES = (
    "MPI-IO is not simulated: open the file with Python, or gather the data to rank 0 and write them there"
)
SESSIONS = "sessions are not simulated: use MPI.COMM_WORLD"
PORTS = "dynamic processes are not simulated: start all ranks at once and split COMM_WORLD"
REPRESENTATIONS = "MPI-IO is not simulated"
PARTITIONS = "partitioned communication is not simulated: send each partition as a message of its own"

FILE_CALLS = """
Close() | Set_size(size) | Preallocate(size) | Get_size() | Get_amode() | Get_group() | Set_info(info) | Get_info()
Set_view(disp=0, etype=BYTE, filetype=None, datarep='native', info=INFO_NULL) | Get_view()
Read_at(offset, buf, status=None) | Read_at_all(offset, buf, status=None)
Write_at(offset, buf, status=None) | Write_at_all(offset, buf, status=None)
Iread_at(offset, buf) | Iread_at_all(offset, buf) | Iwrite_at(offset, buf) | Iwrite_at_all(offset, buf)
Read(buf, status=None) | Read_all(buf, status=None) | Write(buf, status=None) | Write_all(buf, status=None)
Iread(buf) | Iread_all(buf) | Iwrite(buf) | Iwrite_all(buf) | Seek(offset, whence=SEEK_SET) | Get_position()
Get_byte_offset(offset) | Read_shared(buf, status=None) | Write_shared(buf, status=None)
Iread_shared(buf) | Iwrite_shared(buf) | Read_ordered(buf, status=None) | Write_ordered(buf, status=None)
Seek_shared(offset, whence=SEEK_SET) | Get_position_shared() | Read_at_all_begin(offset, buf)
Read_at_all_end(buf, status=None) | Write_at_all_begin(offset, buf) | Write_at_all_end(buf, status=None)
Read_all_begin(buf) | Read_all_end(buf, status=None) | Write_all_begin(buf) | Write_all_end(buf, status=None)
Read_ordered_begin(buf) | Read_ordered_end(buf, status=None) | Write_ordered_begin(buf)
Write_ordered_end(buf, status=None) | Get_type_extent(datatype) | Set_atomicity(flag) | Get_atomicity() | Sync()
Get_errhandler() | Set_errhandler(errhandler) | Call_errhandler(errorcode)
"""
FILE_CLASS_CALLS = """
Open(comm, filename, amode=MODE_RDONLY, info=INFO_NULL) | Delete(filename, info=INFO_NULL)
Create_errhandler(errhandler_fn)
"""
FILE_PROPERTIES = "size amode group group_size group_rank info atomicity"
SESSION_CALLS = """
Finalize() | Get_num_psets(info=INFO_NULL) | Get_nth_pset(n, info=INFO_NULL) | Get_info() | Get_pset_info(pset_name)
Create_group(pset_name) | Attach_buffer(buf) | Detach_buffer() | Flush_buffer() | Iflush_buffer()
Get_errhandler() | Set_errhandler(errhandler) | Call_errhandler(errorcode)
"""
SESSION_CLASS_CALLS = "Init(info=INFO_NULL, errhandler=None) | Create_errhandler(errhandler_fn)"
PORT_CALLS = """
Open_port(info=INFO_NULL) | Close_port(port_name) | Publish_name(service_name, port_name, info=INFO_NULL)
Unpublish_name(service_name, port_name, info=INFO_NULL) | Lookup_name(service_name, info=INFO_NULL)
"""
DATAREP_CALLS = "Register_datarep(datarep, read_fn, write_fn, extent_fn)"

_DEFAULTS = {
    "INFO_NULL": INFO_NULL, "BYTE": predefined.BYTE, "ANY_SOURCE": ANY_SOURCE, "ANY_TAG": ANY_TAG,
    "SEEK_SET": constants.SEEK_SET, "MODE_RDONLY": constants.MODE_RDONLY,
}  # fmt: skip


def refusal(call: str, advice: str, bound: str = "", owner: str = "") -> Callable[..., NoReturn]:
    """Return a function with the signature of `call`, such as "Read(buf, status=None)", that refuses."""
    name, _, parameters = call.strip().rstrip(")").partition("(")
    parameters = ", ".join(part for part in (bound, parameters) if part)

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"{owner}{name}: {advice}")

    refuse.__name__, refuse.__qualname__ = name, owner + name
    refuse.__doc__ = f"Refuse: {advice}."
    refuse.__signature__ = inspect.signature(eval(f"lambda {parameters}: None", dict(_DEFAULTS)))  # type: ignore[attr-defined]
    return refuse


def refusals(table: str, advice: str, owner: str = "") -> dict[str, Any]:
    """Return a refusing function, or method of `owner`, for each call of a table."""
    made = [
        refusal(call, advice, "self" if owner else "", owner and f"{owner}.")
        for line in table.strip().splitlines()
        for call in line.split(" | ")
    ]
    return {each.__name__: each for each in made}


def _class_refusals(table: str, advice: str, owner: str) -> dict[str, Any]:
    return {name: classmethod(each) for name, each in refusals(table, advice, owner).items()}


def _null(owner: str, code: int) -> property:
    def refuse(self: Any) -> NoReturn:
        raise CallError(code, f"the {owner} is null")

    return property(refuse)


def _new(cls: Any, other: Any = None) -> Any:
    self = object.__new__(cls)
    self._identity = None
    return self


def _file_new(cls: Any, file: Any = None) -> Any:
    return _new(cls)


def _session_new(cls: Any, session: Any = None) -> Any:
    return _new(cls)


File: Any = type(
    "File",
    (Handle,),
    {
        "__doc__": "MPI-IO: not simulated. Every call refuses.",
        "__slots__": (),
        "__new__": _file_new,
        **refusals(FILE_CALLS, FILES, "File"),
        **_class_refusals(FILE_CLASS_CALLS, FILES, "File"),
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
        **refusals(SESSION_CALLS, SESSIONS, "Session"),
        **_class_refusals(SESSION_CLASS_CALLS, SESSIONS, "Session"),
    },
)


def refused_functions() -> dict[str, Any]:
    """Return the functions that refuse, by name."""
    return refusals(PORT_CALLS, PORTS) | refusals(DATAREP_CALLS, REPRESENTATIONS)


CLASSES = (
    Comm, Intracomm, Topocomm, Cartcomm, Graphcomm, Distgraphcomm, Intercomm, Request, Prequest, Grequest, Message, Win,
    File, Session,
)  # fmt: skip


def _own(room: ModuleType) -> dict[str, Any]:
    """Return the functions that a room defines."""
    return {
        name: value
        for name, value in vars(room).items()
        if callable(value)
        and getattr(value, "__module__", "") == room.__name__
        and not isinstance(value, type)
    }


def build() -> Any:
    """Return the module."""
    module: Any = ModuleType("mpi4py.MPI", "The virtual MPI of spawnsim, under mpi4py's names.")
    vars(module).update(words.namespace())
    vars(module).update({each.__name__: each for each in CLASSES})
    vars(module).update(refused_functions() | _own(functions) | _own(insides))
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
