"""Who is ahead of its left neighbour waits until that one is a step ahead: all do, and it is a cycle."""


def main(comm, iterations=20, fixed=False):
    rank, size = comm.Get_rank(), comm.Get_size()
    if size == 1:
        return
    left, right = (rank - 1) % size, (rank + 1) % size
    heard = 0  # steps of the left neighbour
    for iteration in range(iterations):
        with comm.compute(0.01):
            pass
        while comm.iprobe(left):
            comm.recv(source=left)
            heard += 1
        if heard < iteration:
            until = iteration if fixed else iteration + 1
            while heard < until:
                comm.recv(source=left)
                heard += 1
        comm.send(iteration, right)
    comm.Barrier()
    while comm.iprobe(left):
        comm.recv(source=left)
