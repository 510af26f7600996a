"""Digits on many ranks, under one of three policies: "none", "average" (everybody), "selective" (best replace worst).

    spawnsim run studies/digits.py --ranks 1000 --platform ethernet-10g --straggler lognormal:0.3 --seed 7 --out runs/a
    spawnsim run studies/digits.py --ranks 1000 --set policy=average --set alpha=0.1 --seed 7 --out runs/b
    spawnsim run studies/digits.py --backend mpi -n 4 --seed 7 --out runs/c
    spawnsim plot runs/a runs/b runs/c

`pip install "spawnsim[demo]"` brings the images.
"""

from spawnsim import AsyncSelectiveAveragingPolicy, AverageAllPolicy
from spawnsim.errors import ParameterError
from spawnsim.workloads import Digits


def main(
    comm,
    policy="selective",  # "none", "average" or "selective"
    iterations=200,
    alpha=0.3,  # Dirichlet split of the classes over ranks; 0.1: one or two digits each; None: even
    average_every=10,
    replacement_ratio=0.2,  # of the ranks, the worst ones; "selective" alone
    cooldown=0,  # iterations between two replacements of one rank, at least; likewise
    compression=None,  # of the models that "selective" sends: "float16", "bfloat16", "blockwise8", …; None: none
    accuracy_every=10,
    hidden=(32,),  # widths of the hidden layers
    judge="loss",  # selection goes by "loss" (of the own batch) or "accuracy" (on the held-out images not reported)
):
    """Train on this rank's shard, and exchange models with the others."""
    digits = Digits(comm.rng, comm.Get_rank(), comm.Get_size(), alpha=alpha, hidden=hidden)
    model, optimizer = digits.build()

    if policy == "none":
        exchange = None
    elif policy == "average":
        exchange = AverageAllPolicy(average_every=average_every)
    elif policy == "selective":
        exchange = AsyncSelectiveAveragingPolicy(
            digits.build, average_every=average_every, replacement_ratio=replacement_ratio, cooldown=cooldown,
            compression=compression,
        )  # fmt: skip
    else:
        raise ParameterError(f'policy={policy!r}: choose "none", "average" or "selective"')

    judged, reported = (slice(0, None, 2), slice(1, None, 2)) if judge == "accuracy" else (None, slice(None))
    for iteration in range(iterations):
        with comm.compute() as block:
            loss = digits.step(model, optimizer)
        if judged is None:
            metric = -loss
        elif iteration % average_every == 0:
            metric = digits.accuracy(model, judged)
        info = {}
        if exchange is not None:
            model, optimizer, info = exchange(iteration, model, optimizer, local_metric=metric, group=comm)
        if (iteration + 1) % accuracy_every == 0:  # measured outside of compute(): free on virtual ranks
            info = {**info, "accuracy": digits.accuracy(model, reported)}
        comm.record(iteration=iteration, loss=loss, compute_s=block.seconds, **info)

    if exchange is not None:
        exchange.shutdown()
