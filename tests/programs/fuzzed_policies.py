"""Every built-in policy, with drawn parameters, in the loop that the guide shows: for `spawnsim fuzz --survive`."""

import torch
from support.random_policies import EVERY, Draw, Mixed

from spawnsim.errors import RankFailed, Revoked, Timeout

MOST = 12  # recoveries at one step


def main(comm, policy="average_all", iterations=12, hurried=False):
    rank, seed = comm.Get_rank(), comm.rng.key[0]
    draw = Draw(7, seed)
    model = Mixed(rank + 1.0, draw.one(5, 40, 300, 3000))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen = EVERY[policy](Draw(8, seed, hurried=hurried))
    group, iteration, again = comm, 0, 0
    while iteration < iterations:
        try:
            with group.compute(0.01), torch.no_grad():
                model.weight += 0.01 * float(comm.rng("step").normal())
            worst = iteration // 2 % group.Get_size() == group.Get_rank()
            # Each is the worst in its turn; a rank that is behind meets another's turn: either may be worse.
            metric = -1.0 - iteration * (rank + 1) * 0.618 % 1 if worst else rank + 3.0
            model, optimizer, info = chosen(iteration, model, optimizer, metric, group)
            comm.record(iteration=iteration, weight=model.logZ, averaged=info["averaged_this_iteration"])
            iteration, again = iteration + 1, 0
        except (RankFailed, Revoked, Timeout):
            again += 1
            if again > MOST:
                raise
            found = group.recover(iteration)
            group, iteration = found.comm, found.step
    chosen.shutdown()
