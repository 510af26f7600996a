"""Rows of all ranks at rank 0 of a group, whatever their dtype and number.

This room knows tensors as rows of bytes; counts travel as 64-bit integers, never in the data's own dtype.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from spawnsim.comm import Comm
from spawnsim.distributed.transport import from_bytes, raw_bytes
from spawnsim.distributed.worlds import Group, comm_of, default_backend
from spawnsim.errors import MismatchError

Kind = tuple[str, tuple[int, ...]]  # name of the dtype, shape of one row


def gather_distributed_data(
    local_tensor: torch.Tensor | Sequence[Any],
    world_size: int | None = None,
    rank: int | None = None,
    training_group: Group = None,
    *,
    backend: str = default_backend,
) -> torch.Tensor | None:
    """Return the rows of all ranks of the group, in the order of ranks, on rank 0; None on the others.

    Args:
        local_tensor: (rows, ...) of any dtype, or a list of numbers; a 0-dim tensor is one row. Ranks may have
            different numbers of rows, none too; dtype and shape of a row must agree.
        world_size: not needed: the group knows its size.
        rank: not needed either.
        training_group: the ranks that take part; all of the world for None.
        backend: which world, where no group is given.

    Raises:
        MismatchError: on every rank, if rows differ in dtype or shape.
    """
    comm = comm_of(training_group, backend)
    own = local_tensor if isinstance(local_tensor, torch.Tensor) else torch.as_tensor(local_tensor)
    rows = own.detach().cpu().reshape(own.shape or (1,))
    raw = raw_bytes(rows)
    facts = _facts(comm, rows, raw.numel())
    kind = _agreed(comm, rows, facts)
    together = torch.empty(int(facts[:, 2].sum()) if comm.Get_rank() == 0 else 0, dtype=torch.uint8)
    _gather(comm, raw, together, facts[:, 2])
    if comm.Get_rank() != 0:
        return None
    return from_bytes(together, getattr(torch, kind[0]), (int(facts[:, 0].sum()), *kind[1]))


def _kind(rows: torch.Tensor) -> Kind:
    return str(rows.dtype).removeprefix("torch."), tuple(rows.shape[1:])


def _facts(comm: Comm, rows: torch.Tensor, nbytes: int) -> NDArray[np.int64]:
    """Return rows, digest of the kind and bytes of every rank, (size, 3)."""
    digest = hashlib.blake2b(repr(_kind(rows)).encode(), digest_size=8).digest()
    own = np.array(
        [rows.shape[0] if rows.numel() else 0, int.from_bytes(digest, "little", signed=True), nbytes]
    )
    facts = np.empty((comm.Get_size(), 3), np.int64)
    comm.Allgather(own, facts)
    return facts


def _agreed(comm: Comm, rows: torch.Tensor, facts: NDArray[np.int64]) -> Kind:
    """Return the kind of the rows that are not empty. An empty list says nothing about its dtype."""
    speaking = np.flatnonzero(facts[:, 0]) if facts[:, 0].any() else np.zeros(1, np.int64)
    first = int(speaking[0])
    kind: Kind = comm.bcast(_kind(rows), root=first)
    others = [int(rank) for rank in speaking if facts[rank, 1] != facts[first, 1]]
    if others:
        raise MismatchError(
            f"rank {comm.Get_rank()}: rows cannot be gathered: rank {first} has {kind[0]} of shape {list(kind[1])}, "
            f"rank {', '.join(map(str, others))} something else; give all ranks rows of one dtype and shape"
        )
    return kind


def _gather(comm: Comm, raw: torch.Tensor, together: torch.Tensor, counts: NDArray[np.int64]) -> None:
    collective: Any = comm
    collective.Gatherv(
        raw.numpy(), [together.numpy(), counts.tolist()] if comm.Get_rank() == 0 else None, root=0
    )
