"""The records of a run over columns: rows of a sample of ranks, one "round" event per turn, and its replacements.

Replacements are events "replacement" if all ranks have rows, else "sampled_replacement".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from spawnsim.columnar.supported import selective_of
from spawnsim.models.network.cost import Floats, Ints
from spawnsim.policies import SpawnPolicy
from spawnsim.policies.rules.donors import Decision
from spawnsim.policies.rules.selection import Mask
from spawnsim.record.recorder import Recorder
from spawnsim.record.table import Table


@dataclass(frozen=True)
class Round:
    """One turn of the policy; columns are over `members`.

    Attributes:
        iteration: the iteration of all ranks.
        members: world ranks that took part, ascending, int64 (members,).
        entered_s: arrival of each member, float64 (members,), seconds.
        left_s: departure of each member, float64 (members,), seconds.
        metrics: metric that each member reported, float64 (members,); None if metrics are not tracked.
        decision: the replaced ranks and their donors; None for averaging.
        died: ranks found dead at this turn, int64.
        messages: number of messages sent in this turn.
        nbytes: their size in bytes.
    """

    iteration: int
    members: Ints
    entered_s: Floats
    left_s: Floats
    metrics: Floats | None
    decision: Decision | None
    died: Ints
    messages: int
    nbytes: int


class Kept:
    """The records of a run: rows of a sample of ranks, and events."""

    def __init__(self, policy: SpawnPolicy, ranks: int, sample: int, model_nbytes: int) -> None:
        count = min(sample, ranks)
        self.ranks: Ints = np.unique(np.linspace(0, ranks - 1, count).round().astype(np.int64))
        self.recorder, self.last = Recorder(), -1
        self._sampled: Mask = np.zeros(ranks, np.bool_)
        self._sampled[self.ranks] = True
        self._alive = np.ones(len(self.ranks), np.bool_)
        self._nbytes = model_nbytes
        self._columns: list[dict[str, np.ndarray[Any, Any]]] = []
        # Figures of replacements show shares of all ranks, so a sample needs a kind of event that they do not read.
        self._kind = "replacement" if count == ranks else "sampled_replacement"
        self._how = _how(policy)

    def died(self, ranks: Ints, deaths_s: Floats) -> None:
        """Record the deaths of ranks."""
        for rank in ranks[self._sampled[ranks]].tolist():
            self._alive[np.searchsorted(self.ranks, rank)] = False
            self.recorder.event(rank, float(deaths_s[rank]), "crash", {})

    def rows(
        self, iteration: int, entered_s: Floats, since_s: Floats,
        turn: tuple[Floats, Floats, Decision | None] | None, *, more: Mapping[str, Floats],
    ) -> None:  # fmt: skip
        """Add a row for each living rank of the sample."""
        self.last, who = iteration, self.ranks[self._alive]
        clock, metrics, decision = (entered_s, None, None) if turn is None else turn
        replaced, donors = np.zeros(len(who), np.bool_), np.zeros(len(who), np.int64)
        if decision is not None and len(decision.replaced):
            place = np.minimum(np.searchsorted(decision.replaced, who), len(decision.replaced) - 1)
            replaced = decision.replaced[place] == who
            donors = np.where(replaced, decision.counts[place], 0)
        self._columns.append(
            {
                "rank": who.astype(np.int32),
                "time_s": clock[who],
                "iteration": np.full(len(who), iteration),
                "local_metric": np.full(len(who), np.nan) if metrics is None else metrics[who],
                "compute_s": entered_s[who] - since_s[who],
                "wait_s": clock[who] - entered_s[who],
                "is_replaced": replaced,
                "donors": donors,
                **{name: values[who] for name, values in more.items()},
            }
        )

    def round(self, done: Round, since_s: Floats, mean: Mapping[str, float]) -> None:
        """Add the events of a turn; `mean` are numbers of the mean of all models."""
        wait_s, compute_s = done.left_s - done.entered_s, done.entered_s - since_s
        metrics = np.empty(0) if done.metrics is None else done.metrics
        if not np.isfinite(metrics.sum()):  # a sum is faster than a check of each metric
            metrics = metrics[np.isfinite(metrics)]
        first = int(done.members[0])
        self.recorder.event(
            first,
            float(done.left_s.max()),
            "round",
            {
                "iteration": done.iteration,
                "alive": len(done.members),
                "died": len(done.died),
                "replaced": 0 if done.decision is None else len(done.decision.replaced),
                "messages": done.messages,
                "bytes": done.nbytes,
                "compute_mean_s": float(compute_s.mean()),
                "compute_max_s": float(compute_s.max()),
                "wait_mean_s": float(wait_s.mean()),
                "wait_max_s": float(wait_s.max()),
                **({} if not metrics.size else _spread(metrics)),
                **mean,
            },
        )
        if done.decision is not None:
            self._replacements(done, done.decision)

    def _replacements(self, done: Round, decision: Decision) -> None:
        ends = np.cumsum(decision.counts)
        for index in np.flatnonzero(self._sampled[decision.replaced]).tolist():
            rank, edges = (
                int(decision.replaced[index]),
                slice(int(ends[index] - decision.counts[index]), int(ends[index])),
            )
            place = int(np.searchsorted(done.members, rank))
            donors, left_s = decision.donors[edges], float(done.left_s[place])
            own = {
                "iteration": done.iteration,
                "round": decision.round,
                "replaced": rank,
                "donors": donors,
                "weights": decision.weights[edges],
                "versions": [done.iteration] * len(donors),
                "asked": done.iteration,
                "metric": None if done.metrics is None else float(done.metrics[place]),
                "low": decision.low,
                "high": decision.high,
                "bytes": len(donors) * self._nbytes,
                "wait_s": left_s - float(done.entered_s[place]),
            }
            self.recorder.event(rank, left_s, self._kind, own | dict(self._how))

    def table(self) -> Table:
        """Return the rows, by rank."""
        if not self._columns:
            return Table({"rank": np.empty(0, np.int32), "time_s": np.empty(0)})
        columns = {name: np.concatenate([each[name] for each in self._columns]) for name in self._columns[0]}
        order = np.argsort(columns["rank"], kind="stable")
        return Table(columns).where(order)


def _how(policy: SpawnPolicy) -> Mapping[str, Any]:
    """Return the fields of replacement events that describe the policy."""
    selective = selective_of(policy)
    if selective is None:
        return {}
    how = selective.replacement
    return {
        "served": "before", "strategy": how.strategy, "momentum": how.momentum, "rule": how.rule,
        "optimizer_state": how.travels.optimizer_state, "mode": selective.mode,
    }  # fmt: skip


def _spread(metrics: Floats) -> dict[str, float]:
    return {
        "metric_low": float(metrics.min()),
        "metric_mean": float(metrics.mean()),
        "metric_high": float(metrics.max()),
    }
