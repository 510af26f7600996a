"""A program of which one rank dies when all is done: `main(comm, victim=…, at=…)`, in a job that survives it."""

from __future__ import annotations

import os
import signal
import threading

from spawnsim.run import real


def die(*_args, **_named):
    """End here, without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def then_dies(function):
    """Return a function that does the same, and is its process's last one."""

    def instead(*args, **named):
        function(*args, **named)
        die()

    return instead


def main(comm, victim=1, at="settled"):
    """Come to the end of the program; the victim dies while the job ends."""
    comm.Barrier()
    runtime = comm.runtime
    comm.record(size=comm.size)
    if at == "before" and comm.rank != victim:
        comm.send(None, victim)
    if comm.rank == victim:
        if at == "waiting":
            threading.Timer(0.3, die).start()
        if at == "settled":
            runtime.settle = then_dies(runtime.settle)
        if at == "merging":
            real.collect = die
        if at == "merged":
            real.collect = then_dies(real.collect)
        if at == "released":
            runtime.release = then_dies(runtime.release)
        if at == "before":
            for other in set(range(comm.size)) - {victim}:  # one in the barrier would be told of a death
                comm.recv(source=other)
            die()
    elif at == "waiting":
        comm.clock.sleep(0.8)
    elif at == "before" and comm.rank == 0:
        comm.clock.sleep(7.0)  # as one that waits for others in shutdown(): longer than anybody may be silent
        comm.record(size=comm.size, slow=True)
