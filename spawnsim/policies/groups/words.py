"""The words that averagers exchange: self-contained byte messages.

This room knows bytes; no communicator, no clock. What cannot be read raises `Unreadable`; its receiver drops it.

| kind | from → to | carries |
|---|---|---|
| DECLARE | anyone → keeper of a key | key, place (None: take it back), value |
| LISTED | keeper → who declared or asked | key, the entries of that key |
| JOIN | follower → leader | place, key, schema, whether a client, what the leader hands on |
| REPLY | leader → follower | `Reply`, and a rank to ask instead, or how long the promise holds |
| LEAVE | follower → leader | nothing: forget join request `number` |
| DISBAND | leader → follower | a rank to ask instead, or None |
| BEGIN | leader → follower | the group: its number, its members |
| PART | sender → reducer | one part of the sender's vector; `value` is the weight |
| DELTA | reducer → sender | average minus the part that was sent |
| ABSENT | member → members | nothing: this rank takes no part in group `number` |
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
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Outgoing = tuple[int, "Word"]  # (destination, word)

_HEADER = struct.Struct("<IBBHqidq")  # magic, kind, raw?, padding, number, part, value, length of meta
HEADER_NBYTES = -(-_HEADER.size // 8) * 8
MAGIC = 0x53504732
NOTHING: Bytes = np.empty(0, np.uint8)


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
    DUPLICATE_PEER_ID = 9
    GROUP_IS_FULL = 10


class Unreadable(Exception):
    """Bytes that are no word."""


@dataclass(frozen=True, slots=True)
class Word:
    """One word. `number` names a request, a group or a download; `meta` is any small object; `body` bytes.

    `raw` says that the body is not compressed.
    """

    kind: Kind
    number: int
    part: int = 0
    value: float = 0.0
    raw: bool = False
    meta: Any = None
    body: Bytes = field(default_factory=lambda: NOTHING)


def encode(word: Word) -> Bytes:
    """Return a word as bytes; the body lies at a multiple of eight."""
    meta = b"" if word.meta is None else pickle.dumps(word.meta, protocol=5)
    start = HEADER_NBYTES + -(-len(meta) // 8) * 8
    buffer = np.empty(start + word.body.size, np.uint8)
    _HEADER.pack_into(
        buffer.data, 0, MAGIC, word.kind, word.raw, 0, word.number, word.part, word.value, len(meta)
    )
    if meta:
        buffer[HEADER_NBYTES : HEADER_NBYTES + len(meta)] = np.frombuffer(meta, np.uint8)
    buffer[start:] = word.body
    return buffer


def decode(buffer: Bytes) -> Word:
    """Return the word in a buffer; its body is a view into it."""
    if buffer.size < HEADER_NBYTES:
        raise Unreadable(f"{buffer.size} bytes are too few for a word")
    magic, kind, raw, _, number, part, value, length = _HEADER.unpack_from(buffer.data)
    start = HEADER_NBYTES + -(-length // 8) * 8
    if magic != MAGIC or kind not in Kind._value2member_map_ or not 0 <= start <= buffer.size:
        raise Unreadable("the bytes are no word of an averager: does another program use its tag?")
    meta = None
    if length:
        try:
            meta = pickle.loads(buffer[HEADER_NBYTES : HEADER_NBYTES + length].data)
        except (
            pickle.UnpicklingError,
            EOFError,
            AttributeError,
            ImportError,
            IndexError,
            ValueError,
        ) as error:
            raise Unreadable(f"a word whose object cannot be read: {error}") from error
    return Word(Kind(kind), number, part, value, bool(raw), meta, buffer[start:])
