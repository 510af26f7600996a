"""Messages, collectives and one-sided accesses of a rank share its network card."""

from dataclasses import replace

import numpy as np
import pytest
from support.virtual_run import BANDWIDTH, LATENCY, platform, run

from spawnsim.comm import BFLOAT16_T, FLOAT, INT64_T
from spawnsim.errors import RankFailed, Timeout
from spawnsim.models.collectives import Selection
from spawnsim.models.platform import Platform
from spawnsim.virtual.mpi.requests import Request

MEGABYTE = 1_000_000
BYTES_S = MEGABYTE / BANDWIDTH  # 1 s


def mega():
    """Return 1 MB."""
    return np.zeros(MEGABYTE, np.uint8)


def times(main, ranks, **how):
    """Run; return what each rank records as `at`."""
    found = run(main, ranks, platform=platform(**how))[1].column("at")
    return [found[rank] for rank in sorted(found)]


@pytest.mark.parametrize("mode", ["eager", "rendezvous"])
@pytest.mark.parametrize("contention", ["none", "serial", "fifo", "fair"])
def test_a_message_to_oneself_passes_no_card(contention, mode):
    """It neither waits behind 1 MB that the card sends and 1 MB that it receives, nor delays them."""

    def main(comm):
        peer = 1 - comm.rank
        others = [comm.Irecv(mega(), peer), comm.Isend(mega(), peer)]
        kept = mega()
        own = [comm.Irecv(kept, comm.rank, 1), comm.Isend(mega(), comm.rank, 1)]
        Request.Waitall(own)
        comm.record(at=comm.clock.now())
        Request.Waitall(others)
        comm.record(end=comm.clock.now())

    how = {"eager_bytes": 1 << 30 if mode == "eager" else 1000, "contention": contention}
    notes = run(main, 2, platform=platform(**how))[1]
    assert notes.column("at") == dict.fromkeys(range(2), pytest.approx(0.0, abs=1e-5))
    flights = 1 if mode == "eager" else 3
    assert notes.column("end") == dict.fromkeys(range(2), pytest.approx(BYTES_S + flights * LATENCY))


# ------------------------------------------------------------------------------------------------ collectives


@pytest.mark.parametrize("contention", ["none", "serial", "fifo"])
def test_a_barrier_waits_behind_what_its_sender_still_sends(contention):
    """1 MB on the way from rank 0's card: what it says in the barrier leaves after that. The others' does not wait."""

    def main(comm):
        if comm.rank == 0:
            comm.Send(mega(), 1)
        comm.Barrier()
        comm.record(at=comm.clock.now())
        if comm.rank == 1:
            comm.Recv(mega(), 0)

    assert times(main, 2, contention=contention) == pytest.approx([LATENCY, BYTES_S + LATENCY])


def test_a_tree_is_late_from_the_busy_rank_on():
    """Eight ranks, rank 2 busy for 1 s: a broadcast from rank 0 is late for rank 3 alone, whom rank 2 tells."""

    def main(comm):
        if comm.rank == 2:
            comm.Send(mega(), 5)
        comm.Bcast(np.zeros(0, np.uint8))
        comm.record(at=comm.clock.now())
        if comm.rank == 5:
            comm.Recv(mega(), 2)

    found = times(main, 8)
    assert found[3] == pytest.approx(BYTES_S + LATENCY)
    assert max(found[:3] + found[4:]) < 0.01


@pytest.mark.parametrize(("eager_bytes", "stays_s"), [(1 << 30, BYTES_S), (1000, 2 * BYTES_S)])
def test_a_root_does_not_stay_for_what_it_sent_before(eager_bytes, stays_s):
    """Its broadcast of 1 MB goes behind 1 MB. It stays as if the card had been idle, or until long data have left.

    In either case its next message comes behind both.
    """

    def main(comm):
        if comm.rank == 0:
            comm.Rsend(mega(), 1, tag=5)
        comm.Bcast(mega())
        comm.record(left=comm.clock.now())
        if comm.rank == 0:
            comm.Send(np.zeros(0, np.uint8), 1)
        else:
            comm.Recv(np.zeros(0, np.uint8), 0, tag=0)
            comm.record(at=comm.clock.now())
            comm.Recv(mega(), 0, tag=5)

    notes = run(main, 2, platform=platform(contention="none", eager_bytes=eager_bytes))[1]
    assert notes.column("left") == {0: pytest.approx(stays_s), 1: pytest.approx(2 * BYTES_S + LATENCY)}
    assert notes.column("at") == {1: pytest.approx(2 * BYTES_S + LATENCY)}


def test_collectives_in_a_row_share_the_card():
    """Three small broadcasts by the same root, one behind the other: their bytes leave one after the other."""

    def main(comm):
        for _ in range(3):
            comm.Bcast(np.zeros(10_000, np.uint8))
        comm.record(at=comm.clock.now())

    assert times(main, 2) == pytest.approx([3 * 0.01, 3 * 0.01 + LATENCY])


def test_a_nonblocking_collective_begins_with_the_card_as_it_is():
    """Behind 1 MB as well; and what the rank sends after it has waited comes behind it."""

    def main(comm):
        if comm.rank == 0:
            comm.Send(mega(), 1)
            request = comm.Ibcast(mega())
            request.Wait()
            comm.Send(np.zeros(0, np.uint8), 1)
        else:
            comm.Ibcast(mega()).Wait()
            comm.record(at=comm.clock.now())
            comm.Recv(mega(), 0)
            comm.Recv(np.zeros(0, np.uint8), 0)
            comm.record(last=comm.clock.now())

    notes = run(main, 2, platform=platform(contention="none"))[1]
    assert [notes.column("at")[1], notes.column("last")[1]] == pytest.approx([2 * BYTES_S + LATENCY] * 2)


def test_reduce_scatter_is_timed_by_its_blocks():
    """Recursive halving among four: 2 α and three quarters of all bytes, whether the blocks are equal or not."""

    def main(comm):
        comm.Reduce_scatter_block(np.zeros(4000, np.uint8), np.zeros(1000, np.uint8))
        comm.Barrier()
        begin = comm.clock.now()
        comm.Reduce_scatter(np.zeros(4000, np.uint8), np.zeros(1000, np.uint8), [1000] * 4)
        comm.record(at=comm.clock.now() - begin)

    assert times(main, 4) == pytest.approx([2 * LATENCY + 3000 / BANDWIDTH] * 4)


@pytest.mark.parametrize(("datatype", "speed"), [(FLOAT, 4e6), (BFLOAT16_T, 1e6), (INT64_T, 2e6)])
def test_a_reduction_takes_the_time_of_its_dtype(datatype, speed):
    """Recursive doubling among four, 2 (α + nβ + nγ), and a tree to one root, whatever the dtype of other calls."""
    gammas = (("float32", 1 / 4e6), ("bfloat16", 1 / 1e6))
    network = replace(platform().network, gamma_s_per_B=1 / 2e6, gamma_of=gammas)
    choice = Selection(fixed=(("allreduce", "recursive_doubling"), ("reduce", "binomial")))

    def main(comm):
        def call():
            mine = [np.zeros(800, np.uint8), datatype]
            into = [np.zeros(800, np.uint8), datatype]
            comm.Allreduce(mine, into)
            comm.Reduce(mine, into)

        comm.Allreduce(np.zeros(100, np.float32), np.zeros(100, np.float32))
        comm.Barrier()
        begin = comm.clock.now()
        call()
        comm.record(at=comm.clock.now() - begin)

    found = run(main, 4, platform=Platform("test", network, collectives=choice))[1].column("at")
    assert found[0] == pytest.approx(4 * (LATENCY + 800 / BANDWIDTH + 800 / speed))


# ------------------------------------------------------------------------------------------------ to oneself


@pytest.mark.parametrize("contention", ["none", "serial", "fifo", "fair"])
@pytest.mark.parametrize("eager_bytes", [0, 1 << 30], ids=["rendezvous", "eager"])
def test_a_message_to_oneself_does_not_meet_the_card(contention, eager_bytes):
    """It is a copy in the rank's own memory, though the card is busy for a second."""

    def main(comm):
        if comm.rank == 0:
            sent = [comm.Isend(mega(), 1), comm.Irecv(np.zeros(4, np.uint8), 0)]
            comm.Send(np.zeros(4, np.uint8), 0)
            sent[1].Wait()
            comm.record(at=comm.clock.now())
            sent[0].Wait()
        else:
            comm.Recv(mega(), 0)

    assert times(main, 2, contention=contention, eager_bytes=eager_bytes) == [0.0]


def test_a_message_to_oneself_does_not_occupy_the_card():
    """What is sent to another rank after 1 MB to oneself leaves at once."""

    def main(comm):
        if comm.rank == 0:
            comm.Send(mega(), 0)
            comm.Send(np.zeros(0, np.uint8), 1)
            comm.Recv(mega(), 0)
        else:
            comm.Recv(np.zeros(0, np.uint8), 0)
            comm.record(at=comm.clock.now())

    assert times(main, 2) == pytest.approx([LATENCY])


# ------------------------------------------------------------------------------------------------ one-sided

OTHERS = 4
IN_TURN = [(1 + k) * BYTES_S for k in range(OTHERS)]
TOGETHER = [OTHERS * BYTES_S] * OTHERS
AT_ONCE = [BYTES_S] * OTHERS


def one_sided(access):
    """Return a program in which all others access 1 MB of rank 0 at once, and record what that took."""

    def main(comm):
        window = comm.Win.Create(mega() if comm.rank == 0 else None, comm=comm)
        window.Lock_all()
        comm.Barrier()
        comm.clock.sleep(1.0 - comm.clock.now())
        if comm.rank:
            access(window)
            window.Flush(0)
            comm.record(at=comm.clock.now() - 1.0)
        window.Unlock_all()
        comm.Barrier()
        window.Free()

    return main


EAGER = pytest.mark.parametrize("eager_bytes", [1000, 1 << 30], ids=["long", "short"])


@EAGER
@pytest.mark.parametrize(
    ("contention", "expected"),
    [("none", IN_TURN), ("serial", IN_TURN), ("fifo", IN_TURN), ("fair", TOGETHER)],
)
def test_gets_queue_at_the_targets_up_link(contention, expected, eager_bytes):
    """Four Gets of 1 MB from one rank take what four messages from it take, and one latency for asking."""
    found = times(one_sided(lambda window: window.Get(mega(), 0)), 1 + OTHERS, contention=contention,
                  eager_bytes=eager_bytes)  # fmt: skip
    assert sorted(found) == pytest.approx([2 * LATENCY + each for each in expected])


@EAGER
@pytest.mark.parametrize(
    ("contention", "expected"),
    [("none", AT_ONCE), ("serial", IN_TURN), ("fifo", IN_TURN), ("fair", TOGETHER)],
)
@pytest.mark.parametrize("call", ["Put", "Accumulate"])
def test_puts_queue_at_the_targets_down_link(call, contention, expected, eager_bytes):
    """Four Puts of 1 MB into one rank likewise, and one latency for the answer."""
    found = times(one_sided(lambda window: getattr(window, call)(mega(), 0)), 1 + OTHERS, contention=contention,
                  eager_bytes=eager_bytes)  # fmt: skip
    assert sorted(found) == pytest.approx([2 * LATENCY + each for each in expected])


@pytest.mark.parametrize("contention", ["none", "serial", "fifo", "fair"])
@EAGER
def test_gets_of_one_rank_from_many_queue_at_its_down_link(contention, eager_bytes):
    """One rank that reads from four takes in 4 MB, one after the other, unless its card takes in any number."""

    def main(comm):
        window = comm.Win.Create(mega(), comm=comm)
        window.Lock_all()
        comm.Barrier()
        comm.clock.sleep(1.0 - comm.clock.now())
        if comm.rank == 0:
            requests = [window.Rget(mega(), rank) for rank in range(1, 1 + OTHERS)]
            Request.Waitall(requests)
            comm.record(at=comm.clock.now() - 1.0)
        comm.Barrier()

    found = times(main, 1 + OTHERS, contention=contention, eager_bytes=eager_bytes)
    all_s = BYTES_S if contention == "none" else OTHERS * BYTES_S
    assert found == pytest.approx([2 * LATENCY + all_s])


@pytest.mark.parametrize("contention", ["none", "serial", "fifo"])
def test_a_get_waits_behind_what_its_target_sends(contention):
    """And a message of the target behind what it answers."""

    def main(comm):
        window = comm.Win.Create(mega(), comm=comm)
        window.Lock_all()
        comm.Barrier()
        comm.clock.sleep(1.0 - comm.clock.now())
        if comm.rank == 0:
            comm.Send(mega(), 2)
            comm.clock.sleep(0.01)
            comm.Send(np.zeros(0, np.uint8), 2)
        elif comm.rank == 1:
            window.Get(mega(), 0)
            window.Flush(0)
            comm.record(at=comm.clock.now() - 1.0)
        else:
            comm.Recv(mega(), 0)
            comm.Recv(np.zeros(0, np.uint8), 0)
            comm.record(at=comm.clock.now() - 1.0)
        comm.Barrier()

    assert times(main, 3, contention=contention) == pytest.approx([2 * BYTES_S + LATENCY] * 2)


@pytest.mark.parametrize("contention", ["serial", "fifo", "fair"])
def test_accesses_of_a_pair_are_served_in_the_order_sent(contention):
    """A small Put behind a large one is seen last, although it could be there before."""

    def main(comm):
        window = comm.Win.Create(mega(), comm=comm)
        window.Lock_all()
        comm.Barrier()
        if comm.rank == 1:
            window.Put(np.full(MEGABYTE, 1, np.uint8), 0)
            window.Put(np.full(1, 2, np.uint8), 0)
            window.Flush(0)
        comm.Barrier()
        comm.record(at=int(np.frombuffer(window, np.uint8)[0]))

    assert times(main, 2, contention=contention, eager_bytes=1000)[0] == 2


def test_an_access_of_ones_own_memory_does_not_meet_the_card():
    """It takes no time, though the card is busy."""

    def main(comm):
        window = comm.Win.Create(mega(), comm=comm)
        window.Lock_all()
        comm.Barrier()
        begin = comm.clock.now()
        if comm.rank == 0:
            comm.Send(mega(), 1)
            window.Get(mega(), 0)
            window.Flush(0)
            comm.record(at=comm.clock.now() - begin)
        else:
            comm.Recv(mega(), 0)

    assert times(main, 2) == [0.0]


def test_a_flush_waits_for_accesses_with_requests_too():
    """What `Rput` writes is there when `Flush` returns, and what `Rget` reads; a wait afterwards is over at once."""

    def main(comm):
        window = comm.Win.Create(mega(), comm=comm)
        window.Lock_all()
        comm.Barrier()
        begin, read = comm.clock.now(), np.zeros(1, np.uint8)
        if comm.rank == 0:
            writing = window.Rput(np.full(MEGABYTE, 1, np.uint8), 1)
            reading = window.Rget(read, 1)
            window.Flush(1)
            comm.record(at=comm.clock.now() - begin, read=int(read[0]))
            read[0] = 7
            Request.Waitall([writing, reading])
            comm.record(after=comm.clock.now() - begin, kept=int(read[0]))
        comm.Barrier()

    rows = run(main, 2, platform=platform())[1].rows
    expected = pytest.approx(BYTES_S + 2 * LATENCY, rel=1e-4)
    assert [values for _, _, values in rows] == [{"at": expected, "read": 1}, {"after": expected, "kept": 7}]


def test_a_flush_that_met_its_deadline_may_be_tried_again():
    """The target computes for 1 s: what the first flush has not seen completed the second one waits for."""

    def main(comm):
        window = comm.Win.Create(np.zeros(8, np.uint8), comm=comm)
        window.Lock_all()
        comm.Barrier()
        if comm.rank == 1:
            with comm.compute(1.0):
                pass
        else:
            window.Put(np.zeros(8, np.uint8), 1)
            with pytest.raises(Timeout), comm.clock.deadline(0.1):
                window.Flush(1)
            window.Flush(1)
            comm.record(at=comm.clock.now())
        comm.Barrier()

    assert times(main, 2)[0] > 1.0


def test_an_access_to_the_dead_fails_once():
    """Who has heard of it in a flush may close the epoch."""

    def main(comm):
        window = comm.Win.Create(np.zeros(8, np.uint8), comm=comm)
        window.Lock_all()
        comm.clock.sleep(1.0)
        if comm.rank == 0:
            window.Rput(np.zeros(8, np.uint8), 1)
            with pytest.raises(RankFailed):
                window.Flush(1)
            window.Unlock_all()
            comm.record(at=comm.clock.now())

    found = run(main, 2, faults="crash:1@0.5s", platform=platform())[1].column("at")
    assert found == {0: pytest.approx(1.0, abs=0.01)}
