"""From what a program holds to a `Comm`: wrap another library's group, or find the world of the calling rank.

A group of another kind than its library's own says itself which communicator it stands for, by `as_comm()`. Backends
are imported only when they are needed (MPI), and classes of groups are looked up among the modules that are loaded
already. Makes no communicator itself and keeps none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spawnsim.backends import BACKENDS, backend_of, real_backends
from spawnsim.comm.protocols import Comm
from spawnsim.errors import ParameterError, UsageError


def as_comm(group: Any) -> Comm:
    """Return a spawnsim `Comm` for what a user passed as a group.

    Args:
        group: a `Comm`, which comes back unchanged, an mpi4py communicator, a torch.distributed process group, or an
            object with `as_comm()`, as process groups of virtual ranks have it.

    Raises:
        ParameterError: anything else.
    """
    if hasattr(group, "compute") and hasattr(group, "clock"):
        found: Comm = group
        return found
    if hasattr(group, "as_comm"):
        return group.as_comm()  # type: ignore[no-any-return]
    for backend in BACKENDS.values():
        if backend.has(group):
            wrapped: Comm = backend.load().wrap(group)
            return wrapped
    raise ParameterError(
        f"group={group!r}: pass a spawnsim Comm, an mpi4py communicator or a torch.distributed group"
    )


_worlds_of_callers: list[Callable[[], Comm | None]] = []


def register_world(of_caller: Callable[[], Comm | None]) -> None:
    """Let a backend whose ranks share a process tell the calling rank's COMM_WORLD, None where no rank of its calls."""
    _worlds_of_callers.append(of_caller)


def virtual_world() -> Comm | None:
    """Return the calling virtual rank's COMM_WORLD, None outside virtual ranks."""
    return next((found for of_caller in _worlds_of_callers if (found := of_caller()) is not None), None)


def world(kind: str = "mpi") -> Comm:
    """Return the communicator of all ranks of the caller's job.

    On a virtual rank that is its COMM_WORLD, or its default group if it has entered torch.distributed, whatever the
    kind. On a real one, "torch" is torch.distributed's default group, and "mpi" MPI's COMM_WORLD; a job whose MPI
    world is this process alone, but whose default group has others too (torchrun started it), means the default group
    in both cases.

    Raises:
        ParameterError: another kind.
        UsageError: "torch" before `torch.distributed.init_process_group`.
    """
    wanted = backend_of(kind, real_backends())
    virtual, default = virtual_world(), default_group()
    if virtual is not None:
        return virtual if default is None else as_comm(default)
    if wanted.launcher == "torchrun":
        if default is None:
            raise UsageError(
                "torch.distributed has no default group yet: call init_process_group, or pass a group"
            )
        return as_comm(default)
    group = wanted.group_of_all(load=True)
    # torchrun starts processes that each can load an MPI, and are alone in it: their world is torch's group.
    if default is not None and group.Get_size() == 1 and default.size() > 1:
        return as_comm(default)
    found: Comm = wanted.load().wrap(group)  # several backends may wrap one library: the one that was named
    return found


def default_group() -> Any:
    """Return torch.distributed's default group, None if there is none."""
    return BACKENDS["torch"].group_of_all()
