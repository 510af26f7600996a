"""How new datatypes are made of old ones.

This room knows the arguments of MPI's type constructors and turns them into layouts; what a datatype is beside
that, its child class knows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np

from spawnsim.comm import constants as c
from spawnsim.comm.failures import ERR_ARG, ERR_COUNT, CallError
from spawnsim.comm.handles import Attributed
from spawnsim.comm.integers import AINT, each_integer, integer
from spawnsim.comm.layouts import Layout, integers, place, repeat
from spawnsim.comm.recipes import Recipe, darray_displacements, subarray_layout
from spawnsim.errors import ParameterError

if TYPE_CHECKING:
    from spawnsim.comm.datatypes import Datatype


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
        layout = self._strided(count, blocklength, stride)
        return self._derive(layout, "HVECTOR", count=count, blocklength=blocklength, stride=stride)

    def _strided(self, count: int, blocklength: int, stride_nbytes: int) -> Layout:
        starts = np.arange(count, dtype=np.int64) * stride_nbytes
        return repeat(self.live(), np.full(count, blocklength, np.int64), starts)

    def _blocks(self, blocklengths: Any, displacements: Any, unit_nbytes: int) -> Layout:
        lengths, starts = integers(blocklengths), integers(displacements)
        if len(lengths) != len(starts):
            raise CallError(ERR_ARG, f"{len(lengths)} blocklengths but {len(starts)} displacements")
        if (lengths < 0).any():
            raise CallError(ERR_COUNT, f"negative blocklength {lengths.min()}")
        return repeat(self.live(), lengths, starts * unit_nbytes)

    def Create_indexed(self, blocklengths: Sequence[int], displacements: Sequence[int]) -> Self:
        """Return blocks of given lengths at displacements counted in elements."""
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
        padded = -(-layout.extent // layout.align) * layout.align
        types = {
            "blocklengths": lengths,
            "displacements": starts,
            "datatypes": [*datatypes],
        }
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
        return self._derive(
            part.resized(0, math.prod(parameters["gsizes"]) * base.extent), "DARRAY", **parameters
        )

    def Create_resized(self, lb: int, extent: int) -> Self:
        """Return the same data with other bounds: the next element starts `extent` bytes later."""
        lb, extent = integer(lb, AINT), integer(extent, AINT)
        return self._derive(self.live().resized(lb, extent), "RESIZED", lb=lb, extent=extent)

    Resized = Create_resized

    @classmethod
    def fromcode(cls, code: str) -> Datatype:
        """Return the datatype of a typecode or type string."""
        found: Datatype = tables().fromcode(code)
        return found

    @classmethod
    def Get_value_index(cls, value: Datatype, index: Datatype) -> Datatype:
        """Return the pair type for `MINLOC` and `MAXLOC`, or `DATATYPE_NULL`."""
        found: Datatype = tables().value_index(value, index)
        return found

    @classmethod
    def Match_size(cls, typeclass: int, size: int) -> Datatype:
        """Return the type of a class and size in bytes."""
        found: Datatype = tables().match_size(typeclass, size)
        return found

    @classmethod
    def Create_f90_integer(cls, r: int) -> Datatype:
        """Return an integer of at least r decimal digits."""
        found: Datatype = tables().f90("INTEGER", r=r)
        return found

    @classmethod
    def Create_f90_real(cls, p: int, r: int) -> Datatype:
        """Return a real of at least p digits and exponent range r."""
        found: Datatype = tables().f90("REAL", p=p, r=r)
        return found

    @classmethod
    def Create_f90_complex(cls, p: int, r: int) -> Datatype:
        """Return a complex number whose parts have at least p digits and exponent range r."""
        found: Datatype = tables().f90("COMPLEX", p=p, r=r)
        return found


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


def tables() -> Any:
    """Return the room of predefined types; it is built from this one, so that it can be asked only at call time."""
    from spawnsim.comm import predefined

    return predefined


def press() -> Any:
    """Return the room of packing, likewise built from this one."""
    from spawnsim.comm import packing

    return packing
