"""Who belongs together, who keeps what, who reduces how much: pure functions against closed forms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog
from support.effort import tried

from spawnsim.errors import ParameterError
from spawnsim.policies.averaging import Everyone, Exponential, Grid, RandomGroups
from spawnsim.policies.averaging.directory import replicas
from spawnsim.policies.averaging.gossip import partner
from spawnsim.policies.averaging.interface import next_bits
from spawnsim.policies.averaging.tree import tree
from spawnsim.policies.averaging.vector import element_counts, fractions, whole_shares

RULES = [
    Everyone(),
    Exponential(),
    Grid(),
    Grid((3, 4, 50)),
    RandomGroups(4),
    RandomGroups(7, seed=3),
]


def mixed(values: np.ndarray, rule: object, round_: int) -> np.ndarray:
    """Return the values after one round of plain averaging in the rule's groups."""
    size = len(values)
    return np.stack([values[list(rule.members(rank, size, round_))].mean(axis=0) for rank in range(size)])


@given(st.sampled_from(RULES), st.integers(1, 60), st.integers(0, 9))
def test_a_rule_partitions_the_ranks(rule: object, size: int, round_: int) -> None:
    """Every member of a group sees the same group, and each rank is in exactly one."""
    groups = {rank: rule.members(rank, size, round_) for rank in range(size)}
    for rank, members in groups.items():
        assert rank in members
        assert list(members) == sorted(set(members))
        assert all(groups[other] == members for other in members)


def test_a_square_grid_is_exact_in_two_rounds() -> None:
    """1,024 = 32²: no spread is left, and the mean stays."""
    values = np.random.default_rng(0).normal(size=(1024, 3))
    after = mixed(mixed(values, Grid(), 0), Grid(), 1)
    assert np.abs(after - values.mean(axis=0)).max() < 1e-14


def test_the_exponential_graph_is_exact_after_log2_rounds() -> None:
    """64 ranks agree after six rounds."""
    values = after = np.random.default_rng(0).normal(size=(64, 3))
    for round_ in range(6):
        after = mixed(after, Exponential(), round_)
    assert np.abs(after - values.mean(axis=0)).max() < 1e-14


@pytest.mark.parametrize(("size", "members"), [(64, 2), (64, 8), (1024, 32)])
def test_random_groups_contract_as_the_closed_form_says(size: int, members: int) -> None:
    """Variance shrinks by (N/M − 1)/(N − 1) a round in expectation: within 1 % over 40,000 columns and draws."""
    wide, rounds = 400, 100 if size < 1024 else 12
    values = np.random.default_rng(1).normal(size=(size, wide))
    before = values.var(axis=0).mean()
    after = []
    for round_ in range(rounds):
        order = np.argsort([rank for group in _groups(size, members, round_) for rank in group])
        means = values[np.concatenate(_groups(size, members, round_))].reshape(-1, members, wide).mean(axis=1)
        after.append(np.repeat(means, members, axis=0)[order].var(axis=0).mean())
    assert np.mean(after) / before == pytest.approx((size / members - 1) / (size - 1), rel=0.01)


def _groups(size: int, members: int, round_: int) -> list[tuple[int, ...]]:
    rule, seen, groups = RandomGroups(members, seed=5), set[int](), []
    for rank in range(size):
        if rank not in seen:
            groups.append(rule.members(rank, size, round_))
            seen.update(groups[-1])
    return groups


# --------------------------------------------------------------------------------------------------------- keys
@given(st.text(max_size=8), st.integers(1, 300), st.sets(st.integers(0, 299), max_size=5))
def test_a_key_has_two_replicas_that_are_not_suspects(key: str, size: int, suspects: set[int]) -> None:
    """The same for all who ask; in a world of suspects, suspects are asked."""
    found = replicas(key, size, suspects)
    assert found == replicas(key, size, suspects)
    assert len(set(found)) == len(found) <= 2
    if size > 20:
        assert not suspects.intersection(found)


@given(st.integers(1, 6), st.integers(0, 2**62), st.data())
def test_members_of_a_group_scatter(width: int, number: int, data: st.DataObject) -> None:
    """With as many buckets as members no two have the same key in the next round."""
    size = data.draw(st.integers(2, 2**width))
    bits = "0" * width
    after = [next_bits(bits, number, index=i, group_size=size, target=2**width) for i in range(size)]
    assert len(set(after)) == size
    assert {len(each) for each in after} == {width}
    assert next_bits("", number, index=0, group_size=size, target=4) == ""  # no bits stay no bits


# ------------------------------------------------------------------------------------------------------ balance
def by_linear_programme(bandwidths: np.ndarray) -> float:
    """Return the optimum of: minimise x, subject to 1 + (n − 2)·w_i <= x·b_i where b_i > 0, Σ w = 1, w >= 0."""
    n, works = len(bandwidths), bandwidths > 0
    rows = np.hstack([np.diag(np.full(n, n - 2.0)), -bandwidths[:, None]])[works]
    free = [(0, None if rate else 0) for rate in bandwidths] + [(0, None)]
    total = np.append(np.ones(n), 0)[None]
    found = linprog(np.append(np.zeros(n), 1), rows, -np.ones(works.sum()), total, [1.0], free)
    assert found.success
    return float(found.x[-1])


def slowest_time(parts: Sequence[float], bandwidths: Sequence[float]) -> float:
    """Return the time of the slowest peer with bandwidth, for a vector of length 1: max (1 + (n − 2)·w_i)/b_i."""
    rates = np.asarray(bandwidths)
    load = 1 + (rates.size - 2) * np.asarray(parts)
    return float(np.max(load[rates > 0] / rates[rates > 0]))


@tried(60)
@given(st.lists(st.one_of(st.just(0.0), st.floats(0.05, 100)), min_size=3, max_size=40))
def test_filling_water_solves_the_linear_programme(bandwidths: list[float]) -> None:
    """The slowest peer is as fast as in the programme's optimum."""
    if any(bandwidths):
        found = fractions(bandwidths)
        assert (found >= 0).all()
        assert found.sum() == pytest.approx(1)
        optimum = by_linear_programme(np.array(bandwidths))
        assert slowest_time(found, bandwidths) == pytest.approx(optimum, rel=1e-6)


@pytest.mark.parametrize(
    ("length", "bandwidths", "reference"),
    [
        (60, (0.25, 0.25, 0.25, 0.25), (15, 15, 15, 15)),
        (1024, (0.3, 0.5, 0.9, 0.6), (0, 255, 479, 290)),
        (60, (0.44, 0.33, 0.22), (42, 18, 0)),
        (60, (0.44, 0.32, 0.41), (27, 9, 24)),
        (1024 * 1024, (0.3, 0.5, 0.9, 0.6, None, 0.6), (0, 169327, 602629, 276621, 0, 0)),
        (1024, (0.0, 0.5, None, 1.0), (0, 64, 512, 448)),
    ],
)
def test_never_slower_than_a_reference(length: int, bandwidths: tuple, reference: tuple) -> None:
    """Hand-made partitions of the same vectors take at least as long (up to one element)."""
    known = [rate for rate in bandwidths if rate]
    rates = np.array([sum(known) / len(known) if rate is None else rate for rate in bandwidths])
    found = np.array(element_counts(length, bandwidths))
    assert found.sum() == length
    best = slowest_time(found / length, rates)
    if sum(reference) == length:
        element_s = len(rates) / length / rates[rates > 0].min()
        assert best <= slowest_time(np.array(reference) / length, rates) + element_s


def test_small_shares_and_unknown_bandwidths() -> None:
    """`min_size` holds where somebody can have that much; an unknown bandwidth is the mean; whole quotas are exact."""
    assert element_counts(60, (1.0, 1.0, 0.2), min_size=5)[2] == 0
    assert sum(element_counts(60, (1.0, 1.0, 0.2), min_size=100)) == 60
    assert element_counts(60, [0.55, 0.44, 0.40], 10) == [41, 19, 0]
    assert element_counts(60, [0.32, 0.55, 0.44], 10) == [0, 40, 20]
    assert element_counts(1, [0.55, 0.20, 0.44], 10) == [1, 0, 0]
    assert element_counts(100, [0, 0, None, None]) == [0, 0, 50, 50]
    assert whole_shares(10, np.array([1.0, 2.0, 2.0])) == [2, 4, 4]


@given(st.integers(1, 255), st.integers(1, 10**6), st.integers(0, 2**32))
def test_up_to_255_peers_share_every_element(peers: int, length: int, seed: int) -> None:
    """Whole numbers that sum exactly, none negative; clients get nothing."""
    rng = np.random.default_rng(seed)
    bandwidths = rng.uniform(0, 100, peers) * (rng.random(peers) > 0.1)
    bandwidths[0] = 1.0
    found = np.array(element_counts(length, list(bandwidths), int(rng.integers(0, length + 1))))
    assert found.sum() == length
    assert (found >= 0).all()
    assert not found[bandwidths == 0].any()


def test_bad_parameters_are_refused() -> None:
    """In the constructor, with the value in the message."""
    for make in (
        lambda: Grid(()),
        lambda: RandomGroups(1),
        lambda: fractions([0.0, 0.0]),
        lambda: Grid((2, 2)).sides(5),
    ):
        with pytest.raises(ParameterError):
            make()


# ------------------------------------------------------------------------------------------------- by the clock
def test_a_tree_reaches_all() -> None:
    """Each member but the root has one parent, which names it as a child."""
    members = tuple(range(5, 105))
    for rank in members:
        parent, children = tree(members, rank, 4)
        assert all(tree(members, child, 4)[0] == rank for child in children)
        assert (parent is None) == (rank == 5)


def test_partners() -> None:
    """ring: the successor; shift_one: lower half to upper, shifted; random: nobody absent, never oneself."""
    rng = np.random.default_rng(0)
    assert [partner("ring", r, 4, round_=0, rng=rng) for r in range(4)] == [1, 2, 3, 0]
    assert [partner("shift_one", r, 6, round_=1, rng=rng) for r in range(6)] == [4, 5, 3, None, None, None]
    odd = {
        frozenset((r, p))
        for t in range(10)
        for r in range(5)
        if (p := partner("shift_one", r, 5, round_=t, rng=rng)) is not None
    }
    assert {rank for pair in odd for rank in pair} == set(range(5))
    assert all(len(pair) == 2 for pair in odd)
    assert {partner("random", 2, 5, round_=0, rng=rng) for _ in range(99)} == {0, 1, 3, 4}
    assert partner("random", 0, 1, round_=0, rng=rng) is None
