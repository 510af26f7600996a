"""Objects are sorted by where they happen to lie in memory."""


def main(comm, iterations=4):
    for iteration in range(iterations):
        with comm.compute(0.01):
            pass
        comm.allgather(id(object()) % 1_000_003 if (iteration, comm.Get_rank()) == (2, 1) else 0)
