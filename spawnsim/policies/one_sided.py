"""`OneSidedSelectiveAveragingPolicy`: ranks lay their models out in windows; a rank that dies takes from others'.

This room puts a cadence, a selection, rules for donors, a renewal and windows together (`shelf.py` for models,
`board.py` for metrics). Each rank decides about itself; no rank ever has to call at the same time as another, once
the windows have been made.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

import torch

from spawnsim.policies.account import Replacement
from spawnsim.policies.cadence import Cadence, Every
from spawnsim.policies.codecs import Codec
from spawnsim.policies.compression import Compression
from spawnsim.policies.deciding import Rules, gifts_for
from spawnsim.policies.donors import Count, DonorRule, Uniform
from spawnsim.policies.mixing import Mixing
from spawnsim.policies.policy import Info, Result, SpawnPolicy, as_metric, blank_info
from spawnsim.policies.renewal import Explore, Gift, ModelBuilder, Renewal, shared
from spawnsim.policies.selection import (
    Age,
    Mode,
    NanPolicy,
    Report,
    Selection,
    admitted,
    behind,
    check_age_range,
    spare_the_best,
)
from spawnsim.policies.selective import MOST_DONORS, check_cooldown, selection_for
from spawnsim.policies.snapshot import model_device
from spawnsim.policies.state import Travels, collect
from spawnsim.policies.windows import Opened, Windows, span

logger = logging.getLogger(__name__)


class OneSidedSelectiveAveragingPolicy(SpawnPolicy):
    """Selective averaging over windows: each rank decides about itself and takes its donors' snapshots.

    Args:
        model_builder: makes the fresh (model, optimizer) of a replaced rank; None overwrites its own in place.
        model: with `group`, lets the constructor make the windows; else the first call does. Both are collective.
        average_every: iterations between reports to the board, snapshots, and checks in mode "worst_ratio".
        threshold_metric: in mode "threshold", a rank that is worse is replaced; infinite means never.
        replacement_ratio: in mode "worst_ratio", the share that is replaced, of those on the board.
        averaging_strategy, momentum: as in `AsyncSelectiveAveragingPolicy`.
        age_range: in mode "age", lives last drawn + 1 calls, the draw uniform over the range, both ends included.
        replacement_mode: "age" (checked at every call), "threshold" (likewise) or "worst_ratio".
        group: spawnsim's, mpi4py's or torch's communicator.
        cooldown: iterations for which a replaced rank is not replaced again by metric (None: `average_every`).
        donors: a donor rule, or a number or share of the candidates, drawn uniformly. By default half the group,
            8 at most. Candidates have laid out a snapshot, have a finite metric and are not being replaced.
        selection: your own rule over the board's reports, checked at the cadence.
        windows: layout, how often to publish, deadlines.
        The rest is as in `AsyncSelectiveAveragingPolicy`.
    """

    # fmt: off
    def __init__(
        self, model_builder: ModelBuilder | None, model: torch.nn.Module | None, average_every: int,
        threshold_metric: float = 0.0, replacement_ratio: float = 0.2, averaging_strategy: str = "mean",
        momentum: float = 0.0, age_range: tuple[int, int] = (50, 150), replacement_mode: str = "age",
        group: Any = None, *, cooldown: int | None = None, donors: DonorRule | Count = None,
        selection: Selection | None = None, mixing: Mixing | None = None, cadence: Cadence | None = None,
        travels: Travels | None = None, explore: Explore | None = None, mode: Mode = "max",
        nan_policy: NanPolicy = "worst", windows: Windows | None = None,
        compression: str | Codec | None = None, timing: dict[str, list[float]] | None = None,
    ) -> None:
        # fmt: on
        super().__init__(average_every, cadence=cadence)
        threshold = threshold_metric if replacement_mode == "threshold" else None
        named = selection_for(replacement_mode, ratio=replacement_ratio, threshold=threshold, mode=mode)
        self.rules = Rules(
            selection if selection is not None else named, donors if callable(donors) else Uniform(donors),
            averaging_strategy, mixing, mode, nan_policy,
        )  # fmt: skip
        self._by_board = selection is not None or replacement_mode == "worst_ratio"
        travels = travels if travels is not None else Travels(optimizer_state="reset")
        self.renewal = Renewal(model_builder, averaging_strategy, momentum, "replace", travels, explore)
        Compression(compression)  # refuses what it does not know
        self.compression = compression
        self.windows = windows if windows is not None else Windows()
        self.publishing = Every(self.windows.publish_every or self.average_every)
        self.cooldown = check_cooldown(self.average_every if cooldown is None else cooldown)
        self.threshold_metric, self.replacement_ratio = float(threshold_metric), float(replacement_ratio)
        self.averaging_strategy, self.momentum, self.mode = averaging_strategy, float(momentum), mode
        self.replacement_mode, self.age_range = replacement_mode, check_age_range(age_range)
        self.timing = timing if timing is not None else {}
        self.total_iterations = 0
        self.unmatched: tuple[str, ...] = ()
        self._donors = donors
        self._group = group
        self._opened: Opened | None = None
        self._life: Age | None = None
        self._resume: dict[str, Any] = {}
        self._last_replaced = -math.inf
        self._idle = blank_info(replacement_mode, self.average_every if self._by_board else 1)
        if group is not None and model is not None:
            self.setup(group, model)

    def setup(self, group: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Opened:
        """Make the windows; collective over the group. The constructor or the first call does it if you do not."""
        comm = self.comm_of(group)
        if self._donors is None:
            half = min(max(1, comm.Get_size() // 2), MOST_DONORS)
            self.rules = replace(self.rules, donors=Uniform(half))
        self._life = Age(self.age_range, comm.rng("age"))
        self._life.age, self._life.max_age = self._resume.get("age", (0, self._life.max_age))
        opened = self.windows.open(comm, collect(model, optimizer, self.renewal.travels), self.compression)
        self._group, self._opened = group, opened
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
        """Take over from others if this rank's time has come; lay the own model out if that is due."""
        opened = self._opened
        if opened is None or (group is not None and group is not self._group):
            opened = self.setup(group if group is not None else self._group, model, optimizer)
        info = self._idle.copy()
        metric = 0.0 if local_metric is None else as_metric(local_metric)
        if local_metric is not None:
            info["local_metric"] = metric
        first = not self.total_iterations
        self.total_iterations += 1
        due = first or self.cadence.due(iteration)
        if due:
            opened.board.write(metric, iteration)
        if self._is_dying(opened, iteration, metric, due=due):
            model, optimizer = self._replace(opened, iteration, (model, optimizer), info)
        if expose_params and (first or info["is_replaced"] or self.publishing.due(iteration)):
            info["bytes"] += opened.shelf.publish(collect(model, optimizer, self.renewal.travels), iteration)
        return model, optimizer, info

    # ------------------------------------------------------------------------------------------------ deciding
    def _is_dying(self, opened: Opened, iteration: int, metric: float, *, due: bool) -> bool:
        if self.replacement_mode == "age" and not self._by_board:
            return self._life is not None and self._life.tick()
        if iteration - self._last_replaced < self.cooldown:
            return False
        if not self._by_board:
            return self.is_agent_dying(metric, self.threshold_metric)
        return due and opened.comm.Get_rank() in self._doomed(opened.reports(metric)[0])

    def is_agent_dying(self, local_metric: float, threshold_metric: float, check_policy: int = 0) -> bool:
        """Return whether this rank is to be replaced: `check_policy` 0 by metric (worse than threshold), 1 by age."""
        if check_policy:
            return self.age >= self.max_age
        return behind(float(local_metric), float(threshold_metric), self.mode)

    def _doomed(self, reports: list[Report]) -> frozenset[int]:
        """Return whom the selection would replace; ages are known to their own rank alone."""
        taking = admitted(reports, self.rules.nan_policy)
        return spare_the_best(self.rules.selection(taking), taking, self.mode)

    # --------------------------------------------------------------------------------------------- replacing
    def _replace(
        self, opened: Opened, iteration: int, whose: tuple[torch.nn.Module, torch.optim.Optimizer], info: Info
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        comm, metric = opened.comm, info["local_metric"]
        began_s = comm.clock.now()
        opened.board.write(metric, iteration, busy=True)
        reports, busy = opened.reports(metric)
        gifts, nbytes = self._take(opened, (reports, busy), model_device(whose[0]))
        if gifts or self.averaging_strategy == "reset_weights":
            new = self.renewal(*whose, gifts, reference={}, rng=comm.rng("explore"))
            whose, self.unmatched = (new.model, new.optimizer), new.unmatched
            wait_s = comm.clock.now() - began_s
            low, high = span(reports)
            account = Replacement(
                iteration, iteration, iteration, metric, gifts, low, high, nbytes, wait_s, new.unmatched
            )
            self._count(iteration, wait_s)
            account.tell(info, self.num_replacements)
            account.record(comm, self.renewal, served="after")
        opened.board.write(metric, iteration)
        return whose

    def _count(self, iteration: int, wait_s: float) -> None:
        self.num_replacements += 1
        self._idle["num_replacements_so_far"] = self.num_replacements
        self._last_replaced = iteration
        self.reset_age()
        self.note("replace", wait_s)

    def _take(
        self, opened: Opened, board: tuple[list[Report], set[int]], device: torch.device
    ) -> tuple[list[Gift], int]:
        """Return the gifts of this rank's donors and their bytes; donors are finite, and not being replaced."""
        me, (reports, busy) = opened.comm.Get_rank(), board
        out = busy.union(self._doomed(reports), [me])
        givers = [report for report in reports if report.rank not in out and math.isfinite(report.metric)]
        if not givers or self.averaging_strategy == "reset_weights":
            return [], 0
        donors, weights = gifts_for(me, givers, self.rules, opened.comm.rng("donors"))
        taken = opened.shelf.take(donors, device)
        share = dict(zip(donors, weights, strict=True))
        gifts = [Gift(donor, got.iteration, share[donor], got.tensors) for donor, got in taken.items()]
        return shared(gifts), sum(got.nbytes for got in taken.values())

    # ------------------------------------------------------------------------------------------------ looking
    @property
    def age(self) -> int:
        """Calls since this rank's life began."""
        return self._life.age if self._life else 0

    @property
    def max_age(self) -> int:
        """The age at which this life ends; -1 before the windows are made."""
        return self._life.max_age if self._life else -1

    @property
    def agents_killed(self) -> int:
        """Replacements of this rank."""
        return self.num_replacements

    def reset_age(self) -> None:
        """Begin a new life."""
        if self._life is not None:
            self._life.reset()

    @property
    def stats(self) -> dict[str, float]:
        """Calls, replacements, and what reading met with: torn, missing, nothing."""
        counts = self._opened.shelf.counts if self._opened else {}
        return {"total_iterations": self.total_iterations, "num_replacements": self.num_replacements, **counts}

    # ------------------------------------------------------------------------------------------------- ending
    def shutdown(self) -> None:
        """Offer nothing any more and free the windows, if all others come within `windows.shutdown_timeout_s`."""
        opened, self._opened = self._opened, None
        if opened is not None and not opened.close(self.windows.shutdown_timeout_s):
            logger.warning("rank %d: not all ranks came to free the windows: they stay", opened.comm.Get_rank())

    def state_dict(self) -> dict[str, Any]:
        """Return counters and the age."""
        age = (self.age, self.max_age) if self._life else self._resume.get("age")
        last = self._last_replaced if math.isfinite(self._last_replaced) else None
        return {**super().state_dict(), "total_iterations": self.total_iterations, "age": age, "last_replaced": last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a checkpoint."""
        super().load_state_dict(state)
        self._idle["num_replacements_so_far"] = self.num_replacements
        self._last_replaced = -math.inf if state["last_replaced"] is None else state["last_replaced"]
        self._resume = {"age": tuple(state["age"])} if state["age"] else {}
        if self._life is not None and self._resume:
            self._life.age, self._life.max_age = self._resume["age"]
