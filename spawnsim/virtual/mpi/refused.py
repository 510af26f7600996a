"""What is outside the simulation: files, sessions, ports. Every call is there, and refuses by name.

The tables below are mpi4py's signatures, one call each. This room knows words only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

from spawnsim.comm import constants, predefined
from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG
from spawnsim.comm.failures import ERR_FILE, CallError
from spawnsim.comm.handles import Attributed, Handle
from spawnsim.comm.info import INFO_NULL
from spawnsim.errors import UnsupportedError

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


def functions() -> dict[str, Any]:
    """Return the functions that refuse, by name."""
    return refusals(PORT_CALLS, PORTS) | refusals(DATAREP_CALLS, REPRESENTATIONS)
