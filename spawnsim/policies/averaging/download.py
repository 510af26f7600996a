"""A newcomer downloads the state of a donor: packing and rebuilding it, the donor's side and the newcomer's side.

A state is small metadata and tensors, sent as chunks. Donors declare themselves in the directory; a download goes
through them from the highest priority down, until one gives everything in time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
import torch

from spawnsim.phantoms import is_phantom
from spawnsim.policies.averaging.grouping import REPLICAS, DirectoryClient, DirectoryQuery, Entry
from spawnsim.policies.averaging.interface import Settings
from spawnsim.policies.averaging.vector import Vector
from spawnsim.policies.exchange.endpoint import Endpoint, ProgressEngine
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

# (small metadata, tensors), and perhaps descriptions of the tensors
State = (
    tuple[Any, Sequence[torch.Tensor]] | tuple[Any, Sequence[torch.Tensor], Sequence[CompressionInfo] | None]
)
Loaded = tuple[Any, list[torch.Tensor]]


def state_key(prefix: str) -> str:
    """Return the key under which donors declare themselves."""
    return f"{prefix}.all_averagers"


def chunks(number: int, state: State, compression: Choices, part_size_bytes: int) -> Iterator[Message]:
    """Yield the STATE messages of a state: first all but the numbers, then these in parts.

    The first message names the codecs, so that a state is read as its donor packed it.
    """
    metadata, tensors = state[0], [_on_cpu(tensor) for tensor in state[1]]
    infos = state[2] if len(state) > 2 else None
    codecs = codecs_for(compression, infos_by_place(tensors) if infos is None else infos)
    layout = [
        (str(t.dtype)[6:], tuple(t.shape), _plain(codec)) for t, codec in zip(tensors, codecs, strict=True)
    ]
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


def _codec(plain: Any) -> Codec:
    """Return the codec that travelled."""
    codec: Codec = _BUILT_IN[plain[0]](*plain[1:]) if type(plain) is tuple else plain
    return codec


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if without_data(tensor) else tensor.detach().cpu().contiguous()


def rebuild(messages: Sequence[Message]) -> Loaded:
    """Return the state that the messages of `chunks` hold. Raises ValueError if they do not fit together."""
    metadata, layout, part_size_bytes = messages[0].meta
    phantom = any(is_phantom(message.body) for message in messages)
    device = META if phantom else CPU
    tensors = [torch.zeros(shape, dtype=getattr(torch, dtype), device=device) for dtype, shape, _ in layout]
    if not tensors:
        return metadata, []
    vector = Vector(tensors, [_codec(plain) for _, _, plain in layout])
    [parts] = vector.cut([vector.count], part_size_bytes)
    flat = vector.zeros()
    for part, message in zip(parts, messages[1:], strict=True):
        flat[part.segment][part.start : part.stop] = vector.unpacked(part, message.raw, message.body)
    vector.add(flat)
    return metadata, tensors


class Download:
    """One newcomer's download: asks a donor, collects its chunks in order, falls through to the next donor."""

    def __init__(self, number: int, chunk_timeout_s: float, order: np.random.Generator) -> None:
        self.number, self.chunk_timeout_s = number, chunk_timeout_s
        self.out: deque[Outgoing] = deque()
        self.messages: list[Message] = []
        self.complete = False
        self.donor: int | None = None
        self._order = order
        self._donors: deque[int] = deque()  # those left to ask, the best first
        self._due_s = math.inf

    def offer(self, donors: Sequence[Entry], now_s: float) -> None:
        """Go through these donors, from the highest priority down; those of equal priority in random order."""
        ties = self._order.permutation(len(donors))  # newcomers that ask at one time go to several donors
        ranked = sorted(zip(donors, ties, strict=True), key=lambda each: (-each[0].value, each[1]))
        self._donors = deque(entry.rank for entry, _ in ranked)
        self._ask(now_s)

    def _ask(self, now_s: float) -> None:
        self.messages, self._due_s = [], math.inf
        self.donor = self._donors.popleft() if self._donors else None
        if self.donor is not None:
            self.number += 1
            self._due_s = now_s + self.chunk_timeout_s
            self.out.append((self.donor, Message(Kind.FETCH, self.number)))

    def handle(self, source: int, message: Message, now_s: float) -> None:
        """Take a STATE message. One that was damaged, or that is missing, ends this donor's turn."""
        if (
            source != self.donor
            or message.number != self.number
            or self.complete
            or message.part < len(self.messages)
        ):
            return
        # No parts: it shares no state any more.
        if not message.parts or message.damaged or message.part > len(self.messages):
            self.lost(source, now_s)
            return
        self.messages.append(message)
        self._due_s = now_s + self.chunk_timeout_s
        self.complete = len(self.messages) == message.parts

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

    def __init__(self, settings: Settings, directory: DirectoryClient, endpoint: Endpoint) -> None:
        self.settings, self.directory, self.endpoint = settings, directory, endpoint
        self.sharing, self.priority, self.given = settings.shares_state, 0.0, 0
        self._key = state_key(settings.prefix)
        self._declare_s, self._declared = -math.inf, 0.0
        self._fetches: list[tuple[int, Message]] = []

    def change(self, *, sharing: bool | None = None, priority: float | None = None) -> None:
        """Change what others are told, from now on."""
        self.sharing = self.sharing if sharing is None else sharing
        self.priority = self.priority if priority is None else priority
        self._declare_s = -math.inf

    def asked(self, source: int, message: Message) -> None:
        """Take a FETCH."""
        self._fetches.append((source, message))

    @property
    def waiting(self) -> bool:
        """Whether a newcomer has asked and not been answered."""
        return bool(self._fetches)

    def declare(self, now_s: float) -> None:
        """Renew the declaration if that is due."""
        if now_s < self._declare_s:
            return
        if self.sharing:
            self.endpoint.send_all(self.directory.ask(self._key, now_s, self._entry(now_s)))
        else:
            self.endpoint.send_all(self.directory.take_back(self._key))
        self._declare_s = now_s + self.settings.declare_state_period

    def _entry(self, now_s: float) -> Entry:
        self._declared = self.priority
        until_s = now_s + 2 * self.settings.declare_state_period
        return Entry(self.endpoint.rank, -self.priority, until_s, self.priority)

    def renew(self, now_s: float) -> None:
        """Tell the replicas of a changed priority: after an average, others may look for it."""
        if self.sharing and self.priority != self._declared and now_s < self._declare_s:
            self.endpoint.send_all(self.directory.renew(self._key, self._entry(now_s)))

    def retire(self) -> None:
        """Give nothing any more."""
        self.change(sharing=False)
        self.endpoint.send_all(self.directory.take_back(self._key))
        self.answer(lambda: (None, []))
        self._declare_s = math.inf

    def answer(self, state_of: Callable[[], State]) -> None:
        """Send the state to the ranks that asked, or refuse it if this rank does not share its state."""
        # All chunks are packed at once, while the tensors are held: chunks packed later would be of a model that has
        # trained on, and the newcomer would get a state that no rank ever had.
        fetches, self._fetches = self._fetches, []
        state = state_of() if self.sharing and fetches else None
        for source, message in fetches:
            if state is None:
                self.endpoint.send(source, Message(Kind.STATE, message.number, parts=0))
            else:
                settings = self.settings
                for chunk in chunks(
                    message.number, state, settings.state_compression, settings.part_size_bytes
                ):
                    self.endpoint.send(source, chunk)
                self.given += 1

    def wake_s(self) -> float:
        """Return when `declare` is next needed."""
        return self._declare_s


class StateDownload:
    """A download of state under way: `done()`, `result()`. Donors are those that declare themselves now."""

    def __init__(
        self, settings: Settings, directory: DirectoryClient, engine: ProgressEngine, download: Download,
        number: Callable[[], int], until_s: float | None,
    ) -> None:  # fmt: skip
        self.settings, self.directory, self.engine = settings, directory, engine
        self.download, self._number = download, number
        self._until_s = math.inf if until_s is None else until_s
        self._retry = until_s is not None
        self._key = state_key(settings.prefix)
        self._question: DirectoryQuery | None = None
        self._unheard, self._ask_s = 0, -math.inf
        self._over = False

    def done(self) -> bool:
        """Whether the state is here, or will not come."""
        return self.download.complete or self._over

    def result(self) -> Loaded | None:
        """Wait for the end; return (metadata, tensors), or None if no donor gave its state in time."""
        self.engine.drive(self.done, math.inf)
        return rebuild(self.download.messages) if self.download.complete else None

    def handle(self, source: int, message: Message, now_s: float) -> None:
        """Take a STATE, or the LISTED that answers this download's question."""
        if message.kind is Kind.STATE:
            self.download.handle(source, message, now_s)
        elif self._question is not None:
            self._question.handle(source, message)

    def tick(self, now_s: float, dead: set[int]) -> None:
        """Ask for donors, then go from one to the next."""
        for rank in dead:
            self.download.lost(rank, now_s)
        self.download.tick(now_s)
        if self._question is not None:
            self._listed(self._question, now_s)
        if now_s >= self._until_s:
            self._over = True
        elif self._question is None and self.download.donor is None:
            self._ask(now_s)
        self.engine.endpoint.send_queue(self.download.out)

    def _ask(self, now_s: float) -> None:
        """Ask for the donors again; without a time limit one list of donors is enough."""
        if self._ask_s > -math.inf and not self._retry:
            self._over = True
        elif now_s >= self._ask_s:
            question = self._question = DirectoryQuery(self.directory, self._key, self._number(), now_s)
            question.due_s = min(question.due_s, (now_s + self._until_s) / 2)
            self._ask_s = now_s + self.settings.request_timeout
            self.engine.endpoint.send_all(question.messages())

    def _listed(self, question: DirectoryQuery, now_s: float) -> None:
        if not question.over(now_s):
            return
        self._question = None
        if question.heard:
            self.download.offer(question.entries(now_s), now_s)
        elif self._unheard < REPLICAS:  # all its replicas are silent: others hold the key now
            self._unheard, self._ask_s = self._unheard + 1, -math.inf

    def wake_s(self) -> float:
        """Return when `tick` is next needed."""
        if self._question is not None:
            return min(self._until_s, self._question.due_s)
        return min(self._until_s, self.download.wake_s() if self.download.donor is not None else self._ask_s)
