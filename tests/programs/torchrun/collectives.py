"""Every collective of torch.distributed, in each of its forms; prints what each rank got."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
RANK, SIZE = dist.get_rank(), dist.get_world_size()


def show(name, value):
    """Print a result in one line."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    elif isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
        value = [each.tolist() for each in value]
    sys.stdout.write(f"{RANK} {name} {value}\n")


def mine(count=4, dtype=torch.float32):
    """Return numbers that no other rank has."""
    return (torch.arange(count) + 1 + 10 * RANK).to(dtype)


for dtype in (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
):
    tensor = mine(5, dtype)
    dist.all_reduce(tensor)
    show(f"all_reduce {dtype}", tensor)
for op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
    tensor = mine(3, torch.int64)
    dist.all_reduce(tensor, op)
    show(f"all_reduce {op}", tensor)
tensor = torch.complex(mine(), mine() / 2)
dist.all_reduce(tensor)
show("complex", torch.view_as_real(tensor))
tensor = mine(6).view(2, 3).t()
work = dist.all_reduce(tensor.contiguous(), async_op=True)
work.wait()
show("async", work.result()[0])
for root in range(SIZE):
    tensor = mine()
    dist.broadcast(tensor, root)
    show("broadcast", tensor)
    tensor = mine()
    dist.reduce(tensor, root)
    show("reduce", tensor if root == RANK else "")
    parts = [torch.empty(4) for _ in range(SIZE)] if root == RANK else None
    dist.gather(mine(), parts, root)
    show("gather", parts)
    tensor = torch.empty(4)
    dist.scatter(tensor, [mine() + each for each in range(SIZE)] if root == RANK else None, root)
    show("scatter", tensor)
parts = [torch.empty(2, 2) for _ in range(SIZE)]
dist.all_gather(parts, mine().view(2, 2))
show("all_gather", parts)
whole = torch.empty(SIZE * 4)
dist.all_gather_into_tensor(whole, mine())
show("all_gather_into_tensor", whole)
tensor = torch.empty(2)
dist.reduce_scatter_tensor(tensor, torch.arange(2.0 * SIZE) + RANK)
show("reduce_scatter_tensor", tensor)
tensor = torch.empty(3)
dist.reduce_scatter(tensor, [mine(3) * (each + 1) for each in range(SIZE)])
show("reduce_scatter", tensor)
tensor = torch.empty(SIZE, 2)
dist.all_to_all_single(tensor, torch.arange(2.0 * SIZE).view(SIZE, 2) + 100 * RANK)
show("all_to_all_single", tensor)
send = [RANK + other for other in range(SIZE)]
tensor = torch.empty(sum(send))
dist.all_to_all_single(
    tensor, torch.arange(float(sum(send))) + 100 * RANK, [other + RANK for other in range(SIZE)], send
)
show("uneven", tensor)
found = [None] * SIZE
dist.all_gather_object(found, {"rank": RANK, "parts": (1, "two")})
show("all_gather_object", found)
found = [None] * SIZE if RANK == 0 else None
dist.gather_object([RANK] * RANK, found)
show("gather_object", found)
found = ["one", {2: 3}, None] if RANK == SIZE - 1 else [None] * 3
dist.broadcast_object_list(found, SIZE - 1)
show("broadcast_object_list", found)
found = [None]
dist.scatter_object_list(found, [f"for {each}" for each in range(SIZE)] if RANK == 0 else None)
show("scatter_object_list", found)
dist.barrier()
dist.monitored_barrier(timeout=timedelta(seconds=20))
half = dist.new_group(range(0, SIZE, 2))
if RANK % 2 == 0:
    tensor = mine()
    dist.all_reduce(tensor, group=half)
    show("half", tensor)
    show("places", (dist.get_rank(half), dist.get_world_size(half), dist.get_process_group_ranks(half)))
pair, _ = dist.new_subgroups(group_size=1)
tensor = mine()
dist.all_reduce(tensor, group=pair)
show("subgroup", tensor)
future = dist.all_reduce(mine(), async_op=True).get_future()
show("future", future.then(lambda done: done.value()[0] * 2).wait())
with torch.sparse.check_sparse_tensor_invariants():
    sparse = torch.sparse_coo_tensor([[RANK, SIZE, SIZE]], [1.0 + RANK, 2.0, 3.0], (2 * SIZE,))
    dist.all_reduce(sparse)
    show("sparse", (sparse.is_coalesced(), sparse.to_dense().tolist()))
empty = torch.empty(0)
dist.all_reduce(empty)
show("empty", empty)
show("names", (dist.get_backend(), dist.is_initialized(), dist.is_torchelastic_launched()))
dist.destroy_process_group()
show("end", dist.is_initialized())
