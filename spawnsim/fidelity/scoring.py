"""How well a platform explains measurements: virtual ranks on it repeat the measurements, and times are compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spawnsim.errors import WorldError
from spawnsim.fidelity.fitting import LEAST_S_PER_B
from spawnsim.fidelity.measuring import Measured, points
from spawnsim.fidelity.microbenchmarks import Effort, Point, held_out
from spawnsim.models.network import Link, Network, Piecewise
from spawnsim.models.platform import Platform
from spawnsim.scenario import Scenario
from spawnsim.units import text_table
from spawnsim.virtual import simulate

ALL = "all operations"
MEDIUM = (10_000, 200_000)  # bytes
WORST = {"p2p": 0.5, ALL: 0.75}  # median errors: larger ones make predictions useless


@dataclass(frozen=True)
class Pair:
    """One point, measured and predicted. `where` is "apart" for pairs on two nodes."""

    measured: Point
    predicted_s: float
    where: str = ""

    @property
    def error(self) -> float:
        """Return predicted over measured, less 1."""
        if self.measured.seconds == 0.0:
            return 0.0 if self.predicted_s == 0.0 else float("inf")
        return self.predicted_s / self.measured.seconds - 1.0

    @property
    def held_out(self) -> bool:
        """Return whether the point was held out of the fit."""
        return held_out(self.measured.nbytes)


@dataclass(frozen=True)
class Score:
    """Absolute relative errors of one operation: the medians over fitted and over held-out points, and the largest.

    `medium` is the median over held-out points of 10 to 200 kB, the size of the parts of many models.
    """

    operation: str
    fitted: float
    held_out: float
    largest: float
    medium: float


class NullRecorder:
    """A recorder that keeps nothing."""

    def row(self, rank: int, time_s: float, values: Any) -> None: ...

    def event(self, rank: int, time_s: float, kind: str, fields: Any) -> None: ...


def compare(measured: Measured, platform: Platform) -> tuple[Pair, ...]:
    """Return each measured point with the time that virtual ranks on the platform take."""
    largest = max(point.nbytes for point in measured.points)
    # Virtual samples differ only by the state of links and clocks: three samples show that, more would repeat it.
    effort = Effort(least=3, most=3, passes=1, largest_nbytes=largest)
    found: list[tuple[tuple[Point, ...], tuple[Point, ...]]] = []
    # Named as the measured ranks were placed, so that the same pairs are near and apart on virtual ranks.
    hosts = [f"node {rank // measured.ranks_per_node}" for rank in range(measured.ranks)]

    def program(comm: Any) -> None:
        both = points(comm, effort, hosts)
        if comm.Get_rank() == 0:
            found.append(both)

    # Without stragglers: messages are compared, and the noise of compute times does not affect a sample's quartile.
    simulate(program, Scenario(measured.ranks, platform, "constant"), recorder=NullRecorder())
    return (*_paired(measured.points, found[0][0], ""), *_paired(measured.apart, found[0][1], "apart"))


def _paired(measured: Iterable[Point], predicted: Iterable[Point], where: str) -> Iterable[Pair]:
    known = {(point.operation, point.nbytes): point.seconds for point in predicted}
    # A rank's copies to itself are part of its collectives; as a separate operation they take no virtual time.
    return [Pair(p, known[p.operation, p.nbytes], where) for p in measured if p.operation != "copy"]


def scores(pairs: Sequence[Pair]) -> tuple[Score, ...]:
    """Return the errors of each operation, and of all operations."""
    names = dict.fromkeys(pair.measured.operation for pair in pairs)
    groups = {name: [pair for pair in pairs if pair.measured.operation == name] for name in names}
    return tuple(_score(name, group) for name, group in (groups | {ALL: list(pairs)}).items())


def _score(operation: str, pairs: Sequence[Pair]) -> Score:
    errors = {flag: [abs(pair.error) for pair in pairs if pair.held_out is flag] for flag in (False, True)}
    medium = [abs(p.error) for p in pairs if p.held_out and MEDIUM[0] <= p.measured.nbytes <= MEDIUM[1]]
    medians = [
        float(np.median(found)) if found else float("nan") for found in (errors[False], errors[True], medium)
    ]
    return Score(operation, medians[0], medians[1], max(errors[False] + errors[True]), medians[2])


def score_table(found: Sequence[Score]) -> str:
    """Return the errors as lines of text."""
    rows = []
    for score in found:
        values = (score.fitted, score.held_out, score.medium, score.largest)
        rows.append((score.operation, *("-" if value != value else f"{value:.1%}" for value in values)))
    return text_table(("operation", "fitted", "held out", "10-200 kB", "largest"), rows)


def require_fit(platform: Platform, found: Sequence[Score]) -> None:
    """Raise `WorldError` if the measurements fit no network: a platform made from them would silently give wrong times.

    This is so if messages have no latency or no bandwidth, or if the median error of held-out points, of messages or
    of all operations, exceeds its limit in `WORST`.
    """
    wrong = [reason for link in _links(platform.network) for reason in _impossible(link)]
    # By held-out points, since a fit with enough pieces passes through all points that it was fitted to.
    medians = {score.operation: score.held_out for score in found if score.operation in WORST}
    wrong += [
        f"of {name} half is off by more than {off:.0%}" for name, off in medians.items() if off > WORST[name]
    ]
    if wrong:
        raise WorldError(
            f"these measurements fit no network ({'; '.join(wrong)}), and no file was written: measure again while the "
            "machine is idle, with no more ranks than cores, and without --quick"
        )


def _links(network: Network) -> list[Link]:
    return [getattr(network, name) for name in ("link", "intra", "inter") if hasattr(network, name)]


def _impossible(link: Link) -> list[str]:
    steps = link.steps if isinstance(link, Piecewise) else ((0, link),)
    (_, first), (_, last) = steps[0], steps[-1]
    found = ["the shortest messages have no latency"] if getattr(first, "L", 1.0) <= 0.0 else []
    if getattr(last, "G", 1.0) <= LEAST_S_PER_B:
        found.append("the longest messages have no bandwidth")
    return found
