"""Deaths, stops and late returns on real ranks: what the survivors find, how the job ends, and that nothing is left.

Each case is one program of `survivors.py`, started by `launch(survive=True)`; conditions bound them, not sleeps.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.surviving import went_on

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(150)]


def test_survivors_finish_their_steps(survive):
    """Whoever dies and whenever, rank 0 and the one that decides included, the others go on from one step."""
    dead = {"at_once": 2, "deserts": 2, "inside deciding": 2, "inside making": 2, "one_by_one": 3}
    cases, details = zip(*(case.partition(" ")[::2] for case in dead), strict=True)
    ended = survive("+".join(cases), "+".join(details), n=12)
    assert (ended.status, ended.run.outcome) == (0, "finished"), ended.err
    left = 12
    for number, (case, died) in enumerate(dead.items()):
        left -= died
        assert set(ended.column("size", number).values()) == {left}, (case, ended.err)
        assert set(ended.column("step", number).values()) == {12}, case
    (last,) = ended.column("size", number)  # by rank in the world, as is what the events tell
    reported = {
        rank for event in ended.events("recovered") if event["rank"] == last for rank in event["dead"]
    }
    assert reported == set(range(12)) - {last}


def test_a_death_when_others_have_their_communicator_begins_another_round(survive):
    """All go on together, those who had one already included."""
    ended = survive("inside", "confirming")
    went_on(ended, dead={0, 1})
    assert set(ended.column("step").values()) == {12}


def test_what_was_made_before_a_death_ends_with_it(survive):
    """Requests, tasks, communicators, windows: one case after the other, with a death in each."""
    ended = survive("+".join(ENDS), "+" * (len(ENDS) - 1), n=4 + len(ENDS), deadline_s=20.0)
    assert (ended.status, ended.run.outcome) == (0, "finished"), ended.err
    for number, (name, check) in enumerate(ENDS.items()):
        sizes = ended.column("size", number)
        assert len(sizes) >= 4, (name, ended.err)
        assert set(sizes.values()) == {3 + len(ENDS) - number}, (name, ended.err)
        check(lambda column, number=number: ended.column(column, number), ended)


def open_requests(column, ended):
    """Those that need the dead may have failed before. Their memory is not written to, and no end waits for them."""
    ends, me = column("ends"), column("me")
    assert any(text.startswith("Revoked") for text in ends.values()), ends
    assert all(text.startswith("Revoked") for rank, text in ends.items() if me[rank] != 1), (
        ends
    )  # 1 receives from it
    assert {end for text in ends.values() for end in text.split()} <= {"Revoked", "RankFailed"}, ends
    assert all(column("untouched").values())


def background(column, ended):
    """A wait of a task on the old communicator ends."""
    assert all(column("ended").values())
    assert set(column("heard").values()) <= {"Revoked", "Timeout", "RankFailed"}


def parts(column, ended):
    """Communicators without a dead member end too; new ones can be made."""
    assert set(column("ends").values()) == {" ".join(["Revoked"] * 7)}
    (size,) = set(column("size").values())
    part, me = column("part"), column("me")
    assert part == {rank: (size + 1 - me[rank] % 2) // 2 for rank in part}


def windows(column, ended):
    """A lock that died with its holder is a Timeout; windows are made anew."""
    locked, me = column("locked"), column("me")
    assert next(locked[rank] for rank in me if me[rank] == 0) in ("Timeout", "RankFailed", "Revoked")
    assert set(column("old").values()) == {"Revoked Revoked Revoked"}
    assert set(column("counted").values()) == set(column("size").values())


def half_made(column, ended):
    """Open MPI makes one window at a time, and waited for ever for the turn of one that a death had left half made."""
    assert set(column("ended").values()) <= {"RankFailed", "Revoked"}
    assert max(column("took_s").values()) < 10.0, ended.err


def flush(column, ended):
    """A flush towards a dead rank ends, also where it needs the target's polls. And no window of arrays needs torch."""
    assert all(column("ended").values())
    assert all(column("light").values())


def noticed(column, ended):
    """Nobody waits for a deadline: a monitor reports the death, or the library. Who acknowledges it hears others."""
    text, me = column("text"), column("me")
    assert {text[rank] for rank in me if me[rank] != 2} == {"RankFailed"}, text
    assert [text[rank] for rank in me if me[rank] == 2] == ["RankFailed (1, 1) heard"], text


ENDS = {
    each.__name__: each for each in (open_requests, background, parts, windows, noticed, flush, half_made)
}


@pytest.mark.parametrize("wakes", ["others", "nobody"])
def test_a_rank_that_comes_back_too_late_is_fenced(survive, wakes):
    """It ends in one error, and no message of its reaches the survivors: they drop and count them."""
    ended = survive("fenced", wakes)
    went_on(ended, dead={2})
    assert ended.err.count("spawnsim.errors.Revoked: ") == 1, ended.err
    assert re.search(r"rank 2 of 4 raised .*; this rank leaves", ended.err)
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
        ("all_die", 122, "no rank survived to the end"),
        ("uncaught", 122, "missing: rank 1"),
        ("raises", 1, "ValueError: after all"),
        ("hopeless", 122, "5 recoveries in a row have begun at step 3, but no rank has died"),
    ],
)
def test_a_job_that_does_not_finish_ends_loudly(survive, case, status, text):
    """Nobody left, an error that nobody caught, an exception after a recovery."""
    ended = survive(case)
    assert ended.status == status, ended.err
    assert text in ended.err
    assert ended.err.count("Traceback") <= 1, ended.err
