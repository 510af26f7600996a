"""Communicators between two groups."""

from __future__ import annotations

from typing import Any

import numpy as np

from spawnsim.testing.claims import claim, needs, same


def bridged(comm: Any) -> tuple[Any, Any, int]:
    """Return (local communicator, intercommunicator, side): even ranks on side 0, odd ones on side 1."""
    side = comm.Get_rank() % 2
    local = comm.Split(side)
    return local, local.Create_intercomm(0, comm, 1 - side, tag=9), side


def sides(comm: Any, side: int) -> list[int]:
    """Return the ranks of one side."""
    return list(range(side, comm.Get_size(), 2))


@needs(ranks=2)
def sizes_and_groups(MPI: Any, comm: Any) -> None:
    """Local and remote sizes, ranks and groups."""
    local, bridge, side = bridged(comm)
    same((bridge.Get_size(), bridge.Get_remote_size()), (len(sides(comm, side)), len(sides(comm, 1 - side))))
    same((bridge.Get_rank(), bridge.Is_inter(), bridge.is_intra), (local.Get_rank(), True, False))
    whole = comm.Get_group()
    remote = bridge.Get_remote_group()
    same(remote.Translate_ranks(list(range(remote.Get_size())), whole), sides(comm, 1 - side))
    same((bridge.remote_size, bridge.remote_group.Get_size()), (bridge.Get_remote_size(),) * 2)
    claim(isinstance(bridge, MPI.Intercomm), "its class says so")
    bridge.Free()
    local.Free()


@needs(ranks=2)
def messages_across(MPI: Any, comm: Any) -> None:
    """Ranks of messages are those of the other side."""
    local, bridge, side = bridged(comm)
    partner = min(bridge.Get_rank(), bridge.Get_remote_size() - 1)
    if bridge.Get_rank() < bridge.Get_remote_size():
        status, target = MPI.Status(), np.zeros(1, np.int64)
        bridge.Sendrecv(np.full(1, comm.Get_rank()), partner, 1, target, partner, 1, status)
        same((int(target[0]), status.source), (sides(comm, 1 - side)[partner], partner))
        same(bridge.sendrecv("text", dest=partner, source=partner), "text")
    bridge.Free()
    local.Free()


@needs(ranks=2)
def bcast_across(MPI: Any, comm: Any) -> None:
    """One rank of one side is ROOT, its fellows PROC_NULL, the other side names it."""
    local, bridge, side = bridged(comm)
    root = (MPI.ROOT if bridge.Get_rank() == 0 else MPI.PROC_NULL) if side == 0 else 0
    buf = np.full(2, 7 if side == 0 else -1)
    bridge.Bcast(buf, root=root)
    same(buf, np.full(2, 7))
    found = bridge.bcast("object" if root == MPI.ROOT else None, root=root)
    same(found, "object" if side == 1 else None)
    bridge.Free()
    local.Free()


@needs(ranks=2)
def gather_across(MPI: Any, comm: Any) -> None:
    """The ROOT of one side gathers from all of the other, and scatters back."""
    local, bridge, side = bridged(comm)
    if side == 1:
        bridge.Gather(np.full(1, comm.Get_rank()), None, root=0)
        target = np.zeros(1, np.int64)
        bridge.Scatter(None, target, root=0)
        same(int(target[0]), comm.Get_rank())
    else:
        root = MPI.ROOT if bridge.Get_rank() == 0 else MPI.PROC_NULL
        table = np.zeros(bridge.Get_remote_size(), np.int64)
        bridge.Gather(None, table if root == MPI.ROOT else None, root=root)
        if root == MPI.ROOT:
            same(table, sides(comm, 1))
        bridge.Scatter(table if root == MPI.ROOT else None, None, root=root)
    bridge.Free()
    local.Free()


@needs(ranks=2)
def allgather_across(MPI: Any, comm: Any) -> None:
    """Each side gets the blocks of the other."""
    local, bridge, side = bridged(comm)
    table = np.zeros(bridge.Get_remote_size(), np.int64)
    bridge.Allgather(np.full(1, comm.Get_rank()), table)
    same(table, sides(comm, 1 - side))
    same(bridge.allgather(comm.Get_rank()), sides(comm, 1 - side))
    bridge.Free()
    local.Free()


@needs(ranks=2)
def allreduce_across(MPI: Any, comm: Any) -> None:
    """Each side gets the sum of the other."""
    local, bridge, side = bridged(comm)
    total = np.zeros(1, np.int64)
    bridge.Allreduce(np.full(1, comm.Get_rank()), total)
    same(int(total[0]), sum(sides(comm, 1 - side)))
    same(bridge.allreduce(comm.Get_rank()), sum(sides(comm, 1 - side)))
    bridge.Free()
    local.Free()


@needs(ranks=2)
def alltoall_across(MPI: Any, comm: Any) -> None:
    """Blocks are exchanged with the other side."""
    local, bridge, side = bridged(comm)
    mine, remote = comm.Get_rank(), bridge.Get_remote_size()
    target = np.zeros(remote, np.int64)
    bridge.Alltoall(np.arange(remote) + 100 * mine, target)
    same(target, [100 * other + bridge.Get_rank() for other in sides(comm, 1 - side)])
    bridge.Free()
    local.Free()


@needs(ranks=2)
def reduce_across(MPI: Any, comm: Any) -> None:
    """The ROOT of one side gets the sum of the other."""
    local, bridge, side = bridged(comm)
    total = np.full(1, -1)
    if side == 1:
        bridge.Reduce(np.full(1, comm.Get_rank()), None, root=0)
    else:
        root = MPI.ROOT if bridge.Get_rank() == 0 else MPI.PROC_NULL
        bridge.Reduce(None, total if root == MPI.ROOT else None, root=root)
        same(int(total[0]), sum(sides(comm, 1)) if root == MPI.ROOT else -1)
    bridge.Free()
    local.Free()


@needs(ranks=2)
def barrier_across(MPI: Any, comm: Any) -> None:
    """A barrier holds both sides."""
    local, bridge, _ = bridged(comm)
    bridge.Barrier()
    bridge.Ibarrier().Wait()
    bridge.Free()
    local.Free()


@needs(ranks=2)
def merge(MPI: Any, comm: Any) -> None:
    """Merging gives one intracommunicator, the high side last."""
    local, bridge, side = bridged(comm)
    for high in (0, 1):
        whole = bridge.Merge(high=side == high)
        order = sides(comm, 1 - high) + sides(comm, high)
        same(whole.allgather(comm.Get_rank()), order)
        same(whole.Is_intra(), True)
        whole.Free()
    bridge.Free()
    local.Free()


@needs(ranks=2)
def duplicates_and_splits(MPI: Any, comm: Any) -> None:
    """An intercommunicator can be duplicated and split."""
    local, bridge, side = bridged(comm)
    twin = bridge.Dup()
    same((twin.allgather(side), twin.Compare(bridge)), ([1 - side] * bridge.Get_remote_size(), MPI.CONGRUENT))
    part = bridge.Split(0, 0)
    same(part.Get_remote_size(), bridge.Get_remote_size())
    for one in (part, twin, bridge, local):
        one.Free()
