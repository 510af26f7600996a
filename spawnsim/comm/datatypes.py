"""MPI's datatypes: what one element is, where its bytes lie, and how new types are made of old ones.

This room knows layouts and names. Buffers, messages and operations are built on it and unknown to it. The predefined
types are in `predefined`; a datatype is immutable but for its name, commit mark and attributes.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from spawnsim.comm import constants as c
from spawnsim.comm.constructors import Constructors, press, tables
from spawnsim.comm.failures import ERR_TYPE, CallError
from spawnsim.comm.layouts import Bytes, Layout
from spawnsim.comm.recipes import Recipe

BF16 = np.dtype([("bfloat16", np.uint16)])
"""Storage of one bfloat16: its own dtype, so that arithmetic never takes it for an unsigned integer."""


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
            raise CallError(ERR_TYPE, f"{self._name} is predefined and cannot be freed")
        self.delete_attributes()
        self._identity = None

    # How it was made

    @property
    def basic(self) -> Datatype | None:
        """The predefined type of which all elements are; None if there are several."""
        if self.recipe.name == "NAMED":
            return self
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
        return base if base is not None else tables().DATATYPE_NULL, self.recipe.name, made["parameters"]

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
        kinds = {"c": "S1", "U": "U1"}
        return kinds.get(self.code) or f"{_dtype(self).kind}{_dtype(self).itemsize}"

    @property
    def typechar(self) -> str:
        """The character code ("d" for `DOUBLE`), "V" for others, "" for the null type."""
        if not self.code:
            return "V" if self else ""
        return self.code if self.code in ("c", "U") else _dtype(self).char

    # Packing by hand

    def Pack(self, inbuf: Any, outbuf: Any, position: int, comm: Any) -> int:
        """Append the elements in `inbuf` to `outbuf` at a byte position; return the new position."""
        return int(press().pack(self, (inbuf, outbuf), position))

    def Unpack(self, inbuf: Any, position: int, outbuf: Any, comm: Any) -> int:
        """Fill `outbuf` with elements from `inbuf` at a byte position; return the new position."""
        return int(press().unpack(self, (inbuf, outbuf), position))

    def Pack_size(self, count: int, comm: Any) -> int:
        """Return the bytes that `count` elements take when packed."""
        return count * self.live().size

    def Pack_external(self, datarep: str, inbuf: Any, outbuf: Any, position: int) -> int:
        """Append the elements in `inbuf` to `outbuf` in a portable form ("external32")."""
        return int(press().pack_external(self, datarep, (inbuf, outbuf), position))

    def Unpack_external(self, datarep: str, inbuf: Any, position: int, outbuf: Any) -> int:
        """Fill `outbuf` with elements in a portable form from `inbuf`."""
        return int(press().unpack_external(self, datarep, (inbuf, outbuf), position))

    def Pack_external_size(self, datarep: str, count: int) -> int:
        """Return the bytes that `count` elements take in a portable form."""
        return int(press().external_nbytes(self, datarep, count))

    def wire(self, memory: Bytes, count: int, origin: int = 0) -> NDArray[Any]:
        """Return an owned 1-D snapshot of `count` elements: typed for dense predefined types, else bytes."""
        return self.live().gather(memory, count, origin)


def _dtype(datatype: Datatype) -> np.dtype[Any]:
    assert datatype.dtype is not None, "only types with a code have a type string"
    return datatype.dtype


def _predefined(name: str) -> Datatype:
    """Return a predefined type by MPI's name, for pickle."""
    found: Datatype = tables().NAMED[name]
    return found


def _rebuild(cls: type[Datatype], recipe: Recipe, committed: bool) -> Datatype:
    """Make a derived type again, for pickle."""
    maker = recipe.base if recipe.base is not None else cls
    names = {"DUP": "Dup"}
    new: Datatype = getattr(maker, names.get(recipe.name, f"Create_{recipe.name.lower()}"))(
        **recipe.parameters
    )
    new.committed = committed
    return new
