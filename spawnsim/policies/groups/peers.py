"""Whom a rank averages with when its clock says so.

Pure functions of rank, size and round; no communicator. `partners` names the ranks that this rank asks in a round,
and `gain` how far both go towards each other: x ← x + gain·(other − x).
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from spawnsim.errors import ParameterError

Mode = Literal["all", "ring", "shift_one", "random"]
GAIN = {"ring": 1 / 3, "shift_one": 1 / 2, "random": 1 / 2}


def check_mode(mode: str) -> Mode:
    """Return the mode, or raise `ParameterError`."""
    if mode not in get_args(Mode):
        raise ParameterError(f"peer_selection_mode={mode!r}: choose one of {', '.join(get_args(Mode))}")
    return mode  # type: ignore[return-value]


def partner(mode: Mode, rank: int, size: int, *, round_: int, rng: np.random.Generator) -> int | None:
    """Return the rank to ask in this round, or None.

    ring: the successor (every edge is used once when all have asked). shift_one: the lower half asks the upper one,
    shifted by one each round (an odd number of ranks takes turns in sitting out). random: anyone.
    """
    if mode == "ring":
        peer = (rank + 1) % size
        return peer if size > 1 and not (size == 2 and rank == 1) else None
    if mode == "shift_one":
        half, shift = size // 2, round_ if size % 2 else 0
        place = (rank + shift) % size
        return (half + (round_ + place) % half - shift) % size if place < half else None
    others = [other for other in range(size) if other != rank]
    return int(others[rng.integers(len(others))]) if others else None


def tree(members: tuple[int, ...], rank: int, fanout: int) -> tuple[int | None, tuple[int, ...]]:
    """Return (parent, children) of a rank in the tree of the given fan-out over `members`; the first is the root.

    >>> tree((3, 5, 7, 9), 5, 2)
    (3, (9,))
    """
    place = members.index(rank)
    parent = members[(place - 1) // fanout] if place else None
    first = place * fanout + 1
    return parent, members[first : first + fanout]
