"""One-sided calls on real MPI: they work while the target computes, and their locks meet deadlines."""

from __future__ import annotations

import pytest

from tests.real.test_torch import EPOCHS

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]


def test_a_get_does_not_wait_for_a_target_that_computes(ranks):
    """Windows by Allocate are read while their owner computes: it goes on until it sees that it was read."""
    ranks(
        """
        window = comm.Win.Allocate(8 * 4)
        memory = np.frombuffer(window.tomemory(), np.float64)
        memory[:] = rank
        window.Sync()
        comm.Barrier()
        if rank == 1:
            with comm.compute():
                end = time.perf_counter() + 8
                while not os.path.exists("was read") and time.perf_counter() < end: sum(range(1000))
            assert os.path.exists("was read")
        elif rank == 0:
            got = np.empty(4)
            window.Lock(1, LOCK_SHARED)
            window.Get(got, 1)
            window.Unlock(1)
            open("was read", "w").close()
            assert (got == 1).all()
        comm.Barrier()
        window.Free()
        """,
        n=2,
    )


def test_exclusive_locks_exclude_and_atomics_count(ranks):
    """Read, add one, write, under an exclusive lock: no increment of any rank is lost."""
    ranks(
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


def test_a_lock_that_is_never_released_times_out(ranks):
    """A dead holder hangs survivors in MPI's own Lock for ever; here the wait ends in Timeout."""
    ranks(
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


def test_a_window_over_existing_memory_is_reached_when_its_owner_polls(ranks):
    """`Create` works while the target computes in blocks, since the end of each block polls."""
    ranks(
        """
        mine = np.full(1000, float(rank))
        window = comm.Win.Create(mine)
        comm.Barrier()
        if rank == 1:
            end = time.perf_counter() + 8
            while not os.path.exists("was read, too") and time.perf_counter() < end:
                with comm.compute(): time.sleep(0.02)
            assert os.path.exists("was read, too")
        else:
            got = np.empty(1000)
            window.Lock(1, LOCK_SHARED)
            window.Get(got, 1)
            window.Unlock(1)
            open("was read, too", "w").close()
            assert (got == 1).all()
        comm.Barrier()
        window.Free()
        """,
        n=2,
    )


def test_epochs_say_who_is_missing(ranks):
    """Start and Wait past their deadline name the ranks that have not posted or completed, and may be tried again."""
    ranks(EPOCHS, n=3)
