"""Averaging by the clock survives deaths and stops on real ranks, in the background too."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(150)]

PROGRAM = Path(__file__).with_name("survivors_by_clock.py")


@pytest.mark.parametrize("victim", [0, 1])
def test_averaging_goes_on_without_the_dead(survive, victim):
    """The coordinator (rank 0), or another one: the survivors average on, although none of them recovers."""
    ended = survive("dies", str(victim), n=6, program=PROGRAM, deadline_s=5.0)
    assert ended.status == 0, ended.err
    after = ended.column("after")
    assert sorted(after) == [rank for rank in range(6) if rank != victim]
    assert min(after.values()) >= 5, after
    assert min(ended.column("before").values()) >= 3
    assert all(ended.column("whole").values())


def test_a_coordinator_that_was_stopped_comes_back(survive):
    """The others go on under another one, and it averages with them again."""
    ended = survive("stops", "0", program=PROGRAM, deadline_s=10.0)
    assert ended.status == 0, ended.err
    after = ended.column("after")
    assert sorted(after) == [0, 1, 2, 3]
    assert min(after.values()) >= 5, after


@pytest.mark.parametrize("victim", [0, 2])
def test_a_recovery_leaves_the_background_task_alive(survive, victim):
    """It ended in `Revoked`, and took the job along; now it goes on over the survivors' communicator."""
    ended = survive("recovers", str(victim), program=PROGRAM)
    assert ended.status == 0, ended.err
    after = ended.column("after")
    assert sorted(after) == [rank for rank in range(4) if rank != victim]
    assert set(ended.column("size").values()) == {3}
    assert all(ended.column("recovered").values())
    assert min(after.values()) >= 3, after
    assert all(ended.column("whole").values())
