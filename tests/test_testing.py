"""`spawnsim.testing`, as another project meets it: a test on virtual ranks, its failure, and its replay."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

TESTS = """
import numpy as np
import pytest
from spawnsim.testing import virtual


@virtual(ranks=[2, 12], seeds=6, faults="crash:*@*; delay")
def test_right(comm, tmp_path):
    assert tmp_path.is_dir()
    total = np.empty(1)
    with comm.compute(0.01):
        pass
    comm.Allreduce(np.ones(1), total)
    assert total[0] == comm.size


class TestGroup:
    @pytest.mark.parametrize("tag", [0, 1])
    @virtual(ranks=range(3, 9), seeds=20, parameters={"iterations": 20})
    def test_order(self, comm, tag, iterations):
        for iteration in range(iterations):
            with comm.compute(0.01):
                pass
            if comm.rank:
                comm.send(comm.rank, 0, tag=2 * iteration + tag)
            else:
                got = [comm.recv(tag=2 * iteration + tag) for _ in range(comm.size - 1)]
                assert got == sorted(got) or tag == 0


@virtual("train.py", ranks=3, seeds=4)
def test_of_a_file(run):
    assert run.table["loss"].max() < 9


@virtual("script.py", ranks=3, seeds=2, faults="crash:1@0s", survive=True)
def test_of_an_unmodified_program(run):
    pass
"""
TRAIN = "def main(comm):\n    comm.record(loss=comm.rank + 8.0)\n"
SCRIPT = "from mpi4py import MPI\nfor _ in range(9):\n    MPI.COMM_WORLD.Barrier()\n"


def pytest_in(folder: Path, *arguments: str) -> str:
    """Run pytest as another project would; return what it prints."""
    line = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments]
    done = subprocess.run(
        line, cwd=folder, capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    return done.stdout + done.stderr


def test_failures_show_what_broke_and_how_to_replay_it(tmp_path):
    """What is right passes; of what fails: the case as found, then the smallest; both lines fail in the same way."""
    (tmp_path / "test_them.py").write_text(TESTS)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "script.py").write_text(SCRIPT)
    text = pytest_in(tmp_path)
    assert "3 failed, 2 passed" in text
    assert re.search(
        r"(?s)AssertionError: rank 0 raised AssertionError: assert \(?\[.*? at [\d.]+ s \(test_them\.py:\d+\)",
        text,
    )
    assert "3 ranks, seed" in text
    assert "assert np.float64(10.0) < 9" in text
    assert "rank 1 failed" in text or "rank 1 has failed" in text
    replays = [
        shlex.split(line.partition(":")[2])
        for line in text.splitlines()
        if line.startswith(("replay:", "as found:"))
    ]
    assert all(each[:3] == ["pytest", "-p", "spawnsim.testing"] for each in replays)
    assert [each[4] for each in replays[:2]] == ["--spawnsim-seed", "--spawnsim-case"]
    runs = [pytest_in(tmp_path, *each[1:]) for each in replays[:2]]
    told = [line for line in text.splitlines() if line.startswith("AssertionError: rank 0")]
    for each, first in zip(runs, told, strict=False):
        assert "1 failed" in each
        assert [line for line in each.splitlines() if line.startswith("AssertionError: rank")] == [first]


LISTED = """
import numpy as np
from spawnsim.testing import virtual


@virtual(ranks=[2, 3, 8], seeds=2)
def test_wrong(comm):
    total = np.empty(1)
    comm.Allreduce(np.ones(1), total)
    assert total[0] == 2


@virtual("ring.py", ranks=[4, 5], seeds=6)
def test_ring(run):
    assert run.totals["messages"]
"""
RING = """
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, down, up = comm.rank, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
if rank % 2 == 0:
    comm.ssend("last", down)
    comm.recv(source=down)
    comm.ssend("first", up)
comm.recv(source=up)
if rank % 2:
    comm.ssend("first", up)
    comm.recv(source=down)
    comm.ssend("last", down)
"""


def test_cases_keep_to_the_numbers_of_ranks_that_a_test_lists(tmp_path):
    """With one rank both fail, too, each in a way that the test does not have."""
    (tmp_path / "test_them.py").write_text(LISTED)
    (tmp_path / "ring.py").write_text(RING)
    text = pytest_in(tmp_path)
    assert "2 failed" in text
    ranks = {line.partition(",")[0] for line in text.splitlines() if ", seed " in line and "ranks" in line}
    assert ranks <= {"3 ranks", "8 ranks", "5 ranks"}
    assert "3 ranks" in ranks
    assert "a cycle of waits: rank 0 → rank 4 → rank 0" in text
    assert "waits for itself" not in text


def test_the_options_are_for_sessions_that_ask_for_them():
    """No session of pytest loads the plugin by itself, and a test needs no more than its import."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "pytest11" not in declared.get("entry-points", {})
