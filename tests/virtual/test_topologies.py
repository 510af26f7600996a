"""Grids and graphs take what mpi4py takes."""

import pytest
from virtual_run import run

from spawnsim.comm.constants import UNDEFINED, UNWEIGHTED, WEIGHTS_EMPTY
from spawnsim.comm.failures import CallError


def test_a_graph_may_be_given_as_an_adjacency_array():
    """It begins with 0; a map of it counted one place too many."""

    def main(comm):
        ends, edges = [], []
        for rank in range(comm.size):
            edges += [(rank - 1) % comm.size, (rank + 1) % comm.size]
            ends.append(len(edges))
        for index in (ends, [0, *ends]):
            assert comm.Graph_map(index, edges) == comm.Create_graph(index, edges).rank == comm.rank
        few = [0, 1, 2], [1, 0]
        assert comm.Graph_map(*few) == (comm.rank if comm.rank < 2 else UNDEFINED)

    run(main, 12)


@pytest.mark.parametrize("periods", [[], [0, 0]])
def test_a_grid_needs_a_flag_for_each_length(periods):
    """Else a ValueError, as mpi4py raises it, before ranks have met."""

    def main(comm):
        with pytest.raises(ValueError, match="one flag for each of 1 lengths"):
            comm.Create_cart([comm.size], periods)
        with pytest.raises(CallError, match="must be positive"):
            comm.Create_cart([0, comm.size])

    run(main, 12)


def test_a_graph_without_edges_may_have_weights():
    """They are empty, which is not the same as none."""

    def main(comm):
        for weights, known in ((WEIGHTS_EMPTY, True), ([], True), (UNWEIGHTED, False), (None, False)):
            graph = comm.Create_dist_graph_adjacent([], [], weights, weights)
            assert graph.Get_dist_neighbors_count() == (0, 0, known)
            assert graph.Get_dist_neighbors() == ([], [], ([], []) if known else None)

    run(main, 12)
