"""Receives that nobody waits for: their buffers are full from the arrival on, and not before; the run tells of them."""

import numpy as np
import pytest
from support.virtual_run import LATENCY, platform, run

import spawnsim
from spawnsim.comm import ANY_SOURCE
from spawnsim.comm.failures import Truncated
from spawnsim.virtual.mpi.requests import Request

LOOKS = {
    "Get_status": lambda request: request.Get_status(),
    "Get_status_all": lambda request: Request.Get_status_all([request]),
    "Get_status_any": lambda request: Request.Get_status_any([request])[1],
    "Get_status_some": lambda request: Request.Get_status_some([request]),
}


def sending(comm, seconds, data):
    """Send after some time."""
    with comm.compute(seconds):
        pass
    comm.Send(data, 0)


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("eager_bytes", [1 << 30, 0])
def test_a_look_that_says_over_has_filled_the_buffer(look, eager_bytes):
    """And one that does not has not."""

    def main(comm):
        if comm.rank:
            sending(comm, 0.01, np.ones(2))
            return
        target = np.zeros(2)
        request = comm.Irecv(target, 1)
        while not LOOKS[look](request):
            assert target[1] == 0.0
        assert target[1] == 1.0
        assert request
        request.Wait()

    run(main, 2, platform=platform(eager_bytes=eager_bytes))


@pytest.mark.parametrize("source", [1, ANY_SOURCE])
@pytest.mark.parametrize("eager_bytes", [1 << 30, 0])
def test_a_freed_receive_is_filled_at_its_arrival(source, eager_bytes):
    """The rank looks at its memory every tenth of a millisecond; no call asks for the message."""
    seen = []

    def main(comm):
        if comm.rank:
            sending(comm, 0.01, np.ones(1))
            return
        target = np.zeros(1)
        comm.Irecv(target, source).Free()
        while not target[0]:
            comm.clock.sleep(1e-4)
            seen.append((comm.clock.now(), target[0]))

    run(main, 2, platform=platform(eager_bytes=eager_bytes))
    arrival_s = 0.01 + LATENCY * (3 if eager_bytes == 0 else 1) + 8e-6
    assert seen[-1] == (pytest.approx(arrival_s, abs=2e-4), 1.0)
    assert seen[-1][0] >= arrival_s - 1e-9


def test_a_freed_receive_is_full_when_a_later_word_says_so():
    """A named receive needs no event; what arrived before it must be there all the same."""

    def main(comm):
        if comm.rank:
            sending(comm, 0.01, np.ones(1))
            comm.send("sent", 0, tag=1)
        else:
            target = np.zeros(1)
            comm.Irecv(target, 1, 0).Free()
            assert comm.recv(source=1, tag=1) == "sent"
            assert target[0] == 1.0
            assert comm._rank.observers == 0

    run(main, 2)


def test_a_freed_receive_that_never_comes_harms_nobody():
    """It was matched by nothing when the program ends."""

    def main(comm):
        comm.Irecv(np.zeros(1), 1 - comm.rank).Free()
        comm.irecv(source=1 - comm.rank, tag=5).Free()
        comm.Barrier()

    run(main, 2)


def test_a_freed_receive_that_is_too_short_ends_the_run():
    """There is no call that could raise it; the rank and the message are named."""

    def main(comm):
        if comm.rank:
            comm.Send(np.ones(4), 0, 3)
        else:
            comm.Irecv(np.zeros(1), 1).Free()
        comm.clock.sleep(1.0)

    with pytest.raises(Truncated, match="it is from rank 1 with tag 3 on MPI_COMM_WORLD") as caught:
        run(main, 2)
    assert "on rank 0" in caught.value.__notes__[0]


def forgets_to_wait(comm):
    """A gossip that reads what it has asked for, and that may not be there yet."""
    for iteration in range(3):
        with comm.compute(0.01):
            pass
        comm.Irecv(np.zeros(20_000), (comm.rank - 1) % comm.size, tag=7)
        comm.Isend(np.ones(20_000), (comm.rank + 1) % comm.size, tag=iteration and 7)


def keeps_windows(comm):
    """Each with a window on one rank, and on all."""
    comm.Win.Allocate(8, comm=comm)
    if comm.rank == 5:
        comm.Win.Allocate(8, comm=comm.Split(comm.rank))
    else:
        comm.Split(comm.rank)


OPEN = {
    forgets_to_wait: [
        "36 receives were never completed by Wait or Test, so the program may read data that has not "
        "arrived: rank 0: 3 × Irecv(source=11, tag=7) on MPI_COMM_WORLD, rank 1: 3 × Irecv(source=0, tag=7)",
    ],
    keeps_windows: ["13 windows were never freed: rank 0, rank 1, rank 2, rank 3, and 8 more"],
}


@pytest.mark.parametrize("main", OPEN, ids=lambda main: main.__name__)
def test_what_a_program_leaves_open_is_reported(main):
    """At the end of a run that went well: such a program is a race, or hangs, on a real MPI."""
    reported = spawnsim.run(main, ranks=12).what["warnings"]
    assert len(reported) == len(OPEN[main])
    assert all(text.startswith(words) for text, words in zip(reported, OPEN[main], strict=True)), reported


def test_what_is_collected_in_any_way_is_not_open():
    """Waited for, tested, freed, cancelled, taken from several, begun anew, received in parts, copied."""

    def main(comm):
        n, here = comm.size, [np.zeros(1) for _ in range(9)]
        source, dest = (comm.rank - 1) % n, (comm.rank + 1) % n
        for tag in range(8):
            comm.Isend(np.ones(1), dest, tag)
        comm.Irecv(here[0], source, 0).Wait()
        request = comm.Irecv(here[1], source, 1)
        while not request.Test():
            comm.clock.sleep(1e-3)
        comm.Irecv(here[2], source, 2).Free()
        never = comm.Irecv(here[8], source, 99)
        never.Cancel()
        never.Wait()
        Request.Waitall([comm.Irecv(here[tag], source, tag) for tag in (3, 4)])
        again = comm.Recv_init(here[5], source, 5)
        again.Start()
        again.Wait()
        comm.Mprobe(source, 6).Irecv(here[6]).Wait()
        request = comm.Irecv(here[7], source, 7)
        type(request)(request).Wait()
        comm.Barrier()
        assert [each[0] for each in here] == [1] * 8 + [0]
        comm.Sendrecv(np.ones(1), dest, recvbuf=here[8], source=source)
        assert comm.irecv(source=comm.isend("x", comm.rank) and comm.rank).wait() == "x"

    assert "warnings" not in spawnsim.run(main, ranks=11).what
