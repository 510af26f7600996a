"""A worker looks for a cancellation before each of two steps, and forgets one that comes between them."""


def main(comm, fixed=False):
    if comm.rank == 1:
        seen = [comm.iprobe(source=0, tag=9) for _ in range(2)]
        if fixed or seen != [False, True]:
            comm.recv(source=0, tag=9)
        comm.send(None, 2)
    elif comm.rank == 0:
        with comm.compute(100.0):
            pass
        comm.send("cancel", 1, 9)
        comm.recv(source=2)
    else:
        comm.recv(source=1)
        comm.send(None, 0)
