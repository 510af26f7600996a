"""A watch on a program from outside: when each rank computes, and how long it stays inside communication calls.

The watch wraps a communicator; the program does not notice. The same watch runs on real and on virtual ranks, so that
both are measured in the same way. Background tasks are not watched: their time is not the program's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spawnsim.fidelity.microbenchmarks import FloatArray

# A context variable, so that it is False again in other threads and greenlets.
_WATCHED: ContextVar[bool] = ContextVar("watched", default=False)
_UNTIMED = frozenset(
    {"clock", "rng", "record", "rank", "size", "Get_rank", "Get_size", "Get_group", "Get_name"}
)


@dataclass(frozen=True)
class Seen:
    """The observations of one rank: clock readings in seconds, one entry per compute block.

    `inside_s[i]` is the time inside communication calls after block i, before the next block or the end.
    `worked_s[i]` is the processor time in block i, and `own_s[i]` the processor time after it, outside of
    communication calls; None: not known.
    """

    began_s: FloatArray
    ended_s: FloatArray
    inside_s: FloatArray
    end_s: float
    worked_s: FloatArray | None = None
    own_s: FloatArray | None = None

    @property
    def blocks_s(self) -> FloatArray:
        return self.ended_s - self.began_s

    @property
    def gaps_s(self) -> FloatArray:
        return np.append(self.began_s[1:], self.end_s) - self.ended_s

    @property
    def local_s(self) -> FloatArray:
        """The program's own work outside of compute blocks and communication calls, in seconds."""
        # By processor time where it is known: a program may also sleep, or wait for its background tasks.
        return np.maximum(self.gaps_s - self.inside_s, 0.0) if self.own_s is None else self.own_s


@dataclass
class Watch:
    """The notes of one rank while it runs."""

    now: Callable[[], float]
    processor: Callable[[], float] | None = None
    began_s: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)
    inside_s: list[float] = field(default_factory=list)
    worked_s: list[float] = field(default_factory=list)
    own_s: list[float] = field(default_factory=list)
    _counted_s: float = 0.0  # processor time that is already counted, or left out

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Count the block as communication, unless an outer call is counted already or no compute block has ended."""
        # A library's call may make further calls: only the outermost counts, or time would count twice.
        if not self.inside_s or not _WATCHED.get():
            yield
            return
        token, began_s = _WATCHED.set(False), self.now()
        self._count(self.own_s)
        try:
            yield
        finally:
            self.inside_s[-1] += self.now() - began_s
            self._count([])
            _WATCHED.reset(token)

    def begin(self) -> None:
        """Record the start of a block."""
        self._count(self.own_s)
        self.began_s.append(self.now())
        self.worked_s.append(0.0)

    def end(self) -> None:
        """Record the end of a block."""
        self._count(self.worked_s)
        self.ended_s.append(self.now())
        self.inside_s.append(0.0)
        self.own_s.append(0.0)

    def _count(self, column: list[float]) -> None:
        """Add the processor time since the last count to the last entry of a column."""
        if self.processor is not None:
            now_s = self.processor()
            if column:
                column[-1] += now_s - self._counted_s
            self._counted_s = now_s

    def seen(self) -> Seen:
        """Return the observations at the end of the program."""
        end_s = self.now()
        self._count(self.own_s)
        clock = [np.array(column) for column in (self.began_s, self.ended_s, self.inside_s)]
        processor = [
            None if self.processor is None else np.array(column) for column in (self.worked_s, self.own_s)
        ]
        return Seen(clock[0], clock[1], clock[2], end_s, processor[0], processor[1])


class Computing:
    """`with comm.compute(): ...` under a watch."""

    def __init__(self, watch: Watch, compute: Any) -> None:
        self._watch, self._compute, self._block = watch, compute, compute

    def __call__(self, seconds: float | None = None) -> Computing:
        self._block = self._compute(seconds)
        return self

    def __enter__(self) -> Computing:
        self._watch.begin()
        self._block.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        # The clock is read after the block has ended: on virtual ranks, the end of the block advances the clock.
        self._block.__exit__(*error)
        self._watch.end()

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
        # Cached, so that the next look-up does not reach this method: the watch must not add to the times it
        # measures.
        self.__dict__[name] = found
        return found

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            with self._watch.inside():
                return self._dressed(call(*args, **named))

        return timed

    def _dressed(self, value: Any) -> Any:
        communicates = any(hasattr(type(value), name) for name in ("Wait", "Flush", "Get_rank"))
        return Timed(value, self._watch) if communicates and not isinstance(value, Timed) else value


def watched(
    main: Callable[[Any], object], comm: Any, *, processor: Callable[[], float] | None = None
) -> Seen:
    """Run a program on a rank and return the observations; `processor` reads the rank's processor time."""
    watch = Watch(comm.clock.now, processor)
    token = _WATCHED.set(True)
    try:
        main(Timed(comm, watch))
    finally:
        _WATCHED.reset(token)
    return watch.seen()
