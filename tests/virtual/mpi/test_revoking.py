"""What a recovery ends and what it leaves alone, who is awaited at one, and who is given up."""

import math
import pickle

import numpy as np
import pytest
from support.virtual_run import platform, run

from spawnsim.errors import Deadlock, RankFailed, Revoked, SpawnsimError
from spawnsim.virtual.engine import kernel
from spawnsim.virtual.mpi.module import MPI


def ends(call):
    """Return how a call ends: "done", or the name of its error."""
    try:
        call()
    except SpawnsimError as error:
        return type(error).__name__
    return "done"


def bridged(comm, halves):
    """Return an intercommunicator of the two halves, joined over `comm`."""
    return halves.Create_intercomm(0, comm, 1 - comm.rank % 2)


DERIVED = {
    "Dup": lambda comm, halves: comm.Dup(),
    "Idup": lambda comm, halves: comm.Idup()[0],
    "Dup of a half": lambda comm, halves: halves.Dup(),
    "Split of a half": lambda comm, halves: halves.Split(0),
    "Create": lambda comm, halves: comm.Create(comm.Get_group()),
    "Create_group": lambda comm, halves: comm.Create_group(halves.Get_group()),
    "Create_cart": lambda comm, halves: comm.Create_cart([comm.size]),
    "Create_dist_graph": lambda comm, halves: comm.Create_dist_graph_adjacent([comm.rank], [comm.rank]),
    "Create_intercomm": bridged,
    "Merge": lambda comm, halves: bridged(comm, halves).Merge(),
}


@pytest.mark.parametrize("make", DERIVED.values(), ids=list(DERIVED))
def test_whatever_was_made_of_a_communicator_ends_with_it(make):
    """In a state in which every call would otherwise come back; it can still be asked, and freed without the others."""

    def main(comm):
        made = make(comm, comm.Split(comm.rank % 2))
        made.Barrier()
        found = comm.recover()
        comm.record(ends=" ".join(map(ends, (made.Barrier, made.Iprobe, lambda: made.isend(0, 0), made.Dup))))
        assert made.Is_revoked() and made.rank < made.size and made.Get_group().Get_size() == made.size
        made.Free()
        found.comm.Barrier()

    assert set(run(main, 4)[1].column("ends").values()) == {"Revoked Revoked Revoked Revoked"}


def test_a_recovery_leaves_alone_what_was_not_made_of_its_communicator():
    """The parent, a sister, the communicators of survivors."""

    def main(comm):
        halves, twin = comm.Split(comm.rank % 2), comm.Dup()
        first = comm.recover().comm if comm.rank < 0 else None
        assert first is None
        if comm.rank % 2:
            new = halves.recover().comm
            assert ends(halves.Barrier) == "Revoked"
        else:
            new = halves
        twin.Barrier()
        comm.Barrier()
        part = new.Split(0)
        world = comm.recover().comm
        comm.record(old=ends(part.Barrier), recovered=ends(new.Barrier), world=ends(world.Barrier))

    notes = run(main, 4)[1]
    assert [set(notes.column(name).values()) for name in ("old", "recovered", "world")] == [
        {"Revoked"}, {"Revoked"}, {"done"},
    ]  # fmt: skip


REQUESTS = {
    "wait": lambda request: request.wait(),
    "test": lambda request: request.test(),
    "Get_status": lambda request: request.Get_status(),
    "Waitany": lambda request: MPI.Request.Waitany([request]),
    "Waitall": lambda request: MPI.Request.Waitall([request]),
    "Testall": lambda request: MPI.Request.Testall([request]),
    "Testsome": lambda request: MPI.Request.Testsome([request]),
}
OPEN = {
    "irecv": lambda comm: comm.irecv(source=1 - comm.rank),
    "Ibarrier": lambda comm: comm.Ibarrier() if comm.rank else comm.Dup().Irecv(np.zeros(1), 1),
    "Recv_init": lambda comm: started(comm.Recv_init(np.zeros(1), 1 - comm.rank)),
    "Isendrecv": lambda comm: comm.Isendrecv(np.zeros(1), 1 - comm.rank, 5, np.zeros(1), 1 - comm.rank, 6),
}


def started(request):
    """Start a persistent request."""
    request.Start()
    return request


@pytest.mark.parametrize("end", REQUESTS.values(), ids=list(REQUESTS))
@pytest.mark.parametrize("begin", [OPEN["irecv"], OPEN["Recv_init"], OPEN["Isendrecv"]])
def test_open_requests_end_once(begin, end):
    """However the program asks; afterwards the request is null, or inactive."""

    def main(comm):
        request = begin(comm)
        new = comm.recover().comm
        assert ends(lambda: end(request)) == "Revoked"
        assert request.Test()
        new.Barrier()

    run(main, 2)


def test_what_was_complete_before_stays_complete():
    """A message that had come, a collective that all had entered; not one that comes later."""

    def main(comm):
        comm.isend(comm.rank, 1 - comm.rank)
        sums, came, barrier = np.zeros(1), comm.irecv(source=1 - comm.rank), comm.Ibarrier()
        total = comm.Iallreduce(np.ones(1), sums)
        comm.clock.sleep(1.0)
        comm.Isend(np.zeros(1000), 1 - comm.rank, 3)  # on its way for 9 ms, which the recovery does not take
        late = comm.Irecv(np.zeros(1000), 1 - comm.rank, 3)
        comm.clock.sleep(1e-4)
        new = comm.recover().comm
        assert came.wait() == 1 - comm.rank
        assert barrier.Test()
        assert total.Wait() and sums[0] == 2
        new.clock.sleep(1.0)
        assert ends(late.Wait) == "Revoked"

    run(main, 2)


@pytest.mark.parametrize("wait", ["recv", "probe", "Barrier", "Lock", "Waitany", "task"])
def test_who_waits_is_woken_when_the_recovery_begins(wait):
    """On a communicator made of the old one, for somebody who lives."""

    def main(comm):
        twin = comm.Dup()
        win = comm.Win.Allocate(8, comm=twin)
        if comm.rank == 0:
            win.Lock(0)
            comm.clock.sleep(2.0)
            comm.recover()
            return
        comm.clock.sleep(1.0)
        calls = {
            "recv": lambda: twin.recv(source=0),
            "probe": lambda: twin.Probe(),
            "Barrier": twin.Barrier,
            "Lock": lambda: win.Lock(0),
            "Waitany": lambda: MPI.Request.Waitany([twin.irecv(source=0), twin.irecv(source=0, tag=4)]),
            "task": lambda: twin.recv(source=0),
        }
        if wait == "task":
            heard = []
            comm.background(lambda: heard.append(ends(calls["task"]))).join()
        else:
            heard = [ends(calls[wait])]
        comm.record(heard=heard[0], when=comm.clock.now())
        comm.recover()

    notes = run(main, 2)[1]
    assert notes.column("heard") == {1: "Revoked"}
    assert notes.column("when")[1] == pytest.approx(2.0, abs=0.01)


def test_a_rank_that_does_not_come_is_given_up_after_the_deadline():
    """It computes for too long. It is told when it comes, and the run goes on without it."""

    def main(comm):
        if comm.rank == 1:
            with comm.compute(60.0):
                pass
            assert ends(MPI.COMM_SELF.Iprobe) == "Revoked"
            comm.recover()
        found = comm.recover(step=comm.rank)
        comm.record(size=found.comm.size, step=found.step, dead=str(found.dead), when=comm.clock.now())
        MPI.COMM_SELF.Barrier()

    notes = run(main, 3, deadline_s=5.0)[1]
    assert notes.column("size") == {0: 2, 2: 2}
    assert set(notes.column("dead").values()) == {"(1,)"}
    assert notes.column("when")[0] == pytest.approx(5.0, abs=0.01)
    reported = [(rank, kind, fields.get("dead")) for rank, _, kind, fields in notes.events]
    assert reported == [(0, "recovered", [1]), (2, "recovered", [1]), (1, "given_up", None)]
    assert notes.events[-1][1] == 60.0


def test_a_rank_that_has_ended_is_not_awaited():
    """Nor given up: it has nothing to be told."""

    def main(comm):
        if comm.rank == 2:
            comm.clock.sleep(1.0)
            return
        comm.record(dead=str(comm.recover().dead), when=comm.clock.now())

    notes = run(main, 3)[1]
    assert notes.column("dead") == {0: "(2,)", 1: "(2,)"}
    assert notes.column("when")[0] == pytest.approx(1.0, abs=0.01)
    assert [(kind, fields["dead"]) for _, _, kind, fields in notes.events] == [("recovered", [])] * 2


def test_a_pause_that_ends_in_time_lets_the_rank_take_part():
    """It wakes half a second before it would be given up, takes note of the revocation, and comes."""

    def main(comm):
        if comm.rank == 2:
            assert ends(lambda: comm.recv(source=0)) == "Revoked"
            assert comm.clock.now() == 3.5
        else:
            comm.clock.sleep(1.0)
        comm.record(size=comm.recover().comm.size, when=comm.clock.now())

    notes = run(main, 3, faults="pause:2@0.5s+3s")[1]
    assert set(notes.column("size").values()) == {3}
    assert notes.column("when")[0] == pytest.approx(3.5, abs=0.01)


def test_messages_that_nobody_received_are_dropped_and_counted():
    """Arrived or still on their way, at survivors only; those of windows are nobody's business."""

    def main(comm):
        win = comm.Win.Allocate(8, comm=comm)
        comm.isend("arrived", 0, 7)
        comm.clock.sleep(1.0)
        comm.Isend(np.zeros(2000), 0, 8)
        if comm.rank == 2:
            win.Post(comm.Get_group())
            comm.clock.sleep(100.0)
        assert ends(lambda: comm.recv(source=2, tag=1)) == "RankFailed"
        new = comm.recover().comm
        comm.record(dropped=sum(comm._rank.dropped.values()))
        new.Barrier()

    notes = run(main, 3, faults="crash:2@1.5s", platform=platform(eager_bytes=1000))[1]
    assert notes.column("dropped") == {0: 6, 1: 0}
    late = [
        (rank, fields["source"], fields["nbytes"])
        for rank, _, kind, fields in notes.events
        if kind == "late_message"
    ]
    assert sorted(source for _, source, _ in late) == [0, 0, 1, 1, 2, 2]
    assert {rank for rank, _, _ in late} == {0}


def test_a_message_that_a_link_delays_is_dropped_when_it_comes():
    """It was sent before the recovery, and would arrive after it."""

    def main(comm):
        if comm.rank == 1:
            comm.isend("late", 0)
        comm.clock.sleep(1.0)
        new = comm.recover().comm
        comm.record(seen=new.Iprobe(), dropped=comm._rank.dropped[1])
        assert ends(comm.Iprobe) == "Revoked"

    notes = run(main, 2, faults="delay:1>0@0s+0.5s,5s")[1]
    assert notes.column("seen") == {0: False, 1: False}
    assert notes.column("dropped") == {0: 1, 1: 0}


def test_only_the_communicator_itself_is_revoked_by_revoke():
    """As with MPI's own: what was made of it goes on, and so does what survivors make of it."""

    def main(comm):
        twin = comm.Dup()
        if comm.rank == 0:
            comm.Revoke()
        assert ends(comm.Barrier) == "Revoked"
        twin.Barrier()
        comm.Shrink().Barrier()

    run(main, 2)


def test_windows_of_a_revoked_communicator_can_be_freed():
    """Without the others; and the rank may then run ahead again."""

    def main(comm):
        win = comm.Win.Allocate(8, comm=comm)
        win.Lock_all()
        comm.clock.sleep(0.1)
        new = comm.recover().comm
        for call in (win.Lock_all, win.Flush_all, win.Fence, lambda: win.Get(np.zeros(1), 0)):
            assert ends(call) == "Revoked"
        if comm.rank:
            win.Free()
        comm.record(observers=comm._rank.observers)
        new.Barrier()

    assert run(main, 2)[1].column("observers") == {0: 1, 1: 0}


def test_without_a_deadline_the_living_are_awaited():
    """Whoever hears of the recovery and waits for something else makes it a deadlock, which is reported as one."""

    def main(comm):
        if comm.rank:
            MPI.COMM_SELF.recv(source=0)
        comm.recover()

    with pytest.raises(Deadlock, match="recover on MPI_COMM_WORLD"):
        run(main, 3, deadline_s=math.inf)


def test_a_collective_ends_once_although_its_last_ones_wait_on_their_way_in(monkeypatch):
    """Each rank waits for the others at each effect, also while it enters."""
    totals = []
    for budget in (4096, 1):
        monkeypatch.setattr(kernel, "RUN_AHEAD", budget)
        found, notes = run(lambda comm: comm.record(total=comm.allreduce(comm.rank)), 5)
        totals.append((found.messages, found.digest, found.virtual_seconds))
        assert set(notes.column("total").values()) == {10}
    assert totals[0] == totals[1]


def test_a_paused_rank_is_given_up_long_before_the_deadline():
    """After three seconds of silence, counted from when the others came; the living are awaited for longer."""

    def main(comm):
        if comm.rank == 1:
            comm.clock.sleep(9.0)
        comm.clock.sleep(1.0)
        comm.record(dead=str(comm.recover().dead), when=comm.clock.now())

    how = {"faults": "pause:2@0.5s+100s", "deadline_s": 30.0}
    notes = run(main, 3, **how)[1]
    assert notes.column("dead") == {0: "(2,)", 1: "(2,)"}
    assert notes.column("when")[0] == pytest.approx(10.0, abs=0.01)
    notes = run(lambda comm: comm.rank == 1 or main(comm), 3, **how)[1]
    assert notes.column("when")[0] == pytest.approx(4.0, abs=0.01)


def test_who_dies_on_the_way_is_awaited_until_then_and_does_not_go_on():
    """One dies before it comes, one after; nobody knows before it happens."""

    def main(comm):
        comm.clock.sleep(100.0 if comm.rank == 1 else 1.0 + comm.rank / 10)
        comm.record(dead=str(comm.recover().dead), when=comm.clock.now())

    notes = run(main, 4, faults="crash:2@3s; crash:1@5s")[1]
    assert notes.column("dead") == {0: "(1, 2)", 3: "(1, 2)"}
    assert notes.column("when")[0] == pytest.approx(5.01, abs=0.01)


def test_a_wait_that_begins_after_the_recovery_ends_at_once():
    """The rank had passed its check before, and then waited for its time."""

    def main(comm):
        if comm.rank:
            with comm.compute(2.0):
                pass
            assert ends(comm.recv) == "Revoked"
            assert comm.clock.now() == 2.0
        else:
            comm.clock.sleep(1.0)
        comm.recover()

    run(main, 2)


def test_a_communicator_that_is_made_too_late_is_revoked_from_the_beginning():
    """Rank 0 leaves a Split by its deadline, and recovers before the others have it."""

    def main(comm):
        MPI.Win.Allocate(8, comm=MPI.COMM_SELF)  # ranks with a window act at their own time
        comm.clock.sleep(1.0)
        if comm.rank == 0:
            with comm.clock.deadline(1e-4):
                assert ends(lambda: comm.Split(0)) == "Timeout"
        else:
            part = comm.Split(0)
            assert ends(lambda: part.recv(source=0)) == "Revoked"
        comm.recover()

    run(main, 3)


def test_a_paused_rank_does_nothing_that_those_who_gave_it_up_could_hear():
    """What it computes ends long after; it must not have sent ahead of that."""

    def main(comm):
        if comm.rank == 1:
            with comm.compute(1.0):
                pass
            assert comm.clock.now() == 61.0
            assert ends(lambda: comm.isend("later", 0)) == "Revoked"
        comm.clock.sleep(1.0)
        new = comm.recover().comm
        new.clock.sleep(100.0)
        comm.record(dropped=comm._rank.dropped[1])

    assert run(main, 3, faults="pause:1@0.5s+60s")[1].column("dropped") == {0: 0, 2: 0}


@pytest.mark.parametrize(
    "call", [lambda comm: comm.Agree(1), lambda comm: comm.Shrink()], ids=["Agree", "Shrink"]
)
def test_agreements_wait_for_a_death_to_be_known(call):
    """A rank that will die in four seconds may still come."""

    def main(comm):
        comm.clock.sleep(100.0 if comm.rank == 1 else 1.0)
        call(comm)
        comm.record(when=comm.clock.now())

    assert run(main, 3, faults="crash:1@5s")[1].column("when")[0] == pytest.approx(5.01, abs=0.01)


@pytest.mark.parametrize(
    ("revoked_s", "deadline_s", "end", "at_s"),
    [
        (0.1, 30.0, "Revoked", 0.1),
        (0.1, 0.3, "Revoked", 0.1),  # the deadline was known to come
        (0.9, 30.0, "done", 0.501),
        (0.9, 0.3, "Timeout", 0.3),
    ],
)
def test_a_wait_whose_end_is_known_ends_when_the_communicator_is_revoked(revoked_s, deadline_s, end, at_s):
    """Half a megabyte is on its way; who waited for it came late to the recovery. Its sender's death is no matter."""

    def main(comm):
        if comm.rank == 11:
            comm.record(end=ends(lambda: comm.Recv(np.zeros(500_000, np.uint8), 0)), at=comm.clock.now())
        elif comm.rank == 0:
            comm.Send(np.zeros(500_000, np.uint8), 11)
            comm.clock.sleep(60.0)
        elif comm.rank == 2:
            comm.clock.sleep(revoked_s)
            comm.Revoke()

    _, notes = run(main, 12, faults="crash:0@0.05s; crash:5@50s", deadline_s=deadline_s)
    assert notes.column("end") == {11: end}
    assert notes.column("at")[11] == pytest.approx(at_s, abs=0.002)


def test_what_is_local_works_on_a_communicator_that_was_revoked():
    """A peer may revoke it at any time: its name, error handler, hints and attributes are this rank's alone."""

    def main(comm):
        own = comm.Dup()
        if comm.rank == 7:
            own.Revoke()
        comm.Barrier()
        assert own.Is_revoked()
        own.Set_errhandler(MPI.ERRORS_RETURN)
        own.Set_name("old")
        own.Set_info(own.Get_info())
        assert (own.Get_errhandler(), own.Get_name()) == (MPI.ERRORS_RETURN, "old")
        assert own.Get_attr(MPI.TAG_UB) == comm.Get_attr(MPI.TAG_UB)
        with pytest.raises(Revoked):
            own.Barrier()

    run(main, 12)


def test_programs_of_mpi4py_meet_deaths_and_revocations_as_its_exceptions():
    """With their error classes, as programs for ULFM ask for them."""
    found = {}

    def main(comm):
        with pytest.raises(MPI.Exception) as died:
            comm.Recv(np.zeros(1), source=11)
        assert isinstance(died.value, RankFailed)
        assert died.value.ranks == (11,)
        found[comm.rank] = [died.value.Get_error_class()]
        own = comm.Shrink()
        own.Revoke()
        for call in (
            own.Barrier,
            lambda: own.Send(np.zeros(1), MPI.PROC_NULL),
            lambda: own.Irecv(np.zeros(1), 0),
        ):
            with pytest.raises(MPI.Exception) as revoked:
                call()
            assert isinstance(pickle.loads(pickle.dumps(revoked.value)), Revoked)
            found[comm.rank].append(revoked.value.error_class)

    run(main, 12, faults="crash:11@0.5s")
    assert found == {rank: [MPI.ERR_PROC_FAILED] + [MPI.ERR_REVOKED] * 3 for rank in range(11)}
