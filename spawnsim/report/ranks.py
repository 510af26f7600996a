"""The states of a run's ranks as a grid, curves over ranks, and the latest events, for the page.

The states of a run in progress come from `spawnsim.record.journal.RankStates`; the states of a finished run follow from
its outcome and events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from spawnsim.plots import series
from spawnsim.plots.experiments import Recorded, is_real, ranks_of
from spawnsim.plots.gallery import metrics_of
from spawnsim.record.journal import RankStates
from spawnsim.run.result import FINISHED, end_s

PER_ROW = 50  # cells: a row shows its first rank's number, so a rank is found by counting
MOST = 4_096  # cells of one grid
FRESH = 0.05  # share of the run's time: replacements in the last part are marked
EVENTS = 12  # the number of latest events in the list
ELEMENTS, LONGEST = 8, 160  # elements shown of a list in an event; letters shown of an event
WIDTH, HEIGHT, POINTS = 160.0, 36.0, 60  # of a curve: width and height in pixels, number of points

WORDS = ("starting", "computing", "waiting", "running", "finished", "not finished", "died", "given up")
"""The states and endings of a rank. Real ranks in an unknown state are "running": nothing reports it during a call."""


class Cell(NamedTuple):
    """One rank: `kind` is the class of its colour, `text` describes it, `fresh` marks a recent replacement."""

    kind: str
    text: str
    fresh: bool


class Ranks(NamedTuple):
    """The ranks of a run at a time: cells in `rows` (first rank, cells), ranks per state, and ranks without a cell."""

    clock: str
    rows: list[tuple[int, list[Cell]]]
    counts: list[tuple[str, str, int]]
    left_out: int
    fresh: int


def standing(run: Recorded, states: RankStates | None = None, most: int = MOST) -> Ranks:
    """Return the states of the ranks."""
    words = _ended(run) if states is None else states.ranks
    recorded_s = float(run.table["time_s"].max(initial=0.0))
    last_s = max(end_s(run.totals) or 0.0, recorded_s, 0.0 if states is None else states.time_s)
    replaced: dict[int, list[float]] = {}
    for event in run.events:
        if event.get("kind") == "replacement":
            replaced.setdefault(event["rank"], []).append(event["time_s"])
    known = _last_rows(run)
    cells = [
        _cell(rank, said, known.get(rank, ""), (replaced.get(rank, ()), last_s * (1 - FRESH)))
        for rank, said in enumerate(words[:most])
    ]
    counted = Counter(word for word, _ in words)
    return Ranks(
        f"{last_s:.4g} s{'' if is_real(run) else ' of virtual time'}",
        [(first, cells[first : first + PER_ROW]) for first in range(0, len(cells), PER_ROW)],
        [(word.replace(" ", "-"), word, counted[word]) for word in WORDS if counted[word]],
        max(0, len(words) - most),
        sum(times[-1] >= last_s * (1 - FRESH) for times in replaced.values()),
    )


def _cell(rank: int, said: tuple[str, str], row: str, replaced: tuple[Sequence[float], float]) -> Cell:
    word, more = said
    times, since_s = replaced
    often = f"replaced {len(times)} times, last at {times[-1]:.4g} s" if times else ""
    text = "; ".join(part for part in (f"rank {rank}: {word} {more}".rstrip(), row, often) if part)
    return Cell(word.replace(" ", "-"), text, bool(times) and times[-1] >= since_s)


def _ended(run: Recorded) -> list[tuple[str, str]]:
    """Return how each rank ended, according to the run's outcome and events."""
    found: list[tuple[str, str]] = [
        ("finished" if run.outcome == FINISHED else "not finished", "")
    ] * ranks_of(run)
    # By time, so that a rank that restarted after its death counts as living.
    for event in run.events:
        kind, at = event.get("kind"), f"at {event['time_s']:.6g} s"
        dead = event["dead"] if kind == "recovered" and isinstance(event.get("dead"), list) else []
        for rank in [event["rank"]] if kind == "crash" else dead:
            if rank < len(found):
                found[rank] = ("died", at)
        if kind == "restart":
            found[event["rank"]] = (
                "finished" if run.outcome == FINISHED else "not finished",
                f"restarted {at}",
            )
        elif kind in ("given_up", "not_joined"):
            found[event["rank"]] = ("given up", at)
    return found


def _last_rows(run: Recorded) -> dict[int, str]:
    """Return each rank's last record: the iteration, and the metrics of the figures."""
    names = [name for name in ("iteration", *metrics_of([run])) if name in run.table]
    members, reverse = np.unique(run.table["rank"][::-1], return_index=True)
    rows = len(run.table["rank"]) - 1 - reverse
    columns = {name: run.table[name][rows].tolist() for name in names}
    return {
        rank: ", ".join(f"{name} {_short(columns[name][place])}" for name in names)
        for place, rank in enumerate(members.tolist())
    }


def _short(value: Any) -> str:
    """Return a value as short text: a list shows a few elements, or the number of equal ones."""
    if not isinstance(value, (list, tuple)):
        return f"{value:.4g}" if isinstance(value, float) else str(value)
    texts = [_short(each) for each in value]
    if len(texts) > 2 and len({*texts}) == 1:
        return f"{len(texts)} × {texts[0]}"
    more = f" … ({len(texts)} in all)" if len(texts) > ELEMENTS else ""
    return f"[{', '.join(texts[:ELEMENTS])}{more}]"


class Progress(NamedTuple):
    """The progress of a run: iterations of the fastest and slowest rank, and of the whole program; 0: not known."""

    furthest: int
    slowest: int
    of: int

    @property
    def text(self) -> str:
        """The progress in words."""
        whole = f" of {self.of:,}" if self.of else ""
        slowest = f"; the slowest rank: {self.slowest:,}" if self.slowest < self.furthest else ""
        return f"iteration {self.furthest:,}{whole}{slowest}"


def progress(run: Recorded) -> Progress | None:
    """Return the progress of a run from its rows; None without a column `iteration`.

    The program's total is its parameter `iterations`.
    """
    if "iteration" not in run.table or run.table["iteration"].dtype.kind not in "iuf":
        return None
    _, reverse = np.unique(run.table["rank"][::-1], return_index=True)
    last = run.table["iteration"][len(run.table["rank"]) - 1 - reverse]
    known = last[np.isfinite(last)]
    given = run.what.get("parameters")
    wanted = given.get("iterations") if isinstance(given, Mapping) else None
    whole = wanted if isinstance(wanted, int) and not isinstance(wanted, bool) and wanted > 0 else 0
    return Progress(int(known.max()) + 1, int(known.min()) + 1, whole) if len(known) else None


class Curve(NamedTuple):
    """A metric over ranks as two paths of SVG: the median, and the band of the middle 80 %."""

    median: str
    band: str


def curve(run: Recorded, name: str) -> Curve | None:
    """Return a metric's curve over iterations, or over time if none were recorded; None for less than two points."""
    over = "iteration" if "iteration" in run.table else "time_s"
    if not np.isfinite(series.numbers(run.table, name)).any():
        return None
    grid = series.carried_forward(run.table, name, over, POINTS)
    low, middle, high = series.quantiles(grid, (series.BAND[0], 0.5, series.BAND[1]))
    known = np.isfinite(low) & np.isfinite(high)
    if known.sum() < 2:
        return None
    x, values = grid.x[known], (low[known], middle[known], high[known])
    least, most = float(values[0].min()), float(values[2].max())
    places = [(float(each) - float(x[0])) / (float(x[-1]) - float(x[0])) * WIDTH for each in x]
    heights = [
        [HEIGHT * (1 - (each - least) / ((most - least) or 1.0)) for each in line.tolist()] for line in values
    ]
    band = [*zip(places, heights[2], strict=True), *reversed([*zip(places, heights[0], strict=True)])]
    return Curve(_path(zip(places, heights[1], strict=True)), _path(band) + "Z")


def _path(points: Any) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def latest(events: Sequence[Mapping[str, Any]]) -> list[tuple[str, int, str, str]]:
    """Return the latest events, newest first: time, rank, kind, and their other fields."""
    rows = []
    for event in list(events)[: -EVENTS - 1 : -1]:
        more = {name: value for name, value in event.items() if name not in ("kind", "time_s", "rank")}
        text = ", ".join(f"{name} {_short(value)}" for name, value in more.items())
        text = text if len(text) <= LONGEST else f"{text[:LONGEST].rpartition(', ')[0] or text[:LONGEST]} …"
        rows.append((f"{event['time_s']:.6g}", event["rank"], event["kind"], text))
    return rows


def kinds(events: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of events of each kind, in a line."""
    return ", ".join(
        f"{count:,} {kind}" for kind, count in sorted(Counter(e["kind"] for e in events).items())
    )
