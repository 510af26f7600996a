"""Averaging in pairs at intervals of the clock: one rank's side, a state machine driven by messages and time.

The requesting rank sends its weights. The partner moves its weights by `gain` towards them, and returns its own weights
from before the move. The requesting rank does the same when they arrive, as a delta, which preserves steps taken
meanwhile: x ← x + gain·(other − x). The sum over both ranks is preserved.

No rank ever waits for a partner: if an answer does not arrive in time, its rank is excluded for a while, longer each
time. Partners are chosen among the other ranks; a ring closes over excluded ranks. Works on flat arrays; must not know
communicators.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch

from spawnsim.errors import ParameterError
from spawnsim.policies.averaging.vector import Values, Vector, difference
from spawnsim.policies.exchange.messages import Kind, Message, Outgoing
from spawnsim.policies.state.codecs import Bytes

Mode = Literal["all", "ring", "shift_one", "random"]
GAIN = {"ring": 1 / 3, "shift_one": 1 / 2, "random": 1 / 2}


def check_mode(mode: str) -> Mode:
    """Return the mode, or raise `ParameterError`."""
    if mode not in get_args(Mode):
        raise ParameterError(f"peer_selection_mode={mode!r}: choose one of {', '.join(get_args(Mode))}")
    return mode  # type: ignore[return-value]


def partner(mode: Mode, rank: int, size: int, *, round_: int, rng: np.random.Generator) -> int | None:
    """Return the partner of this round, or None.

    ring: the successor (every edge is used once when all ranks have sent a request). shift_one: the lower half requests
    the upper half, shifted by one each round (with an odd number of ranks, one rank pauses, in turn). random: any rank.
    """
    if mode == "ring":
        peer = (rank + 1) % size
        # Two ranks share one edge, which only one of them may use in a round.
        return peer if size > 1 and not (size == 2 and rank == 1) else None
    if mode == "shift_one":
        half, shift = size // 2, round_ if size % 2 else 0
        place = (rank + shift) % size
        return (half + (round_ + place) % half - shift) % size if place < half else None
    others = [other for other in range(size) if other != rank]
    return int(others[rng.integers(len(others))]) if others else None


STEPS = 4  # a request and its answer may each wait for a step of their receiver; steps differ in length
DOUBLINGS = 4  # how often the exclusion time of a silent rank doubles


@dataclass
class Pace:
    """Seconds between exchanges, and seconds after which a peer counts as silent.

    A rank that trains answers only between its steps, so the limit covers several steps: `step_s` is the usual time
    between two polls of a rank, as far as this rank knows.
    """

    interval_s: float
    stated_s: float
    step_s: float = 0.0

    @property
    def patience_s(self) -> float:
        return self.patience_for(1)

    def patience_for(self, levels: int) -> float:
        """Return the seconds to wait for a message that passes several ranks, one after the other."""
        return max(self.stated_s, STEPS * self.step_s * levels)


def as_body(values: list[Values]) -> Bytes:
    """Return the segments of a vector as bytes, end to end."""
    return np.concatenate([segment.view(np.uint8) for segment in values])


def from_body(body: Bytes, vector: Vector) -> list[Values] | None:
    """Return the segments in a body, or None if its length does not match."""
    sizes = [segment.count * segment.wide.itemsize for segment in vector.segments]
    if body.size != sum(sizes):
        return None
    ends = np.cumsum(sizes)
    pieces = [body[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    return [piece.copy().view(segment.wide) for piece, segment in zip(pieces, vector.segments, strict=True)]


def scaled(deltas: list[Values], factor: float, vector: Vector) -> list[Values]:
    """Return each delta times a factor, in its dtype.

    Deltas of integers are rounded symmetrically, to equal magnitudes on both ranks: rounding halves up would drift.
    """
    dtypes = dict.fromkeys(torch.view_as_real(t).dtype if t.is_complex() else t.dtype for t in vector.tensors)
    whole = [not (dtype.is_floating_point or dtype == torch.bool) for dtype in dtypes]
    moves = [delta * delta.dtype.type(factor) for delta in deltas]
    return [np.rint(move) if rounded else move for move, rounded in zip(moves, whole, strict=True)]


class _Pending(NamedTuple):
    peer: int
    number: int
    sent: list[Values]
    until_s: float


# Both deltas of an exchange are computed from the same pair of values, so the sum over both ranks is preserved although
# they are applied at different times. A lost answer violates that: the partner has moved and the requesting rank has
# not. This is accepted, since the remedy (a second round trip before the moves) would slow down every exchange.
class PairwiseGossip:
    """One rank's exchanges in the modes ring, shift_one and random."""

    def __init__(
        self, mode: Mode, ranks: tuple[int, int], pace: Pace, rng: np.random.Generator, *, share: float = 1.0
    ) -> None:
        self.mode, (self.rank, self.size), self.pace = mode, ranks, pace
        self._gain = share * GAIN[mode]
        self.out: deque[Outgoing] = deque()
        self.counts: Counter[str] = Counter()
        self.rounds, self.active = 0, False
        self._rng = rng
        self._asked: _Pending | None = None
        self._absent: dict[int, float] = {}  # rank → end of its exclusion
        self._silences: Counter[int] = Counter()  # consecutive silences, by rank
        self._requesters: set[int] = set()
        self._due_s = math.inf

    def set_active(self, active: bool, now_s: float, *, for_good: bool = False) -> None:
        self.active = active
        self._due_s = now_s + self.pace.interval_s if active else math.inf

    def note_step(self, step_s: float) -> None:
        self.pace.step_s = step_s

    @property
    def settled(self) -> bool:
        return self._asked is None

    @property
    def relied_on(self) -> bool:
        return False  # other ranks find another partner

    def forget(self) -> None:
        self._asked = None

    def tick(self, now_s: float, vector: Vector) -> None:
        if self._asked is not None and now_s >= self._asked.until_s:
            self.counts["silent peers"] += 1
            self._silences[self._asked.peer] += 1
            self._leave_out(self._asked.peer, now_s)
            self._asked = None
        # One request at a time: a second one would send weights that the first answer changes.
        if now_s < self._due_s or self._asked is not None:
            return
        # Counted from now, not from the due time: a busy rank does not catch up on rounds.
        self._due_s = now_s + self.pace.interval_s
        self._absent = {rank: until_s for rank, until_s in self._absent.items() if until_s > now_s}
        there = [rank for rank in range(self.size) if rank not in self._absent]
        place = partner(self.mode, there.index(self.rank), len(there), round_=self.rounds, rng=self._rng)
        self.rounds += 1
        if place is None:
            return
        peer = there[place]
        sent = vector.read()
        number = int(self._rng.integers(1, 2**62))
        self._asked = _Pending(peer, number, sent, now_s + self.pace.patience_s)
        self.out.append((peer, Message(Kind.SWAP, number, value=self._gain, body=as_body(sent))))

    def _leave_out(self, peer: int, now_s: float) -> None:
        doubled = 2 ** min(self._silences[peer], DOUBLINGS)
        self._absent[peer] = now_s + doubled * max(4 * self.pace.interval_s, self.pace.patience_s)

    def lost(self, rank: int, now_s: float) -> None:
        # Forever: a rank that restarts joins another communicator.
        self._absent[rank] = math.inf
        if self._asked is not None and self._asked.peer == rank:
            self._asked = None

    def handle(self, source: int, message: Message, now_s: float, vector: Vector) -> None:
        self._silences[source] = 0
        if message.kind is Kind.SWAP:
            self._absent.pop(source, None)
            # Stored, so that this rank can notify these ranks when it leaves.
            self._requesters.add(source)
            self._swap(source, message, vector)
            return
        if message.kind is Kind.DECLINED and message.part:  # it has left for good
            self.lost(source, now_s)
            return
        asked = self._asked
        if asked is None or (source, message.number) != (asked.peer, asked.number):
            self.counts["late"] += 1
            return
        self._asked = None
        if message.kind is Kind.DECLINED:
            self.counts["declined"] += 1
            self._leave_out(source, now_s)
        else:
            self._approach(vector, message.body, asked.sent, self._gain)

    def _swap(self, source: int, message: Message, vector: Vector) -> None:
        # Read before the move: the answer has the original weights, or the sum over both would change.
        own = vector.read()
        # A gain above one half would overshoot; it can only come from damage or another version.
        fair, answer = self.active and 0 < message.value <= 0.5, Message(Kind.DECLINED, message.number)
        if fair and self._approach(vector, message.body, own, message.value):
            answer = Message(Kind.SWAPPED, message.number, body=as_body(own))
        self.out.append((source, answer))

    def _approach(self, vector: Vector, body: Bytes, own: list[Values], gain: float) -> bool:
        """Move by `gain` towards the weights in a body; return whether their shapes match."""
        theirs = from_body(body, vector)
        if theirs is None:
            self.counts["other shapes"] += 1
            return False
        deltas = [difference(there, here) for there, here in zip(theirs, own, strict=True)]
        vector.add(scaled(deltas, gain, vector))
        self.counts["exchanges"] += 1
        return True

    def wake_s(self) -> float:
        return self._due_s if self._asked is None else self._asked.until_s

    def leave(self) -> None:
        """Notify all ranks that have sent requests that this rank leaves."""
        self.out.extend((rank, Message(Kind.DECLINED, 0, part=1)) for rank in sorted(self._requesters))
