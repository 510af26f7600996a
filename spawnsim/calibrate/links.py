"""From measured point-to-point times to a link: robust least squares, in pieces by size where one line is not enough.

The one-way time of n bytes is L + 2o + (n - 1) G up to the eager limit. Beyond it the kernel first asks and is
answered, two flights of an empty message, and so does the fit. `o` comes from how long a send holds its processor, `g`
from a stream of messages.

This room knows points and link models. It must not know communicators. The least squares are
scipy's (the extra `calibrate`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from spawnsim.calibrate.operations import STREAM
from spawnsim.calibrate.sampling import FloatArray, Point
from spawnsim.errors import ParameterError, UnsupportedError
from spawnsim.virtual.network import Link, LogGP, Piecewise

MOST_PIECES = 4
LEAST_S_PER_B = 1e-13  # 10 TB/s: no link is quicker
WORTH = 0.8  # a further piece must bring the error below this share of what it was
GOOD = 0.5 * (0.01 / 0.1) ** 2  # cost of a point that is 1 % off: no more pieces for less
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
        errors: FloatArray = (x[0] + nbytes * x[1]) / seconds - 1.0
        return errors

    alpha_s, beta = least_squares(residuals, (max(float(seconds[0]), 1e-9), float(slope)))
    beta = max(
        beta, LEAST_S_PER_B
    )  # times that do not grow over the sizes of a piece have no bandwidth to write down
    error = residuals(np.array([alpha_s, beta])) / ROBUST_SCALE
    return Line(int(nbytes[0]), float(alpha_s), float(beta), float(np.sum(np.sqrt(1.0 + error**2) - 1.0)))


def fit_lines(nbytes: FloatArray, seconds: FloatArray) -> list[Line]:
    """Return as few lines as it takes through points by rising size. Each holds at least two points."""
    best = [fit_line(nbytes, seconds)]
    for pieces in range(2, MOST_PIECES + 1):
        if _cost(best) < GOOD * len(nbytes):
            break
        candidate = min(_cuts(nbytes, seconds, pieces), key=_cost, default=best)
        if _cost(candidate) < WORTH * _cost(best):
            best = candidate
    return best


def _cuts(nbytes: FloatArray, seconds: FloatArray, pieces: int) -> Iterator[list[Line]]:
    known: dict[tuple[int, int], Line] = {}
    for inner in combinations(range(2, len(nbytes) - 1), pieces - 1):
        edges = list(pairwise((0, *inner, len(nbytes))))
        if all(end - begin >= 2 for begin, end in edges):
            for begin, end in edges:
                if (begin, end) not in known:
                    known[begin, end] = fit_line(nbytes[begin:end], seconds[begin:end])
            yield [known[edge] for edge in edges]


def _cost(lines: Sequence[Line]) -> float:
    return sum(line.cost for line in lines)


@dataclass(frozen=True)
class Overheads:
    """Of LogGP: how long a send holds the processor (o), and how long the card between two sends (g), in seconds."""

    send_s: float
    gap_s: float


def overheads(points: Sequence[Point]) -> Overheads:
    """Return o and g from the smallest posts, streams and ping-pongs."""
    post, stream, ping = (_smallest(points, operation) for operation in ("post", "stream", "p2p"))
    one_way_s = ping.seconds
    send_s = min(post.seconds, 0.4 * one_way_s)
    # A stream takes (k - 1) gaps, then one flight, then the answer's.
    gap_s = max(0.0, (stream.seconds * STREAM - 2.0 * one_way_s) / (STREAM - 1))
    return Overheads(send_s, max(gap_s, send_s))


def _smallest(points: Sequence[Point], operation: str) -> Point:
    found = [point for point in points if point.operation == operation]
    if not found:
        raise ParameterError(f"no times of {operation!r} among the points: measure it too")
    return min(found, key=lambda point: point.nbytes)


def fit_link(points: Sequence[Point], *, eager_nbytes: int) -> Link:
    """Return the link that explains the point-to-point times.

    `points` hold "p2p", "stream" and "post" at sizes from 1 byte; beyond `eager_nbytes` a message asks first.
    """
    own = overheads(points)
    pings = sorted((p for p in points if p.operation == "p2p" and p.nbytes), key=lambda point: point.nbytes)
    nbytes = np.array([point.nbytes for point in pings], dtype=np.float64)
    seconds = np.array([point.seconds for point in pings])
    handshake_s = 2.0 * max(seconds[0] - own.send_s, 0.0)
    asked = nbytes > eager_nbytes
    # A fast network's handshake can be longer than what noise leaves of the time: never take more than half of it.
    seconds = np.where(asked, np.maximum(seconds - handshake_s, 0.5 * seconds), seconds)
    lines = fit_lines(nbytes, seconds)
    steps = [(line.from_nbytes if i else 0, _loggp(line, own)) for i, line in enumerate(lines)]
    return steps[0][1] if len(steps) == 1 else Piecewise(tuple(steps))


def _loggp(line: Line, own: Overheads) -> LogGP:
    """α = L + 2o - G and β = G."""
    return LogGP(
        L=max(line.alpha_s + line.beta_s_per_B - 2.0 * own.send_s, 0.0),
        o=own.send_s,
        g=own.gap_s,
        G=line.beta_s_per_B,
    )
