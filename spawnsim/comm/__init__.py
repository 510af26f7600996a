"""The vocabulary of communication, under mpi4py's names: constants, datatypes, operations, buffers, groups, protocols.

Values and memory only: nothing here sends a message, or loads MPI, torch, simpy or greenlet.
"""

from __future__ import annotations

from spawnsim.comm import constants, datatypes, failures, handles, ops
from spawnsim.comm.backends import as_comm
from spawnsim.comm.buffers import Buffer, Vector, as_buffer, as_target
from spawnsim.comm.constants import (
    ANY_SOURCE,
    ANY_TAG,
    BOTTOM,
    BUFFER_AUTOMATIC,
    IN_PLACE,
    LOCK_EXCLUSIVE,
    LOCK_SHARED,
    PROC_NULL,
    ROOT,
    UNDEFINED,
)
from spawnsim.comm.datatypes import (
    BFLOAT16_T,
    BOOL,
    BYTE,
    DATATYPE_NULL,
    DOUBLE,
    FLOAT,
    INT,
    INT64_T,
    LONG,
    Datatype,
)
from spawnsim.comm.failures import CallError, MPIException, Truncated
from spawnsim.comm.group import GROUP_EMPTY, GROUP_NULL, Group
from spawnsim.comm.handles import (
    ERRHANDLER_NULL,
    ERRORS_ABORT,
    ERRORS_ARE_FATAL,
    ERRORS_RETURN,
    INFO_ENV,
    INFO_NULL,
    Attributed,
    Errhandler,
    Handle,
    Info,
)
from spawnsim.comm.layouts import BF16
from spawnsim.comm.memory import buffer
from spawnsim.comm.objects import Clock, Message, Recorder, Request, Task, Win, Windows
from spawnsim.comm.ops import (
    BAND,
    BOR,
    BXOR,
    LAND,
    LOR,
    LXOR,
    MAX,
    MAXLOC,
    MIN,
    MINLOC,
    NO_OP,
    OP_NULL,
    PROD,
    REPLACE,
    SUM,
    Op,
)
from spawnsim.comm.packing import Pickle
from spawnsim.comm.protocols import Comm, FaultTolerantComm
from spawnsim.comm.status import Status

__all__ = [
    "ANY_SOURCE", "ANY_TAG", "BAND", "BF16", "BFLOAT16_T", "BOOL", "BOR", "BOTTOM", "BUFFER_AUTOMATIC", "BXOR", "BYTE",
    "DATATYPE_NULL", "DOUBLE", "ERRHANDLER_NULL", "ERRORS_ABORT", "ERRORS_ARE_FATAL", "ERRORS_RETURN", "FLOAT",
    "GROUP_EMPTY", "GROUP_NULL", "INFO_ENV", "INFO_NULL", "INT", "INT64_T", "IN_PLACE", "LAND", "LOCK_EXCLUSIVE",
    "LOCK_SHARED", "LONG", "LOR", "LXOR", "MAX", "MAXLOC", "MIN", "MINLOC", "NO_OP", "OP_NULL", "PROC_NULL", "PROD",
    "REPLACE", "ROOT", "SUM", "UNDEFINED", "Attributed", "Buffer", "CallError", "Clock", "Comm", "Datatype",
    "Errhandler", "FaultTolerantComm", "Group", "Handle", "Info", "MPIException", "Message", "Op",
    "Pickle", "Recorder", "Request", "Status", "Task", "Truncated", "Vector", "Win", "Windows", "as_buffer", "as_comm",
    "as_target", "buffer", "namespace",
]  # fmt: skip


def namespace() -> dict[str, object]:
    """Return all that `mpi4py.MPI` has and that needs no communicator: constants, types, ops, classes, functions."""
    words: dict[str, object] = {
        name: value for name, value in vars(constants).items() if name.isupper() or name.endswith("Type")
    }
    faults: dict[str, object] = {
        name: value for name, value in vars(failures).items() if name.startswith("ERR_")
    }
    faults |= {"SUCCESS": failures.SUCCESS, "Exception": MPIException}
    faults |= {"Get_error_class": failures.Get_error_class, "Get_error_string": failures.Get_error_string}
    nulls: dict[str, object] = {
        name: value for name, value in vars(handles).items() if name.startswith("ERR") and name.isupper()
    }
    nulls |= {
        "GROUP_NULL": GROUP_NULL,
        "GROUP_EMPTY": GROUP_EMPTY,
        "INFO_NULL": INFO_NULL,
        "INFO_ENV": INFO_ENV,
    }
    classes = (Datatype, Op, Status, Info, Group, Errhandler, Pickle, buffer)
    named: dict[str, object] = {cls.__name__: cls for cls in classes}
    tables: dict[str, object] = {"memory": buffer, "_typedict": datatypes.typedict}
    return words | faults | nulls | named | tables | datatypes.BY_NAME | ops.BY_NAME
