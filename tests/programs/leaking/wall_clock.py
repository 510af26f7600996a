"""Ranks send how long a loop took on the wall."""

import time


def main(comm, iterations=4):
    for iteration in range(iterations):
        with comm.compute(0.01):
            pass
        value = 0.0
        if iteration == 2:
            value = time.perf_counter()
        comm.allreduce(value)
