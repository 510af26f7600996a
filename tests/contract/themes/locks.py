"""Passive-target access to windows: under locks, without the target's help, and atomic calls that lose nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from contract.cases import needs, refused, ring, same


def window(MPI: Any, comm: Any, length: int = 4) -> tuple[Any, Any]:
    """Return a window of zeros and its memory as doubles."""
    win = MPI.Win.Allocate(8 * length, 8, MPI.INFO_NULL, comm)
    memory = np.frombuffer(win.tomemory(), np.float64)
    memory[:] = 0
    # Nobody may access a part before its owner has set it to zero.
    comm.Barrier()
    return win, memory


def closed(comm: Any, win: Any) -> None:
    """Free a window when all are through with it."""
    # MPI asks that all accesses have ended before Free, and a target does not know of those to its part.
    comm.Barrier()
    win.Free()


def put_and_get_under_a_lock(MPI: Any, comm: Any) -> None:
    """What was put is there after the unlock, and can be got."""
    rank, _, left, right = ring(comm)
    win, memory = window(MPI, comm)
    win.Lock(right)
    win.Put(np.full(4, float(rank)), right)
    win.Unlock(right)
    comm.Barrier()
    # Also for the own part: loads between accesses of others are defined within an epoch alone.
    win.Lock(rank)
    same(memory, np.full(4, float(left)))
    win.Unlock(rank)
    comm.Barrier()
    found = np.zeros(4)
    win.Lock(right, MPI.LOCK_SHARED)
    win.Get(found, right)
    win.Unlock(right)
    same(found, np.full(4, float(rank)))
    del memory
    closed(comm, win)


def exclusive_locks_exclude(MPI: Any, comm: Any) -> None:
    """Reading, changing and writing under an exclusive lock loses no increment."""
    rank, size = comm.Get_rank(), comm.Get_size()
    win, memory = window(MPI, comm, 1)
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
        win.Lock(0)
        same(float(memory[0]), 5.0 * size)
        win.Unlock(0)
    del memory
    closed(comm, win)


def shared_locks_share(MPI: Any, comm: Any) -> None:
    """All ranks may read one part together."""
    win, memory = window(MPI, comm)
    if comm.Get_rank() == 0:
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
    del memory
    closed(comm, win)


def lock_all_and_flush(MPI: Any, comm: Any) -> None:
    """One epoch to all ranks may stand for the whole program; flushes complete calls within it."""
    rank, size = comm.Get_rank(), comm.Get_size()
    win, memory = window(MPI, comm, size)
    win.Lock_all()
    for other in range(size):
        win.Put(np.full(1, rank + 1.0), other, rank)
    win.Flush_all()
    comm.Barrier()
    found = np.zeros(size)
    win.Get(found, (rank + 1) % size)
    win.Flush((rank + 1) % size)
    same(found, np.arange(1.0, size + 1))
    comm.Barrier()
    win.Unlock_all()
    del memory
    closed(comm, win)


def local_flushes_free_the_origin(MPI: Any, comm: Any) -> None:
    """After a local flush the origin's buffer may be used again."""
    rank, _, _, right = ring(comm)
    win, memory = window(MPI, comm)
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
    win.Lock(rank)
    same(memory, [8, 7, 7, 7])
    win.Unlock(rank)
    del memory
    closed(comm, win)


def sync_between_loads_and_calls(MPI: Any, comm: Any) -> None:
    """Sync makes own stores visible to the others' calls."""
    rank, _, _, right = ring(comm)
    win, memory = window(MPI, comm)
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
    del memory
    closed(comm, win)


def calls_with_requests(MPI: Any, comm: Any) -> None:
    """The request forms complete by waiting, before the flush."""
    rank, _, left, right = ring(comm)
    win, memory = window(MPI, comm)
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
    win.Lock(rank)
    same(memory, [left, left, 2, 2])
    win.Unlock(rank)
    del memory
    closed(comm, win)


@needs(ranks=2)
def a_passive_target_takes_no_part(MPI: Any, comm: Any) -> None:
    """While one rank waits in a receive, others read and write its part."""
    rank, size = comm.Get_rank(), comm.Get_size()
    win, memory = window(MPI, comm, size)
    if rank == 0:
        for other in range(1, size):
            # In a call of MPI, since a library may serve accesses only while its target is inside one.
            comm.recv(source=other)
        win.Lock(0)
        same(memory, np.arange(float(size)))
        win.Unlock(0)
    else:
        win.Lock(0, MPI.LOCK_SHARED)
        win.Put(np.full(1, float(rank)), 0, rank)
        win.Unlock(0)
        comm.send("done", dest=0)
    del memory
    closed(comm, win)


def locks_without_checks(MPI: Any, comm: Any) -> None:
    """Assertions are hints and change no result."""
    rank, _, left, right = ring(comm)
    win, memory = window(MPI, comm)
    win.Lock(right, MPI.LOCK_SHARED, MPI.MODE_NOCHECK)
    win.Put(np.full(4, float(rank)), right)
    win.Unlock(right)
    comm.Barrier()
    win.Lock(rank, MPI.LOCK_SHARED)
    same(memory, np.full(4, float(left)))
    win.Unlock(rank)
    win.Fence(MPI.MODE_NOPRECEDE)
    win.Fence(MPI.MODE_NOSUCCEED)
    del memory
    closed(comm, win)


def counter(MPI: Any, comm: Any) -> tuple[Any, Any]:
    """Return a window of one integer per rank, zero, and its memory."""
    win = MPI.Win.Allocate(8, 8, MPI.INFO_NULL, comm)
    memory = np.frombuffer(win.tomemory(), np.int64)
    memory[:] = 0
    comm.Barrier()
    return win, memory


def a_shared_counter(MPI: Any, comm: Any) -> None:
    """Fetch_and_op hands out each number once."""
    rank, size = comm.Get_rank(), comm.Get_size()
    win, memory = counter(MPI, comm)
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
        win.Lock(0)
        same(int(memory[0]), 4 * size)
        win.Unlock(0)
    del memory
    closed(comm, win)


def reading_atomically(MPI: Any, comm: Any) -> None:
    """NO_OP fetches without changing."""
    win, memory = counter(MPI, comm)
    if comm.Get_rank() == 0:
        win.Lock(0)
        memory[0] = 42
        win.Unlock(0)
    comm.Barrier()
    found, ignored = np.zeros(1, np.int64), np.full(1, 5)
    win.Lock(0, MPI.LOCK_SHARED)
    win.Fetch_and_op(ignored, found, 0, 0, MPI.NO_OP)
    win.Unlock(0)
    same(int(found[0]), 42)
    del memory
    closed(comm, win)


def one_winner(MPI: Any, comm: Any) -> None:
    """Of all ranks that compare and swap one cell, exactly one finds the old value."""
    rank = comm.Get_rank()
    win, memory = counter(MPI, comm)
    found = np.full(1, -1)
    win.Lock(0, MPI.LOCK_SHARED)
    win.Compare_and_swap(np.full(1, rank + 1), np.zeros(1, np.int64), found, 0, 0)
    win.Unlock(0)
    winners = [other for other, value in enumerate(comm.allgather(int(found[0]))) if value == 0]
    same(len(winners), 1)
    if rank == 0:
        win.Lock(0)
        same(int(memory[0]), winners[0] + 1)
        win.Unlock(0)
    # The losers find what the winner has put, and never a third value.
    same(int(found[0]) in (0, winners[0] + 1), True)
    del memory
    closed(comm, win)


def get_and_accumulate(MPI: Any, comm: Any) -> None:
    """Get_accumulate returns what was there before it added; the values of all ranks are a chain."""
    size = comm.Get_size()
    win, memory = window(MPI, comm, 2)
    found = np.zeros(2)
    win.Lock(0, MPI.LOCK_SHARED)
    win.Get_accumulate(np.ones(2), found, 0)
    win.Unlock(0)
    same(sorted(comm.allgather(float(found[0]))), [float(n) for n in range(size)])
    del memory
    closed(comm, win)


def accumulates_are_atomic(MPI: Any, comm: Any) -> None:
    """Concurrent accumulates under shared locks lose nothing."""
    rank, size = comm.Get_rank(), comm.Get_size()
    win, memory = window(MPI, comm)
    for _ in range(10):
        win.Lock(0, MPI.LOCK_SHARED)
        win.Accumulate(np.ones(4), 0)
        win.Unlock(0)
    comm.Barrier()
    if rank == 0:
        win.Lock(0)
        same(memory, np.full(4, 10.0 * size))
        win.Unlock(0)
    del memory
    closed(comm, win)


def single_elements_only(MPI: Any, comm: Any) -> None:
    """Fetch_and_op and Compare_and_swap take one element of one type."""
    win, memory = counter(MPI, comm)
    win.Lock_all()
    with refused(ValueError):
        win.Fetch_and_op(np.ones(2, np.int64), np.zeros(2, np.int64), 0)
    with refused(ValueError):
        win.Compare_and_swap(np.ones(1, np.int64), np.ones(1), np.ones(1, np.int64), 0)
    win.Unlock_all()
    del memory
    closed(comm, win)


def accumulating_through_a_derived_type(MPI: Any, comm: Any) -> None:
    """A target of derived type takes a predefined operation element by element; so do origin and result."""
    size, numbers = comm.Get_size(), 12
    win = MPI.Win.Allocate(8 * numbers, 8, MPI.INFO_NULL, comm)
    memory = np.frombuffer(win.tomemory(), np.float64)
    memory[:] = np.arange(numbers)
    every_other = MPI.DOUBLE.Create_vector(3, 1, 2).Commit()
    pairs = every_other.Create_resized(0, 8).Commit()
    comm.Barrier()
    win.Fence()
    win.Accumulate([np.full(3, 10.0), 3, MPI.DOUBLE], 0, [1, 1, every_other], MPI.SUM)
    win.Fence()
    if comm.Get_rank() == 0:
        wanted = np.arange(numbers, dtype=float)
        wanted[1:7:2] += 10.0 * size
        same(memory, wanted)
        win.Accumulate([np.arange(5.0), 1, every_other], 0, [7, 1, pairs], MPI.REPLACE)
    win.Fence()
    if comm.Get_rank() == 0:
        same(memory[7:12:2], [0.0, 2.0, 4.0])
    comm.Barrier()
    if comm.Get_rank() == 0:
        result = np.zeros(5)
        win.Lock(0)
        win.Get_accumulate(
            [np.full(5, 3.0), 1, every_other], [result, 1, every_other], 0, [7, 1, pairs], MPI.MAX
        )
        win.Flush(0)
        win.Unlock(0)
        same(result, [0.0, 0.0, 2.0, 0.0, 4.0])
        same(memory[7:12:2], [3.0, 3.0, 4.0])
    every_other.Free()
    pairs.Free()
    del memory
    closed(comm, win)
