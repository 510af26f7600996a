"""Going on without the dead, on virtual ranks."""

import numpy as np
import pytest
from support.virtual_run import run

import spawnsim
from spawnsim.errors import Deadlock, Livelock, RankFailed, Revoked, Timeout
from spawnsim.virtual.mpi.fault_tolerance import RecoveryAgreement
from spawnsim.virtual.mpi.requests import Request


def train(comm, steps=40):
    """Sum over all ranks each step; on a failure recover, and go on from the agreed step."""
    step, recovered = 0, 0
    while step < steps:
        try:
            with comm.compute(0.1):
                pass
            total = np.zeros(1)
            comm.Allreduce(np.ones(1), total)
            step += 1
        except (RankFailed, Revoked):
            comm.Revoke()
            recovery = comm.recover(step)
            comm, step, recovered = recovery.comm, recovery.step, recovered + 1
    comm.record(size=comm.size, total=total[0], step=step, recovered=recovered)


@pytest.mark.parametrize(
    ("ranks", "faults", "left"),
    [
        (4, "crash:2@1.05s", 3),
        (4, "crash:0@1.05s", 3),
        (6, "crash:2@1.05s; crash:5@1.05s", 4),
        (16, "crash:1@0.5s; crash:7@1.0s; crash:8@1.5s; crash:15@2.0s", 12),
    ],
    ids=["one", "root", "two at once", "four staggered"],
)
def test_survivors_recover_and_finish(ranks, faults, left):
    """All survivors finish all steps on a communicator without the dead."""
    notes = run(train, ranks, faults=faults)[1]
    assert len(notes.column("step")) == left
    assert set(notes.column("size").values()) == {left}
    assert set(notes.column("total").values()) == {float(left)}
    assert set(notes.column("step").values()) == {40}
    reported = [
        (fields["dead"], fields["size"]) for rank, _, kind, fields in notes.events if kind == "recovered"
    ]
    died = sorted({rank for rank, _, kind, _ in notes.events if kind == "crash"})
    assert sorted({rank for dead, _ in reported for rank in dead}) == died  # by their ranks in the world
    assert min(size for _, size in reported) == left


def test_a_death_inside_recovery_is_recovered_from():
    """A second rank dies while the others meet; the meeting goes on without it."""

    def main(comm):
        if comm.rank == 3:
            comm.recv(source=2)
        if comm.rank == 2:
            with comm.compute(5.0):
                pass
        with pytest.raises(RankFailed):
            comm.Barrier()
        recovery = comm.recover(comm.rank)
        comm.record(dead=str(recovery.dead), step=recovery.step, ranks=str(dict(recovery.ranks)))

    notes = run(main, 4, faults="crash:2@1s; crash:3@1.005s")[1]
    assert set(notes.column("dead").values()) == {"(2, 3)"}
    assert set(notes.column("step").values()) == {0}
    assert notes.column("ranks")[0] == "{0: 0, 1: 1}"


def test_revoke_reaches_a_rank_that_waits_for_the_living():
    """Rank 1 waits for rank 0, which is alive but revokes: its wait ends in Revoked."""

    def main(comm):
        if comm.rank == 0:
            with comm.compute(1.0):
                pass
            comm.Revoke()
        else:
            with pytest.raises(Revoked):
                comm.recv(source=0)
            comm.record(when=comm.clock.now())
        assert comm.Is_revoked()
        with pytest.raises(Revoked):
            comm.send(None, 1 - comm.rank)
        assert comm.Agree(6 | comm.rank) == 6
        assert comm.Shrink().size == 2

    assert run(main, 2)[1].column("when") == {1: 1.0}


def test_failures_are_seen_as_a_group():
    """Get_failed names the dead that are known by now."""

    def main(comm):
        if comm.rank == 1:
            comm.clock.sleep(5.0)
        before = comm.Get_failed().Get_size()
        comm.clock.sleep(2.0)
        comm.record(before=before, after=comm.Get_failed().Get_size(), acked=comm.Ack_failed())

    notes = run(main, 3, faults="crash:1@1s")[1]
    assert set(notes.column("before").values()) == {0}
    assert set(notes.column("after").values()) == {1}
    assert set(notes.column("acked").values()) == {1}


def test_receives_from_anybody_go_on_once_the_dead_are_acknowledged():
    """A death ends the wait once; after Ack_failed the living are heard again."""

    def main(comm):
        if comm.rank == 2:
            with comm.compute(3.0):
                pass
            comm.send("alive", 0)
        elif comm.rank == 1:
            comm.recv(source=0)
        else:
            with pytest.raises(RankFailed):
                comm.recv()
            assert comm.Ack_failed() == 1
            comm.record(got=comm.recv(), at=comm.clock.now())

    notes = run(main, 3, faults="crash:1@1s")[1]
    assert notes.column("got") == {0: "alive"}
    assert notes.column("at")[0] > 3.0


def test_a_recovery_looks_at_each_rank_a_few_times(monkeypatch):
    """Of twice as many ranks a recovery asks about twice as often who is still awaited: not all for each that comes."""

    def main(comm):
        with comm.compute(0.001 * (comm.rank % 5)):  # they come in no order of their ranks
            pass
        with pytest.raises((RankFailed, Revoked)):
            comm.Barrier()
        comm.record(size=comm.recover(0).comm.size)

    asked = []
    known = RecoveryAgreement._gone_s
    monkeypatch.setattr(
        RecoveryAgreement, "_gone_s", lambda self, rank: asked.append(rank) or known(self, rank)
    )
    counts = []
    for ranks in (60, 120):
        asked.clear()
        notes = run(main, ranks, faults="crash:7@0.0005s; crash:20@0.0005s")[1]
        assert set(notes.column("size").values()) == {ranks - 2}
        counts.append(len(asked))
    assert counts[1] < 12 * 120  # each rank some times; it was 60 of 120
    assert counts[1] < 3 * counts[0]


def test_default_deadlines_hold_behind_a_recovery_in_which_one_has_passed():
    """Rank 0's first wait would miss its deadline in the recovery, where members have none; a later wait does."""

    def main(comm):
        if comm.rank:
            with comm.compute(0.11 if comm.rank == 1 else 0.05):
                pass
        else:
            with pytest.raises(RankFailed):
                comm.Recv(np.empty(1), source=5)
        group = comm.recover(0).comm
        if group.rank == 0:
            begun_s = comm.clock.now()
            with pytest.raises(Timeout):
                group.Recv(np.empty(1), source=1)
            assert comm.clock.now() - begun_s == pytest.approx(0.105)
        else:
            with comm.compute(0.5):
                pass
            group.Send(np.ones(1), 0)

    run(main, 11, faults="crash:5@0.01s", deadline_s=0.105)


def test_waits_for_anybody_do_not_look_through_all_deaths():
    """Each communicator looks at each death once, not in each wait: of thousands, nearly all were left out long ago."""

    class Deaths(dict):
        looks = 0

        def __iter__(self):
            Deaths.looks += len(self)
            return super().__iter__()

        def items(self):
            Deaths.looks += len(self)
            return super().items()

    def main(comm):
        if comm.rank == 0:
            comm._world.failed = Deaths(comm._world.failed)
        with comm.compute(0.001):
            pass
        with pytest.raises((RankFailed, Revoked)):
            comm.Barrier()
        comm = comm.recover(0).comm
        if comm.rank == 0:
            comm.record(got=sum(comm.recv() for _ in range(50 * (comm.size - 1))))
            return
        for turn in range(50):
            with comm.compute(0.01 * comm.rank):
                pass
            comm.send(turn, 0)

    notes = run(main, 36, faults="; ".join(f"crash:{rank}@0.0005s" for rank in range(12, 36)))[1]
    assert notes.column("got") == {0: 11 * sum(range(50))}
    assert 0 < Deaths.looks <= 24 * 24  # some communicators, each once for each death


def some(look):
    """Return what makes two requests, and looks at both."""
    return lambda comm: look([comm.irecv(source=1), comm.irecv(source=1, tag=2)])


LOOKS = {
    "test": lambda comm: comm.irecv(source=1).Test,
    "test of a synchronous send": lambda comm: comm.issend(1, 1).Test,
    "test of a collective": lambda comm: comm.Ibarrier().Test,
    "Get_status": lambda comm: comm.irecv(source=1).Get_status,
    "Testall": some(lambda requests: lambda: Request.Testall(requests)),
    "Testany": some(lambda requests: lambda: Request.Testany(requests)[1]),
    "Testsome": some(lambda requests: lambda: Request.Testsome(requests)),
    "Iprobe": lambda comm: lambda: comm.Iprobe(source=1),
    "Improbe": lambda comm: lambda: comm.Improbe(source=1),
}


@pytest.mark.parametrize("kind", LOOKS)
def test_a_loop_of_looks_ends_when_its_peer_has_died(kind):
    """As waiting does. It went on until it was taken for a livelock, and the report did not speak of the death."""

    def main(comm):
        if comm.rank == 1:
            comm.clock.sleep(10.0)
        if comm.rank == 0:
            over = LOOKS[kind](comm)
            with pytest.raises(RankFailed) as caught:
                while not over():
                    comm.clock.sleep(0.1)
            comm.record(dead=str(caught.value.ranks), at=comm.clock.now())

    notes = run(main, 3, faults="crash:1@1.05s")[1]
    assert notes.column("dead") == {0: "(1,)"}
    assert notes.column("at")[0] == pytest.approx(1.1, abs=0.01)


def test_what_is_over_is_reported_before_a_death():
    """Of several requests one has come, and the other one's sender has died."""

    def main(comm):
        if comm.rank == 1:
            comm.clock.sleep(10.0)
        if comm.rank == 2:
            comm.send("here", dest=0)
        if comm.rank == 0:
            requests = [comm.irecv(source=1), comm.irecv(source=2)]
            comm.clock.sleep(2.0)
            assert Request.testsome(requests) == ([1], ["here"])
            with pytest.raises(RankFailed):
                Request.testsome(requests)

    run(main, 3, faults="crash:1@1.05s")


def test_reports_of_what_stands_still_name_the_dead():
    """A look at any source may have waited for rank 1."""

    def main(comm):
        if comm.rank == 1:
            comm.clock.sleep(10.0)
        if comm.rank == 0:
            while not comm.Iprobe():
                pass

    with pytest.raises(Livelock, match=r"Died: rank 1 at 1\.05 s"):
        run(main, 2, faults="crash:1@1.05s")
    with pytest.raises(Deadlock, match=r"Died: rank 1 at 1\.05 s"):
        run(
            lambda comm: comm.recv(source=2) if comm.rank == 0 else comm.clock.sleep(3.0),
            3,
            faults="crash:1@1.05s",
        )


@pytest.mark.parametrize("call", ["Wait()", "Test()"])
def test_a_request_whose_peer_has_died_was_waited_for(call, tmp_path):
    """It has ended, with an error; the run warned that nobody had waited for it."""
    program = tmp_path / "program.py"
    program.write_text(
        "import time\nfrom mpi4py import MPI\ncomm = MPI.COMM_WORLD\ntime.sleep(2)\nrequest = comm.irecv(source=1)\n"
        f"try:\n    request.{call}\nexcept MPI.Exception as error:\n"
        "    assert error.Get_error_class() == MPI.ERR_PROC_FAILED\n"
    )
    found = spawnsim.run(program, ranks=3, faults="crash:1@1s")
    assert not [each for each in found.what["warnings"] if "never completed" in each]
