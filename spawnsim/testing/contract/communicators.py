"""Communicators: making, comparing, naming and leaving them."""

from __future__ import annotations

from typing import Any

import numpy as np

from spawnsim.testing.claims import claim, fails, needs, ring, same


def rank_and_size(MPI: Any, comm: Any) -> None:
    """Ranks count from zero, and are the same by method and attribute."""
    rank, size = comm.Get_rank(), comm.Get_size()
    same((comm.rank, comm.size), (rank, size))
    same(comm.allgather(rank), list(range(size)))


def comm_self(MPI: Any, comm: Any) -> None:
    """COMM_SELF has one rank on every rank."""
    same((MPI.COMM_SELF.Get_size(), MPI.COMM_SELF.Get_rank()), (1, 0))
    same(MPI.COMM_SELF.allgather(comm.Get_rank()), [comm.Get_rank()])


def comm_world(MPI: Any, comm: Any) -> None:
    """COMM_WORLD has all ranks, in the order of the communicator at hand."""
    same((MPI.COMM_WORLD.Get_size(), MPI.COMM_WORLD.Get_rank()), (comm.Get_size(), comm.Get_rank()))


def a_duplicate_keeps_messages_apart(MPI: Any, comm: Any) -> None:
    """A message sent on one communicator is never received on its duplicate."""
    rank, _, left, right = ring(comm)
    twin = comm.Dup()
    requests = [comm.isend("one", dest=right, tag=1), twin.isend("two", dest=right, tag=1)]
    same((twin.recv(source=left, tag=1), comm.recv(source=left, tag=1)), ("two", "one"))
    MPI.Request.waitall(requests)
    same((twin.Get_rank(), twin.Compare(comm)), (rank, MPI.CONGRUENT))
    twin.Free()


def duplicates_in_other_ways(MPI: Any, comm: Any) -> None:
    """Clone, Dup with info and Idup duplicate too."""
    for twin in (comm.Clone(), comm.Dup(MPI.Info.Create({"a": "b"})), comm.Dup_with_info(MPI.INFO_NULL)):
        same((twin.allreduce(1), twin.Compare(comm)), (comm.Get_size(), MPI.CONGRUENT))
        twin.Free()
    twin, request = comm.Idup()
    request.Wait()
    same(twin.allreduce(1), comm.Get_size())
    twin.Free()


def split_by_parity(MPI: Any, comm: Any) -> None:
    """Split makes one communicator per colour, in the order of ranks."""
    rank, size = comm.Get_rank(), comm.Get_size()
    part = comm.Split(rank % 2)
    same((part.Get_rank(), part.Get_size()), (rank // 2, len(range(rank % 2, size, 2))))
    same(part.allgather(rank), list(range(rank % 2, size, 2)))
    part.Free()


def split_with_keys(MPI: Any, comm: Any) -> None:
    """Keys order the new ranks; equal keys keep the old order."""
    rank, size = comm.Get_rank(), comm.Get_size()
    mirrored, same_keys = comm.Split(0, -rank), comm.Split(0, 7)
    same((mirrored.Get_rank(), same_keys.Get_rank()), (size - 1 - rank, rank))
    same(mirrored.allgather(rank), list(range(size))[::-1])
    mirrored.Free()
    same_keys.Free()


def split_without_a_colour(MPI: Any, comm: Any) -> None:
    """UNDEFINED as colour gives COMM_NULL."""
    rank, size = comm.Get_rank(), comm.Get_size()
    part = comm.Split(MPI.UNDEFINED if rank == 0 else 1)
    if rank == 0:
        claim(part == MPI.COMM_NULL, "who has no colour gets COMM_NULL")
    else:
        same(part.Get_size(), size - 1)
        part.Free()


def split_of_a_split(MPI: Any, comm: Any) -> None:
    """Communicators nest, and all of them work at once."""
    rank, size = comm.Get_rank(), comm.Get_size()
    half = comm.Split(rank * 2 // size)
    quarter = half.Split(half.Get_rank() % 2)
    inner = sum(quarter.allgather(rank))
    same(half.allreduce(inner if quarter.Get_rank() == 0 else 0), half.allreduce(rank))
    quarter.Free()
    half.Free()


def split_by_shared_memory(MPI: Any, comm: Any) -> None:
    """Split_type groups ranks that share memory; each is in one group."""
    part = comm.Split_type(MPI.COMM_TYPE_SHARED)
    claim(1 <= part.Get_size() <= comm.Get_size(), "a part is not empty, and no larger than the whole")
    same(comm.allreduce(1 if part.Get_rank() == 0 else 0) <= comm.Get_size(), True)
    part.Free()


def create_from_a_group(MPI: Any, comm: Any) -> None:
    """Create gives members their communicator and the others COMM_NULL."""
    rank, size = comm.Get_rank(), comm.Get_size()
    group = comm.Get_group()
    chosen = list(range(0, size, 2))[::-1]
    part = comm.Create(group.Incl(chosen))
    if rank % 2:
        claim(part == MPI.COMM_NULL, "who is not in the group gets COMM_NULL")
    else:
        same(part.allgather(rank), chosen)
        part.Free()


@needs(ranks=2)
def create_group_asks_members_only(MPI: Any, comm: Any) -> None:
    """Create_group is called by members of the group alone."""
    rank, size = comm.Get_rank(), comm.Get_size()
    chosen = list(range(1, size))
    if rank in chosen:
        part = comm.Create_group(comm.Get_group().Incl(chosen), tag=5)
        same(part.allgather(rank), chosen)
        part.Free()
    comm.Barrier()


def comparisons(MPI: Any, comm: Any) -> None:
    """Identical, congruent, similar and unequal communicators."""
    size = comm.Get_size()
    twin, mirrored, alone = comm.Dup(), comm.Split(0, -comm.Get_rank()), comm.Split(comm.Get_rank())
    same((comm.Compare(comm), comm.Compare(twin)), (MPI.IDENT, MPI.CONGRUENT))
    same(comm.Compare(mirrored), MPI.SIMILAR if size > 1 else MPI.CONGRUENT)
    same(comm.Compare(alone), MPI.UNEQUAL if size > 1 else MPI.CONGRUENT)
    claim(comm == comm and comm != twin, "equality is identity")
    for other in (twin, mirrored, alone):
        other.Free()


def names(MPI: Any, comm: Any) -> None:
    """Names can be set, and are each rank's own view of the communicator."""
    comm.Set_name("contract")
    same((comm.Get_name(), comm.name), ("contract", "contract"))
    same(MPI.COMM_WORLD.Get_name(), "MPI_COMM_WORLD")


def a_freed_communicator_is_null(MPI: Any, comm: Any) -> None:
    """After Free the handle is COMM_NULL, false, and of no use."""
    twin = comm.Dup()
    claim(twin, "a live communicator is true")
    twin.Free()
    claim(twin == MPI.COMM_NULL and not twin, "a freed communicator is null")
    with fails(MPI, MPI.ERR_COMM):
        twin.Get_rank()


def attributes(MPI: Any, comm: Any) -> None:
    """Attributes are stored under keyvals, found again and deleted."""
    keyval = MPI.Comm.Create_keyval()
    same(comm.Get_attr(keyval), None)
    value = ["any object"]
    comm.Set_attr(keyval, value)
    claim(comm.Get_attr(keyval) is value, "the attribute is the object itself")
    comm.Delete_attr(keyval)
    same(comm.Get_attr(keyval), None)
    same(MPI.Comm.Free_keyval(keyval), MPI.KEYVAL_INVALID)


def attributes_of_duplicates(MPI: Any, comm: Any) -> None:
    """Dup copies what copy functions say, and Free calls delete functions."""
    log: list[Any] = []
    plain = MPI.Comm.Create_keyval()
    doubled = MPI.Comm.Create_keyval(lambda c, k, v: v * 2, lambda c, k, v: log.append(v))
    comm.Set_attr(plain, 1)
    comm.Set_attr(doubled, 21)
    twin = comm.Dup()
    same((twin.Get_attr(plain), twin.Get_attr(doubled)), (None, 42))
    twin.Free()
    same(log, [42])
    comm.Delete_attr(doubled)
    same(log, [42, 21])
    comm.Delete_attr(plain)


def predefined_attributes(MPI: Any, comm: Any) -> None:
    """TAG_UB is a number, WTIME_IS_GLOBAL a flag or None."""
    claim(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) >= 32767, "TAG_UB is at least 32767")
    claim(MPI.COMM_WORLD.Get_attr(MPI.WTIME_IS_GLOBAL) in (None, True, False, 0, 1), "a flag")


def error_handlers(MPI: Any, comm: Any) -> None:
    """The handler of a communicator can be read, replaced and called."""
    before = comm.Get_errhandler()
    seen: list[Any] = []
    handler = MPI.Comm.Create_errhandler(lambda c, code: seen.append(MPI.Get_error_class(code)))
    comm.Set_errhandler(handler)
    comm.Call_errhandler(MPI.ERR_OTHER)
    same(seen, [MPI.ERR_OTHER])
    comm.Set_errhandler(before)
    same(comm.Get_errhandler() == before, True)
    handler.Free()
    before.Free()


def infos_of_communicators(MPI: Any, comm: Any) -> None:
    """Hints can be set and read; unknown ones may be dropped."""
    info = MPI.Info.Create({"spawnsim_hint": "1"})
    comm.Set_info(info)
    found = comm.Get_info()
    claim(found.get("spawnsim_hint", "1") == "1", "a kept hint has its value")
    found.Free()
    info.Free()


def kinds(MPI: Any, comm: Any) -> None:
    """An intracommunicator says so, and has no topology."""
    same((comm.Is_inter(), comm.Is_intra(), comm.is_inter, comm.is_intra), (False, True, False, True))
    same((comm.Get_topology(), comm.is_topo), (MPI.UNDEFINED, False))
    claim(isinstance(comm, MPI.Intracomm) and isinstance(comm, MPI.Comm), "its classes say so too")


def collectives_on_parts_at_the_same_time(MPI: Any, comm: Any) -> None:
    """Parts do collectives of their own, different in number and kind."""
    rank, size = comm.Get_rank(), comm.Get_size()
    part = comm.Split(rank % 2)
    total = np.zeros(1, np.int64)
    for _ in range(3 if rank % 2 else 1):
        part.Allreduce(np.full(1, rank), total)
    same(int(total[0]), sum(range(rank % 2, size, 2)))
    part.Barrier()
    same(comm.allreduce(1), size)
    part.Free()


def disconnect(MPI: Any, comm: Any) -> None:
    """Disconnect ends a communicator like Free."""
    twin = comm.Dup()
    twin.Disconnect()
    claim(twin == MPI.COMM_NULL, "a disconnected communicator is null")


def groups_of_communicators(MPI: Any, comm: Any) -> None:
    """A communicator's group has its ranks."""
    group = comm.Get_group()
    same(
        (group.Get_size(), group.Get_rank(), comm.group.size),
        (comm.Get_size(), comm.Get_rank(), comm.Get_size()),
    )
    part = comm.Split(0, -comm.Get_rank())
    same(part.Get_group().Translate_ranks(None, group), list(range(comm.Get_size()))[::-1])
    part.Free()
    group.Free()
