"""torchgfn trains a GFlowNet per rank on its own HyperGrid, under one of our policies of exchange.

    pip install 'spawnsim[gfn]'
    spawnsim run studies/gfn_hypergrid.py --ranks 64 --platform ethernet-10g --compute "20 ms" --seed 7 --out runs/a
    spawnsim run studies/gfn_hypergrid.py --backend mpi -n 4 --seed 7 --out runs/b
    mpiexec -n 4 spawnsim run studies/gfn_hypergrid.py --backend mpi --seed 7 --out runs/c

Environment, estimators, sampler and loss are torchgfn's as they come from the package index; the metric is the number
of modes that a rank has found. With `gradients=True` every step averages gradients as well, by the toolkit.
"""

import torch
from gfn.estimators import DiscretePolicyEstimator
from gfn.gflownet import TBGFlowNet
from gfn.gym import HyperGrid
from gfn.preprocessors import KHotPreprocessor
from gfn.utils.modules import MLP

from spawnsim.errors import ParameterError
from spawnsim.torchgfn.distributed import average_gradients, gather_distributed_data
from spawnsim.torchgfn.spawn_policy import (
    AsyncSelectiveAveragingPolicy,
    AsyncSelectiveAveragingPolicympi4pyFast,
    AverageAllPolicy,
)


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
    """Return the policy of a name, as the original's users construct it; None for "none"."""
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
    policy="selective",  # "none", "average", "selective" or "one-sided"
    iterations=200,
    dimensions=2,
    height=16,
    hidden=64,
    batch=16,
    epsilon=0.05,  # chance of an even action, for exploration
    average_every=20,
    gradients=False,  # average gradients at every step
):
    """Train this rank's sampler, exchange models, and report what all ranks found."""
    torch.set_num_threads(1)
    env = HyperGrid(ndim=dimensions, height=height)
    build = builder(comm, env, hidden)
    model, optimizer = build()
    exchange = chosen(policy, build, model, average_every, comm)
    found = set()

    for iteration in range(iterations):
        with comm.compute():
            # Nothing else runs between here and the end of the block, so the draws are this rank's alone.
            torch.manual_seed(comm.rng("trajectories").integers(2**63))
            trajectories = model.sample_trajectories(env, n=batch, epsilon=epsilon)
            optimizer.zero_grad()
            loss = model.loss(env, trajectories)
            loss.backward()
            found |= env.modes_found(trajectories.terminating_states)
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
    modes = gather_distributed_data(torch.tensor(sorted(found), dtype=torch.int64), training_group=comm)
    if modes is not None:
        comm.record.event("modes", together=modes.unique().numel())
