"""One rank's end of the asynchronous exchange on one communicator: mailbox, state machines, and the shutdown.

Every call does what can be done and returns; only `ShutdownDrain` waits, within `shutdown_timeout_s`. One `Iprobe`
finds all that has arrived; requests and buffers are kept until they complete; a message to the own rank takes no wire.
If the coordinating rank dies, the next one takes its place. What a decision does to a model is not known here.

MPI does not allow messages that nobody receives (MPICH kills such a job when it finalizes). So at the end rank 0 adds
up what each has sent to each, after which none sends any more, and each stays until it has received its share. The
coordinator goes on deciding for those who still train, until all others have left or are known to be dead.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from spawnsim.comm import ANY_SOURCE, Comm, Status
from spawnsim.errors import RankFailed, Revoked, Timeout
from spawnsim.policies.exchange.coordinator import Coordinator, Inbox, Outcome, Wiring
from spawnsim.policies.exchange.messages import (
    Bytes,
    Kind,
    Message,
    Unreadable,
    assign_message,
    assignment_of,
    decode,
    encode,
)
from spawnsim.policies.exchange.replacement import Packer
from spawnsim.policies.rules.donors import Assignment, Decision, Rules
from spawnsim.policies.rules.selection import Report
from spawnsim.policies.state.arithmetic import CPU
from spawnsim.policies.state.layout import Travels, collect
from spawnsim.policies.state.snapshot import Compression, allocator_for, model_device

if TYPE_CHECKING:
    from spawnsim.comm import Request


AT_ONCE_NBYTES = 4096  # every MPI delivers so little with the envelope: a receive after a probe does not wait


def _new_buffer(nbytes: int) -> Bytes:
    return np.empty(nbytes, np.uint8)


class Mailbox:
    """One rank's post on one communicator and tag. `room` makes the memory that large messages are received into."""

    def __init__(self, comm: Comm, tag: int) -> None:
        self.comm, self.tag, self.rank = comm, tag, comm.Get_rank()
        self.counts: Counter[str] = Counter()
        self._probe, self._status = comm.Iprobe, Status()
        self.sent: Counter[int] = Counter()  # messages put on the wire, by rank
        self.received = 0
        self.room: Callable[[int], Bytes] = _new_buffer
        self._own: deque[Bytes] = deque()
        self._sends: list[tuple[Request, Bytes]] = []
        self._receives: list[tuple[Request, int, Bytes]] = []

    def send(self, rank: int, message: Bytes) -> bool:
        """Send bytes to a rank; False if it is known to be dead. The buffer must not be written to afterwards."""
        if rank == self.rank:
            self._own.append(message)
            return True
        try:
            self._sends.append((self.comm.Isend(message, rank, self.tag), message))
            self.sent[rank] += 1
            self.counts["bytes_sent"] += message.size
        except RankFailed:
            self.counts["undeliverable"] += 1
            return False
        return True

    def poll(self) -> list[tuple[int, Bytes]]:
        """Return (source, bytes) of everything that has arrived; no wait, one probe if there is nothing."""
        arrived = self.own()
        if self._receives:
            arrived += self._finished()
        try:
            while self._probe(ANY_SOURCE, self.tag, self._status):
                self._take(arrived)
        except RankFailed:
            self.counts["peer failed"] += 1
        return arrived

    def own(self) -> list[tuple[int, Bytes]]:
        """Return what this rank has sent to itself."""
        return [(self.rank, self._own.popleft()) for _ in range(len(self._own))]

    def _take(self, arrived: list[tuple[int, Bytes]]) -> None:
        source, nbytes = self._status.Get_source(), self._status.Get_count()
        buffer = self.room(nbytes) if nbytes > AT_ONCE_NBYTES else _new_buffer(nbytes)
        self.counts["bytes_received"] += nbytes
        self.received += 1
        if nbytes <= AT_ONCE_NBYTES:
            self.comm.Recv(buffer, source, self.tag)
            arrived.append((source, buffer))
            return
        request = self.comm.Irecv(buffer, source, self.tag)
        if request.Test():
            arrived.append((source, buffer))
        else:
            self._receives.append((request, source, buffer))

    def _finished(self) -> list[tuple[int, Bytes]]:
        finished, receives = [], []
        for request, source, buffer in self._receives:
            try:
                over = request.Test()
            except RankFailed:  # it died while sending
                self.counts["peer failed"] += 1
                continue
            if over:
                finished.append((source, buffer))
            else:
                receives.append((request, source, buffer))
        self._receives = receives
        return finished

    def sending(self, message: Bytes) -> bool:
        """Return whether this memory is still being sent, as far as is known since `reap`."""
        return any(message is other for _, other in self._sends)

    def reap(self) -> bool:
        """Let go of sends that have completed; return whether all have."""
        if self._sends:
            self._sends = [entry for entry in self._sends if not self._gone(entry[0])]
        return not self._sends

    def _gone(self, request: Request) -> bool:
        try:
            return request.Test()
        except RankFailed:  # nobody will take it any more
            self.counts["peer failed"] += 1
            return True

    def dead(self) -> list[int]:
        """Return the ranks of the group that are known to have died; none where the job ends with the first."""
        if not self.comm.capabilities().survives:
            return []
        failed = cast("Any", self.comm).Get_failed()
        return [rank for rank in failed.Translate_ranks(None, self.comm.Get_group()) if rank >= 0]

    @property
    def unfinished(self) -> int:
        """Number of sends and receives under way."""
        return len(self._sends) + len(self._receives)


class Exchange:
    """One rank's side of the protocol; on the coordinating rank, the coordinator's as well."""

    def __init__(
        self, comm: Comm, rules: Rules, wiring: Wiring, *, travels: Travels, cooldown: int,
        compression: Compression | None = None,
    ) -> None:  # fmt: skip
        self.comm, self.wiring, self.travels = comm, wiring, travels
        self.rules, self.cooldown = rules, cooldown
        self.mailbox = Mailbox(comm, wiring.tag)
        self.inbox = Inbox(wiring.new_deadline())
        self.leader = min(wiring.coordinator, comm.Get_size() - 1)  # after recoveries groups are smaller
        self.coordinator = self._new_coordinator() if comm.Get_rank() == self.leader else None
        self.assigned: Assignment | None = None  # taken in the latest `serve`: the time to take a reference
        self.leaving = False  # nothing is sent any more
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

    def report(self, iteration: int, metric: float, *, expired: bool) -> None:
        """Tell the coordinator this rank's metric of the round `iteration`."""
        self.mailbox.reap()
        self._pace(self.comm.clock.now())
        settled = self.inbox.settled
        message = Message(Kind.REPORT, iteration, iteration, value=metric, settled=settled, expired=expired)
        self.tell_leader(message)

    def tell_leader(self, message: Message) -> None:
        """Send to the coordinating rank; if it is known to be dead, to the next one, which takes over its part."""
        size = self.comm.Get_size()
        for _ in range(size):
            if self.mailbox.send(self.leader, encode(message)):
                return
            self.leader = (self.leader + 1) % size

    def _pace(self, now_s: float) -> None:
        """Learn the time from call to call, from report to report."""
        if self._calls:
            self.call_s = (now_s - self._reported_s) / self._calls
        self._reported_s, self._calls = now_s, 0

    def serve(
        self, iteration: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> Outcome | None:
        """Handle all that has arrived; return this rank's replacement if it is ready to be carried out."""
        self.assigned = None
        self._calls += 1
        arrived = self.mailbox.poll()
        if not (arrived or self.inbox.waiting or (self.coordinator and self.coordinator.waiting)):
            return None
        now_s = self.comm.clock.now()
        self._packed.clear()
        while True:
            for source, buffer in arrived:
                self._handle(source, buffer, (now_s, iteration), (model, optimizer))
            self._coordinate(iteration, now_s)
            arrived = self.mailbox.own()  # what this rank's roles have just told each other
            if not arrived:
                break
        return self.inbox.outcome(now_s)

    def _handle(
        self, source: int, buffer: Bytes, when: tuple[float, int],
        whose: tuple[torch.nn.Module, torch.optim.Optimizer],
    ) -> None:  # fmt: skip
        now_s, iteration = when
        try:
            message = decode(buffer)
            if message.kind == Kind.FETCH and not self.leaving:
                self._give(source, message.round, iteration, whose)
            elif message.kind == Kind.SNAPSHOT:
                self.inbox.part(source, message, now_s)
            elif message.kind == Kind.ASSIGN and not self.leaving:
                self.mailbox.room = allocator_for(model_device(whose[0]))
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
            self.coordinator = (
                self._new_coordinator()
            )  # the ranks before this one are dead: it is the leader now
        report = Report(source, message.value, message.expired)
        self.coordinator.report(message.round, report, now_s, message.settled)

    def _give(
        self, replaced: int, round_: int, iteration: int, whose: tuple[torch.nn.Module, torch.optim.Optimizer]
    ) -> None:
        messages = self._packed.get(round_)
        if messages is None:
            live = collect(*whose, self.travels)
            messages = self._packed[round_] = self._packer.pack(live, round_, iteration, busy=self._busy)
        for message in messages:
            self.mailbox.send(replaced, message)

    def _busy(self, memory: Bytes) -> bool:
        """Return whether a snapshot is being sent from this memory, or may be in this call."""
        mine = (message for messages in self._packed.values() for message in messages)
        return self.mailbox.sending(memory) or any(memory is message for message in mine)

    def _ask(self, assignment: Assignment, now_s: float, iteration: int) -> None:
        if self.inbox.assign(assignment, now_s):
            self.assigned = assignment
            for donor in assignment.donors:
                self.mailbox.send(donor, encode(Message(Kind.FETCH, assignment.round, iteration)))

    def _coordinate(self, iteration: int, now_s: float) -> None:
        if self.coordinator is None or not self.coordinator.waiting:
            return
        for decision in self.coordinator.due(now_s):
            for rank, assignment in decision.assignments.items():
                self.mailbox.send(rank, encode(assign_message(assignment, iteration)))
            self._record(decision)

    def _record(self, decision: Decision) -> None:
        world = self.comm.Get_group().members
        self.comm.record.event(
            "decision",
            round=decision.round,
            replaced=[world[rank] for rank in sorted(decision.assignments)],
            reported=decision.reported,
            low=decision.low,
            high=decision.high,
        )

    def unpack(self, outcome: Outcome, device: torch.device = CPU) -> dict[int, dict[str, torch.Tensor]]:
        """Return the tensors of each donor whose snapshot is whole and can be read, on the device of who needs them."""
        unpacked = {}
        for donor, parts in outcome.given.items():
            try:
                unpacked[donor] = self._packer.unpack(parts, device)
            except Unreadable:
                self.counts["unreadable"] += 1
        return unpacked

    def tally(self) -> Counter[str]:
        """Return all counters of this rank's side of the protocol."""
        total = self.counts + self.mailbox.counts + self.inbox.counts
        return total + self.coordinator.counts if self.coordinator else total


PATIENCE_CALLS = 4  # others answer once a call
PATIENCE_POLLS = 10


class ShutdownDrain:
    """One rank's way out. `iteration`, `model` and `optimizer` are the latest, for those who still ask for them."""

    def __init__(
        self, exchange: Exchange, iteration: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self.exchange, self._latest = exchange, (iteration, model, optimizer)
        self._clock, self._wiring = exchange.comm.clock, exchange.wiring

    def __call__(self) -> bool:
        """Leave; return whether nothing was left behind."""
        exchange = self.exchange
        end_s = self._clock.now() + self._wiring.shutdown_timeout_s
        try:
            exchange.tell_leader(Message(Kind.LEAVE, self._latest[0], self._latest[0]))
            self._finish(min(end_s, self._clock.now() + PATIENCE_CALLS * exchange.call_s))
            while exchange.coordinator and not self._alone() and self._clock.now() < end_s:
                self._rest()
            exchange.coordinator, exchange.leaving = None, True
            return self._receive(self._expected(end_s), end_s)
        except (RankFailed, Revoked, Timeout):
            return False

    def _alone(self) -> bool:
        """Whether all others have said goodbye to this coordinating rank, or have died."""
        coordinator = self.exchange.coordinator
        assert coordinator is not None
        for rank in () if coordinator.alone else self.exchange.mailbox.dead():
            coordinator.leave(rank)
        return coordinator.alone

    def _rest(self) -> None:
        self.exchange.serve(*self._latest)
        self._clock.sleep(self._wiring.poll_interval_s)

    def _finish(self, end_s: float) -> None:
        """Let donors answer that were asked; the result is too late to be of use."""
        while self.exchange.inbox.waiting and self._clock.now() < end_s:
            self._rest()
        self.exchange.inbox.give_up()

    def _expected(self, end_s: float) -> int:
        """Return how many messages were sent to this rank, once all ranks have come to say so."""
        comm = self.exchange.comm
        with self._clock.deadline(max(end_s - self._clock.now(), 1e-3)):
            # Few are sent to by each: a vector of all ranks on every rank would be the largest thing a rank holds.
            sent = comm.gather(dict(self.exchange.mailbox.sent), root=0)
            expected = comm.scatter(None if sent is None else _by_receiver(sent), root=0)
        return int(expected)

    def _receive(self, expected: int, end_s: float) -> bool:
        """Receive what is still missing; what does not come while nothing moves, or in all the time left, is lost."""
        box, patience_s = self.exchange.mailbox, PATIENCE_POLLS * self._wiring.poll_interval_s
        moved_s, before = self._clock.now(), -1
        end_s = max(end_s, moved_s + patience_s)
        while not (box.reap() and box.received >= expected and not box.unfinished):
            now_s = self._clock.now()
            if box.received != before:
                moved_s, before = now_s, box.received
            elif now_s > end_s or (now_s > moved_s + patience_s and not box.unfinished):
                return False
            self._rest()
        return True


def _by_receiver(sent: Sequence[Mapping[int, int]]) -> list[int]:
    """Return how many messages were sent to each rank, from how many each has sent to whom."""
    total: Counter[int] = Counter()
    for each in sent:
        total.update(each)
    return [total[rank] for rank in range(len(sent))]
