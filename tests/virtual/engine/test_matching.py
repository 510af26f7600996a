"""Matching at its time: nothing is matched by a receive that was withdrawn before, and nothing overtakes."""

from functools import partial

import numpy as np
import pytest
from support.virtual_run import BANDWIDTH, LATENCY, OVERHEAD, platform, run

from spawnsim.comm import Status
from spawnsim.comm.constants import ANY_SOURCE
from spawnsim.errors import Deadlock, RankError, Timeout
from spawnsim.models.network import Hockney, Switch
from spawnsim.models.platform import Platform
from spawnsim.virtual.mpi.requests import Request

BYTE = 1 / BANDWIDTH
SMALL = platform(eager_bytes=1000, contention="none")


def room(nbytes=8):
    """Return a buffer."""
    return np.zeros(nbytes, np.uint8)


def give_up(comm, seconds, call):
    """Make a call that must meet its deadline; record when."""
    with pytest.raises(Timeout), comm.clock.deadline(seconds):
        call()
    comm.record(gave_up=comm.clock.now())


@pytest.mark.parametrize("nbytes", [8, 5000], ids=["eager", "rendezvous"])
@pytest.mark.parametrize("sent_s", [0.9995, 10.0], ids=["on its way", "not sent yet"])
def test_a_receive_is_cancelled_before_its_message_has_come(nbytes, sent_s):
    """The sender has run ahead of the receiver, which does not yet know of the message; the next receive gets it."""

    def main(comm):
        if comm.rank:
            with comm.compute(sent_s):
                pass
            comm.Send(room(nbytes), 0)
            return
        request, status = comm.Irecv(room(nbytes), 1), Status()
        comm.clock.sleep(1.0)
        request.Cancel()
        request.Cancel()  # once more does no harm
        request.Wait(status)
        comm.record(cancelled=status.Is_cancelled(), at=comm.clock.now())
        comm.Recv(room(nbytes), 1)
        comm.record(got=comm.clock.now())

    _, notes = run(main, 2, platform=SMALL)
    assert notes.column("cancelled") == {0: True}
    assert notes.column("at")[0] == pytest.approx(1.0 + 2 * OVERHEAD)
    envelope_s = sent_s + LATENCY + (nbytes * BYTE if nbytes < 1000 else 0)
    rest_s = 0 if nbytes < 1000 else 2 * LATENCY + nbytes * BYTE
    assert notes.column("got")[0] == pytest.approx(max(envelope_s, 1.0 + 2 * OVERHEAD) + rest_s)


@pytest.mark.parametrize("source", [1, ANY_SOURCE], ids=["named", "anybody"])
def test_a_message_that_comes_at_the_very_time_of_a_cancel_has_come(source):
    """Although the receiver came to that time first."""

    def main(comm):
        if comm.rank:
            comm.clock.sleep(1.0 - 2.0**-10)
            comm.Send(room(0), 0)
            return
        request, status = comm.Irecv(room(0), source), Status()
        comm.clock.sleep(1.0)
        request.Cancel()
        request.Wait(status)
        comm.record(cancelled=status.Is_cancelled())

    exact = Platform("test", Switch(Hockney(2.0**-10, 2.0**20)))
    assert run(main, 2, platform=exact)[1].column("cancelled") == {0: False}


def test_what_a_cancelled_receive_would_have_taken_goes_to_the_next():
    """Three receives, three messages under way; the first receive is cancelled, and all move up by one."""

    def main(comm):
        if comm.rank:
            for value in (1, 2, 3):
                comm.Send(np.full(8, value, np.uint8), 0)
            return
        buffers = [room() for _ in range(3)]
        requests = [comm.Irecv(each, 1) for each in buffers]
        comm.clock.sleep(LATENCY / 2)
        requests[0].Cancel()
        Request.Waitall(requests)
        comm.record(got=str([int(each[0]) for each in buffers]))
        comm.Recv(buffers[0], 1)
        comm.record(last=int(buffers[0][0]))

    _, notes = run(main, 2)
    assert (notes.column("got"), notes.column("last")) == ({0: "[0, 1, 2]"}, {0: 3})


def test_a_receive_that_has_matched_is_not_cancelled():
    """An envelope that is there at the very time of the cancel has matched, although its data have not come."""

    def main(comm):
        if comm.rank:
            comm.Send(room(5000), 0)
            return
        request, status = comm.Irecv(room(5000), 1), Status()
        comm.clock.sleep(LATENCY)
        request.Cancel()
        request.Wait(status)
        comm.record(cancelled=status.Is_cancelled(), at=comm.clock.now())

    _, notes = run(main, 2, platform=SMALL)
    assert notes.column("cancelled") == {0: False}
    assert notes.column("at")[0] == pytest.approx(3 * LATENCY + 5000 * BYTE)


@pytest.mark.parametrize("nbytes", [8, 5000], ids=["synchronous", "rendezvous"])
def test_a_receive_that_gave_up_has_not_released_its_sender(nbytes):
    """The sender waits for the receive that comes a second later."""

    def main(comm):
        if comm.rank:
            with comm.compute(0.010):
                pass
            comm.Ssend(room(nbytes), 0)
            comm.record(sent=comm.clock.now())
            return
        give_up(comm, 0.005, lambda: comm.Recv(room(nbytes), 1))
        comm.clock.sleep(1.0)
        comm.Recv(room(nbytes), 1)
        comm.record(got=comm.clock.now())

    _, notes = run(main, 2, platform=SMALL)
    bulk_s = nbytes * BYTE if nbytes > 1000 else 0
    assert notes.column("gave_up") == {0: 0.005}
    assert notes.column("sent")[1] == pytest.approx(1.005 + LATENCY + bulk_s)
    assert notes.column("got")[0] == pytest.approx(1.005 + (2 * LATENCY + bulk_s if bulk_s else 0))


@pytest.mark.parametrize("nbytes", [8, 5000], ids=["synchronous", "rendezvous"])
def test_nobody_receives_what_a_receive_gave_up(nbytes):
    """A sender whose only receive gave up before the message came waits for ever: a deadlock, and no quiet success."""

    def main(comm):
        if comm.rank:
            with comm.compute(0.010):
                pass
            comm.Ssend(room(nbytes), 0)
        else:
            give_up(comm, 0.005, lambda: comm.Recv(room(nbytes), 1))

    with pytest.raises(Deadlock, match="Ssend"):
        run(main, 2, platform=SMALL, deadline_s=float("inf"))


@pytest.mark.parametrize("looks_first", [True, False])
def test_a_receive_that_gave_up_leaves_the_order_as_it_was(looks_first):
    """What it would have taken was sent after a message that nobody has received yet, and stays behind it."""

    def main(comm):
        if comm.rank:
            comm.send("first", 0, tag=1)
            with comm.compute(0.010):
                pass
            comm.send("second", 0, tag=0)
            return
        give_up(comm, 0.005, lambda: comm.recv(source=1, tag=0))
        if looks_first:
            comm.record(seen=comm.Iprobe(tag=1))
        comm.record(got=str([comm.recv(source=1), comm.recv(source=1)]))

    _, notes = run(main, 2)
    assert notes.column("got") == {0: "['first', 'second']"}
    assert notes.column("seen") == ({0: True} if looks_first else {})


def test_giving_up_does_not_bring_time_backwards():
    """A receive with a deadline, then one from anybody: an early message waits behind none that is yet to come."""

    def main(comm):
        if comm.rank == 1:
            comm.send("early", 0, tag=1)
            with comm.compute(0.010):
                pass
            comm.send("late", 0, tag=0)
        elif comm.rank == 0:
            give_up(comm, 0.005, lambda: comm.recv(source=1, tag=0))
            comm.record(got=comm.recv(tag=1), at=comm.clock.now())
            comm.send("on", 2)
        else:
            comm.Iprobe()
            comm.clock.sleep(0.002)
            comm.record(got=comm.recv(), at=comm.clock.now())

    _, notes = run(main, 3)
    assert notes.column("got") == {0: "early", 2: "on"}
    assert notes.column("at")[0] == pytest.approx(0.005)


def test_a_matched_message_of_a_receive_that_gave_up_is_not_sent_twice():
    """The data were on their way when the deadline came: the next receive waits for the rest of the way alone."""

    def main(comm):
        if comm.rank:
            comm.Send(room(5000), 0)
            comm.record(sent=comm.clock.now())
            return
        give_up(comm, 0.004, lambda: comm.Recv(room(5000), 1))
        comm.Recv(room(5000), 1)
        comm.record(got=comm.clock.now())

    _, notes = run(main, 2, platform=SMALL)
    assert notes.column("sent")[1] == pytest.approx(2 * LATENCY + 5000 * BYTE)
    assert notes.column("got")[0] == pytest.approx(3 * LATENCY + 5000 * BYTE)


@pytest.mark.parametrize("name", ["infiniband-hdr", "gigabit", "laptop", "ethernet-10g"])
def test_a_large_message_does_not_overtake_a_small_one(name):
    """An eager message and a rendezvous behind it, whose envelopes come within a rounding error of each other."""

    def main(comm, nbytes):
        if comm.rank:
            status = Status()
            comm.clock.sleep(1.0)
            comm.Recv(room(100_000), status=status)
            comm.Recv(room(100_000))
            comm.record(first=status.nbytes)
        else:
            comm.clock.sleep(0.3)
            comm.Send(room(nbytes), 1)
            comm.Send(room(100_000), 1)

    sizes = range(1, 100, 7)
    first = [run(partial(main, nbytes=n), 2, platform=name)[1].column("first")[1] for n in sizes]
    assert first == list(sizes)


@pytest.mark.parametrize("how", ["sleep", "compute"])
@pytest.mark.parametrize("looker", [0, 1])
def test_without_latency_ranks_act_in_their_order(how, looker):
    """At one time rank 0 comes before rank 1, however they came there: a look sees what a lower rank has sent."""
    instant = Platform("instant", Switch(Hockney(0.0, BANDWIDTH), call_overhead_s=OVERHEAD))

    def main(comm):
        if how == "sleep":
            comm.clock.sleep(1.0)
        else:
            with comm.compute(1.0):
                pass
        if comm.rank == looker:
            comm.record(seen=comm.Iprobe(source=1 - looker))
            comm.Recv(room(0), 1 - looker)
        else:
            comm.Send(room(0), looker)

    assert run(main, 2, platform=instant)[1].column("seen") == {looker: looker == 1}


def test_a_blocked_probe_costs_one_look():
    """However many other messages come meanwhile."""

    def main(comm):
        if comm.rank == 0:
            comm.Probe(tag=7)
            comm.record(at=comm.clock.now())
        for tag in range(5) if comm.rank == 1 else ():
            comm.Send(room(0), 0, tag)
        if comm.rank == 2:
            comm.clock.sleep(0.5)
            comm.Send(room(0), 0, 7)

    assert run(main, 3)[1].column("at")[0] == pytest.approx(0.5 + LATENCY + OVERHEAD)


def test_a_message_to_oneself_meets_no_network_card():
    """It is there at once, although the card is busy for a second with a message to somebody else."""

    def main(comm):
        if comm.rank == 0:
            comm.Send(room(1_000_000), 1)
            comm.Send(room(), 0)
            comm.Recv(room(), 0)
            comm.record(at=comm.clock.now())
        else:
            comm.Recv(room(1_000_000), 0)

    assert run(main, 2)[1].column("at") == {0: 0.0}


def test_the_data_of_a_dead_rank_do_not_come():
    """A rank that dies before the clear-to-send is back has nothing left to send."""

    def main(comm):
        if comm.rank:
            comm.Send(room(5000), 0)
        else:
            comm.clock.sleep(0.1 - LATENCY / 2)
            comm.Recv(room(5000), 1)

    with pytest.raises(RankError, match="rank 1 has failed"):
        run(main, 2, platform=SMALL, faults="crash:1@0.1s")


def test_receives_that_are_over_are_not_kept():
    """A ring needs no event, so the clock stands; each receive looked through all before it, 145 µs in round 2,500."""
    kept = []

    def main(comm):
        out, into = room(), room()
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for _ in range(500):
            Request.Waitall([comm.Irecv(into, left, 0), comm.Isend(out, right)])
        kept.extend(len(each) for each in comm._mailbox._early.values())

    run(main, 12)
    assert len(kept) > 9
    assert max(kept) <= 16
