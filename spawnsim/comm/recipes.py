"""How derived datatypes were made, and the arithmetic of boxes in n-dimensional arrays.

This room knows constructors' arguments; a recipe answers `Get_envelope`, `Get_contents` and `decode`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from spawnsim.comm import constants as c
from spawnsim.comm.failures import ERR_ARG, CallError
from spawnsim.comm.layouts import Ints, Layout, repeat

if TYPE_CHECKING:
    from spawnsim.comm.datatypes import Datatype

# Which arguments `Get_contents` lists as plain integers; all other numbers are large counts (MPI 4.1, table 5.1).
_PLAIN: Final = {
    "SUBARRAY": ("ndims", "order"),
    "DARRAY": ("size", "rank", "ndims", "distribs", "dargs", "psizes", "order"),
    "F90_REAL": ("p", "r"), "F90_COMPLEX": ("p", "r"), "F90_INTEGER": ("r",),
}  # fmt: skip
_LISTS_WITH_LENGTH: Final = ("INDEXED", "HINDEXED", "STRUCT", "INDEXED_BLOCK", "HINDEXED_BLOCK")


@dataclass(frozen=True)
class Recipe:
    """The constructor's name, the type that it was called on (None for none), and its arguments by name.

    It keeps handles of its own of the types, and gives out copies: whoever has them may free them.
    """

    name: str
    base: Datatype | None
    parameters: dict[str, Any]

    def __post_init__(self) -> None:
        for name, value in self.copied().items():
            object.__setattr__(self, name, value)

    def copied(self) -> dict[str, Any]:
        """Return base and parameters, with new handles of types."""
        parameters = dict(self.parameters)
        if "datatypes" in parameters:
            parameters["datatypes"] = [_copy(each) for each in parameters["datatypes"]]
        return {"base": None if self.base is None else _copy(self.base), "parameters": parameters}

    def contents(self) -> tuple[list[int], list[int], list[int], list[Datatype]]:
        """Return (integers, addresses, large counts, datatypes)."""
        own = self.copied()
        types = own["parameters"].get("datatypes", [own["base"]] if self.base is not None else [])
        numbers = {key: value for key, value in self.parameters.items() if key != "datatypes"}
        plain = _PLAIN.get(self.name, ())
        if "ndims" in plain:
            numbers = self._with_dimensions(numbers)
        if self.name in _LISTS_WITH_LENGTH:
            numbers = {"count": len(numbers["displacements"])} | numbers
        integers = _flat(value for key, value in numbers.items() if key in plain)
        return integers, [], _flat(value for key, value in numbers.items() if key not in plain), types

    def _with_dimensions(self, numbers: dict[str, Any]) -> dict[str, Any]:
        count = {"ndims": len(numbers["sizes" if self.name == "SUBARRAY" else "gsizes"])}
        if self.name == "SUBARRAY":
            return count | numbers
        head = {key: numbers[key] for key in ("size", "rank")}
        return head | count | {key: value for key, value in numbers.items() if key not in head}

    @cached_property
    def envelope(self) -> tuple[int, int, int, int, int]:
        """The numbers of (integers, addresses, large counts, datatypes, combiner)."""
        integers, addresses, counts, types = self.contents()
        combiner = getattr(c, f"COMBINER_{self.name}")
        return len(integers), len(addresses), len(counts), len(types), combiner


def _copy(datatype: Datatype) -> Datatype:
    return datatype if datatype.is_predefined else type(datatype)(datatype)


def _flat(values: Any) -> list[int]:
    return list(itertools.chain.from_iterable(v if isinstance(v, list) else [v] for v in values))


def subarray_layout(
    base: Layout, box: tuple[Sequence[int], Sequence[int], Sequence[int]], order: int
) -> Layout:
    """Return the layout of a box (sizes, subsizes, starts) of an array of `base` elements."""
    sizes, subsizes, starts = ([int(n) for n in part] for part in box)
    if not len(sizes) == len(subsizes) == len(starts) > 0:
        raise CallError(
            ERR_ARG, f"sizes, subsizes and starts differ in length: {sizes}, {subsizes}, {starts}"
        )
    for size, subsize, start in zip(sizes, subsizes, starts, strict=True):
        if subsize < 1 or start < 0 or start + subsize > size:
            raise CallError(ERR_ARG, f"box {start}:{start + subsize} does not fit an axis of {size}")
    at = _grid(sizes, [np.arange(a, a + n) for a, n in zip(starts, subsizes, strict=True)], order)
    layout = repeat(base, np.ones(len(at), np.int64), at * base.extent)
    return layout.resized(0, int(np.prod(sizes)) * base.extent)


def _grid(sizes: list[int], picked: list[Ints], order: int) -> Ints:
    """Return the element displacements of picked indices per axis, in memory order."""
    if order == c.ORDER_C:
        sizes, picked = sizes[::-1], picked[::-1]
    at, stride = np.zeros(1, np.int64), 1
    for size, indices in zip(sizes, picked, strict=True):
        at = (indices[:, None] * stride + at).reshape(-1)
        stride *= size
    return at


def darray_displacements(parameters: dict[str, Any]) -> Ints:
    """Return the element displacements of one rank's part of a distributed array (MPI 4.1, section 5.1.4)."""
    psizes, gsizes = parameters["psizes"], parameters["gsizes"]
    if int(np.prod(psizes)) != parameters["size"]:
        raise CallError(ERR_ARG, f"a grid of {psizes} ranks does not have {parameters['size']}")
    coords = [int(n) for n in np.unravel_index(parameters["rank"], psizes)]
    axes = zip(gsizes, parameters["distribs"], parameters["dargs"], psizes, coords, strict=True)
    return _grid(list(gsizes), [_owned(*axis) for axis in axes], parameters["order"])


def _owned(*axis: int) -> Ints:
    """Return the indices that one coordinate owns: (axis length, distribution, argument, ranks, coordinate)."""
    length, distribution, argument, ranks, coordinate = axis
    everything: Ints = np.arange(length, dtype=np.int64)
    if distribution == c.DISTRIBUTE_NONE:
        return everything
    default = -(-length // ranks) if distribution == c.DISTRIBUTE_BLOCK else 1
    block = default if argument == c.DISTRIBUTE_DFLT_DARG else argument
    mine: Ints = everything[everything // block % ranks == coordinate]
    return mine
