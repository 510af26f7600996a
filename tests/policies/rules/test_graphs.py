"""Graphs held to their theory: doubly stochastic, known eigenvalues, exact means after finitely many rounds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from spawnsim.errors import ParameterError
from spawnsim.policies import graphs
from spawnsim.policies.rules.graphs import BaseGraph, Mixing, mixing

NAMED = (
    graphs.ring, graphs.torus, graphs.complete, graphs.exponential, graphs.one_peer_exponential, graphs.random_pairs,
    BaseGraph(1), BaseGraph(3),
)  # fmt: skip


@pytest.mark.parametrize("graph", NAMED, ids=lambda graph: getattr(graph, "__name__", str(graph)))
def test_every_graph_is_doubly_stochastic(graph: graphs.Graph) -> None:
    """For all sizes up to 30, some larger, and several rounds; views by rank say the same as the matrix."""
    for size in (*range(1, 31), 97, 300):
        for round_ in (0, 1, 2, 11):
            found = mixing(graph, size, round_, 5)
            if size > 30:
                continue
            full = found.matrix()
            np.testing.assert_allclose(full.sum(0), 1, rtol=0, atol=1e-12)
            np.testing.assert_allclose(full.sum(1), 1, rtol=0, atol=1e-12)
            assert full.min() >= 0
            for rank in range(size):
                row, column = np.zeros(size), np.zeros(size)
                row[rank] = column[rank] = found.own(rank)
                for other, weight in found.incoming(rank):
                    row[other] = weight
                for other, weight in found.outgoing(rank):
                    column[other] = weight
                np.testing.assert_array_equal(row, full[rank])
                np.testing.assert_array_equal(column, full[:, rank])
            values = np.arange(size) ** 2.0
            np.testing.assert_allclose(found(values), full @ values, rtol=1e-13)


def test_fixed_graphs_have_the_eigenvalues_of_theory() -> None:
    """Ring: 1/3 + 2/3 cos(2πk/n). Torus: (1 + 2cos + 2cos)/5. Exponential: |1 − 2/(1 + log2 n)| for n = 2^k."""
    for size in (5, 12, 33):
        expected = sorted(1 / 3 + 2 / 3 * math.cos(2 * math.pi * k / size) for k in range(size))
        np.testing.assert_allclose(np.linalg.eigvalsh(graphs.ring(size).matrix()), expected, atol=1e-12)
    waves = [[2 * math.cos(2 * math.pi * k / side) for k in range(side)] for side in (4, 5)]
    expected = sorted((1 + row + column) / 5 for row in waves[0] for column in waves[1])
    np.testing.assert_allclose(np.linalg.eigvalsh(graphs.torus(20).matrix()), expected, atol=1e-12)
    for power in (3, 4, 6):
        values = sorted(abs(np.linalg.eigvals(graphs.exponential(2**power).matrix())))
        assert values[-2] == pytest.approx(1 - 2 / (1 + power), abs=1e-12)


def test_one_peer_exponential_is_exact_for_powers_of_two_alone() -> None:
    """The product of log2 n rounds is the mean, from any round on; for 12 ranks it never is."""
    for first in range(4):
        product = np.eye(16)
        for round_ in range(first, first + 4):
            product = graphs.one_peer_exponential(16, round_).matrix() @ product
        np.testing.assert_allclose(product, 1 / 16, atol=1e-15)
    values = np.arange(12.0)
    for round_ in range(12):
        values = graphs.one_peer_exponential(12, round_)(values)
    assert 1e-6 < np.ptp(values) < 1


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_base_graphs_are_exact_for_any_number_of_ranks(degree: int) -> None:
    """At most k neighbours in a round, the mean to 1e-12, in at most 2·log_{k+1} n + 2 rounds (theorem 1)."""
    for size in (*range(2, 101), 243, 255, 257, 625, 1000, 1023, 1024):
        values = np.random.default_rng(size).normal(size=size)
        mean, rounds = values.mean(), BaseGraph(degree).rounds(size)
        for round_ in range(len(rounds)):
            found = mixing(BaseGraph(degree), size, round_)
            assert np.bincount(found.receivers[found.receivers != found.senders], minlength=1).max() <= degree
            values = found(values)
        np.testing.assert_allclose(values, mean, rtol=0, atol=1e-12)
        assert len(rounds) <= 2 * math.log(size, degree + 1) + 2 + 1e-9
        assert mixing(BaseGraph(degree), size, len(rounds)) is not None  # the rounds repeat


def test_base_graphs_have_the_lengths_of_their_paper() -> None:
    """Hypercubes for products of small factors; 5 ranks in 5 rounds, 6 in 4 (figures 2 to 4)."""
    assert [len(BaseGraph(1).rounds(size)) for size in (2, 3, 4, 5, 6, 7, 8, 16, 25)] == [
        1,
        3,
        2,
        5,
        4,
        5,
        3,
        4,
        9,
    ]
    assert [len(BaseGraph(2).rounds(size)) for size in (3, 6, 9, 27)] == [1, 2, 2, 3]
    assert len(BaseGraph(4).rounds(625)) == 4


def test_random_pairs_are_pairs_that_change() -> None:
    """Each rank has one partner (one rank none, of an odd number); another round or seed gives others."""
    for size in (8, 9):
        found = graphs.random_pairs(size, 3, 5).matrix()
        assert sorted((found > 0).sum(0).tolist()) == [1] * (size % 2) + [2] * (size - size % 2)
        np.testing.assert_array_equal(found, found.T)
    same, round_, seed = (graphs.random_pairs(20, *key).matrix() for key in ((3, 5), (4, 5), (3, 6)))
    assert (same == graphs.random_pairs(20, 3, 5).matrix()).all()
    assert (same != round_).any()
    assert (same != seed).any()


def test_weights_of_any_graph_and_bad_graphs() -> None:
    """A star by Metropolis' weights; edges in one direction, to nobody; rows that do not sum to 1."""
    star = graphs.metropolis([range(1, 11), *[[0]] * 10])
    assert star.own(0) == pytest.approx(1 / 11)
    assert star.own(3) == pytest.approx(10 / 11)
    mixing(lambda *_: star, 11, 0)
    for bad in ([[1], []], [[0], []], [[2], []]):
        with pytest.raises(ParameterError, match="rank 0 has neighbour"):
            graphs.metropolis(bad)

    def directed(size: int, round_: int, seed: int) -> Mixing:
        """All send half to rank 0: columns sum to 1, rows do not."""
        ranks = np.arange(size)
        weights = np.full(size, 0.5)
        weights[0] = 0
        keep = np.where(ranks == 0, 1, 0.5)
        return Mixing(size, np.concatenate([ranks, 0 * ranks[1:]]), np.concatenate([ranks, ranks[1:]]),
                      np.concatenate([keep, weights[1:]]))  # fmt: skip

    mixing(directed, 5, 0, rows=False)
    with pytest.raises(
        ParameterError, match=r"graph directed of 5 ranks is not doubly stochastic .* row 0 sums to 3"
    ):
        mixing(directed, 5, 0)
    with pytest.raises(ParameterError, match="edge to a rank that does not exist"):
        mixing(lambda *_: graphs.ring(6), 5, 0)
    with pytest.raises(ParameterError, match="degree=0"):
        BaseGraph(0)
