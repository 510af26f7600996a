"""MPI's matching of messages and receives, in virtual time.

A receive from a *named* source matches that source's messages in the order sent, whatever the clocks say: no event is
needed. A *wildcard* takes the earliest arrival among all sources, so from the first one on the mailbox is *timed*:
messages are matched by events, in the order in which their envelopes arrive, against receives in the order posted.

Once a mailbox has seen a wildcard it stays timed: a rank that takes from anybody once does so again.

This room knows messages, receives and arrival times of one rank on one communicator. It must not know buffers,
networks or what a rank does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Any

from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG
from spawnsim.virtual.card import Card
from spawnsim.virtual.completion import Completion, Message, Receive
from spawnsim.virtual.kernel import Kernel


class Mailbox:
    """The unexpected messages and posted receives of one rank on one communicator."""

    def __init__(self, kernel: Kernel, rank: int, card: Card | None = None) -> None:
        self.kernel, self.rank, self.card = kernel, rank, card
        self.unexpected: dict[int, deque[Message]] = {}  # by source, in the order sent
        self.posted: dict[int, deque[Receive]] = {}  # by source; ANY_SOURCE holds the wildcards
        self.lanes: dict[int, Any] = {}  # by source: what `contention` keeps of messages under way
        self.watchers: list[Completion] = []  # blocked probes: to be woken by any delivery
        self._numbers = 0
        self._open = 0  # receives posted and not matched
        self._flying: list[tuple[float, int, int, Message]] | None = None  # a heap; not None: timed
        self._arrived: deque[Message] = (
            deque()
        )  # while timed: the unexpected in order of arrival, and some taken
        self._latest: dict[
            int, float
        ] = {}  # while timed: last envelope per source, for messages do not overtake
        self._alarm_s = math.inf

    # -- the two sides -------------------------------------------------------------------------------------

    def deliver(self, message: Message) -> None:
        """Take in a message that was just sent; its envelope arrives now or later."""
        self._numbers += 1
        message.number = self._numbers
        if self._flying is not None:
            self._fly(message)
            self._set_alarm()
        elif not self._open or not self._hand_over(message):
            message.queued = True
            try:
                self.unexpected[message.source].append(message)
            except KeyError:
                self.unexpected[message.source] = deque((message,))
        if self.watchers:
            self._wake_watchers()

    def post(self, receive: Receive) -> None:
        """Match a receive or queue it. A wildcard's caller has observed: the clock stands at `posted_s`."""
        self._numbers += 1
        receive.number, receive.card = self._numbers, self.card
        message = self.find(receive.source, receive.tag)
        if message is not None:
            self.remove(message)
            receive.take(message)
            return
        queue = self.posted.get(receive.source)
        if queue is None:
            queue = self.posted[receive.source] = deque()
        queue.append(receive)
        self._open += 1

    def ready(self, source: int, tag: int) -> Message | None:
        """Return the eager message at the head of a named source's queue, if a receive would take that one now.

        The short way of most receives: `take_ready` then takes it, and no `Receive` need be made.
        """
        queue = self.unexpected.get(source)
        if queue and self._flying is None:
            message = queue[0]
            if message.sender is None and (tag == message.tag or tag == ANY_TAG):
                return message
        return None

    def take_ready(self, message: Message) -> None:
        """Take out what `ready` has just returned."""
        self.unexpected[message.source].popleft()
        message.queued = False

    def find(self, source: int, tag: int) -> Message | None:
        """Return the queued message that a receive or probe would get now: of a wildcard's, the first to arrive.

        Not timed, a named source's message counts although it may still be on its way.
        """
        if source == ANY_SOURCE:
            self._become_timed()
            return self._first(self._trimmed(), tag)
        if self._flying:
            self._catch_up()
        return self._first(self.unexpected.get(source, ()), tag)

    def earliest(self, source: int, tag: int) -> float | None:
        """Return when the first message that fits and is on its way becomes visible, or None."""
        wanted = Receive(self.kernel, source, tag, 0.0)
        flying = [entry[0] for entry in self._flying or () if wanted.accepts(entry[3])]
        queued = self._first(self.unexpected.get(source, ()), tag)
        return min(flying if queued is None else [*flying, queued.envelope_s], default=None)

    def remove(self, message: Message) -> None:
        """Take a queued message out."""
        queue = self.unexpected[message.source]
        message.queued = False
        if queue[0] is message:
            queue.popleft()
        else:
            queue.remove(message)

    def cancel(self, receive: Receive) -> bool:
        """Withdraw a receive; False if it has matched already."""
        if receive.message is not None:
            return False
        self._withdraw(receive)
        return True

    def _withdraw(self, receive: Receive) -> None:
        self.posted[receive.source].remove(receive)
        self._open -= 1

    def give_up(self, receive: Receive) -> None:
        """Withdraw a receive; a message that it has matched goes back to the head of its queue."""
        message = receive.message
        if message is None:
            self.cancel(receive)
        else:
            message.receive = receive.message = None
            message.queued = True
            self.unexpected.setdefault(message.source, deque()).appendleft(message)
            self._arrived.appendleft(message)

    def _queue(self, message: Message) -> None:
        queue = self.unexpected.get(message.source)
        if queue is None:
            queue = self.unexpected[message.source] = deque()
        message.queued = True
        queue.append(message)

    @staticmethod
    def _first(queue: Iterable[Message], tag: int) -> Message | None:
        for message in queue:
            if (tag == message.tag or tag == ANY_TAG) and message.queued:
                return message
        return None

    def _hand_over(self, message: Message) -> bool:
        """Give a message to the first receive posted that takes it."""
        first: Receive | None = None
        for source in (message.source, ANY_SOURCE):
            for receive in self.posted.get(source, ()):
                if receive.tag == message.tag or receive.tag == ANY_TAG:
                    if first is None or receive.number < first.number:
                        first = receive
                    break
        if first is None:
            return False
        self._withdraw(first)
        first.take(message)
        return True

    def _wake_watchers(self) -> None:
        watchers, self.watchers = self.watchers, []
        for watcher in watchers:
            if watcher.waiter is not None:
                self.kernel.resume(watcher.waiter)

    # -- timed -----------------------------------------------------------------------------------------------

    def _become_timed(self) -> None:
        """Sort what is queued into arrived and flying; from now on envelopes arrive by events."""
        if self._flying is not None:
            self._catch_up()
            return
        now, self._flying = self.kernel.env.now, []
        for queue in self.unexpected.values():
            behind: list[Message] = []  # what has not arrived, and what was sent behind it
            while any(message.envelope_s > now for message in queue):
                behind.append(queue.pop())
            for message in reversed(behind):
                message.queued = False
                self._fly(message)
        here = [message for queue in self.unexpected.values() for message in queue]
        self._arrived.extend(sorted(here, key=_order))
        self._set_alarm()

    def _fly(self, message: Message) -> None:
        assert self._flying is not None
        message.envelope_s = max(message.envelope_s, self._latest.get(message.source, 0.0))
        self._latest[message.source] = message.envelope_s
        heappush(self._flying, (message.envelope_s, message.source, message.number, message))

    def _set_alarm(self) -> None:
        """See that an event stands at the arrival of the next envelope."""
        if self._flying and self._flying[0][0] < self._alarm_s:
            self._alarm_s = alarm_s = self._flying[0][0]
            self.kernel.env.at(alarm_s, self.rank, lambda: self._ring(alarm_s))

    def _ring(self, alarm_s: float) -> None:
        if alarm_s == self._alarm_s:
            self._alarm_s = math.inf
            self._catch_up()
            self._set_alarm()

    def _catch_up(self) -> None:
        """Match what has arrived by now, in the order of arrival."""
        while self._flying and self._flying[0][0] <= self.kernel.env.now:
            message = heappop(self._flying)[3]
            if not self._hand_over(message):
                self._queue(message)
                self._arrived.append(message)

    def _trimmed(self) -> deque[Message]:
        """Return what has arrived, without those at its head that were taken."""
        arrived = self._arrived
        while arrived and not arrived[0].queued:
            arrived.popleft()
        return arrived


def _order(message: Message) -> tuple[float, int, int]:
    return message.envelope_s, message.source, message.number
