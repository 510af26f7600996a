"""Common features of MPI objects: null handles, equality, attributes with keyvals, error handlers, hints, names.

A keyval is an `int` that carries its own callbacks, so no table of keyvals is needed. `Info` is a dictionary with MPI's
limits: spawnsim stores hints but ignores them. Integer arguments are converted here in the same way as in mpi4py:
ranks, tags and similar arguments by `__int__` (2.5 becomes 2), lists of numbers by `__index__`. Values that do not fit
C's types are refused.
"""

from __future__ import annotations

import itertools
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import index
from typing import Any, ClassVar, Final, NoReturn, Self
from weakref import WeakValueDictionary

from spawnsim.comm.constants import KEYVAL_INVALID, MAX_INFO_KEY, MAX_INFO_VAL
from spawnsim.comm.failures import (
    ERR_ARG,
    ERR_ERRHANDLER,
    ERR_INFO_KEY,
    ERR_INFO_NOKEY,
    ERR_INFO_VALUE,
    ERR_KEYVAL,
    ERR_OTHER,
    CallError,
    SpecTypeError,
    TooLarge,
    lacking,
)

INT: Final = 1 << 31  # one more than the largest of C's `int`
AINT: Final = 1 << 63  # for addresses, displacements and sizes in bytes


def integer(value: Any, limit: int = INT) -> int:
    """Return one number as a plain `int`. Raises `SpecTypeError` (a TypeError) or `TooLarge` (an OverflowError)."""
    if type(value) is not int:
        # `__int__` and not `index`: mpi4py converts single numbers as C does, so 2.5 is rank 2, and tensors of one
        # element serve.
        if not hasattr(type(value), "__int__"):
            raise SpecTypeError(f"an integer is required, got {value!r}")
        value = int(value)
    return _fitting(value, limit)


def each_integer(values: Iterable[Any], limit: int = INT) -> list[int]:
    """Return a list of numbers as plain `int`s. Raises as `integer` does, also for floats."""
    # Lists go by `index`, and refuse floats, as in mpi4py.
    return [_fitting(index(value), limit) for value in values]


def _fitting(value: int, limit: int) -> int:
    if not -limit <= value < limit:
        raise TooLarge(f"value too large to convert to an integer of C: {value}")
    return value


_numbered: WeakValueDictionary[int, Identity] = WeakValueDictionary()  # by the number that was given out


@lacking
class Identity:
    """An object that can be freed, whose copies (`MPI.Group(group)`) are equal to it: the behaviour, without slots."""

    __slots__ = ()
    _identity: object | None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identity):
            return NotImplemented
        # Two null handles share the identity None, so their kinds are compared as well.
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
        number = self._number()
        if number:
            _numbered[number] = self
        return number

    def _number(self) -> int:
        return 0 if self._identity is None else id(self._identity)

    def toint(self) -> int:
        return self.handle

    def py2f(self) -> int:
        """Return -1, as mpi4py does without Fortran; a warning says so."""
        warnings.warn(
            "py2f() is -1: no library of Fortran can use virtual ranks", RuntimeWarning, stacklevel=2
        )
        return -1

    @classmethod
    def fromhandle(cls, handle: int) -> Any:
        """Return the object of a number that `handle` or `toint` has given."""
        found: Any = _numbered.get(handle)
        if found is None and handle == 0:
            return cls()
        if not isinstance(found, cls) and not issubclass(cls, type(found)):
            raise CallError(
                ERR_ARG, f"{cls.__name__}.fromhandle({handle}): no {cls.__name__} has this number"
            )
        return type(found)(found)

    @classmethod
    def fromint(cls, arg: int) -> Any:
        return cls.fromhandle(arg)

    def free(self) -> None:
        """Free the object unless it is predefined or freed already."""
        if self and not getattr(self, "is_predefined", False):
            getattr(self, "Free", lambda: None)()


def same_kind(kind: type[Identity], given: Any) -> None:
    """Refuse to create a handle of this kind from an object of another kind. Raises `SpecTypeError`."""
    if not isinstance(given, kind):
        raise SpecTypeError(f"{kind.__name__}({given!r}): give another {kind.__name__}, or nothing")


def reduced(obj: Any, constants: Mapping[str, Any], name: str) -> str | tuple[Any, ...]:
    """Return how to pickle a predefined object: by its name; a copy of it as a copy of that."""
    return name if constants[name] is obj else (type(obj), (constants[name],))


class Handle(Identity):
    """An `Identity` with a slot for the identity that makes copies equal."""

    __slots__ = ("__weakref__", "_identity")


OBSERVERS: list[Callable[[Owned | Keyval, bool], None]] = []
"""They see each object that a program must free: when it is new (True), and when it is freed."""


def _notice(owned: Owned | Keyval, new: bool) -> None:
    for observer in OBSERVERS:
        observer(owned, new)


class Owned(Handle):
    """A handle of an object that a program makes and must free."""

    __slots__ = ("_origin",)
    kind: ClassVar[str]
    _origin: str  # for observers: the line that made the object, which its copies share

    def _made(self) -> Self:
        _notice(self, True)
        return self

    def _freed(self) -> None:
        _notice(self, False)
        self._identity = None

    def _copy(self, other: Owned) -> None:
        """Become another handle of an object."""
        self._identity, self._origin = other._identity, getattr(other, "_origin", "")


def _kin(one: Identity, other: Identity) -> bool:
    """Return whether two null handles are of the same kind (`DATATYPE_NULL == OP_NULL` is false)."""
    return isinstance(one, type(other)) or isinstance(other, type(one))


class Keyval(int):
    """The key of an attribute: an `int`, as MPI requires, that carries its callbacks."""

    kind = "keyval"
    _origin: str
    copy_fn: Callable[[Any, int, Any], Any] | bool | None
    delete_fn: Callable[[Any, int, Any], None] | None

    @classmethod
    def fresh(
        cls, copy_fn: Callable[..., Any] | bool | None, delete_fn: Callable[..., None] | None
    ) -> Keyval:
        """Return a new, unique keyval."""
        keyval = cls(next(_fresh))
        keyval.copy_fn, keyval.delete_fn = copy_fn, delete_fn
        _notice(keyval, True)
        return keyval


_fresh = itertools.count(0x24000001)


def _called_back(function: Callable[..., Any], *args: Any) -> Any:
    """Call a keyval's function. As in MPI, the program gets an MPI error for its exception, which is printed."""
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
        if keyval == KEYVAL_INVALID:
            raise CallError(ERR_KEYVAL, "KEYVAL_INVALID names no attribute")
        return self._attributes.get(keyval)

    def Set_attr(self, keyval: int, attrval: Any) -> None:
        """Store an attribute; a former one under this keyval is deleted first."""
        if not isinstance(keyval, Keyval):
            raise CallError(ERR_KEYVAL, f"keyval {keyval} was not made by Create_keyval")
        # MPI: setting an attribute that exists deletes the old one first, through its callback.
        if keyval in self._attributes:
            self.Delete_attr(keyval)
        self._attributes[keyval] = attrval

    def Delete_attr(self, keyval: int) -> None:
        # Find the stored key, since a program may pass a plain int, which has no callbacks.
        key = next((held for held in self._attributes if held == keyval), None)
        if key is None:
            raise CallError(ERR_KEYVAL, f"nothing is stored under keyval {int(keyval)}")
        # Removed before the callback, so that a callback that inspects the object does not find it.
        value = self._attributes.pop(key)
        if isinstance(key, Keyval) and key.delete_fn is not None:
            _called_back(key.delete_fn, self, key, value)

    def copy_attributes(self, to: Attributes) -> None:
        """Copy the attributes that want it to a duplicate; `copy_fn` True copies, a callable says what."""
        for key, value in self._attributes.items():
            rule = key.copy_fn if isinstance(key, Keyval) else None
            kept = value if rule else NotImplemented
            # Only a function is called; it returns NotImplemented for "do not copy", since None is a value like
            # any other.
            copied = _called_back(rule, self, key, value) if callable(rule) else kept
            if copied is not NotImplemented:
                to._attributes[key] = copied

    def delete_attributes(self) -> None:
        """Delete all attributes that a program has stored, the last one first, as `Free` must."""
        # MPI: in reverse order of setting, since later attributes may depend on earlier ones.
        for key in [held for held in self._attributes if isinstance(held, Keyval)][::-1]:
            self.Delete_attr(key)

    @classmethod
    def Create_keyval(
        cls,
        copy_fn: Callable[[Any, int, Any], Any] | None = None,
        delete_fn: Callable[[Any, int, Any], None] | None = None,
        nopython: bool = False,
    ) -> int:
        return Keyval.fresh(copy_fn, delete_fn)

    @classmethod
    def Free_keyval(cls, keyval: int) -> int:
        """Free a keyval; its attributes stay until their objects are freed."""
        if not isinstance(keyval, Keyval):
            raise CallError(ERR_KEYVAL, f"keyval {keyval} was not made by Create_keyval")
        _notice(keyval, False)
        return KEYVAL_INVALID


class Attributed(Attributes, Handle):
    """A handle with cached attributes."""

    __slots__ = ("_attributes",)


class Errhandler(Owned):
    """Whether errors are exceptions in Python, or end the run."""

    __slots__ = ("name",)
    kind = "error handler"
    name: str

    def __new__(cls, errhandler: Errhandler | None = None) -> Self:
        self = super().__new__(cls)
        if errhandler is not None:
            same_kind(Errhandler, errhandler)
            self._copy(errhandler)
        else:
            self._identity = None
        self.name = errhandler.name if errhandler is not None else "ERRHANDLER_NULL"
        return self

    @classmethod
    def of(cls, name: str) -> Self:
        """Return a predefined error handler."""
        self = cls()
        # The handler is its own identity: that tells the constants from the copies which `Get_errhandler` gives out.
        self._identity, self.name = self, name
        return self

    is_predefined = True

    def Free(self) -> None:
        """Free the handle; objects that use the handler keep it."""
        if self._identity is None:
            raise CallError(ERR_ERRHANDLER, "Free of a null error handler")
        # MPI: a predefined handler that was got may be freed as a handle; the constant itself may not.
        if self._identity is self:
            raise CallError(
                ERR_ERRHANDLER, f"{self.name} is predefined: free what Get_errhandler returned instead"
            )
        self._freed()

    def __reduce__(self) -> str | tuple[Any, ...]:
        return reduced(self, globals(), self.name)


ERRHANDLER_NULL: Final = Errhandler()
ERRORS_RETURN: Final = Errhandler.of("ERRORS_RETURN")
ERRORS_ABORT: Final = Errhandler.of("ERRORS_ABORT")
ERRORS_ARE_FATAL: Final = Errhandler.of("ERRORS_ARE_FATAL")


Items = "Info | Mapping[str, str] | Iterable[tuple[str, str]]"


class Info(Owned):
    """An ordered mapping of strings, under mpi4py's names."""

    __slots__ = ("_items",)
    kind = "info object"
    _items: dict[str, str]

    def __new__(cls, info: Info | None = None) -> Self:
        self = super().__new__(cls)
        if info is not None:
            same_kind(Info, info)
            self._copy(info)
        else:
            self._identity = None
        # The dictionary is shared by copies of a handle, as two handles of one info object are in C.
        self._items = info._items if info is not None else {}
        return self

    @classmethod
    def Create(cls, items: Info | Mapping[str, str] | Iterable[tuple[str, str]] | None = None) -> Self:
        return cls.of(items)._made()

    @classmethod
    def of(cls, items: Info | Mapping[str, str] | Iterable[tuple[str, str]] | None = None) -> Self:
        """Return a new info object that the program need not free."""
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
        if self._identity in (None, INFO_ENV._identity):
            return reduced(self, globals(), "INFO_ENV" if self else "INFO_NULL")
        return type(self).of, (self.items(),)

    def Free(self) -> None:
        self._live()
        self._freed()
        self._items = {}

    def _live(self) -> dict[str, str]:
        if self._identity is None:
            raise CallError(ERR_ARG, "the info object is null or was freed")
        return self._items

    def Dup(self) -> Self:
        return type(self).Create(list(self._live().items()))

    def Get(self, key: str) -> str | None:
        return self._live().get(key)

    def Set(self, key: str, value: str) -> None:
        items = self._live()
        if not 0 < len(key) <= MAX_INFO_KEY:
            raise CallError(ERR_INFO_KEY, f"a key of {len(key)} characters; 1 to {MAX_INFO_KEY} are allowed")
        if not 0 < len(value) <= MAX_INFO_VAL:
            raise CallError(
                ERR_INFO_VALUE, f"a value of {len(value)} characters; 1 to {MAX_INFO_VAL} are allowed"
            )
        items[key] = value

    def Delete(self, key: str) -> None:
        if key not in self._live():
            raise CallError(ERR_INFO_NOKEY, f"key {key!r} is not set")
        del self._items[key]

    def Get_nkeys(self) -> int:
        return len(self._live())

    def Get_nthkey(self, n: int) -> str:
        keys = list(self._live())
        if not 0 <= n < len(keys):
            raise CallError(ERR_ARG, f"key number {n} of {len(keys)}")
        return keys[n]

    def __len__(self) -> int:
        return len(self._items)

    def __bool__(self) -> bool:
        return self._identity is not None

    def __iter__(self) -> Iterator[str]:
        # A copy of the keys, so that a program may delete while it walks over them.
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
        return self._items.get(key, default)

    def keys(self) -> list[str]:
        return list(self._items)

    def values(self) -> list[str]:
        return list(self._items.values())

    def items(self) -> list[tuple[str, str]]:
        return list(self._items.items())

    def update(self, items: Info | Mapping[str, str] | Iterable[tuple[str, str]] = (), **kwds: str) -> None:
        if not self:
            raise KeyError("the info object is null")
        pairs = items.items() if isinstance(items, (Info, Mapping)) else items
        for key, value in [*pairs, *kwds.items()]:
            self.Set(key, value)

    def pop(self, key: str, *default: str) -> str:
        return self._items.pop(key, *default)

    def popitem(self) -> tuple[str, str]:
        return self._items.popitem()

    def copy(self) -> Self:
        return self.Dup() if self else type(self)()

    def clear(self) -> None:
        self._items.clear()


INFO_NULL: Final = Info()
INFO_ENV: Final = Info.of()


@lacking
class Named(Attributes):
    """Name, hints, error handler and attributes, as communicators and windows have them; without slots."""

    __slots__ = ()
    _kind: ClassVar[str]  # COMM or WIN
    _name: str
    _info: Info | None
    _errhandler: Errhandler | None

    def _exist(self) -> None:
        """Refuse a null or freed object. One that was revoked is still there: all calls of this class are local."""
        raise NotImplementedError

    def _abort(self, errorcode: int) -> NoReturn:
        raise NotImplementedError

    def Get_name(self) -> str:
        """Return the name; null objects have one, too."""
        return f"MPI_{self._kind}_NULL" if self._identity is None else self._name

    def Set_name(self, name: str) -> None:
        self._exist()
        self._name = name  # type: ignore[misc]  # a slot of the subclass

    name = property(Get_name, Set_name)

    def Get_info(self) -> Info:
        self._exist()
        return Info.Create(self._info)

    def Set_info(self, info: Info) -> None:
        """Set hints; all are stored and ignored."""
        self._exist()
        self._info = Info.of(info)  # type: ignore[misc]  # a slot of the subclass

    info = property(Get_info, Set_info)

    def Get_errhandler(self) -> Errhandler:
        self._exist()
        # A fresh handle: in MPI, the program must free a handle that it has got.
        return Errhandler(self._errhandler or ERRORS_RETURN)._made()

    def Set_errhandler(self, errhandler: Errhandler) -> None:
        self._exist()
        if not errhandler:
            raise CallError(ERR_ARG, "Set_errhandler(ERRHANDLER_NULL): give ERRORS_RETURN, or another one")
        self._errhandler = errhandler  # type: ignore[misc]  # a slot of the subclass

    def Call_errhandler(self, errorcode: int) -> None:
        if self.Get_errhandler().name != "ERRORS_RETURN":
            self._abort(errorcode)
