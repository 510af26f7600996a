"""Programs with averagers on virtual ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import spawnsim
from spawnsim.policies.averaging import DecentralizedAverager

QUICK = {"min_matchmaking_time": 0.5, "request_timeout": 0.3}


def play(main: Callable[[Any], Any], ranks: int, **circumstances: Any) -> dict[int, Any]:
    """Run a program; return what it returned on each rank."""
    returned: dict[int, Any] = {}

    def kept(comm: Any) -> None:
        returned[comm.rank] = main(comm)

    spawnsim.run(kept, ranks=ranks, **({"platform": "ethernet-10g", "seed": 7} | circumstances))
    return returned


def averager_of(
    comm: Any, value: float | list[torch.Tensor] = 0.0, count: int = 10, **parameters: Any
) -> DecentralizedAverager:
    """Return an averager of some tensors, or of one full of a number."""
    tensors = value if isinstance(value, list) else [torch.full((count,), value)]
    return DecentralizedAverager(tensors, comm, **({"start": False, "prefix": "t"} | QUICK | parameters))


def flat(state: torch.nn.Module | list[torch.Tensor]) -> np.ndarray:
    """Return all values of some tensors, or of a model's state, as one array."""
    tensors = list(state.state_dict().values()) if isinstance(state, torch.nn.Module) else state
    return np.concatenate([tensor.detach().double().reshape(-1).numpy() for tensor in tensors]).copy()


def rows(returned: dict[int, Any], index: int) -> np.ndarray:
    """Return one of the things that ranks returned, stacked by rank."""
    return np.stack([returned[rank][index] for rank in sorted(returned)])
