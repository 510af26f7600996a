"""The exchange of models in rows: means, outer steps, and replacement by donors.

It applies a policy's own arithmetic to rows, so models get the same values as on ordinary ranks. Knows rows and
policies; must not know how models train.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spawnsim.columnar.rows import WEIGHTS, Members, Rows
from spawnsim.columnar.shards import Index, Shards, index
from spawnsim.models.network.cost import Floats, Ints
from spawnsim.policies import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    EASGDPolicy,
    StreamingDiLoCoPolicy,
)
from spawnsim.policies.exchange.replacement import Contribution, mixture, nonfinite_donors, normalized
from spawnsim.policies.outer_optimizer import GlobalWeightsPolicy
from spawnsim.policies.rules.donors import Decision
from spawnsim.policies.state.arithmetic import with_momentum
from spawnsim.policies.state.difference_codecs import ErrorFeedback, RandomMask
from spawnsim.policies.state.layout import StateScope, collect

AT_ONCE_NBYTES = 64 << 20  # memory for differences of rows
BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def _travelling(models: Rows, travels: StateScope, *, state: bool) -> dict[str, Tensor]:
    """Return the columns that travel, by name: the weights, and with `state` the optimizer's state."""
    weights = models.of[WEIGHTS] if travels.frozen else models.of[WEIGHTS][:, models.plan.columns]
    return {WEIGHTS: weights} | (_of_state(models) if state else {})


def _places(models: Rows, travels: StateScope, mask: RandomMask) -> Tensor:
    """Return the columns of a mask's places: rows are ordered by the optimizer's group, masks by the model."""
    plan = models.plan
    travelling = {place.name for place in (plan.places if travels.frozen else plan.trained)}
    columns = _columns(models, [name for name in plan.names if name in travelling])
    return columns[torch.from_numpy(mask.places(len(columns)))]


def _columns(models: Rows, names: Sequence[str]) -> Tensor:
    """Return the columns of some parameters, in the order of their names."""
    places = {place.name: place.columns for place in models.plan.places}
    return torch.cat([torch.arange(places[name].start, places[name].stop) for name in names])


def _of_state(models: Rows) -> dict[str, Tensor]:
    return {name: rows for name, rows in models.of.items() if name != WEIGHTS}


def _reset(models: Rows, rows: Any) -> None:
    for each in _of_state(models).values():
        each[rows] = 0


# ------------------------------------------------------------------------------------------------------- averaging
def are_equal(
    models: Rows, members: Members, policy: AverageAllPolicy, mask: RandomMask | None = None
) -> bool:
    """Return whether the travelling parts of some models are equal, to the bit; with a mask, at its places."""
    state, shards = policy.travels.optimizer_state == "average", models.shards
    own, first = index(shards.own(members)), lowest(shards, members)
    for each in _travelling(models, policy.travels, state=state).values():
        bits = BITS[each.dtype]
        rows, like = each[own].view(bits), shards.row(each, first).view(bits)
        if mask is not None:
            places = _places(models, policy.travels, mask)
            rows, like = rows[:, places], like[places]
        # Most differ in the first two rows.
        if not all(shards.each(bool((rows[:2] == like).all()) and bool((rows == like).all()))):
            return False
    return True


def lowest(shards: Shards, members: Members) -> int:
    """Return the lowest of some ranks."""
    return int(np.arange(shards.ranks)[members][0])


@torch.no_grad()
def average(
    models: Rows, members: Members, policy: AverageAllPolicy, *, equal: bool, mask: RandomMask | None = None
) -> None:
    """Set some rows to their mean, unless they are equal, and treat the optimizer's state as the policy says.

    With a mask only the weights at its places are averaged, and what is not finite elsewhere stays.
    """
    how, shards = policy.travels.optimizer_state, models.shards
    if not equal and mask is not None:
        rows = _travelling(models, policy.travels, state=False)[WEIGHTS]
        places = _places(models, policy.travels, mask)
        few = rows[:, places]
        Averaging(shards, few, members, momentum=0.0, guard=policy.guard).assign()
        rows[:, places] = few
    elif not equal:
        healed = torch.zeros(0, dtype=torch.bool)
        for each in _travelling(models, policy.travels, state=how == "average").values():
            averaging = Averaging(shards, each, members, momentum=policy.momentum, guard=policy.guard)
            # Step counts are in main memory, even if the weights are on a GPU.
            found = averaging.assign().cpu()
            healed = found if not healed.numel() else healed | found
        _reset_if_not_finite(models, members, healed)
    if how == "reset":
        _reset(models, index(shards.own(members)))


def count_of(shards: Shards, members: Members) -> int:
    """Return the number of some ranks, in all processes."""
    return len(np.arange(shards.ranks)[members])


def mean_of(shards: Shards, rows: Tensor, members: Members) -> Tensor:
    """Return the mean of some ranks' rows; collective."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = shards.total(members, lambda some: rows[some].sum(0, dtype=wide))
    return total.div_(count_of(shards, members)).to(rows.dtype)


class Averaging:
    """The mean of some rows; with a guard, of the finite numbers in each column, and a column without any is kept."""

    def __init__(
        self, shards: Shards, rows: Tensor, members: Members, *, momentum: float, guard: bool
    ) -> None:
        self._shards, self._rows, self._members, self._momentum = shards, rows, members, momentum
        self._mean, self._count = mean_of(shards, rows, members), torch.ones(0)
        self._heals = guard and not bool(self._mean.isfinite().all())
        if self._heals:
            self._count = shards.total(members, lambda some: rows[some].isfinite().sum(0))
            finite_sum = shards.total(members, lambda some: rows[some].nan_to_num(0.0, 0.0, 0.0).sum(0))
            self._mean = finite_sum / self._count.clamp(min=1)

    def assign(self) -> Tensor:
        """Set the rows of this process to the mean; return which were healed, bool (rows,)."""
        found = [self._assign(index(some)) for some in self._shards.chunks(self._members) if len(some)]
        return torch.cat(found) if found else torch.zeros(0, dtype=torch.bool)

    def _assign(self, some: Index) -> Tensor:
        own = self._rows[some]
        mean, healed = self._mean, torch.zeros(len(own), dtype=torch.bool, device=own.device)
        if self._heals:
            healed = (~own.isfinite() & (self._count > 0)).any(1)
            mean = torch.where(self._count > 0, mean, own)
        if self._momentum:
            drift = own - mean
            mean = mean + self._momentum * torch.where(drift.isfinite(), drift, 0.0)
        self._rows[some] = mean.expand_as(own)
        return healed


def _reset_if_not_finite(models: Rows, members: Members, healed: Tensor) -> None:
    """Reset the optimizer state of healed ranks if it is not finite: it would damage the healed weights again."""
    if not healed.any():
        return
    own = torch.from_numpy(models.shards.own(members))[healed.cpu()].tolist()
    state = _of_state(models).values()
    _reset(models, [row for row in own if not all(bool(rows[row].isfinite().all()) for rows in state)])


# --------------------------------------------------------------------------------------------------------- mixing
@torch.no_grad()
def mix(models: Rows, receivers: Ints, senders: Ints, weights: Floats, *, travels: StateScope) -> None:
    """Add to rows the weighted differences of other rows from them: θ_i ← θ_i + Σ_j w_ij (θ_j − θ_i).

    As in `blend`, equal rows stay equal to the bit. All differences are of the rows as they were.

    Args:
        models: the rows.
        receivers: rank i of each pair, int64 (pairs,), ascending.
        senders: rank j of each pair.
        weights: w of each pair, float64 (pairs,).
        travels: the parts that are mixed.
    """
    rows, shards = _travelling(models, travels, state=False)[WEIGHTS], models.shards
    fetched, ranks = shards.fetch({WEIGHTS: rows}, receivers, senders)
    theirs = fetched[WEIGHTS]
    own = shards.process_of(receivers) == shards.process
    receivers, senders, weights = receivers[own] - shards.first, senders[own], weights[own]
    near = shards.process_of(senders) == shards.process
    senders = np.where(near, senders - shards.first, shards.count + np.searchsorted(ranks, senders))
    starts = np.flatnonzero(np.r_[True, receivers[1:] != receivers[:-1]][: len(receivers)])
    place = np.arange(len(receivers)) - np.repeat(starts, np.diff(np.r_[starts, len(receivers)]))
    # The first senders of all rows at once, then the second ones, and so on: the order of the sums of `blend`.
    turns = [np.flatnonzero(place == number) for number in range(int(place.max(initial=-1)) + 1)]
    pairs = [
        (torch.from_numpy(receivers[each]), torch.from_numpy(senders[each]), _column(weights[each], rows))
        for each in turns
    ]
    columns = max(1, AT_ONCE_NBYTES // max(rows[:, :1].nbytes, 1))
    for some, far in zip(torch.split(rows, columns, 1), torch.split(theirs, columns, 1), strict=True):
        drift = torch.zeros_like(some)
        source = torch.cat([some, far]) if len(far) else some
        for to, of, share in pairs:
            drift[to] += _difference(source[of], some[to]).mul_(share)
        some += drift


def _column(weights: Floats, like: Tensor) -> Tensor:
    return torch.from_numpy(weights).to(like)[:, None]


def _difference(value: Tensor, anchor: Tensor) -> Tensor:
    """Return value − anchor, and 0 where they are equal, such as for two infinities of a mask."""
    return (value - anchor).masked_fill_(value == anchor, 0)


# -------------------------------------------------------------------------------------------------- global weights
class GlobalWeights:
    """The weights from which all ranks continue, and the outer momentum.

    Args:
        row: the initial weights, (columns,).
        fragments: the columns of each part that has its own steps; None: one part with all columns.
        encoder: encodes the differences of ranks; None: they travel as they are.
    """

    def __init__(
        self, row: Tensor, fragments: Sequence[Tensor] | None = None, encoder: ErrorFeedback | None = None
    ) -> None:
        self.weights, self.momentum = row.clone(), torch.zeros_like(row)
        self._fragments: Sequence[Tensor | slice] = [slice(None)] if fragments is None else fragments
        self._encoder = encoder
        self._means: deque[Tensor] = deque()

    def send(self, rows: Tensor, members: Members, shards: Shards, place: int = 0) -> Tensor:
        """Take the mean difference of some rows from the weights, for a later `step`.

        A non-finite number counts as a difference of 0.

        Args:
            rows: the weights of this process's ranks, (rows, columns).
            members: the ranks that take part.
            shards: the division of ranks over processes.
            place: the fragment.

        Returns:
            Which rows were not finite, bool, for each member of this process.
        """
        columns = self._fragments[place]
        before, healed = self.weights[columns], []

        def moved(some: Index) -> Tensor:
            difference = before - rows[some][:, columns]
            finite = difference.isfinite()
            healed.append(~finite.all(1))
            difference = torch.where(finite, difference, 0.0)
            if self._encoder is None:
                return difference.sum(0)
            ranks = torch.arange(shards.count)[some] + shards.first
            return self._decoded(difference, place, ranks.tolist())

        self._means.append(shards.total(members, moved).div_(count_of(shards, members)))
        return torch.cat(healed)

    def step(
        self,
        rows: Tensor,
        members: Members,
        policy: GlobalWeightsPolicy,
        *,
        shards: Shards,
        place: int = 0,
        scale: float = 1.0,
    ) -> None:
        """Make the outer step of the oldest mean that was sent, and move some rows.

        Args:
            rows: the weights of this process's ranks, (rows, columns); changed in place.
            members: the ranks to move.
            policy: its outer optimizer. `EASGDPolicy` moves rows by a share of their difference, streaming leaves them
                a share of their own weights, others move them all the way.
            shards: the division of ranks over processes.
            place: the fragment.
            scale: see `OuterSGD.step`.
        """
        columns = self._fragments[place]
        anchor, weights, momentum = (
            each[columns].clone() for each in (self.weights, self.weights, self.momentum)
        )
        policy.rule.step([weights], [momentum], [self._means.popleft()], scale)
        self.weights[columns], self.momentum[columns] = weights, momentum
        kept = policy.blend if isinstance(policy, StreamingDiLoCoPolicy) else 0.0
        if isinstance(policy, EASGDPolicy):
            kept = 1 - policy.rule.lr / count_of(shards, members)
        else:
            anchor = weights
        for own in shards.chunks(members):
            some = torch.from_numpy(own)
            at = some if isinstance(columns, slice) else (some[:, None], columns)
            difference = anchor - rows[at] if kept else torch.zeros_like(anchor)
            rows[at] = torch.sub(anchor, torch.where(difference.isfinite(), difference, 0.0), alpha=kept)

    def _decoded(self, differences: Tensor, place: int, ranks: list[int]) -> Tensor:
        """Return the sum of differences as the other ranks decode them; each rank keeps its encoding error."""
        encoder, total = self._encoder, torch.zeros_like(differences[0])
        assert encoder is not None
        for rank, values in zip(ranks, differences.cpu().numpy(), strict=True):
            body = encoder.encode((place, rank), values)
            encoder.commit((place, rank))
            total += torch.from_numpy(encoder.codec.decode(body, values.size)).to(total)
        return total


def cut(pattern: nn.Module, policy: GlobalWeightsPolicy) -> list[list[str]]:
    """Return the names of the parameters of each of a policy's fragments, in the model's order."""
    live = collect(pattern, None, policy.travels)
    floats = {name: each for name, each in live.items() if each.is_floating_point()}
    return [[name.partition("/")[2] for name in part] for part in policy.outer.split(floats)]


@torch.no_grad()
def begin_together(
    models: Rows, members: Members, policy: GlobalWeightsPolicy, fragments: Sequence[Sequence[str]]
) -> GlobalWeights:
    """Give some ranks the model of the lowest one; return the global weights."""
    whole, shards, feedback = models.of[WEIGHTS], models.shards, policy.outer.feedback
    row = shards.row(whole, lowest(shards, members))
    whole[index(shards.own(members))] = row
    row = row if policy.travels.frozen else row[models.plan.columns]
    if feedback is None and len(fragments) == 1:
        return GlobalWeights(row)
    # Differences are encoded in the model's order.
    encoder = None if feedback is None else ErrorFeedback(feedback.codec, feedback.decay)
    return GlobalWeights(row, [_columns(models, part) for part in fragments], encoder)


@torch.no_grad()
def send_difference(
    models: Rows, members: Members, policy: GlobalWeightsPolicy, *, outer: GlobalWeights, place: int
) -> None:
    """Take the mean difference of some ranks from the global weights."""
    rows = _travelling(models, policy.travels, state=False)[WEIGHTS]
    healed = outer.send(rows, members, models.shards, place)
    _reset_if_not_finite(models, members, healed)


@torch.no_grad()
def step_together(
    models: Rows,
    members: Members,
    policy: GlobalWeightsPolicy,
    *,
    outer: GlobalWeights,
    place: int,
    scale: float,
) -> None:
    """Make an outer step by the oldest mean, and move the weights of some ranks to the result, or towards it."""
    rows = _travelling(models, policy.travels, state=False)[WEIGHTS]
    outer.step(rows, members, policy, shards=models.shards, place=place, scale=scale)
    if policy.travels.optimizer_state == "reset":
        _reset(models, index(models.shards.own(members)))


# ----------------------------------------------------------------------------------------------------- replacement
@torch.no_grad()
def replace(models: Rows, decision: Decision, policy: AsyncSelectiveAveragingPolicy) -> dict[int, int]:
    """Set replaced ranks to the weighted mean of their donors, and treat optimizer state as the policy says.

    Returns:
        The heaviest donor of each replaced rank of this process; none for a rank that keeps its model.
    """
    how = policy.replacement
    state = how.travels.optimizer_state
    rows = _travelling(models, how.travels, state=how.travels.with_optimizer)
    found: dict[int, dict[str, Tensor]] = {}  # by row of this process
    heaviest: dict[int, int] = {}
    for row, given in _contributions(rows, decision, models.shards).items():
        out = nonfinite_donors(given, partial(_row_of, rows, row)) if policy.guard else []
        kept = normalized([each for each in given if each.donor not in out])
        if not kept:  # the rank keeps its model
            continue
        own, most = rows[WEIGHTS][row], max(kept, key=lambda each: each.precedence)
        heaviest[row + models.shards.first] = most.donor
        found[row] = {WEIGHTS: with_momentum(_mixed(WEIGHTS, own, kept), own, how.momentum)}
        names = [name for name in rows if name != WEIGHTS]
        if state == "copy":
            found[row] |= {name: most.tensors[name].clone() for name in names}
        elif state == "average":
            found[row] |= {name: _mixed(name, rows[name][row], kept) for name in names}
    # Assign only after all mixtures: a donor may be replaced as well.
    for row, values in found.items():
        for name, value in values.items():
            rows[name][row] = value
    if state == "reset":
        _reset(models, torch.tensor([*found], dtype=torch.int64))
    return heaviest


def _row_of(rows: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    return {name: each[row] for name, each in rows.items()}


def _contributions(
    rows: dict[str, Tensor], decision: Decision, shards: Shards
) -> dict[int, list[Contribution]]:
    """Return the contributions of donors to each replaced rank of this process, by its row."""
    donor = shards.fetched(rows, decision.receivers, decision.donors)
    ends = np.cumsum(decision.counts)
    low, high = np.searchsorted(decision.replaced, (shards.first, shards.first + shards.count))
    found = {}
    for place in range(low, high):
        edges = slice(int(ends[place] - decision.counts[place]), int(ends[place]))
        pairs = zip(decision.donors[edges].tolist(), decision.weights[edges].tolist(), strict=True)
        found[int(decision.replaced[place]) - shards.first] = [
            Contribution(rank, decision.round, weight, donor(rank)) for rank, weight in pairs
        ]
    return found


def _mixed(name: str, own: Tensor, given: list[Contribution]) -> Tensor:
    mixed = mixture(name, own, given)
    assert mixed is not None  # all donors have this tensor
    return mixed
