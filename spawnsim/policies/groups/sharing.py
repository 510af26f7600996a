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

from spawnsim.policies.codecs import Codec, pack, unpack
from spawnsim.policies.groups.directory import Entry
from spawnsim.policies.groups.parts import Vector
from spawnsim.policies.groups.words import Kind, Outgoing, Word

State = tuple[Any, list[torch.Tensor]]


def state_key(prefix: str) -> str:
    """Return the key under which donors declare themselves."""
    return f"{prefix}.all_averagers"


def chunks(number: int, state: State, codec: Codec, part_size_bytes: int) -> Iterator[Word]:
    """Yield the STATE words of a state: first the metadata, the tensors' dtypes and shapes, then the parts in order."""
    metadata, tensors = state
    shapes = [(str(tensor.dtype)[6:], tuple(tensor.shape)) for tensor in tensors]
    if not tensors:
        yield Word(Kind.STATE, number, 0, 1.0, meta=(metadata, shapes))
        return
    vector = Vector([_movable(tensor) for tensor in tensors])
    values = vector.read()
    [parts] = vector.cut([vector.count], codec, part_size_bytes)
    yield Word(Kind.STATE, number, 0, 1.0 + len(parts), meta=(metadata, shapes))
    for index, part in enumerate(parts, 1):
        raw, body = pack(vector.codec(part.segment, codec), values[part.segment][part.start : part.stop])
        yield Word(Kind.STATE, number, index, 1.0 + len(parts), raw, None, body)


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous()


def rebuild(words: Sequence[Word], codec: Codec, part_size_bytes: int) -> State:
    """Return the state that the words of `chunks` hold. Raises ValueError if they do not fit together."""
    metadata, shapes = words[0].meta
    tensors = [torch.zeros(shape, dtype=getattr(torch, dtype)) for dtype, shape in shapes]
    if not tensors:
        return metadata, []
    vector = Vector(tensors)
    [parts] = vector.cut([vector.count], codec, part_size_bytes)
    flat = vector.zeros()
    for part, word in zip(parts, words[1:], strict=True):
        segment = vector.segments[part.segment]
        flat[part.segment][part.start : part.stop] = unpack(
            vector.codec(part.segment, codec), word.body, raw=word.raw, dtype=segment.wide,
            count=part.stop - part.start,
        )  # fmt: skip
    vector.add(flat)
    return metadata, tensors


class Download:
    """One newcomer's download: asks a donor, collects its chunks, falls through to the next."""

    def __init__(self, number: int, chunk_timeout_s: float, order: np.random.Generator) -> None:
        self.number, self.chunk_timeout_s = number, chunk_timeout_s
        self.out: deque[Outgoing] = deque()
        self.words: dict[int, Word] | None = None
        self.complete = False
        self.donor: int | None = None
        self.tried: set[int] = set()
        self._order, self._ranking = order, dict[int, float]()
        self._due_s = math.inf

    def asking(self) -> bool:
        """Whether a donor has been asked and not given up."""
        return self.donor is not None

    def offer(self, donors: Sequence[Entry], now_s: float) -> None:
        """Take up donors; ask the one of the highest priority if nobody is being asked (ties: by lot)."""
        for entry in donors:
            if entry.rank not in self._ranking:
                self._ranking[entry.rank] = self._order.random()
        if self.donor is None and not self.complete:
            left = [entry for entry in donors if entry.rank not in self.tried]
            best = max(left, key=lambda entry: (entry.value, self._ranking[entry.rank]), default=None)
            if best is not None:
                self._ask(best.rank, now_s)

    def _ask(self, rank: int, now_s: float) -> None:
        self.donor, self.words = rank, {}
        self.tried.add(rank)
        self.number += 1
        self._due_s = now_s + self.chunk_timeout_s
        self.out.append((rank, Word(Kind.FETCH, self.number)))

    def handle(self, source: int, word: Word, now_s: float) -> None:
        """Take a STATE word."""
        if source != self.donor or word.number != self.number or self.words is None:
            return
        if word.value <= 0:  # the donor shares no state any more
            self.lost(source)
            return
        self.words[word.part] = word
        self._due_s = now_s + self.chunk_timeout_s
        self.complete = len(self.words) == int(word.value)

    def lost(self, rank: int) -> None:
        """Give up a donor."""
        if rank == self.donor and not self.complete:
            self.donor, self.words, self._due_s = None, None, math.inf

    def tick(self, now_s: float) -> None:
        """Give up a donor that is silent."""
        if self.donor is not None and not self.complete and now_s >= self._due_s:
            self.lost(self.donor)

    def wake_s(self) -> float:
        """Return when `tick` is next needed."""
        return math.inf if self.complete else self._due_s
