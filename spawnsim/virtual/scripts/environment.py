"""Environment variables: launchers' variables for each rank, and the environment of processes that a rank starts.

Python's `os.environ` is separate for each rank. C has one environment: writes of any rank reach it, for libraries that
read it, and it becomes the calling rank's before that rank starts a process.
"""

from __future__ import annotations

import os
import subprocess  # also loads the C module that starts processes
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

import numpy as np

from spawnsim.virtual.engine.world import World
from spawnsim.virtual.interpreter import Put
from spawnsim.virtual.torch import MASTER

# Functions that start processes, which inherit C's environment.
STARTING = (
    (os, "system"), (os, "fork"), (os, "forkpty"), (subprocess, "_fork_exec"),
    (sys.modules.get("_posixsubprocess"), "fork_exec"),
)  # fmt: skip
Environ = dict[Any, Any]  # as `os.environ` keeps it
_environ: Any = os.environ  # its stub lacks the internals
_putenv, _unsetenv = os.putenv, os.unsetenv


def set_environ(variables: Any) -> None:
    """Let `os.environ`, which programs may have imported by name, hold other variables."""
    _environ._data = variables
    if hasattr(os, "environb"):
        os.environb._data = variables  # type: ignore[attr-defined]


class CEnvironment:
    """C's environment while ranks run.

    Args:
        calling: returns the process of the calling rank (`rank_process.Process`), or None.
    """

    def __init__(self, calling: Callable[[], Any]) -> None:
        self._calling = calling
        self._before: Environ = _environ._data
        self._names = set(self._before)  # a superset of the names in it

    def with_variables(self, variables: Mapping[str, str]) -> Environ:
        """Return a rank's initial environment: the one outside the run, extended by `variables`."""
        own = {_environ.encodekey(name): _environ.encodevalue(value) for name, value in variables.items()}
        return self._before | own

    @contextmanager
    def shared(self, environs: Sequence[Environ]) -> Iterator[None]:
        """Add the variables that all ranks have in common to C's environment; restore it after the block."""
        common = (
            set(environs[0].items()).intersection(*(each.items() for each in environs[1:]))
            if environs
            else ()
        )
        self._set(self._before | dict(common))
        try:
            yield
        finally:
            set_environ(self._before)
            self._set(self._before)

    def leave(self) -> None:
        """Let `os.environ` hold the variables outside the run."""
        set_environ(self._before)

    def _set(self, variables: Mapping[Any, Any]) -> None:
        for name in self._names - variables.keys():
            _unsetenv(name)
        for name, value in variables.items():
            _putenv(name, value)
        self._names = set(variables)

    def install(self, put: Put) -> None:
        """Replace the functions that write to it, and the functions that start processes."""
        put(os, "putenv", self._writing(_putenv))
        put(os, "unsetenv", self._writing(_unsetenv))
        for owner, name in STARTING:
            if hasattr(owner, name):
                put(owner, name, self._starting(getattr(owner, name)))

    def _writing(self, original: Callable[..., None]) -> Callable[..., None]:
        """Return an `os.putenv` or `os.unsetenv` that records a rank's changes; `os.environ` calls both."""

        @wraps(original)
        def write(name: Any, *value: Any) -> None:
            original(name, *value)
            process = self._calling()
            if process is not None:
                self._names.add(os.fsencode(name))
                process.written[os.fsencode(name)] = os.fsencode(value[0]) if value else None

        return write

    def _starting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that starts a process; the process inherits the calling rank's environment."""

        @wraps(original)
        def start(*args: Any, **kwargs: Any) -> Any:
            process = self._calling()
            if process is not None:
                environ = process.environ | process.written
                self._set({name: value for name, value in environ.items() if value is not None})
            return original(*args, **kwargs)

        return start


class Placement(NamedTuple):
    """The placement of a rank on the platform's nodes."""

    rank: int
    size: int
    local_rank: int  # index among the ranks of its node
    local_size: int
    node: int  # numbered by the first rank on each node
    nodes: int


def placements(world: World) -> list[Placement]:
    """Return each rank's placement; the network determines which ranks share a node."""
    places = world.network.place(np.arange(len(world.ranks))).tolist()
    counts: dict[int, int] = {}  # number of ranks on each node so far
    local_ranks = []
    for place in places:
        local_ranks.append(counts.get(place, 0))
        counts[place] = local_ranks[-1] + 1
    numbers = {place: number for number, place in enumerate(counts)}
    return [
        Placement(rank, len(places), local_ranks[rank], counts[place], numbers[place], len(counts))
        for rank, place in enumerate(places)
    ]


def as_mpiexec(where: Placement) -> dict[str, str]:
    """Return the variables that MPICH's mpiexec sets: programs use them to detect whether it has started them."""
    return {
        "PMI_RANK": str(where.rank),
        "PMI_SIZE": str(where.size),
        "MPI_LOCALRANKID": str(where.local_rank),
        "MPI_LOCALNRANKS": str(where.local_size),
    }


def as_torchrun(where: Placement, incarnation: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a process."""
    return {
        "RANK": str(where.rank),
        "WORLD_SIZE": str(where.size),
        "LOCAL_RANK": str(where.local_rank),
        "LOCAL_WORLD_SIZE": str(where.local_size),
        "GROUP_RANK": str(where.node),
        "GROUP_WORLD_SIZE": str(where.nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(where.rank),
        "ROLE_WORLD_SIZE": str(where.size),
        "MASTER_ADDR": MASTER[0],
        "MASTER_PORT": str(MASTER[1]),
        "TORCHELASTIC_RESTART_COUNT": str(incarnation),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "spawnsim",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        # As torchft's launcher: each rank is a replica.
        "REPLICA_GROUP_ID": str(where.rank),
        "NUM_REPLICA_GROUPS": str(where.size),
        "TORCHFT_LIGHTHOUSE": "http://lighthouse:29510",
    }
