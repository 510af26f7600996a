"""What a revocation ends: the calls, open requests and windows of a communicator, or of it and all that was made of it.

From the time of the revocation on every call ends in `Revoked`; who waits is woken. After a recovery nothing is
delivered there any more: messages that nobody has received are dropped and counted. This room knows contexts and who
waits on them; who recovers, and why, is the business of others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from spawnsim.comm.failures import Revoked
from spawnsim.virtual.comm.context import Context
from spawnsim.virtual.engine.completion import Message
from spawnsim.virtual.engine.matching import Mailbox, undelivered
from spawnsim.virtual.engine.world import World


def family(context: Context) -> list[Context]:
    """Return a context and all that were made of it, in the order in which they were made."""
    found = [each for each in context.world.open_contexts if each.within(context)]
    return sorted(found, key=lambda each: each.number)


def revoke(contexts: Sequence[Context]) -> None:
    """Let every call on these contexts end in `Revoked` from the running task's time on."""
    world = contexts[0].world
    task, env = world.kernel.current, world.kernel.env
    fresh = {each for each in contexts if each.revoked_s is None or each.revoked_s > task.clock}
    if fresh:
        world.revoked = True
        for context in fresh:
            context.revoked_s = task.clock
        env.at(max(task.clock, env.now), task.rank, lambda: _interrupt(world, fresh))


def _interrupt(world: World, contexts: Collection[Context]) -> None:
    """Wake who waits on revoked contexts."""
    for task in world.kernel.tasks:
        wait = task.wait
        if task.parked and wait is not None and not contexts.isdisjoint(wait.contexts()):  # type: ignore[attr-defined]
            world.kernel.throw(task, Revoked(f"{task.name} was in {wait.describe()} when it was revoked"))


def give_up(world: World, rank: int) -> None:
    """Shut a rank out: all its calls end in `Revoked`, on whatever communicator, should it ever come back."""
    world.revoked = True
    world.ranks[rank].given_up = True
    for context in world.open_contexts:
        context.shut_out(rank)


def close(contexts: Sequence[Context], survivors: Collection[int], time_s: float) -> None:
    """Drop all messages that survivors have not received there, and all that are still to come."""
    for context in contexts:
        for rank in sorted(survivors & context.mailboxes.keys()):
            side = next(side for side, places in enumerate(context.places) if rank in places)
            senders = context.sides[-1 - side] if len(context.sides) > 1 else context.sides[0]
            mailbox = context.mailboxes[rank]
            mailbox.__class__ = ClosedMailbox  # whoever sends has it already, and need not look
            assert isinstance(mailbox, ClosedMailbox)
            mailbox.close(context.world, () if context.inner else senders, time_s)


class ClosedMailbox(Mailbox):
    """A mailbox from which nobody will receive any more."""

    def close(self, world: World, senders: Sequence[int], time_s: float) -> None:
        """Drop what is here. `senders` are the world ranks by whose messages are counted; empty: a window's own."""
        self._world, self._senders, self._closed_s = world, senders, time_s
        left = [*undelivered(self)]
        self.unexpected, self._flying, self._arrived = {}, None, type(self._arrived)()
        for message in sorted(left, key=lambda each: (each.envelope_s, each.source, each.number)):
            self._admit(message)

    def _admit(self, message: Message) -> None:
        """Drop and count a message."""
        message.queued = False
        if self._senders:
            source, time_s = self._senders[message.source], max(message.envelope_s, self._closed_s)
            self._world.ranks[self.rank].dropped[source] += 1
            self._world.recorder.event(
                self.rank, time_s, "late_message", {"source": source, "nbytes": message.nbytes}
            )

    def _put_back(self, message: Message) -> None:
        """Forget a message whose receive was given up."""
