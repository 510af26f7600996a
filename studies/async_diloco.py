"""Asynchronous local SGD on workers of different speeds: what momentum does to changes that arrive late.

    spawnsim study async_diloco [--quick]
    spawnsim run studies/async_diloco.py --ranks 5 --set method=delayed --out runs/a

The toy of its authors, smaller: classes that are mixtures of Gaussians, a network with one hidden layer, AdamW begun
anew in each round, four workers with 0.58, 0.75, 1.51 and 3.33 s a step, 5 steps a round; rank 4 serves. All methods
take as many local steps in sum. Outer rates and momenta are the authors'; without momentum a mean change moves the
weights by 1.
"""

import math

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from spawnsim import TrainingStep
from spawnsim.policies import AsyncServerPolicy, Polynomial, ServerOptions, ServerRule, StateScope, constant
from spawnsim.random import WORLD, generator
from spawnsim.study import Context

STEP_S, ROUND, CLASSES, CLUSTERS = (0.58, 0.75, 1.51, 3.33), 5, 4, 8
WORKERS, SHARE = len(STEP_S), 1 / 2  # of a change when it arrives: √4/4, as the authors have it
RULES = {
    "synchronous": ServerRule(0.1, 0.9),  # DiLoCo
    "plain": ServerRule(0.5, 0.0),
    "momentum": ServerRule(0.1, 0.9),
    "momentum, by staleness": ServerRule(0.1, 0.9),
    "buffered": ServerRule(0.1, 0.9, WORKERS),
    "delayed": ServerRule(0.1, 0.9, WORKERS, delayed=True),
    "delayed, DyLU": ServerRule(0.1, 0.9, WORKERS, delayed=True),
}


def main(comm, method="momentum", rounds=100, size=64, hidden=256, rate=5e-3):
    """Train on ranks 0 to 3; rank 4 serves, and records the loss of the server's weights at the end."""
    x, y = data(comm.rng.key[0], size)
    model = torch.nn.Sequential(
        torch.nn.Linear(size, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, CLASSES)
    )
    first = torch.Generator().manual_seed(comm.rng.key[0])
    for parameter in model.parameters():
        width = parameter.shape[-1] if parameter.dim() > 1 else size
        parameter.data.uniform_(-1 / math.sqrt(width), 1 / math.sqrt(width), generator=first)
    policy = policy_of(method)
    if comm.rank == WORKERS:
        policy.serve(model, comm)
        comm.record(loss=cross_entropy(model(x), y).item(), seconds=comm.clock.now())
        return
    optimizer, step = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=1e-3), TrainingStep(loss_of)
    shard = generator(comm.rng.key[0], WORLD, "shards").permutation(len(x))[comm.rank :: WORKERS]
    total_s = rounds * (
        max(STEP_S) * ROUND if method == "synchronous" else WORKERS * ROUND / sum(1 / s for s in STEP_S)
    )
    policy(0, model, optimizer, group=comm)
    iteration = 1
    while comm.clock.now() < total_s * (1 - 1e-9):
        with comm.compute(STEP_S[comm.rank] if method != "synchronous" else max(STEP_S)):
            done = comm.clock.now() / total_s
            optimizer.param_groups[0]["lr"] = 1e-5 + (rate - 1e-5) * 0.5 * (1 + math.cos(math.pi * done))
            batch = comm.rng("batches").choice(shard, 32)
            step(model, optimizer, x[batch], y[batch])
        policy(iteration, model, optimizer, group=comm)
        iteration += 1
    policy.shutdown()


def policy_of(method):
    """Return the policy of a method."""
    grace_s = 0.0
    rule = RULES[method]
    if method == "synchronous":
        # All arrive together: the fourth change of a round makes the step, and all are answered after it.
        rule, grace_s = ServerRule(rule.lr, rule.momentum, WORKERS), 0.1
    buffered = rule.size > 1
    options = ServerOptions(
        rule,
        Polynomial() if "staleness" in method else constant,
        scale=1.0 if buffered else SHARE,
        grace_s=grace_s,
    )
    return AsyncServerPolicy(
        options, steps=ROUND, dylu="DyLU" in method, least_steps=1, server=WORKERS, patience_s=600.0,
        travels=StateScope(optimizer_state="reset"),
    )  # fmt: skip


def loss_of(model, x, y):
    """Return the mean cross entropy."""
    return cross_entropy(model(x), y)


def data(seed, size, count=8192, noise=0.5):
    """Return points of 4 classes, each of 8 Gaussians around points of the unit sphere."""
    rng = generator(seed, WORLD, "data")
    centres = rng.normal(size=(CLASSES * CLUSTERS, size))
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    which = rng.integers(CLASSES * CLUSTERS, size=count)
    x = centres[which] + noise * rng.normal(size=(count, size)) / math.sqrt(size / 64)
    return torch.from_numpy(x).float(), torch.from_numpy(which // CLUSTERS)


def study(context: Context) -> None:
    """Train by each method, over seeds; state the claim."""
    seeds = list(range(1, 4 if context.quick else 9))
    cells = context.grid(
        "async_diloco.py", ranks=[WORKERS + 1], seeds=seeds, over={"method": list(RULES)},
        platform="ethernet-10g", parameters={"rounds": 40 if context.quick else 200},
    )  # fmt: skip
    losses = {method: [] for method in RULES}
    for result in context.sweep(cells):
        table = result.run.table
        losses[result.cell.parameters["method"]].append(float(table["loss"][0]))
    report(context, losses)


def report(context, losses):
    """Say what was found, and state the claim."""
    mean = {method: float(np.mean(each)) for method, each in losses.items()}
    half = {method: 2 * float(np.std(each, ddof=1)) / math.sqrt(len(each)) for method, each in losses.items()}
    context.save_table(
        [{"method": method, "loss": mean[method], "half_width": half[method]} for method in losses], "losses"
    )
    for method in losses:
        context.say(f"{method:24} loss {mean[method]:.4f} ± {half[method]:.4f}")

    def above(one, other):
        """Whether one loses to another, seed by seed, beyond its 95 % interval."""
        gaps = np.asarray(losses[one]) - np.asarray(losses[other])
        return gaps.mean() > 2 * gaps.std(ddof=1) / math.sqrt(len(gaps))

    context.claim(
        "Asynchronous local SGD with momentum falls behind synchronous DiLoCo, since momentum acts on stale changes; "
        "delayed Nesterov with steps by speed (DyLU) makes up for it",
        source="arXiv 2401.09135; google-deepmind/asyncdiloco",
        checks={
            "momentum behind synchronous": above("momentum", "synchronous"),
            "momentum behind plain": above("momentum", "plain"),
            "delayed Nesterov ahead of momentum": above("momentum", "delayed"),
            "with DyLU no worse than synchronous": not above("delayed, DyLU", "synchronous"),
        },
        found="loss of the server's weights: "
        + ", ".join(f"{method} {mean[method]:.3f} ± {half[method]:.3f}" for method in losses)
        + f" ({len(next(iter(losses.values())))} seeds, their smaller toy)",
    )
