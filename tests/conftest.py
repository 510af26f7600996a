"""What every test stands on: quiet threads, no display, and no hurry."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

# Before torch or numpy is imported: a pool of threads per rank would only fight over the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where a test has two threads, they sleep as they wait: beside other tests, to spin takes five times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("MPLBACKEND", "Agg")
# Under a bare mpiexec, unbuffered ranks print a line in pieces, and cut into each other's.
os.environ.pop("PYTHONUNBUFFERED", None)

import pytest
from hypothesis import settings

from spawnsim.real.launch.supervisor import shared_memory_removed

# Signals do what they do on a terminal, here and in the processes that tests start: the background of a shell ignores
# Ctrl-C, and nohup SIGHUP.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# An example that took long on a busy machine is no defect.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


# What operating systems, MPI and gloo do to a job as it starts and ends is theirs: a test of real processes gets a
# second try, which the summary names. Virtual ranks promise to do the same each time, so their tests get none.
HERE = Path(__file__).parent
REAL = [HERE / "real", HERE / "contract", HERE / "run/test_stopping.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of real processes their second try."""
    for item in items:
        real = item.get_closest_marker("mpi") or any(map(item.path.is_relative_to, REAL))
        if real and not item.get_closest_marker("flaky"):
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture(scope="session", autouse=True)
def no_shared_memory_is_left() -> Iterator[None]:
    """Remove what MPICH leaves of jobs that tests start by a bare mpiexec and that abort: 4 MB each in /dev/shm."""
    with shared_memory_removed():
        yield
