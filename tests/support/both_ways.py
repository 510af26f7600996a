"""A training program as users run it, and once more with each step made at once: the second says what is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import spawnsim

RANKS = 12
Ended = tuple[spawnsim.Run, dict[int, Any]]


def once(main: Callable[[spawnsim.Comm], Any], eager: bool, ranks: int = RANKS, **how: Any) -> Ended:
    """Run `main(comm)` with steps together, or eagerly; return the run with what its ranks returned."""
    found: dict[int, Any] = {}

    def program(comm: spawnsim.Comm) -> None:
        found[comm.rank] = main(comm)

    circumstances = {"ranks": ranks, "seed": 3, "stragglers": "lognormal:0.3"} | how
    return spawnsim.run(program, eager=eager, **circumstances), found


def both(main: Callable[[spawnsim.Comm], Any], ranks: int = RANKS, **how: Any) -> tuple[Ended, Ended]:
    """Run `main(comm)` with steps together, and eagerly."""
    return once(main, False, ranks, **how), once(main, True, ranks, **how)
