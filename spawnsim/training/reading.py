"""What code reads besides what it is given: the names of variables and attributes, and which functions it comes to.

Python's instructions are looked at, of functions of the program alone: what libraries define is taken to compute the
same at each call.
"""

from __future__ import annotations

import dis
import functools
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spawnsim.training.structure import (
    CONSTANTS,
    COPIED_NBYTES,
    KEPT_BY_TORCH,
    OWN_VARIABLES,
    Unequal,
    attributes_of,
    is_library,
    is_trained,
    of_library,
    references,
)

_LOADS_OF_VARIABLES = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_LOADS_OF_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"}
# By which a function reads what is not seen in it: of Python, and of tensors.
READERS = {"eval", "exec", "globals", "open", "__import__"}
_TENSOR_READERS = {"data_ptr", "numpy", "storage_offset", "tolist"}
# By which it reads attributes that it does not name.
_READ_ANY = {"getattr", "vars", "__dict__", "asdict", "astuple", "attrgetter", "methodcaller"}
_READERS_OF_ANY = (operator.attrgetter, operator.methodcaller)
_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
# What a deep copy does not copy.
_SHARED = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, Enum)
_GROUPS = (list, tuple, set, frozenset)
_MAKERS = {"__init__", "__new__"}
MOST_PARTS = 256  # that a function and a model compute with
MOST_REACHED = 4096  # functions, classes and objects; of more any attribute may be read


@dataclass(frozen=True)
class Loads:
    """The names that some code reads, with the functions that it makes: of variables, of attributes, of modules."""

    variables: frozenset[str]
    attributes: frozenset[str]
    imports: frozenset[str]

    @staticmethod
    @functools.cache
    def of(code: types.CodeType) -> Loads:
        """Return those of some code."""
        variables, attributes, imports = set[str](), set[str](), set[str]()
        for step in dis.get_instructions(code):
            if step.opname in _LOADS_OF_VARIABLES:
                variables.add(step.argval)
            elif step.opname in _LOADS_OF_ATTRIBUTES:
                attributes.add(step.argval)
            elif step.opname == "IMPORT_NAME":
                imports.add(step.argval)
            elif step.opname.startswith("MATCH_"):
                attributes |= _READ_ANY
        for inner in [Loads.of(each) for each in code.co_consts if isinstance(each, types.CodeType)]:
            variables |= inner.variables
            attributes |= inner.attributes
            imports |= inner.imports
        return Loads(frozenset(variables), frozenset(attributes), frozenset(imports))


class Reached:
    """The functions of the program that a function of a model comes to, and the attributes that they name.

    Raises:
        Unequal: one of them enters autocast.
    """

    def __init__(self, function: Callable[..., Any], model: nn.Module) -> None:
        self.names: set[str] = set()
        self._holders: list[Mapping[str, Any]] = []  # of classes and modules of the program: their members
        self._seen: dict[int, Any] = {}
        self._any = False
        for module in model.modules():
            self._add(module)
        self._add(function)
        self._any = self._any or not _READ_ANY.isdisjoint(self.names)
        self._seen.clear()  # a model that is gone must not be kept
        self._holders.clear()

    def reads(self, name: str) -> bool:
        """Return whether an attribute may be read."""
        return self._any or name in self.names or name == "forward"

    def _add(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if len(self._seen) > MOST_REACHED:
            self._any = True
            return
        if isinstance(value, types.FunctionType):
            for each in _filled(value):
                self._add(each)
            if not of_library(value):
                loads = Loads.of(value.__code__)
                if "autocast" in loads.variables | loads.attributes:
                    raise Unequal("it computes under autocast: enter it around the step")
                self._add_names(loads.attributes | (loads.variables & _READ_ANY))
                for each in map(value.__globals__.get, loads.variables):
                    self._add(each)
        elif isinstance(value, types.MethodType):
            self._add(value.__self__)
            self._add(value.__func__)
        elif type(value) is functools.partial:
            for each in (value.func, *value.args, *value.keywords.values()):
                self._add(each)
        elif isinstance(value, _READERS_OF_ANY):
            self._any = True
        elif hasattr(type(value), "cache_clear"):  # functools.cache
            self._add(value.__wrapped__)
        elif isinstance(value, (types.ModuleType, type)):
            if not of_library(value):
                self._add_holder(vars(value))
        else:
            self._add_object(value)

    def _add_object(self, value: Any) -> None:
        if isinstance(value, (dict, list, tuple)) and len(value) <= MOST_PARTS:
            for each in value.values() if isinstance(value, dict) else value:
                self._add(each)
        kinds = [kind for kind in type(value).__mro__ if not of_library(kind)]
        for kind in kinds:
            self._add(kind)
        # An object of a library calls what it was given: an activation, a list of them.
        own = (attributes_of(value) or {}) if kinds or isinstance(value, nn.Module) else {}
        for name, each in own.items():
            if name not in KEPT_BY_TORCH and not isinstance(each, (*CONSTANTS, Tensor, np.ndarray)):
                self._add(each)

    def _add_holder(self, members: Mapping[str, Any]) -> None:
        self._holders.append(members)
        special = [name for name in members if name == "forward" or (name[:2] == "__" != name)]
        for name in {*self.names, *special} - {"__init__", "__new__", "__globals__", "__builtins__"}:
            self._add_member(members.get(name))

    def _add_names(self, names: Iterable[str]) -> None:
        new = set(names) - self.names
        self.names |= new
        for members in [*self._holders]:
            for name in new:
                self._add_member(members.get(name))

    def _add_member(self, value: Any) -> None:
        for each in (value.fget, value.fset) if isinstance(value, property) else (value,):
            if isinstance(each, functools.cached_property):
                each = each.func
            self._add(each.__func__ if isinstance(each, (staticmethod, classmethod)) else each)


def _filled(function: Any) -> Iterator[Any]:
    """Yield what the variables around a function, and its defaults, hold."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


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
            names = map(value.__globals__.get, self._names_in(value))
            for each in (*_filled(value), *vars(value).values(), *names):
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
        loads = Loads.of(function.__code__)
        self._require(all(map(is_library, loads.imports)), types)
        calls = (loads.variables & READERS) | (loads.attributes & _TENSOR_READERS)
        if calls:
            raise Unequal(f"it calls {min(calls)}")
        return sorted(loads.variables)


def _contents(module: nn.Module) -> Iterable[Any]:
    """Return what a module of a library holds: settings, parameters, buffers, hooks and modules."""
    inner = [each.values() for each in vars(module).values() if isinstance(each, dict)]
    return chain(vars(module).values(), *inner)
