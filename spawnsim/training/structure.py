"""Which models, and which functions of a model, are equal but for their tensors: what may be computed together.

Two ranks build their models apart, and their losses too: equal objects, not the same. Equal keys mean equal results
from equal tensors. Where that cannot be told, the reason is given, and the model steps alone.
"""

from __future__ import annotations

import functools
import pickle
import types
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import nn

# What nn.Module keeps of itself. Tensors are compared by shape, modules by name; hooks may do anything.
_OWN = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook"}
# Its parameters again, brought up to date in each forward pass.
_OF_RNN = {"_flat_weights", "_flat_weight_refs"}
_HOOKS = {name for name in vars(nn.Module()) if "hook" in name} - _OWN


class Unequal(Exception):
    """Why something cannot be compared."""


def of_model(model: nn.Module) -> Hashable:
    """Return a key of all that a model computes with besides its parameters: classes, attributes, shapes.

    Raises:
        Unequal: it has hooks or buffers, or attributes that cannot be compared.
    """
    parts: list[Hashable] = []
    for name, module in model.named_modules():
        own = vars(module)
        if any(own.get(hooks) for hooks in _HOOKS):
            raise Unequal(f"it has hooks ({name or type(model).__name__})")
        if isinstance(module, nn.LSTM):
            raise Unequal("it has an LSTM, which torch computes for one model at a time")
        if module._buffers:
            raise Unequal(f"it has buffers ({'.'.join(filter(None, [name, next(iter(module._buffers))]))})")
        apart = _OWN | _HOOKS | (_OF_RNN if isinstance(module, nn.RNNBase) else set())
        kept = {key: value for key, value in own.items() if key not in apart}
        parts.append((name, type(module), of_value(kept)))
    shapes = [(name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()]
    return tuple(parts), tuple(shapes)


def of_function(function: Callable[..., Any]) -> Hashable:
    """Return a key of a function: the function itself, or where each rank makes its own, code and what it refers to.

    Raises:
        Unequal: it refers to something that cannot be compared.
    """
    if isinstance(function, functools.partial):
        parts = (function.func, function.args, function.keywords)
        return "partial", of_function(parts[0]), of_value(parts[1]), of_value(parts[2])
    if isinstance(function, types.MethodType):
        return "method", of_function(function.__func__), of_value(function.__self__)
    if isinstance(function, types.FunctionType):
        given = function.__defaults__, function.__kwdefaults__
        if function.__closure__ is None and given == (None, None):
            return function.__code__, id(function.__globals__)
        cells = tuple(map(of_value, references(function)))
        return function.__code__, id(function.__globals__), cells, *map(of_value, given)
    return of_value(function)


def references(function: Callable[..., Any]) -> tuple[Any, ...]:
    """Return the present values of the variables around a function to which it refers.

    Raises:
        Unequal: one of them has no value yet.
    """
    try:
        return tuple(cell.cell_contents for cell in getattr(function, "__closure__", None) or ())
    except ValueError as error:
        raise Unequal("it refers to a variable that has no value yet") from error


def frozen(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that refers to the present values for ever: its own variables are one rank's, and change."""
    if not isinstance(function, types.FunctionType) or not function.__closure__:
        return function
    cells = tuple(map(types.CellType, references(function)))
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def of_value(value: Any) -> Hashable:
    """Return a key that is equal for equal values.

    Raises:
        Unequal: values of this kind cannot be compared.
    """
    if isinstance(value, Mapping):
        return "mapping", tuple((key, of_value(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(of_value(each) for each in value)
    if isinstance(value, nn.Module):
        if next(value.parameters(), None) is not None:
            raise Unequal(f"it refers to a {type(value).__name__} with parameters of its own")
        return of_model(value)
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        return of_function(value)
    if isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)):
        return value
    # Objects that are compared by identity are equal if they hold equal things; tensors are compared by what they hold.
    by_value = "__hash__" in {name for kind in type(value).__mro__[:-1] for name in vars(kind)}
    if by_value and not isinstance(value, torch.Tensor):
        try:
            hash(value)
        except TypeError:
            pass
        else:
            return type(value), value
    try:
        return type(value), pickle.dumps(value)
    except Exception as error:
        raise Unequal(f"it refers to a {type(value).__name__}, which cannot be compared: {error}") from error
