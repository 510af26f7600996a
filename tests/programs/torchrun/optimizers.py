"""Join with uneven inputs, ZeroRedundancyOptimizer, the averagers of models and PostLocalSGDOptimizer."""

import sys
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def show(name, model):
    """Print a sum of the weights."""
    weights = sum(each.double().abs().sum().item() for each in model.parameters())
    sys.stdout.write(f"{dist.get_rank()} {name} {weights:.3f}\n")


def made():
    """Return a model, alike on all ranks, and this rank's data."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    return model, torch.Generator().manual_seed(dist.get_rank())


def step(model, optimizer, data):
    """Make one step of training."""
    optimizer.zero_grad()
    model(torch.randn(4, 8, generator=data)).square().mean().backward()
    optimizer.step()


def main():
    """Train in several ways."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, data = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Join([model]):
        for _ in range(2 + rank):
            step(model, optimizer, data)
    show("join", model)
    model, data = made()
    zero = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    for _ in range(3):
        step(model, zero, data)
    show("zero", model)
    zero.consolidate_state_dict(to=0)
    if rank == 0:
        sys.stdout.write(f"0 state {len(zero.state_dict()['state'])}\n")
    model, data = made()
    alone, _ = dist.new_subgroups(group_size=1)
    state = post.PostLocalSGDState(None, alone, start_localSGD_iter=2)
    model.register_comm_hook(state, post.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=2)
    local = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), averager)
    for _ in range(5):
        step(model, local, data)
        show("local", model)
    if dist.get_world_size() % 4 == 0:
        model, data = made()
        levels = HierarchicalModelAverager(OrderedDict({2: 2, 4: dist.get_world_size()}), warmup_steps=1)
        own, plain = torch.optim.SGD(model.module.parameters(), lr=0.05), model.module
        for _ in range(6):
            step(plain, own, data)
            levels.average_parameters(plain.parameters())
            show("levels", plain)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
