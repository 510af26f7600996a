"""Ranks that finish at different times: to have finished is not to have died, and to wait costs nobody any time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import run as run_command
from typing import Any

import pytest
import torch
from support.policy_ranks import line

import spawnsim
from spawnsim.models.network import Hockney, Switch
from spawnsim.policies import (
    AsyncModelAveragePolicy,
    AsyncSelectiveAveragingPolicy,
    AsyncServerPolicy,
    DecoupledDiLoCoPolicy,
    EDiTPolicy,
    ExchangeOptions,
    OneSidedSelectiveAveragingPolicy,
    PopulationBasedTrainingPolicy,
    ServerOptions,
    ServerRule,
    WAGMAPolicy,
    WindowOptions,
)

SLOW, TIMES, STEP_S, STEPS = 3, 10, 0.1, 80
BEHIND_S = 72  # more than any time-out of any policy
POLICIES: dict[str, Callable[[], Any]] = {
    "selective": lambda: AsyncSelectiveAveragingPolicy(None, 10),
    "age": lambda: AsyncSelectiveAveragingPolicy(None, 10, replacement_mode="age", age_range=(5, 15)),
    "coordinator": lambda: AsyncSelectiveAveragingPolicy(None, 10, wiring=ExchangeOptions(coordinator=SLOW)),
    "one_sided": lambda: OneSidedSelectiveAveragingPolicy(None, None, 10, replacement_mode="worst_ratio"),
    "population": lambda: PopulationBasedTrainingPolicy(10),
    "by_clock": lambda: AsyncModelAveragePolicy("all", 500),
    "ad_psgd": lambda: AsyncModelAveragePolicy("random", 500),
    "server": lambda: AsyncServerPolicy(ServerOptions(ServerRule(0.5, 0)), steps=10),
    "slow_server": lambda: AsyncServerPolicy(ServerOptions(ServerRule(0.5, 0)), steps=10, server=SLOW),
    "decoupled": lambda: DecoupledDiLoCoPolicy(20, fragments=2),
    "edit": lambda: EDiTPolicy(10, every_s=5.0),
    "wagma": lambda: WAGMAPolicy(10, group_size=2),
}


def train(make: Callable[[], Any], **how: Any) -> tuple[Any, dict[int, float]]:
    """Train, one rank ten times slower than the others; return the run, and when each rank has shut down."""
    ended_s: dict[int, float] = {}
    forgets = how.pop("forgets", ())

    def main(comm: Any) -> None:
        (model, optimizer), policy = line(float(comm.rank)), make()
        for iteration in range(STEPS):
            with comm.compute(STEP_S):
                pass
            model, optimizer, _ = policy(iteration, model, optimizer, float(comm.rank), comm)
        if comm.rank not in forgets:
            policy.shutdown()
        ended_s[comm.rank] = comm.clock.now()

    run = spawnsim.run(main, ranks=4, stragglers=f"rank:{SLOW},{TIMES}", deadline_s=1000, **how)
    return run, ended_s


@pytest.mark.parametrize("name", POLICIES)
def test_the_slowest_rank_ends_the_run_and_nobody_has_died(name: str) -> None:
    """The makespan is what the slowest rank needs; no warning of any kind."""
    run, ended_s = train(POLICIES[name])
    assert ended_s[SLOW] == max(ended_s.values()) or ended_s[SLOW] > max(ended_s.values()) - 0.1
    assert run.totals["virtual_seconds"] == pytest.approx(STEPS * STEP_S * TIMES, abs=0.2)
    assert run.what.get("warnings", []) == []


def test_a_server_that_finishes_first_still_takes_what_is_on_its_way() -> None:
    """Models are slow to arrive: of some, the server has begun to receive when it has finished its own steps."""
    ended = []

    def main(comm: Any) -> None:
        model = torch.nn.Linear(200, 200)
        optimizer, policy = torch.optim.SGD(model.parameters(), 0.1), POLICIES["server"]()
        for iteration in range(11):
            with comm.compute(0.01 if comm.rank == 0 else 0.02):
                pass
            model, optimizer, _ = policy(iteration, model, optimizer, None, comm)
        policy.shutdown()
        ended.append(comm.rank)

    spawnsim.run(main, ranks=6, platform=Switch(Hockney(1e-4, 1e6)), deadline_s=100)
    assert sorted(ended) == [*range(6)]


@pytest.mark.parametrize("name", ["selective", "one_sided"])
def test_a_rank_that_dies_meanwhile_is_named(name: str) -> None:
    """It ends the others' wait when it is known, and nobody else is said to have died."""
    run, ended_s = train(POLICIES[name], faults=f"crash:{SLOW}@50s")
    assert {round(each) for each in ended_s.values()} == {50}
    (warning,) = run.what["warnings"]
    assert f"rank {SLOW} has died" in warning


@pytest.mark.parametrize("name", ["selective", "one_sided"])
def test_a_rank_that_ends_without_shutdown_is_named(name: str) -> None:
    """The others do not wait for ever, and do not call it dead."""
    run, ended_s = train(POLICIES[name], forgets={SLOW})
    assert ended_s[SLOW] == pytest.approx(80, abs=0.2)
    assert max(ended_s.values()) < 1.3 * ended_s[SLOW]
    assert f"rank {SLOW} has ended its program" in run.what["warnings"][0]
    assert "died" not in str(run.what["warnings"])


@pytest.mark.parametrize(
    "make",
    [
        lambda: AsyncSelectiveAveragingPolicy(None, 10, wiring=ExchangeOptions(shutdown_timeout_s=2.0)),
        lambda: OneSidedSelectiveAveragingPolicy(
            None, None, 10, windows=WindowOptions(deadline=0.5, shutdown_timeout_s=2.0)
        ),
    ],
)
def test_a_rank_that_stands_still_is_waited_for_as_long_as_the_time_out_says(
    make: Callable[[], Any],
) -> None:
    """It is paused while the others wait: they leave after two seconds, and say why."""
    run, ended_s = train(make, faults=f"pause:{SLOW}@5s+500s")
    assert all(ended_s[rank] < 13 for rank in range(SLOW))
    assert f"rank {SLOW} does not answer" in run.what["warnings"][0]


def test_ranks_that_wait_for_each_other_are_a_deadlock() -> None:
    """One waits in `shutdown` for a rank that waits for its message: no endless wait."""

    def main(comm: Any) -> None:
        (model, optimizer), policy = line(0.0), AsyncSelectiveAveragingPolicy(None, 10)
        policy(0, model, optimizer, 0.0, comm)
        if comm.rank:
            comm.recv(source=0)
        policy.shutdown()

    with pytest.raises(spawnsim.errors.Deadlock):
        spawnsim.run(main, ranks=2, deadline_s=float("inf"))


def test_who_is_absent_is_known_at_the_ranks_own_time() -> None:
    """By rank of the communicator: dead, ended, paused; not those who compute."""
    seen: dict[float, dict[int, str]] = {}

    def main(comm: Any) -> None:
        if comm.rank == 3:
            part = comm.Create_group(comm.Get_group().Excl([0]))
            for time_s in (1.0, 4.0, 7.0):
                comm.clock.sleep(time_s - comm.clock.now())
                seen[time_s] = part.absent()
        elif comm.rank:
            comm.Create_group(comm.Get_group().Excl([0]))
            with comm.compute(2.0 if comm.rank == 1 else 50.0):
                pass

    spawnsim.run(main, ranks=6, faults="crash:4@3s; pause:5@3s+3s")
    ended, dead, silent = "has ended its program", "has died", "does not answer"
    assert seen == {1.0: {}, 4.0: {0: ended, 3: dead, 4: silent}, 7.0: {0: ended, 3: dead}}


PROGRAM = """
import time
import torch
from spawnsim.policies import *

MAKE = {
    "selective": lambda: AsyncSelectiveAveragingPolicy(None, 2, wiring=ExchangeOptions(shutdown_timeout_s=0.2)),
    "one_sided": lambda: OneSidedSelectiveAveragingPolicy(
        None, None, 2, replacement_mode="worst_ratio", windows=WindowOptions(shutdown_timeout_s=0.2)
    ),
}

def main(comm):
    for name, make in MAKE.items():
        model = torch.nn.Linear(2, 1)
        optimizer, policy = torch.optim.SGD(model.parameters(), lr=0.1), make()
        for iteration in range(10):
            with comm.compute():
                time.sleep(0.15 if comm.rank == 2 else 0.01)
            model, optimizer, _ = policy(iteration, model, optimizer, float(comm.rank), comm)
        policy.shutdown()
        comm.record.event("left", policy=name)
"""


@pytest.mark.mpi
@pytest.mark.parametrize("backend", ["mpi", "torch"])
def test_real_ranks_wait_for_those_that_still_train(tmp_path: Path, backend: str) -> None:
    """Longer than any time-out: no rank is said to be absent, and the job does not end."""
    program = tmp_path / "late.py"
    program.write_text(PROGRAM)
    line = [
        sys.executable,
        "-m",
        "spawnsim",
        "run",
        program,
        "--backend",
        backend,
        "-n",
        3,
        "--out",
        tmp_path / "run",
    ]
    done = run_command([str(word) for word in line], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    found = spawnsim.Run.load(tmp_path / "run")
    assert found.what.get("warnings", []) == []
    left = [(event["policy"], event["time_s"]) for event in found.events if event["kind"] == "left"]
    assert len(left) == 6
    for name in ("selective", "one_sided"):
        times = [time_s for policy, time_s in left if policy == name]
        assert max(times) - min(times) < 1.0
