"""What the members of a communicator share, and what one member holds of it.

This room knows members, numbering, mailboxes and meetings. It must not know MPI's calls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG, PROC_NULL, TAG_UB_VALUE
from spawnsim.comm.failures import ERR_COMM, ERR_RANK, ERR_ROOT, ERR_TAG, CallError, Revoked
from spawnsim.comm.handles import Attributed
from spawnsim.comm.info import Info
from spawnsim.errors import UsageError
from spawnsim.virtual.departures import WaitingForCollective
from spawnsim.virtual.engine.completion import Completion
from spawnsim.virtual.engine.matching import Mailbox
from spawnsim.virtual.engine.world import Rank, World
from spawnsim.virtual.meeting import Call, Meeting
from spawnsim.virtual.waiting import Dead, await_one

GIVEN_UP = (
    "the others have given this rank up, because it was silent for too long (paused, or it did not come to their "
    "recovery), and go on without it: it must leave"
)


@dataclass(eq=False)
class Context:
    """One communicator. `sides` are the world ranks of its group, or of its two groups."""

    world: World
    sides: tuple[tuple[int, ...], ...]
    topology: Any = None
    ancestors: frozenset[int] = frozenset()  # their numbers: a recovery of any of them ends this one, too
    number: int = field(init=False)
    meetings: dict[int, Meeting] = field(default_factory=dict)
    calls: dict[int, int] = field(default_factory=dict)  # collectives called so far, by world rank
    mailboxes: dict[int, Mailbox] = field(default_factory=dict)  # by world rank
    notes: dict[Any, Any] = field(default_factory=dict)  # agreements of the members, made in collectives
    revoked_s: float | None = None  # inf: only for members that were given up
    lives: dict[int, int] = field(default_factory=dict)  # of members that had begun again when they joined
    origin: Context | None = None  # whose recoveries have led to this one; None: itself
    regrouping: Any = None  # the recovery under way
    successor: Context | None = None  # what the last recovery has made of it
    inner: bool = False  # not of the program's making: a window's
    name: str = ""  # if MPI or a member has given it one

    def __post_init__(self) -> None:
        self.number = self.world.next_context()
        self.world.open_contexts.add(self)
        if self.world.ledger is not None:
            self.world.ledger.made(self)
        self.everyone = tuple(rank for side in self.sides for rank in side)
        self.places = [{rank: place for place, rank in enumerate(side)} for side in self.sides]

    @property
    def label(self) -> str:
        """The name, or the number: the same on all members."""
        return self.name or f"communicator {self.number}"

    def derive(self, *sides: tuple[int, ...], topology: Any = None, inner: bool = False) -> Context:
        """Return a new context that is made of this one, and ends with it."""
        new = Context(
            self.world, sides, topology, self.ancestors | {self.number}, lives=self.lives, inner=inner
        )
        new.revoked_s = self.revoked_s  # by somebody who did not wait for the others
        return new

    def within(self, other: Context) -> bool:
        """Whether this is `other`, or was made of it."""
        return self is other or other.number in self.ancestors

    def why_revoked(self, rank: int, by_s: float) -> str:
        """Return why calls of a world rank end in `Revoked` by a time; "" if they do not."""
        if self.revoked_s is not None and self.world.ranks[rank].given_up:
            return f"was revoked: {GIVEN_UP}"
        if not self.takes(rank):
            return "is of an earlier life of this rank, which has begun again since: recover() to join the others"
        if self.revoked_s is not None and self.revoked_s <= by_s:
            return "was revoked: call recover(), shrink it, or use another communicator"
        return ""

    def succeed(self, lives: Mapping[int, int]) -> Context:
        """Return a context of these lives, by world rank, in the order of the first communicator."""
        origin = self.origin or self
        sides = tuple(tuple(rank for rank in side if rank in lives) for side in origin.sides)
        again = {rank: life for rank, life in lives.items() if life}
        return Context(self.world, sides, ancestors=self.ancestors, lives=again, origin=origin)

    def life(self, rank: int) -> int:
        """Return which life of a world rank is a member."""
        return self.lives.get(rank, 0)

    def takes(self, rank: int) -> bool:
        """Whether the present life of a world rank is a member."""
        return self.life(rank) == self.world.ranks[rank].life

    def is_dead(self, rank: int, dead: Dead) -> bool:
        """Whether the life of a world rank that is a member is among the dead."""
        return (rank, self.life(rank)) in dead

    def death_known_s(self, rank: int) -> float:
        """Return when the others know of the death of a member, by world rank; inf: never."""
        return self.world.failed.get((rank, self.life(rank)), math.inf)

    def shut_out(self, rank: int) -> None:
        """Let the calls of a world rank end in `Revoked`; for the other members nothing changes."""
        if self.revoked_s is None and any(rank in places for places in self.places):
            self.revoked_s = math.inf

    def mailbox(self, rank: int) -> Mailbox:
        """Return the mailbox of a world rank."""
        mailbox = self.mailboxes.get(rank)
        if mailbox is None:
            mailbox = self.mailboxes[rank] = Mailbox(self.world.kernel, rank, self.world.cards.get(rank))
            if self.inner and self.world.links is not None:
                self.world.links.make_reliable(mailbox)
        return mailbox

    def meet(self, rank: int, name: str, call: Call) -> WaitingForCollective:
        """Let a world rank arrive at its next collective."""
        number = self.calls.get(rank, 0)
        self.calls[rank] = number + 1
        meeting = self.meetings.get(number)
        if meeting is None:
            meeting = self.meetings[number] = Meeting(
                self.world, name, self.everyone, number, len(self.sides[0]), context=self
            )
        me = self.everyone.index(rank) if len(self.sides) > 1 else self.places[0][rank]
        if (
            len(self.sides) > 1
        ):  # algorithms of two groups are not modelled: timed as an exchange of all with all
            part = call.part.copy() if call.lent else call.part  # the groups do not wait for each other
            call = replace(
                call, timing="allgather", part=part, lent=False, nbytes=total(call.nbytes), sizes="each"
            )
        meeting.join(me, call)
        if meeting.here == len(self.everyone):
            del self.meetings[number]
        return WaitingForCollective(meeting, me)


class Member(Attributed):
    """One rank's handle of a communicator: the ground that the rooms of `Comm` stand on."""

    __slots__ = (
        "_context",
        "_errhandler",
        "_info",
        "_mailbox",
        "_me",
        "_name",
        "_own",
        "_peers",
        "_rank",
        "_side",
        "_world",
    )

    _context: Context
    _world: World
    _rank: Rank
    _me: int
    _peers: Sequence[int]
    _mailbox: Mailbox
    _name: str
    _side: int
    _own: Any
    _errhandler: Any
    _info: Info | None

    @classmethod
    def enter(cls, context: Context, rank: int, name: str = "") -> Self:
        """Return the handle of a world rank that belongs to `context`."""
        self = cls.__new__(cls)
        self._identity = self._context = context
        self._world, self._rank = context.world, context.world.ranks[rank]
        self._side = next(side for side, places in enumerate(context.places) if rank in places)
        self._me = context.places[self._side][rank]
        self._peers = context.sides[-1 - self._side] if len(context.sides) > 1 else context.sides[0]
        self._mailbox = context.mailbox(rank)
        self._attributes, self._name, self._errhandler, self._info = {}, name, None, None
        self._own = None
        if name:
            context.name = name
        return self

    def __getattr__(self, name: str) -> Any:
        """Refuse what a null communicator has not."""
        if name in Member.__slots__:
            raise CallError(ERR_COMM, "the communicator is null, or was freed before")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def _label(self) -> str:
        return self._name or self._context.label

    @property
    def _members(self) -> tuple[int, ...]:
        """The world ranks of this rank's own group."""
        return self._context.sides[self._side]

    def _exist(self) -> None:
        if self._identity is None:
            raise CallError(ERR_COMM, "the communicator is null, or was freed before")

    def _need(self) -> None:
        """Refuse one that is null or freed, or was revoked."""
        self._exist()
        if self._context.revoked_s is not None:
            why = self._why_revoked()
            if why:
                raise Revoked(f"{self._world.kernel.current.name}: {self._label} {why}")

    def _why_revoked(self) -> str:
        return self._context.why_revoked(self._rank.id, self._world.kernel.current.clock)

    def _check_peer(self, peer: int, tag: int) -> None:
        """Refuse a rank or tag out of range; `peer` is not PROC_NULL."""
        if (
            self._identity is None
            or self._context.revoked_s is not None
            or not 0 <= peer < len(self._peers)
            or not 0 <= tag <= TAG_UB_VALUE
        ):
            self._refuse_peer(peer, tag)

    def _refuse_peer(self, peer: int, tag: int) -> None:
        """Raise what is wrong, if it is wrong already."""
        self._need()
        if not 0 <= peer < len(self._peers):
            raise CallError(
                ERR_RANK, f"rank {peer} is not in {self._label}, whose ranks are 0 to {len(self._peers) - 1}"
            )
        if not 0 <= tag <= TAG_UB_VALUE:
            raise CallError(ERR_TAG, f"tag {tag} is outside 0 to {TAG_UB_VALUE}")

    def _check_source(self, source: int, tag: int) -> None:
        if (
            source not in (ANY_SOURCE, PROC_NULL)
            or tag != ANY_TAG
            or self._identity is None
            or self._context.revoked_s is not None
        ):
            self._check_peer(0 if source in (ANY_SOURCE, PROC_NULL) else source, 0 if tag == ANY_TAG else tag)

    def _check_root(self, root: int) -> None:
        self._need()
        if not 0 <= root < len(self._peers):
            raise CallError(
                ERR_ROOT, f"root {root} is not in {self._label}, whose ranks are 0 to {len(self._peers) - 1}"
            )

    def _join(self, call: Call) -> tuple[Completion, WaitingForCollective]:
        """Arrive at a collective without waiting for its end."""
        self._need()
        rank, task = self._rank, self._world.kernel.current
        if task.rank != rank.id:
            raise UsageError(
                f"{call.describe()}: {task.name} has got hold of rank {self._me}'s handle of {self._label}; each rank "
                "must use its own"
            )
        rank.trace.note((task.clock, 2, call.root, int(total(call.nbytes)), len(call.name)))
        rank.trace.cover(call.part)
        waiting = self._context.meet(rank.id, self._label, call)
        completion = waiting.meeting.gone[waiting.me]
        assert completion is not None
        return completion, waiting

    def _meet(self, call: Call) -> Any:
        """Take part in a collective and return this rank's outcome of it."""
        completion, waiting = self._join(call)
        try:
            await_one(self._world, completion, waiting)
        except BaseException:
            waiting.meeting.keep(waiting.me)
            raise
        return waiting.meeting.outcome(waiting.me)


def total(nbytes: Any) -> int:
    """Return the bytes that a rank brings to a collective; see `Call`."""
    if isinstance(nbytes, tuple):  # a neighbour exchange: dests, and the size for each
        return sum(nbytes[1])
    return nbytes if isinstance(nbytes, int) else int(nbytes.sum())
