"""The operations that a calibration times, and how: on a communicator, real or virtual alike.

What is sent has just been written, as a model has after a training step: memory that was never written is one page of
zeros that all caches hold, and looked four times faster. Each sample starts at a barrier and takes what the slowest
rank took; a point is the lower quartile of its samples. A virtual platform measured by this module must give back
what it was made of: that is how the module is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spawnsim.comm import Comm
from spawnsim.errors import ParameterError

STREAM = 16  # messages of a stream
READY = 1  # tag of the message that starts a sample between two ranks

Action = Callable[[], float]
"""Does the operation once and returns how long it took on this rank, in seconds; 0 on a rank that does not count."""
Prepare = Callable[[Any, int], AbstractContextManager[Action]]
"""`prepare(comm, nbytes)` holds what the action of a rank needs, such as a window, for a `with` statement."""


def _timed(comm: Comm, call: Callable[[], Any], sent: Sequence[Any] = ()) -> Action:
    """Return an action that times a call; the arrays in `sent` are written before."""
    now = comm.clock.now

    def action() -> float:
        # Before the clock is read: writing is part of a training step, and not of the message.
        for array in sent:
            _write(array)
        began_s = now()
        call()
        return now() - began_s

    return action


def _write(array: Any) -> None:
    np.add(array, 1, out=array)


# ----------------------------------------------------------------------------------------- between two ranks


def _pair(comm: Comm, first: Action, second: Callable[[], Any]) -> Action:
    """Return an action of ranks 0 and 1: rank 0's time counts, and starts when rank 1 says that it is ready."""
    ready, rank, others = np.zeros(1, np.uint8), comm.Get_rank(), lambda: 0.0

    def zero() -> float:
        # Rank 1 has posted its part: otherwise its being late would count as the flight's time.
        comm.Recv(ready, 1, READY)
        return first()

    def one() -> float:
        second()
        return 0.0

    return {0: zero, 1: one}.get(rank, others)


def _say_ready(comm: Comm) -> None:
    comm.Send(np.zeros(1, np.uint8), 0, READY)


def _ping_pong(comm: Comm, nbytes: int) -> Action:
    out, into = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)

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
        # Posted before rank 0 may begin, so that no message of the stream is unexpected and copied twice.
        requests = [comm.Irecv(buffer, 0) for buffer in buffers]
        _say_ready(comm)
        for request in requests:
            request.Wait()
        comm.Send(buffers[0][:1], 0)

    return take


def _stream(comm: Comm, nbytes: int) -> Action:
    buffers = [np.ones(nbytes, np.uint8) for _ in range(STREAM)]

    def give() -> None:
        for request in [comm.Isend(buffer, 1) for buffer in buffers]:
            request.Wait()
        comm.Recv(buffers[0][:1], 1)

    return _pair(comm, _timed(comm, give, buffers), _take_stream(comm, buffers))


def _post(comm: Comm, nbytes: int) -> Action:
    """Only what the sends cost the sender before it may go on."""
    buffers = [np.ones(nbytes, np.uint8) for _ in range(STREAM)]
    requests: list[Any] = []

    def start() -> None:
        # Kept until they are waited for outside of the clock: only what the sends hold the sender counts.
        requests[:] = [comm.Isend(buffer, 1) for buffer in buffers]

    timed = _timed(comm, start, buffers)

    def give() -> float:
        seconds = timed()
        for request in requests:
            request.Wait()
        comm.Recv(buffers[0][:1], 1)
        return seconds

    return _pair(comm, give, _take_stream(comm, buffers))


@contextmanager
def _get(comm: Any, nbytes: int) -> Iterator[Action]:
    """Rank 0 reads rank 1's memory while rank 1 waits inside MPI."""
    window, into = comm.Win.Allocate(nbytes, comm=comm), np.ones(nbytes, np.uint8)
    memory = np.frombuffer(window.tomemory(), np.uint8)
    window.Lock_all()
    done = np.zeros(1, np.uint8)

    def get() -> None:
        window.Get(into, 1)
        window.Flush(1)

    timed = _timed(comm, get)

    def reader() -> float:
        seconds = timed()
        comm.Send(done, 1)
        return seconds

    def owner() -> None:
        _write(memory)
        _say_ready(comm)
        comm.Recv(done, 0)

    # One window for all samples: making one is a collective that takes longer than a read.
    yield _pair(comm, reader, owner)
    window.Unlock_all()
    window.Free()


# --------------------------------------------------------------------------------------------- of all ranks


def _probe(comm: Comm, nbytes: int) -> Action:
    return _timed(comm, lambda: [comm.Iprobe() for _ in range(STREAM)])


def _barrier(comm: Comm, nbytes: int) -> Action:
    return _timed(comm, comm.Barrier)


def _doubles(nbytes: int, ranks: int = 1) -> Any:
    """Return float64 numbers of at least so many bytes, a row for each rank."""
    return np.ones((ranks, max(nbytes // 8, 1)))


def _bcast(comm: Comm, nbytes: int) -> Action:
    buffer = _doubles(nbytes)
    return _timed(comm, lambda: comm.Bcast(buffer, 0), [buffer])


def _reduce(comm: Comm, nbytes: int) -> Action:
    own, total = _doubles(nbytes), _doubles(nbytes)
    return _timed(comm, lambda: comm.Reduce(own, total, root=0), [own])


def _allreduce(comm: Comm, nbytes: int) -> Action:
    own, total = _doubles(nbytes), _doubles(nbytes)
    return _timed(comm, lambda: comm.Allreduce(own, total), [own])


def _gather(comm: Comm, nbytes: int) -> Action:
    own, every = _doubles(nbytes), _doubles(nbytes, comm.Get_size())
    return _timed(comm, lambda: comm.Gather(own, every, 0), [own])


def _scatter(comm: Comm, nbytes: int) -> Action:
    own, every = _doubles(nbytes), _doubles(nbytes, comm.Get_size())
    return _timed(comm, lambda: comm.Scatter(every, own, 0), [every])


def _allgather(comm: Comm, nbytes: int) -> Action:
    own, every = _doubles(nbytes), _doubles(nbytes, comm.Get_size())
    return _timed(comm, lambda: comm.Allgather(own, every), [own])


def _alltoall(comm: Comm, nbytes: int) -> Action:
    own, every = _doubles(nbytes, comm.Get_size()), _doubles(nbytes, comm.Get_size())
    return _timed(comm, lambda: comm.Alltoall(own, every), [own])


def _plain(prepare: Callable[[Any, int], Action]) -> Prepare:
    return lambda comm, nbytes: nullcontext(prepare(comm, nbytes))


OPERATIONS: Mapping[str, tuple[Prepare, float]] = MappingProxyType(
    {
        "p2p": (_plain(_ping_pong), 0.5),
        "stream": (_plain(_stream), 1.0 / STREAM),
        "post": (_plain(_post), 1.0 / STREAM),
        "get": (_get, 1.0),
        "probe": (_plain(_probe), 1.0 / STREAM),
        "barrier": (_plain(_barrier), 1.0),
        "bcast": (_plain(_bcast), 1.0),
        "reduce": (_plain(_reduce), 1.0),
        "allreduce": (_plain(_allreduce), 1.0),
        "gather": (_plain(_gather), 1.0),
        "scatter": (_plain(_scatter), 1.0),
        "allgather": (_plain(_allgather), 1.0),
        "alltoall": (_plain(_alltoall), 1.0),
    }
)
"""Operation -> how to prepare it, and which share of the time is one operation's."""

COLLECTIVES = ("bcast", "reduce", "allreduce", "gather", "scatter", "allgather", "alltoall")


FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """One operation at one size: the lower quartile of its samples in seconds, their inter-quartile range and number.

    The lower quartile, since whatever else a machine does only ever adds to a sample.
    """

    operation: str
    nbytes: int
    seconds: float
    spread_s: float
    samples: int


@dataclass(frozen=True)
class Effort:
    """How much is measured: `budget_s` of samples per point and pass, but at least `least` and at most `most` of them.

    Each point is sampled in several `passes` over all points, so that no point is measured in one bad moment alone.
    """

    budget_s: float = 0.01
    least: int = 3
    most: int = 30
    passes: int = 5
    largest_nbytes: int = 16 << 20

    def __post_init__(self) -> None:
        if not (
            self.budget_s > 0.0
            and 1 <= self.least <= self.most
            and self.passes >= 1
            and self.largest_nbytes >= 1
        ):
            raise ParameterError(f"{self}: all must be above 0, and least at most most")

    def samples(self, one_s: float) -> int:
        """Return how many samples to take of an operation that takes `one_s`."""
        return int(np.clip(self.budget_s / max(one_s, 1e-9), self.least, self.most))

    def sizes(self, least: int = 1) -> list[int]:
        """Return the sizes to measure: powers of two. Every other one is held out of the fit; see `held_out`."""
        return [1 << k for k in range(self.largest_nbytes.bit_length()) if 1 << k >= least]


def held_out(nbytes: int) -> bool:
    """Whether points of this size are kept for judging the fit."""
    return nbytes.bit_length() % 2 == 0


def measure_points(comm: Comm, wanted: Sequence[tuple[str, int]], effort: Effort) -> tuple[Point, ...]:
    """Measure (operation, nbytes) pairs. Collective; all ranks get the same points."""
    taken: dict[tuple[str, int], list[FloatArray]] = {pair: [] for pair in wanted}
    for _ in range(effort.passes):
        for operation, nbytes in taken:
            taken[operation, nbytes].append(_sampled(comm, operation, nbytes, effort))
    return tuple(_point(*pair, np.concatenate(parts)) for pair, parts in taken.items())


def _point(operation: str, nbytes: int, samples_s: FloatArray) -> Point:
    quarter, three = np.quantile(samples_s, (0.25, 0.75))
    return Point(operation, nbytes, float(quarter), float(three - quarter), samples_s.size)


def _sampled(comm: Comm, operation: str, nbytes: int, effort: Effort) -> FloatArray:
    prepare, share = OPERATIONS[operation]
    with prepare(comm, nbytes) as action:
        # Two samples warm caches and connections, and say how many fit into the budget.
        warm_s = float(np.median(_samples(comm, action, 2)))
        # Rank 0's number for all: ranks that measured differently would go through different numbers of barriers.
        count = effort.samples(comm.bcast(warm_s))
        return _samples(comm, action, count) * share


def _samples(comm: Comm, action: Action, count: int) -> FloatArray:
    """Return how long the slowest rank took, for each of `count` samples."""
    own_s = np.empty(count)
    for sample in range(count):
        comm.Barrier()
        own_s[sample] = action()
    # Gathered after all samples: a collective between them would be part of the next one.
    slowest_s: FloatArray = np.max(comm.allgather(own_s), axis=0)
    return slowest_s
