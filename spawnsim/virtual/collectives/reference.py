"""A collective message by message: the same rounds as the dataflow, sent on the kernel's own wire.

Slower by orders of magnitude and needed by nobody but those who doubt: it is what the dataflow is held to. Lengths are
whole bytes here, so a vector that does not divide may differ by what a byte takes. Alone in this package it knows the
wire and mailboxes, and nothing else in the package knows it; buffers and communicators' calls it does not know.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from spawnsim.virtual.collectives.timing import CollectivePlan, Step
from spawnsim.virtual.engine import wire
from spawnsim.virtual.engine.completion import Message, Receive
from spawnsim.virtual.engine.matching import Mailbox
from spawnsim.virtual.engine.waiting import Waiting, await_one
from spawnsim.virtual.engine.world import World


class Group(Protocol):
    """What is needed of a communicator: `communicators' Context` has it."""

    @property
    def world(self) -> World:
        """The cluster."""
        ...

    @property
    def everyone(self) -> Sequence[int]:
        """The world ranks of the members."""
        ...

    def mailbox(self, rank: int) -> Mailbox:
        """Return the mailbox of a world rank."""
        ...


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

    def __init__(self, group: Group, me: int) -> None:
        self.group, self.me = group, me
        self.world = group.world
        self.rank = self.world.ranks[group.everyone[me]]
        self._in_free_s = self._stay_s = -math.inf

    def perform(self, plan: CollectivePlan, tag: int = 0, key: tuple[int, ...] | None = None) -> None:
        """Do this rank's part of a plan, on the running task; its clock ends when the rank leaves."""
        self._in_free_s = self._stay_s = -math.inf
        for step in plan.rounds_of(self.me):
            self._send(step, tag, key)
            for source, nbytes, reduced in step.receives:
                self._take(source, round(nbytes), tag)
                self._spend(reduced * self.world.network.gamma_s_per_B)
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
                inject_s = self.world.price(self.rank.id, members[dest], round(nbytes))[1]
                self._stay_s = max(now_s, self._stay_s) + inject_s

    def _take(self, source: int, nbytes: int, tag: int) -> None:
        kernel, members = self.world.kernel, self.group.everyone
        receive = Receive(kernel, source, tag, kernel.current.clock)
        self.group.mailbox(self.rank.id).post(receive)
        receive.nic = None  # messages are let in here
        await_one(self.world, receive, self._waiting(source, tag))
        assert receive.message is not None and receive.message.arrival_s is not None
        drain_s = self.world.network.drain(members[source], self.rank.id, nbytes)
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
