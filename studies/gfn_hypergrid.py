"""torchgfn trains a GFlowNet per rank on its own HyperGrid, under one of our exchange policies.

    pip install 'spawnsim[gfn]'
    spawnsim study gfn_hypergrid [--quick]
    spawnsim run studies/gfn_hypergrid.py --ranks 64 --platform ethernet-10g --compute "20 ms" --seed 7 --out runs/a
    spawnsim run studies/gfn_hypergrid.py --backend mpi -n 4 --seed 7 --out runs/b
    mpiexec -n 4 spawnsim run studies/gfn_hypergrid.py --backend mpi --seed 7 --out runs/c

Environment, estimators, sampler and loss are torchgfn's, unchanged from the package index; the metric is the number
of modes that a rank has found. With `gradients=True` every step also averages gradients, with the toolkit.

The study asks the questions of torchgfn's authors: how many modes all ranks have found together, over iterations and
by policy; how many iterations it takes to find all modes, by the number of ranks; and which distribution is learnt,
compared with the reward. The method: HyperGrid 2 x 8 x 8 (4 mode states), an exchange every 10 iterations, over
seeds. The learnt distribution is counted from the final states of the last tenth of all ranks' trajectories.

The finding: exchange does not change how soon all four modes are known; the number of ranks does (2: 21 to 25
iterations, 6: 12 to 13). After 60 iterations an average of 6 ranks has learnt less of the distribution (L1 0.92) than
ranks alone (0.69): GFlowNets with different initial weights lose by averaging. Selective replacement (0.71), which
acts once in 60 iterations under its cooldown of 50, does no harm. Three seeds, a small grid.
"""

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from gfn.estimators import DiscretePolicyEstimator
from gfn.gflownet import TBGFlowNet
from gfn.gym import HyperGrid
from gfn.preprocessors import KHotPreprocessor
from gfn.utils.modules import MLP

import spawnsim
from spawnsim import workloads
from spawnsim.errors import ParameterError
from spawnsim.plots import series, style
from spawnsim.torchgfn.distributed import average_gradients, gather_distributed_data
from spawnsim.torchgfn.spawn_policy import (
    AsyncSelectiveAveragingPolicy,
    AsyncSelectiveAveragingPolicympi4pyFast,
    AverageAllPolicy,
)
from spawnsim.units import counted


def builder(comm, env, hidden):
    """Return the function that makes a fresh model and optimizer for this rank."""

    def build():
        torch.manual_seed(comm.rng("init").integers(2**63))  # torchgfn draws from torch's own generator
        features = KHotPreprocessor(height=env.height, ndim=env.ndim)
        forward = MLP(features.output_dim, env.n_actions, hidden_dim=hidden)
        model = TBGFlowNet(
            pf=DiscretePolicyEstimator(forward, env.n_actions, preprocessor=features),
            pb=DiscretePolicyEstimator.uniform(env.n_actions, preprocessor=features),
        )
        groups = [
            {"params": model.pf.parameters(), "lr": 1e-2},
            {"params": model.logz_parameters(), "lr": 1e-1},
        ]
        return model, torch.optim.Adam(groups)

    return build


def chosen(policy, build, model, average_every, comm):
    """Return the policy with a name, constructed as users of the original do; None for "none"."""
    if policy == "none":
        return None
    if policy == "average":
        return AverageAllPolicy(average_every)
    if policy == "selective":
        return AsyncSelectiveAveragingPolicy(
            build, average_every, replacement_ratio=0.2, cooldown=5 * average_every
        )
    if policy == "one-sided":
        return AsyncSelectiveAveragingPolicympi4pyFast(
            build, model, average_every, replacement_mode="worst_ratio", group=comm
        )
    raise ParameterError(f'policy={policy!r}: choose "none", "average", "selective" or "one-sided"')


def main(
    comm,
    policy: Literal["none", "average", "selective", "one-sided"] = "selective",
    iterations=200,
    dimensions=2,
    height=16,
    hidden=64,
    batch=16,
    epsilon=0.05,  # chance of an even action, for exploration
    average_every=20,
    gradients=False,  # average gradients at every step
):
    """Train this rank's sampler, exchange models, and report the modes that all ranks found."""
    torch.set_num_threads(1)
    env = HyperGrid(ndim=dimensions, height=height)
    build = builder(comm, env, hidden)
    model, optimizer = build()
    exchange = chosen(policy, build, model, average_every, comm)
    found, ends = set(), torch.zeros(env.n_states)

    for iteration in range(iterations):
        with comm.compute():
            # Nothing else runs until the end of the block, so the draws are this rank's alone.
            torch.manual_seed(comm.rng("trajectories").integers(2**63))
            trajectories = model.sample_trajectories(env, n=batch, epsilon=epsilon)
            optimizer.zero_grad()
            loss = model.loss(env, trajectories)
            loss.backward()
            fresh = env.modes_found(trajectories.terminating_states) - found
            found |= fresh
            if iteration >= 0.9 * iterations:
                places = env.get_states_indices(trajectories.terminating_states)
                ends += torch.bincount(places, minlength=env.n_states)
        for mode in sorted(fresh):
            comm.record.event("mode", mode=mode, iteration=iteration)
        if gradients:
            average_gradients(model, comm)
        optimizer.step()
        info = {}
        if exchange is not None:
            model, optimizer, info = exchange(
                iteration, model, optimizer, local_metric=float(len(found)), group=comm
            )
        comm.record(
            iteration=iteration, loss=loss.item(), logZ=model.logZ.item(), modes_found=len(found), **info
        )

    if exchange is not None:
        exchange.shutdown()
    together = np.empty(env.n_states, np.float32)
    comm.Reduce(ends.numpy(), together, root=0)
    if comm.Get_rank() == 0:
        comm.record.event("ends", counts=together.astype(int).tolist())
    modes = gather_distributed_data(torch.tensor(sorted(found), dtype=torch.int64), training_group=comm)
    if modes is not None:
        comm.record.event("modes", together=modes.unique().numel())


# ------------------------------------------------------------------------------------------------------------ study
POLICIES = ("none", "average", "selective")
HEIGHT = 8
LEARNING = {"iterations": 60, "average_every": 10, "hidden": 32, "height": HEIGHT}


def study(context):
    """Run all policies over seeds and numbers of ranks; draw modes and learnt distributions."""
    seeds, sizes = context.seeds(range(1, 4)), [2, 3] if context.quick else [2, 6]
    chosen = POLICIES[::2] if context.quick else POLICIES
    learning = LEARNING | ({"iterations": 20} if context.quick else {})
    runs = {}
    for ranks in sizes:
        for policy in chosen:
            for seed in seeds:
                runs[ranks, policy, seed] = spawnsim.run(
                    Path(__file__), ranks=ranks, seed=seed, compute="20 ms", platform="ethernet-10g",
                    parameters=learning | {"policy": policy},
                )  # fmt: skip
            some = [runs[ranks, policy, seed] for seed in seeds]
            shown = series.over_seeds([len(first_finds(run)) for run in some])
            context.say(
                f"{ranks} ranks, {policy:10} {shown.median:.0f} of 4 modes together ({shown.kind} {shown.low:.0f} to "
                f"{shown.high:.0f}), all after {all_after(some, learning['iterations']):.0f} iterations, "
                f"L1 {np.mean([distance(run) for run in some]):.2f}"
            )
    context.save(modes_figure(runs, learning["iterations"]), "modes")
    context.save(learnt_figure({policy: runs[sizes[-1], policy, seeds[0]] for policy in chosen}), "learnt")


def first_finds(run):
    """Return the iteration in which any rank first found each mode."""
    found = {}
    for event in run.events:
        if event["kind"] == "mode":
            found[event["mode"]] = min(event["iteration"], found.get(event["mode"], event["iteration"]))
    return sorted(found.values())


def all_after(runs, iterations):
    """Return the median iteration in which all four modes were known; the number of iterations if they never were."""
    return float(np.median([(first_finds(run) + [iterations] * 4)[3] for run in runs]))


def learnt(run):
    """Return the share of the last trajectories that ended in each state, (height, height)."""
    counts = np.array(next(event["counts"] for event in run.events if event["kind"] == "ends"), float)
    return (counts / counts.sum()).reshape(HEIGHT, HEIGHT)


def rewarded():
    """Return the target distribution, (height, height)."""
    return workloads.HyperGrid(2, HEIGHT).target().numpy().reshape(HEIGHT, HEIGHT)


def distance(run):
    """Return Σ |learnt − reward|, in [0, 2]; it compares counts, so a perfect sampler does not quite reach 0."""
    return float(np.abs(learnt(run) - rewarded()).sum())


def modes_figure(runs, iterations):
    """Draw the modes found together over iterations, for most ranks; and when half were known, by number of ranks."""
    from matplotlib.figure import Figure

    sizes, policies, seeds = (list(dict.fromkeys(key[at] for key in runs)) for at in range(3))
    with style.talk():
        drawn = Figure(figsize=(12, 5))
        left, right = drawn.subplots(1, 2)
        looks = style.looks(policies)
        at = np.arange(iterations)
        for policy in policies:
            look = looks[policy]
            finds = [
                np.searchsorted(first_finds(runs[sizes[-1], policy, seed]), at, "right") for seed in seeds
            ]
            found = np.median(finds, 0)
            left.plot(
                at, found, drawstyle="steps-post", color=look.colour, linestyle=look.dashes, label=policy
            )
            left.fill_between(
                at, np.min(finds, 0), np.max(finds, 0), step="post", color=look.colour, alpha=0.15
            )
            ends = [all_after([runs[ranks, policy, seed] for seed in seeds], iterations) for ranks in sizes]
            right.plot(sizes, ends, marker=look.marker, color=look.colour, linestyle=look.dashes)
        left.set_xlabel("iteration")
        left.set_yticks(range(5))
        left.set_ylabel(f"modes found together, {sizes[-1]} ranks")
        left.legend(frameon=False)
        right.set_xscale("log", base=2)
        right.set_xticks(sizes, [str(size) for size in sizes])
        right.set_xlabel("ranks")
        right.set_ylabel("iterations until all are found")
        right.set_ylim(0)
        caption = (
            f"torchgfn, trajectory balance, HyperGrid 2 x {HEIGHT} x {HEIGHT}, 4 mode states · median and range of "
            f"{counted(len(seeds), 'seed')}"
        )
        return style.frame(drawn, "Modes of a HyperGrid: how soon, under which policy", caption)


def learnt_figure(runs):
    """Draw the reward, and the final states of the last trajectories under each policy."""
    from matplotlib.figure import Figure

    shown = {"reward": rewarded()} | {policy: learnt(run) for policy, run in runs.items()}
    with style.talk():
        drawn = Figure(figsize=(3.1 * len(shown) + 1, 4.4))
        axes = drawn.subplots(1, len(shown), sharey=True)
        for ax, (name, values) in zip(axes, shown.items(), strict=True):
            mesh = ax.imshow(values, origin="lower", cmap="Blues", vmin=0, vmax=2 * shown["reward"].max())
            far = "" if name == "reward" else f", L1 {distance(runs[name]):.2f}"
            ax.set_title(f"{name}{far}", fontsize=12)
            ax.set_xticks([])
            ax.set_yticks([])
            ax.grid(visible=False)
        drawn.colorbar(mesh, ax=axes, label="probability", shrink=0.8, pad=0.01)
        caption = f"torchgfn, HyperGrid 2 x {HEIGHT} x {HEIGHT} · where the last tenth of trajectories ended, one seed"
        return style.frame(drawn, "What the ranks have learnt, next to the reward", caption)
