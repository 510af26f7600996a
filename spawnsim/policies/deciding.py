"""One decision: from a round's reports to who is replaced, by whom, and with which weights.

This room puts selection, donors and mixing together; a pure function of its arguments and the generator given.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from spawnsim.errors import UsageError
from spawnsim.policies.donors import DonorRule
from spawnsim.policies.messages import Assignment
from spawnsim.policies.mixing import Mixing, check_strategy, weights_for
from spawnsim.policies.selection import (
    Mode,
    NanPolicy,
    Report,
    Selection,
    admitted,
    check_mode,
    check_nan_policy,
    spare_the_best,
)


@dataclass(frozen=True, slots=True)
class Rules:
    """The composition: who (selection), from whom (donors), how much (strategy, or `mixing` in its place)."""

    selection: Selection
    donors: DonorRule
    strategy: str = "mean"
    mixing: Mixing | None = None
    mode: Mode = "max"
    nan_policy: NanPolicy = "worst"

    def __post_init__(self) -> None:
        check_strategy(self.strategy)
        check_mode(self.mode)
        check_nan_policy(self.nan_policy)

    def weights(self, metrics: Sequence[float]) -> list[float]:
        """Return the weights of donors with these metrics."""
        given = self.mixing(metrics) if self.mixing else weights_for(self.strategy, metrics, self.mode)
        weights = np.asarray(given, dtype=np.float64)
        if weights.shape != (len(metrics),) or not (weights >= 0).all() or not math.isclose(weights.sum(), 1):
            raise UsageError(
                f"mixing gave {weights.tolist()} for {len(metrics)} donors: weights are >= 0 and sum to 1"
            )
        return [float(weight) for weight in weights]


@dataclass(frozen=True, slots=True)
class Decision:
    """What a round decided: each replaced rank's assignment, and the range of the metrics that it saw."""

    round: int
    reported: int
    low: float = math.nan
    high: float = math.nan
    assignments: dict[int, Assignment] = field(default_factory=dict)


def decide(
    round_: int,
    reports: Sequence[Report],
    rules: Rules,
    rng: np.random.Generator,
    *,
    busy: Collection[int] = (),
) -> Decision:
    """Return the decision of one round.

    `busy` ranks (still being replaced from an earlier round) are neither replaced nor donors, but they count: nobody
    else goes in their place. Donors have finite metrics and are not replaced in this round; where there is none,
    nobody is replaced.
    """
    taking = admitted(reports, rules.nan_policy)
    finite = [report.metric for report in reports if math.isfinite(report.metric)]
    low, high = (min(finite), max(finite)) if finite else (math.nan, math.nan)
    decision = Decision(round_, len(reports), low, high)
    known = {report.rank for report in taking}
    selected = spare_the_best(known.intersection(rules.selection(taking)), taking, rules.mode)
    givers = [r for r in taking if r.rank not in selected and r.rank not in busy and math.isfinite(r.metric)]
    if givers or rules.strategy == "reset_weights":
        for rank in sorted(selected.difference(busy)):
            donors, weights = gifts_for(rank, givers, rules, rng)
            decision.assignments[rank] = Assignment(round_, donors, weights, low, high)
    return decision


def gifts_for(
    rank: int, givers: Sequence[Report], rules: Rules, rng: np.random.Generator
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the donors of one replaced rank, by rank, and their weights; donors of no weight are left out."""
    if rules.strategy == "reset_weights":
        return (), ()
    chosen = sorted(set(rules.donors(rank, givers, rng)))
    metrics = {report.rank: report.metric for report in givers}
    if not chosen or not metrics.keys() >= set(chosen):
        raise UsageError(
            f"the donor rule gave {chosen} for rank {rank}: choose among {sorted(metrics)}, at least one"
        )
    weights = rules.weights([metrics[donor] for donor in chosen])
    pairs = [(donor, weight) for donor, weight in zip(chosen, weights, strict=True) if weight > 0]
    return tuple(donor for donor, _ in pairs), tuple(weight for _, weight in pairs)
