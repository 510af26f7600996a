"""MPI's datatypes: the type and memory layout of an element, and the construction of derived types.

The constructors convert MPI's arguments to layouts. A datatype is immutable except for its name and commit mark. The
end of the module creates MPI's own types, and the tables from typecodes and numpy dtypes to them. Buffers, messages and
operations depend on datatypes, but not the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Self, cast

import numpy as np
from numpy.typing import NDArray

from spawnsim.comm import constants as c
from spawnsim.comm.failures import (
    ERR_ARG,
    ERR_COUNT,
    ERR_TYPE,
    CallError,
    SpecBufferError,
    Truncated,
    UnknownTypeError,
    lacking,
)
from spawnsim.comm.handles import AINT as LARGE
from spawnsim.comm.handles import Owned, each_integer, integer, same_kind
from spawnsim.comm.layouts import BF16, Bytes, Layout, Recipe, atom, integers, place, repeat, subarray_layout
from spawnsim.comm.memory import as_bytes, flat
from spawnsim.errors import ParameterError
from spawnsim.phantoms import PhantomArray, is_phantom


class Constructors(Owned):
    """The constructors of `Datatype`."""

    __slots__ = ()
    kind = "datatype"

    def live(self) -> Layout:
        raise NotImplementedError

    @classmethod
    def of(cls, layout: Layout, recipe: Recipe) -> Self:
        """Return a new derived datatype, not yet committed."""
        raise NotImplementedError

    def _derive(self, layout: Layout, name: str, **parameters: Any) -> Self:
        return type(self).of(layout, Recipe(name, cast("Datatype", self), parameters))

    def Create_contiguous(self, count: int) -> Self:
        count = _count(count)
        return self._derive(place([(self.live(), count, 0)]), "CONTIGUOUS", count=count)

    def Create_vector(self, count: int, blocklength: int, stride: int) -> Self:
        count, blocklength, stride = _count(count), _count(blocklength), integer(stride, LARGE)
        layout = self._strided(count, blocklength, stride * self.live().extent)
        return self._derive(layout, "VECTOR", count=count, blocklength=blocklength, stride=stride)

    def Create_hvector(self, count: int, blocklength: int, stride: int) -> Self:
        """Return `count` blocks of `blocklength` elements whose starts are `stride` bytes apart."""
        count, blocklength, stride = _count(count), _count(blocklength), integer(stride, LARGE)
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
        # All lengths are checked before a layout is created: a negative one would silently shift the following blocks.
        if (lengths < 0).any():
            raise CallError(ERR_COUNT, f"negative blocklength {lengths.min()}")
        return repeat(self.live(), lengths, starts * unit_nbytes)

    def Create_indexed(self, blocklengths: Sequence[int], displacements: Sequence[int]) -> Self:
        # Plain lists, because the recipe must keep the original values even if the program changes its array later.
        lengths, starts = _list(blocklengths), _list(displacements)
        layout = self._blocks(lengths, starts, self.live().extent)
        return self._derive(layout, "INDEXED", blocklengths=lengths, displacements=starts)

    def Create_hindexed(self, blocklengths: Sequence[int], displacements: Sequence[int]) -> Self:
        """Return blocks of given lengths at displacements counted in bytes."""
        lengths, starts = _list(blocklengths), _list(displacements)
        layout = self._blocks(lengths, starts, 1)
        return self._derive(layout, "HINDEXED", blocklengths=lengths, displacements=starts)

    def Create_indexed_block(self, blocklength: int, displacements: Sequence[int]) -> Self:
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
        sizes, subsizes, starts = _list(sizes), _list(subsizes), _list(starts)
        layout = subarray_layout(self.live(), (sizes, subsizes, starts), order)
        boxes = {"sizes": [*sizes], "subsizes": [*subsizes], "starts": [*starts], "order": order}
        return self._derive(layout, "SUBARRAY", **boxes)

    def Create_resized(self, lb: int, extent: int) -> Self:
        """Return the same data with other bounds: the next element starts `extent` bytes later."""
        lb, extent = integer(lb, LARGE), integer(extent, LARGE)
        return self._derive(self.live().resized(lb, extent), "RESIZED", lb=lb, extent=extent)

    Resized = Create_resized


def _list(values: Any) -> list[int]:
    """Return numbers as plain `int`s; an array is converted as a whole."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "iu":
        numbers: list[int] = values.reshape(-1).tolist()
        return numbers
    return each_integer(values, LARGE)


def _count(count: int) -> int:
    count = integer(count, LARGE)
    if count < 0:
        raise CallError(ERR_COUNT, f"negative count {count}")
    return count


@lacking
class Datatype(Constructors):
    """A datatype with mpi4py's method names.

    Slots for implementers: `size` (bytes of data of one element), `dense` (elements lie in memory in packed form),
    `dtype` (numpy's dtype of one element if the type is predefined, else None), `layout`.
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
        self._identity = None
        self._name, self.size, self.dense, self.dtype, self.code = "", 0, False, None, ""
        self.committed = self.is_predefined = False
        if datatype is not None:
            same_kind(Datatype, datatype)
            for slot in (*Datatype.__slots__, "_identity", "_origin"):
                if hasattr(datatype, slot):
                    setattr(self, slot, getattr(datatype, slot))
        return self

    @classmethod
    def of(cls, layout: Layout, recipe: Recipe) -> Self:
        """Return a new derived datatype, not yet committed."""
        self = cls()
        self._identity, self.layout, self.recipe, self.family = object(), layout, recipe, "derived"
        self.size, self.dense = layout.size, layout.dense
        return self._made()

    def live(self) -> Layout:
        """Return the layout; a null or freed datatype is an error."""
        if self._identity is None:
            raise CallError(ERR_TYPE, "the datatype is null or was freed")
        return self.layout

    def __reduce__(self) -> str | tuple[Any, ...]:
        if not self:
            return (_predefined, ("DATATYPE_NULL",)) if self is DATATYPE_NULL else (type(self), ())
        if self.recipe.name == "NAMED":
            known = _predefined(self._name)
            # A copy of a predefined type pickles as a copy, so that it does not become the constant itself.
            return (_predefined, (self._name,)) if known is self else (type(self), (known,))
        return (_rebuild, (type(self), self.recipe, self.committed))

    # Properties

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
        """Return the name, such as "MPI_DOUBLE"; a derived type is unnamed until `Set_name`."""
        return self._name if self else "MPI_DATATYPE_NULL"

    def Set_name(self, name: str) -> None:
        self.live()
        # One less than MPI's limit: C's strings need room for their last byte.
        self._name = name[: c.MAX_OBJECT_NAME - 1]

    name = property(Get_name, Set_name)

    def Dup(self) -> Self:
        new = type(self).of(self.live(), Recipe("DUP", self, {}))
        new.committed, new.dtype, new.code, new.family = self.committed, self.dtype, self.code, self.family
        return new

    Create_dup = Dup

    def Commit(self) -> Self:
        self.live()
        self.committed = True
        return self

    def Free(self) -> None:
        """Make this handle null; predefined types cannot be freed."""
        self.live()
        if self.is_predefined:
            # MPI: freeing a predefined type is erroneous. All ranks share it here, so one rank would take it from
            # the others.
            raise CallError(ERR_TYPE, f"{self._name} is predefined and cannot be freed")
        self._freed()

    # Construction

    @property
    def basic(self) -> Datatype | None:
        """The predefined type of all elements; None if there are several."""
        if self.recipe.name == "NAMED":
            return self
        # Structs have no base, their types are among the contents.
        parts = self.recipe.contents()[3] if self.recipe.base is None else [self.recipe.base]
        found = [part.basic for part in parts]
        return found[0] if found and all(each is found[0] for each in found) else None

    def Get_envelope(self) -> tuple[int, int, int, int, int]:
        """Return (integers, addresses, large counts, datatypes, combiner): the sizes of `Get_contents`' results."""
        self.live()
        return self.recipe.envelope

    def Get_contents(self) -> tuple[list[int], list[int], list[int], list[Datatype]]:
        self.live()
        if self.recipe.name == "NAMED":
            raise CallError(ERR_TYPE, f"{self._name} was not made from other datatypes: it has no contents")
        return self.recipe.contents()

    def decode(self) -> tuple[Datatype, str, dict[str, Any]]:
        self.live()
        made = self.recipe.copied()
        base = self if self.recipe.name == "NAMED" else made["base"]
        return base if base is not None else BY_NAME["DATATYPE_NULL"], self.recipe.name, made["parameters"]

    envelope = property(Get_envelope)
    contents = property(Get_contents)

    @property
    def combiner(self) -> int:
        return self.Get_envelope()[4]

    @property
    def is_named(self) -> bool:
        return self.combiner == c.COMBINER_NAMED

    def tocode(self) -> str:
        self.live()
        if not self.code:
            raise ValueError("cannot map to character code or type string")
        return self.code

    @property
    def typestr(self) -> str:
        """The type string of the array interface: "f8" for `DOUBLE`, "V16" for any other 16 bytes, "" for null."""
        if not self.code:
            return f"V{self.extent}" if self else ""
        # numpy's array interface has no separate kind for characters.
        kinds = {"c": "S1", "U": "U1"}
        return kinds.get(self.code) or f"{_dtype(self).kind}{_dtype(self).itemsize}"

    @property
    def typechar(self) -> str:
        """The character code ("d" for `DOUBLE`), "V" for other types, "" for the null type."""
        if not self.code:
            return "V" if self else ""
        return self.code if self.code in ("c", "U") else _dtype(self).char

    # MPI's own types

    @classmethod
    def Match_size(cls, typeclass: int, size: int) -> Datatype:
        """Return the type of Fortran of a class (`TYPECLASS_REAL`, …) and a size in bytes."""
        found = BY_NAME.get(f"{_TYPECLASSES.get(typeclass, '?')}{size}")
        if not found:
            raise CallError(ERR_ARG, f"Match_size({typeclass}, {size}): there is no such type")
        return found

    @classmethod
    def Get_value_index(cls, value: Datatype, index: Datatype) -> Datatype:
        """Return the predefined type of pairs of a value and an `INT`; the null type if there is none."""
        value.live(), index.live()
        pairs = (name for name in _PAIRS if index == INT and BY_NAME[name.removesuffix("_INT")] == value)
        return next((BY_NAME[name] for name in pairs), DATATYPE_NULL)

    @classmethod
    def fromcode(cls, code: str) -> Datatype:
        try:
            return typedict[code]
        except KeyError:
            known = " ".join(typedict)
            raise UnknownTypeError(f"cannot map {code!r} to an MPI datatype; known codes: {known}") from None

    # Packing by hand

    def Pack(self, inbuf: Any, outbuf: Any, position: int, comm: Any) -> int:
        """Append the elements in `inbuf` to `outbuf` at a byte position; return the new position."""
        source = as_bytes(flat(inbuf))
        count = self._whole(len(source))
        target = _room(outbuf, position, count * self.size)
        if count:
            target[...] = self.wire(source, count)
        return position + len(target)

    def Unpack(self, inbuf: Any, position: int, outbuf: Any, comm: Any) -> int:
        """Fill `outbuf` with elements from `inbuf` at a byte position; return the new position."""
        packed, target = as_bytes(flat(inbuf)), as_bytes(flat(outbuf))
        nbytes = self._whole(len(target)) * self.size
        if position + nbytes > len(packed):
            raise Truncated(message=f"{nbytes} bytes are requested at position {position} of {len(packed)}")
        self.layout.scatter(_room(outbuf, 0, len(target)), packed[position : position + nbytes])
        return position + nbytes

    def _whole(self, nbytes: int) -> int:
        """Return the number of elements that a buffer of `nbytes` holds."""
        extent = self.Get_extent()[1]
        if extent <= 0:
            raise ParameterError(f"cannot pack elements of extent {extent}")
        return nbytes // extent

    def Pack_size(self, count: int, comm: Any) -> int:
        """Return the bytes that `count` elements take when packed."""
        return count * self.live().size

    def wire(self, memory: Bytes, count: int, origin: int = 0) -> NDArray[Any]:
        """Return an owned 1-D snapshot of `count` elements: typed for dense predefined types, else bytes."""
        if is_phantom(memory):
            return PhantomArray(count * self.size, np.uint8)  # type: ignore[return-value]
        return self.live().gather(memory, count, origin)


def _room(buffer: Any, position: int, nbytes: int) -> Bytes:
    """Return `nbytes` bytes of a buffer that are to be written."""
    out = as_bytes(flat(buffer))
    if position < 0 or position + nbytes > len(out):
        raise Truncated(
            message=f"{nbytes} bytes at position {position} do not fit a buffer of {len(out)} bytes"
        )
    if not out.flags.writeable:
        raise SpecBufferError("the packed bytes go to a read-only buffer: pass writable memory")
    return out[position : position + nbytes]


def _dtype(datatype: Datatype) -> np.dtype[Any]:
    assert datatype.dtype is not None, "only types with a code have a type string"
    return datatype.dtype


def _predefined(name: str) -> Datatype:
    return NAMED[name]


def _rebuild(cls: type[Datatype], recipe: Recipe, committed: bool) -> Datatype:
    """Reconstruct a derived type, for pickle."""
    # A struct is created by the class, every other type by a method of its base.
    maker = recipe.base if recipe.base is not None else cls
    names = {"DUP": "Dup"}
    new: Datatype = getattr(maker, names.get(recipe.name, f"Create_{recipe.name.lower()}"))(
        **recipe.parameters
    )
    new.committed = committed
    return new


# The predefined types, one line each: MPI's name, numpy's dtype of its storage, typecode, family. The family says which
# operations it allows: integer, float, complex, logical, byte, fortran (an integer without logical operations), pair,
# opaque.
_TABLE: Final = """
PACKED u1 B opaque | BYTE u1 B byte | AINT i8 p integer | OFFSET i8 p integer | COUNT i8 p integer
CHAR i1 c integer | WCHAR u4 U opaque | SIGNED_CHAR b b integer | SHORT h h integer | INT i i integer | LONG l l integer
LONG_LONG q q integer | UNSIGNED_CHAR B B integer | UNSIGNED_SHORT H H integer | UNSIGNED I I integer
UNSIGNED_LONG L L integer | UNSIGNED_LONG_LONG Q Q integer | FLOAT f f float | DOUBLE d d float | LONG_DOUBLE g g float
C_BOOL ? b1 logical | INT8_T i1 i1 integer | INT16_T i2 i2 integer | INT32_T i4 i4 integer | INT64_T i8 i8 integer
UINT8_T u1 u1 integer | UINT16_T u2 u2 integer | UINT32_T u4 u4 integer | UINT64_T u8 u8 integer | FLOAT16_T e e float
C_FLOAT_COMPLEX F F complex | C_DOUBLE_COMPLEX D D complex | C_LONG_DOUBLE_COMPLEX G G complex
CXX_BOOL ? ? logical | CXX_FLOAT_COMPLEX F F complex | CXX_DOUBLE_COMPLEX D D complex
CXX_LONG_DOUBLE_COMPLEX G G complex | CHARACTER i1 c integer | LOGICAL i4 i logical | INTEGER i i fortran
REAL f f float | DOUBLE_PRECISION d d float | COMPLEX F F complex | DOUBLE_COMPLEX D D complex
LOGICAL1 i1 b logical | LOGICAL2 i2 h logical | LOGICAL4 i4 i logical | LOGICAL8 i8 l logical
INTEGER1 i1 i1 fortran | INTEGER2 i2 i2 fortran | INTEGER4 i4 i4 fortran | INTEGER8 i8 i8 fortran
REAL2 e e float | REAL4 f f4 float | REAL8 d f8 float | REAL16 g f16 float
COMPLEX8 F c8 complex | COMPLEX16 D c16 complex | COMPLEX32 G c32 complex
"""
_ALIASES: Final = """
FLOAT32_T FLOAT | FLOAT64_T DOUBLE | C_COMPLEX C_FLOAT_COMPLEX | TWOINT INT_INT | UNSIGNED_INT UNSIGNED | BOOL C_BOOL
SIGNED_SHORT SHORT | SIGNED_INT INT | SIGNED_LONG LONG | SIGNED_LONG_LONG LONG_LONG | SINT8_T INT8_T | SINT16_T INT16_T
SINT32_T INT32_T | SINT64_T INT64_T | F_BOOL LOGICAL | F_INT INTEGER | F_FLOAT REAL | F_DOUBLE DOUBLE_PRECISION
F_COMPLEX COMPLEX | F_FLOAT_COMPLEX COMPLEX | F_DOUBLE_COMPLEX DOUBLE_COMPLEX
"""
_MPI_NAMES: Final = {
    "LONG_LONG": "MPI_LONG_LONG_INT", "C_FLOAT_COMPLEX": "MPI_C_COMPLEX", "INT_INT": "MPI_2INT",
}  # fmt: skip
_TYPECLASSES: Final = {
    c.TYPECLASS_REAL: "REAL", c.TYPECLASS_INTEGER: "INTEGER", c.TYPECLASS_COMPLEX: "COMPLEX",
    c.TYPECLASS_LOGICAL: "LOGICAL",
}  # fmt: skip
_PAIRS: Final = {"SHORT_INT": "h", "INT_INT": "i", "LONG_INT": "l", "FLOAT_INT": "f", "DOUBLE_INT": "d",
                 "LONG_DOUBLE_INT": "g"}  # fmt: skip


def _named(name: str, dtype: np.dtype[Any], code: str, family: str) -> Datatype:
    """Return a predefined type; the bytes of a pair type lie apart where C would pad."""
    layout = atom(dtype.itemsize, dtype.alignment)
    if family == "pair":
        value, index = dtype["value"].itemsize, dtype.fields["index"][1] if dtype.fields else 0
        layout = place([(atom(value), 1, 0), (atom(4), 1, index)]).resized(0, dtype.itemsize)
    new = Datatype.of(layout, Recipe("NAMED", None, {}))
    new.dtype, new.code, new.family = dtype, code, family
    new.committed = new.is_predefined = True
    new.Set_name(_MPI_NAMES.get(name, f"MPI_{name}"))
    return new


def _pair(code: str) -> np.dtype[Any]:
    return np.dtype([("value", code), ("index", np.int32)], align=True)


def _build() -> dict[str, Datatype]:
    rows = (row.split() for line in _TABLE.strip().splitlines() for row in line.split("|"))
    types = {name: _named(name, np.dtype(dtype), code, family) for name, dtype, code, family in rows}
    types |= {name: _named(name, _pair(code), "", "pair") for name, code in _PAIRS.items()}
    types["BFLOAT16_T"] = _named("BFLOAT16_T", BF16, "", "float")
    types |= dict.fromkeys(("DATATYPE_NULL", "COMPLEX4", "INTEGER16", "LOGICAL16"), Datatype())
    pairs = (pair.split() for line in _ALIASES.strip().splitlines() for pair in line.split("|"))
    return types | {alias: types[name] for alias, name in pairs}


BY_NAME: Final = _build()
"""Every predefined datatype under mpi4py's name ("DOUBLE"), `DATATYPE_NULL` included."""
NAMED: Final = {each.Get_name() if each else "DATATYPE_NULL": each for each in BY_NAME.values()}
"""The same under MPI's names ("MPI_DOUBLE")."""

DATATYPE_NULL = BY_NAME["DATATYPE_NULL"]
BYTE, PACKED, CHAR, BOOL, AINT = (BY_NAME[name] for name in ("BYTE", "PACKED", "CHAR", "C_BOOL", "AINT"))
INT, LONG, FLOAT, DOUBLE = (BY_NAME[name] for name in ("INT", "LONG", "FLOAT", "DOUBLE"))
INT32_T, INT64_T, UINT8_T, UINT64_T = (
    BY_NAME[name] for name in ("INT32_T", "INT64_T", "UINT8_T", "UINT64_T")
)
BFLOAT16_T, DOUBLE_INT, FLOAT_INT, INT_INT = (
    BY_NAME[name] for name in ("BFLOAT16_T", "DOUBLE_INT", "FLOAT_INT", "INT_INT")
)

_C_CODES: Final = """
? C_BOOL b SIGNED_CHAR h SHORT i INT l LONG q LONG_LONG B UNSIGNED_CHAR H UNSIGNED_SHORT I UNSIGNED L
UNSIGNED_LONG Q UNSIGNED_LONG_LONG e FLOAT16_T f FLOAT d DOUBLE g LONG_DOUBLE Zf C_FLOAT_COMPLEX Zd
C_DOUBLE_COMPLEX F C_FLOAT_COMPLEX D C_DOUBLE_COMPLEX Zg C_LONG_DOUBLE_COMPLEX G C_LONG_DOUBLE_COMPLEX i1
INT8_T i2 INT16_T i4 INT32_T i8 INT64_T f4 FLOAT f8 DOUBLE f16 LONG_DOUBLE c8 C_FLOAT_COMPLEX c16
C_DOUBLE_COMPLEX c32 C_LONG_DOUBLE_COMPLEX b1 C_BOOL u1 UINT8_T u2 UINT16_T u4 UINT32_T u8 UINT64_T f2
FLOAT16_T n COUNT N UNSIGNED_LONG p AINT P UNSIGNED_LONG c CHAR a CHAR S CHAR S1 CHAR s CHAR 1s CHAR U WCHAR
U1 WCHAR u UINT16_T 1u UINT16_T w WCHAR 1w WCHAR M INT64_T M8 INT64_T m INT64_T m8 INT64_T bf16 BFLOAT16_T
"""
_words = _C_CODES.split()
typedict: Final = {code: BY_NAME[name] for code, name in zip(_words[::2], _words[1::2], strict=True)}
"""Typecodes of `array`, `struct` and numpy, and type strings, to datatypes."""

BY_DTYPE: Final[dict[np.dtype[Any], Datatype]] = {
    np.dtype(char): typedict[char] for char in "?bhilqBHILQefdgFDG"
} | {np.dtype("S1"): CHAR, np.dtype("U1"): typedict["U"], BF16: BFLOAT16_T}
"""Native numpy dtypes to datatypes, as mpi4py finds them from the buffer's format."""
