"""Faults of links touch collectives and windows, as they would on reliable connections."""

import numpy as np
import pytest
from support.virtual_run import BANDWIDTH, LATENCY, platform, run

from spawnsim.comm.ops import MAX, SUM
from spawnsim.errors import ParameterError, Timeout
from spawnsim.models.faults import DELIVERED, Delay, FaultPlan
from spawnsim.models.faults.plan import RETRANSMIT_S
from spawnsim.virtual.mpi.requests import Request

FLOATS = 30_000  # 120 kB: above the usual eager threshold
NONE = platform(contention="none")


def attempt(comm, call, seconds=5.0):
    """Start a call at 1 s; record when it ended, what it returned, and of a Timeout whom it names."""
    comm.clock.sleep(1.0 - comm.clock.now())
    try:
        with comm.clock.deadline(seconds):
            result = call()
        comm.record(at=comm.clock.now() - 1.0, result=str(result))
    except Timeout as error:
        comm.record(out=comm.clock.now() - 1.0, missing=str(list(error.ranks)))


def tried(call, ranks, faults, **how):
    """Let all ranks attempt a collective; return the notes."""
    return run(lambda comm: attempt(comm, lambda: call(comm)), ranks, faults=faults, **how)[1]


def links(notes):
    """Return the events of links: (rank, what, dest, call)."""
    return [
        (rank, fields["what"], fields["dest"], fields.get("call", ""))
        for rank, _, kind, fields in notes.events
        if kind == "link"
    ]


# ------------------------------------------------------------------------------------------------ lost


def test_a_partition_ends_a_collective_at_the_deadline_and_names_the_other_side():
    """Twelve ranks, cut in two: nobody gets through an allreduce, and all know whose messages are missing."""
    vector = np.ones(FLOATS, np.float32)
    notes = tried(
        lambda comm: comm.Allreduce(vector, vector.copy()), 12, "partition:0-5@0.5s",
        platform=platform(eager_bytes=65536),
    )  # fmt: skip
    assert notes.column("at") == {}
    assert list(notes.column("out").values()) == [5.0] * 12
    for rank, missing in notes.column("missing").items():
        others = set(range(6, 12)) if rank < 6 else set(range(6))
        assert set(eval(missing)) & others, rank
    struck = links(notes)
    assert {what for _, what, _, _ in struck} == {"lost"}
    assert {call for _, _, _, call in struck} == {"Allreduce"}
    assert all((source < 6) != (dest < 6) for source, _, dest, _ in struck)


def test_only_those_wait_who_depend_on_what_is_lost():
    """A broadcast down a binomial tree: whom rank 4 tells gets nothing if rank 4 does; all others leave as ever."""
    call = lambda comm: comm.Bcast(np.zeros(1000, np.uint8))  # noqa: E731
    plain, notes = (tried(call, 8, faults) for faults in (None, "down:0>4@0.5s"))
    at = notes.column("at")
    assert sorted(at) == [0, 1, 2, 3]
    assert at == {rank: plain.column("at")[rank] for rank in at}
    assert notes.column("missing") == dict.fromkeys([4, 5, 6, 7], "[0]")
    assert links(notes) == [(0, "lost", 4, "Bcast")]


def test_with_the_default_deadline_it_is_a_timeout_and_no_deadlock():
    """The program is not to blame: after 30 s the call says who could not be heard."""
    with pytest.raises(Timeout, match=r"Barrier\(\), number 0 on MPI_COMM_WORLD.*missing: rank 1"):
        run(lambda comm: comm.Barrier(), 3, faults="down:1>2@0s")


@pytest.mark.parametrize("wait", ["Wait", "Waitany"])
def test_a_request_of_a_collective_that_never_ends_meets_its_deadline(wait):
    """Nonblocking, waited for later, with the default deadline of its own wait."""

    def main(comm):
        request = comm.Ibarrier()
        comm.clock.sleep(1.0)
        try:
            request.Wait() if wait == "Wait" else Request.Waitany([request])
        except Timeout as error:
            comm.record(out=comm.clock.now(), missing=str(error.ranks))

    notes = run(main, 2, faults="down:1>0@0s", deadline_s=7.0)[1]
    assert notes.column("out") == {0: pytest.approx(8.0)}
    assert notes.column("missing") == {0: "(1,)"}


def test_after_a_timeout_the_program_goes_on():
    """It catches the error, recovers when the link is back, and the next collective goes well."""

    def main(comm):
        try:
            with comm.clock.deadline(2.0):
                comm.Allreduce(np.ones(4), np.ones(4))
        except Timeout:
            comm.clock.sleep(2.0)
        comm = comm.recover().comm
        total = np.zeros(4)
        comm.Allreduce(np.ones(4), total)
        comm.record(total=float(total[0]), at=comm.clock.now())

    notes = run(main, 10, faults="drop:*>*@0s+4s")[1]
    assert notes.column("total") == dict.fromkeys(range(10), 10.0)


# ------------------------------------------------------------------------------------------------ late


def test_a_delay_adds_to_the_flight_of_its_message_alone():
    """Of a broadcast to eight, rank 4 and those whom it tells are 0.3 s late."""
    call = lambda comm: comm.Bcast(np.zeros(1000, np.uint8))  # noqa: E731
    plain, notes = (tried(call, 8, faults).column("at") for faults in (None, "delay:0>4@0.5s+1s,0.3s"))
    assert [notes[rank] - plain[rank] for rank in range(8)] == pytest.approx([0.0] * 4 + [0.3] * 4)


def test_a_delay_beyond_all_clocks_is_a_message_that_does_not_come():
    """An object of Python's may hold any finite time; texts are bounded."""
    plan = FaultPlan((Delay(0, 1, 0.0, 9.0, delay_s=1e300, spread_s=1e300),))
    notes = tried(lambda comm: comm.Allreduce(np.zeros(2), np.zeros(2)), 2, plan)
    assert notes.column("out")[1] == pytest.approx(5.0)


def test_a_link_that_is_down_holds_a_collective_until_it_is_back():
    """Down from 0.5 s to 1.7 s: what was to be sent at 1 s arrives when it would have been sent at 1.7 s."""
    notes = tried(lambda comm: comm.Barrier(), 2, "down:0>1@0.5s+1.2s")
    assert notes.column("at") == {0: pytest.approx(LATENCY), 1: pytest.approx(0.7 + LATENCY)}
    assert links(notes) == [(0, "delayed", 1, "Barrier")]


def test_a_late_collective_names_who_was_late_when_the_deadline_comes_first():
    """The message would come after 10 s; the deadline is 5 s."""
    notes = tried(lambda comm: comm.Barrier(), 2, "delay:0>1@0s,10s")
    assert notes.column("out") == {1: 5.0}
    assert notes.column("missing") == {1: "[0]"}


@pytest.mark.parametrize(("length_s", "resent_s"), [(0.1, 1), (0.5, 3), (1.3, 7)])
def test_what_is_dropped_is_sent_again(length_s, resent_s):
    """After 0.2, 0.6 and 1.4 s; the first that does not meet the fault comes through."""
    notes = tried(lambda comm: comm.Barrier(), 2, f"drop:0>1@1s+{length_s}s")
    late_s = resent_s * RETRANSMIT_S
    assert notes.column("at") == {0: pytest.approx(LATENCY), 1: pytest.approx(late_s + LATENCY)}
    assert links(notes) == [(0, "resent", 1, "Barrier")]


def test_data_are_sent_again_at_the_times_of_tcp_until_it_gives_up():
    """Twice as long each time, from 0.2 s up to 120 s: 11 times for 300 s without a link; never through for 1,000 s."""
    verdict = FaultPlan.parse("drop:0>1@0s+300s").carried(0, 1, 0.0, 7)
    assert (verdict.lost, verdict.resent) == (False, 11)
    assert verdict.delay_s == pytest.approx(0.2 * (2**10 - 1) + 120.0)
    assert FaultPlan.parse("drop:0>1@0s+1000s").carried(0, 1, 0.0, 7).lost
    assert FaultPlan.parse("drop:0>1@0s+1000s").carried(1, 0, 0.0, 7) == DELIVERED


def test_a_lossy_network_is_slow_and_loses_nothing():
    """Every tenth message is lost, for ever: forty allreduces of twelve ranks all end, later than without loss."""

    def main(comm):
        total = np.zeros(8)
        for _ in range(40):
            comm.Allreduce(np.full(8, comm.rank + 1.0), total)
            assert (total == 78).all()
        comm.record(at=comm.clock.now())

    plain, notes = (run(main, 12, faults=faults)[1] for faults in (None, "drop:*>*@0s,0.1"))
    assert min(notes.column("at").values()) > 2 * max(plain.column("at").values())
    whats = [what for _, what, _, _ in links(notes)]
    assert set(whats) == {"resent"}
    assert 40 * 44 * 0.06 < len(whats) < 40 * 44 * 0.14


def test_copies_are_taken_once_and_counted():
    """Same times, same results, an event for each copy; and the digest says that the run was another one."""

    def main(comm):
        total = np.zeros(8)
        comm.Allreduce(np.ones(8), total)
        window = comm.Win.Allocate(8, 1, comm=comm)
        window.Lock_all()
        window.Accumulate(np.ones(8, np.uint8), (comm.rank + 1) % comm.size)
        window.Flush_all()
        comm.Barrier()
        comm.record(at=comm.clock.now(), total=float(total[0]), there=int(np.asarray(window)[0]))

    (plain, before), (doubled, after) = (run(main, 10, faults=each) for each in (None, "duplicate:*>*@0s"))
    assert before.rows == after.rows
    assert {what for _, what, _, _ in links(after)} == {"doubled"}
    assert {call for _, _, _, call in links(after)} == {"Allreduce", "Win.Allocate", "Accumulate", "Barrier"}
    assert plain.digest != doubled.digest


# ------------------------------------------------------------------------------------------------ damaged


def flips(a, b):
    """Return how many bits differ."""
    return int(np.unpackbits(np.asarray(a).view(np.uint8) ^ np.asarray(b).view(np.uint8)).sum())


@pytest.mark.parametrize("floats", [1000, FLOATS], ids=["tree", "scattered"])
def test_a_damaged_broadcast_is_damaged_for_those_behind_the_link(floats):
    """Down a tree one bit for rank 4 and those whom it tells; scattered and gathered, for all whom the part reaches."""

    def main(comm):
        sent = np.arange(floats, dtype=np.float32)
        data = sent.copy() if comm.rank == 0 else np.zeros_like(sent)
        comm.Bcast(data)
        comm.record(bits=flips(data, sent))

    notes = run(main, 8, faults="corrupt:0>4@0s", platform=platform(eager_bytes=65536))[1]
    found = [notes.column("bits")[rank] for rank in range(8)]
    struck = links(notes)
    assert set(struck) == {(0, "corrupt", 4, "Bcast")}
    if floats == 1000:
        assert found == [0] * 4 + [1] * 4
    else:  # a part for 4 to 7 to share out, and later one from rank 0 to rank 4 alone
        assert (found[0], len(struck), found[4]) == (0, 2, 2)
        assert set(found[1:]) == {1, 2}


CUT = {  # calls whose results are whole blocks of other ranks
    "Gather": lambda comm, own, to: comm.Gather(own, to, root=2),
    "Allgather": lambda comm, own, to: comm.Allgather(own, to),
    "Alltoall": lambda comm, own, to: comm.Alltoall(np.tile(own, comm.size), to),
}


@pytest.mark.parametrize("name", CUT)
def test_a_damaged_block_is_one_block_with_one_bit_changed(name):
    """Whoever gets damaged data gets them in whole blocks of others, one bit in each."""

    def main(comm):
        own, to = np.full(100, comm.rank, np.int64), np.zeros((comm.size, 100), np.int64)
        CUT[name](comm, own, to)
        clean = np.repeat(np.arange(comm.size), 100).reshape(to.shape)
        if name != "Gather" or comm.rank == 2:
            comm.record(bits=str([flips(a, b) for a, b in zip(to, clean, strict=True)]))

    notes = run(main, 10, faults="corrupt:3>2@0s; corrupt:1>2@0s")[1]
    rows = {rank: eval(bits) for rank, bits in notes.column("bits").items()}
    assert set(rows[2]) == {0, 1}, "some block at rank 2, and never two bits of one"
    assert rows[2][2] == 0, "its own block never travelled"
    assert len(links(notes)) >= 1


def test_a_damaged_message_of_a_reduction_damages_its_senders_contribution():
    """In rank 1's sum, rank 0's number counts with one bit changed; rank 0's own sum is right."""

    def main(comm):
        total = np.zeros(100, np.int64)
        comm.Allreduce(np.full(100, 1 << comm.rank, np.int64), total, SUM)
        comm.record(wrong=str([int(each) - 3 for each in total if each != 3]))

    found = run(main, 2, faults="corrupt:0>1@0s", seed=4)[1].column("wrong")
    assert found[0] == "[]"
    (wrong,) = eval(found[1])
    assert abs(wrong).bit_count() == 1


def test_a_reduction_takes_damage_as_its_operation_does():
    """The maximum of numbers of which one is damaged is the maximum of those numbers.

    Rank 0 hands its numbers to rank 1, who goes on with them, so all see the damage.
    """

    def main(comm):
        total = np.zeros(1000, np.uint8)
        comm.Allreduce(np.full(1000, 200 if comm.rank else 100, np.uint8), total, MAX)
        comm.record(got=str(sorted(set(total.tolist()))))

    found = run(main, 12, faults="corrupt:0>1@0s")[1].column("got")
    assert set(found.values()) == {"[200, 228]"}  # 100 + 128: the one bit that is flipped


def test_what_the_library_tells_itself_is_checked():
    """Making communicators and windows, and barriers, go well where every payload is damaged."""

    def main(comm):
        half = comm.Split(comm.rank % 2)
        comm.Barrier()
        window = comm.Win.Allocate(8, 1, comm=half.Dup())
        comm.record(size=half.size, bytes=np.asarray(window).nbytes)

    notes = run(main, 12, faults="corrupt:*>*@0s")[1]
    assert notes.column("size") == dict.fromkeys(range(12), 6)
    assert links(notes) == []


# ------------------------------------------------------------------------------------------------ windows


def accessed(access, faults, **how):
    """Let rank 1 of twelve access 120 kB of rank 0's at 1 s; return the notes."""

    def main(comm):
        window = comm.Win.Create(np.arange(FLOATS, dtype=np.float32), comm=comm)
        window.Lock_all()
        if comm.rank == 1:
            attempt(comm, lambda: access(window))
        comm.clock.sleep(9.0 - comm.clock.now())
        if comm.rank == 0:
            mine = np.asarray(window).view(np.float32)
            comm.record(bits=flips(mine, np.arange(FLOATS, dtype=np.float32)))

    how = {"platform": platform(contention="none", eager_bytes=65536)} | how
    return run(main, 12, faults=faults, **how)[1]


def get(window):
    """Read all; return how many bits are not as they should be."""
    data = np.zeros(FLOATS, np.float32)
    window.Rget(data, 0).Wait()
    return flips(data, np.arange(FLOATS, dtype=np.float32))


def put(window):
    """Write what is there already."""
    window.Put(np.arange(FLOATS, dtype=np.float32), 0)
    window.Flush(0)


def accumulate(window):
    """Add nothing."""
    window.Accumulate(np.zeros(FLOATS, np.float32), 0)
    window.Flush(0)


TOOK_S = 2 * LATENCY + 4 * FLOATS / BANDWIDTH
ACCESSES = {"Get": get, "Put": put, "Accumulate": accumulate}
each_access = pytest.mark.parametrize("call", ACCESSES)


@each_access
@pytest.mark.parametrize("link", ["1>0", "0>1"], ids=["asking", "answering"])
def test_an_access_over_a_dead_link_meets_its_deadline(call, link):
    """In either direction; it names the target."""
    notes = accessed(ACCESSES[call], f"down:{link}@0.5s")
    assert (notes.column("out"), notes.column("missing")) == ({1: 5.0}, {1: "[0]"})
    assert ("lost", call) in {(what, each) for _, what, _, each in links(notes)}


@each_access
@pytest.mark.parametrize(
    ("faults", "late_s", "what"),
    [
        ("delay:1>0@0.5s,0.3s", 0.3, "delayed"),
        ("delay:0>1@0.5s,0.3s", 0.3, "delayed"),
        ("down:1>0@0.5s+1s", 0.5, "delayed"),
        ("partition:0@0.5s+1s", 0.5, "delayed"),
        ("drop:1>0@1s+0.1s", RETRANSMIT_S, "resent"),
    ],
)
def test_an_access_is_late_by_what_holds_it(call, faults, late_s, what):
    """Delayed, held until the link is back, or sent again."""
    notes = accessed(ACCESSES[call], faults)
    assert notes.column("at") == {1: pytest.approx(TOOK_S + late_s)}
    assert {(each, name) for _, each, _, name in links(notes)} == {(what, call)}


def test_damaged_accesses_damage_one_bit_where_they_go():
    """A Get at the origin, a Put at the target; an empty request or answer has nothing to damage."""
    notes = accessed(get, "corrupt:*>*@0.5s")
    assert (notes.column("result")[1], notes.column("bits")[0]) == ("1", 0)
    assert links(notes) == [(0, "corrupt", 1, "Get")]
    notes = accessed(put, "corrupt:*>*@0.5s")
    assert notes.column("bits")[0] == 1
    assert links(notes) == [(1, "corrupt", 0, "Put")]


def test_what_follows_a_lost_request_is_lost_with_it():
    """The connection is in order: a later access to the same target waits as well, one to another does not."""

    def both(window):
        window.Put(np.zeros(4, np.float32), 0)
        window.Get(np.zeros(4, np.float32), 2)
        window.Flush(2)
        window.Get(np.zeros(4, np.float32), 0)
        window.Flush(0)

    notes = accessed(both, "down:1>0@0.5s+0.6s; down:1>0@1s")
    assert notes.column("out") == {1: pytest.approx(5.0 + 2 * LATENCY, abs=1e-3)}


def test_a_lock_and_its_end_cross_links_too():
    """Rank 1 gets its lock late, and gives it up late: rank 2, who asks at 1.7 s, gets it after that."""

    def main(comm):
        window = comm.Win.Allocate(8, 1, comm=comm)
        comm.clock.sleep(1.0 - comm.clock.now())
        if comm.rank == 2:
            comm.clock.sleep(0.7)
        if comm.rank:
            window.Lock(0)
            comm.record(at=comm.clock.now() - 1.0)
            window.Unlock(0)

    found = run(main, 3, faults="delay:1>0@0.5s,0.5s", platform=NONE)[1].column("at")
    assert found == {1: pytest.approx(0.5 + 2 * LATENCY), 2: pytest.approx(1.0 + 4 * LATENCY)}


def test_the_words_of_an_active_epoch_are_sent_again():
    """Post, Start, Complete and Wait of a window go well on a network that loses half of all."""

    def main(comm):
        window = comm.Win.Allocate(8, 1, comm=comm)
        group = comm.Get_group()
        others = group.Excl([0])
        for _ in range(4):
            if comm.rank == 0:
                window.Post(others)
                window.Wait()
            else:
                window.Start(group.Incl([0]))
                window.Accumulate(np.ones(8, np.uint8), 0)
                window.Complete()
        if comm.rank == 0:
            comm.record(there=int(np.asarray(window)[0]))

    notes = run(main, 11, faults="drop:*>*@0s,0.5", deadline_s=1e4)[1]
    assert notes.column("there") == {0: 40}
    assert "window" in {call for _, _, _, call in links(notes)}


# ------------------------------------------------------------------------------------------------ all


def test_the_same_seed_gives_the_same_faults():
    """Equal digests and events twice; another seed chooses other messages."""

    def main(comm):
        total, window = np.zeros(FLOATS, np.float32), comm.Win.Allocate(4 * FLOATS, 1, comm=comm)
        window.Lock_all()
        for step in range(5):
            comm.Allreduce(np.full(FLOATS, comm.rank, np.float32), total)
            window.Get(total, (comm.rank + step) % comm.size)
            window.Flush_all()
        comm.record(at=comm.clock.now(), sum=float(total.sum()))

    faults = "drop:*>*@0s,0.05; delay:*>3@0s,1ms,1ms; corrupt:2>*@0s,0.1; duplicate:*>*@0s,0.1"
    small = platform(eager_bytes=65536)
    first, again, other = (run(main, 11, faults=faults, seed=seed, platform=small) for seed in (1, 1, 2))
    assert first[0].digest == again[0].digest
    assert first[1].events == again[1].events
    assert other[1].events != first[1].events


def test_messages_to_oneself_cross_no_link():
    """They are copies in the rank's own memory; and a fault of such a link is refused."""

    def main(comm):
        comm.send(comm.rank, comm.rank)
        comm.record(got=comm.recv(source=comm.rank))

    notes = run(main, 2, faults="drop:*>*@0s")[1]
    assert notes.column("got") == {0: 0, 1: 1}
    with pytest.raises(ParameterError, match=r"LinkDown\(source=1, dest=1.*no link to itself"):
        FaultPlan.parse("down:1>1@0s")


def test_a_partition_of_all_from_nobody_is_refused():
    """It would silently do nothing."""
    with pytest.raises(ParameterError, match=r"all 4 ranks are on one side"):
        run(lambda comm: None, 4, faults="partition:0-3@1s")
    run(lambda comm: None, 5, faults="partition:0-3@1s")
