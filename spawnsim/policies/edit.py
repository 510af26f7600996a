"""`EDiTPolicy`: block by block, ranks that moved far weigh little; every H steps, or by the clock (A-EDiT).

Source: Cheng et al. 2024, EDiT (arXiv 2412.07210), and its reference implementation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from spawnsim.comm import Comm
from spawnsim.errors import ParameterError, WorldError
from spawnsim.policies.base import Info
from spawnsim.policies.options import OuterOptions
from spawnsim.policies.outer_optimizer import GlobalWeightsPolicy
from spawnsim.policies.rules.merging import OutlierFilter, clip_scale, norm_softmax
from spawnsim.policies.state.layout import assign
from spawnsim.policies.state.outer import Fragment

PATIENCE = 10  # intervals for which a rank that has ended waits for the other ranks' next round


class EDiTPolicy(GlobalWeightsPolicy):
    """EDiT: Θ moves by Σ w_m·Δ_m with w = softmax(−‖Δ_m‖) for each block of the model, without outliers.

    A block whose norm is an outlier among its own rank's norms has weight 0 in that round; if all are outliers, the
    block returns to Θ. The merged difference is clipped in norm; then the outer optimizer (Nesterov) applies it.

    By the clock (A-EDiT), a round is due `every_s` seconds after the last one, whatever a rank's iteration: fast ranks
    take more steps, and no rank waits longer than one step of the slowest. A rank that has finished training continues
    to attend the rounds in `shutdown`, without contributing, until all ranks have finished; each of these waits ends
    after ten intervals. As ranks reach a round in different iterations, the training loop must make no collective calls
    in between.

    Args:
        average_every: H, iterations from one round to the next.
        every_s: seconds of `comm.clock` between rounds, in place of `average_every`; None counts iterations.
        clip: largest norm of a block's merged difference, above 0.
        outliers: creates the filter of a block's norms; see `rules.merging.OutlierFilter`.
        how: `lr`, `momentum`, `compression`, `feedback`, `travels`, `timing` as in `OuterOptimizerPolicy`.
    """

    paper = "arXiv 2412.07210"
    states = ("average", "healed", "outlier")

    usual = OuterOptions(momentum=0.8, fragments=0)
    refused = ("fragments", "fragmenter")

    def __init__(
        self,
        average_every: int = 10,
        *,
        every_s: float | None = None,
        clip: float = 10.0,
        outliers: Callable[[], OutlierFilter] = OutlierFilter,
        **how: Any,
    ) -> None:
        super().__init__(average_every, **how)
        if not (clip > 0 and (every_s is None or every_s > 0)):
            raise ParameterError(f"clip={clip!r}, every_s={every_s!r}: give numbers above 0")
        self.every_s, self.clip = every_s, clip
        self.num_outliers = 0
        self._outliers, self._filters = outliers, list[OutlierFilter]()
        self._next_s, self._ended = math.inf, False

    def _join(self, comm: Comm, model: torch.nn.Module) -> bool:
        fresh = super()._join(comm, model)
        self._filters = self._filters or [self._outliers() for _ in self.outer.fragments]
        self._set_alarm(comm)
        return fresh

    def _set_alarm(self, comm: Comm) -> None:
        if self.every_s is not None:
            self._next_s = comm.clock.now() + self.every_s

    def wanted(self, iteration: int) -> bool:
        if self.every_s is None:
            return self.due(iteration)
        comm = self.outer.comm
        # Not by iterations: each rank has its own, and the k-th round of one rank is the k-th of all.
        return comm is not None and comm.clock.now() >= self._next_s

    def turn(
        self, iteration: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, info: Info
    ) -> int:
        group = self.outer
        live = group.live(model)
        broken = [fragment.read_difference(live) for fragment in group.fragments]
        nbytes = self._merge([self._judged(place, count) for place, count in enumerate(broken)])
        for fragment in group.fragments:
            assign(live, fragment.weights.tensors())
        self.stepped(iteration, info, nbytes)
        assert group.comm is not None
        self._set_alarm(group.comm)
        return sum(broken)

    def _judged(self, place: int, broken: int) -> float:
        """Return the norm of a block's difference; infinity for a block that must have weight 0."""
        if broken:
            return math.inf
        norm = self.outer.fragments[place].delta.norm()
        if self._filters[place].is_outlier(norm):
            self.num_outliers += 1
            assert self.outer.comm is not None
            self.outer.comm.record.event("outlier", block=place, norm=norm)
            return math.inf
        self._filters[place].see(norm)
        return norm

    def _merge(self, norms: list[float] | None) -> int:
        """Update the global weights; None: no contribution. Return the bytes sent, 0 if all ranks have ended."""
        group = self.outer
        assert group.comm is not None
        size, rank = group.comm.Get_size(), group.comm.Get_rank()
        mine = np.array([*(norms or [math.inf] * len(group.fragments)), norms is None], np.float64)
        rows = np.empty((size, len(mine)))
        group.comm.Allgather(mine, rows)
        if rows[:, -1].all():
            return 0
        nbytes = mine.nbytes
        for place, fragment in enumerate(group.fragments):
            weights = norm_softmax(rows[:, place].tolist())
            for row in fragment.delta.rows:
                # The mean over the group divides by its size.
                row.mul_(float(weights[rank]) * size)
            mean = group.mean(place, fragment.delta)
            mean.wait()
            nbytes += mean.nbytes
            if weights.any():
                self._step(fragment)
        return nbytes

    def _step(self, fragment: Fragment) -> None:
        scale = clip_scale(fragment.delta.norm(), self.clip)
        for row in fragment.delta.rows:
            row.mul_(scale)
        fragment.step(self.rule)

    @property
    def stats(self) -> dict[str, float]:
        """Outer steps, healed rounds, and outlier blocks of this rank."""
        return {**super().stats, "num_outliers": self.num_outliers}

    def state_dict(self) -> dict[str, Any]:
        seen = [each.state() for each in self._filters]
        return {**super().state_dict(), "num_outliers": self.num_outliers, "outliers": seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.num_outliers, self._ended = int(state["num_outliers"]), False
        self._filters = [self._outliers() for _ in state["outliers"]]
        for each, seen in zip(self._filters, state["outliers"], strict=True):
            each.load(seen)

    def shutdown(self) -> None:
        """Attend the other ranks' rounds until all have ended, if rounds are by the clock. May be called twice."""
        super().shutdown()
        comm = self.outer.comm
        if self.every_s is None or comm is None or self._ended:
            return
        self._ended = True
        with suppress(WorldError), comm.clock.deadline(PATIENCE * self.every_s):
            while self._merge(None):
                pass
