"""What an exchange of weights costs in time, learning aside: a model of any size, one policy, a clock.

    spawnsim run studies/exchange.py --ranks 64 --platform ethernet-10g --set policy=average --set parameters=262144

`seconds` is the virtual (or measured) time per iteration beyond computing.
"""

import torch

from spawnsim import AsyncSelectiveAveragingPolicy, AverageAllPolicy
from spawnsim.errors import ParameterError


def main(
    comm,
    policy="average",  # "average" (everybody) or "selective" (the best replace the worst)
    parameters=262_144,  # float32 numbers in the model: 1 MiB
    iterations=20,
    average_every=1,
    replacement_ratio=0.2,
):
    """Compute and exchange; record what each iteration took beyond computing."""
    generator = torch.Generator().manual_seed(comm.rng.seed("init"))

    def build():
        model = torch.nn.Linear(parameters, 1, bias=False, device="meta").to_empty(device="cpu")
        torch.nn.init.normal_(model.weight, generator=generator)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    if policy == "average":
        exchange = AverageAllPolicy(average_every=average_every)
    elif policy == "selective":
        exchange = AsyncSelectiveAveragingPolicy(
            build, average_every=average_every, replacement_ratio=replacement_ratio, cooldown=0
        )
    else:
        raise ParameterError(f'policy={policy!r}: choose "average" or "selective"')

    model, optimizer = build()
    for iteration in range(iterations):
        begin = comm.clock.now()
        with comm.compute() as block:
            metric = float(comm.rng("metric").normal())
        model, optimizer, _ = exchange(iteration, model, optimizer, local_metric=metric, group=comm)
        comm.record(iteration=iteration, seconds=comm.clock.now() - begin - block.seconds)
    exchange.shutdown()
