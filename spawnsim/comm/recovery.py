"""What every communicator says of itself, and what remains after ranks have died.

This room knows two records. How a building finds them out is its own business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a communicator can do here.

    Attributes:
        backend: "virtual", "mpi" or "torch".
        library: the library that carries it, with its version.
        survives: whether the job goes on when a rank dies.
        ulfm: whether Revoke, Shrink and Agree are the library's own.
        progress: when a busy rank answers one-sided accesses: "poll", "async" or "hardware".
        threads: the thread level, such as "multiple".
        devices: where the memory of buffers may lie, in torch's words: "cpu", and "cuda" where GPU tensors are taken.
        missing: launcher flags or settings that would give more, with what each would give.
    """

    backend: str
    library: str
    survives: bool
    ulfm: bool
    progress: str
    threads: str
    devices: tuple[str, ...] = ("cpu",)
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recovery:
    """What `comm.recover()` returns on every survivor.

    Attributes:
        comm: the communicator of the survivors, in their old order.
        ranks: old rank → new rank.
        step: the smallest step that any survivor gave; None if none was given. Survivors of an interrupted step stand
            at different steps, and go on together from this one.
        dead: the old ranks that are gone.
        joined: the new ranks of those that have begun again since they died, and have nothing yet: bring them what they
            need (weights, the iteration). On these ranks themselves nobody but they have joined.
    """

    comm: Any
    ranks: Mapping[int, int]
    step: int | None
    dead: tuple[int, ...]
    joined: tuple[int, ...] = ()
