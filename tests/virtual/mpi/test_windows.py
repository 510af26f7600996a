"""Handles of windows."""

import numpy as np
import pytest
from support.virtual_run import run

from spawnsim.comm.constants import LOCK_SHARED
from spawnsim.comm.failures import CallError
from spawnsim.comm.ops import NO_OP


def test_windows_are_of_the_communicator_that_is_given():
    """Else of the one whose `Win` makes them, as on real ranks; those of the class `Win` are of COMM_SELF alone."""

    def main(comm):
        pair = comm.Split(comm.rank // 2)
        for make in (
            lambda **of: comm.Win.Allocate(8, **of),
            lambda **of: comm.Win.Create(np.zeros(1), **of),
            lambda **of: comm.Win.Allocate_shared(8, **of),
            lambda **of: comm.Win.Create_dynamic(**of),
        ):
            for of, size in (({}, comm.size), ({"comm": pair}, 2)):
                win = make(**of)
                assert (win.group.size, win.group.rank) == (size, comm.rank % size)
                win.Free()
        assert type(win).Allocate(8).group.size == 1

    run(main, 10)


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        (lambda win: win.Lock(1), lambda win: win.Unlock(1)),
        (lambda win: win.Lock_all(), lambda win: win.Unlock_all()),
        (lambda win: win.Fence(), lambda win: win.Fence()),
    ],
    ids=["lock", "lock_all", "fence"],
)
def test_all_handles_of_a_window_share_its_epoch(begin, end):
    """What one begins, another may use and end; a copy knew of Lock alone, of neither Lock_all nor Fence."""

    def main(comm):
        win = comm.Win.Allocate(8, comm=comm)
        other = type(win)(win)
        begin(win)
        other.Put(np.full(8, comm.rank + 1, np.uint8), 1)
        end(other)
        comm.Barrier()
        assert comm.rank != 1 or set(win.tolist()) == set(other.tolist()) <= {1, 2}
        if comm.rank == 1:
            assert win[0] > 0
        win.Free()
        with pytest.raises(CallError, match="null"):
            win.Lock_all()

    run(main, 2)


def test_a_copy_of_no_window_is_none():
    """As with mpi4py: a null handle, whatever it was made of."""

    def main(comm):
        win = comm.Win.Allocate(8, comm=comm)
        kind = type(win)
        win.Free()
        for none in (kind(), kind(kind()), kind(win)):
            assert not none and none.nbytes == 0

    run(main, 2)


@pytest.mark.parametrize("end", ["Flush", "Unlock"])
def test_a_loop_that_reads_its_own_part_comes_to_the_time_of_a_store(end):
    """Such a read costs next to nothing; a loop of them, as mpi4py's Mutex has, let nobody else go on."""

    def main(comm):
        win, seen, looks = comm.Win.Allocate(8, comm=comm), np.zeros(1, np.int64), 0
        comm.Barrier()
        if comm.rank == 10:
            comm.clock.sleep(5e-3)
            win.Lock(0, LOCK_SHARED)
            win.Accumulate(np.ones(1, np.int64), 0)
            win.Unlock(0)
        while comm.rank == 0 and not seen[0]:
            looks += 1
            assert looks < 10_000
            if end == "Unlock" or looks == 1:
                win.Lock(0, LOCK_SHARED)
            win.Fetch_and_op(seen, seen, 0, op=NO_OP)
            getattr(win, end)(0)
        if comm.rank == 0 and end == "Flush":
            win.Unlock(0)
        comm.Barrier()

    run(main, 11)
