"""The seeds' names, constructors, calls and defaults."""

from __future__ import annotations

import abc
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support.policy_ranks import line, numbers

import spawnsim
from spawnsim.policies import DecentralizedAverager
from spawnsim.torchgfn import spawn_policy

SIGNATURES = {
    "AverageAllPolicy": "average_every",
    "AverageAllPolicympi4py": "average_every",
    "AsyncSelectiveAveragingPolicy": (
        "model_builder, average_every, replacement_ratio=0.2, averaging_strategy='mean', momentum=0.0, "
        "poll_interval_s=0.01, threshold=None, cooldown=None, timing=None"
    ),
    "AsyncSelectiveAveragingPolicympi4pyFast": (
        "model_builder, model, average_every, threshold_metric=0.0, replacement_ratio=0.2, "
        "averaging_strategy='mean', momentum=0.0, age_range=(50, 150), replacement_mode='age', group=None"
    ),
    "AsyncSelectiveAveragingPolicympi4pyGeneral": (
        "model_builder, model, average_every, threshold_metric=0.0, replacement_ratio=0.2, averaging_strategy='mean', "
        "momentum=0.0, poll_interval_s=0.01, age_range=(50, 150), replacement_mode='age', group=None"
    ),
}
POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD


@pytest.mark.parametrize("name", SIGNATURES)
def test_constructors_have_the_seeds_arguments_in_their_order(name: str) -> None:
    """What the originals take by position or name is taken, with the same defaults; more is keyword-only."""
    found = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(getattr(spawn_policy, name)).parameters.values()
        if parameter.kind == POSITIONAL
    ]
    assert ", ".join(map(str, found)) == SIGNATURES[name]


@pytest.mark.parametrize("name", SIGNATURES)
def test_calls_have_the_seeds_arguments_in_their_order(name: str) -> None:
    """`expose_params` stands before `group` in the one-sided pair."""
    found = [
        p.name
        for p in inspect.signature(getattr(spawn_policy, name).__call__).parameters.values()
        if p.kind == POSITIONAL
    ]
    middle = ["expose_params"] if "mpi4py" in name and "Async" in name else []
    assert found == ["self", "iteration", "model", "optimizer", "local_metric", *middle, "group"]


def test_the_base_class_is_abstract() -> None:
    """As in the original: only a class that defines the call can be made; all policies count as its subclasses."""
    assert abc.ABC in spawn_policy.SpawnPolicy.__mro__
    with pytest.raises(TypeError, match="abstract"):
        spawn_policy.SpawnPolicy(1)  # type: ignore[abstract]

    class Mine(spawn_policy.SpawnPolicy):
        def __call__(self, iteration: int, model: Any, optimizer: Any, *_: Any, **__: Any) -> Any:
            return model, optimizer, {}

    assert Mine(3).average_every == 3
    assert isinstance(spawn_policy.AverageAllPolicy(2), spawn_policy.SpawnPolicy)
    assert issubclass(spawn_policy.AsyncSelectiveAveragingPolicympi4pyFast, spawn_policy.SpawnPolicy)


def test_the_averager_must_know_whether_to_start() -> None:
    """As in the original, where the argument has no default."""
    start = inspect.signature(DecentralizedAverager).parameters["start"]
    assert (start.kind, start.default) == (start.KEYWORD_ONLY, start.empty)


def test_the_rest_of_the_seeds_names() -> None:
    """The base class, the logger, and the helper that ranks the worst."""
    with pytest.raises(NotImplementedError, match=r"define act\(\), or __call__\(\)"):
        spawnsim.SpawnPolicy().act(0, *line(0.0), None, cast("Any", None), {})
    assert spawn_policy.logger.name == "spawnsim.torchgfn.spawn_policy"
    assert spawn_policy._compute_worst_ranks_by_ratio([3.0, 1.0, 2.0, float("nan")], 0.5) == {1, 3}
    assert spawn_policy._compute_worst_ranks_by_ratio([1.0], 0.5) == set()


@pytest.mark.parametrize("name", ["Fast", "General"])
def test_the_one_sided_pair_runs_as_the_originals_are_called(name: str) -> None:
    """All by position: builder, model, cadence, threshold, ratio, strategy, momentum."""
    models: dict[int, torch.nn.Module] = {}

    def main(comm: Any) -> None:
        kind = getattr(spawn_policy, f"AsyncSelectiveAveragingPolicympi4py{name}")
        model, optimizer = line(float(comm.Get_rank()))
        policy = kind(
            lambda: line(9.0), model, 3, 0.5, 0.2, "mean", 0.0, replacement_mode="threshold", group=comm
        )
        policy.capture_comm("train", comm.Get_size())
        for iteration in range(6):
            with comm.compute(0.01):
                pass
            model, optimizer, _ = policy(iteration, model, optimizer, float(comm.Get_rank()), True, comm)
        models[comm.Get_rank()] = model
        policy.shutdown()

    spawnsim.run(main, ranks=3)
    assert numbers(models[0]) <= {1.0, 2.0, 1.5}
    assert [numbers(models[rank]) for rank in (1, 2)] == [{1.0}, {2.0}]


@pytest.mark.parametrize("name", ["Fast", "General"])
def test_the_one_sided_pair_has_the_originals_attributes(name: str) -> None:
    """Who and how many, in which group, from how many; nothing that is only stored."""
    kind = getattr(spawn_policy, f"AsyncSelectiveAveragingPolicympi4py{name}")

    def main(comm: Any) -> None:
        half = comm.Split(comm.Get_rank() % 2, 0)
        model, optimizer = line(float(comm.Get_rank()))
        policy = kind(lambda: line(9.0), model, 3, age_range=(2, 2), group=half)
        assert (policy.myrank, policy.comm_size, policy.train_comm_group) == (half.Get_rank(), 12, half)
        assert (policy.debug_mode, policy.averaging_ranks, policy.agents_killed) == (False, 0, 0)
        assert not policy.is_agent_dying(1.0, 0.0, check_agent=0)
        assert policy.is_agent_dying(-1.0, 0.0, check_policy=0)
        for iteration in range(3):
            with comm.compute(0.01):
                pass
            model, optimizer, _ = policy(iteration, model, optimizer, float(comm.Get_rank()), group=half)
        assert policy.averaging_ranks == 6  # half of the group
        assert policy.is_agent_dying(1.0, 0.0, check_agent=1) == (policy.age >= policy.max_age)
        policy.shutdown()

    spawnsim.run(main, ranks=24)


def test_models_are_laid_out_in_every_call_as_in_the_originals() -> None:
    """So snapshots are about as old as a read takes; `expose_params=False` leaves a call out."""

    def main(comm: Any) -> None:
        model, optimizer = line(float(comm.Get_rank()))
        policy = spawn_policy.AsyncSelectiveAveragingPolicympi4pyFast(None, None, 100, age_range=(900, 900))
        written = []
        for iteration in range(4):
            *_, info = policy(iteration, model, optimizer, 1.0, iteration != 2, comm)
            written.append(info["bytes"] > 0)
        assert written == [True, True, False, True]
        policy.shutdown()

    spawnsim.run(main, ranks=2)


def test_the_mean_is_that_of_all_survivors_as_in_the_original() -> None:
    """Also where there are more than eight."""
    values: dict[int, set[float]] = {}

    def main(comm: Any) -> None:
        policy = spawn_policy.AsyncSelectiveAveragingPolicy(lambda: line(9.0), 3, 0.2, cooldown=100)
        assert (policy.poll_interval_s, policy.cooldown, policy.threshold) == (0.01, 100, None)
        model, optimizer = line(float(comm.Get_rank()))
        for iteration in range(12):
            with comm.compute(0.01):
                pass
            model, optimizer, _ = policy(iteration, model, optimizer, float(comm.Get_rank()), comm)
        values[comm.Get_rank()] = numbers(model)
        policy.shutdown()

    spawnsim.run(main, ranks=12)
    assert [values[rank] for rank in (0, 1, 2)] == [{6.5}, {6.5}, {2.0}]


def test_print_time_and_print_stats_return_what_they_print(capsys: pytest.CaptureFixture[str]) -> None:
    """A table for people, the data for programs."""
    policy = spawn_policy.AverageAllPolicy(5)
    policy.note("average", 0.25)
    policy.note("average", 0.75)
    policy.capture_comm("train", 4)
    assert policy.print_time() == {"average": {"calls": 2, "total_s": 1.0, "mean_s": 0.5}}
    assert policy.print_stats()["comm/train"] == 4
    assert "average" in capsys.readouterr().out


def test_nothing_else_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """A library's calls leave standard output to its user."""

    def main(comm: Any) -> None:
        policy = spawn_policy.AsyncSelectiveAveragingPolicy(lambda: line(0.0), 1, 0.5, cooldown=0)
        pair = line(float(comm.Get_rank()))
        for iteration in range(6):
            with comm.compute(0.01):
                pass
            *pair, _ = policy(iteration, *pair, float(comm.Get_rank()), comm)
        policy.shutdown()

    spawnsim.run(main, ranks=2)
    assert capsys.readouterr().out == ""


PROGRAM = """
import torch
from mpi4py import MPI
from spawnsim.torchgfn.spawn_policy import *

comm = MPI.COMM_WORLD
half = comm.Split(comm.rank % 2, comm.rank)
def build(value):
    model = torch.nn.Linear(3, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
def value(model):
    return model.bias.item()
for group, expected in ((None, 1.5), (comm, 1.5), (half, comm.rank % 2 + 1.0)):
    model, optimizer = build(float(comm.rank))
    where = {} if group is None else {"group": group}
    model, optimizer, info = AverageAllPolicympi4py(1)(0, model, optimizer, **where)
    assert info["averaged_this_iteration"] and value(model) == expected, (group, value(model))
model, optimizer = build(float(comm.rank))
for kind in (AsyncSelectiveAveragingPolicympi4pyFast, AsyncSelectiveAveragingPolicympi4pyGeneral):
    policy = kind(lambda: build(9.0), model, 2, age_range=(3, 6), group=comm)
    for iteration in range(20):
        model, optimizer, info = policy(iteration, model, optimizer, float(comm.rank))
    policy.shutdown()
policy = AsyncSelectiveAveragingPolicy(lambda: build(9.0), 2, 0.25, cooldown=0)
for iteration in range(40):
    model, optimizer, info = policy(iteration, model, optimizer, float(comm.rank))
policy.shutdown()
assert 0 <= value(model) <= 3
comm.Barrier()
if comm.rank == 0:
    print("all well")
"""


@pytest.mark.mpi
def test_raw_mpi4py_groups_and_the_default_world(tmp_path: Path) -> None:
    """A program that knows only mpi4py and the seeds' names, without torch.distributed."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    mpiexec = Path(sys.executable).with_name("mpiexec")
    line_ = [mpiexec, "-n", "4", sys.executable, program]
    done = subprocess.run(list(map(str, line_)), capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "all well\n"), done.stderr


def test_without_a_group_a_virtual_rank_means_its_own_world() -> None:
    """The originals' default, COMM_WORLD, is the virtual cluster's on virtual ranks."""

    def main(comm: Any) -> None:
        model = torch.nn.Linear(1, 1, bias=False)
        model.weight.data.fill_(float(comm.rank))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policy = spawn_policy.AverageAllPolicympi4py(average_every=1)
        model, optimizer, _ = policy(1, model, optimizer)
        comm.record(weight=model.weight.item())

    run = spawnsim.run(main, ranks=4)
    assert run.table["weight"].tolist() == [1.5] * 4


@pytest.mark.parametrize("slope", [0.1, -0.1])
@pytest.mark.parametrize(
    "name", ["AsyncSelectiveAveragingPolicympi4pyFast", "AsyncSelectiveAveragingPolicympi4pyGeneral"]
)
def test_the_worst_are_replaced_whatever_way_metrics_go(name: str, slope: float) -> None:
    """Ranks in step, that publish in each call and answer between their steps alone: readers are not overtaken."""
    replaced: list[tuple[int, int, int]] = []

    def main(comm: Any) -> None:
        me = comm.Get_rank()
        model = torch.nn.Linear(200, 100)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        how = {"replacement_ratio": 0.2, "replacement_mode": "worst_ratio", "cooldown": 0}
        policy = getattr(spawn_policy, name)(None, None, 10, **how)
        for iteration in range(101):
            with comm.compute(0.01):
                pass
            metric = 0.02 * me + slope * iteration
            model, optimizer, info = policy(iteration, model, optimizer, metric, group=comm)
            if info["is_replaced"]:
                replaced.append((me, info["donors"], info["staleness"]))
        policy.shutdown()

    spawnsim.run(main, ranks=10)
    assert {rank for rank, _, _ in replaced} == {0, 1}
    assert len(replaced) >= 14
    assert {donors for _, donors, _ in replaced} <= {3, 4, 5}
    assert max(abs(staleness) for _, _, staleness in replaced) <= 20
