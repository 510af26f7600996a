"""A step of DistributedDataParallel, 3,084,672 parameters in buckets of 2.5 MiB: its time, and one all-reduce's."""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PARAMETERS, LAYERS = 3_084_672, 6


class Net(nn.Module):
    """Six weights of equal size; and a buffer, as of a causal mask."""

    def __init__(self, masked):
        """Make them."""
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(PARAMETERS // LAYERS) for _ in range(LAYERS))
        self.register_buffer("mask", torch.zeros(masked))

    def forward(self, x):
        """Return a score."""
        for part in self.parts:
            x = x + part.sum()
        return x


dist.init_process_group("gloo")
model = DistributedDataParallel(Net(int(sys.argv[1])), bucket_cap_mb=2.5)
for _ in range(3):  # after the first pass the buckets are made anew
    dist.barrier()
    began = time.time()
    model(torch.zeros(())).backward()
    step = time.time() - began
dist.barrier()
began = time.time()
dist.all_reduce(torch.zeros(PARAMETERS))
if dist.get_rank() == 0:
    print(step, time.time() - began)
