"""The calls of MPI as data: the forms of a collective, and what spawnsim refuses, with mpi4py's signatures.

A collective has one name in three forms. What is outside spawnsim (files, sessions, partitioned communication, dynamic
processes) is there under its name and with its parameters, so that a program that only mentions it runs, and one that
calls it is told what to do instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

from spawnsim.comm import constants, datatypes
from spawnsim.comm.handles import INFO_NULL
from spawnsim.errors import UnsupportedError


def nonblocking(name: str) -> str:
    """Return the name of a collective's non-blocking form.

    >>> nonblocking("Allreduce")
    'Iallreduce'
    """
    return "I" + name[0].lower() + name[1:]


def persistent(name: str) -> str:
    """Return the name of a collective's persistent form."""
    return name + "_init"


Class = TypeVar("Class", bound=type)


class Refused(NamedTuple):
    """Calls of one class ("" for functions of the module `MPI`) that are refused, and what to do instead."""

    owner: str
    advice: str
    calls: str
    classmethods: str = ""


FILES = (
    "MPI-IO is not simulated: open the file with Python, or gather the data to rank 0 and write them there"
)
SESSIONS = "sessions are not simulated: use MPI.COMM_WORLD"
PARTITIONS = "partitioned communication is not simulated: send each partition as a message of its own"
PROCESSES = "dynamic processes are not simulated; start all ranks at once with --ranks N"
PORTS = "dynamic processes are not simulated: start all ranks at once and split COMM_WORLD"

REFUSED: Final = (
    Refused("", PORTS, """
        Open_port(info=INFO_NULL) | Close_port(port_name) | Publish_name(service_name, port_name, info=INFO_NULL)
        Unpublish_name(service_name, port_name, info=INFO_NULL) | Lookup_name(service_name, info=INFO_NULL)"""),
    Refused("", "MPI-IO is not simulated", "Register_datarep(datarep, read_fn, write_fn, extent_fn)"),
    Refused("Comm", PARTITIONS, """
        Psend_init(buf, partitions, dest, tag=0, info=INFO_NULL)
        Precv_init(buf, partitions, source=ANY_SOURCE, tag=ANY_TAG, info=INFO_NULL)"""),
    Refused("Comm", "dynamic processes are not simulated; start all ranks at once", "", "Join(fd)"),
    Refused("Comm", "who survives is known when the survivors have met; use Shrink", "Ishrink()"),
    Refused("Intracomm", PROCESSES, """
        Spawn(command, args=None, maxprocs=1, info=INFO_NULL, root=0, errcodes=None)
        Spawn_multiple(command, args=None, maxprocs=None, info=INFO_NULL, root=0, errcodes=None)
        Accept(port_name, info=INFO_NULL, root=0) | Connect(port_name, info=INFO_NULL, root=0)"""),
    Refused("Prequest", PARTITIONS, """
        Pready(partition) | Pready_range(partition_low, partition_high) | Pready_list(partitions)
        Parrived(partition)"""),
    Refused("File", FILES, """
        Close() | Set_size(size) | Preallocate(size) | Get_size() | Get_amode() | Get_group() | Set_info(info)
        Get_info() | Set_view(disp=0, etype=BYTE, filetype=None, datarep='native', info=INFO_NULL) | Get_view()
        Read_at(offset, buf, status=None) | Read_at_all(offset, buf, status=None)
        Write_at(offset, buf, status=None) | Write_at_all(offset, buf, status=None)
        Iread_at(offset, buf) | Iread_at_all(offset, buf) | Iwrite_at(offset, buf) | Iwrite_at_all(offset, buf)
        Read(buf, status=None) | Read_all(buf, status=None) | Write(buf, status=None) | Write_all(buf, status=None)
        Iread(buf) | Iread_all(buf) | Iwrite(buf) | Iwrite_all(buf) | Seek(offset, whence=SEEK_SET) | Get_position()
        Get_byte_offset(offset) | Read_shared(buf, status=None) | Write_shared(buf, status=None)
        Iread_shared(buf) | Iwrite_shared(buf) | Read_ordered(buf, status=None) | Write_ordered(buf, status=None)
        Seek_shared(offset, whence=SEEK_SET) | Get_position_shared() | Read_at_all_begin(offset, buf)
        Read_at_all_end(buf, status=None) | Write_at_all_begin(offset, buf) | Write_at_all_end(buf, status=None)
        Read_all_begin(buf) | Read_all_end(buf, status=None) | Write_all_begin(buf)
        Write_all_end(buf, status=None) | Read_ordered_begin(buf) | Read_ordered_end(buf, status=None)
        Write_ordered_begin(buf) | Write_ordered_end(buf, status=None) | Get_type_extent(datatype)
        Set_atomicity(flag) | Get_atomicity() | Sync() | Get_errhandler() | Set_errhandler(errhandler)
        Call_errhandler(errorcode)""", """
        Open(comm, filename, amode=MODE_RDONLY, info=INFO_NULL) | Delete(filename, info=INFO_NULL)
        Create_errhandler(errhandler_fn)"""),
    Refused("Session", SESSIONS, """
        Finalize() | Get_num_psets(info=INFO_NULL) | Get_nth_pset(n, info=INFO_NULL) | Get_info()
        Get_pset_info(pset_name) | Create_group(pset_name) | Attach_buffer(buf) | Detach_buffer() | Flush_buffer()
        Iflush_buffer() | Get_errhandler() | Set_errhandler(errhandler) | Call_errhandler(errorcode)""",
        "Init(info=INFO_NULL, errhandler=None) | Create_errhandler(errhandler_fn)"),
)  # fmt: skip

_DEFAULTS: Final = {
    "INFO_NULL": INFO_NULL, "BYTE": datatypes.BYTE, "ANY_SOURCE": constants.ANY_SOURCE, "ANY_TAG": constants.ANY_TAG,
    "SEEK_SET": constants.SEEK_SET, "MODE_RDONLY": constants.MODE_RDONLY,
}  # fmt: skip


def refused(owner: str) -> dict[str, Any]:
    """Return a function that refuses for each refused call of a class, or ("") of the module `MPI`, by name.

    They are told to the program by `UnsupportedError`, which names the call and what to do instead.
    """
    found: dict[str, Any] = {}
    for entry in REFUSED:
        if entry.owner == owner:
            found |= {each.__name__: each for each in _refusals(entry, entry.calls)}
            found |= {each.__name__: classmethod(each) for each in _refusals(entry, entry.classmethods)}
    return found


def refusing(owner: Class) -> Class:
    """Give a class its refused calls. Use it as a decorator of the class."""
    for name, member in refused(owner.__name__).items():
        setattr(owner, name, member)
    return owner


def _refusals(entry: Refused, calls: str) -> list[Callable[..., NoReturn]]:
    lines = [line.strip() for line in calls.strip().splitlines()]
    return [_refusal(call, entry) for line in lines for call in line.split(" | ")]


def _refusal(call: str, entry: Refused) -> Callable[..., NoReturn]:
    """Return a function with the signature of `call`, such as "Read(buf, status=None)", that refuses."""
    name, _, parameters = call.removesuffix(")").partition("(")
    qualified = f"{entry.owner}.{name}" if entry.owner else name
    parameters = ", ".join(part for part in ("self" if entry.owner else "", parameters) if part)

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"{qualified}: {entry.advice}")

    refuse.__name__, refuse.__qualname__ = name, qualified
    refuse.__doc__ = f"Refuse: {entry.advice}."
    refuse.__signature__ = inspect.signature(eval(f"lambda {parameters}: None", dict(_DEFAULTS)))  # type: ignore[attr-defined]
    return refuse
