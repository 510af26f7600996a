"""Averaging by the clock survives deaths and stops on real ranks, in the background too."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(150)]

PROGRAM = Path(__file__).with_name("survivors_by_clock.py")


def test_averaging_goes_on_without_the_dead(survive):
    """A coordinator stops and comes back; it dies, and another rank, and none of the others recovers; then all do.

    The recovery ended the background task in `Revoked`, and with it the job; now it goes on with the survivors.
    """
    cases, victims = ("stops", "dies", "dies", "recovers", "recovers"), ("0", "0", "1", "2", "0")
    ended = survive("+".join(cases), "+".join(victims), n=7, program=PROGRAM, deadline_s=10.0)
    assert ended.status == 0, ended.err
    for number, left in enumerate((7, 6, 5, 4, 3)):
        after = ended.column("after", number)
        assert 3 <= len(after) <= left, (cases[number], ended.err)  # a later victim may take its words along
        assert min(after.values()) >= (5 if number < 3 else 3), (cases[number], after)
        assert all(ended.column("whole", number).values()), cases[number]
    for number in (0, 1, 2):
        assert min(ended.column("before", number).values()) >= 3
    for number, left in ((3, 4), (4, 3)):
        assert set(ended.column("size", number).values()) == {left}
        assert all(ended.column("recovered", number).values())
