"""Which message belongs to which receive: MPI's matching, by context, source and tag, in order.

Knows parcels and memory; knows neither torch nor communicators. One lock guards it; who waits for something to arrive
waits on its condition.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG
from spawnsim.real.rank.tally import Tally
from spawnsim.real.torch.wire import INLINE_NBYTES, Bytes, Parcel, Sent, Wire

MESSAGE, RECEIPT = 1, 2
SYNCHRONOUS = 1


@dataclass(eq=False, slots=True)
class Letter:
    """A message of this rank: known from its header on, readable once it has arrived."""

    source: int
    tag: int
    nbytes: int
    receipt: int = 0  # whoever sent it synchronously waits for this number
    data: Bytes | None = None
    direct: bool = False  # the data lie in the receive's own memory


@dataclass(eq=False, slots=True)
class Slot:
    """A receive: what it takes, perhaps memory for the data, and the letter that it was given."""

    source: int
    tag: int
    memory: Bytes | None = None
    letter: Letter | None = None

    def takes(self, letter: Letter) -> bool:
        """Whether a letter may go to this receive."""
        return self.source in (ANY_SOURCE, letter.source) and self.tag in (ANY_TAG, letter.tag)

    @property
    def filled(self) -> bool:
        """Whether the letter's data are there."""
        return self.letter is not None and self.letter.data is not None


@dataclass
class Shelf:
    """One communicator's open receives and unclaimed letters, each in order."""

    slots: list[Slot] = field(default_factory=list)
    letters: list[Letter] = field(default_factory=list)


class Mailbox:
    """One per rank. `ranks[context]` maps the wire's ranks to the communicator's."""

    def __init__(self, condition: threading.Condition, wire: Wire, tally: Tally) -> None:
        self._condition, self._wire, self._tally = condition, wire, tally
        self._shelves: dict[int, Shelf] = defaultdict(Shelf)
        self.ranks: dict[int, dict[int, int]] = {}
        self.members: dict[int, tuple[int, ...]] = {}
        self._receipts: dict[int, Sent] = {}
        wire.receivers[MESSAGE] = self
        wire.receivers[RECEIPT] = Receipts(self._receipts, condition)

    def open(self, context: int, members: tuple[int, ...]) -> None:
        """Say who the ranks of a context are."""
        self.members[context] = members
        self.ranks[context] = {member: rank for rank, member in enumerate(members)}

    # ------------------------------------------------------------------------------------------------ sending
    def send(self, context: int, dest: int, tag: int, data: Bytes, *, synchronous: bool = False) -> Sent:
        """Send bytes; synchronously, the result is complete when a receive has been found."""
        self._tally.access(data)
        ident = next(self._wire.idents) if synchronous else 0
        waiting = Sent(False)
        if synchronous:
            self._receipts[ident] = waiting
        # the sender's rank travels too, since a letter may come before its context is open here
        me = self.ranks[context][self._wire.rank]
        parcel = Parcel(MESSAGE, context, tag, ident=ident, first=me)
        sent = self._wire.send(self.members[context][dest], parcel, data)
        return waiting if synchronous else sent

    # ---------------------------------------------------------------------------------- called by the wire's thread
    def begin(self, parcel: Parcel) -> Bytes | None:
        """Find the receive for a message that comes in; it goes straight to that receive's memory if it fits."""
        letter = Letter(parcel.first, parcel.tag, parcel.nbytes, parcel.ident)
        with self._condition:
            shelf = self._shelves[parcel.context]
            slot = next((slot for slot in shelf.slots if slot.takes(letter)), None)
            if slot is None:
                shelf.letters.append(letter)
            else:
                shelf.slots.remove(slot)
                slot.letter = letter
            if parcel.nbytes > INLINE_NBYTES:  # else the data are here already, and `done` wakes for both
                self._condition.notify_all()
        parcel.token = letter
        if slot is None:
            return None
        self._acknowledge(letter, parcel.source)
        if slot.memory is None or slot.memory.nbytes < parcel.nbytes:
            return None
        letter.direct = True
        return slot.memory[: parcel.nbytes]

    def done(self, parcel: Parcel, payload: Bytes) -> None:
        """Hand over the data."""
        with self._condition:
            parcel.token.data = payload
            self._condition.notify_all()

    def _acknowledge(self, letter: Letter, sender: int) -> None:
        if letter.receipt:
            self._wire.send(sender, Parcel(RECEIPT, ident=letter.receipt))
            letter.receipt = 0

    # ---------------------------------------------------------------------------------------------- receiving
    def post(self, context: int, slot: Slot) -> None:
        """Open a receive; it takes the first unclaimed letter that fits."""
        self._tally.received += 1
        with self._condition:
            shelf = self._shelves[context]
            letter = next((letter for letter in shelf.letters if slot.takes(letter)), None)
            if letter is None:
                shelf.slots.append(slot)
                return
            shelf.letters.remove(letter)
            slot.letter = letter
        self._acknowledge(letter, self.members[context][letter.source])

    def peek(self, context: int, source: int, tag: int) -> Letter | None:
        """Return the first unclaimed letter that such a receive would get; it stays."""
        wanted = Slot(source, tag)
        with self._condition:
            return next((letter for letter in self._shelves[context].letters if wanted.takes(letter)), None)

    def claim(self, context: int, source: int, tag: int) -> Slot | None:
        """Return a receive that was given the first fitting letter, or None if there is none."""
        slot = Slot(source, tag)
        with self._condition:  # re-entrant: nothing comes between the look and the claim
            if self.peek(context, source, tag) is None:
                return None
            self.post(context, slot)
        return slot

    def clear(self) -> int:
        """Drop all unclaimed letters whose data are there; return how many. Who waits for a receipt gets it."""
        dropped: list[tuple[Letter, int]] = []
        with self._condition:
            for context, shelf in self._shelves.items():
                whole = [letter for letter in shelf.letters if letter.data is not None]
                shelf.letters = [letter for letter in shelf.letters if letter.data is None]
                dropped += [(letter, self.members[context][letter.source]) for letter in whole]
        for letter, sender in dropped:
            self._acknowledge(letter, sender)
        return len(dropped)

    def cancel(self, context: int, slot: Slot) -> bool:
        """Close a receive that has no letter; return whether it had none."""
        with self._condition:
            slots = self._shelves[context].slots
            if slot not in slots:
                return False
            slots.remove(slot)
            return True


class Receipts:
    """Receiver of receipts for synchronous sends."""

    def __init__(self, waiting: dict[int, Sent], condition: threading.Condition) -> None:
        self._waiting, self._condition = waiting, condition

    def begin(self, parcel: Parcel) -> Bytes | None:
        """Nothing comes with a receipt."""
        return None

    def done(self, parcel: Parcel, payload: Bytes) -> None:
        """Complete the send."""
        with self._condition:
            sent = self._waiting.pop(parcel.ident, None)
            if sent is not None:
                sent.complete = True
            self._condition.notify_all()


def as_payload(data: Any) -> Bytes:
    """Return bytes-like data as an array of bytes."""
    return np.frombuffer(data, np.uint8)
