"""Giving up communicators: each rank when it likes, and finalizers wherever they run."""

import gc
import sys

import numpy as np
import pytest
from support.virtual_run import LATENCY, Notes, platform, run

from spawnsim.comm.failures import CallError
from spawnsim.errors import RankError, UsageError
from spawnsim.scenario import Scenario
from spawnsim.virtual import simulate


def test_free_waits_for_nobody():
    """One rank frees before, the others after a barrier; it was a deadlock."""

    def main(comm):
        sub = comm.Dup()
        before = comm.clock.now()
        if comm.rank == 0:
            sub.Free()
            comm.record(took=comm.clock.now() - before)
        comm.Barrier()
        if comm.rank:
            sub.Free()
        assert not sub
        with pytest.raises(CallError, match="null"):
            sub.Barrier()

    assert run(main, 3)[1].column("took")[0] == 0.0


def test_disconnect_waits_for_all():
    """It is collective, as the standard says."""

    def main(comm):
        sub = comm.Dup()
        comm.clock.sleep(0.1 * comm.rank)
        sub.Disconnect()
        assert comm.clock.now() > 0.1 * (comm.size - 1) + LATENCY
        assert not sub

    run(main, 3)


def test_messages_on_their_way_arrive_after_the_sender_has_freed():
    """Also large ones, whose data leave when the receive is there."""

    def main(comm):
        sub, data = comm.Dup(), np.zeros(1000)
        if comm.rank == 0:
            sub.send("small", 1)
            request = sub.Isend(data + 7, 1)
            sub.Free()
            request.Wait()
        else:
            comm.clock.sleep(0.1)
            assert sub.recv(source=0) == "small"
            sub.Recv(data, 0)
            sub.Free()
            assert data[0] == 7

    run(main, 2, platform=platform(eager_bytes=1000))


def test_what_mpi_has_made_cannot_be_freed():
    """Neither the world nor a null communicator."""

    def main(comm):
        for call in (comm.Free, comm.Disconnect):
            with pytest.raises(CallError, match="MPI_COMM_WORLD cannot be"):
                call()
        comm.Dup().Free()

    run(main, 2)


class Wrapper:
    """Frees what it holds when it goes; in a cycle of references, as packages do it."""

    def __init__(self, held):
        self.held, self.me = held, self

    def __del__(self):
        self.held.Free()


def test_the_collector_frees_communicators_of_all_ranks_in_one():
    """Rank 0 collects the garbage of all; nobody else notices, and it takes no time."""
    ended = []

    def main(comm):
        for _ in range(3):
            Wrapper(comm.Dup())
        comm.Barrier()
        before = comm.clock.now()
        if comm.rank == 0:
            gc.collect()
        assert comm.clock.now() == before
        comm.Barrier()
        ended.append(comm.rank)

    run(main, 4)
    assert sorted(ended) == [0, 1, 2, 3]


def test_finalizers_that_communicate_are_refused(monkeypatch):
    """They would do it as whichever rank comes along, in the middle of whatever it does."""
    refused = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: refused.append(found.exc_value))

    class Chatty:
        """Says good-bye."""

        def __init__(self, call):
            self.call, self.me = call, self

        def __del__(self):
            self.call()

    def main(comm):
        window = comm.Win.Allocate(8, comm=comm)
        calls = [
            window.Free, comm.Barrier, lambda: comm.send("bye", 0), lambda: comm.Iprobe(),
            lambda: comm.isend("bye", 0), lambda: comm.recv(), lambda: comm.clock.sleep(1), lambda: window.Lock(0),
        ]  # fmt: skip
        for call in calls:
            Chatty(call)
        comm.Barrier()
        now = comm.clock.now()
        if comm.rank == 0:
            gc.collect()
        comm.Barrier()
        assert comm.clock.now() < now + 4 * LATENCY
        assert not comm.Iprobe()
        window.Free()

    run(main, 2)
    assert [type(error) for error in refused] == [UsageError] * 16
    assert all("garbage collector" in str(error) for error in refused)


def test_a_communicator_outlives_the_run():
    """What is left of ranks goes when it goes, without a word."""
    left = []
    simulate(lambda comm: left.append(Wrapper(comm.Dup())), Scenario(2, platform()), recorder=Notes())
    left.clear()
    gc.collect()


def test_a_rank_with_anothers_handle_is_reported():
    """Functions that ranks share may hand one rank's communicator to another."""
    held = {}

    def main(comm):
        held[comm.rank] = comm
        comm.Barrier()
        held[0].Barrier()

    with pytest.raises((UsageError, RankError), match=r"rank 1 uses rank 0's handle"):
        run(main, 2)
