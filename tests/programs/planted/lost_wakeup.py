"""Workers that found no work say that they sleep, and wait to be woken; work that was sent meanwhile wakes nobody."""

WORK, SLEEP, WAKE, DONE = 1, 2, 3, 4


def give(comm, iterations):
    """Hand out work, and wake those who have said that they sleep."""
    asleep = set()
    for iteration in range(iterations):
        with comm.compute(0.004):
            pass
        while comm.iprobe(tag=SLEEP):
            asleep.add(comm.recv(tag=SLEEP))
        worker = 1 + iteration % (comm.Get_size() - 1)
        comm.send(iteration, worker, WAKE if worker in asleep else WORK)
        asleep.discard(worker)
    return asleep


def main(comm, iterations=20, fixed=False):
    size, rank = comm.Get_size(), comm.Get_rank()
    if size == 1:
        return
    if rank == 0:
        give(comm, iterations)
        comm.Barrier()
        while comm.iprobe(tag=SLEEP):
            comm.recv(tag=SLEEP)
        return
    mine = len(range(rank - 1, iterations, size - 1))
    while mine:
        with comm.compute(0.003):
            pass
        if comm.iprobe(source=0, tag=WORK):
            comm.recv(source=0, tag=WORK)
        else:
            comm.send(rank, 0, SLEEP)
            if fixed:
                comm.recv(source=0)  # work or a wake-up, whichever was sent
            else:
                comm.recv(source=0, tag=WAKE)
        mine -= 1
    comm.Barrier()
