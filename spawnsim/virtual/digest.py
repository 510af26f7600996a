"""The digest of what one rank did, in its own program order: it does not depend on how ranks were interleaved.

It covers when each event was, what, with whom and how much, and the contents of all that was sent: runs that differ in
the contents of a message differ in their digests.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

try:  # the same checksum, several times as fast: a tenth of what a message of 4 KiB costs
    from isal import isal_zlib as zlib
except ImportError:
    import zlib

crc32: Callable[[Any, int], int] = zlib.crc32
# What kind an event is: the number behind its time. Digests of runs are compared between versions, so a number once
# given out is never changed; 7 is unused.
SEND, COLLECTIVE, RECEIVE, COMPUTE, SLEEP, ONE_SIDED = 1, 2, 3, 4, 5, 6
CRASH, RESTART, LINK_FAULT = 8, 9, 10

# The checksum of contents is, up to 8 KiB, the CRC-32 of all bytes. The bytes of more are first added up, as 64-bit
# words, in lanes: word i belongs to lane i modulo 251. That is one pass over memory, six times as fast as a CRC. A
# change of one word always changes its lane. Words that change places are seen, unless they are a multiple of 251
# apart.
SHORT_NBYTES = 8192
_LANES = 251  # a prime, so that no power of two is a multiple of it
_WORD, _BYTE = np.dtype(np.uint64), np.dtype(np.uint8)
_WHOLE = "?bBhHiIlLqQefdFD"  # dtypes of numpy all of whose bytes count
_EXTENDED = np.finfo(np.longdouble).nmant == 63  # 10 bytes of 16 count; the others are undefined


def checksum(payload: Any, start: int = 0) -> int:
    """Return the checksum, as 32 bits, of `payload` behind what `start` is the checksum of.

    Args:
        payload: Bytes, an array, or a list or mapping of them. Anything else has no contents: None, and the tuples by
            which the library agrees on communicators and windows, which hold addresses and whole memories.
        start: Checksum of what came before.
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
    """Behind their lengths: the same bytes, divided in another way, are other contents."""
    start = crc32(array("q", [-1 if each is None else len(each) for each in members]), start)
    for each in members:
        start = checksum(each, start)
    return start


def _of_array(data: Any, start: int) -> int:
    """Padding does not count: it does not travel, or its bytes are undefined."""
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
    # `ndarray` itself: `frombuffer` and `reshape` take twice as long, a tenth of all this for 40 kB.
    sofar = crc32(np.add.reduce(np.ndarray((rows, _LANES), _WORD, data), axis=0), start)
    return crc32(np.ndarray(nbytes - end, _BYTE, data, end), sofar) if end < nbytes else sofar


# Each event goes into the hash at once. To keep 64 of them and pack them together was the first way: no quicker, and
# the numbers that waited there were a third of a rank's memory.
packed = struct.Struct("<diiqi").pack
Entry = tuple[float, int, int, int, int]  # time in seconds, kind, peer, bytes, tag


def nanoseconds(seconds: float) -> int:
    """Return a length of time as entries hold it: whole nanoseconds, 292 years at most."""
    return min(round(min(seconds * 1e9, 2.0**63)), 2**63 - 1)


class RankDigest:
    """Takes the events of one rank: what, when, with whom, how much; and the contents of what it sends.

    Attributes:
        count: Number of events so far.
        contents: Checksum of all that the rank has sent, been answered and printed so far, one after the other.
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
        """Begin a new hash with the value of the one so far, and return that: a hash itself cannot be kept."""
        value = self._hash.digest()
        self._begin(value)
        return value.hex()

    def resume(self, value: bytes, count: int, contents: int) -> None:
        """Go on as after the `cut` that returned `value`, as bytes."""
        self._begin(value)
        self.count, self.contents = count, contents

    def value(self) -> bytes:
        """Return the 16-byte digest of all events and contents so far."""
        # The contents enter at the end and not with each event: they are covered where they are, which may be later.
        whole = self._hash.copy()
        whole.update(struct.pack("<I", self.contents))
        return whole.digest()
