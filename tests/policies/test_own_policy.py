"""A policy of one's own: docs/examples/neighbours.py, held to the theory of decentralized averaging; and docstrings."""

from __future__ import annotations

import doctest
import importlib
import math
import pkgutil
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.policy_ranks import Line, line, numbers, walk

import spawnsim
from spawnsim import policies
from spawnsim.errors import MismatchError, ParameterError, Timeout, UsageError
from spawnsim.policies import StateScope

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "examples" / "neighbours.py"))
Neighbours = EXAMPLE["NeighbourAveragingPolicy"]


def wave(rank: int, ranks: int) -> tuple[Line, torch.optim.Optimizer]:
    """Return a model that is one period of a cosine along a ring: an eigenvector of averaging with neighbours."""
    return line(math.cos(2 * math.pi * rank / ranks), dtype=torch.float64)


def star(size: int) -> dict[int, list[int]]:
    """Return a graph in which degrees differ as much as they can."""
    return {0: list(range(1, size)), **{rank: [0] for rank in range(1, size)}}


def test_a_ring_of_12_contracts_by_its_second_eigenvalue() -> None:
    """Each averaging multiplies the wave by 1/3 + 2/3 cos(2π/12), and does so in its due iterations alone."""
    found = walk(lambda _: Neighbours(3), ranks=12, steps=10, start=lambda rank: wave(rank, 12))
    shrunk = (1 / 3 + 2 / 3 * math.cos(2 * math.pi / 12)) ** 3
    for rank, model in found.models.items():
        expected = torch.full((30_000,), shrunk * math.cos(2 * math.pi * rank / 12), dtype=torch.float64)
        torch.testing.assert_close(model.state_dict()["weight"], expected, rtol=0, atol=1e-12)
    assert [i for i in range(10) if found.infos[5, i]["averaged_this_iteration"]] == [3, 6, 9]
    assert found.infos[5, 3]["donors"] == 2
    assert found.infos[5, 3]["bytes"] >= 4 * 30_000 * 8


def test_any_graph_keeps_the_mean_and_reaches_it() -> None:
    """A star of 11, where the hub has ten neighbours and the others one, and all rows of weights differ."""
    found = walk(lambda _: Neighbours(1, graph=star), ranks=11, steps=200)
    ends = [number for model in found.models.values() for number in numbers(model)]
    assert min(ends) == pytest.approx(5, abs=1e-3)
    assert max(ends) == pytest.approx(5, abs=1e-3)


def test_equal_models_stay_equal_to_the_bit() -> None:
    """Also where weights of 1/3 do not sum to 1 exactly, in half precision, and for infinities of a mask."""
    for value, dtype in ((0.7, torch.bfloat16), (math.inf, torch.float32)):
        found = walk(
            lambda _: Neighbours(1), ranks=10, steps=3, start=lambda _, v=value, d=dtype: line(v, dtype=d)
        )
        assert all(numbers(model) == numbers(line(value, dtype=dtype)[0]) for model in found.models.values())


def test_a_straggler_holds_up_its_neighbours_first() -> None:
    """A rank waits for those next to it alone: after the collective of the first, k hops take k averagings."""
    found = walk(lambda _: Neighbours(1), ranks=12, steps=8, pace=lambda rank: 0.05 if rank == 0 else 0.01)
    began_to_wait = [
        next(i for i in range(1, 8) if found.infos[rank, i]["wait_s"] > 0.01) for rank in range(1, 7)
    ]
    assert began_to_wait == [1, 2, 3, 4, 5, 6]


def test_a_neighbour_that_does_not_come_leaves_the_model_as_it_is() -> None:
    """The time-out is the caller's, and nothing was written; ranks further away have got their averages."""
    averaged: dict[int, bool] = {}

    def main(comm: Any) -> None:
        policy, (model, optimizer) = Neighbours(1), line(float(comm.rank**2))
        policy(0, model, optimizer, group=comm)
        before = numbers(model)
        if comm.rank in (3, 5):
            with pytest.raises(Timeout), comm.clock.deadline(0.5):
                policy(1, model, optimizer, group=comm)
        elif comm.rank != 4:
            policy(1, model, optimizer, group=comm)
        averaged[comm.rank] = numbers(model) != before

    spawnsim.run(main, ranks=10)
    assert {rank for rank in averaged if not averaged[rank]} == {3, 4, 5}


@pytest.mark.parametrize("graph", [{0: [1], 1: []}, {0: [0], 1: []}, {0: [2], 1: []}])
def test_bad_graphs_are_refused(graph: dict[int, list[int]]) -> None:
    """An edge in one direction, to itself, or to a rank that is not there."""
    with pytest.raises(ParameterError, match="rank 0 has neighbour"):
        walk(lambda _: Neighbours(1, graph=lambda size: graph), ranks=2, steps=2)


def test_models_that_differ_and_optimizers_that_travel_are_refused() -> None:
    """On all ranks, as in every policy that averages by place and not by name."""
    with pytest.raises(MismatchError, match="models of this group differ"):
        walk(lambda _: Neighbours(1), ranks=10, steps=2, start=lambda rank: line(0.0, width=9 + rank // 9))
    with pytest.raises(ParameterError, match="optimizer"):
        Neighbours(1, travels=StateScope(optimizer_state="average"))


class _Forgetful(policies.SpawnPolicy):
    """A policy of one's own with two slips: no `super().__init__`, or what `act` returns."""

    def __init__(self, returned: Any) -> None:
        if returned != "no super":
            super().__init__(1)
        self.returned = returned

    def act(self, *given: Any) -> Any:
        return self.returned


@pytest.mark.parametrize(
    ("returned", "reported"),
    [
        ("no super", r"_Forgetful: its __init__ must call super\(\).__init__\(average_every\)"),
        (None, "_Forgetful.act returned nothing: end it with `return model, optimizer`"),
        (torch.nn.Linear(1, 1), "_Forgetful.act returned a Linear alone: end it"),
        ((1, 2, 3), "_Forgetful.act returned 3 values: end it"),
        ((1, torch.nn.Linear(1, 1)), "_Forgetful.act returned int and Linear: end it"),
    ],
)
def test_slips_in_a_policy_of_ones_own_are_reported_in_its_terms(returned: Any, reported: str) -> None:
    """Not as an error within spawnsim's own lines."""
    with pytest.raises(UsageError, match=reported):
        walk(lambda _: _Forgetful(returned), ranks=2, steps=1)


class _Anew(policies.SpawnPolicy):
    """A policy of one's own that returns a new object as its model, with the optimizer of the old one."""

    def __init__(self, made: Any) -> None:
        super().__init__(1)
        self.made = made

    def act(self, iteration: int, model: Any, optimizer: Any, *given: Any) -> Any:
        return self.made(model), optimizer


def test_a_new_model_needs_an_optimizer_of_its_own() -> None:
    """With that of the old one nothing would be trained from then on; a wrapper keeps the old one's parameters."""
    with pytest.raises(UsageError, match=r"Anew\.act returned a new model, but the returned optimizer"):
        walk(lambda _: _Anew(lambda model: torch.nn.Linear(1, 1)), ranks=2, steps=1)
    walk(lambda _: _Anew(torch.nn.Sequential), ranks=2, steps=1)


def test_examples_in_docstrings_print_what_they_say() -> None:
    """Of all modules of policies: they are the part that users copy."""
    names = [each.name for each in pkgutil.walk_packages(policies.__path__, "spawnsim.policies.")]
    found = {name: doctest.testmod(importlib.import_module(name)) for name in names}
    assert {name for name, result in found.items() if result.failed} == set()
    assert sum(result.attempted for result in found.values()) >= 10
