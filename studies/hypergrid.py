"""A GFlowNet per rank searches for the modes of one HyperGrid, under one of three exchange policies.

    spawnsim run studies/hypergrid.py --ranks 64 --platform ethernet-10g --straggler lognormal:0.3 --seed 7 --out runs/a
    spawnsim run studies/hypergrid.py --ranks 64 --set policy=none --set height=16 --seed 7 --out runs/b
    spawnsim run studies/hypergrid.py --backend mpi -n 4 --seed 7 --out runs/c

Each row has the number of modes that its rank has found; each first find is an event "mode" with the number of the
state. So `len({e["mode"] for e in run.events if e["kind"] == "mode"})` is the number of modes that all ranks found
together.
"""

from typing import Literal

from spawnsim import AsyncSelectiveAveragingPolicy, AverageAllPolicy
from spawnsim.errors import ParameterError
from spawnsim.workloads import GFlowNet, HyperGrid


def main(
    comm,
    policy: Literal["none", "average", "selective"] = "selective",
    iterations=500,
    dimensions=2,
    height=32,  # 2 x 32 x 32 has 36 modes, 9 near each corner
    epsilon=0.05,  # chance of an even action, for exploration
    average_every=20,
    replacement_ratio=0.2,  # share of ranks to replace, those with the fewest modes; only for "selective"
    cooldown=100,  # iterations in which a replaced rank may catch up; only for "selective"
):
    """Train this rank's sampler, and exchange models with the other ranks."""
    flow = GFlowNet(comm.rng, HyperGrid(dimensions, height), epsilon=epsilon, same_start=False)
    model, optimizer = flow.build()

    if policy == "none":
        exchange = None
    elif policy == "average":
        exchange = AverageAllPolicy(average_every=average_every)
    elif policy == "selective":
        exchange = AsyncSelectiveAveragingPolicy(
            flow.build, average_every=average_every, replacement_ratio=replacement_ratio, cooldown=cooldown
        )
    else:
        raise ParameterError(f'policy={policy!r}: choose "none", "average" or "selective"')

    for iteration in range(iterations):
        with comm.compute() as block:
            loss = flow.step(model, optimizer)
        for mode in sorted(flow.fresh):
            comm.record.event("mode", mode=mode, iteration=iteration)
        info = {}
        if exchange is not None:
            score = float(flow.modes_found)
            model, optimizer, info = exchange(iteration, model, optimizer, local_metric=score, group=comm)
        found = flow.modes_found
        comm.record(iteration=iteration, loss=loss, modes_found=found, compute_s=block.seconds, **info)

    if exchange is not None:
        exchange.shutdown()
