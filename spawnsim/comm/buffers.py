"""The door through which every message comes: `as_buffer` makes any buffer specification one object.

This room decides who reads a specification. A plain numpy array takes the short way, under a microsecond.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import numpy as np

from spawnsim.comm.constants import IN_PLACE
from spawnsim.comm.failures import SpecBufferError
from spawnsim.comm.predefined import BY_DTYPE
from spawnsim.comm.regions import Buffer
from spawnsim.comm.specs import general, nothing, simple_parts, typed_array
from spawnsim.comm.vectors import Vector, as_vector

__all__ = ["Buffer", "Vector", "as_buffer"]


@overload
def as_buffer(
    spec: Any, *, vector: Literal[False] = False, blocks: int = 1, types: bool = False, writable: bool = False
) -> Buffer: ...


@overload
def as_buffer(
    spec: Any, *, vector: Literal[True], blocks: int = 1, types: bool = False, writable: bool = False
) -> Vector: ...


@overload
def as_buffer(
    spec: Any, *, vector: bool, blocks: int = 1, types: bool = False, writable: bool = False
) -> Buffer | Vector: ...


def as_buffer(
    spec: Any, *, vector: bool = False, blocks: int = 1, types: bool = False, writable: bool = False
) -> Buffer | Vector:
    """Return the `Buffer` of a specification, or with `vector` the `vectors.Vector` of `blocks` blocks.

    A specification is memory (numpy array, torch CPU tensor, bytes, memoryview, array.array), or [memory, count],
    [memory, type], [memory, count, type], [memory, (count, displacement), type], [memory, count, displacement, type];
    a type is a `Datatype` or a typecode. None and `IN_PLACE` are empty buffers; the latter has `in_place` set.
    Without a count it is what the memory holds, divided by `blocks`. `types` asks for the `w` form: one type per block,
    displacements in bytes. `writable` refuses read-only memory at once.

    Raises `SpecTypeError`, `SpecBufferError`, `UnknownTypeError` or `ParameterError`, which are also the TypeError,
    BufferError, KeyError and ValueError of mpi4py.
    """
    if type(spec) is np.ndarray and blocks < 2 and not vector:
        datatype = BY_DTYPE.get(spec.dtype)
        if datatype is not None and spec.flags.c_contiguous and (not writable or spec.flags.writeable):
            return Buffer(spec, datatype, spec.size)
    if vector:
        return as_vector(spec, blocks, types=types, writable=writable)
    if spec is None or spec is IN_PLACE:
        return nothing(spec is IN_PLACE)
    buffer = typed_array(spec) if blocks < 2 and type(spec) is list else None
    if buffer is None:
        buffer = general(*simple_parts(spec), blocks=blocks)
    if writable and not buffer.writable:
        raise SpecBufferError("the receiving buffer is read-only: pass memory that can be written")
    return buffer
