"""Numbers that are not finite (NaN, infinities): found for the price of a sum, and left out of means over a group.

The rule holds number by number: a mean is taken over the ranks that have a finite number in that place, and all ranks
get it; where no rank has one, each keeps its own. So one rank's NaN reaches nobody, that rank is healed, and a mask of
infinities that all ranks have stays. Leaving out the whole rank would be stronger, but a rank would have to read all of
its model before the first sum, a third of the price of an average here, and a mask would leave out every rank.

This room knows tensors and a communicator's Allreduce; it knows no model and no policy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from spawnsim.comm import IN_PLACE, MAX, Comm
from spawnsim.policies.memory import as_memory


def surely_finite(tensor: torch.Tensor) -> bool:
    """Return whether a sum says that all is finite; False where the sum itself may have overflowed."""
    total = tensor.sum().item()
    return math.isfinite(total.real) and math.isfinite(total.imag)


def all_finite(tensor: torch.Tensor) -> bool:
    """Return whether all numbers of a floating-point tensor are finite."""
    return surely_finite(tensor) or bool(torch.isfinite(tensor).all())


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


Piece = tuple[torch.Tensor, LeftOut | None]


def leave_out(contribution: torch.Tensor) -> LeftOut | None:
    """Put 0 where a flat contribution is not finite; return what was left out, None if it is nothing."""
    if all_finite(contribution):
        return None
    places = (~torch.isfinite(contribution)).nonzero().squeeze(1)
    left_out = LeftOut(places, contribution[places])
    contribution[places] = 0
    return left_out


def heal(comm: Comm, pieces: Sequence[Piece]) -> Healed:
    """Mend means from which some ranks left something out, in place; all ranks of the group call, with equal pieces.

    A piece is a mean (the sum divided by the group's size) and what this rank left out of it. Where nobody left
    anything out, this costs one small Allreduce.
    """
    if not pieces:
        return Healed()
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
    mean.mul_(torch.where(counts > 0, comm.Get_size() / counts, 1))
    if left_out is None:
        return Healed()
    nobody = counts[left_out.places] == 0
    mean[left_out.places] = torch.where(nobody, left_out.values, mean[left_out.places])
    lost = int((nobody & left_out.values.isnan()).sum())
    return Healed(int((~nobody).sum()), lost)
