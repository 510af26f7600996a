"""`spawnsim run --backend mpi`: real ranks, real folders, and jobs that end early."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.surviving import processes

import spawnsim
from spawnsim.errors import did_you_mean

pytestmark = pytest.mark.mpi

PROGRAM = """
import atexit, os, sys, time

def main(comm, iterations=3, raise_on=-1, kill_on=-1, signal=9, leave=False, wait_s=0.0, unread=0, talk=0, meet=True,
         kill_at_exit=-1):
    rank = comm.Get_rank()
    if rank == kill_at_exit:
        atexit.register(os.kill, os.getpid(), signal)
    for line in range(talk):
        print("rank", rank, "x" * 60, "line", line, "end")
    for _ in range(unread if rank == 0 else 0):
        comm.Isend(bytearray(100_000), 1, 7)
    for iteration in range(iterations):
        with comm.compute():
            time.sleep(0.001)
        comm.record(iteration=iteration, total=comm.allreduce(rank))
    comm.record.event("replacement", donors=[0])
    if rank == raise_on:
        raise ValueError("no such luck")
    if rank == kill_on:
        os.kill(os.getpid(), signal)
        time.sleep(60)
    if leave:
        sys.exit()
    time.sleep(wait_s)
    if meet:
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
    assert sorted(path.name for path in real.iterdir()) == [
        "events.jsonl", "inputs", "metrics.npz", "run.json",
    ]  # fmt: skip


@pytest.mark.parametrize("backend", ["mpi", "torch"])
def test_the_command_is_the_one_that_was_typed(train: Path, tmp_path: Path, backend: str) -> None:
    """And not what its ranks were started with; a run that the program starts itself has its own command."""
    train.write_text("import os\n\ndef main(comm):\n    comm.record(told='SPAWNSIM_COMMAND' in os.environ)\n")
    survive = ["--survive"] * (backend == "mpi")
    typed = ["run", train, "--backend", backend, "-n", 2, *survive, "--quiet", "--out", tmp_path / "run"]
    assert _spawnsim(*typed).returncode == 0
    found = spawnsim.Run.load(tmp_path / "run")
    assert found.what["made"]["command"] == shlex.join(["spawnsim", *map(str, typed)])
    assert not found.table["told"].any()


@pytest.mark.parametrize("backend", ["mpi", "torch"])
def test_checked_calls_tell_a_wrong_root(tmp_path: Path, backend: str) -> None:
    """Both libraries take it, and go on with what they have; the option ends the job, with the line of each rank."""
    program = tmp_path / "roots.py"
    program.write_text(
        "import numpy as np\n\ndef main(comm):\n    first = 0 if comm.rank else 1\n"
        "    comm.Bcast(np.full(3, 1.0), root=first)\n"
    )
    done = _spawnsim("run", program, "--backend", backend, "-n", 3, "--check-calls")
    assert done.returncode == 1 and "MismatchError" in done.stderr, done.stderr
    for rank, root in (("rank 0", 1), ("ranks 1-2", 0)):
        assert re.search(rf"  {rank}: Bcast, root {root}, 24 bytes of float64 \(roots.py:5\)", done.stderr)


MIXED = """
import numpy as np
from mpi4py import MPI
from spawnsim.comm import CallError

def main(comm, case):
    x, to, fro = np.ones(2), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if case == "op":
        comm.Allreduce(MPI.IN_PLACE, x)
        comm.Allreduce(MPI.IN_PLACE, x, op=MPI.MAX)
    if case == "requests":
        MPI.Request.Waitall([comm.Irecv(x, fro), comm.Isend(x.copy(), to)])
    if case == "window":
        MPI.Win.Allocate(8, comm=comm)
    comm.Isend(x, to)
    for name in ("ANY_SOURCE", "PROC_NULL"):
        for call in (comm.Recv, comm.Irecv):
            try:
                call(x, getattr(MPI, name))
            except CallError as error:
                comm.record(named=f"from spawnsim.comm import {name}" in str(error))
    comm.Recv(x, fro)
"""


@pytest.mark.parametrize("backend", ["virtual", "mpi", "torch"])
@pytest.mark.parametrize("case", ["op", "requests", "window"])
def test_what_is_mpi4pys_is_refused_in_words(tmp_path: Path, backend: str, case: str) -> None:
    """A communicator takes and gives spawnsim's own; ranks over MPI hand on what has mpi4py's type."""
    program = tmp_path / "mixed.py"
    program.write_text(MIXED)
    done = _spawnsim("run", program, "--backend", backend, "-n", 2, "--set", f"case={case}", "--quiet")
    if (backend, case) == ("mpi", "op"):
        assert done.returncode == 0, done.stderr
    else:
        assert "from spawnsim.comm import IN_PLACE, MAX, Request" in done.stderr
        assert done.returncode == 1


@pytest.mark.parametrize("backend", ["virtual", "mpi", "torch"])
def test_numbers_of_mpi4py_are_no_ranks(tmp_path: Path, backend: str) -> None:
    """MPICH's ANY_SOURCE must not mean here what Open MPI's PROC_NULL means there: to receive nothing, silently."""
    program = tmp_path / "mixed.py"
    program.write_text(MIXED)
    given = ("--backend", backend, "-n", 2, "--set", "case=numbers", "--out", tmp_path / "run")
    done = _spawnsim("run", program, *given)
    assert done.returncode == 0, done.stderr
    assert spawnsim.Run.load(tmp_path / "run").table["named"].tolist() == [True] * 8


OWN = """
import numpy as np
from spawnsim.comm import ANY_SOURCE, IN_PLACE, LOCK_SHARED, MAX, UNDEFINED, Request

def main(comm):
    right, most, got = (comm.rank + 1) % comm.size, np.array([float(comm.rank)]), np.zeros(1)
    comm.Allreduce(IN_PLACE, most, op=MAX)
    requests = [comm.Irecv(got, source=ANY_SOURCE), comm.Isend(most + comm.rank, right)]
    assert Request.Waitsome(requests) is not None
    assert Request.Waitall(requests) and Request.Testall(requests) and Request.Waitany(requests) == UNDEFINED
    assert Request.waitall([comm.irecv(source=ANY_SOURCE), comm.isend("x", right)])[0] == "x"
    assert Request.Waitall([]) and Request.waitall([]) == [] and Request.Waitany([]) == UNDEFINED
    window = comm.Win.Allocate(8, comm=comm)
    window.Lock(right, LOCK_SHARED)
    window.Unlock(right)
    window.Free()
    comm.record(got=got[0])
"""


@pytest.mark.parametrize("backend", ["virtual", "mpi", "torch"])
def test_constants_and_requests_of_spawnsim_serve_everywhere(tmp_path: Path, backend: str) -> None:
    """A file with main(comm) takes what MPI's calls need from spawnsim.comm, whatever carries its ranks."""
    program = tmp_path / "own.py"
    program.write_text(OWN)
    done = _spawnsim("run", program, "--backend", backend, "-n", 3, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert spawnsim.Run.load(tmp_path / "run").table["got"].tolist() == [4, 2, 3]


DRAWS = """
import random
import numpy as np

def main(comm):
    import torch

    comm.record(drawn=repr([random.random(), np.random.rand(), float(torch.rand(1))]))
    torch.manual_seed(100 + comm.rank)
    comm.Barrier()
    comm.record(drawn=repr([random.random(), np.random.rand(), float(torch.rand(1))]))
"""


def test_global_generators_start_where_virtual_ranks_start(tmp_path: Path) -> None:
    """A program that seeds nothing, or all, draws the same numbers on real ranks and on virtual ones."""
    program, real = tmp_path / "draws.py", tmp_path / "real"
    program.write_text(DRAWS)
    done = _spawnsim("run", program, "--backend", "mpi", "-n", 2, "--seed", 3, "--out", real)
    assert done.returncode == 0, done.stderr
    virtual = spawnsim.run(program, ranks=2, seed=3)
    assert spawnsim.Run.load(real).table["drawn"].tolist() == virtual.table["drawn"].tolist()


def test_totals_need_no_folder(train: Path) -> None:
    """Without --out the rows are gathered; `sys.exit()` in the program is an ordinary end."""
    done = _spawnsim("run", train, "--backend", "mpi", "-n", 2, "--json", "--set", "leave=true")
    totals = json.loads(done.stdout)
    assert (done.returncode, totals["iterations"], totals["replacements"]) == (0, 3, 2)


@pytest.mark.parametrize("backend", ["virtual", "mpi", "torch"])
def test_a_mistyped_call_is_answered_with_the_names_that_come_closest(backend: str, tmp_path: Path) -> None:
    """Over MPI it was taken for an object of mpi4py's that had met one of ours."""
    (tmp_path / "typo.py").write_text("def main(comm):\n    comm.allReduce(1)\n")
    done = _spawnsim("run", tmp_path / "typo.py", "--backend", backend, "-n", 2)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "raised AttributeError" in last
    assert "; did you mean Allreduce or allreduce?" in last and "typo.py:2" in last


def test_a_package_that_an_extra_installs_is_named(tmp_path: Path) -> None:
    """A page's first program ended in ModuleNotFoundError; of other packages nothing is said."""
    for name, said in (("torchft", "pip install 'spawnsim[torchft]'"), ("nowhere_to_be_found", "")):
        error = ModuleNotFoundError(f"No module named {name!r}", name=f"{name}.manager")
        assert did_you_mean(error).removeprefix("; ") == said
    (tmp_path / "torchft.py").write_text("raise ModuleNotFoundError('gone', name='torchft')")
    (tmp_path / "ft.py").write_text("import torchft\n\ndef main(comm):\n    pass\n")
    done = _spawnsim("run", tmp_path / "ft.py", "-n", 2)
    assert done.returncode == 1
    assert done.stderr.endswith("while it was loaded; pip install 'spawnsim[torchft]'\n")


def test_a_raising_rank_ends_the_job_and_the_folder_is_kept(train: Path, tmp_path: Path) -> None:
    """One traceback, a non-zero status, and the rows of all ranks until then."""
    done = _spawnsim(
        "run", train, "--backend", "mpi", "-n", 3, "--set", "raise_on=1", "--out", tmp_path / "a"
    )
    assert done.returncode != 0
    assert done.stderr.count("\nValueError: no such luck") == 1
    assert re.search(
        r"\nspawnsim: rank 1 of 3 raised ValueError: no such luck \(train.py:\d+\); the job ends\n",
        done.stderr,
    )
    assert done.stderr.endswith(f"\nspawnsim: recorded until then: {tmp_path / 'a'}\n")
    run = spawnsim.Run.load(tmp_path / "a")
    assert run.outcome == "ValueError: no such luck"
    assert run.table.of_rank(1)["total"].tolist() == [3, 3, 3]


@pytest.mark.parametrize("backend", ["mpi", "torch"])
@pytest.mark.parametrize(
    ("given", "status", "outcome"),
    [
        ((), 0, "finished"),
        (("raise_on=1",), 1, "ValueError: no such luck"),
        (("leave=true",), 0, "finished"),
        (("kill_on=1",), 137, r"rank 1 \(process .*\) was killed by signal 9 \(SIGKILL\)"),
        (
            ("kill_at_exit=1",), 137,
            r"rank 1 \(process .*\) was killed by signal 9 \(SIGKILL\), after all rows had been recorded",
        ),
        (("kill_on=1", "signal=15"), 143, r"rank 1 was asked to stop \(SIGTERM\)"),
    ],
)  # fmt: skip
def test_the_outcome_agrees_with_the_status(
    train: Path, tmp_path: Path, backend: str, given: tuple[str, ...], status: int, outcome: str
) -> None:
    """However a job ends, run.json, the launcher's line and the status of the command say the same."""
    told = [word for value in given for word in ("--set", value)]
    done = _spawnsim("run", train, "--backend", backend, "-n", 2, *told, "--out", tmp_path / "a")
    assert done.returncode == status, done.stderr
    run = spawnsim.Run.load(tmp_path / "a")
    assert re.fullmatch(outcome, run.outcome)
    # Of a killed job others may lose what they had not written yet; that one rank is told to stop loses nothing.
    assert run.table.rows == 6 or given == ("kill_on=1",)
    assert (run.totals["ranks"], run.table.of_rank(1)["total"].tolist()) == (2, [1, 1, 1])
    assert not (tmp_path / "a/shards").exists()
    if status > 128 and "after all" not in run.outcome:  # the launcher alone speaks
        kept = f"spawnsim: {run.outcome}; recorded until then: {tmp_path / 'a'}"
        assert (done.stdout, done.stderr.splitlines()) == ("", [kept])


def test_a_job_that_survives_its_ranks_needs_no_folder(train: Path) -> None:
    """Its totals are printed once, by the lowest rank that lives, and count the dead one's rows."""
    given = ("--survive", "--json", "--set", "kill_on=0", "--set", "meet=false")
    done = _spawnsim("run", train, "--backend", "mpi", "-n", 3, *given)
    assert done.returncode == 0, done.stderr
    assert {"ranks": 3, "deaths": 1}.items() <= json.loads(done.stdout).items()
    line = r"\s*spawnsim: rank 0 \(process \d+ on .*\) was killed by signal 9 \(SIGKILL\)\s*"
    assert re.fullmatch(line, done.stderr)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--set", "lr=1"),
            "takes no parameter lr; its parameters: iterations, raise_on, kill_on, signal, leave, wait",
        ),
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


def test_a_real_run_counts_what_its_ranks_did(train: Path, tmp_path: Path) -> None:
    """Messages, bytes and events are the program's; the digest is that of the results, and nothing shows None."""
    out = [tmp_path / "a", tmp_path / "b"]
    shown = [_spawnsim("run", train, "--backend", "mpi", "-n", 2, "--out", place) for place in out]
    runs = [spawnsim.Run.load(place) for place in out]
    for run in runs:
        assert run.totals["messages"] == 2 * (3 + 1)  # three reductions of an object, one Barrier
        assert run.totals["events"] == run.totals["messages"] + 2 * 3  # and three computed blocks
        assert 0 < run.totals["run_seconds"] <= run.totals["wall_seconds"] < 60
        assert "virtual_seconds" not in run.totals
        assert "virtual" not in repr(run)
    assert runs[0].totals["digest"] == runs[1].totals["digest"] is not None
    assert "None" not in shown[0].stdout
    for command in ("report", "plot", "trace"):
        page = tmp_path / ("plots" if command == "plot" else f"{command}.html")
        done = _spawnsim(command, out[0], "--out", page)
        assert done.returncode == 0, done.stderr
        assert not page.is_file() or ">None<" not in page.read_text(encoding="utf-8")


def test_messages_that_nobody_received_are_dropped_and_counted(train: Path, tmp_path: Path) -> None:
    """MPICH aborts when it ends with large messages inside; here they are an event, and the end takes no deadline."""
    begin_s = time.monotonic()
    done = _spawnsim("run", train, "--backend", "mpi", "-n", 2, "--out", tmp_path / "a", "--set", "unread=3")
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begin_s < 25
    run = spawnsim.Run.load(tmp_path / "a")
    leftovers = [event for event in run.events if event["kind"] == "leftover_messages"]
    assert [(event["rank"], event["count"]) for event in leftovers] == [(1, 3)]
    assert run.totals["bytes"] == 300_000


@pytest.mark.parametrize(
    ("number", "outcome"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "stopped by SIGTERM")]
)
def test_a_stopped_job_says_so_and_loses_nothing(
    train: Path, tmp_path: Path, number: int, outcome: str
) -> None:
    """Ctrl-C or SIGTERM to the launcher: one line, a status of its own, and every row that was recorded."""
    place = tmp_path / "a"
    line = ["run", train, "--backend", "mpi", "-n", 3, "--out", place, "--set", "wait_s=60"]
    started = _started(*line)
    _await_rows(place, 9)
    started.send_signal(number)
    out, err = started.communicate(timeout=30)
    assert (started.returncode, out) == (128 + number, "")
    assert err.splitlines() == [f"spawnsim: {outcome}; recorded until then: {place}"]
    run = spawnsim.Run.load(place)
    assert (run.outcome, run.table.rows) == (outcome, 9)


def test_a_killed_launcher_takes_its_job_along(train: Path, tmp_path: Path) -> None:
    """Nobody would see what the ranks say, or stop them; they keep what they have recorded."""
    place = tmp_path / "a"
    started = _started("run", train, "--backend", "mpi", "-n", 2, "--out", place, "--set", "wait_s=60")
    _await_rows(place, 6)
    started.kill()
    started.communicate(timeout=60)
    end_s = time.monotonic() + 30
    while processes(str(train)):
        assert time.monotonic() < end_s
        time.sleep(0.1)
    run = spawnsim.Run.load(place)
    assert (run.outcome, run.table.rows) == ("stopped by SIGTERM", 6)


def _started(*arguments: object) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "spawnsim", *map(str, arguments)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _await_rows(place: Path, rows: int) -> None:
    """Wait until so many rows have reached the folder; an event takes those before it along."""
    end_s = time.monotonic() + 60
    while not (place / "shards").is_dir() or spawnsim.Run.load(place).table.rows < rows:
        assert time.monotonic() < end_s
        time.sleep(0.1)


@pytest.mark.parametrize("backend", ["mpi", "torch"])
def test_lines_of_ranks_are_whole(train: Path, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """What ranks print side by side is never cut into each other, unbuffered Python or not."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    done = _spawnsim("run", train, "--backend", backend, "-n", 4, "--quiet", "--set", "talk=400")
    expected = {f"rank {rank} {'x' * 60} line {line} end" for rank in range(4) for line in range(400)}
    assert sorted(done.stdout.splitlines()) == sorted(expected), done.stderr
    assert done.returncode == 0, done.stderr


def test_one_bar_of_rank_0(train: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher decides whether there is a bar, and one rank draws it."""
    monkeypatch.setenv("SPAWNSIM_PROGRESS", "1")  # as the launcher sets it on a terminal
    done = _spawnsim("run", train, "--backend", "mpi", "-n", 3, "--set", "wait_s=1")
    assert done.returncode == 0
    assert "rank 0: 3 rows" in done.stderr
    assert "rank 1" not in done.stderr


def test_the_world_of_a_toolkit_is_that_of_the_run(tmp_path: Path) -> None:
    """A policy or toolkit call without a group finds the run's own communicator: its seed, recorder and deadline."""
    path = tmp_path / "train.py"
    path.write_text(
        "from spawnsim.comm.backends import world\n"
        "def main(comm):\n"
        "    assert world() is comm\n"
        "    comm.record(ok=1)\n"
    )
    for backend in ("mpi", "torch"):
        done = _spawnsim("run", path, "--backend", backend, "-n", 2, "--json")
        assert done.returncode == 0, done.stderr
