"""The choices of a run: every decision that a real system could take differently, and a record that forces them.

A decision has a key: its kind, the rank that asks, and its number among that rank's decisions of this kind. Kinds:

* `recv` and `probe`: the source of a wildcard receive or probe; `none` for a poll that finds no message;
* `done`: the positions of the requests that a Waitany, Waitsome or test finds complete, such as `0+2`, or `none`;
* `win4`: the rank whose access the window with context 4 admits next at the asking rank: locks, and accesses under
  shared locks or fences.

A record maps keys to outcomes; virtual time decides whatever the record leaves out. A forced wildcard waits for the
chosen source as if the network delayed all other messages, a forced poll as if its rank were slow, and a forced window
holds other accesses back. A forced outcome that can never come leaves its rank waiting: such a run is *infeasible*, and
proves nothing.

Each decision lists its other possible outcomes at the end of the run: those which do not happen after its end
(`ordering`). Runs without a record of choices are not instrumented.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG, LOCK_EXCLUSIVE, LOCK_SHARED
from spawnsim.errors import Livelock, ParameterError
from spawnsim.virtual import ordering
from spawnsim.virtual.engine.causality import Clocks, before, joined
from spawnsim.virtual.engine.completion import Completion, Message
from spawnsim.virtual.engine.kernel import current_task
from spawnsim.virtual.engine.world import World
from spawnsim.virtual.mpi.context import Member
from spawnsim.virtual.mpi.requests import Reception
from spawnsim.virtual.mpi.rma_service import Access, Target

RECEIVE, PROBE, DONE, WINDOW = "recv", "probe", "done", "win"
SUBSETS = (
    3  # requests of one call up to which all subsets are alternatives; beyond: single ones, all and none
)
LATE = 3  # how often polls may find nothing although a message or request is there, and never twice in a row
POLLS = f"polls that miss a message twice in a row, or more than {LATE} times"
MANY = f"more than one, and less than all, of over {SUBSETS} complete requests"
ENDLESS = 10_000  # decisions after which a forced outcome that has not come never comes
Key = tuple[str, int, int]
Outcome = tuple[int, ...]
"""A source or origin, or positions; () for a poll that finds nothing."""
Record = Mapping[Key, Outcome]


def written(record: Record) -> str:
    """Return a record as text for `parsed`.

    >>> written({("recv", 0, 2): (3,), ("done", 1, 0): ()})
    'done:1.0=none,recv:0.2=3'
    """
    return ",".join(
        f"{kind}:{rank}.{number}={'+'.join(map(str, outcome)) or 'none'}"
        for (kind, rank, number), outcome in sorted(record.items())
    )


def parsed(text: str) -> dict[Key, Outcome]:
    """Return the record that a text describes.

    >>> parsed("recv:0.2=3, done:1.0=none")
    {('recv', 0, 2): (3,), ('done', 1, 0): ()}
    """
    record: dict[Key, Outcome] = {}
    for word in filter(None, (each.strip() for each in text.split(","))):
        try:
            key, outcome = word.split("=")
            kind, place = key.split(":")
            rank, number = map(int, place.split("."))
            found = () if outcome == "none" else tuple(map(int, outcome.split("+")))
        except ValueError as error:
            raise ParameterError(
                f"{word!r} is not a choice: write recv:RANK.NUMBER=SOURCE, as a failure shows"
            ) from error
        if kind not in (RECEIVE, PROBE, DONE) and not kind.startswith(WINDOW):
            raise ParameterError(f"{word!r}: kinds of choices are {RECEIVE}, {PROBE}, {DONE}, {WINDOW}NUMBER")
        record[kind, rank, number] = found
    return record


@dataclass(eq=False, slots=True)
class Decision:
    """One decision of a run.

    Attributes:
        key: names it.
        forced: the outcome in the record; None: virtual time decides.
        began: number of its rank's event that asks.
        outcome: None while it is open.
        ended: number of its rank's event that knows the outcome; 0 while it is open.
        stamp: the events that happen before the rank asks.
        others: returns the other possible outcomes, at the end of the run.
        concluded: its place in the order in which the simulator has concluded decisions.
        cause: the events that happen before the sends of the messages that decide it, if any do.
        hidden: whether it depends on events that the clocks do not know.
        needs: returns decisions of the same rank that limit its outcomes, at the end of the run.
    """

    key: Key
    forced: Outcome | None
    began: int
    stamp: Any
    outcome: Outcome | None = None
    ended: int = 0
    others: Callable[[], Iterable[Outcome]] = tuple
    concluded: int = 0
    cause: Any = None
    hidden: bool = False
    needs: Callable[[], Iterable[Decision]] = tuple

    @property
    def at_window(self) -> bool:
        return self.key[0].startswith(WINDOW)

    def follows(self, other: Decision) -> bool:
        """Whether this decision, or the message that decides it, knows that another one was asked."""
        stamps = [self.stamp] if self.cause is None else [self.stamp, self.cause]
        return any(before(other.key[1], other.began, each) for each in stamps)

    @property
    def place(self) -> tuple[str, int]:
        """Where decisions follow each other: a rank's program, or its part of a window."""
        return self.key[0] if self.at_window else "", self.key[1]


@dataclass(eq=False, slots=True)
class Posting:
    """A receive or probe, and the message that it got."""

    source: int
    tag: int
    takes: bool
    number: int = 0  # its position among the postings of its mailbox
    began: int = 0
    ended: int = 0
    message: Message | None = None
    receive: Reception | None = None
    decision: Decision | None = None

    def got(self) -> Message | None:
        """Return the message, also if the program has not collected it."""
        return self.message if self.receive is None or self.message else self.receive.message

    def accepts(self, message: Message) -> bool:
        return self.source in (message.source, ANY_SOURCE) and self.tag in (message.tag, ANY_TAG)


@dataclass(eq=False, slots=True)
class Box:
    """What a mailbox got: its messages in the order sent, and its receives and probes in the order posted."""

    messages: list[Message] = field(default_factory=list)
    postings: list[Posting] = field(default_factory=list)


class TimedClocks(Clocks):
    """Vector clocks that know the times of each rank's events."""

    __slots__ = ("times_s",)

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.times_s: list[list[float]] = [[] for _ in range(ranks)]

    def count(self, rank: int) -> int:
        task = current_task()  # None in an event after a rank's death
        if task is not None and task.rank == rank:
            self.times_s[rank].append(task.clock)
        return super().count(rank)


class Choices:
    """The decisions of one run, as `World.choices`."""

    def __init__(self, world: World, record: Record) -> None:
        self.world, self._record = world, record
        self.order = ordering.Ordering(world)
        self.order.clocks = self.clocks = TimedClocks(len(world.ranks))
        world.ordering = self.order
        self.decisions: list[Decision] = []
        self._concluded = 0
        self._accesses: list[int] = []  # how many decisions were concluded at each access to a window
        self.impossible = False  # whether the record forces an outcome that its decision cannot have
        # Those for whose forced outcome a rank has waited until a deadline.
        self._expired: list[Decision] = []
        self._numbers: Counter[tuple[str, int]] = Counter()
        self.boxes: defaultdict[Any, Box] = defaultdict(Box)
        self.receives: dict[Completion, Posting] = {}
        # How often polls have found nothing although a message or request was there; ranks that did nothing since.
        self._late: Counter[Message | Completion] = Counter()
        self._idle: set[int] = set()
        self.untried: set[str] = set()  # kinds of outcomes that are no alternatives, since there are too many
        self._held: defaultdict[Target, list[Access]] = defaultdict(list)
        self._admitted: defaultdict[Target, list[Access]] = defaultdict(list)
        self.requested: dict[Access, Any] = {}  # stamps
        self.complete: dict[Access, int] = {}  # the origin's event that knows the end

    # -- decisions ---------------------------------------------------------------------------------------------

    def ask(self, kind: str, rank: int) -> Decision:
        """Begin a decision of a rank."""
        number = self._numbers[kind, rank]
        self._numbers[kind, rank] = number + 1
        key = kind, rank, number
        decision = Decision(key, self._record.get(key), self.clocks.count(rank), self.clocks.stamp(rank))
        self.decisions.append(decision)
        if len(self.decisions) % ENDLESS == 0 and self.open():
            self.impossible = True
            endless = Livelock("ranks poll while another one waits for a forced outcome")
            self.world.kernel.fail(endless, current_task() or self.world.kernel.tasks[0])
        return decision

    def conclude(self, decision: Decision, outcome: Outcome) -> None:
        """End a decision: the rank knows the outcome."""
        rank = decision.key[1]
        self._set(decision, outcome)
        decision.ended = self.clocks.count(rank)

    def _set(self, decision: Decision, outcome: Outcome) -> None:
        self._concluded += 1
        decision.outcome, decision.concluded = outcome, self._concluded

    def open(self) -> list[Decision]:
        """Return the forced decisions whose outcome has not come."""
        return [each for each in self.decisions if each.forced is not None and each.outcome is None]

    def expire(self, rank: int) -> None:
        """Note that a wait of a rank has reached its deadline: unforced, the call could have ended."""
        self._expired += [each for each in self.open() if each.key[1] == rank]

    def refused(self, *, waits: bool) -> bool:
        """Whether no real run can have the outcomes that the record forces, at the end of the run.

        Args:
            waits: whether the run has succeeded, or ended in a wait. What else fails, such as an assertion, has not
                failed for a forced outcome that did not come yet.
        """
        self._settle()
        left = bool(self.open())
        wrong = left or any(self._held.values()) or any(map(self._overtaken, self.boxes.values()))
        return self.impossible or (wrong and (waits or not left))

    def _overtaken(self, box: Box) -> bool:
        """Whether a later receive of a mailbox took a message that MPI gives to an earlier, forced wildcard.

        It may have taken it if the wildcard's own message can arrive before: if it is sent without knowledge of the
        later receive.
        """
        forced = [each for each in box.postings if each.decision is not None and each.decision.forced]
        for wildcard in forced:
            own = wildcard.got()
            for later in box.postings[wildcard.number + 1 :]:
                taken = later.got()
                if taken is None or not later.ended or not wildcard.accepts(taken):
                    continue
                rank = wildcard.decision.key[1] if wildcard.decision is not None else 0
                if own is None or before(rank, later.ended, own.stamp):
                    return True
        return False

    def _settle(self) -> None:
        """Conclude the receives whose messages the program never collected, at the end of the run."""
        for box in self.boxes.values():
            for posting in box.postings:
                decision, message = posting.decision, posting.got()
                if decision is not None and decision.outcome is None and message is not None:
                    self._set(decision, (message.source,))
                    decision.cause = message.stamp
        self.impossible = self.impossible or any(each.outcome is None for each in self._expired)

    def acts(self, rank: int) -> None:
        """Note that a rank sends or gets a message, or finds a request complete."""
        self._idle.discard(rank)

    def put_off(self, rank: int, late: Iterable[Message | Completion | None]) -> None:
        """Note the messages or requests that a poll could find and does not."""
        there = [each for each in late if each is not None]
        self._late.update(there)
        if there:
            self._idle.add(rank)

    def may_be_late(self, rank: int, found: Iterable[Message | Completion | None]) -> bool:
        """Whether a poll could find nothing instead of these: limited, or loops of polls would not end."""
        there = [each for each in found if each is not None]
        able = rank not in self._idle and any(self._late[each] < LATE for each in there)
        if there:
            self.acts(rank)
            if not able:
                self.untried.add(POLLS)
        return able

    # -- messages ----------------------------------------------------------------------------------------------

    def post(self, member: Member, source: int, tag: int, *, takes: bool) -> Posting:
        """Note a receive or probe."""
        box = self.boxes[member._mailbox]
        posting = Posting(source, tag, takes, len(box.postings))
        posting.began = self.clocks.count(member._rank.id)
        box.postings.append(posting)
        return posting

    def ask_source(self, kind: str, member: Member, posting: Posting) -> int:
        """Begin the decision of a wildcard; return the source to use."""
        decision = posting.decision = self.ask(kind, member._rank.id)
        box = self.boxes[member._mailbox]
        decision.others = lambda: self._sources(box, posting)
        decision.needs = lambda: self._earlier(box, posting)
        if decision.forced and decision.forced[0] >= len(member._peers):  # of a larger communicator
            self.impossible, decision.forced = True, None
        return decision.forced[0] if decision.forced else posting.source

    def met(self, posting: Posting, message: Message, rank: int) -> None:
        """Note the message that a receive or probe got."""
        self.acts(rank)
        self.clocks.learn(rank, message.stamp)  # a probe knows of its message, too
        posting.message = message
        posting.ended = self.clocks.count(rank)
        if posting.decision is not None:
            posting.decision.cause = message.stamp
            self.conclude(posting.decision, (message.source,))

    def _sources(self, box: Box, posting: Posting) -> Iterator[Outcome]:
        """Yield the other sources whose next message a receive or probe could get."""
        decision = posting.decision
        assert decision is not None
        chosen, seen = decision.outcome, set()
        gone = {id(each.got()) for each in box.postings[: posting.number] if each.takes}
        for message in box.messages:
            if message.source in seen or not posting.accepts(message) or id(message) in gone:
                continue
            seen.add(message.source)
            known = decision.ended and before(decision.key[1], decision.ended, message.stamp)
            if (message.source,) != chosen and not known:
                yield (message.source,)

    def _earlier(self, box: Box, posting: Posting) -> Iterator[Decision]:
        """Yield the decisions of earlier receives that would have got the message of a receive or probe."""
        message = posting.got()
        if message is None:
            return
        for each in box.postings[: posting.number]:
            if each.takes and each.decision is not None and each.got() is not None and each.accepts(message):
                yield each.decision

    # -- requests ----------------------------------------------------------------------------------------------

    def found(self, decision: Decision, completions: Sequence[Completion | None], places: Outcome) -> None:
        """End the decision of a call that finds the requests at these places complete."""
        self.conclude(decision, places)
        decision.needs = lambda: self.limits(decision, completions)
        if self.impossible:
            return
        postings = [self.receives.get(each) if each is not None else None for each in completions]
        messages = [None if (posting := postings[place]) is None else posting.got() for place in places]
        decision.cause = joined(None if each is None else each.stamp for each in messages)
        decision.hidden = None in messages

    def limits(self, decision: Decision, completions: Iterable[Completion | None]) -> Iterator[Decision]:
        """Yield the decisions of receives that a call could find complete."""
        for each in completions:
            posting = self.receives.get(each) if each is not None else None
            if posting is not None and posting.decision is not None and self.could_end(each, decision):
                yield posting.decision

    def could_end(self, completion: Completion | None, decision: Decision) -> bool:
        """Whether a request could be complete at a call that did not wait for it."""
        posting = self.receives.get(completion) if completion is not None else None
        message = None if posting is None else posting.got()
        if message is None:
            return completion is not None and completion.finish_s is not None
        return not before(decision.key[1], decision.ended, message.stamp)

    def positions(
        self, decision: Decision, completions: Sequence[Completion | None], sizes: Callable[[int], bool]
    ) -> Iterator[Outcome]:
        """Yield the other sets of requests that a call could find complete."""
        able = [
            place
            for place, each in enumerate(completions)
            if each is not None and self.could_end(each, decision)
        ]
        few = len(able) <= SUBSETS
        if not few and any(map(sizes, range(2, len(able)))):
            self.untried.add(MANY)
        for size in range(len(able) + 1):
            if sizes(size) and (few or size in (0, 1, len(able))):
                yield from (
                    each for each in combinations(able, size) if set(each) != set(decision.outcome or ())
                )

    # -- windows -----------------------------------------------------------------------------------------------

    def admits(self, target: Target, access: Access) -> bool:
        """Whether the record lets a target take an access now; otherwise it is held back."""
        if target.exclusive is not None:
            return True
        kind, rank = f"{WINDOW}{access.connection.windows.context.number}", target.rank.id
        forced = self._record.get((kind, rank, self._numbers[kind, rank]))
        if forced in (None, (access.connection.origin.id,)):
            return True
        self._held[target].append(access)
        return False

    def admitted(self, target: Target, access: Access) -> None:
        """Note the access that a target takes."""
        if target.exclusive is not None:
            self._accesses.append(self._concluded)
            return
        number = access.connection.windows.context.number
        decision = self.ask(f"{WINDOW}{number}", target.rank.id)
        self._set(decision, (access.connection.origin.id,))
        self._accesses.append(self._concluded)
        line = self._admitted[target]
        line.append(access)
        place, sharers = len(line), frozenset(target.sharers)
        decision.others = lambda: self._origins(access, line[place:], sharers)

    def _origins(self, taken: Access, later: Sequence[Access], sharers: Set[int]) -> Iterator[Outcome]:
        """Yield the origins that could come first, as one of their later accesses conflicts with the one it took.

        An exclusive lock may have to wait for sharers: then any origin could come first.
        """
        own, ended = taken.connection.origin.id, self.complete.get(taken, 0)
        origins, blocked = set[int](), False
        for access in later:
            origin = access.connection.origin.id
            if origin != own and not (ended and before(own, ended, self.requested[access])):
                origins.add(origin)
                if _conflict(taken, access):
                    yield (origin,)
                    blocked = blocked or (access.lock == LOCK_EXCLUSIVE and bool(sharers - {origin}))
        yield from ((each,) for each in origins if blocked)

    def resubmit(self, target: Target) -> None:
        """Let a target consider the held accesses again."""
        held, self._held[target] = self._held.pop(target, []), []
        for access in held:
            target.acquire(access)

    # -- the tree ----------------------------------------------------------------------------------------------

    def leaf(self) -> dict[Key, Outcome]:
        """Return the whole record of the run."""
        return {each.key: each.outcome for each in self.decisions if each.outcome is not None}

    def branches(self) -> Iterator[dict[Key, Outcome]]:
        """Yield the records that take one decision differently, and keep what does not depend on it."""
        needs = {each: [*each.needs()] for each in self.decisions if each.outcome is not None}
        done = _in_order(needs)
        for place, decision in enumerate(done):
            others = sorted(set(decision.others()))
            if not others:
                continue
            kept, undone = done[:place], {decision}
            after = [] if decision.at_window else [decision]
            accessed = bisect_left(self._accesses, decision.concluded)
            for each in done[place + 1 :]:
                # The clocks know neither how windows order ranks, nor what completes a request that is no receive.
                # But what the record forces does not depend on what it leaves open.
                unknown = each.hidden or bisect_left(self._accesses, each.concluded) > accessed
                unknown = unknown and (each.forced is None or decision.forced is not None)
                knows = any(map(each.follows, after))
                if not (
                    unknown or knows or each.place == decision.place or not undone.isdisjoint(needs[each])
                ):
                    kept.append(each)
                    continue
                undone.add(each)
                if not (knows or each.at_window):
                    after.append(each)
            record = {each.key: each.outcome for each in kept if each.outcome is not None}
            for other in others:
                yield {**record, decision.key: other}


def _in_order(needs: Mapping[Decision, Sequence[Decision]]) -> list[Decision]:
    """Return decisions with an outcome, each after all those on which its outcomes depend."""
    done = sorted(needs, key=lambda each: each.concluded)
    placed: list[Decision] = []
    begun: set[Decision] = set()

    def place(decision: Decision) -> None:
        if decision in begun:
            return
        begun.add(decision)
        for each in needs[decision]:
            if each not in begun and each.outcome is not None:
                for cause in done:
                    if cause.ended and before(cause.key[1], cause.ended, each.cause):
                        place(cause)
                place(each)
        placed.append(decision)

    for each in done:
        place(each)
    return placed


def _conflict(one: Access, other: Access) -> bool:
    """Whether the order of two accesses to a target matters."""
    if one.lock or other.lock:
        return LOCK_EXCLUSIVE in (one.lock, other.lock) or LOCK_SHARED not in (one.lock, other.lock)
    return one.call not in READS or other.call not in READS


READS = ("Get", "Rget")
