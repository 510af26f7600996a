"""The directory of declarations, and the download of a state from a rank that has declared itself as its donor.

The directory is sharded over the ranks: each key has replicas on two of them. A declaration has a rank, a place
(earlier places lead) and a value, and expires by itself. A state consists of small metadata and tensors, sent as
chunks. A newcomer tries the declared donors, from the highest priority down, until one sends everything in time. All
classes are driven by messages and time.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from spawnsim.phantoms import is_phantom
from spawnsim.policies.averaging.interface import Settings
from spawnsim.policies.averaging.vector import Vector, digest
from spawnsim.policies.exchange.endpoint import Endpoint
from spawnsim.policies.exchange.messages import Kind, Message, Outgoing
from spawnsim.policies.state.arithmetic import CPU, META, without_data
from spawnsim.policies.state.codecs import (
    NAMED,
    Choices,
    Codec,
    CompressionInfo,
    codecs_for,
    infos_by_place,
    pack,
)

if TYPE_CHECKING:
    from spawnsim.policies.averaging.averager import DecentralizedAverager

REPLICAS = 2  # replicas of each key: one of them may die, compute or sleep
LISTED_AT_MOST = 64  # entries in one answer: the earliest places
SUSPECTED_TIMEOUTS = 8.0  # exclusion of a silent replica, in request time-outs


def replicas(key: str, size: int, suspects: Collection[int] = ()) -> list[int]:
    """Return the replicas of a key in a communicator of `size`: the first ranks in its order that are not suspects.

    Every key has an order of all ranks, drawn from its digest and the same on every rank. If all ranks are suspects,
    the first ones are used anyway: suspicion is a guess, and without a replica a search finds nothing.
    """
    stream = np.random.Generator(np.random.PCG64(digest(key)))
    # For many ranks, draw only the beginning of the order: enough even if many ranks are suspects.
    order = stream.permutation(size) if size < 64 else stream.integers(0, size, 32)
    ranks = list(dict.fromkeys(order.tolist()))
    trusted = [rank for rank in ranks if rank not in suspects]
    return (trusted or ranks)[:REPLICAS]


class Entry(NamedTuple):
    """One rank's declaration under a key: earlier places lead; it is valid until `until_s`."""

    rank: int
    place: float
    until_s: float
    value: Any = None


def _by_place(entry: Entry) -> tuple[float, int]:
    return entry.place, entry.rank


# Declarations expire, and are renewed several times before. So the directory needs no repair and no agreement: a dead
# rank takes only copies with it, the next renewal uses other replicas, and the entry of a dead rank expires. Answers
# may be stale or incomplete; the search then sends one request without success.
class DirectoryShard:
    """The declarations stored on this rank, by key and rank."""

    def __init__(self) -> None:
        self.entries: dict[str, dict[int, Entry]] = {}

    def handle(self, source: int, message: Message, now_s: float) -> list[Outgoing]:
        """Handle a DECLARE; return the answer if it is requested (`part`), and notices to ranks that declared before.

        A notice contains a new entry with the earliest place: these ranks should join it, and do not know it yet.
        """
        key, declared = message.meta
        kept = self.entries.setdefault(key, {})
        out: list[Outgoing] = []
        if declared:
            entry = Entry(*declared)
            others = self.find(key, now_s)
            if others and _by_place(entry) < _by_place(others[0]) and source not in kept:
                news = Message(Kind.LISTED, message.number, meta=(key, [tuple(entry)]))
                out = [(other.rank, news) for other in others]
            self.entries.setdefault(key, kept)[source] = entry
        elif declared is False:  # withdrawn; None is only a query
            kept.pop(source, None)
        if message.part:
            found = [tuple(each) for each in self.find(key, now_s)]
            out.append((source, Message(Kind.LISTED, message.number, meta=(key, found))))
        return out

    def find(self, key: str, now_s: float) -> list[Entry]:
        """Return the earliest valid entries of a key; remove expired ones."""
        kept = self.entries.get(key, {})
        for rank in [rank for rank, entry in kept.items() if entry.until_s <= now_s]:
            del kept[rank]
        if not kept:
            self.entries.pop(key, None)
        return sorted(kept.values(), key=_by_place)[:LISTED_AT_MOST]


class DirectoryClient:
    """Declares under keys and collects answers. One query at a time for each key."""

    def __init__(self, rank: int, size: int, request_timeout_s: float) -> None:
        self.rank, self.size, self.request_timeout_s = rank, size, request_timeout_s
        self.counts: Counter[str] = Counter()
        self.suspects: dict[int, float] = {}  # rank → end of its exclusion
        self.entries: dict[str, dict[int, Entry]] = {}
        self._asked: dict[tuple[str, int], float] = {}  # (key, replica) → due time of its answer
        self._declared: dict[str, list[int]] = {}  # key → replicas that have a declaration of this rank

    def ask(self, key: str, now_s: float, declaration: Entry | None = None) -> list[Outgoing]:
        """Query all entries of a key, with an optional declaration; return the messages to send."""
        ranks = self.replicas(key, now_s)
        for replica in ranks:
            self._asked.setdefault((key, replica), now_s + self.request_timeout_s)
        if declaration is not None:
            self._declared[key] = ranks
        plain = None if declaration is None else tuple(declaration)
        return [(replica, Message(Kind.DECLARE, 0, part=1, meta=(key, plain))) for replica in ranks]

    def renew(self, key: str, declaration: Entry) -> list[Outgoing]:
        """Return the messages that replace a declaration; replicas do not answer them."""
        renewed = Message(Kind.DECLARE, 0, meta=(key, tuple(declaration)))
        return [(replica, renewed) for replica in self._declared.get(key, [])]

    def take_back(self, key: str) -> list[Outgoing]:
        """Return the messages that withdraw this rank's declaration."""
        self.entries.pop(key, None)
        for pair in [pair for pair in self._asked if pair[0] == key]:
            del self._asked[pair]
        return [(rank, Message(Kind.DECLARE, 0, meta=(key, False))) for rank in self._declared.pop(key, [])]

    def handle(self, source: int, message: Message) -> str | None:
        """Handle a LISTED; return its key if this rank has queried it, or has a declaration under it."""
        key, listed = message.meta
        self.suspects.pop(source, None)
        if self._asked.pop((key, source), None) is None and key not in self._declared:
            self.counts["late"] += 1
            return None
        entries = [Entry(*each) for each in listed]
        self.entries.setdefault(key, {}).update((entry.rank, entry) for entry in entries)
        return str(key)

    def known(self, key: str, now_s: float) -> list[Entry]:
        """Return all known valid entries except this rank's own, earliest first."""
        entries = self.entries.get(key, {}).values()
        return sorted((e for e in entries if e.until_s > now_s and e.rank != self.rank), key=_by_place)

    def tick(self, now_s: float) -> set[str]:
        """Suspect late replicas; return the keys whose replicas have changed by that."""
        late = [pair for pair, due_s in self._asked.items() if due_s <= now_s]
        for pair in late:
            del self._asked[pair]
            self.suspect(pair[1], now_s)
        return {key for key, _ in late}

    def wake_s(self) -> float:
        return min(self._asked.values(), default=math.inf)

    def replicas(self, key: str, now_s: float) -> list[int]:
        """Return the replicas of a key, without recently silent ranks."""
        self.suspects = {rank: until_s for rank, until_s in self.suspects.items() if until_s > now_s}
        return replicas(key, self.size, self.suspects)

    def suspect(self, rank: int, now_s: float) -> None:
        self.counts["silent replicas"] += 1
        self.suspects[rank] = now_s + SUSPECTED_TIMEOUTS * self.request_timeout_s


class DirectoryQuery:
    """One query to the replicas of a key for the valid declarations. Answers carry its number."""

    def __init__(self, directory: DirectoryClient, key: str, number: int, now_s: float) -> None:
        self.directory, self.number = directory, number
        self.due_s = now_s + directory.request_timeout_s
        self.awaited = set(directory.replicas(key, now_s))
        self.answered = False  # whether any replica has answered
        self._entries: dict[int, Entry] = {}
        question = Message(Kind.DECLARE, number, part=1, meta=(key, None))
        self.messages = [(replica, question) for replica in sorted(self.awaited)]

    def handle(self, source: int, message: Message) -> None:
        """Handle a LISTED; of two declarations of one rank the later one is valid."""
        if message.number != self.number or source not in self.awaited:
            return
        self.awaited.discard(source)
        self.directory.suspects.pop(source, None)
        self.answered = True
        for entry in (Entry(*each) for each in message.meta[1]):
            known = self._entries.get(entry.rank)
            if known is None or known.until_s < entry.until_s:
                self._entries[entry.rank] = entry

    def over(self, now_s: float) -> bool:
        """Return whether the query is complete: all replicas have answered, or it is due and late ones are suspects."""
        if self.awaited and now_s >= self.due_s:
            for replica in sorted(self.awaited):
                self.directory.suspect(replica, now_s)
            self.awaited.clear()
        return not self.awaited

    def entries(self, now_s: float) -> list[Entry]:
        """Return the valid declarations of other ranks, by rank."""
        others = (entry for _, entry in sorted(self._entries.items()) if entry.rank != self.directory.rank)
        return [entry for entry in others if entry.until_s > now_s]


# (small metadata, tensors), and optional descriptions of the tensors
State = (
    tuple[Any, Sequence[torch.Tensor]] | tuple[Any, Sequence[torch.Tensor], Sequence[CompressionInfo] | None]
)
Loaded = tuple[Any, list[torch.Tensor]]


def chunks(number: int, state: State, compression: Choices, part_size_bytes: int) -> Iterator[Message]:
    """Yield the STATE messages of a state: first metadata and layout, then the values in parts.

    The first message contains the codecs, so that a newcomer decodes a state as its donor packed it.
    """
    metadata, live = state[0], [tensor.detach() for tensor in state[1]]
    tensors = [each if without_data(each) else each.cpu().contiguous() for each in live]
    infos = state[2] if len(state) > 2 else None
    codecs = codecs_for(compression, infos_by_place(tensors) if infos is None else infos)
    kinds = zip(tensors, codecs, strict=True)
    layout = [(str(tensor.dtype)[6:], tuple(tensor.shape), _plain(codec)) for tensor, codec in kinds]
    if not tensors:
        yield Message(Kind.STATE, number, meta=(metadata, layout, part_size_bytes))
        return
    vector = Vector(tensors, codecs)
    values = vector.read()
    [parts] = vector.cut([vector.count], part_size_bytes)
    yield Message(Kind.STATE, number, parts=1 + len(parts), meta=(metadata, layout, part_size_bytes))
    for index, part in enumerate(parts, 1):
        raw, body = pack(vector.segments[part.segment].codec, values[part.segment][part.start : part.stop])
        yield Message(Kind.STATE, number, part=index, parts=1 + len(parts), body=body, raw=raw)


_BUILT_IN: dict[str, Any] = {type(codec).__name__: type(codec) for codec in NAMED.values()}


def _plain(codec: Codec) -> Any:
    """Return the wire form of a codec: (name, fields) for a codec of this package, a user's own codec itself."""
    name = type(codec).__name__
    return (name, *astuple(codec)) if _BUILT_IN.get(name) is type(codec) else codec  # type: ignore[call-overload]


def rebuild(messages: Sequence[Message]) -> Loaded:
    """Return the state in the messages of `chunks`. Raises ValueError if they are inconsistent."""
    metadata, layout, part_size_bytes = messages[0].meta
    device = META if any(is_phantom(message.body) for message in messages) else CPU
    tensors = [torch.zeros(shape, dtype=getattr(torch, dtype), device=device) for dtype, shape, _ in layout]
    if not tensors:
        return metadata, []
    codecs = [_BUILT_IN[it[0]](*it[1:]) if type(it) is tuple else it for _, _, it in layout]
    vector = Vector(tensors, codecs)
    [parts] = vector.cut([vector.count], part_size_bytes)
    flat = vector.zeros()
    for part, message in zip(parts, messages[1:], strict=True):
        flat[part.segment][part.start : part.stop] = vector.unpacked(part, message.raw, message.body)
    vector.add(flat)
    return metadata, tensors


def _state_key(settings: Settings) -> str:
    return f"{settings.prefix}.all_averagers"


class StateDonor:
    """This rank as a donor of its state to newcomers. `declare_s`: time of its next declaration."""

    def __init__(self, settings: Settings, directory: DirectoryClient, endpoint: Endpoint) -> None:
        self.settings, self.directory, self.endpoint = settings, directory, endpoint
        given = settings.allow_state_sharing
        self.sharing = not (settings.client_mode or settings.auxiliary) if given is None else given
        self.priority, self.given = 0.0, 0
        self.declare_s = -math.inf
        self.fetches: list[tuple[int, Message]] = []  # not answered yet
        self._key, self._declared = _state_key(settings), 0.0

    def change(self, *, sharing: bool | None = None, priority: float | None = None) -> None:
        """Change the declaration; it is renewed at the next opportunity."""
        self.sharing = self.sharing if sharing is None else sharing
        self.priority = self.priority if priority is None else priority
        self.declare_s = -math.inf

    def declare(self, now_s: float) -> None:
        """Renew or withdraw the declaration if that is due."""
        if now_s < self.declare_s:
            return
        if self.sharing:
            self.endpoint.send_all(self.directory.ask(self._key, now_s, self._entry(now_s)))
        else:
            self.endpoint.send_all(self.directory.take_back(self._key))
        self.declare_s = now_s + self.settings.declare_state_period

    def _entry(self, now_s: float) -> Entry:
        self._declared = self.priority
        until_s = now_s + 2 * self.settings.declare_state_period
        return Entry(self.endpoint.rank, -self.priority, until_s, self.priority)

    def renew(self, now_s: float) -> None:
        """Declare a changed priority to the replicas: after an average, newcomers may search for it."""
        if self.sharing and self.priority != self._declared and now_s < self.declare_s:
            self.endpoint.send_all(self.directory.renew(self._key, self._entry(now_s)))

    def retire(self) -> None:
        """Stop sharing: withdraw the declaration, and refuse open requests."""
        self.change(sharing=False)
        self.endpoint.send_all(self.directory.take_back(self._key))
        self.answer(lambda: (None, []))
        self.declare_s = math.inf

    def answer(self, state_of: Callable[[], State]) -> None:
        """Send the state to the ranks that requested it, or refuse if this rank does not share its state."""
        # All chunks are packed at once, while the tensors are locked: later chunks would contain further training, and
        # the newcomer would get a state that no rank ever had.
        fetches, self.fetches = self.fetches, []
        state = state_of() if self.sharing and fetches else None
        how = self.settings.state_compression, self.settings.part_size_bytes
        for source, message in fetches:
            if state is None:
                self.endpoint.send(source, Message(Kind.STATE, message.number, parts=0))
            else:
                self.endpoint.send_all((source, chunk) for chunk in chunks(message.number, state, *how))
                self.given += 1


class StateDownload:
    """A download of a state: requests it from the currently declared donors, one after the other.

    Without `until_s`, it tries one list of donors; with it, it queries new lists until then.
    """

    def __init__(
        self, averager: DecentralizedAverager, chunk_timeout_s: float, until_s: float | None
    ) -> None:
        self._averager, self._chunk_timeout_s = averager, chunk_timeout_s
        self._until_s, self._retry = math.inf if until_s is None else until_s, until_s is not None
        self._ties, self._number = averager.comm.rng("groups.donors"), averager.number()
        self._complete = self._over = False
        self._out: deque[Outgoing] = deque()
        self._question: DirectoryQuery | None = None
        self._unanswered, self._ask_s = 0, -math.inf  # queries without an answer; time of the next query
        self._donors: deque[int] = deque()  # remaining donors, the best first
        self._donor: int | None = None
        self._chunks: list[Message] = []
        self._due_s = math.inf  # due time of the next chunk

    def done(self) -> bool:
        """Return whether the download has completed or failed."""
        return self._complete or self._over

    def result(self) -> Loaded | None:
        """Wait for the end; return (metadata, tensors), or None if no donor sent its state in time."""
        self._averager.engine.drive(self.done, math.inf)
        return rebuild(self._chunks) if self._complete else None

    def handle(self, source: int, message: Message, now_s: float) -> None:
        """Handle a STATE, or the LISTED that answers this download's query."""
        if message.kind is Kind.LISTED:
            if self._question is not None:
                self._question.handle(source, message)
        elif (source, message.number) == (self._donor, self._number) and not self._complete:
            self._take(source, message, now_s)

    def _take(self, source: int, message: Message, now_s: float) -> None:
        came = len(self._chunks)
        if message.part < came:
            return  # a duplicate
        # A damaged or missing chunk ends this donor's turn; no parts: it no longer shares its state.
        if not message.parts or message.damaged or message.part > came:
            self._lost(source, now_s)
            return
        self._chunks.append(message)
        self._due_s = now_s + self._chunk_timeout_s
        self._complete = came + 1 == message.parts

    def _lost(self, rank: int, now_s: float) -> None:
        if rank in self._donors:
            self._donors.remove(rank)
        if rank == self._donor and not self._complete:
            self._fetch(now_s)

    def _fetch(self, now_s: float) -> None:
        """Send a request to the next donor, if any."""
        self._chunks, self._due_s = [], math.inf
        self._donor = self._donors.popleft() if self._donors else None
        if self._donor is not None:
            self._number += 1
            self._due_s = now_s + self._chunk_timeout_s
            self._out.append((self._donor, Message(Kind.FETCH, self._number)))

    def tick(self, now_s: float, dead: set[int]) -> None:
        """Query donors, then try one after the other."""
        for rank in dead:
            self._lost(rank, now_s)
        if self._donor is not None and now_s >= self._due_s:
            self._lost(self._donor, now_s)
        if self._question is not None and self._question.over(now_s):
            self._listed(self._question, now_s)
        if now_s >= self._until_s:
            self._over = True
        elif self._question is None and self._donor is None:
            self._ask(now_s)
        self._averager.endpoint.send_queue(self._out)

    def _ask(self, now_s: float) -> None:
        """Query the directory for donors; without a time limit only once."""
        if self._ask_s > -math.inf and not self._retry:
            self._over = True
        elif now_s >= self._ask_s:
            averager, key = self._averager, _state_key(self._averager.settings)
            question = self._question = DirectoryQuery(averager.directory, key, averager.number(), now_s)
            question.due_s = min(question.due_s, (now_s + self._until_s) / 2)
            self._ask_s = now_s + averager.settings.request_timeout
            averager.endpoint.send_all(question.messages)

    def _listed(self, question: DirectoryQuery, now_s: float) -> None:
        self._question = None
        if question.answered:
            donors = question.entries(now_s)
            # Ties in random order: simultaneous newcomers use different donors.
            ranked = zip(donors, self._ties.permutation(len(donors)), strict=True)
            order = sorted(ranked, key=lambda each: (-each[0].value, each[1]))
            self._donors = deque(entry.rank for entry, _ in order)
            self._fetch(now_s)
        elif self._unanswered < REPLICAS:  # all its replicas are silent: other ranks are replicas now
            self._unanswered, self._ask_s = self._unanswered + 1, -math.inf

    def wake_s(self) -> float:
        if self._question is not None:
            return min(self._until_s, self._question.due_s)
        return min(self._until_s, self._due_s if self._donor is not None else self._ask_s)
