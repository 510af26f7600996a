"""Asynchronous selective averaging, on virtual ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.policy_ranks import Line, Steps, line, numbers, walk

import spawnsim
from spawnsim.errors import ParameterError
from spawnsim.policies import (
    AsyncSelectiveAveragingPolicy,
    AsyncServerPolicy,
    AverageAllPolicy,
    Best,
    ExchangeOptions,
    replay,
)


def selective(comm: Any, strategy: str = "mean", every: int = 3, **how: Any) -> AsyncSelectiveAveragingPolicy:
    """Return a policy that replaces one of four ranks every third iteration, in place unless told otherwise."""
    how = {"cooldown": 0, **how}
    return AsyncSelectiveAveragingPolicy(how.pop("builder", None), every, 0.25, strategy, **how)


def replacements(found: Steps) -> list[tuple[int, list[int]]]:
    """Return (replaced, donors) of all replacements, by time."""
    return [(event["replaced"], event["donors"]) for event in found.events("replacement")]


# --------------------------------------------------------------------------------------------- strategies
PARTS, SECOND, NONE_SUCH = (
    ExchangeOptions(part_nbytes=16), ExchangeOptions(coordinator=2), ExchangeOptions(coordinator=9),
)  # fmt: skip


@pytest.mark.parametrize(
    ("how", "replaced", "donors", "value", "decided_by"),
    [
        ({}, 0, [1, 2, 3], 2.0, 0),
        ({"strategy": "best_only"}, 0, [3], 3.0, 0),
        ({"strategy": "reset_weights", "builder": lambda: line(42.0)}, 0, [], 42.0, 0),
        ({"mode": "min"}, 3, [0, 1, 2], 1.0, 0),
        ({"replacement_mode": "threshold", "threshold": 0.5}, 0, [1, 2, 3], 2.0, 0),
        ({"selection": lambda reports: frozenset({1}), "donors": Best(2)}, 1, [2, 3], 2.5, 0),
        ({"wiring": PARTS}, 0, [1, 2, 3], 2.0, 0),
        ({"wiring": SECOND}, 0, [1, 2, 3], 2.0, 2),
        ({"wiring": NONE_SUCH}, 0, [1, 2, 3], 2.0, 3),  # recoveries leave groups that have no such rank
    ],
)
def test_who_is_replaced_by_whom(
    how: dict[str, Any], replaced: int, donors: list[int], value: float, decided_by: int
) -> None:
    """The worst of four goes on from what its donors gave, all tensors alike; the others keep theirs."""
    found = walk(lambda comm: selective(comm, **how), steps=12)
    assert replacements(found)[0] == (replaced, donors)
    assert {rank: numbers(model) for rank, model in found.models.items()} == {
        rank: {value if rank == replaced else float(rank)} for rank in range(4)
    }
    assert {event["rank"] for event in found.events("decision")} == {decided_by}


@pytest.mark.parametrize(("donors", "given"), [(None, {(31,)}), (3, None)])
def test_best_only_copies_the_best_of_any_number(
    donors: int | None, given: set[tuple[int, ...]] | None
) -> None:
    """By default the best of all gives to all that are replaced; a number of donors draws that many first."""
    found = walk(lambda comm: selective(comm, "best_only", donors=donors), ranks=32, steps=12)
    taken = [(replaced, tuple(each)) for replaced, each in replacements(found)]
    assert {replaced for replaced, _ in taken} == set(range(8))
    assert all(len(each) == 1 for _, each in taken)
    assert given is None or {each for _, each in taken} == given
    assert given is not None or len({each for _, each in taken}) > 1


def test_the_mean_of_eight_by_default_and_of_all_on_demand() -> None:
    """A share of 1.0 is all survivors, as in the original."""
    for donors, count in ((None, 8), (1.0, 9)):
        found = walk(lambda comm, donors=donors: selective(comm, donors=donors), ranks=12, steps=12)
        assert {len(each) for _, each in replacements(found)} == {count}
        if count == 9:
            assert {frozenset(numbers(found.models[rank])) for rank in range(3)} == {frozenset({7.0})}


def test_a_rank_that_runs_away_is_healed() -> None:
    """Its weights grow tenfold a step: by default it takes over what the donors gave, and nothing of its own steps."""
    seen: dict[str, list[float]] = {}

    def main(comm: Any, rule: dict[str, Any], name: str) -> None:
        policy = selective(comm, builder=lambda: line(0.0), **rule)
        model, optimizer = line(1.0)
        for iteration in range(24):
            with comm.compute(0.01), torch.no_grad():
                if comm.Get_rank() == 0:
                    model.weight.mul_(10.0)
            metric = -float(model.weight.detach().abs().max())
            model, optimizer, info = policy(iteration, model, optimizer, metric, comm)
            if info["is_replaced"]:
                seen.setdefault(name, []).append(float(model.weight.detach().abs().max()))
        policy.shutdown()

    for name, rule in (("default", {}), ("delta", {"rule": "delta"})):
        spawnsim.run(lambda comm, rule=rule, name=name: main(comm, rule, name), ranks=10)
    assert set(seen["default"]) == {1.0}
    assert max(seen["delta"]) > 1e6  # what "delta" means: the steps since it asked come back


def test_weighted_mean_leans_to_the_better_donors() -> None:
    """Between the plain mean and the best."""
    (value,) = numbers(walk(lambda comm: selective(comm, "weighted_mean"), steps=12).models[0])
    assert 2.0 < value < 3.0


def test_ages_run_out() -> None:
    """Each rank goes when its own age has, whatever its metric."""
    found = walk(lambda comm: selective(comm, replacement_mode="age", age_range=(4, 8)), steps=16)
    assert len({replaced for replaced, _ in replacements(found)}) > 1


# ------------------------------------------------------------------------------------------------ promises
def test_nobody_waits_for_anybody() -> None:
    """Ten iterations of 10 ms take 100 ms on every rank, however slow another one is."""
    found = walk(selective, steps=10, pace=lambda rank: 0.05 if rank == 2 else 0.01)
    ends = {rank: found.run.table["time_s"][found.run.table["rank"] == rank].max() for rank in range(4)}
    assert all(ends[rank] == pytest.approx(0.1, abs=2e-3) for rank in (0, 1, 3))


@pytest.mark.parametrize("dead", [3, 0])
def test_a_dead_rank_costs_only_itself(dead: int) -> None:
    """The others go on replacing, by quorum or deadline; the next rank takes over from a dead coordinator."""
    found = walk(
        lambda comm: selective(comm, wiring=ExchangeOptions(deadline=0.02)), steps=40, faults=f"crash:{dead}@0.05s",
        metric=lambda rank, iteration: float(rank + iteration % 2),
    )  # fmt: skip
    late = [event for event in found.events("decision") if event["time_s"] > 0.2 and event["replaced"]]
    assert {event["rank"] for event in late} == {0 if dead else 1}
    assert all(dead not in event["donors"] for event in found.events("replacement") if event["time_s"] > 0.2)
    assert found.infos[0 if dead else 1, 39]["num_replacements_so_far"] > 0


def test_a_coordinator_that_is_done_decides_for_those_who_are_not() -> None:
    """Rank 0 trains five times as fast as the others; their replacements go on until they have finished."""
    found = walk(selective, steps=40, pace=lambda rank: 0.01 if rank == 0 else 0.05)
    assert max(event["time_s"] for event in found.events("replacement")) > 1.5
    assert found.run.totals["virtual_seconds"] < 2.2


def test_a_slow_rank_is_dropped_from_rounds_not_waited_for() -> None:
    """Rounds are decided without the straggler; its late reports are counted."""
    found = walk(
        lambda comm: selective(comm, wiring=ExchangeOptions(deadline=0.02)), steps=40,
        pace=lambda rank: 0.2 if rank == 3 else 0.01,
    )  # fmt: skip
    decided = [
        event for event in found.events("decision") if event["time_s"] < 0.39
    ]  # the others end at 0.4 s
    assert len(decided) >= 10
    assert {event["reported"] for event in decided} == {3}


def test_counts_and_ranks_come_from_the_group() -> None:
    """Two groups of four each replace one of theirs; events name ranks of the whole run."""
    found = walk(selective, ranks=8, steps=12, group=lambda comm: comm.Split(comm.Get_rank() // 4, 0))
    assert sorted(replacements(found))[:1] + sorted(replacements(found))[-1:] == [
        (0, [1, 2, 3]),
        (4, [5, 6, 7]),
    ]


@pytest.mark.parametrize("strategy", ["mean", "best_only"])
def test_a_poisoned_donor_is_left_out(strategy: str) -> None:
    """The best rank's weights are NaN, though its metric is not: nobody takes them, and an event says so.

    An infinity that all ranks have in one place, as in a mask, does no harm. With guard=False the NaN spreads.
    """

    def start(rank: int) -> tuple[Line, torch.optim.Optimizer]:
        model, optimizer = line(float(rank))
        model.register_buffer("mask", torch.tensor([-math.inf, 0.0]))
        if rank == 11:
            model.weight.data[7] = math.nan
        return model, optimizer

    def poisoned(guard: bool) -> tuple[set[int], Steps]:
        found = walk(
            lambda comm: selective(comm, strategy, donors=None if strategy == "best_only" else 1.0, guard=guard),
            ranks=12, steps=16, start=start,
        )  # fmt: skip
        return {r for r, model in found.models.items() if not torch.isfinite(model.weight).all()}, found

    bad, found = poisoned(guard=True)
    assert bad == {11}
    assert all(event["donors"] == [11] for event in found.events("left_out"))
    assert all(11 not in donors for _, donors in replacements(found))
    assert bool(replacements(found)) == (strategy == "mean")
    assert poisoned(guard=False)[0] > {11}


def test_a_nan_rank_is_replaced_and_never_gives() -> None:
    """NaN is worst; it triggers nothing else and reaches nobody."""
    found = walk(selective, steps=12, metric=lambda rank, i: math.nan if rank == 2 and i < 5 else float(rank))
    first = found.events("replacement")[0]
    assert (first["replaced"], 2 in first["donors"]) == (2, False)
    assert all(math.isfinite(number) for model in found.models.values() for number in numbers(model))


def test_ratio_0_and_an_infinite_threshold_replace_nobody() -> None:
    """Both mean never."""
    for how in ({"threshold": math.inf}, {"replacement_mode": "threshold", "threshold": math.inf}):
        assert not replacements(walk(lambda comm, how=how: selective(comm, **how), steps=12))
    found = walk(lambda comm: AsyncSelectiveAveragingPolicy(None, 3, 0.0, cooldown=0), steps=12)
    assert not replacements(found)


def test_ratio_1_leaves_a_survivor() -> None:
    """The best rank stays and gives to all others."""
    found = walk(lambda comm: AsyncSelectiveAveragingPolicy(None, 3, 1.0, cooldown=0), steps=12)
    assert {replaced for replaced, _ in replacements(found)} == {0, 1, 2}
    assert all(donors == [3] for _, donors in replacements(found))


def test_a_single_rank_goes_on_alone() -> None:
    """A group of one replaces nobody and fails nowhere."""
    assert not replacements(walk(selective, ranks=1, steps=12))


def rounds_that_replace(**how: Any) -> list[int]:
    """Return the rounds in which somebody is replaced, of those at 10, 20, …, 220."""
    found = walk(lambda comm: AsyncSelectiveAveragingPolicy(None, 10, **how), steps=225, ranks=2)
    return [event["round"] for event in found.events("decision") if event["replaced"]]


@pytest.mark.parametrize(
    ("how", "rounds"),
    [
        ({"threshold": 9.0}, [10, 210]),
        ({}, [*range(10, 221, 10)]),
        ({"threshold": 9.0, "cooldown": 80}, [10, 90, 170]),
        ({"cooldown": 80}, [10, 90, 170]),
        ({"cooldown": 200}, [10, 210]),
    ],
)
def test_cooldowns(how: dict[str, Any], rounds: list[int]) -> None:
    """By default the seeds': 200 iterations where a threshold is given, else none. One that is given always holds."""
    assert rounds_that_replace(**how) == rounds


def test_donors_give_their_current_model_also_after_a_rebuild() -> None:
    """Rank 0 is rebuilt with 3's weights; later it gives those, not the discarded ones."""
    found = walk(
        lambda comm: selective(comm, "best_only", builder=lambda: line(-1.0)),
        ranks=2, steps=20, start=lambda rank: line(5.0 * rank),
        metric=lambda rank, iteration: float(rank if iteration < 5 else 1 - rank),
    )  # fmt: skip
    assert replacements(found)[0] == (0, [1])
    assert (1, [0]) in replacements(found)
    assert [numbers(model) for model in found.models.values()] == [{5.0}, {5.0}]


def test_the_delta_rule_keeps_steps_taken_meanwhile() -> None:
    """Own progress between asking and taking over is added to what the donors gave."""
    taken: list[tuple[float, float, int]] = []

    def main(comm: Any) -> None:
        policy = AsyncSelectiveAveragingPolicy(None, 3, 0.25, "best_only", cooldown=0, rule="delta")
        model, optimizer = line(10.0 * comm.Get_rank())
        for iteration in range(8):
            with comm.compute(0.01), torch.no_grad():
                model.weight += 1.0
            before = model.weight[0].item()
            model, optimizer, info = policy(iteration, model, optimizer, float(comm.Get_rank()), comm)
            if info["is_replaced"]:
                taken.append((before, model.weight[0].item(), iteration))
        policy.shutdown()

    run = spawnsim.run(main, ranks=4, seed=1)
    (event,) = [event for event in run.events if event["kind"] == "replacement"]
    (_, after, iteration), version = taken[0], event["versions"][0]
    assert iteration > event["asked"]
    assert after == (30 + version + 1) + (iteration - event["asked"])


def test_models_of_different_shapes_are_matched_by_name() -> None:
    """What fits is taken, what does not stays, and is named."""
    found = walk(
        lambda comm: selective(comm, "best_only"),
        steps=12,
        start=lambda rank: line(float(rank), width=3 + rank),
    )
    assert found.models[0].logZ.item() == 3
    assert found.models[0].weight.tolist() == [0, 0, 0]
    assert found.policies[0].unmatched == ("parameter/weight",)


def test_without_a_metric_a_rank_takes_no_part() -> None:
    """It is neither replaced nor a donor."""
    found = walk(
        lambda comm: selective(comm, wiring=ExchangeOptions(deadline=0.06)), steps=24,
        metric=lambda rank, _: None if rank == 0 else float(rank),
    )  # fmt: skip
    assert replacements(found)
    assert all(0 not in (replaced, *donors) for replaced, donors in replacements(found))


def test_a_metric_may_be_a_tensor_with_a_gradient() -> None:
    """The example's `-loss` needs no detach."""
    found = walk(selective, steps=12, metric=lambda rank, _: torch.tensor(float(rank), requires_grad=True))
    assert replacements(found)


# --------------------------------------------------------------------------------------------- record, end
def test_info_tells_what_happened() -> None:
    """Donors, staleness, bytes, wait and the metrics' range, in the call of the replacement and there alone."""
    timing: dict[str, list[float]] = {}
    found = walk(lambda comm: selective(comm, timing=timing if comm.Get_rank() == 0 else None), steps=12)
    assert timing["wait"][0] > 0
    ((_, info),) = [(key, info) for key, info in found.infos.items() if info["is_replaced"]]
    assert (info["donors"], info["global_min_metric"], info["global_max_metric"]) == (3, 0.0, 3.0)
    assert info["bytes"] > 3 * 24
    assert info["wait_s"] > 0
    assert all(isinstance(value, (int, float, str)) for value in info.values())
    assert found.infos[0, 7]["num_replacements_so_far"] == 1


def test_shutdown_may_come_first_twice_and_early() -> None:
    """Before any call, with a replacement open, and again."""
    selective(None).shutdown()
    found = walk(selective, steps=6)
    assert found.run.totals["virtual_seconds"] < 0.2


def leaving_s(**how: Any) -> dict[int, float]:
    """Return the virtual seconds that each surviving rank spends in `shutdown`."""
    spent: dict[int, float] = {}

    def main(comm: Any) -> None:
        wiring = ExchangeOptions(**{"deadline": 0.05, **how.get("wiring", {})})
        policy = AsyncSelectiveAveragingPolicy(None, 2, 0.3, cooldown=0, wiring=wiring)
        model, optimizer = line(float(comm.Get_rank()))
        for iteration in range(20):
            with comm.compute(0.01):
                pass
            metric = float((comm.Get_rank() * 7 + iteration) % 5)
            model, optimizer, _ = policy(iteration, model, optimizer, metric, comm)
        began_s = comm.clock.now()
        policy.shutdown()
        spent[comm.Get_rank()] = comm.clock.now() - began_s

    spawnsim.run(main, ranks=how.get("ranks", 10), faults=how["faults"], seed=how.get("seed", 3))
    return spent


@pytest.mark.parametrize("seed", [0, 1])
def test_shutdown_ends_in_time_whatever_was_lost(seed: int) -> None:
    """Half of all messages vanish, large ones too, whose senders and receivers would wait for ever."""
    spent = leaving_s(faults="drop:*>*@0s+0.15s,0.5", wiring={"shutdown_timeout_s": 0.3}, seed=seed)
    assert len(spent) == 10
    assert max(spent.values()) < 0.6


@pytest.mark.parametrize("dead", [0, 3])
@pytest.mark.parametrize("at_s", [0.0, 0.1, 0.199])
def test_a_known_death_costs_no_shutdown_its_time(dead: int, at_s: float) -> None:
    """The coordinating rank or another, at the start, in the middle or near the end: not the 30 s of the default."""
    spent = leaving_s(faults=f"crash:{dead}@{at_s}s")
    assert sorted(spent) == sorted(set(range(10)) - {dead})
    assert max(spent.values()) < 0.2


def test_a_checkpoint_keeps_counts_cooldown_and_age() -> None:
    """A resumed coordinator does not replace within the old cooldown."""
    found = walk(
        lambda comm: selective(comm, cooldown=50, replacement_mode="age", age_range=(1, 1)), steps=12
    )
    state = found.policies[0].state_dict()
    assert state["last_trigger"] == 3
    again = selective(None, cooldown=50)
    again.load_state_dict(state)
    assert again.state_dict() == state


def test_the_same_seed_takes_the_same_decisions() -> None:
    """Runs are reproducible; another seed draws other donors."""
    how = {"ranks": 16, "steps": 12, "stragglers": "lognormal:0.3"}
    policy = lambda comm: selective(comm, donors=3)  # noqa: E731
    one, two, other = (walk(policy, seed=seed, **how).run for seed in (1, 1, 2))
    assert one.totals["digest"] == two.totals["digest"] != other.totals["digest"]


def test_a_replay_takes_the_same_decisions_elsewhere() -> None:
    """On another platform with other stragglers: who, when, from whom, which version, how much."""
    names = ("iteration", "round", "replaced", "donors", "weights", "versions", "asked")
    one = walk(
        lambda comm: selective(comm, rule="delta", donors=2), ranks=8, steps=20, stragglers="lognormal:0.5"
    )
    two = walk(lambda _: replay(one.run.events), ranks=8, steps=20, stragglers="lognormal:0.1", seed=3)
    taken = [
        sorted([event[name] for name in names] for event in found.events("replacement"))
        for found in (one, two)
    ]
    assert taken[0] == taken[1] != []
    for rank in range(8):
        assert torch.equal(one.models[rank].weight, two.models[rank].weight)


@pytest.mark.parametrize(
    "bad",
    [
        {"replacement_ratio": 1.5}, {"replacement_ratio": -0.1}, {"averaging_strategy": "median"}, {"momentum": 2.0},
        {"cooldown": -1}, {"mode": "best"}, {"nan_policy": "ignore"}, {"replacement_mode": "luck"},
        {"replacement_mode": "threshold"}, {"threshold": math.nan}, {"age_range": (5, 2)}, {"donors": 0},
        {"average_every": 0}, {"rule": "add"}, {"averaging_strategy": "reset_weights"}, {"poll_interval_s": 0.0},
    ],
)  # fmt: skip
def test_bad_parameters_are_refused_in_the_constructor(bad: dict[str, Any]) -> None:
    """Before any run, with a message that names the parameter."""
    with pytest.raises(ParameterError):
        AsyncSelectiveAveragingPolicy(**{"model_builder": None, "average_every": 5, **bad})


def call(*args: Any, **how: Any) -> Any:
    """Call a policy of two ranks, on both."""
    return spawnsim.run(lambda comm: AverageAllPolicy(1)(*args, group=comm, **how), ranks=2)


def test_a_call_that_makes_no_sense_is_refused() -> None:
    """Arguments in another order; metrics that are no number; a model for its builder; steps for a server's options."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ParameterError, match=r"model is a SGD: call policy\(iteration, model"):
        call(model, optimizer, 3)
    for metric in (torch.ones(3), "good", [1.0]):
        with pytest.raises(ParameterError, match=f"local_metric is a {type(metric).__name__}.*one number"):
            call(3, model, optimizer, local_metric=metric)
    with pytest.raises(ParameterError, match="model_builder is a tuple: give a function"):
        AsyncSelectiveAveragingPolicy((model, optimizer), 5)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match=r"options=5: give ServerOptions.*steps="):
        AsyncServerPolicy(5)  # type: ignore[arg-type]


def test_unknown_parameters_are_refused() -> None:
    """A misspelt name is an error, not a default."""
    with pytest.raises(TypeError, match="replacment"):
        AsyncSelectiveAveragingPolicy(None, 5, replacment_ratio=0.1)
