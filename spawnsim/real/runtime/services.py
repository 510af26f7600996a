"""The non-MPI services of a real rank: clock, compute blocks, random streams, background tasks, records, and counters.

Each rank has one `RankServices`, shared by all its communicators. `Options` holds the options of a run, and `Counters`
the activity of the rank. A message is a send, an access to a window, or this rank's part in a collective. The latter
counts once, with the bytes that the rank contributes, independent of the messages that implement it. Objects are
counted where they arrive, since only there their size is known; MPI's object collectives are counted without bytes.
Counting costs 0.03 to 0.5 us per call.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import repeat
from operator import mul
from types import SimpleNamespace
from typing import Any, Protocol

from spawnsim.comm.constants import IN_PLACE
from spawnsim.errors import ParameterError
from spawnsim.random import Streams
from spawnsim.real.runtime.registry import CHECK_CALLS, SURVIVE
from spawnsim.units import check_duration


@dataclass(frozen=True)
class Options:
    """The options of a run; the same on all ranks.

    Args:
        reduction: "native" leaves the order of sums to the library, "ordered" sums in rank order everywhere.
        check_calls: each blocking collective first compares its call on all ranks; not with `survive`.
        node_memory: large sums among ranks of one node use shared memory, which is faster and gives the same bits.
        survive: collectives are non-blocking calls with a deadline, so that a program can catch `Timeout` and call
            `recover()`.

    Raises:
        ParameterError: `reduction` has another value.
    """

    reduction: str = "native"
    check_calls: bool = False
    node_memory: bool = True
    survive: bool = False

    @classmethod
    def given(cls) -> Options:
        return cls(survive=SURVIVE in os.environ, check_calls=CHECK_CALLS in os.environ)

    def __post_init__(self) -> None:
        if self.reduction not in ("native", "ordered"):
            raise ParameterError(f"reduction={self.reduction!r}: give 'native' or 'ordered'")


SLEEP_SLICE_S = 5e-3  # a sleeping rank polls this often


class Recorder(Protocol):
    """Stores the recorded values of ranks; `spawnsim.record` has implementations."""

    def row(self, rank: int, time_s: float, values: dict[str, Any]) -> None:
        """Store one row of named values."""

    def event(self, rank: int, time_s: float, kind: str, fields: dict[str, Any]) -> None:
        """Store one event."""


class ThreadDeadline(threading.local):
    """The deadline of each thread's blocks; a class default is faster than handling a missing attribute."""

    limit_s: float | None = None


class Clock:
    """This rank's wall clock: seconds since the ranks met at the start of the run."""

    def __init__(self, deadline_s: float) -> None:
        if not deadline_s > 0:
            raise ParameterError(f"deadline_s={deadline_s}: give seconds above 0")
        self._default_s = deadline_s
        self._inside = ThreadDeadline()
        self.poll: Callable[[], object] = int
        self.sleeps = 0
        self.start()

    def start(self) -> None:
        self._zero = time.perf_counter()

    def set_forward(self, seconds: float) -> None:
        """Continue from a time if it is later than now: a resumed run has begun earlier."""
        self._zero -= max(seconds - self.now(), 0.0)

    def now(self) -> float:
        return time.perf_counter() - self._zero

    def sleep(self, seconds: float) -> None:
        """Let `seconds` of wall time pass and poll meanwhile."""
        check_duration("sleep", seconds)
        self.sleeps += 1
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            time.sleep(min(left, SLEEP_SLICE_S))
            self.poll()

    @contextmanager
    def deadline(self, seconds: float) -> Iterator[None]:
        """Limit each blocking call inside the block (in this thread) to `seconds`; the shortest limit applies."""
        check_duration("deadline", seconds)
        outer = self._inside.limit_s
        self._inside.limit_s = seconds if outer is None else min(seconds, outer)
        try:
            yield
        finally:
            self._inside.limit_s = outer

    def limit_s(self) -> float:
        limit = self._inside.limit_s
        return self._default_s if limit is None else limit

    def met(self, limit_s: float) -> str:
        return f"missed its deadline of {limit_s:g} s at {self.now():.3f} s"


class ComputeBlock:
    """`with comm.compute():` on a real rank: measures the block and polls at its end. Reusable, not nestable."""

    def __init__(self, poll: Callable[[], object]) -> None:
        self.poll = poll
        self.began_s: float | None = None  # perf_counter at the block's start, for the watchdog's table
        self.seconds = 0.0  # duration of the last block
        self.total_s = 0.0
        self.blocks = 0

    def __call__(self, seconds: float | None = None) -> ComputeBlock:
        """Return the block. `seconds` is for virtual ranks; here the block is measured."""
        if seconds is not None:
            check_duration("compute", seconds)
        return self

    def __enter__(self) -> ComputeBlock:
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
    """`comm.record(loss=...)` adds a row, `comm.record.event(kind, ...)` an event; no-ops without a recorder."""

    def __init__(self, recorder: Recorder | None, rank: int, clock: Clock) -> None:
        self._recorder, self._rank, self._clock = recorder, rank, clock

    def __call__(self, **values: Any) -> None:
        if self._recorder is not None:
            self._recorder.row(self._rank, self._clock.now(), values)

    def event(self, kind: str, **fields: Any) -> None:
        if self._recorder is not None:
            self._recorder.event(self._rank, self._clock.now(), kind, fields)

    @contextmanager
    def operation(self, name: str, method: str, *arguments: Any) -> Iterator[SimpleNamespace]:
        """Record a block as an event of kind "operation"; a process that dies in the block records nothing."""
        call, begin_s, end_s = SimpleNamespace(result=None), self._clock.now(), None
        given = deepcopy(arguments)
        try:
            yield call
            end_s = self._clock.now()
        finally:
            self.event(
                "operation", object=name, method=method, arguments=given, begin_s=begin_s, end_s=end_s,
                result=None if end_s is None else call.result,
            )  # fmt: skip


class Task:
    """The result of `comm.background(fn)`: a daemon thread of this rank."""

    def __init__(self, fn: Callable[[], object], on_error: Callable[[BaseException], None]) -> None:
        self._fn, self._on_error = fn, on_error
        self._thread = threading.Thread(target=self._run, name="spawnsim-background", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._fn()
        except BaseException as error:  # noqa: BLE001  a thread's error has no caller, so it ends the job
            self._on_error(error)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the task's end, at most `timeout` seconds; return whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()


class RankServices:
    """Clock, random streams, record, compute blocks and background tasks of one rank, created once per run.

    `on_error` is called with an exception of a background task.
    """

    def __init__(self, rank: int, *, recorder: Recorder | None, seed: int, deadline_s: float) -> None:
        self.rank = rank
        self.clock = Clock(deadline_s)
        self.rng = Streams(seed, rank)
        self.record = Record(recorder, rank, self.clock)
        self.compute = ComputeBlock(self._polled)
        self.tasks: list[Task] = []
        self.on_error: Callable[[BaseException], None] = _raise

    def _polled(self) -> None:
        self.clock.poll()

    def background(self, fn: Callable[[], object]) -> Task:
        """Run `fn()` in parallel with this rank's program; an exception in it ends the job, as in the program."""
        task = Task(fn, self.on_error)
        self.tasks = [*(other for other in self.tasks if other.alive), task]
        return task


def _raise(error: BaseException) -> None:
    raise error


SENT_BY_ROOT = {"Bcast", "Scatter", "Scatterv"}
OWN_BLOCK_IN_PLACE = {"Gather", "Gatherv", "Allgather", "Allgatherv"}
IN_PLACE_TYPE = type(IN_PLACE).__name__  # mpi4py's type has the same name


class Counters:
    """One per rank and run."""

    __slots__ = ("messages", "nbytes", "received")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.messages = self.nbytes = self.received = 0

    def sent(self, operation: str, buf: Any) -> None:
        """Count a send, or an access to a window; for objects (`isend`), the receiver counts the bytes."""
        self.messages += 1
        if operation[0] == "I":
            self.nbytes += nbytes_of(buf)

    def access(self, buf: Any) -> None:
        self.messages += 1
        self.nbytes += nbytes_of(buf)

    def part(self, nbytes: int) -> None:
        """Count this rank's part in a collective, and its contributed bytes."""
        self.messages += 1
        self.nbytes += nbytes

    def native(self, operation: str, args: tuple[Any, ...], rank: int) -> None:
        """Count this rank's part in a torch collective: its tensor is in a list that comes first, or comes last."""
        self.messages += 1
        if operation in ("Bcast", "Ibcast") and args[-1].rootRank != rank:
            return
        given = args[0][0] if type(args[0]) is list else args[-1]
        self.nbytes += getattr(given, "nbytes", 0)

    def totals(self, services: RankServices) -> dict[str, Any]:
        """Return the totals of this rank; every action is an event, as on virtual ranks."""
        events = self.messages + self.received + services.compute.blocks + services.clock.sleeps
        return {
            "messages": self.messages,
            "bytes": self.nbytes,
            "events": events,
            "clock_s": services.clock.now(),
        }


def contribution(
    operation: str, args: tuple[Any, ...], kwargs: dict[str, Any], place: tuple[int, int]
) -> int:
    """Return the bytes that a rank contributes to a collective, by the call's arguments; 0 for objects.

    Args:
        operation: the blocking call's name.
        args: the positional arguments of the call.
        kwargs: the keyword arguments of the call.
        place: the rank, and the number of ranks.
    """
    if operation[0].islower() or not (args or kwargs):
        return 0
    if operation in SENT_BY_ROOT and _root(args, kwargs) != place[0]:
        return 0
    given = args[0] if args else kwargs.get("sendbuf", kwargs.get("buf"))
    if type(given).__name__ != IN_PLACE_TYPE:
        return nbytes_of(given)
    given = args[1] if len(args) > 1 else kwargs.get("recvbuf")
    return _own_block(given, *place) if operation in OWN_BLOCK_IN_PLACE else nbytes_of(given)


def _own_block(spec: Any, rank: int, size: int) -> int:
    """Return the bytes of a rank's block in a receive buffer: by the counts of all ranks if given, else its share."""
    if isinstance(spec, (list, tuple)) and spec:
        counts, sizes = _counts(spec[1:]), _sizes(spec)
        if counts and len(counts) == size and sizes and size > 1:
            return counts[rank] * sizes[0]
    return nbytes_of(spec) // size


def _root(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if "root" in kwargs:
        return kwargs["root"]
    return args[-1] if args and type(args[-1]) is int else 0


def nbytes_of(spec: Any) -> int:
    """Return the number of bytes of a buffer specification; 0 if unknown."""
    try:
        nbytes: int = spec.nbytes  # arrays, tensors, memory views
    except AttributeError:
        return _described(spec)
    return nbytes


def _described(spec: Any) -> int:
    """Return the bytes of `[memory, count, type]` and its variants, or of `bytes`; otherwise 0."""
    if not isinstance(spec, (list, tuple)):
        return len(spec) if isinstance(spec, (bytes, bytearray)) else 0
    if not spec:
        return 0
    counts, sizes = _counts(spec[1:]), _sizes(spec)
    if counts is None or not sizes:
        return nbytes_of(spec[0])
    return sum(map(mul, counts, sizes if len(sizes) > 1 else repeat(sizes[0])))


def _counts(parts: Any) -> list[int] | None:
    """Return the numbers of elements in a specification: a number, a list of numbers, or (counts, displacements)."""
    for part in parts:
        if hasattr(part, "__index__"):
            return [int(part)]
        if isinstance(part, (list, tuple)) and part:
            if isinstance(part, tuple) and len(part) == 2:  # counts, displacements
                return _counts(part[:1])
            found = [int(each) for each in part if hasattr(each, "__index__")]
            return found if len(found) == len(part) else None
    return None


def _sizes(spec: Any) -> list[int]:
    """Return the bytes of one element, or of one per rank: by the datatypes if given, else by the memory."""
    types = spec[-1] if isinstance(spec[-1], (list, tuple)) else spec[-1:]
    if all(hasattr(each, "Get_size") for each in types):
        return [int(each.Get_size()) for each in types]
    itemsize = getattr(spec[0], "itemsize", None)
    return [] if itemsize is None else [itemsize]
