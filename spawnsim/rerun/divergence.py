"""Whether a run repeats; and if not, the first event that differs: its rank, time, call and line.

The run is repeated in two processes with different hash seeds for strings. If digests differ, each rank's events are
kept with the line of the program that caused them, and the earliest difference is reported.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from spawnsim.errors import WorldError
from spawnsim.record import Recorder
from spawnsim.record.manifest import versions
from spawnsim.rerun.again import Again
from spawnsim.virtual.digest import Entry, RankDigest, checksum
from spawnsim.virtual.engine import diagnosis
from spawnsim.virtual.engine.kernel import current_task
from spawnsim.virtual.engine.world import World

HASH_SEEDS = ("0", "1")  # of the two processes; the command line fixes the first
KEPT = 2_000_000  # total number of events whose lines are kept
_bits: Any = np.random.bit_generator  # its stub lacks the source of seeds

HASHING = (
    "likely: the order of a set, or hash() of a text, which differ with PYTHONHASHSEED: sort sets before iterating "
    "(`spawnsim run` fixes it, other programs do not)"
)
KINDS = {
    1: "send", 2: "collective", 3: "receive", 4: "compute", 5: "sleep", 6: "access", 8: "crash", 9: "restart",
    10: "fault",
}  # fmt: skip

Logged = tuple[float, str, str]
"""Time, description, and line."""


@dataclass(frozen=True)
class Verdict:
    """The comparison of a run with its repetitions.

    Attributes:
        repeats: whether all digests are equal.
        text: the report for the user.
        rank: rank of the first event that differs, or -1.
        time_s: its time, in virtual seconds.
        call: its call.
        line: its line of the program.
        hint: the likely reason.
    """

    repeats: bool
    text: str
    rank: int = -1
    time_s: float = 0.0
    call: str = ""
    line: str = ""
    hint: str = ""


def verify(folder: Path, file: Path | None = None) -> Verdict:
    """Repeat a folder's run twice, and compare.

    Args:
        folder: the run folder.
        file: the program, in place of the copy that the folder keeps.

    Returns:
        The comparison.

    Raises:
        ParameterError: the folder's run cannot be repeated.
        WorldError: a process that runs it has died.
    """
    again = Again.of(folder, file)
    recorded = again.recorded.totals.get("digest")
    first, second = (_elsewhere(again, seed) for seed in HASH_SEEDS)
    if recorded == first["digest"] == second["digest"]:
        return Verdict(True, f"the same digest three times: {recorded}")
    if first["digest"] == second["digest"]:
        return _other_world(again, first)
    third = _elsewhere(again, HASH_SEEDS[0])
    hashing = first["digest"] == third["digest"]
    found = _first_difference(first, second if hashing else third)
    hint = HASHING if hashing else _hint([*first["leaks"], *third["leaks"]])
    if found is None:
        return Verdict(False, f"digests differ, although no event of any rank differs; {hint}", hint=hint)
    rank, mine, theirs = found
    text = (
        f"the run does not repeat. First difference: rank {rank} at {mine[0]:.6g} s, {mine[1]} ({mine[2]}); "
        f"in the other run: {theirs[1]} at {theirs[0]:.6g} s ({theirs[2]})\n{hint}"
    )
    return Verdict(False, text, rank, mine[0], mine[1].partition(" ")[0], mine[2], hint)


def _hint(leaks: list[str]) -> str:
    found = list(dict.fromkeys(leaks))
    if found:
        return "likely: " + "; ".join(found)
    return (
        "no clock or system entropy was read, and no thread or unseeded generator was seen: look for "
        "addresses (id(), sorting by them, texts of objects), files, and libraries that draw numbers or read clocks"
    )


def _other_world(again: Again, now: Mapping[str, Any]) -> Verdict:
    """Return the verdict on a run that repeats here, but differs from the recorded run."""
    before, today = again.recorded.what.get("versions", {}), versions()
    changed = [
        f"{name} {old} → {new}" for name, new in today.items() if (old := before.get(name)) not in (None, new)
    ]
    reason = f"versions differ: {', '.join(changed)}" if changed else (
        "the program may read files that changed since, or the threads, the processor or libraries differ"
    )  # fmt: skip
    resumed = again.recorded.what.get("made", {}).get("resumed_at")
    if resumed:
        at = ", ".join(map(str, resumed))
        reason = (
            f"it was resumed at iteration {at}, perhaps with another program, ranks or parameters; {reason}"
        )
    differing = list(_differing(again.recorded.table, now["rows"]))
    text = f"the run repeats here, but not as it was recorded ({reason})"
    if not differing:
        return Verdict(False, text, hint=reason)
    time_s, rank, column = min(differing)
    text += f". First recorded value that differs: {column} of rank {rank} at {time_s:.6g} s"
    return Verdict(False, text, rank, time_s, "record", "", reason)


def _differing(table: Any, rows: list[list[Any]]) -> Iterator[tuple[float, int, str]]:
    """Yield time, rank and column of recorded values that differ from the repetition's rows."""
    names = [name for name in table if name not in ("rank", "time_s")]
    for at, (rank, time_s, values) in enumerate(rows):
        if at >= table.rows or int(table["rank"][at]) != rank:
            break
        for name in names:
            was = table[name][at].item()
            is_now = values.get(name, was)
            # A column holds NaN where a row has no number: a value that is missing, None or NaN in the repetition is
            # equal.
            if was != is_now and not (was != was and (is_now is None or is_now != is_now)):
                yield time_s, rank, name


def _first_difference(
    first: Mapping[str, Any], second: Mapping[str, Any]
) -> tuple[int, Logged, Logged] | None:
    """Return rank and events of the earliest difference between two logs."""
    found = []
    for rank, logs in enumerate(zip(first["log"], second["log"], strict=True)):
        for a, b in zip_longest(*logs):
            if a is None or b is None or a[:2] != b[:2]:
                time_s = min(each[0] for each in (a, b) if each is not None)
                nothing = (time_s, "nothing", "")
                found.append((time_s, rank, tuple(a or nothing), tuple(b or nothing)))
                break
    return min(found)[1:] if found else None


def _elsewhere(again: Again, hash_seed: str) -> dict[str, Any]:
    """Repeat the run in another process; return its digest, its leaks, and each rank's events."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "log.json"
        # Not by -m: this module, which its package imports, would be loaded twice.
        call = f"import sys; from {__name__} import main; main(*sys.argv[1:])"
        line = [sys.executable, "-c", call, str(again.folder), str(again.file), str(out)]
        done = subprocess.run(
            line, check=False, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
        )  # fmt: skip
        if done.returncode or not out.is_file():
            raise WorldError(
                f"the run ended with status {done.returncode} when it was repeated:\n{done.stderr[-2000:]}"
            )
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found


# ------------------------------------------------------------------------------------- in the process that runs it


class LoggedDigest(RankDigest):
    """A digest that also keeps each event with the line of the program that caused it."""

    __slots__ = ("left", "log")

    def __init__(self, rank: int, most: int) -> None:
        super().__init__(rank)
        self.log: list[Logged] = []
        self.left = most

    def note(self, entry: Entry) -> None:
        """Add one event."""
        super().note(entry)
        time_s, kind, peer, nbytes, tag = entry
        self.add(time_s, f"{KINDS.get(kind, 'event')} peer={peer} bytes={nbytes} tag={tag}")

    def cover(self, payload: Any) -> None:
        super().cover(payload)
        task = current_task()
        self.add(task.clock if task is not None else 0.0, f"contents {checksum(payload):08x}")

    def add(self, time_s: float, what: str) -> None:
        """Keep one event, if there is room."""
        if self.left > 0:
            self.left -= 1
            frame = sys._getframe(2)
            call = diagnosis.calling(frame)
            self.log.append((time_s, f"{call} {what}".strip(), diagnosis.place(frame) or "?"))


class LoggedRecorder(Recorder):
    """A recorder that adds rows to the events of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None

    def prepare(self, world: World) -> None:
        """Make all ranks of a world keep their events."""
        self.world = world
        for rank in world.ranks:
            rank.digest = LoggedDigest(rank.id, max(1, KEPT // len(world.ranks)))

    def row(self, rank: int, time_s: float, values: Mapping[str, Any]) -> None:
        super().row(rank, time_s, values)
        if self.world is not None:
            digest: Any = self.world.ranks[rank].digest
            digest.add(time_s, f"record {dict(values)!r}")


@contextmanager
def unseeded(found: list[str]) -> Iterator[None]:
    """Record draws of a program while it is loaded, before any rank runs: such generators belong to no rank."""
    states = random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[index]
    seed, randbits = random.Random.seed, _bits.randbits

    def noted(what: str) -> None:
        place = diagnosis.place(sys._getframe(2))
        if place and current_task() is None:
            found.append(f"{what} when the file was loaded, so no seed repeats it ({place})")

    def seeding(self: random.Random, a: Any = None, version: int = 2) -> None:
        if a is None:
            noted("a generator was created without a seed")
        seed(self, a, version)

    def drawing(bits: int) -> Any:
        noted("a generator was created without a seed")
        return randbits(bits)

    random.Random.seed = seeding  # type: ignore[method-assign]
    _bits.randbits = drawing
    try:
        yield
    finally:
        random.Random.seed, _bits.randbits = seed, randbits  # type: ignore[method-assign]
        now = random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[index]
        found += [
            f"{name}'s global generator was used when the file was loaded, outside of any rank"
            for name, before, after in zip(("random", "numpy.random"), states, now, strict=True)
            if before != after
        ]


def main(folder: str, file: str, out: str) -> None:
    """Run a folder's run once; write its digest, its leaks, its rows and its ranks' events to the file `out`."""
    from spawnsim.run.program import program

    again, recorder, leaks = Again.of(Path(folder), Path(file)), LoggedRecorder(), list[str]()
    if not again.is_whole:
        with unseeded(leaks):
            program(again.file, again.parameters)
    run = again.run(recorder, prepare=recorder.prepare, thinned=True)
    table = run.table
    names = [name for name in table if name not in ("rank", "time_s")]
    rows = [
        [int(table["rank"][at]), float(table["time_s"][at]), {name: table[name][at].item() for name in names}]
        for at in range(min(table.rows, KEPT))
    ]
    digests: list[Any] = [rank.digest for rank in recorder.world.ranks] if recorder.world is not None else []
    document = {
        "digest": run.totals.get("digest"), "leaks": [*leaks, *run.what.get("leaks", ())], "rows": rows,
        "log": [digest.log for digest in digests], "outcome": run.outcome,
    }  # fmt: skip
    Path(out).write_text(json.dumps(document), encoding="utf-8")
