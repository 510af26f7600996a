"""The rule of virtual time, held to a plain discrete-event engine and to its promises about events."""

import pytest
from support.random_programs import MIXTURES, differing
from support.virtual_run import LATENCY, platform, run

from spawnsim.errors import Livelock
from spawnsim.virtual.mpi.module import MPI

PROGRAMS = 60


@pytest.mark.parametrize("mixture", MIXTURES)
def test_random_programs_log_what_a_plain_engine_logs(mixture):
    """All ways to send, receive, wait, look, cancel, give up and access windows: the same results at the same times."""
    differ = differing(range(PROGRAMS), mixture)
    assert not differ, f"{len(differ)} of {PROGRAMS} differ, the first: {next(iter(differ.items()))}"


@pytest.mark.parametrize(
    ("mixture", "seed"),
    [
        ("rendezvous fifo", 855),
        ("no latency", 2672),
        ("no latency", 10107),
        ("polls ties", 235),
    ],
)
def test_programs_that_once_differed(mixture, seed):
    """Ties: on a card that takes one message after the other, of two requests of which either may end first, and of two
    deadlines, after one of which something is sent. And tests, in a row, of a long message of the rank to itself.
    """
    assert not differing([seed], mixture)


@pytest.mark.parametrize(("contention", "events"), [("none", 0), ("serial", 0), ("fifo", 20)])
def test_a_ring_of_named_receives_needs_no_event_a_message(contention, events):
    """What carries no information costs no event; where arrival decides, ranks in step pay one event a round."""

    def main(comm):
        for _ in range(20):
            comm.send(None, (comm.rank + 1) % comm.size)
            comm.recv(source=(comm.rank - 1) % comm.size)

    totals, _ = run(main, 100, deadline_s=float("inf"), platform=platform(contention=contention))
    assert (totals.scheduled, totals.messages) == (events, 2000)


def test_an_access_to_a_ranks_own_part_takes_one_event():
    """It is served before the rank's turn comes: that needs no event of its own, though others have theirs then."""
    taken = []

    def main(comm):
        win = comm.Win.Allocate(8, comm=comm)
        win.Lock_all()
        for _ in range(3):
            with comm.compute(0.01):
                pass
            before = comm._world.kernel.steps
            win.Put(bytes(8), comm.rank)
            win.Flush(comm.rank)
            taken.append(comm._world.kernel.steps - before)
        win.Unlock_all()
        win.Free()

    run(main, 12)
    assert taken == [1] * 36


def test_an_error_before_a_look_ends_the_run_and_not_the_call():
    """An event happens on the stack of whoever waits, who is not to blame for it."""
    caught = []

    def fail():
        raise ValueError("an event failed")

    def main(comm):
        if comm.rank == 0:
            comm._world.kernel.env.at(0.005, 0, fail)
        with comm.compute(0.01 * (comm.rank + 1)):
            pass
        try:
            comm.Iprobe()
        except ValueError as error:
            caught.append(error)

    with pytest.raises(ValueError, match="an event failed"):
        run(main, 12)
    assert not caught


LOOKS = {
    "Iprobe": lambda comm, request: comm.Iprobe(),
    "Iprobe of a rank": lambda comm, request: comm.Iprobe(0),
    "Test": lambda comm, request: request.Test(),
    "Testall": lambda comm, request: MPI.Request.Testall([request, comm.isend(None, comm.rank)]),
    "Testany": lambda comm, request: MPI.Request.Testany([request])[1],
}


@pytest.mark.parametrize("look", LOOKS)
def test_looks_in_a_row_take_one_turn(look):
    """After the first, nothing that others still do can be seen by a look that comes within the latency."""

    def main(comm):
        request = comm.irecv(source=(comm.rank + 1) % comm.size, tag=1)
        for _ in range(20):
            with comm.compute(0.01):
                pass
            for _ in range(5):
                assert not LOOKS[look](comm, request)
        comm.isend(None, comm.rank - 1 if comm.rank else comm.size - 1, tag=1)
        request.wait()

    assert run(main, 50)[0].scheduled <= 50 * (20 + 1)  # and the message's arrival, behind a wildcard


def test_wildcards_cost_one_event_a_message():
    """A coordinator that takes from anybody pays for ordering, once a message."""

    def main(comm):
        if comm.rank == 0:
            for _ in range(comm.size - 1):
                comm.recv()
        else:
            with comm.compute(0.001 * comm.rank):
                pass
            comm.send(None, 0)

    totals, _ = run(main, 50, deadline_s=float("inf"))
    assert totals.scheduled <= 2 * 50


def test_wildcards_take_the_earliest_arrival_though_it_is_sent_last():
    """The rank that runs first in the engine is not the one whose message arrives first."""

    def main(comm):
        if comm.rank == 2:
            comm.record(order=str([comm.recv() for _ in range(2)]))
        else:
            with comm.compute(1.0 - 0.5 * comm.rank):
                pass
            comm.send(comm.rank, 2)

    assert run(main, 3)[1].column("order") == {2: "[1, 0]"}


def test_a_rank_leaves_a_rooted_collective_when_its_own_part_is_over():
    """The root of a broadcast does not wait for a straggler, and may send it what it waits for."""

    def main(comm):
        if comm.rank == 1:
            assert comm.recv(source=0) == "go"  # sent behind the broadcast that this rank has not joined yet
        comm.bcast("x" if comm.rank == 0 else None)
        if comm.rank == 0:
            comm.record(left=comm.clock.now())
            comm.send("go", 1)

    assert run(main, 4)[1].column("left")[0] < 3 * LATENCY


def test_polling_without_end_is_a_livelock():
    """A rank that polls for what nobody will do is reported, not left running."""

    def main(comm):
        while comm.rank == 0 and not comm.Iprobe():
            pass

    with pytest.raises(Livelock, match="polls in a row"):
        run(main, 2)
