"""One-sided access to a busy rank: it answers when it next enters MPI, which is when its compute block ends."""

import numpy as np

import spawnsim


def main(comm):
    """Rank 0 computes in blocks of 50 ms; rank 1 reads its memory now and then."""
    window = comm.Win.Allocate(8, disp_unit=8, comm=comm)
    window.Lock_all()
    comm.Barrier()
    if comm.rank == 0:
        for _ in range(10):
            with comm.compute(0.05):
                pass
    else:
        for _ in range(4):
            comm.clock.sleep(0.08)
            begin, value = comm.clock.now(), np.empty(1)
            window.Get(value, 0)
            window.Flush(0)
            comm.record(at=begin * 1e3, waited=(comm.clock.now() - begin) * 1e3)
    window.Unlock_all()
    window.Free()


run = spawnsim.run(main, ranks=2, platform="ethernet-10g")
for at, waited in zip(run.table["at"], run.table["waited"], strict=True):
    print(f"asked at {at:.3f} ms, answered after {waited:.3f} ms")
