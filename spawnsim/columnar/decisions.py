"""A round's decision over columns: the rules of `policies.rules` on arrays, not on one object a report.

Nothing is decided here that `rules.decide` would decide otherwise: the same ranks are replaced, by the same donors with
the same weights, drawn from the same stream. A test holds the two equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from spawnsim.errors import UnsupportedError, UsageError
from spawnsim.models.network.cost import Floats, Ints
from spawnsim.policies.rules.donors import Best, Rules, Uniform, how_many, weights_in_rows

Mask = np.ndarray[Any, np.dtype[np.bool_]]
Members = Ints | slice
"""Which ranks take part: an index into columns over all ranks."""
MOST_EDGES = 50_000_000  # donors of all replaced ranks of a round, at most


@dataclass(frozen=True)
class Reports:
    """What the ranks of a group told: columns by rank.

    Attributes:
        ranks: who, rising, int64 (reports,).
        metrics: how good each is, float64 (reports,).
        expired: whose age has run out, bool (reports,).
    """

    ranks: Ints
    metrics: Floats
    expired: Mask


@dataclass(frozen=True)
class Decision:
    """Who is replaced, and by whom: `Decision` of `rules.donors` as columns.

    Attributes:
        round: the iteration whose metrics decided.
        reported: how many reports there were.
        low, high: the range of the finite metrics; NaN if there is none.
        replaced: the replaced ranks, rising, int64 (replaced,).
        counts: how many donors each of them has, int64 (replaced,).
        donors: their donors, one replaced rank after the other, int64 (edges,).
        weights: of the donors, float64 (edges,); those of one replaced rank sum to 1.
    """

    round: int
    reported: int
    low: float
    high: float
    replaced: Ints
    counts: Ints
    donors: Ints
    weights: Floats

    @property
    def receivers(self) -> Ints:
        """The replaced rank of each edge, int64 (edges,)."""
        return np.repeat(self.replaced, self.counts)

    @property
    def begins(self) -> Ints:
        """The first edge of each replaced rank, int64 (replaced,)."""
        begins: Ints = np.cumsum(self.counts) - self.counts
        return begins


_NOBODY = np.empty(0, np.int64)


def check_rules(rules: Rules) -> None:
    """Raise `UnsupportedError` for rules that have no form over columns."""
    refused = [
        (not hasattr(rules.selection, "columns"), f"selection={_name(rules.selection)}"),
        (not hasattr(rules.donors, "columns"), f"donors={_name(rules.donors)}"),
        (rules.mixing is not None, f"mixing={_name(rules.mixing)}"),
        (rules.strategy == "reset_weights", "averaging_strategy='reset_weights'"),
    ]
    for is_so, what in refused:
        if is_so:
            raise UnsupportedError(
                f"columnar: {what} has no form over columns: it decides on one object a rank. "
                "Run the policy on virtual ranks, or give it a method `columns` as `rules.selection.WorstRatio` has"
            )


def _name(value: object) -> str:
    return getattr(value, "__qualname__", type(value).__qualname__)


def decide(
    round_: int, reports: Reports, rules: Rules, rng: np.random.Generator, *, bulk: bool = False
) -> Decision:
    """Return the decision of one round.

    Args:
        round_: the iteration whose metrics decide.
        reports: of all ranks that take part.
        rules: which `check_rules` lets pass.
        rng: for what is drawn.
        bulk: whether donors are drawn for all replaced ranks at once: other draws, of the same distribution.

    Returns:
        Who is replaced, and by whom.

    Raises:
        UsageError: a metric is not finite, and the rules' `nan_policy` is "raise"; too many donors in all.
    """
    finite = np.isfinite(reports.metrics)
    every = bool(finite.all())  # as nearly always: then nothing is looked for, and no column is copied
    low, high = _ends(reports.metrics if every else reports.metrics[finite])
    nobody = Decision(round_, len(reports.ranks), low, high, _NOBODY, _NOBODY, _NOBODY, np.empty(0))
    taking = reports if every else _admitted(reports, finite, rules)
    selected = rules.selection.columns(taking.metrics, taking.expired)  # type: ignore[attr-defined]
    replaced = taking.ranks[selected]
    giving = np.flatnonzero(~selected if every else ~selected & np.isfinite(taking.metrics))
    if not (len(replaced) and len(giving)):
        return nobody
    # Before they are chosen; what a rule of the program's own chooses is known afterwards.
    wanted = how_many(rules.donors.count, len(giving)) if isinstance(rules.donors, (Uniform, Best)) else 0
    _require_few(len(replaced), wanted)
    metrics = taking.metrics[giving]
    if bulk and isinstance(rules.donors, Uniform):
        places = subsets(rng, len(giving), wanted, len(replaced))
    else:
        places = rules.donors.columns(metrics, len(replaced), rng)  # type: ignore[attr-defined]
        _require_few(*places.shape)
    weights = weights_in_rows(rules.strategy, metrics[places], rules.mode)
    gives = weights > 0  # a donor of no weight would be asked for its whole model for nothing
    donors = taking.ranks[giving[places[gives]]]
    return Decision(round_, len(reports.ranks), low, high, replaced, gives.sum(1), donors, weights[gives])


def _require_few(replaced: int, wanted: int) -> None:
    if replaced * wanted > MOST_EDGES:
        raise UsageError(
            f"{replaced:,} replaced ranks with {wanted:,} donors each are {replaced * wanted:,} models in one round: "
            "give a number of donors, such as donors=8"
        )


def _ends(metrics: Floats) -> tuple[float, float]:
    return (float(metrics.min()), float(metrics.max())) if len(metrics) else (np.nan, np.nan)


def _admitted(reports: Reports, finite: Mask, rules: Rules) -> Reports:
    """Return the reports that take part, as `rules.selection.admitted` does."""
    if rules.nan_policy == "worst":
        return reports
    if rules.nan_policy == "raise":
        ranks = reports.ranks[~finite].tolist()
        raise UsageError(f"rank {ranks} reported a metric that is not finite, and nan_policy is 'raise'")
    return Reports(reports.ranks[finite], reports.metrics[finite], reports.expired[finite])


def subsets(rng: np.random.Generator, size: int, wanted: int, count: int) -> Ints:
    """Return random subsets, each as likely as any other.

    Args:
        rng: for what is drawn.
        size: numbers from 0 to size - 1 are chosen.
        wanted: how many in each subset, at most `size`.
        count: how many subsets.

    Returns:
        Rising rows, int64 (count, wanted).
    """
    # R. Floyd's way (CACM 30 (1987) 754), for all subsets at once: a number that a subset has already is replaced by
    # the largest that this step may draw, which it cannot have.
    chosen = np.empty((count, wanted), np.int64)
    for step in range(wanted):
        largest = size - wanted + step
        drawn = rng.integers(0, largest + 1, count)
        known = (chosen[:, :step] == drawn[:, None]).any(1)
        chosen[:, step] = np.where(known, largest, drawn)
    return np.sort(chosen, axis=1)
