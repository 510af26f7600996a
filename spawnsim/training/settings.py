"""What a function and a model compute with besides the tensors that are given: attributes and variables, as they are.

A step that is put off is carried out later, with those of other ranks, and yet with the settings that it met: they are
compared before each step, what is carried out at once has equal ones, and copies of them, which nobody changes. What
cannot be compared, or copied, is refused: the model steps alone.
"""

from __future__ import annotations

import copy
import functools
import operator
import types
from collections.abc import Callable, Collection, Hashable, Mapping
from enum import Enum
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spawnsim.random import Streams
from spawnsim.training.reading import MOST_PARTS, READERS, Loads, Reached
from spawnsim.training.structure import (
    CONSTANTS,
    COPIED_NBYTES,
    KEPT_BY_TORCH,
    OWN_VARIABLES,
    Unequal,
    attributes_of,
    by_value,
    digits_of,
    is_trained,
    kind_of,
    of_library,
    of_tensor,
    references,
    statistics_of,
    users_of,
)

_MADE = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
SMALL_NBYTES = 4096  # of an array, which torch counts no changes of
FEW_NBYTES = 256  # of a tensor whose numbers are compared, too: they can be changed without a count


def is_fixed(value: Any) -> bool:
    """Return whether there is nothing in a value that may change, or that is looked at."""
    kind = type(value)
    if kind in CONSTANTS or isinstance(
        value, (type, types.ModuleType, Enum, torch.layout, torch.memory_format)
    ):
        return True
    if isinstance(value, types.BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, (type, types.ModuleType))
    if (
        kind.__module__ == "builtins"
        or not of_library(kind)
        or isinstance(value, (nn.Module, functools.partial, Streams))
    ):
        return False
    return isinstance(value, (np.generic, np.dtype)) or callable(value) or by_value(value)


class Settings:
    """What a function and a model compute with, as it is now.

    Attributes:
        key: equal for equal settings of any rank.

    Args:
        function: of a model.
        model: of which attributes and buffers count, and no parameters.

    Raises:
        Unequal: there is something that may change unnoticed, or of which no copy can be made.
    """

    def __init__(self, function: Callable[..., Any], model: nn.Module) -> None:
        # Where something is: a dictionary (of variables, of attributes, of the program) and a name, and what was there.
        self._places: list[Mapping[Any, Any]] = []
        self._names: list[Any] = []
        self._held: list[Any] = []
        self._dicts: list[Mapping[Any, Any]] = []  # in which names may come
        self._sizes: list[int] = []
        self._functions: list[types.FunctionType] = []
        self._made: list[Any] = []
        self._cells: list[tuple[Any, Any]] = []
        self._lists: list[tuple[Any, tuple[Any, ...]]] = []
        self._kept: list[tuple[Callable[[], Any], Any]] = []  # what else is compared, by what it gives
        self._of_model: list[list[Any]] = []  # tensors: each with its version, and a digest
        self._seen: dict[int, Any] = {}
        self._left = MOST_PARTS
        self._is_of_model = False  # what is looked at
        try:
            self._reached = Reached(function, model)
            self.key: Hashable = self._walk(function, model)
        except RecursionError as error:
            raise Unequal("it refers to what refers to more, too deep to be compared") from error
        self._seen.clear()

    def unchanged(self) -> bool:
        """Return whether all is as it was."""
        now = [*map(dict.get, self._places, self._names)]  # type: ignore[arg-type]
        if not all(map(is_, now, self._held)) and not all(map(is_equal, now, self._held)):
            return False
        if [*map(len, self._dicts)] != self._sizes:
            return False
        if not all(map(is_, chain.from_iterable(map(_MADE, self._functions)), self._made)):
            return False
        # What most have none of is asked for first: this is called before each step.
        if not (self._cells or self._lists or self._kept or self._of_model):
            return True
        try:
            if not all(is_equal(cell.cell_contents, held) for cell, held in self._cells):
                return False
        except ValueError:  # a variable that was deleted
            return False
        if not all(len(each) == len(held) and all(map(is_equal, each, held)) for each, held in self._lists):
            return False
        return all(get() == held for get, held in self._kept) and all(map(_is_kept, self._of_model))

    def frozen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that computes with the present settings for ever."""
        return _Copies(self._reached).of(function)  # type: ignore[no-any-return]

    # -- the walk -----------------------------------------------------------------------------------------------

    def _walk(self, function: Callable[..., Any], model: nn.Module) -> Hashable:
        parts = [self._of(function)]
        self._is_of_model = True
        for name, module in model.named_modules():
            parts.append((name, kind_of(module), self._of_module(module, statistics_of(module))))
        return tuple(parts)

    def _of_module(self, module: nn.Module, apart: Collection[str] = ()) -> Hashable:
        own = self._in(vars(module))
        # What a program keeps in its model, such as a count of epochs, and nobody is seen to read, may be anything.
        every = any(of_library(each) for each in type(module).__mro__ if each not in (nn.Module, object))
        read = [name for name in own if name not in KEPT_BY_TORCH and (every or self._reached.reads(name))]
        found = [(name, self._of_attribute(own, name)) for name in sorted(read)]
        held = [name for name, buffer in module._buffers.items() if buffer is not None and name not in apart]
        return *found, *((name, self._of_attribute(module._buffers, name)) for name in sorted(held))

    def _of_attribute(self, place: Mapping[Any, Any], name: str) -> Hashable:
        value = place[name]
        if not isinstance(value, Tensor):
            return self._at(place, name)
        if value.requires_grad:
            raise Unequal(f"{name} requires a gradient, and is no parameter")
        digest = of_tensor(value)
        self._watch(place, name)
        self._of_model.append([value, _version(value), digest])
        return digest

    def _watch(self, place: Mapping[Any, Any], name: Any) -> Any:
        value = place.get(name)  # of a variable that Python has: None, unless it is replaced
        self._places.append(place)
        self._names.append(name)
        self._held.append(value)
        return value

    def _at(self, place: Mapping[Any, Any], name: Any) -> Hashable:
        """Keep an eye on a place; return a key of what is there."""
        return self._of(self._watch(place, name))

    def _in(self, place: dict[Any, Any]) -> dict[Any, Any]:
        """Keep an eye on names that come."""
        self._dicts.append(place)
        self._sizes.append(len(place))
        return place

    def _of(self, value: Any) -> Hashable:
        """Keep an eye on what is in a value; return a key of it."""
        if is_fixed(value):
            return type(value), digits_of(value)
        if id(value) in self._seen:
            return "again", list(self._seen).index(id(value))
        self._seen[id(value)] = value
        self._left -= 1
        if self._left < 0:
            raise Unequal(
                f"it refers to more than {MOST_PARTS} values: give them as a tensor, beside the batch"
            )
        if isinstance(value, types.FunctionType):
            return self._of_function(value)
        if isinstance(value, types.MethodType):
            return "method", self._of(value.__func__), self._of(value.__self__)
        if type(value) is functools.partial:
            parts = (value.func, *value.args, *value.keywords.values())
            return "partial", tuple(map(self._of, parts)), tuple(value.keywords)
        if isinstance(value, (Tensor, np.ndarray)):
            return self._of_numbers(value)
        if isinstance(value, nn.Module):
            if is_trained(value):
                raise Unequal(
                    f"it refers to a {type(value).__name__} with parameters of its own: use the model that it is given"
                )
            return tuple((name, kind_of(each), self._of_module(each)) for name, each in value.named_modules())
        return self._of_collection(value)

    def _of_numbers(self, value: Any) -> Hashable:
        if isinstance(value, np.ndarray):
            if type(value) is not np.ndarray or value.dtype.hasobject or value.nbytes > SMALL_NBYTES:
                raise Unequal(
                    "it refers to a large array, or one of objects: give it as a tensor, beside the batch"
                )
            self._kept.append((value.tobytes, value.tobytes()))
            return value.dtype, value.shape, value.tobytes()
        if isinstance(value, nn.Parameter) or value.requires_grad:
            raise Unequal(
                "it refers to a tensor that is trained: use the parameters of the model that it is given"
            )
        self._kept.append((functools.partial(_version, value), _version(value)))
        digest = of_tensor(value) if _is_few(value) else None
        if digest is not None:
            self._kept.append((functools.partial(of_tensor, value), digest))
        return _Same(value), _version(value), digest

    def _of_collection(self, value: Any) -> Hashable:
        kind = type(value)
        if kind is dict and all(map(is_fixed, value)):
            return "dict", tuple([(name, self._at(value, name)) for name in self._in(value)])
        if kind is list:
            self._lists.append((value, tuple(value)))
            return "list", tuple(map(self._of, value))
        if kind is tuple or (
            isinstance(value, tuple) and hasattr(kind, "_fields") and attributes_of(value) is None
        ):
            return kind, tuple(map(self._of, value))
        if kind in (set, frozenset) and all(map(is_fixed, value)):
            self._kept.append((functools.partial(frozenset, value), frozenset(value)))
            return kind, frozenset(value)
        own = attributes_of(value)
        if own is None or not _is_plain(kind):
            raise Unequal(f"it refers to a {kind.__name__}, which may change unnoticed")
        return kind, tuple(
            [(name, self._at(own, name)) for name in self._in(own) if self._reached.reads(name)]
        )

    def _of_function(self, function: types.FunctionType) -> Hashable:
        library = of_library(function)
        if library and not function.__closure__:
            return function
        if self._is_of_model and not all(map(is_fixed, references(function))):
            # A copy of the model has the same function.
            raise Unequal("an attribute of it is a function that refers to variables which may change")
        self._cells += zip(function.__closure__ or (), references(function), strict=True)
        around = [self._of(each) for each in (*references(function), *(function.__defaults__ or ()))]
        self._functions.append(function)
        self._made += _MADE(function)
        if function.__kwdefaults__:
            around += [self._at(function.__kwdefaults__, name) for name in self._in(function.__kwdefaults__)]
        if not library:
            variables, own = sorted(Loads.of(function.__code__).variables), self._in(vars(function))
            around += [self._variable(function.__globals__, name) for name in variables]
            around += [self._at(own, name) for name in own]
        return function.__code__, id(function.__globals__), tuple(around)

    def _variable(self, place: Mapping[Any, Any], name: str) -> Hashable:
        """Keep an eye on a variable of a module; what is trained there, a teacher of all ranks, is as it is then."""
        value = place.get(name)
        trained = is_trained(value) or (isinstance(value, Tensor) and value.requires_grad)
        return _Same(self._watch(place, name)) if trained else self._at(place, name)


def is_equal(now: Any, before: Any) -> bool:
    """Return whether something is still the same, or as good: an equal number."""
    alike = type(now) is type(before) and is_fixed(now)
    return now is before or (alike and bool(digits_of(now) == digits_of(before)))


def _is_kept(entry: list[Any]) -> bool:
    """Return whether a tensor of a model holds what it did; take note of its version."""
    tensor, version, digest = entry
    if (_version(tensor) != version or _is_few(tensor)) and of_tensor(tensor) != digest:
        return False
    entry[1] = _version(tensor)
    return True


def _is_few(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() <= FEW_NBYTES


def _is_plain(kind: type) -> bool:
    """Return whether objects of a class are nothing but their attributes, and can be made anew."""
    if kind is types.SimpleNamespace:
        return True
    own = kind.__mro__[:-1]
    return not any(
        of_library(each) or vars(each).get("__slots__") or "__del__" in vars(each) for each in own
    ) and (kind.__basicsize__ <= _Plain.__basicsize__)


class _Plain:
    """An object of the program that is nothing but its attributes."""


class _Same:
    """An object as part of a key: equal to itself alone."""

    __slots__ = ("of",)

    def __init__(self, of: Any) -> None:
        self.of = of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.of is other.of

    def __hash__(self) -> int:
        return id(self.of)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class _Copies:
    """Copies of what functions refer to, one of each: of what `Settings` has not refused."""

    def __init__(self, reached: Reached) -> None:
        self._reached, self._made = reached, dict[int, Any]()
        self._originals: list[Any] = []  # so that no identity comes again

    def of(self, value: Any) -> Any:
        """Return a value that nobody changes: a copy, where it may change."""
        if is_fixed(value):
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
        if type(value) is functools.partial:
            keywords = {name: self.of(each) for name, each in value.keywords.items()}
            return functools.partial(self.of(value.func), *map(self.of, value.args), **keywords)
        if isinstance(value, Tensor):
            return value.clone() if _is_own(value) else value
        if isinstance(value, np.ndarray):
            return value.copy()
        if isinstance(value, nn.Module):
            return value if is_trained(value) else copy.deepcopy(value)
        return self._of_collection(value)

    def _of_collection(self, value: Any) -> Any:
        kind = type(value)
        made: Any
        if kind is dict:
            made = self._made[id(value)] = {}
            made.update({name: self.of(each) for name, each in value.items()})
            return made
        if kind is list:
            made = self._made[id(value)] = []
            made.extend(map(self.of, value))
            return made
        if isinstance(value, tuple):
            parts = map(self.of, value)
            return tuple(parts) if kind is tuple else kind(*parts)
        if kind in (set, frozenset):
            return kind(value)
        own = attributes_of(value)
        if not own:  # nothing to be changed: only which one it is counts
            return value
        made = types.SimpleNamespace() if kind is types.SimpleNamespace else object.__new__(kind)
        self._made[id(value)] = made
        vars(made).update({name: self.of(each) for name, each in own.items() if self._reached.reads(name)})
        return made

    def _of_function(self, function: types.FunctionType) -> types.FunctionType:
        library = of_library(function)
        if library and not function.__closure__:
            return function
        around, read = function.__globals__, Loads.of(function.__code__).variables
        variables: dict[str, Any] = around
        if not library and not READERS & read:
            variables = {name: each for name, each in around.items() if name.startswith("__")}
            variables[OWN_VARIABLES] = True
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
        made.__dict__.update(
            {name: each if library else self.of(each) for name, each in vars(function).items()}
        )
        return made


def _is_own(tensor: Tensor) -> bool:
    """Return whether a tensor is small, and shares its memory with no other: not with a weight, which changes."""
    small = tensor.untyped_storage().nbytes() <= COPIED_NBYTES
    return type(tensor) is Tensor and small and users_of(tensor) == 1
