"""Means over a group: one Allreduce per wire dtype for the small tensors, and the large ones piece by piece.

This room knows tensors and a communicator's collectives; it knows no cadence and no policy. The result is the same
on every building: floats are summed in float32 (float64 stays) in the order of the communicator's `Allreduce`,
then divided by the group's size; whole numbers are averaged exactly (quotients and remainders are summed apart, so
nothing overflows) and rounded to the nearest, halves up.

Where a rank's death can be survived, all tensors go through one buffer and are written last: a group that did not meet
leaves them as they were. Where it ends the job, nobody could tell, so large tensors are summed where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from spawnsim.comm import IN_PLACE, MIN, Comm
from spawnsim.errors import MismatchError
from spawnsim.policies.arithmetic import sum_dtype
from spawnsim.policies.memory import CPU, new_buffer, one_run
from spawnsim.policies.state import Entry, Layout, Tensors

Array = NDArray[Any]
LARGE = 16_384  # elements from which a tensor's own Allreduce costs less than two more passes over its memory
PIECE_NBYTES = 1 << 21  # what has been summed is divided while it is still in the cache
PIECE_ON_GPU_NBYTES = 1 << 26  # a launch costs more than a pass over memory there
SHARE_NBYTES = 1 << 18  # of each rank in a piece: shorter messages do not fill a network


def _memory(tensor: torch.Tensor) -> Any:
    """Return a tensor in main memory as an array: numpy begins sooner than torch, which counts for small ones."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


class Gathered:
    """Tensors that travel through one flat buffer, which is built once."""

    def __init__(self, wire: torch.dtype, entries: Sequence[Entry], device: torch.device) -> None:
        self._names, self._whole = [entry.name for entry in entries], wire == torch.int64
        lengths = [entry.count for entry in entries]
        self._count = sum(lengths)
        self._flat = new_buffer(2 * self._count if self._whole else self._count, wire, device)
        self._memory = _memory(self._flat)
        pieces = torch.split(self._flat[: self._count], lengths)
        self._views = [piece.view(entry.shape) for piece, entry in zip(pieces, entries, strict=True)]
        self.nbytes = self._flat.nbytes
        self._live: Tensors = {}
        self._own: list[torch.Tensor] = []
        self._rows: list[torch.Tensor] = []  # the own tensors in one dimension, where that needs no copy
        # Where numpy sees their memory: it copies small tensors at half the price of torch.
        self._arrays: list[Array] = []
        self._means: list[Array] = []  # the place of each in the buffer

    def average(self, comm: Comm, live: Tensors, momentum: float) -> None:
        """Take the mean of the live tensors; `store` writes it to them, when the group has met for all there is."""
        self._bind(live)
        size = comm.Get_size()
        if self._arrays:
            np.concatenate(self._arrays, out=self._memory)
        elif self._rows:
            torch.cat(self._rows, out=self._flat)
        else:
            torch._foreach_copy_(self._views, self._own)
        if self._whole:
            self._split(size)
        comm.Allreduce(IN_PLACE, self._memory)
        if self._whole:
            self._round(size)
        else:
            _divide(self._memory, size)
        _keep(self._own, self._views, 0.0 if self._whole else momentum)

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

    def _split(self, size: int) -> None:
        """Sum quotients and remainders apart."""
        value = self._flat[: self._count]
        quotient = value.div(size, rounding_mode="floor")
        self._flat[self._count :] = value - quotient * size
        self._flat[: self._count] = quotient

    def _round(self, size: int) -> None:
        remainder = (2 * self._flat[self._count :] + size).div(2 * size, rounding_mode="floor")
        self._flat[: self._count] += remainder


class Large:
    """Memory that is summed piece by piece where it lies: a large tensor, or tensors end to end in one storage."""

    def __init__(self, wire: torch.dtype, entries: Sequence[Entry], piece_nbytes: int) -> None:
        self._names, self._wire = [entry.name for entry in entries], wire
        self._step = piece_nbytes // wire.itemsize
        self.nbytes = sum(entry.count for entry in entries) * wire.itemsize
        self._live: Tensors = {}
        self._own: list[torch.Tensor] = []
        self._row: torch.Tensor | None = None
        self._scratch: torch.Tensor | None = None

    def average(self, comm: Comm, live: Tensors, momentum: float) -> None:
        """Replace the live tensors by their mean."""
        if live is not self._live:
            own = [live[name] for name in self._names]
            self._live, self._own, self._row = live, own, one_run(own)
        if self._row is not None:
            self._sum(comm, self._row, momentum)
            return
        # It was moved apart, or lies across memory.
        row = torch.cat([tensor.reshape(-1) for tensor in self._own])
        self._sum(comm, row, momentum)
        for tensor, mean in zip(self._own, torch.split(row, [t.numel() for t in self._own]), strict=True):
            tensor.copy_(mean.view(tensor.shape))

    def store(self) -> None:
        """Do nothing: the mean is where it belongs."""

    def _sum(self, comm: Comm, row: torch.Tensor, momentum: float) -> None:
        size = comm.Get_size()
        for piece in torch.split(row, self._step):
            staged = row.dtype != self._wire or momentum
            total = self._converted(piece) if staged else piece
            memory = _memory(total)
            comm.Allreduce(IN_PLACE, memory)
            _divide(memory, size)
            if staged:
                _keep([piece], [total], momentum)
                piece.copy_(total)

    def _converted(self, piece: torch.Tensor) -> torch.Tensor:
        if self._scratch is None:  # the first piece is the longest
            self._scratch = new_buffer(piece.numel(), self._wire, piece.device)
        return self._scratch[: piece.numel()].copy_(piece)


def _divide(total: Any, size: int) -> None:
    if size & (size - 1):
        total /= size
    else:  # by a power of two: the same number, at a third of the price
        total *= 1 / size


def _keep(own: list[torch.Tensor], mean: list[torch.Tensor], momentum: float) -> None:
    """Move the means towards the own values by `momentum`."""
    if momentum:
        for mine, total in zip(own, mean, strict=True):
            total.add_((mine.to(total) - total).mul_(momentum))


def _wire(dtype: torch.dtype) -> torch.dtype:
    return sum_dtype(dtype) if dtype.is_floating_point else torch.int64


class GroupMean:
    """Averages one schema of tensors over one group. Making it checks, collectively, that all ranks agree."""

    def __init__(self, comm: Comm, live: Tensors) -> None:
        self.layout = Layout.of(live)
        check_same(comm, self.layout)
        able = comm.capabilities()
        in_place = not able.survives and all(t.device.type in able.devices for t in live.values())
        self._parts: list[Gathered | Large] = []
        for wire in dict.fromkeys(_wire(entry.dtype) for entry in self.layout.entries):
            entries = [entry for entry in self.layout.entries if _wire(entry.dtype) == wire]
            if in_place and wire != torch.int64:
                entries = self._lift(comm, live, entries)
            if entries:
                device = live[entries[0].name].device
                self._parts.append(Gathered(wire, entries, device if device.type in able.devices else CPU))
        self.nbytes = sum(part.nbytes for part in self._parts)

    def _lift(self, comm: Comm, live: Tensors, entries: list[Entry]) -> list[Entry]:
        """Take out what is summed where it lies; return the entries that are left."""
        wire = _wire(entries[0].dtype)
        together, near = _agreed(comm, [live[entry.name] for entry in entries])
        nbytes = max(PIECE_NBYTES if near else PIECE_ON_GPU_NBYTES, comm.Get_size() * SHARE_NBYTES)
        if together and sum(entry.count for entry in entries) >= LARGE:
            self._parts.append(Large(wire, entries, nbytes))
            return []
        self._parts += [Large(wire, [entry], nbytes) for entry in entries if entry.count >= LARGE]
        return [entry for entry in entries if entry.count < LARGE]

    def __call__(self, comm: Comm, live: Tensors, momentum: float = 0.0) -> None:
        """Average the live tensors in place."""
        for part in self._parts:
            part.average(comm, live, momentum)
        for part in self._parts:
            part.store()


def _agreed(comm: Comm, tensors: Sequence[torch.Tensor]) -> tuple[bool, bool]:
    """Return whether on all ranks of the group the tensors lie end to end, and whether in main memory."""
    near = all(tensor.device.type == "cpu" for tensor in tensors)
    words = np.asarray([one_run(tensors) is not None, near], np.int32)
    comm.Allreduce(IN_PLACE, words, MIN)
    return bool(words[0]), bool(words[1])


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
