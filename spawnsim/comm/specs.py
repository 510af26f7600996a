"""The grammar of buffer specifications: `array`, `[array, type]`, `[array, count, type]` and their like.

This room takes apart what a user passed, with mpi4py's rules, and finds the bytes that it means. Errors are also the
TypeError, ValueError, KeyError or BufferError that mpi4py raises.
"""

from __future__ import annotations

from operator import index
from typing import Any

import numpy as np

from spawnsim.comm.constants import BOTTOM
from spawnsim.comm.datatypes import Datatype
from spawnsim.comm.failures import ERR_TYPE, CallError, SpecBufferError, SpecTypeError, UnknownTypeError
from spawnsim.comm.memory import Unbounded, as_bytes, at_address, flat
from spawnsim.comm.predefined import BY_DTYPE, BYTE, DATATYPE_NULL, fromcode
from spawnsim.comm.regions import Array, Buffer
from spawnsim.errors import ParameterError


def nothing(in_place: bool = False) -> Buffer:
    """Return the buffer that holds nothing: of None and, marked as such, of `IN_PLACE`."""
    new = Buffer(np.zeros(0, np.uint8), BYTE, 0)
    new.in_place = in_place
    return new


def typed_array(spec: list[Any]) -> Buffer | None:
    """Return the buffer of [array, its own datatype], the most common list; None for all others."""
    if len(spec) != 2 or type(spec[0]) is not np.ndarray or not isinstance(spec[1], Datatype):
        return None
    array, datatype = spec
    if datatype.dtype is not array.dtype or not datatype.is_predefined or not array.flags.c_contiguous:
        return None
    return Buffer(array, datatype, array.size)


def _is_type(item: Any) -> bool:
    return isinstance(item, (Datatype, str))


def simple_parts(spec: Any) -> tuple[Any, Any, Any, Any]:
    """Return (memory, count, displacement, type) of a specification; what is not given is None."""
    if not isinstance(spec, (list, tuple)):
        return spec, None, None, None
    memory, count, displacement, kind = split(spec)
    if isinstance(count, (list, tuple)):
        count, displacement = count
    return memory, count, displacement, kind


def split(spec: Any) -> tuple[Any, Any, Any, Any]:
    """Return (memory, count or counts, displacement or displacements, type) of a list or tuple."""
    if len(spec) == 2:
        return (spec[0], None, None, spec[1]) if _is_type(spec[1]) else (spec[0], spec[1], None, None)
    if len(spec) == 3:
        return spec[0], spec[1], None, spec[2]
    if len(spec) == 4:
        return spec[0], spec[1], spec[2], spec[3]
    raise ParameterError(
        f"a message of {len(spec)} items: expecting 2 to 4 (memory, count, displacement, type)"
    )


def datatype_of(memory: Array | None, kind: Any) -> Datatype:
    """Return the datatype that was named, or the one of the array's dtype; it must be committed."""
    if isinstance(kind, str):
        return fromcode(kind)
    if kind is not None:
        if not isinstance(kind, Datatype):
            raise SpecTypeError(f"{kind!r} is no datatype: pass a Datatype or a typecode such as 'd'")
        if kind and not kind.committed:
            raise CallError(ERR_TYPE, "the datatype has not been committed: call its Commit() first")
        return kind
    if memory is None:
        raise SpecTypeError("memory without a type: pass [memory, count, datatype]")
    found = BY_DTYPE.get(memory.dtype)
    if found is None:
        if not memory.dtype.isnative:
            raise SpecBufferError(f"dtype {memory.dtype} has a foreign byte order: convert the array first")
        raise UnknownTypeError(
            f"cannot map dtype {memory.dtype} to an MPI datatype: pass [array, count, datatype]"
        )
    return found


def general(obj: Any, count: Any, displacement: Any, kind: Any, *, blocks: int) -> Buffer:
    """Return the buffer of a specification that has been taken apart."""
    if obj is None or obj is BOTTOM:
        return _absolute(obj, 0 if count is None else _number(count), kind, blocks)
    memory = flat(obj)
    datatype = datatype_of(memory, kind)
    nbytes = memory.nbytes
    start = _start(displacement, datatype, nbytes)
    if count is None:
        number = infer(nbytes - start, datatype, max(blocks, 1))
    else:
        number = _number(count)
    return locate(memory, datatype, start, (number, max(blocks, 1)))


def _number(count: Any) -> int:
    number = index(count)
    if number < 0:
        raise ParameterError(f"negative count {number}")
    return number


def _start(displacement: Any, datatype: Datatype, nbytes: int) -> int:
    """Return the byte at which a message with a displacement (in elements) starts."""
    elements = 0 if displacement is None else index(displacement)
    if elements < 0:
        raise ParameterError(f"negative displacement {elements}")
    start = elements * datatype.Get_extent()[1] if elements else 0
    if start > nbytes and datatype.size:
        raise ParameterError(f"displacement {elements} is out of bounds: the buffer has {nbytes} bytes")
    return start


def infer(nbytes: int, datatype: Datatype, blocks: int) -> int:
    """Return how many elements per block a buffer of `nbytes` holds."""
    if nbytes == 0:
        return 0
    extent = datatype.Get_extent()[1] if datatype else 0
    if extent <= 0:
        raise ParameterError("cannot infer a count: the datatype is null or has no extent; pass the count")
    if nbytes % extent:
        raise ParameterError(f"cannot infer a count: {nbytes} bytes are no multiple of the extent, {extent}")
    if nbytes // extent % blocks:
        raise ParameterError(
            f"cannot infer a count: {nbytes // extent} elements do not divide into {blocks} blocks"
        )
    return nbytes // extent // blocks


def locate(memory: Array, datatype: Datatype, start: int, shape: tuple[int, int]) -> Buffer:
    """Return the buffer of (count, blocks) elements from byte `start` of a flat array, within its bounds."""
    count, blocks = shape
    total = count * blocks
    if not total:
        return Buffer(memory[:0] if datatype.dtype == memory.dtype else _empty(datatype), datatype, 0, blocks)
    layout = datatype.live()
    if not layout.size:  # it touches nothing, wherever it lies
        return Buffer(_empty(datatype), datatype, count, blocks)
    low, high = layout.span(total)
    if datatype.is_predefined:
        high = total * layout.extent
    if isinstance(memory, Unbounded):
        memory, start = memory.reaching(start + low, start + high), -low
    if start + low < 0 or start + high > memory.nbytes:
        raise ParameterError(
            f"{total} elements of {datatype.Get_name() or 'a derived type'} span bytes {start + low} to "
            f"{start + high}, but the buffer has {memory.nbytes}: pass a longer buffer or a smaller count"
        )
    if datatype.dtype is None or not datatype.is_predefined:
        new = Buffer(as_bytes(memory), datatype, count, blocks)
        new.origin = -start
        return new
    if memory.dtype == datatype.dtype and start % memory.itemsize == 0:
        first = start // memory.itemsize
        return Buffer(memory[first : first + total], datatype, count, blocks)
    return Buffer(as_bytes(memory)[start : start + high].view(datatype.dtype), datatype, count, blocks)


def _empty(datatype: Datatype) -> Array:
    predefined = datatype.is_predefined and datatype.dtype is not None
    return np.zeros(0, datatype.dtype if predefined else np.uint8)


def _absolute(obj: Any, count: int, kind: Any, blocks: int) -> Buffer:
    """Return the buffer of a datatype whose displacements are addresses (`BOTTOM`)."""
    if count and obj is None:
        raise ParameterError(f"the buffer is None but the count is {count}")
    datatype = datatype_of(None, kind) if kind is not None else BYTE
    return at(0, datatype, count, max(blocks, 1))


def at(address: int, datatype: Datatype, count: int, blocks: int = 1) -> Buffer:
    """Return the buffer of a datatype whose displacements count from an address."""
    if not count * blocks:
        return Buffer(_empty(datatype if datatype else BYTE), datatype or DATATYPE_NULL, 0, blocks)
    low, high = datatype.live().span(count * blocks)
    new = Buffer(at_address(address + low, high - low), datatype, count, blocks)
    new.origin = low
    return new
