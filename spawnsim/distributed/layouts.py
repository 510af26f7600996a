"""Who does what: which ranks train, which keep replay buffers, which coordinates; pure functions of numbers and names.

This room knows ranks and host names; it knows no communicator. Some ranks are put into `buffers` chunks of nearly equal
size; the last rank of a chunk keeps the buffer of the others, which train. The last rank of all may coordinate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from spawnsim.errors import ParameterError

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The part of every rank of a world of `world_size` ranks.

    `chunks` hold the ranks that share a buffer, its keeper last; without buffers there are none, and all but the
    coordinator train. `agent_groups` partition the training ranks into groups of one size.
    """

    world_size: int
    training_ranks: Ranks
    agent_groups: tuple[Ranks, ...]
    chunks: tuple[Ranks, ...] = ()
    coordinator_rank: int | None = None
    _chunk_of: dict[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        places = {rank: number for number, chunk in enumerate(self.chunks) for rank in chunk}
        object.__setattr__(self, "_chunk_of", places)

    @property
    def buffer_ranks(self) -> Ranks:
        """The ranks that keep a replay buffer, one per chunk."""
        return tuple(chunk[-1] for chunk in self.chunks)

    @property
    def agent_group_size(self) -> int:
        """Ranks per agent group."""
        return len(self.agent_groups[0])

    def agent_group_of(self, rank: int) -> int | None:
        """Return the number of a training rank's agent group, None for other ranks."""
        return next((number for number, group in enumerate(self.agent_groups) if rank in group), None)

    def buffer_of(self, rank: int) -> int | None:
        """Return which rank keeps a training rank's buffer, None where there is none."""
        if rank not in self._chunk_of or rank in self.buffer_ranks:
            return None
        return self.chunks[self._chunk_of[rank]][-1]

    def trainers_of(self, rank: int) -> Ranks | None:
        """Return the training ranks that a buffer rank serves, None for other ranks."""
        return self.chunks[self._chunk_of[rank]][:-1] if rank in self.buffer_ranks else None

    def role_of(self, rank: int) -> str:
        """Return "training", "buffer" or "coordinator"."""
        if rank == self.coordinator_rank:
            return "coordinator"
        return "buffer" if rank in self.buffer_ranks else "training"


def arithmetic_layout(
    world_size: int, num_remote_buffers: int = 0, num_agent_groups: int = 1, num_coordinators: int = 0
) -> RankLayout:
    """Return the layout that looks at numbers only: chunks are runs of ranks.

    Raises:
        ParameterError: more buffers than training ranks, more than one coordinator, or training ranks that do not
            divide into the agent groups.
    """
    _check(world_size, num_remote_buffers, num_agent_groups, num_coordinators)
    working = range(world_size - num_coordinators)
    chunks = _runs(working, num_remote_buffers)
    return _layout(world_size, tuple(working), chunks, num_agent_groups)


def host_layout(
    hosts: Sequence[str], num_remote_buffers: int = 0, num_agent_groups: int = 1, num_coordinators: int = 0
) -> RankLayout:
    """Return the layout that keeps chunks and agent groups together on hosts; `hosts[r]` is where rank r runs.

    Where the buffers divide evenly over the hosts, each host gets its share of chunks, and no rank talks to a buffer
    elsewhere. Otherwise (or if a host is too small) chunks are runs of the ranks sorted by host.

    Raises:
        ParameterError: as `arithmetic_layout`.
    """
    _check(len(hosts), num_remote_buffers, num_agent_groups, num_coordinators)
    by_host = _by_host(hosts[: len(hosts) - num_coordinators])
    share, left = divmod(num_remote_buffers, len(by_host))
    order = tuple(rank for ranks in by_host for rank in ranks)
    if left or any(len(ranks) < 2 * share for ranks in by_host):
        chunks = _runs(order, num_remote_buffers)
    else:
        chunks = tuple(chunk for ranks in by_host for chunk in _runs(ranks, share))
    return _layout(len(hosts), order, chunks, num_agent_groups)


def _by_host(hosts: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each host, hosts in the order of their first rank."""
    found: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    return list(found.values())


def _runs(ranks: Sequence[int], count: int) -> tuple[Ranks, ...]:
    """Return `count` runs whose lengths differ by one at most, the longer ones first."""
    runs, at = [], 0
    for number in range(count):
        length = len(ranks) // count + (number < len(ranks) % count)
        runs.append(tuple(ranks[at : at + length]))
        at += length
    return tuple(runs)


def _layout(world_size: int, order: Ranks, chunks: tuple[Ranks, ...], num_agent_groups: int) -> RankLayout:
    keepers = {chunk[-1] for chunk in chunks}
    training = tuple(rank for rank in order if rank not in keepers)
    if len(training) % num_agent_groups:
        raise ParameterError(
            f"{len(training)} training ranks do not divide into {num_agent_groups} agent groups: change "
            f"num_agent_groups, "
            f"num_remote_buffers or the number of ranks"
        )
    groups = _runs(training, num_agent_groups)
    coordinator = world_size - 1 if len(order) < world_size else None
    return RankLayout(world_size, tuple(sorted(training)), groups, chunks, coordinator)


def _check(world_size: int, buffers: int, agent_groups: int, coordinators: int) -> None:
    working = world_size - coordinators
    if coordinators not in (0, 1) or working < 1:
        raise ParameterError(
            f"num_coordinators={coordinators} of {world_size} ranks: give 0 or 1, and leave one training"
        )
    if buffers < 0 or 2 * buffers > working:
        raise ParameterError(
            f"num_remote_buffers={buffers}: {working} ranks beside the coordinator can keep 0 to {working // 2} "
            f"buffers, "
            f"each with at least one training rank"
        )
    if not 1 <= agent_groups <= working - buffers:
        raise ParameterError(
            f"num_agent_groups={agent_groups}: {working - buffers} training ranks make 1 to {working - buffers} groups"
        )
