"""The GPUs of a job over torch.distributed: whether NCCL serves its ranks, and what it has not finished.

NCCL takes one rank per GPU and waits for ever, or fails late, where ranks share one: so the ranks compare their cards
when they enter. Knows torch's groups and cards; knows no communicator.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from spawnsim.real.rank.watchdog import Call, Watchdog

Card = tuple[str, bool]
"""A rank's GPU, empty without one, and whether its group of torch has NCCL."""


def beneath(group: Any, device: str) -> Any:
    """Return the part of a group of torch that serves "cpu" or "cuda", or None."""
    try:
        return group._get_backend(torch.device(device))
    except RuntimeError:  # torch has no question to which "none" is the answer
        return None


def card(group: Any) -> Card:
    """Return this rank's card."""
    if not torch.cuda.is_available():
        return "", False
    index = torch.cuda.current_device()
    ident = getattr(torch.cuda.get_device_properties(index), "uuid", index)
    found = beneath(group, "cuda")
    return f"{socket.gethostname()} {ident}", found is not None and found.name() == "nccl"


def verdict(cards: Sequence[Card]) -> tuple[bool, str]:
    """Return whether NCCL serves all ranks, and if they have GPUs and it does not, why and what to do."""
    held = [where for where, _ in cards]
    if not any(held):
        return False, ""
    if len(set(held)) == len(held) and all(nccl for _, nccl in cards):
        return True, ""
    why = "not all ranks have it"
    if not all(held):
        why = f"rank {held.index('')} sees no GPU"
    elif len(set(held)) < len(held):
        where = next(one for one in held if held.count(one) > 1)
        why = f"{held.count(where)} ranks share the GPU {where}, and it takes one"
    instead = "GPU tensors go over gloo by way of pinned memory; one rank per GPU is faster"
    return False, f"NCCL is not used, since {why}: {instead}"


class Unfinished:
    """NCCL's collectives that the GPU has not finished: the watchdog sees them as calls that their rank is in.

    A collective of NCCL returns to the host at once. If the GPU has not done it by its deadline, the watchdog ends the
    job and says who is missing. `add` and the watchdog's looks drop what is done.
    """

    def __init__(self, watchdog: Watchdog) -> None:
        self._active, self._works = watchdog.active, dict[int, Any]()
        self._keys = itertools.count(-2, -1)  # threads, the other keys there, are positive
        watchdog.progress = self.look

    def add(self, call: Call, work: Any) -> None:
        """Watch a collective until the GPU has done it."""
        self.look(2)
        key = next(self._keys)
        self._works[key] = work
        self._active[key] = call

    def look(self, most: int | None = None) -> None:
        """Drop what is done, the oldest first; `most`: of so many."""
        for key, work in list(itertools.islice(self._works.items(), most)):
            if work.is_completed():
                self._works.pop(key, None)
                self._active.pop(key, None)
