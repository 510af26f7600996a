"""Passive-target access to windows: under locks, without the target's help, and atomic calls that lose nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from contract.cases import needs, refused, same


def window(MPI: Any, comm: Any, own: Any, length: int = 4, kind: type = np.float64) -> tuple[Any, Any]:
    """Return a window of zeros and its memory."""
    win = own(MPI.Win.Allocate(8 * length, 8, MPI.INFO_NULL, comm))
    memory = np.frombuffer(win.tomemory(), kind)
    memory[:] = 0
    # Nobody may access a part before its owner has set it to zero.
    comm.Barrier()
    return win, memory


def holds(win: Any, memory: Any, rank: int, wanted: Any) -> None:
    """Claim what the rank's own part holds."""
    # Loads between accesses of others are defined within an epoch alone.
    win.Lock(rank)
    same(memory, wanted)
    win.Unlock(rank)


def put_and_get_under_a_lock(MPI, comm, rank, left, right, own):
    """What was put is there after the unlock, and can be got; assertions are hints and change no result."""
    for put, get in (((), (MPI.LOCK_SHARED,)), ((MPI.LOCK_SHARED, MPI.MODE_NOCHECK),) * 2):
        win, memory = window(MPI, comm, own)
        win.Lock(right, *put)
        win.Put(np.full(4, float(rank)), right)
        win.Unlock(right)
        comm.Barrier()
        holds(win, memory, rank, np.full(4, float(left)))
        comm.Barrier()
        found = np.zeros(4)
        win.Lock(right, *get)
        win.Get(found, right)
        win.Unlock(right)
        same(found, np.full(4, float(rank)))
        win.Fence(MPI.MODE_NOPRECEDE)
        win.Fence(MPI.MODE_NOSUCCEED)


def exclusive_locks_exclude(MPI, comm, rank, size, own):
    """Reading, changing and writing under an exclusive lock loses no increment."""
    win, memory = window(MPI, comm, own, 1)
    for _ in range(5):
        value = np.zeros(1)
        win.Lock(0, MPI.LOCK_EXCLUSIVE)
        win.Get(value, 0)
        # Within one epoch a Get is complete only after a flush, and the next line uses what it brings.
        win.Flush(0)
        value += 1
        win.Put(value, 0)
        win.Unlock(0)
    comm.Barrier()
    if rank == 0:
        holds(win, memory, 0, [5.0 * size])


def shared_locks_share(MPI, comm, rank, own):
    """All ranks may read one part together."""
    win, memory = window(MPI, comm, own)
    if rank == 0:
        win.Lock(0)
        memory[:] = 3
        win.Unlock(0)
    comm.Barrier()
    found = np.zeros(4)
    win.Lock(0, MPI.LOCK_SHARED)
    win.Get(found, 0)
    win.Flush(0)
    same(found, np.full(4, 3.0))
    win.Unlock(0)


def lock_all_and_flush(MPI, comm, rank, size, right, own):
    """One epoch to all ranks may stand for the whole program; flushes complete calls within it."""
    win, _ = window(MPI, comm, own, size)
    win.Lock_all()
    for other in range(size):
        win.Put(np.full(1, rank + 1.0), other, rank)
    win.Flush_all()
    comm.Barrier()
    found = np.zeros(size)
    win.Get(found, right)
    win.Flush(right)
    same(found, np.arange(1.0, size + 1))
    comm.Barrier()
    win.Unlock_all()


def local_flushes_free_the_origin(MPI, comm, rank, right, own):
    """After a local flush the origin's buffer may be used again."""
    win, memory = window(MPI, comm, own)
    win.Lock_all()
    source = np.full(4, 7.0)
    win.Put(source, right)
    win.Flush_local(right)
    # What is overwritten here must have left already: complete at the origin, if not at the target.
    source[:] = -1
    win.Put(np.full(1, 8.0), right)
    win.Flush_local_all()
    win.Unlock_all()
    comm.Barrier()
    holds(win, memory, rank, [8, 7, 7, 7])


def sync_between_loads_and_calls(MPI, comm, rank, right, own):
    """Sync makes own stores visible to the others' calls."""
    win, memory = window(MPI, comm, own)
    win.Lock_all()
    memory[:] = rank
    # In the separate memory model stores lie in the private copy until it is synchronised.
    win.Sync()
    comm.Barrier()
    found = np.zeros(4)
    win.Get(found, right)
    win.Flush(right)
    win.Unlock_all()
    same(found, np.full(4, float(right)))


def calls_with_requests(MPI, comm, rank, left, right, own):
    """The request forms complete by waiting, before the flush."""
    win, memory = window(MPI, comm, own)
    win.Lock_all()
    win.Rput(np.full(2, float(rank)), right).Wait()
    win.Raccumulate(np.full(2, 1.0), right, 2).Wait()
    win.Flush(right)
    comm.Barrier()
    found, before = np.zeros(2), np.zeros(2)
    win.Rget(found, rank).Wait()
    same(found, np.full(2, float(left)))
    win.Rget_accumulate(np.full(2, 1.0), before, rank, 2).Wait()
    same(before, [1, 1])
    win.Unlock_all()
    comm.Barrier()
    holds(win, memory, rank, [left, left, 2, 2])


@needs(ranks=2)
def a_passive_target_takes_no_part(MPI, comm, rank, size, own):
    """While one rank waits in a receive, others read and write its part."""
    win, memory = window(MPI, comm, own, size)
    if rank == 0:
        for other in range(1, size):
            # In a call of MPI, since a library may serve accesses only while its target is inside one.
            comm.recv(source=other)
        holds(win, memory, 0, np.arange(float(size)))
    else:
        win.Lock(0, MPI.LOCK_SHARED)
        win.Put(np.full(1, float(rank)), 0, rank)
        win.Unlock(0)
        comm.send("done", dest=0)


def a_shared_counter(MPI, comm, rank, size, own):
    """Fetch_and_op hands out each number once."""
    win, memory = window(MPI, comm, own, 1, np.int64)
    drawn, one = [], np.ones(1, np.int64)
    win.Lock_all()
    for _ in range(4):
        found = np.zeros(1, np.int64)
        win.Fetch_and_op(one, found, 0, 0, MPI.SUM)
        win.Flush(0)
        drawn.append(int(found[0]))
    win.Unlock_all()
    same(sorted(n for part in comm.allgather(drawn) for n in part), list(range(4 * size)))
    if rank == 0:
        holds(win, memory, 0, [4 * size])


def reading_atomically(MPI, comm, rank, own):
    """NO_OP fetches without changing."""
    win, memory = window(MPI, comm, own, 1, np.int64)
    if rank == 0:
        win.Lock(0)
        memory[0] = 42
        win.Unlock(0)
    comm.Barrier()
    found, ignored = np.zeros(1, np.int64), np.full(1, 5)
    win.Lock(0, MPI.LOCK_SHARED)
    win.Fetch_and_op(ignored, found, 0, 0, MPI.NO_OP)
    win.Unlock(0)
    same(int(found[0]), 42)


def one_winner(MPI, comm, rank, own):
    """Of all ranks that compare and swap one cell, exactly one finds the old value."""
    win, memory = window(MPI, comm, own, 1, np.int64)
    found = np.full(1, -1)
    win.Lock(0, MPI.LOCK_SHARED)
    win.Compare_and_swap(np.full(1, rank + 1), np.zeros(1, np.int64), found, 0, 0)
    win.Unlock(0)
    winners = [other for other, value in enumerate(comm.allgather(int(found[0]))) if value == 0]
    same(len(winners), 1)
    if rank == 0:
        holds(win, memory, 0, [winners[0] + 1])
    # The losers find what the winner has put, and never a third value.
    same(int(found[0]) in (0, winners[0] + 1), True)


def get_and_accumulate(MPI, comm, size, own):
    """Get_accumulate returns what was there before it added; the values of all ranks are a chain."""
    win, _ = window(MPI, comm, own, 2)
    found = np.zeros(2)
    win.Lock(0, MPI.LOCK_SHARED)
    win.Get_accumulate(np.ones(2), found, 0)
    win.Unlock(0)
    same(sorted(comm.allgather(float(found[0]))), [float(n) for n in range(size)])


def accumulates_are_atomic(MPI, comm, rank, size, own):
    """Concurrent accumulates under shared locks lose nothing."""
    win, memory = window(MPI, comm, own)
    for _ in range(10):
        win.Lock(0, MPI.LOCK_SHARED)
        win.Accumulate(np.ones(4), 0)
        win.Unlock(0)
    comm.Barrier()
    if rank == 0:
        holds(win, memory, 0, np.full(4, 10.0 * size))


def single_elements_only(MPI, comm, own):
    """Fetch_and_op and Compare_and_swap take one element of one type."""
    win, _ = window(MPI, comm, own, 1, np.int64)
    win.Lock_all()
    refused(ValueError, win.Fetch_and_op, np.ones(2, np.int64), np.zeros(2, np.int64), 0)
    refused(ValueError, win.Compare_and_swap, np.ones(1, np.int64), np.ones(1), np.ones(1, np.int64), 0)
    win.Unlock_all()


def accumulating_through_a_derived_type(MPI, comm, rank, size, own):
    """A target of derived type takes a predefined operation element by element; so do origin and result."""
    numbers = np.arange(12.0)
    win, memory = window(MPI, comm, own, len(numbers))
    memory[:] = numbers
    every_other = own(MPI.DOUBLE.Create_vector(3, 1, 2).Commit())
    pairs = own(every_other.Create_resized(0, 8).Commit())
    comm.Barrier()
    win.Fence()
    win.Accumulate([np.full(3, 10.0), 3, MPI.DOUBLE], 0, [1, 1, every_other], MPI.SUM)
    win.Fence()
    if rank == 0:
        numbers[1:7:2] += 10.0 * size
        same(memory, numbers)
        win.Accumulate([np.arange(5.0), 1, every_other], 0, [7, 1, pairs], MPI.REPLACE)
    win.Fence()
    if rank == 0:
        same(memory[7:12:2], [0.0, 2.0, 4.0])
    comm.Barrier()
    if rank == 0:
        three, result = [np.full(5, 3.0), 1, every_other], np.zeros(5)
        win.Lock(0)
        win.Get_accumulate(three, [result, 1, every_other], 0, [7, 1, pairs], MPI.MAX)
        win.Flush(0)
        win.Unlock(0)
        same(result, [0.0, 0.0, 2.0, 0.0, 4.0])
        same(memory[7:12:2], [3.0, 3.0, 4.0])
