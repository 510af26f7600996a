"""A newcomer downloads the state of a donor: packing and rebuilding it, the donor's side and the newcomer's side.

A state is small metadata and tensors, sent as chunks. Donors declare themselves in the directory; a download goes
through them from the highest priority down, until one gives everything in time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from spawnsim.policies.averaging.grouping import KEEPERS, DirectoryQuery, Entry
from spawnsim.policies.averaging.messages import Kind, Message, Outgoing
from spawnsim.policies.averaging.progress import AveragerEngine
from spawnsim.policies.averaging.vector import Vector
from spawnsim.policies.state.codecs import Choices, CompressionInfo, codecs_for, infos_by_place, pack

# (small metadata, tensors), and perhaps descriptions of the tensors
State = (
    tuple[Any, Sequence[torch.Tensor]] | tuple[Any, Sequence[torch.Tensor], Sequence[CompressionInfo] | None]
)
Loaded = tuple[Any, list[torch.Tensor]]


def state_key(prefix: str) -> str:
    """Return the key under which donors declare themselves."""
    return f"{prefix}.all_averagers"


def chunks(number: int, state: State, compression: Choices, part_size_bytes: int) -> Iterator[Message]:
    """Yield the STATE words of a state: first all but the numbers, then these in parts.

    The first word names the codecs, so that a state is read as its donor packed it.
    """
    metadata, tensors = state[0], [_on_cpu(tensor) for tensor in state[1]]
    infos = state[2] if len(state) > 2 else None
    codecs = codecs_for(compression, infos_by_place(tensors) if infos is None else infos)
    layout = [(str(t.dtype)[6:], tuple(t.shape), codec) for t, codec in zip(tensors, codecs, strict=True)]
    if not tensors:
        yield Message(Kind.STATE, number, 0, 1.0, meta=(metadata, layout, part_size_bytes))
        return
    vector = Vector(tensors, codecs)
    values = vector.read()
    [parts] = vector.cut([vector.count], part_size_bytes)
    yield Message(Kind.STATE, number, 0, 1.0 + len(parts), meta=(metadata, layout, part_size_bytes))
    for index, part in enumerate(parts, 1):
        raw, body = pack(vector.segments[part.segment].codec, values[part.segment][part.start : part.stop])
        yield Message(Kind.STATE, number, index, 1.0 + len(parts), raw, None, body)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous()


def rebuild(words: Sequence[Message]) -> Loaded:
    """Return the state that the words of `chunks` hold. Raises ValueError if they do not fit together."""
    metadata, layout, part_size_bytes = words[0].meta
    tensors = [torch.zeros(shape, dtype=getattr(torch, dtype)) for dtype, shape, _ in layout]
    if not tensors:
        return metadata, []
    vector = Vector(tensors, [codec for _, _, codec in layout])
    [parts] = vector.cut([vector.count], part_size_bytes)
    flat = vector.zeros()
    for part, word in zip(parts, words[1:], strict=True):
        flat[part.segment][part.start : part.stop] = vector.unpacked(part, word.raw, word.body)
    vector.add(flat)
    return metadata, tensors


class Download:
    """One newcomer's download: asks a donor, collects its chunks in order, falls through to the next donor."""

    def __init__(self, number: int, chunk_timeout_s: float, order: np.random.Generator) -> None:
        self.number, self.chunk_timeout_s = number, chunk_timeout_s
        self.out: deque[Outgoing] = deque()
        self.words: list[Message] = []
        self.complete = False
        self.donor: int | None = None
        self._order = order
        self._donors: deque[int] = deque()  # those left to ask, the best first
        self._due_s = math.inf

    def offer(self, donors: Sequence[Entry], now_s: float) -> None:
        """Go through these donors, from the highest priority down (ties: by lot)."""
        lots = self._order.permutation(len(donors))
        ranked = sorted(zip(donors, lots, strict=True), key=lambda each: (-each[0].value, each[1]))
        self._donors = deque(entry.rank for entry, _ in ranked)
        self._ask(now_s)

    def _ask(self, now_s: float) -> None:
        self.words, self._due_s = [], math.inf
        self.donor = self._donors.popleft() if self._donors else None
        if self.donor is not None:
            self.number += 1
            self._due_s = now_s + self.chunk_timeout_s
            self.out.append((self.donor, Message(Kind.FETCH, self.number)))

    def handle(self, source: int, word: Message, now_s: float) -> None:
        """Take a STATE word. One that was damaged, or that is missing, ends this donor's turn."""
        if source != self.donor or word.number != self.number or self.complete or word.part < len(self.words):
            return
        if (
            word.value <= 0 or word.damaged or word.part > len(self.words)
        ):  # at most 0: it shares no state any more
            self.lost(source, now_s)
            return
        self.words.append(word)
        self._due_s = now_s + self.chunk_timeout_s
        self.complete = len(self.words) == int(word.value)

    def lost(self, rank: int, now_s: float) -> None:
        """Give up a donor."""
        if rank in self._donors:
            self._donors.remove(rank)
        if rank == self.donor and not self.complete:
            self._ask(now_s)

    def tick(self, now_s: float) -> None:
        """Give up a donor that is silent."""
        if self.donor is not None and not self.complete and now_s >= self._due_s:
            self.lost(self.donor, now_s)

    def wake_s(self) -> float:
        """Return when `tick` is next needed."""
        return math.inf if self.complete else self._due_s


class StateDonor:
    """What this rank gives to newcomers, and whether it does."""

    def __init__(self, engine: AveragerEngine, *, sharing: bool) -> None:
        self.engine, self.sharing, self.priority, self.given = engine, sharing, 0.0, 0
        self._key = state_key(engine.settings.prefix)
        self._declare_s, self._declared = -math.inf, 0.0
        self._fetches: list[tuple[int, Message]] = []

    def change(self, *, sharing: bool | None = None, priority: float | None = None) -> None:
        """Change what others are told, from now on."""
        self.sharing = self.sharing if sharing is None else sharing
        self.priority = self.priority if priority is None else priority
        self._declare_s = -math.inf

    def asked(self, source: int, word: Message) -> None:
        """Take a FETCH."""
        self._fetches.append((source, word))

    @property
    def waiting(self) -> bool:
        """Whether somebody has asked and not been answered."""
        return bool(self._fetches)

    def declare(self, now_s: float) -> None:
        """Renew the declaration if that is due."""
        if now_s < self._declare_s:
            return
        if self.sharing:
            self.engine.send(self.engine.asker.ask(self._key, now_s, self._entry(now_s)))
        else:
            self.engine.send(self.engine.asker.take_back(self._key))
        self._declare_s = now_s + self.engine.settings.declare_state_period

    def _entry(self, now_s: float) -> Entry:
        self._declared = self.priority
        until_s = now_s + 2 * self.engine.settings.declare_state_period
        return Entry(self.engine.post.rank, -self.priority, until_s, self.priority)

    def renew(self, now_s: float) -> None:
        """Tell the keepers if the priority is not what they were told: after an average, others may look for it."""
        if self.sharing and self.priority != self._declared and now_s < self._declare_s:
            self.engine.send(self.engine.asker.renew(self._key, self._entry(now_s)))

    def retire(self) -> None:
        """Give nothing any more."""
        self.change(sharing=False)
        self.engine.send(self.engine.asker.take_back(self._key))
        self.answer(lambda: (None, []))
        self._declare_s = math.inf

    def answer(self, state_of: Callable[[], State]) -> None:
        """Send the state to those who asked; who may not have it is told so."""
        fetches, self._fetches = self._fetches, []
        settings = self.engine.settings
        state = state_of() if self.sharing and fetches else None
        for source, word in fetches:
            if state is None:
                self.engine.send([(source, Message(Kind.STATE, word.number, value=-1.0))])
            else:
                packed = chunks(word.number, state, settings.state_compression, settings.part_size_bytes)
                self.engine.send((source, chunk) for chunk in packed)
                self.given += 1

    def wake_s(self) -> float:
        """Return when `declare` is next needed."""
        return self._declare_s


class StateDownload:
    """A download of state under way: `done()`, `result()`. Donors are those that declare themselves now."""

    def __init__(
        self, engine: AveragerEngine, download: Download, numbers: Callable[[], int], until_s: float | None
    ) -> None:
        self.engine, self.download, self._number = engine, download, numbers
        self._until_s = math.inf if until_s is None else until_s
        self._retry = until_s is not None
        self._key = state_key(engine.settings.prefix)
        self._question: DirectoryQuery | None = None
        self._unheard, self._ask_s = 0, -math.inf
        self._over = False

    def done(self) -> bool:
        """Whether the state is here, or will not come."""
        return self.download.complete or self._over

    def result(self) -> Loaded | None:
        """Wait for the end; return (metadata, tensors), or None if nobody gave a state in time."""
        self.engine.drive(self.done, math.inf)
        return rebuild(self.download.words) if self.download.complete else None

    def handle(self, source: int, word: Message, now_s: float) -> None:
        """Take a STATE, or the LISTED that answers this download's question."""
        if word.kind is Kind.STATE:
            self.download.handle(source, word, now_s)
        elif self._question is not None:
            self._question.handle(source, word)

    def tick(self, now_s: float, dead: set[int]) -> None:
        """Ask who gives its state, then go from donor to donor."""
        for rank in dead:
            self.download.lost(rank, now_s)
        self.download.tick(now_s)
        if self._question is not None:
            self._listed(self._question, now_s)
        if now_s >= self._until_s:
            self._over = True
        elif self._question is None and self.download.donor is None:
            self._ask(now_s)
        self.engine.send(self.download.out)
        self.download.out.clear()

    def _ask(self, now_s: float) -> None:
        """Ask for the donors again; without a time limit one list of donors is enough."""
        if self._ask_s > -math.inf and not self._retry:
            self._over = True
        elif now_s >= self._ask_s:
            question = self._question = DirectoryQuery(self.engine.asker, self._key, self._number(), now_s)
            question.due_s = min(question.due_s, (now_s + self._until_s) / 2)
            self._ask_s = now_s + self.engine.settings.request_timeout
            self.engine.send(question.words())

    def _listed(self, question: DirectoryQuery, now_s: float) -> None:
        if not question.over(now_s):
            return
        self._question = None
        if question.heard:
            self.download.offer(question.entries(now_s), now_s)
        elif self._unheard < KEEPERS:  # all its keepers are silent: others keep the key now
            self._unheard, self._ask_s = self._unheard + 1, -math.inf

    def wake_s(self) -> float:
        """Return when `tick` is next needed."""
        if self._question is not None:
            return min(self._until_s, self._question.due_s)
        return min(self._until_s, self.download.wake_s() if self.download.donor is not None else self._ask_s)
