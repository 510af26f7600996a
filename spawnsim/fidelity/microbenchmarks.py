"""The operations that a calibration times, and the timing method, on real and virtual communicators alike.

The sender writes its data just before sending, as a model is written in a training step: memory that was never
written is one page of zeros in all caches, and looked four times faster. Each sample starts at a barrier and lasts
from the last rank's start to the last rank's end, on clocks that were compared before: ranks leave a barrier some
microseconds apart, and this difference is not part of the operation (S. Hunold, A. Carpen-Amarie, IEEE TPDS 27 (2016)
3617-3630). Data is written before the barrier: lines that another rank has read take longer to write. A point is the
lower quartile of its samples. Tests measure a virtual platform with this module, and must recover the platform's
parameters.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spawnsim.comm import Comm
from spawnsim.errors import ParameterError

STREAM = 16  # messages of a stream
# Added to lengths of a page and more. Two blocks of whole pages, one behind the other on a heap, begin 16 bytes
# apart within their pages, and copies between such places take 2.5 times as long on some processors (AMD's Zen 3).
ASIDE_NBYTES = 1000
PAGE_NBYTES = 4096
HUGE_NBYTES = 1 << 22  # numpy asks for huge pages from this size, torch does not
ANSWERS = 20  # clock readings of the peer from which the difference of two clocks is estimated
READY = 1  # tag of the message that starts a sample between two ranks

Span = tuple[float, float]
Action = Callable[[], Span]
"""Executes the operation once and returns its start and end on this rank; `NOT_TIMED` on ranks that do not count."""
NOT_TIMED: Span = (-math.inf, -math.inf)
Prepare = Callable[[Any, int], AbstractContextManager[Action]]
"""`prepare(comm, nbytes)` holds the resources of a rank's action, such as a window, for a `with` statement."""


def _timed(comm: Comm, call: Callable[[], Any], sent: Sequence[Any] = ()) -> Action:
    """Return an action that times a call; the arrays in `sent` are written first."""
    now = comm.clock.now

    def action() -> Span:
        # Before the clock is read: writing is part of a training step, not of the message.
        for array in sent:
            _write(array)
        began_s = now()
        call()
        return began_s, now()

    return action


def _write(array: Any) -> None:
    np.add(array, 1, out=array)


# ----------------------------------------------------------------------------------------- between two ranks


def _pair(comm: Comm, first: Action, second: Callable[[], Any]) -> Action:
    """Return an action of ranks 0 and 1: rank 0's time counts, and starts when rank 1 reports that it is ready."""
    ready, rank, others = np.zeros(1, np.uint8), comm.Get_rank(), lambda: NOT_TIMED

    def zero() -> Span:
        # Rank 1 has posted its part: otherwise its delay would count as flight time.
        comm.Recv(ready, 1, READY)
        return first()

    def one() -> Span:
        second()
        return NOT_TIMED

    return {0: zero, 1: one}.get(rank, others)


def _say_ready(comm: Comm) -> None:
    comm.Send(np.zeros(1, np.uint8), 0, READY)


_places = count(0, 1088)  # offsets of buffers in their pages: different for all buffers of an operation


def _memory(nbytes: int) -> Any:
    """Return separate uint8 memory for the operation, in pages as programs have them, already written.

    A heap returns used memory, in small or huge pages depending on its history: the same message took 1.5 times as
    long early in a process as later.
    """
    pages = mmap.mmap(-1, nbytes + PAGE_NBYTES)
    if nbytes >= HUGE_NBYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    place = next(_places) % PAGE_NBYTES
    memory = np.frombuffer(pages, np.uint8)[place : place + nbytes]
    memory.fill(1)
    return memory


def _ping_pong(comm: Comm, nbytes: int) -> Action:
    out, into = _memory(nbytes), _memory(nbytes)

    def ping() -> None:
        comm.Send(out, 1)
        comm.Recv(into, 1)

    def pong() -> None:
        _write(out)
        _say_ready(comm)
        comm.Recv(into, 0)
        comm.Send(out, 0)

    return _pair(comm, _timed(comm, ping, [out]), pong)


def _take_stream(comm: Comm, buffers: list[Any]) -> Callable[[], None]:
    def take() -> None:
        # Posted before rank 0 may start, so that no message of the stream is unexpected and copied twice.
        requests = [comm.Irecv(buffer, 0) for buffer in buffers]
        _say_ready(comm)
        for request in requests:
            request.Wait()
        comm.Send(buffers[0][:1], 0)

    return take


def _stream(comm: Comm, nbytes: int) -> Action:
    buffers = [_memory(nbytes) for _ in range(STREAM)]

    def give() -> None:
        for request in [comm.Isend(buffer, 1) for buffer in buffers]:
            request.Wait()
        comm.Recv(buffers[0][:1], 1)

    return _pair(comm, _timed(comm, give, buffers), _take_stream(comm, buffers))


def _post(comm: Comm, nbytes: int) -> Action:
    """Return an action that times only the sends: how long they occupy the sender."""
    buffers = [_memory(nbytes) for _ in range(STREAM)]
    requests: list[Any] = []

    def start() -> None:
        # Kept for a wait outside of the timed span: only the time that the sends occupy the sender counts.
        requests[:] = [comm.Isend(buffer, 1) for buffer in buffers]

    timed = _timed(comm, start, buffers)

    def give() -> Span:
        span = timed()
        for request in requests:
            request.Wait()
        comm.Recv(buffers[0][:1], 1)
        return span

    return _pair(comm, give, _take_stream(comm, buffers))


@contextmanager
def _get(comm: Any, nbytes: int) -> Iterator[Action]:
    """Rank 0 reads rank 1's memory while rank 1 waits inside MPI."""
    window, into = comm.Win.Allocate(nbytes, comm=comm), _memory(nbytes)
    memory = np.frombuffer(window.tomemory(), np.uint8)
    window.Lock_all()
    done = np.zeros(1, np.uint8)

    def get() -> None:
        window.Get(into, 1)
        window.Flush(1)

    timed = _timed(comm, get)

    def reader() -> Span:
        span = timed()
        comm.Send(done, 1)
        return span

    def owner() -> None:
        _write(memory)
        _say_ready(comm)
        comm.Recv(done, 0)

    # One window for all samples: creating a window is a collective that takes longer than a read.
    yield _pair(comm, reader, owner)
    window.Unlock_all()
    window.Free()


# --------------------------------------------------------------------------------------------- of all ranks


def _together(comm: Comm, call: Callable[[], Any], sent: Sequence[Any] = ()) -> Action:
    """Return an action of all ranks that times a call which all start together, after the arrays were written."""
    timed = _timed(comm, call)

    def action() -> Span:
        for array in sent:
            _write(array)
        comm.Barrier()
        return timed()

    return action


def _probe(comm: Comm, nbytes: int) -> Action:
    return _timed(comm, lambda: [comm.Iprobe() for _ in range(STREAM)])


def _barrier(comm: Comm, nbytes: int) -> Action:
    return _together(comm, comm.Barrier)


def _doubles(nbytes: int, ranks: int = 1) -> Any:
    """Return float64 numbers of at least `nbytes` bytes, a row for each rank."""
    length = max(nbytes // 8, 1)
    return _memory(8 * length * ranks).view(np.float64).reshape(ranks, length)


def _copy(comm: Comm, nbytes: int) -> Action:
    own, into = _doubles(nbytes), _doubles(nbytes)
    return _together(comm, lambda: np.copyto(into, own), [own])


def _bcast(comm: Comm, nbytes: int) -> Action:
    buffer = _doubles(nbytes)
    return _together(comm, lambda: comm.Bcast(buffer, 0), [buffer])


# Whether a collective has a root, whether a rank sends a row for each rank, and whether it receives one.
_SHAPES = {
    "reduce": (True, False, False),
    "allreduce": (False, False, False),
    "gather": (True, False, True),
    "scatter": (True, True, False),
    "allgather": (False, False, True),
    "alltoall": (False, True, True),
}


def _collective(name: str) -> Callable[[Any, int], Action]:
    rooted, *many = _SHAPES[name]

    def prepare(comm: Comm, nbytes: int) -> Action:
        own, into = (_doubles(nbytes, comm.Get_size() if rows else 1) for rows in many)
        call = partial(getattr(comm, name.capitalize()), own, into, **({"root": 0} if rooted else {}))
        return _together(comm, call, [own])

    return prepare


_ACTIONS: dict[str, tuple[Callable[[Any, int], Action], float]] = {
    "p2p": (_ping_pong, 0.5),
    "stream": (_stream, 1.0 / STREAM),
    "post": (_post, 1.0 / STREAM),
    "probe": (_probe, 1.0 / STREAM),
    "barrier": (_barrier, 1.0),
    "copy": (_copy, 1.0),
    "bcast": (_bcast, 1.0),
    **{name: (_collective(name), 1.0) for name in _SHAPES},
}


def _plain(prepare: Callable[[Any, int], Action]) -> Prepare:
    return lambda comm, nbytes: nullcontext(prepare(comm, nbytes))


OPERATIONS: Mapping[str, tuple[Prepare, float]] = MappingProxyType(
    {name: (_plain(prepare), share) for name, (prepare, share) in _ACTIONS.items()} | {"get": (_get, 1.0)}
)
"""Operation -> how to prepare it, and the share of the measured time that is one operation's."""

COLLECTIVES = ("bcast", *_SHAPES)


FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """One operation at one size: the lower quartile of its samples in seconds, their inter-quartile range and number.

    The lower quartile, since disturbances of the machine only ever add to a sample.
    """

    operation: str
    nbytes: int
    seconds: float
    spread_s: float
    samples: int


@dataclass(frozen=True)
class Effort:
    """How much to measure: samples for `budget_s` per point and pass, but at least `least` and at most `most`.

    Each point is sampled in several `passes` over all points, so that no point is measured only in one bad moment.
    """

    budget_s: float = 0.01
    least: int = 3
    most: int = 30
    passes: int = 5
    largest_nbytes: int = 16 << 20

    def __post_init__(self) -> None:
        if (
            self.budget_s <= 0.0
            or not 1 <= self.least <= self.most
            or min(self.passes, self.largest_nbytes) < 1
        ):
            raise ParameterError(f"{self}: all must be above 0, and least at most most")

    def samples(self, one_s: float) -> int:
        """Return the number of samples of an operation that takes `one_s`."""
        return int(np.clip(self.budget_s / max(one_s, 1e-9), self.least, self.most))

    def sizes(self, least: int = 1) -> list[int]:
        """Return the sizes to measure: each about twice the last, and some between. Most are `held_out` of the fit."""
        powers = [1 << k for k in range(self.largest_nbytes.bit_length()) if 1 << k >= least]
        between = [nbytes for nbytes in BETWEEN_NBYTES if least <= nbytes <= self.largest_nbytes]
        return sorted([_aside(power) for power in powers] + between)


BETWEEN_NBYTES = (10_000, 20_000, 50_000, 100_000, 200_000)


def _aside(power: int) -> int:
    return power + ASIDE_NBYTES * (power >= PAGE_NBYTES)


def held_out(nbytes: int) -> bool:
    """Return whether points of this size are kept to judge the fit: all but every other power of two."""
    # Measured in the same passes as the other points: a machine's state may change from one second to the next.
    power = 1 << max(nbytes.bit_length() - 1, 0)
    return nbytes.bit_length() % 2 == 0 or nbytes != _aside(power)


def measure_points(comm: Comm, wanted: Sequence[tuple[str, int]], effort: Effort) -> tuple[Point, ...]:
    """Measure (operation, nbytes) pairs. Collective; all ranks get the same points."""
    taken: dict[tuple[str, int], list[FloatArray]] = {pair: [] for pair in wanted}
    for _ in range(effort.passes):
        ahead_s = _ahead_s(comm)  # again in each pass, since clocks drift apart
        for operation, nbytes in taken:
            taken[operation, nbytes].append(_sampled(comm, operation, nbytes, effort=effort, ahead_s=ahead_s))
    return tuple(_point(*pair, np.concatenate(parts)) for pair, parts in taken.items())


def _point(operation: str, nbytes: int, samples_s: FloatArray) -> Point:
    quarter, three = np.quantile(samples_s, (0.25, 0.75))
    return Point(operation, nbytes, float(quarter), float(three - quarter), samples_s.size)


def _ahead_s(comm: Comm) -> float:
    """Return how far this rank's clock is ahead of rank 0's: read half way between a question and its answer."""
    rank, mine = comm.Get_rank(), 0.0
    for other in range(1, comm.Get_size()):
        found: list[tuple[float, float]] = []
        read = np.zeros(1)
        for _ in range(ANSWERS):
            if rank == 0:
                asked_s = comm.clock.now()
                comm.Send(read, other)
                comm.Recv(read, other)
                answered_s = comm.clock.now()
                found.append((answered_s - asked_s, float(read[0]) - 0.5 * (asked_s + answered_s)))
            elif rank == other:
                comm.Recv(read, 0)
                comm.Send(np.array([comm.clock.now()]), 0)
        # The fastest answer leaves the least uncertainty between the two readings.
        ahead_s = comm.bcast(min(found)[1] if rank == 0 else 0.0)
        mine = ahead_s if rank == other else mine
    return mine


def _sampled(comm: Comm, operation: str, nbytes: int, *, effort: Effort, ahead_s: float) -> FloatArray:
    prepare, share = OPERATIONS[operation]
    with prepare(comm, nbytes) as action:
        # Two samples warm up caches and connections, and show how many samples fit into the budget.
        warm_s = float(np.median(_samples(comm, action, 2, ahead_s)))
        # Rank 0's number for all: ranks with different numbers of samples would enter different numbers of barriers.
        count = effort.samples(comm.bcast(warm_s))
        return _samples(comm, action, count, ahead_s) * share


def _samples(comm: Comm, action: Action, count: int, ahead_s: float) -> FloatArray:
    """Return the time from the last rank's start to the last rank's end, for each of `count` samples."""
    spans_s = np.empty((count, 2))
    for sample in range(count):
        comm.Barrier()
        spans_s[sample] = action()
    # Gathered after all samples: a collective between them would be part of the next sample.
    last_s = np.max(comm.allgather(spans_s - ahead_s), axis=0)
    seconds: FloatArray = last_s[:, 1] - last_s[:, 0]
    return seconds
