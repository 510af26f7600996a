"""Running the contract on virtual ranks, in this process, and on real ones, in a job.

This room knows how each building is entered, and makes every failure an outcome.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from spawnsim.errors import RankError, SpawnsimError, UnsupportedError
from spawnsim.record import Recorder
from spawnsim.testing.cases import ABSENT, FAILED, PASSED, SKIPPED, Case, Outcome, find_cases
from spawnsim.testing.claims import Skipped
from spawnsim.testing.jobs import REAL_BACKENDS, member_command, watch

BACKENDS = ("virtual", *REAL_BACKENDS)


def run_contract(backend: str, ranks: int, match: str | None = None) -> Iterator[Outcome]:
    """Run the cases that fit and match, and yield their outcomes as they come.

    Args:
        backend: "virtual", "mpi" (bare mpi4py), "real" (spawnsim over MPI), "torch" (over torch.distributed), or
            "module:function" of yours, which returns a namespace and a communicator on each real rank.
        ranks: how many ranks.
        match: words; a case runs when its id holds one of them.
    """
    cases = find_cases(ranks, match)
    return run_virtual(cases, ranks) if backend == "virtual" else run_real(cases, ranks, backend)


def run_virtual(cases: Iterable[Case], ranks: int, **cluster: Any) -> Iterator[Outcome]:
    """Run each case on a virtual cluster of its own. `cluster`: as for `spawnsim.virtual.simulate`."""
    simulate = importlib.import_module("spawnsim.virtual").simulate
    mpi = importlib.import_module("spawnsim.virtual.mpi").MPI
    for case in cases:
        main = functools.partial(_on_a_duplicate, case, mpi)
        yield outcome_of(case, functools.partial(simulate, main, ranks=ranks, recorder=Recorder(), **cluster))


def _on_a_duplicate(case: Case, mpi: Any, comm: Any) -> None:
    """Run a case as every backend does: on a communicator of its own."""
    own = comm.Dup()
    case.test(mpi, own)
    own.Free()


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
    """Run cases on real ranks that mpiexec or torchrun starts, in as many jobs as it takes."""
    return watch([*_launcher(backend, ranks), *member_command(backend)], list(cases), ranks)


def _launcher(backend: str, ranks: int) -> list[str]:
    """Return the command line up to Python's arguments."""
    if backend == "torch":
        return [
            sys.executable,
            "-m",
            "spawnsim.real.launching.torchrun",
            "--standalone",
            f"--nproc-per-node={ranks}",
        ]
    launch = importlib.import_module("spawnsim.real.launching.launch")
    library = launch.find_library()
    return [library.mpiexec, *launch.flags(library, ranks), "-n", str(ranks), sys.executable]
