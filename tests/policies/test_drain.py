"""`drain`: a policy that goes on after a checkpoint is in the state in which a new one takes the checkpoint up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import spawnsim
from spawnsim.errors import UsageError
from spawnsim.policies import (
    AsyncModelAveragePolicy,
    AsyncSelectiveAveragingPolicy,
    AsyncServerPolicy,
    AverageAllPolicy,
    DecentralizedAveragingPolicy,
    DecoupledDiLoCoPolicy,
    EASGDPolicy,
    EDiTPolicy,
    GossipPolicy,
    NoLoCoPolicy,
    OneRoundLatePolicy,
    OneSidedSelectiveAveragingPolicy,
    OuterOptimizerPolicy,
    PopulationBasedTrainingPolicy,
    ServerOptions,
    ServerRule,
    SPARTAPolicy,
    SpawnPolicy,
    StreamingDiLoCoPolicy,
    Tier,
    TopK,
    WAGMAPolicy,
    graphs,
    replay,
)

RANKS, ITERATIONS, CUT = 12, 24, 12


def build(comm: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model above the eager threshold, and an optimizer with state."""
    model = torch.nn.Linear(40, 30)  # above the eager threshold
    with torch.no_grad():
        model.weight.copy_(torch.tensor(comm.rng("init").normal(size=(30, 40))))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


POLICIES: dict[str, Callable[[Any], SpawnPolicy]] = {
    "all": lambda comm: AverageAllPolicy(4),
    "selective": lambda comm: AsyncSelectiveAveragingPolicy(None, 3, 0.3, cooldown=0),
    "selective by age": lambda comm: AsyncSelectiveAveragingPolicy(
        None, 3, replacement_mode="age", age_range=(4, 7)
    ),
    "one-sided": lambda comm: OneSidedSelectiveAveragingPolicy(
        None, None, 3, replacement_ratio=0.3, replacement_mode="worst_ratio"
    ),
    "one-sided by age": lambda comm: OneSidedSelectiveAveragingPolicy(None, None, 3, age_range=(4, 7)),
    "gossip": lambda comm: GossipPolicy(3, graph=graphs.random_pairs, global_every=3),
    "wagma": lambda comm: WAGMAPolicy(1, group_size=4, sync_every=3),
    "push-sum": lambda comm: GossipPolicy(1, graph=graphs.exponential, push_sum=True, delay=2),
    "server": lambda comm: AsyncServerPolicy(
        ServerOptions(ServerRule(0.7, 0.9, 3, delayed=True)), steps=5, dylu=True
    ),
    "tiers": lambda comm: AsyncServerPolicy(
        ServerOptions(ServerRule(0.7, 0.9)),
        steps=2,
        tier=Tier(lambda size: [rank % 2 for rank in range(size)], every=5),
    ),
    "population": lambda comm: PopulationBasedTrainingPolicy(3),
    "groups": lambda comm: DecentralizedAveragingPolicy(3, target_group_size=4, load_state=True),
    "groups beside": lambda comm: DecentralizedAveragingPolicy(3, target_group_size=4, asynchronous=True),
    "clock": lambda comm: AsyncModelAveragePolicy("all", 20),
    "pairs": lambda comm: AsyncModelAveragePolicy("random", 20, warmup_steps=15),
    "diloco": lambda comm: OuterOptimizerPolicy.diloco(4),
    "decoupled": lambda comm: DecoupledDiLoCoPolicy(4, fragments=2),
    "streaming": lambda comm: StreamingDiLoCoPolicy(4, fragments=2, fragmenter="greedy"),
    "sparseloco": lambda comm: OuterOptimizerPolicy.sparseloco(3, compression=TopK(4, 1)),
    "co2": lambda comm: OneRoundLatePolicy.co2(3),
    "eager": lambda comm: OneRoundLatePolicy.eager(3),
    "noloco": lambda comm: NoLoCoPolicy(3),
    "easgd": lambda comm: EASGDPolicy(3),
    "edit": lambda comm: EDiTPolicy(3),
    "edit by the clock": lambda comm: EDiTPolicy(every_s=0.03),
    "sparta": lambda comm: SPARTAPolicy(3),
    "background": lambda comm: AsyncModelAveragePolicy("ring", 20, background=True),
}


def trained(comm: Any, make: Callable[[Any], SpawnPolicy], *, anew: bool) -> None:
    """Train with a drain in the middle; `anew`: another object takes up the state of the first."""
    model, optimizer = build(comm)
    policy = make(comm)
    for iteration in range(ITERATIONS):
        with comm.compute(0.01):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.01 * (comm.rank + 1))
            optimizer.step()
        metric = float(comm.rng("metric").normal())
        model, optimizer, info = policy(iteration, model, optimizer, local_metric=metric, group=comm)
        comm.record(iteration=iteration, weight=next(model.parameters()).sum().item(), **info)
        if iteration == CUT:
            policy.drain()
            comm.Barrier()
            state = policy.state_dict()
            if anew:
                policy = make(comm)
                policy.load_state_dict(state)
            assert str(policy.state_dict()) == str(state)
    comm.record(
        **{f"end/{name}": value for name, value in policy.state_dict().items() if name == "num_averagings"}
    )
    policy.shutdown()


@pytest.mark.parametrize("name", POLICIES)
def test_a_drained_policy_and_one_that_takes_up_its_state_go_on_alike(name: str) -> None:
    """To the digest: nothing is left in the old object that its state does not tell."""
    runs = [
        spawnsim.run(
            lambda comm, anew=anew: trained(comm, POLICIES[name], anew=anew),
            ranks=RANKS,
            stragglers="lognormal:0.3",
        )
        for anew in (False, True)
    ]
    assert runs[0].totals["digest"] == runs[1].totals["digest"]
    acted = runs[0].table["averaged_this_iteration"].astype(bool) | runs[0].table["is_replaced"].astype(bool)
    after = runs[0].table["iteration"] > CUT
    assert acted[after].any() and acted[~after].any(), "it acts before the cut and after it"
    kinds = {event["kind"] for event in runs[0].events}
    assert not kinds & {"warning", "left_out", "refused_messages"}, "a drain is no end, and loses nothing"
    assert "loaded_from_peer" not in runs[0].table, "who has its state downloads none"


def test_a_replay_refuses_to_be_cut() -> None:
    """What it has given is taken at later iterations."""
    with pytest.raises(UsageError, match="replay"):
        replay([]).drain()


def activity(comm: Any, name: str, every: int) -> None:
    """Train in step, with a drain every few iterations, or without (0)."""
    model, optimizer = build(comm)
    policy = POLICIES[name](comm)
    for iteration in range(48):
        with comm.compute(0.01):
            pass
        model, optimizer, info = policy(iteration, model, optimizer, local_metric=0.0, group=comm)
        comm.record(iteration=iteration, staleness=info.get("staleness", -1))
        if every and (iteration + 1) % every == 0:
            policy.drain()
            comm.Barrier()


def test_who_goes_on_after_a_checkpoint_counts_on_all_others() -> None:
    """Decoupled learners merge the same, whether they are drained meanwhile or not: by one rank, of all, as late."""
    bare, drained = (
        spawnsim.run(activity, ranks=RANKS, parameters={"name": "decoupled", "every": every})
        for every in (0, 11)
    )
    merges, others = (
        [
            (event["rank"], event["fragment"], event["learners"])
            for event in run.events
            if event["kind"] == "merge"
        ]
        for run in (bare, drained)
    )
    assert len(merges) > 10
    assert others == merges
    assert {(rank, len(learners)) for rank, _, learners in others} == {(0, RANKS)}
    assert {*drained.table["staleness"]} == {*bare.table["staleness"]}


@pytest.mark.parametrize("name", ["clock", "pairs", "background"])
def test_a_drain_does_not_wait_for_who_has_left(name: str) -> None:
    """Whatever is under way ends at once: none waits for the answer of a rank that was drained before it."""
    run = spawnsim.run(
        activity, ranks=RANKS, stragglers="lognormal:0.1", parameters={"name": name, "every": 6}, seed=3
    )
    assert run.totals["virtual_seconds"] < 1.5, "of which training takes 0.6; a wait would last 5"


ALIGNED: dict[str, Callable[[], SpawnPolicy]] = {
    "selective": lambda: AsyncSelectiveAveragingPolicy(None, 10, 0.3),
    "selective after a rest": lambda: AsyncSelectiveAveragingPolicy(None, 10, 0.3, cooldown=10),
    "population": lambda: PopulationBasedTrainingPolicy(10),
    "one-sided": lambda: OneSidedSelectiveAveragingPolicy(
        None, None, 10, replacement_ratio=0.3, replacement_mode="worst_ratio"
    ),
}
LATE: dict[str, Callable[[], SpawnPolicy]] = {
    "streaming": lambda: StreamingDiLoCoPolicy(20, fragments=2, compression=None),
    "streaming in four bits": lambda: StreamingDiLoCoPolicy(20, fragments=2, overlap=3),
    "eager": lambda: OneRoundLatePolicy.eager(10),
    "eager fragments": lambda: OneRoundLatePolicy.eager(10, fragments=2),
    "co2": lambda: OneRoundLatePolicy.co2(10),
}


def aligned(comm: Any, name: str, after: tuple[int, ...]) -> None:
    """Train; drain behind iterations whose number ends so: at 0, all decide, or send what they have learnt."""
    model, optimizer = build(comm)
    policy = {**ALIGNED, **LATE}[name]()
    for iteration in range(100):
        with comm.compute(0.01):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.001 * (comm.rank + 1))
            optimizer.step()
        metric = float(comm.rng("metric").normal())
        model, optimizer, _ = policy(iteration, model, optimizer, local_metric=metric, group=comm)
        if iteration % 10 in after:
            policy.drain()
            comm.Barrier()
    comm.record(weights=next(model.parameters()).detach().double().sum().item())
    policy.shutdown()


@pytest.mark.parametrize("after", [(0,), (1,), (2,)])
@pytest.mark.parametrize("name", ALIGNED)
def test_a_checkpoint_right_behind_a_decision_costs_no_replacement(name: str, after: tuple[int, ...]) -> None:
    """The round that it has cut is held again: else a program with a checkpoint at each would have none."""
    bare, cut = (
        sum(event["kind"] == "replacement" for event in run.events)
        for run in (
            spawnsim.run(
                aligned, ranks=RANKS, stragglers="lognormal:0.1", parameters={"name": name, "after": each}
            )
            for each in ((), after)
        )
    )
    assert bare > 10
    assert 0.8 * bare <= cut <= 1.3 * bare


@pytest.mark.parametrize("name", LATE)
def test_a_mean_that_is_under_way_at_a_checkpoint_is_taken(name: str) -> None:
    """At its iteration, as without a checkpoint: the weights are the same to the last bit."""
    bare, cut = (
        spawnsim.run(aligned, ranks=RANKS, parameters={"name": name, "after": each}).table["weights"][-1]
        for each in ((), (0, 4))
    )
    assert cut == bare
