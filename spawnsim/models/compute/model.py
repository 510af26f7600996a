"""The compute model of a run: how long each compute block of each rank takes.

    seconds = (stated duration | the model's own) × stragglers, drawn from (seed, rank, cause)

The model's own duration is fixed, or comes from a trace of recorded compute times: replay a run, and ask what if.
Models and stragglers are written as on the command line and in platform files (`FORMS`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spawnsim import units
from spawnsim.columns import read_columns, require_ranks
from spawnsim.errors import ParameterError
from spawnsim.models.compute.stragglers import (
    Bimodal,
    Constant,
    Exponential,
    FloatArray,
    Gamma,
    Lognormal,
    Markov,
    Pareto,
    Slow,
    SlowRank,
    Speed,
    Straggler,
    StreamKey,
    Stretch,
)
from spawnsim.options import nearest


@dataclass(frozen=True, eq=False)
class Trace:
    """Durations of compute blocks in seconds: one row per rank, one entry per block, rows of any length.

    A recording contains each block's duration, which replaces the program's statement. Without `cycle`, a rank that
    computes more blocks than were recorded raises ParameterError. Without `resample`, so does a rank beyond the
    recorded ones; with it, that rank replays the row of a random rank, starting at a random block and wrapping around.
    """

    rows: Sequence[ArrayLike]
    cycle: bool = False
    resample: bool = False
    source: str = "trace"

    def __post_init__(self) -> None:
        rows = tuple(np.asarray(row, dtype=np.float64) for row in self.rows)
        if not rows:
            raise ParameterError(f"{self.source}: a trace of no ranks: give one row of durations per rank")
        for rank, row in enumerate(rows):
            self._check(rank, row)
        object.__setattr__(self, "rows", rows)

    def _check(self, rank: int, row: FloatArray) -> None:
        if row.ndim != 1 or row.size == 0:
            raise ParameterError(
                f"{self.source}: rank {rank} has shape {row.shape}: give at least one duration"
            )
        bad = np.flatnonzero(~(np.isfinite(row) & (row >= 0.0)))
        if bad.size:
            block, value = int(bad[0]), float(row[bad[0]])
            raise ParameterError(f"{self.source}: rank {rank}, block {block}: {value} s is not a duration")

    @classmethod
    def of_run(cls, folder: str | Path, *, cycle: bool = False, resample: bool = False) -> Trace:
        """Return the compute times of a recorded run: column `compute_s` of its `metrics.npz`, rank by rank."""
        path = Path(folder) / "metrics.npz"
        ranks, durations_s = _columns(path)
        order = np.argsort(ranks, kind="stable")
        order = order[np.isfinite(durations_s[order])]
        found, begins = np.unique(ranks[order], return_index=True)
        lacking = np.flatnonzero(found != np.arange(len(found)))
        if len(lacking) or len(found) <= ranks.max(initial=-1):
            rank = int(lacking[0]) if len(lacking) else len(found)
            raise ParameterError(
                f"{path}: no duration of rank {rank} was recorded, but durations of later ranks were"
            )
        rows = np.split(durations_s[order], begins[1:])
        return cls(rows, cycle=cycle, resample=resample, source=str(path))

    def without_slowest(self, count: int = 1) -> Trace:
        """Return the trace without the `count` ranks with the largest mean; the other ranks close the gap."""
        rows = self._rows()
        if not 0 <= count < len(rows):
            raise ParameterError(f"{self.source}: {len(rows)} ranks: cannot leave out {count}")
        by_mean = np.argsort([row.mean() for row in rows], kind="stable")
        kept = sorted(by_mean[: len(rows) - count])
        return replace(self, rows=tuple(rows[rank] for rank in kept))

    def _rows(self) -> tuple[FloatArray, ...]:
        return tuple(np.asarray(row, dtype=np.float64) for row in self.rows)

    def open(self, key: StreamKey) -> Iterator[float]:
        """Return the durations of one rank in order."""
        rows = self._rows()
        if key.rank < len(rows):
            return self._replay(key.rank, rows[key.rank])
        if not self.resample:
            raise ParameterError(
                f"{self.source} holds {len(rows)} ranks and the run has a rank {key.rank}: run at most {len(rows)} "
                "ranks, or resample (`resample=True`, `--compute RUN,resample`)"
            )
        stream = key.generator()
        row = rows[int(stream.integers(len(rows)))]
        return _round_and_round(np.roll(row, -int(stream.integers(row.size))))

    def _replay(self, rank: int, row: FloatArray) -> Iterator[float]:
        if self.cycle:
            yield from _round_and_round(row)
        yield from row.tolist()
        raise ParameterError(
            f"{self.source} holds {row.size} compute blocks of rank {rank}, which now computes one more: run fewer "
            "iterations, or start over (`cycle=True`, `--compute RUN,cycle`)"
        )

    def __str__(self) -> str:
        return self.source + ",cycle" * self.cycle + ",resample" * self.resample


def _round_and_round(row: FloatArray) -> Iterator[float]:
    durations_s = row.tolist()
    while True:
        yield from durations_s


def _columns(path: Path) -> tuple[NDArray[np.int64], FloatArray]:
    columns = read_columns(path, ("rank", "compute_s"))
    require_ranks(path, columns["rank"])
    if columns["compute_s"].dtype.kind not in "iuf":
        raise ParameterError(f"cannot read {path}: its column 'compute_s' holds no durations")
    return columns["rank"].astype(np.int64), columns["compute_s"].astype(np.float64)


MOST_BLOCKS = 10**8  # of a rank: an upper bound for the count in a checkpoint
Sampler = Callable[[float | None, float], float]
"""`sampler(stated_s, now_s) -> seconds`: the duration of a rank's next block; `stated_s` None: not stated."""


class Base(Protocol):
    """The source of durations before stragglers: an iterator of seconds for each rank."""

    def open(self, key: StreamKey) -> Iterator[float]: ...


@dataclass(frozen=True)
class Fixed:
    """Each block whose duration the program does not state takes `duration_s`. Zero is allowed if given explicitly."""

    duration_s: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.duration_s < math.inf:
            raise ParameterError(f"compute duration {self.duration_s} s: give a finite time of at least 0 s")

    def open(self, key: StreamKey) -> Iterator[float]:
        return repeat(self.duration_s)

    def __str__(self) -> str:
        return f"{self.duration_s:g}s"


@dataclass(frozen=True)
class ComputeModel:
    """A base, and the stragglers that stretch it.

    `base`: `Fixed` (unless the program states a duration), a `Trace` (whatever the program states), or None: then a
    block that states no duration is a ParameterError, never a silent zero. `stragglers` multiply; stragglers that
    follow the clock are applied last, to the final duration.
    """

    base: Base | None = None
    stragglers: tuple[Straggler, ...] = ()

    def open(self, seed: int, rank: int) -> Sampler:
        """Return the sampler of one rank, at the start of all its streams."""
        key = StreamKey(seed, rank, "compute.base")
        clocked = [straggler.follows_clock for straggler, _ in self.causes()]
        return Durations(self.base, key, tuple(self._open_stragglers(seed, rank)), clocked.count(True)).take

    def causes(self) -> Iterator[tuple[Straggler, str]]:
        """Yield each straggler, in the order of application to a block, with the purpose of its random streams."""
        # Streams are named by kind and number, not by position: adding another kind of straggler keeps all existing
        # draws, so two runs differ only by the addition and not by chance.
        seen: Counter[str] = Counter()
        for straggler in sorted(self.stragglers, key=lambda straggler: straggler.follows_clock):
            kind = type(straggler).__name__.lower()
            yield straggler, f"compute.{kind}.{seen[kind]}"
            seen[kind] += 1

    def _open_stragglers(self, seed: int, rank: int) -> Iterator[Stretch]:
        """Open each straggler with its own stream, even if one kind occurs twice."""
        return (straggler.open(StreamKey(seed, rank, purpose)) for straggler, purpose in self.causes())


class Durations:
    """The durations of one rank's blocks, in order."""

    __slots__ = ("_by_clock", "_own", "_rank", "_replays", "_stretches", "counts")

    def __init__(
        self, base: Base | None, key: StreamKey, stretches: tuple[Stretch, ...], by_clock: int = 0
    ) -> None:
        self._rank, self._stretches, self._replays = key.rank, stretches, isinstance(base, Trace)
        self._own = base.open(key) if base is not None else None
        # The number of stretches, at the end of the list, that depend on the clock and not on the block's number.
        self._by_clock = by_clock
        self.counts = (0, 0)  # blocks, and the blocks whose duration came from the base

    def skip(self, taken: int, from_base: int) -> None:
        """Skip `taken` blocks, of which `from_base` took their duration from the base."""
        blocks, own = self.counts
        if not (blocks <= taken <= MOST_BLOCKS and own <= from_base <= taken):
            raise ParameterError(
                f"rank {self._rank} has computed {blocks} blocks, and cannot continue after {taken}"
            )
        for _ in range(taken - blocks):
            for stretch in self._stretches[: len(self._stretches) - self._by_clock]:
                stretch(0.0, 0.0)
        for _ in range(from_base - own):
            self._next()
        self.counts = taken, from_base

    def take(self, stated_s: float | None, now_s: float) -> float:
        """Return the duration of the next block, which begins at `now_s`."""
        blocks, own = self.counts
        self.counts = blocks + 1, own + (stated_s is None or self._replays)
        if stated_s is None or self._replays:
            duration_s = self._next()
        elif 0.0 <= stated_s < math.inf:
            duration_s = stated_s
        else:
            raise ParameterError(
                f"rank {self._rank}: comm.compute({stated_s}): give a finite time of at least 0 s"
            )
        for stretch in self._stretches:
            duration_s = stretch(duration_s, now_s)
        return duration_s

    def _next(self) -> float:
        if self._own is None:
            raise ParameterError(
                f"rank {self._rank}: comm.compute() states no duration and the run has no compute model: write "
                'comm.compute(0.01), give the run one (compute="10 ms", --compute 10ms), or name a platform that has '
                "one"
            )
        return next(self._own)


_Form = tuple[str, Callable[..., Straggler], tuple[Callable[[str], float], ...]]

FORMS: tuple[_Form, ...] = (
    ("constant", Constant, ()),
    ("constant:FACTOR", Constant, (units.number,)),
    ("lognormal:SIGMA", Lognormal, (units.number,)),
    ("exponential:SHARE", Exponential, (units.number,)),
    ("pareto:TAIL", Pareto, (units.number,)),
    ("gamma:VARIATION", Gamma, (units.number,)),
    ("bimodal:SHARE,SLOWDOWN", Bimodal, (units.number, units.number)),
    ("speed:SIGMA", Speed, (units.number,)),
    ("slow:SHARE,SLOWDOWN", Slow, (units.number, units.number)),
    ("rank:RANK,SLOWDOWN", SlowRank, (units.whole, units.number)),
    ("markov:FAST,SLOW,SLOWDOWN", Markov, (units.seconds, units.seconds, units.number)),
)
"""Pattern, class and the readers of its parameters."""


def parse_stragglers(text: str | Straggler | Sequence[Straggler] | None) -> tuple[Straggler, ...]:
    """Return the stragglers that a text such as "lognormal:0.3+slow:0.02,5" names; objects pass through.

    Noise (lognormal, exponential, pareto, gamma) and `speed` have mean 1 and keep the mean step time. `bimodal`,
    `slow`, `rank` and `markov` add their slowdown to it.

    >>> [straggler.mean for straggler in parse_stragglers("lognormal:0.3+slow:0.02,5")]
    [1.0, 1.08]
    """
    if text is None or text == "":
        return ()
    if isinstance(text, Straggler):
        return (text,)
    if not isinstance(text, str):
        return tuple(text)
    return tuple(_straggler(part.strip(), text) for part in text.split("+"))


def _straggler(part: str, whole: str) -> Straggler:
    name, _, rest = part.partition(":")
    words = [word.strip() for word in rest.split(",")] if rest else []
    for pattern, build, readers in FORMS:
        if pattern.partition(":")[0] == name and len(readers) == len(words):
            try:
                return build(*(read(word) for read, word in zip(readers, words, strict=True)))
            except ValueError as error:  # includes ParameterError
                raise ParameterError(f"straggler {part!r}: {error}") from error
    where = f" in {whole!r}" if part != whole else ""
    own = [pattern for pattern, _, _ in FORMS if pattern.partition(":")[0] == name]
    if own:
        raise ParameterError(f"straggler {part!r}{where}: write {' or '.join(own)}")
    forms = [pattern for pattern, _, _ in FORMS]
    hint = nearest(name, (pattern.partition(":")[0] for pattern in forms))
    raise ParameterError(
        f"straggler {part!r}{where} is not of a known form{f'; {hint}' if hint else '.'} "
        f"Forms, joined by +: {', '.join(forms)}"
    )


def parse_base(text: str | float | Fixed | Trace) -> Fixed | Trace:
    """Return the base of a compute model: a duration ("10 ms", 0.01) or a recorded run.

    A run is its folder, then options: "runs/a,cycle,resample,without-slowest:1" (see `Trace`).
    """
    if isinstance(text, (Fixed, Trace)):
        return text
    if not isinstance(text, str):
        return Fixed(float(text))
    folder, *options = text.split(",")
    if Path(folder).is_dir():
        return _trace(folder, options)
    try:
        return Fixed(units.seconds(text))
    except ParameterError:
        raise ParameterError(
            f"compute {text!r}: write a number and one of {', '.join(units.SECONDS)}, such as '10 ms'; or a run folder "
            "that exists"
        ) from None


def _trace(folder: str, options: list[str]) -> Trace:
    leave_out = 0
    flags = {"cycle": False, "resample": False}
    for option in options:
        name, _, value = option.partition(":")
        if name == "without-slowest" and (value or "1").isdecimal():
            leave_out = int(value or "1")
        elif name in flags and not value:
            flags[name] = True
        else:
            raise ParameterError(f"compute option {option!r}: one of cycle, resample, without-slowest:N")
    return Trace.of_run(folder, **flags).without_slowest(leave_out)
