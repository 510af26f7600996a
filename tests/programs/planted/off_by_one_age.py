"""Neighbours in a ring use each other's values while these are at most two iterations old; the age is off by one."""

OLDEST = 2


def main(comm, iterations=20, fixed=False):
    rank, size = comm.Get_rank(), comm.Get_size()
    if size == 1:
        return
    known = 0
    for iteration in range(iterations):
        with comm.compute(0.01):
            comm.isend(iteration, (rank + 1) % size)
        while comm.iprobe((rank - 1) % size):
            known = comm.recv(source=(rank - 1) % size)
        age = iteration - known if fixed else iteration - known - 1
        if age <= OLDEST:
            comm.check(iteration - known <= OLDEST, f"a value of {iteration - known} iterations ago was used")
    comm.Barrier()
    while comm.iprobe((rank - 1) % size):
        comm.recv(source=(rank - 1) % size)
