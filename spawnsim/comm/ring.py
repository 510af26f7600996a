"""The order in which gloo sums: a ring of all ranks for each of as many blocks as there are ranks.

torch.distributed's gloo has one algorithm for all-reduces and one for reduces, whatever their size, and both add alike.
Of block b the sum begins with rank b - 1, goes down through the ranks (behind rank 0 comes the last one), and ends with
rank b: x[b] + (x[b+1] + (… + (x[b-2] + x[b-1]))). Blocks are equal, but for the last ones, which may be short or empty.
`tests/real/test_torchrun.py` compares this with gloo itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from spawnsim.comm.datatypes import Datatype
from spawnsim.comm.layouts import BF16
from spawnsim.comm.ops import PROD, SUM, Merge, Op, quiet
from spawnsim.errors import ParameterError

Array = NDArray[Any]
ORDERS = ("mpi", "gloo")
"""In whose order virtual ranks sum: `ops.reduce_tree` is MPI's."""
SEGMENT_NBYTES = 1 << 20  # of gloo's longest message


def check_order(sums: str) -> None:
    """Raise `ParameterError` unless `sums` is one of `ORDERS`."""
    if sums not in ORDERS:
        raise ParameterError(f"sums={sums!r}: choose one of {', '.join(ORDERS)}")


def depends_on_order(op: Op, datatype: Datatype) -> bool:
    """Return whether gloo itself reduces this, with bits that depend on the order: sums and products of floats."""
    dtype = datatype.dtype if datatype.is_predefined else None
    if op not in (SUM, PROD) or dtype is None:
        return False
    return dtype == BF16 or dtype.name in ("float16", "float32", "float64")


def combined(parts: list[Array], op: Op, datatype: Datatype, *, rooted: bool = False) -> Array:
    """Combine contributions of floats as gloo does; `rooted` as its `reduce`, otherwise as its `allreduce`."""
    itemsize = parts[0].itemsize
    block = ring_block(parts[0].nbytes, itemsize, len(parts), rooted=rooted)
    return reduce_ring(parts, op.merging(datatype), block // itemsize)


def ring_block(nbytes: int, itemsize: int, ranks: int, *, rooted: bool = False) -> int:
    """Return the bytes of a block.

    Args:
        nbytes: the bytes that each rank contributes.
        itemsize: the bytes of an element.
        ranks: how many contribute.
        rooted: whether it is a reduce: it cuts contributions of more than 2 MiB times `ranks` differently.
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

    For `merge` see `Op.merging`. `parts` stay as they are.
    """
    merge, total = quiet(merge), np.empty_like(parts[0])
    # Twice down through the ranks, all blocks side by side: block b takes b - 1 to 0, and then the last rank to b.
    for rank in reversed(range(len(parts) - 1)):
        begins, others = slice((rank + 1) * block, (rank + 2) * block), slice((rank + 2) * block, None)
        total[begins] = parts[rank][begins]
        merge(parts[rank][others], total[others], total[others])
    total[:block] = parts[-1][:block]
    for rank in reversed(range(len(parts))):
        adds = slice(block if rank == len(parts) - 1 else 0, (rank + 1) * block)
        merge(parts[rank][adds], total[adds], total[adds])
    return total
