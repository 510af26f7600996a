"""Contributions that are combined as they come have the same bits as if all were looked at in the end."""

import inspect
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from support.virtual_run import run

import spawnsim
from spawnsim import PhantomArray
from spawnsim.comm import ops
from spawnsim.errors import ParameterError
from spawnsim.virtual.mpi.collectives import Collectives
from spawnsim.virtual.mpi.instance import CollectiveInstance
from spawnsim.virtual.mpi.module import MPI

LONG = 300  # doubles: more than are added up in one array


def contribution(rank):
    """Return numbers whose sum depends on the order."""
    return np.random.default_rng(rank).normal(size=LONG)


def in_the_end(ranks):
    """Return the sum of all contributions, looked at together."""
    return ops.reduce_tree([contribution(rank) for rank in range(ranks)], np.add)


@pytest.fixture
def looked_at_together(monkeypatch):
    """Return a list that grows with each reduction for which all contributions were looked at in the end."""
    found, reduced = [], CollectiveInstance._reduced
    monkeypatch.setattr(
        CollectiveInstance, "_reduced", lambda self, me: found.append(me) or reduced(self, me)
    )
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 8, 13])
@pytest.mark.parametrize("call", ["Allreduce", "Iallreduce", "Reduce_scatter"])
def test_the_order_of_arrival_does_not_change_a_bit(ranks, call, looked_at_together):
    """Ranks come in any order; what they bring is combined in the order of ranks, and each contribution once."""
    late = np.random.default_rng(ranks).random(ranks)

    def main(comm):
        mine, total = contribution(comm.rank), np.zeros(LONG)
        with comm.compute(late[comm.rank]):
            pass
        if call == "Allreduce":
            comm.Allreduce(mine, total)
        elif call == "Iallreduce":
            request = comm.Iallreduce(mine, total)
            mine[:] = np.nan  # it was copied: nothing is lent by a call that only starts
            request.Wait()
        else:
            comm.Reduce_scatter(mine, total, [LONG] + [0] * (comm.size - 1))
            total = comm.bcast(total)
        comm.record(right=total.tobytes() == in_the_end(comm.size).tobytes())

    assert all(run(main, ranks)[1].column("right").values())
    assert not looked_at_together


def test_what_is_put_into_a_waiting_rank_s_memory_is_summed(looked_at_together):
    """Where others can write to a contribution while its rank waits, it is read when all are there."""

    def main(comm):
        mine, total = np.ones(LONG), np.zeros(LONG)
        window = MPI.Win.Create(mine if comm.rank == 0 else None, comm=comm)
        if comm.rank == 1:
            with comm.compute(1.0):
                pass
            window.Lock(0)
            window.Put(np.full(LONG, 10.0), 0)
            window.Unlock(0)
        comm.Allreduce(mine, total)
        window.Free()
        comm.record(total=total[0])

    assert set(run(main, 3)[1].column("total").values()) == {12.0}
    assert looked_at_together


def test_a_function_of_the_program_is_called_where_the_result_is_asked_for():
    """Its error is the first leaver's, and not that of the rank that happened to come last."""

    def fail(first, inout, datatype):
        raise ZeroDivisionError

    def main(comm):
        with comm.compute(comm.rank):
            pass
        with pytest.raises(ZeroDivisionError):
            comm.Allreduce(np.ones(LONG), np.zeros(LONG), MPI.Op.Create(fail))
        comm.record(clock=comm.clock.now())

    clocks = run(main, 3)[1].column("clock").values()
    assert min(clocks) > 2.0


@pytest.mark.parametrize("length", [3, LONG])
def test_overflow_is_no_error_of_a_reduction_whatever_numpy_was_set_to(length):
    """MPI libraries add without a word, and ranks that have told numpy other things share the result."""

    def main(comm):
        with comm.compute(comm.rank):
            pass
        found = np.zeros(length)
        with np.errstate(over="raise" if comm.rank % 2 else "warn"), warnings.catch_warnings():
            warnings.simplefilter("error")
            comm.Allreduce(np.full(length, 1e308), found)
        assert np.isinf(found).all()
        with np.errstate(over="raise"), pytest.raises(FloatingPointError):
            found[:] = np.full(length, 1e308) * 2  # of its own arithmetic the program is told

    run(main, 4)


def test_an_error_of_what_combines_is_raised_where_the_result_is_asked_for(monkeypatch):
    """Each rank gets it as it leaves, and all have come by then."""

    def refuse(*_):
        raise MemoryError

    def main(comm):
        with comm.compute(comm.rank):
            pass
        with pytest.raises(MemoryError):
            comm.Allreduce(np.ones(LONG), np.zeros(LONG))
        comm.record(clock=comm.clock.now())

    monkeypatch.setattr(ops.ReductionTree, "_merged", refuse)
    clocks = run(main, 4)[1].column("clock").values()
    assert min(clocks) > 3.0


@pytest.mark.parametrize("length", [1, 5, LONG])
@pytest.mark.parametrize("size", [*range(1, 18), 33])
def test_a_rooted_reduction_has_the_bits_of_its_binomial_tree(size, length):
    """Also the product of single complex numbers, which numpy rounds otherwise in place."""
    rng = np.random.default_rng(size)
    parts = [rng.normal(size=length) + 1j * rng.normal(size=length) for _ in range(size)]
    kept = [part.copy() for part in parts]
    for root in {0, size // 2, size - 1}:
        expected = ops.reduce_binomial(parts, lambda a, b: np.multiply(a, b, np.empty_like(b)), root)
        found = ops.reduce_to_root(parts, np.multiply, root)
        assert found.tobytes() == expected.tobytes()
        assert not any(np.shares_memory(found, part) for part in parts)
    assert all((part == copy).all() for part, copy in zip(parts, kept, strict=True))


def test_equal_blocks_are_timed_as_counts_that_are_equal():
    """Not given, or given one by one: the same time, and the same digest."""

    def among(counts):
        def main(comm):
            block = np.zeros(4)
            if counts:
                comm.Reduce_scatter(np.arange(4.0 * comm.size), block, [4] * comm.size)
            else:
                comm.Reduce_scatter_block(np.arange(4.0 * comm.size), block)
            comm.record(block=str(block.tolist()), clock=comm.clock.now())

        totals, notes = run(main, 6)
        return totals.digest, notes.column("block"), notes.column("clock")

    assert among(counts=True) == among(counts=False)


def test_no_rank_makes_a_list_of_all_ranks():
    """In a scatter only the root knows the sizes, and equal blocks need no list of them."""
    one = SimpleNamespace(_me=1, _peers=range(10**15), _root=lambda root: root)
    assert Collectives._scatter(one, None, np.zeros(1), 0, vector=False).nbytes == 0
    describe = inspect.getclosurevars(Collectives.Reduce_scatter_block).nonlocals["describe"]
    call = describe(one, np.zeros(0), np.zeros(0))
    assert (call.nbytes, call.sizes) == (0, "blocks")


@pytest.mark.parametrize("ranks", [1, 2, 3, 13])
def test_ranks_that_sum_as_gloo(ranks):
    """Also on communicators made of the first; whole numbers, and calls that gloo lacks, are summed as ever."""
    parts = [contribution(rank) for rank in range(ranks)]
    expected = {
        "Allreduce": ops.combined(parts, MPI.SUM, MPI.DOUBLE),
        "Reduce": ops.combined(parts, MPI.SUM, MPI.DOUBLE, rooted=True),
        "Reduce_scatter": in_the_end(ranks),
    }

    def main(comm):
        mine, again = contribution(comm.rank), comm.Split(0, comm.rank).Dup()
        found = {name: np.zeros(LONG) for name in expected}
        again.Allreduce(mine, found["Allreduce"])
        again.Reduce(mine, found["Reduce"], root=0)
        again.Reduce_scatter(mine, found["Reduce_scatter"], [LONG] + [0] * (ranks - 1))
        found["Reduce"] = again.bcast(found["Reduce"])
        found["Reduce_scatter"] = again.bcast(found["Reduce_scatter"])
        phantom = PhantomArray(10**9, np.float64)
        comm.Allreduce(phantom, PhantomArray(10**9, np.float64))
        return all(found[name].tobytes() == expected[name].tobytes() for name in expected)

    results = []
    spawnsim.run(lambda comm: results.append(main(comm)), ranks=ranks, sums="gloo")
    assert results == [True] * ranks


def test_whose_order_must_be_known():
    """Before anything runs."""
    with pytest.raises(ParameterError, match="sums='nccl': choose one of mpi, gloo"):
        spawnsim.run(lambda comm: None, ranks=2, sums="nccl")
