"""State sharing: how a donor packs its state, and how a newcomer collects it.

This room knows tensors, words and the time it is told; no communicator. A state is small metadata and tensors, sent
as chunks; a download goes through the donors from the highest priority down, until one gives everything in time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from spawnsim.policies.codecs import pack
from spawnsim.policies.groups.compression import Choices, CompressionInfo, codecs_for, described
from spawnsim.policies.groups.directory import Entry
from spawnsim.policies.groups.parts import Vector
from spawnsim.policies.groups.words import Kind, Outgoing, Word

# (small metadata, tensors), and perhaps descriptions of the tensors
State = (
    tuple[Any, Sequence[torch.Tensor]] | tuple[Any, Sequence[torch.Tensor], Sequence[CompressionInfo] | None]
)
Loaded = tuple[Any, list[torch.Tensor]]


def state_key(prefix: str) -> str:
    """Return the key under which donors declare themselves."""
    return f"{prefix}.all_averagers"


def chunks(number: int, state: State, compression: Choices, part_size_bytes: int) -> Iterator[Word]:
    """Yield the STATE words of a state: first all but the numbers, then these in parts.

    The first word names the codecs, so that a state is read as its donor packed it.
    """
    metadata, tensors = state[0], [_movable(tensor) for tensor in state[1]]
    infos = state[2] if len(state) > 2 else None
    codecs = codecs_for(compression, described(tensors) if infos is None else infos)
    layout = [(str(t.dtype)[6:], tuple(t.shape), codec) for t, codec in zip(tensors, codecs, strict=True)]
    if not tensors:
        yield Word(Kind.STATE, number, 0, 1.0, meta=(metadata, layout, part_size_bytes))
        return
    vector = Vector(tensors, codecs)
    values = vector.read()
    [parts] = vector.cut([vector.count], part_size_bytes)
    yield Word(Kind.STATE, number, 0, 1.0 + len(parts), meta=(metadata, layout, part_size_bytes))
    for index, part in enumerate(parts, 1):
        raw, body = pack(vector.segments[part.segment].codec, values[part.segment][part.start : part.stop])
        yield Word(Kind.STATE, number, index, 1.0 + len(parts), raw, None, body)


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous()


def rebuild(words: Sequence[Word]) -> Loaded:
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
        self.words: list[Word] = []
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
            self.out.append((self.donor, Word(Kind.FETCH, self.number)))

    def handle(self, source: int, word: Word, now_s: float) -> None:
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
