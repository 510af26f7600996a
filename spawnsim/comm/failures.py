"""MPI's error classes, their texts, and the exceptions that carry them.

`MPIException` is the class that a program catches as `MPI.Exception`. spawnsim raises its subclass `CallError` for an
invalid call, so that both `except MPI.Exception` and `except errors.UsageError` catch it. `ABSENT` lists the mpi4py
names that virtual ranks lack.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any, Final, NoReturn, TypeVar

from spawnsim import errors
from spawnsim.errors import ParameterError, TruncationError, UnsupportedError, UsageError

SUCCESS: Final = 0
ERR_BUFFER: Final = 1
ERR_COUNT: Final = 2
ERR_TYPE: Final = 3
ERR_TAG: Final = 4
ERR_COMM: Final = 5
ERR_RANK: Final = 6
ERR_ROOT: Final = 7
ERR_GROUP: Final = 8
ERR_OP: Final = 9
ERR_TOPOLOGY: Final = 10
ERR_DIMS: Final = 11
ERR_ARG: Final = 12
ERR_UNKNOWN: Final = 13
ERR_TRUNCATE: Final = 14
ERR_OTHER: Final = 15
ERR_INTERN: Final = 16
ERR_IN_STATUS: Final = 17
ERR_PENDING: Final = 18
ERR_REQUEST: Final = 19
ERR_ACCESS: Final = 20
ERR_AMODE: Final = 21
ERR_BAD_FILE: Final = 22
ERR_CONVERSION: Final = 23
ERR_DUP_DATAREP: Final = 24
ERR_FILE_EXISTS: Final = 25
ERR_FILE_IN_USE: Final = 26
ERR_FILE: Final = 27
ERR_INFO: Final = 28
ERR_INFO_KEY: Final = 29
ERR_INFO_VALUE: Final = 30
ERR_INFO_NOKEY: Final = 31
ERR_IO: Final = 32
ERR_NAME: Final = 33
ERR_NO_MEM: Final = 34
ERR_NOT_SAME: Final = 35
ERR_NO_SPACE: Final = 36
ERR_NO_SUCH_FILE: Final = 37
ERR_PORT: Final = 38
ERR_QUOTA: Final = 39
ERR_READ_ONLY: Final = 40
ERR_SERVICE: Final = 41
ERR_SPAWN: Final = 42
ERR_UNSUPPORTED_DATAREP: Final = 43
ERR_UNSUPPORTED_OPERATION: Final = 44
ERR_WIN: Final = 45
ERR_BASE: Final = 46
ERR_LOCKTYPE: Final = 47
ERR_KEYVAL: Final = 48
ERR_RMA_CONFLICT: Final = 49
ERR_RMA_SYNC: Final = 50
ERR_SIZE: Final = 51
ERR_DISP: Final = 52
ERR_ASSERT: Final = 53
ERR_RMA_RANGE: Final = 55
ERR_RMA_ATTACH: Final = 56
ERR_RMA_SHARED: Final = 57
ERR_RMA_FLAVOR: Final = 58
ERR_PROC_FAILED: Final = 71
ERR_PROC_FAILED_PENDING: Final = 72
ERR_REVOKED: Final = 73
ERR_SESSION: Final = 75
ERR_PROC_ABORTED: Final = 76
ERR_VALUE_TOO_LARGE: Final = 77
ERR_ABI: Final = 78
ERR_ERRHANDLER: Final = 80
ERR_LASTCODE: Final = 0x3FFFFFFF

_OVERRIDES = {
    "PROC_FAILED": "a process has failed",
    "PROC_FAILED_PENDING": "a process has failed; the operation is still pending",
    "REVOKED": "the communicator was revoked",
    "PROC_ABORTED": "a process was aborted",
    "INTERN": "internal error",
    "IN_STATUS": "see the error field of each status",
    "OTHER": "other error",
    "UNKNOWN": "unknown error",
    "TRUNCATE": "message truncated",
    "NO_MEM": "out of memory",
    "PENDING": "pending request",
    "NOT_SAME": "arguments of a collective call differ between ranks",
    "RMA_SYNC": "wrong synchronisation of one-sided calls",
    "RMA_CONFLICT": "conflicting accesses to a window",
    "RMA_RANGE": "target memory is outside the window",
    "INFO_NOKEY": "info key is not defined",
    "UNSUPPORTED_OPERATION": "unsupported operation",
}


def _texts() -> dict[int, str]:
    """Return the text of every error class: "invalid rank" for `ERR_RANK`, unless said better above."""
    names = {name[4:]: value for name, value in globals().items() if name.startswith("ERR_")}
    plain = {value: f"invalid {name.lower().replace('_', ' ')}" for name, value in names.items()}
    return plain | {names[name]: text for name, text in _OVERRIDES.items()} | {SUCCESS: "no error"}


TEXTS: Final = _texts()


def Get_error_class(errorcode: int) -> int:
    """Return the class of an error code."""
    return errorcode if errorcode in TEXTS else ERR_UNKNOWN


def Get_error_string(errorcode: int) -> str:
    """Return the text of an error code."""
    return TEXTS.get(int(errorcode), TEXTS[ERR_UNKNOWN])


class MPIException(RuntimeError):
    """MPI's exception, `MPI.Exception`: an error code, and possibly a message with more detail than its text."""

    def __init__(self, ierr: int = SUCCESS, message: str = "") -> None:
        self.ob_mpi, self.message = ierr, message
        super().__init__(ierr, message)

    def __int__(self) -> int:
        return int(self.ob_mpi)

    def __bool__(self) -> bool:
        return self.ob_mpi != SUCCESS

    def __hash__(self) -> int:
        return hash(self.ob_mpi)

    def __eq__(self, other: object) -> bool:
        return int(self) == (int(other) if isinstance(other, MPIException) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: int) -> bool:
        return int(self) < int(other)

    def __le__(self, other: int) -> bool:
        return int(self) <= int(other)

    def __gt__(self, other: int) -> bool:
        return int(self) > int(other)

    def __ge__(self, other: int) -> bool:
        return int(self) >= int(other)

    def Get_error_code(self) -> int:
        return self.ob_mpi

    def Get_error_class(self) -> int:
        return Get_error_class(self.ob_mpi)

    def Get_error_string(self) -> str:
        text = Get_error_string(self.ob_mpi)
        return f"{text}: {self.message}" if self.message else text

    error_code = property(Get_error_code)
    error_class = property(Get_error_class)
    error_string = property(Get_error_string)

    def __str__(self) -> str:
        return self.Get_error_string()

    def __repr__(self) -> str:
        if type(self) is MPIException and not self.message:
            return f"MPI.Exception({int(self)})"
        return f"{type(self).__name__}({int(self)}, {self.message!r})"


class CallError(UsageError, MPIException):
    """An invalid call: wrong rank, tag, count, type, op or handle."""


class ArgumentError(CallError, ParameterError):
    """Arguments that do not fit each other or the number of ranks: also the ValueError that mpi4py raises."""


class Truncated(TruncationError, CallError):
    """A message is longer than the buffer that receives it (`ERR_TRUNCATE`)."""

    def __init__(self, ierr: int = ERR_TRUNCATE, message: str = "") -> None:
        super().__init__(ierr, message)


class Unreadable(UsageError, pickle.UnpicklingError):
    """A message that is not a pickled object."""


class SpecTypeError(UsageError, TypeError):
    """An argument is of a type that no buffer specification has."""


class TooLarge(UsageError, OverflowError):
    """A number that does not fit the integers of MPI's calls."""


class SpecBufferError(UsageError, BufferError):
    """Memory that cannot serve: not contiguous, read-only, of foreign byte order, or on another device."""


class UnknownTypeError(UsageError, KeyError, ValueError):
    """An element type without an MPI datatype."""

    def __str__(self) -> str:
        return str(self.args[0])


class RankFailed(errors.RankFailed, MPIException):
    """A call needs a dead rank: `spawnsim.errors.RankFailed` for programs that catch `MPI.Exception`."""

    def __init__(self, ranks: Iterable[int], message: str = "") -> None:
        errors.RankFailed.__init__(self, ranks, message)
        self.ob_mpi, self.message = ERR_PROC_FAILED, message


class Revoked(errors.Revoked, MPIException):
    """The communicator is revoked: `spawnsim.errors.Revoked` for programs that catch `MPI.Exception`."""

    def __init__(self, message: str = "") -> None:
        self.ob_mpi, self.message = ERR_REVOKED, message
        Exception.__init__(self, message)

    def __str__(self) -> str:
        return self.message


class NotAvailable(UnsupportedError, MPIException):
    """A call that virtual ranks lack, as MPI's `ERR_UNSUPPORTED_OPERATION`: programs may have another way."""

    def __init__(self, message: str) -> None:
        self.ob_mpi, self.message = ERR_UNSUPPORTED_OPERATION, message
        Exception.__init__(self, message)

    def __str__(self) -> str:
        return self.message


class Absent(type):
    """An mpi4py name that virtual ranks lack: a program may mention it, but every use of it is an error."""

    advice: str

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        raise NotAvailable(f"{cls.__name__} is not available on virtual ranks: {cls.advice}")

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotAvailable(f"{cls.__name__}.{name} is not available on virtual ranks: {cls.advice}")


_PROCESSES = "start all ranks at once with --ranks N, and split COMM_WORLD"
_HANDLES = "no library of C or Fortran could use the number of a handle"

ABSENT: Final[dict[str, dict[str, str]]] = {
    "": {
        "Open_port Close_port Publish_name Unpublish_name Lookup_name": _PROCESSES,
        "Register_datarep": "convert the data with numpy before they are written",
        "Session SESSION_NULL": "use MPI.COMM_WORLD",
        "Add_error_class Add_error_code Add_error_string Remove_error_class Remove_error_code Remove_error_string":
            "raise your own exception",
        "Get_abi_version Get_abi_info Get_abi_fortran_info _sizeof _addressof _handleof "
        "_datatype_create _datatype_decode": _HANDLES,
    },
    "Identity": {"f2py": _HANDLES},
    "Group": {"Create_from_session_pset": "use Get_group() of a communicator"},
    "Status": {"f2py py2f tomemory": _HANDLES},
    "Datatype": {
        "Create_darray": "use Create_subarray, or Create_indexed",
        "Create_f90_integer Create_f90_real Create_f90_complex": "name the type",
        "Pack_external Unpack_external Pack_external_size": "convert the array with numpy: array.astype('>f8')",
        "Create_keyval Free_keyval Get_attr Set_attr Delete_attr": "keep a dictionary by datatype",
    },
    "Named": {"Create_errhandler": "errors are exceptions: catch MPI.Exception"},
    "Comm": {
        "Join": _PROCESSES,
        "Ishrink": "the survivors are known only after they have met; use Shrink",
    },
    "Intracomm": {"Accept Connect": _PROCESSES},
}  # fmt: skip
"""By class ("" for the module `MPI`): the names that are absent, and what to use instead."""

Class = TypeVar("Class", bound=type)


def absent(owner: str) -> dict[str, Absent]:
    """Return an `Absent` for each absent name of a class, or ("") of the module `MPI`."""
    found = {}
    for names, advice in ABSENT[owner].items():
        for name in names.split():
            qualified = name if owner in ("Identity", "Named") else f"{owner or 'MPI'}.{name}"
            found[name] = Absent(qualified, (), {"advice": advice})
    return found


def lacking(owner: Class) -> Class:
    """Give a class its absent names; a decorator."""
    for name, stand_in in absent(owner.__name__).items():
        setattr(owner, name, stand_in)
    return owner
