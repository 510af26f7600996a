"""Groups of torch.distributed given to policies and to the toolkit of torchgfn, and groups that the toolkit makes."""

import sys

import torch
import torch.distributed as dist

from spawnsim.comm import as_comm
from spawnsim.torchgfn import distributed as toolkit
from spawnsim.torchgfn.spawn_policy import AverageAllPolicy


def averaged(group):
    """Return what the policy makes of weights that are the rank's number."""
    model = torch.nn.Linear(2, 1)
    model.weight.data.fill_(dist.get_rank())
    AverageAllPolicy(1)(0, model, torch.optim.SGD(model.parameters(), lr=0.1), 0.0, group)
    return model.weight[0, 0].item()


def show(*words):
    """Print words behind the rank's number."""
    sys.stdout.write(" ".join(map(str, (dist.get_rank(), *words))) + "\n")


def main():
    """Use the default group, a group of two ranks, and those of a context."""
    dist.init_process_group("gloo")
    rank, everyone = dist.get_rank(), dist.group.WORLD
    pair = dist.new_group([0, 2])
    for name, group in [("world", everyone), *[("pair", pair)] * (rank != 1)]:
        ours, theirs = torch.full((1000,), rank + 0.5), torch.full((1000,), rank + 0.5)
        toolkit.all_reduce(ours, group=group)
        dist.all_reduce(theirs, group=group)
        comm = as_comm(group)
        show(name, "averaged", averaged(group), "sum", ours[-1].item(), torch.equal(ours, theirs))
        show(
            name, "rank", comm.Get_rank(), "of", comm.Get_size(), as_comm(group) is comm, comm.allgather(rank)
        )
    for again in range(2):
        place = toolkit.initialize_distributed_compute("gloo", 1, 1)
        group = place.get_train_group("torch")
        if group is not None:
            total = torch.ones(1)
            dist.all_reduce(total, group=group)
            show("training", again, total.item(), dist.get_process_group_ranks(group), averaged(group))
            show(
                "same", again, as_comm(group) is place.get_train_group(), isinstance(group, dist.ProcessGroup)
            )
        place.cleanup()
    show("left", dist.is_initialized())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
