"""Copies of objects for another process: as bytes, with references to the objects that processes share.

A process that is spawned, and a queue, receive copies; tensors then share their memory, as torch.multiprocessing moves
it to shared memory. A process that is forked starts with copies of everything that is not in shared memory, also of the
variables that its functions have enclosed.
"""

from __future__ import annotations

import ctypes
import io
import multiprocessing.process
import pickle
import sys
from contextlib import suppress
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

# Definitions: a forked process shares them with its parent. It may set the names of a module, but not change them.
DEFINITIONS = (FunctionType, BuiltinFunctionType, ModuleType, type, CodeType)
KEPT = (*DEFINITIONS, multiprocessing.process.BaseProcess)
# Memory of `multiprocessing.Value` and `Array`.
MEMORY = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure)


class Shared:
    """Base of the objects that processes share."""

    def given(self, process: Any) -> None:
        """Note that a process that is about to start will hold the object."""


class Copy(NamedTuple):
    """A copied object: bytes, and the objects that are shared."""

    data: bytes
    shared: list[Any]

    def load(self) -> Any:
        """Return a new copy, for the calling process."""
        unpickler: Any = pickle.Unpickler(io.BytesIO(self.data))
        unpickler.persistent_load = self.shared.__getitem__
        return unpickler.load()


class _Reference:
    """An object that a copy refers to, whatever it is."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Copier(pickle.Pickler):
    def __init__(self, file: io.BytesIO, *, forks: bool, receiver: Any) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.shared: list[Any] = []
        self._forks, self._receiver = forks, receiver
        self._clones: dict[int, Any] = {}  # by the address of the original in C++
        torch: Any = sys.modules.get("torch")
        storages = (torch.storage.TypedStorage, torch.storage.UntypedStorage) if _complete(torch) else ()
        self._storages: tuple[type, ...] = storages
        synchronized: Any = sys.modules.get("multiprocessing.sharedctypes")
        self._synchronized = () if synchronized is None else (synchronized.SynchronizedBase,)

    def persistent_id(self, obj: Any) -> int | None:
        """Return the number of a shared object; None for objects to be copied."""
        if isinstance(obj, _Reference):
            obj = obj.value
        elif isinstance(obj, self._storages):
            obj = self._storage(obj)
        elif isinstance(obj, Shared):
            obj.given(self._receiver)
        elif not (
            isinstance(obj, (*MEMORY, *self._synchronized))
            or (self._forks and isinstance(obj, KEPT) and not getattr(obj, "__closure__", None))
        ):
            return None
        self.shared.append(obj)
        return len(self.shared) - 1

    def _storage(self, storage: Any) -> Any:
        """Return the memory of a tensor, as the receiver gets it."""
        typed = hasattr(storage, "_untyped_storage")
        memory = storage._untyped_storage if typed else storage
        if not self._forks or memory.is_shared():
            return storage
        if memory._cdata not in self._clones:
            self._clones[memory._cdata] = memory.clone()
        clone = self._clones[memory._cdata]
        return type(storage)(wrap_storage=clone, dtype=storage.dtype, _internal=True) if typed else clone

    def reducer_override(self, obj: Any) -> Any:
        """Copy the functions of a forked process with their enclosed variables."""
        if self._forks and isinstance(obj, FunctionType):
            parts = obj.__code__, obj.__globals__, obj.__name__, obj.__defaults__
            return _function, (*map(_Reference, parts), obj.__closure__, obj.__kwdefaults__)
        if self._forks and isinstance(obj, CellType):
            try:
                content = (obj.cell_contents,)
            except ValueError:  # empty
                return CellType, ()
            return CellType, (), content, None, None, _fill
        return NotImplemented


def _complete(torch: Any) -> bool:
    return hasattr(torch, "storage")


def _function(code: Any, names: Any, name: Any, defaults: Any, *rest: Any) -> FunctionType:
    closure, keywords = rest
    function = FunctionType(code, names, name, defaults, closure)
    function.__kwdefaults__ = keywords
    return function


def _fill(cell: CellType, content: tuple[Any]) -> None:
    cell.cell_contents = content[0]


def copied(obj: Any, *, forks: bool = False, receiver: Any = None) -> Copy:
    """Copy an object.

    Args:
        obj: the object.
        forks: whether the receiver is forked.
        receiver: the process that is about to start with it, if one is.

    Returns:
        The copy.

    Raises:
        Exception: the error of pickle, if the object cannot be copied.
    """
    file = io.BytesIO()
    copier = _Copier(file, forks=forks, receiver=receiver)
    copier.dump(obj)
    return Copy(file.getvalue(), copier.shared)


class Forked(NamedTuple):
    """All that a forked process starts with."""

    whole: Copy  # the call, and the values of `moved`
    kept: dict[ModuleType, dict[str, Any]]  # names of modules with values that are not copied
    moved: tuple[tuple[ModuleType, str], ...]  # names whose values are copied
    uncopied: tuple[str, ...]  # names whose values should have been copied

    @classmethod
    def of(cls, call: Any, modules: list[ModuleType], receiver: Any) -> Forked:
        """Copy a call and the modules whose names the process may set."""
        kept: dict[ModuleType, dict[str, Any]] = {module: {} for module in modules}
        moved: dict[tuple[ModuleType, str], Any] = {}
        uncopied = []
        for module in modules:
            for name, value in vars(module).items():
                plain = name.startswith("__") or isinstance(value, (*DEFINITIONS, *_PLAIN))
                if not plain and _can_copy(value):
                    moved[module, name] = value
                    continue
                kept[module][name] = value
                uncopied += [] if plain else [name]
        if not _can_copy(call):
            call = _Reference(call)
            uncopied.append("its arguments")
        # Together: one value may refer to another.
        whole = copied((call, list(moved.values())), forks=True, receiver=receiver)
        return cls(whole, kept, tuple(moved), tuple(uncopied))

    def load(self) -> tuple[Any, dict[ModuleType, dict[str, Any]]]:
        """Return the call, and all names of each module."""
        call, values = self.whole.load()
        names = {module: dict(each) for module, each in self.kept.items()}
        for (module, name), value in zip(self.moved, values, strict=True):
            names[module][name] = value
        return call, names


_PLAIN = (int, float, str, bytes, bool, complex, type(None))


def _can_copy(value: Any) -> bool:
    with suppress(Exception):
        copied(value, forks=True)
        return True
    return False
