"""The messages of all policies: self-contained, checksummed bytes in one wire format. No communicator, no model.

A message is a header of 64 bytes, then small metadata, then a body (both aligned to 64 bytes, so that a tensor of any
dtype can be received in place). Metadata that is bytes already, such as the layout of a snapshot, is sent unchanged;
any other object is pickled. Pickled metadata consists of plain tuples, numbers and strings: a class instance would
contain the class's module path, and moving a file would change the length of messages, and with it virtual times.

Header and metadata share one checksum, the body has another. Bytes with a damaged header raise `Unreadable`, and the
receiver drops and counts them. A message with only a damaged body arrives without it, as `damaged`, so that its
receiver still learns its sender and round.

Replacements, through a coordinator (`exchange`):

| kind | from → to | carries |
|---|---|---|
| REPORT | any rank → coordinator | metric, whether the age has expired, last round settled |
| ASSIGN | coordinator → replaced rank | donors, weights, the round's lowest and highest metric |
| FETCH | replaced rank → donor | nothing: requests a snapshot for round `number` |
| SNAPSHOT | donor → replaced rank | one part of the donor's state |
| LEAVE | any rank → coordinator | nothing: this rank neither donates nor is replaced from now on |

Averaging among ranks that find each other (`averaging`):

| kind | from → to | carries |
|---|---|---|
| DECLARE | any rank → a key's replica | key, entry (None: query only; False: withdraw it) |
| LISTED | replica → declaring or querying rank | key, the entries of that key |
| JOIN | follower → leader | place, key, schema, the follower as a member |
| REPLY | leader → follower | `part`: a `Reply`; a rank to ask instead, how long the promise holds, or a `Position` |
| LEAVE | follower → leader | nothing: forget join request `number` |
| DISBAND | leader → follower | a rank to ask instead, or None |
| BEGIN | leader → follower | the group: its number, its members |
| PART | sender → reducer | one part of the sender's vector; `value` is the weight |
| DELTA | reducer → sender | average minus the sent part; `value`: the weight of the averaged senders, \
0 without the receiver's part (and no body); metadata: the senders that were not averaged |
| ABSENT | member → members | nothing: this rank does not participate in group `number` |
| CALL | leader → missing members | place, key: an invitation to join |
| FETCH | newcomer → donor | nothing: requests the donor's state |
| STATE | donor → newcomer | one chunk of the donor's state |
| SWAP | asking rank → partner | its weights; `value` is the gain |
| SWAPPED, DECLINED | partner → asking rank | the partner's weights; or that it does not average now |
| PRESENT | member → coordinator | whether (`part`) this rank averages from now on |
| SETTLED | coordinator → member | `part`: the last round in which the member participates |
| OPEN | parent → child | round `number` begins; its members |
| UP | child → parent | mean and weight (`value`) of a branch |
| DOWN | parent → child | mean and weight of all |
| HANDOVER | coordinator → all other ranks | averaging, idle and gone ranks: a new coordinator's epoch begins |

A server (`server`); `part` is the tier, 0 between workers and their server, 1 between servers and the global server:

| kind | from → to | carries |
|---|---|---|
| PUSH | worker → server | the change since version `number`; `value`: the worker's steps per second |
| PULL | server → worker | weights of version `number`; `value`: the fastest's steps per second; `settled`: staleness |
| LEAVE | worker → server | nothing: this worker has ended |

Decoupled learners (`decoupled`):

| kind | from → to | carries |
|---|---|---|
| PART | learner → merging rank | the difference of fragment `part`; `value` is its weight |
| DOWN | merging rank → learner | new weights of fragment `part`; `value`: number of merged learners |
| LEAVE | learner → the lowest ranks | nothing: this learner has ended |
| HANDOVER | merging rank → learners | the ranks that have left: send to me from now on |

Wait-avoiding sums (`wait_avoiding`):

| kind | from → to | carries |
|---|---|---|
| SUM | member → partner | the partial sum of round `number` before phase `part` |
"""

from __future__ import annotations

import pickle
import struct
import zlib
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from spawnsim.phantoms import is_phantom
from spawnsim.policies.rules.donors import Assignment
from spawnsim.policies.state.codecs import Bytes

Outgoing = tuple[int, "Message"]  # (destination, message)

# One header for all policies, although none uses every field: the 16 bytes or so that a kind does not use cost its
# messages 13 ns at 10 Gbit/s, and a second format would need its own checksums, errors, receivers and tests.
# Fields: magic, kind, flags, part, parts | channel, metadata length, number | iteration, settled | value, checksums
_HEADER = struct.Struct("<IBBxxiI IIq qq dII")
_SUM = struct.Struct("<I")  # of the body (0: unchecked), and of all before the checksum itself
_BODY_SUM_AT, _HEAD_SUM_AT = 56, 60
HEADER_NBYTES = 64
MAGIC = 0x53504E32
_ALIGN_NBYTES = 64
_RAW, _EXPIRED, _BYTES = 1, 2, 4  # flags; the last: the metadata is bytes
_ROW = 512  # words of 8 bytes: a row of sums that fits into the first-level cache
_SMALL_NBYTES = 8 * _ROW


class Kind(IntEnum):
    """The kind of a message."""

    REPORT = 1
    ASSIGN = 2
    FETCH = 3
    SNAPSHOT = 4
    LEAVE = 5
    DECLARE = 6
    LISTED = 7
    JOIN = 8
    REPLY = 9
    DISBAND = 10
    BEGIN = 11
    PART = 12
    DELTA = 13
    ABSENT = 14
    CALL = 15
    STATE = 16
    SWAP = 17
    SWAPPED = 18
    DECLINED = 19
    PRESENT = 20
    SETTLED = 21
    OPEN = 22
    UP = 23
    DOWN = 24
    HANDOVER = 25
    PUSH = 26
    PULL = 27
    SUM = 28


_KINDS: dict[int, Kind] = {kind.value: kind for kind in Kind}


class Unreadable(Exception):
    """Bytes that are not a message of these policies, or a message with a damaged header."""


class Foreign(Unreadable):
    """A message for another channel: another averager uses the same tag."""


@dataclass(slots=True, eq=False)
class Message:
    """One message. Treat it as frozen: one object may go to many ranks (`frozen=True` costs a microsecond each).

    Attributes:
        kind: the kind of the message.
        number: the message's round (the iteration whose metrics decided), request, group or download.
        iteration: the sender's iteration at the time of writing.
        part, parts: index and number of pieces; some kinds store another small number in `part`.
        value: a metric, weight or gain.
        settled: the last round that the sender of a REPORT finished or gave up.
        expired: whether the sender of a REPORT has reached its age of replacement.
        meta: small metadata: bytes, or any small object made of plain types.
        body: the data, shape (nbytes,).
        raw: whether the body is not compressed.
        damaged: whether the body was damaged under way; then it is empty.
    """

    kind: Kind
    number: int
    iteration: int = 0
    part: int = 0
    parts: int = 1
    value: float = 0.0
    settled: int = -1
    expired: bool = False
    meta: Any = None
    body: Bytes = field(default_factory=lambda: _EMPTY)
    raw: bool = False
    damaged: bool = False


_EMPTY: Bytes = np.empty(0, np.uint8)


def body_at(meta_nbytes: int) -> int:
    """Return the offset of the body in a message with this much metadata: aligned for any dtype."""
    return HEADER_NBYTES + -(-meta_nbytes // _ALIGN_NBYTES) * _ALIGN_NBYTES


def checksum(body: Bytes) -> int:
    """Return 32 bits, not 0, over any number of bytes: CRC-32 of the wrapping sums of every 512th word, and the rest.

    Detects any change of one word, at the speed of memory (a CRC of all bytes takes six times as long). It cannot
    detect whole rows of 4 KiB in another order, an error that no wire causes.
    """
    if is_phantom(body):
        return 1
    if body.size < _SMALL_NBYTES:  # most messages: the same result in one step
        return zlib.crc32(body.data) or 1
    ends = body.size // (8 * _ROW) * (8 * _ROW)
    rows = body[:ends].view(np.uint64).reshape(-1, _ROW)
    return zlib.crc32(body[ends:].data, zlib.crc32(np.add.reduce(rows, axis=0).data)) or 1


def _head(message: Message, channel: int, body_sum: int) -> bytes:
    """Return header and metadata, padded to the offset of the body."""
    flags = _RAW * message.raw | _EXPIRED * message.expired
    if isinstance(message.meta, bytes):
        meta, flags = message.meta, flags | _BYTES
    else:
        meta = b"" if message.meta is None else pickle.dumps(message.meta, protocol=5)
    header = _HEADER.pack(
        MAGIC, message.kind, flags, message.part, message.parts, channel, len(meta), message.number,
        message.iteration, message.settled, message.value, body_sum, 0,
    )  # fmt: skip
    if meta:
        meta += b"\0" * (-len(meta) % _ALIGN_NBYTES)
    head = header[:_HEAD_SUM_AT]
    return head + zlib.crc32(meta, zlib.crc32(head)).to_bytes(4, "little") + meta


def write_head(buffer: Bytes, message: Message) -> None:
    """Write header and metadata to the start of a buffer; the caller fills the body, and then calls `seal`."""
    head = _head(message, 0, 0)
    buffer[: len(head)] = np.frombuffer(head, np.uint8)


def seal(buffer: Bytes, meta_nbytes: int, *, body: bool) -> None:
    """Write the checksum of header and metadata, and the body's checksum if wanted (otherwise 0)."""
    start = body_at(meta_nbytes)
    head = np.asarray(buffer[:start])  # of a phantom, a copy
    _SUM.pack_into(head.data, _BODY_SUM_AT, checksum(buffer[start:]) if body else 0)
    _SUM.pack_into(head.data, _HEAD_SUM_AT, _head_checksum(head.data, start))
    if is_phantom(buffer):
        buffer[:start] = head


def _head_checksum(data: memoryview, start: int) -> int:
    return zlib.crc32(data[HEADER_NBYTES:start], zlib.crc32(data[:_HEAD_SUM_AT]))


def encode(message: Message, channel: int = 0) -> Bytes:
    """Return a message as bytes, including checksums.

    Args:
        message: the message to encode.
        channel: 32 bits that the receiver expects; they distinguish averagers that share a tag.
    """
    body = message.body
    head = _head(message, channel, checksum(body) if body.size else 0)
    # A third of the time that numpy takes to concatenate two arrays.
    if body.size < _SMALL_NBYTES and not is_phantom(body):
        return np.frombuffer(bytearray(head + body.data), np.uint8)
    return np.concatenate((np.frombuffer(head, np.uint8), body))


def immutable(buffer: Bytes) -> Bytes:
    """Return an encoded message in immutable memory: virtual ranks send it to many ranks without copies."""
    if is_phantom(buffer) or isinstance(buffer.base, bytes):
        return buffer
    return np.frombuffer(buffer.tobytes(), np.uint8)


def decode(buffer: Bytes, channel: int = 0) -> Message:
    """Return the message in a buffer; its body is a view into it, or empty if it was damaged.

    Raises:
        Unreadable: the bytes are not a message, or its header is damaged.
        Foreign: the message is for another channel.
    """
    if buffer.size < HEADER_NBYTES:
        raise Unreadable(f"{buffer.size} bytes are too few for a message")
    data = buffer.data
    (
        magic, kind, flags, part, parts, where, length, number, iteration, settled, value, body_sum, head_sum,
    ) = _HEADER.unpack_from(data)  # fmt: skip
    known, start = _KINDS.get(kind), body_at(length)
    if magic != MAGIC or known is None or start > buffer.size:
        raise Unreadable("the bytes are not a message of a policy: does another program use its tag?")
    if _head_checksum(data, start) != head_sum:
        raise Unreadable("the header of a message was damaged on the way")
    if where != channel:
        raise Foreign(f"a message for channel {where}, not {channel}")
    meta: Any = None
    if flags & _BYTES:
        meta = data[HEADER_NBYTES : HEADER_NBYTES + length].tobytes()
    elif length:
        meta = pickle.loads(data[HEADER_NBYTES : HEADER_NBYTES + length])
    body = buffer[start:]
    if is_phantom(buffer) and len(data) >= buffer.size:
        body = np.asarray(body)  # real data in a phantom's receive buffer
    damaged = body_sum != 0 and checksum(body) != body_sum
    return Message(
        known, number, iteration, part, parts, value, settled, bool(flags & _EXPIRED), meta,
        _EMPTY if damaged else body, bool(flags & _RAW), damaged,
    )  # fmt: skip


_ROW_OF_DONOR = np.dtype([("donor", "<i8"), ("weight", "<f8")])


def assign_message(assignment: Assignment, iteration: int) -> Message:
    """Return the ASSIGN message of an assignment, written at this iteration."""
    rows = np.empty(len(assignment.donors), _ROW_OF_DONOR)
    rows["donor"], rows["weight"] = assignment.donors, assignment.weights
    limits = np.asarray([assignment.low, assignment.high])
    body = np.concatenate([limits.view(np.uint8), rows.view(np.uint8)])
    return Message(Kind.ASSIGN, assignment.round, iteration, body=body)


def assignment_of(message: Message) -> Assignment:
    """Return the assignment in an ASSIGN message; raise `Unreadable` if its body is not an assignment."""
    if message.body.size < 16 or message.body.size % 16:
        raise Unreadable(f"an assignment of {message.body.size} bytes")
    low, high = message.body[:16].view("<f8")
    rows = message.body[16:].view(_ROW_OF_DONOR)
    donors, weights = (tuple(rows[name].tolist()) for name in ("donor", "weight"))
    return Assignment(message.number, donors, weights, float(low), float(high))
