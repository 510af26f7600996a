"""What one real rank counts: messages that it sends, their bytes, and all that it does.

A message is a send, an access to a window, or this rank's part in a collective of the library, which counts once,
with the bytes that the rank contributes (how many messages the library makes of it, it does not tell). Objects count
where they arrive, since only there their size is known; MPI's object collectives count without bytes. Knows buffers by
their size; knows neither MPI nor torch. A call costs 0.03 to 0.14 us.
"""

from __future__ import annotations

from itertools import repeat
from operator import mul
from typing import Any

from spawnsim.real.rank.own import Own

SENT_BY_ROOT = {"Bcast", "Scatter", "Scatterv"}


class Tally:
    """One per rank and run."""

    __slots__ = ("messages", "nbytes", "received")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin at zero."""
        self.messages = self.nbytes = self.received = 0

    def sent(self, operation: str, buf: Any) -> None:
        """Count a send, or an access to a window; of objects (`isend`) the receiver counts the bytes."""
        self.messages += 1
        if operation[0] == "I":
            self.nbytes += nbytes_of(buf)

    def access(self, buf: Any) -> None:
        """Count an access to a window, and the bytes that it moves."""
        self.messages += 1
        self.nbytes += nbytes_of(buf)

    def part(self, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any], rank: int) -> None:
        """Count this rank's part in a collective of the library, by the call's arguments."""
        self.messages += 1
        if not args or operation[0].islower() or (operation in SENT_BY_ROOT and _root(args, kwargs) != rank):
            return
        given = args[0]
        in_place = isinstance(given, int) and len(args) > 1  # IN_PLACE, ours or the library's
        self.nbytes += nbytes_of(args[1] if in_place else given)

    def native(self, operation: str, args: tuple[Any, ...], rank: int) -> None:
        """Count this rank's part in a collective of torch: its tensors come first in a list, or the given one last."""
        self.messages += 1
        if operation in ("Bcast", "Ibcast") and args[-1].rootRank != rank:
            return
        given = args[0][0] if type(args[0]) is list else args[-1]
        self.nbytes += getattr(given, "nbytes", 0)

    def counted(self, own: Own) -> dict[str, Any]:
        """Return the totals of this rank: everything that it did is an event, as on virtual ranks."""
        events = self.messages + self.received + own.compute.blocks + own.clock.sleeps
        return {
            "messages": self.messages,
            "bytes": self.nbytes,
            "events": events,
            "clock_s": own.clock.now(),
        }


def _root(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if "root" in kwargs:
        return kwargs["root"]
    return args[-1] if type(args[-1]) is int else 0


def nbytes_of(spec: Any) -> int:
    """Return how many bytes a buffer specification stands for; 0 where it does not say."""
    try:
        nbytes: int = spec.nbytes  # arrays, tensors, memory views
    except AttributeError:
        return _described(spec)
    return nbytes


def _described(spec: Any) -> int:
    """Return the bytes of `[memory, count, type]` and its kin, of `bytes`, or 0."""
    if not isinstance(spec, (list, tuple)):
        return len(spec) if isinstance(spec, (bytes, bytearray)) else 0
    if not spec:
        return 0
    counts, sizes = _counts(spec[1:]), _sizes(spec)
    if counts is None or not sizes:
        return nbytes_of(spec[0])
    return sum(map(mul, counts, sizes if len(sizes) > 1 else repeat(sizes[0])))


def _counts(parts: Any) -> list[int] | None:
    """Return the numbers of elements that a specification states: a number, a list of them, or (counts, places)."""
    for part in parts:
        if hasattr(part, "__index__"):
            return [int(part)]
        if isinstance(part, (list, tuple)) and part:
            if isinstance(part, tuple) and len(part) == 2:  # what, and where
                return _counts(part[:1])
            found = [int(each) for each in part if hasattr(each, "__index__")]
            return found if len(found) == len(part) else None
    return None


def _sizes(spec: Any) -> list[int]:
    """Return the bytes of one element, or of one for each rank: by the datatypes if stated, else by the memory."""
    types = spec[-1] if isinstance(spec[-1], (list, tuple)) else spec[-1:]
    if all(hasattr(each, "Get_size") for each in types):
        return [int(each.Get_size()) for each in types]
    itemsize = getattr(spec[0], "itemsize", None)
    return [] if itemsize is None else [itemsize]
