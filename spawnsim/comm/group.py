"""Groups: ordered sets of processes, and their algebra.

A group is a tuple of process numbers together with the caller's process number; nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, Self

from spawnsim.comm.constants import IDENT, PROC_NULL, SIMILAR, UNDEFINED, UNEQUAL
from spawnsim.comm.failures import ERR_ARG, ERR_GROUP, ERR_RANK, CallError, lacking
from spawnsim.comm.handles import Owned, each_integer, integer, reduced, same_kind


@lacking
class Group(Owned):
    """An ordered set of processes, with mpi4py's method names; `Group.of(members, me)` creates one.

    `members[rank]` is the process number of a rank (any number that all ranks of a run agree on). `me` is the caller's
    process number, whether it is a member or not.
    """

    __slots__ = ("_places", "me", "members")
    kind = "group"
    members: tuple[int, ...]
    me: int | None
    _places: dict[int, int] | None

    def __new__(cls, group: Group | None = None) -> Self:
        self = super().__new__(cls)
        self._identity = self._places = self.me = None
        self.members = ()
        if group is not None:
            same_kind(Group, group)
            self._copy(group)
            self.members, self.me = group.members, group.me
        return self

    @classmethod
    def of(cls, members: Iterable[int], me: int | None = None) -> Self:
        """Return the group of these processes, in this order. Groups created from the same tuple are equal."""
        self = cls()
        self.members = members if isinstance(members, tuple) else tuple(members)
        self._identity, self.me = self.members, me
        return self._made() if self.members else self  # the empty group is predefined

    def live(self) -> tuple[int, ...]:
        """Return the members; a null or freed group is an error."""
        if self._identity is None:
            raise CallError(ERR_GROUP, "the group is null or was freed")
        return self.members

    @property
    def places(self) -> dict[int, int]:
        """Process number → rank."""
        if self._places is None:
            self._places = {process: rank for rank, process in enumerate(self.live())}
        return self._places

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self._identity is None or self._identity is GROUP_EMPTY._identity:
            return reduced(self, globals(), "GROUP_EMPTY" if self else "GROUP_NULL")
        raise ValueError("cannot serialize a Group: its ranks mean something on this process only")

    def Get_size(self) -> int:
        return len(self.live())

    def Get_rank(self) -> int:
        self.live()
        return UNDEFINED if self.me is None else self.places.get(self.me, UNDEFINED)

    size = property(Get_size)
    rank = property(Get_rank)

    def Translate_ranks(self, ranks: Sequence[int] | None = None, group: Group | None = None) -> list[int]:
        """Return the ranks that these ranks (default: all) have in another group, or `UNDEFINED`."""
        members = self.live()
        wanted = range(len(members)) if ranks is None else self._ranks(ranks, null=True)
        places = (self if group is None else group).places
        return [PROC_NULL if r == PROC_NULL else places.get(members[r], UNDEFINED) for r in wanted]

    def _ranks(self, ranks: Iterable[int], null: bool = False) -> list[int]:
        size, wanted = len(self.live()), each_integer(ranks)
        for rank in wanted:
            if not (0 <= rank < size or (null and rank == PROC_NULL)):
                raise CallError(ERR_RANK, f"rank {rank} in a group of {size}")
        return wanted

    def Compare(self, group: Group) -> int:
        if self.live() == group.live():
            return IDENT
        same = len(self.members) == len(group.members) and self.places.keys() == group.places.keys()
        return SIMILAR if same else UNEQUAL

    def Dup(self) -> Self:
        return self._new(self.live())

    def _new(self, members: Iterable[int]) -> Self:
        return type(self).of(members, self.me)

    @classmethod
    def Union(cls, group1: Group, group2: Group) -> Self:
        """Return all members of the first group, then the members of the second that are not in the first."""
        first, places = group1.live(), group1.places
        return cls.of((*first, *(p for p in group2.live() if p not in places)), _me(group1, group2))

    @classmethod
    def Intersection(cls, group1: Group, group2: Group) -> Self:
        """Return the members of the first group that are in the second."""
        return cls.of((p for p in group1.live() if p in group2.places), _me(group1, group2))

    Intersect = Intersection

    @classmethod
    def Difference(cls, group1: Group, group2: Group) -> Self:
        """Return the members of the first group that are not in the second."""
        return cls.of((p for p in group1.live() if p not in group2.places), _me(group1, group2))

    def Incl(self, ranks: Sequence[int]) -> Self:
        wanted = self._ranks(ranks)
        if len(set(wanted)) < len(wanted):
            raise CallError(ERR_RANK, f"a rank is named twice in {wanted}")
        return self._new(self.members[rank] for rank in wanted)

    def Excl(self, ranks: Sequence[int]) -> Self:
        """Return all but these ranks."""
        out = set(self._ranks(ranks))
        if len(out) < len(ranks):
            raise CallError(ERR_RANK, f"a rank is named twice in {list(ranks)}")
        return self._new(process for rank, process in enumerate(self.members) if rank not in out)

    def Range_incl(self, ranks: Sequence[tuple[int, int, int]]) -> Self:
        """Return the ranks of (first, last, stride) triplets."""
        return self.Incl(self._range(ranks))

    def Range_excl(self, ranks: Sequence[tuple[int, int, int]]) -> Self:
        """Return all but the ranks of (first, last, stride) triplets."""
        return self.Excl(self._range(ranks))

    def _range(self, triplets: Sequence[tuple[int, int, int]]) -> list[int]:
        size = len(self.live())
        found: list[int] = []
        for triplet in triplets:
            first, last, stride = map(integer, triplet)  # mpi4py truncates floats here, but not in Incl
            if stride == 0:
                raise CallError(ERR_ARG, f"stride 0 in the range ({first}, {last}, {stride})")
            ranks = range(first, last + (1 if stride > 0 else -1), stride)
            if any(not 0 <= rank < size for rank in ranks):
                raise CallError(ERR_ARG, f"the range ({first}, {last}, {stride}) leaves a group of {size}")
            found.extend(ranks)
        return found

    def Free(self) -> None:
        self.live()
        self._freed()


def _me(*groups: Group) -> int | None:
    return next((group.me for group in groups if group.me is not None), None)


GROUP_NULL: Final = Group()
GROUP_EMPTY: Final = Group.of(())
