"""The digest of what one rank did, in its own program order: it does not depend on how ranks were interleaved.

This room knows numbers that are hashed. It must not know what they mean to a rank.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

from spawnsim.virtual.checksums import checksum

FIELDS = 5
ROOM = (
    64 * FIELDS
)  # numbers kept before they are hashed: packing many at once costs a fifth, and ranks stay small
_FULL = struct.Struct("<" + "diiqi" * (ROOM // FIELDS)).pack

Entry = tuple[float, int, int, int, int]  # time in seconds, kind, peer, bytes, tag


def nanoseconds(seconds: float) -> int:
    """Return a length of time as entries hold it: whole nanoseconds, 292 years at most."""
    return min(round(seconds * 1e9), 2**63 - 1)


class Trace:
    """Takes the events of one rank: what, when, with whom, how much; and the contents of what it sends.

    Attributes:
        contents: Checksum of all that the rank has sent, been answered and printed so far, one after the other.
    """

    __slots__ = ("_hash", "_hashed", "_pending", "contents", "rank")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._hash: Any = None  # made when first needed: a thousand ranks that do little stay small
        self._hashed, self._pending = 0, list[float]()
        self.contents = 0

    def note(self, entry: Entry) -> None:
        """Add one event."""
        pending = self._pending
        pending += entry
        if len(pending) == ROOM:
            self._update(_FULL(*pending))

    def cover(self, payload: Any) -> None:
        """Add the contents of a payload: see `checksums`."""
        self.contents = checksum(payload, self.contents)

    def _update(self, packed: bytes) -> None:
        if self._hash is None:
            self._hash = hashlib.blake2b(digest_size=16)
        self._hash.update(packed)
        self._hashed += len(self._pending)
        self._pending.clear()

    @property
    def count(self) -> int:
        """Number of events so far."""
        return (self._hashed + len(self._pending)) // FIELDS

    def digest(self) -> bytes:
        """Return the 16-byte digest of all events and contents so far."""
        self._update(struct.pack("<" + "diiqi" * (len(self._pending) // FIELDS), *self._pending))
        whole = self._hash.copy()
        whole.update(struct.pack("<I", self.contents))
        return bytes(whole.digest())
