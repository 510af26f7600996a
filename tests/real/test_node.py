"""Large sums among ranks of one node, through memory that they share."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_sums_are_those_of_the_tree_to_the_last_bit(ranks, n):
    """As virtual ranks sum: for all sizes around the chunk, dtypes, in place or not, however buffers are spelled."""
    ranks(
        f"""
        import torch
        comm = comm.Split(0 if rank < {n} else UNDEFINED)
        if comm is None:
            return
        size = comm.size
        from mpi4py import MPI
        from spawnsim.comm.ops import reduce_tree_in_place
        from spawnsim.real.mpi.collectives import CHUNK_NBYTES, LARGE_NBYTES, SharedMemorySum
        raw = comm.as_mpi_comm()
        rng = np.random.default_rng(rank)
        for kind in (np.float32, np.float64, np.int32, np.int64, np.uint64):
            item = np.dtype(kind).itemsize
            sizes = (8, LARGE_NBYTES - 8, LARGE_NBYTES, CHUNK_NBYTES, CHUNK_NBYTES + 8, 5 * CHUNK_NBYTES // 2)
            for nbytes in sizes if kind in (np.float32, np.int64) else (LARGE_NBYTES, CHUNK_NBYTES + 8):
                own = (rng.standard_normal(nbytes // item) * 1e3).astype(kind)
                expected = reduce_tree_in_place(raw.allgather(own), lambda a, b: np.add(a, b, out=b))
                got = np.empty_like(own)
                if nbytes < LARGE_NBYTES and MPI.get_vendor()[0] == "Open MPI":
                    raw.Allreduce(own, expected)  # a ring's sums for some sizes
                comm.Allreduce(own, got)
                assert (got == expected).all(), (kind, nbytes)
                named = MPI._typedict[np.dtype(kind).char]
                if rank == 0:
                    comm.Allreduce([own, named], [got, len(got), named])
                elif rank == 1:
                    got[:] = own
                    comm.Allreduce(IN_PLACE, got)
                else:
                    comm.Allreduce(own, got.reshape(1, -1))
                assert (got == expected).all(), (kind, nbytes)
        assert type(comm._node) is SharedMemorySum
        mean = torch.full((200, 300), float(rank))
        comm.Allreduce(IN_PLACE, mean)
        assert (mean == size * (size - 1) / 2).all()
        comm.Free()
        """
    )


def test_communicators_have_memory_of_their_own_and_give_it_back(ranks):
    """Halves of the world sum at the same time; a freed communicator leaves nothing open."""
    ranks(
        """
        half, numbers = comm.Split(rank % 2), np.full(100_000, float(rank))
        for _ in range(3):
            total = np.empty_like(numbers)
            half.Allreduce(numbers, total)
            assert (total == (4 if rank % 2 else 2)).all()
        assert len(comm.runtime.windows) == 1
        half.Free()
        assert comm.runtime.windows == []
        comm.Allreduce(numbers, total)
        assert (total == 6).all()
        """
    )


def test_a_maximum_goes_through_the_library(ranks):
    """Only sums take the other way."""
    ranks(
        """
        from spawnsim.comm import MAX
        numbers = np.full(100_000, float(rank))
        comm.Allreduce(IN_PLACE, numbers, MAX)
        assert (numbers == 3).all() and comm._node is None
        """
    )


def test_it_can_be_switched_off(ranks):
    """`Options(node_memory=False)` leaves all to the library."""
    ranks(
        """
        numbers = np.ones(100_000)
        comm.Allreduce(IN_PLACE, numbers)
        assert (numbers == size).all() and comm._node is None
        """,
        n=2,
        options="Options(node_memory=False)",
    )


def test_a_rank_that_stays_away_is_named(job):
    """The watchdog sees the call that waits for it, as in the library's own."""
    found = job(
        """
        comm = world(deadline_s=1.0)
        with guarded(comm):
            numbers = np.ones(100_000)
            comm.Allreduce(IN_PLACE, numbers)
            if comm.rank == 2:
                time.sleep(30)
            comm.Allreduce(IN_PLACE, numbers)
        """
    )
    assert found.status != 0
    assert "Allreduce number" in found.err
    assert "missing: rank 2" in found.err
