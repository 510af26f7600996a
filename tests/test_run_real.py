"""`spawnsim run --backend mpi`: real ranks, real folders, and jobs that end early."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import spawnsim

pytestmark = pytest.mark.mpi

PROGRAM = """
import os, sys, time

def main(comm, iterations=3, raise_on=-1, kill_on=-1, leave=False):
    rank = comm.Get_rank()
    for iteration in range(iterations):
        with comm.compute():
            time.sleep(0.001)
        comm.record(iteration=iteration, total=comm.allreduce(rank))
    comm.record.event("replacement", donors=[0])
    if rank == raise_on:
        raise ValueError("no such luck")
    if rank == kill_on:
        os.kill(os.getpid(), 9)
    if leave:
        sys.exit()
    comm.Barrier()
"""


@pytest.fixture
def train(tmp_path: Path) -> Path:
    """A training file."""
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


def _spawnsim(*arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "spawnsim", *map(str, arguments)]
    return subprocess.run(
        line, capture_output=True, text=True, check=False, timeout=120, env=dict(os.environ)
    )


def test_real_ranks_leave_the_same_folder_as_virtual_ones(train: Path, tmp_path: Path) -> None:
    """Four processes and four virtual ranks record the same columns and values, apart from time."""
    real, virtual = tmp_path / "real", tmp_path / "virtual"
    done = _spawnsim("run", train, "--backend", "mpi", "-n", 4, "--out", real, "--json")
    assert (done.returncode, json.loads(done.stdout)["ranks"]) == (0, 4), done.stderr
    assert _spawnsim("run", train, "--compute", "1 ms", "-n", 4, "--out", virtual).returncode == 0
    mine, theirs = spawnsim.Run.load(real), spawnsim.Run.load(virtual)
    assert {name: column.dtype for name, column in mine.table.items()} == {
        name: column.dtype for name, column in theirs.table.items()
    }
    for name in ("rank", "iteration", "total"):
        assert mine.table[name].tolist() == theirs.table[name].tolist()
    assert [event["rank"] for event in mine.events if event["kind"] == "replacement"] != []
    assert mine.totals["iterations"] == theirs.totals["iterations"] == 3
    assert (mine.what["backend"], theirs.what["backend"]) == ("mpi", "virtual")
    assert sorted(path.name for path in real.iterdir()) == ["events.jsonl", "metrics.npz", "run.json"]


def test_totals_need_no_folder(train: Path) -> None:
    """Without --out the rows are gathered; `sys.exit()` in the program is an ordinary end."""
    done = _spawnsim("run", train, "--backend", "mpi", "-n", 2, "--json", "--set", "leave=true")
    totals = json.loads(done.stdout)
    assert (done.returncode, totals["iterations"], totals["replacements"]) == (0, 3, 2)


def test_a_raising_rank_ends_the_job_and_the_folder_is_kept(train: Path, tmp_path: Path) -> None:
    """One traceback, a non-zero status, and the rows of all ranks until then."""
    done = _spawnsim(
        "run", train, "--backend", "mpi", "-n", 3, "--set", "raise_on=1", "--out", tmp_path / "a"
    )
    assert done.returncode != 0
    assert done.stderr.count("ValueError: no such luck") == 1
    run = spawnsim.Run.load(tmp_path / "a")
    assert run.outcome == "ValueError: no such luck"
    assert run.table.of_rank(1)["total"].tolist() == [3, 3, 3]


def test_a_killed_rank_leaves_what_it_had_written(train: Path, tmp_path: Path) -> None:
    """Nobody has last words; the launcher merges the shards."""
    done = _spawnsim("run", train, "--backend", "mpi", "-n", 3, "--set", "kill_on=1", "--out", tmp_path / "a")
    assert done.returncode != 0
    run = spawnsim.Run.load(tmp_path / "a")
    assert "no rank could say why" in run.outcome
    assert run.totals["ranks"] == 3
    assert run.table.of_rank(1)["total"].tolist() == [3, 3, 3]
    assert not (tmp_path / "a/shards").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set", "lr=1"), "takes no parameter lr; its parameters: iterations, raise_on, kill_on, leave"),
        (("--platform", "laptop"), "--platform describes virtual ranks"),
    ],
)
def test_bad_parameters_are_told_once(train: Path, arguments: tuple[str, ...], message: str) -> None:
    """Two ranks find the same fault; one message appears, and the status is 2."""
    done = _spawnsim("run", train, "--backend", "mpi", "-n", 2, *arguments)
    assert done.returncode == 2
    assert done.stderr.count(message) == 1


def test_a_rank_count_must_fit_the_job(train: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a job, -n is the job's own size or an error."""
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    done = _spawnsim("run", train, "--backend", "mpi", "-n", 4)
    assert done.returncode == 2
    assert "one of 2 ranks already" in done.stderr
