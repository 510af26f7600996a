"""One backward pass of DistributedDataParallel whose layers take a stated time each; prints what it takes."""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LAYERS, WIDTH = 6, 300
STEP_S, BUCKET_MB = float(sys.argv[1]), float(sys.argv[2])


class Slow(torch.autograd.Function):
    """The identity, whose gradient takes time."""

    @staticmethod
    def forward(ctx, x):
        """Return x."""
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradient, later."""
        time.sleep(STEP_S)
        return gradient.clone()


class Net(nn.Module):
    """Layers of one size."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x):
        """Return scores."""
        for layer in self.layers:
            x = Slow.apply(layer(x))
        return x


dist.init_process_group("gloo")
model = DistributedDataParallel(Net(), bucket_cap_mb=BUCKET_MB)
x = torch.randn(1, WIDTH)
for _ in range(2):  # after the first pass the buckets are made anew
    model(x).sum().backward()
loss = model(x).sum()
dist.barrier()
began = time.time()
dist.all_reduce(torch.zeros(WIDTH * WIDTH * (1 if BUCKET_MB < 1 else LAYERS)))
alone = time.time() - began
dist.barrier()
began = time.time()
loss.backward()
if dist.get_rank() == 0:
    print(alone, time.time() - began)
