"""The shared state of a communicator (`Context`), and one member's handle of it (`Member`).

A context has the members, their numbering, their mailboxes and the collectives in progress. A member has the parts of
all calls between two ranks: sending one message and receiving one message, with or without a wait.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NoReturn, Self

from numpy import ndarray

from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG, PROC_NULL, TAG_UB_VALUE, of_mpi4py
from spawnsim.comm.failures import (
    ERR_COMM,
    ERR_RANK,
    ERR_ROOT,
    ERR_TAG,
    CallError,
    Revoked,
    Truncated,
    Unreadable,
)
from spawnsim.comm.handles import Info, Named, integer
from spawnsim.comm.status import Status
from spawnsim.errors import UsageError, WorldError
from spawnsim.phantoms import PhantomError
from spawnsim.virtual.digest import COLLECTIVE, RECEIVE, packed
from spawnsim.virtual.engine.completion import Message, Receive
from spawnsim.virtual.engine.matching import Mailbox
from spawnsim.virtual.engine.waiting import Waiting, await_one, check_alive
from spawnsim.virtual.engine.wire import Mode, Transfer, send
from spawnsim.virtual.engine.world import Rank, World
from spawnsim.virtual.mpi.instance import Call, CollectiveInstance, Departure
from spawnsim.virtual.mpi.payload import Room, check_type, loads, unpack, watched
from spawnsim.virtual.mpi.requests import Reception, Request, fill, request_for, request_over

GIVEN_UP = (
    "the other ranks have given this rank up, because it was silent for too long (paused, or it did not join their "
    "recovery), and continue without it: it must leave"
)


@dataclass(eq=False)
class Context:
    """The state that a communicator's members share. `groups`: the world ranks of its one or two groups."""

    world: World
    groups: tuple[tuple[int, ...], ...]
    topology: Any = None
    ancestors: frozenset[int] = frozenset()  # their numbers: a recovery of any of them ends this one, too
    number: int = 0  # 0: assign the next one
    instances: dict[int, CollectiveInstance] = field(default_factory=dict)
    calls: dict[int, int] = field(default_factory=dict)  # collectives called so far, by world rank
    mailboxes: dict[int, Mailbox] = field(default_factory=dict)  # by world rank
    notes: dict[Any, Any] = field(default_factory=dict)  # agreements of the members, made in collectives
    revoked_s: float | None = None  # inf: only for members that were given up
    # By world rank, of members that were restarted before they joined.
    incarnations: dict[int, int] = field(default_factory=dict)
    origin: Context | None = None  # the context whose recoveries led to this one; None: itself
    regrouping: Any = None  # the recovery in progress
    successor: Context | None = None  # the result of its last recovery
    inner: bool = False  # made by the library, not by the program: a window's
    lasting: bool = False  # the program need not free it: it belongs to a torch.distributed process group
    # By world rank, the last collective: each begins on a rank when the previous one has ended there. None: at once.
    queue: dict[int, Any] | None = None
    name: str = ""  # if MPI or a member has named it
    sums: str = ""  # the order of its sums, one of `comm.ops.ORDERS`; "": as its origin or the world
    # Members, by world rank, in the order of their deaths.
    _dead: list[int] = field(default_factory=list)
    _deaths_seen: int = 0  # number of the world's deaths examined so far

    def __post_init__(self) -> None:
        self.number = self.number or self.world.next_context()
        self.sums = self.sums or (self.origin or self.world).sums
        self.world.open_contexts.add(self)
        if self.world.resource_leaks is not None:
            self.world.resource_leaks.made(self)
        self.everyone = tuple(rank for side in self.groups for rank in side)
        self.places = [{rank: place for place, rank in enumerate(side)} for side in self.groups]

    @property
    def label(self) -> str:
        """The name, or the number: the same on all members."""
        return self.name or f"communicator {self.number}"

    def derive(self, *groups: tuple[int, ...], topology: Any = None, inner: bool = False) -> Context:
        """Return a new context that is derived from this one, and ends with it."""
        new = Context(
            self.world,
            groups,
            topology,
            self.ancestors | {self.number},
            incarnations=self.incarnations,
            inner=inner,
            sums=self.sums,
        )
        new.revoked_s = self.revoked_s  # by a member that did not wait for the other members
        return new

    def within(self, other: Context) -> bool:
        """Whether this is `other`, or was derived from it."""
        return self is other or other.number in self.ancestors

    def why_revoked(self, rank: int, by_s: float) -> str:
        """Return why calls of a world rank end in `Revoked` by a time; "" if they do not."""
        if self.revoked_s is not None and self.world.ranks[rank].evicted:
            return f"was revoked: {GIVEN_UP}"
        if not self.takes(rank):
            return (
                "belongs to an earlier incarnation of this rank, which has restarted: call recover() to join the "
                "other ranks"
            )
        if self.revoked_s is not None and self.revoked_s <= by_s:
            return "was revoked: call recover(), shrink it, or use another communicator"
        return ""

    def succeed(self, incarnations: Mapping[int, int]) -> Context:
        """Return a context of these incarnations, by world rank, in the order of the first communicator."""
        origin = self.origin or self
        groups = tuple(tuple(rank for rank in side if rank in incarnations) for side in origin.groups)
        again = {rank: incarnation for rank, incarnation in incarnations.items() if incarnation}
        return Context(self.world, groups, ancestors=self.ancestors, incarnations=again, origin=origin)

    def incarnation(self, rank: int) -> int:
        return self.incarnations.get(rank, 0)

    def takes(self, rank: int) -> bool:
        return self.incarnation(rank) == self.world.ranks[rank].incarnation

    def dead(self, by_s: float) -> set[int]:
        """Return the members that are known to have died by a time, as world ranks."""
        # Of a thousand deaths in the world, few concern members: most dead ranks were replaced or excluded long ago. So
        # each context examines each death once.
        failed = self.world.failed
        if self._deaths_seen < len(failed):
            for rank, incarnation in islice(failed, self._deaths_seen, None):
                if self.incarnation(rank) == incarnation and any(rank in side for side in self.places):
                    self._dead.append(rank)
            self._deaths_seen = len(failed)
        return {rank for rank in self._dead if self.death_known_s(rank) <= by_s}

    def death_known_s(self, rank: int) -> float:
        """Return when the death of a member (world rank) becomes known to the other ranks; inf: never."""
        return self.world.failed.get((rank, self.incarnation(rank)), math.inf)

    def shut_out(self, rank: int) -> None:
        """Make the calls of a world rank end in `Revoked`; the other members are not affected."""
        if self.revoked_s is None and any(rank in places for places in self.places):
            self.revoked_s = math.inf

    def mailbox(self, rank: int) -> Mailbox:
        """Return the mailbox of a world rank."""
        mailbox = self.mailboxes.get(rank)
        if mailbox is None:
            mailbox = self.mailboxes[rank] = Mailbox(self.world.kernel, rank, self.world.nic(rank))
            if self.inner and self.world.links is not None:
                self.world.links.make_reliable(mailbox)
        return mailbox

    def meet(self, member: Member, call: Call) -> Departure:
        """Register the arrival of a member at its next collective."""
        rank, me = member._rank.id, member._me
        number = self.calls.get(rank, 0)
        self.calls[rank] = number + 1
        # A communicator's collectives match by their order on each rank, without tags (MPI 4.1, 6.1): the n-th call of
        # every member is the same instance, even if some members are several calls ahead.
        instance = self.instances.get(number)
        if instance is None:
            instance = self.instances[number] = CollectiveInstance(
                self.world, member._label, self.everyone, number, context=self
            )
        if len(self.groups) > 1:  # both groups meet as one, to agree
            me = self.everyone.index(rank)
        try:
            return instance.join(me, call)
        finally:
            if instance.here == len(self.everyone):
                del self.instances[number]


KINDS: dict[str, Any] = {}
"""The classes that communicators create: `Split` an `Intracomm`, `Create_cart` a `Cartcomm`, `Win` its `Windows`.

They derive from `Member`, so its calls cannot import them: the module that defines a class enters it here. Code that
creates a world imports `module`, which imports all of them.
"""


class Nowhere:
    """Replaces the context of a null communicator: every attribute access raises an error."""

    # With a `Member.__getattr__` instead, Python (3.11) would look up each attribute of each communicator the slow way:
    # an eighth of a message's cost.
    def __getattr__(self, name: str) -> NoReturn:
        raise CallError(ERR_COMM, "the communicator is null, or was freed before")

    def __len__(self) -> int:
        return len(self.members)


NOWHERE: Any = Nowhere()


class Member(Named):
    """One rank's handle of a communicator, with the building blocks of its calls: send, receive, collective."""

    __slots__ = (
        "__weakref__",
        "_attributes",
        "_box",
        "_context",
        "_errhandler",
        "_identity",
        "_info",
        "_me",
        "_name",
        "_own",
        "_peers",
        "_rank",
        "_side",
        "_world",
    )

    _identity: object | None
    _attributes: dict[int, Any]
    _context: Context
    _world: World
    _rank: Rank
    _me: int
    _peers: Sequence[int]
    _box: Mailbox | None
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
        self._peers = context.groups[-1 - self._side] if len(context.groups) > 1 else context.groups[0]
        self._attributes, self._name, self._errhandler, self._info = {}, name, None, None
        self._own = self._box = None
        if name:
            context.name = name
        return self

    @property
    def _mailbox(self) -> Mailbox:
        box = self._box
        if box is None:
            box = self._box = self._context.mailbox(self._rank.id)
        return box

    def _entered(self, context: Context, kind: Any = None) -> Any:
        """Return the rank's handle of a derived communicator, with the rank's services and error handler.

        MPI lets a new communicator inherit the error handler (MPI 4.1, 9.3). `kind` is its class; None: the same.
        """
        new = (kind or type(self)).enter(context, self._rank.id)
        new._own, new._errhandler = self._own, self._errhandler
        return new

    @property
    def _label(self) -> str:
        return self._name or self._context.label

    @property
    def _members(self) -> tuple[int, ...]:
        return self._context.groups[self._side]

    def _exist(self) -> None:
        if self._identity is None:
            raise CallError(ERR_COMM, "the communicator is null, or was freed before")

    def _need(self) -> None:
        """Refuse a communicator that is null, freed or revoked."""
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
        """Raise the error of an invalid peer or tag, if there is one."""
        self._need()
        if not 0 <= peer < len(self._peers):
            raise CallError(
                ERR_RANK,
                f"rank {peer} is not in {self._label}, whose ranks are 0 to {len(self._peers) - 1}{of_mpi4py(peer)}",
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

    def _join(self, call: Call) -> Departure:
        """Arrive at a collective without waiting for its end."""
        if self._identity is None or self._context.revoked_s is not None:
            self._need()
        rank, task = self._rank, self._world.kernel.current
        if task.rank != rank.id:
            raise UsageError(
                f"{call.describe()}: {task.name} uses rank {self._me}'s handle of {self._label}; each rank must use "
                "its own"
            )
        nbytes = call.nbytes if type(call.nbytes) is int else int(total(call.nbytes))
        rank.digest.note((task.clock, COLLECTIVE, call.root, nbytes, len(call.name)))
        if call.part is not None:
            rank.digest.cover(call.part)
        return self._context.meet(self, call)

    def _meet(self, call: Call) -> Any:
        """Take part in a collective and return this rank's outcome."""
        departure = self._join(call)
        try:
            await_one(self._world, departure, departure)
        except BaseException:
            departure.instance.keep(departure.me)
            raise
        return departure.instance.outcome(departure.me)

    # -- messages --------------------------------------------------------------------------------------------

    def _dispatch(self, payload: Any, dest: int, tag: int, mode: Mode, *, buf: Any = None) -> Transfer | None:
        """Send a payload (bytes, or an object with `nbytes`), made from `buf`. Returns a transfer to await, or None."""
        peers, context, world = self._peers, self._context, self._world
        fits = 0 <= dest < len(peers) and 0 <= tag <= TAG_UB_VALUE  # `_check_peer`, without the call
        if not fits or context.revoked_s is not None or self._identity is None:
            if dest == PROC_NULL:
                self._need()
                return None
            self._refuse_peer(dest, tag)
        if world.failed:
            check_alive(world, self._waiting("Send", dest, tag, "dest"))
        message = Message(self._me, tag, payload, len(payload) if type(payload) is bytes else payload.nbytes)
        if type(buf) is ndarray:
            message.dtype = buf.dtype
        elif buf is not None:
            message.dtype = getattr(payload, "dtype", None)
        receiver = peers[dest]
        mailbox = context.mailboxes.get(receiver)
        if mailbox is None:
            mailbox = context.mailbox(receiver)
        return send(world, mailbox, message, mode)

    def _deliver(
        self, payload: Any, dest: int, tag: int, mode: Mode, *, operation: str, buf: Any = None
    ) -> None:
        """Send and wait until the program may continue."""
        if type(dest) is not int or type(tag) is not int:
            dest, tag = integer(dest), integer(tag)
        transfer = self._dispatch(payload, dest, tag, mode, buf=buf)
        if transfer is not None:
            await_one(self._world, transfer, self._waiting(operation, dest, tag, "dest"))

    def _accept(self, source: int, tag: int, operation: str) -> Message:
        """Receive one message, blocking. `source` and `tag` are plain integers."""
        # Messages of one sender match in the order sent (MPI 4.1, 3.5), regardless of other senders. So a receive from
        # a named source may take a queued message at once. A receive from any source depends on all messages sent by
        # then, and waits for its time.
        fits = 0 <= source < len(self._peers) and ANY_TAG <= tag <= TAG_UB_VALUE
        if not fits or self._context.revoked_s is not None or self._identity is None:
            self._check_source(source, tag)
        mailbox = self._box or self._mailbox
        message = mailbox.ready(source, tag)
        if message is not None and self._take_now(mailbox, message):
            return message
        return self._accept_later(source, tag, operation)

    def _take_now(self, mailbox: Mailbox, message: Message) -> bool:
        """Take a message whose data are on their way, without parking; False if it must be taken at its time."""
        rank, kernel, nic = self._rank, self._world.kernel, mailbox.nic
        task, arrival_s, receive_s = kernel.current, message.arrival_s, message.receive_s
        now_s = task.clock
        due_s = now_s + task.deadline_s
        assert arrival_s is not None
        if arrival_s + receive_s > due_s:  # so late that its place at the NIC stays free
            return False
        if nic is not None:
            if rank.observers and arrival_s > now_s:  # its NIC may let in requests to a window first
                return False
            if message.drain_s:  # as in `Receive.final`
                message.arrival_s = arrival_s = nic.admit(arrival_s, message.drain_s)
                message.drain_s = 0.0
                if arrival_s + receive_s > due_s:
                    return False
        mailbox.unexpected[message.source].popleft()
        message.queued = False
        finish_s = (arrival_s if arrival_s > now_s else now_s) + receive_s
        if finish_s > now_s:
            if rank.awake is None and finish_s < rank.death_s:  # `advance_to`, without the call
                task.clock = finish_s
            else:
                rank.advance_to(task, finish_s)
            if rank.observers:  # its memory is exposed: its next action must happen at its own time
                kernel.observe()
        digest = rank.digest
        digest.count += 1  # `digest.note`, without the call
        digest.update(packed(task.clock, RECEIVE, message.source, message.nbytes, message.tag))
        return True

    def _accept_later(self, source: int, tag: int, operation: str) -> Message:
        """Receive one message, and wait for it if necessary."""
        kernel = self._world.kernel
        if source == ANY_SOURCE:  # a wildcard is an observation
            kernel.observe()
        task = kernel.current
        receive = Receive(kernel, source, tag, task.clock)
        if self._world.plan is None and not self._rank.observers:  # only its deadline will end it
            receive.stays_s = task.clock + task.deadline_s
        self._mailbox.post(receive)
        try:
            await_one(self._world, receive, self._waiting(operation, source, tag))
        except WorldError:  # the program may continue: the receive must not swallow a later message
            self._mailbox.give_up(receive, self._world.kernel.current.clock)
            raise
        message, receive.message = receive.message, None
        assert message is not None
        self._rank.digest.note((task.clock, RECEIVE, message.source, message.nbytes, message.tag))
        return message

    def _waiting(self, operation: str, peer: int, tag: int, keyword: str = "source") -> Waiting:
        context = self._context
        acknowledged = context.notes.get(("acknowledged", self._rank.id), ())
        return Waiting(operation, self._label, self._peers, peer, tag, keyword, acknowledged, context)

    def _isend(
        self, payload: Any, dest: int, tag: int, mode: Mode, *, operation: str, buf: Any = None
    ) -> Request:
        """Start a send. A buffer that the program must not change meanwhile is watched."""
        if type(dest) is not int or type(tag) is not int:
            dest, tag = integer(dest), integer(tag)
        transfer = self._dispatch(payload, dest, tag, mode, buf=buf)
        collected = None if buf is None else watched(self._world, buf, payload, f"{operation} to rank {dest}")
        if transfer is None:
            return request_over(self._world, collected, writes=False)
        about = (self, operation, dest, tag, "dest")
        return request_for(self._world, transfer, about, collected, writes=False)

    def _irecv(self, source: int, tag: int, operation: str, into: Any = None) -> Request:
        """Post a receive. `into` is a `payload.target` for a buffer; None or a `payload.Room` for an object."""
        if type(source) is not int or type(tag) is not int:
            source, tag = integer(source), integer(tag)
        if source == PROC_NULL:
            self._need()
            return request_over(self._world, receive_nothing)
        fits = 0 <= source < len(self._peers) and ANY_TAG <= tag <= TAG_UB_VALUE  # as in `_accept`
        if not fits or self._context.revoked_s is not None or self._identity is None:
            self._check_source(source, tag)
        world = self._world
        kernel = world.kernel
        if source == ANY_SOURCE:  # a wildcard is an observation
            kernel.observe()
        receive = Reception(kernel, source, tag, kernel.current.clock)
        receive.owner, receive.into = self, into
        (self._box or self._mailbox).post(receive)
        about = (self, operation, source, tag)
        rank = self._rank
        rank.open_receives += 1
        rank.last_receive = about
        return request_for(
            world,
            receive,
            about,
            receive.deliver,
            writes=into is not None and type(into) is not Room,
            withdraw=self._withdraw,
        )

    def _withdraw(self, request: Request, now_s: float) -> None:
        receive = request._completion
        if (
            isinstance(receive, Receive)
            and not (receive.message is None and receive.finish_s is not None)  # cancelled before
            and self._mailbox.withdraw(receive, now_s)
        ):
            receive.complete(self._world.kernel.current.clock)

    def _taken(self, message: Message, into: Any) -> Any:
        """Write a message to a `payload.target`; for None or a `payload.Room`, return its object."""
        try:
            if into is None:
                return loads(message.payload)
            if type(into) is Room:
                return into.load(message)
            unpack(into, message.payload)
        except Exception as error:  # noqa: BLE001 - whatever a pickle raises
            raise self._unfit(error, message) from None
        # A type mismatch is a warning instead of an error: MPI libraries deliver the bytes silently.
        if message.dtype is not into.dtype:
            check_type(self._world, self._label, into, message)
        return None

    def _unfit(self, error: Exception, message: Message) -> Exception:
        """Return the error, which names the message, of a message that the program cannot receive."""
        name = f"rank {message.source} with tag {message.tag} on {self._label}"
        if isinstance(error, Truncated):
            return Truncated(message=f"{error.message}; it is from {name}")
        if isinstance(error, (pickle.UnpicklingError, EOFError)):
            return Unreadable(
                f"the {message.nbytes:,} bytes from {name} are not a pickled object ({error}): if Send sent them, "
                "receive them with Recv, because upper-case and lower-case calls do not mix"
            )
        if isinstance(error, PhantomError):
            return PhantomError(f"rank {self._me} receives from {name}: {error}")
        error.add_note(f"raised while the object from {name} was unpickled")
        return error


def total(nbytes: Any) -> int:
    """Return the bytes that a rank contributes to a collective; see `Call`."""
    if isinstance(nbytes, tuple):  # a neighbour exchange: dests, and the size for each
        return sum(nbytes[1])
    return nbytes if isinstance(nbytes, int) else int(nbytes.sum())


def receive_nothing(status: Status) -> None:
    """Write into a status the result of a receive from PROC_NULL."""
    fill(status, PROC_NULL, ANY_TAG, 0)
