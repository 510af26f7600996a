"""What a run records, and its run folder: described when the run begins, written however the run ends.

For virtual ranks `RunWriter` does both. Real ranks write their own shards (`real`), and share the description.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spawnsim.errors import ParameterError, SpawnsimError, StorageError
from spawnsim.run import process_setup
from spawnsim.run.program import Program
from spawnsim.run.result import FINISHED, Run, totals_of, warned

if TYPE_CHECKING:
    from spawnsim.record import Journal, Recorder
    from spawnsim.record.manifest import Files

OnError = Callable[[BaseException], None]
FILES_OF = ("platform", "stragglers", "faults", "compute")  # circumstances that files may describe


def describe(
    task: Program, circumstances: Mapping[str, Any], *, backend: str, command: str | None = None
) -> tuple[dict[str, Any], Files]:
    """Return the "what" of run.json, and the files that the run depends on; for `command` see `manifest.made`."""
    from spawnsim.record import manifest

    named = manifest.program(task.main) | {"parameters": task.parameters, "backend": backend}
    return describe_named(named, manifest.path_of(task.main), circumstances, command)


def describe_named(
    named: Mapping[str, Any], file: Path | None, circumstances: Mapping[str, Any], command: str | None = None
) -> tuple[dict[str, Any], Files]:
    """Return the same as `describe`, given the program's names and parameters, and its file if it has one."""
    from spawnsim.record import manifest
    from spawnsim.record.recorder import document

    # Converted to JSON at the start: if the run changes an object, the description must show its initial state.
    what = {name: document(value) for name, value in {**named, **circumstances}.items()}
    inputs = manifest.inputs(file, **{name: circumstances.get(name) for name in FILES_OF})
    about = {"inputs": manifest.digests(inputs), "versions": manifest.versions()}
    about["made"] = manifest.made(command)
    return what | about, inputs


class RunWriter:
    """A `with` block around a run: provides its recorder, and writes the run folder when the block ends.

    During the run the recorder is a journal on disk: a process that is killed loses only the last half second.
    Without a folder everything stays in memory.
    """

    def __init__(
        self,
        what: Mapping[str, Any],
        out: Path | None,
        on_error: OnError | None = None,
        inputs: Files | None = None,
        *,
        trace: bool = False,
        resume: bool = False,
        thin: tuple[int, Any] = (1, None),
    ) -> None:
        from spawnsim.record import Journal, Recorder, folder, journal

        self._named = out  # in messages
        out = None if out is None else out.absolute()  # ranks may change their working directory
        self.what, self.out, self._inputs = dict(what), out, inputs or {}
        self.recorder: Recorder | Journal = Recorder()
        # These limit what the ranks record: see `sink`.
        self._thin, self._after_s = thin, dict[int, float]()
        self.trace: Journal | None = None  # the journal of the timeline
        self._on_error = on_error
        self.counted: Any = None  # a dataclass, once the simulator has counted
        self._run: Run | None = None
        self.saving: Any = self._saving(out, resume)
        if out is not None:
            # The folder says "running" before the first row. A run that is killed at once therefore differs from a
            # folder without a run.
            folder.prepare(out)
            self._hold = journal.Hold(out)
            try:
                self._after_s = begin_folder(out, self.what, self._inputs, resume=resume)
            except BaseException:
                self._hold.release()  # the error's traceback may keep this object
                raise
            # Not flushed at each event: all ranks share this process, so a crash loses half a second, but never the
            # order among ranks.
            self.recorder = Journal(journal.shard(out), prompt=False)
            if trace:
                self.trace = Journal(out / journal.FOLDER / journal.TRACE, prompt=False)

    @staticmethod
    def _saving(out: Path | None, resume: bool) -> Any:
        from spawnsim import checkpoints
        from spawnsim.virtual.cluster import Saving

        return Saving(out, resume and out is not None and bool(checkpoints.whole(out)))

    @property
    def sink(self) -> Any:
        """Where the ranks record: the recorder, or a filter that passes some rows on to it."""
        from spawnsim.record import Thinned

        if self._thin == (1, None) and not self._after_s:
            return self.recorder
        return Thinned(self.recorder, *self._thin, after_s=self._after_s)

    @property
    def run(self) -> Run:
        """The recorded run, once the block has ended."""
        if self._run is None:
            # Without a folder the block's end gathered nothing: the table is built only on request.
            self._run = self._gathered(FINISHED)
        return self._run

    def _gathered(self, outcome: str) -> Run:
        recorder = self._recorded()
        table, events = recorder.table(), recorder.events()
        counted = dataclasses.asdict(self.counted) if self.counted is not None else {}
        self.what |= reproducible(self.what, counted.get("leaks", ()))
        if found := [*counted.get("mistakes", ()), *recorder.mixed.values()]:
            self.what["warnings"] = [*self.what.get("warnings", ()), *found]
        if counted.get("all_dead"):
            self.what["all_dead"] = True
        # Only now, after the program, are its modules of computed names and its threads known.
        add_late(self.what, self._inputs, self.out)
        known = {"ranks": self.what.get("ranks"), "plan": self.what.get("faults")}
        totals = totals_of(table, events, known | counted)
        return Run(warned(self.what, table, events), table, events, totals, outcome)

    def _recorded(self) -> Recorder:
        from spawnsim.record import Recorder, merge

        if isinstance(self.recorder, Recorder):
            return self.recorder
        assert self.out is not None
        # Pending rows are only in this process. The shard is read back as a loader of a killed run would read it.
        self.recorder.flush()
        # The whole shard is replayed, since the journal keeps only unwritten rows in memory.
        return merge(self.out).recorder

    def report(self, error: BaseException) -> None:
        """Save the records, and pass the error on, before the ranks are ended: ending them may hang."""
        # An interruption, or a fault of spawnsim, is saved and reported once, when the block ends.
        if isinstance(error, SpawnsimError):
            self._save(error)
            if self.trace is not None:
                self.trace.flush()
            if self._on_error is not None:
                self._on_error(error)

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        # The journal is discarded last. Until the folder's own files are whole, the journal is the only copy of the
        # results, and `Run.load` reads it if the run was killed in between.
        try:
            self._end(error)
        finally:
            if self.out is not None:
                self._hold.release()

    def _end(self, error: BaseException | None) -> None:
        from spawnsim.record import Journal, folder, journal

        self._save(error)
        if self.out is not None and isinstance(self.recorder, Journal):
            # Closed after saving: if saving fails, rows must still be able to reach the journal.
            self.recorder.close()
            if self.trace is not None:
                # Closed before it is packed: the packed file would lack pending entries.
                self.trace.close()
                folder.keep_trace(self.out)
            journal.discard(self.out)

    def _save(self, error: BaseException | None) -> None:
        """Write the run's files next to the journal, which stays if they cannot be written."""
        from spawnsim import checkpoints
        from spawnsim.record import folder

        # A failed run has returned no counts; its error carries the counts up to the failure.
        if self.counted is None:
            self.counted = getattr(error, "totals", None)
        if self.out is None:
            return
        note = f"Recorded until then: {self._named}"
        nothing = f"Nothing was recorded until then; how the run ended: {self._named}"
        # The outcome also includes the notes, so our note is removed while the outcome is composed, and added again
        # below.
        for known in (note, nothing):
            if known in getattr(error, "__notes__", ()):  # a first call of `report` has added it
                error.__notes__.remove(known)  # type: ignore[union-attr]  # not part of the outcome
        try:
            with folder.failing_in_place(self.out):
                self._run = self._gathered(outcome_of(error))
                self._run.save(self.out)
        except StorageError as full:
            full.add_note(note)
            # A full disk hides the run's own error unless it is chained to it.
            raise full from error
        # Other exceptions keep their own text: the command line prints the note for these two alone.
        if isinstance(error, (SpawnsimError, KeyboardInterrupt)):
            kept = self._run.table.rows or self._run.events or self.trace or checkpoints.whole(self.out)
            error.add_note(note if kept else nothing)


def begin_folder(out: Path, what: dict[str, Any], inputs: Files, *, resume: bool) -> dict[int, float]:
    """Open a run folder, or continue in it from its newest checkpoint; return until when it holds each rank's rows."""
    import numpy as np

    from spawnsim import checkpoints
    from spawnsim.record import folder, journal

    if not (resume and checkpoints.whole(out)):
        folder.begin(out, what, inputs)
        return {}
    found = checkpoints.newest(out)
    clocks_s = checkpoints.clocks_s(found)
    journal.mend(out)
    old, warnings = _recorded_before(out)
    if old.what.get("seed") != what["seed"]:
        raise ParameterError(
            f"{out}: the run has seed {old.what.get('seed')}, and cannot continue with seed {what['seed']}"
        )
    of_rows = (int(piece["rank"].max()) for piece in old.table.pieces("rank"))
    most: int = 1 + max((*clocks_s, *of_rows, *(event["rank"] for event in old.events)))
    # A rank without a saved state had died by then, or existed only before the run was resumed with fewer ranks. Its
    # rows count until the clock of the rank whose state it would load. Rows of a rank that has joined since the
    # checkpoint do not count.
    saved = list(clocks_s)
    until_s = np.array([clocks_s.get(rank, clocks_s[saved[rank % len(saved)]]) for rank in range(most)])
    # Piece by piece, and read until the last piece is written: the recorded rows may exceed the memory.
    tables = (piece.where(piece["time_s"] < until_s[piece["rank"]]) for piece in old.table.pieces())
    events = [event for event in old.events if event["time_s"] < until_s[event["rank"]]]
    what["made"] = what["made"] | {
        "resumed_at": [*_resumed_at(old.what), found.iteration],
        "most_ranks": most,  # earlier rows may belong to ranks that this run no longer has
    }
    if edited := _edited(old.what, what):
        warnings.append(
            f"resumed at iteration {found.iteration} with another program than before: {', '.join(edited)} was "
            "edited since; the records until then are from the old program"
        )
    if warnings:
        what["warnings"] = warnings
    folder.begin_again(out, what, inputs, before=(tables, events))
    checkpoints.discard(out, after=found.iteration)
    return dict(enumerate(until_s.tolist()))


def _recorded_before(out: Path) -> tuple[Run, list[str]]:
    """Return a run folder's contents, and a sentence if rows or events are unreadable: a checkpoint needs none."""
    import numpy as np

    from spawnsim.record import folder
    from spawnsim.record.table import Table

    what = folder.read_manifest(out)["what"]
    try:
        return Run.load(out), []
    except ParameterError as error:
        nothing = Table({"rank": np.empty(0, np.int32), "time_s": np.empty(0)})
        return Run(what, nothing, [], {}), [f"all records from before the run was resumed are lost: {error}"]


def _edited(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the program's files that both descriptions name, with other contents."""
    old, new = (each.get("inputs") for each in (before, now))
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return []
    names = [name for name in new if name.startswith("program/") and name in old]
    return [name.removeprefix("program/") for name in names if old[name] != new[name]]


def _resumed_at(what: Mapping[str, Any]) -> list[int]:
    made = what.get("made")
    resumed = made.get("resumed_at") if isinstance(made, Mapping) else None
    return resumed if isinstance(resumed, list) else []


def reproducible(what: Mapping[str, Any], leaks: Sequence[str]) -> dict[str, Any]:
    """Return whether a run with the same seed would be equal, as far as spawnsim can detect, and the causes if not."""
    # A measured block takes as long as the machine took, so a second run of the same seed has other clocks.
    measured = str(what.get("compute")).startswith("measured")
    found = [*(["computing was measured"] if measured else []), *leaks]
    return {"reproducible": not found, "leaks": found}


def add_late(what: dict[str, Any], inputs: Files, out: Path | None) -> None:
    """Add facts known only after the program has run: modules that it imported by computed names, its threads."""
    from spawnsim.record import manifest

    file = inputs.get(f"program/{what.get('file')}")
    late = {} if file is None else manifest.late_files(file)
    # Initial files keep their digest: an edit during the run must not change the run's description.
    new = {name: path for name, path in late.items() if name not in what["inputs"]}
    if out is not None:
        manifest.keep(out, new)
    # A new mapping: the caller may own the one in `what`.
    what["inputs"] = what["inputs"] | manifest.digests(new)
    what["made"] = what["made"] | {"threads": manifest.threads()}


def outcome_of(error: BaseException | None) -> str:
    """Return the "outcome" of run.json."""
    if error is None:
        return FINISHED
    if isinstance(error, KeyboardInterrupt):
        return process_setup.outcome_of(error)
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
