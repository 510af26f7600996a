"""Requests that are started again and again."""

from __future__ import annotations

from typing import Any

import numpy as np

from spawnsim.testing.claims import claim, needs, ring, same


def persistent_messages(MPI: Any, comm: Any) -> None:
    """A pair of persistent requests carries what the buffer holds at each start."""
    rank, _, left, right = ring(comm)
    source, target = np.zeros(3), np.zeros(3)
    sending, receiving = comm.Send_init(source, dest=right, tag=3), comm.Recv_init(target, source=left, tag=3)
    for round_ in range(4):
        source[:] = 10 * round_ + rank
        receiving.Start()
        sending.Start()
        receiving.Wait()
        sending.Wait()
        same(target, np.full(3, 10.0 * round_ + left))
    sending.Free()
    receiving.Free()
    claim(not sending and not receiving, "freed requests are null")


def startall(MPI: Any, comm: Any) -> None:
    """Startall starts a list of persistent requests, Waitall completes them and keeps them."""
    rank, _, left, right = ring(comm)
    source, target = np.full(2, rank), np.zeros(2, np.int64)
    requests = [comm.Recv_init(target, source=left), comm.Send_init(source, dest=right)]
    for _ in range(2):
        target[:] = -1
        MPI.Prequest.Startall(requests)
        MPI.Request.Waitall(requests)
        same(target, np.full(2, left))
        claim(all(requests), "persistent requests outlive their completion")
    for request in requests:
        request.Free()


def an_inactive_request_is_done(MPI: Any, comm: Any) -> None:
    """A persistent request that was not started completes at once with an empty status."""
    _, _, left, _ = ring(comm)
    request, status = comm.Recv_init(np.zeros(1), source=left), MPI.Status()
    same((request.Test(status), request.Wait(status)), (True, True))
    same((status.source, status.tag, status.Get_count(MPI.BYTE)), (MPI.ANY_SOURCE, MPI.ANY_TAG, 0))
    request.Free()


def persistent_send_modes(MPI: Any, comm: Any) -> None:
    """All send modes have a persistent form."""
    rank, _, left, right = ring(comm)
    MPI.Attach_buffer(bytearray(1 << 12))
    source, target = np.full(1, rank), np.full(1, -1)
    for name in ("Send_init", "Bsend_init", "Ssend_init", "Rsend_init"):
        receiving = comm.Recv_init(target, source=left, tag=2)
        receiving.Start()
        comm.Barrier()
        sending = getattr(comm, name)(source, dest=right, tag=2)
        sending.Start()
        MPI.Request.Waitall([sending, receiving])
        same(int(target[0]), left)
        sending.Free()
        receiving.Free()
    MPI.Detach_buffer()


def persistent_and_plain_ends_meet(MPI: Any, comm: Any) -> None:
    """A persistent send is received by a plain receive, and the other way round."""
    rank, _, left, right = ring(comm)
    source, target = np.full(1, rank), np.full(1, -1)
    sending = comm.Send_init(source, dest=right)
    sending.Start()
    comm.Recv(target, source=left)
    sending.Wait()
    same(int(target[0]), left)
    receiving = comm.Recv_init(target, source=right)
    receiving.Start()
    comm.Isend(source, dest=left).Wait()
    receiving.Wait()
    same(int(target[0]), right)
    sending.Free()
    receiving.Free()


def persistent_collectives(MPI: Any, comm: Any) -> None:
    """Persistent Bcast, Allreduce and Barrier do at each start what the plain calls do."""
    rank, size = comm.Get_rank(), comm.Get_size()
    value, total = np.zeros(2), np.zeros(2)
    requests = [
        comm.Bcast_init(value, root=0),
        comm.Allreduce_init(value, total, MPI.SUM),
        comm.Barrier_init(),
    ]
    for round_ in range(3):
        value[:] = round_ if rank == 0 else -1
        for request in requests:
            request.Start()
            request.Wait()
        same((value.tolist(), total.tolist()), ([round_] * 2, [float(round_ * size)] * 2))
    for request in requests:
        request.Free()


def persistent_gathers(MPI: Any, comm: Any) -> None:
    """Persistent Gather, Scatter, Allgather and Alltoall."""
    rank, size = comm.Get_rank(), comm.Get_size()
    mine, one, row = np.full(1, rank), np.full(1, -1), np.full(size, -1)
    table = np.arange(size) * 10 + rank
    crossed = np.zeros(size, np.int64)
    requests = [comm.Allgather_init(mine, row), comm.Alltoall_init(table, crossed)]
    requests += [
        comm.Gather_init(mine, row if rank == 0 else None),
        comm.Scatter_init(row if rank == 0 else None, one),
    ]
    for request in requests:
        request.Start()
        request.Wait()
        request.Free()
    same((row.tolist(), int(one[0])), (list(range(size)), rank))
    same(crossed, rank * 10 + np.arange(size))


def persistent_reductions(MPI: Any, comm: Any) -> None:
    """Persistent Reduce, Scan, Exscan and Reduce_scatter_block."""
    rank, size = comm.Get_rank(), comm.Get_size()
    mine, total, upto, before = np.full(1, rank + 1), np.zeros(1, int), np.zeros(1, int), np.zeros(1, int)
    whole, part = np.full(size, rank), np.zeros(1, np.int64)
    requests = [
        comm.Reduce_init(mine, total, MPI.SUM, 0),
        comm.Scan_init(mine, upto),
        comm.Exscan_init(mine, before),
    ]
    requests.append(comm.Reduce_scatter_block_init(whole, part))
    for request in requests:
        request.Start()
        request.Wait()
        request.Free()
    same(int(total[0]), size * (size + 1) // 2 if rank == 0 else 0)
    same((int(upto[0]), int(before[0])), ((rank + 1) * (rank + 2) // 2, rank * (rank + 1) // 2))
    same(int(part[0]), size * (size - 1) // 2)


@needs(ranks=2)
def partitioned_messages(MPI: Any, comm: Any) -> None:
    """A partitioned message is complete when all of its parts were marked ready."""
    rank, parts = comm.Get_rank(), 4
    if rank == 0:
        source = np.arange(8.0)
        request = comm.Psend_init(source, parts, 1, 0)
        request.Start()
        for part in (2, 0, 3, 1):
            request.Pready(part)
        request.Wait()
        request.Free()
    elif rank == 1:
        target = np.zeros(8)
        request = comm.Precv_init(target, parts, 0, 0)
        request.Start()
        request.Wait()
        same(target, np.arange(8.0))
        request.Free()
