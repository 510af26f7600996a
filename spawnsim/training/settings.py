"""What a function and a model compute with besides the tensors that are given: attributes and variables, as they are.

A step that is put off is carried out later, with those of other ranks, and yet with the settings that it met: they are
compared before each step, what is carried out at once has equal ones, and copies of them, which nobody changes.
"""

from __future__ import annotations

import copy
import dis
import functools
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from enum import Enum
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spawnsim.training.structure import (
    CONSTANTS,
    COPIED_NBYTES,
    KEPT_BY_TORCH,
    OWN_VARIABLES,
    READERS,
    Unequal,
    by_value,
    is_trained,
    of_library,
    of_tensor,
    references,
)

# Of these nothing is looked at but which one it is.
_FIXED = (
    *CONSTANTS,
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    Enum,
    np.generic,
    np.dtype,
    torch.layout,
)
_COLLECTIONS = (list, tuple, set, frozenset)
_LOADS_OF_VARIABLES = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_LOADS_OF_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}
_READ_ANY = {
    "getattr",
    "vars",
    "__dict__",
    "asdict",
    "astuple",
}  # by which a function reads attributes it does not name
MOST_PARTS = 256  # of a collection: larger ones are taken for data, and only their length is compared


@functools.cache
def _loads(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of variables and of attributes that some code reads, with the functions that it makes."""
    variables, attributes = set(), set()
    for step in dis.get_instructions(code):
        if step.opname in _LOADS_OF_VARIABLES:
            variables.add(step.argval)
        elif step.opname in _LOADS_OF_ATTRIBUTES:
            attributes.add(step.argval)
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            inner = _loads(each)
            variables |= inner[0]
            attributes |= inner[1]
    return frozenset(variables), frozenset(attributes)


class _Reached:
    """The functions of the program that a function comes to, and what they name.

    Args:
        function: of a model.
        model: whose forward pass it calls.
    """

    def __init__(self, function: Callable[..., Any], model: nn.Module) -> None:
        self.names: set[str] = set()
        self._kinds: set[type] = set()
        self._functions: set[types.FunctionType] = set()
        for module in model.modules():
            self._add_kind(type(module), "forward")
        self._add(function)
        self.all = not _READ_ANY.isdisjoint(self.names)

    def reads(self, name: str, kind: type) -> bool:
        """Return whether an attribute of an object of a class may be read."""
        return self.all or name in self.names or kind not in self._kinds

    def _add(self, value: Any) -> None:
        if isinstance(value, types.FunctionType):
            if value not in self._functions and not of_library(value):
                self._functions.add(value)
                variables, attributes = _loads(value.__code__)
                self._add_names(attributes | (variables & _READ_ANY))
                for each in (*map(value.__globals__.get, variables), *_filled(value)):
                    self._add(each)
        elif isinstance(value, types.MethodType):
            self._add_kind(type(value.__self__))
            self._add(value.__func__)
        elif isinstance(value, functools.partial):
            self._add(value.func)
        elif callable(value) and not isinstance(value, type) and not of_library(type(value)):
            self._add_kind(type(value), "forward" if isinstance(value, nn.Module) else "__call__")

    def _add_kind(self, kind: type, *called: str) -> None:
        own = [each for each in kind.__mro__ if not of_library(each)]
        if not own:  # all of what a library's object holds counts
            return
        self._kinds.add(kind)
        for name in (*called, *self.names):
            self._add_member(own, name)

    def _add_names(self, names: Iterable[str]) -> None:
        new = set(names) - self.names
        self.names |= new
        for kind in [*self._kinds]:
            own = [each for each in kind.__mro__ if not of_library(each)]
            for name in new:
                self._add_member(own, name)

    def _add_member(self, own: list[type], name: str) -> None:
        for kind in own:
            value = vars(kind).get(name)
            if isinstance(value, property):
                self._add(value.fget)
            else:
                self._add(getattr(value, "__func__", value))


def _filled(function: Any) -> Iterator[Any]:
    """Yield what the variables around a function, and its defaults, hold."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


class Settings:
    """What a function and a model compute with, as it is now.

    Attributes:
        key: equal for equal settings of any rank.

    Args:
        function: of a model.
        model: of which attributes and buffers count, and no parameters.

    Raises:
        Unequal: a variable has no value yet.
    """

    def __init__(self, function: Callable[..., Any], model: nn.Module) -> None:
        self._reached = _Reached(function, model)
        # Where something is: a dictionary (of variables, of attributes) and a name, and what was there.
        self._places: list[Mapping[str, Any]] = []
        self._names: list[str] = []
        self._held: list[Any] = []
        self._dicts: list[Mapping[str, Any]] = []  # in which names may come
        self._sizes: list[int] = []
        self._functions: list[tuple[types.FunctionType, tuple[Any, ...]]] = []
        self._cells: list[Any] = []
        self._inner: list[tuple[Any, Hashable]] = []  # what may change within, and how it was
        self._tensors: list[tuple[Tensor, int]] = []
        self._of_model: list[list[Any]] = []  # tensors: each with its version, and a digest
        self._seen: dict[int, Any] = {}
        parts = [self._of(function)]
        for name, module in model.named_modules():
            parts.append((name, type(module), self._of_module(module)))
        self.key: Hashable = tuple(parts)

    def unchanged(self) -> bool:
        """Return whether all is as it was."""
        now = [*map(dict.get, self._places, self._names)]  # type: ignore[arg-type]
        if not all(map(is_, now, self._held)) and not all(map(_is_equal, now, self._held)):
            return False
        if [*map(len, self._dicts)] != self._sizes:
            return False
        if not all(_made_of(each) == before for each, before in self._functions):
            return False
        if self._cells and not all(_is_equal(cell.cell_contents, held) for cell, held in self._cells):
            return False
        if self._tensors and any(tensor._version != version for tensor, version in self._tensors):
            return False
        for each in self._of_model:
            tensor, version, digest = each
            if tensor._version != version:
                if of_tensor(tensor) != digest:
                    return False
                each[1] = tensor._version
        return not self._inner or all(_contents(value, [MOST_PARTS]) == held for value, held in self._inner)

    def frozen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that computes with the present settings for ever."""
        return _Copies(self._reached).of(function)  # type: ignore[no-any-return]

    # -- the walk -----------------------------------------------------------------------------------------------

    def _of_module(self, module: nn.Module) -> Hashable:
        own, kind = self._in(vars(module)), type(module)
        found = [(name, self._at(own, name, of_model=True)) for name in own if self._counts(name, kind)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                found.append((name, self._at(module._buffers, name, of_model=True)))
        return tuple(found)

    def _counts(self, name: str, kind: type) -> bool:
        return name not in KEPT_BY_TORCH and self._reached.reads(name, kind)

    def _at(self, place: Mapping[str, Any], name: str, *, of_model: bool = False) -> Hashable:
        """Keep an eye on a place; return a key of what is there."""
        value = place.get(name)  # of a variable that Python has: None, unless it is replaced
        self._places.append(place)
        self._names.append(name)
        self._held.append(value)
        if not of_model and is_trained(value):
            return _Same(value)  # a variable outside, or an attribute: a teacher of all ranks
        if of_model and isinstance(value, Tensor):
            digest = of_tensor(value)
            self._of_model.append([value, _version(value), digest])
            return digest
        return self._of(value)

    def _of(self, value: Any) -> Hashable:
        """Keep an eye on what is in a value; return a key of it."""
        if isinstance(value, _FIXED):
            return type(value), value
        if id(value) in self._seen:
            return "again", list(self._seen).index(id(value))
        self._seen[id(value)] = value
        if isinstance(value, types.FunctionType):
            return value if of_library(value) else self._of_function(value)
        if isinstance(value, types.MethodType):
            return "method", self._of(value.__func__), self._of(value.__self__)
        if isinstance(value, functools.partial):
            parts = (value.func, *value.args, *value.keywords.values())
            return "partial", tuple(map(self._of, parts)), tuple(value.keywords)
        if isinstance(value, nn.Parameter):
            return _Same(value)  # trained meanwhile, as is all that has parameters and is shared by ranks
        if isinstance(value, Tensor):
            self._tensors.append((value, _version(value)))
            return _Same(value), _version(value)
        if isinstance(value, nn.Module):
            if is_trained(value):
                raise Unequal(
                    f"it refers to a {type(value).__name__} with parameters of its own: use the model that it is given"
                )
            return tuple((name, type(each), self._of_module(each)) for name, each in value.named_modules())
        return self._of_object(value)

    def _of_object(self, value: Any) -> Hashable:
        own = getattr(value, "__dict__", None)
        if own is None or isinstance(value, (Mapping, *_COLLECTIONS)) or of_library(type(value)):
            contents = _contents(value, [MOST_PARTS])
            self._inner.append((value, contents))
            return contents
        return type(value), tuple(
            (name, self._at(own, name)) for name in self._in(own) if self._reached.reads(name, type(value))
        )

    def _of_function(self, function: types.FunctionType) -> Hashable:
        cells = zip(function.__closure__ or (), references(function), strict=True)
        self._cells += cells
        around = tuple(map(self._of, _filled(function)))
        self._functions.append((function, _made_of(function)))
        variables, own = sorted(_loads(function.__code__)[0]), self._in(vars(function))
        kept = [(name, self._at(function.__globals__, name)) for name in variables]
        kept += [(name, self._at(own, name)) for name in own]
        return function.__code__, id(function.__globals__), around, tuple(kept)

    def _in(self, place: dict[str, Any]) -> dict[str, Any]:
        """Keep an eye on names that come."""
        self._dicts.append(place)
        self._sizes.append(len(place))
        return place


def _made_of(function: types.FunctionType) -> tuple[Any, ...]:
    return function.__code__, id(function.__defaults__), id(function.__kwdefaults__)


def _is_equal(now: Any, before: Any) -> bool:
    """Return whether something is still the same, or as good: an equal number."""
    return now is before or (type(now) is type(before) and isinstance(now, _FIXED) and bool(now == before))


class _Same:
    """An object as part of a key: equal to itself alone."""

    __slots__ = ("of",)

    def __init__(self, of: Any) -> None:
        self.of = of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.of is other.of

    def __hash__(self) -> int:
        return id(self.of)


def _contents(value: Any, left: list[int]) -> Hashable:
    """Return a key of a value, in depth: of as many parts as are left."""
    left[0] -= 1
    if isinstance(value, _FIXED):
        return type(value), value
    if isinstance(value, Tensor):
        return _Same(value), _version(value)
    if isinstance(value, np.ndarray):
        return _Same(value), value.tobytes() if value.nbytes <= MOST_PARTS * 8 else 0
    if left[0] < 0:
        return _Same(value)
    if by_value(value):
        return type(value), value
    if isinstance(value, Mapping):
        if len(value) > left[0]:
            return _Same(value), len(value)
        pairs = (part for pair in value.items() for part in pair)
        return type(value), tuple([_contents(each, left) for each in pairs])
    if isinstance(value, _COLLECTIONS):
        if len(value) > left[0]:
            return _Same(value), len(value)
        parts = [_contents(each, left) for each in value]
        return type(value), tuple(parts) if isinstance(value, (list, tuple)) else frozenset(parts)
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial, nn.Module)):
        return _Same(value)
    own = getattr(value, "__dict__", None)
    if own is None:
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        own = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    if not own or of_library(type(value)):
        return _Same(value)
    return type(value), tuple([(name, _contents(each, left)) for name, each in own.items()])


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class _Copies:
    """Copies of what functions refer to, one of each."""

    def __init__(self, reached: _Reached) -> None:
        self._reached, self._made, self._left = reached, dict[int, Any](), MOST_PARTS
        self._originals: list[Any] = []  # so that no identity comes again

    def of(self, value: Any) -> Any:
        """Return a value that nobody changes: a copy, where it may change."""
        if isinstance(value, _FIXED) or (isinstance(value, types.FunctionType) and of_library(value)):
            return value
        if id(value) not in self._made:
            self._originals.append(value)
            self._made[id(value)] = value  # for what refers to itself
            self._made[id(value)] = self._of(value)
        return self._made[id(value)]

    def _of(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            return self._of_function(value)
        if isinstance(value, types.MethodType):
            return types.MethodType(self.of(value.__func__), self.of(value.__self__))
        if isinstance(value, functools.partial):
            keywords = {name: self.of(each) for name, each in value.keywords.items()}
            return functools.partial(self.of(value.func), *map(self.of, value.args), **keywords)
        if isinstance(value, Tensor):
            return value.clone() if _is_own(value) else value
        if isinstance(value, np.ndarray):
            return value.copy() if value.nbytes <= COPIED_NBYTES else value
        if isinstance(value, nn.Module):
            return value if is_trained(value) else copy.deepcopy(value)
        return self._of_parts(value)

    def _of_parts(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, (Mapping, *_COLLECTIONS)):
            self._left -= len(value)
            if self._left < 0 or kind not in (dict, *_COLLECTIONS):
                return value
            if isinstance(value, dict):
                return {name: self.of(each) for name, each in value.items()}
            return kind(map(self.of, value))
        own = getattr(value, "__dict__", None)
        if own is None or of_library(kind):
            return value
        self._left -= len(own)
        if self._left < 0:
            return value
        try:
            made = object.__new__(kind)
        except TypeError:  # of a class made in C
            made = copy.copy(value)
            vars(made).clear()
        self._made[id(value)] = made
        vars(made).update(
            {name: self.of(each) for name, each in own.items() if self._reached.reads(name, kind)}
        )
        return made

    def _of_function(self, function: types.FunctionType) -> types.FunctionType:
        read = _loads(function.__code__)[0]
        around = function.__globals__
        variables = {name: each for name, each in around.items() if name.startswith("__")}
        variables[OWN_VARIABLES] = True
        if READERS & read:
            variables = around
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        made = types.FunctionType(function.__code__, variables, function.__name__, None, cells or None)
        self._made[id(function)] = made
        for cell, value in zip(cells, references(function), strict=True):
            cell.cell_contents = self.of(value)
        for name in read & around.keys() if variables is not around else ():
            variables[name] = self.of(around[name])
        made.__defaults__ = function.__defaults__ and tuple(map(self.of, function.__defaults__))
        made.__kwdefaults__ = function.__kwdefaults__ and {
            name: self.of(each) for name, each in function.__kwdefaults__.items()
        }
        made.__dict__.update(function.__dict__)
        return made


def _is_own(tensor: Tensor) -> bool:
    """Return whether a tensor is small, and shares its memory with no other: not with a weight, which changes."""
    storage = tensor.untyped_storage()
    alone: bool = torch._C._storage_Use_Count(storage._cdata) <= 2  # its own, and that of this call
    plain = type(tensor) is Tensor and not tensor.requires_grad
    return plain and alone and storage.nbytes() <= COPIED_NBYTES
