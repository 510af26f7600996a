"""One slow rank: averaging all waits for it, whoever is not in its group does not."""

import numpy as np

import spawnsim


def main(comm):
    """Average ten times, over all ranks or over half of them."""
    half = comm.Split(comm.rank % 2)
    for name, group in (("all", comm), ("half", half)):
        comm.Barrier()
        begin = comm.clock.now()
        for _ in range(10):
            with comm.compute(0.030 if comm.rank == 3 else 0.010):
                pass
            group.Allreduce(np.ones(1000), np.empty(1000))
        comm.record(group=name, milliseconds=(comm.clock.now() - begin) * 1e3)


run = spawnsim.run(main, ranks=6, platform="ethernet-10g")
for rank in range(6):
    took = run.table.of_rank(rank)["milliseconds"]
    print(f"rank {rank}: all {took[0]:.2f} ms, half {took[1]:.2f} ms")
