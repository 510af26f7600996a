"""Training goes on with the survivors, whatever the policy; an averaging that did not happen changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(150)]

PROGRAM = Path(__file__).with_name("survivors_training.py")


def sizes(ended, number):
    """Return how many were left after a case, as ranks say who were: a later victim may take its words along."""
    found = ended.column("size", number)
    assert len(found) >= 3, ended.err
    return set(found.values())


def test_training_goes_on_with_the_survivors(survive):
    """Policy after policy a rank dies, where one coordinates that one; the others finish, and exchange again."""
    cases, victims = ("average_all", "selective", "one_sided", "groups"), ("1", "0", "0", "3")
    ended = survive("+".join(cases), "+".join(victims), n=7, program=PROGRAM)
    assert ended.status == 0, ended.err
    for number, case in enumerate(cases):
        assert sizes(ended, number) == {6 - number}, (case, ended.err)
        assert set(ended.column("iteration", number).values()) == {24}, case
        assert all(ended.column("whole", number).values()), case
        assert any(ended.column("busy", number).values()), case


def test_an_averaging_that_did_not_happen_changes_nothing(survive):
    """A rank dies before its first sum or between two: bit for bit, the others' models are what they were.

    And nobody waits for a donor that dies in the middle of a snapshot; no model is torn.
    """
    ended = survive("before+between+later+donor", "+++", n=7, program=PROGRAM)
    assert ended.status == 0, ended.err
    for number in range(3):
        assert sizes(ended, number) == {6 - number}, ended.err
        assert set(ended.column("same", number).values()) == {True}, ended.err
        assert "averaged" not in ended.column("ended", number).values()
        assert set(ended.column("averaged", number).values()) == {True}
        assert len(set(ended.column("mean", number).values())) == 1
        assert len(set(ended.column("first", number).values())) == 1
    assert sizes(ended, 3) == {3}, ended.err
    assert all(ended.column("whole", 3).values())
