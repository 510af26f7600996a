"""What all MPI objects share: being null, equality, attributes under keyvals, error handlers.

This room knows identity and nothing of communication. A keyval is an `int` that carries its own callbacks, so no
table of keyvals exists anywhere.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, Final, Self
from weakref import WeakValueDictionary

from spawnsim.comm.constants import KEYVAL_INVALID
from spawnsim.comm.failures import ERR_ERRHANDLER, ERR_KEYVAL, ERR_OTHER, CallError
from spawnsim.errors import UnsupportedError


class Identity:
    """An object that can be freed, whose copies (`MPI.Group(group)`) are equal to it: the behaviour, without slots."""

    __slots__ = ()
    _identity: object | None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identity):
            return NotImplemented
        return self._identity is other._identity and (self._identity is not None or _kin(self, other))

    def __ne__(self, other: object) -> bool:
        same = self.__eq__(other)
        return same if same is NotImplemented else not same

    def __hash__(self) -> int:
        return hash(self._identity)

    def __bool__(self) -> bool:
        return self._identity is not None

    @property
    def handle(self) -> int:
        """A number that is the same for equal objects; 0 for a null one. No C library knows it."""
        if self._identity is None:
            return 0
        number = id(self._identity)
        known = _given_out.get()
        if known is None:
            _given_out.set(known := WeakValueDictionary())
        known[number] = self
        return number

    def toint(self) -> int:
        """Return the number of the handle."""
        return self.handle

    def py2f(self) -> int:
        """Return the number of the handle."""
        return self.handle

    @classmethod
    def fromhandle(cls, handle: int) -> Self:
        """Return a copy of the object whose number it is, while that exists; any other number is refused."""
        if handle == 0:
            return cls()
        known = _given_out.get()
        found = None if known is None else known.get(handle)
        if found is None or id(found._identity) != handle:
            raise UnsupportedError(
                f"{cls.__name__}.fromhandle({handle}): no such object is there; C libraries have no handles here"
            )
        copy: Self = type(found)(found)
        return copy

    @classmethod
    def fromint(cls, arg: int, /) -> Self:
        """Do the same as `fromhandle`."""
        return cls.fromhandle(arg)

    @classmethod
    def f2py(cls, arg: int) -> Self:
        """Do the same as `fromhandle`."""
        return cls.fromhandle(arg)

    def free(self) -> None:
        """Free the object unless it is predefined or freed already."""
        if self and not getattr(self, "is_predefined", False):
            getattr(self, "Free", lambda: None)()


# Number -> one of the objects that have it. Each virtual rank has its own, for ranks share what makes objects equal.
_given_out: ContextVar[WeakValueDictionary[int, Any] | None] = ContextVar("spawnsim_handles", default=None)


def reduced(obj: Any, constants: Mapping[str, Any], name: str) -> str | tuple[Any, ...]:
    """Return how to pickle a predefined object: by its name; a copy of it as a copy of that."""
    return name if constants[name] is obj else (type(obj), (constants[name],))


class Handle(Identity):
    """The same with a slot for what makes it equal to others."""

    __slots__ = ("__weakref__", "_identity")


def _kin(one: Identity, other: Identity) -> bool:
    """Return whether two null handles are of the same kind (`DATATYPE_NULL == OP_NULL` is false)."""
    return isinstance(one, type(other)) or isinstance(other, type(one))


class Keyval(int):
    """The key of an attribute: an `int`, as MPI wants it, that carries its callbacks."""

    copy_fn: Callable[[Any, int, Any], Any] | bool | None
    delete_fn: Callable[[Any, int, Any], None] | None

    @classmethod
    def fresh(
        cls, copy_fn: Callable[..., Any] | bool | None, delete_fn: Callable[..., None] | None
    ) -> Keyval:
        """Return a keyval that no other equals."""
        keyval = cls(next(_fresh))
        keyval.copy_fn, keyval.delete_fn = copy_fn, delete_fn
        return keyval


_fresh = itertools.count(0x24000001)


def _called_back(function: Callable[..., Any], *args: Any) -> Any:
    """Call a keyval's function. MPI stands between it and the program: its error is told, and becomes one of MPI's."""
    try:
        return function(*args)
    except Exception as error:
        traceback.print_exception(error)
        raise CallError(
            ERR_OTHER, f"the keyval's {function.__name__} raised {type(error).__name__}: {error}"
        ) from error


class Attributes(Identity):
    """Cached attributes, as datatypes, communicators and windows have them: the behaviour, without slots."""

    __slots__ = ()
    _attributes: dict[int, Any]

    def Get_attr(self, keyval: int) -> int | Any | None:
        """Return the attribute under a keyval, or None."""
        return self._attributes.get(keyval)

    def Set_attr(self, keyval: int, attrval: Any) -> None:
        """Store an attribute; a former one under this keyval is deleted first."""
        if not isinstance(keyval, Keyval):
            raise CallError(ERR_KEYVAL, f"keyval {keyval} was not made by Create_keyval")
        if keyval in self._attributes:
            self.Delete_attr(keyval)
        self._attributes[keyval] = attrval

    def Delete_attr(self, keyval: int) -> None:
        """Delete an attribute, calling the keyval's `delete_fn`."""
        key = next((held for held in self._attributes if held == keyval), None)
        if key is None:
            raise CallError(ERR_KEYVAL, f"nothing is stored under keyval {int(keyval)}")
        value = self._attributes.pop(key)
        if isinstance(key, Keyval) and key.delete_fn is not None:
            _called_back(key.delete_fn, self, key, value)

    def copy_attributes(self, to: Attributes) -> None:
        """Copy the attributes that want it to a duplicate; `copy_fn` True copies, a callable says what."""
        for key, value in self._attributes.items():
            rule = key.copy_fn if isinstance(key, Keyval) else None
            kept = value if rule else NotImplemented
            copied = _called_back(rule, self, key, value) if callable(rule) else kept
            if copied is not NotImplemented:
                to._attributes[key] = copied

    def delete_attributes(self) -> None:
        """Delete all attributes that a program has stored, the last one first, as `Free` must."""
        for key in [held for held in self._attributes if isinstance(held, Keyval)][::-1]:
            self.Delete_attr(key)

    @classmethod
    def Create_keyval(
        cls,
        copy_fn: Callable[[Any, int, Any], Any] | None = None,
        delete_fn: Callable[[Any, int, Any], None] | None = None,
        nopython: bool = False,
    ) -> int:
        """Return a new keyval. `nopython` (attributes are C integers) makes no difference here."""
        return Keyval.fresh(copy_fn, delete_fn)

    @classmethod
    def Free_keyval(cls, keyval: int) -> int:
        """Give up a keyval; attributes under it stay until their objects are freed."""
        if not isinstance(keyval, Keyval):
            raise CallError(ERR_KEYVAL, f"keyval {keyval} was not made by Create_keyval")
        return KEYVAL_INVALID


class Attributed(Attributes, Handle):
    """A handle with cached attributes."""

    __slots__ = ("_attributes",)


class Errhandler(Handle):
    """What happens on an error: return (raise in Python), abort, or a function of the program."""

    __slots__ = ("function", "name")
    name: str
    function: Callable[[Any, int], None] | None

    def __new__(cls, errhandler: Errhandler | None = None) -> Self:
        self = super().__new__(cls)
        self._identity = errhandler._identity if errhandler is not None else None
        self.function = errhandler.function if errhandler is not None else None
        self.name = errhandler.name if errhandler is not None else "ERRHANDLER_NULL"
        return self

    @classmethod
    def of(cls, name: str, function: Callable[[Any, int], None] | None = None) -> Self:
        """Return a new error handler."""
        self = cls()
        self._identity, self.name, self.function = self, name, function
        return self

    @property
    def is_predefined(self) -> bool:
        """Whether MPI defines this handler."""
        return self.function is None

    def Free(self) -> None:
        """Give up the handle; objects that use the handler keep it."""
        if self._identity is None:
            raise CallError(ERR_ERRHANDLER, "Free of a null error handler")
        if self._identity is self and self.is_predefined:
            raise CallError(
                ERR_ERRHANDLER, f"{self.name} is predefined: free what Get_errhandler returned instead"
            )
        self._identity = None

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self.function is not None:
            raise CallError(ERR_ERRHANDLER, "a user-defined error handler cannot be pickled")
        return reduced(self, globals(), self.name)


ERRHANDLER_NULL: Final = Errhandler()
ERRORS_RETURN: Final = Errhandler.of("ERRORS_RETURN")
ERRORS_ABORT: Final = Errhandler.of("ERRORS_ABORT")
ERRORS_ARE_FATAL: Final = Errhandler.of("ERRORS_ARE_FATAL")
