"""Messages between ranks, stores, and what a process finds: prints what each rank got."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE


def show(name, value):
    """Print a result in one line."""
    sys.stdout.write(f"{RANK} {name} {value.tolist() if isinstance(value, torch.Tensor) else value}\n")


if SIZE > 1:
    got = torch.zeros(3)
    if RANK == 0:
        dist.send(torch.arange(3.0), right)
        dist.recv(got, left)
    else:
        show("from", dist.recv(got, left))
        dist.send(got + 1, right)
    show("ring", got)
    sent = [dist.isend(torch.full((2,), float(10 * RANK + tag)), right, tag=tag) for tag in (7, 3)]
    for tag in (3, 7):
        got = torch.zeros(2)
        dist.recv(got, left, tag=tag)
        show(f"tag {tag}", got)
    for request in sent:
        request.wait()
    got = torch.zeros(2, 2)
    batch = [dist.P2POp(dist.isend, torch.eye(2) * RANK, right), dist.P2POp(dist.irecv, got, left)]
    for request in dist.batch_isend_irecv(batch):
        request.wait()
    show("batch", got)
    big = torch.zeros(200_000)
    requests = [dist.isend(torch.full((200_000,), float(RANK)), right), dist.irecv(big, left)]
    for request in requests:
        request.wait()
    show("big", big.sum())
    if RANK == 0:
        heard, sources = torch.zeros(1), []
        total = 0.0
        for _ in range(SIZE - 1):
            sources.append(dist.recv(heard))
            total += heard.item()
        show("any", (sorted(sources), total))
    else:
        dist.send(torch.tensor([float(RANK)]), 0)
    found = [None, None]
    if RANK == 0:
        dist.send_object_list(["text", {"a": torch.ones(2)}], 1)
    elif RANK == 1:
        dist.recv_object_list(found, 0)
        show("objects", found)
    dist.barrier()

store = dist.PrefixStore("own", dist.distributed_c10d._get_default_store())
store.set(f"key {RANK}", str(RANK * RANK))
show("get", store.get(f"key {right}"))
store.wait([f"key {rank}" for rank in range(SIZE)], timedelta(seconds=20))
dist.barrier()
show("add", store.add("sum", 1) in range(1, SIZE + 1))
dist.barrier()
show("sum", (store.get("sum"), store.check(["sum"]), store.check(["none"])))
dist.barrier()
if RANK == 0:
    show(
        "set",
        (store.compare_set("c", "", "x"), store.compare_set("c", "x", "y"), store.compare_set("c", "x", "z")),
    )
    show("delete", (store.delete_key("c"), store.delete_key("c")))
    try:
        store.wait(["nobody's"], timedelta(milliseconds=300))
    except dist.DistStoreError as error:
        show("late", str(error)[:32])
if SIZE > 3:  # names are those within the group, whose first rank is 1 of the world
    some = dist.new_group([1, 3, 2])
    try:
        if RANK in (1, 2):
            dist.monitored_barrier(some, timeout=timedelta(milliseconds=500))
    except RuntimeError as error:
        show("barrier", str(error).partition(" (")[0])
local = dist.HashStore()
local.set("a", "b")
show("local", local.get("a"))
dist.barrier()
dist.destroy_process_group()
