"""The best rank of a round gives its weights, but sends those that it has kept since it was last asked."""

import numpy as np


def main(comm, iterations=20, fixed=False):
    rank, size = comm.Get_rank(), comm.Get_size()
    weights, kept, kept_at = np.full(4, float(rank)), None, -1
    for iteration in range(iterations):
        with comm.compute(0.01):
            weights += comm.rng("step").normal(size=4)
        if iteration % 3 or size == 1:
            continue
        metrics = comm.allgather(float(weights.sum()))
        best, worst = int(np.argmax(metrics)), int(np.argmin(metrics))
        if rank == best and (fixed or kept is None or iteration > kept_at + 3):
            kept, kept_at = weights.copy(), iteration
        if rank == best and best != worst:
            comm.Send(kept, worst, tag=iteration)
        if rank == worst and best != worst:
            comm.Recv(weights, best, tag=iteration)
            comm.check(
                np.isclose(weights.sum(), metrics[best]),
                "the donor's weights are not those it was chosen for",
            )
