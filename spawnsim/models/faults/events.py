"""Faults as data: one frozen object per fault, each a fact about a rank or a link and a window of virtual time.

A link fault gives a verdict on each message that meets it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from numbers import Integral, Real
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spawnsim.errors import ParameterError
from spawnsim.models.network.cost import Ints
from spawnsim.options import nearest


class Verdict(NamedTuple):
    """The effect of faults on one message."""

    lost: bool = False
    delay_s: float = 0.0
    """Added to the time of arrival."""
    copies: int = 1
    """Number of deliveries; 1 is normal."""
    corrupt: bool = False
    """Whether its payload is damaged in transit."""
    nan: bool = False
    """Whether the corrupted value is NaN, instead of a flipped bit."""
    resent: int = 0
    """Number of retransmissions before it arrived; only on a reliable connection."""

    def then(self, other: Verdict) -> Verdict:
        """Return the combination of both verdicts: any loss loses, delays add, copies multiply."""
        return Verdict(
            self.lost or other.lost,
            self.delay_s + other.delay_s,
            self.copies * other.copies,
            self.corrupt or other.corrupt,
            self.nan or other.nan,
        )

    def describe(self) -> str:
        """Return the effect on the message, such as "delayed+doubled"; empty if it is delivered normally."""
        struck = {
            "lost": self.lost, "resent": self.resent, "corrupt": self.corrupt and not self.nan,
            "nan": self.corrupt and self.nan,
            "delayed": self.delay_s > 0.0 and not self.resent, "doubled": self.copies > 1,
        }  # fmt: skip
        return "+".join(name for name, is_so in struck.items() if is_so)


DELIVERED = Verdict()
LOST = Verdict(lost=True)


Bools = NDArray[np.bool_]


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError
    return int(value)


def _real(value: Any) -> float:
    number = value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf if number > 0 else -math.inf


_HELD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "int": (_whole, "a whole number"),
    "int | None": (lambda value: None if value is None else _whole(value), "a rank, or None for any"),
    "tuple[int, ...]": (lambda value: tuple(map(_whole, value)), "ranks, such as (0, 1)"),
    "float": (_real, "a number"),
    "str": (str, "a text"),
}


@cache
def _fields(kind: Any) -> list[tuple[str, Callable[[Any], Any], str]]:
    return [(part.name, *_HELD[str(part.type)]) for part in fields(kind)]


def hold(item: object) -> None:
    """Convert each field of a fault to its declared type, from any type of number.

    Raises:
        ParameterError: a value is invalid.
    """
    kind: Any = type(item)
    for name, read, what in _fields(kind):
        try:
            value = read(getattr(item, name))
        except TypeError:
            raise ParameterError(f"fault {item!r}: {name} must be {what}") from None
        object.__setattr__(item, name, value)


@dataclass(frozen=True)
class Fault(ABC):
    """One fault. `kind` is its name in texts and JSON."""

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        hold(self)
        window = vars(self)
        self.check_window(window["at_s"], window.get("for_s", math.inf))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that the fault names."""
        named = [getattr(self, part.name) for part in fields(self) if part.name in ("rank", "source", "dest")]
        return tuple(rank for rank in named if rank is not None)

    def refuse(self, why: str) -> ParameterError:
        return ParameterError(f"fault {self!r}: {why}")

    def check_window(self, at_s: float, for_s: float) -> None:
        """Raise ParameterError unless the window starts at a finite time of at least 0 and lasts."""
        if any(rank < 0 for rank in self.ranks):
            raise self.refuse("ranks are counted from 0")
        if not 0.0 <= at_s < math.inf:
            raise self.refuse("at_s must be a finite time of at least 0 s")
        if not for_s > 0.0:
            raise self.refuse("for_s must be above 0 s")


@dataclass(frozen=True)
class Crash(Fault):
    """The rank stops for good at `at_s`: unsent messages are never sent."""

    rank: int
    at_s: float
    kind: ClassVar[str] = "crash"


@dataclass(frozen=True)
class Restart(Fault):
    """A crashed rank starts its program again at `at_s`, with only its number."""

    rank: int
    at_s: float
    kind: ClassVar[str] = "restart"


@dataclass(frozen=True)
class Pause(Fault):
    """The rank stands still from `at_s` for `for_s` seconds, as under SIGSTOP: it neither computes nor responds."""

    rank: int
    at_s: float
    for_s: float
    kind: ClassVar[str] = "pause"

    @property
    def speed(self) -> float:
        """Work done per second during the pause: 0."""
        return 0.0


@dataclass(frozen=True)
class SlowDown(Fault):
    """The rank computes `factor` times slower from `at_s` for `for_s` seconds."""

    rank: int
    at_s: float
    for_s: float
    factor: float
    kind: ClassVar[str] = "slow"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0.0 < self.factor < math.inf and self.speed < math.inf):
            raise self.refuse("factor must be a finite number above 0; use a pause for a rank that stops")

    @property
    def speed(self) -> float:
        """Work done per second during the fault."""
        return 1.0 / self.factor


@dataclass(frozen=True)
class Skew(Fault):
    """The rank's clock shows `offset_s` seconds more from `at_s` on, and gains `drift` seconds a second.

    Only the rank's readings are wrong (`comm.clock.now()`, `MPI.Wtime()`, never below 0): its computing, its waits and
    the times of its rows are unaffected. After `for_s` seconds the clock is right again.
    """

    rank: int
    at_s: float
    for_s: float
    offset_s: float
    drift: float = 0.0
    kind: ClassVar[str] = "skew"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.offset_s) and math.isfinite(self.drift)):
            raise self.refuse("offset_s and drift must be finite")

    def error_s(self, time_s: float) -> float:
        """Return the amount by which the clock is ahead at a time."""
        if not self.at_s <= time_s < self.at_s + self.for_s:
            return 0.0
        return self.offset_s + self.drift * (time_s - self.at_s)


@dataclass(frozen=True)
class LinkFault(Fault):
    """A fault of messages from `source` to `dest` (None: any rank), sent from `at_s` for `for_s` seconds."""

    source: int | None
    dest: int | None
    at_s: float
    for_s: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source is not None and self.source == self.dest:
            raise self.refuse("a rank has no link to itself: its messages to itself never leave its memory")

    def covers(self, source: int, dest: int, sent_s: float) -> bool:
        """Whether a message sent at `sent_s` meets this fault."""
        return (
            self.source in (None, source)
            and self.dest in (None, dest)
            and source != dest
            and self.at_s <= sent_s < self.at_s + self.for_s
        )

    def touches(self, source: Ints, dest: Ints) -> Bools:
        """Return which of many links the fault concerns, at any time."""
        ours = np.ones(len(source), bool)
        for own, ends in ((self.source, source), (self.dest, dest)):
            if own is not None:
                ours &= ends == own
        return ours

    @abstractmethod
    def verdict(self, sent_s: float, chance: float) -> Verdict:
        """Return the verdict on a message that meets this fault; `chance` is its own uniform draw from [0, 1)."""


@dataclass(frozen=True)
class LinkDown(LinkFault):
    """Messages wait at the sender until the link is back; on a link that stays down they are lost."""

    kind: ClassVar[str] = "down"

    def verdict(self, sent_s: float, chance: float) -> Verdict:
        wait_s = self.at_s + self.for_s - sent_s
        return LOST if math.isinf(wait_s) else Verdict(delay_s=wait_s)


@dataclass(frozen=True)
class Likely(LinkFault):
    """A link fault that hits each message with a given probability."""

    probability: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.probability <= 1.0:
            raise self.refuse("probability must lie in [0, 1]")

    @abstractmethod
    def hit(self) -> Verdict:
        """Return the verdict on a message that is hit."""

    def verdict(self, sent_s: float, chance: float) -> Verdict:
        return self.hit() if chance < self.probability else DELIVERED


@dataclass(frozen=True)
class Drop(Likely):
    """Messages are lost."""

    kind: ClassVar[str] = "drop"

    def hit(self) -> Verdict:
        return LOST


@dataclass(frozen=True)
class Duplicate(Likely):
    """Messages arrive twice."""

    kind: ClassVar[str] = "duplicate"

    def hit(self) -> Verdict:
        return Verdict(copies=2)


@dataclass(frozen=True)
class Corrupt(Likely):
    """The payload of messages is damaged in transit.

    `damage`: "bit" flips one; "nan" sets 8 bytes to 0xFF: NaN in each type of floating point numbers, -1 in integers.
    """

    damage: str = "bit"
    kind: ClassVar[str] = "corrupt"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.damage not in ("bit", "nan"):
            raise self.refuse("damage must be bit or nan")

    def hit(self) -> Verdict:
        return Verdict(corrupt=True, nan=self.damage == "nan")


@dataclass(frozen=True)
class Delay(LinkFault):
    """Messages take `delay_s` longer, plus a uniform draw from [0, `spread_s`), by which they may overtake."""

    delay_s: float
    spread_s: float = 0.0
    kind: ClassVar[str] = "delay"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0.0 <= self.delay_s < math.inf and 0.0 <= self.spread_s < math.inf):
            raise self.refuse("delay_s and spread_s must be finite times of at least 0 s")

    def verdict(self, sent_s: float, chance: float) -> Verdict:
        return Verdict(delay_s=self.delay_s + self.spread_s * chance)


@dataclass(frozen=True)
class Reorder(LinkFault):
    """Each message takes up to `spread_s` longer, drawn by itself with a probability: later ones may overtake.

    Messages of one sender on one communicator still stay in order, as MPI guarantees.
    """

    spread_s: float
    probability: float = 1.0
    kind: ClassVar[str] = "reorder"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.spread_s < math.inf or not 0.0 < self.probability <= 1.0:
            raise self.refuse("spread_s must be a finite time above 0 s, probability lie in (0, 1]")

    def verdict(self, sent_s: float, chance: float) -> Verdict:
        if chance >= self.probability:
            return DELIVERED
        return Verdict(delay_s=self.spread_s * chance / self.probability)


@dataclass(frozen=True)
class Partition(Fault):
    """`members` and all other ranks are cut off from each other from `at_s` for `for_s` seconds, as by `LinkDown`."""

    members: tuple[int, ...]
    at_s: float
    for_s: float
    kind: ClassVar[str] = "partition"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "members", tuple(sorted(set(self.members))))
        if not self.members:
            raise self.refuse("members must name at least one rank")

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.members

    def covers(self, source: int, dest: int, sent_s: float) -> bool:
        """Whether a message sent at `sent_s` meets this fault."""
        apart = (source in self.members) != (dest in self.members)
        return apart and self.at_s <= sent_s < self.at_s + self.for_s

    def touches(self, source: Ints, dest: Ints) -> Bools:
        """Return which of many links the fault cuts, at any time."""
        ours, theirs = np.isin(source, self.members), np.isin(dest, self.members)
        return np.not_equal(ours, theirs)

    def verdict(self, sent_s: float, chance: float) -> Verdict:
        """Return the verdict on a message that meets this fault."""
        wait_s = self.at_s + self.for_s - sent_s
        return LOST if math.isinf(wait_s) else Verdict(delay_s=wait_s)


@dataclass(frozen=True)
class Clog(Partition):
    """Messages to and from `members` wait from `at_s` for `for_s` seconds, and then all arrive at once."""

    kind: ClassVar[str] = "clog"

    def covers(self, source: int, dest: int, sent_s: float) -> bool:
        """Whether a message sent at `sent_s` meets this fault."""
        ours = source != dest and (source in self.members or dest in self.members)
        return ours and self.at_s <= sent_s < self.at_s + self.for_s

    def touches(self, source: Ints, dest: Ints) -> Bools:
        """Return which of many links the fault clogs, at any time."""
        found: Bools = np.isin(source, self.members) | np.isin(dest, self.members)
        return found


KINDS: dict[str, type[Fault]] = {
    fault.kind: fault
    for fault in (
        Crash,
        Restart,
        Pause,
        SlowDown,
        LinkDown,
        Drop,
        Duplicate,
        Corrupt,
        Delay,
        Partition,
        Clog,
        Reorder,
        Skew,
    )
}
"""All faults by their names in texts and JSON."""
MEANT = dict.fromkeys(("kill", "die", "death", "fail", "failure"), "crash")


def no_kind(word: str, known: Sequence[str]) -> str:
    """Return the error text for a word that names no kind of fault: a suggestion, and all kinds."""
    hint = f"did you mean {MEANT[word]}?" if word in MEANT else nearest(word, known)
    return f"no kind {word!r}; {hint}{' ' * bool(hint)}kinds: {', '.join(known)}"
