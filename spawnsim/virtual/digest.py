"""The digest of one rank's actions, in its own program order: it does not depend on the interleaving of ranks.

It covers each event's time, kind, peer and size, and the contents of all sent data: runs that differ in the contents
of a message differ in their digests.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

try:  # the same checksum, several times as fast: a tenth of the cost of a 4 KiB message
    from isal import isal_zlib as zlib
except ImportError:
    import zlib

crc32: Callable[[Any, int], int] = zlib.crc32
# The kind of an event: the number after its time. Digests of runs are compared between versions, so an assigned number
# never changes; 7 is unused.
SEND, COLLECTIVE, RECEIVE, COMPUTE, SLEEP, ONE_SIDED = 1, 2, 3, 4, 5, 6
CRASH, RESTART, LINK_FAULT = 8, 9, 10

# Up to 8 KiB, the checksum of contents is the CRC-32 of all bytes. Longer contents are first added up, as 64-bit
# words, in lanes: word i belongs to lane i modulo 251. That is one pass over memory, six times as fast as a CRC. A
# change of one word always changes its lane. Swapped words are detected, unless their distance is a multiple of 251.
SHORT_NBYTES = 8192
_LANES = 251  # a prime, so that it divides no power of two
_WORD, _BYTE = np.dtype(np.uint64), np.dtype(np.uint8)
_WHOLE = "?bBhHiIlLqQefdFD"  # numpy dtypes in which every byte counts
_EXTENDED = np.finfo(np.longdouble).nmant == 63  # 10 bytes of 16 count; the rest is undefined


def checksum(payload: Any, start: int = 0) -> int:
    """Return the 32-bit checksum of `payload`, appended to the data with checksum `start`.

    Args:
        payload: Bytes, an array, or a list or mapping of them. Anything else has no contents: None, and the tuples
            with which the library agrees on communicators and windows, which hold addresses and whole memories.
        start: Checksum of the data before it.
    """
    if isinstance(payload, np.ndarray):
        if payload.dtype.char in _WHOLE and payload.flags.c_contiguous:
            nbytes = payload.nbytes
            return crc32(payload, start) if nbytes <= SHORT_NBYTES else _of_many(payload, nbytes, start)
        return _of_array(payload, start)
    if isinstance(payload, (bytes, bytearray, memoryview)):
        return _of_bytes(payload, start)
    if isinstance(payload, list):
        return _of_members(payload, start)
    if isinstance(payload, dict):
        return _of_members(list(payload.values()), crc32(repr(list(payload)).encode(), start))
    return start


def _of_members(members: list[Any], start: int) -> int:
    """Include the lengths: the same bytes, divided differently, are different contents."""
    start = crc32(array("q", [-1 if each is None else len(each) for each in members]), start)
    for each in members:
        start = checksum(each, start)
    return start


def _of_array(data: Any, start: int) -> int:
    """Ignore padding: it does not travel, or its bytes are undefined."""
    if data.dtype.names is not None:
        for name in data.dtype.names:
            start = checksum(data[name], start)
        return start
    raw = np.ascontiguousarray(data).reshape(-1)
    if raw.size and raw.dtype.char in "gG" and _EXTENDED:
        raw = np.ascontiguousarray(raw.view(np.uint8).reshape(-1, 16)[:, :10]).reshape(-1)
    return _of_bytes(raw.view(np.uint8), start) if raw.size else start


def _of_bytes(data: Any, start: int) -> int:
    nbytes = memoryview(data).nbytes
    return crc32(data, start) if nbytes <= SHORT_NBYTES else _of_many(data, nbytes, start)


def _of_many(data: Any, nbytes: int, start: int) -> int:
    rows = nbytes // (8 * _LANES)
    end = rows * 8 * _LANES
    # `ndarray` itself: `frombuffer` and `reshape` take twice as long, a tenth of the total for 40 kB.
    sofar = crc32(np.add.reduce(np.ndarray((rows, _LANES), _WORD, data), axis=0), start)
    return crc32(np.ndarray(nbytes - end, _BYTE, data, end), sofar) if end < nbytes else sofar


# Each event is hashed at once. Collecting 64 of them and packing them together was no faster, and the waiting numbers
# were a third of a rank's memory.
packed = struct.Struct("<diiqi").pack
Entry = tuple[float, int, int, int, int]  # time in seconds, kind, peer, bytes, tag


def nanoseconds(seconds: float) -> int:
    """Return a duration in the unit of entries: whole nanoseconds, 292 years at most."""
    return min(round(min(seconds * 1e9, 2.0**63)), 2**63 - 1)


class RankDigest:
    """Collects the events of one rank (time, kind, peer and size), and the contents of the data it sends.

    Attributes:
        count: Number of events so far.
        contents: Checksum of everything that the rank has sent, received as an answer and printed so far, in order.
    """

    __slots__ = ("_hash", "contents", "count", "rank", "update")

    def __init__(self, rank: int) -> None:
        self.rank, self.count, self.contents = rank, 0, 0
        self._begin(b"")

    def _begin(self, value: bytes) -> None:
        self._hash = hashlib.blake2b(value, digest_size=16)
        self.update = self._hash.update

    def note(self, entry: Entry) -> None:
        """Add one event."""
        self.count += 1
        self.update(packed(*entry))

    def cover(self, payload: Any) -> None:
        """Add the contents of a payload: see `checksum`."""
        self.contents = checksum(payload, self.contents)

    def cut(self) -> str:
        """Begin a new hash with the current value, and return that value: a hash object itself cannot be saved."""
        value = self._hash.digest()
        self._begin(value)
        return value.hex()

    def resume(self, value: bytes, count: int, contents: int) -> None:
        """Continue as after the `cut` that returned `value`, as bytes."""
        self._begin(value)
        self.count, self.contents = count, contents

    def value(self) -> bytes:
        """Return the 16-byte digest of all events and contents so far."""
        # The contents are added at the end and not with each event: some are checksummed later than their event.
        whole = self._hash.copy()
        whole.update(struct.pack("<I", self.contents))
        return whole.digest()
