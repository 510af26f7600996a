"""Communicators: making, comparing, naming and leaving them; groups and their algebra; intercommunicators."""

from __future__ import annotations

from typing import Any

import numpy as np

from contract.cases import claim, fails, needs, same


def rank_and_size(MPI, comm, rank, size):
    """Ranks count from zero, and are the same by method and attribute."""
    same((comm.rank, comm.size), (rank, size))
    same(comm.allgather(rank), list(range(size)))


def comm_self(MPI, comm, rank):
    """COMM_SELF has one rank on every rank."""
    same((MPI.COMM_SELF.Get_size(), MPI.COMM_SELF.Get_rank()), (1, 0))
    same(MPI.COMM_SELF.allgather(rank), [rank])


def comm_world(MPI, comm, rank, size):
    """COMM_WORLD has all ranks, in the order of the communicator at hand."""
    same((MPI.COMM_WORLD.Get_size(), MPI.COMM_WORLD.Get_rank()), (size, rank))


def a_duplicate_keeps_messages_apart(MPI, comm, rank, left, right, own):
    """A message sent on one communicator is never received on its duplicate."""
    twin = own(comm.Dup())
    requests = [comm.isend("one", dest=right, tag=1), twin.isend("two", dest=right, tag=1)]
    # Received in the other order: contexts keep them apart, not the order of arrival.
    same((twin.recv(source=left, tag=1), comm.recv(source=left, tag=1)), ("two", "one"))
    MPI.Request.waitall(requests)
    same((twin.Get_rank(), twin.Compare(comm)), (rank, MPI.CONGRUENT))


def duplicates_in_other_ways(MPI, comm, size, own):
    """Clone, Dup with info and Idup duplicate too."""
    twin, request = comm.Idup()
    request.Wait()
    for each in (
        twin,
        comm.Clone(),
        comm.Dup(MPI.Info.Create({"a": "b"})),
        comm.Dup_with_info(MPI.INFO_NULL),
    ):
        same((own(each).allreduce(1), each.Compare(comm)), (size, MPI.CONGRUENT))


def split_by_colour_and_key(MPI, comm, rank, size, own):
    """Split makes one communicator per colour, in the order of keys, then of ranks."""
    part = own(comm.Split(rank % 2))
    same((part.Get_rank(), part.Get_size()), (rank // 2, len(range(rank % 2, size, 2))))
    same(part.allgather(rank), list(range(rank % 2, size, 2)))
    mirrored, same_keys = own(comm.Split(0, -rank)), own(comm.Split(0, 7))
    same((mirrored.Get_rank(), same_keys.Get_rank()), (size - 1 - rank, rank))
    same(mirrored.allgather(rank), list(range(size))[::-1])


def split_without_a_colour(MPI, comm, rank, size):
    """UNDEFINED as colour gives COMM_NULL."""
    part = comm.Split(MPI.UNDEFINED if rank == 0 else 1)
    if rank == 0:
        claim(part == MPI.COMM_NULL, "a rank without a colour gets COMM_NULL")
    else:
        same(part.Get_size(), size - 1)
        part.Free()


def split_of_a_split(MPI, comm, rank, size, own):
    """Communicators nest, and all of them work at once."""
    half = own(comm.Split(rank * 2 // size))
    quarter = own(half.Split(half.Get_rank() % 2))
    inner = sum(quarter.allgather(rank))
    same(half.allreduce(inner if quarter.Get_rank() == 0 else 0), half.allreduce(rank))


def split_by_shared_memory(MPI, comm, own):
    """Split_type groups ranks that share memory; each is in one group."""
    part = own(comm.Split_type(MPI.COMM_TYPE_SHARED))
    claim(1 <= part.Get_size() <= comm.Get_size(), "a part is not empty, and no larger than the whole")
    same(comm.allreduce(1 if part.Get_rank() == 0 else 0) <= comm.Get_size(), True)


def create_from_a_group(MPI, comm, rank, size):
    """Create gives members their communicator and the others COMM_NULL."""
    group = comm.Get_group()
    chosen = list(range(0, size, 2))[::-1]
    part = comm.Create(group.Incl(chosen))
    if rank % 2:
        claim(part == MPI.COMM_NULL, "a rank outside of the group gets COMM_NULL")
    else:
        same(part.allgather(rank), chosen)
        part.Free()


@needs(ranks=2)
def create_group_asks_members_only(MPI, comm, rank, size):
    """Create_group is called by members of the group alone."""
    chosen = list(range(1, size))
    if rank in chosen:
        part = comm.Create_group(comm.Get_group().Incl(chosen), tag=5)
        same(part.allgather(rank), chosen)
        part.Free()
    # Rank 0 has been here all the time: a call collective over all ranks would have hung.
    comm.Barrier()


def comparisons(MPI, comm, rank, size, own):
    """Identical, congruent, similar and unequal communicators."""
    twin, mirrored, alone = own(comm.Dup()), own(comm.Split(0, -rank)), own(comm.Split(rank))
    same((comm.Compare(comm), comm.Compare(twin)), (MPI.IDENT, MPI.CONGRUENT))
    same(comm.Compare(mirrored), MPI.SIMILAR if size > 1 else MPI.CONGRUENT)
    same(comm.Compare(alone), MPI.UNEQUAL if size > 1 else MPI.CONGRUENT)
    claim(comm == comm and comm != twin, "equality is identity")


def names(MPI, comm):
    """Names can be set, and are each rank's own view of the communicator."""
    comm.Set_name("contract")
    same((comm.Get_name(), comm.name), ("contract", "contract"))
    same(MPI.COMM_WORLD.Get_name(), "MPI_COMM_WORLD")


def a_freed_communicator_is_null(MPI, comm):
    """After Free the handle is COMM_NULL, false, and of no use."""
    twin = comm.Dup()
    claim(twin, "a live communicator is true")
    twin.Free()
    claim(twin == MPI.COMM_NULL and not twin, "a freed communicator is null")
    fails(MPI, MPI.ERR_COMM, twin.Get_rank)


def disconnect(MPI, comm):
    """Disconnect ends a communicator like Free."""
    twin = comm.Dup()
    twin.Disconnect()
    claim(twin == MPI.COMM_NULL, "a disconnected communicator is null")


def attributes(MPI, comm):
    """Attributes are stored under keyvals, found again and deleted."""
    keyval = MPI.Comm.Create_keyval()
    same(comm.Get_attr(keyval), None)
    value = ["any object"]
    comm.Set_attr(keyval, value)
    claim(comm.Get_attr(keyval) is value, "the attribute is the object itself")
    comm.Delete_attr(keyval)
    same(comm.Get_attr(keyval), None)
    same(MPI.Comm.Free_keyval(keyval), MPI.KEYVAL_INVALID)


def attributes_of_duplicates(MPI, comm):
    """Dup copies what copy functions say, and Free calls delete functions."""
    log: list[Any] = []
    plain = MPI.Comm.Create_keyval()
    doubled = MPI.Comm.Create_keyval(lambda c, k, v: v * 2, lambda c, k, v: log.append(v))
    comm.Set_attr(plain, 1)
    comm.Set_attr(doubled, 21)
    twin = comm.Dup()
    # Without a copy function MPI copies no attribute.
    same((twin.Get_attr(plain), twin.Get_attr(doubled)), (None, 42))
    twin.Free()
    same(log, [42])
    comm.Delete_attr(doubled)
    same(log, [42, 21])
    comm.Delete_attr(plain)


def predefined_attributes(MPI, comm):
    """TAG_UB is a number, WTIME_IS_GLOBAL a flag or None."""
    claim(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) >= 32767, "TAG_UB is at least 32767")
    claim(MPI.COMM_WORLD.Get_attr(MPI.WTIME_IS_GLOBAL) in (None, True, False, 0, 1), "a flag")


def error_handlers(MPI, comm, own):
    """The handler of a communicator can be read, replaced and called; to return is to raise in Python."""
    before = own(comm.Get_errhandler())
    comm.Set_errhandler(MPI.ERRORS_ARE_FATAL)
    same(own(comm.Get_errhandler()) == MPI.ERRORS_ARE_FATAL, True)
    comm.Set_errhandler(before)
    comm.Call_errhandler(MPI.ERR_OTHER)
    same(comm.Get_errhandler() == before, True)


def infos_of_communicators(MPI, comm, own):
    """Hints can be set and read; unknown ones may be dropped."""
    info = own(MPI.Info.Create({"spawnsim_hint": "1"}))
    comm.Set_info(info)
    found = own(comm.Get_info())
    claim(found.get("spawnsim_hint", "1") == "1", "a kept hint has its value")


def kinds(MPI, comm):
    """An intracommunicator says so, and has no topology."""
    same((comm.Is_inter(), comm.Is_intra(), comm.is_inter, comm.is_intra), (False, True, False, True))
    same((comm.Get_topology(), comm.is_topo), (MPI.UNDEFINED, False))
    claim(isinstance(comm, MPI.Intracomm) and isinstance(comm, MPI.Comm), "its classes say so too")


def collectives_on_parts_at_the_same_time(MPI, comm, rank, size, own):
    """Parts do collectives of their own, different in number and kind."""
    part = own(comm.Split(rank % 2))
    total = np.zeros(1, np.int64)
    # Different numbers of calls: matched across parts, the odd ranks' second one would never complete.
    for _ in range(3 if rank % 2 else 1):
        part.Allreduce(np.full(1, rank), total)
    same(int(total[0]), sum(range(rank % 2, size, 2)))
    part.Barrier()
    same(comm.allreduce(1), size)


def groups_of_communicators(MPI, comm, rank, size, own):
    """A communicator's group has its ranks."""
    group = own(comm.Get_group())
    same((group.Get_size(), group.Get_rank(), comm.group.size), (size, rank, size))
    part = own(comm.Split(0, -rank))
    same(part.Get_group().Translate_ranks(None, group), list(range(size))[::-1])


def ranks_in(group: Any, whole: Any) -> list[int]:
    """Return a group's members as ranks of another group."""
    return list(group.Translate_ranks(list(range(group.Get_size())), whole))


def inclusion_and_exclusion_of_ranks(MPI, comm, size):
    """Incl takes ranks in the order given, Excl keeps the order of the others; ranges are first, last, stride."""
    group, everyone = comm.Get_group(), list(range(size))
    for found, wanted in (
        (group.Incl(everyone[::-1]), everyone[::-1]),
        (group.Range_incl([(0, size - 1, 2)]), everyone[::2]),
        (group.Range_incl([(size - 1, 0, -1)]), everyone[::-1]),
        (group.Range_incl([(0.0, size - 0.5, 2)]), everyone[::2]),  # of programs that divide by /
        (group.Excl([0]), everyone[1:]),
        (group.Range_excl([(0, size - 1, 2)]), everyone[1::2]),
        (group.Excl(everyone), []),
    ):
        same(ranks_in(found, group), wanted)


def unions_intersections_differences_of_groups(MPI, comm, size):
    """The algebra keeps the order of the first group."""
    group = comm.Get_group()
    even, low = group.Range_incl([(0, size - 1, 2)]), group.Range_incl([(0, size // 2 if size > 1 else 0, 1)])
    evens, lows = ranks_in(even, group), ranks_in(low, group)
    same(ranks_in(MPI.Group.Union(even, low), group), evens + [r for r in lows if r not in evens])
    same(ranks_in(MPI.Group.Intersection(low, even), group), [r for r in lows if r in evens])
    same(ranks_in(MPI.Group.Difference(low, even), group), [r for r in lows if r not in evens])


def comparisons_of_groups(MPI, comm, size):
    """Groups are identical, similar or unequal; the empty one has no members and no rank for anyone."""
    group = comm.Get_group()
    mirrored = group.Incl(list(range(size))[::-1])
    same(group.Compare(group.Dup()), MPI.IDENT)
    same(group.Compare(mirrored), MPI.SIMILAR if size > 1 else MPI.IDENT)
    same(group.Compare(MPI.GROUP_EMPTY), MPI.UNEQUAL)
    same((MPI.GROUP_EMPTY.Get_size(), MPI.GROUP_EMPTY.Get_rank()), (0, MPI.UNDEFINED))
    claim(group.Incl([]) == MPI.GROUP_EMPTY, "a group of nobody is the empty group")


@needs(ranks=2)
def rank_of_a_stranger_in_a_group(MPI, comm, rank):
    """A rank that is not a member is UNDEFINED, and is translated to it; PROC_NULL stays PROC_NULL."""
    group = comm.Get_group()
    others = group.Excl([0])
    same(others.Get_rank(), MPI.UNDEFINED if rank == 0 else rank - 1)
    same(group.Translate_ranks([0, 1], others), [MPI.UNDEFINED, 0])
    same(group.Translate_ranks([MPI.PROC_NULL, 0], group), [MPI.PROC_NULL, 0])


def mistakes_with_groups(MPI, comm, size):
    """A rank that does not exist is ERR_RANK; a freed group is null and of no use."""
    group = comm.Get_group()
    for call in (group.Incl, group.Excl):
        fails(MPI, MPI.ERR_RANK, call, [size])
    group.Free()
    claim(group == MPI.GROUP_NULL and not group, "a freed group is null")
    fails(MPI, MPI.ERR_GROUP, group.Get_size)


def bridged(comm: Any, own: Any) -> tuple[Any, int]:
    """Return (intercommunicator, side): even ranks on side 0, odd ones on side 1."""
    side = comm.Get_rank() % 2
    return own(own(comm.Split(side)).Create_intercomm(0, comm, 1 - side, tag=9)), side


def sides(comm: Any, side: int) -> list[int]:
    """Return the ranks of one side."""
    return list(range(side, comm.Get_size(), 2))


@needs(ranks=2)
def sizes_and_groups_of_intercomms(MPI, comm, own):
    """Local and remote sizes, ranks and groups."""
    bridge, side = bridged(comm, own)
    same((bridge.Get_size(), bridge.Get_remote_size()), (len(sides(comm, side)), len(sides(comm, 1 - side))))
    same((bridge.Get_rank(), bridge.Is_inter(), bridge.is_intra), (comm.Get_rank() // 2, True, False))
    whole = comm.Get_group()
    remote = bridge.Get_remote_group()
    same(remote.Translate_ranks(list(range(remote.Get_size())), whole), sides(comm, 1 - side))
    same((bridge.remote_size, bridge.remote_group.Get_size()), (bridge.Get_remote_size(),) * 2)
    claim(isinstance(bridge, MPI.Intercomm), "its class says so")


@needs(ranks=2)
def messages_across(MPI, comm, own):
    """Ranks of messages are those of the other side."""
    bridge, side = bridged(comm, own)
    partner = min(bridge.Get_rank(), bridge.Get_remote_size() - 1)
    if bridge.Get_rank() < bridge.Get_remote_size():
        status, target = MPI.Status(), np.zeros(1, np.int64)
        bridge.Sendrecv(np.full(1, comm.Get_rank()), partner, 1, target, partner, 1, status)
        same((int(target[0]), status.source), (sides(comm, 1 - side)[partner], partner))
        same(bridge.sendrecv("text", dest=partner, source=partner), "text")


@needs(ranks=2)
def barrier_across(MPI, comm, own):
    """A barrier holds both sides."""
    bridge, _ = bridged(comm, own)
    bridge.Barrier()
    bridge.Ibarrier().Wait()


@needs(ranks=2)
def merge_of_intercomms(MPI, comm, rank, own):
    """Merging gives one intracommunicator, the high side last."""
    bridge, side = bridged(comm, own)
    for high in (0, 1):
        whole = own(bridge.Merge(high=side == high))
        same((whole.allgather(rank), whole.Is_intra()), (sides(comm, 1 - high) + sides(comm, high), True))


@needs(ranks=2)
def duplicates_and_splits_of_intercomms(MPI, comm, own):
    """An intercommunicator can be duplicated and split."""
    bridge, side = bridged(comm, own)
    twin = own(bridge.Dup())
    same((twin.Get_remote_size(), twin.Compare(bridge)), (len(sides(comm, 1 - side)), MPI.CONGRUENT))
    same(own(bridge.Split(0, 0)).Get_remote_size(), bridge.Get_remote_size())
