"""Messages that a mailbox holds and nobody has received, arrived or not.

This room looks into mailboxes; it changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from spawnsim.virtual.completion import Message
from spawnsim.virtual.matching import Mailbox


def undelivered(mailbox: Mailbox) -> Iterator[Message]:
    """Yield the messages that no receive has matched."""
    for queue in mailbox.unexpected.values():
        yield from (message for message in queue if message.queued)
    yield from (entry[3] for entry in mailbox._flying or ())
