"""Which models, and which functions of a model, are equal but for their tensors: what may be computed together.

Two ranks build their models apart, and their losses too: equal objects, not the same. Equal keys mean equal results
from equal tensors. Where that cannot be told, the reason is given, and the model steps alone.
"""

from __future__ import annotations

import dis
import functools
import pickle
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import nn

# What nn.Module keeps of itself. Tensors are compared by shape, modules by name; hooks may do anything.
_OWN = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook"}
# Its parameters again, brought up to date in each forward pass.
_OF_RNN = {"_flat_weights", "_flat_weight_refs"}
_HOOKS = {name for name in vars(nn.Module()) if "hook" in name} - _OWN
# What these packages define is taken to compute the same at each call.
_LIBRARIES = {
    "torch",
    "spawnsim",
    "math",
    "numpy",
    "builtins",
    "functools",
    "itertools",
    "operator",
    "typing",
    "enum",
}
_CONSTANTS = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.Size, type(None))


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


class Globals:
    """The variables outside of a function and of a model's classes that they read, and what these held at first.

    Those of the functions that they call are among them, and so are values that others may change. A record of a call
    is right as long as they are `unchanged`, besides what the call is given.

    Raises:
        Unequal: one of them holds something that may change unnoticed, such as a list.
    """

    def __init__(self, function: Callable[..., Any], model: nn.Module) -> None:
        self._variables: dict[tuple[int, str], tuple[Callable[[], Any], Any, int]] = {}
        self._seen: set[Any] = set()
        self._visit(function)
        for module in model.modules():
            self._visit_class(type(module))
            for value in vars(module).values():
                # The model is a copy, whose values nobody else changes; but what their classes read is not.
                self._visit_class(type(value))

    def unchanged(self) -> bool:
        """Return whether all hold what they held."""
        return all(
            read() is value and (version < 0 or value._version == version)
            for read, value, version in self._variables.values()
        )

    def _visit(self, value: Any) -> None:
        if isinstance(value, types.FunctionType):
            self._visit_function(value)
        elif isinstance(value, types.MethodType):
            self._visit(value.__func__)
            self._visit(value.__self__)
        elif isinstance(value, functools.partial):
            for each in (value.func, *value.args, *value.keywords.values()):
                self._visit(each)
        elif isinstance(value, type):
            self._visit_class(value)
        elif isinstance(value, tuple):
            for each in value:
                self._visit(each)
        elif isinstance(value, nn.Module):
            for each in value.modules():
                self._require(_of_library(type(each)), type(each))
        else:
            fixed = isinstance(value, _CONSTANTS) or _is_watched(value)
            called = callable(value) or isinstance(value, types.ModuleType)
            self._require(fixed or (called and _of_library(value)), type(value))

    @staticmethod
    def _require(stays: bool, kind: type) -> None:
        if not stays:
            raise Unequal(f"it refers to a {kind.__name__}, which may change")

    def _visit_class(self, kind: type) -> None:
        """Visit the methods of a class and of its bases. How its objects are made does not matter: they are there."""
        for each in kind.__mro__:
            if each in self._seen or _of_library(each):
                continue
            self._seen.add(each)
            for name, value in vars(each).items():
                method = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                if isinstance(method, types.FunctionType) and name != "__init__":
                    self._visit_function(method)

    def _visit_function(self, function: types.FunctionType) -> None:
        if function in self._seen or _of_library(function):
            return
        self._seen.add(function)
        for each in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._visit(each)
        references(function)  # each has a value
        for number, cell in enumerate(function.__closure__ or ()):
            self._note((id(function), str(number)), functools.partial(getattr, cell, "cell_contents", None))
        where = function.__globals__
        for each in _instructions(function.__code__):
            if each.opname == "IMPORT_NAME":
                self._require(_library(each.argval), types.ModuleType)
            elif each.opname == "LOAD_GLOBAL" and each.argval in where:
                self._note((id(where), each.argval), functools.partial(where.get, each.argval))

    def _note(self, key: tuple[int, str], read: Callable[[], Any]) -> None:
        if key not in self._variables:
            value = read()
            self._variables[key] = read, value, value._version if _is_watched(value) else -1
            self._visit(value)


def _is_watched(value: Any) -> bool:
    """Return whether a value is a tensor that counts how often it was changed."""
    return type(value) in (torch.Tensor, nn.Parameter) and not value.is_inference()


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    """Yield what some code does, and what the functions do that it makes."""
    yield from dis.get_instructions(code)
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _instructions(each)


def _of_library(value: Any) -> bool:
    """Return whether a module, a class or a function is one of a library's."""
    if isinstance(value, types.ModuleType):
        return _library(value.__name__)
    return _library(getattr(value, "__module__", None) or type(value).__module__)


def _library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


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
