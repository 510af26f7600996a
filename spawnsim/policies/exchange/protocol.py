"""One rank's side of the replacement protocol on one communicator: state machines on an endpoint, and the shutdown.

Every call does the possible work and returns; only `ShutdownDrain` waits, for ranks that still train. Progress is made
only in the policy's own calls, once per training step, because a snapshot must be taken between two steps; so this
module uses no progress engine. If the coordinating rank dies, the next one takes its place. The policy applies a
decision to the model.

MPI does not allow messages that are never received (MPICH kills such a job in finalize). So at the end rank 0 sums up
the number of messages from each rank to each rank, after which no rank sends any more, and each waits until it has
received its share. The coordinator continues to decide for training ranks until all other ranks have left or are known
to be absent.
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
    """One rank's side of the protocol; on the coordinating rank also the coordinator's."""

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
        self.leader = min(wiring.coordinator, comm.Get_size() - 1)  # smaller after recoveries
        self.coordinator = self._new_coordinator() if comm.Get_rank() == self.leader else None
        self.assigned: Assignment | None = None  # accepted in the latest `serve`: time for a reference
        self.leaving = False  # no more sends
        self.reported = -1  # the round of the latest report
        self.call_s = math.inf  # recent time from call to call
        self.counts: Counter[str] = Counter()
        self._calls, self._reported_s = 0, 0.0  # since the last report
        compression = compression if compression is not None else Compression()
        self._packer = Packer(wiring.part_nbytes, checksum=wiring.checksum, compression=compression)
        self._packed: dict[int, list[Bytes]] = {}  # this call's snapshots, by round
        if compression.name:  # needed by a replay
            comm.record.event("transport", compression=compression.name)

    def _new_coordinator(self) -> Coordinator:
        return Coordinator(
            self.comm.Get_size(), self.rules, self.comm.rng("donors"), deadline=self.wiring.new_deadline(),
            quorum=self.wiring.quorum, cooldown=self.cooldown,
        )  # fmt: skip

    def report(self, round_: int, iteration: int, metric: float, *, expired: bool) -> None:
        """Send the coordinator this rank's metric of a round: `iteration`, or an earlier one that is repeated."""
        # Completed sends are dropped before another begins: their memory is reused for the next snapshot.
        self.endpoint.reap()
        self._pace(self.comm.clock.now())
        settled, self.reported = self.inbox.settled, round_
        # Each report contains `settled`, so that a lost report costs at most one round.
        message = Message(Kind.REPORT, round_, iteration, value=metric, settled=settled, expired=expired)
        self.send_to_leader(message)

    def send_to_leader(self, message: Message) -> None:
        """Send to the coordinating rank; if it is known to be dead, to the next one, which takes over its role."""
        size = self.comm.Get_size()
        for _ in range(size):
            if self.endpoint.send(self.leader, message):
                return
            self.leader = (self.leader + 1) % size

    def _pace(self, now_s: float) -> None:
        if self._calls:
            # Averaged over all calls between two reports: a single gap (an evaluation, a checkpoint) is not
            # representative.
            self.call_s = (now_s - self._reported_s) / self._calls
        self._reported_s, self._calls = now_s, 0

    def serve(
        self, iteration: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> Outcome | None:
        """Handle all arrived messages; return this rank's replacement if it is ready."""
        self.assigned = None
        self._calls += 1
        arrived: list[tuple[int, Message]] = []
        gathered = False
        for source, message in self.endpoint.messages():
            if message.kind == Kind.SNAPSHOT and not message.damaged:
                # Immediately, before the next is received: together they may exceed the memory.
                gathered = True
                self._gather(source, self.inbox.part(source, message), (model, optimizer))
            else:
                arrived.append((source, message))
        # Do not read the clock if nothing happened: this holds for most calls of a training loop, and a read costs
        # virtual ranks an event.
        if not (arrived or gathered or self.inbox.waiting or (self.coordinator and self.coordinator.waiting)):
            return None
        now_s = self.comm.clock.now()
        # Snapshots belong to this call's model; kept longer, they would be another iteration's weights.
        self._packed.clear()
        while True:
            # Messages before decisions: a report that has arrived must count in the decision.
            for source, message in arrived:
                self._handle(source, message, (now_s, iteration), (model, optimizer))
            self._coordinate(iteration, now_s)
            arrived = self.endpoint.from_self()  # messages between this rank's own roles
            if not arrived:
                break
        # After the loop, because the last part of a snapshot may be this rank's own answer to itself.
        return self.inbox.outcome(now_s)

    def _handle(
        self, source: int, message: Message, when: tuple[float, int],
        whose: tuple[torch.nn.Module, torch.optim.Optimizer],
    ) -> None:  # fmt: skip
        now_s, iteration = when
        if message.damaged:  # here every message with a body needs it
            self.counts["unreadable"] += 1
            return
        try:
            # A leaving rank sends nothing: its sends were counted for the shutdown already.
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
        # One packing serves all replaced ranks of a round that ask in one call: all of them under "best_only".
        messages = self._packed.get(round_)
        if messages is None:
            live = collect(*whose, self.travels)
            messages = self._packed[round_] = self._packer.pack(live, round_, iteration, busy=self._busy)
        else:  # several ranks ask
            messages = self._packed[round_] = [immutable(message) for message in messages]
        for message in messages:
            self.endpoint.send_packed(replaced, message)

    def _busy(self, memory: Bytes) -> bool:
        # Memory with a send under way must not be overwritten, nor memory that this call is about to send.
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
        """Add a complete snapshot."""
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
    """Work that a drain finds under way: `open` rounds, and `cut` decisions, which were not completed.

    `settled` is the last round that this rank has completed, `assigned` the coordinator's rounds by replaced rank.
    """

    open: bool = False
    cut: bool = False
    settled: int = -1
    assigned: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, exchange: Exchange) -> Unfinished:
        """Return one rank's unfinished work."""
        books = exchange.coordinator
        assigned = {} if books is None else books.assigned
        return cls(books is not None and books.waiting, settled=exchange.inbox.settled, assigned=assigned)

    @classmethod
    def all_of(cls, comm: Comm, own: Unfinished) -> Unfinished:
        """Return the unfinished work of all ranks together; collective."""
        gathered = comm.gather((own.open, own.settled, own.assigned), root=0)
        found = None
        if gathered is not None:
            assigned = [pair for _, _, each in gathered for pair in each.items()]
            found = (
                any(each[0] for each in gathered),
                any(gathered[rank][1] < round_ for rank, round_ in assigned),
            )
        return cls(*comm.bcast(found, root=0))


PATIENCE_CALLS = 4  # other ranks answer once per call
PATIENCE_POLLS = 10
UNTAKEN = "its receivers did not take them in time"


class ShutdownDrain:
    """One rank's shutdown. `iteration`, `model` and `optimizer` are the latest, for ranks that still request them."""

    def __init__(
        self, exchange: Exchange, iteration: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self.exchange, self._latest = exchange, (iteration, model, optimizer)
        self._clock, self._wiring = exchange.comm.clock, exchange.wiring
        self.unfinished = Unfinished()

    def __call__(self, *, together: bool = False) -> str:
        """Leave; return why messages remained, "" if none did.

        `together`: all ranks drain now, for a checkpoint. Open rounds end immediately, and `unfinished` records them.
        """
        exchange = self.exchange
        try:
            if together:
                self.unfinished = Unfinished.of(exchange)
                exchange.inbox.give_up()
            else:
                exchange.send_to_leader(Message(Kind.LEAVE, self._latest[0], self._latest[0]))
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
        """Wait until all ranks arrive here while the coordinator decides; return absent ranks and the reasons."""
        exchange, patience_s = self.exchange, self._wiring.shutdown_timeout_s
        attendance, absent = Attendance(exchange.comm, patience_s), dict[int, str]()
        while exchange.coordinator and not self._alone():
            if attendance.absences.is_due():
                if attendance.all_here():  # a LEAVE was lost
                    break
                absent |= attendance.absences.check()
                for rank in absent:
                    exchange.coordinator.leave(rank)
                continue
            # Only an open round reaches its deadline without a message.
            self._rest(0.0 if exchange.coordinator.waiting else attendance.absences.wait_s())
        # The coordinator stops before the sends are counted: a decision after the count would be an unexpected message.
        exchange.coordinator, exchange.leaving = None, True
        # Once more: a paused rank may arrive after other ranks gave it up, and these do not arrive a second time.
        return absent or attendance.complete() or Attendance(exchange.comm, patience_s).complete()

    def _alone(self) -> bool:
        """Return whether all other ranks have left this coordinating rank, or have died."""
        coordinator = self.exchange.coordinator
        assert coordinator is not None
        # This rank's own LEAVE may have gone to a coordinator that has died.
        coordinator.leave(self.exchange.comm.Get_rank())
        for rank in () if coordinator.alone else self.exchange.endpoint.find_failed():
            coordinator.leave(rank)
        return coordinator.alone

    def _rest(self, seconds: float = 0.0) -> None:
        self.exchange.endpoint.wait(max(seconds, self._wiring.poll_interval_s))
        self.exchange.serve(*self._latest)

    def _finish(self) -> None:
        """Let the donors that were asked answer; the result comes too late to be used."""
        end_s = self._clock.now() + min(
            self._wiring.shutdown_timeout_s, PATIENCE_CALLS * self.exchange.call_s
        )
        while self.exchange.inbox.waiting and self._clock.now() < end_s:
            self._rest()
        self.exchange.inbox.give_up()

    def _expected(self) -> int:
        """Return the number of messages sent to this rank; collective."""
        comm = self.exchange.comm
        with self._clock.deadline(self._wiring.shutdown_timeout_s):
            # Each rank sends to few: a vector over all ranks would be the largest object of a rank.
            sent = comm.gather(dict(self.exchange.endpoint.sent), root=0)
            # Gathered and scattered by rank 0 instead of Alltoall, which for 1,000 ranks needs a vector of 1,000
            # numbers on each.
            expected = comm.scatter(None if sent is None else _by_receiver(sent), root=0)
        return int(expected)

    def _receive(self, expected: int) -> str:
        """Receive the missing messages; after a silence, or at the time limit, the rest counts as lost."""
        box, patience_s = self.exchange.endpoint, PATIENCE_POLLS * self._wiring.poll_interval_s
        moved_s, before = self._clock.now(), -1
        end_s = moved_s + max(self._wiring.shutdown_timeout_s, patience_s)
        while not (box.reap() and box.received >= expected and not box.unfinished):
            now_s = self._clock.now()
            if box.received != before:
                moved_s, before = now_s, box.received
            # Silence ends the wait only while no message is incomplete: a large part may take longer than the patience.
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
