"""Faults of links: messages that are lost, late, doubled or damaged between sender and mailbox.

This room knows messages and the plan's verdicts. Collectives are meetings, not messages: link faults leave them alone.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from spawnsim.virtual.completion import Message
from spawnsim.virtual.matching import Mailbox
from spawnsim.virtual.wire import set_out
from spawnsim.virtual.world import World


class Links:
    """Carries messages to mailboxes as a fault plan wants it. Each fault that strikes becomes an event of the run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sent: Counter[tuple[int, int]] = Counter()

    def carry(self, source: int, mailbox: Mailbox, message: Message) -> None:
        """Deliver a message from a world rank, or not, or late, or twice, or damaged."""
        dest, sent_s = mailbox.rank, self._world.kernel.current.clock
        number = self._sent[source, dest]
        self._sent[source, dest] += 1
        verdict = self._world.plan.message(source, dest, sent_s, number)
        struck = [name for name in ("lost", "corrupt") if getattr(verdict, name)]
        struck += ["delayed"] * (verdict.delay_s > 0) + ["doubled"] * (verdict.copies > 1)
        if struck:
            fields = {"what": "+".join(struck), "dest": dest, "number": number}
            self._world.recorder.event(source, sent_s, "link", fields)
        if verdict.lost:
            return
        if verdict.corrupt:
            message.payload = damaged(message.payload)
        message.envelope_s += verdict.delay_s
        if message.arrival_s is not None:
            message.arrival_s += verdict.delay_s
        copies = [twin(message) for _ in range(verdict.copies - 1 if message.arrival_s is not None else 0)]
        for each in (message, *copies):
            set_out(self._world, each, mailbox, source)


def damaged(payload: Any) -> Any:
    """Return a payload with the highest bit of its middle byte flipped."""
    if isinstance(payload, np.ndarray):
        data = payload.copy()
        raw = data.view(np.uint8).reshape(-1)
    else:
        raw = data = np.frombuffer(bytearray(payload), np.uint8)
    if raw.size:
        raw[raw.size // 2] ^= 0x80
    return data if isinstance(payload, np.ndarray) else data.tobytes()


def twin(message: Message) -> Message:
    """Return a second copy of an eager message."""
    copy = Message(message.source, message.tag, message.payload, message.nbytes)
    copy.envelope_s, copy.arrival_s = message.envelope_s, message.arrival_s
    copy.receive_s, copy.drain_s = message.receive_s, message.drain_s
    return copy
