"""Read-modify-write access to windows that loses nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from spawnsim.testing.claims import refused, same
from spawnsim.testing.contract.locks import closed, window


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
