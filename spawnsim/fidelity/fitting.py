"""From measurements to a platform: links, reductions, collective algorithms, compute steps and stragglers.

Every other size is left out of the fit, and judges it. Links: the one-way time of n bytes is L + 2o + (n - 1) G up
to the eager limit, in pieces by size where one line is not enough; beyond the limit the kernel first asks and is
answered, two flights of an empty message, and so does the fit. `o` comes from how long a send holds its processor,
`g` from a stream of messages. The robust least squares are scipy's (the extra `calibrate`).

Stragglers: persistent differences are taken out first, then rare blocks far from the others (transient stragglers),
and what is left is the noise: of the families that `spawnsim.models.compute` has, the one whose distribution
function is nearest (Kolmogorov and Smirnov's distance).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spawnsim import random
from spawnsim.errors import ParameterError, UnsupportedError
from spawnsim.fidelity.measuring import Measured
from spawnsim.fidelity.microbenchmarks import STREAM, FloatArray, Point, held_out
from spawnsim.models.collectives import Selection, Timing
from spawnsim.models.collectives.catalogue import names
from spawnsim.models.compute import (
    Bimodal,
    ComputeModel,
    Exponential,
    Fixed,
    Gamma,
    Lognormal,
    Noise,
    Pareto,
    SlowRank,
    Speed,
    Straggler,
)
from spawnsim.models.network import Fabric, Hockney, Link, LogGP, Nodes, Piecewise, Switch
from spawnsim.models.platform import Cores, Platform

MOST_PIECES = 4
LEAST_S_PER_B = 1e-13  # 10 TB/s: no link is quicker
WORTH_A_PIECE = 0.8  # a further piece must bring the error below this share of what it was
GOOD_LINE = 0.5 * (0.01 / 0.1) ** 2  # cost of a point that is 1 % off: no more pieces for less
ROBUST_SCALE = 0.1  # relative errors beyond 10 % count linearly, not squared


def least_squares(residuals: Any, start: Sequence[float]) -> FloatArray:
    """Return the non-negative parameters of least soft-L1 residuals.

    Raises:
        UnsupportedError: scipy is not installed.
    """
    try:
        from scipy import optimize
    except ModuleNotFoundError as error:
        raise UnsupportedError("calibrate needs scipy: pip install 'spawnsim[calibrate]'") from error
    # Latencies and times per byte lie six decades apart: unscaled, the solver's steps would suit one of them alone.
    scale = np.maximum(np.abs(np.asarray(start, dtype=np.float64)), 1e-15)
    found = optimize.least_squares(
        lambda x: residuals(x * scale),
        np.asarray(start) / scale,
        bounds=(0.0, np.inf),
        loss="soft_l1",
        f_scale=ROBUST_SCALE,
    )
    return np.asarray(found.x, dtype=np.float64) * scale


@dataclass(frozen=True)
class Line:
    """α + nβ on the sizes from `from_nbytes` on, with the sum of its robust errors."""

    from_nbytes: int
    alpha_s: float
    beta_s_per_B: float  # noqa: N815
    cost: float


def fit_line(nbytes: FloatArray, seconds: FloatArray) -> Line:
    """Return the line of least relative error through points by rising size."""
    slope = max((seconds[-1] - seconds[0]) / max(nbytes[-1] - nbytes[0], 1.0), 1e-13)

    def residuals(x: FloatArray) -> FloatArray:
        # Relative errors: absolute ones would fit the largest messages and let microseconds go.
        errors: FloatArray = (x[0] + nbytes * x[1]) / seconds - 1.0
        return errors

    alpha_s, beta = least_squares(residuals, (max(float(seconds[0]), 1e-9), float(slope)))
    # Times that do not grow over the sizes of a piece have no bandwidth to write down.
    beta = max(beta, LEAST_S_PER_B)
    error = residuals(np.array([alpha_s, beta])) / ROBUST_SCALE
    return Line(int(nbytes[0]), float(alpha_s), float(beta), float(np.sum(np.sqrt(1.0 + error**2) - 1.0)))


def fit_lines(nbytes: FloatArray, seconds: FloatArray) -> list[Line]:
    """Return as few lines as it takes through points by rising size. Each holds at least two points."""
    best = [fit_line(nbytes, seconds)]
    for pieces in range(2, MOST_PIECES + 1):
        if _cost_of(best) < GOOD_LINE * len(nbytes):
            break
        candidate = min(_cuts(nbytes, seconds, pieces), key=_cost_of, default=best)
        # More pieces always fit better; a gain must be worth a piece, or noise is fitted.
        if _cost_of(candidate) < WORTH_A_PIECE * _cost_of(best):
            best = candidate
    return best


def _cuts(nbytes: FloatArray, seconds: FloatArray, pieces: int) -> Iterator[list[Line]]:
    # Cuts share most of their pieces, and each fit is an optimisation of its own.
    known: dict[tuple[int, int], Line] = {}
    for inner in combinations(range(2, len(nbytes) - 1), pieces - 1):
        edges = list(pairwise((0, *inner, len(nbytes))))
        if all(end - begin >= 2 for begin, end in edges):
            for begin, end in edges:
                if (begin, end) not in known:
                    known[begin, end] = fit_line(nbytes[begin:end], seconds[begin:end])
            yield [known[edge] for edge in edges]


def _cost_of(lines: Sequence[Line]) -> float:
    return sum(line.cost for line in lines)


@dataclass(frozen=True)
class Overheads:
    """Of LogGP: how long a send holds the processor (o), and how long the card between two sends (g), in seconds."""

    send_s: float
    gap_s: float


def overheads(points: Sequence[Point]) -> Overheads:
    """Return o and g from the smallest post, and from the quickest stream and ping-pong."""
    # More bytes take no less time, and what disturbs a measurement only adds to it: so no size is quicker than the
    # smallest one would be undisturbed, and a single disturbed point does not make every message slow.
    post, stream, ping = (_quickest(points, operation) for operation in ("post", "stream", "p2p"))
    one_way_s = ping.seconds
    # A post may cost as much as the whole flight on a machine with more ranks than cores; L would then vanish.
    send_s = min(post.seconds, 0.4 * one_way_s)
    # A stream takes (k - 1) gaps, then one flight, then the answer's.
    gap_s = max(0.0, (stream.seconds * STREAM - 2.0 * one_way_s) / (STREAM - 1))
    return Overheads(send_s, max(gap_s, send_s))


def _quickest(points: Sequence[Point], operation: str) -> Point:
    found = [point for point in points if point.operation == operation]
    if not found:
        raise ParameterError(f"no times of {operation!r} among the points: measure it too")
    return min(found, key=lambda point: point.seconds)


def _curve(points: Sequence[Point], operation: str) -> tuple[FloatArray, FloatArray]:
    """Return the sizes of an operation's points, rising, and their seconds."""
    own = sorted((point for point in points if point.operation == operation), key=lambda point: point.nbytes)
    return np.array([float(point.nbytes) for point in own]), np.array([point.seconds for point in own])


def _stepwise(lines: Sequence[Line], link: Callable[[Line], Link]) -> Link:
    steps = [(line.from_nbytes if i else 0, link(line)) for i, line in enumerate(lines)]
    return steps[0][1] if len(steps) == 1 else Piecewise(tuple(steps))


def fit_link(points: Sequence[Point], *, eager_nbytes: int) -> Link:
    """Return the link that explains the point-to-point times.

    `points` hold "p2p", "stream" and "post" at sizes from 1 byte; beyond `eager_nbytes` a message asks first.
    """
    own = overheads(points)
    nbytes, seconds = _curve([point for point in points if point.nbytes], "p2p")
    # The model adds the handshake to what it is fitted to, so it is taken out first; as much as leaves both overheads.
    handshake_s = 2.0 * max(seconds[0] - own.send_s, 0.0)
    asked = nbytes > eager_nbytes
    seconds = np.where(asked, np.maximum(seconds - handshake_s, 2.0 * own.send_s), seconds)
    return _stepwise(_protocols(nbytes, seconds, asked, eager_nbytes), lambda line: _loggp(line, own))


def copy_s_per_B(points: Sequence[Point]) -> float:
    """Return what a byte takes that a rank copies to itself, by the times of "copy"; 0 where that took no time."""
    nbytes, seconds = _curve([point for point in points if point.seconds > 0.0], "copy")
    return fit_line(nbytes, seconds).beta_s_per_B if len(nbytes) > 1 else 0.0


def fit_window(points: Sequence[Point]) -> Link:
    """Return what copying from memory that two ranks map takes, by the times of "get"."""
    lines = fit_lines(*_curve(points, "get"))
    return _stepwise(lines, lambda line: Hockney(line.alpha_s, 1.0 / line.beta_s_per_B))


def _protocols(
    nbytes: FloatArray, seconds: FloatArray, asked: NDArray[np.bool_], eager_nbytes: int
) -> list[Line]:
    """Return one line through all sizes if it is good, else lines through those that ask first by themselves."""
    together = fit_lines(nbytes, seconds)
    good = len(together) == 1 and _cost_of(together) < GOOD_LINE * len(nbytes)
    if good or min(asked.sum(), (~asked).sum()) < 2:
        return together
    # A line through sizes of two protocols fits neither, and the second one begins where it does, at whatever size.
    eager, long = (fit_lines(nbytes[kind], seconds[kind]) for kind in (~asked, asked))
    return [*eager, replace(long[0], from_nbytes=eager_nbytes + 1), *long[1:]]


def _loggp(line: Line, own: Overheads) -> LogGP:
    """α = L + 2o - G and β = G."""
    return LogGP(
        L=max(line.alpha_s + line.beta_s_per_B - 2.0 * own.send_s, 0.0),
        o=own.send_s,
        g=own.gap_s,
        G=line.beta_s_per_B,
    )


BETWEEN_TWO = ("p2p", "stream", "post", "get")
REDUCING = ("reduce", "allreduce")
LIBRARIES = (Selection("mpich"), Selection("openmpi"))
GAMMAS = (0.0, *np.geomspace(1e-12, 1e-8, 33).tolist())  # seconds per byte: 1,000 GB/s to 0.1 GB/s
FINER = np.geomspace(0.75, 1.34, 25).tolist()
ROUNDS = 5
GOOD_RULES = 0.05  # a mean error of 5 %: no fixed algorithm for less
# A fixed algorithm must bring the error below this share of that of the library's own choice.
WORTH_FIXING = 0.8

Begun = dict[bytes, FloatArray]
"""By the clocks before them, the clocks after the two barriers of a sample."""


def _begun(timing: Timing, clocks: FloatArray, known: Begun) -> FloatArray:
    """Return when ranks begin a sample, the last one at 0: after two barriers, before and behind the writing."""
    # A sample lasts as long whenever it is: all begin from the last clock, and so what is equal is so to the last bit.
    clocks = clocks - clocks.max()
    key = clocks.tobytes()
    begun = known.get(key)
    if begun is None:
        begun = timing.finish("barrier", timing.finish("barrier", clocks, 0).times, 0).times
        known[key] = begun = begun - begun.max()
    return begun


def predicted_s(timing: Timing, operation: str, nbytes: int, ranks: int, *, known: Begun) -> float:
    """Return what would be measured: from the last beginning to the last end, after barriers left unequally.

    `known` is kept from call to call with what makes no difference to a barrier.
    """
    clocks, before, lasted_s = np.zeros(ranks), np.zeros(0), list[float]()
    size = 0 if operation == "barrier" else max(nbytes // 8, 1) * 8
    for _ in range(ROUNDS):
        begun = _begun(timing, clocks, known)
        if np.array_equal(begun, before):  # as it nearly always is: the samples to come are this one
            break
        # The clocks go on from sample to sample: ranks leave a barrier at different times, and the next sample begins
        # so.
        before, clocks = begun, timing.finish(operation, begun, size).times
        lasted_s.append(float(clocks.max()))
    return float(np.median(lasted_s + lasted_s[-1:] * (ROUNDS - len(lasted_s))))


def misfit(
    timing: Timing,
    points: Sequence[Point],
    ranks: int,
    limit: float = math.inf,
    *,
    known: Begun | None = None,
) -> float:
    """Return the mean absolute logarithm of predicted over measured; infinity if it is not below a limit."""
    found: list[float] = []
    known = {} if known is None else known
    for point in points:
        # Logarithms: half and twice the measured time are equally wrong.
        ratio = predicted_s(timing, point.operation, point.nbytes, ranks, known=known) / point.seconds
        found.append(abs(math.log(ratio)))
        if sum(found) >= limit * len(points):
            return math.inf
    return sum(found) / len(points)


def fit_gamma(network: Fabric, points: Sequence[Point], ranks: int) -> Fabric:
    """Return the network with the speed of arithmetic that explains the reductions best, whatever their algorithms."""
    # Long messages first: they show soonest that a speed is wrong.
    reductions = _by_operation(sorted(points, key=lambda point: -point.nbytes), REDUCING)
    if not reductions:
        return network
    # A grid and not a solver: algorithms change with the sizes, so the misfit has steps and many local minima.
    coarse = _best_gamma(network, reductions, ranks, GAMMAS)
    return _best_gamma(network, reductions, ranks, [coarse.gamma_s_per_B * factor for factor in FINER])


def _best_gamma(
    network: Fabric, reductions: Mapping[str, Sequence[Point]], ranks: int, gammas: Sequence[float]
) -> Fabric:
    best, least = network, math.inf
    known: dict[Selection, Begun] = {}  # barriers reduce nothing
    for gamma in dict.fromkeys(gammas):
        candidate = replace(network, gamma_s_per_B=gamma)
        found = _best_misfit(candidate, reductions, ranks, limit=least, known=known)
        if found < least:
            best, least = candidate, found
    return best


def _best_misfit(
    network: Fabric,
    reductions: Mapping[str, Sequence[Point]],
    ranks: int,
    *,
    limit: float,
    known: dict[Selection, Begun],
) -> float:
    total = 0.0
    for operation, points in reductions.items():
        least = limit - total
        # The library's choice is not known yet, so each reduction takes the one that explains it best with this speed:
        # one algorithm at all sizes, or those that a library changes with the size.
        for choice in (*LIBRARIES, *_fixed(operation)):
            barriers = known.setdefault(choice, {})
            least = min(least, misfit(Timing(network, choice), points, ranks, least, known=barriers))
        total += least
    return total


def fit_collectives(network: Fabric, points: Sequence[Point], ranks: int) -> tuple[Fabric, Selection]:
    """Return the network with what collectives add, and the algorithms; the pair that explains their times best."""
    found = []
    for asks in (True, False):
        # In this order: algorithms are chosen by times that the speed of arithmetic is part of.
        known = fit_gamma(replace(network, collective_rendezvous=asks), points, ranks)
        selection = fit_selection(known, points, ranks)
        found.append((misfit(Timing(known, selection), points, ranks), known, selection))
    _, network, selection = min(found, key=lambda each: each[0])
    return network, selection


def fit_selection(network: Fabric, points: Sequence[Point], ranks: int) -> Selection:
    """Return the selection that explains the collectives best: a library's rules, and fixed algorithms where better."""
    by_operation = _by_operation(
        points, ("barrier", "bcast", *REDUCING, "gather", "scatter", "allgather", "alltoall")
    )
    rules = {
        selection.library: {
            op: misfit(Timing(network, selection), own, ranks) for op, own in by_operation.items()
        }
        for selection in LIBRARIES
    }
    library = min(rules, key=lambda name: sum(rules[name].values()))
    fixed = []
    for operation, own in by_operation.items():
        errors = {
            choice.fixed[0][1]: misfit(Timing(network, choice), own, ranks) for choice in _fixed(operation)
        }
        best = min(errors, key=lambda name: errors[name])
        if errors[best] < WORTH_FIXING * rules[library][operation] and rules[library][operation] > GOOD_RULES:
            fixed.append((operation, best))
    return Selection(library, tuple(fixed))


def _fixed(operation: str) -> list[Selection]:
    return [Selection(fixed=((operation, name),)) for name in names(operation) if name != "two_level"]


def _by_operation(points: Sequence[Point], operations: Sequence[str]) -> dict[str, list[Point]]:
    found = {operation: [p for p in points if p.operation == operation] for operation in operations}
    return {operation: own for operation, own in found.items() if own}


FEW_RANKS = 16  # up to here each rank keeps its own factor; beyond, factors are a distribution
LEAST_SPREAD = 0.005  # relative differences below are left out
WORTH_TRANSIENT = 0.7  # transient stragglers must bring the distance below this share
FAR = 6.0  # robust standard deviations from the median: a transient straggler
DRAWS = 20_000


@dataclass(frozen=True)
class Fit:
    """A step and its stragglers. `distance`: between measured and fitted distributions of blocks (0 to 1)."""

    step_s: float
    stragglers: tuple[Straggler, ...]
    distance: float

    @property
    def model(self) -> ComputeModel:
        return ComputeModel(Fixed(self.step_s), self.stragglers)

    def __str__(self) -> str:
        return "+".join(map(str, self.stragglers)) or "constant"


def fit_stragglers(rows: Sequence[FloatArray], *, same_ranks: bool = True) -> Fit:
    """Return the step and stragglers of durations in seconds, one row of blocks per rank.

    The mean block of the fit is the mean block of the rows. `same_ranks`: rank i of the fit is rank i of the rows,
    where they are few; otherwise its speeds are a distribution, fit for any number of ranks.
    """
    rows = [np.asarray(row, dtype=np.float64) for row in rows]
    if not rows or any(row.size < 2 for row in rows) or any((row <= 0.0).any() for row in rows):
        raise ParameterError(
            "stragglers are fitted to at least 2 compute blocks per rank, each longer than 0 s"
        )
    means = np.array([row.mean() for row in rows])
    # Each rank by its own mean: slow ranks would otherwise look like a wide distribution of noise.
    ratios = np.concatenate([row / mean for row, mean in zip(rows, means, strict=True)])
    persistent = _persistent(means, ratios.std() / math.sqrt(ratios.size / len(rows)), same_ranks)
    noise = _noise(ratios)
    stragglers = (*persistent, *noise)
    # SlowRank has mean 1 over very many ranks; here it is about these ranks.
    product = math.prod(s.mean for s in noise) * (
        _mean_of_ranks(persistent, len(rows)) if same_ranks else 1.0
    )
    return Fit(float(means.mean()) / product, stragglers, _distance_of(noise, ratios))


def _mean_of_ranks(persistent: Sequence[Straggler], ranks: int) -> float:
    factors = [s.slowdown for s in persistent if isinstance(s, SlowRank)]
    return (sum(factors) + ranks - len(factors)) / ranks


def _persistent(means: FloatArray, error: float, same_ranks: bool) -> tuple[Straggler, ...]:
    """Return what tells the ranks' means apart beyond the error of the means."""
    relative = means / means.mean()
    # The means have an error of their own; only what goes beyond it tells ranks apart.
    spread = max(float(np.log(relative).std()) ** 2 - error**2, 0.0) ** 0.5
    if spread < LEAST_SPREAD:
        return ()
    if same_ranks and len(means) <= FEW_RANKS:
        return tuple(SlowRank(rank, _round(factor)) for rank, factor in enumerate(relative))
    return (Speed(_round(spread)),)


def _noise(ratios: FloatArray) -> tuple[Noise, ...]:
    """Return the noise of blocks around their rank's mean: one family, or a family and transient stragglers."""
    plain = _family(ratios)
    near, transient = _without_far(ratios)
    if not transient:
        return plain
    both = (*_family(near / near.mean()), *transient)
    return both if _distance_of(both, ratios) < WORTH_TRANSIENT * _distance_of(plain, ratios) else plain


def _family(ratios: FloatArray) -> tuple[Noise, ...]:
    if ratios.std() < LEAST_SPREAD:
        return ()
    return (min(_families(ratios), key=lambda family: _distance_of((family,), ratios)),)


def _without_far(ratios: FloatArray) -> tuple[FloatArray, tuple[Noise, ...]]:
    middle = float(np.median(ratios))
    # The median absolute deviation, in units of a normal distribution's: the outliers would inflate a standard
    # deviation until none of them is far.
    deviation = 1.4826 * float(np.median(np.abs(ratios - middle)))
    far = ratios > max(middle + FAR * deviation, 1.25 * middle)
    # An outlier seen in more than 20 % of the blocks is the distribution.
    if not far.any() or far.mean() > 0.2:
        return ratios, ()
    slowdown = float(ratios[far].mean() / ratios[~far].mean())
    return ratios[~far], (Bimodal(_round(far.mean()), _round(slowdown)),)


def _families(near: FloatArray) -> list[Noise]:
    # Hill's estimate of the exponent; at 1 and below a Pareto distribution has no mean to keep.
    tail = near.size / float(np.sum(np.log(near / near.min())))
    families: list[Noise] = [Lognormal(_round(np.log(near).std())), Gamma(_round(near.std()))]
    families.append(Exponential(_round(min(max(1.0 - near.min(), 1e-6), 1.0))))
    return [*families, Pareto(_round(tail))] if tail > 1.001 else families


def _round(value: float) -> float:
    # Rounded before it is judged: the file holds these digits, and its distance must be that of the file.
    return float(f"{value:.6g}")


def _distance_of(noise: Sequence[Noise], ratios: FloatArray) -> float:
    drawn = np.ones(DRAWS)
    for kind in noise:
        # A stream by the noise's own name: no distance depends on which others were tried before.
        drawn = drawn * kind.draw(random.generator(0, 0, f"calibrate.{kind}"), DRAWS)
    return _between(drawn / drawn.mean(), ratios)


def _between(drawn: FloatArray, measured: FloatArray) -> float:
    grid = np.sort(np.concatenate([drawn, measured]))
    below = [
        np.searchsorted(np.sort(sample), grid, side="right") / sample.size for sample in (drawn, measured)
    ]
    return float(np.max(np.abs(below[0] - below[1])))


LEAST_OVERHEAD_S = 1e-8  # an observation must cost something, or polling would not move time on


def fit(measured: Measured, name: str = "measured") -> Platform:
    """Return the platform that explains the measurements."""
    network = _network(measured)
    collectives = [point for point in _kept(measured.points) if point.operation not in (*BETWEEN_TWO, "copy")]
    network, selection = fit_collectives(network, collectives, measured.ranks)
    # A platform is used with other numbers of ranks than it was measured with.
    steps = fit_stragglers(measured.steps_s, same_ranks=False)
    facts = dict(measured.facts)
    cores = int(facts["cores"])
    return Platform(
        name=name,
        network=network,
        step=Fixed(steps.step_s),
        stragglers=steps.stragglers,
        cores=Cores(cores, measured.sharing),
        progress="hardware" if measured.answers_busy else "poll",
        collectives=selection,
        description=f"measured on {facts['ranks']} ranks, {facts['library']}, {facts['cores']} cores a node",
        fitted=measured.facts,
    )


def _kept(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if not held_out(point.nbytes)]


def _network(measured: Measured) -> Fabric:
    probe = next(point for point in measured.points if point.operation == "probe")
    near = fit_link(_kept(measured.points), eager_nbytes=measured.eager_nbytes)
    common = {
        "call_overhead_s": max(probe.seconds, LEAST_OVERHEAD_S),
        "eager_bytes": measured.eager_nbytes,
        "copy_s_per_B": copy_s_per_B(_kept(measured.points)),
        # Memory that can be read without its owner's help, on one node, is mapped: the reader copies.
        "window": fit_window(_kept(measured.points)) if measured.answers_busy else None,
    }
    if not measured.apart:
        return Switch(near, **common)  # type: ignore[arg-type]
    apart = fit_link(_kept(measured.apart), eager_nbytes=measured.eager_nbytes)
    return Nodes(near, apart, ranks_per_node=measured.ranks_per_node, **common)  # type: ignore[arg-type]
