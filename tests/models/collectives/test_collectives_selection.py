"""Which algorithm runs, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from support.collective_plans import switch

from spawnsim.errors import ParameterError
from spawnsim.models.collectives import ALGORITHMS, Planner, Selection, finish, names


def test_selection_by_size():
    """Small messages take few steps, large ones send few bytes, as the libraries decide."""
    mpich, openmpi = Planner(switch()), Planner(switch(), Selection.parse("openmpi"))
    assert [mpich.plan("allreduce", 10, n).algorithm for n in (2048, 2049)] == [
        "recursive_doubling",
        "rabenseifner",
    ]
    assert [openmpi.plan("allreduce", 10, n).algorithm for n in (9999, 10000)] == [
        "recursive_doubling",
        "ring",
    ]
    assert [mpich.plan("bcast", 16, n).algorithm for n in (12287, 12288, 524288)] == [
        "binomial", "scatter_doubling", "scatter_ring",
    ]  # fmt: skip
    assert mpich.plan("alltoallv", 3, np.arange(9).reshape(3, 3)).algorithm == "linear"
    assert [mpich.plan("alltoall", 8, n).algorithm for n in (256, 257, 32769)] == [
        "bruck",
        "linear",
        "pairwise",
    ]


@pytest.mark.parametrize("library", ["mpich", "openmpi", "gloo"])
def test_every_choice_can_be_laid_out(library):
    """Whatever a library decides, for whatever size, is an algorithm that there is."""
    planner = Planner(switch(), Selection.parse(library))
    for operation in ALGORITHMS:
        for size in (1, 2, 7, 8, 16, 100):
            for nbytes in (0, 100, 1000, 20_000, 500_000, 5_000_000):
                one = planner.plan(operation, size, nbytes)
                assert one.algorithm in names(operation)
                assert np.isfinite(one.finish(np.zeros(size), planner.network).times).all()


def test_selection_by_name():
    """One word stands for all operations that know it; what nobody knows is refused."""
    assert dict(Selection.parse("ring").fixed) == {
        "allreduce": "ring",
        "allgather": "ring",
        "reduce_scatter": "ring",
    }
    with pytest.raises(ParameterError, match="no library and no algorithm is called 'rnig'"):
        Selection.parse("rnig")
    with pytest.raises(ParameterError, match="choose one of binomial, linear"):
        Selection.parse("bcast=ring")
    with pytest.raises(ParameterError, match="no collective is called 'bcats'"):
        finish("bcats", np.zeros(2), 0, network=switch())


def test_sizes_that_do_not_fit():
    """A block per rank means as many as ranks; an alltoall by Bruck means equal blocks."""
    with pytest.raises(ParameterError, match="shape"):
        finish("gatherv", np.zeros(3), np.array([1, 2]), network=switch())
    with pytest.raises(ParameterError, match="at least 0"):
        finish("bcast", np.zeros(3), -1, network=switch())
    with pytest.raises(ParameterError, match="pairwise or linear"):
        unequal = np.arange(16).reshape(4, 4)
        finish("alltoall", np.zeros(4), unequal, network=switch(), selection=Selection.parse("bruck"))
