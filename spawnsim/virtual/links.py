"""Faults of links: what is lost, late, doubled or damaged between two ranks.

A program's own messages are told one by one: what is lost never comes. Collectives and windows travel on reliable
connections, as MPI's do: what is lost is sent again until it comes through (`faults.Plan.carried`), what comes twice is
taken once. Each fault that strikes becomes an event of the run.

This room knows messages and the plan's verdicts. It must not know what collectives and windows make of them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from spawnsim.virtual.completion import Message
from spawnsim.virtual.damage import damaged
from spawnsim.virtual.faults import Verdict
from spawnsim.virtual.matching import Mailbox
from spawnsim.virtual.trace import nanoseconds
from spawnsim.virtual.wire import set_out
from spawnsim.virtual.world import World

LINK = 10  # kind of the trace
# What travels on reliable connections: the first part of each draw's key.
COLLECTIVE, REQUEST, ANSWER, TOKEN = 1, 2, 3, 4


class Links:
    """Carries messages to mailboxes, and judges all else, as a fault plan wants it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sent: Counter[tuple[int, int]] = Counter()
        self._tokens: Counter[tuple[int, int]] = Counter()
        self._reliable: set[Mailbox] = set()

    # -- messages --------------------------------------------------------------------------------------------

    def make_reliable(self, mailbox: Mailbox) -> None:
        """Let what goes to a mailbox travel on reliable connections: it is the library's, not the program's."""
        self._reliable.add(mailbox)

    def carry(self, source: int, mailbox: Mailbox, message: Message) -> None:
        """Deliver a message from a world rank, or not, or late, or twice, or damaged."""
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
        """Judge a message of the library's own. It brings the key of its draws, or is a token without payload."""
        key = getattr(message, "key", None)
        if key is None:
            key = TOKEN, self._tokens[source, dest]
            self._tokens[source, dest] += 1
        verdict = self.judge(source, dest, sent_s, *key)._replace(copies=1, corrupt=False)
        self.tell(verdict, source, dest, sent_s, call="window", number=key[-1])
        return verdict

    def _deliver(self, source: int, mailbox: Mailbox, message: Message, verdict: Verdict) -> None:
        if verdict.corrupt:
            message.payload = damaged(message.payload)
        message.envelope_s += verdict.delay_s
        if message.arrival_s is not None:
            message.arrival_s += verdict.delay_s
        copies = [twin(message) for _ in range(verdict.copies - 1 if message.arrival_s is not None else 0)]
        for each in (message, *copies):
            set_out(self._world, each, mailbox, source)

    # -- all else --------------------------------------------------------------------------------------------

    def judge(self, source: int, dest: int, sent_s: float, *key: int) -> Verdict:
        """Return what becomes of data on the reliable connection of two world ranks, sent at `sent_s`."""
        return self._world.plan.carried(source, dest, sent_s, *key)  # type: ignore[no-any-return]

    def tell(self, verdict: Verdict, source: int, dest: int, sent_s: float, **fields: Any) -> None:
        """Make an event of a fault that strikes, and note it among what the sender did."""
        what = verdict.describe()
        if what:
            self._world.recorder.event(source, sent_s, "link", {"what": what, "dest": dest, **fields})
            self.note(verdict, source, dest, sent_s)

    def note(self, verdict: Verdict, source: int, dest: int, sent_s: float) -> None:
        """Note a fault in the sender's trace."""
        late_ns = -1 if verdict.lost else nanoseconds(verdict.delay_s)
        marks = verdict.copies + (verdict.corrupt << 8)
        self._world.ranks[source].trace.note((sent_s, LINK, dest, late_ns, marks))


def twin(message: Message) -> Message:
    """Return a second copy of an eager message."""
    copy = Message(message.source, message.tag, message.payload, message.nbytes)
    copy.envelope_s, copy.arrival_s = message.envelope_s, message.arrival_s
    copy.receive_s, copy.drain_s = message.receive_s, message.drain_s
    return copy
