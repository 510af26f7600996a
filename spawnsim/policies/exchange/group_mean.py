"""Means over a group of ranks: of tensors in place, and of the ranks' models over time.

Small tensors share one buffer, with one Allreduce per wire dtype; large ones are summed piece by piece in place. The
result is the same on every backend: half precision is summed in float32, float64 stays, integers are averaged exactly
(quotients and remainders separately) and rounded, halves up. If the backend survives deaths, all tensors go through one
buffer and are written last, so that a group that did not meet leaves them unchanged.

The mean of equal models is that model to the bit. The sum of n equal floats, divided by n, is exact only if n is a
power of two, so ranks first compare digests: digests of the first elements of a few tensors; if these agree, of the
first elements of all tensors; and then of everything. If models differ, as in training, this costs one small Allreduce.
With `guard`, floats that are not finite are ignored element by element: the mean is taken over the ranks with a finite
number in that place, and if no rank has one, each keeps its own.

`Consensus` stores each rank's weights at given times, without affecting the training, and computes the mean model
afterwards: the result that averaging would give, whatever the policy.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spawnsim.comm import IN_PLACE, MAX, MIN, SUM, Comm
from spawnsim.errors import MismatchError, ParameterError
from spawnsim.policies.state.arithmetic import (
    CPU,
    META,
    all_finite,
    as_memory,
    as_one_view,
    new_buffer,
    sum_dtype,
    surely_finite,
    without_data,
)
from spawnsim.policies.state.layout import Entry, Layout, StateScope, Tensors, as_real, collect

FEW, HEAD = 8, 16  # number of tensors compared first, and elements of each


def all_same(comm: Comm, live: Tensors) -> bool:
    """Return whether all ranks of the group hold the same bits; collective. The layouts must be equal."""
    tensors = [tensor for tensor in live.values() if tensor.numel()]
    if not tensors:
        return True
    if without_data(tensors[0]):  # models in training differ, as the first comparison shows
        tensors = [torch.tensor([comm.Get_rank()])]
    # Spread over all tensors, including the last one: early layers may be frozen and equal while later ones differ.
    few = tensors[:: -(-len(tensors) // FEW)] + tensors[-1:]
    # `and` stops at the first difference; models in training already differ in the heads of a few tensors.
    return (
        _same_digest(comm, map(_head, few))
        and _same_digest(comm, map(_head, tensors))
        and _same_digest(comm, (tensor.reshape(-1) for tensor in tensors))
    )


def _head(tensor: torch.Tensor) -> torch.Tensor:
    # Indexing instead of `reshape`, which would copy a non-contiguous tensor completely for its first elements.
    while tensor.dim() > 1:
        tensor = tensor[0]
    return tensor.reshape(-1)[:HEAD]


def _same_digest(comm: Comm, rows: Iterable[torch.Tensor]) -> bool:
    state = blake2b(digest_size=8)
    for row in rows:
        state.update(row.contiguous().cpu().view(torch.uint8).numpy().data)
    digest = np.frombuffer(state.digest(), np.int64)
    # Maximum and minimum in one Allreduce: the maximum of the complement is the complement of the minimum.
    ends = np.concatenate([digest, ~digest])  # the greatest, and the least
    comm.Allreduce(IN_PLACE, ends, MAX)
    return bool(ends[0] == ~ends[1])


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Elements that a rank excludes from a sum: flat positions, and their values."""

    places: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class Healed:
    """Number of this rank's elements that are now the mean of other ranks, and number that are NaN on every rank."""

    numbers: int = 0
    lost: int = 0

    def __add__(self, other: Healed) -> Healed:
        return Healed(self.numbers + other.numbers, self.lost + other.lost)


MeanPiece = tuple[torch.Tensor, LeftOut | None]


def leave_out(contribution: torch.Tensor) -> LeftOut | None:
    """Set elements of a flat contribution that are not finite to 0; return them, None if all are finite."""
    if all_finite(contribution):
        return None
    places = (~torch.isfinite(contribution)).nonzero().squeeze(1)
    left_out = LeftOut(places, contribution[places])
    contribution[places] = 0
    return left_out


def heal(comm: Comm, pieces: Sequence[MeanPiece]) -> Healed:
    """Correct means from which some ranks excluded elements, in place; collective, with equal pieces on all ranks.

    A piece is a mean (the sum divided by the group's size) and the elements that this rank excluded from it. If no rank
    excluded any, this costs one small Allreduce.
    """
    # All ranks have equal pieces, so all skip the collective together.
    if not pieces:
        return Healed()
    # All ranks must agree on the pieces to mend, because mending is itself a collective.
    wanted = np.asarray([left_out is not None for _, left_out in pieces], np.int32)
    comm.Allreduce(IN_PLACE, wanted, MAX)
    found = Healed()
    for (mean, left_out), wants in zip(pieces, wanted.tolist(), strict=True):
        if wants:
            found += mend(comm, mean, left_out)
    return found


def mend(comm: Comm, mean: torch.Tensor, left_out: LeftOut | None) -> Healed:
    """Divide by the number of ranks that contributed, element by element; collective over the group."""
    counts = torch.ones_like(mean)
    if left_out is not None:
        counts[left_out.places] = 0
    comm.Allreduce(IN_PLACE, as_memory(counts))
    # The mean was divided by the group's size: this factor corrects it where fewer ranks contributed.
    mean.mul_(torch.where(counts > 0, comm.Get_size() / counts, 1))
    if left_out is None:
        return Healed()
    nowhere = counts[left_out.places] == 0  # no rank had a finite number: each keeps its own
    mean[left_out.places] = torch.where(nowhere, left_out.values, mean[left_out.places])
    lost = int((nowhere & left_out.values.isnan()).sum())
    return Healed(int((~nowhere).sum()), lost)


Array = NDArray[Any]
BLOCK = 1 << 16  # elements that are divided and checked together, while they are in the cache


class BufferedMean:
    """Tensors that share one flat buffer, which is built once."""

    pending: Sequence[MeanPiece] = ()

    def __init__(
        self, wire: torch.dtype, entries: Sequence[Entry], device: torch.device, *, guard: bool
    ) -> None:
        self._names, self._whole = [entry.name for entry in entries], wire == torch.int64
        self._guard = guard and not self._whole
        lengths = [entry.count for entry in entries]
        self._count = sum(lengths)
        # Remainders follow the quotients in one buffer: one Allreduce instead of two.
        self._flat = new_buffer(2 * self._count if self._whole else self._count, wire, device)
        self._memory = as_memory(self._flat)
        pieces = torch.split(self._flat[: self._count], lengths)
        self._views = [piece.view(entry.shape) for piece, entry in zip(pieces, entries, strict=True)]
        self.nbytes = self._flat.nbytes
        self._live: Tensors = {}
        self._own: list[torch.Tensor] = []
        self._rows: list[torch.Tensor] = []  # the rank's tensors as flat views, if that needs no copy
        # The same as numpy arrays, if possible: numpy copies small tensors at half the cost of torch.
        self._arrays: list[Array] = []
        self._means: list[Array] = []  # the mean of each in the buffer

    def average(self, comm: Comm, live: Tensors, momentum: float) -> Healed:
        """Compute the mean of the live tensors; `store` writes it back after all sums of the group."""
        self._bind(live)
        self._gather()
        if self._whole:
            self._mean_of_whole(comm)
            return Healed()
        healed = Healed()
        # The sum is checked for NaN and infinities, not the contributions, which would cost a pass over all tensors
        # each time. They appear in the sum on all ranks alike, so all ranks take this branch together and sum again.
        if not self._mean(comm):
            # Gather again: the failed sum has overwritten this rank's contribution.
            self._gather()
            left_out = leave_out(self._flat)
            self._mean(comm)
            healed = mend(comm, self._flat, left_out)
        _add_momentum(self._own, self._views, momentum)
        return healed

    def _gather(self) -> None:
        if without_data(self._flat):
            return
        if self._arrays:
            np.concatenate(self._arrays, out=self._memory)
        elif self._rows:
            torch.cat(self._rows, out=self._flat)
        else:
            torch._foreach_copy_(self._views, self._own)

    def _mean(self, comm: Comm) -> bool:
        """Compute the mean; return whether it needs no mending; the same on all ranks, because the sums are."""
        comm.Allreduce(IN_PLACE, self._memory)
        if not self._guard:
            _divide(self._memory, comm.Get_size())
            return True
        # Two checks: the quick one may consider very large finite numbers infinite.
        return _divided(self._flat, comm.Get_size()) or all_finite(self._flat)

    def _bind(self, live: Tensors) -> None:
        # By identity of the mapping: the collector returns the same one as long as the memory is the same.
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
        if without_data(self._flat):
            return
        if not self._arrays:
            torch._foreach_copy_(self._own, self._views)
        for own, mean in zip(self._arrays, self._means, strict=True):
            own[...] = mean

    def _mean_of_whole(self, comm: Comm) -> None:
        # The sum of integers may overflow although their mean does not. So each rank contributes the quotient by the
        # group's size and the remainder separately: the sum of quotients is at most the largest number, and the sum of
        # remainders is less than the square of the size.
        size, value = comm.Get_size(), self._flat[: self._count]
        quotient = value.div(size, rounding_mode="floor")
        self._flat[self._count :] = value - quotient * size
        self._flat[: self._count] = quotient
        comm.Allreduce(IN_PLACE, self._memory)
        # Halves round up: torch rounds to even, which would depend on whether the mean is odd.
        remainder = (2 * self._flat[self._count :] + size).div(2 * size, rounding_mode="floor")
        self._flat[: self._count] += remainder


class InPlaceMean:
    """Memory that is summed piece by piece in place: a large tensor, or tensors end to end in one storage.

    If `copied`, the pieces belong to a copy, which replaces the memory at the end. `pending` are the means that `heal`
    may have to mend afterwards.
    """

    def __init__(
        self, wire: torch.dtype, entries: Sequence[Entry], piece_nbytes: int, *, guard: bool, copied: bool
    ) -> None:
        self._names, self._wire, self._guard = [entry.name for entry in entries], wire, guard
        self._copied, self._copy = copied, torch.empty(0)
        self._step = piece_nbytes // wire.itemsize
        self.nbytes = sum(entry.count for entry in entries) * wire.itemsize
        self.pending: list[MeanPiece] = []
        self._live: Tensors = {}
        self._own: list[torch.Tensor] = []
        self._row: torch.Tensor | None = None
        self._scratch: torch.Tensor | None = None

    def average(self, comm: Comm, live: Tensors, momentum: float) -> Healed:
        """Replace the live tensors by their mean."""
        if live is not self._live:
            own = [live[name] for name in self._names]
            self._live, self._own, self._row = live, own, as_one_view(own)
        # Reset for each call: means of a failed call must not be mended in the next one.
        self.pending = []
        row = self._row
        if row is None or self._copied:  # moved to separate memory, or never contiguous
            row = torch.cat([tensor.reshape(-1) for tensor in self._own])
        staged = row.dtype != self._wire or momentum
        healed = self._staged(comm, row, momentum) if staged else self._in_place(comm, row)
        # Tensors without common memory are mended in the copy before it is written back, so none remain for later.
        if row is not self._row:
            healed += heal(comm, self.pending)
            self.pending, self._copy = [], row
            if not self._copied:
                self._write_back()
        return healed

    def _write_back(self) -> None:
        lengths = [tensor.numel() for tensor in self._own]
        for tensor, mean in zip(self._own, torch.split(self._copy, lengths), strict=True):
            tensor.copy_(mean.view(tensor.shape))
        self._copy = torch.empty(0)

    def store(self) -> None:
        """Replace copied memory by its mean; without a copy the mean is in place already."""
        if self._copied:
            self._write_back()

    def _in_place(self, comm: Comm, row: torch.Tensor) -> Healed:
        for piece in torch.split(row, self._step):
            self.pending += self._mean(comm, piece)
        return Healed()

    def _staged(self, comm: Comm, row: torch.Tensor, momentum: float) -> Healed:
        healed = Healed()
        for piece in torch.split(row, self._step):
            total = self._converted(piece)
            healed += heal(comm, self._mean(comm, total))
            _add_momentum([piece], [total], momentum)
            piece.copy_(total)
        return healed

    def _mean(self, comm: Comm, total: torch.Tensor) -> list[MeanPiece]:
        """Replace a contribution by the mean; return the input of `heal`."""
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
    else:  # by a power of two: the same result, at a third of the cost
        # Exact only for powers of two: the reciprocal of any other integer is rounded.
        total *= 1 / size


def _divided(total: torch.Tensor, size: int) -> bool:
    """Divide in place, block by block; return whether all elements are certainly finite."""
    finite = True
    for block in torch.split(total, BLOCK if total.device.type == "cpu" else total.numel()):
        _divide(as_memory(block), size)
        finite = finite and surely_finite(block)
    return finite


def _add_momentum(own: list[torch.Tensor], mean: list[torch.Tensor], momentum: float) -> None:
    """Move the means towards this rank's values by `momentum`, where these are finite."""
    if momentum:
        for mine, total in zip(own, mean, strict=True):
            drift = (mine.to(total) - total).mul_(momentum)
            # Only the drift is cleaned: own values that are not finite must not return through momentum.
            total.add_(drift if all_finite(drift) else drift.nan_to_num_(0, 0, 0))


logger = logging.getLogger(__name__)

LARGE = 16_384  # elements from which a separate Allreduce costs less than two more passes over the tensor's memory
PIECE_NBYTES = 1 << 21  # a summed piece is divided while it is still in the cache
PIECE_ON_GPU_NBYTES = 1 << 26  # on a GPU a launch costs more than a pass over memory
SHARE_NBYTES = 1 << 18  # per rank in a piece: shorter messages do not saturate a network


def _wire_dtype(dtype: torch.dtype) -> torch.dtype:
    return sum_dtype(dtype) if dtype.is_floating_point else torch.int64


class GroupMean:
    """Averages one schema of tensors over one group. Construction checks, collectively, that all ranks agree.

    With `guard`, elements that are not finite are ignored, and a rank with replaced elements logs a warning and records
    an event "healed". All ranks of a group must give the same value.
    """

    def __init__(self, comm: Comm, live: Tensors, *, guard: bool = True) -> None:
        self.layout, self._guard = Layout.of(live), guard
        check_same(comm, self.layout, guard=guard)
        able = comm.capabilities()
        # Summing a tensor in place saves two passes over its memory, but if the group does not complete the sums, it
        # leaves the tensor partly summed. If the backend survives that, the model must be unchanged: everything goes
        # through a buffer. But gloo's bits depend on the boundaries of pieces, so virtual ranks that sum like gloo use
        # the same pieces, copied.
        self._survives = able.survives
        in_place = (not able.survives or able.sums == "gloo") and all(
            t.device.type in able.devices or without_data(t) for t in live.values()
        )
        self._parts: list[BufferedMean | InPlaceMean] = []
        # In order of appearance, which is the same on all ranks; a set would sum dtypes in different orders.
        for wire in dict.fromkeys(_wire_dtype(entry.dtype) for entry in self.layout.entries):
            entries = [entry for entry in self.layout.entries if _wire_dtype(entry.dtype) == wire]
            if in_place and wire != torch.int64:
                entries = self._lift(comm, live, entries)
            if entries:
                device = live[entries[0].name].device
                place = device if device.type in able.devices or device == META else CPU
                self._parts.append(BufferedMean(wire, entries, place, guard=guard))
        self.nbytes = sum(part.nbytes for part in self._parts)

    def _lift(self, comm: Comm, live: Tensors, entries: list[Entry]) -> list[Entry]:
        """Select the entries that are summed in place; return the remaining ones."""
        wire = _wire_dtype(entries[0].dtype)
        together, near = _agree_on_place(comm, [live[entry.name] for entry in entries])
        nbytes = max(PIECE_NBYTES if near else PIECE_ON_GPU_NBYTES, comm.Get_size() * SHARE_NBYTES)
        if together and sum(entry.count for entry in entries) >= LARGE:
            self._parts.append(self._pieces(wire, entries, nbytes))
            return []
        large = [entry for entry in entries if entry.count >= LARGE]
        self._parts += [self._pieces(wire, [entry], nbytes) for entry in large]
        return [entry for entry in entries if entry.count < LARGE]

    def _pieces(self, wire: torch.dtype, entries: list[Entry], nbytes: int) -> InPlaceMean:
        return InPlaceMean(wire, entries, nbytes, guard=self._guard, copied=self._survives)

    def __call__(self, comm: Comm, live: Tensors, momentum: float = 0.0) -> Healed:
        """Average the live tensors in place; return the number of healed and lost elements of this rank."""
        size = comm.Get_size()
        # Without the comparison equal models would change: the sum of seven 0.7 divided by 7 is not 0.7. If models
        # differ, the digest of a few heads shows it in one Allreduce of 16 bytes.
        if size & (size - 1) and all_same(comm, live):  # division by a power of two is exact
            return Healed()
        healed = Healed()
        for part in self._parts:
            healed += part.average(comm, live, momentum)
        # After all sums: one small Allreduce for all pieces instead of one per piece.
        healed += heal(comm, [piece for part in self._parts for piece in part.pending])
        # Written last, so that a group that fails in the middle leaves the tensors unchanged.
        for part in self._parts:
            part.store()
        if healed != Healed():
            _record_healed(comm, healed)
        return healed


def _record_healed(comm: Comm, healed: Healed) -> None:
    comm.record.event("healed", numbers=healed.numbers, lost=healed.lost)
    logger.warning(
        "rank %d: %d numbers of this rank were NaN or infinite, and are now the mean of the other ranks'; "
        "%d are NaN on all ranks", comm.rank, healed.numbers, healed.lost,
    )  # fmt: skip


def _agree_on_place(comm: Comm, tensors: Sequence[torch.Tensor]) -> tuple[bool, bool]:
    """Return whether on all ranks the tensors lie end to end, and whether they are in main memory; collective."""
    near = all(tensor.device.type == "cpu" or without_data(tensor) for tensor in tensors)
    words = np.asarray([as_one_view(tensors) is not None, near], np.int32)
    comm.Allreduce(IN_PLACE, words, MIN)
    return bool(words[0]), bool(words[1])


def latest_round(comm: Comm, own: int) -> int:
    """Return the latest round of any rank, from which newcomers continue; collective."""
    rounds = np.asarray([own])
    comm.Allreduce(IN_PLACE, rounds, MAX)
    return int(rounds[0])


def check_same(comm: Comm, layout: Layout, *, guard: bool) -> None:
    """Raise `MismatchError` on every rank of the group unless all have the same layout and the same guard."""
    digest = np.uint64(layout.digest)
    # Digest and its complement: damage to one of them on a link is detected; collectives carry no checksums.
    rows = np.empty((comm.Get_size(), 2), np.uint64)
    comm.Allgather(np.asarray([digest, ~digest ^ np.uint64(guard)]), rows)
    guards = rows[:, 0] ^ ~rows[:, 1]
    if (rows == rows[0]).all() and guards[0] <= 1:
        return
    who = f"rank {comm.Get_rank()}"
    off, on, damaged = (np.flatnonzero(each).tolist() for each in (guards == 0, guards == 1, guards > 1))
    if damaged:
        raise MismatchError(
            f"{who}: the digests of the models of ranks {damaged} were damaged on the way, so it is unknown "
            f"whether the models of this group agree. Collectives carry no checksums: see the events of kind link"
        )
    if (rows[:, 0] == rows[0, 0]).all():
        raise MismatchError(f"{who}: ranks {off} average with guard=False, ranks {on} with guard=True: agree")
    others = [int(rank) for rank in np.flatnonzero(rows[:, 0] != rows[0, 0])]
    # Texts are exchanged only in case of an error, which all ranks detect together: they may be megabytes.
    texts = comm.allgather(layout.text)
    difference = Layout.parse(texts[0]).difference(Layout.parse(texts[others[0]]))
    raise MismatchError(
        f"{who}: the models of this group differ, so they cannot be averaged: between rank 0 (here) "
        f"and rank {', '.join(map(str, others))} (there), {difference}. Build equal models on all ranks, "
        f"or use a selective policy, which matches tensors by name"
    )


AT_ONCE_NBYTES = 1 << 18  # summed by one call: a call per time would cost more than the sum


class Consensus:
    """Stores a rank's weights at the multiples of a period of its clock, and computes the group's means of them.

    ```python
    consensus = Consensus(comm, model, every_s=0.1)
    for iteration in range(iterations):
        model = train_and_exchange(iteration, model)
        consensus.passed(model)
    for time_s, mean in consensus.means():
        comm.record.event("consensus", at_s=time_s, accuracy=accuracy(mean))
    ```

    Each time takes the memory of the weights, unless they are unchanged since the last one.

    Args:
        comm: the group.
        model: the initial model. Its floating-point parameters and buffers are averaged, at least in float32.
        every_s: the period, in seconds of `comm.clock`.

    Raises:
        ParameterError: `every_s` is not above 0.
    """

    def __init__(self, comm: Comm, model: torch.nn.Module, every_s: float) -> None:
        if not every_s > 0:
            raise ParameterError(f"every_s={every_s!r}: give seconds above 0")
        self._comm, self._every_s, self._model = comm, every_s, model
        self._held: Any = _weights(model)
        self._kept: list[Tensor] = []

    def passed(self, model: torch.nn.Module) -> None:
        """Record the end of an iteration; until now the rank held the model of the previous one.

        Args:
            model: the model after the iteration.
        """
        due = int(self._comm.clock.now() / self._every_s) + 1
        # A long iteration may span several times: the rank held the older model at each of them.
        self._kept += [self._held] * (due - len(self._kept))
        self._held, self._model = _weights(model), model

    def means(self) -> Iterator[tuple[float, torch.nn.Module]]:
        """Yield the mean model at each time, until the last rank has ended. Collective; waits for that rank.

        Ranks that ended earlier contribute their last weights.

        Yields:
            Seconds and the mean model at that time, on the group's rank 0; nothing on other ranks. It is the same
            object each time, with other weights.
        """
        comm, held = self._comm, self._held
        with comm.clock.deadline(float("inf")):  # a straggler may end much later than the first rank
            ticks = comm.allreduce(len(self._kept), op=MAX)
        # A rank that has ended keeps its last weights; otherwise the mean would cover ever fewer ranks.
        self._kept += [held] * (ticks - len(self._kept))
        found, at_once = copy.deepcopy(self._model), max(1, AT_ONCE_NBYTES // max(held.nbytes, 1))
        for begin in range(0, ticks, at_once):
            mine = torch.stack(self._kept[begin : begin + at_once])
            total = torch.zeros_like(mine)
            comm.Reduce(mine, total, op=SUM, root=0)
            if comm.Get_rank() == 0:
                for tick, weights in enumerate(total / comm.Get_size(), start=begin):
                    _set_weights(found, weights)
                    yield tick * self._every_s, found


@torch.no_grad()
def _weights(model: torch.nn.Module) -> Tensor:
    live = as_real(collect(model, None, StateScope())).values()
    floating = [each.reshape(-1) for each in live if each.is_floating_point()]
    return torch.cat([torch.empty(0, dtype=torch.float32), *floating])


def _set_weights(model: torch.nn.Module, weights: Tensor) -> None:
    tensors = [each for each in collect(model, None, StateScope()).values() if each.is_floating_point()]
    for tensor, part in zip(tensors, torch.split(weights, [each.numel() for each in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
