"""Tensors as they are averaged over a group: through one buffer, or piece by piece where they lie.

Floats are summed in the order of the communicator's `Allreduce` and divided by the group's size; whole numbers are
averaged exactly (quotients and remainders are summed apart, so nothing overflows) and rounded to the nearest, halves
up. With `guard`, floats that are not finite are left out (`finite.py`).

This room knows tensors of one wire dtype and a communicator's Allreduce; it knows no schema and no policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from spawnsim.comm import IN_PLACE, Comm
from spawnsim.policies.finite import Healed, Piece, all_finite, heal, leave_out, mend, surely_finite
from spawnsim.policies.memory import as_memory, new_buffer, one_run
from spawnsim.policies.state import Entry, Tensors

Array = NDArray[Any]
BLOCK = 1 << 16  # numbers that are divided and looked at together, while they are in the cache


class Gathered:
    """Tensors that travel through one flat buffer, which is built once."""

    pending: Sequence[Piece] = ()

    def __init__(
        self, wire: torch.dtype, entries: Sequence[Entry], device: torch.device, *, guard: bool
    ) -> None:
        self._names, self._whole = [entry.name for entry in entries], wire == torch.int64
        self._guard = guard and not self._whole
        lengths = [entry.count for entry in entries]
        self._count = sum(lengths)
        self._flat = new_buffer(2 * self._count if self._whole else self._count, wire, device)
        self._memory = as_memory(self._flat)
        pieces = torch.split(self._flat[: self._count], lengths)
        self._views = [piece.view(entry.shape) for piece, entry in zip(pieces, entries, strict=True)]
        self.nbytes = self._flat.nbytes
        self._live: Tensors = {}
        self._own: list[torch.Tensor] = []
        self._rows: list[torch.Tensor] = []  # the own tensors in one dimension, where that needs no copy
        # Where numpy sees their memory: it copies small tensors at half the price of torch.
        self._arrays: list[Array] = []
        self._means: list[Array] = []  # the place of each in the buffer

    def average(self, comm: Comm, live: Tensors, momentum: float) -> Healed:
        """Take the mean of the live tensors; `store` writes it to them, when the group has met for all there is."""
        self._bind(live)
        self._gather()
        if self._whole:
            self._mean_of_whole(comm)
            return Healed()
        healed = Healed()
        if not self._mean(comm):
            self._gather()
            left_out = leave_out(self._flat)
            self._mean(comm)
            healed = mend(comm, self._flat, left_out)
        _keep(self._own, self._views, momentum)
        return healed

    def _gather(self) -> None:
        if self._arrays:
            np.concatenate(self._arrays, out=self._memory)
        elif self._rows:
            torch.cat(self._rows, out=self._flat)
        else:
            torch._foreach_copy_(self._views, self._own)

    def _mean(self, comm: Comm) -> bool:
        """Take the mean; return whether it needs no mending, which is the same on all ranks, as the sums are."""
        comm.Allreduce(IN_PLACE, self._memory)
        if not self._guard:
            _divide(self._memory, comm.Get_size())
            return True
        return _divided(self._flat, comm.Get_size()) or all_finite(self._flat)

    def _bind(self, live: Tensors) -> None:
        if live is not self._live:
            self._live, self._own = live, [live[name] for name in self._names]
            dtype, device = self._flat.dtype, self._flat.device  # Adam's step counts stay on the CPU
            plain = all(t.dtype == dtype and t.device == device and t.is_contiguous() for t in self._own)
            self._rows = [t.view(-1) for t in self._own] if plain and not self._whole else []
            near = device.type == "cpu"
            self._arrays = [row.numpy() for row in self._rows] if near else []
            self._means = [view.view(-1).numpy() for view in self._views] if self._arrays else []

    def store(self) -> None:
        """Replace the live tensors by their mean."""
        if not self._arrays:
            torch._foreach_copy_(self._own, self._views)
        for own, mean in zip(self._arrays, self._means, strict=True):
            own[...] = mean

    def _mean_of_whole(self, comm: Comm) -> None:
        """Sum quotients and remainders apart, and round."""
        size, value = comm.Get_size(), self._flat[: self._count]
        quotient = value.div(size, rounding_mode="floor")
        self._flat[self._count :] = value - quotient * size
        self._flat[: self._count] = quotient
        comm.Allreduce(IN_PLACE, self._memory)
        remainder = (2 * self._flat[self._count :] + size).div(2 * size, rounding_mode="floor")
        self._flat[: self._count] += remainder


class Large:
    """Memory that is summed piece by piece where it lies: a large tensor, or tensors end to end in one storage.

    `pending` are the means that `heal` may have to mend when all have been taken.
    """

    def __init__(
        self, wire: torch.dtype, entries: Sequence[Entry], piece_nbytes: int, *, guard: bool
    ) -> None:
        self._names, self._wire, self._guard = [entry.name for entry in entries], wire, guard
        self._step = piece_nbytes // wire.itemsize
        self.nbytes = sum(entry.count for entry in entries) * wire.itemsize
        self.pending: list[Piece] = []
        self._live: Tensors = {}
        self._own: list[torch.Tensor] = []
        self._row: torch.Tensor | None = None
        self._scratch: torch.Tensor | None = None

    def average(self, comm: Comm, live: Tensors, momentum: float) -> Healed:
        """Replace the live tensors by their mean."""
        if live is not self._live:
            own = [live[name] for name in self._names]
            self._live, self._own, self._row = live, own, one_run(own)
        self.pending = []
        row = self._row
        if row is None:  # it was moved apart, or lies across memory
            row = torch.cat([tensor.reshape(-1) for tensor in self._own])
        staged = row.dtype != self._wire or momentum
        healed = self._staged(comm, row, momentum) if staged else self._in_place(comm, row)
        if row is not self._row:
            healed += heal(comm, self.pending)
            self.pending = []
            lengths = [tensor.numel() for tensor in self._own]
            for tensor, mean in zip(self._own, torch.split(row, lengths), strict=True):
                tensor.copy_(mean.view(tensor.shape))
        return healed

    def store(self) -> None:
        """Do nothing: the mean is where it belongs."""

    def _in_place(self, comm: Comm, row: torch.Tensor) -> Healed:
        for piece in torch.split(row, self._step):
            self.pending += self._mean(comm, piece)
        return Healed()

    def _staged(self, comm: Comm, row: torch.Tensor, momentum: float) -> Healed:
        healed = Healed()
        for piece in torch.split(row, self._step):
            total = self._converted(piece)
            healed += heal(comm, self._mean(comm, total))
            _keep([piece], [total], momentum)
            piece.copy_(total)
        return healed

    def _mean(self, comm: Comm, total: torch.Tensor) -> list[Piece]:
        """Replace a contribution by the mean; return what `heal` needs of it."""
        left_out = leave_out(total) if self._guard else None
        memory = as_memory(total)
        comm.Allreduce(IN_PLACE, memory)
        _divide(memory, comm.Get_size())
        return [(total, left_out)] if self._guard else []

    def _converted(self, piece: torch.Tensor) -> torch.Tensor:
        if self._scratch is None:  # the first piece is the longest
            self._scratch = new_buffer(piece.numel(), self._wire, piece.device)
        return self._scratch[: piece.numel()].copy_(piece)


def _divide(total: Any, size: int) -> None:
    if size & (size - 1):
        total /= size
    else:  # by a power of two: the same number, at a third of the price
        total *= 1 / size


def _divided(total: torch.Tensor, size: int) -> bool:
    """Divide in place, block by block; return whether all is surely finite."""
    finite = True
    for block in torch.split(total, BLOCK if total.device.type == "cpu" else total.numel()):
        _divide(as_memory(block), size)
        finite = finite and surely_finite(block)
    return finite


def _keep(own: list[torch.Tensor], mean: list[torch.Tensor], momentum: float) -> None:
    """Move the means towards the own values by `momentum`, where these are finite."""
    if momentum:
        for mine, total in zip(own, mean, strict=True):
            drift = (mine.to(total) - total).mul_(momentum)
            total.add_(drift if all_finite(drift) else drift.nan_to_num_(0, 0, 0))
