"""The account of one replacement: what `info` and events.jsonl say of it.

This room knows the facts of a replacement and how they are told, and what of it is worth a warning; it sends nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from spawnsim.comm import Comm
from spawnsim.policies.policy import Info
from spawnsim.policies.renewal import Gift, Renewal, shared, unsound
from spawnsim.policies.state import collect

Served = Literal["before", "after"]
Whose = tuple[torch.nn.Module, torch.optim.Optimizer]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Replacement:
    """What happened to a rank at `iteration`.

    `round` is the iteration whose metrics decided, `asked` the own iteration at which the donors were asked (the
    reference of the delta rule), `low` and `high` the metrics' range as far as it was known.
    """

    iteration: int
    round: int
    asked: int
    metric: float
    gifts: Sequence[Gift]
    low: float = math.nan
    high: float = math.nan
    nbytes: int = 0
    wait_s: float = 0.0
    unmatched: tuple[str, ...] = ()
    mode: str = ""  # "max" or "min", where it is known which metrics are better

    @property
    def staleness(self) -> int:
        """Iterations by which the oldest donor snapshot is behind this rank; negative if it is ahead."""
        return max((self.iteration - gift.iteration for gift in self.gifts), default=0)

    def tell(self, info: Info, so_far: int) -> None:
        """Write the replacement into the info of the call in which it happened."""
        info.update(
            averaged_this_iteration=bool(self.gifts), is_replaced=True, num_replacements_so_far=so_far,
            global_min_metric=self.low, global_max_metric=self.high, donors=len(self.gifts),
            staleness=self.staleness, bytes=self.nbytes, wait_s=self.wait_s,
        )  # fmt: skip

    def record(self, comm: Comm, renewal: Renewal, *, served: Served) -> None:
        """Add the event "replacement", with all that `replay` needs; warn of tensors that no donor had.

        Ranks are those of the whole run, also where the communicator is a part of it. `served` says whether donors
        give what they have before or after a replacement of their own in the same call.
        """
        world = comm.Get_group().members
        comm.record.event(
            "replacement", iteration=self.iteration, round=self.round, replaced=world[comm.Get_rank()],
            donors=[world[gift.donor] for gift in self.gifts], weights=[gift.weight for gift in self.gifts],
            versions=[gift.iteration for gift in self.gifts], asked=self.asked, metric=self.metric, low=self.low,
            high=self.high, bytes=self.nbytes, wait_s=self.wait_s, served=served,
            strategy=renewal.strategy, momentum=renewal.momentum, rule=renewal.rule,
            optimizer_state=renewal.travels.optimizer_state, mode=self.mode,
        )  # fmt: skip
        if self.unmatched:
            shown = ", ".join(self.unmatched[:5]) + (", …" if len(self.unmatched) > 5 else "")
            count = len(self.unmatched)
            logger.warning(
                "rank %d: %d tensors without a match at the donors stay: %s", comm.rank, count, shown
            )


def sound(comm: Comm, gifts: Sequence[Gift], whose: Whose, renewal: Renewal) -> list[Gift]:
    """Return the gifts that hold no NaN and no strange infinity, with weights that sum to 1.

    Donors that are left out are told of: an event "left_out", and a warning.
    """
    out = unsound(gifts, collect(*whose, renewal.travels))
    if out:
        world = comm.Get_group().members
        comm.record.event("left_out", donors=[world[donor] for donor in out])
        logger.warning("rank %d: what donors %s gave is not finite: left out", comm.rank, out)
    return shared([gift for gift in gifts if gift.donor not in out])
