"""Donors' states give the same bits whether they are kept or taken into a running mean; many need little memory."""

from __future__ import annotations

import gc
import math
import random
import tracemalloc
import weakref
from typing import Any

import pytest
import torch
from support.policy_ranks import Line, line, walk

import spawnsim
from spawnsim.policies import AsyncSelectiveAveragingPolicy, StateScope, replay
from spawnsim.policies.exchange.replacement import Gathering, mixture
from spawnsim.policies.state.arithmetic import blend
from spawnsim.policies.state.layout import Tensors


def state(seed: int, dtype: torch.dtype) -> Tensors:
    """Return a state of two tensors that lie end to end, and one of whole numbers."""
    row = (100 * torch.randn(70, generator=torch.Generator().manual_seed(seed))).to(dtype)
    whole = torch.tensor([seed % 7, 2 * seed])
    return {"parameter/w": row[:60].view(6, 10), "parameter/b": row[60:], "buffer/n": whole}


def gathered(given: dict[int, Tensors], weights: dict[int, float], **how: Any) -> tuple[list[Any], list[Any]]:
    """Return what a gathering of these states, in this order, mixes and records."""
    found: list[Any] = []

    def main(comm: Any) -> None:
        whose = line(0.0)
        gathering = Gathering(weights, how.pop("travels", StateScope()), guard=how.pop("guard", True))
        for donor, tensors in given.items():
            gathering.add(donor, 10 + donor, tensors, whose)
        found.extend(gathering.finish(comm, whose))

    spawnsim.run(main, ranks=20)
    return found[0], found[1]


def test_recorded_weights_stay_what_they_are() -> None:
    """A real run's weights, divided once: they sum to 1 but for their rounding errors, and a replay divided again."""
    weights = {0: 0.7996156071219319, 1: 0.08124431273938856, 2: 0.11914008013867937}
    assert sum(weights.values()) != 1
    kept, recorded = gathered({donor: state(donor, torch.float32) for donor in weights}, weights)
    assert {each.donor: each.weight for each in recorded} == weights
    assert kept == recorded


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_running_mean_has_the_bits_of_a_mean_of_all(dtype: torch.dtype) -> None:
    """In the order in which the states came, which the record keeps; with the donors' iterations and weights."""
    order = random.Random(4).sample(range(20), 15)
    raw = {donor: 1.0 + donor for donor in order}
    weights = {donor: weight / sum(raw.values()) for donor, weight in raw.items()}
    given = {donor: state(donor, dtype) for donor in order}
    (mixed,), recorded = gathered(given, weights)
    assert [(each.donor, each.iteration, each.weight) for each in recorded] == [
        (donor, 10 + donor, weights[donor]) for donor in order
    ]
    for name, tensor in mixed.tensors.items():
        want = blend([given[donor][name] for donor in order], [weights[donor] for donor in order])
        assert tensor.dtype == want.dtype
        assert torch.equal(tensor, want)


def test_few_donors_are_mixed_in_order_of_rank() -> None:
    """As long as they are kept, the order of arrival has no effect."""
    given = {donor: state(donor, torch.float32) for donor in (5, 1, 3)}
    mixed, recorded = gathered(given, dict.fromkeys(given, 1 / 3))
    assert [each.donor for each in mixed] == [each.donor for each in recorded] == [1, 3, 5]
    assert mixed[0].tensors is given[1]


def test_donors_that_do_not_come_leave_their_weight_to_the_others() -> None:
    """Of ten, four come."""
    given = {donor: state(donor, torch.float64) for donor in (7, 2, 9, 4)}
    (mixed,), recorded = gathered(given, dict.fromkeys(range(10), 0.1))
    want = torch.stack([each["parameter/w"] for each in given.values()]).mean(0)
    torch.testing.assert_close(mixed.tensors["parameter/w"], want)
    assert mixed.weight == 1
    assert [each.weight for each in recorded] == [0.1] * 4


def test_models_of_other_shapes_have_a_mean_of_their_own() -> None:
    """Of twelve, every third is wider: each shape is averaged over those that have it."""
    given: dict[int, Tensors] = {d: {"w": torch.full((2 + (d % 3 == 0),), float(d))} for d in range(12)}
    mixed, _ = gathered(given, dict.fromkeys(given, 1 / 12))
    wide, narrow = (mixture("w", torch.empty(width), mixed) for width in (3, 2))
    assert wide is not None
    assert narrow is not None
    torch.testing.assert_close(wide, torch.full((3,), 4.5))
    torch.testing.assert_close(narrow, torch.full((2,), 6.0))


def test_of_many_donors_the_heaviest_gives_its_optimizer() -> None:
    """The model is the mean, where the optimizer's state is to be copied."""
    given: dict[int, Tensors] = {
        donor: {
            "parameter/w": torch.full((1,), float(donor)),
            "optimizer/w/m": torch.full((1,), float(donor)),
        }
        for donor in range(10)
    }
    weights = {donor: 0.19 if donor == 6 else 0.09 for donor in given}
    (mixed,), _ = gathered(given, weights, travels=StateScope(optimizer_state="copy"))
    assert mixed.tensors["optimizer/w/m"].item() == 6
    torch.testing.assert_close(mixed.tensors["parameter/w"].item(), 0.09 * 45 + 0.6)


@pytest.mark.parametrize("guard", [True, False])
def test_of_many_donors_those_that_are_not_finite_are_left_out(guard: bool) -> None:
    """As of few; without the guard a NaN spreads."""
    given: dict[int, Tensors] = {
        donor: {"w": torch.tensor([math.nan if donor == 3 else 1.0])} for donor in range(10)
    }
    (mixed,), recorded = gathered(given, dict.fromkeys(given, 0.1), guard=guard)
    assert (mixed.tensors["w"].item() == 1) == guard
    assert (3 in [each.donor for each in recorded]) != guard


def test_states_that_are_in_the_mean_are_given_up() -> None:
    """All but the first, from which the others' distances are taken."""
    gathering = Gathering(dict.fromkeys(range(12), 1 / 12), StateScope(), guard=True)
    alive = []
    for donor in range(12):
        tensors = state(donor, torch.float32)
        alive.append(weakref.ref(tensors["buffer/n"]))
        gathering.add(donor, donor, tensors, line(0.0))
        del tensors
    gc.collect()
    assert [each() is not None for each in alive] == [True] + [False] * 11


def different(rank: int) -> tuple[Line, torch.optim.Optimizer]:
    """Return a model of its own for each rank."""
    model, optimizer = line(0.0)
    model.weight.data = torch.randn(100, generator=torch.Generator().manual_seed(rank))
    return model, optimizer


def test_a_replay_of_many_donors_has_the_same_bits() -> None:
    """It takes their states in the recorded order, that of arrival."""
    how: dict[str, Any] = {"ranks": 20, "steps": 12, "start": different}
    one = walk(
        lambda comm: AsyncSelectiveAveragingPolicy(None, 3, 0.25, donors=1.0, cooldown=0), **how,
        stragglers="lognormal:0.5",
    )  # fmt: skip
    taken = one.events("replacement")
    given = {len(event["donors"]) for event in taken}
    assert min(given) < max(given) == 15  # some deadlines passed before all had come
    assert any(event["donors"] != sorted(event["donors"]) for event in taken)
    two = walk(lambda _: replay(one.run.events), **how)
    for rank in range(20):
        assert torch.equal(one.models[rank].weight, two.models[rank].weight)


def test_memory_grows_with_the_ranks_and_not_with_their_square() -> None:
    """All survivors of 48 ranks give 1 MB to each of 12: 432 MB on their way at one time."""

    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(500, 500)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def main(comm: Any) -> None:
        model, optimizer = build()
        policy = AsyncSelectiveAveragingPolicy(None, 20, 0.25, donors=1.0)
        for iteration in range(35):
            with comm.compute(0.02):
                pass
            model, optimizer, _ = policy(iteration, model, optimizer, float(comm.rank), comm)
        policy.shutdown()

    tracemalloc.start()
    try:
        found = spawnsim.run(main, ranks=48)
        peak_nbytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.totals["replacements"] == 12
    assert peak_nbytes < 48 * 6e6
