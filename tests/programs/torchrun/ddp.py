"""DistributedDataParallel over several buckets: losses, no_sync, buffers, unused parameters, communication hooks."""

import gc
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

STEPS = 4


class Net(nn.Module):
    """A small network; with `branches`, of two layers in its middle each rank uses one."""

    def __init__(self, branches):
        super().__init__()
        self.first, self.norm = nn.Linear(20, 64), nn.BatchNorm1d(64)
        self.middle, self.last = nn.Linear(64, 64), nn.Linear(64, 4)
        if branches:
            self.extra = nn.Linear(64, 64)

    def forward(self, x, extra):
        """Return scores."""
        x = torch.relu(self.norm(self.first(x)))
        x = self.extra(x) if extra else self.middle(x)
        return self.last(torch.relu(x))


def own_hook(state, bucket):
    """Average in two steps: as doubles, then back."""
    work = dist.all_reduce(bucket.buffer().double(), async_op=True)
    return work.get_future().then(lambda done: (done.value()[0] / dist.get_world_size()).float())


def train(name, hook=None, state=None, **how):
    """Train, and print losses."""
    torch.manual_seed(0)
    branches = bool(how.get("find_unused_parameters"))
    model = DistributedDataParallel(Net(branches), **({"bucket_cap_mb": 0.005} | how))
    if hook is not None:
        model.register_comm_hook(state, hook)
    rank = dist.get_rank()
    data = torch.Generator().manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        x, y = torch.randn(8, 20, generator=data), torch.randint(0, 4, (8,), generator=data)
        extra = branches and (step + rank) % 2 == 0
        optimizer.zero_grad()
        if step == 1:
            with model.no_sync():
                nn.functional.cross_entropy(model(x, extra), y).backward()
        loss = nn.functional.cross_entropy(model(x, extra), y)
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        sys.stdout.write(f"{rank} {name} {step} {loss.item():.8f} {total.item():.4f}\n")
    weights = sum(each.double().sum().item() for each in model.parameters())
    sys.stdout.write(f"{rank} {name} weights {weights:.3f}\n")


def main():
    """Train in several ways."""
    dist.init_process_group("gloo")
    train("plain", find_unused_parameters=True)
    train("view", gradient_as_bucket_view=True, find_unused_parameters=True, broadcast_buffers=False)
    train("own", own_hook, find_unused_parameters=True)
    train("fp16", default_hooks.fp16_compress_hook, find_unused_parameters=True)
    if dist.get_world_size() > 1:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        # One bucket, and no unused parameters to agree on: over gloo this hook's sums, begun in callbacks, would
        # now and then meet others.
        train("power", powerSGD_hook.powerSGD_hook, state, bucket_cap_mb=25)
    # gloo's threads end with the last reference to the group, which models in cycles hold. One that still drops a work
    # and its Python callback while the interpreter ends aborts the process.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
