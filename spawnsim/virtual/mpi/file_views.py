"""Where the data of an MPI file lie: a rank's view, as byte ranges of the file, and reads and writes over it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from spawnsim.comm import failures
from spawnsim.comm.datatypes import BYTE, Datatype
from spawnsim.comm.failures import ERR_ARG, ERR_IO, CallError

CODES = {
    errno.ENOENT: failures.ERR_NO_SUCH_FILE, errno.EEXIST: failures.ERR_FILE_EXISTS, errno.EACCES: failures.ERR_ACCESS,
    errno.EPERM: failures.ERR_ACCESS, errno.EROFS: failures.ERR_READ_ONLY, errno.EISDIR: failures.ERR_BAD_FILE,
    errno.ENOTDIR: failures.ERR_BAD_FILE, errno.ENAMETOOLONG: failures.ERR_BAD_FILE,
    errno.ENOSPC: failures.ERR_NO_SPACE, errno.EDQUOT: failures.ERR_QUOTA, errno.ETXTBSY: failures.ERR_FILE_IN_USE,
}  # fmt: skip


@contextmanager
def errors_of_mpi() -> Iterator[None]:
    """Raise an error of the operating system as an MPI error."""
    try:
        yield
    except OSError as error:
        raise CallError(CODES.get(error.errno or 0, ERR_IO), str(error)) from error


@dataclass(frozen=True)
class View:
    """The bytes of a file that a rank sees: tiles of `filetype` from byte `disp` on, counted in elements of `etype`."""

    disp: int = 0
    etype: Datatype = BYTE
    filetype: Datatype = BYTE
    datarep: str = "native"

    def check(self) -> None:
        """Raise an MPI error unless the types fit each other."""
        etype, filetype = self.etype.live(), self.filetype.live()
        if self.disp < 0 or not etype.size or filetype.size % etype.size:
            raise CallError(
                ERR_ARG,
                f"Set_view: a file type of {filetype.size} bytes, an element type of {etype.size} bytes, and "
                f"displacement {self.disp}: give a displacement of at least 0, and a file type of whole elements",
            )
        if self.datarep not in ("native", "internal"):
            raise CallError(
                failures.ERR_UNSUPPORTED_DATAREP,
                f"Set_view: data representation {self.datarep!r}: give 'native'",
            )

    def kept(self) -> View:
        """Return a view that the program's freeing of the types does not change."""
        etype, filetype = (each if each.is_predefined else each.Dup() for each in (self.etype, self.filetype))
        return View(self.disp, etype, filetype, self.datarep)

    @property
    def unit(self) -> int:
        """Bytes of one element."""
        return self.etype.live().size

    def pieces(self, position: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield the byte ranges of the file, as (start, length), that hold `nbytes` from element `position` on."""
        layout, skip = self.filetype.live(), position * self.unit
        if layout.dense:
            yield self.disp + skip, nbytes
            return
        tile, skip = divmod(skip, layout.size)
        blocks = list(zip(layout.offsets.tolist(), layout.lengths.tolist(), strict=True))
        while nbytes:
            for offset, length in blocks:
                if skip >= length:
                    skip -= length
                    continue
                taken = min(length - skip, nbytes)
                if taken:
                    yield self.disp + tile * layout.extent + offset + skip, taken
                nbytes, skip = nbytes - taken, 0
            tile += 1

    def place(self, position: int) -> int:
        """Return the byte of the file at which an element lies."""
        return next(self.pieces(position, self.unit))[0]

    def position(self, nbytes: int) -> int:
        """Return the number of whole elements that a file of `nbytes` has in this view."""
        layout, left = self.filetype.live(), max(0, nbytes - self.disp)
        if layout.dense or not layout.size:
            return left // self.unit
        tiles, left = divmod(left, layout.extent)
        ends = zip(layout.offsets.tolist(), layout.lengths.tolist(), strict=True)
        seen: int = tiles * layout.size + sum(min(max(0, left - at), length) for at, length in ends)
        return seen // self.unit

    def read(self, file: int, position: int, nbytes: int) -> bytes:
        """Return bytes from element `position` on, fewer where the file ends."""
        found = []
        for start, length in self.pieces(position, nbytes):
            piece = os.pread(file, length, start)
            found.append(piece)
            if len(piece) < length:
                break
        return b"".join(found)

    def write(self, file: int, position: int, data: Any) -> None:
        """Write bytes from element `position` on."""
        done = 0
        for start, length in self.pieces(position, len(data)):
            piece = data[done : done + length]
            while len(piece):
                written = os.pwrite(file, piece, start)
                piece, start = piece[written:], start + written
            done += length
