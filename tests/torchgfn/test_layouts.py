"""Who trains, who keeps buffers, who coordinates: pure functions of numbers and host names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spawnsim.errors import ParameterError
from spawnsim.torchgfn.distributed import DistributedContext, RankLayout, arithmetic_layout, host_layout


def test_the_last_rank_of_each_chunk_keeps_the_buffer() -> None:
    """Nine ranks, two buffers, a coordinator, three agent groups."""
    layout = arithmetic_layout(9, 2, 3, 1)
    assert layout.training_ranks == (0, 1, 2, 4, 5, 6)
    assert layout.buffer_ranks == (3, 7)
    assert layout.coordinator_rank == 8
    assert layout.agent_groups == ((0, 1), (2, 4), (5, 6))
    assert [layout.buffer_of(rank) for rank in range(9)] == [3, 3, 3, None, 7, 7, 7, None, None]
    assert [layout.trainers_of(rank) for rank in (3, 7, 0, 8)] == [(0, 1, 2), (4, 5, 6), None, None]
    assert [layout.role_of(rank) for rank in (0, 3, 8)] == ["training", "buffer", "coordinator"]


def test_without_buffers_all_train() -> None:
    """No chunk, no keeper, one group."""
    layout = arithmetic_layout(5)
    assert (layout.training_ranks, layout.chunks, layout.coordinator_rank) == ((0, 1, 2, 3, 4), (), None)
    assert layout.agent_group_size == 5


def test_buffers_stay_on_hosts() -> None:
    """Ranks dealt out to two hosts in turn: each host has a buffer of its own, and its ranks form a group."""
    layout = host_layout(["a", "b"] * 4, num_remote_buffers=2, num_agent_groups=2)
    assert layout.chunks == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert layout.agent_groups == ((0, 2, 4), (1, 3, 5))


def test_unequal_hosts_get_equal_shares_of_buffers() -> None:
    """The arithmetic layout would let a chunk span both hosts."""
    layout = host_layout(["a"] * 4 + ["b"] * 2, num_remote_buffers=2)
    assert layout.chunks == ((0, 1, 2, 3), (4, 5))
    assert arithmetic_layout(6, 2).chunks == ((0, 1, 2), (3, 4, 5))


def test_buffers_that_do_not_divide_fall_back_to_runs() -> None:
    """Three buffers on two hosts, or a host too small for its share."""
    assert host_layout(["a"] * 4 + ["b"] * 4, 3).chunks == arithmetic_layout(8, 3).chunks
    assert host_layout(["a"] * 5 + ["b"], 2).chunks == arithmetic_layout(6, 2).chunks


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[str], int, int, int]:
    """Return host names, buffers, agent groups and coordinators that fit together."""
    coordinators = draw(st.integers(0, 1))
    working = draw(st.integers(1, 40))
    buffers = draw(st.integers(0, working // 2))
    training = working - buffers
    groups = draw(st.sampled_from([n for n in range(1, training + 1) if training % n == 0]))
    names = draw(st.lists(st.sampled_from("abcd"), min_size=working, max_size=working))
    return names + ["z"] * coordinators, buffers, groups, coordinators


@given(jobs())
def test_every_rank_has_one_part(job: tuple[list[str], int, int, int]) -> None:
    """Parts and groups are partitions, every trainer has a buffer where there are any, and the other way round."""
    hosts, *numbers = job
    for layout in (host_layout(hosts, *numbers), arithmetic_layout(len(hosts), *numbers)):
        _hold(layout, *numbers)


def _hold(layout: RankLayout, buffers: int, groups: int, coordinators: int) -> None:
    everyone = list(range(layout.world_size))
    last = everyone[-1:] if coordinators else []
    assert sorted([*layout.training_ranks, *layout.buffer_ranks, *last]) == everyone
    assert (len(layout.buffer_ranks), len(layout.agent_groups)) == (buffers, groups)
    assert sorted(rank for group in layout.agent_groups for rank in group) == list(layout.training_ranks)
    assert len({len(group) for group in layout.agent_groups}) == 1
    for rank in layout.training_ranks:
        keeper = layout.buffer_of(rank)
        assert (keeper is None) == (buffers == 0)
        assert keeper is None or rank in (layout.trainers_of(keeper) or ())


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((4, 3, 1, 0), "num_remote_buffers=3: 4 ranks"),
        ((4, -1, 1, 0), "num_remote_buffers=-1"),
        ((4, 0, 3, 0), "4 training ranks do not divide into 3"),
        ((4, 2, 3, 0), "num_agent_groups=3"),
        ((4, 0, 0, 0), "num_agent_groups=0"),
        ((4, 0, 1, 2), "num_coordinators=2"),
        ((1, 0, 1, 1), "leave one training"),
    ],
)
def test_numbers_that_do_not_fit_are_reported(numbers: tuple[int, int, int, int], message: str) -> None:
    """Before any group is made."""
    with pytest.raises(ParameterError, match=message):
        arithmetic_layout(*numbers)


def test_a_context_without_a_layout_counts_as_the_original_did() -> None:
    """The first ranks train."""
    place = DistributedContext(my_rank=3, world_size=4, num_training_ranks=3, agent_group_size=3)
    assert (place.is_training_rank(), place.is_buffer_rank(), place.get_train_group()) == (False, True, None)
