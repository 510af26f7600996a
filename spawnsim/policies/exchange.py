"""The asynchronous exchange of one rank on one communicator: the mailbox and the state machines that it feeds.

Every call does what can be done and returns; nothing here waits for another rank, except `drain`, which is bounded.
This room knows a communicator (through its mailbox, clock and streams) and the protocol; it does not know what a
decision does to a model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from spawnsim.comm import Comm
from spawnsim.errors import ParameterError, RankFailed, Revoked, UsageError
from spawnsim.policies.coordinator import Coordinator, Quorum, check_quorum
from spawnsim.policies.deadlines import Deadline, Fixed, as_deadline
from spawnsim.policies.deciding import Decision, Rules
from spawnsim.policies.intake import Intake, Outcome
from spawnsim.policies.mailbox import Mailbox
from spawnsim.policies.messages import Assignment, Bytes, Kind, Message, Unreadable, decode, encode
from spawnsim.policies.selection import Report
from spawnsim.policies.snapshot import Packer
from spawnsim.policies.state import Travels, collect

Latest = tuple[int, torch.nn.Module, torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Wiring:
    """How the exchange waits and sends.

    `quorum`: how many reports decide a round at once, a share of the group (float) or a number of ranks (int).
    `deadline`: seconds until a round is decided with those that have reported, and until a replaced rank goes on with
    what its donors have sent; None learns both from past arrivals (`Adaptive`). `coordinator`: which rank of the
    group decides (it takes part like any other). `tag`: every message of the policy has it. `part_nbytes`: larger
    snapshots travel in several messages. `checksum`: check the weights too, at about 4 GB/s
    (control messages always are).
    """

    quorum: Quorum = 1.0
    deadline: float | Callable[[], Deadline] | None = None
    coordinator: int = 0
    tag: int = 7001
    part_nbytes: int = 2**26
    checksum: bool = True
    poll_interval_s: float = 0.01
    shutdown_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        check_quorum(self.quorum)
        if isinstance(self.deadline, (int, float)):
            Fixed(self.deadline)
        for name in ("part_nbytes", "poll_interval_s", "shutdown_timeout_s"):
            if not getattr(self, name) > 0:
                raise ParameterError(f"{name}={getattr(self, name)!r}: give a number above 0")
        if self.coordinator < 0 or self.tag < 0:
            raise ParameterError(
                f"coordinator={self.coordinator}, tag={self.tag}: give numbers of at least 0"
            )

    def new_deadline(self) -> Deadline:
        """Return a deadline that has seen nothing yet."""
        return self.deadline() if callable(self.deadline) else as_deadline(self.deadline)


class Exchange:
    """One rank's side of the protocol; on the coordinating rank, the coordinator's as well."""

    def __init__(self, comm: Comm, rules: Rules, wiring: Wiring, *, travels: Travels, cooldown: int) -> None:
        if wiring.coordinator >= comm.Get_size():
            raise UsageError(
                f"coordinator={wiring.coordinator}: the group has ranks 0 to {comm.Get_size() - 1}"
            )
        self.comm, self.wiring, self.travels = comm, wiring, travels
        self.mailbox = Mailbox(comm, wiring.tag)
        self.intake = Intake(wiring.new_deadline())
        self.coordinator: Coordinator | None = None
        if comm.Get_rank() == wiring.coordinator:
            self.coordinator = Coordinator(
                comm.Get_size(), rules, comm.rng("donors"),
                deadline=wiring.new_deadline(), quorum=wiring.quorum, cooldown=cooldown,
            )  # fmt: skip
        self.assigned: Assignment | None = None  # taken in the latest `serve`: the time to take a reference
        self.counts: Counter[str] = Counter()
        self._calls, self._reported_s, self._call_s = (
            0,
            0.0,
            math.inf,
        )  # calls since the last report, its time, pace
        self._leaving = False  # nothing is sent any more
        self._packer = Packer(wiring.part_nbytes, checksum=wiring.checksum)
        self._packed: dict[int, list[Bytes]] = {}  # this call's snapshot, by round

    def report(self, iteration: int, metric: float, *, expired: bool) -> None:
        """Tell the coordinator this rank's metric of the round `iteration`."""
        self.mailbox.reap()
        self._pace(self.comm.clock.now())
        settled = self.intake.settled
        message = Message(Kind.REPORT, iteration, iteration, value=metric, settled=settled, expired=expired)
        self.mailbox.send(self.wiring.coordinator, encode(message))

    def _pace(self, now_s: float) -> None:
        """Learn the time from call to call, from report to report."""
        if self._calls:
            self._call_s = (now_s - self._reported_s) / self._calls
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
            if message.kind == Kind.FETCH and not self._leaving:
                self._give(source, message.round, iteration, whose)
            elif message.kind == Kind.SNAPSHOT:
                self.intake.part(source, message, now_s)
            elif message.kind == Kind.ASSIGN and not self._leaving:
                self._ask(Assignment.decode(message), now_s, iteration)
            elif self.coordinator and message.kind == Kind.REPORT:
                report = Report(source, message.value, message.expired)
                self.coordinator.report(message.round, report, now_s, message.settled)
            elif self.coordinator and message.kind == Kind.LEAVE:
                self.coordinator.leave(source)
        except Unreadable:
            self.counts["unreadable"] += 1

    def _give(
        self, replaced: int, round_: int, iteration: int, whose: tuple[torch.nn.Module, torch.optim.Optimizer]
    ) -> None:
        messages = self._packed.get(round_)
        if messages is None:
            live = collect(*whose, self.travels)
            messages = self._packed[round_] = self._packer.pack(live, round_, iteration)
        for message in messages:
            self.mailbox.send(replaced, message)

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

    def unpack(self, outcome: Outcome) -> dict[int, dict[str, torch.Tensor]]:
        """Return the tensors of each donor whose snapshot is whole and can be read."""
        unpacked = {}
        for donor, parts in outcome.given.items():
            try:
                unpacked[donor] = self._packer.unpack(parts)
            except Unreadable:
                self.counts["unreadable"] += 1
        return unpacked

    def tally(self) -> Counter[str]:
        """Return all counters of this rank's side of the protocol."""
        total = self.counts + self.mailbox.counts + self.intake.counts
        return total + self.coordinator.counts if self.coordinator else total

    def drain(self, iteration: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        """Say goodbye, and stay until all that was sent to this rank has been received; return whether it was.

        MPI does not allow messages that nobody receives. So all ranks add up what each has sent to each (without
        waiting in it), after which none sends any more, and each stays until it has received its share. Not longer
        than `shutdown_timeout_s`, and not once a rank is known to be dead.
        """
        clock, size = self.comm.clock, self.comm.Get_size()
        self.coordinator, whose = None, (iteration, model, optimizer)
        if self.comm.Get_rank() != self.wiring.coordinator:
            self.mailbox.send(self.wiring.coordinator, encode(Message(Kind.LEAVE, iteration, iteration)))
        began_s = clock.now()
        patience_s = min(self.wiring.shutdown_timeout_s, 4 * self._call_s)  # others answer once a call
        try:
            while self.intake.waiting and clock.now() < began_s + patience_s:
                self._rest(*whose)
            self.intake.give_up()
            self._leaving = True
            total = np.zeros(size, np.int64)
            summing = self.comm.Iallreduce(self.mailbox.sent, total)
            while not summing.Test():
                if clock.now() > began_s + self.wiring.shutdown_timeout_s:
                    return False
                self._rest(*whose)
            return self._receive_all(int(total[self.comm.Get_rank()]), whose)
        except (RankFailed, Revoked):
            return False

    def _rest(self, iteration: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.serve(iteration, model, optimizer)
        self.comm.clock.sleep(self.wiring.poll_interval_s)

    def _receive_all(self, expected: int, whose: Latest) -> bool:
        """Receive until nothing is missing; what does not come while nothing moves is lost."""
        clock, patience_s = self.comm.clock, 10 * self.wiring.poll_interval_s
        moved_s, before = clock.now(), -1
        while self.mailbox.received < expected or self.mailbox.unfinished:
            if self.mailbox.received != before:
                moved_s, before = clock.now(), self.mailbox.received
            elif clock.now() > moved_s + patience_s and not self.mailbox.unfinished:
                return False
            self._rest(*whose)
            self.mailbox.reap()
        return True
