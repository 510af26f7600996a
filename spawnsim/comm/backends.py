"""From what a program holds to a `Comm`: wrap another library's group, or find the world of the calling rank.

Backends are known by the names of their modules and imported only when they are needed (MPI) or looked up among the
modules that are loaded already (virtual ranks, torch). Makes no communicator itself and keeps none.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from spawnsim.comm.protocols import Comm
from spawnsim.errors import ParameterError, UsageError

# Which building wraps a foreign group, by the package that its type comes from.
_WRAPPERS = {"mpi4py": "spawnsim.real.mpi", "torch": "spawnsim.real.torch"}


def as_comm(group: Any) -> Comm:
    """Return a spawnsim `Comm` for what a user passed as a group.

    A `Comm` comes back unchanged; an mpi4py communicator or a torch.distributed process group is wrapped by its
    building's `wrap(group)`, which is imported only then. Raises `ParameterError` for anything else.
    """
    if hasattr(group, "compute") and hasattr(group, "clock"):
        found: Comm = group
        return found
    package = type(group).__module__.partition(".")[0]
    if package not in _WRAPPERS:
        raise ParameterError(
            f"group={group!r}: pass a spawnsim Comm, an mpi4py communicator or a torch.distributed group"
        )
    wrapped: Comm = importlib.import_module(_WRAPPERS[package]).wrap(group)
    return wrapped


KINDS = ("mpi", "torch")


def world(kind: str = "mpi") -> Comm:
    """Return the communicator of all ranks of the caller's job.

    On a virtual rank that is its COMM_WORLD, whatever the kind. On a real one, "torch" is torch.distributed's default
    group, and "mpi" MPI's COMM_WORLD; a job whose MPI world is this process alone, but whose default group has others
    too (torchrun started it), means the default group in both cases.

    Raises:
        ParameterError: another kind.
        UsageError: "torch" before `torch.distributed.init_process_group`.
    """
    if kind not in KINDS:
        raise ParameterError(f"backend={kind!r}: choose one of {', '.join(KINDS)}")
    return virtual_world() or as_comm(_real_group(kind))


def virtual_world() -> Comm | None:
    """Return the calling virtual rank's COMM_WORLD, None outside virtual ranks."""
    kernel: Any = sys.modules.get("spawnsim.virtual.engine.kernel")
    if kernel is None or kernel.current_task() is None:
        return None
    held: Comm = importlib.import_module("spawnsim.virtual.mpi.communicators").held("COMM_WORLD")
    return held


def _real_group(kind: str) -> Any:
    default = default_group()
    if kind == "mpi":
        mpi = importlib.import_module("spawnsim.real.mpi.comm").MPI.COMM_WORLD
        return mpi if default is None or mpi.Get_size() > 1 or default.size() == 1 else default
    if default is None:
        raise UsageError(
            "torch.distributed has no default group yet: call init_process_group, or pass a group"
        )
    return default


def default_group() -> Any:
    """Return torch.distributed's default group, None if there is none."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.group.WORLD
