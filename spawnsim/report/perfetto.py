"""Runs as Chrome/Perfetto JSON: a thread per rank, its calls as slices, messages as arrows from send to arrival.

The format is the Trace Event Format: a list of objects with `ph` (X slice, i instant, s and f the ends of an arrow, M
names), and `ts` and `dur` in microseconds of the ranks' clocks. An arrow belongs to the slice that began last before
it on its thread, so entries are ordered by time and by each rank's program. Arrows have numeric ids, since Perfetto
accepts only hexadecimal texts.

A traced run (`spawnsim run --trace`) shows all calls and messages, within the iterations of its rows. Any other run
shows only its iterations: computing and the rest. Open the file at ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

import gzip
import json
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spawnsim.plots.experiments import Recorded, donors_of, grouped, is_real, ranks_of
from spawnsim.record.recorder import document
from spawnsim.report.trace_reader import Row, Selection, Timeline, fitting
from spawnsim.run.result import end_s

Entry = dict[str, Any]
LARGE = 20_000  # entries, some 4 MB: a larger file is compressed unless its name says otherwise
LAST = math.inf  # the order of entries without a call, among entries that begin at one time
ALL = Selection()
OWN_OF_ROWS = ("rank", "order", "time_s", "call", "number", "end_s", "task")
PACKED = ".gz"
THREADS = 64  # threads of a rank, at most; no process may have a thread's number: viewers would show it first


class Line(NamedTuple):
    """One entry as text; sorting lines gives their order in the file. `call` is the number of their call."""

    at_ns: int
    call: float
    part: int  # of the call: 0 for the call itself, then the entries within it
    text: str


class Span(NamedTuple):
    """The place and time of a slice."""

    thread: int
    begin_ns: int
    end_ns: int
    number: float


NAMES = 2  # lines of a sheet that only name its run


@dataclass
class Drawing:
    """The contents of a file: `lines`, a description for the file (`about`), and notes for the user (`notes`).

    `is_empty`: the lines only name runs.
    """

    lines: list[Line] = field(default_factory=list)
    is_empty: bool = True
    about: list[Entry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def draw(runs: Sequence[tuple[Recorded, Timeline | None]], selection: Selection = ALL) -> Drawing:
    """Return runs as one drawing: each run is a process. The runs share the limit of the selection."""
    drawing, timelines = Drawing(), {id(run): timeline for run, timeline in runs}
    chosen = grouped([run for run, _ in runs]).named
    for process, (name, run) in enumerate(chosen):
        timeline = timelines[id(run)]
        # Each run has an equal share of the limit: from a common pool, a long run would leave nothing for the other
        # runs.
        shown, left_out = fitting(run, timeline, selection, max(1, selection.limit // len(chosen)))
        sheet = _Sheet(run, process, shown, timeline)
        sheet.draw(name)
        drawing.lines += sheet.lines
        drawing.is_empty = drawing.is_empty and not sheet.lines[NAMES:]
        drawing.about.append(_about(run, name, left_out))
        drawing.notes += [f"{name}: {note}" for note in _notes(sheet, left_out, selection.limit)]
    # Sorted last, over all runs: viewers assign an arrow to the slice that precedes it in the file.
    drawing.lines.sort()
    return drawing


def _about(run: Recorded, name: str, left_out: str) -> Entry:
    made, versions = run.what.get("made") or {}, run.what.get("versions") or {}
    about = {"run": name, "outcome": run.outcome.partition("\n")[0], "seed": run.what.get("seed")}
    about |= {"command": made.get("command"), "date": made.get("date"), "spawnsim": versions.get("spawnsim")}
    return about | {"shown": f"only {left_out}" if left_out else "all recorded data"}


def _notes(sheet: _Sheet, left_out: str, limit: int) -> Iterator[str]:
    """Yield a sentence about each kind of missing data."""
    if not sheet.lines[NAMES:]:
        yield "these ranks recorded nothing in this time"
    if left_out:
        yield f"only {left_out}: at most {limit:,} entries; select with --ranks, --from, --until, --limit"
    if sheet.timeline is None:
        if not is_real(sheet.run):
            yield "no calls and messages: the run was recorded without --trace"
        return
    shown = [event for event in sheet.timeline.events if sheet.shown.shows(event["rank"])]
    full = [event for event in shown if event["kind"] == "full"]
    if full:
        first = min(full, key=lambda event: (event["time_s"], event["rank"]))
        yield (
            f"{len(full):,} ranks were traced only in the first part of the run, rank {first['rank']} until "
            f"{first['time_s']:.6g} s: with fewer ranks, the trace covers more time"
        )


# ------------------------------------------------------------------------------------------------------------- a run
class _Sheet:
    """The lines of one run: a process."""

    def __init__(self, run: Recorded, process: int, shown: Selection, timeline: Timeline | None) -> None:
        self.run, self.shown, self.timeline = run, shown, timeline
        # Process numbers are far apart, so that no thread of any run has its process's number.
        self.process = process * THREADS * ranks_of(run)
        self.lines: list[Line] = []
        self._ranks = ranks_of(run)
        self._end_ns = _ns(end_s(run.totals) or 0.0)
        self._arrows = 0
        self._paused_ns: defaultdict[int, int] = defaultdict(int)  # end of the last pause, by rank
        self._threads: dict[int, str] = {}

    def draw(self, name: str) -> None:
        """Draw everything in the selection."""
        if self.timeline is None:
            self._blocks()
        else:
            self._calls(self.timeline)
        for number, event in enumerate(self.run.events):
            if self.shown.shows(event["rank"]) and self.shown.overlaps(event["time_s"], event["time_s"]):
                self._event(event, number)
        self._name("process_name", 0, {"name": name})
        self._name("process_labels", 0, {"labels": self.run.outcome.partition("\n")[0]})
        # By rank, then task: viewers would otherwise sort threads by appearance, or by name, with rank 10 before
        # rank 2.
        for place, thread in enumerate(sorted(self._threads, key=lambda each: (each % self._ranks, each))):
            self._name("thread_name", thread, {"name": self._threads[thread]})
            self._name("thread_sort_index", thread, {"sort_index": place})

    # -- entries -----------------------------------------------------------------------------------------------

    def _name(self, what: str, thread: int, arguments: Entry) -> None:
        entry = {"name": what, "ph": "M", "pid": self.process, "tid": thread, "args": arguments}
        self.lines.append(Line(-1, self.process, len(self.lines), json.dumps(entry)))

    def _add(self, at_ns: int, thread: int, place: tuple[float, int], entry: Entry) -> None:
        # From whole nanoseconds: with sums of floats, a slice might end after the next one begins, and viewers would
        # draw the next one inside it.
        whole = entry | {"pid": self.process, "tid": thread, "ts": at_ns / 1000}
        self.lines.append(Line(at_ns, *place, json.dumps(whole, allow_nan=False)))
        if thread not in self._threads:
            task, rank = divmod(thread, self._ranks)
            self._threads[thread] = f"rank {rank}" + (f", background {task}" if task else "")

    def _slice(self, span: Span, name: str, kind: str, arguments: Entry) -> None:
        lasts_us = (span.end_ns - span.begin_ns) / 1000
        entry = {"name": name, "cat": kind, "ph": "X", "dur": lasts_us, "args": arguments}
        self._add(span.begin_ns, span.thread, (span.number, 0), entry)

    def _arrow(self, begin: tuple[int, Span], end: tuple[int, Span], name: str, arguments: Entry) -> None:
        """Draw an arrow between times within two slices; without a length it has no direction, and is not drawn."""
        (sent_ns, out), (got_ns, into) = begin, end
        if got_ns > sent_ns:
            self._arrows += 1
            # Numbers are unique over all runs of a file: viewers join arrows with the same number, whatever their
            # process.
            entry = {"name": name, "cat": name, "id": self.process << 40 | self._arrows, "args": arguments}
            self._add(sent_ns, out.thread, (out.number, 1), entry | {"ph": "s"})
            self._add(got_ns, into.thread, (into.number, 1), entry | {"ph": "f", "bp": "e"})

    def _event(self, event: Mapping[str, Any], number: int) -> None:
        """Draw an event; for a replacement without messages, also arrows from donors that last as its wait did."""
        rank, at_ns = int(event["rank"]), _ns(float(event["time_s"]))
        fields = {key: value for key, value in event.items() if key not in ("kind", "rank", "time_s")}
        kind = str(event["kind"])
        entry = {"name": kind, "cat": kind, "ph": "i", "s": "t", "args": document(fields)}
        self._add(at_ns, rank, (LAST, 2 * number), entry)
        waited = event.get("wait_s")
        waited_ns = _ns(waited) if isinstance(waited, float) and waited > 0 else 0
        for donor in donors_of(event, self._ranks) if self.timeline is None else ():
            if self.shown.shows(donor):
                sent_ns = max(0, at_ns - max(waited_ns, 1000))
                ends = (Span(thread, 0, 0, LAST) for thread in (donor, rank))
                self._arrow((sent_ns, next(ends)), (at_ns, next(ends)), "weights", {})

    # -- of rows -----------------------------------------------------------------------------------------------

    def _rows(self) -> Iterator[tuple[int, int, Span]]:
        """Yield each row's index, rank, and the span of the iteration that the row ends."""
        table = self.run.table
        before: defaultdict[int, int] = defaultdict(int)
        restarts = {
            event["rank"]: _ns(event["time_s"]) for event in self.run.events if event["kind"] == "restart"
        }
        for row, (rank, time_s) in enumerate(
            zip(table["rank"].tolist(), table["time_s"].tolist(), strict=True)
        ):
            if self.shown.shows(rank):
                end_ns, begin_ns = _ns(time_s), before[rank]
                # The time for which the rank was dead is not part of its first iteration.
                if begin_ns < restarts.get(rank, -1) <= end_ns:
                    begin_ns = restarts[rank]
                before[rank] = end_ns
                if self.shown.overlaps(begin_ns / 1e9, time_s) and begin_ns <= end_ns:
                    yield row, rank, Span(rank, begin_ns, end_ns, row)

    def _blocks(self) -> None:
        """Draw the iteration that each row ends: computing comes first (`compute_s`), the rest is exchange."""
        compute_s, iteration = (_numbers(self.run, name) for name in ("compute_s", "iteration"))
        for row, _, span in self._rows():
            arguments = _iteration(iteration, row)
            if compute_s is None or not np.isfinite(compute_s[row]):
                self._slice(span, "iteration", "iteration", arguments)
                continue
            # Recorded seconds are rounded, and may exceed the iteration by a nanosecond.
            middle_ns = min(span.begin_ns + _ns(float(compute_s[row])), span.end_ns)
            self._slice(span._replace(end_ns=middle_ns), "compute", "compute", arguments)
            if span.end_ns > middle_ns:
                self._slice(span._replace(begin_ns=middle_ns), "exchange", "exchange", arguments)

    # -- of a timeline -----------------------------------------------------------------------------------------

    def _calls(self, timeline: Timeline) -> None:
        """Draw calls, and the slices around and in them: iterations, messages, pauses."""
        spans: dict[tuple[int, int], Span] = {}
        messages: list[Row] = []
        for row in timeline.rows(self.shown):
            # Messages wait until all calls are known: a message's row may precede the row of the call that received
            # it.
            if "call" not in row:
                messages.append(row)
                continue
            span = spans[row["rank"], row["number"]] = self._span(row)
            facts = {name: value for name, value in row.items() if name not in OWN_OF_ROWS}
            self._slice(span, row["call"], _kind(row), facts)
        for row in messages:
            self._message(row, spans.get((row["source"], row["out"])), spans.get((row["rank"], row["into"])))
        programs: defaultdict[int, list[Span]] = defaultdict(list)
        for (rank, _), span in spans.items():
            if span.thread == rank:  # not a background task
                programs[rank].append(span)
        for found in programs.values():
            found.sort(key=lambda span: span.number)
        self._iterations(programs)
        for event in sorted(timeline.events, key=lambda event: float(event["time_s"])):
            self._own_event(event, programs[event["rank"]])

    def _span(self, row: Row) -> Span:
        begin_ns = _ns(row["time_s"])
        # A call that never returned lasts to the end of the run.
        end_ns = _ns(row["end_s"]) if math.isfinite(row["end_s"]) else self._end_ns
        return Span(
            row["rank"] + self._ranks * row.get("task", 0), begin_ns, max(begin_ns, end_ns), row["number"]
        )

    def _message(self, row: Row, out: Span | None, into: Span | None) -> None:
        """Draw a message whose send and receive are shown: from its send to its arrival, within the receiving call."""
        if out is not None and into is not None:
            # Kept within the slices: viewers would assign an arrow that ends outside to another call.
            begin = min(max(_ns(row["sent_s"]), out.begin_ns), out.end_ns)
            end = min(max(_ns(row["arrival_s"]), into.begin_ns), into.end_ns)
            facts = {name: row[name] for name in ("bytes", "tag", "sent_s", "arrival_s")}
            self._arrow((begin, out), (end, into), "message", facts)

    def _iterations(self, programs: Mapping[int, Sequence[Span]]) -> None:
        """Draw the iterations of the rows around their calls, unless a row was recorded during a call."""
        iteration, begins_ns = _numbers(self.run, "iteration"), {}
        for rank, calls in programs.items():
            begins_ns[rank] = [call.begin_ns for call in calls]
        open_ns: dict[int, int] = {}
        for row, rank, span in self._rows():
            calls, begins = programs.get(rank, ()), begins_ns.get(rank, [])
            begin_ns = open_ns.pop(rank, span.begin_ns)
            after = bisect_left(begins, span.end_ns)
            if after and calls[after - 1].end_ns > span.end_ns:
                open_ns[rank] = begin_ns  # a background task recorded the row
                continue
            first = bisect_left(begins, begin_ns)
            # Just before its first call, so that the iteration is the outermost of the slices from here.
            number = calls[first].number - 0.5 if first < len(calls) else LAST
            around = Span(rank, begin_ns, span.end_ns, number)
            self._slice(around, "iteration", "iteration", _iteration(iteration, row))

    def _own_event(self, event: Mapping[str, Any], calls: Sequence[Span]) -> None:
        """Draw a pause within the call during which it occurs, after earlier pauses; draw other events as instants."""
        rank, at_ns, kind = event["rank"], _ns(event["time_s"]), event["kind"]
        shown = self.shown.shows(rank) and self.shown.overlaps(event["time_s"], event["time_s"])
        if kind == "full" or not shown:
            return
        fields = {name: value for name, value in event.items() if name not in ("kind", "rank", "time_s")}
        around = next((call for call in calls if call.begin_ns <= at_ns < call.end_ns), None)
        if kind != "pause" or around is None:
            entry = {"name": kind, "cat": kind, "ph": "i", "s": "t", "args": fields}
            self._add(at_ns, rank, (LAST, 1), entry)
            return
        begin_ns = max(at_ns, self._paused_ns[rank])
        end_ns = min(at_ns + _ns(fields["seconds"]), around.end_ns)
        # Planned pauses may overlap; each nanosecond is drawn once.
        if begin_ns < end_ns:
            self._slice(Span(rank, begin_ns, end_ns, around.number + 0.25), "paused", "fault", fields)
            self._paused_ns[rank] = end_ns


def _ns(time_s: float) -> int:
    return round(time_s * 1e9)


def _kind(row: Row) -> str:
    if row["call"] in ("compute", "sleep"):
        return str(row["call"])
    return "collective" if "collective" in row else "call"


def _numbers(run: Recorded, name: str) -> NDArray[Any] | None:
    """Return a column of numbers, or None if the run has no such column."""
    found = run.table.get(name)
    return found if found is not None and found.dtype.kind in "biuf" else None


def _iteration(iteration: NDArray[Any] | None, row: int) -> Entry:
    return {} if iteration is None or not np.isfinite(iteration[row]) else {"iteration": int(iteration[row])}


# -------------------------------------------------------------------------------------------------------------- files
def default_path(drawing: Drawing, folder: Path) -> Path:
    """Return trace.json in a folder, or trace.json.gz for a large drawing."""
    return folder / ("trace.json" if len(drawing.lines) <= LARGE else f"trace.json{PACKED}")


def write(drawing: Drawing, path: Path) -> Path:
    """Write a drawing, compressed if the name ends in `.gz`; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    about = json.dumps({"runs": document(drawing.about)}, allow_nan=False)
    with path.open("wb") as plain:
        packed = path.suffix == PACKED
        file = gzip.GzipFile("", "wb", compresslevel=6, fileobj=plain, mtime=0) if packed else plain
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {about}, "traceEvents": ['.encode())
        separator = "\n"
        # Line by line: one text would take the size of the file again in memory.
        for line in drawing.lines:
            file.write(f"{separator}{line.text}".encode())
            separator = ",\n"
        file.write(b"\n]}\n")
        if file is not plain:
            file.close()
    return path
