"""`AsyncSelectiveAveragingPolicy`: the worst ranks take over the weights of better ones, and no rank waits.

It combines a cadence, rules (selection, donors, mixing), a replacement and an exchange. `exchange/protocol.py`
implements the protocol, and `exchange/replacement.py` the replacement of a model.
"""

from __future__ import annotations

import logging
import math
from typing import Any, ClassVar

import torch

from spawnsim.comm import Comm
from spawnsim.policies.base import Info, SpawnPolicy
from spawnsim.policies.exchange.coordinator import ExchangeOptions, Outcome
from spawnsim.policies.exchange.protocol import Exchange, ShutdownDrain
from spawnsim.policies.exchange.replacement import ModelBuilder, ReplacementRecord, Rule
from spawnsim.policies.options import SelectionOptions, TravelOptions, split
from spawnsim.policies.rules.cadence import Cadence
from spawnsim.policies.rules.donors import MOST_DONORS
from spawnsim.policies.rules.selection import Age, check_age_range, check_cooldown, selection_for
from spawnsim.policies.state.layout import ModelAndOptimizer, Tensors
from spawnsim.policies.state.snapshot import Compression

logger = logging.getLogger(__name__)


COOLDOWN = 200  # default with a threshold


class AsyncSelectiveAveragingPolicy(SpawnPolicy):
    """Asynchronous selective averaging: the worst ranks take over others' models, and no call waits for another rank.

    At each cadence ranks report their metric. The coordinator, one rank of the group, selects the ranks to replace and
    their donors. At their next call, donors send a snapshot of their current model. The replaced rank takes it over at
    its first call after the snapshot has arrived.

    Ranks are compared by their `local_metric`: it must have the same meaning on all ranks, such as an accuracy on the
    same held-out data. The loss on a rank's own data measures how hard these data are, not how good the model is.

    Args:
        model_builder: creates the fresh (model, optimizer) of a replaced rank; None overwrites its own.
        average_every: iterations between reports.
        replacement_ratio: share of the ranks replaced per round in mode "worst_ratio"; 0 replaces none.
        averaging_strategy: "mean", "weighted_mean" (better donors weigh more), "best_only" (the best of all survivors,
            unless `donors` is given), or "reset_weights".
        momentum: m in θ ← m·θ_own + (1 - m)·θ_new; the same share of a diverging rank's weights is kept, too.
        poll_interval_s: seconds between polls while `shutdown` waits.
        threshold: in mode "worst_ratio", replace only if some rank is worse than this (None: always; infinite: never);
            in mode "threshold", replace exactly the ranks that are worse.
        cooldown: iterations after a round with replacements during which no further replacement is decided. The default
            is 200 with a threshold; without one every round replaces, as in the original.
        timing: a dictionary to fill with durations in seconds, by step.
        replacement_mode: "worst_ratio", "threshold" or "age" (a rank is replaced at the first report after it reaches
            its age, drawn from `age_range`, both ends included).
        cadence: when ranks report, in place of `average_every`.
        rule: "replace": the replaced rank takes the donors' weights unchanged, which heals it whatever its own weights
            are. It loses the steps since its request, usually one or two. "delta" adds these steps, so a diverging rank
            brings its divergence back (steps that are not finite are dropped).
        wiring: quorum, deadlines, coordinator, tag.
        how: `donors`, `selection`, `mixing`, `mode`, `nan_policy` of `options.SelectionOptions`; `travels`, `explore`,
            `compression`, `guard` of `options.TravelOptions`. By default a replaced rank has at most 8 donors. Up to 8
            are averaged in order of rank, more in order of arrival. (`spawnsim.torchgfn.spawn_policy` uses all
            survivors, as the original does.)
    """

    paper = "torchgfn"

    most_donors: ClassVar[int | None] = MOST_DONORS
    acts_in_every_call = True  # other ranks may request this rank's model at any time
    promises = ("range",)
    states: ClassVar[tuple[str, ...]] = ("average", "decision", "replacement", "left_out")

    option_types = (SelectionOptions, TravelOptions)

    # fmt: off
    def __init__(
        self, model_builder: ModelBuilder | None, average_every: int, replacement_ratio: float = 0.2,
        averaging_strategy: str = "mean", momentum: float = 0.0, poll_interval_s: float = 0.01,
        threshold: float | None = None, cooldown: int | None = None, timing: dict[str, list[float]] | None = None, *,
        replacement_mode: str = "worst_ratio", age_range: tuple[int, int] = (50, 150), cadence: Cadence | None = None,
        rule: Rule = "replace", wiring: ExchangeOptions | None = None, **how: Any,
    ) -> None:
        # fmt: on
        super().__init__(average_every, cadence=cadence, timing=timing)
        self.idle_info["replacement_mode"] = replacement_mode
        select, travel = split(how, SelectionOptions, TravelOptions)
        mode = select.mode
        named = selection_for(replacement_mode, ratio=replacement_ratio, threshold=threshold, mode=mode)
        self.rules = select.rules(named, averaging_strategy, self.most_donors)
        self.replacement = travel.replacement(model_builder, averaging_strategy, momentum, rule)
        self.compression, self.guard = travel.compression, bool(travel.guard)
        self.wiring = wiring if wiring is not None else ExchangeOptions(poll_interval_s=poll_interval_s)
        self.poll_interval_s = self.wiring.poll_interval_s
        usual = 0 if threshold is None else COOLDOWN
        self.cooldown, self.replacement_mode = check_cooldown(usual if cooldown is None else cooldown), replacement_mode
        self.replacement_ratio, self.threshold = float(replacement_ratio), threshold
        self.averaging_strategy, self.momentum, self.mode = averaging_strategy, float(momentum), mode
        self.age_range = check_age_range(age_range)
        self.unmatched: tuple[str, ...] = ()
        self._judged = self._finite = False  # whether a metric was ever given, and ever finite
        self._exchange: Exchange | None = None
        self._age: Age | None = None
        self._resume: dict[str, Any] = {}
        self._reference: tuple[int, Tensors] = (-1, {})
        self._latest: tuple[int, torch.nn.Module, torch.optim.Optimizer] | None = None

    def act(
        self,
        iteration: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        metric: float | None,
        comm: Comm,
        info: Info,
    ) -> ModelAndOptimizer:
        # Report first, so that a coordinator decides with its own metric in the same call; then serve requests. Donors
        # send their weights before their own replacement: the weights that were judged.
        exchange = self._exchange
        if exchange is None or comm is not exchange.comm:
            exchange = self._join(comm)
        self._latest = (iteration, model, optimizer)
        expired = self._age.tick() if self._age is not None else False
        if metric is not None:
            self._judged, self._finite = True, self._finite or math.isfinite(metric)
            cut = self._resume.pop("cut", None)  # the round that a checkpoint interrupted
            if self.cadence.due(iteration):
                exchange.report(iteration, iteration, metric, expired=expired)
            elif cut is not None:
                exchange.report(cut, iteration, metric, expired=expired)
        outcome = exchange.serve(iteration, model, optimizer)
        if exchange.assigned is not None:  # the donors were asked just now: reference for later steps
            self._reference = (iteration, self.replacement.reference(model))
        if outcome is not None and (outcome.given or outcome.fresh_start):
            return self._take_over(exchange, outcome, info)
        return model, optimizer

    def _join(self, comm: Comm) -> Exchange:
        """Begin on a communicator; a different one (after a recovery) starts from scratch."""
        travels, resume = self.replacement.travels, self._resume
        exchange = Exchange(
            comm, self.rules, self.wiring, travels=travels, cooldown=self.cooldown,
            guard=self.guard, compression=Compression(self.compression),
        )  # fmt: skip
        exchange.inbox.settled = resume.get("settled", -1)
        exchange.call_s = resume.get("call_s", math.inf)
        if exchange.coordinator is not None:
            exchange.coordinator.last_trigger = resume.get("last_trigger", -self.cooldown)
        if self.replacement_mode == "age" and self._age is None:
            self._age = Age(self.age_range, comm.rng("age"))
            self._age.age, self._age.max_age = resume.get("age", (0, self._age.max_age))
        self._exchange = exchange
        return exchange

    def _take_over(self, exchange: Exchange, outcome: Outcome, info: Info) -> ModelAndOptimizer:
        assert self._latest is not None
        iteration, model, optimizer = self._latest
        contributions, recorded = exchange.gathering.finish(exchange.comm, (model, optimizer))
        if not (contributions or outcome.fresh_start):
            return model, optimizer
        asked, reference = self._reference
        self._reference = (-1, {})
        new = self.replacement(model, optimizer, contributions, reference=reference, rng=exchange.comm.rng("explore"))
        self.unmatched = new.unmatched
        self.count_replacement()
        if self._age is not None:
            self._age.reset()
        self.note("wait", outcome.wait_s)
        assignment = outcome.assignment
        record = ReplacementRecord(
            iteration, assignment.round, asked, info["local_metric"], recorded, assignment.low, assignment.high,
            outcome.nbytes, outcome.wait_s, new.unmatched, self.mode,
        )  # fmt: skip
        record.publish(exchange.comm, info, self.num_replacements, self.replacement, served="before")
        self._latest = (iteration, new.model, new.optimizer)
        return new.model, new.optimizer

    def shutdown(self) -> None:
        """Serve outstanding requests, and wait for all ranks of the group that still train. May be called twice."""
        self._closed()
        exchange, self._exchange = self._exchange, None
        if exchange is None or self._latest is None:
            return
        self._resume = self._progress(exchange)
        self._warn_if_idle(exchange, self._latest[0])
        books, leave = exchange.coordinator, ShutdownDrain(exchange, *self._latest)
        left = leave(together=self._draining)
        if leave.unfinished.open or leave.unfinished.cut:
            # Repeated in the next call: with a checkpoint at each decision, no rank would ever be replaced otherwise.
            self._resume["cut"] = exchange.reported
            if leave.unfinished.cut and books is not None:
                self._resume["last_trigger"] = books.trigger_before  # no cooldown for a cut replacement
        if left:
            logger.warning(
                "rank %d: shut down with %d messages under way: %s",
                exchange.comm.rank, exchange.endpoint.unfinished, left,
            )  # fmt: skip
        self._latest = None

    def _warn_if_idle(self, exchange: Exchange, last: int) -> None:
        """Warn of whatever kept this policy from acting in a run whose last iteration is `last`, if anything did."""
        comm, books = exchange.comm, exchange.coordinator
        self.warn_if_never_due(last, comm)
        if not self._judged and last > 0:
            self.warn(comm, "it received no local_metric: without one, no rank is replaced")
        if self._judged and not self._finite and last > 0:
            # The same sentence on all ranks; each rank's event names the rank.
            sentence = "no finite local_metric was ever given on some ranks: they count as the worst, and do not donate"
            self.warn(comm, sentence, by=comm.Get_rank())
        if self.replacement_mode == "age":
            self.warn_if_all_lived(self.age_range, last + 1, comm)
        if books is not None and books.counts["cooldown"] and self.cooldown > last:
            sentence = f"cooldown={self.cooldown} exceeds the {last + 1} iterations: one round replaced ranks"
            self.warn(comm, f"{sentence}, {books.counts['cooldown']} later rounds did not", by=comm.Get_rank())

    @property
    def stats(self) -> dict[str, float]:
        """Replacements, and messages that the protocol dropped: late, duplicate, missing and unreadable ones."""
        stats: dict[str, float] = {"num_replacements": self.num_replacements}
        if self._exchange is not None:
            stats |= self._exchange.tally()
        return stats

    def _progress(self, exchange: Exchange | None) -> dict[str, Any]:
        if exchange is None:
            return dict(self._resume)
        state: dict[str, Any] = {"settled": exchange.inbox.settled, "call_s": exchange.call_s}
        if exchange.coordinator is not None:
            state["last_trigger"] = exchange.coordinator.last_trigger
        if self._age is not None:
            state["age"] = (self._age.age, self._age.max_age)
        return state

    def state_dict(self) -> dict[str, Any]:
        # Counters, the age, and the progress of the rounds; messages under way are not kept.
        return {**super().state_dict(), **self._progress(self._exchange)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        names = ("settled", "last_trigger", "age", "call_s", "cut")
        self._resume = {name: state[name] for name in names if name in state}
        self._exchange = self._age = None
        self._reference = (-1, {})
