"""A rank dies; the others recover and go on from the step that they agree on."""

import numpy as np

import spawnsim
from spawnsim.errors import RankFailed, Revoked


def main(comm):
    """Sum once a step, ten steps, whoever dies."""
    step, total = 0, np.zeros(1)
    while step < 10:
        try:
            with comm.compute(0.1):
                pass
            comm.Allreduce(np.ones(1), total)
            step += 1
        except (RankFailed, Revoked):  # who comes later finds the communicator revoked
            recovery = comm.recover(step)
            comm, step = recovery.comm, recovery.step
    comm.record(total=total[0], seconds=comm.clock.now())


run = spawnsim.run(main, ranks=4, platform="ethernet-10g", faults="crash:2@0.45s")
for event in run.events:
    print(dict(event.items()))
for rank, total, seconds in zip(run.table["rank"], run.table["total"], run.table["seconds"], strict=True):
    print(f"rank {rank} ends at {seconds:.6f} s with {total:.0f} ranks")
