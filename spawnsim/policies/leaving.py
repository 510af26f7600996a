"""The end of an exchange: stay until all that was sent to this rank has been received.

MPI does not allow messages that nobody receives (MPICH kills such a job when it finalizes). So rank 0 adds up what
each has sent to each, after which none sends any more, and each stays until it has received its share. The leader goes
on deciding for those who still train, until all others have said goodbye or are known to be dead. All waits together
are bounded by `shutdown_timeout_s`, whatever was lost; the dead end those that hang on them.

This room knows an exchange and a communicator's clock and two collectives; it decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from spawnsim.errors import RankFailed, Revoked, Timeout
from spawnsim.policies.exchange import Exchange
from spawnsim.policies.messages import Kind, Message

PATIENCE_CALLS = 4  # others answer once a call
PATIENCE_POLLS = 10


class Leaving:
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
        while self.exchange.intake.waiting and self._clock.now() < end_s:
            self._rest()
        self.exchange.intake.give_up()

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
