"""Buffers of receives that nobody waits for: full from the arrival on, and not before."""

import numpy as np
import pytest
from support.virtual_run import LATENCY, platform, run

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
