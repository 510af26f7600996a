"""Collective calls on Python objects."""

from __future__ import annotations

from typing import Any

import numpy as np

from spawnsim.testing.claims import claim, close, refused, same


def bcast_from_every_root(MPI: Any, comm: Any) -> None:
    """All receive the root's object; what others pass is ignored."""
    rank, size = comm.Get_rank(), comm.Get_size()
    for root in range(size):
        found = comm.bcast({"root": root, "list": [1, 2]} if rank == root else "ignored", root=root)
        same(found, {"root": root, "list": [1, 2]})


def bcast_of_nothing(MPI: Any, comm: Any) -> None:
    """None, empty containers and False are objects too."""
    nothing: list[Any] = [None, [], False, ""]
    for sent in nothing:
        same(comm.bcast(sent if comm.Get_rank() == 0 else 1), sent)


def bcast_objects_are_independent(MPI: Any, comm: Any) -> None:
    """Changing a received object changes nobody else's."""
    rank = comm.Get_rank()
    found = comm.bcast([0] if rank == 0 else None)
    found.append(rank)
    comm.Barrier()
    same(found, [0, rank])


def bcast_of_large_objects(MPI: Any, comm: Any) -> None:
    """Megabytes arrive whole at every rank."""
    found = comm.bcast(np.arange(200_000) if comm.Get_rank() == 0 else None)
    same(found, np.arange(200_000))


def gather_to_every_root(MPI: Any, comm: Any) -> None:
    """The root gets all objects by rank, the others None."""
    rank, size = comm.Get_rank(), comm.Get_size()
    for root in range(size):
        found = comm.gather([rank] * rank, root=root)
        same(found, [[other] * other for other in range(size)] if rank == root else None)


def scatter_from_every_root(MPI: Any, comm: Any) -> None:
    """Each rank gets its object of the root's list."""
    rank, size = comm.Get_rank(), comm.Get_size()
    for root in range(size):
        sent = [f"for {other}" for other in range(size)] if rank == root else None
        same(comm.scatter(sent, root=root), f"for {rank}")


def scatter_takes_any_sequence(MPI: Any, comm: Any) -> None:
    """The root's objects may be a tuple or an iterator of the right length."""
    rank, size = comm.Get_rank(), comm.Get_size()
    same(comm.scatter(tuple(range(size)) if rank == 0 else None), rank)


def scatter_of_a_wrong_number(MPI: Any, comm: Any) -> None:
    """A list that does not hold one object per rank is refused (tried on one rank, where nobody waits)."""
    with refused(ValueError):
        MPI.COMM_SELF.scatter([1, 2])
    with refused(ValueError):
        MPI.COMM_SELF.alltoall([])


def allgather(MPI: Any, comm: Any) -> None:
    """Everybody gets all objects by rank."""
    rank, size = comm.Get_rank(), comm.Get_size()
    same(comm.allgather((rank, "x" * rank)), [(other, "x" * other) for other in range(size)])


def alltoall(MPI: Any, comm: Any) -> None:
    """Object j of rank i becomes object i of rank j."""
    rank, size = comm.Get_rank(), comm.Get_size()
    same(comm.alltoall([(rank, other) for other in range(size)]), [(other, rank) for other in range(size)])


def reduce_to_every_root(MPI: Any, comm: Any) -> None:
    """The root gets the sum, the others None."""
    rank, size = comm.Get_rank(), comm.Get_size()
    for root in range(size):
        same(comm.reduce(rank + 1, root=root), size * (size + 1) // 2 if rank == root else None)


def allreduce_with_every_operation(MPI: Any, comm: Any) -> None:
    """Predefined operations act on Python numbers."""
    rank, size = comm.Get_rank(), comm.Get_size()
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


def reductions_with_functions(MPI: Any, comm: Any) -> None:
    """Any function of two objects is an operation, applied in the order of ranks."""
    rank, size = comm.Get_rank(), comm.Get_size()
    text = "".join(chr(ord("a") + other) for other in range(size))
    same(comm.allreduce(chr(ord("a") + rank), op=lambda x, y: x + y), text)
    same(comm.allreduce({rank}, op=lambda x, y: x | y), set(range(size)))
    found = comm.reduce([rank], op=lambda x, y: x + y, root=size - 1)
    same(found, list(range(size)) if rank == size - 1 else None)


def reductions_keep_the_order_of_ranks(MPI: Any, comm: Any) -> None:
    """Sums of lists are concatenations in the order of ranks, in reduce, allreduce, scan and exscan."""
    rank, size = comm.Get_rank(), comm.Get_size()
    same(comm.allreduce([rank]), list(range(size)))
    same(comm.scan([rank]), list(range(rank + 1)))
    same(comm.exscan([rank]), list(range(rank)) if rank else None)


def reductions_of_arrays(MPI: Any, comm: Any) -> None:
    """Arrays are objects with an addition of their own."""
    rank, size = comm.Get_rank(), comm.Get_size()
    same(comm.allreduce(np.array([1, rank])), [size, size * (size - 1) // 2])


def reductions_of_floats_agree(MPI: Any, comm: Any) -> None:
    """All ranks get the same sum of floats, to the last bit."""
    rank, size = comm.Get_rank(), comm.Get_size()
    total = comm.allreduce(1.0 / (rank + 3))
    claim(len(set(comm.allgather(total))) == 1, "all ranks have the same bits")
    close(total, sum(1.0 / (other + 3) for other in range(size)))


def scan_and_exscan(MPI: Any, comm: Any) -> None:
    """Scan includes the rank itself, exscan does not, and rank 0 of exscan gets None."""
    rank = comm.Get_rank()
    same(comm.scan(rank + 1), (rank + 1) * (rank + 2) // 2)
    same(comm.exscan(rank + 1), rank * (rank + 1) // 2 if rank else None)
    same(comm.scan(rank, op=MPI.MAX), rank)
    same(comm.scan(-rank, op=MPI.MIN), -rank)


def barriers(MPI: Any, comm: Any) -> None:
    """Both spellings wait for all and return None."""
    same((comm.barrier(), comm.Barrier()), (None, None))


def many_collectives_in_a_row(MPI: Any, comm: Any) -> None:
    """Results of successive calls are not mixed up."""
    rank, size = comm.Get_rank(), comm.Get_size()
    for i in range(30):
        root = i % size
        same(comm.bcast(i if rank == root else None, root=root), i)
        same(comm.allreduce(i), i * size)
        same(comm.gather(rank + i, root=root), [i + r for r in range(size)] if rank == root else None)


def operations_of_the_program_on_objects(MPI: Any, comm: Any) -> None:
    """An Op made of a Python function works on objects: its third argument is then None."""
    rank, size = comm.Get_rank(), comm.Get_size()
    op = MPI.Op.Create(lambda x, y, datatype: (x[0] + y[0], datatype), commute=True)
    found = comm.allreduce((rank, "start"), op=op)
    same(found[0], size * (size - 1) // 2)
    if size > 1:
        same(found[1], None)
    op.Free()


def the_roots_own_object_is_a_copy(MPI: Any, comm: Any) -> None:
    """What a collective returns is never the object that was passed, on no rank: all get copies."""
    rank, size = comm.Get_rank(), comm.Get_size()
    own = [rank, [rank]]
    several = [[rank, other] for other in range(size)]
    found = [
        comm.bcast(own, 0), comm.scatter(several, 0), comm.allgather(own)[rank], comm.alltoall(several)[rank],
        comm.sendrecv(own, rank, source=rank),
    ]  # fmt: skip
    gathered = comm.gather(own, 0)
    found += [] if gathered is None else gathered
    passed = [own, own[1], *several]
    claim(not any(each is old for each in found for old in passed), "what comes is a copy")
    claim(found[0][1] is not own[1], "also inside")
    received = comm.bcast([rank], 0)
    received.append(rank)
    comm.Barrier()
    same(received, [0, rank])
