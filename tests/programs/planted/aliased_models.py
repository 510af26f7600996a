"""A copy of a replacing policy that hands the donor's tensors on, through a cache that all virtual ranks share."""

import torch

from spawnsim import SpawnPolicy

SNAPSHOTS = {}


class Replace(SpawnPolicy):
    promises = ("range",)

    def __init__(self, average_every, fixed):
        super().__init__(average_every)
        self.fixed = fixed

    def act(self, iteration, model, optimizer, metric, comm, info):
        SNAPSHOTS[comm.Get_rank()] = [each.data for each in model.parameters()]
        metrics = comm.allgather(metric)
        if metrics.index(min(metrics)) == comm.Get_rank() and min(metrics) < max(metrics) - 1.0:
            for each, given in zip(model.parameters(), SNAPSHOTS[metrics.index(max(metrics))], strict=True):
                each.data = given.clone() if self.fixed else given
            info["is_replaced"] = True
        comm.Barrier()
        return model, optimizer


def main(comm, iterations=20, fixed=False):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = Replace(3, fixed)
    for iteration in range(iterations):
        with comm.compute(0.01):
            metric = float(comm.rng("metric").normal())
        model, optimizer, _ = policy(iteration, model, optimizer, local_metric=metric, group=comm)
    policy.shutdown()
