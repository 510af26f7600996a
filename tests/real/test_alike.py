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
from spawnsim.comm.constants import *
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


def test_tensors_that_require_grad_are_refused(alike):
    """By every collective, whether they are given, filled, or summed in place, and as they are."""
    alike(
        """
        p, free = torch.nn.Parameter(torch.full((4,), float(rank))), torch.ones(4)
        calls = {
            "Bcast": lambda: comm.Bcast(p),
            "Ibcast": lambda: comm.Ibcast(p),
            "a view": lambda: comm.Bcast(p.view(2, 2)),
            "not a leaf": lambda: comm.Bcast(p * 2),
            "in place": lambda: comm.Allreduce(IN_PLACE, p),
            "a plain tensor in place": lambda: comm.Allreduce(IN_PLACE, torch.ones(4, requires_grad=True)),
            "given": lambda: comm.Allreduce(p, free),
            "filled": lambda: comm.Allreduce(free, p),
            "Reduce": lambda: comm.Reduce(p, free),
            "Allgather": lambda: comm.Allgather(p, torch.empty(4 * size)),
        }
        found = {name: told(call) for name, call in calls.items()}
        assert all("detach()" in text and "BufferError" in text for text in found.values()), found
        assert p.detach().tolist() == [float(rank)] * 4
        comm.Bcast(p.detach())
        assert p.detach().tolist() == [0.0] * 4
        """
    )


def test_types_that_gloo_has_not_travel_as_bytes_or_are_refused(alike):
    """Neither is the death of a rank."""
    alike(
        """
        for dtype in (torch.int16, torch.bool, torch.complex64):
            one = torch.ones(3).to(dtype)
            moved, table = one * (rank == 1), torch.zeros(3 * size, dtype=dtype)
            comm.Bcast(moved, root=1)
            comm.Allgather(moved, table)
            assert moved.equal(one) and table.equal(torch.ones(3 * size).to(dtype)), (dtype, moved, table)
        eight = torch.ones(3).to(torch.float8_e4m3fn)
        if told(lambda: comm.Bcast(eight)) != "accepted":  # over MPI they are bytes
            assert backend == "torch" and "SpecBufferError" in told(lambda: comm.Bcast(eight))
        assert "Error" in told(lambda: comm.Allreduce(eight, torch.empty_like(eight)))
        comm.Barrier()
        """
    )


def test_bfloat16_is_summed(alike):
    """By every reduction, into results of its own or in place, and also where a count is stated."""
    alike(
        """
        half, total = dict(dtype=torch.bfloat16), size * (size + 1) / 2
        def ones(count=size): return torch.full((count,), rank + 1.0, **half)
        def zeros(count=size): return torch.zeros(count, **half)
        found = {name: zeros() for name in ("Allreduce", "Iallreduce", "Reduce", "Ireduce", "Scan", "counted")}
        comm.Allreduce(ones(), found["Allreduce"])
        comm.Iallreduce(ones(), found["Iallreduce"]).Wait()
        comm.Reduce(ones(), found["Reduce"], root=1)
        comm.Ireduce(ones(), found["Ireduce"], root=0).Wait()
        comm.Scan(ones(), found["Scan"])
        comm.Allreduce([ones(), 2], [found["counted"], 2])
        for name, call in ("block", comm.Reduce_scatter_block), ("scattered", comm.Reduce_scatter):
            found[name] = zeros(2)
            call(ones(2 * size), found[name])
        found["in place"] = ones()
        comm.Allreduce(IN_PLACE, found["in place"])
        wanted = dict.fromkeys(found, total) | {"Scan": (rank + 1) * (rank + 2) / 2}
        wanted |= {"Reduce": total * (rank == 1), "Ireduce": total * (rank == 0)}
        assert (found["counted"][2:] == 0).all()
        found["counted"] = found["counted"][:2]
        assert all((found[name] == number).all() for name, number in wanted.items()), found
        largest = zeros()
        comm.Allreduce(-ones(), largest, op=MAX)
        assert (largest == -1).all(), largest
        assert "BAND does not take MPI_BFLOAT16_T" in told(lambda: comm.Allreduce(ones(), zeros(), BAND))
        """
    )


def test_accesses_outside_of_an_epoch_or_of_the_window_are_refused(alike):
    """Before anything is sent; locks, a fence and Start let in."""
    alike(
        """
        after = (rank + 1) % size
        window, into = comm.Win.Allocate(8 * (rank + 1), disp_unit=8, comm=comm), np.empty(1)
        outside = "outside an epoch: Lock, Fence or Start first"
        assert outside in told(lambda: window.Get(into, after))
        assert outside in told(lambda: window.Rput(into, after))
        window.Fence()
        assert told(lambda: window.Get(into, after)) == "accepted"
        window.Fence(MODE_NOSUCCEED)
        assert outside in told(lambda: window.Accumulate(into, after))
        group = comm.Get_group()
        window.Post(group)
        window.Start(group)
        assert told(lambda: window.Get(into, after)) == "accepted"
        window.Complete()
        window.Wait()
        target = torch.tensor(after) if backend == "mpi" else after
        window.Lock(target)
        assert told(lambda: window.Get(into, target, after)) == "accepted"
        beyond = f"of which rank {after} has {8 * (after + 1)}"
        for spec, target in ((into, after + 1), (into, -1), (np.empty(after + 2), None), (into, [after, 2, DOUBLE])):
            assert beyond in told(lambda: window.Get(spec, after, target)), (spec, target)
        assert beyond in told(lambda: window.Put([np.empty(9), after + 2, DOUBLE], after))
        assert told(lambda: window.Put(into, PROC_NULL, 99)) == "accepted"
        window.Unlock(after)
        window.Free()
        """
    )
