"""Programs in which ranks die or stop, for real and on virtual ranks alike: `main(comm, case=…, at=…)`.

Cases that name several (`case="at_once+deserts"`, `at="+"`) run one after the other, each on a communicator of those
who have outlived the one before: starting ranks takes longer than most cases. On real ranks a victim kills or stops
itself; on virtual ones it waits for the crash or pause that the fault plan has for it. What the others found is
recorded.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np

from spawnsim.comm.constants import LOCK_SHARED
from spawnsim.errors import RankFailed, Revoked, Timeout

FAILED = (RankFailed, Revoked, Timeout)
STEPS = 12


def real(comm):
    """Whether these are processes."""
    return comm.capabilities().backend != "virtual"


def die(comm):
    """End here, without a word."""
    if real(comm):
        os.kill(os.getpid(), signal.SIGKILL)
    comm.clock.sleep(1e6)


def stop(comm, *, wake_s=None):
    """Stand still until somebody wakes this rank; `wake_s`: this rank sees to it, after so many seconds."""
    if not real(comm):
        comm.clock.sleep(1.0)  # into the pause
        return
    if wake_s is not None:
        subprocess.Popen(["/bin/sh", "-c", f"sleep {wake_s}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def wake(comm, pid):
    """Let a rank that stopped go on."""
    if real(comm):
        os.kill(pid, signal.SIGCONT)


def dropped(comm, source):
    """Return how many messages from a rank of the world came too late."""
    return comm.runtime.survival.revoking.dropped[source] if real(comm) else comm._rank.dropped[source]


def meet(comm):
    """Wait for all, however long they take to start on a busy machine."""
    for rank in range(comm.size):
        comm.isend(None, dest=rank, tag=99)
    for rank in range(comm.size):
        while not comm.Iprobe(source=rank, tag=99):
            comm.clock.sleep(0.01)
        comm.recv(source=rank, tag=99)


def train(comm, act=lambda comm, step: None, steps=STEPS):
    """Sum over all ranks at each step; recover from what fails. Returns the last communicator."""
    step, total = 0, np.zeros(1)
    while step < steps:
        try:
            act(comm, step)
            with comm.compute(0.01):
                pass
            comm.Allreduce(np.ones(1), total)
            assert total[0] == comm.size
            step += 1
        except FAILED:
            found = comm.recover(step)
            comm, step = found.comm, found.step
    comm.record(size=comm.size, total=total[0], step=step)
    return comm


def in_turn(comm, cases, case, at):
    """Run cases one after the other, on all who live."""
    for number, (name, detail) in enumerate(zip(str(case).split("+"), str(at).split("+"), strict=True)):
        if number:
            comm = alive(comm)
        meet(comm)
        comm = cases[name](comm, *([detail] if detail else [])) or comm


def alive(comm):
    """Return a communicator of those who have come to the end of a case."""
    try:
        comm.Barrier()
    except FAILED:
        return comm.recover().comm
    return comm


def dying(comm, victims):
    """Return what lets ranks of a communicator die: `victims` maps them to steps."""
    when = victims.get(comm.rank)

    def act(comm, step):
        if step == when:
            die(comm)

    return act


def part(comm, victim, known=True):
    """Let a rank die when all others have come here and nobody waits for it any more; return when that is known."""
    if comm.rank != victim:
        comm.send(None, dest=victim, tag=97)
        while known and not comm.Get_failed().Get_size():
            comm.clock.sleep(0.005)
        return
    for other in set(range(comm.size)) - {victim}:
        comm.recv(source=other, tag=97)
    die(comm)


def at_once(comm):
    """Two ranks die in the same step, rank 0 among them."""
    return train(comm, dying(comm, {0: 3, 2: 3}))


def one_by_one(comm):
    """Three ranks die one after the other; of four, one is left, and goes on alone."""
    return train(comm, dying(comm, {3: 2, 0: 5, 2: 8}))


def inside(comm, at="making"):
    """Rank 0 dies in a step, and rank 1 on its way through the recovery."""
    if comm.rank == 1 and real(comm):
        survival = comm.runtime.survival
        where, name = {
            "deciding": (survival.agreement, "_decide"),
            "making": (survival, "_make"),
            "confirming": (survival.agreement, "confirm"),
        }[at]
        setattr(where, name, lambda *_: die(comm))
    return train(comm, dying(comm, {0: 3}))


def deserts(comm):
    """Rank 1 dies instead of coming to the recovery from the death of rank 0."""
    if comm.rank != 1:
        return train(comm, dying(comm, {0: 3}))
    try:
        for _ in range(STEPS):
            comm.Allreduce(np.ones(1), np.zeros(1))
    except FAILED:
        die(comm)
    raise AssertionError("all sums came back")


def fenced(comm, wakes="others"):
    """Rank 2 is stopped, given up, and goes on later: it is told so, and what it sent is dropped."""
    pids = comm.allgather(os.getpid())

    def act(comm, step):
        if comm.size == 4 and comm.rank == 2 and step == 3:
            for rank in (0, 1, 3):
                comm.isend("late", rank, tag=9)
            stop(comm)
            for rank in (0, 1, 3):
                comm.isend("later", rank, tag=9)
        assert comm.size == 4 or not comm.Iprobe(tag=9)
        if comm.size == 3 and step == 6 and comm.rank == 0 and wakes == "others":
            wake(comm, pids[2])
        if comm.size == 3:
            comm.clock.sleep(0.02)

    comm = train(comm, act, steps=30)
    comm.record.event("dropped", count=dropped(comm, 2))


def naps(comm):
    """Rank 2 is stopped for less than the deadline: nobody takes it for dead."""

    def act(comm, step):
        if comm.rank == 2 and step == 3:
            stop(comm, wake_s=0.5)

    train(comm, act)


def never_called(comm):
    """Rank 3 dies when nobody needs it any more: the others end, without a recovery of their own."""
    part(comm, 3)
    comm.record(size=comm.size)


def all_die(comm):
    """Nobody is left."""
    die(comm)


def uncaught(comm):
    """Nobody catches the death of rank 1."""
    if comm.rank == 1:
        die(comm)
    comm.Barrier()


def raises(comm):
    """A survivor raises after the recovery."""
    comm = train(comm, dying(comm, {1: 3}))
    if comm.rank == 2:
        raise ValueError("after all")
    comm.Barrier()


def open_requests(comm):
    """Requests that are open end in Revoked, and their memory is left alone."""
    me, mine = comm.rank, np.full(4, 7.0)
    receive, listening = comm.Irecv(mine, source=(me + 1) % comm.size, tag=3), comm.irecv(source=2, tag=4)
    send = comm.Isend(np.zeros(300_000), dest=2, tag=5)
    part(comm, 2)
    comm = _recovered(comm)
    ends = [_ends(receive.Wait), _ends(listening.wait), _ends(send.Wait)]
    comm.record(size=comm.size, me=me, ends=" ".join(ends), untouched=bool((mine == 7.0).all()))
    comm.Barrier()
    return comm


def _recovered(comm):
    try:
        comm.Barrier()
    except FAILED:
        return comm.recover().comm
    raise AssertionError("a Barrier with a dead rank came back")


def _ends(call):
    try:
        call()
    except FAILED as error:
        return type(error).__name__
    return "done"


def background(comm):
    """A task that waits on the old communicator is told; one may go on with the new one."""
    heard = []

    def listen():
        heard.append(_ends(lambda: comm.recv(source=1 - comm.rank % 2, tag=8)))

    task = comm.background(listen)
    part(comm, 3)
    new = _recovered(comm)
    ended = task.join(5.0)
    new.record(size=new.size, ended=ended, heard=heard[0] if heard else "")
    new.Barrier()
    return new


def parts(comm):
    """Communicators made of the old one end with it; so does the old one. New ones can be made."""
    halves, twin = comm.Split(comm.rank % 2, comm.rank), comm.Dup()
    part(comm, 3)
    new = _recovered(comm)
    ends = [
        _ends(comm.Barrier), _ends(halves.Barrier), _ends(lambda: twin.bcast(1)),
        _ends(lambda: twin.send(1, dest=0)), _ends(lambda: halves.Iprobe()), _ends(lambda: halves.Dup()),
        _ends(lambda: comm.Win.Allocate(8, comm=comm)),
    ]  # fmt: skip
    again = new.Split(new.rank % 2, new.rank)
    new.record(size=new.size, me=new.rank, ends=" ".join(ends), part=again.allreduce(1))
    return new


def windows(comm):
    """A lock dies with its holder; windows are made anew."""
    win = comm.Win.Allocate(64, 1, comm=comm)
    if comm.rank == 1:
        win.Lock(0)
    part(comm, 1)
    with comm.clock.deadline(0.5):
        locked = _ends(lambda: _lock(win, 0)) if comm.rank == 0 else "Timeout"
    new = _recovered(comm)
    old = [_ends(lambda: win.Lock(2)), _ends(lambda: win.Put(np.zeros(1), 2)), _ends(lambda: win.Flush(2))]
    fresh = new.Win.Allocate(64, 8, comm=new)
    fresh.Lock(0)
    found = np.zeros(1, np.int64)
    fresh.Fetch_and_op(np.ones(1, np.int64), found, 0)
    fresh.Unlock(0)
    new.Barrier()
    fresh.Lock(0)
    fresh.Get(found, 0)
    fresh.Unlock(0)
    fresh.Free()
    new.record(size=new.size, me=comm.rank, locked=locked, old=" ".join(old), counted=int(found[0]))
    return new


def half_made(comm):
    """A rank dies while the others are in the library's own making of a window: the next one is made all the same."""
    part(comm, 1)
    if real(comm):  # past the meeting that keeps them out of the library without the dead
        from spawnsim.real.mpi import abortable

        ended = _ends(lambda: abortable.make_detached(comm, "Dup", comm._raw.Dup, meeting=False))
    else:
        ended = _ends(lambda: comm.Win.Allocate(8, comm=comm))
    new = comm.recover().comm
    began_s = comm.clock.now()
    new.Win.Allocate(8, comm=new).Free()
    new.record(size=new.size, ended=ended, took_s=comm.clock.now() - began_s)
    return new


def hopeless(comm):
    """What fails again and again although nobody has died ends the job, and says so."""
    step = 3
    while True:
        try:
            comm.Barrier()  # nobody is on the way here any more
            raise Timeout((), "Barrier", 7)
        except FAILED:
            comm = comm.recover(step).comm


def _lock(win, rank):
    win.Lock(rank)
    win.Unlock(rank)


def flush(comm):
    """A flush towards a dead rank whose window needs its polls: it ends, whatever way."""
    memory, into = np.zeros(100_000), np.zeros(100_000)
    win = comm.Win.Create(memory, 8, comm=comm)
    part(comm, 1)

    def get():
        win.Lock(1, LOCK_SHARED)
        win.Get(into, 1)
        with comm.clock.deadline(1.0):
            win.Flush(1)

    ended = _ends(get)
    new = comm.recover().comm
    ended = ended in ("Timeout", "RankFailed", "Revoked", "done")
    new.record(size=new.size, ended=ended, light="torch" not in sys.modules)
    new.Barrier()
    return new


def noticed(comm):
    """Each call that needs the dead ends at once: a collective, a receive from it, and one from anybody, once."""
    part(comm, 3, known=False)
    if comm.rank == 2:
        first = _ends(lambda: comm.recv(tag=5))
        known = comm.Get_failed().Get_size(), comm.Ack_failed()
        comm.send(None, dest=0, tag=6)
        text = f"{first} {known} {comm.recv(tag=5)}"
        for other in set(range(comm.size)) - {2, 3}:
            comm.send(None, dest=other, tag=7)
    else:
        if comm.rank == 0:
            comm.recv(source=2, tag=6)
            comm.send("heard", dest=2, tag=5)
        text = _ends((lambda: comm.recv(source=3, tag=5)) if comm.rank == 1 else comm.Barrier)
        _ends(lambda: comm.recv(source=2, tag=7))  # a recovery would end what others still say
    new = comm.recover().comm
    new.record(size=new.size, me=comm.rank, text=text)
    new.Barrier()
    return new


def buffers(comm):
    """A sum that was left is not given to the program later, when the stopped rank goes on."""
    pids, total = comm.allgather(os.getpid()), np.full(1000, -1.0)
    if comm.rank == 2:
        stop(comm)
    left = _ends(lambda: comm.Allreduce(np.ones(1000), total))
    if comm.rank == 0:
        wake(comm, pids[2])
    comm.clock.sleep(0.6)
    new = comm.recover().comm
    new.record(size=new.size, left=left, untouched=bool((total == -1.0).all()))
    new.Barrier()


CASES = {
    each.__name__: each
    for each in (
        at_once, one_by_one, inside, deserts, fenced, naps, never_called, all_die, uncaught, raises, open_requests,
        background, parts, windows, half_made, hopeless, flush, buffers, noticed,
    )
}  # fmt: skip


def main(comm, case="at_once", at=""):
    """Run one of the cases, or several."""
    in_turn(comm, CASES, case, at)
