"""A completed run: table, events, totals; in memory, and as a run folder."""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spawnsim.errors import ParameterError

if TYPE_CHECKING:
    from spawnsim.record import Event, Table

DASH = "–"
TOTALS = (
    "ranks", "iterations", "virtual_seconds", "wall_seconds", "events", "messages", "bytes", "replacements", "digest",
)  # fmt: skip
"""The entries of every run's `totals`; real ranks have `run_seconds` for `virtual_seconds`. None (a dash): unknown.

* `ranks`, `iterations`: ranks of the world; progress of the furthest rank.
* `virtual_seconds`, for real ranks `run_seconds`: the time on the ranks' clocks (`comm.clock`) when the last one ended;
  real clocks start when the ranks have met.
* `wall_seconds`: duration of the run on this machine; for real ranks it includes their meeting, but not loading Python.
* `events`: all actions of ranks: sends, receives, parts in collectives, accesses to windows, computed blocks, sleeps;
  on virtual ranks also births and deaths.
* `messages`, `bytes`: sent messages and their payload. A collective on virtual ranks counts the messages of its
  algorithm. A collective of a real library counts one message per rank, with the bytes that the rank contributes, since
  no library reports more (and without bytes for objects, such as `comm.allreduce(1)` over MPI). Windows: one message
  per access.
* `replacements`: events of this kind.
* `digest`: covers the trace with the contents of all messages, and all recorded rows and events; equal for equal seeds.
  It begins with "batched-" if training steps of many ranks were executed together (`spawnsim.TrainingStep`).
  Real ranks have no trace that repeats: their digest covers the rows without times (`time_s`, and every name that ends
  in `_s`), so it shows whether the results of two runs are equal bit for bit; None if nothing was recorded.
"""
SECONDS = ("virtual_seconds", "run_seconds")
LOSSES = ("deaths", "faults")
"""Further entries of `totals`, before the digest, if the run had any.

* `deaths`: deaths of ranks; for real ranks only observed ones (`spawnsim run`). A restarted rank may die twice.
* `faults`: other effects of a fault plan: messages that were lost, late, doubled or damaged; pauses, slow-downs and
  wrong clocks that began. Column programs do not count them.
"""
FAULTS = ("link", "pause", "slow", "skew")  # kinds of their events
FINISHED = "finished"
LEAST_COMPARED = 20  # replacements, for a majority to be significant
JUDGED = ("rank", "iteration", "local_metric")  # columns that show whether a replacement has improved a rank


@dataclass(frozen=True, repr=False)
class Run:
    """The results of one run.

    Attributes:
        what: description of the run: file, parameters, ranks, platform, seed, versions; "warnings": sentences, if any;
            "all_dead": True, if no virtual rank lived to the end of its program.
        table: numpy columns by name, one row per `comm.record`, ordered by rank; see `spawnsim.record.Table`.
        events: dicts with "kind", "time_s", "rank" and the event's own fields, by time.
        totals: the values named in `TOTALS` and, if there were any, in `LOSSES`; see there.
        outcome: "finished", "running", "interrupted", or the error's text.
    """

    what: Mapping[str, Any]
    table: Table
    events: Sequence[Event]
    totals: Mapping[str, Any]
    outcome: str = FINISHED

    @classmethod
    def load(cls, path: str | Path) -> Run:
        """Return the run of a folder; of a run that was killed, or still runs, the records that its ranks have
        written so far.

        For the latter, `what["processes"]` holds each rank's process id, which shows which one was killed.

        Args:
            path: the run folder.

        Returns:
            The run.

        Raises:
            ParameterError: the folder holds no run, or a file of it is damaged.
        """
        from spawnsim.record import folder, journal

        place = Path(path)
        manifest = folder.read_manifest(place)
        what, totals, outcome = manifest["what"], manifest["totals"], manifest["outcome"]
        # Shards next to a finished run were only partly removed: the run's own files are whole, and are read.
        if (place / journal.FOLDER).is_dir() and outcome != FINISHED:
            recorder, counted = journal.merge(place)
            what = what | {"processes": {rank: each.get("process") for rank, each in counted.items()}}
            table, events = recorder.table(), recorder.events()
            # A job that recorded its end has totals already; a killed job's totals are derived from its rows.
            clock = SECONDS[what.get("backend", "virtual") != "virtual"]
            known = {"ranks": what.get("ranks"), "plan": what.get("faults"), clock: None}
            totals = totals or totals_of(table, events, known)
        elif outcome == folder.RUNNING:
            raise ParameterError(
                f"{place}: the run has not ended yet, or was killed before it wrote its rows"
            )
        else:
            # The number of ranks bounds those in the rows: a damaged file must not make tables of a billion ranks.
            ranks = folder.most_ranks(manifest)
            table, events = folder.read_table(place, ranks), folder.read_events(place, ranks)
        return cls(what, table, events, totals, outcome)

    def save(self, path: str | Path) -> None:
        """Write the run folder: run.json, metrics.npz, events.jsonl.

        Args:
            path: the folder; it is made, and files of a run that it holds are replaced.

        Raises:
            StorageError: the files cannot be written, such as on a full disk.
        """
        from spawnsim import record

        manifest = {"what": self.what, "totals": self.totals, "outcome": self.outcome}
        record.write(Path(path), table=self.table, events=self.events, manifest=manifest)

    def __repr__(self) -> str:
        return f"Run({', '.join(self._facts())})"

    def _repr_html_(self) -> str:
        from html import escape  # needed here alone

        rows = "".join(
            f"<tr><th>{name}</th><td>{escape(shown(value))}</td></tr>"
            for name, value in shown_totals(self.totals, self.table.rows).items()
        )
        # Texts of a program are shown in notebooks, so all of them are escaped.
        return f"<p>{escape(', '.join(self._facts()))}</p><table>{rows}</table>{self.table._repr_html_()}"

    @property
    def is_real(self) -> bool:
        """Whether the run took place on real processes."""
        return bool(self.what.get("backend", "virtual") != "virtual")

    def _facts(self) -> list[str]:
        seconds = end_s(self.totals)
        return [
            str(self.what.get("file") or self.what.get("main")),
            f"{self.totals.get('ranks')} ranks",
            f"{self.table.rows:,} rows",
            f"{len(self.events):,} events",
            *([f"{seconds:.6g} {'' if self.is_real else 'virtual '}s"] if seconds is not None else []),
            self.outcome.partition("\n")[0],
        ]


def totals_of(table: Table, events: Sequence[Event], counted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the totals: the backend's counts, and those derived from the recorded rows and events.

    `counted["plan"]` says whether a fault plan was given, since a program may record events with the same names.
    """
    # Own values take precedence below: rows show the ranks' progress more exactly than a backend does.
    own: dict[str, Any] = {
        "iterations": iterations(table),
        "replacements": sum(event["kind"] == "replacement" for event in events),
    }
    if counted.get("plan"):
        kinds = Counter(event["kind"] for event in events)
        own |= {"deaths": kinds["crash"], "faults": sum(kinds[kind] for kind in FAULTS)}
    if counted.get("digest"):
        own["digest"] = whole_digest(str(counted["digest"]), table, events)
    return ordered(dict(counted) | own)


def ordered(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the totals among some values, in their order: all of `TOTALS`, and the nonzero ones of `LOSSES`."""
    lost = [name for name in LOSSES if found.get(name)]
    names = [*TOTALS[:-1], *lost, TOTALS[-1]]
    if SECONDS[1] in found:
        names[names.index(SECONDS[0])] = SECONDS[1]
    return {name: found.get(name) for name in names}


def shown_totals(totals: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return the totals that are shown: without rows, iterations and replacements are unknown."""
    unknown = () if rows else ("iterations", "replacements")
    return {name: value for name, value in ordered(totals).items() if name not in unknown}


def end_s(totals: Mapping[str, Any]) -> float | None:
    """Return the time on the ranks' clocks when the last one ended; None: unknown."""
    return next((totals[name] for name in SECONDS if totals.get(name) is not None), None)


def warned(what: Mapping[str, Any], table: Table, events: Sequence[Event]) -> dict[str, Any]:
    """Return the run's description, with `warnings_of` its rows and events among its "warnings", if there are any."""
    # Saving may happen twice, when an error is reported and when the block ends; each sentence must appear once.
    found = [*what.get("warnings", ()), *warnings_of(table, events)]
    return dict(what) | ({"warnings": [*dict.fromkeys(found)]} if found else {})


def warnings_of(table: Table, events: Sequence[Event]) -> list[str]:
    """Return the problems that a run's own rows and events show.

    These are events "warning", ranks that were started again and ended without the others, invalid donors, and
    misleading metrics.
    """
    texts = [str(event["text"]) for event in events if event["kind"] == "warning" and "text" in event]
    return [
        *dict.fromkeys(texts), *_never_joined(events), *_invalid_donors(events),
        *_misleading_metrics(table, events),
    ]  # fmt: skip


def warnings_of_runs(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return each kind of warning of several runs once, in the words of its first run, with the number of runs.

    Warnings that differ in their numbers alone, such as a rank or a time, are of one kind.
    """
    found: dict[str, dict[str, str]] = {}
    for name, what in runs.items():
        for sentence in what.get("warnings", ()):
            found.setdefault(_MORE.sub("", _NUMBER.sub("#", sentence)), {}).setdefault(name, sentence)
    return [
        f"{len(each)} of {len(runs)} runs, the first is {first}: {each[first]}"
        if len(runs) > 1
        else each[first]
        for each in found.values()
        for first in [next(iter(each))]
    ]


_NUMBER = re.compile(r"\d[\d,.]*(?:e[+-]?\d+)?")
_MORE = re.compile(r" \(and # more like it\)|; and # more\b")


def _never_joined(events: Sequence[Event]) -> list[str]:
    """Return a warning that names the first rank that ended without joining the others, and counts the rest."""
    found = [event for event in events if event["kind"] == "not_joined"]
    if not found:
        return []
    first, more = found[0], len(found) - 1
    why = str(first.get("error", "")).removeprefix(f"rank {first['rank']}: ")
    others = f"; and {more} more: events.jsonl lists them" if more else ""
    return [
        f"rank {first['rank']} restarted after its death, did not join the other ranks, and ended at "
        f"{first['time_s']:.6g} s: {why}{others}"
    ]


def recorded_donors(event: Mapping[str, Any]) -> Any:
    """Return the donors in an event: a list of ranks ("donors"), or the only one ("donor").

    A program's own events may hold any value there, which is returned unchanged; None: the event names no donors.
    """
    return [event["donor"]] if "donor" in event and "donors" not in event else event.get("donors")


def is_rank(value: object) -> bool:
    """Return whether a value may be the number of a rank; a bool is an int in Python."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _invalid_donors(events: Sequence[Event]) -> list[str]:
    """Return a warning that names the first replacement whose donors no figure can take, and counts the rest."""
    found = []
    for event in events:
        donors = recorded_donors(event) if event["kind"] == "replacement" else None
        if donors is not None and not (isinstance(donors, (list, tuple)) and all(map(is_rank, donors))):
            found.append(event)
    if not found:
        return []
    first, more = found[0], f"; and {len(found) - 1} more" * (len(found) > 1)
    name = "donors" if "donors" in first else "donor"
    return [
        f'event "replacement" of rank {first["rank"]} at {first["time_s"]:.6g} s: figures cannot read '
        f"{name}={repr(first[name])[:60]}; give a list of ranks, donors=[3, 17], or one, donor=3{more}"
    ]


def _misleading_metrics(table: Table, events: Sequence[Event]) -> list[str]:
    """Return a warning if most replaced ranks did worse by their own metric after the replacement.

    A rank is replaced since its metric is behind the other ranks' metrics. If all metrics measure the same, the
    donors' weights improve it; if a metric uses the rank's own data, they seldom do. Detected if rows hold the
    policy's `info`, and the iteration after a replacement has its own metric.
    """
    import numpy as np

    # Without a mode the better direction is unknown.
    judged = [
        event for event in events if event["kind"] == "replacement" and event.get("mode") in ("max", "min")
    ]
    known = all(name in table and table.dtype(name).kind in "if" for name in JUDGED[1:])
    # A majority of a few replacements is chance.
    if len(judged) < LEAST_COMPARED or not known:
        return []
    gains: dict[int, list[float]] = {}
    for number, gain in _gains(table, judged):
        gains.setdefault(number, []).append(gain)
    # A rank that was restarted may have an iteration twice: which of them the event means is unknown. An unchanged
    # metric proves nothing: it may be recorded less often than each iteration.
    clear = [found[0] for found in gains.values() if len(found) == 1 and np.isfinite(found[0]) and found[0]]
    compared, worse = len(clear), sum(gain < 0 for gain in clear)
    if compared < LEAST_COMPARED or worse <= compared / 2:
        return []
    return [
        f"after {worse} of {compared} replacements the replaced rank's local_metric was worse than before: do ranks "
        "measure it on the same data? A rank's loss on its own data shows how hard the data are, not how good the model"
    ]


def _gains(table: Table, judged: Sequence[Event]) -> Iterator[tuple[int, float]]:
    """Yield for each row at which a rank was replaced the event's number, and the gain of its next row's metric.

    NaN if the rank has no further row.
    """
    import numpy as np

    ordered = sorted(range(len(judged)), key=lambda number: judged[number]["rank"])
    ranks = [judged[number]["rank"] for number in ordered]
    # A piece's last row is handled with the next piece, in which its rank may continue; no row follows the very last
    # one.
    end = {"rank": np.array([-1]), "iteration": np.array([-1]), "local_metric": np.array([math.nan])}
    last: Mapping[str, Any] = {name: column[:0] for name, column in end.items()}
    for piece in chain(table.pieces(*JUDGED), [end]):
        rank, iteration, metric = (np.concatenate([last[name], piece[name]]) for name in JUDGED)
        last = {name: piece[name][-1:] for name in JUDGED}
        own = rank[:-1]
        most = own.max(initial=-1)
        for number in ordered[bisect_left(ranks, own.min(initial=most)) : bisect_right(ranks, most)]:
            event = judged[number]
            # Rows are ordered by rank, so a rank's rows are one stretch: a mask over all rows for each event was
            # quadratic.
            first, after = np.searchsorted(own, (event["rank"], event["rank"] + 1))
            for row in first + np.flatnonzero(iteration[first:after] == event["iteration"]):
                gain = float(metric[row + 1] - metric[row]) if rank[row + 1] == rank[row] else math.nan
                yield number, gain * (1 if event["mode"] == "max" else -1)


def whole_digest(trace: str, table: Table, events: Sequence[Event] = ()) -> str:
    """Return the digest of a run: it covers the trace, and all rows and events that its ranks recorded.

    The trace alone would not distinguish two runs that communicate alike and learn differently.
    """
    import hashlib  # loads OpenSSL, for which a launcher would wait
    import json

    whole = hashlib.blake2b(trace.encode() + table.digest(), digest_size=16)
    for event in events:
        whole.update(json.dumps(event).encode())
    # The prefix for the execution mode ("batched-") stays in front: such digests are equal only within that mode.
    mode, dash, _ = trace.rpartition("-")
    return mode + dash + whole.hexdigest()


def results_digest(table: Table) -> str | None:
    """Return the digest of all records apart from times, or None if nothing was recorded."""
    if not table.rows:
        return None
    # Times of real ranks never repeat, and would change every digest.
    return table.digest(times=False).hex()


def shown(value: Any) -> str:
    """Return a total as text for people: a dash if unknown."""
    if value is None:
        return DASH
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def iterations(table: Table) -> int:
    """Return the progress of the furthest rank: by the column `iteration` if there is one, else by its rows."""
    if not table.rows:
        return 0
    import numpy as np

    if "iteration" in table and table.dtype("iteration").kind in "if":
        found = (piece["iteration"] for piece in table.pieces("iteration"))
        # Rows may lack an iteration.
        return 1 + max(int(each[each == each].max(initial=-1)) for each in found)
    counts: Counter[int] = Counter()
    for piece in table.pieces("rank"):
        ranks, rows = np.unique(piece["rank"], return_counts=True)
        counts.update(dict(zip(ranks.tolist(), rows.tolist(), strict=True)))
    return max(counts.values())
