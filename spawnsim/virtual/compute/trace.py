"""Recorded compute times as a compute model: replay a run, and ask what if.

This room knows arrays of durations per rank and the columns `rank` and `compute_s` of a run folder. It must not know
how they were recorded, nor what a platform is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spawnsim.columns import read_columns, require_ranks
from spawnsim.errors import ParameterError
from spawnsim.virtual.compute.straggler import FloatArray, StreamKey


@dataclass(frozen=True, eq=False)
class Trace:
    """Durations of compute blocks in seconds: one row per rank, one entry per block, rows of any length.

    A recording knows how long each block took: it takes the place of what the program states. Without `cycle` a rank
    that computes more blocks than were recorded raises ParameterError. Without `resample` so does a rank beyond the
    recorded ones; with it, that rank replays the row of a random rank from a random block on, round and round.
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
            raise ParameterError(f"{self.source}: rank {rank}, block {block}: {value} s is no duration")

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
            raise ParameterError(f"{path}: of rank {rank} no duration was recorded, of later ones there are")
        rows = np.split(durations_s[order], begins[1:])
        return cls(rows, cycle=cycle, resample=resample, source=str(path))

    def without_slowest(self, count: int = 1) -> Trace:
        """Return the trace without the `count` ranks of the largest mean; the others close ranks."""
        rows = self._rows()
        if not 0 <= count < len(rows):
            raise ParameterError(f"{self.source}: {len(rows)} ranks, of which {count} cannot be left out")
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
