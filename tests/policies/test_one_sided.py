"""Selective averaging over windows, on virtual ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.policy_ranks import Line, Steps, line, numbers, walk

import spawnsim
from spawnsim.errors import ParameterError
from spawnsim.policies import OneSidedSelectiveAveragingPolicy, WindowOptions
from spawnsim.policies.exchange.snapshot_window import HEADER, SnapshotWindow, _common_version
from spawnsim.policies.rules.cadence import Adaptive, Fixed

LAYOUTS = pytest.mark.parametrize("layout", ["flat", "per_parameter"])


def windows(comm: Any, mode: str = "worst_ratio", every: int = 3, layout: str = "flat", **how: Any) -> Any:
    """Return a policy that replaces in place unless told otherwise."""
    settings = {
        "threshold_metric": 0.5,
        "replacement_ratio": 0.25,
        "replacement_mode": mode,
        "cooldown": 0,
        **how,
    }
    options = WindowOptions(layout, **settings.pop("options", {}))
    return OneSidedSelectiveAveragingPolicy(
        settings.pop("builder", None), None, every, windows=options, **settings
    )


def replacements(found: Steps) -> list[tuple[int, int, list[int]]]:
    """Return (iteration, replaced, donors) of all replacements, by time."""
    return [(event["iteration"], event["replaced"], event["donors"]) for event in found.events("replacement")]


@LAYOUTS
@pytest.mark.parametrize(
    ("mode", "strategy", "low", "high"),
    [
        ("worst_ratio", "mean", 2, 2),
        ("threshold", "mean", 2, 2),
        ("worst_ratio", "weighted_mean", 2.01, 2.99),
        ("worst_ratio", "best_only", 3, 3),
        ("worst_ratio", "reset_weights", 42, 42),
    ],
)
def test_the_worst_rank_takes_over_from_its_donors(
    mode: str, strategy: str, low: float, high: float, layout: str
) -> None:
    """In both layouts and both modes by metric, by every strategy; parameters, 0-dim ones and buffers."""
    how = {"donors": 3, "averaging_strategy": strategy, "builder": lambda: line(42.0)}
    found = walk(lambda comm: windows(comm, mode, layout=layout, **how), steps=8)
    (value,) = numbers(found.models[0])
    assert low <= value <= high
    assert replacements(found)[0][1] == 0
    assert strategy != "mean" or replacements(found)[0][2] == [1, 2, 3]
    assert [numbers(found.models[rank]) for rank in (1, 2, 3)] == [{1.0}, {2.0}, {3.0}]


def test_a_life_lasts_one_call_more_than_max_age() -> None:
    """Oracle: with age_range (5, 5) every rank is replaced in calls 6, 12, 18 and so on, though all die at once."""
    found = walk(lambda comm: windows(comm, "age", age_range=(5, 5), donors=1), ranks=10, steps=30)
    for rank in range(10):
        assert [iteration for iteration, who, _ in replacements(found) if who == rank][:4] == [5, 11, 17, 23]


NOISE = np.random.default_rng(5).normal(size=(12, 81))


@pytest.mark.parametrize("slope", [-0.5, 0.0, 0.5])
@pytest.mark.parametrize("noisy", [False, True])
def test_ranks_are_judged_at_one_iteration(slope: float, noisy: bool) -> None:
    """Metrics that rise or fall for all, or only scatter: who is replaced was among the worst of its round, always.

    At first, in lockstep, these are all the worst. Ranks that are replaced fall behind, as reading waits for polls.
    """
    metrics = slope * np.arange(81) + (NOISE if noisy else 0.02 * np.arange(12)[:, None])
    found = walk(
        lambda comm: windows(comm, every=8, donors=2),
        ranks=12,
        steps=81,
        metric=lambda rank, i: metrics[rank, i],
    )
    rounds: dict[int, set[int]] = {}
    for event in found.events("replacement"):
        rounds.setdefault(event["round"], set()).add(event["replaced"])
    worst = {at: set(np.argsort(metrics[:, at])[:3].tolist()) for at in range(8, 81, 8)}
    assert all(replaced <= worst[at] for at, replaced in rounds.items())
    assert [rounds[at] for at in (8, 16)] == [worst[at] for at in (8, 16)]
    assert sum(map(len, rounds.values())) >= 18


def test_best_only_takes_the_best_of_all() -> None:
    """Not the best of a few that were drawn."""
    found = walk(
        lambda comm: windows(comm, averaging_strategy="best_only", threshold_metric=0.5), ranks=12, steps=12,
        metric=lambda rank, step: rank + 0.5 * step,
    )  # fmt: skip
    assert {tuple(donors) for *_, donors in replacements(found)} == {(11,)}


@pytest.mark.parametrize("mode", ["threshold", "age"])
def test_a_poisoned_donor_is_left_out(mode: str) -> None:
    """One donor's weights are NaN though its metric is fine: the others give, and the event names it."""

    def start(rank: int) -> tuple[Line, torch.optim.Optimizer]:
        model, optimizer = line(float(rank))
        model.register_buffer(
            "mask", torch.tensor([-math.inf, 0.0])
        )  # an infinity that all have does no harm
        if rank == 3:
            model.weight.data[7] = math.nan
        return model, optimizer

    found = walk(
        lambda comm: windows(comm, mode, donors=1.0, age_range=(5, 5)), ranks=10, steps=7, start=start
    )
    assert {rank for rank, model in found.models.items() if not torch.isfinite(model.weight).all()} <= {3}
    assert found.events("left_out")
    assert all(event["donors"] == [3] for event in found.events("left_out"))
    assert all(3 not in donors for *_, donors in replacements(found))


def test_ages_differ_between_ranks_and_repeat_with_the_seed() -> None:
    """Each rank draws from its own stream: they do not all die at once, nor differently the next time."""
    lives = [
        [
            walk(lambda comm: windows(comm, "age"), ranks=8, steps=1, seed=4).policies[r].max_age
            for r in range(8)
        ]
        for _ in range(2)
    ]
    assert lives[0] == lives[1]
    assert len(set(lives[0])) > 4


@pytest.mark.parametrize(("size", "count"), [(2, 1), (4, 2), (7, 3), (24, 8)])
def test_half_of_the_group_gives_by_default_but_eight_at_most(size: int, count: int) -> None:
    """K = max(1, n // 2) of the group, capped; a number or share of the candidates can be given instead."""
    found = walk(lambda comm: windows(comm, "age", age_range=(6, 6)), ranks=size, steps=7)
    assert max(len(donors) for _, _, donors in replacements(found)) == count


def test_counts_come_from_the_group() -> None:
    """Two groups of four; donors are members of the own one."""
    found = walk(
        lambda comm: windows(comm, donors=3),
        ranks=8,
        steps=8,
        group=lambda comm: comm.Split(comm.Get_rank() // 4, 0),
    )
    assert {(rank, tuple(donors)) for _, rank, donors in replacements(found)} >= {
        (0, (1, 2, 3)),
        (4, (5, 6, 7)),
    }


def test_nan_ranks_are_replaced_and_never_give() -> None:
    """In mode threshold a NaN metric is behind every threshold."""
    found = walk(
        lambda comm: windows(comm, "threshold", threshold_metric=-9.0, donors=3), steps=6,
        metric=lambda rank, i: math.nan if rank == 2 and i < 4 else float(rank),
    )  # fmt: skip
    assert {rank for _, rank, _ in replacements(found)} == {2}
    assert all(2 not in donors for *_, donors in replacements(found))


def test_cooldown_stops_thrashing() -> None:
    """A rank below the threshold is replaced once per cooldown, not in every call."""
    found = walk(lambda comm: windows(comm, "threshold", cooldown=5), steps=30)
    first, second, third, *_ = [iteration for iteration, *_ in replacements(found)]
    assert (second - first, third - second) == (5, 5)


@pytest.mark.parametrize(
    ("mode", "how", "ranks"),
    [
        ("threshold", {"threshold_metric": math.inf}, 4),
        ("worst_ratio", {"replacement_ratio": 0.0}, 4),
        ("age", {"age_range": (1, 1)}, 1),
    ],
)
def test_never(mode: str, how: dict[str, Any], ranks: int) -> None:
    """An infinite threshold and ratio 0 replace nobody; a rank alone has no donors, and goes on."""
    assert not replacements(walk(lambda comm: windows(comm, mode, **how), ranks=ranks, steps=6))


def test_info_reports_how_often_it_really_checks() -> None:
    """Every call by age and threshold, every `average_every` by ratio."""
    for mode, every in (("age", 1), ("threshold", 1), ("worst_ratio", 7)):
        found = walk(lambda comm, mode=mode: windows(comm, mode, 7), ranks=2, steps=1)
        assert found.infos[0, 0]["replacement_check_every"] == every


def test_ranks_may_differ_in_iterations() -> None:
    """A rank that is ten times slower delays nobody's decisions: nothing here is collective."""
    found = walk(lambda comm: windows(comm), steps=20, pace=lambda rank: 0.1 if rank == 3 else 0.01)
    ends = {rank: found.run.table["time_s"][found.run.table["rank"] == rank].max() for rank in range(4)}
    assert ends[1] < ends[2] * 1.2 < 0.5 < ends[3]
    assert {rank for _, rank, _ in replacements(found)} == {0}


@LAYOUTS
def test_models_of_different_shapes_are_matched_by_name(layout: str) -> None:
    """WindowOptions of different sizes, names that not all have: what fits is taken, the rest stays and is named."""

    def start(rank: int) -> tuple[Line, torch.optim.Optimizer]:
        model, optimizer = line(float(rank), width=3 + rank)
        if rank == 2:
            model.extra = torch.nn.Parameter(torch.ones(4))
        return model, optimizer

    found = walk(lambda comm: windows(comm, layout=layout, donors=3), steps=8, start=start)
    assert found.models[0].logZ.item() == 2
    assert found.models[0].weight.tolist() == [0, 0, 0]
    assert found.policies[0].unmatched == ("parameter/weight",)


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_every_dtype_is_read_as_it_was_written(dtype: torch.dtype, layout: str) -> None:
    """Bytes, not floats: no garbage, also for odd numbers of half-precision values beside float32 buffers."""
    found = walk(
        lambda comm: windows(comm, layout=layout, donors=3), steps=8,
        start=lambda rank: line(float(rank), width=3, dtype=dtype),
    )  # fmt: skip
    assert found.models[0].weight.dtype == dtype
    assert numbers(found.models[0]) == {2.0}


def test_a_model_that_outgrows_its_window_is_kept_back_not_torn() -> None:
    """A larger model after a rebuild is not offered; readers take from others."""
    found = walk(lambda comm: windows(comm, builder=lambda: line(7.0, width=900), donors=3), steps=8)
    assert found.policies[0].stats["num_replacements"] >= 1
    assert all(0 not in donors for *_, donors in replacements(found))


def test_expose_params_false_keeps_a_model_back() -> None:
    """A rank that does not expose its model is nobody's donor."""

    def main(comm: Any) -> None:
        policy = windows(comm, donors=3)
        model, optimizer = line(float(comm.Get_rank()))
        for iteration in range(8):
            with comm.compute(0.01):
                pass
            model, optimizer, _ = policy(
                iteration, model, optimizer, float(comm.Get_rank()), comm, expose_params=comm.Get_rank() != 3
            )
        policy.shutdown()

    run = spawnsim.run(main, ranks=4)
    assert [event["donors"] for event in run.events if event["kind"] == "replacement"][-1] == [1, 2]


def test_a_donor_that_does_not_answer_costs_a_deadline_not_the_run() -> None:
    """Readers go on with those that do; the stopped rank comes back later."""
    found = walk(
        lambda comm: windows(comm, donors=3, options={"deadline": 0.05, "shutdown_timeout_s": 0.2}), steps=40,
        faults="pause:3@0.05s+9s",
    )  # fmt: skip
    late = [
        event for event in found.events("replacement") if 0.2 < event["time_s"] < 9 and event["replaced"] == 0
    ]
    assert late
    assert all(event["donors"] == [1, 2] for event in late)
    assert found.run.table["time_s"][found.run.table["rank"] == 1].max() < 2


SHORT = {"board_timeout_s": 0.05, "deadline": 0.05, "shutdown_timeout_s": 0.2, "holder": 2}


def late(found: Steps, after_s: float) -> list[dict[str, Any]]:
    """Return the replacements after a time."""
    return [event for event in found.events("replacement") if event["time_s"] > after_s]


@pytest.mark.parametrize("fault", ["pause:2@0.05s+9s", "crash:2@0.05s"])
def test_the_next_rank_takes_the_board_over(fault: str) -> None:
    """Its holder is dead, or does not answer: replacements go on by the next one's board, without the holder."""
    found = walk(lambda comm: windows(comm, donors=3, options=SHORT), steps=40, faults=fault)
    times = found.run.table["time_s"]
    assert times[found.run.table["rank"] == 1].max() < 1
    assert {event["replaced"] for event in late(found, 0.3) if event["time_s"] < 1} == {0}
    assert all(2 not in event["donors"] for event in late(found, 0.3) if event["time_s"] < 1)


def test_a_holder_that_was_only_slow_follows_the_others() -> None:
    """When it comes back its board says that they have moved: it goes by their new metrics, not by the old lines."""
    found = walk(
        lambda comm: windows(comm, donors=3, options=SHORT), steps=60, faults="pause:2@0.05s+0.3s",
        metric=lambda rank, step: 5.0 if rank == 2 else rank + (0.0 if step < 20 else 9.0),
    )  # fmt: skip
    assert {event["high"] for event in late(found, 0.36) if event["replaced"] == 2} == {12.0}


def test_a_board_without_holder_and_deputies_ends_replacements_not_training() -> None:
    """Three dead: the others train on, and replace nobody."""
    found = walk(
        lambda comm: windows(comm, donors=3, options=SHORT), ranks=6, steps=40,
        faults="crash:2@0.05s; crash:3@0.05s; crash:4@0.05s",
    )  # fmt: skip
    assert {rank for rank, step in found.infos if step == 39} == {0, 1, 5}
    assert late(found, 0.4) == []


def test_shutdown_never_hangs_and_may_be_called_early_and_twice() -> None:
    """A rank that does not come to free the windows has ended its program: it is not waited for."""
    windows(None).shutdown()

    def main(comm: Any) -> None:
        policy = windows(comm, options={"shutdown_timeout_s": 0.1})
        policy(0, *line(0.0), 1.0, comm)
        if comm.Get_rank():
            policy.shutdown()
            policy.shutdown()

    run = spawnsim.run(main, ranks=3)
    assert run.totals["virtual_seconds"] < 0.1
    assert "rank 0 has ended its program" in run.what["warnings"][0]


def test_windows_are_made_explicitly_or_in_the_first_call() -> None:
    """The constructor makes them when it has a group and a model; `setup` when you say so."""

    def main(comm: Any) -> None:
        model, optimizer = line(float(comm.Get_rank()))
        policy = OneSidedSelectiveAveragingPolicy(None, model, 3, group=comm)
        policy(0, model, optimizer, 1.0)
        policy.shutdown()

    spawnsim.run(main, ranks=2)


def test_a_checkpoint_keeps_the_age() -> None:
    """A resumed life goes on where it stopped."""
    found = walk(lambda comm: windows(comm, "age", age_range=(9, 9)), ranks=2, steps=4)
    state = found.policies[0].state_dict()
    again = walk(lambda comm: _resumed(comm, state), ranks=2, steps=8)
    assert [iteration for iteration, rank, _ in replacements(again) if rank == 0] == [5]


def _resumed(comm: Any, state: dict[str, Any]) -> Any:
    policy = windows(comm, "age", age_range=(9, 9))
    policy.load_state_dict(state)
    return policy


@pytest.mark.parametrize(
    "bad",
    [
        {"replacement_mode": "luck"}, {"averaging_strategy": "median"}, {"age_range": (5, 1)}, {"momentum": -1},
        {"replacement_ratio": 2, "replacement_mode": "worst_ratio"},
        {"threshold_metric": math.nan, "replacement_mode": "threshold"},
        {"mode": "best"}, {"nan_policy": "ignore"}, {"average_every": 0}, {"donors": -1},
    ],
)  # fmt: skip
def test_bad_parameters_are_refused_in_the_constructor(bad: dict[str, Any]) -> None:
    """Before any window is made."""
    with pytest.raises(ParameterError):
        OneSidedSelectiveAveragingPolicy(**{"model_builder": line, "model": None, "average_every": 5, **bad})
    with pytest.raises(ParameterError, match="layout"):
        WindowOptions("rows")


# ------------------------------------------------------------------------------------------------- shelves
def headers(*pairs: tuple[int, int]) -> list[np.ndarray]:
    """Return window headers with (begun, done)."""
    made = []
    for begun, done in pairs:
        header = np.zeros(1, HEADER)
        header["begun"], header["done"], header["count"] = begun, done, 2
        made.append(header)
    return made


@pytest.mark.parametrize(
    ("pairs", "version"),
    [
        ([(0, 0)], 0), ([(1, 0)], 0), ([(1, 1)], 1), ([(2, 1)], 1), ([(3, 2), (2, 2)], 2), ([(3, 3), (2, 1)], -1),
        ([], 0),
    ],
)  # fmt: skip
def test_the_version_that_all_windows_of_a_donor_hold(pairs: list[tuple[int, int]], version: int) -> None:
    """The slot before the newest is whole; further apart, the donor is between versions."""
    assert _common_version(headers(*pairs)) == version


def test_a_read_that_was_overtaken_is_repeated() -> None:
    """The donor publishes twice while its snapshot is on the way: the reader notices, and takes a whole one."""
    seen: list[tuple[int, set[float]]] = []
    torn: list[int] = []

    def main(comm: Any) -> None:
        live = {"a": torch.zeros(200_000), "b": torch.zeros(3)}
        snapshots = SnapshotWindow(comm, live, Fixed(9.0))
        if comm.Get_rank() == 0:
            for iteration in range(1, 400):
                for tensor in live.values():
                    tensor.fill_(iteration)
                snapshots.publish(live, iteration)
                comm.clock.sleep(2e-5)
            return
        comm.clock.sleep(1e-3)
        for _ in range(5):
            found = snapshots.take([0]).get(0)
            if found is not None:
                seen.append((found.iteration, {float(n) for t in found.tensors.values() for n in t.unique()}))
        torn.append(snapshots.counts["torn"])

    spawnsim.run(main, ranks=2, platform="ethernet-10g")
    assert torn[0] > 0
    assert all(numbers_ == {iteration} for iteration, numbers_ in seen)


def test_a_reader_waits_a_poll_not_the_donors_whole_computation() -> None:
    """Donors that poll every 10 ms answer within two rounds of polls, though each computes for a second in all."""
    waits: list[float] = []

    def main(comm: Any) -> None:
        snapshots = SnapshotWindow(comm, {"a": torch.zeros(9)}, Adaptive())
        snapshots.publish({"a": torch.ones(9)}, 0)
        for batch in range(100):
            with comm.compute(0.01):
                pass
            if comm.Get_rank() == 0 and batch == 50:
                before_s = comm.clock.now()
                assert len(snapshots.take([1, 2])) == 2
                waits.append(comm.clock.now() - before_s)

    spawnsim.run(main, ranks=3)
    assert 0.01 < waits[0] < 0.05


def test_models_are_laid_out_at_the_cadence_not_in_every_call() -> None:
    """Between publications a call copies nothing; a replaced rank publishes at once."""
    found = walk(lambda comm: windows(comm, "age", 4, age_range=(900, 900)), ranks=2, steps=10)
    assert [i for i in range(10) if found.infos[0, i]["bytes"]] == [0, 4, 8]


def test_the_originals_counters_mean_something() -> None:
    """`agents_killed`, `age` and `max_age` follow the replacements."""
    found = walk(lambda comm: windows(comm, "age", age_range=(3, 3)), steps=12)
    policy = found.policies[0]
    assert policy.agents_killed == policy.num_replacements >= 1
    assert (policy.max_age, policy.total_iterations) == (3, 12)
    assert policy.is_agent_dying(0.0, 0.5)
    assert not policy.is_agent_dying(1.0, 0.5)
    assert not windows(None, "age").is_agent_dying(1.0, 0.5, 1)  # no life has begun
    with pytest.raises(ParameterError, match="check_policy"):
        policy.is_agent_dying(1.0, 0.5, 2)


def test_a_policy_has_few_attributes_of_its_own() -> None:
    """CPython keeps up to 29 in 0.3 kB, more in 1.6 kB, which 100,000 virtual ranks feel; also after a replacement."""
    found = walk(lambda comm: windows(comm, donors=3), steps=12)
    assert found.policies[0].num_replacements
    assert max(len(vars(policy)) for policy in found.policies.values()) < 32
