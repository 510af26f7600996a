"""MPI's reduction operations on arrays and objects, and the order in which contributions are combined.

The order determines the last bits of a floating-point sum. `reduce_tree` reproduces, bit for bit, the order of
`Allreduce` on one node in both MPI wheels (recursive doubling; if the number of ranks is not a power of two, ranks are
first folded in pairs). `reduce_ring` reproduces gloo's order. All backends use these functions, which do not depend on
clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import copy_context
from functools import partial
from itertools import accumulate
from typing import Any, Final, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from spawnsim.comm.buffers import as_buffer
from spawnsim.comm.datatypes import BY_DTYPE, BYTE, Datatype
from spawnsim.comm.failures import ERR_OP, CallError
from spawnsim.comm.handles import Owned, reduced, same_kind
from spawnsim.comm.layouts import BF16
from spawnsim.comm.memory import as_bytes, buffer
from spawnsim.errors import ParameterError
from spawnsim.phantoms import is_phantom

Array = NDArray[Any]
Kernel = Callable[[Array, Array], None]
Merge = Callable[[Array, Array, Array], Array]


def _widen(bits: Array) -> NDArray[np.float32]:
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _narrow(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return float32 rounded to bfloat16, to nearest and ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _arithmetic(ufunc: np.ufunc) -> Kernel:
    """Return a kernel for a numpy ufunc; bfloat16 is computed in float32 and rounded once."""

    def kernel(first: Array, inout: Array) -> None:
        if inout.dtype == BF16:
            inout.view(np.uint16)[...] = _narrow(ufunc(_widen(first), _widen(inout)))
        else:
            ufunc(first, inout, out=inout)

    return kernel


def _extremum(beats: np.ufunc) -> Kernel:
    """Return a kernel that takes the incoming value unless the local one beats it."""

    def kernel(first: Array, inout: Array) -> None:
        wide = inout.dtype == BF16
        local, incoming = (_widen(inout), _widen(first)) if wide else (inout, first)
        np.copyto(inout, first, where=~beats(local, incoming))

    return kernel


def _located(beats: np.ufunc) -> Kernel:
    """Return a kernel for (value, index) pairs; the lowest index wins a tie."""

    def kernel(first: Array, inout: Array) -> None:
        tie = first["value"] == inout["value"]
        lowest = np.minimum(first["index"], inout["index"])
        np.copyto(inout, first, where=beats(first["value"], inout["value"]))
        np.copyto(inout["index"], lowest, where=tie)

    return kernel


def _take(first: Array, inout: Array) -> None:
    inout[...] = first


def _keep(first: Array, inout: Array) -> None:
    pass


ARITHMETIC: Final[dict[str, np.ufunc]] = {
    "SUM": np.add, "PROD": np.multiply,
    "LAND": np.logical_and, "LOR": np.logical_or, "LXOR": np.logical_xor,
    "BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor,
}  # fmt: skip
ARRAY: Final[dict[str, Kernel]] = {name: _arithmetic(ufunc) for name, ufunc in ARITHMETIC.items()} | {
    "MAX": _extremum(np.greater), "MIN": _extremum(np.less),
    "MAXLOC": _located(np.greater), "MINLOC": _located(np.less),
    "REPLACE": _take, "NO_OP": _keep,
}  # fmt: skip

_NUMBERS = frozenset({"integer", "fortran", "float"})
FAMILIES: Final[dict[str, frozenset[str]]] = (
    dict.fromkeys(("SUM", "PROD"), _NUMBERS | {"complex"})
    | dict.fromkeys(("MAX", "MIN"), _NUMBERS)
    | dict.fromkeys(("LAND", "LOR", "LXOR"), frozenset({"integer", "logical"}))
    | dict.fromkeys(("BAND", "BOR", "BXOR"), frozenset({"integer", "fortran", "byte"}))
    | dict.fromkeys(("MAXLOC", "MINLOC"), frozenset({"pair"}))
)
"""The families of datatypes that an operation accepts (MPI 4.1, section 6.9.2)."""


def _best(x: Any, y: Any, better: bool) -> Any:
    """Return the better of two (value, index) pairs; `better`: whether x's value beats y's."""
    if better:
        return x[0], x[1]
    return (x[0], min(x[1], y[1])) if x[0] == y[0] else (y[0], y[1])


SCALAR: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "SUM": lambda x, y: x + y, "PROD": lambda x, y: x * y,
    "MAX": lambda x, y: y if y > x else x, "MIN": lambda x, y: y if y < x else x,
    "LAND": lambda x, y: bool(x) & bool(y), "LOR": lambda x, y: bool(x) | bool(y),
    "LXOR": lambda x, y: bool(x) ^ bool(y),
    "BAND": lambda x, y: x & y, "BOR": lambda x, y: x | y, "BXOR": lambda x, y: x ^ y,
    "MAXLOC": lambda x, y: _best(x, y, x[0] > y[0]), "MINLOC": lambda x, y: _best(x, y, x[0] < y[0]),
    "REPLACE": lambda x, y: y, "NO_OP": lambda x, y: x,
}  # fmt: skip


UserFunction = Callable[[Any, Any, Any], Any]
RMA_ONLY: Final = ("REPLACE", "NO_OP")


class Op(Owned):
    """An operation under mpi4py's names; `op(x, y)` applies it to two objects, `op.reduce` to two arrays."""

    __slots__ = ("_combine", "commute", "function", "name")
    kind = "operation"
    name: str
    function: UserFunction | None
    _combine: Kernel
    commute: bool

    def __new__(cls, op: Op | None = None) -> Self:
        self = super().__new__(cls)
        self._identity, self.name, self.function, self.commute = None, "OP_NULL", None, False
        if op is not None:
            same_kind(Op, op)
            for slot in ("_identity", "_origin", "_combine", "name", "function", "commute"):
                if hasattr(op, slot):
                    setattr(self, slot, getattr(op, slot))
        return self

    @classmethod
    def of(cls, name: str) -> Self:
        """Return a predefined operation."""
        self = cls()
        self._identity, self.name, self.commute, self._combine = object(), name, True, ARRAY[name]
        return self

    @classmethod
    def Create(cls, function: UserFunction, commute: bool = False) -> Self:
        """Return a user-defined operation: `function(inbuf, inoutbuf, datatype)` writes to `inoutbuf`."""
        self = cls()
        self._identity, self.name, self.function, self.commute = object(), "", function, bool(commute)
        return self._made()

    def Free(self) -> None:
        """Make this handle null; predefined operations cannot be freed."""
        self._live()
        if self.is_predefined:
            raise CallError(ERR_OP, f"{self.name} is predefined and cannot be freed")
        self._freed()

    def _live(self) -> None:
        if self._identity is None:
            raise CallError(ERR_OP, "the operation is null or was freed")

    def __repr__(self) -> str:
        return self.name or f"Op.Create({self.function!r})"

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self.function is not None:
            return type(self).Create, (self.function, self.commute)
        return reduced(self, globals(), self.name)

    def Is_commutative(self) -> bool:
        """Return whether operands may be swapped."""
        self._live()
        return self.commute

    is_commutative = property(Is_commutative)

    def Is_predefined(self) -> bool:
        """Return whether MPI defines the operation (also true for the null operation)."""
        return self.function is None

    is_predefined = property(Is_predefined)

    def __call__(self, x: Any, y: Any, /) -> Any:
        if self.function is not None:
            return self.function(x, y, None)
        if self._identity is None:
            raise ParameterError("OP_NULL cannot be called")
        return SCALAR[self.name](x, y)

    def check(self, datatype: Datatype, *, one_sided: bool = False) -> None:
        """Raise `ERR_OP` unless the operation accepts this datatype; `REPLACE` and `NO_OP` are for windows only."""
        self._live()
        if self.function is not None or (one_sided and self.name in RMA_ONLY):
            return
        # MPI: predefined operations accept only predefined types, and a duplicate is a derived type although it has a
        # dtype.
        if datatype.recipe.name == "DUP" or datatype.family not in FAMILIES.get(self.name, ()):
            where = " outside of one-sided calls" if self.name in RMA_ONLY else ""
            raise CallError(
                ERR_OP, f"{self.name} does not take {datatype.Get_name() or 'derived types'}{where}"
            )

    def reduce(
        self, invec: NDArray[Any], inoutvec: NDArray[Any], datatype: Datatype | None = None
    ) -> NDArray[Any]:
        """Compute `inoutvec = invec op inoutvec` in place and return it.

        Both are 1-D arrays as `Buffer.pack()` returns them: typed for predefined datatypes (`BF16` and pairs have their
        own dtypes), otherwise packed bytes. `datatype` is passed to a user-defined function; the default is the
        predefined type of the dtype.
        """
        if is_phantom(invec, inoutvec):
            return inoutvec
        if self.function is None:
            if inoutvec.dtype.kind in "iub":
                self._combine(invec, inoutvec)
            else:
                with np.errstate(all="ignore"):  # see `quiet`
                    self._combine(invec, inoutvec)
        elif datatype is None or datatype.dense or datatype.dtype is not None:
            kind = datatype or BY_DTYPE.get(inoutvec.dtype, BYTE)
            self.function(as_bytes(invec).view(buffer), as_bytes(inoutvec).view(buffer), kind)
        else:
            self._reduce_sparse(invec, inoutvec, datatype)
        return inoutvec

    def merging(self, datatype: Datatype) -> Merge:
        """Return `merge(a, b, out)`, which writes the combination of a and b to `out`: b, or memory of its size."""
        ufunc = ARITHMETIC.get(self.name) if self.function is None else None
        # The bare numpy call: a sum over 1,000 ranks merges 999 times, and copying one of the two operands first would
        # be one more pass over all memory.
        if ufunc is not None and datatype.is_predefined and datatype.dtype != BF16:
            return ufunc

        def merge(a: Array, b: Array, out: Array) -> Array:
            if out is not b:
                out[...] = b
            return self.reduce(a, out, datatype)

        return merge

    def _reduce_sparse(self, invec: NDArray[Any], inoutvec: NDArray[Any], datatype: Datatype) -> None:
        """Unpack the elements with their gaps, as the program's function expects, and pack the result."""
        layout, count = datatype.live(), len(inoutvec) // datatype.size
        low, high = layout.span(count)
        # A program's function may access whole extents, even behind the last byte of data, so this room must exist.
        high = max(high, layout.lb + count * layout.extent)
        first, inout = np.zeros(high - low, np.uint8), np.zeros(high - low, np.uint8)
        layout.scatter(first, as_bytes(invec), low)
        layout.scatter(inout, as_bytes(inoutvec), low)
        assert self.function is not None, "predefined operations never come here"
        self.function(first.view(buffer), inout.view(buffer), datatype)
        as_bytes(inoutvec)[...] = layout.gather(inout, count, low)

    def Reduce_local(self, inbuf: Any, inoutbuf: Any) -> None:
        """Compute `inoutbuf = inbuf op inoutbuf` on this rank."""
        source, target = as_buffer(inbuf), as_buffer(inoutbuf, writable=True)
        if source.datatype != target.datatype:
            raise ParameterError("mismatch in send and receive MPI datatypes")
        if source.count != target.count:
            raise ParameterError(f"mismatch in send count {source.count} and receive count {target.count}")
        self.check(target.datatype)
        target.unpack(self.reduce(source.pack(), target.pack(), target.datatype))


BY_NAME: Final = {name: Op.of(name) for name in ARRAY} | {"OP_NULL": Op()}
"""Every predefined operation by mpi4py's name."""

OP_NULL = BY_NAME["OP_NULL"]
SUM, PROD, MAX, MIN = (BY_NAME[name] for name in ("SUM", "PROD", "MAX", "MIN"))
LAND, LOR, LXOR = (BY_NAME[name] for name in ("LAND", "LOR", "LXOR"))
BAND, BOR, BXOR = (BY_NAME[name] for name in ("BAND", "BOR", "BXOR"))
MAXLOC, MINLOC, REPLACE, NO_OP = (BY_NAME[name] for name in ("MAXLOC", "MINLOC", "REPLACE", "NO_OP"))


def quiet(merge: Merge) -> Merge:
    """Return a predefined `merge` without numpy's overflow warnings; return a user-defined function unchanged."""
    # MPI libraries add without warnings, whatever numpy setting the program uses (`np.seterr(all="raise")`), and ranks
    # with different settings share the result. A separate context is used, since `np.errstate` costs as much as a sum.
    if not isinstance(merge, np.ufunc):
        return merge
    context = copy_context()
    context.run(np.seterr, all="ignore")
    return partial(context.run, merge)


T = TypeVar("T")
Combine = Callable[[T, T], T]
SHORT_NBYTES = 1024  # up to this size, arrays are copied into one array and summed there


def _pairs(parts: list[T], combine: Combine[T]) -> list[T]:
    return [combine(parts[i], parts[i + 1]) for i in range(0, len(parts) - 1, 2)]


def reduce_tree(parts: list[Array], merge: Merge) -> Array:
    """Combine arrays in the order of recursive doubling: fold to a power of two, then pairs, pairs of pairs, and so on.

    For `merge` see `Op.merging`. `parts` are not modified.
    """
    if merge is np.add and parts[0].nbytes <= SHORT_NBYTES and type(parts[0]) is np.ndarray:
        with np.errstate(all="ignore"):  # see `quiet`
            return _sum_by_levels(parts)
    tree = ReductionTree(merge, surplus(len(parts)))
    for part in parts:
        tree.add(part)
    return tree.result()


def reduce_to_root(parts: list[Array], merge: Merge, root: int) -> Array:
    """Combine arrays as `reduce_binomial` does. For `merge` see `Op.merging`; `parts` are not modified."""
    tree = ReductionTree(merge, in_place=False)
    for part in parts[root:] + parts[:root]:
        tree.add(part)
    return tree.result()


def _sum_by_levels(parts: list[Array]) -> Array:
    """Add short arrays as `reduce_tree` does, but a whole level at a time."""
    # One call per level, not per pair: for a thousand arrays of a few numbers, only the calls cost time. The bits are
    # the same, since the rounding of a sum does not depend on its memory location. (Complex products differ.)
    level: Array = np.concatenate(parts, dtype=parts[0].dtype, casting="no").reshape(len(parts), -1)
    first = surplus(len(parts))
    if first:
        level = np.concatenate([level[:first:2] + level[1:first:2], level[first:]])
    while len(level) > 1:
        level = level[::2] + level[1::2]
    total: Array = level[0]
    return total


def surplus(size: int) -> int:
    """Return how many of the first ranks fold into pairs in recursive doubling, so that a power of two remains."""
    # As in MPICH: any other shape changes the bits.
    return 2 * (size - (1 << (size.bit_length() - 1)))


def reduce_tree_in_place(parts: list[Array], merge: Combine[Array]) -> Array:
    """Combine as `reduce_tree` does, in the memory of the parts themselves; the result is in the last part."""
    first = surplus(len(parts))
    level = _pairs(parts[:first], merge) + parts[first:]
    while len(level) > 1:
        level = _pairs(level, merge)
    return level[0]


class ReductionTree:
    """Arrays that are combined as they arrive: in pairs, pairs of pairs, and so on.

    The tree is traversed depth first: a thousand contributions pass once through a few accumulators, which stay in the
    processor's cache.

    Args:
        merge: See `Op.merging`.
        surplus: How many of the first arrays are folded into pairs before.
        in_place: Whether sums are computed in the memory of an operand. For arrays of a single complex number, numpy
            rounds an in-place product differently.

    Attributes:
        count: The number of arrays added so far.
    """

    __slots__ = ("_in_place", "_merge", "_spare", "_stack", "_surplus", "count")

    def __init__(self, merge: Merge, surplus: int = 0, *, in_place: bool = True) -> None:
        self._merge, self._surplus, self._in_place, self.count = quiet(merge), surplus, in_place, 0
        # Complete subtrees, the highest first: a binary counter. Owned arrays may be written.
        self._stack: list[tuple[int, Array, bool]] = []  # height, array, owned
        self._spare: list[Array] = []

    def add(self, value: Array) -> None:
        """Add the next array, and combine subtrees of equal height."""
        height, owned, stack = 0 if self.count >= self._surplus else -1, False, self._stack
        self.count += 1
        while stack and stack[-1][0] == height:
            value = self._merged(value, owned)
            height, owned = height + 1, True
        stack.append((height, value, owned))

    def _merged(self, value: Array, owned: bool) -> Array:
        """Pop the lowest subtree and return its combination with `value`."""
        _, before, own = self._stack.pop()
        # An added array is the program's own memory (contributions are lent): it may be read but never written.
        if owned and self._in_place:
            out = value
        else:  # accumulators are reused: fresh memory for each step would leave the cache
            out = self._spare.pop() if self._spare else np.empty_like(value)
            if owned:
                self._spare.append(value)
        if own:
            self._spare.append(before)
        return self._merge(before, value, out)

    def result(self) -> Array:
        """Return the combination of all arrays in separate memory; subtrees may then have unequal heights."""
        _, value, owned = self._stack.pop()
        while self._stack:
            value, owned = self._merged(value, owned), True
        # The caller writes to the result, and a tree of one array is that array itself.
        return value if owned else value.copy()


def reduce_binomial(parts: list[T], combine: Combine[T], root: int = 0) -> T:
    """Combine in the order of a binomial tree to `root`: ranks are renumbered, starting with the root."""
    level = parts[root:] + parts[:root]
    while len(level) > 1:
        odd = level[-1:] if len(level) % 2 else []
        level = _pairs(level, combine) + odd
    return level[0]


def reduce_ordered(parts: list[T], combine: Combine[T]) -> T:
    """Combine in rank order: ((0 1) 2) 3 and so on."""
    result = parts[0]
    for part in parts[1:]:
        result = combine(result, part)
    return result


def scan_prefixes(parts: list[T], combine: Combine[T]) -> Iterator[T]:
    """Yield the combination of ranks 0..r for each r, in rank order."""
    return accumulate(parts, combine)


# gloo's order of summation. gloo has one algorithm for all-reduces and one for reduces, independent of the size, and
# both sum in the same order: there are as many blocks as ranks, and each block is summed along a ring of all ranks. The
# sum of block b begins with rank b - 1, continues down through the ranks (rank 0 is followed by the last rank), and
# ends with rank b: x[b] + (x[b+1] + (… + (x[b-2] + x[b-1]))). Blocks have equal sizes, except that the last ones may be
# short or empty. A test compares this with gloo itself (`tests/real/test_torchrun.py`).

ORDERS = ("mpi", "gloo")
"""Orders of summation on virtual ranks; `reduce_tree` is MPI's."""
SEGMENT_NBYTES = 1 << 20  # gloo's maximum message size


def check_order(sums: str) -> None:
    """Raise `ParameterError` unless `sums` is one of `ORDERS`."""
    if sums not in ORDERS:
        raise ParameterError(f"sums={sums!r}: choose one of {', '.join(ORDERS)}")


def depends_on_order(op: Op, datatype: Datatype) -> bool:
    """Return whether gloo itself reduces this and the order affects the bits: sums and products of floats."""
    dtype = datatype.dtype if datatype.is_predefined else None
    if op not in (SUM, PROD) or dtype is None:
        return False
    return dtype == BF16 or dtype.name in ("float16", "float32", "float64")


def combined(parts: list[Array], op: Op, datatype: Datatype, *, rooted: bool = False) -> Array:
    """Combine float contributions as gloo does: as its `reduce` if `rooted`, otherwise as its `allreduce`."""
    itemsize = parts[0].itemsize
    block = ring_block(parts[0].nbytes, itemsize, len(parts), rooted=rooted)
    return reduce_ring(parts, op.merging(datatype), block // itemsize)


def ring_block(nbytes: int, itemsize: int, ranks: int, *, rooted: bool = False) -> int:
    """Return the size of a block in bytes.

    Args:
        nbytes: the bytes that each rank contributes.
        itemsize: the bytes of an element.
        ranks: the number of contributing ranks.
        rooted: whether the operation is a reduce, which splits contributions above 2 MiB times `ranks` differently.
    """
    longest, least = itemsize * (SEGMENT_NBYTES // itemsize), 2 * ranks
    if rooted:
        segment = _up(max(min(-(-nbytes // least), longest), 1), itemsize)
        segments = _up(max(-(-nbytes // segment), least), ranks)
    else:
        segments = _up(max(-(-nbytes // longest), least), ranks)
        segment = _up(-(-nbytes // segments), itemsize)
    return segments // ranks * segment


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def reduce_ring(parts: list[Array], merge: Merge, block: int) -> Array:
    """Combine arrays in the order of gloo's rings, into new memory; `block` counts elements of the arrays.

    For `merge` see `Op.merging`. `parts` are not modified.
    """
    merge, total = quiet(merge), np.empty_like(parts[0])
    # Two passes down through the ranks, for all blocks together: block b adds ranks b - 1 to 0, then the last one to b.
    for rank in reversed(range(len(parts) - 1)):
        begins, others = slice((rank + 1) * block, (rank + 2) * block), slice((rank + 2) * block, None)
        total[begins] = parts[rank][begins]
        merge(parts[rank][others], total[others], total[others])
    total[:block] = parts[-1][:block]
    for rank in reversed(range(len(parts))):
        adds = slice(block if rank == len(parts) - 1 else 0, (rank + 1) * block)
        merge(parts[rank][adds], total[adds], total[adds])
    return total
