"""Rank 0 takes metrics from anybody, and takes the order in which they came for the order of ranks."""


def main(comm, iterations=20, fixed=False):
    rank, size = comm.Get_rank(), comm.Get_size()
    for iteration in range(iterations):
        with comm.compute(0.01):
            pass
        if rank:
            comm.send((rank, iteration), 0, tag=iteration)
        else:
            got = [comm.recv(tag=iteration) for _ in range(size - 1)]
            got = sorted(got) if fixed else got
            comm.check([each[0] for each in got] == list(range(1, size)), "metrics are those of other ranks")
        comm.Barrier()
