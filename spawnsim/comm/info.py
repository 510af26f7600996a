"""Hints as pairs of strings, `MPI.Info`.

This room knows a dictionary with MPI's limits. spawnsim keeps hints and follows none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Self

from spawnsim.comm.constants import MAX_INFO_KEY, MAX_INFO_VAL
from spawnsim.comm.failures import ERR_ARG, ERR_INFO_KEY, ERR_INFO_NOKEY, ERR_INFO_VALUE, CallError
from spawnsim.comm.handles import Handle, reduced

Items = "Info | Mapping[str, str] | Iterable[tuple[str, str]]"


class Info(Handle):
    """An ordered mapping of strings, under mpi4py's names."""

    __slots__ = ("_items",)
    _items: dict[str, str]

    def __new__(cls, info: Info | None = None) -> Self:
        self = super().__new__(cls)
        self._identity = info._identity if info is not None else None
        self._items = info._items if info is not None else {}
        return self

    @classmethod
    def Create(cls, items: Info | Mapping[str, str] | Iterable[tuple[str, str]] | None = None) -> Self:
        """Return a new info object with these items."""
        self = cls()
        self._identity = object()
        if items is not None:
            self.update(items)
        return self

    @classmethod
    def Create_env(cls, args: Sequence[str] | None = None) -> Self:
        """Return a new info object that describes how the program was started: here, nothing."""
        return cls.Create()

    def __reduce__(self) -> str | tuple[Any, ...]:
        return (type(self).Create, (self.items(),)) if self else reduced(self, globals(), "INFO_NULL")

    def Free(self) -> None:
        """Make this handle null."""
        self._live()
        self._identity, self._items = None, {}

    def _live(self) -> dict[str, str]:
        if self._identity is None:
            raise CallError(ERR_ARG, "the info object is null or was freed")
        return self._items

    def Dup(self) -> Self:
        """Return a copy."""
        return type(self).Create(list(self._live().items()))

    def Get(self, key: str) -> str | None:
        """Return the value of a key, or None."""
        return self._live().get(key)

    def Set(self, key: str, value: str) -> None:
        """Store a value under a key."""
        items = self._live()
        if not 0 < len(key) <= MAX_INFO_KEY:
            raise CallError(ERR_INFO_KEY, f"a key of {len(key)} characters; 1 to {MAX_INFO_KEY} are allowed")
        if not 0 < len(value) <= MAX_INFO_VAL:
            raise CallError(
                ERR_INFO_VALUE, f"a value of {len(value)} characters; 1 to {MAX_INFO_VAL} are allowed"
            )
        items[key] = value

    def Delete(self, key: str) -> None:
        """Remove a key."""
        if key not in self._live():
            raise CallError(ERR_INFO_NOKEY, f"key {key!r} is not set")
        del self._items[key]

    def Get_nkeys(self) -> int:
        """Return how many keys there are."""
        return len(self._live())

    def Get_nthkey(self, n: int) -> str:
        """Return the n-th key."""
        keys = list(self._live())
        if not 0 <= n < len(keys):
            raise CallError(ERR_ARG, f"key number {n} of {len(keys)}")
        return keys[n]

    def __len__(self) -> int:
        return len(self._items)

    def __bool__(self) -> bool:
        return self._identity is not None

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._items))

    def __contains__(self, value: str, /) -> bool:
        return value in self._items

    def __getitem__(self, item: str, /) -> str:
        return self._items[item]

    def __setitem__(self, item: str, value: str, /) -> None:
        if not self:
            raise KeyError(item)
        self.Set(item, value)

    def __delitem__(self, item: str, /) -> None:
        if item not in self._items:
            raise KeyError(item)
        del self._items[item]

    def get(self, key: str, default: str | None = None) -> str | None:
        """Return the value of a key, or the default."""
        return self._items.get(key, default)

    def keys(self) -> list[str]:
        """Return the keys."""
        return list(self._items)

    def values(self) -> list[str]:
        """Return the values."""
        return list(self._items.values())

    def items(self) -> list[tuple[str, str]]:
        """Return (key, value) pairs."""
        return list(self._items.items())

    def update(self, items: Info | Mapping[str, str] | Iterable[tuple[str, str]] = (), **kwds: str) -> None:
        """Set several keys."""
        pairs = items.items() if isinstance(items, (Info, Mapping)) else items
        for key, value in [*pairs, *kwds.items()]:
            self.Set(key, value)

    def pop(self, key: str, *default: str) -> str:
        """Remove a key and return its value, or the default."""
        return self._items.pop(key, *default)

    def popitem(self) -> tuple[str, str]:
        """Remove one key and return it with its value."""
        return self._items.popitem()

    def copy(self) -> Self:
        """Return a copy."""
        return self.Dup() if self else type(self)()

    def clear(self) -> None:
        """Remove all keys."""
        self._live().clear()


INFO_NULL: Final = Info()
INFO_ENV: Final = Info.Create()
