"""Python objects, from rank to rank and in collective calls."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from contract.cases import claim, close, poll, refused, same


def objects_go_round_a_ring(MPI, comm, rank, left, right):
    """Each rank receives what its left neighbour has sent."""
    request = comm.isend({"from": rank}, dest=right, tag=11)
    same(comm.recv(source=left, tag=11), {"from": left})
    request.wait()


def objects_of_many_kinds(MPI, comm, left, right):
    """Objects arrive equal and of their own type, None and empty ones included."""
    empty: list[Any] = [(), [], {}, None, ""]
    for sent in (*empty, True, 7, 2.5, 1j, "häh", b"bytes", {"a": [1, (2,)]}, {1, 2}, range(3), ...):
        found = comm.sendrecv(sent, dest=right, source=left)
        same((type(found), found), (type(sent), sent))


def arrays_as_objects(MPI, comm, rank, left, right):
    """Arrays of all dtypes and shapes travel as objects, with their dtype."""
    for dtype in ("f8", "i4", "?", "c16", "U3", ">f4", "M8[s]", "i4,f8"):
        found = comm.sendrecv(np.full((2, 3), rank).astype(dtype), dest=right, source=left)
        same((found.dtype, found.shape), (np.dtype(dtype), (2, 3)))
        same(found, np.full((2, 3), left).astype(dtype))


def a_received_object_is_the_receivers_own(MPI, comm, rank):
    """Changing an object after isend, or the received one, changes nobody else's."""
    sent = [rank, [rank]]
    request = comm.isend(sent, dest=rank)
    # isend pickles within the call, so what happens to the object later must not travel.
    sent[1].append("later")
    found = comm.recv(source=rank)
    request.wait()
    same(found, [rank, [rank]])
    found[1].append("mine")
    same(sent, [rank, [rank, "later"]])


def the_status_tells_who_and_what(MPI, comm, rank, left, right):
    """A status has the source, the tag and the size in bytes."""
    status = MPI.Status()
    request = comm.isend("x" * 100, dest=right, tag=rank + 5)
    comm.recv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG, status=status)
    request.wait()
    same((status.Get_source(), status.Get_tag(), status.Get_error()), (left, left + 5, MPI.SUCCESS))
    same((status.source, status.tag), (left, left + 5))
    claim(status.Get_count(MPI.BYTE) >= 100, "the status counts the bytes of the object")


def any_source_finds_all(MPI, comm, rank, size):
    """Rank 0 receives one object of each other rank, from whomever it comes."""
    if rank:
        comm.send(rank * rank, dest=0, tag=rank)
        return
    status, found = MPI.Status(), {}
    for _ in range(size - 1):
        value = comm.recv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG, status=status)
        found[status.source] = (status.tag, value)
    same(found, {other: (other, other * other) for other in range(1, size)})


def tags_choose_and_keep_the_order(MPI, comm, left, right):
    """Messages are taken by tag, whatever the order of sending; those of one tag, and with any tag, in that order."""
    requests = [comm.isend(f"tag {tag}", dest=right, tag=tag) for tag in (3, 1, 2)]
    same([comm.recv(source=left, tag=tag) for tag in (1, 2, 3)], ["tag 1", "tag 2", "tag 3"])
    requests += [comm.isend(i, dest=right, tag=4) for i in range(20)]
    same([comm.recv(source=left, tag=4) for _ in range(20)], list(range(20)))
    requests += [comm.isend(tag, dest=right, tag=tag) for tag in (5, 3, 9)]
    same([comm.recv(source=left) for _ in range(3)], [5, 3, 9])
    MPI.Request.waitall(requests)


def a_rank_sends_to_itself(MPI, comm, rank):
    """A rank is its own peer like any other, and its messages keep their order."""
    request = comm.irecv(source=rank, tag=2)
    comm.send(("self", rank), dest=rank, tag=2)
    same(request.wait(), ("self", rank))
    sending = [comm.isend(i, dest=rank, tag=i % 2) for i in range(6)]
    same([comm.recv(source=rank, tag=1) for _ in range(3)], [1, 3, 5])
    same([comm.recv(source=rank, tag=0) for _ in range(3)], [0, 2, 4])
    MPI.Request.waitall(sending)


def sendrecv_of_objects(MPI, comm, rank, left, right):
    """Sendrecv sends one way and receives from the other, with tags of its own for each, also with oneself."""
    status = MPI.Status()
    found = comm.sendrecv(rank, dest=right, sendtag=6, source=left, recvtag=6, status=status)
    same((found, status.source, status.tag), (left, left, 6))
    same(comm.sendrecv([rank], dest=rank, source=rank), [rank])


def irecv_returns_its_object(MPI, comm, rank, left, right):
    """Wait returns it, also into bytes of the program; test gives (False, None) until it is there, then (True, it)."""
    request, status = comm.irecv(source=left, tag=3), MPI.Status()
    comm.isend(rank, dest=right, tag=3).wait()
    same((request.wait(status), status.source, status.tag), (left, left, 3))
    request = comm.irecv(bytearray(1 << 12), source=left)
    comm.isend(list(range(rank, rank + 100)), dest=right).wait()
    same(request.wait(), list(range(left, left + 100)))
    request = comm.irecv(source=left, tag=3)
    sending = comm.isend({"n": rank}, dest=right, tag=3)
    same(poll(lambda: (done := request.test())[0] and done), (True, {"n": left}))
    sending.wait()


def objects_to_and_from_nowhere(MPI, comm):
    """PROC_NULL swallows what is sent and answers None at once."""
    status = MPI.Status()
    comm.send("lost", dest=MPI.PROC_NULL)
    comm.ssend("lost", dest=MPI.PROC_NULL)
    comm.isend("lost", dest=MPI.PROC_NULL).wait()
    same(comm.recv(source=MPI.PROC_NULL, status=status), None)
    same((status.source, status.tag, status.Get_count(MPI.BYTE)), (MPI.PROC_NULL, MPI.ANY_TAG, 0))
    same(comm.irecv(source=MPI.PROC_NULL).wait(), None)


def large_objects(MPI, comm, rank, left, right):
    """Objects of megabytes arrive whole."""
    sent = np.arange(300_000, dtype=np.float64) + rank
    found = comm.sendrecv(sent, dest=right, source=left)
    same(found, np.arange(300_000, dtype=np.float64) + left)


def waitall_of_objects(MPI, comm, rank, size):
    """Waitall returns objects of receives, in the order of the requests, and None for sends."""
    receiving = [comm.irecv(source=other, tag=rank) for other in range(size)]
    sending = [comm.isend((rank, other), dest=other, tag=other) for other in range(size)]
    statuses = [MPI.Status() for _ in range(size)]
    same(MPI.Request.waitall(receiving, statuses), [(other, rank) for other in range(size)])
    same([status.source for status in statuses], list(range(size)))
    same(MPI.Request.waitall(sending), [None] * size)


def some_or_one_of_the_objects(MPI, comm, rank, size):
    """Waitany returns one index and object at a time, waitsome all that are done, testall all or none."""

    def exchange() -> tuple[list[Any], list[Any]]:
        return (
            [comm.irecv(source=other, tag=1) for other in range(size)],
            [comm.isend(rank, dest=other, tag=1) for other in range(size)],
        )

    receiving, sending = exchange()
    same(dict(MPI.Request.waitany(receiving) for _ in range(size)), {other: other for other in range(size)})
    same(MPI.Request.waitany(receiving)[0], MPI.UNDEFINED)
    MPI.Request.waitall(sending)
    receiving, sending = exchange()
    found: dict[int, int] = {}
    while (done := MPI.Request.waitsome(receiving))[0] is not None:
        found.update(zip(*done, strict=True))
    same(found, {other: other for other in range(size)})
    MPI.Request.waitall(sending)
    receiving, sending = exchange()
    same(poll(lambda: MPI.Request.testall(receiving)[1]), list(range(size)))
    MPI.Request.waitall(sending)


def an_object_that_cannot_be_pickled(MPI, comm, rank):
    """Pickling fails in the sender's call; the communicator stays usable."""
    refused((pickle.PicklingError, AttributeError, TypeError), comm.isend, lambda: None, dest=rank)
    same(comm.sendrecv("fine", dest=rank, source=rank), "fine")


def objects_and_buffers_do_not_mix_up(MPI, comm, rank, left, right):
    """An object and a buffer under different tags reach their own receives."""
    target = np.empty(3)
    requests = [
        comm.isend("object", dest=right, tag=1),
        comm.Isend(np.full(3, float(rank)), dest=right, tag=2),
    ]
    comm.Recv(target, source=left, tag=2)
    same(comm.recv(source=left, tag=1), "object")
    same(target, np.full(3, float(left)))
    requests[0].wait()
    requests[1].Wait()


def bcast_from_every_root(MPI, comm, rank, size):
    """All receive the root's object, of any kind and size; what others pass is ignored. Each has a copy of its own."""
    for root in range(size):
        found = comm.bcast({"root": root, "list": [1, 2]} if rank == root else "ignored", root=root)
        same(found, {"root": root, "list": [1, 2]})
    nothing: list[Any] = [None, [], False, ""]
    for sent in nothing:
        same(comm.bcast(sent if rank == 0 else 1), sent)
    same(comm.bcast(np.arange(200_000) if rank == 0 else None), np.arange(200_000))


def gather_to_every_root(MPI, comm, rank, size):
    """The root gets all objects by rank, the others None."""
    for root in range(size):
        found = comm.gather([rank] * rank, root=root)
        same(found, [[other] * other for other in range(size)] if rank == root else None)


def scatter_from_every_root(MPI, comm, rank, size):
    """Each rank gets its object of the root's list, or of any other sequence."""
    for root in range(size):
        sent = [f"for {other}" for other in range(size)] if rank == root else None
        same(comm.scatter(sent, root=root), f"for {rank}")
    same(comm.scatter(tuple(range(size)) if rank == 0 else None), rank)


def scatter_of_a_wrong_number(MPI, comm):
    """A list that does not hold one object per rank is refused (tried on one rank, where nobody waits)."""
    refused(ValueError, MPI.COMM_SELF.scatter, [1, 2])
    refused(ValueError, MPI.COMM_SELF.alltoall, [])


def allgather_and_alltoall(MPI, comm, rank, size):
    """Everybody gets all objects by rank; object j of rank i becomes object i of rank j."""
    same(comm.allgather((rank, "x" * rank)), [(other, "x" * other) for other in range(size)])
    same(comm.alltoall([(rank, other) for other in range(size)]), [(other, rank) for other in range(size)])


def reduce_to_every_root(MPI, comm, rank, size):
    """The root gets the sum, the others None."""
    for root in range(size):
        same(comm.reduce(rank + 1, root=root), size * (size + 1) // 2 if rank == root else None)


def allreduce_with_every_operation(MPI, comm, rank, size):
    """Predefined operations act on Python numbers."""
    first_odd = min(1, size - 1)
    same(comm.allreduce(rank, op=MPI.MAX), size - 1)
    same(comm.allreduce(rank, op=MPI.MIN), 0)
    same(comm.allreduce(2, op=MPI.PROD), 2**size)
    same(comm.allreduce(rank > 0, op=MPI.LOR), size > 1)
    same(comm.allreduce(rank > 0, op=MPI.LAND), False)
    same(comm.allreduce(True, op=MPI.LXOR), size % 2 == 1)
    same(comm.allreduce(1 << rank, op=MPI.BOR), (1 << size) - 1)
    same(comm.allreduce(rank | 8, op=MPI.BAND), 8 | (0 if size > 1 else rank))
    same(comm.allreduce(7, op=MPI.BXOR), 7 if size % 2 else 0)
    same(comm.allreduce((rank % 2, rank), op=MPI.MAXLOC), (first_odd, first_odd))
    same(comm.allreduce((rank % 2, rank), op=MPI.MINLOC), (0, 0))


def reductions_with_functions(MPI, comm, rank, size):
    """Any function of two objects is an operation, applied in the order of ranks."""
    text = "".join(chr(ord("a") + other) for other in range(size))
    same(comm.allreduce(chr(ord("a") + rank), op=lambda x, y: x + y), text)
    same(comm.allreduce({rank}, op=lambda x, y: x | y), set(range(size)))
    found = comm.reduce([rank], op=lambda x, y: x + y, root=size - 1)
    same(found, list(range(size)) if rank == size - 1 else None)


def reductions_keep_the_order_of_ranks(MPI, comm, rank, size):
    """Sums of lists are concatenations in the order of ranks, in reduce, allreduce, scan and exscan."""
    same(comm.allreduce([rank]), list(range(size)))
    same(comm.scan([rank]), list(range(rank + 1)))
    same(comm.exscan([rank]), list(range(rank)) if rank else None)


def reductions_of_arrays_and_floats(MPI, comm, rank, size):
    """Arrays are objects with an addition of their own; all ranks get the same sum of floats, to the last bit."""
    same(comm.allreduce(np.array([1, rank])), [size, size * (size - 1) // 2])
    total = comm.allreduce(1.0 / (rank + 3))
    claim(len(set(comm.allgather(total))) == 1, "all ranks have the same bits")
    close(total, sum(1.0 / (other + 3) for other in range(size)))


def scan_and_exscan(MPI, comm, rank):
    """Scan includes the rank itself, exscan does not, and rank 0 of exscan gets None."""
    same(comm.scan(rank + 1), (rank + 1) * (rank + 2) // 2)
    same(comm.exscan(rank + 1), rank * (rank + 1) // 2 if rank else None)
    same(comm.scan(rank, op=MPI.MAX), rank)
    same(comm.scan(-rank, op=MPI.MIN), -rank)


def many_collectives_in_a_row(MPI, comm, rank, size):
    """Results of successive calls are not mixed up; both spellings of a barrier return None."""
    for i in range(30):
        root = i % size
        same(comm.bcast(i if rank == root else None, root=root), i)
        same(comm.allreduce(i), i * size)
        same(comm.gather(rank + i, root=root), [i + r for r in range(size)] if rank == root else None)
        same((comm.barrier(), comm.Barrier()), (None, None))


def operations_of_the_program_on_objects(MPI, comm, rank, size, own):
    """An Op made of a Python function works on objects: its third argument is then None."""
    op = own(MPI.Op.Create(lambda x, y, datatype: (x[0] + y[0], datatype), commute=True))
    found = comm.allreduce((rank, "start"), op=op)
    same(found[0], size * (size - 1) // 2)
    if size > 1:
        same(found[1], None)


def the_roots_own_object_is_a_copy(MPI, comm, rank, size):
    """What a collective returns is never the object that was passed, on no rank: all get copies."""
    own = [rank, [rank]]
    several = [[rank, other] for other in range(size)]
    found = [
        comm.bcast(own, 0), comm.scatter(several, 0), comm.allgather(own)[rank], comm.alltoall(several)[rank],
        comm.sendrecv(own, rank, source=rank),
    ]  # fmt: skip
    gathered = comm.gather(own, 0)
    found += [] if gathered is None else gathered
    passed = [own, own[1], *several]
    # In one process it would be cheap to pass the object itself; a program tried so would share state that real ranks
    # do not.
    claim(not any(each is old for each in found for old in passed), "what comes is a copy")
    claim(found[0][1] is not own[1], "also inside")
    received = comm.bcast([rank], 0)
    received.append(rank)
    comm.Barrier()
    same(received, [0, rank])
