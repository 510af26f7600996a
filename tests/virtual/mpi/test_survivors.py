"""The programs of `tests/real/survivors*.py`, on virtual ranks with a fault plan: they end as on real ranks.

What is asserted here is what `tests/real/test_recovery_cases.py` and `test_recovery_training.py` assert there.
"""

import runpy
import sys
from functools import partial
from pathlib import Path

import pytest
from support.virtual_run import platform, run

from spawnsim.errors import RankError
from spawnsim.virtual.engine import kernel

REAL = Path(__file__).parents[2] / "real"
DEADLINE_S = 1.5


@pytest.fixture
def survive(monkeypatch):
    """Run a case on n virtual ranks under a fault plan: `survive("parts", faults="crash:3@1s")`."""
    monkeypatch.syspath_prepend(str(REAL))

    def start(case, at="", *, faults, n=4, program="survivors.py", **how):
        main = runpy.run_path(str(REAL / program))["main"]
        how = {"platform": platform(eager_bytes=65536), "deadline_s": DEADLINE_S} | how
        return run(partial(main, case=case, at=at), n, faults=faults, **how)

    yield start
    sys.modules.pop("survivors", None)


def went_on(notes, *, dead, n=4):
    """The survivors have finished, on a communicator without the dead."""
    assert notes.column("size") == {rank: n - len(dead) for rank in range(n) if rank not in dead}


def events(notes, kind):
    """Return (rank, time, fields) of all events of a kind."""
    return [(rank, time_s, fields) for rank, time_s, what, fields in notes.events if what == kind]


@pytest.mark.parametrize(
    ("case", "faults", "dead"),
    [
        ("at_once", "crash:0,2@1s", {0, 2}),
        ("one_by_one", "crash:3@1s; crash:0@2s; crash:2@3s", {0, 2, 3}),
        ("deserts", "crash:0@1s; crash:1@1.5s", {0, 1}),
        ("inside", "crash:0@1s; crash:1@1.0101s", {0, 1}),
    ],
    ids=["two at once", "down to one", "before it comes", "on its way"],
)
def test_survivors_finish_their_steps(survive, case, faults, dead):
    """Whoever dies and whenever, the others go on from one step."""
    notes = survive(case, faults=faults)[1]
    went_on(notes, dead=dead)
    assert set(notes.column("step").values()) == {12}


@pytest.mark.parametrize(("wakes", "pause_s"), [("others", "+5s"), ("nobody", "")])
def test_a_rank_that_comes_back_too_late_is_fenced(survive, wakes, pause_s):
    """It ends in one error, and no message of its reaches the survivors: they drop and count them."""
    totals, notes = survive("fenced", wakes, faults=f"pause:2@0.5s{pause_s}")
    went_on(notes, dead={2})
    assert [fields["count"] for _, _, fields in events(notes, "dropped")] == [1, 1, 1]
    assert {fields["source"] for _, _, fields in events(notes, "late_message")} == {2}
    left = events(notes, "given_up")
    assert [(rank, time_s) for rank, time_s, _ in left] == ([(2, 5.5)] if pause_s else [])
    assert all("the other ranks have given this rank up" in fields["error"] for _, _, fields in left)
    assert totals.virtual_seconds < 6.0


def test_a_rank_that_comes_back_in_time_is_not_dead(survive):
    """Slow is not dead: below the deadline the result is right, and nobody recovers."""
    notes = survive("naps", faults="pause:2@0.5s+1s")[1]
    went_on(notes, dead=set())
    assert [kind for _, _, kind, *_ in notes.events] == ["pause"]


def test_a_sum_that_was_left_is_not_given_later(survive):
    """A paused rank goes on; whoever gave the sum up keeps the memory as it was."""
    notes = survive("buffers", faults="pause:2@0.5s+2.1s")[1]
    left = notes.column("left")
    assert left[0] == "Timeout"
    assert notes.column("untouched") == {rank: how != "done" for rank, how in left.items()}


def test_open_requests_end_in_revoked(survive):
    """Their memory is not written to."""
    notes = survive("open_requests", faults="crash:2@1s")[1]
    went_on(notes, dead={2})
    assert set(notes.column("ends").values()) == {"Revoked Revoked Revoked"}
    assert all(notes.column("untouched").values())


def test_a_background_task_is_reported(survive):
    """A wait of a task on the old communicator ends."""
    notes = survive("background", faults="crash:3@1s")[1]
    went_on(notes, dead={3})
    assert all(notes.column("ended").values())
    assert set(notes.column("heard").values()) == {"Revoked"}


def test_communicators_of_before_end_in_revoked(survive):
    """Those without a dead member too; new ones can be made."""
    notes = survive("parts", faults="crash:3@1s")[1]
    went_on(notes, dead={3})
    assert set(notes.column("ends").values()) == {" ".join(["Revoked"] * 7)}
    assert notes.column("part") == {0: 2, 1: 1, 2: 2}


def test_windows_of_before_end_in_revoked(survive):
    """A lock that died with its holder ends; windows are made anew."""
    notes = survive("windows", faults="crash:1@1s")[1]
    went_on(notes, dead={1})
    assert notes.column("locked")[0] in ("Timeout", "RankFailed", "Revoked")
    assert set(notes.column("old").values()) == {"Revoked Revoked Revoked"}
    assert set(notes.column("counted").values()) == {3}


def test_a_flush_towards_a_dead_rank_ends(survive):
    """Whatever way."""
    notes = survive("flush", faults="crash:1@1s")[1]
    went_on(notes, dead={1})
    assert all(notes.column("ended").values())


def test_a_death_that_nobody_noticed_is_no_failure(survive):
    """The others have finished."""
    assert sorted(survive("never_called", faults="crash:3@1s")[1].column("size")) == [0, 1, 2]


@pytest.mark.parametrize(
    ("case", "text"), [("uncaught", "rank 1 has failed"), ("raises", "ValueError: after all")]
)
def test_a_job_that_does_not_finish_ends_loudly(survive, case, text):
    """An error that nobody caught, an exception after a recovery."""
    with pytest.raises(RankError, match=text):
        survive(case, faults="crash:1@1s")


@pytest.mark.parametrize("victim", [1, 0], ids=["another dies", "rank 0 dies"])
@pytest.mark.parametrize("case", ["average_all", "selective", "one_sided", "groups"])
def test_training_goes_on_with_the_survivors(survive, case, victim):
    """Whatever the policy: the others finish, and exchange again."""
    pytest.importorskip("torch")
    how = {"faults": f"crash:{victim}@1.2s", "platform": "ethernet-10g"}
    notes = survive(case, victim, program="survivors_training.py", **how)[1]
    assert notes.column("size") == {rank: 3 for rank in range(4) if rank != victim}
    assert set(notes.column("iteration").values()) == {24}
    assert all(notes.column("whole").values())
    assert any(notes.column("busy").values())


@pytest.mark.parametrize(
    ("case", "faults"),
    [
        ("parts", "crash:3@1s"), ("open_requests", "crash:2@1s"), ("windows", "crash:1@1s"),
        ("background", "crash:3@1s"), ("fenced", "pause:2@0.5s+5s"), ("one_by_one", "crash:3@1s; crash:0@2s"),
    ],
)  # fmt: skip
def test_how_far_ranks_run_ahead_changes_nothing(survive, monkeypatch, case, faults):
    """Ranks that wait for the others after every effect find the same, at the same times."""
    found = []
    for budget in (4096, 1):
        monkeypatch.setattr(kernel, "RUN_AHEAD", budget)
        totals, notes = survive(case, faults=faults)
        found.append((totals.digest, sorted(map(str, notes.rows)), sorted(map(str, notes.events))))
    assert found[0] == found[1]
