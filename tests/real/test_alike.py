"""What ranks over MPI and ranks over torch do alike: what they count, refuse and compute."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import pytest
from support.crew import first

from spawnsim.real.launch import launchers

pytestmark = pytest.mark.timeout(120)

HEAD = """
import numpy as np
import torch
from spawnsim.comm import *
from spawnsim.errors import *

def told(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"
"""
Run = Callable[..., None]


@pytest.fixture(params=[pytest.param("mpi", marks=pytest.mark.mpi), "torch"])
def alike(crews, request) -> Run:
    """Run a text on n of four ranks of each backend, whose name is `backend`, and see that it goes well."""
    backend = request.param

    def run(text: str, *, n: int = 4) -> None:
        head = f"{HEAD}backend = {backend!r}\n{first(n)}"
        crew = crews(backend=backend, line=launchers.forked(4)) if backend == "torch" else crews()
        crew.run(head + textwrap.indent(textwrap.dedent(text), "    "))

    return run


def test_a_part_in_a_collective_counts_once_with_the_bytes_that_a_rank_contributes(alike):
    """Also in place, without waiting, by keywords, and where the backend makes the collective of messages."""
    alike(
        """
        a, b, blocks, others = np.ones(10), np.ones(10), np.ones(10 * size), np.ones(10 * size)
        root, all_of_it = rank == 0, 80 * size
        calls = {
            "Allreduce": (lambda: comm.Allreduce(sendbuf=a, recvbuf=b), 80),
            "in place": (lambda: comm.Allreduce(IN_PLACE, a), 80),
            "Iallreduce": (lambda: comm.Iallreduce(a, b).Wait(), 80),
            "Ibcast": (lambda: comm.Ibcast(a).Wait(), 80 * root),
            "Ibarrier": (lambda: comm.Ibarrier().Wait(), 0),
            "Ireduce": (lambda: comm.Ireduce(a, b).Wait(), 80),
            "Iallgather": (lambda: comm.Iallgather(a, blocks).Wait(), 80),
            "Ialltoall": (lambda: comm.Ialltoall(others, blocks).Wait(), all_of_it),
            "Reduce in place": (lambda: comm.Reduce(IN_PLACE if root else a, a), 80),
            "Gather": (lambda: comm.Gather(a, blocks), 80),
            "Gather in place": (lambda: comm.Gather(IN_PLACE if root else a, blocks), 80),
            "Scatter": (lambda: comm.Scatter(blocks, a), all_of_it * root),
            "Allgather in place": (lambda: comm.Allgather(IN_PLACE, blocks), 80),
            "Allgatherv in place": (lambda: comm.Allgatherv(IN_PLACE, [blocks, [3, 4, 5, 6]]), 24 + 8 * rank),
            "Alltoall in place": (lambda: comm.Alltoall(IN_PLACE, blocks), all_of_it),
            "Reduce_scatter_block": (lambda: comm.Reduce_scatter_block(blocks, a), all_of_it),
            "Scan": (lambda: comm.Scan(a, b), 80),
        }
        counters, found = comm.runtime.counters, {}
        for name, (call, _) in calls.items():
            before = counters.messages, counters.nbytes, counters.received
            call()
            found[name] = counters.messages - before[0], counters.nbytes - before[1], counters.received - before[2]
        assert found == {name: (1, nbytes, 0) for name, (_, nbytes) in calls.items()}, found
        """
    )


def test_an_access_to_a_window_is_one_message(alike):
    """Locks are none."""
    alike(
        """
        window, counters = comm.Win.Allocate(80, comm=comm), comm.runtime.counters
        before = counters.messages, counters.nbytes
        window.Lock((rank + 1) % size, LOCK_SHARED)
        window.Get(np.empty(10), (rank + 1) % size)
        window.Unlock((rank + 1) % size)
        assert (counters.messages - before[0], counters.nbytes - before[1]) == (1, 80)
        window.Free()
        """
    )
