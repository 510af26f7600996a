"""The five members that MPI has not, on a real rank: clock, compute, rng, background, record.

One `Own` per rank, shared by all its communicators. Knows the wall clock, threads and a recorder's two methods;
knows no communicator: what to do when a compute block ends (poll) and when a background task raises (end the
job) is handed in.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from spawnsim.errors import ParameterError
from spawnsim.random import Streams

SLEEP_SLICE_S = 5e-3  # a sleeping rank polls this often


class Recorder(Protocol):
    """Who keeps what ranks record; spawnsim.record has them."""

    def row(self, rank: int, time_s: float, values: dict[str, Any]) -> None:
        """Keep one row of named values."""

    def event(self, rank: int, time_s: float, kind: str, fields: dict[str, Any]) -> None:
        """Keep one event."""


class Inside(threading.local):
    """The deadline of each thread's blocks; a default on the class is quicker than a missing one."""

    limit_s: float | None = None


class Clock:
    """This rank's wall clock: seconds since the ranks met at the start of the run."""

    def __init__(self, deadline_s: float) -> None:
        if not deadline_s > 0:
            raise ParameterError(f"deadline_s={deadline_s}: give seconds above 0")
        self._default_s = deadline_s
        self._inside = Inside()
        self.poll: Callable[[], object] = int
        self.sleeps = 0
        self.start()

    def start(self) -> None:
        """Begin at zero now."""
        self._zero = time.perf_counter()

    def now(self) -> float:
        """Return the seconds since the start of the run."""
        return time.perf_counter() - self._zero

    def sleep(self, seconds: float) -> None:
        """Let `seconds` of wall time pass; the rank polls meanwhile."""
        self.sleeps += 1
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            time.sleep(min(left, SLEEP_SLICE_S))
            self.poll()

    @contextmanager
    def deadline(self, seconds: float) -> Iterator[None]:
        """Bound each blocking call inside the block (in this thread) to `seconds`; the tightest block wins."""
        if not seconds >= 0:
            raise ParameterError(f"deadline({seconds}): give seconds of at least 0")
        outer = self._inside.limit_s
        self._inside.limit_s = seconds if outer is None else min(seconds, outer)
        try:
            yield
        finally:
            self._inside.limit_s = outer

    def limit_s(self) -> float:
        """Return how many seconds a blocking call of this thread may take now."""
        limit = self._inside.limit_s
        return self._default_s if limit is None else limit


class Computing:
    """`with comm.compute():` on a real rank: measures the block, and polls when it ends. Reusable, not nested."""

    def __init__(self, poll: Callable[[], object]) -> None:
        self.poll = poll
        self.began_s: float | None = None  # perf_counter of the block that is open, for the watchdog's table
        self.seconds = 0.0  # what the last block took
        self.total_s = 0.0
        self.blocks = 0

    def __call__(self, seconds: float | None = None) -> Computing:
        """Return the block. A stated time is the virtual building's business: here the block is measured."""
        if seconds is not None and not seconds >= 0:
            raise ParameterError(f"compute({seconds}): give seconds of at least 0")
        return self

    def __enter__(self) -> Computing:
        self.began_s = time.perf_counter()
        return self

    def __exit__(self, *_exc: object) -> None:
        if self.began_s is not None:
            self.seconds = time.perf_counter() - self.began_s
            self.total_s += self.seconds
            self.began_s = None
            self.blocks += 1
        self.poll()


class Record:
    """`comm.record(loss=...)` adds a row, `comm.record.event(kind, ...)` an event; without a recorder both are free."""

    def __init__(self, recorder: Recorder | None, rank: int, clock: Clock) -> None:
        self._recorder, self._rank, self._clock = recorder, rank, clock

    def __call__(self, **values: Any) -> None:
        if self._recorder is not None:
            self._recorder.row(self._rank, self._clock.now(), values)

    def event(self, kind: str, **fields: Any) -> None:
        """Add one line of events.jsonl; rank and time are added."""
        if self._recorder is not None:
            self._recorder.event(self._rank, self._clock.now(), kind, fields)


class Task:
    """What `comm.background(fn)` returns: a daemon thread of this rank."""

    def __init__(self, fn: Callable[[], object], on_error: Callable[[BaseException], None]) -> None:
        self._fn, self._on_error = fn, on_error
        self._thread = threading.Thread(target=self._run, name="spawnsim-background", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._fn()
        except BaseException as error:  # noqa: BLE001  a thread's error has no caller: it ends the job
            self._on_error(error)

    @property
    def alive(self) -> bool:
        """Whether the task is still running."""
        return self._thread.is_alive()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the task's end, at most `timeout` seconds; return whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()


class Own:
    """The five of one rank, made once per run."""

    def __init__(self, rank: int, *, recorder: Recorder | None, seed: int, deadline_s: float) -> None:
        self.rank = rank
        self.clock = Clock(deadline_s)
        self.rng = Streams(seed, rank)
        self.record = Record(recorder, rank, self.clock)
        self.compute = Computing(self._polled)
        self.tasks: list[Task] = []
        self.on_error: Callable[[BaseException], None] = _raise

    def _polled(self) -> None:
        self.clock.poll()

    def background(self, fn: Callable[[], object]) -> Task:
        """Run `fn()` beside this rank's program; an exception in it ends the job, as one of the rank's own does."""
        task = Task(fn, self.on_error)
        self.tasks = [*(other for other in self.tasks if other.alive), task]
        return task


def _raise(error: BaseException) -> None:
    raise error
