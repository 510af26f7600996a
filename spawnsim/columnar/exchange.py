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

AT_ONCE_NBYTES = 64 << 20  # memory for differences from the global weights
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
    state = policy.travels.optimizer_state == "average"
    for each in _travelling(models, policy.travels, state=state).values():
        rows = each[members].view(BITS[each.dtype])
        if mask is not None:
            rows = rows[:, _places(models, policy.travels, mask)]
        # Most differ in the first two rows.
        if not bool((rows[:2] == rows[0]).all()) or not bool((rows == rows[0]).all()):
            return False
    return True


@torch.no_grad()
def average(
    models: Rows, members: Members, policy: AverageAllPolicy, *, equal: bool, mask: RandomMask | None = None
) -> None:
    """Set some rows to their mean, unless they are equal, and treat the optimizer's state as the policy says.

    With a mask only the weights at its places are averaged, and what is not finite elsewhere stays.
    """
    how = policy.travels.optimizer_state
    if not equal and mask is not None:
        rows = _travelling(models, policy.travels, state=False)[WEIGHTS]
        places = _places(models, policy.travels, mask)
        few = rows[:, places]
        _average(few, members, 0.0, guard=policy.guard)
        rows[:, places] = few
    elif not equal:
        healed = torch.zeros(0, dtype=torch.bool)
        for each in _travelling(models, policy.travels, state=how == "average").values():
            # Step counts are in main memory, even if the weights are on a GPU.
            found = _average(each, members, policy.momentum, guard=policy.guard).cpu()
            healed = found if not healed.numel() else healed | found
        _reset_if_not_finite(models, members, healed)
    if how == "reset":
        _reset(models, members)


def _average(rows: Tensor, members: Members, momentum: float, *, guard: bool) -> Tensor:
    """Set some rows to their mean; return which rows were healed, bool (members,)."""
    own = rows[members]
    mean = own.mean(0)
    healed = torch.zeros(len(own), dtype=torch.bool, device=own.device)
    if guard and not mean.isfinite().all():
        finite = own.isfinite()
        count = finite.sum(0)
        finite_sum = torch.where(finite, own, 0.0).sum(0)
        mean = torch.where(count > 0, finite_sum / count.clamp(min=1), own)
        healed = (~finite & (count > 0)).any(1)
    if momentum:
        drift = own - mean
        mean = mean + momentum * torch.where(drift.isfinite(), drift, 0.0)
    rows[members] = mean.expand_as(own)
    return healed


def _reset_if_not_finite(models: Rows, members: Members, healed: Tensor) -> None:
    """Reset the optimizer state of healed ranks if it is not finite: it would damage the healed weights again."""
    if not healed.any():
        return
    ranks = torch.arange(len(models.of[WEIGHTS]))[members][healed.cpu()].tolist()
    state = _of_state(models).values()
    _reset(models, [rank for rank in ranks if not all(bool(rows[rank].isfinite().all()) for rows in state)])


# --------------------------------------------------------------------------------------------------------- mixing
@torch.no_grad()
def mix(models: Rows, receivers: Ints, senders: Ints, weights: Floats, *, travels: StateScope) -> None:
    """Add to rows the weighted differences of other rows from them: θ_i ← θ_i + Σ_j w_ij (θ_j − θ_i).

    As in `blend`, equal rows stay equal to the bit. All differences are of the rows as they were.

    Args:
        models: the rows.
        receivers: row i of each pair, int64 (pairs,), ascending.
        senders: row j of each pair.
        weights: w of each pair, float64 (pairs,).
        travels: the parts that are mixed.
    """
    rows = _travelling(models, travels, state=False)[WEIGHTS]
    starts = np.flatnonzero(np.r_[True, receivers[1:] != receivers[:-1]][: len(receivers)])
    place = np.arange(len(receivers)) - np.repeat(starts, np.diff(np.r_[starts, len(receivers)]))
    # The first senders of all rows at once, then the second ones, and so on: the order of the sums of `blend`.
    turns = [np.flatnonzero(place == number) for number in range(int(place.max(initial=-1)) + 1)]
    pairs = [
        (torch.from_numpy(receivers[each]), torch.from_numpy(senders[each]), _column(weights[each], rows))
        for each in turns
    ]
    for some in torch.split(rows, max(1, AT_ONCE_NBYTES // max(rows[:, :1].nbytes, 1)), 1):
        drift = torch.zeros_like(some)
        for to, of, share in pairs:
            drift[to] += _difference(some[of], some[to]).mul_(share)
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
        self.weights, self._momentum = row.clone(), torch.zeros_like(row)
        self._fragments: Sequence[Tensor | slice] = [slice(None)] if fragments is None else fragments
        self._encoder = encoder
        self._means: deque[Tensor] = deque()

    def send(self, rows: Tensor, members: Members, place: int = 0) -> Tensor:
        """Take the mean difference of some rows from the weights, for a later `step`.

        A non-finite number counts as a difference of 0.

        Args:
            rows: the weights of all ranks, (rows, columns).
            members: the rows that take part.
            place: the fragment.

        Returns:
            Which rows were not finite, bool (members,).
        """
        columns = self._fragments[place]
        before = self.weights[columns]
        mean, healed, chosen = torch.zeros_like(before), [], torch.arange(len(rows))[members]
        for some in self._pieces(chosen):
            difference = before - rows[some][:, columns]
            finite = difference.isfinite()
            healed.append(~finite.all(1))
            difference = torch.where(finite, difference, 0.0)
            mean += (
                difference.sum(0)
                if self._encoder is None
                else self._decoded(difference, place, some.tolist())
            )
        self._means.append(mean.div_(len(chosen)))
        return torch.cat(healed)

    def step(
        self,
        rows: Tensor,
        members: Members,
        policy: GlobalWeightsPolicy,
        *,
        place: int = 0,
        scale: float = 1.0,
    ) -> None:
        """Make the outer step of the oldest mean that was sent, and move some rows.

        Args:
            rows: the weights of all ranks, (rows, columns); changed in place.
            members: the rows to move.
            policy: its outer optimizer. `EASGDPolicy` moves rows by a share of their difference, streaming leaves them
                a share of their own weights, others move them all the way.
            place: the fragment.
            scale: see `OuterSGD.step`.
        """
        columns, chosen = self._fragments[place], torch.arange(len(rows))[members]
        anchor, weights, momentum = (
            each[columns].clone() for each in (self.weights, self.weights, self._momentum)
        )
        policy.rule.step([weights], [momentum], [self._means.popleft()], scale)
        self.weights[columns], self._momentum[columns] = weights, momentum
        kept = policy.blend if isinstance(policy, StreamingDiLoCoPolicy) else 0.0
        if isinstance(policy, EASGDPolicy):
            kept = 1 - policy.rule.lr / len(chosen)
        else:
            anchor = weights
        for some in self._pieces(chosen):
            at = some if isinstance(columns, slice) else (some[:, None], columns)
            difference = anchor - rows[at] if kept else torch.zeros_like(anchor)
            rows[at] = torch.sub(anchor, torch.where(difference.isfinite(), difference, 0.0), alpha=kept)

    def _pieces(self, chosen: Tensor) -> Sequence[Tensor]:
        return torch.split(chosen, max(1, AT_ONCE_NBYTES // max(self.weights.nbytes, 1)))

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
    whole, feedback = models.of[WEIGHTS], policy.outer.feedback
    whole[members] = whole[members][0].clone()
    row = _travelling(models, policy.travels, state=False)[WEIGHTS][members][0]
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
    healed = outer.send(_travelling(models, policy.travels, state=False)[WEIGHTS], members, place)
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
    outer.step(rows, members, policy, place=place, scale=scale)
    if policy.travels.optimizer_state == "reset":
        _reset(models, members)


# ----------------------------------------------------------------------------------------------------- replacement
@torch.no_grad()
def replace(models: Rows, decision: Decision, policy: AsyncSelectiveAveragingPolicy) -> dict[int, int]:
    """Set replaced ranks to the weighted mean of their donors, and treat optimizer state as the policy says.

    Returns:
        The heaviest donor of each replaced rank; none for a rank that keeps its model.
    """
    how = policy.replacement
    state = how.travels.optimizer_state
    rows = _travelling(models, how.travels, state=how.travels.with_optimizer)
    found: dict[int, dict[str, Tensor]] = {}
    heaviest: dict[int, int] = {}
    for rank, given in _contributions(rows, decision).items():
        out = nonfinite_donors(given, partial(_row_of, rows, rank)) if policy.guard else []
        kept = normalized([each for each in given if each.donor not in out])
        if not kept:  # the rank keeps its model
            continue
        own, most = rows[WEIGHTS][rank], max(kept, key=lambda each: each.precedence)
        heaviest[rank] = most.donor
        found[rank] = {WEIGHTS: with_momentum(_mixed(WEIGHTS, own, kept), own, how.momentum)}
        names = [name for name in rows if name != WEIGHTS]
        if state == "copy":
            found[rank] |= {name: most.tensors[name].clone() for name in names}
        elif state == "average":
            found[rank] |= {name: _mixed(name, rows[name][rank], kept) for name in names}
    # Assign only after all mixtures: a donor may be replaced as well.
    for rank, values in found.items():
        for name, value in values.items():
            rows[name][rank] = value
    if state == "reset":
        _reset(models, torch.tensor([*found], dtype=torch.int64))
    return heaviest


def _row_of(rows: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    return {name: each[rank] for name, each in rows.items()}


def _contributions(rows: dict[str, Tensor], decision: Decision) -> dict[int, list[Contribution]]:
    """Return the contributions of donors to each replaced rank."""
    ends = np.cumsum(decision.counts).tolist()
    found = {}
    for rank, end, count in zip(decision.replaced.tolist(), ends, decision.counts.tolist(), strict=True):
        edges = slice(end - count, end)
        pairs = zip(decision.donors[edges].tolist(), decision.weights[edges].tolist(), strict=True)
        found[rank] = [
            Contribution(donor, decision.round, weight, {name: each[donor] for name, each in rows.items()})
            for donor, weight in pairs
        ]
    return found


def _mixed(name: str, own: Tensor, given: list[Contribution]) -> Tensor:
    mixed = mixture(name, own, given)
    assert mixed is not None  # all donors have this tensor
    return mixed
