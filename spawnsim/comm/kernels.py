"""The arithmetic of MPI's predefined operations, on whole arrays and on single objects.

This room knows numbers. Each array kernel computes `inout = in op inout` in place, with the same choice as MPI's C code
for NaN and signed zeros; each scalar kernel is what object reductions apply to Python objects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from spawnsim.comm.datatypes import BF16

Array = NDArray[Any]
Kernel = Callable[[Array, Array], None]


def _widen(bits: Array) -> NDArray[np.float32]:
    """Return bfloat16 storage as float32, exactly."""
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _narrow(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return float32 rounded to bfloat16, to nearest and ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _arithmetic(ufunc: np.ufunc) -> Kernel:
    """Return a kernel for a numpy ufunc; bfloat16 is computed in float32 and rounded once."""

    def kernel(first: Array, inout: Array) -> None:
        if inout.dtype == BF16:
            inout.view(np.uint16)[...] = _narrow(ufunc(_widen(first), _widen(inout)))
        else:
            ufunc(first, inout, out=inout)

    return kernel


def _extremum(beats: np.ufunc) -> Kernel:
    """Return a kernel that takes the incoming value unless the local one beats it."""

    def kernel(first: Array, inout: Array) -> None:
        wide = inout.dtype == BF16
        local, incoming = (_widen(inout), _widen(first)) if wide else (inout, first)
        np.copyto(inout, first, where=~beats(local, incoming))

    return kernel


def _located(beats: np.ufunc) -> Kernel:
    """Return a kernel for (value, index) pairs; the lowest index wins a tie."""

    def kernel(first: Array, inout: Array) -> None:
        tie = first["value"] == inout["value"]
        lowest = np.minimum(first["index"], inout["index"])
        np.copyto(inout, first, where=beats(first["value"], inout["value"]))
        np.copyto(inout["index"], lowest, where=tie)

    return kernel


def _take(first: Array, inout: Array) -> None:
    inout[...] = first


def _keep(first: Array, inout: Array) -> None:
    pass


ARRAY: Final[dict[str, Kernel]] = {
    "SUM": _arithmetic(np.add), "PROD": _arithmetic(np.multiply),
    "MAX": _extremum(np.greater), "MIN": _extremum(np.less),
    "LAND": _arithmetic(np.logical_and), "LOR": _arithmetic(np.logical_or), "LXOR": _arithmetic(np.logical_xor),
    "BAND": _arithmetic(np.bitwise_and), "BOR": _arithmetic(np.bitwise_or), "BXOR": _arithmetic(np.bitwise_xor),
    "MAXLOC": _located(np.greater), "MINLOC": _located(np.less),
    "REPLACE": _take, "NO_OP": _keep,
}  # fmt: skip

_NUMBERS = frozenset({"integer", "fortran", "float"})
FAMILIES: Final[dict[str, frozenset[str]]] = (
    dict.fromkeys(("SUM", "PROD"), _NUMBERS | {"complex"})
    | dict.fromkeys(("MAX", "MIN"), _NUMBERS)
    | dict.fromkeys(("LAND", "LOR", "LXOR"), frozenset({"integer", "logical"}))
    | dict.fromkeys(("BAND", "BOR", "BXOR"), frozenset({"integer", "fortran", "byte"}))
    | dict.fromkeys(("MAXLOC", "MINLOC"), frozenset({"pair"}))
)
"""Which families of datatypes an operation takes (MPI 4.1, section 6.9.2)."""


def _best(x: Any, y: Any, better: bool) -> Any:
    """Return the better of two (value, index) pairs; `better` says whether x's value beats y's."""
    if better:
        return x[0], x[1]
    return (x[0], min(x[1], y[1])) if x[0] == y[0] else (y[0], y[1])


SCALAR: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "SUM": lambda x, y: x + y, "PROD": lambda x, y: x * y,
    "MAX": lambda x, y: y if y > x else x, "MIN": lambda x, y: y if y < x else x,
    "LAND": lambda x, y: bool(x) & bool(y), "LOR": lambda x, y: bool(x) | bool(y),
    "LXOR": lambda x, y: bool(x) ^ bool(y),
    "BAND": lambda x, y: x & y, "BOR": lambda x, y: x | y, "BXOR": lambda x, y: x ^ y,
    "MAXLOC": lambda x, y: _best(x, y, x[0] > y[0]), "MINLOC": lambda x, y: _best(x, y, x[0] < y[0]),
    "REPLACE": lambda x, y: y, "NO_OP": lambda x, y: x,
}  # fmt: skip
