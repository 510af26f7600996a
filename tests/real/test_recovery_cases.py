"""Deaths, stops and late returns on real ranks: what the survivors find, how the job ends, and that nothing is left.

Each case is one program of `survivors.py`, started by `launch(survive=True)`; conditions bound them, not sleeps.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from surviving import went_on

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(150)]


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
    ended = survive("naps", deadline_s=20.0)
    went_on(ended, dead=set())
    assert ended.events("recovered") == []


def test_a_sum_that_was_left_is_not_given_later(survive):
    """A stopped rank goes on and completes the sum; whoever gave it up keeps the memory as it was."""
    ended = survive("buffers")
    left, untouched = ended.column("left"), ended.column("untouched")
    assert left[0] == "Timeout", ended.err
    assert untouched == {rank: how != "done" for rank, how in left.items()}, ended.err


def test_open_requests_end_in_revoked(survive):
    """Those that need the dead may have failed before. Their memory is not written to, and no end waits for them."""
    ended = survive("open_requests")
    went_on(ended, dead={2})
    ends = {rank: text.split() for rank, text in ended.column("ends").items()}
    assert ends[0][0] == ends[3][0] == "Revoked", ends
    assert {end for each in ends.values() for end in each} <= {"Revoked", "RankFailed"}, ends
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


def test_a_window_that_a_death_has_left_half_made_holds_up_no_other(survive):
    """Open MPI makes one at a time, and waited for ever for the turn of the one that was left."""
    ended = survive("half_made", deadline_s=10.0)
    went_on(ended, dead={1})
    assert set(ended.column("ended").values()) <= {"RankFailed", "Revoked"}
    assert max(ended.column("took_s").values()) < 5.0, ended.err


def test_a_flush_towards_a_dead_rank_ends(survive):
    """Also where it needs the target's polls."""
    ended = survive("flush")
    went_on(ended, dead={1})
    assert all(ended.column("ended").values())


def test_a_death_is_noticed_at_once(survive):
    """Nobody waits for a deadline: a keeper has told of the death, or the library. Who acknowledges it hears others."""
    ended = survive("noticed", deadline_s=90.0)
    went_on(ended, dead={3})
    text = ended.column("text")
    assert (text[0], text[1]) == ("RankFailed", "RankFailed"), text
    assert text[2] == "RankFailed (1, 1) heard", text


@pytest.mark.parametrize(
    ("at", "victim"),
    [("waiting", 1), ("settled", 0), ("settled", 2), ("merging", 0), ("merged", 0), ("released", 1)],
)
def test_a_death_at_the_end_takes_nothing_back(survive, at, victim):
    """Nobody waits for the dead in the library's own end, and the run is whole, whoever was to write it."""
    ended = survive(at=at, program=Path(__file__).with_name("last_moments.py"), given={"victim": victim})
    assert (ended.status, ended.run.outcome) == (0, "finished"), ended.err
    kept = set(range(4)) - (
        {victim} if at in ("waiting", "settled") else set()
    )  # those have not closed their journals
    assert set(ended.column("size")) >= kept
    assert re.fullmatch(
        rf"\s*spawnsim: rank {victim} \(process \d+ on .*\) was killed by signal 9 .*\s*", ended.err
    )
    assert not ended.shared


def test_who_is_slow_at_the_end_is_not_given_up(survive):
    """The others wait for a rank that still runs its program, though they know that another one has died."""
    ended = survive(at="before", program=Path(__file__).with_name("last_moments.py"))
    assert (ended.status, ended.run.outcome) == (0, "finished"), ended.err
    assert ended.run.table.of_rank(0)["slow"].tolist()[-1] == 1.0
    assert ended.err.count("spawnsim") == 1


def test_a_death_that_nobody_noticed_is_no_failure(survive):
    """The others have finished; they part without the dead."""
    ended = survive("never_called")
    assert ended.status == 0, ended.err
    assert sorted(ended.column("size")) == [0, 1, 2]


@pytest.mark.parametrize(
    ("case", "status", "text"),
    [
        ("all_die", 4, "no rank has lived to the end"),
        ("uncaught", 4, "missing: rank 1"),
        ("raises", 1, "ValueError: after all"),
        ("hopeless", 4, "5 recoveries in a row have begun at step 3, and nobody has died"),
    ],
)
def test_a_job_that_does_not_finish_ends_loudly(survive, case, status, text):
    """Nobody left, an error that nobody caught, an exception after a recovery."""
    ended = survive(case)
    assert ended.status == status, ended.err
    assert text in ended.err
    assert ended.err.count("Traceback") <= 1
