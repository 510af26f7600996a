"""Sums whose bits depend on the order: digests of all reductions, of several sizes and types, and of training."""

import hashlib
import sys
import warnings

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

FLOATS = torch.float64, torch.float32, torch.float16, torch.bfloat16
SUM, PRODUCT, AVG = dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.AVG


def numbers(count, dtype, salt=0):
    """Return numbers of very different sizes, each rank its own."""
    source = torch.Generator().manual_seed(1000 * count + 10 * dist.get_rank() + salt)
    wide = torch.randn(count, generator=source, dtype=torch.float64)
    wide *= torch.exp(2 * torch.randn(count, generator=source, dtype=torch.float64))
    return wide.to(dtype)


def show(name, *tensors):
    """Print a digest of the bytes of tensors."""
    digest = hashlib.blake2b(digest_size=8)
    for each in tensors:
        digest.update(each.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    sys.stdout.write(f"{dist.get_rank()} {name.replace('.', ' ')} {digest.hexdigest()}\n")


def reductions(count, dtype, name):
    """Show every kind of reduction of so many numbers."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for op in (SUM, PRODUCT, AVG):
        whole = numbers(count, dtype)
        dist.all_reduce(whole, op)
        show(f"{name} all_reduce {op}", whole)
    rooted = numbers(count, dtype)
    dist.reduce(rooted, count % size)
    if rank == count % size:
        show(f"{name} reduce", rooted)
    several = [numbers(each, dtype) for each in (count, count // 2, 3)]
    dist.all_reduce_coalesced(several)
    show(f"{name} coalesced", *several)
    block = torch.empty(count, dtype=dtype)
    dist.reduce_scatter_tensor(block, numbers(count * size, dtype))
    show(f"{name} reduce_scatter_tensor", block)
    dist.reduce_scatter(block, list(numbers(count * size, dtype).chunk(size)))
    show(f"{name} reduce_scatter", block)


def training():
    """Show the weights of DistributedDataParallel, and of models that are averaged now and then."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 100), torch.nn.Tanh(), torch.nn.Linear(100, 1))
    for local in (False, True):
        wrapped = model if local else DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(6):
            optimizer.zero_grad()
            wrapped(numbers(32, torch.float32, step).view(4, 8)).square().mean().backward()
            optimizer.step()
            if local and step % 2:
                for each in model.parameters():
                    dist.all_reduce(each.data)
                    each.data /= dist.get_world_size()
        show("local" if local else "ddp", *model.parameters())


def main():
    """Show everything."""
    warnings.simplefilter("ignore")  # torch warns of older names
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    for dtype in FLOATS:
        for count in (1, 5, 17, 1000, 4097):
            reductions(count, dtype, f"{dtype} {count}")
    if size == 3:  # more than 2 MiB a rank are cut differently
        reductions(size * (1 << 18) + 5, torch.float64, "long")
    for dtype in (torch.complex64, torch.complex128):
        both = torch.complex(*(numbers(101, dtype.to_real(), salt) for salt in (1, 2)))
        dist.all_reduce(both)
        show(f"{dtype}", both)
    if size > 2:
        group = dist.new_group([2, 0, 1])  # sorted by torch
        if dist.get_rank() < 3:
            part = numbers(1001, torch.float32)
            dist.all_reduce(part, group=group)
            show("group", part)
    training()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
