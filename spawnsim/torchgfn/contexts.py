"""Roles of the ranks of a job (training, replay buffer, coordinator), and each rank's context.

A layout is a pure function of numbers and host names. It divides the working ranks into `buffers` chunks of nearly
equal size; the last rank of a chunk keeps the replay buffer of the chunk's other ranks, which train. The last rank of
the job may coordinate. The collective `initialize_…` calls create the groups of a layout and return a context on every
rank. They start torch.distributed if the caller requests its groups and it has not been started.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from importlib import import_module
from typing import Any

from spawnsim.backends import BACKENDS, backend_of, real_backends
from spawnsim.comm import UNDEFINED, Comm
from spawnsim.comm.backends import default_group, virtual_world
from spawnsim.errors import ParameterError, UnsupportedError
from spawnsim.torchgfn.communication import Group, _get_MPI, comm_of

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The role of every rank in a world of `world_size` ranks.

    `chunks` are the ranks that share a buffer, with the keeper last; without buffers `chunks` is empty, and all ranks
    but the coordinator train. `agent_groups` divide the training ranks into groups of equal size.
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
        return tuple(chunk[-1] for chunk in self.chunks)

    @property
    def agent_group_size(self) -> int:
        return len(self.agent_groups[0])

    def agent_group_of(self, rank: int) -> int | None:
        """Return the number of a training rank's agent group, None for other ranks."""
        return next((number for number, group in enumerate(self.agent_groups) if rank in group), None)

    def buffer_of(self, rank: int) -> int | None:
        """Return the rank that keeps a training rank's buffer, None without a buffer."""
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
    """Return the layout that depends only on numbers: chunks are runs of ranks.

    Raises:
        ParameterError: more buffers than training ranks, more than one coordinator, or training ranks that are not
            divisible into the agent groups.
    """
    _check_counts(world_size, num_remote_buffers, num_agent_groups, num_coordinators)
    working = range(world_size - num_coordinators)
    chunks = _runs(working, num_remote_buffers)
    return _layout(world_size, tuple(working), chunks, num_agent_groups)


def host_layout(
    hosts: Sequence[str], num_remote_buffers: int = 0, num_agent_groups: int = 1, num_coordinators: int = 0
) -> RankLayout:
    """Return the layout that keeps chunks and agent groups together on hosts; `hosts[r]` is the host of rank r.

    If the buffers divide evenly over the hosts, each host gets its share of chunks, and no rank needs a buffer on
    another host. Otherwise (or if a host is too small) chunks are runs of the ranks sorted by host.

    Raises:
        ParameterError: as `arithmetic_layout`.
    """
    _check_counts(len(hosts), num_remote_buffers, num_agent_groups, num_coordinators)
    by_host = _by_host(hosts[: len(hosts) - num_coordinators])
    share, left = divmod(num_remote_buffers, len(by_host))
    # Sorted by host, so that runs of ranks span as few hosts as possible.
    order = tuple(rank for ranks in by_host for rank in ranks)
    # A chunk needs a rank that keeps the buffer, and a rank that trains.
    if left or any(len(ranks) < 2 * share for ranks in by_host):
        chunks = _runs(order, num_remote_buffers)
    else:
        chunks = tuple(chunk for ranks in by_host for chunk in _runs(ranks, share))
    return _layout(len(hosts), order, chunks, num_agent_groups)


def _by_host(hosts: Sequence[str]) -> list[list[int]]:
    found: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    return list(found.values())


def _runs(ranks: Sequence[int], count: int) -> tuple[Ranks, ...]:
    """Return `count` runs whose lengths differ by at most one, the longer ones first."""
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


def _check_counts(world_size: int, buffers: int, agent_groups: int, coordinators: int) -> None:
    working = world_size - coordinators
    if coordinators not in (0, 1) or working < 1:
        raise ParameterError(
            f"num_coordinators={coordinators} of {world_size} ranks: give 0 or 1, and leave one training"
        )
    if buffers < 0 or 2 * buffers > working:
        raise ParameterError(
            f"num_remote_buffers={buffers}: {working} ranks besides the coordinator can keep 0 to "
            f"{working // 2} buffers, each with at least one training rank"
        )
    if not 1 <= agent_groups <= working - buffers:
        raise ParameterError(
            f"num_agent_groups={agent_groups}: {working - buffers} training ranks make 1 to {working - buffers} groups"
        )


@dataclass
class DistributedContextMPI4Py:
    """A rank's context. Groups are communicators, or None where this rank is not a member.

    `agent_groups` has an entry for each group, `agent_group_id` is the index of this rank's. `train_global_group`
    contains all training ranks, `buffer_group` all buffer ranks. `assigned_buffer` is the rank that keeps this training
    rank's buffer, `assigned_training_ranks` are the ranks that a buffer rank serves. Ranks are ranks of the world.
    """

    my_rank: int
    world_size: int
    num_training_ranks: int
    agent_group_size: int
    agent_groups: list[Comm | None] | None = None
    agent_group_id: int | None = None
    train_global_group: Comm | None = None
    assigned_buffer: int | None = None
    buffer_group: Comm | None = None
    assigned_training_ranks: list[int] | None = None
    coordinator_rank: int | None = None
    layout: RankLayout | None = None
    _made: list[Comm] = field(default_factory=list, repr=False)

    @property
    def role(self) -> str:
        """The rank's role: "training", "buffer" or "coordinator"; without a layout, the first ranks train."""
        if self.layout is not None:
            return self.layout.role_of(self.my_rank)
        if self.my_rank == self.coordinator_rank:
            return "coordinator"
        return "training" if self.my_rank < self.num_training_ranks else "buffer"

    def is_training_rank(self) -> bool:
        return self.role == "training"

    def is_buffer_rank(self) -> bool:
        return self.role == "buffer"

    def is_coordinator_rank(self) -> bool:
        return self.role == "coordinator"

    def cleanup(self) -> None:
        """Free the groups that were created for this rank, and drop all groups. A second call does nothing.

        Collective over the members of each group; ranks outside a group have nothing to free. The world and MPI are not
        finalized: the code that started them does so.
        """
        # Dropped before they are freed: a second call, from a `finally` block, must not free them again.
        made, self._made = self._made, []
        self.agent_groups = self.train_global_group = self.buffer_group = None
        for comm in made:
            comm.Free()


@dataclass
class DistributedContext(DistributedContextMPI4Py):
    """A rank's context, as returned by `initialize_distributed_compute`. See `DistributedContextMPI4Py` for the fields.

    Over torch.distributed, also on virtual ranks, the groups are torch's own (`ProcessGroup`), for torch's calls and
    for this toolkit's calls; over MPI, and if virtual ranks run `main(comm)`, they are communicators. `dc_mpi4py` is
    the same context with communicators, which always have mpi4py's names.
    """

    agent_groups: list[Group] | None = None
    train_global_group: Group = None
    buffer_group: Group = None
    dc_mpi4py: DistributedContextMPI4Py | None = None
    _end: Callable[[], None] | None = field(default=None, repr=False)

    def get_train_group(self, backend: str = "mpi") -> Group:
        """Return the group of all training ranks, None on other ranks.

        Args:
            backend: "mpi" for the communicator, "torch" for the group of torch.distributed.

        Raises:
            UnsupportedError: "torch" in a job that was divided over MPI: its groups do not exist in torch.distributed.
        """
        backend_of(backend, real_backends())
        comm = self.dc_mpi4py.train_global_group if self.dc_mpi4py is not None else None
        if backend == "mpi":
            return comm
        if comm is not None and comm.capabilities().backend == "mpi":
            raise UnsupportedError(
                f"rank {self.my_rank}: the groups of this job are MPI groups, which torch.distributed lacks: "
                "initialize_distributed_compute('gloo', …) makes both"
            )
        return self.train_global_group

    def cleanup(self) -> None:
        """Free all groups, and leave torch.distributed if `initialize_distributed_compute` has started it.

        Collective; a second call does nothing.
        """
        # Groups before the job: leaving torch.distributed first would leave groups that cannot be freed.
        super().cleanup()
        if self.dc_mpi4py is not None:
            self.dc_mpi4py.cleanup()
        end, self._end = self._end, None
        if end is not None:
            end()


def with_torch_groups(
    place: DistributedContextMPI4Py, end: Callable[[], None] | None = None
) -> DistributedContext:
    """Return a context over the same ranks, with torch's groups if the communicators use torch.distributed.

    Collective over the members of each group. `end` is called once all groups have been freed.
    """
    shared = {each.name: getattr(place, each.name) for each in fields(place) if each.name != "_made"}
    shared |= {
        "agent_groups": [_process_group(comm) for comm in place.agent_groups or ()],
        "train_global_group": _process_group(place.train_global_group),
        "buffer_group": _process_group(place.buffer_group),
    }
    return DistributedContext(**shared, dc_mpi4py=place, _end=end)


def _process_group(comm: Comm | None) -> Group:
    make = getattr(comm, "as_process_group", None)
    return comm if make is None else make()


def members_only(comms: Iterable[Comm | None]) -> list[Comm]:
    """Return the communicators that include this rank."""
    return [comm for comm in comms if comm is not None]


def initialize_distributed_compute(
    dist_backend: str,
    num_remote_buffers: int,
    num_agent_groups: int,
    use_coordinator: bool = False,
    *,
    comm: Group = None,
    hosts: Sequence[str] | None = None,
) -> DistributedContext:
    """Start torch.distributed if needed, and divide the job's ranks into training, buffer and coordinator ranks.

    Collective over the world. Ranks may have been started by mpiexec, srun, torchrun or `spawnsim run`. If
    torch.distributed is requested and has no default group, one is created from the launcher's settings; the context's
    `cleanup()` destroys it.

    Args:
        dist_backend: "gloo", "nccl", "xccl" or "ccl" for groups of torch.distributed over that backend; "mpi" for MPI's
            own communicators, whatever torch was built with. Virtual ranks accept any of them; if they run
            `main(comm)`, where torch.distributed is refused, they have only communicators.
        num_remote_buffers: number of ranks that keep replay buffers instead of training; each serves a chunk of ranks.
        num_agent_groups: number of groups of training ranks, all of the same size.
        use_coordinator: whether the last rank only coordinates.
        comm: the ranks to divide, instead of the world.
        hosts: host name of each rank, instead of a query; chunks and groups stay on hosts if possible.

    Raises:
        ParameterError: inconsistent numbers, or another backend.
        UnsupportedError: this build of torch lacks the backend.
    """
    kinds = {"mpi": "mpi"} | {alias: each.name for each in BACKENDS.values() for alias in each.aliases}
    if dist_backend not in kinds:
        raise ParameterError(
            f"Unknown backend {dist_backend!r} (dist_backend): choose one of {', '.join(kinds)}"
        )
    kind, end = kinds[dist_backend], None
    # Only a default group that was created here is destroyed here: the program's own stays.
    if comm is None and kind == "torch" and default_group() is None:
        comm, end = _enter_torch(dist_backend)
    place = _divide(comm_of(comm, kind), num_remote_buffers, num_agent_groups, int(use_coordinator), hosts)
    return with_torch_groups(place, end)


def _enter_torch(backend: str) -> tuple[Comm | None, Callable[[], None] | None]:
    """Enter torch.distributed; return the world and a function to leave it. (None, None) where it is refused."""
    if virtual_world() is None:
        package = BACKENDS["torch"].load()
    elif import_module("spawnsim.virtual.torch.entry").is_offered():
        package = import_module("spawnsim.virtual.torch.communicators")
    else:
        return None, None
    world: Comm = package.world(backend=backend)
    return world, partial(package.close, world)


def initialize_distributed_compute_mpi4py(
    num_remote_buffers: int,
    num_agent_groups: int,
    num_coordinators: int = 0,
    *,
    comm: Group = None,
    hosts: Sequence[str] | None = None,
) -> DistributedContextMPI4Py:
    """Divide the ranks of MPI's world; needs no torch.distributed. See `initialize_distributed_compute`."""
    return _divide(comm_of(comm), num_remote_buffers, num_agent_groups, num_coordinators, hosts)


def _divide(
    world: Comm, buffers: int, agent_groups: int, coordinators: int, hosts: Sequence[str] | None
) -> DistributedContextMPI4Py:
    size = world.Get_size()
    if size == 1:  # one process has all roles: it trains, and keeps its buffer itself
        return _place(world, host_layout(["here"]), (world, world, None), made=[])
    # Gathered, because a rank knows only its own host, and all must compute the same layout.
    names = list(hosts) if hosts is not None else world.allgather(_host())
    if len(names) != size:
        raise ParameterError(f"hosts has {len(names)} names for {size} ranks: give one for each")
    # Each rank computes the layout from the same names: a pure function needs no message.
    layout = host_layout(names, buffers, agent_groups, coordinators)
    mine = layout.agent_group_of(world.Get_rank())
    role = layout.role_of(world.Get_rank())
    colours = (mine, None if mine is None else 0, 0 if role == "buffer" else None)
    groups = tuple(_split(world, colour) for colour in colours)
    return _place(world, layout, groups, made=members_only(groups))


def _host() -> str:
    return socket.gethostname() if virtual_world() is None else str(_get_MPI().Get_processor_name())


def _split(world: Comm, colour: int | None) -> Comm | None:
    found: Any = world.Split(UNDEFINED if colour is None else colour, world.Get_rank())
    return found or None


def _place(
    world: Comm, layout: RankLayout, groups: Sequence[Comm | None], *, made: list[Comm]
) -> DistributedContextMPI4Py:
    """Return a rank's context; `groups` are its agent group, all training ranks, all buffer ranks."""
    rank = world.Get_rank()
    mine, trainers = layout.agent_group_of(rank), layout.trainers_of(rank)
    agent, train, buffer = groups
    return DistributedContextMPI4Py(
        my_rank=rank,
        world_size=layout.world_size,
        num_training_ranks=len(layout.training_ranks),
        agent_group_size=layout.agent_group_size,
        agent_groups=[agent if number == mine else None for number in range(len(layout.agent_groups))],
        agent_group_id=mine,
        train_global_group=train,
        assigned_buffer=layout.buffer_of(rank),
        buffer_group=buffer,
        assigned_training_ranks=None if trainers is None else list(trainers),
        coordinator_rank=layout.coordinator_rank,
        layout=layout,
        _made=made,
    )
