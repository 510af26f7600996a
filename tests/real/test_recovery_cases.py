"""Deaths, stops and late returns on real ranks: what the survivors find, how the job ends, and that nothing is left.

Each case is one program of `survivors.py`, started by `launch(survive=True)`; conditions bound them, not sleeps.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spawnsim import Run

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(150)]

PROGRAM = Path(__file__).with_name("survivors.py")
LAUNCH = """
import sys
from spawnsim.real.launch import launch
sys.exit(launch(sys.argv[1], int(sys.argv[2]), sys.argv[3:], survive=True))
"""
DEADLINE_S = 1.5


@dataclass(frozen=True)
class Ended:
    """How a job ended, what its ranks recorded, and what they said."""

    status: int
    err: str
    run: Run

    def column(self, name: str) -> dict[int, Any]:
        """Return what each rank recorded last under a name."""
        return dict(zip(self.run.table["rank"].tolist(), self.run.table[name].tolist(), strict=True))

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return all events of a kind."""
        return [event for event in self.run.events if event["kind"] == kind]


Survive = Callable[..., Ended]


@pytest.fixture
def survive(tmp_path: Path) -> Survive:
    """Run a case on n ranks: `survive("at_once", n=4)`; a job that hangs is ended, and nothing may be left running."""

    def run(case: str, at: str = "", *, n: int = 4, program: Path = PROGRAM) -> Ended:
        out = tmp_path / "run"
        given = ["--backend", "mpi", "--quiet", "--deadline", str(DEADLINE_S), "--out", str(out)]
        chosen = ["--set", f"case={case}", *(["--set", f"at={at}"] if at else [])]
        command = [sys.executable, "-c", LAUNCH, str(program), str(n), *given, *chosen]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=_environment()) as started:
            try:
                err = started.communicate(timeout=100)[1]
            except subprocess.TimeoutExpired:
                started.send_signal(signal.SIGTERM)
                pytest.fail(f"the job hung\n{started.communicate()[1]}")
        assert processes(str(out)) == []
        return Ended(started.returncode, err, Run.load(out))

    return run


def _environment() -> dict[str, str]:
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
    return os.environ | allowed


def processes(word: str) -> list[int]:
    """Return the processes, this one aside, whose command line has a word."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes()
        except OSError:  # it has just ended
            continue
        if word.encode() in words and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def went_on(ended: Ended, *, dead: set[int], n: int = 4) -> None:
    """The survivors have finished, on a communicator without the dead, and so has the job."""
    assert ended.status == 0, ended.err
    assert ended.run.outcome == "finished"
    assert ended.column("size") == {rank: n - len(dead) for rank in range(n) if rank not in dead}, ended.err


@pytest.mark.parametrize(
    ("case", "at", "dead"),
    [
        ("at_once", "", {0, 2}),
        ("one_by_one", "", {0, 2, 3}),
        ("deserts", "", {0, 1}),
        ("inside", "deciding", {0, 1}),
        ("inside", "making", {0, 1}),
        ("inside", "confirming", {0, 1}),
    ],
    ids=[
        "two at once",
        "down to one",
        "before it comes",
        "while it decides",
        "inside Create_group",
        "after it",
    ],
)
def test_survivors_finish_their_steps(survive, case, at, dead):
    """Whoever dies and whenever, rank 0 and the one that decides included, the others go on from one step."""
    ended = survive(case, at)
    if case == "one_by_one":  # two ranks finished no step alone: only the last one is left to say so
        assert ended.status == 0, ended.err
        assert ended.column("size") == {1: 1}
        return
    went_on(ended, dead=dead)
    assert set(ended.column("step").values()) == {12}


@pytest.mark.parametrize("wakes", ["others", "nobody"])
def test_a_rank_that_comes_back_too_late_is_fenced(survive, wakes):
    """It ends in one error, and no message of its reaches the survivors: they drop and count them."""
    ended = survive("fenced", wakes)
    went_on(ended, dead={2})
    assert ended.err.count("spawnsim.errors.Revoked: ") == 1, ended.err
    assert "rank 2 of 4 raised; this rank leaves" in ended.err
    assert all(event["source"] == 2 for event in ended.events("late_message"))
    assert all(event["count"] >= 1 for event in ended.events("dropped"))
    assert len(ended.events("dropped")) == 3


def test_a_rank_that_comes_back_in_time_is_not_dead(survive):
    """Slow is not dead: below the deadline the result is right, and nobody recovers."""
    ended = survive("naps")
    went_on(ended, dead=set())
    assert ended.events("recovered") == []


def test_a_sum_that_was_left_is_not_given_later(survive):
    """A stopped rank goes on and completes the sum; whoever gave it up keeps the memory as it was."""
    ended = survive("buffers")
    assert ended.column("untouched") == {0: True, 1: True, 3: True}, ended.err


def test_open_requests_end_in_revoked(survive):
    """Their memory is not written to, the end of the job does not wait for them."""
    ended = survive("open_requests")
    went_on(ended, dead={2})
    assert set(ended.column("ends").values()) == {"Revoked Revoked Revoked"}
    assert all(ended.column("untouched").values())


def test_a_background_task_is_told(survive):
    """A wait of a task on the old communicator ends."""
    ended = survive("background")
    went_on(ended, dead={3})
    assert all(ended.column("ended").values())
    assert set(ended.column("heard").values()) <= {"Revoked", "Timeout", "RankFailed"}


def test_communicators_of_before_end_in_revoked(survive):
    """Those without a dead member too; new ones can be made."""
    ended = survive("parts")
    went_on(ended, dead={3})
    assert set(ended.column("ends").values()) == {" ".join(["Revoked"] * 7)}
    assert ended.column("part") == {0: 2, 1: 1, 2: 2}


def test_windows_of_before_end_in_revoked(survive):
    """A lock that died with its holder is a Timeout; windows are made anew."""
    ended = survive("windows")
    went_on(ended, dead={1})
    assert ended.column("locked")[0] in ("Timeout", "RankFailed", "Revoked")
    assert set(ended.column("old").values()) == {"Revoked Revoked Revoked"}
    assert set(ended.column("counted").values()) == {3}


def test_a_flush_towards_a_dead_rank_ends(survive):
    """Also where it needs the target's polls."""
    ended = survive("flush")
    went_on(ended, dead={1})
    assert all(ended.column("ended").values())


def test_a_death_that_nobody_noticed_is_no_failure(survive):
    """The others have finished; they part without the dead."""
    ended = survive("never_called")
    assert ended.status == 0, ended.err
    assert sorted(ended.column("size")) == [0, 1, 2]


@pytest.mark.parametrize(
    ("case", "status", "text"),
    [
        ("all_die", 4, "SIGKILL"),
        ("uncaught", 4, "missing: rank 1"),
        ("raises", 1, "ValueError: after all"),
    ],
)
def test_a_job_that_does_not_finish_ends_loudly(survive, case, status, text):
    """Nobody left, an error that nobody caught, an exception after a recovery."""
    ended = survive(case)
    assert ended.status == status, ended.err
    assert text in ended.err
    assert ended.err.count("Traceback") <= 1
