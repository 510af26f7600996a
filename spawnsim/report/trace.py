"""A run as Chrome/Perfetto JSON: one thread per rank, blocks for computing and exchange, arrows for replacements.

The format is the Trace Event Format: a list of objects with `ph` (X block, i instant, s and f the ends of an arrow,
M names), `ts` and `dur` in microseconds, here of the ranks' clocks. This room knows that format and a run's rows; it
must not know figures. Open the file at ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spawnsim.errors import ParameterError
from spawnsim.options import Parser
from spawnsim.plots.source import Groups, Recorded, donors_of, grouped, label, ranks_of, read
from spawnsim.record.folder import named, require_no_file_of_a_run
from spawnsim.record.plain import document

Entry = dict[str, Any]
DONORS_DRAWN = 4


def entries(run: Recorded, *, process: int = 0, ranks: int | None = None, name: str = "") -> Iterator[Entry]:
    """Yield the trace's entries for one run: names first, then blocks, then events and arrows.

    Args:
        run: a finished run.
        process: the number under which the run appears; several runs can share one file.
        ranks: show the first so many ranks only (None: all).
        name: what the run is called.
    """
    shown = ranks_of(run) if ranks is None else ranks
    yield _name("process_name", process, 0, name or label(run))
    for rank in sorted(rank for rank in _heard_of(run) if rank < shown):
        yield _name("thread_name", process, rank, f"rank {rank}")
        yield _meta("thread_sort_index", process, rank, {"sort_index": rank})
    yield from _blocks(run, process, shown)
    for number, event in enumerate(run.events):
        if int(event["rank"]) < shown:
            yield from _event(event, process, number, shown)


def _heard_of(run: Recorded) -> set[int]:
    """Return the ranks that have recorded anything or given weights."""
    donors = (donor for event in run.events for donor in donors_of(event, ranks_of(run)))
    recorded = map(int, np.unique(run.table["rank"]))
    return {*recorded, *(int(event["rank"]) for event in run.events), *donors}


def _meta(what: str, process: int, thread: int, arguments: Entry) -> Entry:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": arguments}


def _name(what: str, process: int, thread: int, name: str) -> Entry:
    return _meta(what, process, thread, {"name": name})


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _blocks(run: Recorded, process: int, shown: int) -> Iterator[Entry]:
    """A row stands at the end of its iteration: computing comes first (`compute_s`), the rest is exchange."""
    table = run.table
    compute_s, iteration = (_numbers(run, name) for name in ("compute_s", "iteration"))
    before_s: defaultdict[int, float] = defaultdict(float)
    for row in map(int, np.flatnonzero(table["rank"] < shown)):
        rank, end_s = int(table["rank"][row]), float(table["time_s"][row])
        begin_s, before_s[rank] = before_s[rank], end_s
        place: Entry = {"ph": "X", "pid": process, "tid": rank, "args": _arguments(iteration, row)}
        if compute_s is None or not np.isfinite(compute_s[row]):
            yield _block("iteration", begin_s, end_s) | place
            continue
        middle_s = min(begin_s + float(compute_s[row]), end_s)
        yield _block("compute", begin_s, middle_s) | place
        if end_s > middle_s:
            yield _block("exchange", middle_s, end_s) | place


def _numbers(run: Recorded, name: str) -> NDArray[Any] | None:
    """Return a column, or None if there is none, or one of texts."""
    found = run.table.get(name)
    return found if found is not None and found.dtype.kind in "biuf" else None


def _arguments(iteration: NDArray[Any] | None, row: int) -> Entry:
    return {} if iteration is None or not np.isfinite(iteration[row]) else {"iteration": int(iteration[row])}


def _block(name: str, begin_s: float, end_s: float) -> Entry:
    return {"name": name, "cat": name, "ts": _microseconds(begin_s), "dur": _microseconds(end_s - begin_s)}


def _event(event: Mapping[str, Any], process: int, number: int, shown: int) -> Iterator[Entry]:
    rank, at = int(event["rank"]), _microseconds(float(event["time_s"]))
    place = {"cat": str(event["kind"]), "pid": process, "ts": at}
    arguments = document(
        {key: value for key, value in event.items() if key not in ("kind", "rank", "time_s")}
    )
    yield {"name": str(event["kind"]), "ph": "i", "s": "t", "tid": rank, "args": arguments} | place
    for donor in donors_of(event, shown)[:DONORS_DRAWN]:
        arrow = {"name": "weights", "id": f"{process}.{number}.{donor}"} | place
        yield arrow | {"ph": "s", "tid": donor}
        yield arrow | {"ph": "f", "bp": "e", "tid": rank}


def write(runs: Sequence[Recorded] | Groups, path: str | Path, *, ranks: int | None = None) -> Path:
    """Write runs into one file, entry by entry: a thousand ranks fit without holding the text in memory."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        separator = "\n"
        for process, (name, run) in enumerate(grouped(runs).named):
            for entry in entries(run, process=process, ranks=ranks, name=name):
                file.write(separator + json.dumps(entry, allow_nan=False))
                separator = ",\n"
        file.write("\n]}\n")
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """`spawnsim trace RUN…`: write the runs named in `argv`; return the exit code."""
    parser = Parser(
        prog="spawnsim trace", description="Write runs as Chrome/Perfetto JSON: open it at ui.perfetto.dev."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder")
    parser.add_argument(
        "--ranks", type=int, default=None, metavar="N", help="the first N ranks only (default: all)"
    )
    parser.add_argument("--out", default="trace.json", help="the file (default: %(default)s)")
    args = parser.parse_args(argv)
    out = named(args.out)
    require_no_file_of_a_run(out)
    if args.ranks is not None and args.ranks < 1:
        raise ParameterError(f"--ranks {args.ranks}: show at least 1")
    path = write([read(folder) for folder in args.runs], out, ranks=args.ranks)
    sys.stdout.write(f"{path}\n")
    return 0
