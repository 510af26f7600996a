"""Services of backends besides communicators: the `Comm` of a library's group, the caller's world, batches of steps.

A group whose class is not its library's own returns its communicator by `as_comm()`. Backends are imported only when
they are needed (MPI), and the classes of groups are looked up among the loaded modules. This module neither creates nor
stores communicators.

A training step is a blocking call, like `Recv`: the rank parks until its step has been executed, together with the
steps of all ranks that are parked by then (`Batching`). The content of a step is unknown to this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from spawnsim.backends import BACKENDS, backend_of, real_backends
from spawnsim.comm.protocols import Comm
from spawnsim.errors import ParameterError, UsageError


def as_comm(group: Any) -> Comm:
    """Return a spawnsim `Comm` for a group that a user passed.

    Args:
        group: a `Comm`, which is returned unchanged, an mpi4py communicator, a torch.distributed process group, or an
            object with `as_comm()`, such as a process group of virtual ranks.

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
    """Register a function that returns the calling rank's COMM_WORLD, for a backend whose ranks share a process.

    It returns None if the caller is not a rank of that backend.
    """
    _worlds_of_callers.append(of_caller)


def virtual_world() -> Comm | None:
    """Return the calling virtual rank's COMM_WORLD, None outside virtual ranks."""
    return next((found for of_caller in _worlds_of_callers if (found := of_caller()) is not None), None)


def world(kind: str = "mpi") -> Comm:
    """Return the communicator of all ranks of the caller's job.

    On a virtual rank it is COMM_WORLD, or the default group if the rank has initialized torch.distributed, independent
    of `kind`. On a real rank, "torch" is torch.distributed's default group and "mpi" is MPI's COMM_WORLD. If MPI's
    world is this process alone but the default group has more ranks (under torchrun), both return the default group.

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
    # Each process under torchrun can load an MPI, but is alone in it: its world is torch's group.
    if default is not None and group.Get_size() == 1 and default.size() > 1:
        return as_comm(default)
    found: Comm = wanted.load().wrap(group)  # several backends may wrap one library; use the named one
    return found


def default_group() -> Any:
    """Return torch.distributed's default group, or None if it does not exist."""
    return BACKENDS["torch"].group_of_all()


class Batching(Protocol):
    """The services of a run of virtual ranks for calls that are executed together.

    Attributes:
        ranks: The number of ranks of the run.
        eager: Whether each call executes alone, in its rank's turn.
        check: Whether each call is compared with the same call executed alone (`--check-steps`).
        batched: Whether any call was executed together with other calls; set by the executing code.
        attachments: Objects that the calls of one run share.
    """

    ranks: int
    eager: bool
    check: bool
    batched: bool
    attachments: dict[Any, Any]

    def rank(self) -> int:
        """Return the calling rank."""

    def clock_s(self) -> float:
        """Return the calling rank's virtual time."""

    def wait(
        self, call: Any, execute: Callable[[Sequence[Any]], None], memory: Callable[[], Sequence[Any]]
    ) -> None:
        """Park the calling rank until `execute` has been called with a batch that contains its call.

        The rank's compute block passes first: calls wait for the earliest end of a block, and all ranks that compute
        meanwhile have made their calls by then. If other tasks or ranks may access a rank's memory meanwhile (a
        background task, a window over `memory`), its block passes afterwards, and its call waits for its own time.

        Args:
            call: The call that is passed to `execute`.
            execute: Executes calls, which are passed in the order of ranks; the same function for all calls of a run.
            memory: Returns the tensors that the call changes.
        """

    def pass_block(self, memory: Callable[[], Sequence[Any]]) -> None:
        """Let the compute block pass, as in `wait`, for a call that was executed alone."""

    def warn(self, sentence: str) -> None:
        """Record a warning of the calling rank, once per run."""

    def apart(self) -> AbstractContextManager[None]:
        """Return a context in which no rank can communicate and torch's modes have their defaults."""


_finders: list[Callable[[], Batching | None]] = []


def register_batching(of_caller: Callable[[], Batching | None]) -> None:
    """Register a function that returns the run of the calling rank, or None if the caller is not a rank of it."""
    _finders.append(of_caller)


def batching() -> Batching | None:
    """Return the run of the calling virtual rank; None on real ranks and outside a run."""
    return next((found for of_caller in _finders if (found := of_caller()) is not None), None)
