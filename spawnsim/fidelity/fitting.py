"""From measurements to a platform: links, reductions, collective algorithms, compute steps and stragglers.

Every other size is held out of the fit, and judges it. Links: the one-way time of n bytes is L + 2o + (n - 1) G up to
the eager limit, with separate lines for ranges of sizes if one line is not accurate enough. Beyond the limit the
model adds a handshake, two flights of an empty message, and so does the fit. `o` is the time for which a send
occupies its processor, `g` follows from a stream of messages. The robust least squares are scipy's (the extra
`calibrate`).

Stragglers: persistent differences between ranks are removed first, then rare blocks far from the others (transient
stragglers). The rest is noise: among the families in `spawnsim.models.compute`, the fit takes the one whose
distribution function is nearest (Kolmogorov and Smirnov's distance).
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
LEAST_S_PER_B = 1e-13  # 10 TB/s: no link is faster
WORTH_A_PIECE = 0.8  # a further piece must bring the error below this share of its previous value
GOOD_LINE = 0.5 * (0.01 / 0.1) ** 2  # the cost of a point with an error of 1 %: below it, no more pieces
ROBUST_SCALE = 0.1  # relative errors beyond 10 % count linearly, not squared


def least_squares(residuals: Any, start: Sequence[float]) -> FloatArray:
    """Return the non-negative parameters with the least soft-L1 residuals.

    Raises:
        UnsupportedError: scipy is not installed.
    """
    try:
        from scipy import optimize
    except ModuleNotFoundError as error:
        raise UnsupportedError("calibrate needs scipy: pip install 'spawnsim[calibrate]'") from error
    # Latencies and times per byte differ by six decades: without scaling, the solver's steps would suit only one of
    # them.
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
    """α + nβ for sizes from `from_nbytes`, with the sum of its robust errors."""

    from_nbytes: int
    alpha_s: float
    beta_s_per_B: float  # noqa: N815
    cost: float


def fit_line(nbytes: FloatArray, seconds: FloatArray) -> Line:
    """Return the line with the least relative error; points are ordered by size."""
    slope = max((seconds[-1] - seconds[0]) / max(nbytes[-1] - nbytes[0], 1.0), 1e-13)

    def residuals(x: FloatArray) -> FloatArray:
        # Relative errors: absolute ones would fit the largest messages and ignore microseconds.
        errors: FloatArray = (x[0] + nbytes * x[1]) / seconds - 1.0
        return errors

    alpha_s, beta = least_squares(residuals, (max(float(seconds[0]), 1e-9), float(slope)))
    # If times do not grow over the sizes of a piece, its bandwidth is unbounded: keep a finite one.
    beta = max(beta, LEAST_S_PER_B)
    error = residuals(np.array([alpha_s, beta])) / ROBUST_SCALE
    return Line(int(nbytes[0]), float(alpha_s), float(beta), float(np.sum(np.sqrt(1.0 + error**2) - 1.0)))


def fit_lines(nbytes: FloatArray, seconds: FloatArray) -> list[Line]:
    """Return as few lines as necessary; points are ordered by size. Each line covers at least two points."""
    best = [fit_line(nbytes, seconds)]
    for pieces in range(2, MOST_PIECES + 1):
        if _cost_of(best) < GOOD_LINE * len(nbytes):
            break
        candidate = min(_cuts(nbytes, seconds, pieces), key=_cost_of, default=best)
        # More pieces always fit better; the gain must justify a piece, or noise is fitted.
        if _cost_of(candidate) < WORTH_A_PIECE * _cost_of(best):
            best = candidate
    return best


def _cuts(nbytes: FloatArray, seconds: FloatArray, pieces: int) -> Iterator[list[Line]]:
    # Different cuts share most of their pieces, and each fit is a separate optimisation: keep the fits.
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
    """LogGP's overheads in seconds: o, for which a send occupies the processor; g, the card's gap between sends."""

    send_s: float
    gap_s: float


def overheads(points: Sequence[Point]) -> Overheads:
    """Return o and g from the smallest post, and from the quickest stream and ping-pong."""
    # Larger messages take no less time, and a disturbance only adds time. So no size is faster than the smallest one
    # without disturbance, and a single disturbed point does not make every message slow.
    post, stream, ping = (_quickest(points, operation) for operation in ("post", "stream", "p2p"))
    one_way_s = ping.seconds
    # On a machine with more ranks than cores a post may cost as much as the whole flight; L would then vanish.
    send_s = min(post.seconds, 0.4 * one_way_s)
    # A stream takes (k - 1) gaps, then one flight, then the flight of the answer.
    gap_s = max(0.0, (stream.seconds * STREAM - 2.0 * one_way_s) / (STREAM - 1))
    return Overheads(send_s, max(gap_s, send_s))


def _quickest(points: Sequence[Point], operation: str) -> Point:
    found = [point for point in points if point.operation == operation]
    if not found:
        raise ParameterError(f"no times of {operation!r} among the points: measure it too")
    return min(found, key=lambda point: point.seconds)


def _curve(points: Sequence[Point], operation: str) -> tuple[FloatArray, FloatArray]:
    """Return the sizes of an operation's points in increasing order, and their seconds."""
    own = sorted((point for point in points if point.operation == operation), key=lambda point: point.nbytes)
    return np.array([float(point.nbytes) for point in own]), np.array([point.seconds for point in own])


def _stepwise(lines: Sequence[Line], link: Callable[[Line], Link]) -> Link:
    steps = [(line.from_nbytes if i else 0, link(line)) for i, line in enumerate(lines)]
    return steps[0][1] if len(steps) == 1 else Piecewise(tuple(steps))


def fit_link(points: Sequence[Point], *, eager_nbytes: int) -> Link:
    """Return the link that explains the point-to-point times.

    `points` hold "p2p", "stream" and "post" at sizes from 1 byte; a message beyond `eager_nbytes` needs a handshake.
    """
    own = overheads(points)
    nbytes, seconds = _curve([point for point in points if point.nbytes], "p2p")
    # The model adds the handshake to the link's time, so subtract it first, but leave at least both overheads.
    handshake_s = 2.0 * max(seconds[0] - own.send_s, 0.0)
    asked = nbytes > eager_nbytes
    seconds = np.where(asked, np.maximum(seconds - handshake_s, 2.0 * own.send_s), seconds)
    return _stepwise(_protocols(nbytes, seconds, asked, eager_nbytes), lambda line: _loggp(line, own))


def copy_s_per_B(points: Sequence[Point]) -> float:
    """Return the seconds per byte that a rank copies to itself, from the times of "copy"; 0 if those are 0."""
    nbytes, seconds = _curve([point for point in points if point.seconds > 0.0], "copy")
    return fit_line(nbytes, seconds).beta_s_per_B if len(nbytes) > 1 else 0.0


def fit_window(points: Sequence[Point]) -> Link:
    """Return the link of a copy from memory that two ranks map, from the times of "get"."""
    lines = fit_lines(*_curve(points, "get"))
    return _stepwise(lines, lambda line: Hockney(line.alpha_s, 1.0 / line.beta_s_per_B))


def _protocols(
    nbytes: FloatArray, seconds: FloatArray, asked: NDArray[np.bool_], eager_nbytes: int
) -> list[Line]:
    """Return one line through all sizes if it is good, else separate lines for eager sizes and for handshake sizes."""
    together = fit_lines(nbytes, seconds)
    good = len(together) == 1 and _cost_of(together) < GOOD_LINE * len(nbytes)
    if good or min(asked.sum(), (~asked).sum()) < 2:
        return together
    # A line through sizes of two protocols fits neither. The second line begins at the eager limit, whatever sizes
    # exist.
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
GOOD_RULES = 0.05  # a mean error of 5 %: below it, no fixed algorithm replaces the rules
# A fixed algorithm must bring the error below this share of the error of the library's own choice.
WORTH_FIXING = 0.8

Begun = dict[bytes, FloatArray]
"""Clocks before a sample's two barriers (as bytes) → clocks after them."""


def _begun(timing: Timing, clocks: FloatArray, known: Begun) -> FloatArray:
    """Return when ranks begin a sample, the last rank at 0: after two barriers, around the writing of the buffers."""
    # A sample's duration does not depend on its start: with the last clock at 0, equal samples are equal to the last
    # bit.
    clocks = clocks - clocks.max()
    key = clocks.tobytes()
    begun = known.get(key)
    if begun is None:
        begun = timing.finish("barrier", timing.finish("barrier", clocks, 0).times, 0).times
        known[key] = begun = begun - begun.max()
    return begun


def predicted_s(timing: Timing, operation: str, nbytes: int, ranks: int, *, known: Begun) -> float:
    """Return the time that a measurement would give: last start to last end, after barriers that ranks leave unequally.

    `known` caches barriers; pass the same dictionary for parameters that do not change a barrier.
    """
    clocks, before, lasted_s = np.zeros(ranks), np.zeros(0), list[float]()
    size = 0 if operation == "barrier" else max(nbytes // 8, 1) * 8
    for _ in range(ROUNDS):
        begun = _begun(timing, clocks, known)
        if np.array_equal(begun, before):  # nearly always: all further samples equal this one
            break
        # Clocks continue from sample to sample: ranks leave a barrier, and enter the next sample, at different times.
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
    """Return the mean absolute logarithm of predicted over measured time; infinity if it reaches the limit."""
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
    """Return the network with the arithmetic speed that explains the reductions best, whatever their algorithms."""
    # Long messages first: they reveal a wrong speed soonest.
    reductions = _by_operation(sorted(points, key=lambda point: -point.nbytes), REDUCING)
    if not reductions:
        return network
    # A grid instead of a solver: algorithms change with the sizes, so the misfit has steps and many local minima.
    coarse = _best_gamma(network, reductions, ranks, GAMMAS)
    return _best_gamma(network, reductions, ranks, [coarse.gamma_s_per_B * factor for factor in FINER])


def _best_gamma(
    network: Fabric, reductions: Mapping[str, Sequence[Point]], ranks: int, gammas: Sequence[float]
) -> Fabric:
    best, least = network, math.inf
    known: dict[Selection, Begun] = {}  # barriers reduce nothing, so any speed shares them
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
        # The library's choice is not known yet, so each reduction takes the algorithm that explains it best with
        # this speed: one algorithm at all sizes, or a library's rules, which change it with the size.
        for choice in (*LIBRARIES, *_fixed(operation)):
            barriers = known.setdefault(choice, {})
            least = min(least, misfit(Timing(network, choice), points, ranks, least, known=barriers))
        total += least
    return total


def fit_collectives(network: Fabric, points: Sequence[Point], ranks: int) -> tuple[Fabric, Selection]:
    """Return the network with the cost of collectives, and the algorithms: the pair that explains the times best."""
    found = []
    for asks in (True, False):
        # In this order: the choice of algorithms depends on times that include arithmetic.
        known = fit_gamma(replace(network, collective_rendezvous=asks), points, ranks)
        selection = fit_selection(known, points, ranks)
        found.append((misfit(Timing(known, selection), points, ranks), known, selection))
    _, network, selection = min(found, key=lambda each: each[0])
    return network, selection


def fit_selection(network: Fabric, points: Sequence[Point], ranks: int) -> Selection:
    """Return the selection that explains the collectives best: a library's rules, and fixed algorithms if better."""
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


FEW_RANKS = 16  # up to this number each rank keeps its own factor; beyond, factors are a distribution
LEAST_SPREAD = 0.005  # smaller relative differences are ignored
WORTH_TRANSIENT = 0.7  # transient stragglers must bring the distance below this share
FAR = 6.0  # robust standard deviations from the median: beyond, a block is a transient straggler
DRAWS = 20_000


@dataclass(frozen=True)
class Fit:
    """A step and its stragglers; `distance` (0 to 1) is between the measured and fitted distributions of blocks."""

    step_s: float
    stragglers: tuple[Straggler, ...]
    distance: float

    @property
    def model(self) -> ComputeModel:
        return ComputeModel(Fixed(self.step_s), self.stragglers)

    def __str__(self) -> str:
        return "+".join(map(str, self.stragglers)) or "constant"


def fit_stragglers(rows: Sequence[FloatArray], *, same_ranks: bool = True) -> Fit:
    """Return the step and stragglers of durations in seconds; `rows` has one row of blocks per rank.

    The mean block of the fit equals the mean block of the rows. `same_ranks`: rank i of the fit is rank i of the
    rows, if there are few ranks; otherwise the ranks' speeds are a distribution, which suits any number of ranks.
    """
    rows = [np.asarray(row, dtype=np.float64) for row in rows]
    if not rows or any(row.size < 2 for row in rows) or any((row <= 0.0).any() for row in rows):
        raise ParameterError(
            "stragglers are fitted to at least 2 compute blocks per rank, each longer than 0 s"
        )
    means = np.array([row.mean() for row in rows])
    # Each rank relative to its own mean: otherwise slow ranks would look like a wide distribution of noise.
    ratios = np.concatenate([row / mean for row, mean in zip(rows, means, strict=True)])
    persistent = _persistent(means, ratios.std() / math.sqrt(ratios.size / len(rows)), same_ranks)
    noise = _noise(ratios)
    stragglers = (*persistent, *noise)
    # SlowRank has mean 1 over very many ranks; this correction is for these ranks.
    product = math.prod(s.mean for s in noise) * (
        _mean_of_ranks(persistent, len(rows)) if same_ranks else 1.0
    )
    return Fit(float(means.mean()) / product, stragglers, _distance_of(noise, ratios))


def _mean_of_ranks(persistent: Sequence[Straggler], ranks: int) -> float:
    factors = [s.slowdown for s in persistent if isinstance(s, SlowRank)]
    return (sum(factors) + ranks - len(factors)) / ranks


def _persistent(means: FloatArray, error: float, same_ranks: bool) -> tuple[Straggler, ...]:
    """Return the straggler that explains differences between the ranks' means beyond their error."""
    relative = means / means.mean()
    # The means have errors; only the spread beyond these errors is a difference between ranks.
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
    # The median absolute deviation, scaled to a normal distribution: outliers would inflate a standard deviation
    # until none of them counts as far.
    deviation = 1.4826 * float(np.median(np.abs(ratios - middle)))
    far = ratios > max(middle + FAR * deviation, 1.25 * middle)
    # Outliers in more than 20 % of the blocks belong to the distribution.
    if not far.any() or far.mean() > 0.2:
        return ratios, ()
    slowdown = float(ratios[far].mean() / ratios[~far].mean())
    return ratios[~far], (Bimodal(_round(far.mean()), _round(slowdown)),)


def _families(near: FloatArray) -> list[Noise]:
    # Hill's estimate of the exponent; at 1 and below a Pareto distribution has no finite mean.
    tail = near.size / float(np.sum(np.log(near / near.min())))
    families: list[Noise] = [Lognormal(_round(np.log(near).std())), Gamma(_round(near.std()))]
    families.append(Exponential(_round(min(max(1.0 - near.min(), 1e-6), 1.0))))
    return [*families, Pareto(_round(tail))] if tail > 1.001 else families


def _round(value: float) -> float:
    # Rounded before it is judged: the file holds these digits, and the distance must describe the file.
    return float(f"{value:.6g}")


def _distance_of(noise: Sequence[Noise], ratios: FloatArray) -> float:
    drawn = np.ones(DRAWS)
    for kind in noise:
        # A random stream per noise: the distance does not depend on the families tried before.
        drawn = drawn * kind.draw(random.generator(0, 0, f"calibrate.{kind}"), DRAWS)
    return _between(drawn / drawn.mean(), ratios)


def _between(drawn: FloatArray, measured: FloatArray) -> float:
    grid = np.sort(np.concatenate([drawn, measured]))
    below = [
        np.searchsorted(np.sort(sample), grid, side="right") / sample.size for sample in (drawn, measured)
    ]
    return float(np.max(np.abs(below[0] - below[1])))


LEAST_OVERHEAD_S = 1e-8  # an observation must cost something, or polling would not advance time


def fit(measured: Measured, name: str = "measured") -> Platform:
    """Return the platform that explains the measurements."""
    network = _network(measured)
    collectives = [point for point in _kept(measured.points) if point.operation not in (*BETWEEN_TWO, "copy")]
    network, selection = fit_collectives(network, collectives, measured.ranks)
    # A platform is also used with other numbers of ranks than the measured one.
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
        # If memory can be read without its owner's help, on one node, it is mapped: the reader copies.
        "window": fit_window(_kept(measured.points)) if measured.answers_busy else None,
    }
    if not measured.apart:
        return Switch(near, **common)  # type: ignore[arg-type]
    apart = fit_link(_kept(measured.apart), eager_nbytes=measured.eager_nbytes)
    return Nodes(near, apart, ranks_per_node=measured.ranks_per_node, **common)  # type: ignore[arg-type]
