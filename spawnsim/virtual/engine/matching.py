"""MPI's matching of messages and receives, in virtual time.

A message can be matched as soon as its envelope is at the receiver, and messages of one sender arrive in the order
sent. So a receive from a *named* source takes that source's messages in the order sent, regardless of the clocks, and
can be paired with a message as soon as the message is sent, without an event. Two cases need care:

* Such a pair lies in the *future* until the envelope has arrived. A receive that is withdrawn before (by `Cancel`, or
  by a deadline) is unmatched: its message is free for the next receive, whose own message becomes free in turn, and so
  on. So all pairs of a source that lie in the future are undone and made again (`_rematch`).
* A sender that waits for the match (rendezvous, synchronous) is notified at that time and not before, by an event,
  unless the receive is certain to stay posted that long. A blocking receive without faults is certain to stay.

A *wildcard* takes the earliest arrival among all sources, so the first wildcard makes the mailbox *timed*: messages are
matched by events, in the order in which their envelopes arrive, against receives in the order posted. A timed mailbox
stays timed: a rank that uses a wildcard once uses it again.

Ties: an envelope that arrives at the very time of a poll, a cancel or a deadline has arrived. Envelopes that arrive
together are ordered by their senders' ranks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from operator import attrgetter
from typing import Any

from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG
from spawnsim.virtual.engine.completion import Completion, Message, Receive, ReceivingNic
from spawnsim.virtual.engine.event_queue import ARRIVING, Priorities
from spawnsim.virtual.engine.kernel import Kernel

KEPT = 16  # pairs kept per source before pairs that have met, or whose receive was collected, are dropped
_number = attrgetter("number")


class Mailbox:
    """The unexpected messages and posted receives of one rank on one communicator."""

    def __init__(self, kernel: Kernel, rank: int, nic: ReceivingNic | None = None) -> None:
        self.kernel, self.rank, self.nic = kernel, rank, nic
        self.unexpected: dict[int, deque[Message]] = {}  # by source, in the order sent
        # By source, in the order posted; ANY_SOURCE: the wildcards. If both match a message, MPI chooses the one posted
        # first: receives are numbered, and the heads of the two queues are compared.
        self.posted: dict[int, deque[Receive]] = {}
        self.lanes: dict[int, Any] = {}  # by source: state of `contention` for messages in flight
        self.watchers: list[Completion] = []  # blocked probes: to be woken by any delivery
        self._numbers = 0
        self._open = 0  # receives posted and not paired
        self._latest: dict[int, float] = {}  # by source: its last envelope, not to be overtaken
        # By source: receives paired with messages that may still be on their way.
        self._early: dict[int, list[Receive]] = {}
        self._flying: list[tuple[float, int, int, Message]] | None = None  # a heap; not None: timed
        # While timed: unexpected messages in order of arrival; some have been taken.
        self._arrived: deque[Message] = deque()
        self._alarm_s = math.inf

    def clear(self) -> None:
        """Forget all messages and receives."""
        vars(self).update(vars(Mailbox(self.kernel, self.rank, self.nic)))

    # -- delivery and posting ------------------------------------------------------------------------------

    def deliver(self, message: Message) -> None:
        """Accept a message that was just sent; its envelope arrives now or later."""
        self._numbers = message.number = self._numbers + 1
        source, envelope_s = message.source, message.envelope_s
        # MPI's messages of one sender are non-overtaking (MPI 4.1, 3.5). A fault's delay, or rounding, may put this
        # message before the previous one: then it is delayed to that one's time. The rest relies on envelopes in the
        # order sent.
        latest = self._latest
        if source in latest and envelope_s < latest[source]:
            message.hold_back(latest[source])
        else:
            latest[source] = envelope_s
        if self._open or self._flying is not None:
            self._admit(message)
        else:
            message.queued = True
            try:
                self.unexpected[source].append(message)
            except KeyError:
                self.unexpected[source] = deque((message,))
        if self.watchers:
            self._wake_watchers()

    def post(self, receive: Receive) -> None:
        """Match a receive or queue it. A wildcard's caller has observed: the clock is at `posted_s`."""
        self._numbers = receive.number = self._numbers + 1
        receive.nic = self.nic
        source, tag = receive.source, receive.tag
        queue = self.unexpected.get(source)
        if queue and self._flying is None and tag in (queue[0].tag, ANY_TAG):  # the usual case
            message = queue.popleft()
            message.queued = False
        else:
            found = self.find(source, tag)
            if found is None:
                self._await(receive)
                return
            message = found
            self.remove(message)
        self._pair(receive, message)

    def _await(self, receive: Receive) -> None:
        """Queue a receive that has no message yet."""
        queue = self.posted.get(receive.source)
        if queue is None:
            queue = self.posted[receive.source] = deque()
        queue.append(receive)
        self._open += 1

    def withdraw(self, receive: Receive, now_s: float) -> bool:
        """Withdraw a receive at a time of its rank's clock; False if it has matched by then."""
        if receive.message is None:
            self._unpost(receive)
        elif receive.matched_s > now_s:
            self._rematch(receive, now_s)
        else:
            return False
        return True

    def give_up(self, receive: Receive, now_s: float) -> None:
        """Withdraw a receive unconditionally: the message that it has matched becomes unexpected again."""
        if not self.withdraw(receive, now_s):
            message = receive.release()
            if not self._open or not self._hand_over(message):
                self._put_back(message)

    # -- lookups -------------------------------------------------------------------------------------------

    def ready(self, source: int, tag: int) -> Message | None:
        """Return the eager message at the head of a named source's queue, if a receive would take it now.

        The usual case of a receive, which then needs no `Receive`. Nothing is ready for a wildcard. The receiver
        (`mpi.context.Member._take_now`) removes the message from the queue itself: the rule of matching ends here.
        """
        queue = self.unexpected.get(source)
        if queue and self._flying is None:
            message = queue[0]
            if message.sender is None and message.arrival_s is not None and tag in (message.tag, ANY_TAG):
                return message
        return None

    def find(self, source: int, tag: int) -> Message | None:
        """Return the queued message that a receive or probe would get now; for a wildcard, the first to arrive.

        Unless the mailbox is timed, a named source's message counts even if it is still on its way.
        """
        if source == ANY_SOURCE:
            self._become_timed()
            return _first(self._trimmed(), tag)
        if self._flying:
            self._catch_up()
        return _first(self.unexpected.get(source, ()), tag)

    def is_settled(self, source: int, time_s: float) -> bool:
        """Return whether all arrivals from a source by a time are known now, provided that no later send arrives by
        then.

        They are unless an event must still match one: a named source's messages are queued or matched when they are
        sent.
        """
        if self._flying is None:
            return source != ANY_SOURCE
        return not (self._flying and self._flying[0][0] <= time_s)

    def earliest(self, source: int, tag: int) -> float | None:
        """Return when the first matching message on its way becomes visible, or None."""
        wanted = Receive(self.kernel, source, tag, 0.0)
        flying = [entry[0] for entry in self._flying or () if wanted.accepts(entry[3])]
        queued = _first(self.unexpected.get(source, ()), tag)
        return min(flying if queued is None else [*flying, queued.envelope_s], default=None)

    def remove(self, message: Message) -> None:
        """Remove a queued message."""
        queue = self.unexpected[message.source]
        message.queued = False
        if queue[0] is message:
            queue.popleft()
        else:
            queue.remove(message)

    # -- pairs ---------------------------------------------------------------------------------------------

    def _admit(self, message: Message) -> None:
        """Let a message, the last of its source, be matched: by an event if timed, otherwise at once."""
        if self._flying is not None:
            heappush(self._flying, (*self._order(message), message))
            self._set_alarm()
        elif not self._open or not self._hand_over(message):
            self._queue(message)

    def _hand_over(self, message: Message) -> bool:
        """Give a message to the first posted receive that accepts it."""
        first: Receive | None = None
        for source in (message.source, ANY_SOURCE):
            for receive in self.posted.get(source, ()):
                if receive.tag == message.tag or receive.tag == ANY_TAG:
                    if first is None or receive.number < first.number:
                        first = receive
                    break
        if first is None:
            return False
        self._unpost(first)
        self._pair(first, message)
        return True

    def _pair(self, receive: Receive, message: Message) -> None:
        """Pair a receive with a message; notify a waiting sender when the two meet."""
        receive.take(message)
        # A pair is provisional until its envelope has arrived: a receive that may be withdrawn before is remembered, so
        # that `_rematch` finds it. A blocking receive without faults cannot be withdrawn (`stays_s`), so rings and halo
        # exchanges remember nothing.
        envelope_s, met = message.envelope_s, True
        if envelope_s > receive.stays_s and self._flying is None:
            early = self._early.get(message.source)
            if early is None:
                early = self._early[message.source] = []
            # Drop collected receives from the end. A full scan happens only at powers of two: a constant cost per
            # receive.
            while early and early[-1].message is None:
                early.pop()
            if len(early) >= KEPT and not len(early) & (len(early) - 1):
                now_s = self.kernel.env.now
                early[:] = [each for each in early if each.message and each.matched_s > now_s]
            early.append(receive)
            met = message.sender is None or envelope_s <= self.kernel.env.now
        if not met:
            self.kernel.env.at(envelope_s, ARRIVING, message.meet)
        elif message.sender is not None:
            message.meet()

    def _unpost(self, receive: Receive) -> None:
        self.posted[receive.source].remove(receive)
        self._open -= 1

    def _rematch(self, gone: Receive, now_s: float) -> None:
        """Redo the pairs of a source that lie in the future at `now_s`, without a withdrawn receive."""
        # As if the receive had never been posted: its message goes to the next receive that matches, whose own message
        # goes to the one after it. Shifting pairs one by one would have to check tags at each step. Undoing all pairs
        # in the future and admitting their messages in the order sent has the same result by construction.
        assert gone.message is not None
        source = gone.message.source
        pairs = [each for each in self._early.pop(source) if each.message and each.matched_s > now_s]
        messages = [each.release() for each in pairs]
        for receive in pairs:
            if receive is not gone:
                self._repost(receive)
        queue = self.unexpected.get(source, deque())
        while queue and queue[-1].envelope_s > now_s:
            messages.append(queue.pop())
        for message in sorted(messages, key=_number):
            self._admit(message)
        if self.watchers:
            self._wake_watchers()

    def _repost(self, receive: Receive) -> None:
        queue = self.posted.setdefault(receive.source, deque())
        queue.append(receive)
        self.posted[receive.source] = deque(sorted(queue, key=_number))
        self._open += 1

    # -- unexpected messages ---------------------------------------------------------------------------------

    def _queue(self, message: Message) -> None:
        """Add a message, the last of its source, to the unexpected messages."""
        message.queued = True
        queue = self.unexpected.get(message.source)
        if queue is None:
            queue = self.unexpected[message.source] = deque()
        queue.append(message)

    def _put_back(self, message: Message) -> None:
        """Return a message that was not received after all to its place among the unexpected messages."""
        self._queue(message)
        self.unexpected[message.source] = deque(sorted(self.unexpected[message.source], key=_number))
        if self._flying is not None:
            self._arrived = deque(sorted((*self._trimmed(), message), key=self._order))
        if self.watchers:
            self._wake_watchers()

    def _wake_watchers(self) -> None:
        watchers, self.watchers = self.watchers, []
        for watcher in watchers:
            if watcher.waiter is not None:
                self.kernel.resume(watcher.waiter)

    # -- timed -----------------------------------------------------------------------------------------------

    def _become_timed(self) -> None:
        """Split the queued messages into arrived and flying ones; from now on envelopes arrive by events."""
        # Permanently: a mailbox that returned to matching without events after each wildcard made half a million alarms
        # for 1,000 messages to one coordinator, because each wildcard sorted all flying messages again.
        if self._flying is not None:
            self._catch_up()
            return
        now_s, self._flying = self.kernel.env.now, []
        for queue in self.unexpected.values():
            while queue and queue[-1].envelope_s > now_s:
                message = queue.pop()
                message.queued = False
                heappush(self._flying, (*self._order(message), message))
        here = [message for queue in self.unexpected.values() for message in queue]
        self._arrived.extend(sorted(here, key=self._order))
        self._set_alarm()

    def _set_alarm(self) -> None:
        """Ensure that an event exists for the arrival of the next envelope."""
        if self._flying and self._flying[0][0] < self._alarm_s:
            self._alarm_s = alarm_s = self._flying[0][0]
            self.kernel.env.at(alarm_s, ARRIVING, lambda: self._ring(alarm_s))

    def _ring(self, alarm_s: float) -> None:
        if alarm_s == self._alarm_s:
            self._alarm_s = math.inf
            self._catch_up()
            self._set_alarm()

    def _catch_up(self) -> None:
        """Match the messages that have arrived by now, in the order of arrival."""
        while self._flying and self._flying[0][0] <= self.kernel.env.now:
            message = heappop(self._flying)[3]
            if not self._hand_over(message):
                self._queue(message)
                arrived = self._arrived
                arrived.append(message)
                # Without latency, a lower rank may send a message at this very time, after the arrival of a higher
                # rank's.
                if len(arrived) > 1 and self._order(arrived[-2]) > self._order(message):
                    self._arrived = deque(sorted(arrived, key=self._order))

    def _trimmed(self) -> deque[Message]:
        """Return the arrived messages, without the taken ones at the head."""
        arrived = self._arrived
        while arrived and not arrived[0].queued:
            arrived.popleft()
        return arrived

    def _order(self, message: Message) -> tuple[float, int, int]:
        """Return the sorting key of messages: arrival, then at one time the places of their senders."""
        place, envelope_s = self.kernel.env.place, message.envelope_s
        if isinstance(place, Priorities):  # they order the sends already
            return envelope_s, 0, message.number
        source = message.source if place is None else place(message.source, envelope_s)
        return envelope_s, source, message.number


def _first(queue: Iterable[Message], tag: int) -> Message | None:
    for message in queue:
        if (tag == message.tag or tag == ANY_TAG) and message.queued:
            return message
    return None


def undelivered(mailbox: Mailbox) -> Iterator[Message]:
    """Yield the unmatched messages."""
    for queue in mailbox.unexpected.values():
        yield from (message for message in queue if message.queued)
    yield from (entry[3] for entry in mailbox._flying or ())
