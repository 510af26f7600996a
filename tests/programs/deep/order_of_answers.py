"""Rank 0 asks three times and takes the order of answers 3, 1, 2 then 1, 3, 2 for a restart of the ranks."""


def main(comm, fixed=False):
    if comm.rank:
        for _ in range(2):
            with comm.compute(10.0**comm.rank):
                pass
            comm.send(comm.rank, 0, 1)
            comm.recv(source=0)
        return
    orders = []
    for _ in range(2):
        orders.append([comm.recv(tag=1) for _ in range(comm.size - 1)])
        for rank in range(1, comm.size):
            comm.send(None, rank)
    comm.check(fixed or orders != [[3, 1, 2], [1, 3, 2]], "the ranks have restarted")
