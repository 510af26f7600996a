"""Collectives and windows whose results are known: each call returns what it got and what it had to get.

Every rank gives numbers that follow from its rank in the world and the call's number, small enough to add exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spawnsim.comm import SUM

Numbers = NDArray[Any]
Results = tuple[Any, Any]  # what a rank got, and what it had to get


@dataclass(frozen=True)
class Given:
    """One call: on which communicator, of which number, how many elements of which dtype, and the root."""

    comm: Any
    number: int
    count: int
    dtype: str
    root: int

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(self.comm.Get_group().members)

    def of(self, member: int, blocks: int = 1) -> Numbers:
        """Return what a member gives: blocks that differ."""
        block = np.arange(self.count) % 5 + 3 * self.members[member] + self.number
        return np.concatenate([block + 7 * each for each in range(blocks)]).astype(self.dtype)

    @property
    def mine(self) -> Numbers:
        return self.of(self.comm.Get_rank())

    def empty(self, blocks: int = 1) -> Numbers:
        return np.zeros(self.count * blocks, self.dtype)

    def all(self, blocks: int = 1) -> list[Numbers]:
        return [self.of(member, blocks) for member in range(len(self.members))]


def _barrier(given: Given) -> Results:
    given.comm.Barrier()
    return 0, 0


def _bcast(given: Given) -> Results:
    got = given.mine if given.comm.rank == given.root else given.empty()
    given.comm.Bcast(got, given.root)
    return got, given.of(given.root)


def _reduce(given: Given) -> Results:
    got = given.empty()
    given.comm.Reduce(given.mine, got, SUM, given.root)
    return (got, sum(given.all())) if given.comm.rank == given.root else (0, 0)


def _allreduce(given: Given) -> Results:
    got = given.empty()
    given.comm.Allreduce(given.mine, got, SUM)
    return got, sum(given.all())


def _iallreduce(given: Given) -> Results:
    got = given.empty()
    given.comm.Iallreduce(given.mine, got, SUM).Wait()
    return got, sum(given.all())


def _gather(given: Given) -> Results:
    got = given.empty(given.comm.size)
    given.comm.Gather(given.mine, got, given.root)
    return (got, np.concatenate(given.all())) if given.comm.rank == given.root else (0, 0)


def _scatter(given: Given) -> Results:
    got, size = given.empty(), given.comm.size
    given.comm.Scatter(given.of(given.root, size) if given.comm.rank == given.root else None, got, given.root)
    return got, given.of(given.root, size).reshape(size, -1)[given.comm.rank]


def _allgather(given: Given) -> Results:
    got = given.empty(given.comm.size)
    given.comm.Allgather(given.mine, got)
    return got, np.concatenate(given.all())


def _alltoall(given: Given) -> Results:
    rank, size = given.comm.rank, given.comm.size
    got = given.empty(size)
    given.comm.Alltoall(given.of(rank, size), got)
    return got, np.concatenate([each.reshape(size, -1)[rank] for each in given.all(size)])


def _reduce_scatter(given: Given) -> Results:
    rank, size = given.comm.rank, given.comm.size
    got = given.empty()
    given.comm.Reduce_scatter_block(given.of(rank, size), got, SUM)
    return got, sum(given.all(size)).reshape(size, -1)[rank]


def _scan(given: Given) -> Results:
    got = given.empty()
    given.comm.Scan(given.mine, got, SUM)
    return got, sum(given.all()[: given.comm.rank + 1])


def _exscan(given: Given) -> Results:
    got = given.empty()
    given.comm.Exscan(given.mine, got, SUM)
    return (got, sum(given.all()[: given.comm.rank])) if given.comm.rank else (0, 0)


def _objects(given: Given) -> Results:
    got = given.comm.allgather({"rank": given.members[given.comm.rank], "numbers": given.mine.tolist()[:50]})
    return [each["rank"] for each in got], list(given.members)


def _split(given: Given) -> Results:
    rank = given.comm.rank
    part = given.comm.Split(rank % 2, -rank)
    got = given.empty()
    part.Allreduce(given.mine, got, SUM)
    part.Free()
    return got, sum(given.all()[rank % 2 :: 2])


def _window(given: Given) -> tuple[Any, Numbers]:
    mine = given.empty()
    win = given.comm.Win.Allocate(mine.nbytes, mine.itemsize, comm=given.comm)
    memory = np.frombuffer(win.tomemory(), given.dtype)
    memory[:] = 0
    return win, memory


def _put(given: Given) -> Results:
    rank, size = given.comm.rank, given.comm.size
    win, memory = _window(given)
    win.Fence()
    win.Put(given.mine, (rank + 1) % size)
    win.Fence()
    got = memory.copy()
    win.Free()
    return got, given.of((rank - 1) % size)


def _get(given: Given) -> Results:
    rank, size = given.comm.rank, given.comm.size
    win, memory = _window(given)
    memory[:] = given.mine
    given.comm.Barrier()
    got = given.empty()
    win.Lock_all()
    win.Get(got, (rank + 1) % size)
    win.Unlock_all()
    given.comm.Barrier()
    win.Free()
    return got, given.of((rank + 1) % size)


def _accumulate(given: Given) -> Results:
    win, memory = _window(given)
    win.Fence()
    win.Accumulate(given.mine, given.root, op=SUM)
    win.Fence()
    got = memory.copy()
    win.Free()
    return (got, sum(given.all())) if given.comm.rank == given.root else (0, 0)


def _tickets(given: Given) -> Results:
    win, _ = _window(given)
    given.comm.Barrier()
    ticket = np.zeros(1, given.dtype)
    win.Lock(given.root)
    win.Fetch_and_op(np.ones(1, given.dtype), ticket, given.root, 0, SUM)
    win.Unlock(given.root)
    got = given.comm.allgather(float(ticket[0]))
    win.Free()
    return sorted(got), list(range(given.comm.size))


SHARED = ("Scatter", "Alltoall", "Reduce_scatter_block")  # a rank gives a part for each
CALLS = {
    "Barrier": _barrier, "Bcast": _bcast, "Reduce": _reduce, "Allreduce": _allreduce, "Iallreduce": _iallreduce,
    "Gather": _gather, "Scatter": _scatter, "Allgather": _allgather, "Alltoall": _alltoall,
    "Reduce_scatter_block": _reduce_scatter, "Scan": _scan, "Exscan": _exscan, "allgather": _objects,
    "Split": _split, "Put": _put, "Get": _get, "Accumulate": _accumulate, "Fetch_and_op": _tickets,
}  # fmt: skip
