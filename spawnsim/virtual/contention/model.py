"""What the wire asks of a model of contention.

This room knows faces, not models.
"""

from __future__ import annotations

from typing import Protocol

from spawnsim.virtual.completion import Message
from spawnsim.virtual.matching import Mailbox


class Bulk(Protocol):
    """The data of a rendezvous, and who waits until they have left."""

    message: Message

    @property
    def pair(self) -> tuple[int, int]:
        """The world ranks of sender and receiver."""
        ...

    def complete(self, finish_s: float) -> None:
        """Let the sender go on at `finish_s`."""
        ...


class Model(Protocol):
    """Decides when messages arrive that are under way together."""

    def price(self, source: int, dest: int, nbytes: int) -> tuple[float, float, float, float, float]:
        """Return what a message costs besides what the model adds: the five fields of `Costs`."""
        ...

    def carry(self, message: Message, mailbox: Mailbox, source: int) -> None:
        """Take a message from a world rank that by its cost would arrive at its `envelope_s`.

        Deliver it with its final times. Without `arrival_s` it is the envelope of a rendezvous, which has no bytes.
        """
        ...

    def stream(self, bulk: Bulk, left_s: float, arrival_s: float) -> None:
        """Take data that by their cost have left at `left_s` and arrive at `arrival_s`; land their message."""
        ...
