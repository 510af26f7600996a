"""Digests of sums whose bits depend on the order, by every call that sums."""

import hashlib

import numpy as np
import torch

from spawnsim.comm import IN_PLACE, PROD, SUM
from spawnsim.policies import AverageAllPolicy


def numbers(comm, count, dtype=np.float64):
    """Return numbers of very different sizes, each rank its own."""
    draw = np.random.default_rng((comm.Get_rank(), count))
    return (draw.standard_normal(count) * np.exp(3 * draw.standard_normal(count))).astype(dtype)


def digest(array):
    """Return a short digest of an array's bytes."""
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=6).hexdigest()


def digests(comm):
    """Return a digest for each call on this rank."""
    rank, size, found = comm.Get_rank(), comm.Get_size(), {}
    for count in (1, 7, 1001, 100_003):
        for dtype in (np.float32, np.float64):
            own, whole = numbers(comm, count, dtype), np.zeros(count, dtype)
            comm.Allreduce(own, whole)
            found[f"Allreduce {count} {dtype.__name__}"] = digest(whole)
            comm.Iallreduce(own, whole, PROD).Wait()
            found[f"Iallreduce {count} {dtype.__name__}"] = digest(whole)
            comm.Reduce(own, whole if rank == 1 else None, SUM, root=1)
            found[f"Reduce {count} {dtype.__name__}"] = digest(whole) if rank == 1 else ""
    both = numbers(comm, 1001) + 1j * numbers(comm, 1000 + 1)
    comm.Allreduce(IN_PLACE, both)
    found["complex"] = digest(both)
    block = np.zeros(5)
    comm.Reduce_scatter_block(numbers(comm, 5 * size), block)
    found["Reduce_scatter_block"] = digest(block)
    comm.Scan(numbers(comm, 5), block)
    found["Scan"] = digest(block)
    value = float(numbers(comm, 1)[0])
    found["allreduce"], total = comm.allreduce(value).hex(), comm.reduce(value, root=2)
    found["reduce"] = total.hex() if rank == 2 else ""
    for momentum in (0.0, 0.3):
        model = torch.nn.Sequential(
            torch.nn.Linear(130, 130).double(), torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3)
        )
        for each in model.parameters():
            each.data.copy_(torch.from_numpy(numbers(comm, each.numel())).view(each.shape))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, _, _ = AverageAllPolicy(1, momentum=momentum)(0, model, optimizer, group=comm)
        weights = np.concatenate([each.detach().numpy().ravel() for each in model.parameters()])
        found[f"AverageAllPolicy {momentum}"] = digest(weights)
    return found
