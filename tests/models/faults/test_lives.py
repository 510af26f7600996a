"""Ranks that die and begin again: the next life is another member, and joins the others by `recover()` alone."""

from contextlib import suppress

import numpy as np
import pytest
import torch
from support.virtual_run import run

import spawnsim
from spawnsim import AverageAllPolicy
from spawnsim.errors import RankFailed, Revoked, Timeout
from spawnsim.virtual.mpi.module import MPI

FAILED = (RankFailed, Revoked, Timeout)
RANKS, VICTIM = 12, 3
SOON = "crash:3@0.12s; restart:3@0.125s"  # it is back before anybody knows of its death
LATER = "crash:3@0.12s; restart:3@0.2s"
PLANS = pytest.mark.parametrize("faults", [SOON, LATER], ids=["soon", "later"])


def kinds(notes):
    """Return who met which event."""
    return [(rank, kind) for rank, _, kind, _ in notes.events]


def outcome(call):
    """Return what a call returns, or the name of its error."""
    try:
        return call()
    except FAILED as error:
        return type(error).__name__


CALLS = {
    "allgather": lambda comm, win: comm.allgather(comm.rank),
    "Allreduce": lambda comm, win: comm.Allreduce(np.ones(40_000, np.float32), np.zeros(40_000, np.float32)),
    "Ibarrier": lambda comm, win: comm.Ibarrier().Wait(),
    "Dup": lambda comm, win: comm.Dup(),
    "Split": lambda comm, win: comm.Split(comm.rank % 2),
    "window": lambda comm, win: MPI.Win.Allocate(8, comm=comm),
    "fence": lambda comm, win: win.Fence(),
    "recv": lambda comm, win: comm.recv(source=VICTIM),
    "recv from anybody": lambda comm, win: comm.recv(),
    "posted receive": lambda comm, win: comm.irecv(source=VICTIM).wait(),
    "Mprobe": lambda comm, win: comm.Mprobe(VICTIM),
    "Send": lambda comm, win: comm.Send(np.zeros(100_000), VICTIM),
    "Ssend": lambda comm, win: comm.Ssend(np.zeros(1), VICTIM),
}


@PLANS
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("begun", ["before the death", "after the restart"])
def test_no_communicator_takes_the_next_life(faults, call, begun):
    """Whatever others call that needs the rank ends in `RankFailed`, although it is back, and calls the same."""

    def main(comm):
        again = comm.clock.now() > 0
        if again:
            comm.record(again=outcome(lambda: comm.allgather(9)))
            outcome(lambda: comm.send("from the next life", 0))
            return
        win = MPI.Win.Allocate(8, comm=comm)
        comm.clock.sleep(0.11 if begun == "before the death" else 0.3)
        if comm.rank == VICTIM:
            comm.clock.sleep(9.0)
        comm.record(call=outcome(lambda: CALLS[call](comm, win)), at=comm.clock.now())

    notes = run(main, RANKS, faults=faults, platform=None)[1]
    others = [rank for rank in range(RANKS) if rank != VICTIM]
    assert notes.column("call") == dict.fromkeys(others, "RankFailed")
    known_s = 0.13 if begun == "before the death" else 0.3
    assert list(notes.column("at").values()) == pytest.approx([known_s] * len(others), abs=2e-3)
    assert notes.column("again") == {VICTIM: "Revoked"}


@PLANS
def test_memory_of_an_earlier_life_is_gone(faults):
    """Nobody reaches the window of the rank that died, on whatever path."""

    def main(comm):
        if comm.clock.now() > 0:
            return
        win = MPI.Win.Allocate(8, comm=comm)
        comm.clock.sleep(0.3)
        win.Lock(0, MPI.LOCK_SHARED)
        win.Get(np.zeros(1), 0)
        win.Unlock(0)
        found = np.zeros(1)

        def get():
            win.Lock(VICTIM, MPI.LOCK_SHARED)
            win.Get(found, VICTIM)
            win.Unlock(VICTIM)

        comm.record(get=outcome(get), failed=str(comm.Get_failed().members))

    notes = run(main, RANKS, faults=faults, platform=None)[1]
    assert set(notes.column("get").values()) == {"RankFailed"}
    assert set(notes.column("failed").values()) == {"(3,)"}


def steps(comm, policy=None, last=60):
    """Run steps of 10 ms, with a collective in each fifth, the way that the guide shows. Return what was recovered."""
    model = torch.nn.Linear(300, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group, step, found = comm, 0, []
    while step < last:
        try:
            with comm.compute(0.01):
                pass
            if policy is not None:
                model, optimizer, _ = policy(step, model, optimizer, group=group)
            elif step % 5 == 4:
                assert set(group.allgather(step)) == {step}
            step += 1
        except FAILED:
            recovery = group.recover(step)
            found.append(recovery)
            group, step = recovery.comm, recovery.step
            if recovery.joined:  # who has joined has nothing: it takes all from one that stayed
                giver = min(set(range(group.size)) - set(recovery.joined))
                model.load_state_dict(group.bcast(model.state_dict(), giver))
    return group, found, model


@PLANS
@pytest.mark.parametrize(
    "policy", [None, 1, 10], ids=["collectives", "average each step", "average each tenth"]
)
def test_the_next_life_joins_by_recovery(faults, policy):
    """It becomes a member again, in its old place, at the others' step; nobody else is lost."""

    def main(comm):
        rule = None if policy is None else AverageAllPolicy(policy)
        group, found, model = steps(comm, rule)
        comm.record(
            members=str(group.Get_group().members), joined=str(found[-1].joined), dead=str(found[0].dead)
        )
        comm.record(
            weights=float(sum(each.detach().double().sum() for each in model.parameters())),
            step=found[-1].step,
        )

    notes = run(main, RANKS, faults=faults, platform=None)[1]
    everyone = dict.fromkeys(range(RANKS), str(tuple(range(RANKS))))
    assert notes.column("members") == everyone
    assert set(notes.column("joined").values()) == {"(3,)"}
    assert set(notes.column("dead").values()) == {"(3,)"}
    assert len(set(notes.column("weights").values())) == 1
    assert len(set(notes.column("step").values())) == 1
    assert min(notes.column("step").values()) > 5
    assert [each for each in kinds(notes) if each[1] != "recovered"] == [(3, "crash"), (3, "restart")]
    reported = {tuple(fields["dead"]) for _, _, kind, fields in notes.events if kind == "recovered"}
    assert reported - {(3,)} == {()} and (
        faults == LATER or reported == {()}
    )  # once it has begun again, it lives


def test_many_lives_join_one_after_the_other():
    """Four ranks, some twice, also in the middle of a recovery."""

    def main(comm):
        group, found, _ = steps(comm, last=100)
        comm.record(size=group.size, recoveries=len(found))

    faults = (
        "crash:3@0.12s; restart:3@0.125s; crash:3@0.3s; restart:3@0.36s; crash:0@0.126s; restart:0@0.2s; "
        "crash:11@0.36s; restart:11@0.3601s; crash:7@0.1349s; restart:7@0.5s"
    )
    notes = run(main, RANKS, faults=faults, platform=None)[1]
    assert notes.column("size") == dict.fromkeys(range(RANKS), RANKS)
    assert {kind for _, kind in kinds(notes)} == {"crash", "restart", "recovered"}


def test_who_joins_gives_nobody_up():
    """The others are busy for longer than its deadline: it alone ends, and says so; they go on as they were."""

    def main(comm):
        if comm.clock.now() > 0:
            comm.recover()
        comm.clock.sleep(60.0)
        comm.record(at=comm.clock.now())

    notes = run(main, 4, faults="crash:3@1s; restart:3@2s", deadline_s=5.0)[1]
    assert notes.column("at") == dict.fromkeys(range(3), 60.0)
    assert kinds(notes) == [(3, "crash"), (3, "restart"), (3, "not_joined")]
    assert notes.events[-1][1] == pytest.approx(7.0, abs=1e-3)


def test_who_is_alone_goes_on_alone():
    """All others have ended, or died."""

    def main(comm):
        if comm.clock.now() == 0:
            comm.clock.sleep(3.0 if comm.rank == 1 else 1.0)
            return
        recovery = comm.recover(7)
        comm.record(size=recovery.comm.size, step=recovery.step, dead=str(recovery.dead))

    notes = run(main, 4, faults="crash:1@0.5s; restart:1@2s; crash:2@0.6s")[1]
    assert notes.column("size") == {1: 1}
    assert (notes.column("step"), notes.column("dead")) == ({1: 7}, {1: "(0, 1, 2, 3)"})


def test_the_next_life_begins_with_nothing():
    """Its streams and generators start again, its own communicator works, and what was sent to the dead is gone."""

    def main(comm):
        draws = (comm.rng("data").integers(1 << 30), float(torch.rand(())), float(np.random.rand()))
        comm.record(draws=str(draws), own=MPI.COMM_SELF.allreduce(comm.rank))
        if comm.rank == 0:
            comm.clock.sleep(0.1205)
            outcome(lambda: comm.send("to the dead", VICTIM))
        if comm.rank == VICTIM and comm.clock.now() > 0:
            comm.record(message=outcome(lambda: comm.recv(source=0)))
        comm.clock.sleep(1.0)

    notes = run(main, RANKS, faults=LATER, platform=None)[1]
    drawn = [values["draws"] for rank, _, values in notes.rows if rank == VICTIM and "draws" in values]
    assert len(drawn) == 2
    assert drawn[0] == drawn[1]
    assert notes.column("own")[VICTIM] == VICTIM
    assert notes.column("message") == {VICTIM: "Revoked"}


def test_who_does_not_join_leaves_alone():
    """A program that knows nothing of recoveries ends on the restarted rank; the others keep what is theirs."""

    def main(comm):
        comm.clock.sleep(0.2)
        if comm.rank == VICTIM:
            comm.recv(source=0)
        comm.record(done=True)

    notes = run(main, RANKS, faults=LATER)[1]
    assert set(notes.column("done")) == set(range(RANKS)) - {VICTIM}
    assert kinds(notes) == [(3, "crash"), (3, "restart"), (3, "not_joined")]
    assert "earlier incarnation" in notes.events[-1][3]["error"]
    assert "recover()" in notes.events[-1][3]["error"]


def test_ranks_left_behind_are_reported():
    """The run ends well, for the others do; its program has not recovered, which nothing else says."""

    def main(comm):
        comm.clock.sleep(0.2)
        if comm.rank in (3, 5):
            comm.recv(source=0)

    found = spawnsim.run(main, ranks=RANKS, faults="crash:3,5@0.1s; restart:3,5@0.15s")
    assert found.outcome == "finished"
    (only,) = found.what["warnings"]
    assert only.startswith(
        "rank 3 restarted after its death, did not join the other ranks, and ended at 0.35 s: "
    )
    assert only.endswith("recover() to join the other ranks; and 1 more: events.jsonl lists them")


def test_a_healthy_majority_is_not_fenced():
    """The others die, pause and recover while a rank begins again: it takes nothing from them."""

    def main(comm):
        rule = AverageAllPolicy(5)
        group, _, _ = steps(comm, rule, last=40)
        comm.record(members=str(group.Get_group().members))

    faults = "crash:2@0.0158s; pause:6@0.0234s+0.0329s; crash:3@0.0775s; restart:3@0.0785s; crash:5@0.099s"
    notes = run(main, 8, faults=faults, deadline_s=2.0, platform=None)[1]
    left = (0, 1, 3, 4, 6, 7)
    assert notes.column("members") == dict.fromkeys(left, str(left))


WAITS = {
    "recv": lambda comm: comm.recv(source=0, tag=5),
    "ssend": lambda comm: comm.ssend("to nobody who listens", 1, tag=5),
    "sleep": lambda comm: comm.clock.sleep(9.0),
    "background": lambda comm: comm.background(lambda: last_words(comm, "recv")).join(),
}
LAST = {
    "now": lambda comm, win: comm.clock.now(),
    "send": lambda comm, win: comm.send("from the dead", 0),
    "isend": lambda comm, win: comm.isend("from the dead", 0),
    "Ibarrier": lambda comm, win: comm.Ibarrier(),
    "Put": lambda comm, win: win.Put(np.ones(1), 0),
    "background": lambda comm, win: comm.background(lambda: comm.send("from the dead", 0)),
    "record": lambda comm, win: comm.record(said="after death"),
    "event": lambda comm, win: comm.record.event("said", after="death"),
}


def last_words(comm, wait, last="now", win=None):
    """Wait, and call once more when the wait ends."""
    try:
        WAITS[wait](comm)
    finally:
        LAST[last](comm, win)


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("last", LAST)
def test_the_dead_call_nobody(wait, last):
    """A program's `finally` blocks run when its rank dies, as Python's do; what they call comes to nothing."""

    def main(comm):
        win = MPI.Win.Allocate(8, comm=comm)
        memory = np.frombuffer(win.tomemory())
        win.Lock_all()
        with comm.compute(0.01 * comm.rank):
            pass
        if comm.rank == VICTIM:
            last_words(comm, wait, last, win)
        comm.clock.sleep(1.0)
        if comm.rank == 0:
            comm.record(came=comm.iprobe(), stored=float(memory[0]), barrier=outcome(lambda: comm.Barrier()))

    notes = run(main, 4, faults="crash:3@0.5s", platform=None)[1]
    assert notes.rows[-1][2] == {"came": False, "stored": 0.0, "barrier": "RankFailed"}
    assert kinds(notes) == [(3, "crash")]
    assert notes.column("said") == {}


def test_a_program_that_catches_its_own_death_is_left_behind():
    """It goes on calling for ever; the others learn of its death as of any other, and end."""

    def main(comm):
        while comm.rank == VICTIM:
            with suppress(BaseException):
                comm.recv(source=0)
        comm.record(call=outcome(lambda: comm.Barrier()))

    notes = run(main, 4, faults="crash:3@0.5s")[1]
    assert notes.column("call") == dict.fromkeys(range(3), "RankFailed")


@pytest.mark.parametrize("ranks", [4, 12])
def test_a_late_rank_may_show_that_others_could_have_left_before(ranks):
    """Its part is longer, so another algorithm gathers: the others go when that is known, and not in the past."""

    def main(comm):
        comm.clock.sleep(0.5 if comm.rank == ranks - 1 else 0.01 * comm.rank)
        comm.gather("long" * (500_000 if comm.rank == ranks - 1 else 1), 0)
        comm.record(at=comm.clock.now())

    notes = run(main, ranks, faults="crash:0@99s", platform=None)[1]
    assert len(notes.column("at")) == ranks
    assert max(notes.column("at").values()) >= 0.5


@pytest.mark.parametrize("faults", ["crash:3@0.1s; restart:3@0.1s", "crash:3@0s; restart:3@0s"])
def test_a_spare_may_take_over_at_the_time_of_the_death(faults):
    """As one that is free, and needs no time to be swapped in: the next life does not die of the same crash."""

    def main(comm):
        for each in range(4):
            with comm.compute(0.1):
                pass
            comm.record(each=each)

    notes = run(main, RANKS, faults=faults)[1]
    assert [kind for kind in kinds(notes) if kind[1] in ("crash", "restart")] == [
        (3, "crash"),
        (3, "restart"),
    ]
    assert notes.column("each") == dict.fromkeys(range(RANKS), 3)
