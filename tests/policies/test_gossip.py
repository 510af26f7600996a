"""`GossipPolicy` held to recursions written out in numpy; dtypes, groups, deaths, newcomers, checkpoints."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.policy_ranks import line, numbers, walk

import spawnsim
from spawnsim import TrainingStep
from spawnsim.errors import MismatchError, ParameterError, RankFailed, Revoked, Timeout
from spawnsim.policies import (
    AsyncModelAveragePolicy,
    AsyncServerPolicy,
    GossipPolicy,
    ServerOptions,
    ServerRule,
    StateScope,
    WAGMAPolicy,
    graphs,
)
from spawnsim.policies.rules.graphs import BaseGraph, Mixing, butterfly_group

LR, RANKS, STEPS = 0.1, 11, 9
WANTED = np.random.default_rng(5).normal(size=(16, 3))  # the minimum of each rank's loss


def train(policy: Any, ranks: int = RANKS, steps: int = STEPS, **how: Any) -> np.ndarray[Any, Any]:
    """Let each rank take gradient steps towards its own minimum; return all models, (ranks, 3)."""
    return trained(policy, ranks, steps, **how)[0]


def trained(
    policy: Any, ranks: int, steps: int, **how: Any
) -> tuple[np.ndarray[Any, Any], dict[tuple[int, int], Any]]:
    """As `train`; return the infos as well, by rank and iteration."""
    found: dict[int, Any] = {}
    infos: dict[tuple[int, int], Any] = {}

    def main(comm: Any) -> None:
        chosen, rank = policy(), comm.rank
        model = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
        torch.nn.init.constant_(model.weight, float(rank))
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for iteration in range(steps):
            with comm.compute(0.01 * (1 + rank % 3)):
                optimizer.zero_grad()
                ((model.weight - torch.from_numpy(WANTED[rank])) ** 2).sum().mul(0.5).backward()
                optimizer.step()
            model, optimizer, infos[rank, iteration] = chosen(iteration, model, optimizer, group=comm)
        chosen.shutdown()
        found[rank] = model.weight.detach().numpy()[0]

    spawnsim.run(main, ranks=ranks, seed=7, **how)
    return np.stack([found[rank] for rank in range(ranks)]), infos


def irregular(size: int, round_: int, seed: int) -> Mixing:
    """A directed ring in which every third rank also sends to rank 0: columns sum to 1, rows do not."""
    full = np.zeros((size, size))
    for rank in range(size):
        to = [rank, (rank + 1) % size, *([0] if rank % 3 == 2 and (rank + 1) % size else [])]
        for other in to:
            full[other, rank] += 1 / len(to)
    receivers, senders = np.nonzero(full)
    return Mixing(size, receivers, senders, full[receivers, senders])


def test_d_psgd_is_its_recursion() -> None:
    """x_i ← Σ_j W_ij (x_j − γ g_j), on a ring, a torus, and graphs that change in each round."""
    for graph in (graphs.ring, graphs.torus, graphs.exponential, graphs.random_pairs, BaseGraph(2)):
        expected = np.repeat(np.arange(float(RANKS))[:, None], 3, 1)
        for round_ in range(STEPS):
            expected = graph(RANKS, round_, 7).matrix() @ (expected - LR * (expected - WANTED[:RANKS]))
        found = train(lambda graph=graph: GossipPolicy(graph=graph))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("graph", [graphs.one_peer_exponential, irregular])
@pytest.mark.parametrize("delay", [0, 1, 3])
def test_push_sum_is_its_recursion(graph: Any, delay: int) -> None:
    """SGP, and overlap SGP: what was sent in round t comes in at t + delay; the mean of x over Σw stays the mean."""
    x, w = np.repeat(np.arange(float(RANKS))[:, None], 3, 1), np.ones(RANKS)
    z, sent = x.copy(), []
    for round_ in range(STEPS):
        x = x - LR * (z - WANTED[:RANKS])
        sent.append((graph(RANKS, round_, 7).matrix(), x.copy(), w.copy()))
        own = np.diag(sent[-1][0])
        x, w = own[:, None] * x, own * w
        if round_ >= delay:
            full, gone, weights = sent[round_ - delay]
            full = full - np.diag(np.diag(full))
            x, w = x + full @ gone, w + full @ weights
        z = x / w[:, None]
    found = train(lambda: GossipPolicy(graph=graph, push_sum=True, delay=delay))
    np.testing.assert_allclose(found, z, rtol=0, atol=1e-12)


def test_gossip_pga_takes_the_global_mean_each_so_many_rounds() -> None:
    """Rounds 4 and 8 are global means, the others gossip."""
    expected = np.repeat(np.arange(float(RANKS))[:, None], 3, 1)
    for round_ in range(STEPS):
        expected = expected - LR * (expected - WANTED[:RANKS])
        if (round_ + 1) % 4 == 0:
            expected[:] = expected.mean(0)
        else:
            expected = graphs.ring(RANKS).matrix() @ expected
    np.testing.assert_allclose(train(lambda: GossipPolicy(global_every=4)), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ranks", [16, 11])
def test_wagma_is_its_recursion(ranks: int) -> None:
    """Sums of what each member had; who came late goes on with (sum + own)/(S + 1), and nobody has waited for it."""
    steps, size, every = 12, 4, 4
    ends, infos = trained(lambda: WAGMAPolicy(group_size=size, sync_every=every), ranks, steps)
    x, fresh = np.repeat(np.arange(float(ranks))[:, None], 3, 1), []
    first = x.copy()
    late = 0
    for round_ in range(steps):
        fresh.append(x - LR * (x - WANTED[:ranks]))
        if (round_ + 1) % every == 0:
            x = np.repeat(fresh[-1].mean(0, keepdims=True), ranks, 0)
            fresh[-1] = fresh[-2]  # what a rank contributed last: nothing in a round of all
            continue
        x = fresh[-1].copy()
        for rank in range(ranks):
            group = butterfly_group(rank, ranks, size, round_, seed=7)
            assert rank in group
            assert all(butterfly_group(each, ranks, size, round_, seed=7) == group for each in group)
            ages = {each: infos[each, round_]["staleness"] for each in group}
            total = sum((fresh[round_ - age] if age <= round_ else first)[each] for each, age in ages.items())
            x[rank] = (total + fresh[-1][rank]) / (len(group) + 1) if ages[rank] else total / len(group)
            late += ages[rank] > 0
            assert infos[rank, round_]["donors"] == len(group) - 1
    assert late > ranks
    np.testing.assert_allclose(ends, x, rtol=0, atol=1e-12)


def test_wagma_does_not_wait_for_a_straggler_between_its_global_rounds() -> None:
    """One of 64 is ten times as slow: the others wait for messages alone; all are equal, in every type, and stay so."""
    found = walk(
        lambda _: WAGMAPolicy(sync_every=8), ranks=64, steps=7, start=lambda _: line(0.7, dtype=torch.bfloat16),
        pace=lambda rank: 0.1 if rank == 9 else 0.01,
    )  # fmt: skip
    wanted = numbers(line(0.7, dtype=torch.bfloat16)[0])
    assert all(numbers(model) == wanted for model in found.models.values())
    table = found.run.table
    assert table["wait_s"][table["iteration"] > 0].max() < 0.01  # the first round begins with a meeting
    assert table["time_s"][table["rank"] != 9].max() < 0.2
    assert {info["staleness"] for (rank, _), info in found.infos.items() if rank == 9} >= {1, 2}
    assert len({info["bytes"] for info in found.infos.values()}) == 1
    assert found.infos[0, 0]["donors"] == 7


def test_a_base_graph_of_13_ends_in_the_mean_and_stays_there() -> None:
    """Models above the eager threshold; bytes, donors and waits are told."""
    rounds = len(BaseGraph(1).rounds(13))
    found = walk(lambda _: GossipPolicy(graph=BaseGraph(1)), ranks=13, steps=rounds + 2)
    for model in found.models.values():
        assert max(abs(number - 6) for number in numbers(model)) < 1e-6
    reported = [found.infos[3, step] for step in range(rounds)]
    assert {info["donors"] for info in reported} <= {0, 1}
    assert all(info["bytes"] >= 2 * info["donors"] * 120_000 for info in reported)


def test_equal_models_stay_equal_to_the_bit_in_every_dtype() -> None:
    """Half precision, whole numbers, complex numbers; other than with push-sum, where a rounding is due."""

    def start(_: int) -> Any:
        model = torch.nn.Linear(7, 3)
        torch.nn.init.constant_(model.weight, 0.7)
        torch.nn.init.constant_(model.bias, 0.7)
        model.register_parameter("coarse", torch.nn.Parameter(torch.full((5,), 0.7, dtype=torch.bfloat16)))
        model.register_parameter("turn", torch.nn.Parameter(torch.full((5,), 0.7 + 0.3j)))
        model.register_buffer("seen", torch.tensor(12345678901))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    before = start(0)[0].state_dict()
    found = walk(lambda _: GossipPolicy(graph=graphs.random_pairs), ranks=10, steps=3, start=start)
    for model in found.models.values():
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    found = walk(lambda _: GossipPolicy(push_sum=True), ranks=10, steps=3, start=start)
    for model in found.models.values():
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(tensor, before[name])


def test_groups_within_the_world_average_among_themselves() -> None:
    """Two halves of 12 ranks, each in its own communicator, and ranks that are numbered backwards."""
    found = walk(
        lambda _: GossipPolicy(graph=BaseGraph(1)), ranks=12, steps=8,
        group=lambda comm: comm.Split(comm.rank % 2, -comm.rank),
    )  # fmt: skip
    for rank, model in found.models.items():
        assert numbers(model) == {5.0 + rank % 2}


@pytest.mark.parametrize(
    "make",
    [
        lambda: GossipPolicy(graph=graphs.exponential),
        lambda: GossipPolicy(graph=graphs.exponential, push_sum=True, delay=1),
        lambda: GossipPolicy(graph=graphs.exponential, global_every=3),
        lambda: WAGMAPolicy(group_size=4),
    ],
)
def test_deaths_and_newcomers(make: Any) -> None:
    """Two of ten die, in training and at their neighbours' wait; one comes back. All end in one mean of theirs."""
    ends: dict[int, set[float]] = {}

    def main(comm: Any) -> None:
        rank, group, iteration = comm.rank, comm, 0
        policy, (model, optimizer) = make(), line(float(rank))
        newcomer, known = comm.clock.now() > 0, comm
        while iteration < 40:
            try:
                if group is not known:
                    lacking = group.allgather(newcomer)
                    if any(lacking):
                        model.load_state_dict(group.bcast(model.state_dict(), lacking.index(False)))
                    known, newcomer = group, False
                with comm.compute(0.01):
                    pass
                model, optimizer, _ = policy(iteration, model, optimizer, group=group)
                iteration += 1
            except (RankFailed, Revoked, Timeout):
                found = group.recover(iteration)
                group, iteration = found.comm, found.step
        policy.shutdown()
        ends[rank] = {round(number, 3) for number in numbers(model) - {float(rank)}} or numbers(model)

    run = spawnsim.run(main, ranks=10, seed=3, faults="crash:3@0.055s;crash:7@0.1003s;restart:7@0.2s")
    assert set(ends) == set(range(10)) - {3}
    flat = [number for each in ends.values() for number in each]
    assert max(flat) - min(flat) < 0.02
    assert 2 < flat[0] < 7
    assert [event["rank"] for event in run.events if event["kind"] == "crash"] == [3, 7]


def test_a_neighbour_that_does_not_come_leaves_the_model_as_it_is() -> None:
    """A time-out, and the round that was missed is finished by the next call."""
    reported: dict[int, Any] = {}

    def main(comm: Any) -> None:
        policy, (model, optimizer) = GossipPolicy(), line(float(comm.rank))
        policy(0, model, optimizer, group=comm)
        before = numbers(model)
        if comm.rank == 4:
            comm.clock.sleep(1.0)
        if comm.rank in (3, 5):
            with pytest.raises(Timeout), comm.clock.deadline(0.5):
                policy(1, model, optimizer, group=comm)
            reported[comm.rank] = numbers(model) == before
        policy(1, model, optimizer, group=comm)
        policy(2, model, optimizer, group=comm)

    spawnsim.run(main, ranks=10)
    assert reported == {3: True, 5: True}


def test_a_checkpoint_goes_on_in_the_same_round() -> None:
    """Of a graph that changes: 5 rounds, then 4 by new policies, are 9 rounds; also if one rank's is lost."""
    whole = train(lambda: GossipPolicy(graph=graphs.random_pairs), steps=9)
    found: dict[int, Any] = {}

    def main(comm: Any) -> None:
        model = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
        torch.nn.init.constant_(model.weight, float(comm.rank))
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        policy = GossipPolicy(graph=graphs.random_pairs)
        for iteration in range(9):
            if iteration == 5:
                state = policy.state_dict()
                policy = GossipPolicy(graph=graphs.random_pairs)
                if comm.rank != 2:
                    policy.load_state_dict(state)
            optimizer.zero_grad()
            ((model.weight - torch.from_numpy(WANTED[comm.rank])) ** 2).sum().mul(0.5).backward()
            optimizer.step()
            policy(iteration, model, optimizer, group=comm)
        found[comm.rank] = model.weight.detach().numpy()[0]

    spawnsim.run(main, ranks=RANKS, seed=7)
    np.testing.assert_array_equal(np.stack([found[rank] for rank in range(RANKS)]), whole)


def test_bad_parameters_and_models_are_refused() -> None:
    """What cannot be: a delay or a plain mean with the wrong weights, optimizers that travel, models that differ."""
    for bad in ({"delay": 1}, {"delay": -1, "push_sum": True}, {"global_every": 0},
                {"global_every": 2, "push_sum": True}, {"travels": StateScope(optimizer_state="average")}):  # fmt: skip
        with pytest.raises(ParameterError):
            GossipPolicy(**bad)
    with pytest.raises(ParameterError, match="not doubly stochastic"):
        walk(lambda _: GossipPolicy(graph=irregular), ranks=12, steps=2)
    with pytest.raises(MismatchError, match="models of this group differ"):
        walk(lambda _: GossipPolicy(), ranks=10, steps=2, start=lambda rank: line(0.0, width=9 + rank // 9))


def test_averaging_in_pairs_after_each_step_is_ad_psgd() -> None:
    """By the clock at once: pairs at random, nobody waits, a straggler holds up none, and the mean is kept."""
    found = walk(
        lambda _: AsyncModelAveragePolicy("random", sync_interval_ms=1e-3), ranks=12, steps=60,
        start=lambda rank: line(float(rank), width=50, dtype=torch.float64),
        pace=lambda rank: 0.1 if rank == 0 else 0.01,
    )  # fmt: skip
    ends = [model.logZ.item() for model in found.models.values()]
    assert sum(ends) / 12 == pytest.approx(5.5, abs=1e-9)
    assert max(ends) - min(ends) < 1
    table = found.run.table
    assert table["time_s"][(table["rank"] > 0) & (table["iteration"] == 59)].max() < 0.65
    assert table["time_s"][(table["rank"] == 0) & (table["iteration"] == 59)] == pytest.approx(6.0, rel=0.01)


@pytest.mark.parametrize(
    "make",
    [
        lambda: GossipPolicy(graph=BaseGraph(1)),
        lambda: GossipPolicy(graph=graphs.exponential, push_sum=True, delay=1),
        lambda: AsyncServerPolicy(ServerOptions(ServerRule(0.1, 0.0)), steps=3),
    ],
)
def test_steps_that_are_put_off_are_carried_out_before_weights_are_read(make: Any) -> None:
    """Live models under `TrainingStep`, without a metric that would look at them: as eager steps give."""

    def loss_of(model: Any, x: Any) -> Any:
        return (model(x) ** 2).mean()

    def main(comm: Any) -> None:
        model = torch.nn.Linear(8, 1)
        with torch.no_grad():
            model.weight.copy_(torch.tensor(comm.rng("init").normal(size=(1, 8))))
        optimizer, step, policy = torch.optim.SGD(model.parameters(), lr=0.05), TrainingStep(loss_of), make()
        for iteration in range(12):
            with comm.compute(0.01):
                step(model, optimizer, torch.tensor(comm.rng("data").normal(size=(4, 8))).float())
            policy(iteration, model, optimizer, group=comm)
        policy.shutdown()
        comm.record(weight=model.weight.detach().sum().item())

    runs = (spawnsim.run(main, ranks=10, eager=how, stragglers="lognormal:0.2") for how in (True, False))
    eager, batched = (run.table["weight"] for run in runs)
    np.testing.assert_allclose(batched, eager, rtol=1e-4, atol=1e-5)


def test_wagma_takes_a_damaged_message_as_lost() -> None:
    """The round of a group times out; nothing that was damaged is read."""
    with pytest.raises(Timeout, match="the sum of round"):
        walk(lambda _: WAGMAPolicy(patience_s=0.5), ranks=4, steps=5, faults="corrupt:1>0@15ms+9s")
