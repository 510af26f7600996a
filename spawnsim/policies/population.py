"""Populations: `PopulationBasedTrainingPolicy` (exploit and explore), and model soups after training.

PBT is selective replacement (`selective.py`) with one of the best ranks as donor: the replaced rank takes over the
donor's settings and then varies them. Weakly coupled populations that stay diverse need no separate policy: PAPA is
`AverageAllPolicy(10, momentum=0.99)`, without waiting `AsyncModelAveragePolicy(share=0.01)`, in pairs
`GossipPolicy(graph=random_pairs)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from spawnsim.comm import Comm
from spawnsim.errors import ParameterError
from spawnsim.policies.base import Info, as_metric
from spawnsim.policies.exchange.coordinator import Outcome
from spawnsim.policies.exchange.group_mean import GroupMean
from spawnsim.policies.exchange.protocol import Exchange
from spawnsim.policies.exchange.replacement import Explore
from spawnsim.policies.rules.cadence import Every
from spawnsim.policies.rules.donors import DonorRule, OneOfBest
from spawnsim.policies.rules.selection import Mode, Selection, goodness
from spawnsim.policies.selective import AsyncSelectiveAveragingPolicy
from spawnsim.policies.state.arithmetic import blend
from spawnsim.policies.state.layout import ModelAndOptimizer, StateScope, Tensors, as_real, assign, collect

Draw = Callable[[np.random.Generator], float]


@dataclass(frozen=True, slots=True)
class Perturb:
    """Explore: redraw each setting with some probability, otherwise multiply it by one of a few factors.

    Args:
        settings: names of settings of the optimizer's parameter groups, with the functions that draw them; None: never
            drawn.
        factors: the factors, all equally likely.
        resample: probability of a new draw.

    Raises:
        ParameterError: `resample` is not a probability, or there are no factors.
    """

    settings: Mapping[str, Draw | None] = field(default_factory=lambda: {"lr": None})
    factors: tuple[float, ...] = (0.8, 1.2)
    resample: float = 0.25

    def __post_init__(self) -> None:
        if not (0 <= self.resample <= 1 and self.factors):
            raise ParameterError(
                f"resample={self.resample!r}, factors={self.factors!r}: give a probability and factors"
            )

    def __call__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rng: np.random.Generator
    ) -> None:
        """Change the settings of an optimizer in place, equally in all parameter groups."""
        for key, draw in self.settings.items():
            again, factor = rng.random() < self.resample, float(rng.choice(self.factors))
            drawn = draw(rng) if draw is not None and again else None
            for group in optimizer.param_groups:
                group[key] = factor * group[key] if drawn is None else drawn


class PopulationBasedTrainingPolicy(AsyncSelectiveAveragingPolicy):
    """Population based training: the worst ranks take over weights and settings of one of the best, and explore.

    No rank waits for another; this is `AsyncSelectiveAveragingPolicy` with other rules. A metric that is not finite
    counts as the worst, and a donor whose weights are not finite is excluded, so that NaN does not spread. The events
    "replacement" record replaced ranks and donors (`spawnsim plot` draws them, `replay` repeats them), and the events
    "explored" record the new settings of a replaced rank. Source: Jaderberg et al. 2017; defaults of Ray Tune.

    Args:
        average_every: iterations from one decision to the next.
        quantile: share of the ranks that are replaced, and share of the ranks that donate; at most one half.
        exploit: (selection, donors); by default the worst quantile is replaced, each rank by one of the best quantile.
        explore: called as `explore(model, optimizer, rng)` after a replacement.
        settings: names of the optimizer's settings to take over; by default the settings that `explore` changes.
        burn_in: iterations before the first decision.
        how: `mode`, `nan_policy`, `compression`, `guard`, `wiring`, `timing` as in `AsyncSelectiveAveragingPolicy`.

    Raises:
        ParameterError: an argument is out of range.
    """

    paper = "arXiv 1711.09846"
    states = (*AsyncSelectiveAveragingPolicy.states, "explored")

    decided = (
        "model_builder", "replacement_ratio", "averaging_strategy", "cooldown", "donors", "selection", "cadence",
        "travels",
    )  # fmt: skip

    def __init__(
        self,
        average_every: int,
        *,
        quantile: float = 0.25,
        exploit: tuple[Selection | None, DonorRule] | None = None,
        explore: Explore | None = None,
        settings: tuple[str, ...] | None = None,
        burn_in: int = 0,
        **how: Any,
    ) -> None:
        if not 0 < quantile <= 0.5:
            raise ParameterError(f"quantile={quantile!r}: give a share above 0, at most one half")
        explore = explore if explore is not None else Perturb()
        if settings is None:
            settings = tuple(explore.settings) if isinstance(explore, Perturb) else ()
        # Only ranks that are not replaced are candidates: the best quantile of all ranks is a larger share of them.
        selection, donors = exploit or (None, OneOfBest(quantile / (1 - quantile), how.get("mode", "max")))
        self._settings, self.quantile, self.burn_in = settings, float(quantile), int(burn_in)
        super().__init__(
            None, average_every, quantile, "best_only", cooldown=0, donors=donors, selection=selection,
            cadence=Every(average_every, start=burn_in), explore=explore,
            travels=StateScope(optimizer_state="copy", settings=settings), **how,
        )  # fmt: skip

    def _take_over(self, exchange: Exchange, outcome: Outcome, info: Info) -> ModelAndOptimizer:
        before = self.num_replacements
        model, optimizer = super()._take_over(exchange, outcome, info)
        if self.num_replacements > before:
            taken = {key: float(optimizer.param_groups[0][key]) for key in self._settings}
            exchange.comm.record.event("explored", iteration=self._latest[0] if self._latest else -1, **taken)
        return model, optimizer


# -------------------------------------------------------------------------------------------------------------- soups
def uniform_soup(model: torch.nn.Module, comm: Comm) -> None:
    """Replace the models of a group by their mean, including all buffers; elements that are not finite are ignored.

    Args:
        model: this rank's model; changed in place.
        comm: the group; collective.

    Raises:
        MismatchError: on every rank, if the models differ in name, dtype or shape.
    """
    live = as_real(collect(model, None, StateScope()))
    GroupMean(comm, live)(comm, live)


def greedy_soup(
    model: torch.nn.Module,
    comm: Comm,
    evaluate: Callable[[torch.nn.Module], float | torch.Tensor],
    *,
    mode: Mode = "max",
) -> list[int]:
    """Replace the models of a group by the mean of some: the best, then each that does not worsen the mean.

    A model whose metric is not finite is never included. Source: Wortsman et al. 2022.

    Args:
        model: this rank's model; changed in place.
        comm: the group; collective.
        evaluate: returns a model's metric. It must return the same for the same model on all ranks, so use held-out
            data. The group's rank 0 decides.
        mode: "max" if higher is better, else "min".

    Returns:
        The ranks in the soup, in the order in which they were added; on all ranks.
    """
    live = as_real(collect(model, None, StateScope()))
    own = float(goodness(as_metric(evaluate(model)), mode))
    found = np.empty(comm.Get_size())
    comm.Allgather(np.asarray([own]), found)
    order = [int(rank) for rank in np.argsort(-found, kind="stable") if math.isfinite(found[rank])]
    mine = {name: tensor.clone() for name, tensor in live.items()}
    taken: list[int] = []
    best, kept = -math.inf, mine
    for rank in order:
        # Each rank's model is broadcast: all ranks then have the same soup, and no rank needs more than two models. The
        # clones are contiguous, because otherwise the bytes would be received into a copy.
        given = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in mine.items()}
        for tensor in given.values():
            comm.Bcast(_bytes(tensor), rank)
        mixed = given if not taken else _mixed(kept, given, len(taken))
        assign(live, mixed)
        verdict = np.asarray([float(goodness(as_metric(evaluate(model)), mode))])
        comm.Bcast(verdict, 0)
        if verdict[0] >= best:
            best, kept = float(verdict[0]), {name: tensor.clone() for name, tensor in mixed.items()}
            taken.append(rank)
    assign(live, kept)
    return taken


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy() if tensor.device.type == "cpu" else tensor


def _mixed(kept: Tensors, given: Tensors, count: int) -> Tensors:
    return {name: blend([kept[name], given[name]], [count, 1]) for name in kept}
