"""multiprocessing's managers without their server process: dictionaries, lists and values that processes share.

A method of such an object acts on the one object, at its caller's virtual time. Its arguments and its result are
copied, as they are on their way to a server and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from typing import Any

from spawnsim.virtual.scripts import process_objects
from spawnsim.virtual.scripts.copies import copied
from spawnsim.virtual.scripts.process_objects import ProcessObject

# Results that are views or iterators: a caller gets a list.
VIEWS: tuple[type, ...] = (
    type({}.keys()),
    type({}.values()),
    type({}.items()),
    type(iter([])),
    type(iter({})),
)
SPECIAL = ["getitem", "setitem", "delitem", "contains", "len", "add", "iadd", "mul", "imul", "reversed", "eq"]


class Proxy(ProcessObject):
    """A dictionary or list of a manager."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._value = value

    def _do(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self._session.look()
        args, kwargs = copied((args, kwargs)).load()
        found: Any = getattr(self._value, method)(*args, **kwargs)
        self._session.changed()
        if found is self._value:  # of an operation in place
            return self
        return copied(_listed(found)).load()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(self._do, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._do("__iter__"))

    def __repr__(self) -> str:
        return repr(self._value)


for _name in SPECIAL:
    setattr(Proxy, f"__{_name}__", partialmethod(Proxy._do, f"__{_name}__"))


def _listed(found: Any) -> Any:
    views: Any = VIEWS
    return list(found) if isinstance(found, views) else found


class Attributes(ProcessObject):
    """An object with attributes that processes set; `manager.Value` is one."""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        self._values = values

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._values:
            raise AttributeError(name)
        self._session.look()
        return copied(self._values[name]).load()

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            vars(self)[name] = value
            return
        self._session.look()
        self._values[name] = copied(value).load()
        self._session.changed()

    def get(self) -> Any:
        """Return the value (`manager.Value`)."""
        return self.value

    def set(self, value: Any) -> None:
        """Set the value (`manager.Value`)."""
        self.value = value


class Manager:
    """`multiprocessing.Manager()`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        made = process_objects.IN_SYNCHRONIZE | process_objects.IN_QUEUES
        vars(self).update(made)

    def dict(self, *args: Any, **kwargs: Any) -> Proxy:
        return Proxy(dict(*args, **kwargs))

    def list(self, *args: Any) -> Proxy:
        return Proxy(list(*args))

    def Namespace(self, **values: Any) -> Attributes:
        """Return an object for attributes."""
        return Attributes(**values)

    def Value(self, _kind: Any, value: Any, lock: bool = True) -> Attributes:
        """Return an object with the attribute `value`."""
        return Attributes(value=value)

    def Array(self, _kind: Any, values: Any, lock: bool = True) -> Proxy:
        """Return a sequence."""
        return Proxy(list(values))

    def start(self, initializer: Callable[..., Any] | None = None, initargs: tuple[Any, ...] = ()) -> None:
        """Do nothing: there is no server."""

    def shutdown(self) -> None:
        """Do nothing."""

    def __enter__(self) -> Manager:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""
