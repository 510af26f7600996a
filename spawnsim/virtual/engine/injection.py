"""Execution of faults: links that lose, delay, duplicate or damage messages; ranks that crash and restart.

A program's messages are judged one by one: a lost message never arrives, so that policies can be tested against losses.
Collectives and windows travel on reliable connections, as MPI's do: a lost message is sent again until it is delivered
(`FaultPlan.carried`), and a duplicate is discarded. Each fault that strikes becomes an event of the run.

In a collective, a message that is lost for good never arrives: the ranks whose part depends on it wait until their
deadline. A damaged message damages one bit of its contents, for all ranks that receive these. In a block, the damage is
in the block; in a reduction, which merges many contributions, it is in the contribution of the message's sender.

A restarted rank runs its program from the beginning at its time of restart, and keeps nothing but its number. It is a
different member from the one that died: no earlier communicator includes it, however early the restart, and the other
ranks learn of the death as usual. Only `recover()` lets it join them. (ULFM, too, provides no way back into a
communicator.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from spawnsim.models.collectives import CollectivePlan, Damage, Finish, Struck
from spawnsim.models.faults import Verdict
from spawnsim.random import Streams
from spawnsim.virtual.digest import CRASH, LINK_FAULT, RESTART, nanoseconds
from spawnsim.virtual.engine.completion import Message
from spawnsim.virtual.engine.kernel import Program, RankDied, Task
from spawnsim.virtual.engine.matching import Mailbox
from spawnsim.virtual.engine.waiting import rank_failed
from spawnsim.virtual.engine.wire import set_out
from spawnsim.virtual.engine.world import Rank, World

MIDDLE = 0.5  # default position of the damaged byte in a payload


def damaged(payload: Any, place: float = MIDDLE, *, nan: bool = False) -> Any:
    """Return a payload with the highest bit of one byte flipped; in a list or mapping, a byte of one member.

    Args:
        payload: An array, bytes, or a list or mapping of them. Anything else is returned unchanged.
        place: Position of the byte, from 0 (the first) up to but not including 1.
        nan: Set the 8 bytes around it (aligned to 8) to 0xFF instead: NaN, in any floating-point type.
    """
    if isinstance(payload, np.ndarray):
        return _flipped_array(payload, place, nan=nan)
    if isinstance(payload, (bytes, bytearray)):
        return _flipped(np.frombuffer(bytearray(payload), np.uint8), place, nan=nan).tobytes()
    if isinstance(payload, (list, dict)) and payload:
        keys = list(payload) if isinstance(payload, dict) else range(len(payload))
        share = place * len(keys)
        return with_damaged_member(payload, keys[int(share)], share % 1.0, nan=nan)
    return payload


def with_damaged_member(payload: Any, key: Any, place: float, *, nan: bool = False) -> Any:
    """Return a copy of a list or mapping with one damaged member."""
    copy = payload.copy()
    copy[key] = damaged(copy[key], place, nan=nan)
    return copy


def can_be_damaged(payload: Any) -> bool:
    """Whether there is anything to damage: a barrier has no payload, and the library checks its own messages."""
    if isinstance(payload, (list, dict)):
        members = payload.values() if isinstance(payload, dict) else payload
        return any(map(can_be_damaged, members))
    if isinstance(payload, np.ndarray):
        return payload.nbytes > 0
    return isinstance(payload, (bytes, bytearray)) and len(payload) > 0


def _flipped_array(array: Any, place: float, *, nan: bool) -> Any:
    copy = np.ascontiguousarray(array).copy()
    _flipped(copy.reshape(-1).view(np.uint8), place, nan=nan)
    return copy


def _flipped(raw: Any, place: float, *, nan: bool) -> Any:
    if raw.size and nan:
        first = int(raw.size * place) & ~7
        raw[first : first + 8] = 0xFF
    elif raw.size:
        raw[int(raw.size * place)] ^= 0x80
    return raw


# The kinds of data on reliable connections: the first part of each draw's key. Each draw is a function of fault, kind,
# communicator, number of the call and message, so that no answer depends on the order in which ranks run.
COLLECTIVE, REQUEST, ANSWER, TOKEN = 1, 2, 3, 4


class FaultyLinks:
    """Carries messages to mailboxes, and judges all other traffic, according to a fault plan."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sent: Counter[tuple[int, int]] = Counter()
        self._tokens: Counter[tuple[int, int]] = Counter()
        self._reliable: set[Mailbox] = set()

    # -- messages --------------------------------------------------------------------------------------------

    def make_reliable(self, mailbox: Mailbox) -> None:
        """Let messages to a mailbox travel on reliable connections: it belongs to the library, not to the program."""
        # For example a window's mailbox: its tokens order accesses, and a lost token would stop the window for good.
        self._reliable.add(mailbox)

    def carry(self, source: int, mailbox: Mailbox, message: Message) -> None:
        """Deliver a message from a world rank on time, late, twice, damaged, or not at all."""
        dest, sent_s = mailbox.rank, self._world.kernel.current.clock
        if mailbox in self._reliable:
            verdict = self._carried(source, dest, sent_s, message)
        else:
            number = self._sent[source, dest]
            self._sent[source, dest] += 1
            verdict = self._world.plan.message(source, dest, sent_s, number)
            what = verdict.describe()
            if what:
                fields = {"what": what, "dest": dest, "number": number}
                self._world.recorder.event(source, sent_s, "link", fields)
        if not verdict.lost:
            self._deliver(source, mailbox, message, verdict)

    def _carried(self, source: int, dest: int, sent_s: float, message: Message) -> Verdict:
        """Judge a message of the library. It has the key of its draws, or is a token without payload."""
        key = getattr(message, "key", None)
        if key is None:
            key = TOKEN, self._tokens[source, dest]
            self._tokens[source, dest] += 1
        verdict = self.judge(source, dest, sent_s, *key)._replace(copies=1, corrupt=False)
        self.record(verdict, source, dest, sent_s, call="window", number=key[-1])
        return verdict

    def _deliver(self, source: int, mailbox: Mailbox, message: Message, verdict: Verdict) -> None:
        if verdict.corrupt:
            message.payload = damaged(message.payload, nan=verdict.nan)
        # Only eager messages are duplicated: the data of a rendezvous answer one clear-to-send, which is sent once.
        message.envelope_s += verdict.delay_s
        if message.arrival_s is not None:
            message.arrival_s += verdict.delay_s
        copies = [twin(message) for _ in range(verdict.copies - 1 if message.arrival_s is not None else 0)]
        for each in (message, *copies):
            set_out(self._world, each, mailbox, source)

    # -- other traffic -------------------------------------------------------------------------------------------

    def sent_by(self, source: int) -> list[list[list[int]]]:
        """Return how many messages and tokens a rank has sent to each rank: these counts number the draws."""
        return [
            [[dest, number] for (sender, dest), number in sorted(each.items()) if sender == source]
            for each in (self._sent, self._tokens)
        ]

    def resume(self, source: int, counts: Sequence[Sequence[Sequence[int]]]) -> None:
        """Continue a rank's numbering from counts that `sent_by` returned."""
        for each, kept in zip((self._sent, self._tokens), counts, strict=True):
            each.update({(source, int(dest)): int(number) - each[source, int(dest)] for dest, number in kept})

    def judge(self, source: int, dest: int, sent_s: float, *key: int) -> Verdict:
        """Return the verdict on data sent at `sent_s` on the reliable connection of two world ranks."""
        return self._world.plan.carried(source, dest, sent_s, *key)  # type: ignore[no-any-return]

    def record(self, verdict: Verdict, source: int, dest: int, sent_s: float, **fields: Any) -> None:
        """Record an event for a fault that strikes, and note it in the sender's digest."""
        what = verdict.describe()
        if what:
            self._world.recorder.event(source, sent_s, "link", {"what": what, "dest": dest, **fields})
            self.note(verdict, source, dest, sent_s)

    def note(self, verdict: Verdict, source: int, dest: int, sent_s: float) -> None:
        """Note a fault in the sender's digest."""
        late_ns = -1 if verdict.lost else nanoseconds(verdict.delay_s)
        marks = verdict.copies + (verdict.corrupt << 8) + ((verdict.corrupt and verdict.nan) << 9)
        self._world.ranks[source].digest.note((sent_s, LINK_FAULT, dest, late_ns, marks))


def twin(message: Message) -> Message:
    """Return a second copy of an eager message."""
    copy = Message(message.source, message.tag, message.payload, message.nbytes)
    copy.envelope_s, copy.arrival_s = message.envelope_s, message.arrival_s
    copy.receive_s, copy.drain_s = message.receive_s, message.drain_s
    return copy


class CollectiveFaults:
    """The faults that strike one collective.

    Args:
        world: The cluster.
        members: World ranks of the communicator.
        key: Identifies this collective, for the draws.
        fields: The fields of its events.
    """

    def __init__(
        self, world: World, members: Sequence[int], key: tuple[int, ...], fields: dict[str, Any]
    ) -> None:
        self._world, self._members, self._fields = world, members, fields
        self._key = (COLLECTIVE, *key)
        self._reported: set[tuple[int, int, int]] = set()
        self._plan: CollectivePlan | None = None
        self._struck: Struck | None = None

    # -- times -----------------------------------------------------------------------------------------------

    def finish(self, plan: CollectivePlan, arrivals: Any, out_free: Any, calls: Sequence[Any]) -> Finish:
        """Return when each member leaves: NaN for members whose collective never ends."""
        here = [call for call in calls if call is not None]
        self._plan, self._checked = plan, not any(can_be_damaged(call.part) for call in here)
        self._fields["call"] = here[0].name
        ranks = np.asarray(self._members)
        # The whole collective is evaluated again with a verdict for each of its messages, and again whenever another
        # rank arrives; so each strike is reported only once. A collective without faults never reaches this code: it
        # costs a comparison (`FaultPlan.quiet`).
        struck = plan.struck(arrivals, self._world.network, ranks, judge=self, out_free=out_free)
        self._struck = struck
        for strike in struck.strikes:
            place = strike.number, strike.source, strike.dest
            if place not in self._reported:
                self._reported.add(place)
                source, dest = self._rank(strike.source), self._rank(strike.dest)
                what = {"what": strike.verdict.describe(), "dest": dest, **self._fields}
                self._world.recorder.event(source, strike.sent_s, "link", what)
        return struck.finish

    def strikes(
        self, source: Any, dest: Any, sent_s: Any, numbers: Any
    ) -> Iterable[tuple[int, Verdict, float]]:
        """Judge the messages of a lane: see `collectives.faulty.Judge`."""
        plan, links = self._world.plan, self._world.links
        for index in plan.covered(source, dest, sent_s).tolist():
            key = (*self._key, int(numbers[index]))
            pair = int(source[index]), int(dest[index])
            verdict = links.judge(*pair, float(sent_s[index]), *key)
            if self._checked:  # the library's own messages: damage is detected, and they are requested again
                verdict = verdict._replace(corrupt=False)
            yield index, verdict, plan.chance(*key, *pair)

    def late(self, me: int) -> list[int]:
        """Return the members whose messages never reach member `me`, or reach it too late."""
        if self._struck is None:
            return []
        bits = self._struck.late.get(self._relative(me), 0)
        return sorted(self._member(rank) for rank in range(len(self._members)) if bits >> rank & 1)

    # -- contents --------------------------------------------------------------------------------------------

    def note(self, me: int) -> None:
        """Note the faults of a member's messages in its digest."""
        own = self._relative(me)
        for strike in [] if self._struck is None else self._struck.strikes:
            if strike.source == own:
                source, dest = self._rank(strike.source), self._rank(strike.dest)
                self._world.links.note(strike.verdict, source, dest, strike.sent_s)

    def received_by(self, me: int, calls: Sequence[Any]) -> list[Any] | None:
        """Return the members' calls as member `me` receives them; None if it receives nothing damaged."""
        found = () if self._struck is None else self._struck.damage.get(self._relative(me), ())
        received: list[Any] | None = None
        strikes = () if self._struck is None else self._struck.strikes
        nans = {(each.source, each.dest, each.number) for each in strikes if each.verdict.nan}
        for damage in sorted(found):
            owner, member, place = self._place(damage)
            received = list(calls) if received is None else received
            call = received[owner]
            if call is not None:
                nan = damage[:3] in nans
                received[owner] = replace(call, part=_damaged_part(call.part, member, place, nan=nan))
        return received

    def _place(self, damage: Damage) -> tuple[int, Any, float]:
        """Return the owner of the damaged contribution, the damaged block (None: the only one) and the place in it."""
        plan = self._plan
        assert plan is not None
        source, dest = self._member(damage.source), self._member(damage.dest)
        # A reduction never creates partial sums, so the contribution of the message's sender is damaged instead.
        if plan.operation in ("gather", "allgather"):
            return self._member(damage.block), None, damage.place
        if plan.operation == "scatter":
            return plan.root, self._member(damage.block), damage.place
        if plan.operation == "alltoall":
            return source, dest, damage.place
        if plan.operation == "neighbor":
            return source, (dest, damage.number), damage.place
        owner = plan.root if plan.operation == "bcast" else source
        return owner, None, plan.amounts.share(damage.block, damage.place)

    # -- ranks -----------------------------------------------------------------------------------------------

    def _member(self, relative: int) -> int:
        assert self._plan is not None
        return (relative + self._plan.root) % len(self._members)

    def _relative(self, me: int) -> int:
        return (me - (self._plan.root if self._plan is not None else 0)) % len(self._members)

    def _rank(self, relative: int) -> int:
        return self._members[self._member(relative)]


def _damaged_part(part: Any, member: Any, place: float, *, nan: bool) -> Any:
    if member is not None and isinstance(part, (list, dict)):
        return with_damaged_member(part, member, place, nan=nan)
    return damaged(part, place, nan=nan)


DETECTION_S = 0.01  # from a rank's death until the other ranks know of it (measured with ULFM on one node)


class Crashes:
    """Ends ranks at their time of death and restarts them, as the fault plan says."""

    def __init__(
        self, world: World, renew: Callable[[int], None], begin_job: Callable[[tuple[int, ...]], None]
    ) -> None:
        """`renew(rank)` creates new services for a restarted rank; `begin_job(ranks)` a COMM_WORLD for a new job."""
        self._world, self._renew, self._begin_job = world, renew, begin_job
        self._job: set[int] = set()  # ranks of a new job that are yet to begin
        self._programs: dict[int, Program] = {}

    def begin(self, rank: Rank, program: Program, clock_s: float = 0.0) -> None:
        """Run a rank's program from a time on, and end it at its time of death."""
        world = self._world
        rank.ended_s = math.inf
        if world.plan is not None:
            self._programs[rank.id] = program
        rank.tasks = [world.kernel.spawn(rank.id, program, clock=clock_s)]
        self._await_death(rank)

    def _await_death(self, rank: Rank) -> None:
        if rank.death_s < math.inf:
            death_s = rank.death_s
            self._world.kernel.env.at(death_s, rank.id, lambda: self._expire(rank, death_s))

    def skip(self, rank: Rank, time_s: float) -> None:
        """Cancel a rank's deaths before the time to which it is about to move: they are past."""
        if rank.death_s < time_s:
            rank.death_s = self._world.plan.death_s(rank.id, time_s)
            self._await_death(rank)

    def ended(self, task: Task) -> None:
        """Handle the end of a rank's task; the task may have reached the rank's death by itself."""
        rank = self._world.ranks[task.rank]
        if task.clock >= rank.death_s and not rank.dead:
            self._mark_dead(rank)
        elif task is rank.tasks[0] and not rank.dead:
            rank.ended_s = task.clock
            self._world.ended += 1
        self._check_agreements()

    def _expire(self, rank: Rank, death_s: float) -> None:
        """End the tasks of a rank that waits at its time of death."""
        if rank.death_s != death_s or rank.dead or not any(task.alive for task in rank.tasks):
            return
        self._mark_dead(rank)
        for task in rank.tasks:
            if task.alive:
                self._world.kernel.throw(task, RankDied())

    def _mark_dead(self, rank: Rank) -> None:
        world, env = self._world, self._world.kernel.env
        # The rank's own clock knows its death exactly (`Rank.advance_to` stops there). The other ranks learn of it
        # later, all at the same time, so that their reactions do not depend on the order in which they run.
        rank.dead = True
        rank.digest.note((rank.death_s, CRASH, -1, 0, 0))
        known_s = max(rank.death_s, env.now) + DETECTION_S
        world.failed[rank.id, rank.incarnation] = known_s
        if rank.death_s < math.inf:  # otherwise it is paused forever
            world.recorder.event(rank.id, rank.death_s, "crash", {})
        env.at(known_s, rank.id, self._announce)
        self._await_restart(rank)
        if all(each.dead or each.ended_s < math.inf for each in world.ranks):
            self._lose_job(rank)

    def _await_restart(self, rank: Rank) -> float:
        """Schedule a rank's restart as planned; return its time, or inf."""
        env, plan = self._world.kernel.env, self._world.plan
        again_s = math.inf if plan is None else float(plan.restart_s(rank.id, rank.death_s))
        if again_s < math.inf:
            env.at(max(again_s, env.now), rank.id, lambda: self._restart(rank, again_s))
        return again_s

    def _lose_job(self, last: Rank) -> None:
        """Start a new job, with its own COMM_WORLD, of the ranks that restart: no rank remains that they could join."""
        world = self._world
        if world.plan is None:  # these deaths are ends of processes
            return
        for rank in world.ranks:
            # It ended before its planned death; but its job has not, and the job restarts as a whole.
            if not rank.dead and rank.death_s <= last.death_s:
                rank.dead = True
                self._await_restart(rank)
        members = [each.id for each in world.ranks if each.dead and each.death_s < math.inf]
        members = [
            each for each in members if world.plan.restart_s(each, world.ranks[each].death_s) < math.inf
        ]
        if members:
            self._job = set(members)
            self._begin_job(tuple(members))
            world.recorder.event(last.id, last.death_s, "requeue", {"ranks": len(members)})

    def _announce(self) -> None:
        self._check_agreements()
        self.end_waits()

    def end_waits(self) -> None:
        """Wake the tasks that wait for ranks known to be dead."""
        kernel, now_s = self._world.kernel, self._world.kernel.env.now
        for task in kernel.tasks:
            doomed = task.wait.doomed(now_s) if task.parked and task.wait is not None else ()  # type: ignore[attr-defined]
            if doomed:
                task.clock = max(task.clock, now_s)  # the error message includes the time
                kernel.throw(task, rank_failed(task, task.wait, doomed))

    def _check_agreements(self) -> None:
        for check in list(self._world.on_death):
            check()

    def _restart(self, rank: Rank, time_s: float) -> None:
        """Begin a rank's program again: it keeps only its place and its machine."""
        # A restarted process has lost its memory: its NIC is idle, and its random streams and its own communicators
        # begin anew. `revoked` and `shut_out` make its calls on any earlier communicator end in `Revoked`, since
        # messages of different incarnations must not be confused.
        world = self._world
        joins = rank.id not in self._job
        self._job.discard(rank.id)
        rank.incarnation, rank.dead, rank.outside, rank.evicted = rank.incarnation + 1, False, joins, False
        rank.observers, rank.busy, rank.cleared = world.observers_of(rank.id), (), []
        # A spare may take over at once: the death that it makes good is past.
        rank.death_s = world.plan.death_s(rank.id, math.nextafter(time_s, math.inf))
        rank.nic_free_s = rank.bulk_free_s = max(time_s, 0.0)
        rank.streams, rank.generators = Streams(world.seed, rank.id), None
        rank.attachments.clear()
        if joins:
            world.revoked = True
            for context in world.open_contexts:
                context.shut_out(rank.id)
        self._renew(rank.id)
        rank.digest.note((time_s, RESTART, -1, 0, 0))
        world.recorder.event(rank.id, time_s, "restart", {})
        self.begin(rank, self._programs[rank.id], time_s)
