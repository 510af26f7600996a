"""DeviceMesh, functional collectives, DTensor, FSDP2 and checkpoints."""

import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def show(name, value):
    """Print a result in one line."""
    sys.stdout.write(
        f"{dist.get_rank()} {name} {value.tolist() if isinstance(value, torch.Tensor) else value}\n"
    )


def main():
    """Use them all."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    show("reduce", functional.all_reduce(torch.ones(2) * rank, "sum", mesh))
    show("gather", functional.all_gather_tensor(torch.ones(2) * rank, 0, mesh))
    show("scatter", functional.reduce_scatter_tensor(torch.arange(2.0 * size), "sum", 0, mesh))
    if size % 2 == 0:
        grid = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("outer", "inner"))
        show("place", grid.get_coordinate())
        tensor = torch.ones(1) * rank
        dist.all_reduce(tensor, group=grid.get_group("inner"))
        show("inner", tensor)
    whole = torch.arange(8.0 * size).view(size * 2, 4)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    show("shard", sharded.to_local())
    show("full", (sharded @ sharded.t()).full_tensor().sum())
    show("columns", sharded.redistribute(mesh, [Shard(1)]).to_local().sum())
    show("replica", sharded.redistribute(mesh, [Replicate()]).to_local().sum())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8, generator=data)).square().mean()
        loss.backward()
        optimizer.step()
        show("loss", f"{loss.item():.4f}")
    state = model.state_dict()
    before = {name: value.full_tensor().clone() for name, value in state.items()}
    if len(sys.argv) > 1:
        checkpoint.save({"model": state}, checkpoint_id=sys.argv[1])
        with torch.no_grad():
            for value in state.values():
                value.zero_()
        checkpoint.load({"model": state}, checkpoint_id=sys.argv[1])
        show("loaded", all(torch.equal(value.full_tensor(), before[name]) for name, value in state.items()))
    show("kind", isinstance(next(iter(state.values())), DTensor))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
