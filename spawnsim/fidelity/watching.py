"""Watching a program from outside: when each rank computes, and how long it stays inside communication calls.

A communicator is wrapped; the program notices nothing. The same watch sits on real and on virtual ranks, so that what
is compared was measured alike. Background tasks are not watched: their time is not the program's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spawnsim.fidelity.microbenchmarks import FloatArray

_WATCHED: ContextVar[bool] = ContextVar(
    "watched", default=False
)  # False again in threads and greenlets of their own
_UNTIMED = frozenset(
    {"clock", "rng", "record", "rank", "size", "Get_rank", "Get_size", "Get_group", "Get_name"}
)


@dataclass(frozen=True)
class Seen:
    """What was seen of one rank: clock readings in seconds, entry by entry of its compute blocks.

    `inside_s[i]` is the time inside communication calls after block i, before the next one or the end.
    """

    began_s: FloatArray
    ended_s: FloatArray
    inside_s: FloatArray
    end_s: float

    @property
    def blocks_s(self) -> FloatArray:
        """Durations of the blocks."""
        return self.ended_s - self.began_s

    @property
    def gaps_s(self) -> FloatArray:
        """From the end of each block to the next one, or to the end."""
        return np.append(self.began_s[1:], self.end_s) - self.ended_s

    @property
    def local_s(self) -> FloatArray:
        """What is neither computing nor communicating: the program's own work outside of compute blocks."""
        return np.maximum(self.gaps_s - self.inside_s, 0.0)


@dataclass
class Watch:
    """The notes of one rank while it runs."""

    now: Callable[[], float]
    began_s: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)
    inside_s: list[float] = field(default_factory=list)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Count the block as communication, unless an outer one is counted already or no compute block has been."""
        # A library's call may make others: only the outermost counts, or time would be counted twice.
        if not self.inside_s or not _WATCHED.get():
            yield
            return
        token, began_s = _WATCHED.set(False), self.now()
        try:
            yield
        finally:
            self.inside_s[-1] += self.now() - began_s
            _WATCHED.reset(token)

    def seen(self) -> Seen:
        """Return the notes at the end of the program."""
        columns = [np.array(column) for column in (self.began_s, self.ended_s, self.inside_s)]
        return Seen(columns[0], columns[1], columns[2], self.now())


class Computing:
    """`with comm.compute(): ...` under a watch."""

    def __init__(self, watch: Watch, compute: Any) -> None:
        self._watch, self._compute, self._block = watch, compute, compute

    def __call__(self, seconds: float | None = None) -> Computing:
        self._block = self._compute(seconds)
        return self

    def __enter__(self) -> Computing:
        self._watch.began_s.append(self._watch.now())
        self._block.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        # The clock is read after the block has ended: on virtual ranks it is the end of the block that moves the
        # clock.
        self._block.__exit__(*error)
        self._watch.ended_s.append(self._watch.now())
        self._watch.inside_s.append(0.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compute, name)


class Timed:
    """Any object whose calls may communicate: a communicator, a request, a window, the window class."""

    def __init__(self, inner: Any, watch: Watch) -> None:
        self._inner, self._watch = inner, watch

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name.startswith("_") or name in _UNTIMED:
            return found
        if name == "compute":
            found = Computing(self._watch, found)
        elif name == "Win":
            found = Timed(found, self._watch)
        elif callable(found):
            found = self._timed(found)
        # Kept, so that the next look-up does not come here: the watch must not cost what it measures.
        self.__dict__[name] = found
        return found

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            with self._watch.inside():
                return self._dressed(call(*args, **named))

        return timed

    def _dressed(self, value: Any) -> Any:
        """Watch what a call returns, if more calls can be made on it."""
        communicates = any(hasattr(type(value), name) for name in ("Wait", "Flush", "Get_rank"))
        return Timed(value, self._watch) if communicates and not isinstance(value, Timed) else value


def watched(main: Callable[[Any], object], comm: Any) -> Seen:
    """Run a program on a rank and return what was seen of it."""
    watch = Watch(comm.clock.now)
    token = _WATCHED.set(True)
    try:
        main(Timed(comm, watch))
    finally:
        _WATCHED.reset(token)
    return watch.seen()
