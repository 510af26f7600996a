"""Which GPU a rank uses, without any communicator."""

from __future__ import annotations

import pytest

from spawnsim.errors import ParameterError
from spawnsim.real.launch.launchers import gpu_of_rank, local_rank


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, 1),
        ({"MPI_LOCALRANKID": "3", "SLURM_LOCALID": "0"}, 3),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, 2),
        ({"SLURM_LOCALID": "1"}, 1),
        ({"PMI_RANK": "4", "PMI_SIZE": "6"}, 4),
        ({}, 0),
    ],
)
def test_the_innermost_launcher_says_the_local_rank(environ: dict[str, str], rank: int) -> None:
    """An mpiexec inside an allocation of Slurm counts its own ranks."""
    assert local_rank(environ) == rank


def test_ranks_of_a_node_take_turns() -> None:
    """More ranks than GPUs share them; without GPUs there is no index."""
    chosen = [gpu_of_rank(2, {"LOCAL_RANK": str(rank)}) for rank in range(4)]
    assert chosen == [0, 1, 0, 1]
    assert gpu_of_rank(0, {"LOCAL_RANK": "1"}) is None


def test_a_broken_variable_is_named() -> None:
    """The message says which."""
    with pytest.raises(ParameterError, match="LOCAL_RANK='x'"):
        local_rank({"LOCAL_RANK": "x"})
