"""What a thread has counted until a rank looks is sent."""

import threading
import time


def main(comm, iterations=4):
    counted = [0]

    def count():
        while counted[0] >= 0:
            counted[0] += 1

    if comm.Get_rank() == 1:
        threading.Thread(target=count, daemon=True).start()
        time.sleep(0.05)
    for iteration in range(iterations):
        with comm.compute(0.01):
            pass
        comm.allgather(counted[0] if iteration == 2 else 0)
    counted[0] = -(10**12)
