"""One rank's side of the replacement protocol on one communicator: state machines on an endpoint, and the shutdown.

Every call does what can be done and returns; only `ShutdownDrain` waits, for ranks that still train. Progress is made
in the policy's own calls alone, once per training step, because a snapshot must be taken between two steps; so there
is no progress engine here. If the coordinating rank dies, the next one takes its place. What a decision does to a
model is the policy's business.

MPI does not allow messages that are never received (MPICH kills such a job when it finalizes). So at the end rank 0
adds up what each rank has sent to each, after which none sends any more, and each stays until it has received its
share. The coordinator goes on deciding for those who still train, until all others have left or are known to be absent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from spawnsim.comm import Comm
from spawnsim.comm.objects import DIED
from spawnsim.errors import RankFailed, Revoked, Timeout
from spawnsim.policies.exchange.coordinator import Coordinator, ExchangeOptions, Inbox, Outcome
from spawnsim.policies.exchange.endpoint import Attendance, Endpoint, shown
from spawnsim.policies.exchange.messages import (
    Kind,
    Message,
    Unreadable,
    assign_message,
    assignment_of,
    immutable,
)
from spawnsim.policies.exchange.replacement import Gathering, Packer
from spawnsim.policies.rules.donors import Assignment, Decision, Rules
from spawnsim.policies.rules.selection import Report
from spawnsim.policies.state.codecs import Bytes
from spawnsim.policies.state.layout import StateScope, collect
from spawnsim.policies.state.snapshot import Compression, allocator_for, model_device


class Exchange:
    """One rank's side of the protocol; on the coordinating rank, the coordinator's as well."""

    def __init__(
        self, comm: Comm, rules: Rules, wiring: ExchangeOptions, *, travels: StateScope, cooldown: int,
        guard: bool, compression: Compression | None = None,
    ) -> None:  # fmt: skip
        self.comm, self.wiring, self.travels = comm, wiring, travels
        self.rules, self.cooldown = rules, cooldown
        self.endpoint = Endpoint(comm, wiring.tag, tracked=True)
        self.inbox = Inbox(wiring.new_deadline())
        self.guard = guard
        self.gathering = Gathering({}, travels, guard=guard)  # for the open assignment
        self.leader = min(wiring.coordinator, comm.Get_size() - 1)  # after recoveries groups are smaller
        self.coordinator = self._new_coordinator() if comm.Get_rank() == self.leader else None
        self.assigned: Assignment | None = None  # taken in the latest `serve`: the time to take a reference
        self.leaving = False  # nothing is sent any more
        self.reported = -1  # the round of the latest report
        self.call_s = math.inf  # time from call to call, as of late
        self.counts: Counter[str] = Counter()
        self._calls, self._reported_s = 0, 0.0  # since the last report
        compression = compression if compression is not None else Compression()
        self._packer = Packer(wiring.part_nbytes, checksum=wiring.checksum, compression=compression)
        self._packed: dict[int, list[Bytes]] = {}  # this call's snapshot, by round
        if compression.name:  # a replay needs it
            comm.record.event("transport", compression=compression.name)

    def _new_coordinator(self) -> Coordinator:
        return Coordinator(
            self.comm.Get_size(), self.rules, self.comm.rng("donors"), deadline=self.wiring.new_deadline(),
            quorum=self.wiring.quorum, cooldown=self.cooldown,
        )  # fmt: skip

    def report(self, round_: int, iteration: int, metric: float, *, expired: bool) -> None:
        """Tell the coordinator this rank's metric of a round: `iteration`, or an earlier one that is held again."""
        # Finished sends are let go before another begins: their memory is used again for the next snapshot.
        self.endpoint.reap()
        self._pace(self.comm.clock.now())
        settled, self.reported = self.inbox.settled, round_
        # `settled` travels in each report, so that a report that is lost costs no more than one round.
        message = Message(Kind.REPORT, round_, iteration, value=metric, settled=settled, expired=expired)
        self.tell_leader(message)

    def tell_leader(self, message: Message) -> None:
        """Send to the coordinating rank; if it is known to be dead, to the next one, which takes over its part."""
        size = self.comm.Get_size()
        for _ in range(size):
            if self.endpoint.send(self.leader, message):
                return
            self.leader = (self.leader + 1) % size

    def _pace(self, now_s: float) -> None:
        if self._calls:
            # Averaged over all calls between two reports: a single gap (an evaluation, a checkpoint) is not the pace.
            self.call_s = (now_s - self._reported_s) / self._calls
        self._reported_s, self._calls = now_s, 0

    def serve(
        self, iteration: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> Outcome | None:
        """Handle all that has arrived; return this rank's replacement if it is ready to be carried out."""
        self.assigned = None
        self._calls += 1
        arrived: list[tuple[int, Message]] = []
        gathered = False
        for source, message in self.endpoint.messages():
            if message.kind == Kind.SNAPSHOT and not message.damaged:
                # At once, before the next has been received: together they may be more than memory holds.
                gathered = True
                self._gather(source, self.inbox.part(source, message), (model, optimizer))
            else:
                arrived.append((source, message))
        # No look at the clock where nothing happened: most calls of a training loop are such, and a look costs
        # virtual ranks an event.
        if not (arrived or gathered or self.inbox.waiting or (self.coordinator and self.coordinator.waiting)):
            return None
        now_s = self.comm.clock.now()
        # Snapshots are of this call's model; kept any longer, they would be another iteration's weights.
        self._packed.clear()
        while True:
            # Messages first, decisions after them: a report that is here already must count in the decision.
            for source, message in arrived:
                self._handle(source, message, (now_s, iteration), (model, optimizer))
            self._coordinate(iteration, now_s)
            arrived = self.endpoint.from_self()  # what this rank's roles have just told each other
            if not arrived:
                break
        # After the loop, because the last part of a snapshot may be this rank's own answer to itself.
        return self.inbox.outcome(now_s)

    def _handle(
        self, source: int, message: Message, when: tuple[float, int],
        whose: tuple[torch.nn.Module, torch.optim.Optimizer],
    ) -> None:  # fmt: skip
        now_s, iteration = when
        if message.damaged:  # every message with a body is useless without it here
            self.counts["unreadable"] += 1
            return
        try:
            # A leaving rank sends nothing: what each has sent was counted for the shutdown already.
            if message.kind == Kind.FETCH and not self.leaving:
                self._give(source, message.number, iteration, whose)
            elif message.kind == Kind.ASSIGN and not self.leaving:
                self.endpoint.allocate = allocator_for(model_device(whose[0]))
                self._ask(assignment_of(message), now_s, iteration)
            elif message.kind == Kind.REPORT:
                self._reported(source, message, now_s)
            elif self.coordinator and message.kind == Kind.LEAVE:
                self.coordinator.leave(source)
        except Unreadable:
            self.counts["unreadable"] += 1

    def _reported(self, source: int, message: Message, now_s: float) -> None:
        if self.coordinator is None:
            if self.leaving:
                return
            # The ranks before this one are dead: it is the leader now.
            self.coordinator = self._new_coordinator()
        report = Report(source, message.value, message.expired)
        self.coordinator.report(message.number, report, now_s, message.settled)

    def _give(
        self, replaced: int, round_: int, iteration: int, whose: tuple[torch.nn.Module, torch.optim.Optimizer]
    ) -> None:
        # One packing serves all replaced ranks of a round that ask in one call: under "best_only" that is all of them.
        messages = self._packed.get(round_)
        if messages is None:
            live = collect(*whose, self.travels)
            messages = self._packed[round_] = self._packer.pack(live, round_, iteration, busy=self._busy)
        else:  # several ask
            messages = self._packed[round_] = [immutable(message) for message in messages]
        for message in messages:
            self.endpoint.send_packed(replaced, message)

    def _busy(self, memory: Bytes) -> bool:
        # Memory that is being sent must not be packed anew, nor what this call is about to send.
        mine = (message for messages in self._packed.values() for message in messages)
        return self.endpoint.is_sending(memory) or any(memory is message for message in mine)

    def _ask(self, assignment: Assignment, now_s: float, iteration: int) -> None:
        if self.inbox.assign(assignment, now_s):
            self.assigned = assignment
            weights = dict(zip(assignment.donors, assignment.weights, strict=True))
            self.gathering = Gathering(weights, self.travels, guard=self.guard)
            for donor in assignment.donors:
                self.endpoint.send(donor, Message(Kind.FETCH, assignment.round, iteration))

    def _coordinate(self, iteration: int, now_s: float) -> None:
        if self.coordinator is None or not self.coordinator.waiting:
            return
        for decision in self.coordinator.due(now_s):
            for rank, assignment in decision.assignments.items():
                self.endpoint.send(rank, assign_message(assignment, iteration))
            self._record(decision)

    def _record(self, decision: Decision) -> None:
        # World ranks in the record: ranks of the group change with each recovery.
        world = self.comm.Get_group().members
        self.comm.record.event(
            "decision",
            round=decision.round,
            replaced=[world[rank] for rank in sorted(decision.assignments)],
            reported=decision.reported,
            low=decision.low,
            high=decision.high,
        )

    def _gather(
        self, donor: int, parts: list[Message], whose: tuple[torch.nn.Module, torch.optim.Optimizer]
    ) -> None:
        """Take in a snapshot that is whole."""
        if not parts:
            return
        try:
            tensors = self._packer.unpack(parts, model_device(whose[0]))
        except Unreadable:
            self.counts["unreadable"] += 1
        else:
            self.gathering.add(donor, parts[0].iteration, tensors, whose)

    def tally(self) -> Counter[str]:
        """Return all counters of this rank's side of the protocol."""
        total = self.counts + self.endpoint.counts + self.inbox.counts
        return total + self.coordinator.counts if self.coordinator else total


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What a drain finds under way: rounds that are `open`, and decisions not all of which were carried out.

    `settled` is the last round that this rank was through with, `assigned` the coordinator's rounds by replaced rank.
    """

    open: bool = False
    cut: bool = False
    settled: int = -1
    assigned: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, exchange: Exchange) -> Unfinished:
        """Return what one rank knows."""
        books = exchange.coordinator
        assigned = {} if books is None else books.assigned
        return cls(books is not None and books.waiting, settled=exchange.inbox.settled, assigned=assigned)

    @classmethod
    def all_of(cls, comm: Comm, own: Unfinished) -> Unfinished:
        """Return what holds of all ranks; collective."""
        told = comm.gather((own.open, own.settled, own.assigned), root=0)
        found = None
        if told is not None:
            assigned = [pair for _, _, each in told for pair in each.items()]
            found = any(each[0] for each in told), any(told[rank][1] < round_ for rank, round_ in assigned)
        return cls(*comm.bcast(found, root=0))


PATIENCE_CALLS = 4  # others answer once a call
PATIENCE_POLLS = 10
UNTAKEN = "its receivers did not take them in time"


class ShutdownDrain:
    """One rank's shutdown. `iteration`, `model` and `optimizer` are the latest, for ranks that still ask for them."""

    def __init__(
        self, exchange: Exchange, iteration: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self.exchange, self._latest = exchange, (iteration, model, optimizer)
        self._clock, self._wiring = exchange.comm.clock, exchange.wiring
        self.unfinished = Unfinished()

    def __call__(self, *, together: bool = False) -> str:
        """Leave; return why messages were left behind, "" if none were.

        `together`: all do so now, for a checkpoint. Rounds that are under way end at once, and `unfinished` says so.
        """
        exchange = self.exchange
        try:
            if together:
                self.unfinished = Unfinished.of(exchange)
                exchange.inbox.give_up()
            else:
                exchange.tell_leader(Message(Kind.LEAVE, self._latest[0], self._latest[0]))
                self._finish()
            if absent := self._absent():
                return shown(absent)
            expected = self._expected()
            if together:
                self.unfinished = Unfinished.all_of(exchange.comm, self.unfinished)
            return self._receive(expected)
        except RankFailed as error:
            return shown(dict.fromkeys(error.ranks, DIED))
        except (Revoked, Timeout) as error:
            return str(error)
        finally:
            exchange.endpoint.close()

    def _absent(self) -> dict[int, str]:
        """Wait until all have come here, while the coordinating rank decides; return by rank why it will not."""
        exchange, patience_s = self.exchange, self._wiring.shutdown_timeout_s
        attendance, absent = Attendance(exchange.comm, patience_s), dict[int, str]()
        while exchange.coordinator and not self._alone():
            if attendance.absences.is_due():
                if attendance.all_here():  # a LEAVE was lost
                    break
                absent |= attendance.absences.look()
                for rank in absent:
                    exchange.coordinator.leave(rank)
                continue
            # Only an open round comes to its deadline without a message.
            self._rest(0.0 if exchange.coordinator.waiting else attendance.absences.wait_s())
        # The coordinator stops before the sends are counted: a decision after the count would be a message that nobody
        # expects.
        exchange.coordinator, exchange.leaving = None, True
        # Once more, for who was paused may come when others have given it up: those do not come a second time.
        return absent or attendance.complete() or Attendance(exchange.comm, patience_s).complete()

    def _alone(self) -> bool:
        """Whether all others have said goodbye to this coordinating rank, or have died."""
        coordinator = self.exchange.coordinator
        assert coordinator is not None
        for rank in () if coordinator.alone else self.exchange.endpoint.look_for_failed():
            coordinator.leave(rank)
        return coordinator.alone

    def _rest(self, seconds: float = 0.0) -> None:
        self.exchange.endpoint.wait(max(seconds, self._wiring.poll_interval_s))
        self.exchange.serve(*self._latest)

    def _finish(self) -> None:
        """Let donors answer that were asked; the result is too late to be of use."""
        end_s = self._clock.now() + min(
            self._wiring.shutdown_timeout_s, PATIENCE_CALLS * self.exchange.call_s
        )
        while self.exchange.inbox.waiting and self._clock.now() < end_s:
            self._rest()
        self.exchange.inbox.give_up()

    def _expected(self) -> int:
        """Return how many messages were sent to this rank; all ranks have come to say so."""
        comm = self.exchange.comm
        with self._clock.deadline(self._wiring.shutdown_timeout_s):
            # Few are sent to by each: a vector of all ranks on every rank would be the largest thing a rank holds.
            sent = comm.gather(dict(self.exchange.endpoint.sent), root=0)
            # Gathered and scattered by rank 0, not by Alltoall: with 1,000 ranks that takes a vector of 1,000 numbers
            # on each.
            expected = comm.scatter(None if sent is None else _by_receiver(sent), root=0)
        return int(expected)

    def _receive(self, expected: int) -> str:
        """Receive what is still missing; what does not come while nothing moves, or in all the time left, is lost."""
        box, patience_s = self.exchange.endpoint, PATIENCE_POLLS * self._wiring.poll_interval_s
        moved_s, before = self._clock.now(), -1
        end_s = moved_s + max(self._wiring.shutdown_timeout_s, patience_s)
        while not (box.reap() and box.received >= expected and not box.unfinished):
            now_s = self._clock.now()
            if box.received != before:
                moved_s, before = now_s, box.received
            # Silence ends the wait only while no message is unfinished: a large part may take longer than the patience.
            elif now_s > end_s or (now_s > moved_s + patience_s and not box.unfinished):
                return (
                    f"{expected - box.received} messages to it were lost"
                    if box.received < expected
                    else UNTAKEN
                )
            self._rest()
        return ""


def _by_receiver(sent: Sequence[Mapping[int, int]]) -> list[int]:
    total: Counter[int] = Counter()
    for each in sent:
        total.update(each)
    return [total[rank] for rank in range(len(sent))]
