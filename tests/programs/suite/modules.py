"""Modules of the program's folder are each rank's own; argv, globals and stdin too."""

import sys

import helper_state
from helper_state import Holder, note
from mpi4py import MPI

comm = MPI.COMM_WORLD
assert comm.rank == helper_state.RANK
assert Holder().who() == (comm.rank, comm.rank)
for turn in range(3):
    comm.Barrier()
    assert note(turn) == turn + 1
assert helper_state.seen == [(comm.rank, t) for t in range(3)]
sys.argv.append(str(comm.rank))
comm.Barrier()
assert sys.argv[-1] == str(comm.rank)
COUNT = 0


def bump():
    global COUNT
    COUNT += comm.rank
    comm.Barrier()
    return COUNT


for turn in range(3):
    assert bump() == (turn + 1) * comm.rank
import __main__  # noqa: E402

assert vars(__main__)["COUNT"] == COUNT
comm.Barrier()


def late():
    import helper_state as again

    return again.RANK


comm.Barrier()
assert late() == comm.rank
if comm.rank == 0:
    print("modules", sys.argv[0].endswith("modules.py"), __name__)
