"""Asynchronous local SGD on workers of different speeds: the effect of momentum on changes that arrive late.

    spawnsim study async_diloco [--quick]

The authors' toy problem, smaller and easier: four classes, each a mixture of Gaussians; a network with one hidden
layer; AdamW restarted in each round; four workers with 0.58, 0.75, 1.51 and 3.33 s per step, 20 steps per round; rank
4 serves. All methods take the same total of local steps, at each of several outer learning rates. A change that
arrives alone counts half (√4/4, as in the authors' method).
"""

import math
from functools import partial

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import spawnsim
from spawnsim import TrainingStep
from spawnsim.policies import AsyncServerPolicy, ServerOptions, ServerRule, StateScope
from spawnsim.random import WORLD, generator
from spawnsim.study import Context

STEP_S, ROUND, CLASSES, CLUSTERS, SIZE, HIDDEN, RATE = (0.58, 0.75, 1.51, 3.33), 20, 4, 8, 32, 64, 5e-3
WORKERS, OUTER = len(STEP_S), (0.1, 0.3, 0.7)
RULES = {
    "synchronous": lambda rate: ServerRule(
        rate, 0.9, WORKERS
    ),  # DiLoCo: the fourth change of a round triggers the outer step
    "asynchronous": lambda rate: ServerRule(rate, 0.9),
    "without momentum": lambda rate: ServerRule(rate, 0.0),
    "delayed Nesterov": lambda rate: ServerRule(rate, 0.9, WORKERS, delayed=True),
    "delayed Nesterov, DyLU": lambda rate: ServerRule(rate, 0.9, WORKERS, delayed=True),
}


def main(comm, method, outer, rounds):
    """Train on ranks 0 to 3; rank 4 serves, and records the loss of the server's weights at the end."""
    x, y = data(comm.rng.key[0])
    model = torch.nn.Sequential(
        torch.nn.Linear(SIZE, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, CLASSES)
    )
    first = torch.Generator().manual_seed(comm.rng.key[0])
    for parameter in model.parameters():
        width = parameter.shape[-1] if parameter.dim() > 1 else SIZE
        parameter.data.uniform_(-1 / math.sqrt(width), 1 / math.sqrt(width), generator=first)
    policy = policy_of(method, outer)
    if comm.rank == WORKERS:
        policy.serve(model, comm)
        comm.record(loss=cross_entropy(model(x), y).item())
        return
    optimizer, step = (
        torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=1e-3),
        TrainingStep(cross_entropy_of),
    )
    shard = generator(comm.rng.key[0], WORLD, "shards").permutation(len(x))[comm.rank :: WORKERS]
    together = method == "synchronous"
    total_s = rounds * ROUND * (max(STEP_S) if together else WORKERS / sum(1 / s for s in STEP_S))
    policy(0, model, optimizer, group=comm)
    iteration = 1
    while comm.clock.now() < total_s * (1 - 1e-9):
        with comm.compute(max(STEP_S) if together else STEP_S[comm.rank]):
            done = comm.clock.now() / total_s
            optimizer.param_groups[0]["lr"] = 1e-5 + (RATE - 1e-5) * 0.5 * (1 + math.cos(math.pi * done))
            batch = comm.rng("batches").choice(shard, 32)
            step(model, optimizer, x[batch], y[batch])
        policy(iteration, model, optimizer, group=comm)
        iteration += 1
    policy.shutdown()


def policy_of(method, outer):
    """Return the policy of a method."""
    together = method == "synchronous"
    options = ServerOptions(
        RULES[method](outer),
        scale=1.0 if together or "delayed" in method else 0.5,
        grace_s=0.1 if together else 0.0,  # all changes arrive together, and are answered after the step
    )
    return AsyncServerPolicy(
        options, steps=ROUND, dylu="DyLU" in method, server=WORKERS, patience_s=600.0,
        travels=StateScope(optimizer_state="reset"),
    )  # fmt: skip


def cross_entropy_of(model, x, y):
    """Return the mean cross entropy."""
    return cross_entropy(model(x), y)


def data(seed, count=8192, noise=0.28):
    """Return points of 4 classes, each of 8 Gaussians around points of the unit sphere."""
    rng = generator(seed, WORLD, "data")
    centres = rng.normal(size=(CLASSES * CLUSTERS, SIZE))
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    which = rng.integers(CLASSES * CLUSTERS, size=count)
    x = centres[which] + noise * rng.normal(size=(count, SIZE))
    return torch.from_numpy(x).float(), torch.from_numpy(which // CLUSTERS)


def study(context: Context) -> None:
    """Train with each method at each outer rate, over seeds; state the claim."""
    seeds, rounds, rates = (range(1, 3), 8, OUTER[-1:]) if context.quick else (range(1, 5), 40, OUTER)
    losses, rows = {}, []
    for outer in rates:
        for method in RULES:
            losses[method, outer] = np.array([loss(method, outer, rounds, seed) for seed in seeds])
            mean, half = interval(losses[method, outer])
            rows.append({"method": method, "outer": outer, "loss": mean, "half_width": half})
            context.say(f"outer rate {outer}: {method:24} loss {mean:.3f} ± {half:.3f}")
    context.save_table(rows, "losses")
    last = rates[-1]

    def above(one, other, outer=last):
        """Return whether one method's loss is higher than another's, paired by seed, beyond the interval."""
        mean, half = interval(losses[one, outer] - losses[other, outer])
        return mean > half

    def shown(outer):
        return ", ".join(f"{method} {losses[method, outer].mean():.3f}" for method in RULES)

    context.claim(
        "Asynchronous local SGD with momentum falls behind synchronous DiLoCo, since momentum acts on stale changes; "
        "delayed Nesterov with steps by speed (DyLU) compensates for it",
        source="arXiv 2401.09135; google-deepmind/asyncdiloco",
        checks={
            "momentum behind synchronous": above("asynchronous", "synchronous"),
            "momentum behind no momentum": above("asynchronous", "without momentum"),
            "delayed Nesterov with DyLU ahead of momentum": above("asynchronous", "delayed Nesterov, DyLU"),
            "with DyLU no worse than synchronous": not above("delayed Nesterov, DyLU", "synchronous"),
            "at every outer rate": all(above("asynchronous", "synchronous", outer) for outer in rates),
        },
        found="loss of the server's weights: " + "; ".join(f"outer rate {outer}: {shown(outer)}" for outer in rates)
        + f" ({len(seeds)} seeds, {rounds} rounds, a smaller model than the paper's; verdict at {last})",
    )  # fmt: skip


def loss(method, outer, rounds, seed):
    """Return the loss of the server's weights after a run."""
    program = partial(main, method=method, outer=outer, rounds=rounds)
    run = spawnsim.run(program, ranks=WORKERS + 1, seed=seed, platform="ethernet-10g")
    return float(run.table["loss"][run.table["rank"] == WORKERS][0])


def interval(values):
    """Return the mean, and half the width of an interval of about 95 %."""
    return float(values.mean()), 2 * float(values.std(ddof=1)) / math.sqrt(len(values))
