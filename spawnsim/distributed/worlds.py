"""Which communicator a call of the toolkit means, and what the environment says.

This room knows groups, worlds and environment variables; it moves no data.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any, TypeAlias

from spawnsim.comm import Comm, as_comm
from spawnsim.comm.job import KINDS, virtual_world, world
from spawnsim.errors import ParameterError

default_backend = "mpi"

Group: TypeAlias = Any
"""A spawnsim `Comm`, an mpi4py communicator, a torch.distributed process group, or None for the world."""


def comm_of(group: Group = None, backend: str = default_backend) -> Comm:
    """Return the communicator of a group; of the backend's world where there is none.

    Raises:
        ParameterError: a backend other than "mpi" and "torch", or something that is no group.
    """
    if backend not in KINDS:
        raise ParameterError(f"backend={backend!r}: choose one of {', '.join(KINDS)}")
    return world(backend) if group is None else as_comm(group)


def _first_env(*names: str, default: str | None = None) -> str | None:
    """Return the first of these environment variables that is set and not empty."""
    return next((value for name in names if (value := os.environ.get(name))), default)


def _get_MPI() -> Any:
    """Return the caller's `MPI`: mpi4py's module, loaded now, or the virtual one on a virtual rank."""
    room = "spawnsim.real.mpi.comm" if virtual_world() is None else "spawnsim.virtual.mpi"
    return import_module(room).MPI
