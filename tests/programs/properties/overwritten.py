"""Rank 0 applies an update of each worker at once, and keeps one update of a worker that is ahead: the last."""

import numpy as np


def main(comm, iterations=20, fixed=False):
    comm.check("applied", leads_to=(lambda row: row["sent"], lambda row: row["applied"], 60.0))
    if comm.rank:
        for step in range(iterations):
            with comm.compute(0.01):
                update = np.full(3, float(step))
            number = iterations * comm.rank + step
            comm.record(sent=number)
            comm.send((number, update), dest=0)
        comm.send(None, dest=0)
        return
    weights, waiting, working = np.zeros(3), {rank: [] for rank in range(1, comm.size)}, comm.size - 1
    while working:
        for source in [rank for rank in waiting if comm.iprobe(source=rank)]:
            given = comm.recv(source=source)
            if given is None:
                working -= 1
            elif fixed:
                waiting[source].append(given)
            else:
                waiting[source] = [given]
        while all(waiting.values()) or (not working and any(waiting.values())):
            for number, update in [updates.pop(0) for updates in waiting.values() if updates]:
                weights += update
                comm.record(applied=number)
        comm.clock.sleep(0.001)
