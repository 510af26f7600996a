"""Handles of windows."""

import numpy as np
import pytest
from support.virtual_run import run

from spawnsim.comm.failures import CallError


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
