"""A checksum of what travels: runs that differ in the contents of a message shall differ in their digests.

Up to 8 KiB it is the CRC-32 of all bytes. The bytes of more are first added up, as 64-bit words, in lanes: word i
belongs to lane i modulo 251. That is one pass over memory, six times as fast as a CRC. A change of one word always
changes its lane. Words that change places are seen, unless they are a multiple of 251 apart.

This room knows payloads: bytes, arrays, and lists and mappings of them. It must not know messages.
"""

from __future__ import annotations

from array import array
from typing import Any
from zlib import crc32

import numpy as np

SHORT_NBYTES = 8192
_LANES = 251  # a prime, so that no power of two is a multiple of it
_WHOLE = "?bBhHiIlLqQefdFD"  # dtypes of numpy all of whose bytes count
_EXTENDED = np.finfo(np.longdouble).nmant == 63  # 10 bytes of 16 count; the others are whatever was there


def checksum(payload: Any, start: int = 0) -> int:
    """Return the checksum, as 32 bits, of `payload` behind what `start` is the checksum of.

    Args:
        payload: Bytes, an array, or a list or mapping of them. Anything else has no contents: None, and the tuples by
            which the library agrees on communicators and windows, which hold addresses and whole memories.
        start: Checksum of what came before.
    """
    if isinstance(payload, np.ndarray):
        if payload.nbytes <= SHORT_NBYTES and payload.dtype.char in _WHOLE and payload.flags.c_contiguous:
            return crc32(payload, start)  # type: ignore[arg-type]
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
    """Padding does not count: it does not travel, or holds whatever was there."""
    if data.dtype.names is not None:
        for name in data.dtype.names:
            start = checksum(data[name], start)
        return start
    raw = np.ascontiguousarray(data).reshape(-1)
    if raw.size and raw.dtype.char in "gG" and _EXTENDED:
        raw = np.ascontiguousarray(raw.view(np.uint8).reshape(-1, 16)[:, :10]).reshape(-1)
    return _of_bytes(raw.view(np.uint8), start) if raw.size else start


def _of_bytes(data: Any, start: int) -> int:
    if len(data) <= SHORT_NBYTES:
        return crc32(data, start)
    raw = np.frombuffer(data, np.uint8)
    rows = raw.size // (8 * _LANES)
    end = rows * 8 * _LANES
    lanes = np.add.reduce(raw[:end].view(np.uint64).reshape(rows, _LANES), axis=0)
    return crc32(raw[end:].data, crc32(lanes.data, start))
