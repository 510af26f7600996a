"""DTensor (placements, redistribution, operators, gradients), tensor parallelism, FSDP2 on one and two dimensions."""

import itertools
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def show(name, value):
    """Print a result in one line."""
    if isinstance(value, torch.Tensor):
        value = f"{list(value.shape)} {value.double().sum().item():.4f} {value.double().norm().item():.4f}"
    sys.stdout.write(f"{dist.get_rank()} {name} {value}\n")


def placements_of(mesh):
    """Place tensors in each way, even and uneven, and lay them out in each other."""
    size, rank = mesh.size(), dist.get_rank()
    for rows in (2 * size, 2 * size + 1, 1):
        whole = torch.arange(rows * 6.0).view(rows, 6) / 10
        kinds = ([Shard(0)], [Shard(1)], [Replicate()])
        for before, after in itertools.product(kinds, kinds):
            there = distribute_tensor(whole, mesh, before).redistribute(mesh, after)
            assert torch.equal(there.full_tensor(), whole)
            show(f"placed {rows} {before} {after}", there.to_local())
    part = DTensor.from_local(torch.full((size, 3), float(rank + 1)), mesh, [Partial()], run_check=False)
    show("partial, all", part.redistribute(mesh, [Replicate()]).to_local())
    show("partial, rows", part.redistribute(mesh, [Shard(0)]).to_local())
    most = DTensor.from_local(torch.tensor([float(rank % 3)]), mesh, [Partial("max")], run_check=False)
    show("largest", most.full_tensor())


def operators_of(mesh):
    """Compute with tensors that are placed, forward and backward, and hold each to the plain result."""
    size = mesh.size()
    torch.manual_seed(1)
    a, b = torch.randn(4 * size, 8), torch.randn(8, 6)
    functions = {
        "matmul": lambda x, y: x @ y,
        "softmax": lambda x, y: torch.softmax(x @ y, -1),
        "norm": lambda x, y: nn.functional.layer_norm(x @ y, (6,)),
        "mean": lambda x, y: (x * 2 - 1).mean(0) + y.mean(),
        "view": lambda x, y: x.reshape(-1, 4, 8).transpose(0, 1).sum(1) * y.sum(),
    }
    for name, function in functions.items():
        plain = [each.clone().requires_grad_() for each in (a, b)]
        expected = function(*plain)
        expected.square().sum().backward()
        for kind in (Shard(0), Shard(1), Replicate()):
            x = distribute_tensor(a, mesh, [kind]).requires_grad_()
            y = distribute_tensor(b, mesh, [Replicate()]).requires_grad_()
            found = function(x, y)
            found.redistribute(mesh, [Replicate()]).square().sum().backward()
            torch.testing.assert_close(found.full_tensor(), expected)
            torch.testing.assert_close(x.grad.full_tensor(), plain[0].grad)
            torch.testing.assert_close(y.grad.full_tensor(), plain[1].grad)
            show(f"{name} {kind} {found.placements}", found.to_local())


def block():
    """Return a small network, alike on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 4))


def batches(parts, mine):
    """Yield a share of each batch, and the whole of it."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        whole = torch.randn(4 * parts, 8, generator=generator)
        yield whole.chunk(parts)[mine], whole


def train(name, model, shares, *, clip=None, accumulate=False, exact=True):
    """Train a sharded model; hold it to a plain one on the whole batches."""
    plain = block()
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, plain)]
    for share, whole in shares:
        for optimizer in optimizers:
            optimizer.zero_grad()
        if accumulate:
            model.set_requires_gradient_sync(False)
            model(share).square().mean().backward()
            model.set_requires_gradient_sync(True)
        loss = model(share).square().mean()
        loss.backward()
        plain(whole).square().mean().backward()
        if accumulate:
            plain(whole).square().mean().backward()
        if clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            show(f"{name} norm", norm.full_tensor() if isinstance(norm, DTensor) else norm)
            nn.utils.clip_grad_norm_(plain.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()
        show(name, f"{loss.item():.4f}")
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for key, value in plain.state_dict().items():
        found = whole[key].full_tensor() if isinstance(whole[key], DTensor) else whole[key]
        if exact:
            torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5)
        show(f"{name} {key}", found)


def sharded(mesh, **how):
    """Return the network with each layer sharded over a mesh."""
    model = block()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, **how)
    return fully_shard(model, mesh=mesh, **how)


def main():
    """Use them all, on one dimension and on two."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    line = init_device_mesh("cpu", (size,))
    placements_of(line)
    operators_of(line)
    train("fsdp", sharded(line), batches(size, rank), clip=0.3)
    train("kept", sharded(line, reshard_after_forward=False), batches(size, rank), accumulate=True)
    coarse = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    train("coarse", sharded(line, mp_policy=coarse), batches(size, rank), exact=False)
    model = sharded(line)
    model[0].unshard()
    show("whole", model[0].weight)
    model[0].reshard()
    show("shard", model[0].weight.to_local())
    if size % 2 == 0 and size > 2:
        grid = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("outer", "inner"))
        outer, inner = grid.get_local_rank("outer"), grid.get_local_rank("inner")
        whole = torch.arange(8.0 * size).view(2 * size, 4)
        for kinds in (
            (Shard(0), Shard(1)),
            (Replicate(), Shard(0)),
            (Shard(0), Shard(0)),
            (Shard(1), Replicate()),
        ):
            there = distribute_tensor(whole, grid, kinds)
            show(f"grid {kinds}", there.to_local())
            assert torch.equal(there.redistribute(grid, (Replicate(), Replicate())).to_local(), whole)
        part = DTensor.from_local(torch.ones(2, 2) * rank, grid, (Partial(), Shard(0)), run_check=False)
        show("grid partial", part.full_tensor())
        train(
            "hsdp", sharded(grid), batches(size, rank), clip=0.3
        )  # replicated over one, sharded over the other
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallel = parallelize_module(block(), grid["inner"], plan)
        for layer in (parallel[0], parallel[2]):
            fully_shard(layer, mesh=grid["outer"])
        fully_shard(parallel, mesh=grid["outer"])
        train("both", parallel, batches(2, outer))
        show("places", (outer, inner, [str(each) for each in parallel[0].weight.placements]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
