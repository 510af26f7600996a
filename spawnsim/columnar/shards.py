"""Rows divided over real processes: the rows that each process holds, and the collective calls between processes.

Only models are divided: clocks and decisions are computed in every process. A process holds a contiguous range of ranks
that consists of whole chunks. A chunk trains together; sums are made for each chunk, and combined in an order that
depends on the chunks' numbers alone. So results do not depend on the number of processes, to the bit. Without a
communicator one process holds all rows. Knows rows and a `Comm`; must not know policies.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spawnsim.columnar.rows import Members
from spawnsim.errors import ParameterError
from spawnsim.models.network.cost import Ints
from spawnsim.real.launch.launchers import gpu_of_rank

if TYPE_CHECKING:
    from spawnsim.comm import Comm

Index = slice | Tensor  # of some rows of this process
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Shards:
    """The division of rows over the processes of a communicator. All methods that return a sum or rows are collective.

    Args:
        ranks: number of ranks, each of which has one row.
        chunk: number of ranks that train together, and whose rows are added before others.
        comm: the processes; None: this one alone.

    Attributes:
        process: number of this process.
        processes: number of processes.
        first: the first rank of this process; its row is row 0.
        count: number of rows of this process.

    Raises:
        ParameterError: there are more processes than chunks.
    """

    def __init__(self, ranks: int, chunk: int, comm: Comm | None = None) -> None:
        self.ranks, self.chunk = ranks, chunk
        self.comm: Any = comm  # real ones also have Alltoallv
        self.process, self.processes = (0, 1) if comm is None else (comm.Get_rank(), comm.Get_size())
        chunks = -(-ranks // chunk)
        if self.processes > chunks:
            raise ParameterError(
                f"columnar: {ranks:,} ranks are {chunks} chunks of {chunk}, which {self.processes} processes cannot "
                f"share: start at most {chunks}"
            )
        self._bounds = np.array(bounds(ranks, chunk, self.processes))
        self.first, end = bounds(ranks, chunk, self.processes)[self.process : self.process + 2]
        self.count = end - self.first
        hosts = self.each(socket.gethostname())
        self.on_node = hosts.count(hosts[self.process])

    # ------------------------------------------------------------------------------------------------------ own rows
    def own(self, members: Members) -> Ints:
        """Return the rows of this process among some ranks, ascending."""
        world = np.arange(self.ranks)[members]
        low, high = np.searchsorted(world, (self.first, self.first + self.count))
        rows: Ints = world[low:high] - self.first
        return rows

    def own_ranks(self, members: Members) -> list[int]:
        """Return those of some ranks whose rows are in this process, ascending."""
        ranks: list[int] = (self.own(members) + self.first).tolist()
        return ranks

    def chunks(self, members: Members) -> Iterator[Ints]:
        """Yield the rows of this process among some ranks, chunk by chunk; a chunk may be empty."""
        rows = self.own(members)
        cuts = np.searchsorted(rows, np.arange(0, self.count + self.chunk, self.chunk))
        for low, high in pairwise(cuts.tolist()):
            yield rows[low:high]

    def process_of(self, ranks: Any) -> Any:
        """Return the process that holds the row of each rank."""
        return np.searchsorted(self._bounds, ranks, "right") - 1

    # ------------------------------------------------------------------------------------------------- of all processes
    def each(self, value: Any) -> list[Any]:
        """Return an object of each process."""
        return [value] if self.comm is None else [*self.comm.allgather(value)]

    def gathered(self, own: NDArray[Any]) -> NDArray[Any]:
        """Return a column over all ranks from the columns over each process's ranks."""
        return own if self.comm is None else self._joined(own, np.diff(self._bounds).tolist())

    def _joined(self, own: NDArray[Any], counts: Sequence[int]) -> NDArray[Any]:
        width = math.prod(own.shape[1:])
        whole = np.empty((sum(counts), *own.shape[1:]), own.dtype)
        self.comm.Allgatherv(np.ascontiguousarray(own), [whole, [count * width for count in counts]])
        return whole

    def total(self, members: Members, part: Callable[[Index], Tensor]) -> Tensor:
        """Return a sum over some ranks.

        Args:
            members: the ranks.
            part: maps some rows to their sum; it is called for each chunk of this process.
        """
        own = Sums()
        for place, rows in enumerate(self.chunks(members), self.first // self.chunk):
            own.add(place, 1, part(index(rows)))
        if self.comm is None:
            return own.total()
        ends, sums = -(-self._bounds // self.chunk), Sums()
        nodes = [[*held_after(low, high)] for low, high in pairwise(ends.tolist())]
        stacked = torch.stack([value for _, _, value in own.held])
        given = self._joined(_words(stacked), [len(each) for each in nodes])
        found = torch.from_numpy(given).view(stacked.dtype).to(stacked.device)
        for (place, length), value in zip([node for each in nodes for node in each], found, strict=True):
            sums.add(place, length, value)
        return sums.total()

    def row(self, rows: Tensor, rank: int) -> Tensor:
        """Return a copy of a rank's row."""
        owner = int(self.process_of(rank))
        mine = owner == self.process
        found = rows[rank - self.first].clone() if mine else rows.new_empty(rows.shape[1:])
        if self.comm is None:
            return found
        words = _words(found)
        self.comm.Bcast(words, owner)
        return torch.from_numpy(words).view(rows.dtype).to(rows.device)

    def fetched(
        self, rows: Mapping[str, Tensor], receivers: Ints, donors: Ints
    ) -> Callable[[int], dict[str, Tensor]]:
        """Return a function from a donor to its rows, for receivers of this process; arguments as of `fetch`."""
        found, ranks = self.fetch(rows, receivers, donors)
        places = {rank: place for place, rank in enumerate(ranks.tolist())}

        def of(rank: int) -> dict[str, Tensor]:
            place = places.get(rank)
            if place is None:
                return {name: each[rank - self.first] for name, each in rows.items()}
            return {name: each[place] for name, each in found.items()}

        return of

    def fetch(
        self, rows: Mapping[str, Tensor], receivers: Ints, donors: Ints
    ) -> tuple[dict[str, Tensor], Ints]:
        """Fetch the rows that this process needs from others.

        Args:
            rows: the rows of this process, by name.
            receivers: ranks that need a row of another rank.
            donors: the rank whose row each of them needs.

        Returns:
            The rows of other processes that receivers of this one need, and their ranks, ascending.
        """
        if self.comm is None:
            return {name: each[:0] for name, each in rows.items()}, np.empty(0, np.int64)
        by, here = self.process_of(receivers), self.process
        processes = range(self.processes)
        needed = [np.unique(donors[by == process]) for process in processes]
        give = [self._held_by(here, needed[process]) * (process != here) for process in processes]
        take = [self._held_by(process, needed[here]) * (process != here) for process in processes]
        ranks = np.array([rank for each in take for rank in each], np.int64)
        return {name: self._exchanged(each, give, take) for name, each in rows.items()}, ranks

    def _held_by(self, process: int, ranks: Ints) -> list[int]:
        held: list[int] = ranks[self.process_of(ranks) == process].tolist()
        return held

    def _exchanged(self, rows: Tensor, give: Sequence[list[int]], take: Sequence[list[int]]) -> Tensor:
        sent = _words(
            rows[torch.tensor([rank - self.first for each in give for rank in each], dtype=torch.int64)]
        )
        got = np.empty((sum(map(len, take)), *sent.shape[1:]), sent.dtype)
        width = math.prod(sent.shape[1:])
        counts = ([width * len(each) for each in side] for side in (give, take))
        self.comm.Alltoallv([sent, next(counts)], [got, next(counts)])
        return torch.from_numpy(got).view(rows.dtype).to(rows.device)


def bounds(ranks: int, chunk: int, processes: int) -> list[int]:
    """Return the first rank of each process, and the number of ranks."""
    chunks = -(-ranks // chunk)
    return [min(process * chunks // processes * chunk, ranks) for process in range(processes + 1)]


def use_own_gpu() -> None:
    """Make the GPU of this process current: the processes of a node take its GPUs in turn."""
    gpu = gpu_of_rank(torch.cuda.device_count())
    if gpu is not None:
        torch.cuda.set_device(gpu)


def index(rows: Ints) -> Index:
    """Return an index of ascending rows: a slice, which does not copy, if they are consecutive."""
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1:
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows)


def _words(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor's memory as integers: numpy lacks some types of torch."""
    words: NDArray[Any] = tensor.cpu().contiguous().view(WORDS[tensor.element_size()]).numpy()
    return words


class Sums:
    """Sums over chunks, added pair by pair: chunks 0 and 1, 2 and 3; then these; the last ones, without a pair, last.

    Attributes:
        held: sums that wait for their neighbour: the first chunk, the number of chunks, the sum.
    """

    def __init__(self) -> None:
        self.held: list[tuple[int, int, Tensor]] = []

    def add(self, place: int, length: int, value: Tensor) -> None:
        """Add the sum over `length` chunks that follow those added before."""
        while self.held and self.held[-1][1] == length and self.held[-1][0] % (2 * length) == 0:
            place, _, before = self.held.pop()
            length, value = 2 * length, before + value
        self.held.append((place, length, value))

    def total(self) -> Tensor:
        """Return the sum over all chunks."""
        value = self.held[-1][2]
        for _, _, before in reversed(self.held[:-1]):
            value = before + value
        return value


def held_after(low: int, high: int) -> Iterator[tuple[int, int]]:
    """Yield first chunk and length of each sum that `Sums` holds after chunks `low` to `high` - 1."""
    while low < high:
        length = 1 << (high - low).bit_length() - 1
        while low % length:
            length >>= 1
        yield low, length
        low += length
