"""Run a program as one rank of a real job, and keep what all ranks recorded.

Each rank writes its own shard of the run folder while it runs. At the end rank 0 merges the shards; when the job ends
early, each rank that still can does so after its last words, and the launcher does it once more.

This room knows two functions of a real building, `world` and `guarded`, and the run folder. It does not know which
library moves the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spawnsim.errors import ParameterError, UnsupportedError
from spawnsim.run.building import describe
from spawnsim.run.program import Program
from spawnsim.run.result import FINISHED, Run, totals_of

if TYPE_CHECKING:
    from spawnsim.record import Journal, Recorder

BACKENDS = {"mpi": "spawnsim.real.mpi", "torch": "spawnsim.real.torch"}


@dataclass(frozen=True)
class Job:
    """What one real run is. The same on all its ranks."""

    task: Program
    backend: str
    out: Path | None = None
    seed: int = 0
    deadline_s: float = 30.0


def run_rank(job: Job) -> Run | None:
    """Run the program as this process's rank. Collective; returns the run on rank 0, and None on the others.

    An exception of the program ends the whole job and does not come back.
    """
    from spawnsim.record import Journal

    room = _room(job.backend)
    journal = Journal()
    comm = room.world(recorder=journal, seed=job.seed, deadline_s=job.deadline_s)
    with room.guarded(comm):
        shards = Shards(job, comm, journal)
        comm._home.ending.last_words.append(shards.last_words)
        job.task(comm)
        return shards.finish()


def _room(backend: str) -> Any:
    name = BACKENDS[backend]
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise UnsupportedError(
            f"--backend {backend}: not in this version; take one of virtual, mpi"
        ) from error


class Shards:
    """The run folder of a real job, seen from one of its ranks."""

    def __init__(self, job: Job, comm: Any, journal: Journal) -> None:
        from spawnsim.record import folder
        from spawnsim.record import journal as shards

        self._out, self._comm, self._journal = job.out, comm, journal
        self.what = describe(
            job.task, backend=job.backend, ranks=comm.Get_size(), seed=job.seed, deadline_s=job.deadline_s
        )
        if job.out is not None:
            if comm.Get_rank() == 0:
                folder.begin(job.out, self.what)
                shards.discard(job.out)
            comm.Barrier()
            journal.open(shards.shard(job.out, comm.Get_rank()))
        self._began_s = time.perf_counter()

    def finish(self) -> Run | None:
        """Return what all ranks recorded, on rank 0, after a run that went well."""
        from spawnsim.record import journal as shards

        self._journal.close()
        self._comm.Barrier()
        counted = self._counted()
        if self._out is None:
            return self._gathered(counted)
        if self._comm.Get_rank() != 0:
            return None
        run = collect(self._out, what=self.what, counted=counted, outcome=FINISHED)
        shards.discard(self._out)
        return run

    def _gathered(self, counted: Mapping[str, Any]) -> Run | None:
        from spawnsim.record import Recorder
        from spawnsim.record import journal as shards

        parts = self._comm.gather(self._journal.lines, root=0)
        if parts is None:
            return None
        recorder = Recorder()
        for lines in parts:
            shards.replay(lines, recorder)
        return _result(recorder, what=self.what, counted=counted, outcome=FINISHED)

    def last_words(self, summary: str) -> None:
        """Keep what was recorded, as the job ends early. Each rank does; the last one to do so sees it all."""
        self._journal.close()
        if self._out is not None:
            collect(self._out, what=self.what, counted=self._counted(), outcome=summary)

    def _counted(self) -> dict[str, Any]:
        return {"ranks": self._comm.Get_size(), "wall_seconds": time.perf_counter() - self._began_s}


def collect(out: Path, *, what: Mapping[str, Any], counted: Mapping[str, Any], outcome: str) -> Run:
    """Merge the shards of a run folder into its own files, and return the run. The shards stay."""
    from spawnsim.record import journal as shards

    with shards.alone(out):
        recorder, _ = shards.merge(out)
        run = _result(recorder, what=what, counted=counted, outcome=outcome)
        run.save(out)
    return run


def _result(recorder: Recorder, *, what: Mapping[str, Any], counted: Mapping[str, Any], outcome: str) -> Run:
    table, events = recorder.table(), recorder.events()
    return Run(what, table, events, totals_of(table, events, counted), outcome)


def tidy(out: Path, status: int) -> None:
    """Merge the shards that a job left behind, once all its processes have ended."""
    from spawnsim.record import folder
    from spawnsim.record import journal as shards

    if not (out / shards.FOLDER).is_dir():
        return
    try:
        manifest = folder.read_manifest(out)
    except ParameterError:  # it ended before rank 0 wrote one: there is nothing to merge either
        return
    outcome = manifest["outcome"]
    if outcome == folder.RUNNING:
        outcome = f"the job ended with status {status}, and no rank could say why"
    collect(
        out,
        what=manifest["what"],
        counted={"ranks": manifest["what"].get("ranks")} | manifest["totals"],
        outcome=outcome,
    )
    shards.discard(out)
