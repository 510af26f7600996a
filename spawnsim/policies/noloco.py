"""`NoLoCoPolicy`: outer steps in random pairs, with momentum towards each other's weights; no collectives.

Source: Kolehmainen et al. 2025, NoLoCo (arXiv 2506.10911). Its published code uses heavy ball.
"""

from __future__ import annotations

from typing import Any

import torch

from spawnsim.comm import Comm
from spawnsim.policies.base import Info
from spawnsim.policies.options import OuterOptions
from spawnsim.policies.outer_optimizer import GlobalWeightsPolicy
from spawnsim.policies.state.arithmetic import as_memory
from spawnsim.policies.state.layout import assign
from spawnsim.policies.state.outer import FlatFloats, Fragment
from spawnsim.random import WORLD, generator


def partner_of(rank: int, size: int, seed: int, iteration: int) -> int:
    """Return a rank's partner in an iteration; with an odd number of ranks, one rank is its own partner.

    All ranks draw the same permutation and pair its neighbours, so no messages are needed to agree.

    >>> pairs = [partner_of(rank, 11, seed=7, iteration=50) for rank in range(11)]
    >>> all(pairs[pairs[rank]] == rank for rank in range(11)), sum(pairs[rank] == rank for rank in range(11))
    (True, 1)
    """
    order = generator(seed, WORLD, f"pairs {iteration}").permutation(size).tolist()
    place = order.index(rank)
    return int(order[place ^ 1] if place ^ 1 < size else rank)


class NoLoCoPolicy(GlobalWeightsPolicy):
    """NoLoCo: each rank keeps its own slow weights φ, and makes its outer step with one random partner.

    With means over the pair: m ← momentum·m + lr·mean(θ − φ) + pull·(mean(φ) − φ), φ ← φ + m, θ ← φ. A rank waits only
    for its partner. All ranks start from the model of the lowest rank. If the number of ranks is odd, one is its own
    partner.

    Args:
        average_every: H, iterations from one round to the next.
        pull: γ, strength of the pull between the slow weights of a pair; None: equal to `lr`.
        tag: tag of the messages; two policies on one communicator need two tags.
        how: η and μ, as `lr` and `momentum`; `travels`, `cadence`, `timing` as in `OuterOptimizerPolicy`.
    """

    paper = "arXiv 2506.10911"
    newcomers_only = True

    usual = OuterOptions(momentum=0.5, nesterov=False)
    refused = ("nesterov", "sign", "clip", "compression", "feedback", "fragments", "fragmenter")

    def __init__(
        self, average_every: int = 50, *, pull: float | None = None, tag: int = 7401, **how: Any
    ) -> None:
        super().__init__(average_every, **how)
        self.pull, self.tag = self.rule.lr if pull is None else float(pull), tag
        self._theirs: list[FlatFloats] = []

    def _join(self, comm: Comm, model: torch.nn.Module) -> bool:
        fresh = super()._join(comm, model)
        (fragment,) = self.outer.fragments
        self._theirs = [fragment.weights.zeros(), fragment.weights.zeros()]
        return fresh

    def turn(
        self, iteration: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, info: Info
    ) -> int:
        group = self.outer
        assert group.comm is not None
        comm, live = group.comm, group.live(model)
        (fragment,) = group.fragments
        healed = fragment.read_difference(live)
        rank = comm.Get_rank()
        partner = partner_of(rank, comm.Get_size(), comm.rng.key[0], iteration)
        mine = [fragment.delta, fragment.weights]
        if partner != rank:
            requests = [comm.Irecv(as_memory(each.memory), partner, self.tag) for each in self._theirs]
            requests += [comm.Isend(as_memory(each.memory), partner, self.tag) for each in mine]
            # An explicit deadline: a message that is permanently lost raises `Timeout` instead of causing a deadlock.
            with comm.clock.deadline(comm.clock.limit_s()):
                for request in requests:
                    request.Wait()
        self._move(fragment, self._theirs if partner != rank else mine)
        assign(live, fragment.weights.tensors())
        self.stepped(iteration, info, 4 * fragment.nbytes * (partner != rank))
        info["donors"] = int(partner != rank)
        return healed

    def _move(self, fragment: Fragment, theirs: list[FlatFloats]) -> None:
        """Update the slow weights; `theirs` are the partner's difference φ − θ, and its slow weights."""
        rows = zip(
            fragment.weights.rows, fragment.momentum.rows, fragment.delta.rows, *(each.rows for each in theirs),
            strict=True,
        )  # fmt: skip
        for slow, momentum, delta, their_delta, their_slow in rows:
            momentum.mul_(self.rule.momentum)
            momentum.add_(delta + their_delta, alpha=-self.rule.lr / 2)
            momentum.add_(their_slow - slow, alpha=self.pull / 2)
            slow.add_(momentum)
