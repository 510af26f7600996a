"""Dividing a job into training, buffer and coordinator ranks: collective calls that end in a context on every rank.

This module knows the world, layouts and how groups are made. torch.distributed is entered where the caller asks for its
groups and nobody has done so.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from spawnsim.comm import UNDEFINED, Comm
from spawnsim.comm.job import default_group, virtual_world
from spawnsim.distributed.contexts import (
    DistributedContext,
    DistributedContextMPI4Py,
    members_only,
    with_both_faces,
)
from spawnsim.distributed.layouts import RankLayout, host_layout
from spawnsim.distributed.worlds import Group, _get_MPI, comm_of
from spawnsim.errors import ParameterError

BACKENDS = {"mpi": "mpi", "mpi4py": "mpi", "gloo": "torch", "nccl": "torch", "ccl": "torch", "xccl": "torch"}


def initialize_distributed_compute(
    dist_backend: str,
    num_remote_buffers: int,
    num_agent_groups: int,
    use_coordinator: bool = False,
    *,
    comm: Group = None,
    hosts: Sequence[str] | None = None,
) -> DistributedContext:
    """Start torch.distributed if need be, and divide the job's ranks among training, buffers and a coordinator.

    Collective over the world. Ranks may have been started by mpiexec, srun, torchrun or `spawnsim run`. Where
    torch.distributed is wanted and has no default group, it gets one, from what the launcher has told; `cleanup()` of
    the context ends what was begun here.

    Args:
        dist_backend: "gloo", "nccl", "xccl" or "ccl" for groups of torch.distributed over that backend; "mpi" for MPI's
            own communicators, whatever torch was built with. Virtual ranks take any of them and have one kind of group.
        num_remote_buffers: ranks that keep replay buffers instead of training; each serves a chunk of ranks.
        num_agent_groups: groups of training ranks, all of one size.
        use_coordinator: whether the last rank does nothing but coordinate.
        comm: the ranks to divide, instead of the world.
        hosts: host name of each rank, instead of asking; chunks and groups stay on hosts where they can.

    Raises:
        ParameterError: numbers that do not fit together, or another backend.
        UnsupportedError: a backend that this build of torch has not.
    """
    if dist_backend not in BACKENDS:
        raise ParameterError(f"dist_backend={dist_backend!r}: choose one of {', '.join(BACKENDS)}")
    kind, end = BACKENDS[dist_backend], None
    if comm is None and kind == "torch" and virtual_world() is None and default_group() is None:
        comm, end = _entered(dist_backend)
    place = _divide(comm_of(comm, kind), num_remote_buffers, num_agent_groups, int(use_coordinator), hosts)
    return with_both_faces(place, end)


def _entered(backend: str) -> tuple[Comm, Callable[[], None]]:
    """Enter torch.distributed; return the world, and what leaves again."""
    building = import_module("spawnsim.real.torch")
    world: Comm = building.world(backend=backend)
    return world, partial(building.close, world)


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
    if size == 1:  # one process plays all parts: it trains, and keeps its buffer itself
        return _place(world, host_layout(["here"]), (world, world, None), made=[])
    names = list(hosts) if hosts is not None else world.allgather(_host())
    if len(names) != size:
        raise ParameterError(f"hosts has {len(names)} names for {size} ranks: give one for each")
    layout = host_layout(names, buffers, agent_groups, coordinators)
    mine = layout.agent_group_of(world.Get_rank())
    role = layout.role_of(world.Get_rank())
    colours = (mine, None if mine is None else 0, 0 if role == "buffer" else None)
    groups = tuple(_split(world, colour) for colour in colours)
    return _place(world, layout, groups, made=members_only(groups))


def _host() -> str:
    """Return where this rank runs; MPI need not be there."""
    return socket.gethostname() if virtual_world() is None else str(_get_MPI().Get_processor_name())


def _split(world: Comm, colour: int | None) -> Comm | None:
    """Return the group of those with the same colour; None for ranks without one. Collective."""
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
