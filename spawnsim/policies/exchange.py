"""The asynchronous exchange of one rank on one communicator: the mailbox and the state machines that it feeds.

Every call does what can be done and returns; nothing here waits for another rank (`leaving.py` does, at the end). If
the coordinating rank dies, the next one takes its place. This room knows a communicator (through its mailbox, clock and
streams) and the protocol; it does not know what a decision does to a model.
"""

from __future__ import annotations

import math
from collections import Counter

import torch

from spawnsim.comm import Comm
from spawnsim.policies.compression import Compression
from spawnsim.policies.coordinator import Coordinator
from spawnsim.policies.deciding import Decision, Rules
from spawnsim.policies.intake import Intake, Outcome
from spawnsim.policies.mailbox import Mailbox
from spawnsim.policies.memory import CPU
from spawnsim.policies.messages import Assignment, Bytes, Kind, Message, Unreadable, decode, encode
from spawnsim.policies.selection import Report
from spawnsim.policies.snapshot import Packer, model_device, room_for
from spawnsim.policies.state import Travels, collect
from spawnsim.policies.wiring import Wiring


class Exchange:
    """One rank's side of the protocol; on the coordinating rank, the coordinator's as well."""

    def __init__(
        self, comm: Comm, rules: Rules, wiring: Wiring, *, travels: Travels, cooldown: int,
        compression: Compression | None = None,
    ) -> None:  # fmt: skip
        self.comm, self.wiring, self.travels = comm, wiring, travels
        self.rules, self.cooldown = rules, cooldown
        self.mailbox = Mailbox(comm, wiring.tag)
        self.intake = Intake(wiring.new_deadline())
        self.leader = min(wiring.coordinator, comm.Get_size() - 1)  # after recoveries groups are smaller
        self.coordinator = self._books() if comm.Get_rank() == self.leader else None
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

    def _books(self) -> Coordinator:
        return Coordinator(
            self.comm.Get_size(), self.rules, self.comm.rng("donors"), deadline=self.wiring.new_deadline(),
            quorum=self.wiring.quorum, cooldown=self.cooldown,
        )  # fmt: skip

    def report(self, iteration: int, metric: float, *, expired: bool) -> None:
        """Tell the coordinator this rank's metric of the round `iteration`."""
        self.mailbox.reap()
        self._pace(self.comm.clock.now())
        settled = self.intake.settled
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
        if not (arrived or self.intake.waiting or (self.coordinator and self.coordinator.waiting)):
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
        return self.intake.outcome(now_s)

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
                self.intake.part(source, message, now_s)
            elif message.kind == Kind.ASSIGN and not self.leaving:
                self.mailbox.room = room_for(model_device(whose[0]))
                self._ask(Assignment.decode(message), now_s, iteration)
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
            self.coordinator = self._books()  # the ranks before this one are dead: it is the leader now
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
        if self.intake.assign(assignment, now_s):
            self.assigned = assignment
            for donor in assignment.donors:
                self.mailbox.send(donor, encode(Message(Kind.FETCH, assignment.round, iteration)))

    def _coordinate(self, iteration: int, now_s: float) -> None:
        if self.coordinator is None or not self.coordinator.waiting:
            return
        for decision in self.coordinator.due(now_s):
            for rank, assignment in decision.assignments.items():
                self.mailbox.send(rank, assignment.encode(iteration))
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
        total = self.counts + self.mailbox.counts + self.intake.counts
        return total + self.coordinator.counts if self.coordinator else total
