"""Turn what programs record into plain Python values.

This room knows duck types: whatever has `item()` (a numpy scalar, a tensor of one element) is asked for its number,
so no numeric library is imported here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from spawnsim.errors import ParameterError

Scalar = float | int | bool | str | None
INT64 = range(-(2**63), 2**63)


def scalar(value: Any) -> Scalar:
    """Return a value as float, int, bool, str or None; `ParameterError` for anything that is not one value."""
    if value is None or isinstance(value, (bool, float, int, str)):
        return _builtin(value)
    if hasattr(value, "item") and _elements(value) == 1:
        return scalar(value.item())
    raise ParameterError(f"a {type(value).__name__} is not one number, bool or short text")


def _builtin(value: Scalar) -> Scalar:
    # numpy's float64 is a float, and an IntEnum an int: only the exact types have a column format.
    for kind in (bool, float, int, str):
        if isinstance(value, kind):
            return value if type(value) is kind else kind(value)
    return None


def _elements(value: Any) -> int:
    shape = getattr(value, "shape", ())
    return math.prod(shape)


def document(value: Any) -> Any:
    """Return a value as JSON can hold it, in depth; what is not finite becomes None, what is unknown its repr."""
    if isinstance(value, Mapping):
        return {str(name): document(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [document(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(document(each) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"type": type(value).__name__} | document(vars_of(value))
    if value is None or isinstance(value, (bool, int, float, str)):
        plain = _builtin(value)
        return plain if not isinstance(plain, float) or math.isfinite(plain) else None
    if hasattr(value, "tolist"):  # numpy arrays and scalars, tensors
        return document(value.tolist())
    return _named(value)


def _named(value: Any) -> Any:
    """Return an object's repr; where that is an address, its type and its attributes, as far as they are plain."""
    text = repr(value)
    if f" at {hex(id(value))}" not in text:
        return text
    name = getattr(value, "__qualname__", type(value).__qualname__)
    own = getattr(value, "__dict__", {}) if not hasattr(value, "__qualname__") else {}
    plain = {key: each for key, each in own.items() if isinstance(each, (bool, int, float, str, list, tuple))}
    return {"type": name} | document(plain) if plain else name


def vars_of(value: Any) -> dict[str, Any]:
    """Return a dataclass's fields, one level deep, in the order of their definition."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
