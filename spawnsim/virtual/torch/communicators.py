"""Process groups as communicators, and communicators as process groups: calls of either kind accept both.

A group and its communicator have separate contexts: calls on one never match calls on the other.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
COMM, MADE = "communicator", "process group"  # keys of a context's notes, each with a rank of the world


def world(backend: str) -> Any:
    """Initialize torch.distributed, as under torchrun; return the communicator of all ranks. Collective."""
    dist.init_process_group(backend)
    return communicator(dist.group.WORLD)


def close(comm: Any) -> None:
    """Destroy torch.distributed's process groups."""
    if dist.is_initialized():  # the program may have destroyed them
        dist.destroy_process_group()


def communicator(group: Any) -> Any:
    """Return this rank's handle of the communicator of a group's members, the same one each time. Takes no time."""
    own = group.comm
    notes, key = own._context.notes, (COMM, own._rank.id)
    if key not in notes:
        context = notes.get(COMM)
        if context is None:
            context = notes[COMM] = own._context.derive(*own._context.groups)
            context.name, context.lasting = own._label, True
        notes[key] = own._entered(context)
    return notes[key]


def process_group(comm: Any) -> Any:
    """Return torch.distributed's group of a communicator's members, in its order. Collective on the first call."""
    rank = comm._rank.id
    for group in c10d._world.pg_map:
        if group.comm._context.notes.get((COMM, rank)) is comm:
            return group
    default: Any = dist.group.WORLD
    places = default.comm._context.places[0]
    ranks = [places[member] for member in comm._members]
    kind, store = c10d._world.pg_map[default]
    # Not by `new_group`: its names count the groups of each rank, so members of different groups would not meet.
    group, _ = c10d._new_process_group_helper(
        comm.size, comm.rank, ranks, dist.Backend(kind), store, f"communicator {comm._context.number}"
    )
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    group.comm._context.notes[COMM, rank] = comm
    comm._context.notes[MADE, rank] = group
    return group


def free(comm: Any) -> None:
    """Destroy the group that was made of a communicator, if any."""
    group = comm._context.notes.pop((MADE, comm._rank.id), None)
    if group in c10d._world.pg_map:  # the program may have destroyed it
        dist.destroy_process_group(group)
