"""MPI's datatypes: what one element is, where its bytes lie, and how new types are made of old ones.

The constructors turn MPI's arguments into layouts. A datatype is immutable but for its name, commit mark and
attributes. Buffers, messages and operations are built on datatypes and unknown to them; MPI's own types are in
`predefined`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Self, cast

import numpy as np
from numpy.typing import NDArray

from spawnsim.comm import constants as c
from spawnsim.comm import packing
from spawnsim.comm.failures import ERR_ARG, ERR_COUNT, ERR_TYPE, CallError, UnknownTypeError
from spawnsim.comm.handles import AINT, Attributed, each_integer, integer, same_kind
from spawnsim.comm.layouts import (
    Bytes,
    Layout,
    Recipe,
    darray_displacements,
    integers,
    place,
    repeat,
    subarray_layout,
)
from spawnsim.errors import ParameterError
from spawnsim.phantoms import PhantomArray, is_phantom


class Constructors(Attributed):
    """The constructors of `Datatype`."""

    __slots__ = ()

    def live(self) -> Layout:
        """Return the layout of one element."""
        raise NotImplementedError

    @classmethod
    def of(cls, layout: Layout, recipe: Recipe) -> Self:
        """Return a new derived datatype, not yet committed."""
        raise NotImplementedError

    def _derive(self, layout: Layout, name: str, **parameters: Any) -> Self:
        return type(self).of(layout, Recipe(name, cast("Datatype", self), parameters))

    def Create_contiguous(self, count: int) -> Self:
        """Return `count` elements in a row."""
        count = _count(count)
        return self._derive(place([(self.live(), count, 0)]), "CONTIGUOUS", count=count)

    def Create_vector(self, count: int, blocklength: int, stride: int) -> Self:
        """Return `count` blocks of `blocklength` elements whose starts are `stride` elements apart."""
        count, blocklength, stride = _count(count), _count(blocklength), integer(stride, AINT)
        layout = self._strided(count, blocklength, stride * self.live().extent)
        return self._derive(layout, "VECTOR", count=count, blocklength=blocklength, stride=stride)

    def Create_hvector(self, count: int, blocklength: int, stride: int) -> Self:
        """Return `count` blocks of `blocklength` elements whose starts are `stride` bytes apart."""
        count, blocklength, stride = _count(count), _count(blocklength), integer(stride, AINT)
        # The stride of an hvector is in bytes and travels unchanged, while a vector's counts extents of the base type.
        layout = self._strided(count, blocklength, stride)
        return self._derive(layout, "HVECTOR", count=count, blocklength=blocklength, stride=stride)

    def _strided(self, count: int, blocklength: int, stride_nbytes: int) -> Layout:
        starts = np.arange(count, dtype=np.int64) * stride_nbytes
        return repeat(self.live(), np.full(count, blocklength, np.int64), starts)

    def _blocks(self, blocklengths: Any, displacements: Any, unit_nbytes: int) -> Layout:
        lengths, starts = integers(blocklengths), integers(displacements)
        if len(lengths) != len(starts):
            raise CallError(ERR_ARG, f"{len(lengths)} blocklengths but {len(starts)} displacements")
        # Checked for all before a layout is made: a negative length would shift the blocks behind it without an error.
        if (lengths < 0).any():
            raise CallError(ERR_COUNT, f"negative blocklength {lengths.min()}")
        return repeat(self.live(), lengths, starts * unit_nbytes)

    def Create_indexed(self, blocklengths: Sequence[int], displacements: Sequence[int]) -> Self:
        """Return blocks of given lengths at displacements counted in elements."""
        # Plain lists, because the recipe must keep what was given even if the program changes its array afterwards.
        lengths, starts = _list(blocklengths), _list(displacements)
        layout = self._blocks(lengths, starts, self.live().extent)
        return self._derive(layout, "INDEXED", blocklengths=lengths, displacements=starts)

    def Create_hindexed(self, blocklengths: Sequence[int], displacements: Sequence[int]) -> Self:
        """Return blocks of given lengths at displacements counted in bytes."""
        lengths, starts = _list(blocklengths), _list(displacements)
        layout = self._blocks(lengths, starts, 1)
        return self._derive(layout, "HINDEXED", blocklengths=lengths, displacements=starts)

    def Create_indexed_block(self, blocklength: int, displacements: Sequence[int]) -> Self:
        """Return blocks of one length at displacements counted in elements."""
        length, starts = _count(blocklength), _list(displacements)
        layout = self._blocks([length] * len(starts), starts, self.live().extent)
        return self._derive(layout, "INDEXED_BLOCK", blocklength=length, displacements=starts)

    def Create_hindexed_block(self, blocklength: int, displacements: Sequence[int]) -> Self:
        """Return blocks of one length at displacements counted in bytes."""
        length, starts = _count(blocklength), _list(displacements)
        layout = self._blocks([length] * len(starts), starts, 1)
        return self._derive(layout, "HINDEXED_BLOCK", blocklength=length, displacements=starts)

    @classmethod
    def Create_struct(
        cls, blocklengths: Sequence[int], displacements: Sequence[int], datatypes: Sequence[Datatype]
    ) -> Self:
        """Return blocks of several types at byte displacements; the extent is rounded up to the alignment, as in C."""
        if not len(blocklengths) == len(displacements) == len(datatypes):
            raise ParameterError("Create_struct: blocklengths, displacements and datatypes differ in length")
        layouts = [datatype.live() for datatype in datatypes]
        lengths, starts = _list(blocklengths), _list(displacements)
        parts = zip(layouts, map(_count, lengths), starts, strict=True)
        layout = place(list(parts))
        # As C pads a struct, so that an array of structs matches numpy's aligned records. MPI allows this rounding.
        padded = -(-layout.extent // layout.align) * layout.align
        types = {
            "blocklengths": lengths,
            "displacements": starts,
            "datatypes": [*datatypes],
        }
        # The lower bound stays: padding is added at the end only.
        return cls.of(layout.resized(layout.lb, padded), Recipe("STRUCT", None, types))

    def Create_subarray(
        self, sizes: Sequence[int], subsizes: Sequence[int], starts: Sequence[int], order: int = c.ORDER_C
    ) -> Self:
        """Return a box of an n-dimensional array of these elements."""
        sizes, subsizes, starts = _list(sizes), _list(subsizes), _list(starts)
        layout = subarray_layout(self.live(), (sizes, subsizes, starts), order)
        boxes = {"sizes": [*sizes], "subsizes": [*subsizes], "starts": [*starts], "order": order}
        return self._derive(layout, "SUBARRAY", **boxes)

    def Create_darray(
        self, size: int, rank: int, gsizes: Sequence[int], distribs: Sequence[int], dargs: Sequence[int],
        psizes: Sequence[int], order: int = c.ORDER_C,
    ) -> Self:  # fmt: skip
        """Return one rank's part of an n-dimensional array that is spread over a grid of ranks."""
        parameters: dict[str, Any] = {"size": integer(size), "rank": integer(rank), "gsizes": _list(gsizes)}
        parameters |= {
            "distribs": _list(distribs),
            "dargs": _list(dargs),
            "psizes": _list(psizes),
            "order": order,
        }
        base = self.live()
        at = darray_displacements(parameters) * base.extent
        part = repeat(base, np.ones(len(at), np.int64), at)
        # MPI: the extent is that of the whole array, so that a second element lies behind it.
        return self._derive(
            part.resized(0, math.prod(parameters["gsizes"]) * base.extent), "DARRAY", **parameters
        )

    def Create_resized(self, lb: int, extent: int) -> Self:
        """Return the same data with other bounds: the next element starts `extent` bytes later."""
        lb, extent = integer(lb, AINT), integer(extent, AINT)
        return self._derive(self.live().resized(lb, extent), "RESIZED", lb=lb, extent=extent)

    Resized = Create_resized


def _list(values: Any) -> list[int]:
    """Return numbers as plain `int`s; an array's without asking each."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "iu":
        numbers: list[int] = values.reshape(-1).tolist()
        return numbers
    return each_integer(values, AINT)


def _count(count: int) -> int:
    count = integer(count, AINT)
    if count < 0:
        raise CallError(ERR_COUNT, f"negative count {count}")
    return count


class Datatype(Constructors):
    """A datatype under mpi4py's names.

    Slots of use to implementers: `size` (bytes of data of one element), `dense` (elements lie in memory as they
    travel), `dtype` (numpy's dtype of one element if the type is predefined, else None), `layout`.
    """

    __slots__ = (
        "_name",
        "code",
        "committed",
        "dense",
        "dtype",
        "family",
        "is_predefined",
        "layout",
        "recipe",
        "size",
    )
    _name: str
    code: str
    committed: bool
    dense: bool
    dtype: np.dtype[Any] | None
    family: str
    is_predefined: bool
    layout: Layout
    recipe: Recipe
    size: int

    def __new__(cls, datatype: Datatype | None = None) -> Self:
        self = super().__new__(cls)
        self._identity, self._attributes = None, {}
        self._name, self.size, self.dense, self.dtype, self.code = "", 0, False, None, ""
        self.committed = self.is_predefined = False
        if datatype is not None:
            same_kind(Datatype, datatype)
            for slot in (*Datatype.__slots__, "_identity", "_attributes"):
                if hasattr(datatype, slot):
                    setattr(self, slot, getattr(datatype, slot))
        return self

    @classmethod
    def of(cls, layout: Layout, recipe: Recipe) -> Self:
        """Return a new derived datatype, not yet committed."""
        self = cls()
        self._identity, self.layout, self.recipe, self.family = object(), layout, recipe, "derived"
        self.size, self.dense = layout.size, layout.dense
        return self

    def live(self) -> Layout:
        """Return the layout; a null or freed datatype is an error."""
        if self._identity is None:
            raise CallError(ERR_TYPE, "the datatype is null or was freed")
        return self.layout

    def __reduce__(self) -> str | tuple[Any, ...]:
        if not self:
            return (_predefined, ("DATATYPE_NULL",))
        if self.recipe.name == "NAMED":
            known = _predefined(self._name)
            # A copy of a predefined type pickles as a copy, so that it does not become the constant itself.
            return (_predefined, (self._name,)) if known is self else (type(self), (known,))
        return (_rebuild, (type(self), self.recipe, self.committed))

    # What it is

    def Get_size(self) -> int:
        """Return the bytes of data in one element (gaps not counted)."""
        return self.live().size

    def Get_extent(self) -> tuple[int, int]:
        """Return (lower bound, extent) in bytes: the next element starts `extent` later."""
        layout = self.live()
        return layout.lb, layout.extent

    def Get_true_extent(self) -> tuple[int, int]:
        """Return (first byte of data, bytes from there to the end of the data)."""
        layout = self.live()
        return layout.true_lb, layout.true_ub - layout.true_lb

    extent = property(lambda self: self.Get_extent()[1])
    lb = property(lambda self: self.Get_extent()[0])
    ub = property(lambda self: sum(self.Get_extent()))
    true_extent = property(lambda self: self.Get_true_extent()[1])
    true_lb = property(lambda self: self.Get_true_extent()[0])
    true_ub = property(lambda self: sum(self.Get_true_extent()))

    def Get_name(self) -> str:
        """Return the name: "MPI_DOUBLE"; derived types have none until they are given one."""
        return self._name if self else "MPI_DATATYPE_NULL"

    def Set_name(self, name: str) -> None:
        """Give the type a name."""
        self.live()
        # One less than MPI's limit: C's strings need room for their last byte.
        self._name = name[: c.MAX_OBJECT_NAME - 1]

    name = property(Get_name, Set_name)

    def Dup(self) -> Self:
        """Return a copy, with the attributes whose keyval wants that; committed if this one is."""
        new = type(self).of(self.live(), Recipe("DUP", self, {}))
        new.committed, new.dtype, new.code, new.family = self.committed, self.dtype, self.code, self.family
        self.copy_attributes(new)
        return new

    Create_dup = Dup

    def Commit(self) -> Self:
        """Allow the type in communication."""
        self.live()
        self.committed = True
        return self

    def Free(self) -> None:
        """Make this handle null; predefined types stay."""
        self.live()
        if self.is_predefined:
            # MPI: freeing a predefined type is erroneous. All ranks share it here, so one rank would take it from
            # the others.
            raise CallError(ERR_TYPE, f"{self._name} is predefined and cannot be freed")
        # Callbacks first: MPI lets a delete function still use the object.
        self.delete_attributes()
        self._identity = None

    # How it was made

    @property
    def basic(self) -> Datatype | None:
        """The predefined type of which all elements are; None if there are several."""
        if self.recipe.name == "NAMED":
            return self
        # Structs have no base, their types are among the contents.
        parts = self.recipe.contents()[3] if self.recipe.base is None else [self.recipe.base]
        found = [part.basic for part in parts]
        return found[0] if found and all(each is found[0] for each in found) else None

    def Get_envelope(self) -> tuple[int, int, int, int, int]:
        """Return (integers, addresses, large counts, datatypes, combiner): how much `Get_contents` returns."""
        self.live()
        return self.recipe.envelope

    def Get_contents(self) -> tuple[list[int], list[int], list[int], list[Datatype]]:
        """Return the arguments that made the type."""
        self.live()
        if self.recipe.name == "NAMED":
            raise CallError(ERR_TYPE, f"{self._name} was not made of others: it has no contents")
        return self.recipe.contents()

    def decode(self) -> tuple[Datatype, str, dict[str, Any]]:
        """Return (base type, combiner's name, arguments by name)."""
        self.live()
        made = self.recipe.copied()
        base = self if self.recipe.name == "NAMED" else made["base"]
        return base if base is not None else BY_NAME["DATATYPE_NULL"], self.recipe.name, made["parameters"]

    envelope = property(Get_envelope)
    contents = property(Get_contents)

    @property
    def combiner(self) -> int:
        """The constructor that made the type."""
        return self.Get_envelope()[4]

    @property
    def is_named(self) -> bool:
        """Whether MPI names this type."""
        return self.combiner == c.COMBINER_NAMED

    def tocode(self) -> str:
        """Return the typecode ("d" for `DOUBLE`)."""
        self.live()
        if not self.code:
            raise ValueError("cannot map to character code or type string")
        return self.code

    @property
    def typestr(self) -> str:
        """The type string of the array interface: "f8" for `DOUBLE`, "V16" for others of 16 bytes, "" for none."""
        if not self.code:
            return f"V{self.extent}" if self else ""
        # Characters have no kind of their own in numpy's array interface.
        kinds = {"c": "S1", "U": "U1"}
        return kinds.get(self.code) or f"{_dtype(self).kind}{_dtype(self).itemsize}"

    @property
    def typechar(self) -> str:
        """The character code ("d" for `DOUBLE`), "V" for others, "" for the null type."""
        if not self.code:
            return "V" if self else ""
        return self.code if self.code in ("c", "U") else _dtype(self).char

    # MPI's own types

    @classmethod
    def fromcode(cls, code: str) -> Datatype:
        """Return the datatype of a typecode or type string ("d", "f8")."""
        try:
            return typedict[code]
        except KeyError:
            known = " ".join(typedict)
            raise UnknownTypeError(f"cannot map {code!r} to an MPI datatype; known codes: {known}") from None

    @classmethod
    def Get_value_index(cls, value: Datatype, index: Datatype) -> Datatype:
        """Return the pair type for `MINLOC` and `MAXLOC`, or `DATATYPE_NULL`."""
        value.live(), index.live()
        return VALUE_INDEX.get((value, index), BY_NAME["DATATYPE_NULL"])

    @classmethod
    def Match_size(cls, typeclass: int, size: int) -> Datatype:
        """Return the type of a class (real, integer, complex, logical) and size in bytes."""
        if (typeclass, size) not in _SIZED:
            raise CallError(ERR_ARG, f"no type of class {typeclass} has {size} bytes")
        return BY_NAME[_SIZED[typeclass, size]]

    @classmethod
    def Create_f90_integer(cls, r: int) -> Datatype:
        """Return an integer of at least r decimal digits."""
        sizes = (n for n, digits in ((1, 2), (2, 4), (4, 9), (8, 18)) if r <= digits)
        return cls._f90("INTEGER", next(sizes, 0), r=r)

    @classmethod
    def Create_f90_real(cls, p: int, r: int) -> Datatype:
        """Return a real of at least p digits and exponent range r."""
        return cls._f90("REAL", _f90_nbytes(p, r), p=p, r=r)

    @classmethod
    def Create_f90_complex(cls, p: int, r: int) -> Datatype:
        """Return a complex number whose parts have at least p digits and exponent range r."""
        return cls._f90("COMPLEX", 2 * _f90_nbytes(p, r), p=p, r=r)

    @classmethod
    def _f90(cls, name: str, nbytes: int, **parameters: int) -> Datatype:
        found = BY_NAME.get(f"{name}{nbytes}")
        if not found:
            raise CallError(ERR_ARG, f"no {name.lower()} has {parameters}")
        new = Datatype.of(found.layout, Recipe(f"F90_{name}", None, parameters))
        # They count as predefined in MPI: committed, and never freed.
        new.dtype, new.code, new.family = found.dtype, found.code, found.family
        new.committed = new.is_predefined = True
        return new

    # Packing by hand

    def Pack(self, inbuf: Any, outbuf: Any, position: int, comm: Any) -> int:
        """Append the elements in `inbuf` to `outbuf` at a byte position; return the new position."""
        return packing.pack(self, (inbuf, outbuf), position)

    def Unpack(self, inbuf: Any, position: int, outbuf: Any, comm: Any) -> int:
        """Fill `outbuf` with elements from `inbuf` at a byte position; return the new position."""
        return packing.unpack(self, (inbuf, outbuf), position)

    def Pack_size(self, count: int, comm: Any) -> int:
        """Return the bytes that `count` elements take when packed."""
        return count * self.live().size

    def Pack_external(self, datarep: str, inbuf: Any, outbuf: Any, position: int) -> int:
        """Append the elements in `inbuf` to `outbuf` in a portable form ("external32")."""
        return packing.pack_external(self, datarep, (inbuf, outbuf), position)

    def Unpack_external(self, datarep: str, inbuf: Any, position: int, outbuf: Any) -> int:
        """Fill `outbuf` with elements in a portable form from `inbuf`."""
        return packing.unpack_external(self, datarep, (inbuf, outbuf), position)

    def Pack_external_size(self, datarep: str, count: int) -> int:
        """Return the bytes that `count` elements take in a portable form."""
        return packing.external_nbytes(self, datarep, count)

    def wire(self, memory: Bytes, count: int, origin: int = 0) -> NDArray[Any]:
        """Return an owned 1-D snapshot of `count` elements: typed for dense predefined types, else bytes."""
        if is_phantom(memory):
            return PhantomArray(count * self.size, np.uint8)  # type: ignore[return-value]
        return self.live().gather(memory, count, origin)


# `predefined` fills these when it is imported, as `spawnsim.comm` always does.
BY_NAME: Final[dict[str, Datatype]] = {}
"""Every predefined datatype under mpi4py's name ("DOUBLE"), `DATATYPE_NULL` included."""
NAMED: Final[dict[str, Datatype]] = {}
"""The same under MPI's names ("MPI_DOUBLE")."""
typedict: Final[dict[str, Datatype]] = {}
"""Typecodes of `array`, `struct` and numpy, and type strings, to datatypes."""
VALUE_INDEX: Final[dict[tuple[Datatype, Datatype], Datatype]] = {}
"""(Type of the value, type of the index) to the pair type of both."""
_SIZED: Final = {
    (1, 4): "REAL4", (1, 8): "REAL8", (1, 16): "REAL16", (2, 1): "INTEGER1", (2, 2): "INTEGER2", (2, 4): "INTEGER4",
    (2, 8): "INTEGER8", (3, 8): "COMPLEX8", (3, 16): "COMPLEX16", (3, 32): "COMPLEX32",
    (4, 1): "LOGICAL1", (4, 2): "LOGICAL2", (4, 4): "LOGICAL4", (4, 8): "LOGICAL8",
}  # fmt: skip


def _f90_nbytes(p: int, r: int) -> int:
    """Return the bytes of the shortest real of p digits and exponent range r; 0: there is none."""
    reals = ((4, 6, 37), (8, 15, 307), (16, 18, 4931))
    return next((nbytes for nbytes, digits, ten in reals if p <= digits and r <= ten), 0)


def _dtype(datatype: Datatype) -> np.dtype[Any]:
    assert datatype.dtype is not None, "only types with a code have a type string"
    return datatype.dtype


def _predefined(name: str) -> Datatype:
    """Return a predefined type by MPI's name, for pickle."""
    return NAMED[name]


def _rebuild(cls: type[Datatype], recipe: Recipe, committed: bool) -> Datatype:
    """Make a derived type again, for pickle."""
    # A struct is made by the class, every other type by a method of its base.
    maker = recipe.base if recipe.base is not None else cls
    names = {"DUP": "Dup"}
    new: Datatype = getattr(maker, names.get(recipe.name, f"Create_{recipe.name.lower()}"))(
        **recipe.parameters
    )
    new.committed = committed
    return new
