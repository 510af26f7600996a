"""`AsyncServerPolicy`: rules on live ranks against a queue of arrivals; two tiers, deaths, newcomers, bad changes."""

from __future__ import annotations

import heapq
import math
from typing import Any

import numpy as np
import pytest
import torch
from support.policy_ranks import line, numbers, walk

import spawnsim
from spawnsim.errors import MismatchError, ParameterError, RankFailed, Revoked, Timeout
from spawnsim.policies import (
    HALOS,
    AsyncServerPolicy,
    Polynomial,
    ServerOptions,
    ServerRule,
    StateScope,
    Tier,
)
from spawnsim.policies.rules.staleness import ServerOptimizer

PACE = (0.0101, 0.0137, 0.0183, 0.0311, 0.0523)  # seconds a step: no two ranks ever arrive together
LR = 0.1
DELAYED = ServerOptions(ServerRule(0.5, 0.9, 3, delayed=True, activation=0.1), Polynomial(), scale=0.8)
FEDBUFF = ServerOptions(ServerRule(0.5, 0.6, 2), Polynomial())
VANILLA = ServerOptions(ServerRule(0.5, 0.6))


def train(policy: Any, steps: int = 41, ranks: int = 5) -> tuple[dict[int, list[float]], spawnsim.Run]:
    """Let ranks of different speeds walk towards their own numbers; return each one's weight after each step."""
    walked: dict[int, list[float]] = {rank: [] for rank in range(ranks)}

    def main(comm: Any) -> None:
        rank, chosen = comm.rank, policy()
        weight = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        torch.nn.init.constant_(weight.weight, 10.0 * (rank == 0))
        optimizer = torch.optim.SGD(weight.parameters(), lr=LR)
        for iteration in range(steps):
            with comm.compute(PACE[rank]):
                if iteration:
                    optimizer.zero_grad()
                    (weight.weight - rank).square().sum().mul(0.5).backward()
                    optimizer.step()
            chosen(iteration, weight, optimizer, group=comm)
            walked[rank].append(weight.weight.item())
        chosen.shutdown()

    run = spawnsim.run(main, ranks=ranks)
    return walked, run


def oracle(options: ServerOptions, steps: int, every: int, ranks: int = 5) -> dict[int, list[float]]:
    """The same by a queue of arrivals: what arrives first is taken first; messages take no time."""
    server = ServerOptimizer(options.rule, [np.asarray(10.0)])
    begun, version = 10.0, dict.fromkeys(range(ranks), 0)
    weights, starts, taken = dict.fromkeys(range(ranks), begun), dict.fromkeys(range(ranks), begun), 0
    walked = {rank: [begun] for rank in range(ranks)}
    # The first call is the meeting of all, when the slowest has computed once.
    queue = [(max(PACE) + PACE[rank] * every, rank, every) for rank in range(ranks)]
    heapq.heapify(queue)
    while queue:
        time_s, rank, done = heapq.heappop(queue)
        for _ in range(every):
            weights[rank] -= LR * (weights[rank] - rank)
            walked[rank].append(weights[rank])
        if done > steps - 1:
            continue
        staleness = taken - version[rank]
        server.take([np.asarray(starts[rank] - weights[rank])], options.scale * options.staleness(staleness))
        taken += 1
        version[rank] = taken
        weights[rank] = starts[rank] = walked[rank][-1] = float(server.weights[0])
        heapq.heappush(queue, (time_s + PACE[rank] * every, rank, done + every))
    return {rank: each[:steps] for rank, each in walked.items()}


@pytest.mark.parametrize("options", [DELAYED, FEDBUFF, VANILLA])
def test_a_server_is_the_recursion_over_arrivals(options: ServerOptions) -> None:
    """Every weight of every rank at every step, to 1e-12; staleness and versions as the queue has them."""
    found, run = train(lambda: AsyncServerPolicy(options, steps=4))
    expected = oracle(options, 41, 4)
    for rank, walked in found.items():
        np.testing.assert_allclose(walked, expected[rank], rtol=0, atol=1e-12)
    updates = [event for event in run.events if event["kind"] == "server_update"]
    assert [event["version"] for event in updates] == list(range(1, 51))
    assert {event["worker"] for event in updates} == set(range(5))
    assert max(event["staleness"] for event in updates) >= 10


def test_dylu_lets_all_arrive_equally_often() -> None:
    """Steps of the fastest worker: 20; of the others in proportion to their speed, at least 5."""
    found = walk(lambda _: AsyncServerPolicy(VANILLA, steps=20, dylu=True), ranks=11, steps=150,
                 start=lambda rank: line(0.0, 5),
                 pace=lambda rank: 0.01 * (1 + rank % 3 + 9 * (rank == 10)))  # fmt: skip
    wanted = {rank: found.infos[rank, 149]["local_steps"] for rank in range(11)}
    assert wanted == {rank: (20, 10, 6)[rank % 3] if rank < 10 else 5 for rank in range(11)}


def test_a_server_beside_training_answers_while_its_rank_computes() -> None:
    """Rank 0 takes a second for a step: the others' exchanges take network time. 120 kB models, 11 ranks."""
    found = walk(lambda _: AsyncServerPolicy(VANILLA, steps=2), ranks=11, steps=9,
                 pace=lambda rank: 0.01 if rank else 1.0)  # fmt: skip
    waits = [info["wait_s"] for (rank, step), info in found.infos.items() if rank and step and info["donors"]]
    assert len(waits) == 40
    assert max(waits) < 0.005
    assert all(info["bytes"] >= 240_000 for info in found.infos.values() if info["donors"])


def test_a_rank_may_do_nothing_but_serve() -> None:
    """It ends with the server's weights when all workers have left; the others train as before."""
    ends: dict[int, Any] = {}

    def main(comm: Any) -> None:
        policy, (model, optimizer) = AsyncServerPolicy(VANILLA, steps=2, server=4), line(float(comm.rank))
        if comm.rank == 4:
            policy.serve(model, comm)
        else:
            for iteration in range(9):
                with comm.compute(0.01 * (1 + comm.rank % 2)), torch.no_grad():
                    model.logZ += 1
                policy(iteration, model, optimizer, group=comm)
        policy.shutdown()
        ends[comm.rank] = (model.logZ.item(), comm.clock.now())

    spawnsim.run(main, ranks=11)
    assert ends[4][0] > 4
    assert ends[4][1] >= max(at for _, at in ends.values()) - 0.1


def test_two_tiers_merge_as_halos_does() -> None:
    """By hand: a region's server takes K = 2 changes, the global one its difference, then (1−a)θ + aΘ.

    Nobody else changes anything, so the recursion is short: plain steps of lr 1 below, of lr 0.5 above, a = 0.25.
    """
    plain, above = ServerOptions(ServerRule(1.0, 0.0)), ServerOptions(ServerRule(0.5, 0.0))
    tier = Tier(lambda size: [rank * 2 // size for rank in range(size)], above, every=2, merge=0.25)
    found: dict[int, list[float]] = {rank: [] for rank in range(4)}

    def main(comm: Any) -> None:
        policy, (model, optimizer) = AsyncServerPolicy(plain, steps=1, tier=tier), line(0.0, 5, torch.float64)
        for iteration in range(7):
            with comm.compute(0.1):
                if comm.rank == 3 and iteration:
                    with torch.no_grad():
                        model.logZ += 1
            policy(iteration, model, optimizer, group=comm)
            found[comm.rank].append(model.logZ.item())
            comm.clock.sleep(0.05)
        policy.shutdown()

    run = spawnsim.run(main, ranks=4)
    # Region 1 has ranks 2 and 3: each second change is sent up, with the change of rank 3 (2 gives zeros). With r the
    # region's weight, b its base and g the global one: g += (r − b)/2; r, b = both 0.75 r + 0.25 g.
    region, base, above_, expected = 0.0, 0.0, 0.0, [0.0]
    for _ in range(6):
        region += 1.0
        expected.append(region)
        above_ += 0.5 * (region - base)
        region = base = 0.75 * region + 0.25 * above_
    np.testing.assert_allclose(found[3], expected, rtol=0, atol=1e-12)
    assert sum(event["tier"] for event in run.events if event["kind"] == "server_update") >= 11


def test_halos_constants_are_those_of_its_authors() -> None:
    """Local lr 0.2·16, β 0.9, N 16; global lr 0.15·2, β 0.5, N 2; K 32, a 0.25."""
    tier = Tier(lambda size: [0] * size)
    assert HALOS.rule == ServerRule(3.2, 0.9, 16, delayed=True)
    assert tier.options.rule == ServerRule(0.3, 0.5, 2, delayed=True)
    assert (tier.every, tier.merge) == (32, 0.25)


def test_workers_die_and_come_back_and_nobody_notices_but_the_server() -> None:
    """Two of twelve die: the others' exchanges go on, on the old communicator; the server ends without them."""
    found = walk(lambda _: AsyncServerPolicy(VANILLA, steps=3, patience_s=5), ranks=12, steps=40,
                 faults="crash:5@0.1s;crash:11@0.1003s")  # fmt: skip
    ended = {rank for rank, step in found.infos if step == 39}
    assert ended == set(range(12)) - {5, 11}
    assert sum(info["donors"] for (rank, _), info in found.infos.items() if rank == 1) == 13
    assert found.run.totals["virtual_seconds"] < 1


@pytest.mark.parametrize("dead", [0, 3])
def test_survivors_go_on_with_another_server_and_newcomers_with_its_weights(dead: int) -> None:
    """The server's rank or a worker dies and comes back; all recover, and train from the server's weights."""
    reported: dict[int, list[tuple[float, float]]] = {rank: [] for rank in range(10)}

    def main(comm: Any) -> None:
        policy, (model, optimizer) = AsyncServerPolicy(VANILLA, steps=2, patience_s=2), line(float(comm.rank))
        group, iteration = comm, 0
        while iteration < 40:
            try:
                with comm.compute(0.01):
                    pass
                policy(iteration, model, optimizer, group=group)
                reported[comm.rank].append((comm.clock.now(), model.logZ.item()))
                iteration += 1
            except (RankFailed, Revoked, Timeout):
                found = group.recover(iteration)
                group, iteration = found.comm, found.step
        policy.shutdown()

    spawnsim.run(main, ranks=10, faults=f"crash:{dead}@0.1s;restart:{dead}@0.2s")
    ends = {rank: each[-1][1] for rank, each in reported.items()}
    assert set(ends.values()) == {0.0}
    assert all(each[-1][0] > 0.3 for each in reported.values())


def test_a_change_that_is_not_finite_is_refused_and_its_worker_healed() -> None:
    """One worker's weights become NaN: the server's do not, and the worker goes on from them."""

    def start(rank: int) -> Any:
        model, optimizer = line(1.0)
        model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        return model, optimizer

    class Diverging(AsyncServerPolicy):
        def act(self, iteration: int, model: Any, *rest: Any) -> Any:
            if iteration == 4 and rest[2].rank == 7:
                model.weight.data[3] = math.nan
            return super().act(iteration, model, *rest)

    found = walk(lambda _: Diverging(VANILLA, steps=2), ranks=11, steps=12, start=start)
    assert [event["worker"] for event in found.events("refused_update")] == [7]
    for model in found.models.values():
        assert numbers(model) == {1.0, 0.0, -math.inf}


def test_dtypes_groups_and_grace() -> None:
    """bfloat16, whole numbers and complex ones in two subgroups; with a grace, who ends together begins together."""

    def start(_: int) -> Any:
        model = torch.nn.Linear(7, 3, dtype=torch.bfloat16)
        torch.nn.init.constant_(model.weight, 0.75)
        model.register_parameter("turn", torch.nn.Parameter(torch.full((5,), 0.75 + 0.25j)))
        model.register_buffer("seen", torch.tensor(1234567))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    before = start(0)[0].state_dict()["seen"]
    options = ServerOptions(ServerRule(1.0, 0.0), grace_s=0.02)
    found = walk(lambda _: AsyncServerPolicy(options, steps=2), ranks=12, steps=9, start=start,
                 pace=lambda rank: 0.01 + rank * 1e-4,
                 group=lambda comm: comm.Split(comm.rank % 2, -comm.rank))  # fmt: skip
    for model in found.models.values():
        assert torch.equal(model.state_dict()["seen"], before)
    waits = [info["wait_s"] for info in found.infos.values() if info["donors"]]
    assert 0.015 < np.mean(waits) < 0.025
    versions = {event["version"] for event in found.events("server_update")}
    assert max(versions) == 24  # of each half: 6 ranks, 4 exchanges


def test_checkpoints_and_bad_parameters() -> None:
    """Counters and DyLU's steps go on; ranges, servers that are not there, models that differ."""
    policy = AsyncServerPolicy(VANILLA, steps=8, dylu=True)
    state = {"num_replacements": 0, "num_averagings": 5, "wanted": 6, "round": {}, "servers": {}}
    policy.load_state_dict(state)
    assert policy.state_dict() == state
    for bad in ({"patience_s": math.inf}, {"least_steps": 0}, {"server": -1}, {"steps": 0},
                {"travels": StateScope(optimizer_state="average")}):  # fmt: skip
        with pytest.raises(ParameterError):
            AsyncServerPolicy(VANILLA, **bad)
    with pytest.raises(ParameterError, match="server=4"):
        walk(lambda _: AsyncServerPolicy(VANILLA, server=4), ranks=4, steps=1)
    with pytest.raises(ParameterError, match="regions"):
        walk(lambda _: AsyncServerPolicy(VANILLA, tier=Tier(lambda size: [0])), ranks=4, steps=1)
    with pytest.raises(ParameterError, match="merge"):
        Tier(lambda size: [0], merge=0)
    with pytest.raises(MismatchError, match="models of this group differ"):
        walk(
            lambda _: AsyncServerPolicy(VANILLA),
            ranks=10,
            steps=2,
            start=lambda rank: line(0.0, width=9 + rank // 9),
        )
