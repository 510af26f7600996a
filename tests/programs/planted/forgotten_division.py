"""A copy of an averaging policy that halves pairwise sums, and forgets what is left where ranks are no power of two."""

import numpy as np
import torch

from spawnsim import SpawnPolicy


class PairwiseAverage(SpawnPolicy):
    promises = ("mean", "range")

    def __init__(self, average_every, fixed):
        super().__init__(average_every)
        self.fixed = fixed

    def act(self, iteration, model, optimizer, metric, comm, info):
        for each in model.parameters():
            total = np.empty(each.numel())
            comm.Allreduce(each.detach().double().numpy().ravel(), total)
            rounds = comm.Get_size().bit_length() - 1
            parts = comm.Get_size() if self.fixed else 2**rounds
            each.data = torch.from_numpy(total / parts).to(each.dtype).reshape(each.shape)
        info["averaged_this_iteration"] = True
        return model, optimizer


def main(comm, iterations=20, fixed=False):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = PairwiseAverage(2, fixed)
    for iteration in range(iterations):
        with comm.compute(0.01):
            pass
        model, optimizer, _ = policy(iteration, model, optimizer, group=comm)
    policy.shutdown()
