"""How often creating a communicator from a group hangs while another thread of the rank is in the library.

    mpiexec -n 3 python benchmarks/makings.py [TRIES] [alone]

Another thread polls, like the watchdog of a rank that survives failures; with `alone` it pauses during a creation.
The first creation that hangs ends the program: nothing can free a rank that waits in it.
"""

import os
import sys
import threading
import time

from mpi4py import MPI

HUNG_S = 10.0  # a creation takes some ms


def main(tries: int, *, alone: bool) -> None:
    world, free = MPI.COMM_WORLD, threading.Event()
    polled = world.Dup()
    free.set()

    def poll() -> None:
        while True:
            if alone:
                free.wait()
            polled.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
            time.sleep(5e-4)

    threading.Thread(target=poll, daemon=True).start()
    made: list[MPI.Intracomm] = []

    def make(number: int) -> None:
        group = world.Get_group()
        made.append(MPI.Intracomm.Create_from_group(group, f"try {number}", errhandler=MPI.ERRORS_RETURN))

    while len(made) < tries:
        world.Barrier()
        free.clear()
        thread = threading.Thread(target=make, args=(len(made),), daemon=True)
        thread.start()
        thread.join(HUNG_S)
        free.set()
        if thread.is_alive():
            break
        made[-1].Free()
    print(f"rank {world.rank}: {len(made)} made{', the next one hangs' * (len(made) < tries)}", flush=True)
    time.sleep(1.0)  # for the other ranks, which the end of this rank may end
    os._exit(0)


if __name__ == "__main__":
    words = sys.argv[1:]
    main(int(next((word for word in words if word != "alone"), "300")), alone="alone" in words)
