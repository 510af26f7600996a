"""The directory of declarations, and the download of a state from a rank that has declared itself as its donor.

The directory is sharded over the ranks: each key has replicas on two of them. A declaration names its rank, its place
(earlier places lead) and a value, and expires by itself. A state is small metadata and tensors, sent as chunks; a
newcomer goes through the declared donors from the highest priority down, until one gives everything in time. Everything
is driven by messages and the time it is given.
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

REPLICAS = 2  # ranks that hold each key: one may die, compute or sleep
LISTED_AT_MOST = 64  # entries in one answer: the earliest places
SUSPECTED_TIMEOUTS = 8.0  # a replica that did not answer is not asked for so many request time-outs


def replicas(key: str, size: int, suspects: Collection[int] = ()) -> list[int]:
    """Return the ranks of a communicator of `size` that keep a key: the first of its order that are no suspects.

    Every key has an order of all ranks, drawn from its digest and the same on every rank. If all are suspects, the
    first of them are asked all the same: suspicion is a guess, and a directory that is not asked finds nothing.
    """
    stream = np.random.Generator(np.random.PCG64(digest(key)))
    # Of many ranks, only the beginning of the order: enough even if many are suspects.
    order = stream.permutation(size) if size < 64 else stream.integers(0, size, 32)
    ranks = list(dict.fromkeys(order.tolist()))
    trusted = [rank for rank in ranks if rank not in suspects]
    return (trusted or ranks)[:REPLICAS]


class Entry(NamedTuple):
    """One rank's declaration under a key: earlier places lead; it holds until `until_s`."""

    rank: int
    place: float
    until_s: float
    value: Any = None


def _by_place(entry: Entry) -> tuple[float, int]:
    return entry.place, entry.rank


# Declarations expire, and are renewed several times before they do. So the directory needs no repair and no agreement:
# with a rank that dies only copies are lost, the next renewal goes to other replicas, and an entry of a dead rank goes
# by itself. Answers may be stale or incomplete; the search then asks a rank without success, which costs one request.
class DirectoryShard:
    """The declarations that this rank keeps, by key and rank."""

    def __init__(self) -> None:
        self.entries: dict[str, dict[int, Entry]] = {}

    def handle(self, source: int, message: Message, now_s: float) -> list[Outgoing]:
        """Take a DECLARE; return the answer if one is wanted (`part`), and news for ranks that declared before.

        The news is an entry with the earliest place of all: they should ask its rank, and cannot know of it yet.
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
        elif declared is False:  # withdrawn; None only asks
            kept.pop(source, None)
        if message.part:
            found = [tuple(each) for each in self.find(key, now_s)]
            out.append((source, Message(Kind.LISTED, message.number, meta=(key, found))))
        return out

    def find(self, key: str, now_s: float) -> list[Entry]:
        """Return the earliest entries of a key that still hold; forget expired ones."""
        kept = self.entries.get(key, {})
        for rank in [rank for rank, entry in kept.items() if entry.until_s <= now_s]:
            del kept[rank]
        if not kept:
            self.entries.pop(key, None)
        return sorted(kept.values(), key=_by_place)[:LISTED_AT_MOST]


class DirectoryClient:
    """Declares under keys and collects answers. One question at a time for each key."""

    def __init__(self, rank: int, size: int, request_timeout_s: float) -> None:
        self.rank, self.size, self.request_timeout_s = rank, size, request_timeout_s
        self.counts: Counter[str] = Counter()
        self.suspects: dict[int, float] = {}  # rank → until when it is left out
        self.entries: dict[str, dict[int, Entry]] = {}
        self._asked: dict[tuple[str, int], float] = {}  # (key, replica) → when it must have answered
        self._declared: dict[str, list[int]] = {}  # key → replicas that have a declaration of this rank

    def ask(self, key: str, now_s: float, declaration: Entry | None = None) -> list[Outgoing]:
        """Declare under a key (or only ask) and ask for all entries; return the messages to send."""
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
        """Take a LISTED; return its key if it was asked for, or is of use."""
        key, listed = message.meta
        self.suspects.pop(source, None)
        if self._asked.pop((key, source), None) is None and key not in self._declared:
            self.counts["late"] += 1
            return None
        entries = [Entry(*each) for each in listed]
        self.entries.setdefault(key, {}).update((entry.rank, entry) for entry in entries)
        return str(key)

    def known(self, key: str, now_s: float) -> list[Entry]:
        """Return all entries heard of that still hold, without this rank's own, earliest first."""
        entries = self.entries.get(key, {}).values()
        return sorted((e for e in entries if e.until_s > now_s and e.rank != self.rank), key=_by_place)

    def tick(self, now_s: float) -> set[str]:
        """Suspect the replicas that are late; return the keys whose replicas have changed by that."""
        late = [pair for pair, due_s in self._asked.items() if due_s <= now_s]
        for pair in late:
            del self._asked[pair]
            self.suspect(pair[1], now_s)
        return {key for key, _ in late}

    def wake_s(self) -> float:
        return min(self._asked.values(), default=math.inf)

    def replicas(self, key: str, now_s: float) -> list[int]:
        """Return the ranks that keep a key, without the ranks that were silent lately."""
        self.suspects = {rank: until_s for rank, until_s in self.suspects.items() if until_s > now_s}
        return replicas(key, self.size, self.suspects)

    def suspect(self, rank: int, now_s: float) -> None:
        self.counts["silent replicas"] += 1
        self.suspects[rank] = now_s + SUSPECTED_TIMEOUTS * self.request_timeout_s


class DirectoryQuery:
    """One question to the replicas of a key: which declarations hold now. Their answers name its number."""

    def __init__(self, directory: DirectoryClient, key: str, number: int, now_s: float) -> None:
        self.directory, self.number = directory, number
        self.due_s = now_s + directory.request_timeout_s
        self.awaited = set(directory.replicas(key, now_s))
        self.heard = False  # whether any replica has answered
        self._entries: dict[int, Entry] = {}
        question = Message(Kind.DECLARE, number, part=1, meta=(key, None))
        self.messages = [(replica, question) for replica in sorted(self.awaited)]

    def handle(self, source: int, message: Message) -> None:
        """Take a LISTED; of two declarations of one rank the later one holds."""
        if message.number != self.number or source not in self.awaited:
            return
        self.awaited.discard(source)
        self.directory.suspects.pop(source, None)
        self.heard = True
        for entry in (Entry(*each) for each in message.meta[1]):
            known = self._entries.get(entry.rank)
            if known is None or known.until_s < entry.until_s:
                self._entries[entry.rank] = entry

    def over(self, now_s: float) -> bool:
        """Whether all have answered; ranks that are late are suspected."""
        if self.awaited and now_s >= self.due_s:
            for replica in sorted(self.awaited):
                self.directory.suspect(replica, now_s)
            self.awaited.clear()
        return not self.awaited

    def entries(self, now_s: float) -> list[Entry]:
        """Return the other ranks' declarations that still hold, by rank."""
        others = (entry for _, entry in sorted(self._entries.items()) if entry.rank != self.directory.rank)
        return [entry for entry in others if entry.until_s > now_s]


# (small metadata, tensors), and perhaps descriptions of the tensors
State = (
    tuple[Any, Sequence[torch.Tensor]] | tuple[Any, Sequence[torch.Tensor], Sequence[CompressionInfo] | None]
)
Loaded = tuple[Any, list[torch.Tensor]]


def chunks(number: int, state: State, compression: Choices, part_size_bytes: int) -> Iterator[Message]:
    """Yield the STATE messages of a state: first all but the numbers, then these in parts.

    The first message names the codecs, so that a state is read as its donor packed it.
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
    """Return how a codec travels: one of this package as (name, its fields), a user's own as it is."""
    name = type(codec).__name__
    return (name, *astuple(codec)) if _BUILT_IN.get(name) is type(codec) else codec  # type: ignore[call-overload]


def rebuild(messages: Sequence[Message]) -> Loaded:
    """Return the state that the messages of `chunks` hold. Raises ValueError if they do not fit together."""
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
    """What this rank gives to newcomers, and whether it does. `declare_s`: when it declares itself next."""

    def __init__(self, settings: Settings, directory: DirectoryClient, endpoint: Endpoint) -> None:
        self.settings, self.directory, self.endpoint = settings, directory, endpoint
        given = settings.allow_state_sharing
        self.sharing = not (settings.client_mode or settings.auxiliary) if given is None else given
        self.priority, self.given = 0.0, 0
        self.declare_s = -math.inf
        self.fetches: list[tuple[int, Message]] = []  # not answered yet
        self._key, self._declared = _state_key(settings), 0.0

    def change(self, *, sharing: bool | None = None, priority: float | None = None) -> None:
        """Change the declaration, from now on."""
        self.sharing = self.sharing if sharing is None else sharing
        self.priority = self.priority if priority is None else priority
        self.declare_s = -math.inf

    def declare(self, now_s: float) -> None:
        """Renew the declaration if that is due."""
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
        """Declare a changed priority to the replicas: after an average, others may look for it."""
        if self.sharing and self.priority != self._declared and now_s < self.declare_s:
            self.endpoint.send_all(self.directory.renew(self._key, self._entry(now_s)))

    def retire(self) -> None:
        """Give nothing any more."""
        self.change(sharing=False)
        self.endpoint.send_all(self.directory.take_back(self._key))
        self.answer(lambda: (None, []))
        self.declare_s = math.inf

    def answer(self, state_of: Callable[[], State]) -> None:
        """Send the state to the ranks that asked, or refuse it if this rank does not share its state."""
        # All chunks are packed at once, while the tensors are held: chunks packed later would be of a model that has
        # trained on, and the newcomer would get a state that no rank ever had.
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
    """A download of state under way: asks the donors that declare themselves now, one after the other.

    Without `until_s`, it goes through one list of donors; with it, through new lists until then.
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
        self._unheard, self._ask_s = 0, -math.inf  # lists that no replica sent, when to ask for the next
        self._donors: deque[int] = deque()  # those left to ask, the best first
        self._donor: int | None = None
        self._chunks: list[Message] = []
        self._due_s = math.inf  # when the next chunk must be here

    def done(self) -> bool:
        """Whether the state is here, or will not come."""
        return self._complete or self._over

    def result(self) -> Loaded | None:
        """Wait for the end; return (metadata, tensors), or None if no donor gave its state in time."""
        self._averager.engine.drive(self.done, math.inf)
        return rebuild(self._chunks) if self._complete else None

    def handle(self, source: int, message: Message, now_s: float) -> None:
        """Take a STATE, or the LISTED that answers this download's question."""
        if message.kind is Kind.LISTED:
            if self._question is not None:
                self._question.handle(source, message)
        elif (source, message.number) == (self._donor, self._number) and not self._complete:
            self._take(source, message, now_s)

    def _take(self, source: int, message: Message, now_s: float) -> None:
        came = len(self._chunks)
        if message.part < came:
            return  # it came twice
        # A chunk that was damaged or that is missing ends this donor's turn; no parts: it shares no state any more.
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
        """Ask the next donor, if there is one."""
        self._chunks, self._due_s = [], math.inf
        self._donor = self._donors.popleft() if self._donors else None
        if self._donor is not None:
            self._number += 1
            self._due_s = now_s + self._chunk_timeout_s
            self._out.append((self._donor, Message(Kind.FETCH, self._number)))

    def tick(self, now_s: float, dead: set[int]) -> None:
        """Ask for donors, then go from one to the next."""
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
        """Ask the directory for donors again; without a time limit one list of them is enough."""
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
        if question.heard:
            donors = question.entries(now_s)
            # Ties in random order: newcomers that ask at one time go to several donors.
            ranked = zip(donors, self._ties.permutation(len(donors)), strict=True)
            order = sorted(ranked, key=lambda each: (-each[0].value, each[1]))
            self._donors = deque(entry.rank for entry, _ in order)
            self._fetch(now_s)
        elif self._unheard < REPLICAS:  # all its replicas are silent: others hold the key now
            self._unheard, self._ask_s = self._unheard + 1, -math.inf

    def wake_s(self) -> float:
        if self._question is not None:
            return min(self._until_s, self._question.due_s)
        return min(self._until_s, self._due_s if self._donor is not None else self._ask_s)
