"""Programs with averagers on virtual ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import spawnsim
from spawnsim.policies.averaging import DecentralizedAverager

QUICK = {"min_matchmaking_time": 0.5, "request_timeout": 0.3}


def play(main: Callable[[Any], Any], ranks: int, **circumstances: Any) -> dict[int, Any]:
    """Run a program; return what it returned on each rank."""
    returned: dict[int, Any] = {}

    def kept(comm: Any) -> None:
        returned[comm.rank] = main(comm)

    spawnsim.run(kept, ranks=ranks, **({"platform": "ethernet-10g"} | circumstances))
    return returned


def averager_of(comm: Any, value: float = 0.0, count: int = 10, **parameters: Any) -> DecentralizedAverager:
    """Return an averager of one tensor full of a number."""
    return DecentralizedAverager(
        [torch.full((count,), value)], comm, **({"start": False, "prefix": "t"} | QUICK | parameters)
    )
