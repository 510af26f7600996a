"""`GossipPolicy` over columns: each rank sends its model to its neighbours of the round, and mixes it with theirs."""

from __future__ import annotations

import numpy as np

from spawnsim.columnar.meetings import AveragingTurn, Group, take_mean
from spawnsim.columnar.models import Models
from spawnsim.columnar.supported import check_neighbours
from spawnsim.columnar.transfers import swap
from spawnsim.errors import UnsupportedError
from spawnsim.models.network.cost import Floats
from spawnsim.policies import AverageAllPolicy, GossipPolicy
from spawnsim.policies.rules.donors import Decision
from spawnsim.policies.rules.graphs import mixing

ROUND_NBYTES = 8  # the round from which a new group continues


class GossipTurn(AveragingTurn):
    """The messages of a round, on the graph of the living ranks; in every `global_every`-th round the mean instead.

    A new group compares layouts (`Allgather`), and the round from which it continues (`Allreduce` of 8 bytes).
    """

    def __init__(
        self, policy: GossipPolicy, group: Group, nbytes: int, *, seed: int, sum_nbytes: int
    ) -> None:
        check_neighbours(type(policy).__name__, group.platform)
        if policy.delay:
            raise UnsupportedError(
                f"columnar: {type(policy).__name__} with a delay has no form over columns: run it on virtual ranks"
            )
        mean = AverageAllPolicy(1, travels=policy.travels, cadence=policy.cadence)
        super().__init__(mean, group, nbytes)
        self._gossip, self._seed, self._sum_nbytes = policy, seed, sum_nbytes
        self._rounds = 0

    def act(self, iteration: int, metrics: Floats, models: Models) -> Decision | None:
        if self._agreed != self.group.size:
            self._agree()
            self.group.meet("allreduce", ROUND_NBYTES)
        every = self._gossip.global_every
        if every is not None and (self._rounds + 1) % every == 0:
            if self.group.size > 1:
                take_mean(self.group, models, self._policy, nbytes=self._sum_nbytes)
        else:
            self._mix(models)
        self._rounds += 1
        return None

    def _mix(self, models: Models) -> None:
        group, policy = self.group, self._gossip
        # Push-sum is the plain mixture, with weights that stay 1, if columns and rows sum to 1: `mixing` checks both.
        graph = mixing(policy.graph, group.size, self._rounds, self._seed)
        others = np.flatnonzero(graph.receivers != graph.senders)
        order = others[np.lexsort((graph.senders[others], graph.receivers[others]))]
        world = group.world()
        receivers, senders = world[graph.receivers[order]], world[graph.senders[order]]
        sent = np.lexsort((receivers, senders))
        moved = swap(group.cards, senders[sent], receivers[sent], group.platform.network, nbytes=self.nbytes)
        group.count(moved)
        models.mix(receivers, senders, graph.weights[order], policy)
