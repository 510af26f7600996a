"""A rank that ends before its job has begun: the others would wait for it for ever, so the job ends, and says why."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.surviving import processes

from spawnsim.real.launch.launchers import find_library, flags

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(150)]

TRAIN = """
import os, sys

HOW, NAMES = {how!r}, ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")
if HOW == "all" or next(os.environ[name] for name in NAMES if name in os.environ) == "2":
    if HOW == "kill":
        os.kill(os.getpid(), 9)
    if HOW == "leave":
        os._exit(0)
    raise OSError("stale file handle")


def main(comm):
    comm.Barrier()
"""
KILLED = r"spawnsim: rank 2 \(process \d+ on .*\) was killed by signal 9 \(SIGKILL\)"
UNSURVIVED = " before its program had begun: no job survives that"
RAISED = (
    r'Traceback \(most recent call last\):\n  File ".*train.py", line 10, in <module>\n'
    r'    raise OSError\("stale file handle"\)\nOSError: stale file handle\n'
    r"spawnsim: .*train.py raised OSError while it was loaded\nspawnsim: rank \d of 3 did not start; the job ends\n"
)


def ended(line: list[str], file: Path) -> subprocess.CompletedProcess[str]:
    """Run a job of three ranks to its end, which leaves nobody behind."""
    options = ["run", str(file), "--backend"]
    given = [*line[:-1], "-m", "spawnsim", *options, *line[-1].split()]
    found = subprocess.run(given, capture_output=True, text=True, timeout=120, check=False)
    assert gone(str(file))
    return found


def gone(word: str) -> bool:
    """Whether processes end within a while: mpiexec may be gone a moment before its ranks."""
    end_s = time.monotonic() + 20
    while processes(word) and time.monotonic() < end_s:
        time.sleep(0.05)
    return not processes(word)


@pytest.mark.parametrize(
    ("how", "backend", "status", "said"),
    [
        ("kill", "mpi -n 3", 137, f"{KILLED}\n"),
        ("kill", "mpi -n 3 --survive", 137, f"{KILLED}{UNSURVIVED}\n"),
        ("leave", "mpi -n 3", 122, r"spawnsim: rank 2 \(process .*\) left before its program had ended\n"),
        ("raise", "mpi -n 3", 1, RAISED),
        ("raise", "torch -n 3", 1, RAISED),
        ("all", "mpi -n 3", 1, RAISED),
    ],
)
def test_a_rank_that_ends_before_mpi_is_up_ends_the_job(tmp_path, how, backend, status, said):
    """MPICH's launcher does not notice it: such a job hung for ever. One rank is named, and one traceback is shown."""
    file = tmp_path / "train.py"
    file.write_text(TRAIN.format(how=how))
    found = ended([sys.executable, backend], file)
    assert re.fullmatch(said, found.stderr), found.stderr
    assert (found.returncode, found.stdout) == (status, "")


def test_a_job_that_somebody_else_has_started_ends_as_well(tmp_path):
    """Under a launcher of the user's own the rank that fails says so, and ends the job."""
    file = tmp_path / "train.py"
    file.write_text(TRAIN.format(how="raise"))
    library = find_library()
    found = ended([library.mpiexec, *flags(library, 3), "-n", "3", sys.executable, "mpi"], file)
    assert found.stderr.count("Traceback") == 1
    assert re.search(RAISED, found.stderr), found.stderr
    assert found.returncode == 1
    assert "ours" not in found.stderr


@pytest.mark.parametrize(
    ("how", "noticed"),
    [
        ("exit 0", {}),
        ("kill -9 $$", {"MPICH": (137, "rank 1, at its start, was killed by signal 9 (SIGKILL)")}),
    ],
)
def test_a_rank_that_dies_before_it_has_a_keeper_is_missed(tmp_path, how, noticed):
    """Nobody has signed for it, and its launcher waits for a rank that is no more; MPICH's notices signals alone."""
    python, rank = (
        tmp_path / "python",
        "PMI_RANK" if find_library().name == "MPICH" else "OMPI_COMM_WORLD_RANK",
    )
    python.write_text(
        f'#!/bin/sh\nif [ "${rank}" = 1 ]; then sleep 1; {how}; fi\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    file = tmp_path / "train.py"
    file.write_text("def main(comm):\n    comm.Barrier()\n")
    program = (
        "import sys\nfrom spawnsim.real.launch import launchers\nsys.executable = sys.argv[1]\n"
        "ended = launchers.start(sys.argv[2], 3, ['--backend', 'mpi', '--quiet'], survive=True)\n"
        "print(ended.cause)\nsys.exit(ended.status)"
    )
    line = [sys.executable, "-c", program, str(python), str(file)]
    found = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    status, said = noticed.get(find_library().name, (122, "rank 1 died at its start"))
    assert (found.returncode, found.stdout) == (status, f"{said}: no job survives that\n"), found.stderr
    assert gone(str(file))
