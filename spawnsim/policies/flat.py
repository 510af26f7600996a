"""Sums over a group: one Allreduce per wire dtype over flat buffers that are built once.

This room knows tensors and a communicator's collectives; it knows no cadence and no policy. The result is the same
on every building: floats are summed in float32 (float64 stays) in the order of the communicator's `Allreduce`,
then divided by the group's size; whole numbers are averaged exactly (quotients and remainders are summed apart, so
nothing overflows) and rounded to the nearest, halves up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from spawnsim.comm import IN_PLACE, Comm
from spawnsim.errors import MismatchError
from spawnsim.policies.arithmetic import sum_dtype
from spawnsim.policies.state import Layout, Tensors

LARGE = 16_384  # elements per tensor from which a pass over memory costs more than a call


def as_real(tensors: Tensors) -> Tensors:
    """Return the tensors with complex ones seen as pairs of real numbers (same memory)."""
    return {name: torch.view_as_real(t) if t.is_complex() else t for name, t in tensors.items()}


def one_run(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the tensors as one flat view if they lie end to end in one storage, in this order; else None."""
    first, at = tensors[0], tensors[0].storage_offset()
    start = first.untyped_storage().data_ptr()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == start and tensor.storage_offset() == at
        if not (same and tensor.dtype == first.dtype and tensor.is_contiguous() and not tensor.is_cuda):
            return None
        at += tensor.numel()
    return first.as_strided((at - first.storage_offset(),), (1,))


class Bucket:
    """The tensors that are summed in one wire dtype, and the flat buffer for it."""

    def __init__(self, wire: torch.dtype, layout: Layout) -> None:
        self.entries = [entry for entry in layout.entries if _wire(entry.dtype) == wire]
        self.wire, self.whole = wire, wire == torch.int64
        self.count = sum(entry.count for entry in self.entries)
        self.flat = torch.empty(2 * self.count if self.whole else self.count, dtype=wire)
        pieces = torch.split(self.flat[: self.count], [entry.count for entry in self.entries])
        self.views = [piece.view(entry.shape) for piece, entry in zip(pieces, self.entries, strict=True)]
        self.nbytes = self.flat.numel() * wire.itemsize

    def average(self, comm: Comm, live: Tensors, momentum: float) -> None:
        """Replace the live tensors by their mean over the group (a part `momentum` of the own value stays).

        They are written last: if the group does not meet, they are as they were.
        """
        own = [live[entry.name] for entry in self.entries]
        run = one_run(own) if own[0].dtype == self.wire and not self.whole else None
        if run is not None:  # sent from where it lies
            comm.Allreduce(run.numpy(), self.flat.numpy())
            own, views = [run], [self.flat]
        else:
            self._load(own, comm.Get_size())
            comm.Allreduce(IN_PLACE, self.flat.numpy())
            views = self.views
        if self.whole:
            self._round(comm.Get_size())
        elif self.count < LARGE * len(own):  # many small tensors: few calls count more than few passes
            self.flat.div_(comm.Get_size())
        else:
            for mine, total in zip(own, views, strict=True):
                _store(mine, total, comm.Get_size(), momentum)
            return
        _mix(own, views, 0.0 if self.whole else momentum)

    def _load(self, own: list[torch.Tensor], size: int) -> None:
        torch._foreach_copy_(self.views, own)
        if self.whole:  # sum quotients and remainders apart
            value = self.flat[: self.count]
            quotient = value.div(size, rounding_mode="floor")
            self.flat[self.count :] = value - quotient * size
            self.flat[: self.count] = quotient

    def _round(self, size: int) -> None:
        remainder = (2 * self.flat[self.count :] + size).div(2 * size, rounding_mode="floor")
        self.flat[: self.count] += remainder


def _store(own: torch.Tensor, total: torch.Tensor, size: int, momentum: float) -> None:
    if momentum or own.device != total.device:
        _mix([own], [total.div_(size)], momentum)
    else:
        torch.div(total, size, out=own)  # divided, converted and stored in one pass


def _mix(own: list[torch.Tensor], mean: list[torch.Tensor], momentum: float) -> None:
    if momentum:
        for mine, total in zip(own, mean, strict=True):
            total.add_((mine.to(total) - total).mul_(momentum))
    torch._foreach_copy_(own, mean)


def _wire(dtype: torch.dtype) -> torch.dtype:
    return sum_dtype(dtype) if dtype.is_floating_point else torch.int64


class GroupMean:
    """Averages one schema of tensors over one group. Making it checks, collectively, that all ranks agree."""

    def __init__(self, comm: Comm, live: Tensors) -> None:
        self.layout = Layout.of(live)
        check_same(comm, self.layout)
        wires = dict.fromkeys(_wire(entry.dtype) for entry in self.layout.entries)
        self.buckets = [Bucket(wire, self.layout) for wire in wires]
        self.nbytes = sum(bucket.nbytes for bucket in self.buckets)

    def __call__(self, comm: Comm, live: Tensors, momentum: float = 0.0) -> None:
        """Average the live tensors in place."""
        for bucket in self.buckets:
            bucket.average(comm, live, momentum)


def check_same(comm: Comm, layout: Layout) -> None:
    """Raise `MismatchError` on every rank of the group unless all have the same layout."""
    digests = np.empty(comm.Get_size(), np.uint64)
    comm.Allgather(np.asarray([layout.digest], np.uint64), digests)
    if (digests == digests[0]).all():
        return
    others = [int(rank) for rank in np.flatnonzero(digests != digests[0])]
    texts = comm.allgather(layout.text)
    difference = Layout.parse(texts[0]).difference(Layout.parse(texts[others[0]]))
    raise MismatchError(
        f"rank {comm.Get_rank()}: the models of this group differ, so they cannot be averaged: between rank 0 (here) "
        f"and rank {', '.join(map(str, others))} (there), {difference}. Build equal models on all ranks, "
        f"or use a selective policy, which matches tensors by name"
    )
