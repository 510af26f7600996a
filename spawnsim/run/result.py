"""A run, after it ran: table, events, totals; in memory, and as a run folder."""

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
"""What every run's `totals` holds; real ranks have `run_seconds` for `virtual_seconds`. None (a dash): not known.

* `ranks`, `iterations`: ranks of the world; how far the furthest came.
* `virtual_seconds`, of real ranks `run_seconds`: the time on the ranks' clocks (`comm.clock`) when the last one ended;
  real clocks begin when the ranks have met.
* `wall_seconds`: what the run took on this machine; of real ranks their meeting included, loading Python not.
* `events`: all that ranks did: sends, receives, parts in collectives, accesses to windows, computed blocks, sleeps; on
  virtual ranks also births and deaths.
* `messages`, `bytes`: sent, with their payload. Of a collective: on virtual ranks the messages that its algorithm is
  made of; of a real library's one message per rank, with the bytes that the rank contributes, since no library tells
  more (and without bytes for objects, such as `comm.allreduce(1)` over MPI). Windows: one message an access.
* `replacements`: events of this kind.
* `digest`: of the trace with the contents of all messages, and of all recorded rows and events; equal for equal seeds.
  It begins with "batched-" where training steps of many ranks were executed together (`spawnsim.TrainingStep`).
  Real ranks have no trace that repeats: there it is of the rows without times (`time_s`, and every name that ends in
  `_s`), so it tells whether two runs have come to equal results bit for bit; None if nothing was recorded.
"""
SECONDS = ("virtual_seconds", "run_seconds")
LOSSES = ("deaths", "faults")
"""What `totals` holds besides, before the digest, of a run that had any.

* `deaths`: of ranks; of real ones those that `spawnsim run` has seen. A rank that begins again may die twice.
* `faults`: what else a fault plan has done: messages that were lost, late, doubled or damaged; pauses, slow-downs and
  wrong clocks that began. Over columns they are not counted.
"""
FAULTS = ("link", "pause", "slow", "skew")  # kinds of their events
FINISHED = "finished"
LEAST_COMPARED = 20  # replacements, for a majority to say something
JUDGED = ("rank", "iteration", "local_metric")  # columns that tell whether a replacement has improved a rank


@dataclass(frozen=True, repr=False)
class Run:
    """What one run left behind.

    Attributes:
        what: what ran: file, parameters, ranks, platform, seed, versions; "warnings": sentences, if there are any;
            "all_dead": True, if no virtual rank lived to the end of its program.
        table: numpy columns by name, one row per `comm.record`, ordered by rank; see `spawnsim.record.Table`.
        events: dicts with "kind", "time_s", "rank" and the event's own fields, by time.
        totals: the values named in `TOTALS` and, where there were any, in `LOSSES`; see there.
        outcome: "finished", "running", "interrupted", or the error's text.
    """

    what: Mapping[str, Any]
    table: Table
    events: Sequence[Event]
    totals: Mapping[str, Any]
    outcome: str = FINISHED

    @classmethod
    def load(cls, path: str | Path) -> Run:
        """Return the run of a folder; of one that was killed, or still runs, what its ranks have written so far.

        Of the latter, `what["processes"]` holds each rank's process id, which tells which one was killed.

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
        # Shards beside a finished run are those whose removal was cut short: the run's own files are whole, and are
        # read.
        if (place / journal.FOLDER).is_dir() and outcome != FINISHED:
            recorder, counted = journal.merge(place)
            what = what | {"processes": {rank: each.get("process") for rank, each in counted.items()}}
            table, events = recorder.table(), recorder.events()
            # A job that told its end has totals already; of one that was killed they are what the rows tell.
            clock = SECONDS[what.get("backend", "virtual") != "virtual"]
            known = {"ranks": what.get("ranks"), "plan": what.get("faults"), clock: None}
            totals = totals or totals_of(table, events, known)
        elif outcome == folder.RUNNING:
            raise ParameterError(
                f"{place}: the run has not ended yet, or was killed before it could write its rows"
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
    """Return the totals: what the backend counted, and what the recorded rows and events add.

    `counted["plan"]` says whether a fault plan was given, since a program may have events of such names.
    """
    # Own values come first in the lookup below: rows tell more exactly than a backend how far the ranks came.
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
    """Return the totals among some values, in their order: all of `TOTALS`, and those of `LOSSES` that are not 0."""
    lost = [name for name in LOSSES if found.get(name)]
    names = [*TOTALS[:-1], *lost, TOTALS[-1]]
    if SECONDS[1] in found:
        names[names.index(SECONDS[0])] = SECONDS[1]
    return {name: found.get(name) for name in names}


def shown_totals(totals: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return the totals that are shown: without rows nothing is known of iterations and replacements."""
    unknown = () if rows else ("iterations", "replacements")
    return {name: value for name, value in ordered(totals).items() if name not in unknown}


def end_s(totals: Mapping[str, Any]) -> float | None:
    """Return the time on the ranks' clocks when the last one ended; None: not known."""
    return next((totals[name] for name in SECONDS if totals.get(name) is not None), None)


def warned(what: Mapping[str, Any], table: Table, events: Sequence[Event]) -> dict[str, Any]:
    """Return what ran, with `warnings_of` its rows and events among its "warnings", if there are any."""
    # Saving may happen twice, when an error is told and when the block ends; a sentence must not stand there twice.
    found = [*what.get("warnings", ()), *warnings_of(table, events)]
    return dict(what) | ({"warnings": [*dict.fromkeys(found)]} if found else {})


def warnings_of(table: Table, events: Sequence[Event]) -> list[str]:
    """Return what a run's own rows and events say against it.

    That is events "warning", ranks that were started again and ended without the others, donors that are no ranks, and
    metrics that mislead.
    """
    told = [str(event["text"]) for event in events if event["kind"] == "warning" and "text" in event]
    return [
        *dict.fromkeys(told), *_never_joined(events), *_donors_that_are_none(events),
        *_metrics_that_mislead(table, events),
    ]  # fmt: skip


def warnings_of_runs(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return each kind of warning of several runs once, as its first run words it, with the number of runs.

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
    """Return a warning that names the first rank which ended so, and counts the others."""
    found = [event for event in events if event["kind"] == "not_joined"]
    if not found:
        return []
    first, more = found[0], len(found) - 1
    why = str(first.get("error", "")).removeprefix(f"rank {first['rank']}: ")
    others = f"; and {more} more: events.jsonl names them" if more else ""
    return [
        f"rank {first['rank']} was started again after its death, did not join the others, and ended at "
        f"{first['time_s']:.6g} s: {why}{others}"
    ]


def donors_told(event: Mapping[str, Any]) -> Any:
    """Return what an event tells of its donors: a list of ranks ("donors"), or of the only one ("donor").

    A program may record events of its own with whatever else in them, which is returned as it is; None: nothing is.
    """
    return [event["donor"]] if "donor" in event and "donors" not in event else event.get("donors")


def is_rank(value: object) -> bool:
    """Say whether a value may be the number of a rank; a bool is an int in Python."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _donors_that_are_none(events: Sequence[Event]) -> list[str]:
    """Return a warning that names the first replacement whose donors no figure can take, and counts the others."""
    found = []
    for event in events:
        donors = donors_told(event) if event["kind"] == "replacement" else None
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


def _metrics_that_mislead(table: Table, events: Sequence[Event]) -> list[str]:
    """Return a warning where replaced ranks did worse by their own metric, mostly, than before.

    A rank is replaced since its metric is behind others'. If these measure the same, the donors' weights improve it; on
    a metric of the rank's own data they seldom do. Seen where rows hold the policy's `info`, and the iteration after a
    replacement has a metric of its own.
    """
    import numpy as np

    # Without a mode it is not known which way is better.
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
    # metric is no evidence: it may be recorded less often than each iteration.
    clear = [found[0] for found in gains.values() if len(found) == 1 and np.isfinite(found[0]) and found[0]]
    compared, worse = len(clear), sum(gain < 0 for gain in clear)
    if compared < LEAST_COMPARED or worse <= compared / 2:
        return []
    return [
        f"after {worse} of {compared} replacements the replaced rank's local_metric was worse than before: do ranks "
        "measure it on the same data? The loss on a rank's own data says how hard these are, not how good its model is"
    ]


def _gains(table: Table, judged: Sequence[Event]) -> Iterator[tuple[int, float]]:
    """Yield for each row at which a rank was replaced the event's number, and what its next row's metric has gained.

    NaN where the rank has no further row.
    """
    import numpy as np

    ordered = sorted(range(len(judged)), key=lambda number: judged[number]["rank"])
    ranks = [judged[number]["rank"] for number in ordered]
    # A piece's last row is looked at with the next one, in which its rank may go on; nothing follows the last of all.
    end = {"rank": np.array([-1]), "iteration": np.array([-1]), "local_metric": np.array([math.nan])}
    last: Mapping[str, Any] = {name: column[:0] for name, column in end.items()}
    for piece in chain(table.pieces(*JUDGED), [end]):
        rank, iteration, metric = (np.concatenate([last[name], piece[name]]) for name in JUDGED)
        last = {name: piece[name][-1:] for name in JUDGED}
        own = rank[:-1]
        most = own.max(initial=-1)
        for number in ordered[bisect_left(ranks, own.min(initial=most)) : bisect_right(ranks, most)]:
            event = judged[number]
            # Rows are ordered by rank, so a rank's are one stretch: a mask over all rows for each event was quadratic.
            first, after = np.searchsorted(own, (event["rank"], event["rank"] + 1))
            for row in first + np.flatnonzero(iteration[first:after] == event["iteration"]):
                gain = float(metric[row + 1] - metric[row]) if rank[row + 1] == rank[row] else math.nan
                yield number, gain * (1 if event["mode"] == "max" else -1)


def whole_digest(trace: str, table: Table, events: Sequence[Event] = ()) -> str:
    """Return the digest of a run: of its trace, and of all rows and events that its ranks recorded.

    The trace alone would not tell two runs apart that communicate alike and learn differently.
    """
    import hashlib  # loads OpenSSL, for which a launcher would wait
    import json

    whole = hashlib.blake2b(trace.encode() + table.digest(), digest_size=16)
    for event in events:
        whole.update(json.dumps(event).encode())
    # What names how the run was computed stays in front ("batched-"): such digests are equal only to their like.
    mode, dash, _ = trace.rpartition("-")
    return mode + dash + whole.hexdigest()


def results_digest(table: Table) -> str | None:
    """Return the digest of all that was recorded apart from times, or None if nothing was."""
    if not table.rows:
        return None
    # Times of real ranks never repeat, and would make every digest another.
    return table.digest(times=False).hex()


def shown(value: Any) -> str:
    """Return a total as people read it: a dash for what is not known."""
    if value is None:
        return DASH
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def iterations(table: Table) -> int:
    """Return how far the furthest rank came: by the column `iteration` if there is one, else by its rows."""
    if not table.rows:
        return 0
    import numpy as np

    if "iteration" in table and table.dtype("iteration").kind in "if":
        found = (piece["iteration"] for piece in table.pieces("iteration"))
        # Rows may lack it.
        return 1 + max(int(each[each == each].max(initial=-1)) for each in found)
    counts: Counter[int] = Counter()
    for piece in table.pieces("rank"):
        ranks, rows = np.unique(piece["rank"], return_counts=True)
        counts.update(dict(zip(ranks.tolist(), rows.tolist(), strict=True)))
    return max(counts.values())
