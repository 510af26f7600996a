"""Outer steps during training: `StreamingDiLoCoPolicy`, in fragments, and `OneRoundLatePolicy`, one round late.

A fragment's difference is sent at its turn, and its mean is used some iterations later, or at its next turn.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any, Self

import torch

from spawnsim.errors import ParameterError, WorldError
from spawnsim.policies.base import Info
from spawnsim.policies.exchange.outer_group import Mean
from spawnsim.policies.options import OuterOptions
from spawnsim.policies.outer_optimizer import GlobalWeightsPolicy
from spawnsim.policies.state.difference_codecs import LowBit
from spawnsim.policies.state.layout import Tensors, assign
from spawnsim.policies.state.outer import FlatFloats, Fragment


class StreamingDiLoCoPolicy(GlobalWeightsPolicy):
    """Streaming DiLoCo: fragments of the model take turns, and their mean is applied `overlap` iterations later.

    Every `average_every`/`fragments` iterations the next fragment's Θ − θ is sent, with 4 bits per element. `overlap`
    iterations later the outer optimizer updates that fragment's Θ by the mean, and θ ← blend·θ + (1 − blend)·Θ. With
    one fragment, no overlap, no blend and no compression it is DiLoCo.

    Args:
        average_every: H, iterations in which each fragment has one turn; a multiple of `fragments`.
        overlap: τ, iterations from sending to applying, less than `average_every`; 0 waits immediately.
        blend: α, the share of a rank's own weights that it keeps, from 0 to 1.
        how: `timing` and `options.OuterOptions`; P is `fragments`.
    """

    paper = "arXiv 2501.18512"

    usual = OuterOptions(fragments=4, compression=LowBit(4))

    def __init__(self, average_every: int = 100, *, overlap: int = 1, blend: float = 0.5, **how: Any) -> None:
        super().__init__(average_every, **how)
        if not (overlap == int(overlap) and 0 <= overlap < average_every):
            raise ParameterError(
                f"overlap={overlap!r}: give whole iterations, from 0 to less than average_every={average_every}"
            )
        if not 0 <= blend <= 1:
            raise ParameterError(f"blend={blend!r}: give a number from 0 to 1")
        self.overlap, self.blend = int(overlap), float(blend)
        # Place, iteration of the send, mean; None: it has arrived, in the fragment's `delta`.
        self._under_way: deque[tuple[int, int, Mean | None]] = deque()

    def _drop_means(self, *, come: bool) -> None:
        self._under_way = deque(each for each in self._under_way if each[2] is None and not come)

    def wanted(self, iteration: int) -> bool:
        return self._arrives(iteration) or self.due(iteration)

    def _arrives(self, iteration: int) -> bool:
        return bool(self._under_way) and iteration >= self._under_way[0][1] + self.overlap

    def turn(
        self, iteration: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, info: Info
    ) -> int:
        live, healed = self.outer.live(model), 0
        while self._arrives(iteration):
            self._apply(live, info)
        if self.due(iteration):
            place = self.place_at(iteration)
            fragment = self.outer.fragments[place]
            healed = fragment.read_difference(live)
            mean = self.outer.mean(place, fragment.delta, later=self.overlap > 0)
            info["bytes"] += mean.nbytes
            self._under_way.append((place, iteration, mean))
        if not self.overlap:
            self._apply(live, info)
        return healed

    def _apply(self, live: Tensors, info: Info) -> None:
        place, sent_at, mean = self._under_way[0]
        if mean is not None:
            mean.wait()
        self._under_way.popleft()
        fragment = self.outer.fragments[place]
        fragment.step(self.rule)
        assign(live, self._blended(fragment, live))
        self.stepped(sent_at, info, 0)
        info["staleness"] = self.overlap

    def _blended(self, fragment: Fragment, live: Tensors) -> Tensors:
        if not self.blend:
            return fragment.weights.tensors()
        fragment.read_difference(live)  # an element that is not finite here takes the global value
        for delta, weight in zip(fragment.delta.rows, fragment.weights.rows, strict=True):
            delta.mul_(-self.blend).add_(weight)
        return fragment.delta.tensors()

    def shutdown(self) -> None:
        """Wait for the means under way; only a checkpoint keeps them."""
        super().shutdown()
        under_way, self._under_way = self._under_way, deque()
        for place, sent_at, mean in under_way:
            with suppress(WorldError):
                if mean is not None:
                    mean.wait()
                if self._draining:
                    self._under_way.append((place, sent_at, None))

    def state_dict(self) -> dict[str, Any]:
        fragments = self.outer.fragments
        come = [
            [place, sent_at, fragments[place].delta.copies()]
            for place, sent_at, mean in self._under_way
            if mean is None
        ]
        return {**super().state_dict(), "means": come}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._under_way.clear()
        for place, sent_at, mean in state.get("means", ()):
            self.outer.fragments[place].delta.read(mean)
            self._under_way.append((int(place), int(sent_at), None))


class OneRoundLatePolicy(GlobalWeightsPolicy):
    """Eager updates and CO2: the outer step uses the previous round, whose mean has a whole round to arrive.

    At turn t of a fragment its Δ_m^t is sent, and the rank waits for the mean of the Δ^(t−1) (0 in the first turn). The
    outer gradient is that mean. With `own_fresh`, this rank's own part of the mean is replaced by its new one:
    mean(Δ^(t−1)) + (Δ_m^t − Δ_m^(t−1))/ranks. Then θ ← Θ. With `own_fresh` each rank has its own global weights.

    Args:
        average_every: H, iterations from one turn of a fragment to its next.
        own_fresh: use this rank's own newest difference.
        penalty: divisor of the outer gradient, above 0 (CO2's staleness gap penalty, held constant).
        how: `timing` and `options.OuterOptions`; `clip` is CO2's outer momentum clipping.
    """

    paper = "arXiv 2502.12996, 2401.16265"

    def __init__(
        self, average_every: int, *, own_fresh: bool = True, penalty: float = 1.0, **how: Any
    ) -> None:
        super().__init__(average_every, **how)
        if not penalty > 0:
            raise ParameterError(f"penalty={penalty!r}: give a number above 0")
        self.own_fresh, self.penalty = own_fresh, float(penalty)
        # By place: the mean under way, or None if it has arrived; the vectors that it replaces; this rank's part as
        # sent.
        self._late: dict[int, tuple[Mean | None, FlatFloats, FlatFloats]] = {}

    @classmethod
    def eager(cls, average_every: int = 30, **how: Any) -> Self:
        """Return eager updates (Kale et al. 2025), with Streaming DiLoCo's outer optimizer."""
        return cls(average_every, **{"lr": 0.7, "momentum": 0.9, "own_fresh": True} | how)

    @classmethod
    def co2(cls, average_every: int = 48, **how: Any) -> Self:
        """Return CO2 (Sun et al. 2024)."""
        return cls(average_every, **{"lr": 1.0, "momentum": 0.5, "nesterov": False, "own_fresh": False} | how)

    def _drop_means(self, *, come: bool) -> None:
        self._late = {place: late for place, late in self._late.items() if late[0] is None and not come}

    def turn(
        self, iteration: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, info: Info
    ) -> int:
        group, place = self.outer, self.place_at(iteration)
        live, fragment = group.live(model), group.fragments[place]
        late = self._late.get(place)
        if late is not None and late[0] is not None:  # before any change: the group may have ended
            late[0].wait()
        healed = fragment.read_difference(live)
        mine, sent = fragment.weights.zeros(), fragment.weights.zeros()
        mine.memory.copy_(fragment.delta.memory)
        sent.memory.copy_(fragment.delta.memory)
        mean = group.mean(place, sent, later=True)
        self._late[place] = (mean, sent, mine)
        self._outer_gradient(fragment, late)
        fragment.step(self.rule)
        assign(live, fragment.weights.tensors())
        self.stepped(iteration, info, mean.nbytes)
        info["staleness"] = 0 if late is None else self.average_every
        return healed

    def _outer_gradient(
        self, fragment: Fragment, late: tuple[Mean | None, FlatFloats, FlatFloats] | None
    ) -> None:
        """Turn `delta`, this rank's newest difference, into the outer optimizer's gradient."""
        assert self.outer.comm is not None
        size = self.outer.comm.Get_size()
        for number, delta in enumerate(fragment.delta.rows):
            if late is not None:
                delta.sub_(late[2].rows[number])
            delta.mul_(self.own_fresh / size)
            if late is not None:
                delta.add_(late[1].rows[number])
            delta.div_(self.penalty)

    def shutdown(self) -> None:
        """Wait for the means under way; only a checkpoint keeps them."""
        super().shutdown()
        under_way, self._late = self._late, {}
        for place, (mean, sent, mine) in under_way.items():
            with suppress(WorldError):
                if mean is not None:
                    mean.wait()
                if self._draining:
                    self._late[place] = (None, sent, mine)

    def state_dict(self) -> dict[str, Any]:
        come = [
            [place, sent.copies(), mine.copies()]
            for place, (mean, sent, mine) in self._late.items()
            if mean is None
        ]
        return {**super().state_dict(), "means": come}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._late = {
            int(place): (None, FlatFloats.of(mean), FlatFloats.of(mine))
            for place, mean, mine in state.get("means", ())
        }
