"""Runs on virtual ranks, and studies, that are stopped from outside: what they say, and that nothing is lost."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import spawnsim
from spawnsim.real.launch.processes import children
from spawnsim.record import Recorder, journal
from spawnsim.run.process_setup import SIGNALS, stoppable
from spawnsim.run.writer import RunWriter

PROGRAM = """
import os, sys, time

def main(comm, iterations=40, wait_s=60.0, leave=False):
    for iteration in range(iterations):
        comm.record(iteration=iteration, loss=1 / (iteration + 1), policy="none")
        comm.record.event("replacement", donors=[iteration])
        comm.Barrier()
    if comm.rank == 10:
        time.sleep(0.6)
        comm.record(iteration=iterations, loss=0.0, policy="last")
        if leave:
            os._exit(7)
        print("ready", flush=True)
        time.sleep(wait_s)
"""
RANKS, ROWS = 11, 11 * 40


@pytest.fixture
def train(tmp_path: Path) -> Path:
    """A program whose last rank sleeps."""
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


def _started(*arguments: object, **how: object) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "spawnsim", *map(str, arguments)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how)


def _run(train: Path, place: Path, *more: object) -> subprocess.Popen[str]:
    return _started("run", train, "--ranks", RANKS, "--out", place, *more)


@pytest.mark.parametrize(
    ("number", "outcome"),
    [
        (signal.SIGINT, "interrupted"),
        (signal.SIGTERM, "stopped by SIGTERM"),
        (signal.SIGHUP, "stopped by SIGHUP"),
    ],
)
def test_a_stopped_run_says_so_in_one_line_and_keeps_its_rows(
    train: Path, tmp_path: Path, number: int, outcome: str
) -> None:
    """Nobody is blamed, the status is the signal's, and the totals say how far the run came."""
    place = tmp_path / "a"
    with _run(train, place) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "ready\n"
        started.send_signal(number)
        _, err = started.communicate(timeout=30)
    assert (started.returncode, err) == (
        128 + number, f"spawnsim: {outcome}; recorded until then: {place}\n",
    )  # fmt: skip
    run = spawnsim.Run.load(place)
    assert (run.outcome, run.table.rows, len(run.events)) == (outcome, ROWS + 1, ROWS)
    assert run.totals["messages"] > 0
    assert sorted(path.name for path in place.iterdir()) == [
        "events.jsonl",
        "inputs",
        "metrics.npz",
        "run.json",
    ]


STUCK = """
import _thread
from mpi4py import MPI
from spawnsim.virtual.engine import carriers

carriers.GRACE_S = 60.0  # the run must not give this rank up before the second signal, however slow the machine is
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 1:
    lock = _thread.allocate_lock()  # Python's own, on which a rank waits outside of virtual time
    lock.acquire()
    while True:
        try:
            print("ready", flush=True)
            lock.acquire()
        except KeyboardInterrupt:  # the signal came before the rank waited
            pass
MPI.COMM_WORLD.Barrier()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_run_at_once(tmp_path: Path, number: int) -> None:
    """Also where a rank in a thread of its own hears of none."""
    program = tmp_path / "stuck.py"
    program.write_text(STUCK)
    with _started("run", program, "--ranks", 2, "--carrier", "threads", "--set", "prefix=false") as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "ready\n"
        started.send_signal(number)
        while _handles(started.pid, number):  # two signals at once would be one
            time.sleep(0.01)
        assert started.poll() is None
        started.send_signal(number)
        assert started.wait(30) == -number


def _handles(process: int, number: int) -> bool:
    """Return whether the process has a handler for the signal; the first signal resets it."""
    status = Path(f"/proc/{process}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1)


ENDING = """
import atexit, time

def main(comm):
    if comm.rank == 1:
        atexit.register(lambda: (print("ending", flush=True), time.sleep(60)))
        print("ready", flush=True)
    while True:
        comm.Barrier()
"""


def test_a_second_ctrl_c_ends_a_command_that_is_about_to_end(tmp_path: Path) -> None:
    """It is in no run any more: Python itself would raise in whatever the process does last, and tell where."""
    program = tmp_path / "ending.py"
    program.write_text(ENDING)
    with _started("run", program, "--ranks", 2) as started:
        assert started.stdout is not None
        for line in ("ready\n", "ending\n"):
            assert started.stdout.readline() == line
            started.send_signal(signal.SIGINT)
        _, err = started.communicate(timeout=30)
    assert (started.returncode, err) == (-signal.SIGINT, "spawnsim: interrupted\n")


def _loads_for_a_pool(process: int) -> bool:
    lines = [Path(f"/proc/{child}/cmdline").read_bytes() for child in children(process)]
    return any(b"multiprocessing.forkserver" in line for line in lines)


@pytest.mark.parametrize(
    ("runs", "tell"), [("fuzz --runs", os.killpg), ("fuzz --runs", os.kill), ("sweep --seeds", os.killpg)]
)
def test_ctrl_c_while_a_pool_begins_says_one_line(
    train: Path, tmp_path: Path, runs: str, tell: Callable[[int, int], None]
) -> None:
    """A terminal tells all processes of a command, others the first one: what loads for the pool says nothing."""
    name, many = runs.split()
    arguments = (name, train, "--ranks", RANKS, "--set", "wait_s=0.0", many, 10_000, "--jobs", 2)
    with _started(*arguments, start_new_session=True, cwd=tmp_path) as started:
        while started.poll() is None and not _loads_for_a_pool(started.pid):
            time.sleep(0.01)
        time.sleep(0.2)  # until it waits for the pool
        tell(started.pid, signal.SIGINT)
        _, err = started.communicate(timeout=50)  # until the last of its processes has gone
    assert (started.returncode, "Traceback" in err) == (130, False), err


@pytest.mark.parametrize("leave", [False, True])
def test_a_killed_run_leaves_what_it_has_recorded(train: Path, tmp_path: Path, leave: bool) -> None:
    """SIGKILL, or `os._exit` in a rank: all but the last half second is in the folder, and can be read."""
    place = tmp_path / "a"
    with _run(train, place, "--set", f"leave={leave}") as started:
        assert started.stdout is not None
        assert started.stdout.readline() == ("" if leave else "ready\n")
        started.kill()
    run = spawnsim.Run.load(place)
    assert (run.outcome, run.table.rows) == ("running", ROWS + 1)
    assert run.totals["iterations"] == 41
    assert set(run.table["policy"].tolist()) == {"none", "last"}


def test_a_full_disk_is_named_and_what_it_holds_stays(train: Path, tmp_path: Path) -> None:
    """Rows are written as they come until no more fits: one line, status 2, and the part that fits can be read."""
    place = tmp_path / "a"

    def little() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    with _started(
        "run", train, "--ranks", RANKS, "--out", place, "--set", "iterations=4000", preexec_fn=little
    ) as started:
        _, err = started.communicate(timeout=60)
    assert started.returncode == 2
    assert err.splitlines()[0].startswith(
        f"spawnsim: cannot write {place / 'shards' / 'ranks'}: File too large"
    )
    assert err.splitlines()[-1] == f"Recorded until then: {place}"
    assert "Traceback" not in err
    assert spawnsim.Run.load(place).outcome.startswith("StorageError: cannot write")


def test_a_frame_that_does_not_fit_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows a torn frame could not be read: the shard is cut back, and the frame written once there is room."""
    each = journal.Journal(journal.shard(tmp_path))
    each.row(3, 0.0, {"loss": 1.0})
    each.flush()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150, before[1]))
    try:
        each.row(12, 1.0, {"loss": 2.0, "name": "b" * 200})
        with pytest.raises(spawnsim.errors.StorageError, match="cannot write"):
            each.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    each.row(14, 2.0, {"loss": 3.0})
    each.close()
    assert journal.merge(tmp_path).recorder.table()["rank"].tolist() == [3, 12, 14]


def test_a_run_is_the_same_with_and_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows go to disk in pieces, as the clock on the wall has it; what is read back, and its digest, are the same."""

    def main(comm: spawnsim.Comm) -> None:
        for iteration in range(5):
            comm.record(
                iteration=iteration, loss=comm.rng("x").random(), **({"late": "a"} if iteration > 3 else {})
            )
            comm.record.event("replacement", donor=iteration)
            comm.Barrier()

    plain = spawnsim.run(main, ranks=12)
    monkeypatch.setattr(journal, "FLUSH_S", 0.0)
    kept = spawnsim.run(main, ranks=12, out=tmp_path)
    assert kept.totals["digest"] == plain.totals["digest"] == spawnsim.Run.load(tmp_path).totals["digest"]
    assert [*kept.table] == [*plain.table]
    assert isinstance(RunWriter({}, None).recorder, Recorder)


STUDY = """
def study(context):
    context.sweep(context.grid("train.py", ranks=[11], seeds=range(10), over={"wait_s": [WAIT]}))
"""


@pytest.mark.parametrize("jobs", [0, 2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_study_stops_at_once_and_goes_on_from_there(
    train: Path, tmp_path: Path, jobs: int, number: int
) -> None:
    """Nothing more begins, no process is left, one line says what is done, and nobody prints a traceback."""
    study, place = tmp_path / "many.py", tmp_path / "s"
    study.write_text(STUDY.replace("WAIT", "1.5"))
    line = ("study", study, "--out", place, "--jobs", jobs)
    with _started(*line, start_new_session=True) as started:
        done = _await(place / "runs", started)
        os.killpg(started.pid, number) if number == signal.SIGINT else started.send_signal(number)
        _, err = started.communicate(timeout=60)
    finished = [path for path in (place / "runs").iterdir() if path.name.startswith("train")]
    assert done <= len(finished) < 10
    word = "interrupted" if number == signal.SIGINT else "stopped by SIGTERM"
    kept = f"{len(finished)} of 10 runs are done and kept: the same command continues with the rest"
    assert (started.returncode, err) == (128 + number, f"spawnsim: {word}; {kept}\n")


def test_a_killed_search_leaves_no_process(train: Path, tmp_path: Path) -> None:
    """Those that have run its cases waited for more for ever, with its output open."""
    line = ("fuzz", train, "--ranks", RANKS, "--set", "wait_s=0.0", "--runs", 10_000, "--jobs", 2)
    with _started(*line, cwd=tmp_path) as started:
        while started.poll() is None and len(_workers(started.pid)) < 2:  # the first only loads
            time.sleep(0.01)
        started.kill()
        out, _ = started.communicate(timeout=60)  # until the last of its processes has gone
    assert (started.returncode, out) == (-signal.SIGKILL, "")


def _workers(process: int) -> list[int]:
    """Return the processes of a pool that its fork server has started."""
    return [worker for child in children(process) for worker in children(child)]


IDLE = """
import time
from spawnsim.study.executors import pool

if __name__ == "__main__":
    try:
        with pool(2) as executor:
            executor.submit(time.sleep, 0).result()
            time.sleep(1.0)  # another process waits for work by now
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        print("stopped")
"""


def test_processes_that_wait_for_work_end_without_a_word(tmp_path: Path) -> None:
    """They printed a traceback each."""
    file = tmp_path / "idle.py"
    file.write_text(IDLE)
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("stopped\n", "", 0)


def _await(folder: Path, started: subprocess.Popen[str]) -> int:
    """Wait for the first run of a study; return how many there are."""
    while True:
        found = [path for path in folder.glob("train*") if path.is_dir()]
        if found:
            return len(found)
        assert started.poll() is None
        time.sleep(0.05)


def test_a_forked_child_has_pythons_handlers_of_signals() -> None:
    """A pool that is terminated printed a traceback for each worker."""
    with stoppable():
        child = os.fork()
        if not child:
            usual = all(signal.getsignal(number) == handler for number, handler in SIGNALS.items())
            os._exit(0 if usual else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
