"""Fault plans at work: each kind happens, is seen in the events, and is deterministic."""

import numpy as np
import pytest
from support.virtual_run import LATENCY, run

from spawnsim.errors import Revoked, Timeout


def talk(comm):
    """Rank 0 sends twenty numbers to rank 1, which takes what comes within a second."""
    if comm.rank == 0:
        for number in range(20):
            with comm.compute(0.1):
                pass
            comm.isend(number, 1, tag=1)
        return
    got = []
    try:
        with comm.clock.deadline(5.0):
            while True:
                got.append(comm.recv(source=0))
    except Timeout:
        comm.record(got=str(got), first=comm.clock.now())


def received(faults):
    """Return what rank 1 got, and the events."""
    notes = run(talk, 2, faults=faults, seed=3)[1]
    return eval(notes.column("got")[1]), notes.events


def test_dropped_messages_do_not_arrive():
    """Half of the messages are lost; which ones depends on the seed alone."""
    got, events = received("drop:0>1@0s+9s,0.5")
    assert got == sorted(got)
    assert 3 < len(got) < 17
    assert len(events) == 20 - len(got)
    assert {fields["what"] for _, _, _, fields in events} == {"lost"}
    assert received("drop:0>1@0s+9s,0.5")[0] == got


def test_doubled_messages_arrive_twice():
    """A duplicate is a message like the first."""
    got, events = received("duplicate:0>1@0s+9s,1.0")
    assert got == [number for number in range(20) for _ in range(2)]
    assert len(events) == 20


def test_a_link_that_is_down_holds_messages_until_it_is_back():
    """From 0.55 s to 1.05 s nothing passes; then all that waited comes, in order. A link that stays down loses it."""
    got, events = received("down:0>1@0.55s+0.5s")
    assert got == list(range(20))
    assert [round(time_s, 6) for _, time_s, _, _ in events] == [0.6, 0.7, 0.8, 0.9, 1.0]
    assert received("down:0>1@0.55s")[0] == list(range(5))


def test_delays_come_later_but_not_out_of_order():
    """MPI's messages of one pair do not overtake."""
    got, events = received("delay:0>1@0s+9s,0.3s")
    assert got == list(range(20))
    assert len(events) == 20


def test_a_damaged_payload_is_damaged_once():
    """One bit of a buffer is flipped; the sender's own memory is untouched."""

    def main(comm):
        data = np.zeros(64, np.uint8)
        if comm.rank == 0:
            comm.Send(data, 1)
            assert not data.any()
        else:
            comm.Recv(data, 0)
            comm.record(bits=int(np.unpackbits(data).sum()))

    assert run(main, 2, faults="corrupt:0>1@0s+9s,1.0")[1].column("bits") == {1: 1}


def test_a_paused_rank_is_slow_not_dead():
    """A pause during a receive delays the rank, and nobody is reported as failed."""

    def main(comm):
        if comm.rank == 0:
            comm.recv(source=1)
            comm.record(at=comm.clock.now())
        else:
            with comm.compute(1.0):
                pass
            comm.send(None, 0)

    notes = run(main, 2, faults="pause:0@0.5s+6s")[1]
    assert notes.column("at")[0] == pytest.approx(6.5)
    assert {kind for _, _, kind, _ in notes.events} == {"pause"}


def test_a_plan_does_not_change_what_it_does_not_touch():
    """Ranks far from a fault have the times that they have without it."""

    def main(comm):
        half = comm.Split(comm.rank // 2)
        comm.clock.sleep(1.0)
        half.allreduce(1)
        comm.record(at=comm.clock.now())

    plain, faulty = (
        run(main, 4, faults=faults)[1].column("at") for faults in (None, "delay:0>1@0.5s+9s,0.3s")
    )
    assert [faulty[rank] - plain[rank] for rank in range(4)] == pytest.approx([0.0, 0.3, 0.0, 0.0])
    assert LATENCY > 0


@pytest.mark.parametrize("how", ["compute", "sleep", "recv"])
def test_a_rank_may_be_paused_for_ever(how):
    """In a block, asleep or in a call: it does nothing any more, and the others go on without it."""

    def main(comm):
        if comm.rank == 2 and how == "compute":
            with comm.compute(1.0):
                pass
        elif comm.rank == 2 and how == "sleep":
            comm.clock.sleep(1.0)
        elif comm.rank == 2:
            comm.recv(source=0)
        else:
            comm.clock.sleep(1.0)
            comm.isend(None, 2)
        with pytest.raises((Timeout, Revoked)):  # whoever comes late hears of the other's recovery
            comm.Barrier()
        comm.record(size=comm.recover().comm.size)

    notes = run(main, 4, faults="pause:2@0.5s")[1]
    assert notes.column("size") == {0: 3, 1: 3, 3: 3}
