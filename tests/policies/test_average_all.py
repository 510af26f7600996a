"""Averaging over all ranks of a group, on virtual ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.policy_ranks import WIDE, Line, line, numbers, walk

import spawnsim
from spawnsim.errors import MismatchError, ParameterError, UsageError
from spawnsim.policies import AverageAllPolicy, Every, StateScope, one_storage
from spawnsim.policies.state.arithmetic import as_one_view
from spawnsim.policies.state.layout import collect

KEYS = {
    "averaged_this_iteration", "replacement_mode", "is_replaced", "num_replacements_so_far", "local_metric",
    "replacement_check_every", "global_min_metric", "global_max_metric", "donors", "staleness", "bytes", "wait_s",
}  # fmt: skip


def test_iteration_0_averages_too_so_that_ranks_begin_together() -> None:
    """As in the original; a cadence of one's own leaves it out. The flag says when it happened."""
    for every, cadence, expected in ((3, None, [0, 3, 6]), (1, None, list(range(7))), (3, Every(3), [3, 6])):
        found = walk(
            lambda _, every=every, cadence=cadence: AverageAllPolicy(every, cadence=cadence), ranks=2, steps=7
        )
        assert [i for i in range(7) if found.infos[0, i]["averaged_this_iteration"]] == expected
        assert all(set(info) == KEYS for info in found.infos.values())


@pytest.mark.parametrize("size", [2, 3, 7, 11])
def test_averaging_equal_models_over_a_subgroup_changes_nothing(size: int) -> None:
    """The world-size bug detector: counts come from the group. To the bit, though a sum of seven 0.7 is rounded."""

    def part(comm: Any) -> Any:
        return comm.Split(0 if comm.Get_rank() < size else 1, 0)

    found = walk(
        lambda _: AverageAllPolicy(1), ranks=size + 2, steps=3, group=part, start=lambda _: line(0.7)
    )
    for model in found.models.values():
        assert numbers(model) == numbers(Line(0.7))


@pytest.mark.parametrize("place", [0, 11, WIDE - 1])
def test_models_that_differ_in_one_number_are_averaged(place: int) -> None:
    """Wherever it is: nearly equal is not equal."""

    def start(rank: int) -> tuple[Line, torch.optim.Optimizer]:
        model, optimizer = line(1.0)
        model.weight.data[place] = 8.0 if rank == 6 else 1.0
        return model, optimizer

    found = walk(lambda _: AverageAllPolicy(1), ranks=7, steps=1, start=start)
    assert [model.weight[place].item() for model in found.models.values()] == [2.0] * 7


def test_subgroups_average_apart() -> None:
    """Even and odd ranks have means of their own."""
    found = walk(
        lambda _: AverageAllPolicy(1), steps=2, group=lambda comm: comm.Split(comm.Get_rank() % 2, 0)
    )
    assert [numbers(found.models[rank]) for rank in range(4)] == [{1.0}, {2.0}, {1.0}, {2.0}]


def test_momentum_keeps_a_part_of_the_own_weights() -> None:
    """θ ← m·own + (1 - m)·mean."""
    found = walk(lambda _: AverageAllPolicy(1, momentum=0.25), ranks=2, steps=1)
    assert [numbers(found.models[rank]) for rank in range(2)] == [{0.375}, {0.625}]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64])
def test_every_dtype_is_averaged(dtype: torch.dtype) -> None:
    """Half precision is summed in float32 and rounded once; complex numbers are pairs."""
    found = walk(lambda _: AverageAllPolicy(1), steps=1, start=lambda rank: line(float(rank), dtype=dtype))
    assert found.models[3].weight.dtype == dtype
    assert set(found.models[3].weight.detach().to(torch.complex64).tolist()) == {1.5}


def test_whole_numbers_are_averaged_exactly() -> None:
    """No overflow at the edge of int64, no division by value, nearest with halves up."""
    edge = 2**63 - 1

    def start(rank: int) -> tuple[Line, torch.optim.Optimizer]:
        model, optimizer = line(0.0)
        model.register_buffer("steps", torch.tensor([edge, edge - 1 if rank else edge, rank, -rank]))
        model.register_buffer("small", torch.tensor([250 + rank], dtype=torch.uint8))
        model.register_buffer("flag", torch.tensor([rank == 0, rank > 0]))
        return model, optimizer

    found = walk(lambda _: AverageAllPolicy(1), ranks=3, steps=1, start=start)
    state = found.models[0].state_dict()
    assert state["steps"].tolist() == [edge, edge - 1, 1, -1]
    assert state["small"].tolist() == [251]
    assert state["flag"].tolist() == [False, True]


def test_optimizer_state_is_averaged_or_reset_on_demand() -> None:
    """The momentum buffers of SGD follow `travels`; by default they stay."""

    def start(rank: int) -> tuple[Line, torch.optim.Optimizer]:
        model = Line(0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float(rank))
        optimizer.step()
        kept.append(optimizer)
        return model, optimizer

    for how, expected in (("keep", {0.0, 1.0}), ("average", {0.5}), ("reset", set())):
        kept: list[torch.optim.Optimizer] = []
        walk(
            lambda _, how=how: AverageAllPolicy(1, travels=StateScope(optimizer_state=how)),
            ranks=2,
            steps=1,
            start=start,
        )
        values = {float(s["momentum_buffer"].mean()) for optimizer in kept for s in optimizer.state.values()}
        assert values == expected


def test_one_collective_per_dtype_however_many_parameters() -> None:
    """Fifty tensors travel as one message's worth."""

    def start(rank: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(25)))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    counted: list[str] = []

    class Counting(AverageAllPolicy):
        def comm_of(self, group: Any) -> Any:
            comm, real = super().comm_of(group), type(group).Allreduce
            if comm.Get_rank() == 0 and not counted:
                type(group).Allreduce = lambda self, *a, **k: (counted.append("call"), real(self, *a, **k))[1]
            return comm

    from spawnsim.virtual.mpi.communicators import Intracomm

    before = Intracomm.Allreduce
    try:
        walk(lambda _: Counting(1), ranks=2, steps=1, start=start)
    finally:
        Intracomm.Allreduce = before
    assert len(counted) == 2  # one on each of the two ranks


def test_models_of_different_shapes_are_one_clear_error() -> None:
    """Every rank names the tensor, the ranks and what to do."""
    with pytest.raises(MismatchError, match=r"float32\[2\].*float32\[3\]|float32\[3\].*float32\[2\]"):
        walk(lambda _: AverageAllPolicy(1), start=lambda rank: line(0.0, width=2 if rank == 3 else 3))


def test_a_model_that_changes_shape_later_is_one_clear_error() -> None:
    """The schema is checked together once; afterwards each rank checks its own."""

    def main(comm: Any) -> None:
        policy = AverageAllPolicy(1)
        policy(0, *line(1.0), group=comm)
        policy(1, *line(1.0, width=4), group=comm)

    with pytest.raises(UsageError, match="has changed since"):
        spawnsim.run(main, ranks=2)


def test_one_storage_moves_a_model_and_changes_nothing_else() -> None:
    """Values, shapes and parameter objects stay; tensors of one dtype then lie end to end, and training goes on."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1).half())
    before, objects = {k: v.clone() for k, v in model.state_dict().items()}, list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    one_storage(model)
    assert all(a is b for a, b in zip(model.parameters(), objects, strict=True))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    live = collect(model, None, StateScope())
    for dtype in (torch.float32, torch.float16, torch.int64):
        assert as_one_view([tensor for tensor in live.values() if tensor.dtype == dtype]) is not None
    model[0](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert torch.equal(model[0].weight, before["0.weight"] - 0.5)


def test_tensors_that_share_memory_are_not_parted() -> None:
    """Two parameters over one memory would no longer be tied."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(UsageError, match="share memory"):
        one_storage(model)


def test_a_run_of_tensors_is_recognised() -> None:
    """End to end, in order, of one dtype."""
    row = torch.arange(6.0)
    run = as_one_view([row[:2], row[2:5].view(3), row[5]])
    assert run is not None
    assert run.tolist() == row.tolist()
    assert as_one_view([row[:2], row[3:]]) is None
    assert as_one_view([row[:2], torch.zeros(2)]) is None


def test_an_arena_row_is_averaged_in_place() -> None:
    """Views stay views: the arena sees the mean."""
    arena = torch.arange(2.0).repeat_interleave(4).reshape(2, 4).clone()

    def start(rank: int) -> tuple[Line, torch.optim.Optimizer]:
        model, optimizer = line(0.0)
        model.weight.data, model.logZ.data = arena[rank, :3], arena[rank, 3]
        return model, optimizer

    walk(lambda _: AverageAllPolicy(1, travels=StateScope(buffers=False)), ranks=2, steps=1, start=start)
    assert arena.tolist() == [[0.5] * 4] * 2


def test_torchscript_models_are_averaged() -> None:
    """They keep their modules in no dictionary."""

    def main(comm: Any) -> None:
        torch.manual_seed(comm.rank)
        model = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)))
        policy, optimizer = AverageAllPolicy(1), torch.optim.SGD(model.parameters(), lr=0.1)
        for iteration in range(2):
            policy(iteration, model, optimizer, group=comm)
        assert len(set(comm.allgather(float(sum(p.detach().sum() for p in model.parameters()))))) == 1

    spawnsim.run(main, ranks=10)


def test_a_single_rank_averages_with_itself() -> None:
    """A group of one is no special case for the caller."""
    found = walk(lambda _: AverageAllPolicy(1), ranks=1, steps=1)
    assert found.infos[0, 0]["averaged_this_iteration"]
    assert numbers(found.models[0]) == {0.0}


@pytest.mark.parametrize("bad", [0, -3, 2.5, True, "x", None, float("nan")])
def test_a_bad_period_is_refused(bad: Any) -> None:
    """The period is a whole number of at least 1."""
    with pytest.raises(ParameterError, match="average_every"):
        AverageAllPolicy(bad)


def test_a_group_that_is_none_is_refused() -> None:
    """Without a group there is nobody to average with: said, not passed over in silence."""
    with pytest.raises(ParameterError, match="group"):
        AverageAllPolicy(1)(0, *line(1.0))


def test_checkpoints_go_on_where_they_stopped() -> None:
    """Counters survive."""
    found = walk(lambda _: AverageAllPolicy(1), ranks=2, steps=3)
    again = AverageAllPolicy(1)
    again.load_state_dict(found.policies[0].state_dict())
    assert again.stats == {"num_averagings": 3, "num_healed": 0}
    assert len(found.policies[0].timing["average"]) == 3
