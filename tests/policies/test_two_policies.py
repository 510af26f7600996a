"""Two policies of a kind on one communicator: refused where they would take each other's messages."""

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
    DecoupledDiLoCoPolicy,
    ServerOptions,
    ServerRule,
    SpawnPolicy,
    WAGMAPolicy,
)

MAKE: dict[str, Callable[[], SpawnPolicy]] = {
    "selective": lambda: AsyncSelectiveAveragingPolicy(None, 2, cooldown=0),
    "clock": lambda: AsyncModelAveragePolicy(sync_interval_ms=5),
    "wagma": lambda: WAGMAPolicy(2),
    "server": lambda: AsyncServerPolicy(ServerOptions(ServerRule(0.5, 0.0)), steps=2),
    "decoupled": lambda: DecoupledDiLoCoPolicy(2, fragments=1),
}


def parts() -> list[tuple[torch.nn.Module, torch.optim.Optimizer]]:
    """Return a generator and a discriminator, of other shapes, each with its optimizer."""
    models = torch.nn.Linear(4, 2), torch.nn.Linear(2, 1)
    return [(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]


@pytest.mark.parametrize("name", MAKE)
def test_two_on_one_communicator_are_refused(name: str) -> None:
    """Two that are alive are refused, with the remedy; by the remedy, or one after the other, both do their part."""

    def main(comm: Any) -> None:
        (one, of_one), (other, of_other) = parts()
        first, second, own = MAKE[name](), MAKE[name](), comm.Dup()
        for iteration in range(8):
            with comm.compute(0.01):
                pass
            _, _, info = first(iteration, one, of_one, float(comm.rank), comm)
            if iteration == 4:
                with pytest.raises(UsageError, match=r"tag \d+: shutdown.*Dup"):
                    MAKE[name]()(iteration, other, of_other, float(comm.rank), comm)
            second(iteration, other, of_other, float(comm.rank), own)
            comm.record(iteration=iteration, **info)
        first.shutdown()
        second.shutdown()
        comm.Barrier()
        again = MAKE[name]()
        for iteration in range(4):
            with comm.compute(0.01):
                pass
            again(iteration, other, of_other, float(comm.rank), comm)
        again.shutdown()

    run = spawnsim.run(main, ranks=10)
    assert len(run.table["iteration"]) == 80


def test_a_merge_names_ranks_of_the_world() -> None:
    """Each half merges its own: ranks of a group mean nothing outside of it."""

    def main(comm: Any) -> None:
        half, ((model, optimizer), _) = comm.Split(comm.rank % 2, -comm.rank), parts()
        policy = MAKE["decoupled"]()
        for iteration in range(6):
            with comm.compute(0.01):
                pass
            policy(iteration, model, optimizer, None, half)
        policy.shutdown()

    run = spawnsim.run(main, ranks=12)
    merges = [set(event["learners"]) for event in run.events if event["kind"] == "merge"]
    assert {rank for learners in merges for rank in learners} == {*range(12)}
    assert all(len({rank % 2 for rank in learners}) == 1 for learners in merges)
