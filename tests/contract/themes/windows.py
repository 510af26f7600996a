"""Windows: making them, and active-target access: between fences, and between Post, Start, Complete and Wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from contract.cases import claim, needs, poll, same


def exposed(MPI: Any, comm: Any, own: Any, length: int = 4, value: float = -1.0) -> tuple[Any, Any]:
    """Return a window of doubles and its memory."""
    memory = np.full(length, value)
    return own(MPI.Win.Create(memory, 8, MPI.INFO_NULL, comm)), memory


@contextmanager
def fenced(win: Any) -> Iterator[None]:
    """Run the block between two fences."""
    win.Fence()
    yield
    win.Fence()


def attributes(MPI, comm):
    """A window knows its size, unit, flavour, group and name."""
    win, memory = exposed(MPI, comm, lambda win: win)
    same((win.Get_attr(MPI.WIN_SIZE), win.Get_attr(MPI.WIN_DISP_UNIT)), (32, 8))
    same((win.attrs[1:], win.flavor), ((32, 8), MPI.WIN_FLAVOR_CREATE))
    claim(win.model in (MPI.WIN_SEPARATE, MPI.WIN_UNIFIED), "the memory model is one of two")
    same((win.group.Get_size(), win.group_size, win.group_rank), (comm.size, comm.size, comm.rank))
    same(len(win.tomemory()), memory.nbytes)
    win.Set_name("store")
    same((win.Get_name(), win.name), ("store", "store"))
    win.Free()
    claim(win == MPI.WIN_NULL, "a freed window is null")


def put_and_get_between_fences(MPI, comm, rank, left, right, own):
    """What was put has arrived after the fence, also in one's own part, and what was got is there."""
    win, memory = exposed(MPI, comm, own)
    target = np.zeros(4)
    with fenced(win):
        win.Put(np.full(3, float(rank)), right)
        win.Put(np.array([float(rank)]), rank, 3)
    same(memory, [left, left, left, rank])
    with fenced(win):
        win.Get(target, right)
    same(target, [rank, rank, rank, right])


def targets(MPI, comm, rank, left, right, own):
    """A target has a displacement in units of the window, a count and a type."""
    win, memory = exposed(MPI, comm, own, length=6)
    with fenced(win):
        win.Put(np.full(1, float(rank)), right, 1)
        win.Put(np.full(2, float(rank)), right, [3, 2])
        win.Put(np.full(1, float(rank)), right, [5, 1, MPI.DOUBLE])
    same(memory, [-1, left, -1, left, left, left])


def targets_with_derived_types(MPI, comm, rank, left, right, own):
    """A row is put into a column of the target."""
    win, memory = exposed(MPI, comm, own, length=9)
    column, found = own(MPI.DOUBLE.Create_vector(3, 1, 3).Commit()), np.zeros(3)
    with fenced(win):
        win.Put(np.full(3, float(rank)), right, [1, 1, column])
    same(memory.reshape(3, 3), [[-1, left, -1]] * 3)
    with fenced(win):
        win.Get(found, right, [1, 1, column])
    same(found, np.full(3, float(rank)))


def units_of_displacement(MPI, comm, rank, left, right, own):
    """Displacements count units that each rank chooses for its own part."""
    memory = np.full(4, -1.0)
    unit = 8 if rank % 2 else 1
    win = own(MPI.Win.Create(memory, unit, MPI.INFO_NULL, comm))
    units = comm.allgather(unit)
    with fenced(win):
        # The target's own unit scales the displacement, not the origin's.
        win.Put(np.full(1, float(rank)), right, 16 // units[right])
    same(memory, [-1, -1, left, -1])


def parts_of_different_size(MPI, comm, rank, size, own):
    """Each rank exposes as much as it likes, nothing too."""
    memory = np.zeros(rank)
    win = own(MPI.Win.Create(memory, 8, MPI.INFO_NULL, comm))
    with fenced(win):
        if rank == 0:
            for other in range(1, size):
                win.Put(np.full(other, float(other)), other)
    same(memory, np.full(rank, float(rank)))


def exposing_nothing(MPI, comm):
    """None or BOTTOM as memory exposes nothing."""
    for nothing in (None, MPI.BOTTOM):
        win = MPI.Win.Create(nothing, 1, MPI.INFO_NULL, comm)
        win.Fence()
        win.Fence()
        same(win.Get_attr(MPI.WIN_SIZE), 0)
        win.Free()


def allocated_windows(MPI, comm, rank, left, right, own):
    """A window may bring its memory."""
    win = own(MPI.Win.Allocate(32, 8, MPI.INFO_NULL, comm))
    memory = np.frombuffer(win.tomemory(), np.float64)
    same((win.flavor, len(memory)), (MPI.WIN_FLAVOR_ALLOCATE, 4))
    memory[:] = -1
    with fenced(win):
        win.Put(np.full(2, float(rank)), right, 1)
    same(memory, [-1, left, left, -1])
    # The view must go before the memory does: Free releases what the window has brought.
    del memory


def shared_windows(MPI, comm, own):
    """Ranks on one node see each other's parts as plain memory."""
    # MPI allows shared windows only among ranks that can share memory.
    node = own(comm.Split_type(MPI.COMM_TYPE_SHARED))
    rank, size = node.Get_rank(), node.Get_size()
    win = own(MPI.Win.Allocate_shared(16, 8, MPI.INFO_NULL, node))
    mine = np.frombuffer(win.tomemory(), np.float64)
    # Both fences are needed: the first opens the epoch, the second makes the stores visible to the neighbours' loads.
    with fenced(win):
        mine[:] = rank
    other, unit = win.Shared_query((rank + 1) % size)
    same(np.frombuffer(other, np.float64), [(rank + 1) % size] * 2)
    same((unit, win.flavor), (8, MPI.WIN_FLAVOR_SHARED))
    win.Fence()
    del mine, other


def dynamic_windows(MPI, comm, rank, left, right):
    """Memory is attached later, and reached by its address."""
    win, memory = MPI.Win.Create_dynamic(MPI.INFO_NULL, comm), np.full(2, -1.0)
    win.Attach(memory)
    # A dynamic window has no base, so displacements are addresses of the target's process, which it has to tell.
    addresses = comm.allgather(MPI.Get_address(memory))
    with fenced(win):
        win.Put(np.full(1, float(rank)), right, addresses[right] + 8)
    same((memory.tolist(), win.flavor), ([-1, left], MPI.WIN_FLAVOR_DYNAMIC))
    win.Detach(memory)
    win.Free()


def accumulate_from_all(MPI, comm, rank, size, own):
    """Contributions of all ranks add up, element by element."""
    win, memory = exposed(MPI, comm, own, value=0.0)
    with fenced(win):
        for other in range(size):
            win.Accumulate(np.full(4, rank + 1.0), other)
    same(memory, np.full(4, size * (size + 1) / 2))


def accumulate_with_other_operations(MPI, comm, rank, size, own):
    """All predefined operations accumulate; REPLACE puts."""
    win, memory = exposed(MPI, comm, own, value=0.0)
    for op, result in ((MPI.MAX, size - 1.0), (MPI.MIN, 0.0), (MPI.REPLACE, None), (MPI.PROD, 0.0)):
        win.Fence()
        win.Accumulate(np.full(1, float(rank)), 0, 0, op)
        win.Fence()
        if rank == 0 and result is not None:
            same(float(memory[0]), result)
        # Concurrent accumulates of one operation are atomic for each element, but their order is not defined.
        claim(memory[0] in range(size), "whatever was replaced, one rank's value stands")


def nowhere_is_no_target(MPI, comm, own):
    """One-sided calls to PROC_NULL do nothing."""
    win, memory = exposed(MPI, comm, own)
    buf = np.full(4, 5.0)
    with fenced(win):
        win.Put(buf, MPI.PROC_NULL)
        win.Get(buf, MPI.PROC_NULL)
        win.Accumulate(buf, MPI.PROC_NULL)
    same((memory.tolist(), buf.tolist()), ([-1.0] * 4, [5.0] * 4))


def matching_epochs(MPI, comm, rank, left, right, own):
    """Post and Wait expose to a group, Start and Complete access it; no rank is an epoch ahead of its target."""
    win, memory = exposed(MPI, comm, own)
    group = comm.Get_group()
    for step in range(5):
        # Post before Start, since Start may block until the target has posted: on a ring the other order may deadlock.
        win.Post(group.Incl([left]))
        win.Start(group.Incl([right]))
        win.Put(np.full(4, 10.0 * step + rank), right)
        win.Complete()
        win.Wait()
        same(memory, np.full(4, 10.0 * step + left))


@needs(ranks=2)
def matching_epochs_can_be_tested(MPI, comm, rank, own):
    """Test ends an exposure like Wait, once all have completed their access."""
    win, memory = exposed(MPI, comm, own)
    group = comm.Get_group()
    win.Post(group.Incl([]))
    same(win.Test(), True)
    if rank == 0:
        win.Post(group.Incl([1]))
        # Rank 1 has not been told to begin, so its Complete cannot have come.
        same(win.Test(), False)
        comm.send("go", dest=1)
        poll(win.Test)
        same(memory, np.full(4, 3.0))
    elif rank == 1:
        comm.recv(source=0)
        win.Start(group.Incl([0]))
        win.Put(np.full(4, 3.0), 0)
        win.Complete()
    comm.Barrier()


def many_origins_in_one_epoch(MPI, comm, rank, size, own):
    """A target waits for all ranks of its group; an origin reads and adds between Start and Complete."""
    win, memory = exposed(MPI, comm, own, value=0.0)
    group, found = comm.Get_group(), np.zeros(4)
    if rank == 0:
        # Stored before Post: in the epoch the target's own stores would conflict with accesses.
        memory[1] = 7.0
        win.Post(group.Excl([0]))
        win.Wait()
        same(memory[0], size * (size - 1) / 2)
    else:
        win.Start(group.Incl([0]))
        win.Accumulate(np.array([float(rank)]), 0)
        # Another element than the one that is added to: overlapping accesses of one epoch are errors.
        win.Get(found[1:2], 0, 1)
        win.Complete()
        same(found[1], 7.0)
    comm.Barrier()


def epochs_of_nobody(MPI, comm, own):
    """Epochs with an empty group begin and end at once."""
    win, _ = exposed(MPI, comm, own)
    nobody = comm.Get_group().Incl([])
    win.Post(nobody)
    win.Start(nobody)
    win.Complete()
    win.Wait()
