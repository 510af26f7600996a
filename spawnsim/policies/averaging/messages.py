"""The messages that averaging ranks exchange: self-contained bytes. No communicator, no clock.

Header and body have a checksum each. Bytes whose header does not hold raise `Unreadable`, and their receiver drops
them; a message whose body alone does not hold is `damaged`: it comes without the body, so that the receiver knows what
it must do without.

| kind | from → to | carries |
|---|---|---|
| DECLARE | anyone → keeper of a key | key, place (None: take it back), value |
| LISTED | keeper → who declared or asked | key, the entries of that key |
| JOIN | follower → leader | place, key, schema, whether a client, what the leader hands on |
| REPLY | leader → follower | `Reply`, and a rank to ask instead, how long the promise holds, or how far the leader is |
| LEAVE | follower → leader | nothing: forget join request `number` |
| DISBAND | leader → follower | a rank to ask instead, or None |
| BEGIN | leader → follower | the group: its number, its members |
| PART | sender → reducer | one part of the sender's vector; `value` is the weight |
| DELTA | reducer → sender | average minus the part that was sent; `value`: the weight of those that were averaged, \
0 if the receiver's part was not (and no body); `meta`: the senders that were not |
| ABSENT | member → members | nothing: this rank takes no part in group `number` |
| CALL | leader → missing members | place, key: will you come? |
| FETCH | newcomer → donor | nothing: send your state |
| STATE | donor → newcomer | one chunk of the donor's state |
| SWAP | asker → partner | the asker's weights; `value` is the gain |
| SWAPPED, DECLINED | partner → asker | the partner's weights; or that it does not average now |
| PRESENT | member → coordinator | whether (`part`) this rank averages from now on |
| SETTLED | coordinator → member | `part`: the last round in which the member takes part |
| OPEN | parent → child | round `number` begins; its members |
| UP | child → parent | mean and weight (`value`) of a branch |
| DOWN | parent → child | mean and weight of all |
| CLOSED | root → coordinator | round `number` is over |
| HANDOVER | coordinator → another | who averages: coordinate from now on |
"""

from __future__ import annotations

import pickle
import struct
import zlib
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spawnsim.policies.exchange.messages import checksum

Bytes = NDArray[np.uint8]
Outgoing = tuple[int, "Message"]  # (destination, word)

# magic, kind, raw?, padding, channel, checksum of the body, number, part, value, length of meta
_HEADER = struct.Struct("<IBBHIIqidq")
_CHECKSUM = struct.Struct("<I")  # checksum of header and meta
HEADER_NBYTES = _HEADER.size + _CHECKSUM.size  # a multiple of eight
_PADDING = [b"\0" * count for count in range(8)]
_SMALL_NBYTES = 4096  # bodies below this have a CRC alone: `checksum` says the same of them, after more steps
MAGIC = 0x53504733
EMPTY: Bytes = np.empty(0, np.uint8)


class Kind(IntEnum):
    """What a word is."""

    DECLARE = 1
    LISTED = 2
    JOIN = 3
    REPLY = 4
    LEAVE = 5
    DISBAND = 6
    BEGIN = 7
    PART = 8
    DELTA = 9
    ABSENT = 10
    FETCH = 11
    STATE = 12
    SWAP = 13
    SWAPPED = 14
    DECLINED = 15
    PRESENT = 16
    SETTLED = 17
    OPEN = 18
    UP = 19
    DOWN = 20
    CLOSED = 21
    HANDOVER = 22
    CALL = 23


_KINDS: dict[int, Kind] = {kind.value: kind for kind in Kind}


class Reply(IntEnum):
    """What a leader answers to a join request."""

    ACCEPTED = 1
    NOT_LOOKING_FOR_GROUP = 2
    PROTOCOL_VIOLATION = 3
    BAD_SCHEMA_HASH = 4
    BAD_GROUP_KEY = 5
    NOT_DECLARED = 6
    BAD_EXPIRATION_TIME = 7
    NOT_A_LEADER = 8
    GROUP_IS_FULL = 9


class Unreadable(Exception):
    """Bytes that are no word."""


class Foreign(Unreadable):
    """A word for another averager."""


@dataclass(frozen=True, slots=True)
class Message:
    """One word. `number` names a request, a group or a download; `meta` is any small object; `body` bytes.

    `raw` says that the body is not compressed, `damaged` that it was lost on its way.
    """

    kind: Kind
    number: int
    part: int = 0
    value: float = 0.0
    raw: bool = False
    meta: Any = None
    body: Bytes = field(default_factory=lambda: EMPTY)
    damaged: bool = False


def encode(word: Message, channel: int = 0) -> Bytes:
    """Return a word as bytes; the body lies at a multiple of eight. `channel`: 32 bits that the receiver expects."""
    meta = b"" if word.meta is None else pickle.dumps(word.meta, protocol=5)
    header = _HEADER.pack(
        MAGIC,
        word.kind,
        word.raw,
        0,
        channel,
        _body_checksum(word.body),
        word.number,
        word.part,
        word.value,
        len(meta),
    )
    head_sum = zlib.crc32(meta, zlib.crc32(header))
    head = (header, _CHECKSUM.pack(head_sum), meta, _PADDING[-len(meta) % 8])
    if word.body.size < _SMALL_NBYTES:
        return np.frombuffer(bytearray(b"".join((*head, word.body.data))), np.uint8)
    at = HEADER_NBYTES + len(meta) + len(head[3])
    buffer = np.empty(at + word.body.size, np.uint8)
    buffer[:at] = np.frombuffer(b"".join(head), np.uint8)
    buffer[at:] = word.body
    return buffer


def _body_checksum(body: Bytes) -> int:
    """Return the checksum of a body, 0 if it is empty."""
    if body.size < _SMALL_NBYTES:
        return (zlib.crc32(body.data) or 1) if body.size else 0
    return checksum(body)


def decode(buffer: Bytes, channel: int = 0) -> Message:
    """Return the word in a buffer; its body is a view into it. Raises `Unreadable`, `Foreign` for another channel's."""
    if buffer.size < HEADER_NBYTES:
        raise Unreadable(f"{buffer.size} bytes are too few for a word")
    magic, kind, raw, _, where, body_sum, number, part, value, length = _HEADER.unpack_from(buffer.data)
    known = _KINDS.get(kind)
    if magic != MAGIC or known is None or not 0 <= length <= buffer.size - HEADER_NBYTES:
        raise Unreadable("the bytes are no word of an averager: does another program use its tag?")
    meta = buffer[HEADER_NBYTES : HEADER_NBYTES + length].tobytes() if length else b""
    if (zlib.crc32(meta, zlib.crc32(buffer[: _HEADER.size].data)),) != _CHECKSUM.unpack_from(
        buffer.data, _HEADER.size
    ):
        raise Unreadable("the head of a word was damaged on its way")
    if where != channel:
        raise Foreign(f"a word for channel {where}, not {channel}")
    found = pickle.loads(meta) if length else None
    body = buffer[HEADER_NBYTES + length + (-length % 8) :]
    if body_sum != _body_checksum(body):
        return Message(known, number, part, value, bool(raw), found, damaged=True)
    return Message(known, number, part, value, bool(raw), found, body)
