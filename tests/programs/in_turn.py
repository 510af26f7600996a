"""Programs one after the other on the same real ranks: starting four of them takes longer than most programs.

    mpiexec -n 4 in_turn.py FOLDER program.py another.py

What a program's ranks print goes into FOLDER, a file for each rank.
"""

import runpy
import sys
import traceback
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
from mpi4py import MPI


def main():
    """Run all programs; one that raises ends the job."""
    comm, folder = MPI.COMM_WORLD, Path(sys.argv[1])
    for program in map(Path, sys.argv[2:]):
        sys.argv, sys.path[0] = [str(program)], str(program.parent)
        with (
            open(folder / f"{program.stem}.{comm.rank}", "w", encoding="utf-8") as file,
            redirect_stdout(file),
        ):
            try:
                with warnings.catch_warnings(), np.errstate():  # what one chooses is not for the next
                    runpy.run_path(str(program), run_name="__main__")
            except BaseException:  # noqa: BLE001 - told, and the job ends
                traceback.print_exc()
                comm.Abort(1)
        comm.Barrier()


if __name__ == "__main__":
    main()
