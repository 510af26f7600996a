"""`OneSidedSelectiveAveragingPolicy`: each rank exposes its model in an RMA window; a replaced rank reads its donors'.

It combines a cadence, a selection, donor rules, a replacement and windows (`exchange/snapshot_window.py` for models,
`exchange/window_set.py` for metrics). Each rank decides about itself. After the windows have been created, no rank has
to call at the same time as another.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from spawnsim.comm import Comm
from spawnsim.errors import ParameterError
from spawnsim.policies.base import Info, Result, SpawnPolicy
from spawnsim.policies.exchange.replacement import Contribution, ModelBuilder, ReplacementRecord, usable
from spawnsim.policies.exchange.window_set import OpenWindows, WindowOptions
from spawnsim.policies.options import SelectionOptions, TravelOptions, split
from spawnsim.policies.rules.cadence import Cadence, Every
from spawnsim.policies.rules.donors import MOST_DONORS, default_donors, donors_of
from spawnsim.policies.rules.selection import (
    Age,
    Mode,
    ReportRounds,
    Reports,
    ReportTable,
    admitted,
    behind,
    check_age_range,
    check_cooldown,
    selection_for,
)
from spawnsim.policies.state.layout import Collector, ModelAndOptimizer
from spawnsim.policies.state.snapshot import model_device

logger = logging.getLogger(__name__)


class OneSidedSelectiveAveragingPolicy(SpawnPolicy):
    """Selective averaging over windows: each rank decides about its own replacement and reads its donors' snapshots.

    Args:
        model_builder: creates the fresh (model, optimizer) of a replaced rank; None overwrites its own in place.
        model: with `group`, lets the constructor create the windows; otherwise the first call does. Both are
            collective.
        average_every: iterations between reports to the board, between snapshots, and in mode "worst_ratio" between
            checks. Half a period after each report, a rank compares it with the other ranks' reports of the same
            iteration; it compares later if the verdict depends on ranks that are still before that iteration
            (`rules/selection.py`). A report made before a replacement is not judged after it.
        threshold_metric: in mode "threshold", a rank with a worse metric is replaced; infinite means never.
        replacement_ratio: in mode "worst_ratio", the replaced share of the ranks on the board.
        averaging_strategy, momentum: as in `AsyncSelectiveAveragingPolicy`.
        age_range: in mode "age", a rank is replaced every n + 1 calls, with n drawn anew each time, uniformly over the
            range, both ends included.
        replacement_mode: "age" or "threshold" (both checked at every call), or "worst_ratio".
        group: a communicator of spawnsim, mpi4py or torch.
        cooldown: iterations for which a replaced rank is not replaced again by metric (None: `average_every`).
        cadence: when ranks report, in place of `average_every`.
        windows: layout, publishing interval, deadlines.
        how: `donors`, `selection`, `mixing`, `mode`, `nan_policy` of `options.SelectionOptions`; `travels`, `explore`,
            `compression`, `guard` of `options.TravelOptions`. By default half the group donates, at most 8 ranks.
            Candidates have published a snapshot and have a finite metric; except in mode "age", they are also not being
            replaced themselves. A custom `selection` is checked as in mode "worst_ratio".
    """

    paper = "torchgfn"

    most_donors: ClassVar[int | None] = MOST_DONORS
    acts_in_every_call = True
    promises = ("range",)
    states = ("average", "replacement", "left_out")
    # Class attributes until they change: with 30 own attributes an instance takes 1.3 kB more (CPython).
    unmatched: tuple[str, ...] = ()
    _again = False  # a round that a checkpoint interrupted
    _resumed_age: tuple[int, int] | None = None  # from a checkpoint: age and max_age

    option_types = (SelectionOptions, TravelOptions)

    # fmt: off
    def __init__(
        self, model_builder: ModelBuilder | None, model: torch.nn.Module | None, average_every: int,
        threshold_metric: float = 0.0, replacement_ratio: float = 0.2, averaging_strategy: str = "mean",
        momentum: float = 0.0, age_range: tuple[int, int] = (50, 150), replacement_mode: str = "age",
        group: Any = None, *, cooldown: int | None = None, cadence: Cadence | None = None,
        windows: WindowOptions | None = None, timing: dict[str, list[float]] | None = None, **how: Any,
    ) -> None:
        # fmt: on
        super().__init__(average_every, cadence=cadence, timing=timing)
        select, travel = split(how, SelectionOptions, TravelOptions)
        threshold = threshold_metric if replacement_mode == "threshold" else None
        named = selection_for(replacement_mode, ratio=replacement_ratio, threshold=threshold, mode=select.mode)
        self.rules = select.rules(named, averaging_strategy, self.most_donors)
        self._by_board = select.selection is not None or replacement_mode == "worst_ratio"
        self.replacement = travel.replacement(model_builder, averaging_strategy, momentum, "replace")
        self._collect = Collector(self.replacement.travels, real=False)
        self.compression, self.guard = travel.compression, bool(travel.guard)
        self.windows = windows if windows is not None else WindowOptions()
        self.publishing = Every(self.windows.publish_every or self.average_every)
        self.cooldown = check_cooldown(self.average_every if cooldown is None else cooldown)
        self.threshold_metric, self.replacement_ratio = float(threshold_metric), float(replacement_ratio)
        self.age_range = check_age_range(age_range)
        self.total_iterations = 0
        self._donors = select.donors
        self._group = group  # default for calls without a group
        self._opened: OpenWindows | None = None
        self._age: Age | None = None
        self._last_replaced = -math.inf
        self._rounds = ReportRounds(self.average_every)
        self._expose = True
        self.idle_info["replacement_mode"] = replacement_mode
        if not self._by_board:  # a rank judged only by itself is judged in each call
            self.idle_info["replacement_check_every"] = 1
        if group is not None and model is not None:
            self.setup(group, model)

    def setup(self, group: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> OpenWindows:
        """Create the windows; collective over the group. Otherwise the constructor or the first call creates them.

        Args:
            group: a communicator of spawnsim, mpi4py or torch.
            model: the model whose tensors determine the windows' layout.
            optimizer: the model's optimizer; needed if its state is exchanged.

        Returns:
            The windows.
        """
        comm = self._bound(group)
        if self._donors is None:
            half = max(1, comm.Get_size() // 2)
            most = half if self.most_donors is None else min(half, self.most_donors)
            self.rules = replace(self.rules, donors=default_donors(self.averaging_strategy, self.mode, most))
        self._age = Age(self.age_range, comm.rng("age"))
        if self._resumed_age is not None:
            self._age.age, self._age.max_age = self._resumed_age
        opened = self.windows.open(comm, self._collect(model, optimizer), self.compression)
        self._opened = opened
        self._rounds.close()
        return opened

    def __call__(
        self,
        iteration: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        local_metric: float | None = None,
        group: Any = None,
        *,
        expose_params: bool = True,
    ) -> Result:
        """Take over other ranks' weights if this rank is to be replaced; publish its own model if that is due.

        Args:
            iteration: iteration of this rank's training loop, from 0.
            model: the model after the latest optimizer step.
            optimizer: the model's optimizer.
            local_metric: this rank's metric; None is reported as 0.
            group: the communicator; None selects the one of the constructor or of the latest call.
            expose_params: False publishes nothing in this call.

        Returns:
            The model and optimizer to continue with, and the info mapping.
        """
        self._expose = expose_params
        group = group if group is not None else self._group
        return super().__call__(iteration, model, optimizer, local_metric, group)

    def act(
        self,
        iteration: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        metric: float | None,
        comm: Comm,
        info: Info,
    ) -> ModelAndOptimizer:
        opened = self._opened
        if opened is None or comm is not opened.comm:
            opened = self.setup(self._group, model, optimizer)
        metric = 0.0 if metric is None else metric
        self.total_iterations += 1
        # The order below ensures that a verdict applies to the weights that were measured. If ranks are compared on the
        # board, the report comes last: after a replacement the metric belongs to discarded weights, so it is published
        # but never judged. If a rank decides by its own metric or age alone, no verdict depends on the report, and it
        # is sent first. A replaced rank publishes immediately: the selection has just rejected the weights of its
        # latest snapshot, and a later reader would bring them back.
        first = not opened.board.reports
        due = first or self.cadence.due(iteration)
        if first or (due and not self._by_board):
            self._report(opened, iteration, metric, judged=self._again or self.cadence.due(iteration))
            if self._again:
                self._again = False
        seen = self._verdict(opened, iteration, metric, due=due)
        if seen is not None:
            model, optimizer = self._replace(opened, iteration, (model, optimizer), info, *seen)
        if due and self._by_board and not first:
            self._report(opened, iteration, metric, judged=not info["is_replaced"])
        if self._expose and (first or info["is_replaced"] or self.publishing.due(iteration)):
            info["bytes"] += opened.snapshots.publish(self._collect(model, optimizer), iteration)
        return model, optimizer

    def _report(self, opened: OpenWindows, iteration: int, metric: float, *, judged: bool) -> None:
        opened.board.report(metric, iteration)
        self._rounds.reported(iteration, judged=judged and self._by_board)

    def _verdict(
        self, opened: OpenWindows, iteration: int, metric: float, *, due: bool
    ) -> tuple[ReportTable, int] | None:
        """Return the board's lines and the iteration to compare at, if this rank is to be replaced."""
        rested = iteration - self._last_replaced >= self.cooldown
        if self._by_board:
            if not self._rounds.due(iteration, last=due):
                return None
            lines, me = opened.board.read(), opened.comm.Get_rank()
            while verdict := self._rounds.judge(lines, lambda reports: me in self._selected(reports)):
                compared, replaced = verdict
                if replaced and rested:
                    return lines, compared
            return None
        if self.replacement_mode == "age":
            replaced = self._age is not None and self._age.tick()
        else:
            replaced = rested and self.is_agent_dying(metric, self.threshold_metric)
        return (lines := opened.board.read(), lines.shared()) if replaced else None

    def is_agent_dying(self, local_metric: float, threshold_metric: float, check_policy: int = 0) -> bool:
        """Return whether a rank would be replaced; in mode "threshold" the policy itself calls this.

        Args:
            local_metric: the rank's metric.
            threshold_metric: a metric worse than this means yes; an infinite threshold means no.
            check_policy: 0 decides by metric, 1 by this rank's age.

        Returns:
            Whether the rank is to be replaced.

        Raises:
            ParameterError: `check_policy` is neither 0 nor 1.
        """
        if check_policy not in (0, 1):
            raise ParameterError(f"check_policy={check_policy!r}: give 0 (by metric) or 1 (by age)")
        if check_policy:
            return self._age is not None and self.age >= self.max_age
        return bool(behind(float(local_metric), float(threshold_metric), self.mode))

    def _selected(self, reports: Reports) -> set[int]:
        taking = admitted(reports, self.rules.nan_policy)
        return set(taking.ranks[self.rules.selected(taking)].tolist())

    def _replace(
        self, opened: OpenWindows, iteration: int, whose: ModelAndOptimizer, info: Info, lines: ReportTable,
        compared: int,
    ) -> ModelAndOptimizer:
        comm, began_s = opened.comm, opened.comm.clock.now()
        opened.board.mark(busy=True)
        reports = lines.of_alive().near(compared) if lines.alive.sum() > 1 else lines.near(compared)
        contributions, nbytes = self._take(opened, whose, lines, reports)
        if contributions or self.averaging_strategy == "reset_weights":
            new = self.replacement(*whose, contributions, reference={}, rng=comm.rng("explore"))
            whose, self.unmatched = (new.model, new.optimizer), new.unmatched
            wait_s, (low, high) = comm.clock.now() - began_s, reports.range
            record = ReplacementRecord(
                iteration, compared if self._by_board else iteration, iteration, info["local_metric"], contributions,
                low, high, nbytes, wait_s, new.unmatched, self.mode,
            )
            self.count_replacement()
            self._last_replaced = iteration
            self.reset_age()
            self.note("replace", wait_s)
            self._rounds.close()
            record.publish(comm, info, self.num_replacements, self.replacement, served="after")
        opened.board.mark(busy=False)
        return whose

    def _take(
        self, opened: OpenWindows, whose: ModelAndOptimizer, lines: ReportTable, reports: Reports
    ) -> tuple[list[Contribution], int]:
        """Return the contributions of this rank's donors, and their bytes; donors have finite metrics."""
        me, out = opened.comm.Get_rank(), {opened.comm.Get_rank()}
        # A rank that is being replaced for its metric does not donate. A rank replaced for its age does: age says
        # nothing about a model, and if all ranks had the same age there would be no donor at all.
        if self._by_board or self.replacement_mode != "age":
            out |= self._selected(reports).union(lines.ranks[lines.busy].tolist())
        giving = reports.where(np.isfinite(reports.metrics) & ~np.isin(reports.ranks, [*out]))
        if not len(giving) or self.averaging_strategy == "reset_weights":
            return [], 0
        _, donors, weights = donors_of(np.array([me]), giving, self.rules, opened.comm.rng("donors"))
        share = dict(zip(donors.tolist(), weights.tolist(), strict=True))
        taken = opened.snapshots.take([*share], model_device(whose[0]))
        contributions = [Contribution(donor, got.iteration, share[donor], got.tensors) for donor, got in taken.items()]
        kept = usable(opened.comm, contributions, whose, self.replacement.travels, guard=self.guard)
        return kept, sum(got.nbytes for got in taken.values())

    @property
    def replacement_mode(self) -> str:
        """As given to the constructor."""
        return str(self.idle_info["replacement_mode"])

    @property
    def averaging_strategy(self) -> str:
        """As given to the constructor."""
        return self.rules.strategy

    @property
    def momentum(self) -> float:
        """As given to the constructor."""
        return self.replacement.momentum

    @property
    def mode(self) -> Mode:
        """As given to the constructor."""
        return self.rules.mode

    @property
    def age(self) -> int:
        """Calls since this rank was last replaced."""
        return self._age.age if self._age else 0

    @property
    def max_age(self) -> int:
        """The age at which this rank is replaced; -1 before the windows are created."""
        return self._age.max_age if self._age else -1

    @property
    def agents_killed(self) -> int:
        """Replacements of this rank."""
        return self.num_replacements

    def reset_age(self) -> None:
        """Reset the count of calls to 0, and draw the age of the next replacement."""
        if self._age is not None:
            self._age.reset()

    @property
    def stats(self) -> dict[str, float]:
        """Number of calls and replacements, and failed reads: torn, missing, nothing."""
        counts = self._opened.snapshots.counts if self._opened else {}
        return {"total_iterations": self.total_iterations, "num_replacements": self.num_replacements, **counts}

    def shutdown(self) -> None:
        """Free the windows once all ranks have arrived; until then, training ranks can read this rank's snapshot."""
        self._closed()
        opened, self._opened = self._opened, None
        if opened is not None and self._by_board:
            self.warn_if_never_due(self.total_iterations - 1, opened.comm)
        elif opened is not None and self.replacement_mode == "age":
            self.warn_if_all_lived(self.age_range, self.total_iterations, opened.comm)
        if opened is not None and (why := opened.close(self.windows.shutdown_timeout_s)):
            logger.warning("rank %d: the windows were not freed: %s", opened.comm.Get_rank(), why)

    def state_dict(self) -> dict[str, Any]:
        age = (self.age, self.max_age) if self._age else self._resumed_age
        last = self._last_replaced if math.isfinite(self._last_replaced) else None
        own = {"total_iterations": self.total_iterations, "age": age, "last_replaced": last}
        return {**super().state_dict(), **own, "again": self._again or (self._opened is None and self._rounds.open)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._last_replaced = -math.inf if state["last_replaced"] is None else state["last_replaced"]
        self.total_iterations = int(state["total_iterations"])
        self._resumed_age = tuple(state["age"]) if state["age"] else None
        self._rounds, self._again = ReportRounds(self.average_every), bool(state.get("again", False))
        if self._age is not None and self._resumed_age is not None:
            self._age.age, self._age.max_age = self._resumed_age
