"""Buffered sends out of all kinds of attached memory."""

import array

import numpy as np
import torch
from mpi4py import MPI

comm = MPI.COMM_WORLD
right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


class Exporter:
    """Memory that only DLPack knows."""

    def __init__(self, memory):
        self.memory = memory

    def __dlpack__(self, **wishes):
        return self.memory.__dlpack__(**wishes)

    def __dlpack_device__(self):
        return self.memory.__dlpack_device__()


for memory in (Exporter(np.zeros(600)), torch.zeros(1200), bytearray(5000), array.array("d", [0] * 600)):
    MPI.Attach_buffer(memory)
    sending = comm.Ibsend(np.full(100, comm.rank, float), right)
    comm.Bsend(np.full(10, comm.rank, np.float32), right)
    for received in (np.zeros(100), np.zeros(10, np.float32)):
        comm.Recv(received, left)
        assert (received == left).all()
    sending.Wait()
    MPI.Detach_buffer()
try:
    MPI.Attach_buffer(bytes(500))
except BufferError:
    refused = comm.reduce(1)  # the launcher may mix the lines of several ranks
    if comm.rank == 0:
        print(refused, "ranks were refused to attach read-only memory")
