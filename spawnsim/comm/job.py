"""The world of whoever calls: the communicator that is meant where a program names none.

This room knows where the buildings keep their worlds, by the names of modules that are loaded already; only MPI's is
loaded on demand. It makes no communicator and keeps none.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from spawnsim.comm.foreign import as_comm
from spawnsim.comm.protocols import Comm
from spawnsim.errors import ParameterError, UsageError

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
    held: Comm = importlib.import_module("spawnsim.virtual.comm.calling").held("COMM_WORLD")
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
