"""A policy of your own in one file: each rank averages with its neighbours on a graph, as decentralized SGD does.

Source: Lian et al. 2017, "Can Decentralized Algorithms Outperform Centralized Algorithms?" (D-PSGD). A call comes after
the optimizer's step, so ranks adapt first and combine then: x_i ← Σ_j W_ij (x_j − γ g_j), with W symmetric and doubly
stochastic, which keeps the mean of all models.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

import spawnsim
from spawnsim.errors import ParameterError
from spawnsim.policies import SpawnPolicy, StateScope
from spawnsim.policies.exchange.group_mean import check_same
from spawnsim.policies.state.arithmetic import blend
from spawnsim.policies.state.layout import Layout, assign, collect
from spawnsim.policies.state.snapshot import allocator_for, device_of, laid_out, lay_out

Graph = Mapping[int, Sequence[int]]  # rank → its neighbours


def ring(size: int) -> Graph:
    """Return each rank's neighbours on a ring: the one before it and the one after it."""
    return {rank: sorted({(rank - 1) % size, (rank + 1) % size} - {rank}) for rank in range(size)}


def metropolis(graph: Graph, rank: int) -> list[float]:
    """Return row `rank` of W, its own weight first: 1/(1 + the larger degree) for each neighbour, the rest for itself.

    Two neighbours compute the same weight of their edge, each from the graph alone, so W is symmetric on any graph.
    """
    shares = [1 / (1 + max(len(graph[rank]), len(graph[other]))) for other in graph[rank]]
    return [1 - sum(shares), *shares]


class NeighbourAveragingPolicy(SpawnPolicy):
    """Every `average_every` iterations, each rank takes a weighted mean of its own model and its neighbours'.

    A rank waits for its neighbours alone, and no rank is special. On a ring of n ranks the models' distance from their
    mean shrinks by 1/3 + 2/3 cos(2π/n) in each averaging; other graphs mix faster, for more messages.

    Args:
        average_every: iterations from one averaging to the next.
        graph: returns the neighbours of each rank in a group of so many ranks; a function, so that it also holds in the
            smaller group that a recovery leaves.
        travels: which parts of the state are averaged; optimizers keep theirs.
        tag: of the messages; two policies at once need two.

    Raises:
        ParameterError: in the first averaging, if the graph has an edge in one direction only, or to no rank.
        MismatchError: in the first averaging, on every rank, if the models of the group differ in name, dtype or shape.
        Timeout: if a neighbour does not come within `comm.clock.deadline`; this rank's model is then unchanged.
    """

    def __init__(
        self,
        average_every: int = 1,
        *,
        graph: Callable[[int], Graph] = ring,
        travels: StateScope | None = None,
        tag: int = 7301,
    ) -> None:
        super().__init__(average_every)
        self.graph, self.travels, self.tag = graph, travels or StateScope(), tag
        if self.travels.optimizer_state != "keep":
            raise ParameterError("optimizer_state: this policy leaves optimizers alone; give 'keep'")
        self.num_averagings = 0
        self._met = None  # the communicator for which the following hold

    def act(self, iteration, model, optimizer, metric, comm, info):
        """Send the model to all neighbours, wait for theirs, and take the mean; called when an averaging is due."""
        began_s = comm.clock.now()
        live = collect(model, None, self.travels)
        if self._met is not comm:
            self._meet(comm, live)
        device = device_of(live)
        lay_out(self._layout, torch.from_numpy(self._mine), live, device)
        # Receives are posted before anything is sent: large messages then go straight to their place, and no order of
        # arrival can block a ring of ranks that all send. The tag and the order of messages between two ranks pair the
        # k-th averaging of one with the k-th of the other, so no message needs a number.
        pairs = list(zip(self._neighbours, self._theirs, strict=True))
        requests = [comm.Irecv(buffer, rank, self.tag) for rank, buffer in pairs]
        requests += [comm.Isend(self._mine, rank, self.tag) for rank in self._neighbours]
        for request in requests:
            request.Wait()
        # Nothing was written to the model so far: had a neighbour died, it would be as training left it. `blend` starts
        # from the first tensor and adds weighted differences, so equal models stay equal to the bit.
        others = [laid_out(self._layout, torch.from_numpy(buffer), device) for buffer in self._theirs]
        assign(
            live, {name: blend([own, *(o[name] for o in others)], self._row) for name, own in live.items()}
        )
        self.num_averagings += 1
        info.update(
            averaged_this_iteration=bool(others), donors=len(others),
            bytes=2 * len(others) * self._layout.nbytes, wait_s=comm.clock.now() - began_s,
        )  # fmt: skip
        return model, optimizer

    def _meet(self, comm, live):
        """Prepare for a group: its graph, this rank's weights, buffers. Collective, since models are compared."""
        size, me = comm.Get_size(), comm.Get_rank()
        graph = self.graph(size)
        for rank in range(size):
            for other in graph[rank]:
                if other not in range(size) or other == rank or rank not in graph[other]:
                    raise ParameterError(
                        f"graph({size}): rank {rank} has neighbour {other}; give edges between two ranks, both ways"
                    )
        self._layout = Layout.of(live)
        check_same(comm, self._layout, guard=False)
        self._neighbours, self._row = list(graph[me]), metropolis(graph, me)
        room = allocator_for(device_of(live))
        self._mine, *self._theirs = (room(self._layout.nbytes) for _ in range(1 + len(self._neighbours)))
        self._met = comm

    @property
    def stats(self) -> dict[str, float]:
        """Averagings so far."""
        return {"num_averagings": self.num_averagings}


def main(comm, iterations=80):
    """Let each rank's data want another weight, its own rank; the best for all is the mean."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, comm.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with NeighbourAveragingPolicy(average_every=2) as policy:
        for iteration in range(iterations):
            with comm.compute(0.01):
                loss = (model.weight - comm.rank).square().sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            model, optimizer, info = policy(iteration, model, optimizer, -loss.item(), comm)
            comm.record(iteration=iteration, weight=model.weight.item(), **info)


if __name__ == "__main__":
    table = spawnsim.run(main, ranks=12, platform="ethernet-10g").table
    for iteration in (0, 2, 10, 40, 78):
        weights = np.sort(table["weight"][table["iteration"] == iteration])
        print(f"iteration {iteration}: from {weights[0]:.3f} to {weights[-1]:.3f}, mean {weights.mean():.3f}")
    print(f"{table['wait_s'].sum() / 12 * 1e6:.1f} us of waiting a rank")
