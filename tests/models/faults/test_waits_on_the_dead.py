"""Waits whose end depends on a rank other than the addressed one: its death ends them, and the survivors recover."""

import numpy as np
import pytest
from support.virtual_run import run

from spawnsim.comm import LOCK_EXCLUSIVE, LOCK_SHARED
from spawnsim.errors import RankFailed, Revoked, SpawnsimError, Timeout
from spawnsim.virtual.mpi.requests import Request

VICTIM, DEATH_S, KNOWN_S = 1, 5.0, 5.01


def window(comm):
    """Return a window that the victim does not leave before its death."""
    return comm.Win.Allocate(8, comm=comm)


def dwell(comm):
    """Let the victim stay here until it dies."""
    if comm.rank == VICTIM:
        comm.clock.sleep(100.0)


def held(comm, kind=LOCK_EXCLUSIVE, at_s=1.0):
    """Return a window; at `at_s` the victim holds the lock of rank 0's part, and dies with it."""
    win = window(comm)
    comm.Barrier()
    if comm.rank == VICTIM:
        win.Lock(0, kind)
        comm.clock.sleep(100.0)
    comm.clock.sleep(at_s)
    return win


def put_under_lock_all(comm):
    """Lock_all asks nobody: the access waits for the holder."""
    win = held(comm)
    win.Lock_all()
    win.Put(np.ones(1), 0)
    win.Unlock_all()


def requested_put(comm):
    """The access is waited for among others."""
    win = held(comm)
    win.Lock_all()
    Request.Waitany([win.Rput(np.ones(1), 0), comm.irecv(source=0, tag=9)])


def in_background(comm):
    """A task beside the program waits for the lock."""
    win, ended = held(comm), []

    def lock():
        try:
            win.Lock(0)
        except SpawnsimError as error:
            ended.append(error)

    comm.background(lock).join()
    raise ended[0]


def fence(comm):
    """All members meet."""
    win = window(comm)
    dwell(comm)
    win.Fence()


def start(comm):
    """A target has not posted, or an origin does not complete."""
    win, group = window(comm), comm.Get_group().Incl([VICTIM])
    dwell(comm)
    if comm.rank == 0:
        win.Start(group)
    else:
        win.Post(group)
        win.Wait()


def complete(comm):
    """The origin has begun, and does not complete."""
    win, group = window(comm), comm.Get_group()
    if comm.rank == VICTIM:
        win.Start(group.Incl([0, 2, 3]))
    else:
        win.Post(group.Incl([VICTIM]))
    dwell(comm)
    win.Wait()


def later(call):
    """Return a case: everybody calls, the victim not before its death."""

    def case(comm):
        dwell(comm)
        call(comm)

    return case


def inner_broadcast(comm):
    """The root is alive: a rank between it and others is not."""
    comm.bcast("text" if comm.rank == 0 else None)
    dwell(comm)
    comm.bcast("more" if comm.rank == 0 else None)
    comm.barrier()


def leader(comm):
    """The groups of an intercommunicator hear from each other by their leaders; the victim leads ranks 1 and 3."""
    side = comm.rank % 2
    local = comm.Split(side)
    dwell(comm)
    local.Create_intercomm(0, comm, 1 - side, 7)


def merge(comm):
    """The other group has lost a member."""
    side = comm.rank % 2
    inter = comm.Split(side).Create_intercomm(0, comm, 1 - side, 7)
    dwell(comm)
    inter.Merge()


def neighbours(comm):
    """Some have the victim beside them; the others meet those in the barrier."""
    ring = comm.Create_cart([comm.size], periods=[True])
    dwell(comm)
    ring.neighbor_allgather(comm.rank)
    comm.barrier()


def sub_communicator(comm):
    """Rank 3 waits for rank 2, which waits for the victim on a communicator that rank 3 is not in."""
    part = comm.Split(comm.rank == 3)
    dwell(comm)
    comm.recv(source=2) if comm.rank == 3 else part.barrier()


def started_before(comm):
    """The wait begins after the death."""
    dwell(comm)
    request = comm.Ibarrier()
    comm.clock.sleep(10.0)
    request.Wait()


CASES = {
    "a lock": lambda comm: held(comm).Lock(0),
    "a lock asked for after the death": lambda comm: held(comm, at_s=10.0).Lock(0),
    "a lock that the dead share": lambda comm: held(comm, LOCK_SHARED).Lock(0, LOCK_EXCLUSIVE),
    "a shared lock": lambda comm: held(comm).Lock(0, LOCK_SHARED),
    "an access under Lock_all": put_under_lock_all,
    "a request of an access": requested_put,
    "a background task": in_background,
    "Fence": fence,
    "Start and Post": start,
    "Wait": complete,
    "a window's making": later(window),
    "Bcast from the dead": later(lambda comm: comm.bcast(None, root=VICTIM)),
    "Bcast past the dead": inner_broadcast,
    "Gather": later(lambda comm: (comm.gather(1, root=2), comm.barrier())),
    "a request of a collective": started_before,
    "Split": later(lambda comm: comm.Split(comm.rank % 2)),
    "Create_group": later(lambda comm: comm.Create_group(comm.Get_group())),
    "a leader": leader,
    "Merge": merge,
    "neighbours": neighbours,
    "a sub-communicator": sub_communicator,
    "a matched probe": later(lambda comm: comm.mprobe(source=VICTIM)),
    "a matched probe of anybody": later(lambda comm: comm.mprobe()),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_death_ends_waits_that_depend_on_it(case):
    """Each survivor gets an error as soon as the death is known, or as it calls; then all go on without the dead."""

    def main(comm):
        with pytest.raises((RankFailed, Revoked)):
            case(comm)
        comm.record(at=round(comm.clock.now(), 3))
        comm.record(size=comm.recover().comm.size)

    notes = run(main, 4, faults=f"crash:{VICTIM}@{DEATH_S}s")[1]
    assert notes.column("size") == {0: 3, 2: 3, 3: 3}
    assert max(notes.column("at").values()) <= 10.1


@pytest.mark.parametrize("call", ["Shrink", "Agree"])
def test_agreements_of_survivors_go_on_without_the_dead(call):
    """They wait for the living alone."""

    def main(comm):
        dwell(comm)
        comm.record(
            found=getattr(comm, call)(*([1] if call == "Agree" else [])) and comm.clock.now() < KNOWN_S + 0.1
        )

    assert run(main, 4, faults=f"crash:{VICTIM}@{DEATH_S}s")[1].column("found") == dict.fromkeys(
        [0, 2, 3], True
    )


def test_a_deadline_before_the_death_holds():
    """The holder is alive then, and computes."""

    def main(comm):
        win = held(comm)
        with pytest.raises(Timeout) as caught:
            win.Lock(0)
        assert caught.value.ranks == (1,)
        comm.record(at=comm.clock.now())

    assert run(main, 3, faults="crash:1@9s", deadline_s=2.0)[1].column("at") == {
        0: pytest.approx(3.0, abs=0.01),
        2: pytest.approx(3.0, abs=0.01),
    }


def test_a_lock_is_not_given_to_who_has_stopped_waiting():
    """Rank 2 gives up after a second; when rank 1 unlocks, rank 3 gets the lock, and not rank 2."""

    def main(comm):
        win = window(comm)
        comm.Barrier()
        comm.clock.sleep(0.1 * comm.rank)
        if comm.rank == 1:
            win.Lock(0)
            comm.clock.sleep(5.0)
            win.Unlock(0)
        elif comm.rank == 2:
            with comm.clock.deadline(1.0), pytest.raises(Timeout):
                win.Lock(0)
        elif comm.rank == 3:
            win.Lock(0)
            comm.record(at=comm.clock.now())
            win.Unlock(0)

    assert run(main, 4)[1].column("at") == {3: pytest.approx(5.1, abs=0.05)}


def test_a_lock_is_not_given_to_the_dead():
    """Rank 2 dies as it waits; when rank 1 unlocks, rank 3 gets the lock."""

    def main(comm):
        win = window(comm)
        comm.Barrier()
        comm.clock.sleep(0.1 * comm.rank)
        if comm.rank > 0:
            win.Lock(0)
            comm.record(at=comm.clock.now())
            comm.clock.sleep(5.0 if comm.rank == 1 else 0.0)
            win.Unlock(0)

    notes = run(main, 4, faults="crash:2@2s")[1]
    assert notes.column("at") == {1: pytest.approx(0.1, abs=0.05), 3: pytest.approx(5.1, abs=0.05)}
