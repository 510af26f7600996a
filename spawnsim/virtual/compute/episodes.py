"""Slow episodes: a rank is fast and slow by turns, as its clock goes.

This room knows one rank's timeline of episodes, and how much work fits into each. It must not know why time passes.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import count
from typing import ClassVar

import numpy as np

from spawnsim.virtual.compute.straggler import Straggler, StreamKey, Stretch, number


@dataclass(frozen=True)
class Markov(Straggler):
    """On/off slow episodes of exponential lengths: `fast_s` and `slow_s` seconds in the mean.

    Within an episode work takes `slowdown` times longer; a block that outlasts an episode goes on at the next
    speed. A rank starts in the stationary state. (FALCON, arXiv:2410.12588, saw such fail-slow episodes last from
    tens of seconds to hours.)
    """

    fast_s: float
    slow_s: float
    slowdown: float

    follows_clock: ClassVar[bool] = True

    def __post_init__(self) -> None:
        number("fast_s", self.fast_s, above=0.0)
        number("slow_s", self.slow_s, above=0.0)
        number("slowdown", self.slowdown, above=0.0)

    @property
    def mean(self) -> float:
        """Mean factor in the long run: time over work done, (fast + slow) / (fast + slow / slowdown)."""
        return (self.fast_s + self.slow_s) / (self.fast_s + self.slow_s / self.slowdown)

    def open(self, key: StreamKey) -> Stretch:
        """Return the stretch of one rank."""
        return Timeline(self, key.generator()).stretch

    def __str__(self) -> str:
        return f"markov:{self.fast_s:g}s,{self.slow_s:g}s,{self.slowdown:g}"


class Timeline:
    """The episodes of one rank, drawn in order as far as somebody has looked."""

    def __init__(self, model: Markov, stream: np.random.Generator) -> None:
        self.model, self.stream = model, stream
        share_slow = model.slow_s / (model.fast_s + model.slow_s)
        self.starts_slow = bool(stream.random() < share_slow)
        self.ends_s: list[float] = []

    def slow(self, episode: int) -> bool:
        """Say whether the episode of this number, counted from 0, is a slow one."""
        return self.starts_slow ^ bool(episode % 2)

    def end_s(self, episode: int) -> float:
        """Return when the episode ends."""
        while len(self.ends_s) <= episode:
            mean_s = self.model.slow_s if self.slow(len(self.ends_s)) else self.model.fast_s
            start_s = self.ends_s[-1] if self.ends_s else 0.0
            self.ends_s.append(start_s + mean_s * float(self.stream.standard_exponential()))
        return self.ends_s[episode]

    def at(self, now_s: float) -> int:
        """Return the number of the episode that holds `now_s`."""
        while not self.ends_s or self.ends_s[-1] <= now_s:
            self.end_s(len(self.ends_s))
        return bisect_right(self.ends_s, now_s)

    def stretch(self, duration_s: float, now_s: float) -> float:
        """Return how long work of `duration_s` takes that starts at `now_s`."""
        at_s, work_s = now_s, duration_s
        for episode in count(self.at(now_s)):
            factor = self.model.slowdown if self.slow(episode) else 1.0
            end_s = self.end_s(episode)
            if at_s + work_s * factor <= end_s:
                # The common case, a block inside one episode, must not gain rounding errors from now_s.
                return duration_s * factor if at_s == now_s else at_s + work_s * factor - now_s
            work_s -= (end_s - at_s) / factor
            at_s = end_s
        raise AssertionError("unreachable")
