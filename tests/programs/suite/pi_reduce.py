"""Pi by Bcast and Reduce."""

import math

import numpy
from mpi4py import MPI


def comp_pi(n, myrank=0, nprocs=1):
    h = 1.0 / n
    s = 0.0
    for i in range(myrank + 1, n + 1, nprocs):
        x = h * (i - 0.5)
        s += 4.0 / (1.0 + x**2)
    return s * h


def main():
    comm = MPI.COMM_WORLD
    n, mypi, pi = numpy.array(0, dtype=int), numpy.array(0, dtype=float), numpy.array(0, dtype=float)
    if comm.rank == 0:
        n.fill(2000)
    comm.Bcast([n, MPI.LONG], root=0)
    mypi.fill(comp_pi(int(n), comm.rank, comm.size))
    comm.Reduce([mypi, MPI.DOUBLE], [pi, MPI.DOUBLE], op=MPI.SUM, root=0)
    if comm.rank == 0:
        print(f"pi is approximately {float(pi):.8f}, error is {abs(float(pi) - math.pi):.2e}")
    value = comm.allreduce(float(mypi), MPI.SUM)
    assert abs(value - math.pi) < 1e-5


if __name__ == "__main__":
    main()
