"""How runs end badly: one clear error, naming rank, call and time, and nothing recorded is lost."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.virtual_run import LATENCY, Notes, platform, run

from spawnsim.comm import MAX, SUM
from spawnsim.errors import (
    Deadlock,
    MismatchError,
    ParameterError,
    RankFailed,
    Timeout,
    TruncationError,
)
from spawnsim.scenario import Scenario
from spawnsim.virtual import simulate
from spawnsim.virtual.mpi.requests import Request


def test_a_cycle_of_receives_is_a_deadlock_with_table_and_cycle():
    """Everybody receives before sending: the report names each call and the ring."""

    def main(comm):
        comm.record(begun=1)
        comm.recv(source=(comm.rank + 1) % comm.size, tag=3)

    notes = Notes()
    with pytest.raises(Deadlock) as caught:
        simulate(main, Scenario(3, platform()), recorder=notes)
    text = str(caught.value)
    assert "rank 0 → rank 1 → rank 2 → rank 0" in text
    assert "recv(source=1, tag=3) on MPI_COMM_WORLD" in text
    assert "test_endings.py:" in text
    assert len(notes.rows) == 3


def test_a_receive_that_nobody_answers_names_who_has_ended():
    """The sender's program is over: the receiver's wait can never end."""

    def main(comm):
        if comm.rank == 1:
            comm.recv(source=0)

    with pytest.raises(Deadlock, match="rank 1 waits for rank 0, whose program has ended"):
        run(main, 2)


def test_messages_that_fit_no_receive_are_named():
    """A wrong tag is the commonest mistake: the report shows what was sent beside what is waited for."""

    def main(comm):
        pair = comm.Split(comm.rank // 2)
        if comm.rank == 2:
            pair.send("a", dest=1, tag=3)
            pair.send("b", dest=1, tag=3)
        if comm.rank == 3:
            pair.Irecv(np.zeros(1), 0, 5)
            pair.recv(source=0, tag=4)

    with pytest.raises(Deadlock) as caught:
        run(main, 4)
    assert "recv(source=0 (rank 2 of the world), tag=4)" in str(caught.value)
    assert "no receive matches: 2 times rank 0 to rank 1, tag 3, on " in str(caught.value)


def test_two_large_sends_facing_each_other_deadlock():
    """Above the eager threshold a send waits for its receive; below it does not."""

    def main(comm):
        data, other = np.zeros(1000), 1 - comm.rank
        comm.Send(data, other)
        comm.Recv(data, other)

    run(main, 2, platform=platform(eager_bytes=8000))
    with pytest.raises(Deadlock, match="rank 0 → rank 1 → rank 0"):
        run(main, 2, platform=platform(eager_bytes=7999))


@pytest.mark.parametrize(
    ("one", "other", "advice"),
    [
        (
            lambda comm, x: comm.Bcast(x),
            lambda comm, x: comm.Allreduce(x.copy(), x),
            "make the same collective calls in the same order",
        ),
        (
            lambda comm, x: comm.Allreduce(x.copy(), x, SUM),
            lambda comm, x: comm.Allreduce(x.copy(), x, MAX),
            "give the same op",
        ),
        (lambda comm, x: comm.Bcast(x, 0), lambda comm, x: comm.Bcast(x, 1), "give the same root"),
        (
            lambda comm, x: comm.Allreduce(x.copy(), x),
            lambda comm, x: comm.Allreduce(x[:2].copy(), x[:2]),
            "give the same count",
        ),
        (
            lambda comm, x: comm.Allreduce(x.copy(), x),
            lambda comm, x: comm.Allreduce(x.astype("f4"), x.astype("f4")),
            "give the same datatype",
        ),
    ],
    ids=["operation", "op", "root", "count", "datatype"],
)
def test_mismatched_collectives_are_named_when_they_meet(one, other, advice):
    """Both MPIs accept most of these without a word; here both calls are shown, and what differs."""

    def main(comm):
        (one if comm.rank == 0 else other)(comm, np.zeros(4))

    with pytest.raises(MismatchError, match=rf"rank 1 calls .* where rank 0 called .*{advice}"):
        run(main, 2)


def _first_goes_on(comm, x):
    if comm.rank == 0:
        comm.Ibarrier()
    elif comm.rank == 3:
        comm.Allreduce(x.copy(), x)
    else:
        comm.Barrier()


@pytest.mark.parametrize(
    ("main", "other", "line"),
    [
        (lambda comm, x: comm.Allreduce(x.copy(), x) if comm.rank == 3 else comm.Barrier(), 0, 0),
        (lambda comm, x: comm.Allreduce(x.copy(), x) if comm.rank == 3 else comm.Ibarrier().Wait(), 0, 0),
        (_first_goes_on, 1, 6),
    ],
    ids=["blocking", "request", "the first one is not waiting"],
)
def test_a_mismatch_gives_both_lines(main, other, line):
    """That of the odd rank in a note, and that of one which waits in the call of the others."""
    call = rf"rank 3 calls Allreduce\(.* where rank {other} called Barrier\(\) at 0 s"
    place = f"{Path(__file__).name}:{main.__code__.co_firstlineno + line}"
    with pytest.raises(MismatchError, match=rf"{call} and waits at {place}\. All"):
        run(lambda comm: main(comm, np.zeros(4)), 4)


def _polled(comm):
    request = comm.Ibarrier()
    while not request.Test():
        comm.clock.sleep(0.1)


ALL_WAIT = {
    "a blocking call": lambda comm: comm.Barrier(),
    "a rooted call": lambda comm: comm.bcast(None, root=3),
    "a request": lambda comm: comm.Ibarrier().Wait(),
    "one of several requests": lambda comm: Request.Waitany([comm.Ibarrier(), comm.irecv(source=0, tag=9)]),
    "a request that is polled": _polled,
    "a new communicator": lambda comm: comm.Split(0),
    "a new communicator's request": lambda comm: comm.Idup()[1].Wait(),
    "a window": lambda comm: comm.Win.Allocate(8, comm=comm),
}


@pytest.mark.parametrize("call", ALL_WAIT.values(), ids=ALL_WAIT)
@pytest.mark.parametrize("odd", [1, 3])
def test_a_mismatch_reaches_all_members_and_they_may_go_on(call, odd):
    """Those who wait already, and those who come later: with one text. It is a RuntimeError, as MPI's errors are."""

    def main(comm):
        comm.clock.sleep(float(comm.rank))
        with pytest.raises(RuntimeError) as caught:
            comm.allreduce(1) if comm.rank == odd else call(comm)
        assert type(caught.value) is MismatchError
        comm.record(text=str(caught.value), at=comm.clock.now())
        comm.Barrier()

    notes = run(main, 4)[1]
    assert len(notes.column("text")) == 4
    assert len(set(notes.column("text").values())) == 1
    assert notes.column("at") == {rank: pytest.approx(max(rank, odd), abs=0.11) for rank in range(4)}


def test_who_has_left_before_the_mismatch_learns_of_none():
    """A root that broadcasts goes on before others come, and so does who has received."""

    def main(comm):
        comm.clock.sleep(float(comm.rank))
        if comm.rank < 2:
            comm.record(got=comm.bcast("text" if comm.rank == 0 else None))
        else:
            with pytest.raises(MismatchError, match="rank 2 calls Barrier"):
                comm.Barrier()
        comm.Barrier()

    assert run(main, 3)[1].column("got") == {0: "text", 1: "text"}


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (lambda comm, x, to: comm.Ssend(x, to), "use Sendrecv, or Isend and Waitall"),
        (lambda comm, x, to: comm.Recv(x, to), "let one send first, or use Sendrecv"),
        (lambda comm, x, to: comm.Barrier() if comm.rank else comm.Recv(x, 1), None),
    ],
)
def test_a_cycle_of_sends_or_receives_is_reported_with_advice(call, remedy):
    """The two mistakes that most programs make first."""

    def main(comm):
        call(comm, np.zeros(4), (comm.rank + 1) % comm.size)

    with pytest.raises(Deadlock) as caught:
        run(main, 3)
    assert remedy in str(caught.value) if remedy else "use Sendrecv" not in str(caught.value)


def test_receives_that_match_nothing_are_not_advised_to_send_first():
    """All have sent, with another tag: the ring of receives is no order of calls that could be changed."""

    def main(comm):
        comm.Send(np.ones(4), (comm.rank + 1) % comm.size, tag=5)
        comm.Recv(np.zeros(4), (comm.rank - 1) % comm.size, tag=6)

    with pytest.raises(Deadlock, match="Sent, but no receive matches") as caught:
        run(main, 3)
    assert "let one send first" not in str(caught.value)


def test_a_message_longer_than_its_buffer_is_refused():
    """Truncation names both sizes."""

    def main(comm):
        comm.Send(np.zeros(8), 1) if comm.rank == 0 else comm.Recv(np.zeros(4), 0)

    with pytest.raises(TruncationError, match="64 bytes does not fit a buffer of 32"):
        run(main, 2)


def test_a_deadline_ends_a_wait_and_the_program_may_go_on():
    """`comm.clock.deadline` bounds a call; the message that comes too late is received later, not lost."""

    def main(comm):
        if comm.rank == 0:
            with comm.compute(2.0):
                pass
            comm.send("late", 1)
        else:
            with pytest.raises(Timeout) as caught, comm.clock.deadline(0.5):
                comm.recv(source=0)
            assert caught.value.ranks == (0,)
            assert comm.clock.now() == 0.5
            assert comm.recv(source=0) == "late"
            comm.record(now=comm.clock.now())

    assert run(main, 2)[1].column("now")[1] > 2.0


def test_the_tighter_of_two_deadlines_holds_and_none_at_all_is_a_look():
    """As on real ranks: an inner block makes no wait longer, and one of 0 s takes what is there."""
    reported = []

    def main(comm):
        if comm.rank == 1:
            for outer_s, inner_s in ((0.1, 5.0), (5.0, 0.1)):
                with pytest.raises(Timeout), comm.clock.deadline(outer_s), comm.clock.deadline(inner_s):
                    comm.recv(source=0, tag=4)
                reported.append(comm.clock.now())
            comm.clock.sleep(0.1)
            with comm.clock.deadline(0):
                reported.append(comm.recv(source=0, tag=5))
                with pytest.raises(Timeout):
                    comm.recv(source=0, tag=5)
            reported.append(comm.clock.now())
        elif comm.rank == 0:
            comm.send("there", 1, 5)

    run(main, 2)
    assert reported == pytest.approx([0.1, 0.2, "there", 0.3])


def test_the_default_deadline_names_who_is_missing():
    """A collective that one rank joins much too late ends in a Timeout on the others."""

    def main(comm):
        if comm.rank == 2:
            with comm.compute(100.0):
                pass
        comm.Barrier()

    with pytest.raises(
        Timeout, match=r"Barrier\(\), number 0 on MPI_COMM_WORLD .* missing: rank 2"
    ) as caught:
        run(main, 3)
    assert (caught.value.ranks, caught.value.sequence) == ((2,), 0)
    run(main, 3, deadline_s=math.inf)


def test_survivors_of_a_crash_learn_who_failed():
    """A dead rank fails the calls that need it, shortly after its death, and only those."""

    def main(comm):
        if comm.rank == 1:
            for _ in range(100):
                with comm.compute(0.1):
                    pass
        elif comm.rank == 0:
            with pytest.raises(RankFailed) as caught:
                comm.recv(source=1)
            comm.record(when=comm.clock.now(), who=str(caught.value.ranks))
        else:
            assert comm.clock.now() == 0.0

    notes = run(main, 3, faults="crash:1@2.5s")[1]
    assert notes.column("who") == {0: "(1,)"}
    assert 2.5 < notes.column("when")[0] < 2.52
    assert [(rank, time_s, kind) for rank, time_s, kind, _ in notes.events] == [(1, 2.5, "crash")]


def test_a_rank_never_runs_past_its_own_death():
    """What a rank would have sent after its death is not sent."""

    def main(comm):
        if comm.rank == 1:
            for step in range(10):
                with comm.compute(1.0):
                    pass
                comm.send(step, 0)
        elif comm.rank == 0:
            got = []
            with pytest.raises(RankFailed):
                while True:
                    got.append(comm.recv(source=1))
            comm.record(got=len(got))

    assert run(main, 2, faults="crash:1@3.5s")[1].column("got") == {0: 3}


@pytest.mark.parametrize("ranks", [0, -1, 2.5, True])
def test_nonsense_ranks_are_refused(ranks):
    """The number of ranks is a whole number above 0."""
    with pytest.raises(ParameterError, match="ranks="):
        run(lambda comm: None, ranks)


PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, "tests")
from support.virtual_run import Notes, platform
from spawnsim.scenario import Scenario
from spawnsim.virtual import simulate

def main(comm):
    for step in range(5):
        with comm.compute():
            pass
        comm.isend({step}, (comm.rank * 7 + step) % comm.size)
        while comm.iprobe():
            comm.recv()
        comm.allreduce(comm.rng("x").normal())

how = dict(platform="ethernet-10g", stragglers="lognormal:0.3+slow:0.1,4", seed=3)
totals = simulate(main, Scenario(40, **how), recorder=Notes())
print(totals.digest, totals.virtual_seconds, totals.messages, totals.events)
"""


def test_the_same_seed_gives_the_same_trace_in_other_processes():
    """Two processes with different hash seeds and optimisation levels agree to the last bit; another seed does not."""
    found = set()
    for flags, hash_seed in (([], "1"), ([], "2"), (["-O"], "3")):
        done = subprocess.run(
            [sys.executable, *flags, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        found.add(done.stdout)
    assert len(found) == 1
    other = PROGRAM.replace("seed=3", "seed=4")
    done = subprocess.run(
        [sys.executable, "-c", other], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout not in found


def test_recording_changes_nothing():
    """A program that records has the digest of one that does not."""

    def main(comm, noisy):
        for _ in range(5):
            with comm.compute(0.1):
                pass
            comm.allreduce(comm.rank)
            if noisy:
                comm.record(x=1.0)
                comm.record.event("thing", y=2)

    digests = {run(lambda comm, noisy=noisy: main(comm, noisy), 4)[0].digest for noisy in (False, True)}
    assert len(digests) == 1
    assert LATENCY > 0
