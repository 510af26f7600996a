"""A token goes round a ring: each hop costs α + n/B, and the clock says so."""

import numpy as np

import spawnsim


def main(comm):
    """Pass 10 kB on, and note when it came."""
    data = np.zeros(10_000, np.uint8)
    if comm.rank:
        comm.Recv(data, source=comm.rank - 1)
    comm.record(microseconds=comm.clock.now() * 1e6)
    if comm.rank < comm.size - 1:
        comm.Send(data, dest=comm.rank + 1)


run = spawnsim.run(main, ranks=5, platform="ethernet-10g")
for rank, microseconds in zip(run.table["rank"], run.table["microseconds"], strict=True):
    print(f"rank {rank}: {microseconds:.3f} us")
