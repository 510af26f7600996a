"""From tables of collectives to a platform: links by message size, reductions, and NCCL's protocols, with intervals.

Messages: in a collective in lockstep, each round takes α(m) + β(m)·m for its longest message m, and γ(m)·m if its
receivers combine it. So the time of a row is linear in α, β and γ of each range of sizes (or γ of each dtype), and
non-negative least squares of relative errors finds them. The ranges are found one after the other: a further one must
lower the error of rows that its fit has not seen (each row is left out once). NCCL: α and β of each protocol over the
tuner's, of the rows for which the tuner chooses that protocol; the tuner's values are the prior.

A parameter that the rows do not determine is reported and not fitted. Every reported error is of a row that its
fit has not seen.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spawnsim import random
from spawnsim.errors import ParameterError, UnsupportedError
from spawnsim.fidelity.tables import Sample
from spawnsim.models.collectives import Planner, Selection
from spawnsim.models.collectives.nccl import Nccl, pair_of
from spawnsim.models.network import Hockney, Link, Nodes, Piecewise, Switch
from spawnsim.models.platform import Platform

FloatArray = NDArray[np.float64]
Solver = Callable[[FloatArray, FloatArray], FloatArray]
MOST_RANGES = 6
GOOD_ENOUGH = 0.01**2  # mean squared error of unseen rows: below it, no further ranges
WORTH_A_RANGE = 0.9  # a further range must bring the error of unseen rows below this share
LEAST_CACHE = 1 << 20  # bytes: reductions slow down beyond a cache, and the caches of a core are not smaller
LEAST_S_PER_B = 1e-13  # 10 TB/s: no link is faster
SAME = 1e-6  # the part of a column that the other columns do not explain, below which it is not determined
NOISE = 0.02  # of a measured time
PRIOR = 0.5  # of the tuner's constants
RESAMPLES = 200
UNSEEN_SHARE = 0.1  # rows that disagree by more are reported


class Parameter(NamedTuple):
    """A fitted value with its 90 % bootstrap interval, in seconds (α), seconds per byte (β, γ) or as a factor."""

    name: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class TableFit:
    """The result of a fit.

    Attributes:
        platform: the platform.
        parameters: the fitted values.
        undetermined: the parameters that the rows do not determine, each with the reason.
        errors: predicted over measured time, less 1, of each row by a fit to all other rows; in the order of the
            rows; NaN where the other rows do not determine it.
    """

    platform: Platform
    parameters: tuple[Parameter, ...]
    undetermined: tuple[str, ...]
    errors: FloatArray


def fit_table(
    samples: Sequence[Sample], name: str, *, machine: Nccl | None = None, cache_bytes: int | None = None
) -> TableFit:
    """Return the platform that explains the rows.

    Args:
        samples: rows of one library: all of NCCL, or all of messages with one rank per node.
        name: the platform's name.
        machine: for NCCL: the machine whose factors are fitted; without it the bus follows from the largest rows.
        cache_bytes: for messages: the cache of a core, in bytes: reductions of longer operands have a speed of their
            own. None: a size that rows show.

    Raises:
        ParameterError: rows of both kinds, too few rows, rows that no model of this module describes, or speeds of
            reductions both by dtype and by size.
        UnsupportedError: scipy is not installed.
    """
    kinds = {sample.library for sample in samples}
    if len(kinds) != 1:
        raise ParameterError("rows of NCCL and of MPI: fit them one after the other")
    if len(samples) < 4:
        raise ParameterError(f"{len(samples)} rows: a fit needs at least 4")
    return (
        _fit_nccl(samples, name, machine) if kinds == {"nccl"} else _fit_messages(samples, name, cache_bytes)
    )


def solve(columns: FloatArray, seconds: FloatArray, wanted: FloatArray | None = None) -> FloatArray:
    """Return the non-negative parameters with the least squared relative errors; `wanted` replaces the ratio of 1."""
    try:
        from scipy import optimize
    except ModuleNotFoundError as error:
        raise UnsupportedError("calibrate needs scipy: pip install 'spawnsim[calibrate]'") from error
    relative = columns / seconds[:, None]
    scale = np.abs(relative).max(axis=0)
    scale[scale == 0.0] = 1.0
    found, _ = optimize.nnls(relative / scale, np.ones(len(seconds)) if wanted is None else wanted)
    return np.asarray(found / scale, dtype=np.float64)


def unseen(columns: FloatArray, seconds: FloatArray, fit: Solver = solve) -> FloatArray:
    """Return the relative error of each row by the fit to all other rows; NaN where that fit does not know it."""
    errors = np.full(len(seconds), np.nan)
    for left in range(len(seconds)):
        others = np.arange(len(seconds)) != left
        known = (columns[others] != 0.0).any(axis=0)
        if not (columns[left][~known] != 0.0).any():
            errors[left] = float(columns[left] @ fit(columns[others], seconds[others])) / seconds[left] - 1.0
    return errors


def determined(columns: FloatArray, seconds: FloatArray) -> NDArray[np.bool_]:
    """Return which columns are not combinations of earlier ones, in relative errors."""
    relative = columns / seconds[:, None]
    kept: list[int] = []
    for place in range(columns.shape[1]):
        column = relative[:, place]
        size = float(np.linalg.norm(column))
        rest = column
        if kept and size:
            earlier = relative[:, kept]
            rest = column - earlier @ np.linalg.lstsq(earlier, column, rcond=None)[0]
        if size and float(np.linalg.norm(rest)) > SAME * size:
            kept.append(place)
    return np.isin(np.arange(columns.shape[1]), kept)


def intervals(columns: FloatArray, seconds: FloatArray, fit: Solver = solve) -> tuple[FloatArray, FloatArray]:
    """Return the 5th and 95th percentiles of each parameter over resampled rows."""
    stream = random.generator(0, 0, "table fit")
    found = []
    for _ in range(RESAMPLES):
        rows = stream.integers(0, len(seconds), len(seconds))
        drawn = fit(columns[rows], seconds[rows])
        found.append(np.where((columns[rows] != 0.0).any(axis=0), drawn, np.nan))
    bounds = np.full((2, columns.shape[1]), np.nan)
    used = np.isfinite(found).any(axis=0)
    bounds[:, used] = np.nanpercentile(np.array(found)[:, used], (5, 95), axis=0)
    return bounds[0], bounds[1]


def report(samples: Sequence[Sample], found: TableFit) -> str:
    """Return what was fitted, how well, and which rows disagree, as lines."""
    width = max(len(each.name) for each in found.parameters) if found.parameters else 0
    lines = [
        f"{each.name:{width}}  {each.value:10.4g}  ({each.low:.3g} to {each.high:.3g})"
        for each in found.parameters
    ]
    lines += [f"not determined: {each}" for each in found.undetermined]
    known = np.abs(found.errors[np.isfinite(found.errors)])
    if len(known):
        lines.append(
            f"{len(samples)} rows, each predicted by a fit to the others: median error {np.median(known):.1%}, largest "
            f"{known.max():.0%}"
        )
    for sample, error in zip(samples, found.errors, strict=True):
        if not np.isfinite(error):
            lines.append(f"{sample.where}: no other row says anything about it: not judged")
        elif abs(error) > UNSEEN_SHARE:
            kind = " ".join(filter(None, (sample.library, sample.operation, sample.algorithm)))
            lines.append(f"{sample.where}: {kind} of {sample.nbytes} B, predicted {error:+.0%}")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------ messages
class Cuts(NamedTuple):
    """Where ranges of sizes begin, in bytes: of messages, and of operands of reductions; 0 is understood.

    With rows of several dtypes, these have the ranges of operands: a speed each.
    """

    messages: tuple[int, ...] = ()
    operands: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ("",)


def _rounds(sample: Sample) -> list[tuple[float, str | None]]:
    """Return the longest message of each round, and the dtype as which it is combined, if it is."""
    choice = Selection(fixed=((sample.operation, sample.algorithm),)) if sample.algorithm else Selection()
    plan = Planner(Switch(Hockney(1e-6, 1e9)), choice).plan(sample.operation, sample.ranks, sample.nbytes)
    return [
        (
            max(float(np.max(plan.amounts.of(lane))) for lane in each.lanes),
            sample.dtype if each.reduces else None,
        )
        for each in plan.schedule.rounds
    ]


def _columns(rounds: Sequence[Sequence[tuple[float, str | None]]], cuts: Cuts) -> FloatArray:
    """Return (rows, parameters): counts of messages and bytes for each range, then bytes combined for each range."""
    ranges, dtypes = len(cuts.messages) + 1, cuts.dtypes
    found = np.zeros((len(rounds), 2 * ranges + len(cuts.operands) + len(dtypes)))
    for row, each in zip(found, rounds, strict=True):
        for nbytes, dtype in each:
            place = int(np.searchsorted(cuts.messages, nbytes, side="right"))
            row[2 * place] += 1.0
            row[2 * place + 1] += nbytes
            if dtype is not None:
                kind = int(np.searchsorted(cuts.operands, nbytes, side="right")) + dtypes.index(dtype)
                row[2 * ranges + kind] += nbytes
    return found


def _candidates(rounds: Sequence[Sequence[tuple[float, str | None]]]) -> list[int]:
    """Return the sizes between the messages of the rows, at which a range may begin."""
    sizes = sorted({nbytes for each in rounds for nbytes, _ in each if nbytes > 0})
    # One more than the middle: a protocol's largest message is often a power of two, as measured sizes are.
    return [round((low * high) ** 0.5) + 1 for low, high in itertools.pairwise(sizes) if high > 1.5 * low]


def _find_cuts(samples: Sequence[Sample], cache_bytes: int | None) -> Cuts:
    """Return the ranges of sizes: further ones must lower the error of rows that their fit has not seen."""
    rounds = [_rounds(sample) for sample in samples]
    seconds = np.array([sample.seconds for sample in samples])
    candidates = _candidates(rounds)
    dtypes = tuple(sorted({sample.dtype for sample in samples}))
    if len(dtypes) > 1 and (cache_bytes is not None or "" in dtypes):
        raise ParameterError(
            f"rows of several dtypes ({', '.join(dtype or 'none given' for dtype in dtypes)}): each gets one speed of "
            "reductions: name the dtype in all rows, and leave out cache="
        )
    cuts = Cuts((), () if cache_bytes is None else (cache_bytes + 1,), dtypes)
    judged = np.isfinite(unseen(_columns(rounds, cuts), seconds))
    missing = int((~determined(_columns(rounds, cuts), seconds)).sum())

    def error(cuts: Cuts) -> float:
        if int((~determined(_columns(rounds, cuts), seconds)).sum()) > missing:
            return math.inf  # a range of one size: its latency and bandwidth are one number
        # A row that is alone in its range counts as wholly wrong, unless it was alone without further ranges.
        found = np.nan_to_num(np.abs(unseen(_columns(rounds, cuts), seconds)[judged]), nan=1.0)
        return float(np.mean(np.minimum(found, 1.0) ** 2))

    def further(cuts: Cuts) -> Iterator[Cuts]:
        for at in candidates:
            if at not in cuts.messages:
                yield cuts._replace(messages=tuple(sorted({*cuts.messages, at})))
            if not cuts.operands and len(cuts.dtypes) == 1 and at >= LEAST_CACHE:
                yield cuts._replace(operands=(at,))

    least = error(cuts)
    while least > GOOD_ENOUGH and len(cuts.messages) + len(cuts.operands) < MOST_RANGES:
        # Two at once if one does not help: a protocol for middle sizes has two ends.
        for found in ([*further(cuts)], [two for one in further(cuts) for two in further(one)]):
            best = min(found, key=error, default=cuts)
            if found and error(best) < WORTH_A_RANGE * least:
                cuts, least = best, error(best)
                break
        else:
            break
    return cuts


def _fit_messages(samples: Sequence[Sample], name: str, cache_bytes: int | None) -> TableFit:
    for sample in samples:
        if sample.ranks != sample.nodes:
            raise ParameterError(
                f"{sample.where}: {sample.ranks} ranks on {sample.nodes} nodes: these rows cannot separate messages "
                "within a node from messages between nodes; give rows with one rank per node"
            )
    cuts = _find_cuts(samples, cache_bytes)
    rounds = [_rounds(sample) for sample in samples]
    seconds = np.array([sample.seconds for sample in samples])

    columns = _columns(rounds, cuts)
    known = determined(columns, seconds)
    names = _names(cuts)
    missing = tuple(
        f"{each}: these rows do not determine it next to the other parameters; add an algorithm that combines another "
        "share of its bytes, or other sizes"
        for each, is_known in zip(names, known, strict=True)
        if not is_known
    )
    columns[:, ~known] = 0.0
    values = solve(columns, seconds)
    low, high = intervals(columns, seconds)
    parameters = tuple(
        Parameter(each, float(value), float(least), float(most))
        for each, value, least, most, is_known in zip(names, values, low, high, known, strict=True)
        if is_known
    )
    return TableFit(_switch(samples, values, cuts, name=name), parameters, missing, unseen(columns, seconds))


def _names(cuts: Cuts) -> list[str]:
    links = [f"from {at} B" for at in (0, *cuts.messages)]
    named = [f"{what} {link}" for link in links for what in ("latency", "time per byte")]
    if len(cuts.dtypes) > 1:
        return [*named, *(f"reduction per byte of {dtype}" for dtype in cuts.dtypes)]
    return [*named, *(f"reduction per byte from {at} B" for at in (0, *cuts.operands))]


def _switch(samples: Sequence[Sample], values: FloatArray, cuts: Cuts, *, name: str) -> Platform:
    ranges = len(cuts.messages) + 1
    steps: list[tuple[int, Link]] = [
        (at, Hockney(float(values[2 * i]), 1.0 / max(float(values[2 * i + 1]), LEAST_S_PER_B)))
        for i, at in enumerate((0, *cuts.messages))
    ]
    gammas = values[2 * ranges :]
    beyond = (cuts.operands[0], float(gammas[1])) if cuts.operands else None
    gamma_s = float(gammas[0])
    own: tuple[tuple[str, float], ...] = ()
    if len(cuts.dtypes) > 1:
        own = tuple(
            (dtype, max(float(g), LEAST_S_PER_B)) for dtype, g in zip(cuts.dtypes, gammas, strict=True)
        )
        gamma_s = max(gamma for _, gamma in own)  # dtypes without rows: as the slowest of the others
    link = steps[0][1] if ranges == 1 else Piecewise(tuple(steps))
    fixed = {sample.operation: sample.algorithm for sample in samples if sample.algorithm}
    several = {
        sample.operation for sample in samples if sample.algorithm not in ("", fixed.get(sample.operation))
    }
    return Platform(
        name,
        Switch(link, gamma_s_per_B=gamma_s, gamma_beyond=beyond, gamma_of=own),
        collectives=Selection(fixed=tuple((op, alg) for op, alg in fixed.items() if op not in several)),
        description=_description(samples),
        fitted=(("rows", str(len(samples))),),
    )


def _description(samples: Sequence[Sample]) -> str:
    places = sorted({(sample.nodes, sample.ranks) for sample in samples})
    shown = ", ".join(f"{ranks} ranks on {nodes} nodes" for nodes, ranks in places)
    return f"fitted to {len(samples)} rows: {shown}"


# ---------------------------------------------------------------------------------------------------------------- NCCL
def _fit_nccl(samples: Sequence[Sample], name: str, machine: Nccl | None) -> TableFit:
    machine = machine or Nccl(_bus(samples))
    parts: dict[str, list[int]] = defaultdict(list)
    chosen = []
    for place, sample in enumerate(samples):
        estimate = _machine_of(machine, sample).choice(
            sample.operation, _total(sample), ranks=sample.ranks, nodes=sample.nodes
        )
        chosen.append(estimate)
        parts[pair_of(estimate, _total(sample))].append(place)
    errors = np.full(len(samples), np.nan)
    parameters: list[Parameter] = []
    missing: list[str] = []
    factors: list[tuple[str, float, float]] = []
    for pair, places in sorted(parts.items()):
        rows = [samples[place] for place in places]
        columns = np.array(
            [[chosen[p].alpha_s, _total(samples[p]) * chosen[p].beta_s_per_B] for p in places], np.float64
        )
        seconds = np.array([row.seconds for row in rows])
        values = _factors(columns, seconds)
        factors.append((pair, float(values[0]), float(values[1])))
        errors[places] = unseen(columns, seconds, _factors)
        low, high = intervals(columns, seconds, _factors)
        parameters += [
            Parameter(f"{pair} {what}", float(values[i]), float(low[i]), float(high[i]))
            for i, what in enumerate(("latency factor", "time per byte factor"))
        ]
        if len(rows) < 3 or not determined(columns, seconds).all():
            missing.append(
                f"{pair}: {len(rows)} rows do not separate latency from bandwidth: the tuner's constants decide"
            )
    platform = Platform(
        name,
        Nodes(
            Hockney(1e-6, 4.0 * machine.bus_Bps), Hockney(5e-6, machine.bus_Bps),
            max(1, samples[0].ranks // samples[0].nodes),
        ),
        collectives=Selection("nccl", nccl=replace(machine, factors=tuple(factors))),
        description=_description(samples),
        fitted=(("rows", str(len(samples))),),
    )  # fmt: skip
    return TableFit(platform, tuple(parameters), tuple(missing), errors)


def _machine_of(machine: Nccl, sample: Sample) -> Nccl:
    return replace(machine, algorithm=sample.algorithm) if sample.algorithm else machine


def _total(sample: Sample) -> int:
    return sample.nbytes * (1 if sample.operation == "allreduce" else sample.ranks)


def _bus(samples: Sequence[Sample]) -> float:
    """Return the bandwidth of the rings: what the largest rows reach."""
    rings = [sample for sample in samples if sample.algorithm in ("ring", "")] or [*samples]
    passes = {"allreduce": 2.0}
    return max(
        passes.get(sample.operation, 1.0)
        * (sample.ranks - 1)
        / sample.ranks
        * _total(sample)
        / sample.seconds
        for sample in rings
    )


def _factors(columns: FloatArray, seconds: FloatArray) -> FloatArray:
    """Return the factors of α and β: as near to 1 as the rows allow.

    The rows are known to `NOISE`, and the tuner's constants to `PRIOR`: a few rows of one size correct both a little.
    """
    rows = np.vstack([columns / seconds[:, None] / NOISE, np.eye(2) / PRIOR])
    return solve(
        rows, np.ones(len(rows)), np.concatenate([np.full(len(seconds), 1 / NOISE), np.full(2, 1 / PRIOR)])
    )
