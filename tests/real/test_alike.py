"""What ranks over MPI and ranks over torch do alike: what they count, refuse and compute."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import summing
from programs.summing import digests
from support.crew import LATE_RECEIVES, first

import spawnsim
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


def test_virtual_ranks_have_the_bits_of_either_library(alike):
    """Of MPI by default, of the torch backend with `sums="gloo"`: whatever the call, the type and the length."""
    by_sums = {}
    for sums in ("mpi", "gloo"):
        found = by_sums[sums] = {}
        spawnsim.run(
            lambda comm, found=found: found.update({comm.Get_rank(): digests(comm)}), ranks=4, sums=sums
        )
    assert by_sums["mpi"] != by_sums["gloo"]
    alike(
        f"""
        import sys
        sys.path.insert(0, {str(Path(summing.__file__).parent)!r})
        from summing import digests
        sums = "gloo" if backend == "torch" else "mpi"
        found, expected = digests(comm), {by_sums!r}[sums][rank]
        differing = {{name for name in found if found[name] != expected[name]}}
        if backend == "mpi":  # MPICH has other orders for these calls
            differing = {{name for name in differing if not name.startswith(("Reduce", "Scan"))}}
        assert not differing, differing
        assert comm.capabilities().sums == sums
        """
    )


def test_checked_calls_tell_what_differs(alike):
    """On all ranks, with the line of each; the next call goes well."""
    alike(
        """
        odd, a, b, blocks = rank == 2, np.ones(4), np.ones(4), np.ones(4 * size)
        few = a.astype(np.float32) if odd else a
        wrong = [
            ("root 1", lambda: comm.Bcast(a, root=int(odd))),
            ("root 1, 32 bytes", lambda: comm.Gather(a, blocks, root=int(odd))),
            ("root 1", lambda: comm.bcast(rank, root=int(odd))),
            ("root 1", lambda: comm.gather(rank, root=int(odd))),
            ("root 1", lambda: comm.scatter([1] * size, root=int(odd))),
            ("root 1, SUM", lambda: comm.Reduce(a, b, root=int(odd))),
            ("MAX", lambda: comm.Allreduce(a, b, op=MAX if odd else SUM)),
            ("MIN", lambda: comm.Scan(a, b, op=MIN if odd else SUM)),
            ("of float32", lambda: comm.Allreduce(few, few)),
            ("24 bytes", lambda: comm.Allreduce(a[:3] if odd else a, b[:3] if odd else b)),
            ("24 bytes", lambda: comm.Allgather(a[:3] if odd else a, blocks)),
            ("64 bytes", lambda: comm.Alltoall(*([np.ones(8)] * 2 if odd else [a, b]))),
            ("Barrier", lambda: comm.Barrier() if odd else comm.Bcast(a)),
            ("allgather", lambda: comm.allgather(1) if odd else comm.bcast(1)),
        ]
        comm.runtime.check_calls = True
        for what, call in wrong:
            text = told(call)
            assert text.startswith("MismatchError"), (what, text)
            others, _, mine = text.partition("  rank 2: ")
            assert "  ranks 0-1,3: " in others and what in mine and what not in others, text
            assert "<string>" not in text and comm.allreduce(1) == size
        comm.runtime.check_calls = False
        """
    )


def test_checked_calls_let_pass_what_fits(alike):
    """However a rank spells its part."""
    alike(
        """
        first, a, blocks = rank == 0, np.arange(4.0), np.ones(4 * size)
        every_other = DOUBLE.Create_vector(4, 1, 2).Commit()
        counts = list(range(1, size + 1))
        comm.runtime.check_calls = True
        comm.Bcast([np.ones(8), 1, every_other] if first else a)
        comm.Bcast([np.ones(9), 4, DOUBLE] if first else a)
        comm.Bcast([np.ones(9), 4] if rank % 2 else torch.ones(4, dtype=torch.float64))
        comm.Reduce(IN_PLACE if first else a, a if first else None)
        comm.Allreduce(IN_PLACE, a)
        comm.Gather(IN_PLACE if first else a, blocks if first else None)
        comm.Scatter(blocks if first else None, IN_PLACE if first else a)
        comm.Allgather(IN_PLACE, blocks)
        comm.Alltoall(IN_PLACE, blocks)
        comm.Scan(IN_PLACE if first else a.copy(), a)
        comm.Reduce_scatter_block(blocks, a)
        comm.Reduce_scatter(np.ones(sum(counts)), np.ones(counts[rank]), counts)
        comm.Gatherv(np.ones(counts[rank]), [np.ones(sum(counts)), counts] if first else None)
        comm.Scatterv([np.ones(sum(counts)), counts] if first else None, np.ones(counts[rank]))
        comm.Allgatherv(np.ones(counts[rank]), [np.ones(sum(counts)), counts])
        waiting = comm.Ibcast(a), comm.Iscan(a.copy(), np.ones(4))  # not compared, and in any order
        part = comm.Split(rank % 2)
        if rank % 2:
            part.Barrier()
            part.allreduce(1)
        comm.Dup().Bcast(a)
        Request.Waitall(list(waiting))
        win = comm.Win.Allocate(8)
        win.Fence()
        win.Free()
        if backend == "mpi":
            group = comm.Get_group().Incl([0, 1])
            few = comm.Create_group(group) if rank < 2 else None
            comm.Create_cart([2, size // 2]).Sub([True, False]).neighbor_allgather(rank)
        comm.Allgather(np.ones(2), [np.ones(2 * size), 2, DOUBLE] if first else np.ones(2 * size))
        assert comm.allgather(rank) == list(range(size)) and comm.scatter([rank] * size) == 0
        comm.runtime.check_calls = False
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


def test_windows_are_of_the_communicator_that_is_given(alike):
    """Else of the one whose `Win` makes them; what is no communicator is refused."""
    alike(
        """
        pair, seen = comm.Split(rank // 2), np.empty(1)
        makers = [lambda **of: comm.Win.Allocate(8, **of), lambda **of: comm.Win.Create(np.zeros(1), **of)]
        for make in makers + [lambda **of: comm.Win.Create_dynamic(**of)] * (backend == "mpi"):
            for of, members in (({}, size), ({"comm": pair}, 2)):
                win = make(**of)
                assert (win.group.size, win.Get_group().Get_rank()) == (members, rank % members)
                win.Free()
        win = comm.Win.Allocate(8, comm=pair)
        win.Lock_all()
        win.Put(np.array([float(rank)]), pair.rank ^ 1)
        win.Flush_all()
        pair.Barrier()
        win.Get(seen, pair.rank)
        win.Flush_all()
        win.Unlock_all()
        win.Free()
        assert seen[0] == rank ^ 1
        assert "give a communicator of this job" in told(lambda: comm.Win.Allocate(8, comm="world"))
        """
    )


def test_a_receive_that_waited_for_too_long_names_its_tag_and_what_came_instead(alike):
    """A wrong tag shows at once."""
    alike(LATE_RECEIVES)


def test_a_part_is_served_while_its_owner_computes(alike):
    """Windows by Allocate are read meanwhile: the owner goes on until it sees that it was read."""
    alike(
        """
        import os, time
        window, seen = comm.Win.Allocate(8 * 4), np.empty(4)
        np.frombuffer(window.tomemory(), np.float64)[:] = rank
        window.Sync()
        comm.Barrier()
        if rank == 1:
            with comm.compute():
                end = time.perf_counter() + 8
                while not os.path.exists(f"{backend} has read") and time.perf_counter() < end: sum(range(1000))
            assert os.path.exists(f"{backend} has read")
        elif rank == 0:
            window.Lock(1, LOCK_SHARED)
            window.Get(seen, 1)
            window.Unlock(1)
            open(f"{backend} has read", "w").close()
            assert (seen == 1).all()
        comm.Barrier()
        window.Free()
        """,
        n=2,
    )


def test_epochs_say_who_is_missing(alike):
    """Start and Wait past their deadline name the ranks that have not posted or completed, and may be tried again."""
    alike(
        """
        window, group = comm.Win.Allocate(8), comm.Get_group()
        def named_late(call):
            try:
                with comm.clock.deadline(0.3):
                    call()
            except Timeout as late:
                assert late.ranks == (0,) and "0.3 s" in str(late) and "rank 0" in str(late), late
            else:
                raise AssertionError("no deadline")
        if rank == 1:
            named_late(lambda: window.Start(group.Incl([0, 2])))
            comm.send("now", 0)
            window.Start(group.Incl([0, 2]))
            window.Complete()
            window.Post(group.Incl([0]))
            named_late(window.Wait)
            comm.send("now", 0)
            window.Wait()
        elif rank == 2:
            window.Post(group.Incl([1]))
            window.Wait()
        else:
            comm.recv(source=1)
            window.Post(group.Incl([1]))
            window.Wait()
            comm.recv(source=1)
            window.Start(group.Incl([1]))
            window.Complete()
        comm.Barrier()
        window.Free()
        """,
        n=3,
    )


def test_exclusive_locks_exclude_and_atomics_count(alike):
    """Read, add one, write, under an exclusive lock: no increment of any rank is lost."""
    alike(
        """
        window = comm.Win.Allocate(16, 8)
        memory = np.frombuffer(window.tomemory(), np.int64)
        memory[:] = 0
        window.Fence()
        one, got = np.ones(1, np.int64), np.empty(1, np.int64)
        for _ in range(50):
            window.Lock(0, LOCK_EXCLUSIVE)
            window.Get(got, 0)
            window.Flush(0)
            window.Put(got + 1, 0)
            window.Unlock(0)
            window.Fetch_and_op(one, got, 0, 1)
            window.Flush(0)
        window.Fence()
        assert rank or memory.tolist() == [200, 200], memory
        window.Free()
        """
    )


def test_a_lock_that_is_never_released_times_out(alike):
    """A dead holder hangs survivors in MPI's own Lock for ever; here the wait ends in Timeout."""
    alike(
        """
        window = comm.Win.Allocate(8)
        if rank == 1:
            window.Lock(0)
        comm.Barrier()
        if rank == 0:
            try:
                with comm.clock.deadline(0.2):
                    window.Lock(0, LOCK_SHARED)
            except Timeout as error:
                assert error.ranks == (0,)
            else:
                raise AssertionError("locked")
        comm.Barrier()
        if rank == 1:
            window.Unlock(0)
        window.Free()
        """,
        n=2,
    )


def test_a_window_over_existing_memory_is_reached_when_its_owner_polls(alike):
    """`Create` works while the target computes in blocks, since the end of each block polls."""
    alike(
        """
        mine = np.full(1000, float(rank))
        import os, time
        window = comm.Win.Create(mine)
        comm.Barrier()
        if rank == 1:
            end = time.perf_counter() + 8
            while not os.path.exists(f"{backend} read, too") and time.perf_counter() < end:
                with comm.compute(): time.sleep(0.02)
            assert os.path.exists(f"{backend} read, too")
        else:
            got = np.empty(1000)
            window.Lock(1, LOCK_SHARED)
            window.Get(got, 1)
            window.Unlock(1)
            open(f"{backend} read, too", "w").close()
            assert (got == 1).all()
        comm.Barrier()
        window.Free()
        """,
        n=2,
    )
