"""Run a program as one rank of a real job, and keep the records of all ranks.

Each rank writes its own shard of the run folder while it runs, including its counts. At the end the lowest living
rank merges the shards. If the job ends early, each rank that still can does so just before it ends, and the launcher
does it once more. This module does not depend on the library that moves the bytes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spawnsim.backends import BACKENDS
from spawnsim.errors import ParameterError, SpawnsimError, WorldError
from spawnsim.real.runtime.registry import KnownDeaths
from spawnsim.run.program import Program
from spawnsim.run.result import FINISHED, Run, results_digest, totals_of, warned
from spawnsim.run.watched import STATES_S, Bar
from spawnsim.run.writer import add_late, begin_folder, describe

if TYPE_CHECKING:
    from spawnsim.real.launch.supervisor import JobEnd
    from spawnsim.record import Journal
    from spawnsim.record.journal import Merged


@dataclass(frozen=True)
class Job:
    """One real run, the same on all its ranks. `progress`: rank 0 shows a bar. `keep`: `out` outlives the job, and
    takes its checkpoints. `resume`: continue from the newest one there. `observed`: there are observers, for whom
    each rank writes its current wait. `command`: the command line that the user typed, if ranks are started with
    other arguments.
    """

    task: Program
    backend: str
    out: Path | None = None
    seed: int = 0
    deadline_s: float = 30.0
    progress: bool = False
    keep: bool = True
    resume: bool = False
    record_every: int = 1
    record_ranks: str | None = None
    observed: bool = False
    command: str | None = None


def run_rank(job: Job) -> Run | None:
    """Run the program as this process's rank. Collective; returns the run on the lowest rank, and None on the others.

    An exception of the program ends the whole job and is not raised here.
    """
    from spawnsim.random import seeded
    from spawnsim.real.runtime.registry import BEGUN, register_stage
    from spawnsim.record import Journal, Thinned, ranks_named

    # The library is loaded here and not above: mpi4py calls MPI_Init at import, and a launcher imports this module.
    backend = BACKENDS[job.backend].load()
    # The journal exists before the communicator, which receives it as its recorder. It opens its file only when all
    # ranks have met: until then it stays in memory, and a job that never begins leaves no folder behind.
    journal, began_s = Journal(), time.perf_counter()
    thin = (job.record_every, ranks_named(job.record_ranks))
    sink = journal if thin == (1, None) else Thinned(journal, *thin)
    comm = backend.world(recorder=sink, seed=job.seed, deadline_s=job.deadline_s)
    with backend.guarded(comm), seeded(comm.rng):
        shards = Shards(job, comm, journal, began_s)
        # Before the program begins: a peer may fail at the first call, and this rank's rows would be lost with the
        # job.
        comm.runtime.on_abort(shards.last_words)
        # Shows the launcher that ranks may have rows to save: it then waits longer before it ends the job.
        register_stage(BEGUN, comm.rank, os.environ)
        bar = Bar(journal, ranks=None, iterations=job.task.parameters.get("iterations"))
        with bar if job.progress and comm.rank == 0 else nullcontext():
            job.task(comm)
            comm.runtime.abort.end_forked()
            comm.runtime.checkpoints.finish()
            # Within the block: open requests may still fail, which must end the job like a failure of the program.
            comm.runtime.settle()
        return shards.finish()


class Shards:
    """The run folder of a real job, seen from one of its ranks."""

    def __init__(self, job: Job, comm: Any, journal: Journal, began_s: float) -> None:
        from spawnsim import checkpoints
        from spawnsim.real.runtime.rank import Checkpoints
        from spawnsim.record import journal as shards

        self._out, self._comm, self._journal, self._began_s = job.out, comm, journal, began_s
        circumstances = {"ranks": comm.Get_size(), "seed": job.seed, "deadline_s": job.deadline_s}
        self.what, self._inputs = describe(job.task, circumstances, backend=job.backend, command=job.command)
        journal.counted = self._counted
        self._ranks = comm.Get_size()
        if job.out is not None:
            comm.Barrier()  # all have seen that the folder is free
            resumed = False
            # One rank begins the folder, since beginning it removes shards. Its broadcast keeps the other ranks from
            # opening their shards earlier, and from relying on another view of the folder.
            if comm.Get_rank() == 0:
                resumed = job.resume and bool(checkpoints.whole(job.out))
                before = self._begin(job)
                self._ranks = max(self._ranks, len(before))
            resumed = comm.bcast(resumed, root=0)
            if job.keep:
                comm.runtime.checkpoints = Checkpoints(job.out, resumed=resumed)
            journal.open(shards.shard(job.out, comm.Get_rank()))
            self._observed = job.observed
            comm.runtime.watchdog.looked = self._update
        comm.runtime.counters.clear()  # only the program's own operations count
        journal.flush()  # from now on the shard names this rank's process
        self._due_s = 0.0

    def _begin(self, job: Job) -> dict[int, float]:
        """Begin the run folder, or end the job with the reason why it cannot begin: no program has failed."""
        assert job.out is not None
        from spawnsim.record import folder
        from spawnsim.record import journal as shards

        try:
            folder.prepare(job.out)
            self._hold = shards.Hold(job.out)  # until the process ends
            return begin_folder(job.out, self.what, self._inputs, resume=job.resume)
        except SpawnsimError as error:
            self._comm.runtime.abort.refuse(error)
            raise

    def _update(self) -> None:
        """Keep the shard up to date; runs in the watchdog's thread, ten times a second."""
        self._journal.keep_up()
        if self._observed:
            self._write_state()

    def _write_state(self) -> None:
        """Write this rank's state for the observers."""
        from spawnsim.record import journal as shards

        now_s = time.perf_counter()
        if now_s < self._due_s or self._out is None:
            return
        self._due_s = now_s + STATES_S
        here = self._comm.runtime.watchdog.here()
        word = "waiting" if here.calls else "computing"
        # The rank's own clock does not help here: the reader needs the age of this state.
        states = shards.RankStates(time.time(), [(word, str(here).partition(": ")[2])])
        shards.write_states(self._out, states, self._comm.Get_rank())

    def finish(self) -> Run | None:
        """Return the records of all ranks, on rank 0, after a run that succeeded and has settled."""
        from spawnsim.record import journal as shards

        # Closed before the barrier: a merge may read the shards only when all of them are closed.
        self._journal.close()
        # The runtime's own barrier: a job that survives its ranks passes it without the dead ranks.
        self._comm.runtime.barrier()
        add_late(self.what, self._inputs, self._out)
        if self._out is None:
            parts = self._gathered()
            if parts is None:
                return None
            return _result(
                shards.merge_frames(parts), what=self.what, counted=self._known(), outcome=FINISHED
            )
        # Not rank 0: in a job that survives, rank 0 may be among the dead.
        if self._comm.Get_rank() != self._comm.runtime.lowest():
            return None
        # The shards are removed only after the files are whole, so a rank killed here leaves one of the two.
        run = collect(self._out, what=self.what, counted=self._known(), outcome=FINISHED)
        shards.discard(self._out)
        return run

    def _gathered(self) -> list[list[bytes]] | None:
        """Return the records of all ranks, on rank 0."""
        try:
            found: list[list[bytes]] | None = self._comm.gather(self._journal.frames, root=0)
        except WorldError:
            # In a job that must not lose a rank, the loss is a failure of the job, and is reported as one.
            if not self._comm.capabilities().survives:
                raise
            return None  # without a folder that outlives the ranks, the loss of a rank loses the totals
        return found

    def last_words(self, summary: str) -> None:
        """Keep the records, as the job ends early. Each rank does so; the last one sees all of them."""
        self._journal.close()
        if self._out is not None:
            collect(self._out, what=self.what, counted=self._known(), outcome=summary)

    def _known(self) -> dict[str, Any]:
        return {
            "ranks": self._ranks, "wall_seconds": time.perf_counter() - self._began_s,
            "deaths": len(KnownDeaths(os.environ)()),
        }  # fmt: skip

    def _counted(self) -> dict[str, Any]:
        return {**self._comm.runtime.totals(), "process": os.getpid()}


def collect(out: Path, *, what: Mapping[str, Any], counted: Mapping[str, Any], outcome: str) -> Run:
    """Merge the shards of a run folder into its own files, and return the run. The shards stay."""
    from spawnsim.record import folder
    from spawnsim.record import journal as shards

    # Ranks that fail together all merge, since each may be the last. Only one merge runs at a time: otherwise files
    # of a merge that has seen less could replace newer ones.
    with shards.locked(out), folder.failing_in_place(out):
        if not shards.has_shards(out):  # another rank has merged, and has assumed that this one is dead
            return Run.load(out)
        run = _result(shards.merge(out), what=what, counted=counted, outcome=outcome)
        run.save(out)
    return run


def _result(merged: Merged, *, what: Mapping[str, Any], counted: Mapping[str, Any], outcome: str) -> Run:
    table, events = merged.recorder.table(), merged.recorder.events()
    of_ranks = list(merged.counted.values())
    known = {name: sum(each.get(name, 0) for each in of_ranks) for name in ("messages", "bytes", "events")}
    # The longest clock is the run's length; the clock of a killed rank is that in its last frame.
    known["run_seconds"] = max((each.get("clock_s", 0.0) for each in of_ranks), default=0.0)
    totals = totals_of(table, events, {**counted, **known})
    if mixed := [*merged.recorder.mixed.values()]:
        what = {**what, "warnings": [*what.get("warnings", ()), *mixed]}
    return Run(
        warned(what, table, events), table, events, totals | {"digest": results_digest(table)}, outcome
    )


def tidy(out: Path, ended: JobEnd, earlier: tuple[int, int] | None) -> bool:
    """Merge the shards that a job left behind, once all its processes have ended; return whether they held anything.

    `earlier` is `folder.version` from before the job started: a run.json that still has it belongs to another run.
    """
    from spawnsim.record import journal as shards

    try:
        hold = shards.Hold(out)
    except (ParameterError, OSError):  # no folder, or another job has begun there and owns the shards
        return False
    try:
        return _tidied(out, ended, earlier)
    finally:
        hold.release()


def _tidied(out: Path, ended: JobEnd, earlier: tuple[int, int] | None) -> bool:
    from spawnsim.record import folder
    from spawnsim.record import journal as shards

    status, cause = ended.status, ended.cause
    merged = not shards.has_shards(out)
    if merged:
        shards.discard(out)
    try:
        manifest = folder.read_manifest(out)
    except ParameterError:  # the job ended before rank 0 wrote one: there is nothing to merge either
        return False
    if merged:
        # The ranks had merged all records; then one of them failed. The outcome must agree with the status.
        if status and manifest["outcome"] == FINISHED and folder.version(out) != earlier:
            how = cause or f"the job ended with status {status}"
            folder.write_manifest(out, manifest | {"outcome": f"{how}, after all rows had been recorded"})
        return False
    # If a rank could still write its own account of the end, it is there already.
    outcome = manifest["outcome"]
    # A rank's account of its end is kept, since the launcher knows only a status. A cause known here takes precedence
    # over both, as it names the rank that ended first.
    if outcome == folder.RUNNING or cause:  # the rank that would have merged them may have died in the end
        outcome = cause or (
            f"the job ended with status {status}, and no rank reported a reason" if status else FINISHED
        )
    run = collect(
        out,
        what=manifest["what"],
        counted={"ranks": manifest["what"].get("ranks")} | manifest["totals"],
        outcome=outcome,
    )
    shards.discard(out)
    return bool(run.table.rows or run.events)
