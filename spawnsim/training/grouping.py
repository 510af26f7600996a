"""Keys of models and functions: calls with equal keys can execute as one.

Ranks build models and losses separately, so the objects are equal but not identical. A key is computed at a rank's
first call; later calls compare identity alone. Knows objects; must not know when or how calls execute.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

OWN = {
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_is_full_backward_hook",
    "training",
}
OF_RNN = {"_flat_weights", "_flat_weight_refs"}  # these repeat parameters
HOOKS = {name for name in vars(nn.Module()) if "hook" in name} - OWN
CALLED = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
CONSTANTS = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout, Enum)
OBJECTS = (type, types.ModuleType, types.BuiltinFunctionType, types.MethodWrapperType, np.dtype)
COMPARED_NBYTES = 1 << 20  # size of a tensor or an array; larger ones are equal to themselves alone
DEEPEST = 8  # levels of nested values
Parts = dict[str, Hashable]


class Ungroupable(Exception):
    """The reason why a model or a function steps alone."""


class Same:
    """An object as part of a key: equal to itself alone."""

    __slots__ = ("of",)

    def __init__(self, of: Any) -> None:
        self.of = of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.of is other.of

    def __hash__(self) -> int:
        return id(self.of)


def parts_of_model(model: nn.Module) -> Parts:
    """Return the structure of a model by name: classes, attributes that are not tensors, shapes and dtypes.

    Raises:
        Ungroupable: it has hooks or is a TorchScript module.
    """
    hooked = hooks_of(model)
    if hooked:
        raise Ungroupable(f"it has hooks ({hooked})")
    parts: Parts = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise Ungroupable("it is a TorchScript module")
        place = f"{name}." if name else ""
        parts[f"the class of {name or 'the model'}"] = class_of(module)
        apart = OWN | HOOKS | (OF_RNN if isinstance(module, nn.RNNBase) else set())
        for key, value in vars(module).items():
            if key not in apart:
                parts[f"the attribute {place}{key} of the model"] = key_of(value)
    seen: dict[int, int] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        number = seen.setdefault(id(p), len(seen))
        parts[f"the parameter {name}"] = number, p.shape, p.dtype, p.device, p.requires_grad
    for name, each in model.named_buffers(remove_duplicate=False):
        parts[f"the buffer {name}"] = (
            seen.setdefault(id(each), len(seen)),
            each.shape,
            each.dtype,
            each.device,
        )
    return parts


def class_of(module: nn.Module) -> Hashable:
    """Return the class of a module, or base and parametrizations of a class that torch created for this module."""
    kind: Any = type(module)
    if kind.__module__ != parametrize.__name__ or not parametrize.is_parametrized(module):
        found: Hashable = kind
        return found
    return kind.__mro__[1], *getattr(module, "parametrizations", ())


def hooks_of(model: nn.Module) -> str:
    """Return the part of a model that has hooks which its calls run; "" if no part has."""
    if torch.nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
        return "of all modules"
    for name, module in model.named_modules():
        if any(vars(module)[hooks] for hooks in CALLED):
            return name or type(model).__name__
    return next(
        (name for name, p in model.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks),
        "",
    )


def parts_of_function(function: Callable[..., Any]) -> Parts:
    """Return the parts of a function by name: code, closure, defaults. Globals count as constants."""
    if isinstance(function, functools.partial):
        own = {f"argument {number} of the partial": key_of(each) for number, each in enumerate(function.args)}
        own |= {
            f"the argument {name} of the partial": key_of(each) for name, each in function.keywords.items()
        }
        return parts_of_function(function.func) | own
    if isinstance(function, types.MethodType):
        return parts_of_function(function.__func__) | {"the object of the method": key_of(function.__self__)}
    if not isinstance(function, types.FunctionType):
        return {"the function": key_of(function)}
    parts: Parts = {"the code of the function": (function.__code__, id(function.__globals__))}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        parts[f"the variable {name} around the function"] = key_of(_content(cell))
    for number, value in enumerate(function.__defaults__ or ()):
        parts[f"default {number} of the function"] = key_of(value)
    for name, value in (function.__kwdefaults__ or {}).items():
        parts[f"the default of {name}"] = key_of(value)
    return parts


def globals_of(function: Callable[..., Any]) -> Parts:
    """Return the values of the global variables that a function names, to report which one has changed."""
    while isinstance(function, (functools.partial, types.MethodType)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    if not isinstance(function, types.FunctionType):
        return {}
    named = function.__globals__
    return {f"the global {name}": key_of(named[name]) for name in function.__code__.co_names if name in named}


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has no value yet
        return cell


def key_of(value: Any, depth: int = 0) -> Hashable:
    """Return a key that is equal for equal plain values; other objects are equal to themselves alone."""
    kind: Any = type(value)
    if isinstance(value, (float, complex)):
        return kind, repr(value)  # -0.0 equals 0.0, and NaN does not equal itself
    if isinstance(value, CONSTANTS):
        return kind, value
    if isinstance(value, OBJECTS):
        return value
    if depth > DEEPEST:
        return Same(value)
    if isinstance(value, (Tensor, np.ndarray)):
        return _of_numbers(value)
    if isinstance(value, nn.Module):
        return Same(value) if next(value.parameters(), None) is not None else tuple(_of_module(value))
    if isinstance(value, Mapping):
        return kind, tuple((key_of(key, depth + 1), key_of(each, depth + 1)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return kind, tuple(key_of(each, depth + 1) for each in value)
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        return tuple(parts_of_function(value).items()) if depth < DEEPEST else Same(value)
    own = getattr(value, "__dict__", None)
    if kind.__eq__ is not object.__eq__ and kind.__hash__ not in (None, object.__hash__):
        return kind, value
    library = kind.__module__.partition(".")[0] in ("torch", "numpy", "spawnsim")
    if isinstance(own, dict) and (not library or dataclasses.is_dataclass(kind)):
        return kind, tuple((name, key_of(each, depth + 1)) for name, each in own.items())
    return Same(value)


def _of_module(module: nn.Module) -> Iterator[tuple[str, Hashable]]:
    try:
        yield from parts_of_model(module).items()
    except Ungroupable:
        yield "", Same(module)
    for name, each in module.named_buffers():
        yield name, key_of(each)


def _of_numbers(value: Any) -> Hashable:
    """Return a key of a tensor or an array: a digest of the numbers if it is small, else its identity."""
    if isinstance(value, Tensor):
        if value.requires_grad or value.nbytes > COMPARED_NBYTES or value.device.type != "cpu":
            return Same(value)
        if value.layout != torch.strided or value.is_quantized:
            return Same(value)
        numbers: Any = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    elif value.dtype.hasobject or value.nbytes > COMPARED_NBYTES:
        return Same(value)
    else:
        numbers = np.ascontiguousarray(value)
    digest = hashlib.blake2b(numbers.data if numbers.size else b"", digest_size=16).digest()
    return type(value), str(value.dtype), tuple(value.shape), digest
