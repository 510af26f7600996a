"""`GossipPolicy`: each rank averages with its neighbours on a graph, fixed or changing from round to round.

A graph of `rules/graphs.py` defines the neighbours and their weights; `exchange/neighbours.py` transports the models. A
call follows the optimizer's step, so ranks adapt first and then combine: x_i ← Σ_j W_ij (x_j − γ g_j).
"""

from __future__ import annotations

from typing import Any

import torch

from spawnsim.comm import Comm
from spawnsim.errors import ParameterError
from spawnsim.policies.base import Info, SpawnPolicy
from spawnsim.policies.exchange.group_mean import GroupMean, check_same, latest_round
from spawnsim.policies.exchange.neighbours import NeighbourRounds
from spawnsim.policies.rules.cadence import Cadence
from spawnsim.policies.rules.graphs import Graph, Mixing, mixing, ring
from spawnsim.policies.state.arithmetic import CPU, as_tensor, blend, sum_dtype, without_data
from spawnsim.policies.state.codecs import Bytes
from spawnsim.policies.state.layout import (
    Collector,
    Entry,
    Layout,
    ModelAndOptimizer,
    StateScope,
    Tensors,
    assign,
)
from spawnsim.policies.state.snapshot import allocator_for, device_of, laid_out, lay_out

WEIGHT = "weight"  # a message's name for a rank's push-sum weight


class GossipPolicy(SpawnPolicy):
    """Averaging with neighbours on a graph: D-PSGD, SGP and overlap SGP (push-sum), Gossip-PGA, by arguments.

    A rank waits only for its neighbours of the round, and all ranks have the same role. Parameters and buffers may have
    any dtype; equal models stay equal to the bit (without push-sum).

    | | arguments | source |
    |---|---|---|
    | D-PSGD | `graph=ring` | Lian et al. 2017 |
    | SGP | `graph=one_peer_exponential, push_sum=True` | Assran et al. 2019 |
    | overlap SGP | the same, `delay=1` | Assran et al. 2019 |
    | Gossip-PGA | `global_every=H` | Chen et al. 2021 |
    | finite-time consensus | `graph=BaseGraph(k)` | Takezawa et al. 2023 |

    Args:
        average_every: iterations from one round to the next.
        graph: one of `policies.graphs`, or any function of (ranks, round, seed) that returns a `Mixing`.
        push_sum: send a weight w with the values, x_i ← Σ_j p_ij x_j, w_i ← Σ_j p_ij w_j, and train on x/w: correct
            also if only columns sum to 1, and with `delay`.
        delay: rounds after which a message is added, so that messages travel while ranks compute; needs push_sum.
        global_every: every `global_every` rounds take the mean of all ranks instead; None: never. Not with push_sum.
        travels: which parts of the state are averaged; each rank keeps its own optimizer state.
        cadence: when rounds are due, in place of `average_every`.
        timing: a dictionary to fill with durations in seconds, by step.
        tag: tag of the messages; two policies on one communicator need two tags.

    Raises:
        ParameterError: an argument is out of range; or, in a round and on every rank, the graph's weights do not sum to
            1.
        MismatchError: in the first round, on every rank, if the models of the group differ in name, dtype or shape.
        Timeout: if a neighbour does not answer within `comm.clock.deadline`; this rank's model is then unchanged.
    """

    paper = "arXiv 1705.09056, 1811.10792, 2105.09080"
    promises: tuple[str, ...] = ("range", "progress")

    def __init__(
        self,
        average_every: int = 1,
        *,
        graph: Graph = ring,
        push_sum: bool = False,
        delay: int = 0,
        global_every: int | None = None,
        travels: StateScope | None = None,
        cadence: Cadence | None = None,
        timing: dict[str, list[float]] | None = None,
        tag: int = 7401,
    ) -> None:
        super().__init__(average_every, cadence=cadence, timing=timing)
        self.graph, self.push_sum, self.delay, self.tag = graph, bool(push_sum), int(delay), tag
        self.global_every, self.travels = global_every, travels or StateScope()
        if self.travels.optimizer_state != "keep":
            raise ParameterError("optimizer_state: this policy leaves optimizers alone; give 'keep'")
        if delay < 0 or (delay and not push_sum):
            raise ParameterError(
                f"delay={delay!r}, push_sum={push_sum!r}: a delay of rounds > 0 needs push_sum"
            )
        if global_every is not None and (global_every < 1 or push_sum):
            raise ParameterError(
                f"global_every={global_every!r}: give rounds of at least 1, without push_sum"
            )
        # A step applies to x, and so by a factor of 1/w to z: it may exceed the optimizer's step.
        if self.push_sum:
            self.promises = ("progress",)
        self.num_averagings = 0
        self._collect = Collector(self.travels)
        self._met: Comm | None = None  # the communicator of the following attributes
        self._resumed = False  # push-sum continues from a checkpoint
        self._device = CPU
        self._rounds: NeighbourRounds
        self._mean: GroupMean | None = None
        self._sum = PushSum()

    def act(
        self,
        iteration: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        metric: float | None,
        comm: Comm,
        info: Info,
    ) -> ModelAndOptimizer:
        began_s, live = comm.clock.now(), self._collect(model, None)
        if self._met is not comm:
            self._meet(comm, live)
        if self._mean and self.global_every and (self.num_averagings + 1) % self.global_every == 0:
            if comm.Get_size() > 1:
                self._mean(comm, live)
            donors, nbytes = comm.Get_size() - 1, self._mean.nbytes
        else:
            donors, nbytes = self._gossip(comm, live)
        self.num_averagings += 1
        wait_s = comm.clock.now() - began_s
        self.note("average", wait_s)
        info.update(averaged_this_iteration=donors > 0, donors=donors, bytes=nbytes, wait_s=wait_s)
        return model, optimizer

    def _meet(self, comm: Comm, live: Tensors) -> None:
        """Begin on a group; collective. Messages under way on the previous one are lost, and push-sum restarts."""
        self._layout = self._sum.layout(live) if self.push_sum else Layout.of(live)
        if self.global_every is not None:
            self._mean = GroupMean(comm, live)
        else:
            check_same(comm, Layout.of(live), guard=False)
        self.num_averagings = latest_round(comm, self.num_averagings)  # graphs may change with the round
        self._device = device_of(live)
        allocate = allocator_for(self._device)
        self._rounds = NeighbourRounds(comm, self.tag, nbytes=self._layout.nbytes, allocate=allocate)
        if not self._resumed:
            self._sum.begin()
        self._met, self._resumed = comm, False

    def _gossip(self, comm: Comm, live: Tensors) -> tuple[int, int]:
        """Execute a gossip round; return the number of donors, and bytes sent and received."""
        rank, device = comm.Get_rank(), self._device
        weights = self._weights(comm, self.num_averagings)
        to = [other for other, _ in weights.outgoing(rank)]
        sources = [other for other, _ in weights.incoming(rank)]
        # A call that timed out has already sent: its round is finished first, with the current weights.
        sent = self._sum.taken(live) if self.push_sum else live
        if self._rounds.under_way <= self.delay:
            self._rounds.begin(
                lambda memory: lay_out(self._layout, as_tensor(memory), sent, device), to, sources
            )
        found: list[tuple[int, Bytes]] = []
        if self._rounds.under_way > self.delay:
            found = self._rounds.finish()
            weights = self._weights(comm, self.num_averagings - self.delay)
        given = {rank: laid_out(self._layout, as_tensor(memory), device) for rank, memory in found}
        shares = dict(weights.incoming(rank))
        if self.push_sum:
            own = self._weights(comm, self.num_averagings).own(rank)
            self._sum.mix(live, own, [(shares[other], tensors) for other, tensors in given.items()])
        else:
            # Written last, so that an incomplete round leaves the model unchanged. `blend` starts from the first tensor
            # and adds weighted differences: equal models stay equal to the bit.
            row = [weights.own(rank), *(shares[other] for other in given)]
            rows = {name: [own, *(each[name] for each in given.values())] for name, own in live.items()}
            assign(live, {name: blend(values, row) for name, values in rows.items()})
        return len(given), (len(to) + len(sources)) * self._layout.nbytes

    def _weights(self, comm: Comm, round_: int) -> Mixing:
        return mixing(self.graph, comm.Get_size(), round_, comm.rng.key[0], rows=not self.push_sum)

    @property
    def stats(self) -> dict[str, float]:
        return {"num_averagings": self.num_averagings, "push_sum_weight": self._sum.weight}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num_averagings": self.num_averagings, "push_sum": self._sum.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.num_averagings = int(state["num_averagings"])
        self._sum.load(state["push_sum"])
        self._met, self._resumed = None, True

    def drain(self) -> None:
        """Receive and add the messages under way, before a checkpoint. See `SpawnPolicy.drain`."""
        while self._met is not None and self._rounds.under_way:
            first = self.num_averagings - self._rounds.under_way
            weights = dict(self._weights(self._met, first).incoming(self._met.Get_rank()))
            for rank, memory in self._rounds.finish():
                self._sum.add(weights[rank], laid_out(self._layout, as_tensor(memory), self._device))
        super().drain()


class PushSum:
    """One rank's numerators x and weight w: the model holds z = x/w, at which gradients are computed.

    The optimizer changes z by a step, which applies to x unchanged: x ← x + (z − z_written) (Assran et al. 2019).
    """

    def __init__(self) -> None:
        self.weight = 1.0
        self._numerators: Tensors = {}
        self._written: Tensors = {}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint; its tensors are never changed in place."""
        return {"weight": self.weight, "numerators": {**self._numerators}, "written": {**self._written}}

    def load(self, state: dict[str, Any]) -> None:
        self.weight = float(state["weight"])
        self._numerators, self._written = dict(state["numerators"]), dict(state["written"])

    def add(self, share: float, given: Tensors) -> None:
        if without_data(given[WEIGHT]):
            return
        self.weight += share * float(given[WEIGHT])
        self._numerators = {name: own + share * given[name] for name, own in self._numerators.items()}

    def layout(self, live: Tensors) -> Layout:
        """Return the layout of a message: the numerators in their summation dtype, and the weight."""
        entries = [Entry(name, sum_dtype(t.dtype), tuple(t.shape)) for name, t in live.items()]
        return Layout([*entries, Entry(WEIGHT, torch.float64, ())])

    def begin(self) -> None:
        self.weight, self._numerators, self._written = 1.0, {}, {}

    def taken(self, live: Tensors) -> Tensors:
        """Return the tensors to send: the numerators, including the steps since the last round, and the weight."""
        for name, tensor in live.items():
            wide = tensor.to(sum_dtype(tensor.dtype), copy=True)
            if name in self._written:  # steps since the last round
                self._numerators[name] = self._numerators[name] + (wide - self._written[name])
            else:
                self._numerators[name] = wide
            self._written[name] = tensor.to(wide.dtype, copy=True)
        return {**self._numerators, WEIGHT: torch.tensor(self.weight, dtype=torch.float64)}

    def mix(self, live: Tensors, own: float, given: list[tuple[float, Tensors]]) -> None:
        """Combine this rank's own share with the arrived shares, and write z = x/w to the live tensors."""
        if all(without_data(tensor) for tensor in live.values()):
            return
        self.weight *= own
        self._numerators = {name: own * numerator for name, numerator in self._numerators.items()}
        for share, each in given:
            self.add(share, each)
        values = {name: numerator / self.weight for name, numerator in self._numerators.items()}
        values = {name: v if live[name].is_floating_point() else v.round() for name, v in values.items()}
        assign(live, values)
        self._written = {name: live[name].to(value.dtype, copy=True) for name, value in values.items()}
