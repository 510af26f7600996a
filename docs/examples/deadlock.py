"""Everybody receives before sending. The report names each call and the ring."""

import spawnsim
from spawnsim.errors import Deadlock


def main(comm):
    """Receive from the left, then send to the right."""
    with comm.compute(0.25 * comm.rank):
        pass
    comm.recv(source=(comm.rank - 1) % comm.size, tag=7)
    comm.send("never", dest=(comm.rank + 1) % comm.size, tag=7)


try:
    spawnsim.run(main, ranks=3, platform="ethernet-10g")
except Deadlock as deadlock:
    print(deadlock)
