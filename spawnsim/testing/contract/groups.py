"""Groups and their algebra."""

from __future__ import annotations

from typing import Any

from spawnsim.testing.claims import claim, fails, needs, same


def members(group: Any, whole: Any) -> list[int]:
    """Return a group's members as ranks of another group."""
    return list(group.Translate_ranks(list(range(group.Get_size())), whole))


def inclusion(MPI: Any, comm: Any) -> None:
    """Incl takes ranks in the order given; ranges are first, last, stride."""
    group, size = comm.Get_group(), comm.Get_size()
    same(members(group.Incl(list(range(size))[::-1]), group), list(range(size))[::-1])
    same(members(group.Range_incl([(0, size - 1, 2)]), group), list(range(0, size, 2)))
    same(members(group.Range_incl([(size - 1, 0, -1)]), group), list(range(size))[::-1])


def exclusion(MPI: Any, comm: Any) -> None:
    """Excl leaves ranks out and keeps the order of the others."""
    group, size = comm.Get_group(), comm.Get_size()
    same(members(group.Excl([0]), group), list(range(1, size)))
    same(members(group.Range_excl([(0, size - 1, 2)]), group), list(range(1, size, 2)))
    same(group.Excl(list(range(size))).Get_size(), 0)


def unions_intersections_differences(MPI: Any, comm: Any) -> None:
    """The algebra keeps the order of the first group."""
    group, size = comm.Get_group(), comm.Get_size()
    even, low = (
        group.Range_incl([(0, size - 1, 2)]),
        group.Range_incl([(0, size // 2, 1)] if size > 1 else [(0, 0, 1)]),
    )
    evens, lows = members(even, group), members(low, group)
    same(members(MPI.Group.Union(even, low), group), evens + [r for r in lows if r not in evens])
    same(members(MPI.Group.Intersection(low, even), group), [r for r in lows if r in evens])
    same(members(MPI.Group.Difference(low, even), group), [r for r in lows if r not in evens])


def comparisons(MPI: Any, comm: Any) -> None:
    """Groups are identical, similar or unequal."""
    group, size = comm.Get_group(), comm.Get_size()
    mirrored = group.Incl(list(range(size))[::-1])
    same(group.Compare(group.Dup()), MPI.IDENT)
    same(group.Compare(mirrored), MPI.SIMILAR if size > 1 else MPI.IDENT)
    same(group.Compare(MPI.GROUP_EMPTY), MPI.UNEQUAL)


def empty_groups(MPI: Any, comm: Any) -> None:
    """The empty group has no members and no rank for anyone."""
    same((MPI.GROUP_EMPTY.Get_size(), MPI.GROUP_EMPTY.Get_rank()), (0, MPI.UNDEFINED))
    claim(comm.Get_group().Incl([]) == MPI.GROUP_EMPTY, "a group of nobody is the empty group")


@needs(ranks=2)
def rank_of_a_stranger(MPI: Any, comm: Any) -> None:
    """Who is not a member has rank UNDEFINED, and is translated to it."""
    group = comm.Get_group()
    others = group.Excl([0])
    same(others.Get_rank(), MPI.UNDEFINED if comm.Get_rank() == 0 else comm.Get_rank() - 1)
    same(group.Translate_ranks([0, 1], others), [MPI.UNDEFINED, 0])


def nowhere_is_translated_to_nowhere(MPI: Any, comm: Any) -> None:
    """PROC_NULL stays PROC_NULL in every group."""
    group = comm.Get_group()
    same(group.Translate_ranks([MPI.PROC_NULL, 0], group), [MPI.PROC_NULL, 0])


def ranks_outside(MPI: Any, comm: Any) -> None:
    """A rank that does not exist is ERR_RANK."""
    group, size = comm.Get_group(), comm.Get_size()
    for call in (group.Incl, group.Excl):
        with fails(MPI, MPI.ERR_RANK):
            call([size])


def null_groups(MPI: Any, comm: Any) -> None:
    """A freed group is null and of no use."""
    group = comm.Get_group()
    group.Free()
    claim(group == MPI.GROUP_NULL and not group, "a freed group is null")
    with fails(MPI, MPI.ERR_GROUP):
        group.Get_size()
