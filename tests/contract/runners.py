"""Running the contract on virtual ranks, in this process, and on real ones, in jobs.

Makes every failure an outcome: a job is watched by its members' logs, and a new one goes on behind a case that killed
or stopped it. Loads no MPI itself.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from contract.cases import ABSENT, FAILED, PASSED, SKIPPED, Case, Outcome, Skipped, find_cases, free_all
from spawnsim import backends
from spawnsim.errors import RankError, SpawnsimError, UnsupportedError
from spawnsim.real.launch import launchers
from spawnsim.record import Recorder
from spawnsim.scenario import Scenario

# "mpi" is taken by the bare library, against which the suite itself is checked; so spawnsim over MPI is "real".
WRAPPED: Final = {
    "real" if name == "mpi" else name: backends.BACKENDS[name] for name in backends.real_backends()
}
REAL_BACKENDS: Final = ("mpi", *WRAPPED)
"""`mpi`: bare mpi4py, which keeps the suite true; `real`, `torch`: spawnsim's communicators over MPI and torch."""
PATIENCE_S: Final = 60.0  # a case that takes longer than this stands still
GRACE_S: Final = 5.0  # after one rank has failed, the others get this long to end the case
POLL_S: Final = 0.05


@dataclass(frozen=True)
class JobSnapshot:
    """What the logs say: agreed outcomes, the case in hand, who has failed in it, and since when."""

    outcomes: list[Outcome]
    case: str | None
    since_s: float
    failures: dict[int, str]
    inside: list[int]


def read_logs(folder: Path, ranks: int) -> JobSnapshot:
    """Return what the members of a job have written so far."""
    logs = [_lines(folder / f"{rank}.jsonl") for rank in range(ranks)]
    # Rank 0's log tells the outcomes: an agreement is the same on all ranks.
    outcomes = [Outcome(line["case"], line["agreed"], line["text"]) for line in logs[0] if "agreed" in line]
    done = {outcome.case for outcome in outcomes}
    # A case that one rank has begun and not all have agreed on is the one in hand.
    current = [line for log in logs for line in log if line["case"] not in done]
    if not current:
        return JobSnapshot(outcomes, None, 0.0, {}, [])
    case = current[0]["case"]
    verdicts = [
        next((line for line in log if line["case"] == case and "status" in line), None) for log in logs
    ]
    failures = {rank: line["text"] for rank, line in enumerate(verdicts) if line and line["status"] == FAILED}
    inside = [rank for rank, line in enumerate(verdicts) if line is None]
    return JobSnapshot(outcomes, case, max(line["time_s"] for line in current), failures, inside)


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    # Up to the last line break: a rank may be just writing its next line.
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


class Job:
    """One started job and the folder of its members' logs."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self.folder = folder
        self.output = folder / "output.txt"
        path = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]
        with self.output.open("w", encoding="utf-8") as sink:
            self.process = subprocess.Popen(
                command,
                stdout=sink,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
            )

    def stop(self) -> None:
        """End the job and all its processes; it leads a session of its own, so that no other is hit."""
        if self.process.poll() is None:
            # The whole group: ranks of a killed mpiexec would go on, and hold the next job's cores.
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def tail(self) -> str:
        """Return the end of what the job printed."""
        return self.output.read_text(encoding="utf-8", errors="replace")[-2000:]


def watch(command: Sequence[str], cases: list[Case], ranks: int) -> Iterator[Outcome]:
    """Run cases in a job, and in a new one behind each case that kills or stops it; yield every outcome."""
    left = [case.id for case in cases]
    while left:
        with tempfile.TemporaryDirectory(prefix="spawnsim-contract-") as name:
            folder = Path(name)
            (folder / "cases.json").write_text(json.dumps(left), encoding="utf-8")
            job = Job([*command, str(folder)], folder)
            try:
                yield from _follow(job, left, ranks)
            finally:
                job.stop()


def _follow(job: Job, left: list[str], ranks: int) -> Iterator[Outcome]:
    """Yield outcomes as they are agreed on, and strike them out; the last may be the failure that ended the job."""
    seen, moved_s = 0, time.time()
    while True:
        # Asked before the logs are read: asked after, what a job wrote at its very end could be missed.
        ended = job.process.poll()
        sight = read_logs(job.folder, ranks)
        for outcome in sight.outcomes[seen:]:
            left.remove(outcome.case)
            yield outcome
        if len(sight.outcomes) > seen:
            seen, moved_s = len(sight.outcomes), time.time()
        if ended == 0 and not left:
            return
        # From the latest step of any rank, so that a suite of many short cases is never out of patience.
        waited_s = time.time() - max(sight.since_s, moved_s)
        if ended is not None or waited_s > (GRACE_S if sight.failures else PATIENCE_S):
            yield _ending(job, sight, left, ended)
            return
        time.sleep(POLL_S)


def _ending(job: Job, sight: JobSnapshot, left: list[str], ended: int | None) -> Outcome:
    """Return the failure of the case that a job died or stood still in, and strike the case out."""
    how = "stood still" if ended is None else f"ended the job with status {ended}"
    said = "\n".join(f"rank {rank}: {text}" for rank, text in sight.failures.items())
    inside = f"; still inside: rank {', '.join(map(str, sight.inside))}" if sight.inside else ""
    case = sight.case or (left[0] if left else "the end of the job")
    if case in left:
        # Struck out, or the next job would begin with the same case, and never end.
        left.remove(case)
    return Outcome(case, FAILED, f"{how}{inside}\n{said}\n{job.tail()}")


BACKENDS: Final = ("virtual", *REAL_BACKENDS)


def run_contract(backend: str, ranks: int, match: str | None = None) -> Iterator[Outcome]:
    """Run the cases that fit and match, and yield their outcomes as they come.

    Args:
        backend: "virtual", "mpi" (bare mpi4py), "real" (spawnsim over MPI), "torch" (over torch.distributed), or
            "module:function" of yours, which returns a namespace and a communicator on each real rank.
        ranks: how many ranks.
        match: words; a case runs when its id holds one of them.

    Returns:
        An iterator of outcomes, one per case.

    Raises:
        ParameterError: no case matches.
    """
    cases = find_cases(ranks, match)
    return run_virtual(cases, ranks) if backend == "virtual" else run_real(cases, ranks, backend)


def run_virtual(cases: Iterable[Case], ranks: int, **cluster: Any) -> Iterator[Outcome]:
    """Run each case on a virtual cluster of its own.

    Args:
        cases: the cases.
        ranks: how many virtual ranks.
        cluster: further fields of `spawnsim.scenario.Scenario`, such as `platform`.

    Returns:
        An iterator of outcomes, one per case.
    """
    from spawnsim.virtual import simulate  # real ranks run this module too, and need no simulator
    from spawnsim.virtual.mpi.module import MPI

    scenario = Scenario(ranks, **cluster)
    # A cluster for each case: what one leaves behind, such as a message or an attached buffer, must not reach the next.
    for case in cases:
        main = functools.partial(_on_a_duplicate, case, MPI)
        yield outcome_of(case, functools.partial(simulate, main, scenario, recorder=Recorder()))


def _on_a_duplicate(case: Case, mpi: Any, comm: Any) -> None:
    """Run a case as every backend does: on a communicator of its own."""
    own = comm.Dup()
    free_all(own, case.run(mpi, own))


def outcome_of(case: Case, run: Callable[[], Any]) -> Outcome:
    """Return how a case ends when all its ranks are one call."""
    try:
        run()
    except RankError as error:
        cause = error.__cause__ or error
        if isinstance(cause, Skipped):
            return Outcome(case.id, SKIPPED, str(cause))
        if isinstance(cause, UnsupportedError):
            return Outcome(case.id, ABSENT, str(cause))
        return Outcome(
            case.id, FAILED, f"rank {error.rank} at {error.time_s} s: {type(cause).__name__}: {cause}"
        )
    except UnsupportedError as error:
        return Outcome(case.id, ABSENT, str(error))
    except SpawnsimError as error:
        return Outcome(case.id, FAILED, f"{type(error).__name__}: {error}")
    return Outcome(case.id, PASSED)


def run_real(cases: Iterable[Case], ranks: int, backend: str = "mpi") -> Iterator[Outcome]:
    """Run cases on real ranks that mpiexec starts, or one process that forks, in as many jobs as it takes.

    Args:
        cases: the cases.
        ranks: how many processes.
        backend: as for `run_contract`, but for "virtual".

    Returns:
        An iterator of outcomes, one per case; of a case that kills or stops the job it says how.
    """
    member = ["-m", "contract", "--backend", backend, "--member"]
    return watch([*_launcher(backend, ranks), *member], list(cases), ranks)


def _launcher(backend: str, ranks: int) -> list[str]:
    """Return the command line up to Python's arguments."""
    if backend in WRAPPED and WRAPPED[backend].launcher == "torchrun":
        return launchers.forked(ranks)
    library = launchers.find_library()
    return [library.mpiexec, *launchers.flags(library, ranks), "-n", str(ranks), sys.executable]
