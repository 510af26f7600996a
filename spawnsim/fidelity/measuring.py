"""The measurements of a calibration: pairs of ranks, all ranks, one-sided reads, compute steps, and the machine."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, TypeVar

import numpy as np

from spawnsim.comm import UNDEFINED, Comm
from spawnsim.errors import ParameterError
from spawnsim.fidelity.microbenchmarks import (
    COLLECTIVES,
    PAGE_NBYTES,
    Effort,
    FloatArray,
    Point,
    measure_points,
)

STEPS = 200  # compute steps of each rank
SIDE = 160  # of the matrices of a compute step: about a millisecond of one core
READY = 7
EAGER_NBYTES = 64  # precision of the eager limit, or 1/64 of it if that is more
BUSY_S = 0.02  # length of the compute block during which a window is read
T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """All measurements. The same on all ranks.

    Attributes:
        ranks: number of ranks that were measured.
        points: points of all ranks; "p2p", "stream", "post" and "get" are between two ranks of one node.
        apart: points of these four operations between two nodes; empty on one node.
        eager_nbytes: the longest message whose send can return before the receive is posted.
        answers_busy: whether a rank's window can be read while the rank computes, without its help.
        steps_s: durations of compute steps, one row per rank.
        ranks_per_node: number of measured ranks on a node.
        facts: the machine and software, as (name, value) pairs.
        sharing: number of ranks of the job on a node; more than were measured if the node has fewer cores.
    """

    ranks: int
    points: tuple[Point, ...]
    apart: tuple[Point, ...]
    eager_nbytes: int
    answers_busy: bool
    steps_s: tuple[FloatArray, ...]
    ranks_per_node: int
    facts: tuple[tuple[str, str], ...]
    sharing: int


def measure(
    comm: Comm, effort: Effort | None = None, *, host: str | None = None, cores: int | None = None
) -> Measured:
    """Measure a communicator of at least two ranks, real or virtual. Collective; all ranks get the same result.

    On a node with more ranks than cores, only as many ranks as cores are measured, but at least two; the others
    sleep. Otherwise a message would take as long as its receiver waits for a core, which measures the scheduler and
    not the network.

    Args:
        comm: the communicator.
        effort: how much to measure.
        host: name of this rank's node, if it differs from the machine's name.
        cores: number of cores of this rank's node; None: all cores of the machine, or one per virtual rank.

    Raises:
        ParameterError: fewer than two ranks.
    """
    if comm.Get_size() < 2:
        raise ParameterError("a calibration needs at least 2 ranks: mpiexec -n 2 spawnsim calibrate")
    hosts = comm.allgather(host or socket.gethostname())
    rank, known = comm.Get_rank(), dict(facts(comm))
    cores = int(known["cores"]) if cores is None else cores
    known["cores"] = str(cores)
    have_core = [hosts[:each].count(name) < max(cores, 2) for each, name in enumerate(hosts)]
    if all(have_core):
        return _measure(comm, effort or Effort(), hosts, known)
    group: Any = comm.Split(0 if have_core[rank] else UNDEFINED, rank)
    found = None
    if have_core[rank]:
        chosen = [name for name, has in zip(hosts, have_core, strict=True) if has]
        found = _measure(group, effort or Effort(), chosen, known)
        group.Free()
    # Waiting for a request includes naps; a blocking call would poll, on a core that is being measured.
    comm.Ibarrier().Wait()
    measured: Measured = comm.bcast(found, 0)
    return replace(measured, sharing=max(map(hosts.count, hosts)))


def _measure(comm: Comm, effort: Effort, hosts: Sequence[str], known: Mapping[str, str]) -> Measured:
    """Measure ranks on these hosts; each has its own core."""
    near, apart = points(comm, effort, hosts)
    peers = _peers(hosts)
    return Measured(
        ranks=len(hosts),
        points=near,
        apart=apart,
        eager_nbytes=min(
            _with(comm, peer, lambda pair: _eager_nbytes(pair, effort)) for peer in peers.values()
        ),
        answers_busy=all(_with(comm, peer, _answers_busy) for peer in peers.values()),
        steps_s=_steps(comm),
        ranks_per_node=max(map(hosts.count, hosts)),
        facts=tuple({**known, "ranks": str(len(hosts))}.items()),
        sharing=max(map(hosts.count, hosts)),
    )


def points(comm: Comm, effort: Effort, hosts: Sequence[str]) -> tuple[tuple[Point, ...], tuple[Point, ...]]:
    """Return the fields `points` and `apart` of `Measured`. Collective."""
    peers = _peers(hosts)
    pairs = [
        _with(comm, peer, lambda pair: measure_points(pair, _of_pairs(effort), effort))
        for peer in peers.values()
    ]
    return (*pairs[0], *measure_points(comm, _of_all(effort), effort)), pairs[1] if len(pairs) > 1 else ()


def _peers(hosts: Sequence[str]) -> dict[str, int]:
    near = [rank for rank, name in enumerate(hosts) if rank and name == hosts[0]]
    apart = [rank for rank, name in enumerate(hosts) if name != hosts[0]]
    return {where: ranks[0] for where, ranks in (("near", near), ("apart", apart)) if ranks}


def _with(comm: Comm, peer: int, measured: Callable[[Comm], T]) -> T:
    """Return the result that rank 0 and a peer measure on a separate communicator. The other ranks wait."""
    rank = comm.Get_rank()
    # A communicator of two: its barriers do not involve the other ranks.
    pair = comm.Split(0 if rank in (0, peer) else UNDEFINED, rank)
    found = None
    if rank in (0, peer):
        found = measured(pair)
        pair.Free()
    # The other ranks wait here, so that the pair has the network for itself.
    shared: T = comm.bcast(found, 0)
    return shared


def _of_pairs(effort: Effort) -> list[tuple[str, int]]:
    pings = [("p2p", nbytes) for nbytes in effort.sizes()]
    streams = [("stream", nbytes) for nbytes in effort.sizes()[::4]]
    return [*pings, *streams, ("post", 1), *(("get", nbytes) for nbytes in effort.sizes(8))]


def _of_all(effort: Effort) -> list[tuple[str, int]]:
    sizes = replace(effort, largest_nbytes=max(effort.largest_nbytes // 4, 8)).sizes(8)
    return [
        ("probe", 0),
        ("barrier", 0),
        *(("copy", nbytes) for nbytes in sizes if nbytes >= PAGE_NBYTES),
        *((operation, nbytes) for operation in COLLECTIVES for nbytes in sizes),
    ]


def _eager_nbytes(pair: Comm, effort: Effort) -> int:
    """Return the size of the longest message whose send returns although the receiver is asleep."""
    one_way_s = measure_points(pair, [("p2p", 1)], effort)[0].seconds
    # Long compared with a flight, or a slow network would look like a send that waits.
    asleep_s = max(5e-3, 50.0 * one_way_s)
    eager, least, sizes = 0, 0, effort.sizes()
    for nbytes in sizes:
        if _send_s(pair, nbytes, asleep_s) > 0.5 * asleep_s:
            least = nbytes  # the shortest message whose send waited
            break
        eager = nbytes
    # A limit is seldom a power of two, and collectives cut messages into parts of any size.
    while least - eager > max(EAGER_NBYTES, eager / 64):
        middle = (eager + least) // 2
        if _send_s(pair, middle, asleep_s) > 0.5 * asleep_s:
            least = middle
        else:
            eager = middle
    return eager


def _send_s(pair: Comm, nbytes: int, asleep_s: float) -> float:
    buffer, began_s = np.zeros(nbytes, np.uint8), pair.clock.now()
    if pair.Get_rank() == 0:
        pair.Recv(np.zeros(1, np.uint8), 1, READY)
        began_s = pair.clock.now()
        pair.Send(buffer, 1)
    else:
        pair.Send(np.zeros(1, np.uint8), 0, READY)
        # Asleep outside of MPI: a polling receiver would accept the message at any size.
        pair.clock.sleep(asleep_s)
        pair.Recv(buffer, 0)
    seconds: float = pair.bcast(pair.clock.now() - began_s, 0)
    return seconds


def _answers_busy(pair: Any) -> bool:
    """Return whether reading a window of a computing rank takes much less time than the rest of its compute block."""
    window, into = pair.Win.Allocate(8, comm=pair), np.zeros(8, np.uint8)
    window.Lock_all()
    # The minimum of three: a directly readable window is seldom slow, and one that needs its owner is never fast.
    got_s = min(_get_from_busy_s(pair, window, into) for _ in range(3))
    window.Unlock_all()
    window.Free()
    return got_s < 0.5 * BUSY_S


def _get_from_busy_s(pair: Any, window: Any, into: Any) -> float:
    ready, began_s = np.zeros(1, np.uint8), pair.clock.now()
    if pair.Get_rank() == 0:
        pair.Recv(ready, 1, READY)
        began_s = pair.clock.now()
        window.Get(into, 1)
        window.Flush(1)
    else:
        pair.Send(ready, 0, READY)
        with pair.compute(BUSY_S):
            # A real loop inside the block: only virtual ranks let a stated duration pass.
            end_s = time.perf_counter() + BUSY_S
            while time.perf_counter() < end_s:
                pass
    seconds: float = pair.bcast(pair.clock.now() - began_s, 0)
    return seconds


def _steps(comm: Comm) -> tuple[FloatArray, ...]:
    """Return the durations of repeated steps of matrix products, measured on all ranks at once."""
    matrix, own_s = np.eye(SIDE) * 0.5, np.empty(STEPS)
    # All ranks compute at once, as they do in training: they share caches and memory.
    comm.Barrier()
    for step in range(STEPS):
        began_s = comm.clock.now()
        with comm.compute():
            for _ in range(4):
                matrix = matrix @ matrix + matrix
                # Kept within bounds, since arithmetic with infinities and denormals has another speed.
                matrix /= max(float(np.abs(matrix).max()), 1.0)
        own_s[step] = comm.clock.now() - began_s
    return tuple(comm.allgather(own_s))


def doubts(ranks_per_node: int, cores: int, load: float) -> list[str]:
    """Return reasons to distrust times measured here, or an empty list."""
    found = []
    if ranks_per_node > cores:
        found.append(
            f"{ranks_per_node} ranks share {cores} cores: calls sometimes wait for a core, so their times vary"
        )
    if load > cores + 0.5:
        found.append(
            f"load {load:.1f} on {cores} cores before the start: other programs compute here too, and will "
            "affect the measurement"
        )
    return found


def facts(comm: Any) -> tuple[tuple[str, str], ...]:
    """Return the machine and software, for the platform file."""
    backend = comm.capabilities().backend
    known = {
        "backend": backend,
        "library": _library() if backend == "mpi" else "none",
        "ranks": str(comm.Get_size()),
        # Cores of virtual ranks belong to their platform, not to the machine they run on.
        "cores": str(comm.Get_size() if backend == "virtual" else os.cpu_count()),
        "machine": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "spawnsim": metadata.version("spawnsim"),
    }
    return tuple(known.items())


def _library() -> str:
    from spawnsim.real.launch.launchers import find_library

    found = find_library()
    return f"{found.name} ({found.origin})"
