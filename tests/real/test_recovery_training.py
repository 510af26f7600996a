"""Training goes on with the survivors, whatever the policy; an averaging that did not happen changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from surviving import went_on

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(150)]

PROGRAM = Path(__file__).with_name("survivors_training.py")
ANOTHER, RANK_0 = "1", "2"  # seeds, by who dies under them


@pytest.mark.parametrize(
    ("case", "seed"),
    [("average_all", ANOTHER), ("selective", RANK_0), ("one_sided", RANK_0), ("groups", ANOTHER)],
)
def test_training_goes_on_with_the_survivors(survive, case, seed):
    """A rank dies at a random iteration, where one coordinates that one; the others finish, and exchange again."""
    ended = survive(case, seed, program=PROGRAM)
    assert ended.status == 0, ended.err
    assert set(ended.column("size").values()) == {3}, ended.err
    assert len(ended.column("size")) == 3
    assert set(ended.column("iteration").values()) == {24}
    assert all(ended.column("whole").values())
    assert any(ended.column("busy").values())


def test_a_donor_that_dies_in_the_middle_of_a_snapshot_is_not_waited_for(survive):
    """The one it gave to goes on; no model is torn."""
    ended = survive("donor", program=PROGRAM)
    went_on(ended, dead={1})
    assert all(ended.column("whole").values())


@pytest.mark.parametrize("case", ["before", "between", "later"])
def test_an_averaging_that_did_not_happen_changes_nothing(survive, case):
    """A rank dies before its first sum or between two: bit for bit, the others' models are what they were."""
    ended = survive(case, program=PROGRAM)
    went_on(ended, dead={2})
    assert set(ended.column("same").values()) == {True}, ended.err
    assert "averaged" not in ended.column("ended").values()
    assert set(ended.column("averaged").values()) == {True}
    assert len(set(ended.column("mean").values())) == 1
    assert len(set(ended.column("first").values())) == 1
