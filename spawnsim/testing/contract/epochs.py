"""Access between matching epochs: Post and Wait on the side of the memory, Start and Complete on the other."""

from __future__ import annotations

from typing import Any

import numpy as np

from spawnsim.testing.claims import needs, poll, ring, same
from spawnsim.testing.contract.windows import exposed


def matching_epochs(MPI: Any, comm: Any) -> None:
    """Post and Wait expose to a group, Start and Complete access it."""
    rank, _, left, right = ring(comm)
    win, memory = exposed(MPI, comm)
    group = comm.Get_group()
    win.Post(group.Incl([left]))
    win.Start(group.Incl([right]))
    win.Put(np.full(4, float(rank)), right)
    win.Complete()
    win.Wait()
    same(memory, np.full(4, float(left)))
    win.Free()


@needs(ranks=2)
def matching_epochs_can_be_tested(MPI: Any, comm: Any) -> None:
    """Test ends an exposure like Wait, once all have completed their access."""
    rank = comm.Get_rank()
    win, memory = exposed(MPI, comm)
    group = comm.Get_group()
    win.Post(group.Incl([]))
    same(win.Test(), True)
    if rank == 0:
        win.Post(group.Incl([1]))
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
    win.Free()


def matching_epochs_follow_each_other(MPI: Any, comm: Any) -> None:
    """Each Start meets one Post, in order: no rank is an epoch ahead of its target."""
    rank, _, left, right = ring(comm)
    win, memory = exposed(MPI, comm)
    group = comm.Get_group()
    for step in range(5):
        win.Post(group.Incl([left]))
        win.Start(group.Incl([right]))
        win.Put(np.full(4, 10.0 * step + rank), right)
        win.Complete()
        win.Wait()
        same(memory, np.full(4, 10.0 * step + left))
    win.Free()


def many_origins_in_one_epoch(MPI: Any, comm: Any) -> None:
    """A target waits for all ranks of its group; an origin reads and adds between Start and Complete."""
    rank, size = comm.Get_rank(), comm.Get_size()
    win, memory = exposed(MPI, comm, value=0.0)
    group, found = comm.Get_group(), np.zeros(4)
    if rank == 0:
        memory[1] = 7.0
        win.Post(group.Excl([0]))
        win.Wait()
        same(memory[0], size * (size - 1) / 2)
    else:
        win.Start(group.Incl([0]))
        win.Accumulate(np.array([float(rank)]), 0)
        win.Get(found[1:2], 0, 1)
        win.Complete()
        same(found[1], 7.0)
    comm.Barrier()
    win.Free()


def epochs_of_nobody(MPI: Any, comm: Any) -> None:
    """Epochs with an empty group begin and end at once."""
    win, _ = exposed(MPI, comm)
    nobody = comm.Get_group().Incl([])
    win.Post(nobody)
    win.Start(nobody)
    win.Complete()
    win.Wait()
    win.Free()
