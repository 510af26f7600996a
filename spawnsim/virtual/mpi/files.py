"""`MPI.File` on the real file system: accesses happen in the order of their virtual times.

Storage has no model: an access takes the time of a call, and a collective one that of a barrier. A non-blocking access
happens when it starts; the data that it reads are in the buffer once it is complete.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any, NoReturn, Self

import numpy as np

from spawnsim.comm import constants as c
from spawnsim.comm.buffers import as_buffer
from spawnsim.comm.datatypes import BYTE, Datatype
from spawnsim.comm.failures import (
    ERR_ACCESS,
    ERR_AMODE,
    ERR_ARG,
    ERR_COMM,
    ERR_FILE,
    ERR_IO,
    ERR_NOT_SAME,
    ERR_OTHER,
    ERR_READ_ONLY,
    ERR_UNSUPPORTED_OPERATION,
    CallError,
)  # fmt: skip
from spawnsim.comm.group import Group
from spawnsim.comm.handles import AINT, ERRORS_RETURN, INFO_NULL, Errhandler, Info, Named, integer, same_kind
from spawnsim.comm.memory import as_bytes
from spawnsim.comm.status import Status
from spawnsim.virtual.engine.kernel import current_world
from spawnsim.virtual.mpi.comm import abort
from spawnsim.virtual.mpi.communicators import Intracomm
from spawnsim.virtual.mpi.file_views import View, errors_of_mpi
from spawnsim.virtual.mpi.instance import Call
from spawnsim.virtual.mpi.requests import Request, fill, request_for, request_over

OWN, SHARED = "own", "shared"  # the pointer of an access, unless it names an offset
ACCESS = {c.MODE_RDONLY: os.O_RDONLY, c.MODE_WRONLY: os.O_WRONLY, c.MODE_RDWR: os.O_RDWR}


@dataclass(eq=False)
class FileState:
    """What the ranks that opened a file together share."""

    file: io.FileIO
    path: str
    amode: int
    shared: int = 0  # the shared pointer, in elements of the view

    @property
    def size(self) -> int:
        return os.fstat(self.file.fileno()).st_size

    def resize(self, name: str, sizes: list[int], *, shrinks: bool = True) -> None:
        """Set the size to the one that all ranks give; without `shrinks`, a longer file stays."""
        size = _same(name, sizes)
        if size < 0:
            raise CallError(ERR_ARG, f"{name}: size {size}")
        if shrinks or size > self.size:
            with errors_of_mpi():
                os.ftruncate(self.file.fileno(), size)

    def close(self) -> None:
        """Close the file, and delete it if its mode says so."""
        self.file.close()
        if self.amode & c.MODE_DELETE_ON_CLOSE:
            with errors_of_mpi():
                os.unlink(self.path)

    def advance(self, counts: list[int]) -> list[int]:
        """Move the shared pointer over the elements of all ranks, in their order; return where each begins."""
        first, *ends = accumulate(counts, initial=self.shared)
        self.shared = ends[-1]
        return [first, *ends[:-1]]


def _same(name: str, parts: list[Any]) -> Any:
    """Return the argument of a call, which must be the same on all ranks."""
    if len({*parts}) > 1:
        raise CallError(ERR_NOT_SAME, f"{name}: the ranks give different arguments: {sorted({*parts})[:4]}")
    return parts[0]


def _agreed(comm: Any, name: str, part: Any, make: Callable[[list[Any]], Any]) -> Any:
    """Meet all ranks; return the result of `make(parts)`, which runs once, or raise its error on all ranks."""

    def made(parts: list[Any]) -> Any:
        try:
            return make(parts)
        except CallError as error:
            return error

    found = comm._agree(name, part, made)
    if isinstance(found, CallError):
        raise CallError(found.Get_error_code(), found.message)
    return found


def _opened(parts: list[tuple[str, int]]) -> FileState:
    """Open a file once for all ranks, which give (path, mode)."""
    path, amode = _same("File.Open", parts)
    access = [mode for mode in ACCESS if amode & mode]
    creates = amode & (c.MODE_CREATE | c.MODE_EXCL)
    if (
        len(access) != 1
        or (creates and amode & c.MODE_RDONLY)
        or (amode & c.MODE_SEQUENTIAL and amode & c.MODE_RDWR)
    ):
        raise CallError(
            ERR_AMODE,
            f"File.Open of {path} with mode {amode}: give one of MODE_RDONLY, MODE_WRONLY and MODE_RDWR; MODE_RDONLY "
            "creates no file, and MODE_SEQUENTIAL only reads or only writes",
        )
    flags = ACCESS[access[0]] | (os.O_CREAT if amode & c.MODE_CREATE else 0)
    with errors_of_mpi():
        number = os.open(path, flags | (os.O_EXCL if amode & c.MODE_EXCL else 0), 0o666)
    return FileState(io.FileIO(number, "wb" if amode & c.MODE_WRONLY else "rb"), path, amode)


def _path(filename: Any) -> str:
    return os.path.abspath(os.fsdecode(filename))


class File(Named):
    """A file that the ranks of a communicator have opened together."""

    __slots__ = (
        "__weakref__",
        "_atomic",
        "_attributes",
        "_comm",
        "_errhandler",
        "_identity",
        "_info",
        "_name",
        "_pointer",
        "_split",
        "_state",
        "_view",
    )  # fmt: skip
    _kind = "FILE"
    _comm: Any
    _state: FileState
    _view: View
    _pointer: int  # in elements of the view
    _split: tuple[str, Request] | None  # the split collective in progress
    _atomic: bool

    def __new__(cls, file: File | None = None) -> Self:
        """Return a null file, or a copy of another handle."""
        self = super().__new__(cls)
        self._identity = self._info = self._errhandler = None
        self._attributes, self._name = {}, ""
        if file is not None:
            same_kind(File, file)
            for slot in File.__slots__[1:] if file else ():
                setattr(self, slot, getattr(file, slot))
        return self

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self._identity is not None:
            raise ValueError("cannot pickle a file: it means something on its own rank only")
        return "FILE_NULL" if self is FILE_NULL else (type(self), ())

    def _exist(self) -> None:
        if self._identity is None:
            raise CallError(ERR_FILE, "the file is null, or was closed before")

    def _abort(self, errorcode: int) -> NoReturn:
        abort(current_world(), errorcode)

    # -- opening and closing -------------------------------------------------------------------------------------

    @classmethod
    def Open(cls, comm: Any, filename: Any, amode: int = c.MODE_RDONLY, info: Info = INFO_NULL) -> Self:
        """Open a file on all ranks of a communicator; collective."""
        comm._need()
        if not isinstance(comm, Intracomm):
            raise CallError(ERR_COMM, "File.Open: a file belongs to one group: Merge() the two groups")
        make = lambda parts: (_opened(parts), comm._context.derive(comm._members, inner=True))  # noqa: E731
        state, context = _agreed(comm, "File.Open", (_path(filename), integer(amode)), make)
        self = cls()
        self._identity = self._state = state
        self._comm, self._view, self._split = comm._entered(context, Intracomm), View(), None
        self._info, self._atomic = Info.of(info) if info else None, False
        self._pointer = state.shared = state.size if state.amode & c.MODE_APPEND else 0
        comm._rank.attachments.setdefault("files", []).append(state.path)
        return self

    def Close(self) -> None:
        """Close the file; collective."""
        self._all("File.Close", None, lambda _: self._state.close())
        self._comm._rank.attachments["files"].remove(self._state.path)
        self._identity = None

    @classmethod
    def Delete(cls, filename: Any, info: Info = INFO_NULL) -> None:
        """Delete a file."""
        current_world().kernel.observe()
        with errors_of_mpi():
            os.unlink(_path(filename))

    def _all(self, name: str, part: Any, make: Any) -> Any:
        self._exist()
        self._comm._world.kernel.observe()
        return _agreed(self._comm, name, part, make)

    # -- the file itself -----------------------------------------------------------------------------------------

    def Get_size(self) -> int:
        """Return the size in bytes."""
        self._exist()
        self._comm._world.kernel.observe()
        return self._state.size

    def Set_size(self, size: int) -> None:
        """Cut or extend the file to a size in bytes; collective."""
        self._all("Set_size", integer(size, AINT), lambda sizes: self._state.resize("Set_size", sizes))

    def Preallocate(self, size: int) -> None:
        """Extend the file to a size in bytes, unless it is longer; collective."""
        resize = lambda sizes: self._state.resize("Preallocate", sizes, shrinks=False)  # noqa: E731
        self._all("Preallocate", integer(size, AINT), resize)

    def Get_amode(self) -> int:
        self._exist()
        return self._state.amode

    def _live_comm(self) -> Any:
        self._exist()
        return self._comm

    def Get_group(self) -> Group:
        comm = self._live_comm()
        return Group.of(comm._members, comm._rank.id)

    size, amode, group = property(Get_size), property(Get_amode), property(Get_group)

    group_size = property(lambda self: len(self._live_comm()._members))
    group_rank = property(lambda self: self._live_comm()._me)

    def Get_errhandler(self) -> Errhandler:
        """Return the error handler; `FILE_NULL` has one, too."""
        return Errhandler(self._errhandler or ERRORS_RETURN)._made()

    def Set_errhandler(self, errhandler: Errhandler) -> None:
        self._errhandler = errhandler

    def Set_atomicity(self, flag: bool) -> None:
        """Set the mode; collective. Accesses of virtual ranks never overlap, so they are atomic in either mode."""
        self._all("Set_atomicity", None, lambda _: None)
        self._atomic = bool(flag)

    def Get_atomicity(self) -> bool:
        self._exist()
        return self._atomic

    atomicity = property(Get_atomicity, Set_atomicity)

    def Sync(self) -> None:
        """Return once all ranks have called: data are in the file as soon as they are written."""
        self._all("File.Sync", None, lambda _: None)

    # -- views and pointers --------------------------------------------------------------------------------------

    def Set_view(
        self, disp: int = 0, etype: Datatype = BYTE, filetype: Datatype | None = None, datarep: str = "native",
        info: Info = INFO_NULL,
    ) -> None:  # fmt: skip
        """Set the part of the file that this rank sees, and set all pointers to its start; collective."""
        self._exist()
        disp = integer(disp, AINT)
        if disp == c.DISPLACEMENT_CURRENT and self._state.amode & c.MODE_SEQUENTIAL:
            disp = self._view.place(self._state.shared)
        view = View(disp, etype, filetype if filetype is not None else etype, datarep or "native")
        view.check()
        self._view, self._pointer = view.kept(), 0
        self._all("Set_view", None, lambda _: setattr(self._state, "shared", 0))

    def Get_view(self) -> tuple[int, Datatype, Datatype, str]:
        """Return displacement, element type, file type and data representation."""
        self._exist()
        view = self._view.kept()
        return view.disp, view.etype, view.filetype, view.datarep

    def Get_type_extent(self, datatype: Datatype) -> int:
        self._exist()
        return datatype.Get_extent()[1]

    def Get_byte_offset(self, offset: int) -> int:
        """Return the byte of the file at which an element of the view lies."""
        self._exist()
        return self._view.place(integer(offset, AINT))

    def Get_position(self) -> int:
        self._exist()
        return self._pointer

    def Get_position_shared(self) -> int:
        self._exist()
        self._comm._world.kernel.observe()
        return self._state.shared

    def Seek(self, offset: int, whence: int = c.SEEK_SET) -> None:
        self._exist()
        self._comm._world.kernel.observe()
        self._pointer = self._sought(integer(offset, AINT), whence, self._pointer)

    def Seek_shared(self, offset: int, whence: int = c.SEEK_SET) -> None:
        """Move the shared pointer; collective."""

        def move(parts: list[tuple[int, int]]) -> None:
            offset, whence = _same("Seek_shared", parts)
            self._state.shared = self._sought(offset, whence, self._state.shared)

        self._all("Seek_shared", (integer(offset, AINT), integer(whence)), move)

    def _sought(self, offset: int, whence: int, current: int) -> int:
        starts = {c.SEEK_SET: 0, c.SEEK_CUR: current}
        start = self._view.position(self._state.size) if whence == c.SEEK_END else starts.get(whence)
        if start is None or start + offset < 0:
            raise CallError(
                ERR_ARG, f"Seek({offset}, {whence}) from position {current}: it leads before the start"
            )
        return start + offset

    # -- access --------------------------------------------------------------------------------------------------

    def _begin(self, name: str, where: Any, buf: Any) -> Request:
        """Start an access, and a collective one with all ranks; return its request."""
        self._exist()
        lower = name.lower()
        writes, together = "write" in lower, lower.endswith(("_all", "_ordered"))
        buffer: Any = as_buffer(buf, writable=not writes)
        world, state, unit = self._comm._world, self._state, self._view.unit
        if state.amode & (c.MODE_RDONLY if writes else c.MODE_WRONLY):
            code, only = (ERR_READ_ONLY, "reading") if writes else (ERR_ACCESS, "writing")
            raise CallError(code, f"{name}: {state.path} is open for {only} only")
        if state.amode & c.MODE_SEQUENTIAL and where is not SHARED:
            raise CallError(ERR_UNSUPPORTED_OPERATION, f"{name}: MODE_SEQUENTIAL has the shared pointer only")
        if buffer.nbytes % unit:
            raise CallError(ERR_IO, f"{name}: {buffer.nbytes} bytes are no whole elements of {unit} bytes")
        count = buffer.nbytes // unit
        if where is SHARED and together:
            places = self._comm._agree(name, count, state.advance)
        world.kernel.observe()
        if where is OWN:
            position = self._pointer
        elif where is SHARED:
            position = places[self._comm._me] if together else state.advance([count])[0]
        else:
            position = integer(where, AINT)
            if position < 0:
                raise CallError(ERR_ARG, f"{name} at offset {position}")
        done, nbytes = self._accessed(buffer, position, writes)
        if where is OWN:  # behind the last element that was there, as in MPICH
            self._pointer += nbytes // unit
        world.charge_poll()
        if not together or where is SHARED:
            return request_over(world, done)
        departure = self._comm._join(Call(name, "barrier"))
        return request_for(world, departure, departure, done)

    def _accessed(self, buffer: Any, position: int, writes: bool) -> tuple[Any, int]:
        """Access the file; return the function that fills buffer and status, and the number of bytes."""
        number, data = self._state.file.fileno(), b""
        with errors_of_mpi():
            if writes:
                self._view.write(number, position, as_bytes(buffer.pack()).data)
            else:
                data = self._view.read(number, position, buffer.nbytes)

        nbytes = buffer.nbytes if writes else len(data)

        def deliver(status: Status) -> None:
            if not writes:
                buffer.unpack(np.frombuffer(data, np.uint8))
            fill(status, c.ANY_SOURCE, c.ANY_TAG, nbytes)

        return deliver, nbytes

    # The four kinds of methods: blocking, non-blocking, and the two halves of a split collective.

    def _access(self, name: str, where: Any, buf: Any, status: Status | None) -> None:
        self._begin(name, where, buf).Wait(status)

    def _begin_split(self, name: str, where: Any, buf: Any) -> None:
        self._exist()
        if self._split is not None:
            raise CallError(ERR_OTHER, f"{name}_begin before {self._split[0]}_end: one at a time")
        self._split = name, self._begin(name, where, buf)

    def _end_split(self, name: str, _where: Any, _buf: Any, status: Status | None) -> None:
        self._exist()
        if self._split is None or self._split[0] != name:
            raise CallError(ERR_OTHER, f"{name}_end without {name}_begin")
        request, self._split = self._split[1], None
        request.Wait(status)


def _method(name: str, run: Callable[..., Any], pointer: str | None, *, status: bool = False) -> Any:
    """Return a method of `File`, which takes an offset unless it uses a pointer, and perhaps a status."""
    if not status:
        if pointer is None:
            return lambda self, offset, buf: run(self, name, offset, buf)
        return lambda self, buf: run(self, name, pointer, buf)
    if pointer is None:
        return lambda self, offset, buf, status=None: run(self, name, offset, buf, status)
    return lambda self, buf, status=None: run(self, name, pointer, buf, status)


def _add_accesses() -> None:
    pointers = {"_at": None, "_at_all": None, "": OWN, "_all": OWN, "_shared": SHARED, "_ordered": SHARED}
    for (form, pointer), kind in product(pointers.items(), ("Read", "Write")):
        name = kind + form
        setattr(File, name, _method(name, File._access, pointer, status=True))
        if form != "_ordered":
            setattr(File, f"I{name.lower()}", _method(name, File._begin, pointer))
        if form in ("_at_all", "_all", "_ordered"):
            setattr(File, f"{name}_begin", _method(name, File._begin_split, pointer))
            setattr(File, f"{name}_end", _method(name, File._end_split, OWN, status=True))


_add_accesses()
FILE_NULL = File()
