"""Digits on many ranks, under one of five exchange policies.

    spawnsim run studies/digits.py --ranks 1000 --platform ethernet-10g --straggler lognormal:0.3 --seed 7 --out runs/a
    spawnsim run studies/digits.py --ranks 1000 --set policy=average --set alpha=0.1 --seed 7 --out runs/b
    spawnsim run studies/digits.py --backend mpi -n 4 --seed 7 --out runs/c
    spawnsim plot runs/a runs/b runs/c

"none"; "average" (all ranks, in step); "selective" (the worst take the mean of eight others); "groups" (random
groups, without waiting); "clock" (all ranks, by the clock, in parallel with training). `pip install "spawnsim[demo]"`
installs the images.
"""

from contextlib import nullcontext
from functools import cache
from typing import Literal

from spawnsim import AsyncSelectiveAveragingPolicy, AverageAllPolicy, columnar
from spawnsim.errors import ParameterError
from spawnsim.policies import AsyncModelAveragePolicy, Consensus, DecentralizedAveragingPolicy
from spawnsim.policies.averaging import RandomGroups
from spawnsim.workloads import Digits
from spawnsim.workloads.digits import accuracy_of, load, loss_of

POLICIES = ("none", "average", "selective", "groups", "clock")
# By judge: the parts of the held-out images that decide, and that are reported.
JUDGED = {"loss": (None, slice(None)), "accuracy": (slice(0, None, 2), slice(1, None, 2))}


def rate(rng, spread):
    """Return the rank's learning rate."""
    return 0.1 * float(rng("rate").lognormal(0.0, spread))


def main(
    comm,
    # The last choice: three policies one after the other in one job.
    policy: Literal[
        "none", "average", "selective", "groups", "clock", "none+average+selective"
    ] = "selective",
    iterations: int = 200,
    # Dirichlet split of the classes over ranks; 0.1: one or two digits each; None: even
    alpha: float | None = 0.3,
    spread: float = 0.0,  # spread of the ranks' learning rates: 0.1 · exp(spread · N(0, 1))
    average_every: int = 10,
    replacement_ratio: float = 0.2,  # share of ranks to replace, the worst ones; only for "selective"
    cooldown: int = 0,  # least number of iterations between two rounds of replacements; only for "selective"
    # compression of the models that "selective" sends: "float16", "bfloat16", "blockwise8", …; None: none
    compression: str | None = None,
    group_size: int = 16,  # for "groups"
    interval_ms: float = 50.0,  # for "clock"
    accuracy_every: int = 10,
    consensus_every_s: float | None = None,  # time between evaluations of the mean of all models; None: never
    hidden: tuple[int, ...] = (32,),  # widths of the hidden layers
    device: str = "cpu",  # device of the models: "cpu", "cuda"
    # Selection uses the "loss" (of the rank's batch) or the "accuracy" (on the held-out images that are not
    # reported).
    judge: Literal["loss", "accuracy"] = "loss",
):
    """Train on this rank's shard, and exchange models with the other ranks."""
    given, in_turn = dict(locals()), policy.split("+")
    if not {*in_turn} <= {*POLICIES}:
        raise ParameterError(f"policy={policy!r}: choose {', '.join(POLICIES)}")
    if len(in_turn) > 1:  # in one job, since real ranks take longer to start than to train
        for each in in_turn:
            main(**given | {"policy": each})
            comm.Barrier()
        return
    digits = Digits(
        comm.rng,
        comm.Get_rank(),
        comm.Get_size(),
        alpha=alpha,
        hidden=hidden,
        lr=rate(comm.rng, spread),
        device=device,
    )
    model, optimizer = digits.build()

    exchange, training = None, nullcontext
    if policy == "average":
        exchange = AverageAllPolicy(average_every=average_every)
    elif policy == "selective":
        exchange = AsyncSelectiveAveragingPolicy(
            model_builder=None, average_every=average_every, replacement_ratio=replacement_ratio,
            cooldown=cooldown, compression=compression,
        )  # fmt: skip
    elif policy == "groups":
        exchange = DecentralizedAveragingPolicy(
            average_every, asynchronous=True, matchmaking=RandomGroups(group_size), target_group_size=group_size,
            min_matchmaking_time=0.05, request_timeout=0.04, step_timeout=0.3,
        )  # fmt: skip
    elif policy == "clock":
        exchange = AsyncModelAveragePolicy(sync_interval_ms=interval_ms, background=True)
        training = exchange.weights  # held while a step changes them

    judged, reported = JUDGED[judge]
    consensus = Consensus(comm, model, consensus_every_s) if consensus_every_s else None
    for iteration in range(iterations):
        with comm.compute() as block, training():
            loss = digits.step(model, optimizer)
            if judged is not None and iteration % average_every == 0:
                metric = digits.accuracy(model, judged)
        info = {}
        if exchange is not None:
            if judged is None:
                metric = -loss
            model, optimizer, info = exchange(iteration, model, optimizer, local_metric=metric, group=comm)
        if consensus is not None:
            consensus.passed(model)
        # Outside of compute(): free on virtual ranks. Last: values that are not read now become one call for all
        # ranks later.
        if (iteration + 1) % accuracy_every == 0:
            info = {**info, "accuracy": digits.accuracy(model, reported)}
        comm.record(iteration=iteration, loss=loss, compute_s=block.seconds, **info)

    if exchange is not None:
        exchange.shutdown()
    if consensus is not None:
        for at_s, mean in consensus.means():
            comm.record.event("consensus", at_s=at_s, accuracy=digits.accuracy(mean, reported))


def training(alpha=0.3, spread=0.0, hidden=(32,), device="cpu", judge="loss"):
    """Return how models train over columns (`--columns`), as in `main`."""

    def learner(rng, rank, size):
        return Digits(rng, rank, size, alpha=alpha, hidden=hidden, lr=rate(rng, spread), device=device)

    def data(rng, rank, size):
        images = learner(rng, rank, size)
        while True:
            yield images.indices()

    score = None if JUDGED[judge][0] is None else accuracy_on("judged", judge, device)
    return columnar.Training(
        lambda rng: learner(rng, 0, 1).build(),
        loss,
        data,
        score=score,
        report=(accuracy_on("accuracy", judge, device),),
    )


def loss(model, chosen):
    """Return the mean cross-entropy of some training images."""
    return loss_of(model, chosen, str(chosen.device))


@cache  # models train together if their functions are equal
def accuracy_on(name, judge, device):
    """Return the function that gives a model's accuracy on the held-out images that decide, or are reported."""
    test, part = load(device)[1], JUDGED[judge][name == "accuracy"]

    def accuracy(model):
        return accuracy_of(model, test.x[part], test.y[part])

    accuracy.__name__ = name
    return accuracy
