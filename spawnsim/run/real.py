"""Run a program as one rank of a real job, and keep what all ranks recorded.

Each rank writes its own shard of the run folder while it runs, its counts with it. At the end the lowest rank that
lives merges the shards; when the job ends early, each rank that still can does so just before it ends, and the
launcher does it once more. Which library moves the bytes is not known here.
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
from spawnsim.run.watched import LOOK_S, Bar
from spawnsim.run.writer import add_late, begin_folder, describe

if TYPE_CHECKING:
    from spawnsim.real.launch.supervisor import JobEnd
    from spawnsim.record import Journal
    from spawnsim.record.journal import Merged


@dataclass(frozen=True)
class Job:
    """What one real run is. The same on all its ranks. `progress`: rank 0 shows a bar. `keep`: `out` outlives the job,
    and takes its checkpoints. `resume`: go on from the newest that is there. `observed`: somebody watches, to whom each
    rank tells what it waits for. `command`: what the user typed, where ranks are started with other arguments.
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

    An exception of the program ends the whole job and does not come back.
    """
    from spawnsim.random import seeded
    from spawnsim.real.runtime.registry import BEGUN, register_stage
    from spawnsim.record import Journal, Thinned, ranks_named

    # The library is loaded here and not above: mpi4py calls MPI_Init at import, and a launcher imports this module.
    backend = BACKENDS[job.backend].load()
    # The journal exists before the communicator, which is given it as its recorder, and gets its file only once all
    # ranks have met: until then it keeps in memory, and a job that never begins leaves no folder behind.
    journal, began_s = Journal(), time.perf_counter()
    thin = (job.record_every, ranks_named(job.record_ranks))
    sink = journal if thin == (1, None) else Thinned(journal, *thin)
    comm = backend.world(recorder=sink, seed=job.seed, deadline_s=job.deadline_s)
    with backend.guarded(comm), seeded(comm.rng):
        shards = Shards(job, comm, journal, began_s)
        # Before the program begins: a peer may fail at the first call, and rows of this rank would be lost with the
        # job.
        comm.runtime.on_abort(shards.last_words)
        # Tells the launcher that ranks may have rows to save: it waits longer then before it ends the job.
        register_stage(BEGUN, comm.rank, os.environ)
        bar = Bar(journal, ranks=None, iterations=job.task.parameters.get("iterations"))
        with bar if job.progress and comm.rank == 0 else nullcontext():
            job.task(comm)
            comm.runtime.abort.end_forked()
            comm.runtime.checkpoints.finish()
            # Within the block, since open requests may still fail: that must end as a failure of the program does.
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
            # One rank begins the folder, as beginning it removes shards; its word keeps the others from opening theirs
            # before that, and from another view of what the folder holds.
            if comm.Get_rank() == 0:
                resumed = job.resume and bool(checkpoints.whole(job.out))
                before = self._begin(job)
                self._ranks = max(self._ranks, len(before))
            resumed = comm.bcast(resumed, root=0)
            if job.keep:
                comm.runtime.checkpoints = Checkpoints(job.out, resumed=resumed)
            journal.open(shards.shard(job.out, comm.Get_rank()))
            self._observed = job.observed
            comm.runtime.watchdog.looked = self._look
        comm.runtime.counters.clear()  # the program's alone counts
        journal.flush()  # from now on the shard says which process this rank is
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

    def _look(self) -> None:
        """Keep the shard up to date; in the watchdog's thread, ten times a second."""
        self._journal.keep_up()
        if self._observed:
            self._tell()

    def _tell(self) -> None:
        """Write what this rank does, for whoever watches."""
        from spawnsim.record import journal as shards

        now_s = time.perf_counter()
        if now_s < self._due_s or self._out is None:
            return
        self._due_s = now_s + LOOK_S
        here = self._comm.runtime.watchdog.here()
        word = "waiting" if here.calls else "computing"
        # Its own clock is another's affair: the reader wants to know how old this is.
        told = shards.RankStates(time.time(), [(word, str(here).partition(": ")[2])])
        shards.write_states(self._out, told, self._comm.Get_rank())

    def finish(self) -> Run | None:
        """Return what all ranks recorded, on rank 0, after a run that went well and has settled."""
        from spawnsim.record import journal as shards

        # Closed before the barrier: who merges may read every shard only when none is still written.
        self._journal.close()
        # The runtime's own barrier, which a job that survives its ranks passes without those that have died.
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
        # The shards go only after the files are whole, so a rank killed here leaves one of the two.
        run = collect(self._out, what=self.what, counted=self._known(), outcome=FINISHED)
        shards.discard(self._out)
        return run

    def _gathered(self) -> list[list[bytes]] | None:
        """Return what all ranks have recorded, on rank 0."""
        try:
            found: list[list[bytes]] | None = self._comm.gather(self._journal.frames, root=0)
        except WorldError:
            # In a job that must not lose a rank the loss is the job's failure, and is told as such.
            if not self._comm.capabilities().survives:
                raise
            return None  # without a folder that outlives them, the totals are lost with a rank
        return found

    def last_words(self, summary: str) -> None:
        """Keep what was recorded, as the job ends early. Each rank does; the last one to do so sees it all."""
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

    # Ranks that fail together come here together, each as the one who may be last: one merge at a time, or files of
    # one are moved over by those of another that has seen less.
    with shards.locked(out), folder.failing_in_place(out):
        if not shards.has_shards(out):  # another has done so, and has taken this one for dead
            return Run.load(out)
        run = _result(shards.merge(out), what=what, counted=counted, outcome=outcome)
        run.save(out)
    return run


def _result(merged: Merged, *, what: Mapping[str, Any], counted: Mapping[str, Any], outcome: str) -> Run:
    table, events = merged.recorder.table(), merged.recorder.events()
    of_ranks = list(merged.counted.values())
    known = {name: sum(each.get(name, 0) for each in of_ranks) for name in ("messages", "bytes", "events")}
    # The longest clock is the run's length; of a rank that was killed it is that of its last frame.
    known["run_seconds"] = max((each.get("clock_s", 0.0) for each in of_ranks), default=0.0)
    totals = totals_of(table, events, {**counted, **known})
    if mixed := [*merged.recorder.mixed.values()]:
        what = {**what, "warnings": [*what.get("warnings", ()), *mixed]}
    return Run(
        warned(what, table, events), table, events, totals | {"digest": results_digest(table)}, outcome
    )


def tidy(out: Path, ended: JobEnd, begun_s: float) -> bool:
    """Merge the shards that a job left behind, once all its processes have ended; return whether they held anything.

    A run.json that is older than `begun_s`, in seconds of `time.time()`, is another run's.
    """
    from spawnsim.record import journal as shards

    try:
        hold = shards.Hold(out)
    except (ParameterError, OSError):  # there is none, or another job has begun there: the shards are its own
        return False
    try:
        return _tidied(out, ended, begun_s)
    finally:
        hold.release()


def _tidied(out: Path, ended: JobEnd, begun_s: float) -> bool:
    from spawnsim.record import folder
    from spawnsim.record import journal as shards

    status, cause = ended.status, ended.cause
    merged = not shards.has_shards(out)
    if merged:
        shards.discard(out)
    try:
        manifest = folder.read_manifest(out)
    except ParameterError:  # it ended before rank 0 wrote one: there is nothing to merge either
        return False
    if merged:
        # The ranks had recorded and merged all; then one of them failed. The outcome must agree with the status.
        written_s = (out / folder.MANIFEST).stat().st_mtime + 1.0  # some file systems keep whole seconds
        if status and manifest["outcome"] == FINISHED and written_s >= begun_s:
            how = cause or f"the job ended with status {status}"
            folder.write_manifest(out, manifest | {"outcome": f"{how}, after all had been recorded"})
        return False
    # A rank's own words of the end stand there already, if one could still write them.
    outcome = manifest["outcome"]
    # What a rank has said of its end is kept, since the launcher knows only a status; a cause known here is better
    # than both, as it names who ended first.
    if outcome == folder.RUNNING or cause:  # the rank that would have merged them may have died at last
        outcome = cause or (
            f"the job ended with status {status}, and no rank could say why" if status else FINISHED
        )
    run = collect(
        out,
        what=manifest["what"],
        counted={"ranks": manifest["what"].get("ranks")} | manifest["totals"],
        outcome=outcome,
    )
    shards.discard(out)
    return bool(run.table.rows or run.events)
