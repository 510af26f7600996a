"""Messages packed by hand: `Datatype.Pack`, `Unpack` and their portable forms.

This room knows flat bytes and layouts. Packed bytes are those that would travel; "external32" is big-endian.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from spawnsim.comm.datatypes import Datatype
from spawnsim.comm.failures import ERR_ARG, ERR_TYPE, CallError, SpecBufferError, Truncated
from spawnsim.comm.layouts import Bytes
from spawnsim.comm.memory import as_bytes, flat
from spawnsim.errors import ParameterError

# Sizes in external32 that differ from this machine's (MPI 4.1, table 14.2).
_EXTERNAL: Final = {"MPI_LONG": "i4", "MPI_UNSIGNED_LONG": "u4", "MPI_WCHAR": "u2"}


def _whole(datatype: Datatype, nbytes: int) -> int:
    """Return how many elements a buffer of `nbytes` holds."""
    extent = datatype.Get_extent()[1]
    if extent <= 0:
        raise ParameterError(f"cannot pack elements of extent {extent}")
    return nbytes // extent


def _room(outbuf: Any, position: int, nbytes: int) -> Bytes:
    """Return the bytes from a position on; they must be `nbytes` at least, and writable."""
    out = as_bytes(flat(outbuf))
    if position < 0 or position + nbytes > len(out):
        raise Truncated(
            message=f"{nbytes} bytes at position {position} do not fit a buffer of {len(out)} bytes"
        )
    if not out.flags.writeable:
        raise SpecBufferError("the packed bytes go to a read-only buffer: pass memory that can be written")
    return out[position : position + nbytes]


def pack(datatype: Datatype, buffers: tuple[Any, Any], position: int) -> int:
    """Append the whole elements in (source, packed)[0] to the packed bytes; return the new position."""
    source = as_bytes(flat(buffers[0]))
    count = _whole(datatype, len(source))
    target = _room(buffers[1], position, count * datatype.size)
    if count:
        target[...] = datatype.wire(source, count)
    return position + len(target)


def unpack(datatype: Datatype, buffers: tuple[Any, Any], position: int) -> int:
    """Take as many elements from (packed, target)[0] as the target holds; return the new position."""
    packed, target = as_bytes(flat(buffers[0])), as_bytes(flat(buffers[1]))
    nbytes = _whole(datatype, len(target)) * datatype.size
    if position + nbytes > len(packed):
        raise Truncated(message=f"{nbytes} bytes are wanted at position {position} of {len(packed)}")
    datatype.live().scatter(_room(buffers[1], 0, len(target)), packed[position : position + nbytes])
    return position + nbytes


def _external(datatype: Datatype, datarep: str) -> np.dtype[Any]:
    """Return the portable form of one element."""
    if datarep != "external32":
        raise CallError(ERR_ARG, f"data representation {datarep!r} is unknown: only 'external32' is")
    if datatype.dtype is None or datatype.dtype.names:
        raise CallError(
            ERR_TYPE, "external32 is offered for predefined types of one element: pack the parts instead"
        )
    return np.dtype(_EXTERNAL.get(datatype.Get_name(), datatype.dtype)).newbyteorder(">")


def external_nbytes(datatype: Datatype, datarep: str, count: int) -> int:
    """Return the bytes of `count` elements in the portable form."""
    return count * _external(datatype, datarep).itemsize


def pack_external(datatype: Datatype, datarep: str, buffers: tuple[Any, Any], position: int) -> int:
    """Append the elements in (source, packed)[0] to the packed bytes in the portable form."""
    form = _external(datatype, datarep)
    source = as_bytes(flat(buffers[0]))
    count = _whole(datatype, len(source))
    target = _room(buffers[1], position, count * form.itemsize)
    if count:
        target[...] = as_bytes(source[: count * datatype.size].view(datatype.dtype or form).astype(form))
    return position + len(target)


def unpack_external(datatype: Datatype, datarep: str, buffers: tuple[Any, Any], position: int) -> int:
    """Take as many elements in the portable form as the target holds."""
    form = _external(datatype, datarep)
    packed, target = as_bytes(flat(buffers[0])), as_bytes(flat(buffers[1]))
    count = _whole(datatype, len(target))
    nbytes = count * form.itemsize
    if position + nbytes > len(packed):
        raise Truncated(message=f"{nbytes} bytes are wanted at position {position} of {len(packed)}")
    values = np.frombuffer(packed[position : position + nbytes].tobytes(), form)
    _room(buffers[1], 0, count * datatype.size)[...] = as_bytes(values.astype(datatype.dtype))
    return position + nbytes
