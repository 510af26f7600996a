"""Which models, and which functions of a model, are equal but for their tensors: what may be computed together.

Two ranks build their models apart, and their losses too: equal objects, not the same. Equal keys mean equal results
from equal tensors. Where that cannot be told, the reason is given, and the model steps alone.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import operator
import pickle
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from enum import Enum
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

# What nn.Module keeps of itself. Tensors are compared by shape, modules by name; hooks may do anything.
_OWN = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook"}
# Its parameters again, brought up to date in each forward pass.
_OF_RNN = {"_flat_weights", "_flat_weight_refs"}
_HOOKS = {name for name in vars(nn.Module()) if "hook" in name} - _OWN
_CHANGED = ("running_mean", "running_var")  # buffers of torch's own normalizations
KEPT_BY_TORCH = _OWN | _HOOKS | _OF_RNN
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
    "abc",
    "dataclasses",
}
# Of these classes alone: objects of those that inherit from them have attributes.
CONSTANTS = {bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None)}
_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
# What a deep copy does not copy.
_SHARED = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, Enum)
OWN_VARIABLES = "__own_variables__"  # among those of a function that is a copy: nobody else has them
COPIED_NBYTES = 1 << 20  # of a tensor or an array; larger ones are taken for data, and not copied
_GROUPS = (list, tuple, set, frozenset)
_MAKERS = {"__init__", "__new__"}
# By which a function reads what is not seen in it: of Python, and of tensors.
READERS = {"eval", "exec", "globals", "open", "__import__"}
_TENSOR_READERS = {"data_ptr", "numpy", "storage_offset", "tolist"}
LOADS_OF_VARIABLES = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
LOADS_OF_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"}


class Unequal(Exception):
    """Why something cannot be compared."""


def of_model(model: nn.Module) -> Hashable:
    """Return a key of all that a model computes with besides its parameters: classes, attributes, shapes.

    Raises:
        Unequal: it has hooks, buffers that a forward pass changes, or attributes that cannot be compared.
    """
    parts: list[Hashable] = []
    for name, module in model.named_modules():
        own = vars(module)
        if any(own.get(hooks) for hooks in _HOOKS):
            raise Unequal(f"it has hooks ({name or type(model).__name__})")
        changed = next((each for each in _CHANGED if module._buffers.get(each) is not None), None)
        if changed is not None:
            raise Unequal(f"its forward pass changes buffers ({'.'.join(filter(None, [name, changed]))})")
        apart = _OWN | _HOOKS | (_OF_RNN if isinstance(module, nn.RNNBase) else set())
        kept = {key: value for key, value in own.items() if key not in apart}
        kept |= {key: value for key, value in module._buffers.items() if value is not None}
        parts.append((name, type(module), of_value(kept)))
    shapes = [(name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()]
    return tuple(parts), tuple(shapes)


def is_trained(value: Any) -> bool:
    """Return whether it is a module that has parameters."""
    return isinstance(value, nn.Module) and next(value.parameters(), None) is not None


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


class Globals:
    """What a function and a model's classes read besides what they are given, and what all this was at first.

    Variables outside of them, attributes of classes and of functions, and those of the functions that they call. A
    record of a call is right as long as all are `unchanged`.

    Raises:
        Unequal: one of them is something that may change unnoticed, such as a list.
    """

    def __init__(self, function: Callable[..., Any], model: nn.Module) -> None:
        self._reads: list[Callable[[], Iterable[Any]]] = []
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._seen: dict[tuple[str, int], Any] = {}  # kept, so that no identity comes again
        self._watch(lambda: (torch.get_default_dtype(),))
        self._own = set(map(id, model.modules()))
        self._visit_copy(function)
        self._visit_copy(model)
        self._held = self._now()

    def unchanged(self) -> bool:
        """Return whether all are what they were."""
        try:
            now = self._now()
        except Unequal:  # a variable has no value any more
            return False
        same = len(now) == len(self._held) and all(map(operator.is_, now, self._held))
        return same and all(tensor._version == version for tensor, version in self._versions)

    def _now(self) -> list[Any]:
        return [*chain.from_iterable([read() for read in self._reads])]

    def _watch(self, read: Callable[[], Iterable[Any]]) -> None:
        """Compare what is read from now on, and visit it."""
        self._reads.append(read)
        for value in read():
            self._visit(value)

    def _is_new(self, value: Any, how: str) -> bool:
        """Return whether a value was not yet seen in this way."""
        known = (how, id(value)) in self._seen
        self._seen[how, id(value)] = value
        return not known

    def _visit(self, value: Any) -> None:
        """Visit what others may change, too."""
        if type(value) in CONSTANTS or not self._is_new(value, "value"):
            return
        if isinstance(value, types.FunctionType):
            self._visit_function(value)
        elif isinstance(value, functools.partial):
            self._watch(lambda: (value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, type):
            self._visit_class(value)
            for kind in value.__mro__:  # it may be called
                self._visit_attributes(kind, _MAKERS)
            for member in value if issubclass(value, Enum) else ():
                self._visit(member)
        elif isinstance(value, Enum):
            self._visit_class(type(value))
            self._watch(vars(value).values)
        elif type(value) in (torch.Tensor, nn.Parameter) and not value.is_inference():
            self._versions.append((value, value._version))
        elif isinstance(value, tuple):
            self._visit_class(type(value))
            for each in value:
                self._visit(each)
        elif isinstance(value, nn.Module):
            self._require(of_library(type(value)), value)
            self._reads.append(functools.partial(_contents, value))
            for each in filter(callable, _contents(value)):
                self._visit(each)
        elif isinstance(value, _METHODS):
            self._visit(getattr(value, "__func__", None))
            self._visit(value.__self__)
        else:
            self._require(
                (callable(value) or isinstance(value, types.ModuleType)) and of_library(value), value
            )

    def _visit_copy(self, value: Any) -> None:
        """Visit what only the copies of model and function have: nobody changes it, but classes are not their own."""
        if isinstance(
            value, np.ndarray
        ):  # no operation of torch: what follows from it is not seen in a record
            self._require(value.nbytes <= COPIED_NBYTES, value)
        if isinstance(value, (torch.Tensor, np.ndarray)) or not self._is_new(value, "copy"):
            return
        if isinstance(value, types.FunctionType) and value.__globals__.get(OWN_VARIABLES):
            around = (*references(value), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
            names = map(value.__globals__.get, self._names_in(value))
            for each in (*around, *vars(value).values(), *names):
                self._visit_copy(each)
        elif isinstance(value, functools.partial):
            for each in (value.func, *value.args, *value.keywords.values()):
                self._visit_copy(each)
        elif isinstance(value, _SHARED) or hasattr(type(value), "__deepcopy__") or self._is_teacher(value):
            self._visit(value)
        elif isinstance(value, types.MethodType):
            self._visit_copy(value.__func__)
            self._visit_copy(value.__self__)
        else:
            self._visit_class(type(value))
            inner = value.values() if isinstance(value, dict) else value if isinstance(value, _GROUPS) else ()
            for each in (*inner, *getattr(value, "__dict__", {}).values()):
                self._visit_copy(each)

    def _is_teacher(self, value: Any) -> bool:
        return is_trained(value) and id(value) not in self._own

    @staticmethod
    def _require(stays: bool, value: Any) -> None:
        if not stays:
            raise Unequal(f"it refers to a {type(value).__name__}, which may change")

    def _visit_class(self, kind: type) -> None:
        """Visit the attributes of a class, of its bases and of its class, but for how objects are made of it."""
        for each in (*kind.__mro__, type(kind)):
            if not of_library(each) and self._is_new(each, "class"):
                self._reads.append(vars(each).values)
                self._visit_attributes(each, vars(each).keys() - _MAKERS)

    def _visit_attributes(self, kind: type, names: Iterable[str]) -> None:
        for name in () if of_library(kind) else names:
            value = vars(kind).get(name)
            if isinstance(value, (staticmethod, classmethod)):
                value = value.__func__
            if isinstance(value, property):
                for each in (value.fget, value.fset, value.fdel):
                    self._visit(each)
            # What Python keeps of a class, beside its methods, is compared, and computes nothing.
            elif isinstance(value, types.FunctionType) or not (
                name[0] == name[-1] == "_" or name == "_abc_impl"
            ):
                self._visit(value)

    def _visit_function(self, function: types.FunctionType) -> None:
        if of_library(function):  # perhaps one that calls what it was given, as decorators return
            for each in filter(callable, references(function)):
                self._visit(each)
            return
        self._reads.append(lambda: (function.__code__,))
        self._watch(lambda: (function.__defaults__, *(function.__kwdefaults__ or {}).values()))
        self._watch(vars(function).values)
        self._watch(functools.partial(references, function))
        # Those of a builtin are None, unless it is replaced.
        self._watch(functools.partial(map, function.__globals__.get, self._names_in(function)))

    def _names_in(self, function: types.FunctionType) -> list[str]:
        """Return the names of variables outside that a function reads."""
        names = set()
        for step in _instructions(function.__code__):
            if step.opname == "IMPORT_NAME":
                self._require(_library(step.argval), types)
            elif step.opname in LOADS_OF_VARIABLES:
                names.add(step.argval)
            elif step.opname in LOADS_OF_ATTRIBUTES and step.argval in _TENSOR_READERS:
                raise Unequal(f"it calls {step.argval}")
        if names & READERS:
            raise Unequal(f"it calls {min(names & READERS)}")
        return sorted(names)


def _contents(module: nn.Module) -> Iterable[Any]:
    """Return what a module of a library holds: settings, parameters, buffers, hooks and modules."""
    inner = [each.values() for each in vars(module).values() if isinstance(each, dict)]
    return chain(vars(module).values(), *inner)


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    """Yield what some code does, and what the functions do that it makes."""
    yield from dis.get_instructions(code)
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _instructions(each)


def of_library(value: Any) -> bool:
    """Return whether a module, a class or a function is one of a library's."""
    if isinstance(value, types.ModuleType):
        return _library(value.__name__)
    if isinstance(value, types.FunctionType):  # whose `__module__` may be that of another one, which it wraps
        return _library(value.__globals__.get("__name__", ""))
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
    if isinstance(value, torch.Tensor):
        return of_tensor(value)
    if by_value(value):
        return type(value), value
    try:
        return type(value), pickle.dumps(value)
    except Exception as error:
        raise Unequal(f"it refers to a {type(value).__name__}, which cannot be compared: {error}") from error


def by_value(value: Any) -> bool:
    """Return whether a value is compared by what it holds, and can be hashed; many others are compared by identity."""
    if "__hash__" not in {name for kind in type(value).__mro__[:-1] for name in vars(kind)}:
        return False
    try:
        hash(value)
    except TypeError:
        return False
    return not isinstance(value, (torch.Tensor, nn.Module))


def of_tensor(tensor: torch.Tensor) -> Hashable:
    """Return a key that is equal for tensors of equal numbers.

    Raises:
        Unequal: it is sparse, quantized, or has no numbers.
    """
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise Unequal("it refers to a tensor that cannot be compared")
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    digest = hashlib.blake2b(digest_size=16)
    if plain.numel():
        digest.update(plain.view(torch.uint8).numpy().data)
    return tensor.dtype, tensor.device, tensor.shape, digest.digest()
