"""Means over a group of ranks: of tensors in place, and of the ranks' models over time.

Small tensors travel through one buffer, one Allreduce per wire dtype; large ones are summed piece by piece where they
lie. The result is the same on every backend: half precision is summed in float32, float64 stays, whole numbers are
averaged exactly (quotients and remainders apart) and rounded, halves up. Where a rank's death can be survived, all
tensors go through one buffer and are written last: a group that did not meet leaves them as they were.

The mean of equal models is that model to the bit. The sum of n equal floats, divided by n, is that float only where n
is a power of two, so ranks compare digests first: of the beginnings of a few tensors; while these agree, of those of
all tensors; and then of everything. Where models differ, as they do in training, that is one small Allreduce. With
`guard`, floats that are not finite are left out number by number: the mean is taken over the ranks that have a finite
number in that place, and where no rank has one, each keeps its own.

`Consensus` keeps each rank's weights at given times, which disturbs nobody, and forms the mean model when training is
over: what averaging would give, whatever the policy.
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

FEW, HEAD = 8, 16  # tensors that are looked at first, and numbers of each


def all_same(comm: Comm, live: Tensors) -> bool:
    """Return whether all ranks of the group hold the same bits; collective. The layouts must be equal."""
    tensors = [tensor for tensor in live.values() if tensor.numel()]
    if not tensors:
        return True
    if without_data(tensors[0]):  # models that train differ, and the first look shows it
        tensors = [torch.tensor([comm.Get_rank()])]
    # Spread over all tensors, the last one too: early layers may be frozen, and so equal where later ones differ.
    few = tensors[:: -(-len(tensors) // FEW)] + tensors[-1:]
    # `and` stops at the first difference, which training models show in the heads of a few tensors.
    return (
        _same_digest(comm, map(_head, few))
        and _same_digest(comm, map(_head, tensors))
        and _same_digest(comm, (tensor.reshape(-1) for tensor in tensors))
    )


def _head(tensor: torch.Tensor) -> torch.Tensor:
    # Indexing and not `reshape`: a tensor that is not contiguous would be copied whole for its first numbers.
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
    """What a rank does not contribute to a sum: flat places, and the values that stood there."""

    places: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class Healed:
    """How many of this rank's numbers are now the mean of the others', and how many are NaN on every rank."""

    numbers: int = 0
    lost: int = 0

    def __add__(self, other: Healed) -> Healed:
        return Healed(self.numbers + other.numbers, self.lost + other.lost)


MeanPiece = tuple[torch.Tensor, LeftOut | None]


def leave_out(contribution: torch.Tensor) -> LeftOut | None:
    """Put 0 where a flat contribution is not finite; return what was left out, None if it is nothing."""
    if all_finite(contribution):
        return None
    places = (~torch.isfinite(contribution)).nonzero().squeeze(1)
    left_out = LeftOut(places, contribution[places])
    contribution[places] = 0
    return left_out


def heal(comm: Comm, pieces: Sequence[MeanPiece]) -> Healed:
    """Mend means from which some ranks left something out, in place; all ranks of the group call, with equal pieces.

    A piece is a mean (the sum divided by the group's size) and what this rank left out of it. Where no rank left
    anything out, this costs one small Allreduce.
    """
    # All ranks have equal pieces, so all skip the collective alike.
    if not pieces:
        return Healed()
    # All must agree which pieces to mend, because mending is itself a collective.
    wanted = np.asarray([left_out is not None for _, left_out in pieces], np.int32)
    comm.Allreduce(IN_PLACE, wanted, MAX)
    found = Healed()
    for (mean, left_out), wants in zip(pieces, wanted.tolist(), strict=True):
        if wants:
            found += mend(comm, mean, left_out)
    return found


def mend(comm: Comm, mean: torch.Tensor, left_out: LeftOut | None) -> Healed:
    """Divide by the number of ranks that contributed, place by place; all ranks of the group call."""
    counts = torch.ones_like(mean)
    if left_out is not None:
        counts[left_out.places] = 0
    comm.Allreduce(IN_PLACE, as_memory(counts))
    # The mean was divided by the group's size: multiplying undoes that where fewer ranks contributed.
    mean.mul_(torch.where(counts > 0, comm.Get_size() / counts, 1))
    if left_out is None:
        return Healed()
    nowhere = counts[left_out.places] == 0  # no rank had a finite number: each keeps its own
    mean[left_out.places] = torch.where(nowhere, left_out.values, mean[left_out.places])
    lost = int((nowhere & left_out.values.isnan()).sum())
    return Healed(int((~nowhere).sum()), lost)


Array = NDArray[Any]
BLOCK = 1 << 16  # numbers that are divided and looked at together, while they are in the cache


class BufferedMean:
    """Tensors that travel through one flat buffer, which is built once."""

    pending: Sequence[MeanPiece] = ()

    def __init__(
        self, wire: torch.dtype, entries: Sequence[Entry], device: torch.device, *, guard: bool
    ) -> None:
        self._names, self._whole = [entry.name for entry in entries], wire == torch.int64
        self._guard = guard and not self._whole
        lengths = [entry.count for entry in entries]
        self._count = sum(lengths)
        # Remainders travel behind the quotients in one buffer: one Allreduce and not two.
        self._flat = new_buffer(2 * self._count if self._whole else self._count, wire, device)
        self._memory = as_memory(self._flat)
        pieces = torch.split(self._flat[: self._count], lengths)
        self._views = [piece.view(entry.shape) for piece, entry in zip(pieces, entries, strict=True)]
        self.nbytes = self._flat.nbytes
        self._live: Tensors = {}
        self._own: list[torch.Tensor] = []
        self._rows: list[torch.Tensor] = []  # the rank's tensors in one dimension, where that needs no copy
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
        # NaN and infinities are not looked for before the sum, which would cost a pass over all tensors each time: they
        # show in the sum, on all ranks alike, so all take this branch together and sum once more.
        if not self._mean(comm):
            # Gathered again: the failed sum has overwritten this rank's contribution.
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
        """Take the mean; return whether it needs no mending, which is the same on all ranks, as the sums are."""
        comm.Allreduce(IN_PLACE, self._memory)
        if not self._guard:
            _divide(self._memory, comm.Get_size())
            return True
        # Two looks: the quick one may take very large finite numbers for infinite.
        return _divided(self._flat, comm.Get_size()) or all_finite(self._flat)

    def _bind(self, live: Tensors) -> None:
        # By identity of the mapping: the collector gives the same one as long as the memory is the same.
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
        # The sum of whole numbers may overflow where their mean does not. So each rank contributes the quotient by the
        # size of the group, and the remainder apart: the sum of quotients is at most the largest number, and that of
        # the remainders less than the square of the size.
        size, value = comm.Get_size(), self._flat[: self._count]
        quotient = value.div(size, rounding_mode="floor")
        self._flat[self._count :] = value - quotient * size
        self._flat[: self._count] = quotient
        comm.Allreduce(IN_PLACE, self._memory)
        # Halves round up: torch's own rounding to even would depend on whether the mean is odd.
        remainder = (2 * self._flat[self._count :] + size).div(2 * size, rounding_mode="floor")
        self._flat[: self._count] += remainder


class InPlaceMean:
    """Memory that is summed piece by piece where it lies: a large tensor, or tensors end to end in one storage.

    If it is to be `copied`, the pieces are those of a copy, which replaces the memory in the end. `pending` are the
    means that `heal` may have to mend when all have been taken.
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
        # Reset for each call: what a call that failed has left must not be mended in the next one.
        self.pending = []
        row = self._row
        if row is None or self._copied:  # it was moved apart, or lies across memory
            row = torch.cat([tensor.reshape(-1) for tensor in self._own])
        staged = row.dtype != self._wire or momentum
        healed = self._staged(comm, row, momentum) if staged else self._in_place(comm, row)
        # Tensors without common memory are mended in the copy before it is written back, so none is left for later.
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
        """Replace copied memory by its mean; elsewhere the mean is where it belongs."""
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
        # Exact only for powers of two: the reciprocal of any other number is rounded.
        total *= 1 / size


def _divided(total: torch.Tensor, size: int) -> bool:
    """Divide in place, block by block; return whether all is surely finite."""
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
            # Only the drift is cleaned: own values that are not finite must not come back through momentum.
            total.add_(drift if all_finite(drift) else drift.nan_to_num_(0, 0, 0))


logger = logging.getLogger(__name__)

LARGE = 16_384  # elements from which a tensor's own Allreduce costs less than two more passes over its memory
PIECE_NBYTES = 1 << 21  # what has been summed is divided while it is still in the cache
PIECE_ON_GPU_NBYTES = 1 << 26  # a launch costs more than a pass over memory there
SHARE_NBYTES = 1 << 18  # of each rank in a piece: shorter messages do not fill a network


def _wire_dtype(dtype: torch.dtype) -> torch.dtype:
    return sum_dtype(dtype) if dtype.is_floating_point else torch.int64


class GroupMean:
    """Averages one schema of tensors over one group. Making it checks, collectively, that all ranks agree.

    With `guard`, numbers that are not finite are left out, and a rank that is healed by the others warns of it and
    records an event "healed". All ranks of a group must give the same.
    """

    def __init__(self, comm: Comm, live: Tensors, *, guard: bool = True) -> None:
        self.layout, self._guard = Layout.of(live), guard
        check_same(comm, self.layout, guard=guard)
        able = comm.capabilities()
        # Summing a tensor where it lies saves two passes over its memory, but a group that does not meet to the end
        # leaves it half summed. Where that is survived, the model must be as it was: all goes through a buffer. But
        # gloo's bits depend on where the pieces end, so virtual ranks that sum as gloo take the same pieces, copied.
        self._survives = able.survives
        in_place = (not able.survives or able.sums == "gloo") and all(
            t.device.type in able.devices or without_data(t) for t in live.values()
        )
        self._parts: list[BufferedMean | InPlaceMean] = []
        # In order of appearance, which is the same on all ranks: a set would sum dtypes in different orders.
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
        """Take out what is summed where it lies; return the entries that are left."""
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
        """Average the live tensors in place; return what became of this rank's numbers that were not finite."""
        size = comm.Get_size()
        # Without the comparison equal models would change: a sum of seven 0.7 divided by 7 is not 0.7. For models that
        # differ, the digest of a few heads settles it in one Allreduce of 16 bytes.
        if size & (size - 1) and all_same(comm, live):  # by a power of two, equal numbers are divided exactly
            return Healed()
        healed = Healed()
        for part in self._parts:
            healed += part.average(comm, live, momentum)
        # After all sums: one small Allreduce for all pieces instead of one for each.
        healed += heal(comm, [piece for part in self._parts for piece in part.pending])
        # Written last, so that a group that broke up in the middle leaves the tensors as they were.
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
    """Return whether on all ranks of the group the tensors lie end to end, and whether in main memory."""
    near = all(tensor.device.type == "cpu" or without_data(tensor) for tensor in tensors)
    words = np.asarray([as_one_view(tensors) is not None, near], np.int32)
    comm.Allreduce(IN_PLACE, words, MIN)
    return bool(words[0]), bool(words[1])


def latest_round(comm: Comm, own: int) -> int:
    """Return the latest round of any rank, which those take over that have just joined; collective."""
    rounds = np.asarray([own])
    comm.Allreduce(IN_PLACE, rounds, MAX)
    return int(rounds[0])


def check_same(comm: Comm, layout: Layout, *, guard: bool) -> None:
    """Raise `MismatchError` on every rank of the group unless all have the same layout, and the same guard."""
    digest = np.uint64(layout.digest)
    # Digest and its complement: a link that damages one of them shows, since collectives carry no checksums.
    rows = np.empty((comm.Get_size(), 2), np.uint64)
    comm.Allgather(np.asarray([digest, ~digest ^ np.uint64(guard)]), rows)
    told = rows[:, 0] ^ ~rows[:, 1]
    if (rows == rows[0]).all() and told[0] <= 1:
        return
    who = f"rank {comm.Get_rank()}"
    off, on, damaged = (np.flatnonzero(each).tolist() for each in (told == 0, told == 1, told > 1))
    if damaged:
        raise MismatchError(
            f"{who}: what ranks {damaged} have told of their models was damaged on its way here, so it is unknown "
            f"whether the models of this group agree. Collectives carry no checksums: see the events of kind link"
        )
    if (rows[:, 0] == rows[0, 0]).all():
        raise MismatchError(f"{who}: ranks {off} average with guard=False, ranks {on} with guard=True: agree")
    others = [int(rank) for rank in np.flatnonzero(rows[:, 0] != rows[0, 0])]
    # Texts are exchanged only in case of an error, which all ranks see alike: they may be megabytes.
    texts = comm.allgather(layout.text)
    difference = Layout.parse(texts[0]).difference(Layout.parse(texts[others[0]]))
    raise MismatchError(
        f"{who}: the models of this group differ, so they cannot be averaged: between rank 0 (here) "
        f"and rank {', '.join(map(str, others))} (there), {difference}. Build equal models on all ranks, "
        f"or use a selective policy, which matches tensors by name"
    )


AT_ONCE_NBYTES = 1 << 18  # summed by one call: a call for each time would cost more than the sum


class Consensus:
    """Keeps a rank's weights at the multiples of a period of its clock, and gives the group's means of them.

    ```python
    consensus = Consensus(comm, model, every_s=0.1)
    for iteration in range(iterations):
        model = train_and_exchange(iteration, model)
        consensus.passed(model)
    for time_s, mean in consensus.means():
        comm.record.event("consensus", at_s=time_s, accuracy=accuracy(mean))
    ```

    Each time takes the memory of the weights, unless they have not changed since the last one.

    Args:
        comm: the group.
        model: as training begins. Its floating-point parameters and buffers are averaged, in float32 at least.
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
        """Note that an iteration has ended; until now the rank held the model of the one before.

        Args:
            model: as the iteration left it.
        """
        due = int(self._comm.clock.now() / self._every_s) + 1
        # A long iteration may pass several times: the rank held the older model at each of them.
        self._kept += [self._held] * (due - len(self._kept))
        self._held, self._model = _weights(model), model

    def means(self) -> Iterator[tuple[float, torch.nn.Module]]:
        """Give the mean model at each time, until the last rank has ended. Collective; waits for that rank.

        Ranks that ended earlier count with their last weights.

        Yields:
            Seconds and the mean model then, on the group's rank 0; nothing on the others. It is the same object each
            time, with other weights.
        """
        comm, held = self._comm, self._held
        with comm.clock.deadline(float("inf")):  # a straggler may end much later than the first
            ticks = comm.allreduce(len(self._kept), op=MAX)
        # Who has ended keeps its last weights, else the mean would be of ever fewer ranks.
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
