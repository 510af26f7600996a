"""The messages of the asynchronous protocol: self-contained, checksummed bytes. No communicator, no model.

Every message carries its round, the sender's iteration, and its part, and checksums; a snapshot part describes the
names, dtypes and shapes of the tensors it holds. What cannot be read raises `Unreadable`, and its receiver drops and
counts it.

| kind | from → to | carries |
|---|---|---|
| REPORT | any rank → coordinator | metric, age run out?, last round settled |
| ASSIGN | coordinator → replaced | donors, weights, the round's lowest and highest metric |
| FETCH | replaced → donor | what it asks for: a snapshot for this round |
| SNAPSHOT | donor → replaced | one part of the donor's state |
| LEAVE | any rank → coordinator | nothing: this rank neither gives nor takes any more |
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from spawnsim.policies.rules.donors import Assignment

Bytes = NDArray[np.uint8]

_HEADER = struct.Struct("<IHHHHqqdqI")
_CHECKSUMS, _CHECKSUMS_AT = (
    struct.Struct("<II"),
    56,
)  # checksums of the body (`checksum`) and of header and text (CRC-32)
HEADER_NBYTES = 64
MAGIC = 0x53504E31
_ALIGN_NBYTES = 64
_ROW = 512  # words of 8 bytes: a row of sums that stays in the first cache


class Kind(IntEnum):
    """What a message is."""

    REPORT = 1
    ASSIGN = 2
    FETCH = 3
    SNAPSHOT = 4
    LEAVE = 5


class Unreadable(Exception):
    """Bytes that are no message of this protocol."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `round` is the iteration whose metrics decided; `iteration` the sender's own when it wrote.

    `value` is the metric of a REPORT; `settled` the last round that its sender finished or gave up; `text` the layout
    of a SNAPSHOT part; `body` the bytes after the header and text.
    """

    kind: Kind
    round: int
    iteration: int = 0
    part: int = 0
    parts: int = 1
    value: float = 0.0
    settled: int = -1
    expired: bool = False
    text: bytes = b""
    body: Bytes = field(default_factory=lambda: np.empty(0, np.uint8))


def body_at(text_nbytes: int) -> int:
    """Return where the body begins in a message whose text has so many bytes: aligned for any dtype."""
    return HEADER_NBYTES + -(-text_nbytes // _ALIGN_NBYTES) * _ALIGN_NBYTES


def write_head(buffer: Bytes, message: Message) -> None:
    """Write a message's header and text to the start of a buffer; the body is the caller's to fill, before `seal`."""
    buffer[: body_at(len(message.text))] = 0  # gaps travel as well
    _HEADER.pack_into(
        buffer.data, 0, MAGIC, message.kind, message.part, message.parts, message.expired,
        message.round, message.iteration, message.value, message.settled, len(message.text),
    )  # fmt: skip
    buffer[HEADER_NBYTES : HEADER_NBYTES + len(message.text)] = np.frombuffer(message.text, np.uint8)


def checksum(body: Bytes) -> int:
    """Return 32 bits, not 0, over any number of bytes: CRC-32 of the wrapping sums of every 512th word, and the rest.

    Notices any change of one word, at the speed of memory (a CRC of all bytes takes six times as long); what it cannot
    notice, whole rows of 4 KiB in another order, no wire does.
    """
    ends = body.size // (8 * _ROW) * (8 * _ROW)
    rows = body[:ends].view(np.uint64).reshape(-1, _ROW)
    sums = zlib.crc32(np.add.reduce(rows, axis=0).data) if ends else 0
    return zlib.crc32(body[ends:].data, sums) or 1


def seal(buffer: Bytes, text_nbytes: int, *, body: bool) -> None:
    """Write the checksums: of header and text, and of the body if that is wanted (0 says it is not)."""
    start = body_at(text_nbytes)
    _CHECKSUMS.pack_into(buffer.data, _CHECKSUMS_AT, checksum(buffer[start:]) if body else 0, 0)
    _CHECKSUMS.pack_into(
        buffer.data,
        _CHECKSUMS_AT,
        _CHECKSUMS.unpack_from(buffer.data, _CHECKSUMS_AT)[0],
        zlib.crc32(buffer[:start].data),
    )


def _intact(buffer: Bytes, start: int) -> bool:
    body, head = _CHECKSUMS.unpack_from(buffer.data, _CHECKSUMS_AT)
    whole = buffer[:start].copy()
    _CHECKSUMS.pack_into(whole.data, _CHECKSUMS_AT, body, 0)
    if zlib.crc32(whole.data) != head:
        return False
    return not body or checksum(buffer[start:]) == int(body)


def encode(message: Message) -> Bytes:
    """Return a whole message as bytes, sealed."""
    start = body_at(len(message.text))
    buffer = np.zeros(start + message.body.size, np.uint8)
    write_head(buffer, message)
    buffer[start:] = message.body
    seal(buffer, len(message.text), body=True)
    return buffer


def decode(buffer: Bytes) -> Message:
    """Return the message in a buffer; its body is a view into it."""
    if buffer.size < HEADER_NBYTES:
        raise Unreadable(f"{buffer.size} bytes are too few for a message")
    magic, kind, part, parts, expired, round_, iteration, value, settled, length = _HEADER.unpack_from(
        buffer.data
    )
    start = body_at(length)
    if magic != MAGIC or start > buffer.size or part >= parts or kind not in Kind._value2member_map_:
        raise Unreadable("the bytes are no message of a selective policy: does another program use its tag?")
    if not _intact(buffer, start):
        raise Unreadable("the message was damaged on its way")
    text = buffer[HEADER_NBYTES : HEADER_NBYTES + length].tobytes()
    own = (part, parts, value, settled, bool(expired), text, buffer[start:])
    return Message(Kind(kind), round_, iteration, *own)


_ROW_OF_DONOR = np.dtype([("donor", "<i8"), ("weight", "<f8")])


def assign_message(assignment: Assignment, iteration: int) -> Message:
    """Return the ASSIGN message of an assignment, written at this iteration."""
    rows = np.empty(len(assignment.donors), _ROW_OF_DONOR)
    rows["donor"], rows["weight"] = assignment.donors, assignment.weights
    limits = np.asarray([assignment.low, assignment.high])
    body = np.concatenate([limits.view(np.uint8), rows.view(np.uint8)])
    return Message(Kind.ASSIGN, assignment.round, iteration, body=body)


def assignment_of(message: Message) -> Assignment:
    """Return the assignment in an ASSIGN message; raise `Unreadable` if its body is not one."""
    if message.body.size < 16 or message.body.size % 16:
        raise Unreadable(f"an assignment of {message.body.size} bytes")
    low, high = message.body[:16].view("<f8")
    rows = message.body[16:].view(_ROW_OF_DONOR)
    donors, weights = (tuple(rows[name].tolist()) for name in ("donor", "weight"))
    return Assignment(message.round, donors, weights, float(low), float(high))
