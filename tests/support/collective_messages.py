"""A collective message by message: the rounds of its schedule, sent on the kernel's own wire.

Slower by orders of magnitude than the dataflow, which is held to it. Lengths are whole bytes here, so a vector that
does not divide may differ by what a byte takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from spawnsim.models.collectives import CollectivePlan
from spawnsim.models.collectives.schedule import Lengths
from spawnsim.virtual.engine import wire
from spawnsim.virtual.engine.completion import Message, Receive
from spawnsim.virtual.engine.waiting import Waiting, await_one
from spawnsim.virtual.mpi.context import Context


class Step(NamedTuple):
    """One round of one rank: it sends (dest, nbytes) in this order, then takes (source, nbytes, reduced bytes).

    `numbers` tell its sends to one rank apart: those of their lanes, counted over all rounds; of edges, how many edges
    to the same rank come before.
    """

    sends: tuple[tuple[int, float], ...]
    receives: tuple[tuple[int, float, float], ...]
    numbers: tuple[int, ...]


def steps_of(plan: CollectivePlan, rank: int) -> Iterator[Step]:
    """Yield the rounds in which one rank has a part, with absolute ranks of the group."""
    own, size, number = (rank - plan.root) % plan.schedule.size, plan.schedule.size, -1
    for each in plan.schedule.rounds:
        sends, receives, numbers = [], [], []
        for lane in each.lanes:
            number += 1
            pattern, nbytes = lane.pattern, plan.amounts.of(lane)
            sent, taken = pattern.message_from.get(own), pattern.message_to.get(own)
            if sent is not None:
                dest = (int(pattern.dest[sent]) + plan.root) % size
                sends.append((dest, _length(nbytes, sent)))
                again = sum(other == dest for other, _ in sends[:-1])
                numbers.append(again if plan.schedule.cut == "edges" else number)
            if taken is not None:
                source, length = (int(pattern.source[taken]) + plan.root) % size, _length(nbytes, taken)
                receives.append((source, length, length * each.reduces))
        if sends or receives:
            yield Step(tuple(sends), tuple(receives), tuple(numbers))


def _length(nbytes: Lengths, message: int) -> float:
    return nbytes[message].item() if isinstance(nbytes, np.ndarray) else nbytes


class Part(Message):
    """One message of a collective. `key` tells it from all others, for the draws of faults; None: by its number."""

    def __init__(self, source: int, tag: int, nbytes: int, key: tuple[int, ...] | None) -> None:
        super().__init__(source, tag, None, nbytes)
        self.key = key


class Performer:
    """One rank's part in collectives that are sent message by message.

    Its NIC lets messages in as the dataflow has it: in the order in which the algorithm takes them, without gaps. The
    network's contention must be "serial" or "none".
    """

    def __init__(self, group: Context, me: int) -> None:
        self.group, self.me = group, me
        self.world = group.world
        self.rank = self.world.ranks[group.everyone[me]]
        self._in_free_s = self._stay_s = -math.inf

    def perform(self, plan: CollectivePlan, tag: int = 0, key: tuple[int, ...] | None = None) -> None:
        """Do this rank's part of a plan, on the running task; its clock ends when the rank leaves."""
        self._in_free_s = self._stay_s = -math.inf
        for step in steps_of(plan, self.me):
            self._send(step, tag, key)
            for source, nbytes, reduced in step.receives:
                self._take(source, round(nbytes), tag)
                self._spend(self.world.network.reduce_s(reduced, plan.amounts.dtype))
        self.rank.advance_to(self.world.kernel.current, self._stay_s)

    def _send(self, step: Step, tag: int, key: tuple[int, ...] | None) -> None:
        members = self.group.everyone
        for (dest, nbytes), number in zip(step.sends, step.numbers, strict=True):
            message = Part(self.me, tag, round(nbytes), None if key is None else (*key, number))
            now_s = self.world.kernel.current.clock
            wire.send(self.world, self.group.mailbox(members[dest]), message, wire.LOCAL)
            if nbytes > self.world.network.eager_bytes:
                self._stay_s = self.rank.nic_free_s
            else:  # as if the NIC had been idle: see `dataflow.run`
                begin_s, call = max(now_s, self._stay_s), (self.rank.id, members[dest], round(nbytes))
                at = self.world.cost_at
                self._stay_s = (
                    begin_s + (self.world.cost(*call) if at is None else at(*call, begin_s)).inject_s
                )

    def _take(self, source: int, nbytes: int, tag: int) -> None:
        kernel = self.world.kernel
        receive = Receive(kernel, source, tag, kernel.current.clock)
        self.group.mailbox(self.rank.id).post(receive)
        receive.nic = None  # messages are let in here
        await_one(self.world, receive, self._waiting(source, tag))
        assert receive.message is not None and receive.message.arrival_s is not None
        drain_s = receive.message.drain_s
        if drain_s:  # the NIC lets messages in one by one; the wire leaves that to us
            self._in_free_s = max(receive.message.arrival_s, self._in_free_s + drain_s)
            self.rank.advance_to(kernel.current, self._in_free_s + receive.message.receive_s)

    def _waiting(self, source: int, tag: int) -> Waiting:
        group = self.group
        return Waiting("collective message", "a communicator", group.everyone, source, tag, context=group)

    def _spend(self, seconds: float) -> None:
        if seconds:
            task = self.world.kernel.current
            self.rank.advance_to(task, task.clock + seconds)
