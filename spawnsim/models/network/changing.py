"""Links whose bandwidth changes with time: recorded traces, and background traffic on the same link.

The remaining share of a link's bandwidth is a piecewise constant function of time. A message of n bytes that begins at
s completes when the share, integrated from s, has passed n bytes: exact, from change to change. Work (seconds on the
undisturbed link) is therefore looked up in the integral, in both directions.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import numpy as np

from spawnsim import random, units
from spawnsim.errors import ParameterError
from spawnsim.models.network.cost import Floats
from spawnsim.models.network.links import Link, Piece, at_least

MOST_CHANGES = 1e4  # per link and second: beyond this, simulating 100 links takes longer than real time
Key = tuple[int, int, str]  # of a stream: seed, number of the link, purpose
Step = tuple[float, float, float]  # start (s), share of the bandwidth, additional latency (s)


class Source(Protocol):
    """A reason why a link changes."""

    def steps(self, key: Key) -> Iterator[Step]:
        """Yield the state from 0 s on, then each change; the last one holds for ever."""
        ...


@dataclass(frozen=True)
class BandwidthTrace:
    """A recorded link: `rows` of (seconds, bandwidth in bytes per second, latency in seconds), the first from 0 s.

    Args:
        rows: By rising time; latencies of at least the traced link's.
        repeat_s: Period after which it starts again, in seconds; None: its last row holds for ever.

    Raises:
        ParameterError: Times that do not rise from 0, a negative bandwidth, or a link that never passes anything.
    """

    rows: tuple[tuple[float, float, float], ...]
    repeat_s: float | None = None

    def __post_init__(self) -> None:
        times = [row[0] for row in self.rows]
        if not times or times[0] != 0.0 or times != sorted(set(times)) or not times[-1] < math.inf:
            raise ParameterError(f"times of a trace begin at 0 s and rise: they are {times[:9]}")
        for at_s, bandwidth, latency_s in self.rows:
            at_least(bandwidth, 0.0, f"bandwidth at {at_s:g} s")
            at_least(latency_s, 0.0, f"latency at {at_s:g} s")
        if self.repeat_s is not None and not times[-1] < self.repeat_s < math.inf:
            raise ParameterError(f"repeat={self.repeat_s:g} s: must be after the last row, {times[-1]:g} s")
        if self.repeat_s is not None and len(times) > MOST_CHANGES * self.repeat_s:
            raise ParameterError(
                f"repeat={self.repeat_s:g} s: {len(times)} rows are more than {MOST_CHANGES:,.0f} changes a second"
            )
        # A link that is down for ever would leave messages in transit for ever.
        if not (self.rows[-1][1] if self.repeat_s is None else max(row[1] for row in self.rows)):
            raise ParameterError("the bandwidth ends at 0: give the last row a bandwidth above 0")


@dataclass(frozen=True)
class _Relative:
    """A trace as shares of a link's own bandwidth, and latencies beyond its own."""

    trace: BandwidthTrace
    bandwidth_Bps: float  # noqa: N815
    latency_s: float

    def steps(self, key: Key) -> Iterator[Step]:
        """Yield the rows, over and over if the trace repeats."""
        for turn in count():
            for at_s, bandwidth, latency_s in self.trace.rows:
                begin_s = turn * (self.trace.repeat_s or 0.0) + at_s
                yield begin_s, bandwidth / self.bandwidth_Bps, latency_s - self.latency_s
            if self.trace.repeat_s is None:
                return


def _require_few(changes: float, share: float) -> None:
    """Refuse traffic that changes a link too often to simulate; `share`: its mean share of the link."""
    if changes > MOST_CHANGES:
        raise ParameterError(
            f"that changes the link {changes:.3g} times a second, and at most {MOST_CHANGES:,.0f} are simulated: give "
            f"fewer that last longer, or their mean share, constant:{share:.9g}"
        )


@dataclass(frozen=True)
class Constant:
    """Background traffic takes a constant share of the link."""

    share: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.share < 1.0:
            raise ParameterError(f"share {self.share}: other traffic takes from 0 up to, not including, 1")

    def steps(self, key: Key) -> Iterator[Step]:
        yield 0.0, 1.0 - self.share, 0.0

    def __str__(self) -> str:
        return f"constant:{self.share:g}"


@dataclass(frozen=True)
class OnOff:
    """Background traffic takes a share of the link in bursts, after a first pause; both have exponential lengths."""

    on_s: float
    off_s: float
    share: float

    def __post_init__(self) -> None:
        at_least(self.on_s, 0.0, "mean burst (s)", above=True)
        at_least(self.off_s, 0.0, "mean pause (s)", above=True)
        Constant(self.share)
        both_s = self.on_s + self.off_s
        _require_few(2.0 / both_s, self.share * self.on_s / both_s)

    def steps(self, key: Key) -> Iterator[Step]:
        """Yield pauses and bursts."""
        stream, at_s = random.generator(*key), 0.0
        while True:
            yield at_s, 1.0, 0.0
            at_s += float(stream.exponential(self.off_s))
            yield at_s, 1.0 - self.share, 0.0
            at_s += float(stream.exponential(self.on_s))

    def __str__(self) -> str:
        return f"onoff:{self.on_s:g}s,{self.off_s:g}s,{self.share:g}"


@dataclass(frozen=True)
class PoissonFlows:
    """Background flows arrive at random and stay for exponential times; the link is shared fairly: 1/(1 + flows)."""

    rate: float
    stay_s: float

    def __post_init__(self) -> None:
        at_least(self.rate, 0.0, "flows a second", above=True)
        at_least(self.stay_s, 0.0, "mean stay (s)", above=True)
        flows = self.rate * self.stay_s  # at a time, Poisson: the mean of 1/(1 + flows) is (1 - exp(-m)) / m
        _require_few(2.0 * self.rate, min(1.0 + math.expm1(-flows) / flows, 1.0 - 1e-9))

    def steps(self, key: Key) -> Iterator[Step]:
        """Yield each arrival and departure."""
        stream, going = random.generator(*key), list[float]()
        yield 0.0, 1.0, 0.0
        comes_s = float(stream.exponential(1.0 / self.rate))
        while True:
            if going and going[0] <= comes_s:
                at_s = heapq.heappop(going)
            else:
                at_s = comes_s
                heapq.heappush(going, at_s + float(stream.exponential(self.stay_s)))
                comes_s += float(stream.exponential(1.0 / self.rate))
            yield at_s, 1.0 / (1 + len(going)), 0.0

    def __str__(self) -> str:
        return f"poisson:{self.rate:g},{self.stay_s:g}s"


_Form = tuple[str, Callable[..., Source], tuple[Callable[[str], float], ...]]
FORMS: tuple[_Form, ...] = (
    ("constant:SHARE", Constant, (units.number,)),
    ("onoff:BURST,PAUSE,SHARE", OnOff, (units.seconds, units.seconds, units.number)),
    ("poisson:FLOWS,STAY", PoissonFlows, (units.number, units.seconds)),
)
"""Pattern, class and the readers of its parameters, for background traffic."""


def parse_background(text: str) -> Source:
    """Return the traffic that a text such as "poisson:3,400ms" names: three flows a second that stay for 400 ms."""
    name, _, rest = str(text).partition(":")
    words = rest.split(",")
    for pattern, build, readers in FORMS:
        if pattern.partition(":")[0] == name.strip() and len(readers) == len(words):
            try:
                return build(*(read(word.strip()) for read, word in zip(readers, words, strict=True)))
            except ValueError as error:  # includes ParameterError
                raise ParameterError(f"background {text!r}: {error}") from error
    forms = ", ".join(pattern for pattern, _, _ in FORMS)
    raise ParameterError(f"background {text!r} is not of a known form: {forms}")


@dataclass(eq=False)
class Capacity:
    """The remaining share of a link, as a function of time, and its integral. Steps are drawn on demand."""

    coming: Iterator[Step]
    times: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    done: list[float] = field(default_factory=list)  # work until the beginning of each step
    _known: tuple[Floats, ...] = ()

    def __post_init__(self) -> None:
        self._draw(1)

    def _draw(self, more: int) -> bool:
        """Take up to `more` further steps; return whether there were any."""
        drawn = 0
        for at_s, share, latency_s in self.coming:
            if self.times and at_s <= self.times[-1]:  # two causes at one time: the state after both counts
                self.shares[-1], self.latencies[-1] = share, latency_s
                continue
            last = self.done[-1] + (at_s - self.times[-1]) * self.shares[-1] if self.times else 0.0
            self.times.append(at_s)
            self.shares.append(share)
            self.latencies.append(latency_s)
            self.done.append(last)
            drawn += 1
            if drawn == more:
                break
        if drawn:
            self._known = ()
        return drawn > 0

    def _reach(self, time_s: float) -> int:
        while self.times[-1] <= time_s and self._draw(len(self.times)):
            pass
        return max(bisect_right(self.times, time_s) - 1, 0)

    def share_at(self, time_s: float) -> float:
        return self.shares[self._reach(time_s)]

    def latency_at(self, time_s: float) -> float:
        """Return the additional latency, in seconds."""
        return self.latencies[self._reach(time_s)]

    def next_change(self, time_s: float) -> float:
        """Return when the next step begins; inf if no step follows."""
        step = self._reach(time_s)
        return self.times[step + 1] if step + 1 < len(self.times) else math.inf

    def lasts(self, begin_s: float, work_s: float) -> float:
        """Return the duration of work that begins at `begin_s` and would take `work_s` on the whole link."""
        if work_s == 0.0:
            return 0.0
        step = self._reach(begin_s)
        target = self.done[step] + (begin_s - self.times[step]) * self.shares[step] + work_s
        # A little work late in a run may vanish in the sum; while nothing passes it must still wait.
        target = max(target, math.nextafter(self.done[step], math.inf))
        while self.done[-1] < target and self._draw(len(self.times)):
            pass
        last = max(bisect_left(self.done, target) - 1, step)
        if last == step:  # without disturbance, equal to the bit to the time on the whole link
            return work_s / self.shares[step]
        return self.times[last] + (target - self.done[last]) / self.shares[last] - begin_s

    def all_last(self, begin_s: Floats, work_s: Floats | float) -> Floats:
        """Return `lasts` for many, float64 (M,), each equal to the bit; NaN if the begin is NaN."""
        begin, work = np.broadcast_arrays(np.asarray(begin_s, np.float64), work_s)
        here = np.isfinite(begin)
        if not here.any():
            return np.full(begin.shape, np.nan)
        self._reach(float(begin[here].max()))
        times, shares, done = self._arrays()
        steps = np.maximum(np.searchsorted(times, begin, side="right") - 1, 0)
        target = done[steps] + (begin - times[steps]) * shares[steps] + work
        target = np.maximum(target, np.nextafter(done[steps], np.inf))
        while self.done[-1] < target[here].max() and self._draw(len(self.times)):
            times, shares, done = self._arrays()
        last = np.searchsorted(done, target, side="left") - 1
        last = np.minimum(np.maximum(last, steps), len(times) - 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            soon = work / shares[steps]
            late = times[last] + (target - done[last]) / shares[last] - begin
        return np.where(~here, np.nan, np.where(work == 0.0, 0.0, np.where(last == steps, soon, late)))

    def all_latencies(self, time_s: Floats) -> Floats:
        """Return the additional latencies at many times, float64 (M,)."""
        here = np.isfinite(time_s)
        if here.any():
            self._reach(float(time_s[here].max()))
        times = self._arrays()[0]
        steps = np.clip(np.searchsorted(times, time_s, side="right") - 1, 0, len(times) - 1)
        return np.asarray(self.latencies)[steps]

    def _arrays(self) -> tuple[Floats, ...]:
        if not self._known:
            self._known = np.array(self.times), np.array(self.shares), np.array(self.done)
        return self._known


@dataclass(frozen=True)
class Changing:
    """A link that changes with time.

    Args:
        link: The link at its best: a trace's bandwidths are shares of its bandwidth.
        trace: Its recording; None: always its own bandwidth.
        background: Background traffic on it.
        seed: Seed of the background traffic.

    Raises:
        ParameterError: Nothing changes it, a trace has less latency than the link, or the link takes no time per byte.
    """

    link: Link
    trace: BandwidthTrace | None = None
    background: tuple[Source, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.trace is None and not self.background:
            raise ParameterError("a link that changes needs a trace or background traffic")
        least, _ = self._undisturbed()
        for at_s, _, latency_s in () if self.trace is None else self.trace.rows:
            if latency_s < least:
                raise ParameterError(
                    f"latency {latency_s:g} s at {at_s:g} s: the link's own, {least:g} s, is the least it can have"
                )

    def _undisturbed(self) -> tuple[float, float]:
        last = self.link.pieces()[-1]
        per_byte_s = float(last.per_byte.flight_s)
        if not per_byte_s > 0.0:
            raise ParameterError("a link that changes must take time per byte")
        return float(self.link.pieces()[0].fixed.flight_s), 1.0 / per_byte_s

    def pieces(self) -> tuple[Piece, ...]:
        return self.link.pieces()

    def farther(self, latency_s: float, share: float = 1.0) -> Changing:
        """Return the same link with more latency and this share of its bandwidth, which changes in the same way."""
        trace = self.trace and BandwidthTrace(
            tuple((at, rate * share, late + latency_s) for at, rate, late in self.trace.rows),
            self.trace.repeat_s,
        )
        return Changing(self.link.farther(latency_s, share), trace, self.background, self.seed)

    def open(self, number: int = 0) -> Capacity:
        """Return the remaining share of the link, by time; traffic on links of different numbers is independent."""
        sources: list[Source] = list(self.background)
        if self.trace is not None:
            latency_s, bandwidth = self._undisturbed()
            sources.append(_Relative(self.trace, bandwidth, latency_s))
        keys = ((self.seed, number, f"network.background.{place}") for place in range(len(sources)))
        return Capacity(_product([source.steps(key) for source, key in zip(sources, keys, strict=True)]))


def _product(sources: list[Iterator[Step]]) -> Iterator[Step]:
    """Yield the steps of several sources together: shares are multiplied, latencies added."""
    if len(sources) == 1:
        yield from sources[0]
        return
    shares, latencies = [1.0] * len(sources), [0.0] * len(sources)
    for at_s, place, share, latency_s in heapq.merge(
        *(_tagged(place, each) for place, each in enumerate(sources))
    ):
        shares[place], latencies[place] = share, latency_s
        yield at_s, math.prod(shares), sum(latencies)


def _tagged(place: int, steps: Iterator[Step]) -> Iterator[tuple[float, int, float, float]]:
    for at_s, share, latency_s in steps:
        yield at_s, place, share, latency_s
