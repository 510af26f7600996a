"""Every policy under node failures: which ones finish, and what share of the work counts in the end (goodput).

    python benchmarks/failures.py --ranks 1000 --failures 2000 --out failures.png

Nodes of 8 ranks fail at random (Poisson) and restart a second later. A restarted rank reads its last checkpoint,
joins the other ranks with `recover()`, and takes part again. "requeued": averaging all, where each failure ends the
job, which restarts from its checkpoint a second later. Goodput: iterations that ranks have finished, each counted
once even if it was repeated, times the step time, over the time of all ranks. With --kept, results in a file from
earlier calls are not measured again, and are part of the figure: a long campaign can run in parts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import spawnsim
from spawnsim.errors import RankFailed, Revoked, SpawnsimError, Timeout
from spawnsim.models.faults import Crash, Failures, FaultPlan
from spawnsim.policies import (
    AsyncModelAveragePolicy,
    AsyncSelectiveAveragingPolicy,
    AsyncServerPolicy,
    AverageAllPolicy,
    DecentralizedAveragingPolicy,
    DecoupledDiLoCoPolicy,
    EASGDPolicy,
    EDiTPolicy,
    ExchangeOptions,
    GossipPolicy,
    NoLoCoPolicy,
    OneRoundLatePolicy,
    OneSidedSelectiveAveragingPolicy,
    OuterOptimizerPolicy,
    PopulationBasedTrainingPolicy,
    ServerOptions,
    ServerRule,
    SPARTAPolicy,
    SpawnPolicy,
    StreamingDiLoCoPolicy,
    WAGMAPolicy,
    WindowOptions,
    graphs,
)

NODE = 8
POLICIES: dict[str, Callable[[], SpawnPolicy]] = {
    "average all": lambda: AverageAllPolicy(10),
    "selective": lambda: AsyncSelectiveAveragingPolicy(
        None, 10, 0.1, wiring=ExchangeOptions(shutdown_timeout_s=1.0)
    ),
    "one-sided": lambda: OneSidedSelectiveAveragingPolicy(
        None, None, 10, replacement_mode="worst_ratio", windows=WindowOptions(shutdown_timeout_s=1.0)
    ),
    # Ranks average every half a second: the search times, meant for seconds between averagings, must fit into that.
    "groups": lambda: DecentralizedAveragingPolicy(
        10, target_group_size=8, min_matchmaking_time=0.1, request_timeout=0.05
    ),
    "requeued": lambda: AverageAllPolicy(10),
    "by clock": lambda: AsyncModelAveragePolicy("random", 500),
    "gossip": lambda: GossipPolicy(10),
    "push-sum": lambda: GossipPolicy(10, graph=graphs.one_peer_exponential, push_sum=True),
    "WAGMA": lambda: WAGMAPolicy(10, patience_s=1.0),
    "server": lambda: AsyncServerPolicy(ServerOptions(ServerRule(0.5, 0.9)), steps=10, patience_s=1.0),
    "DiLoCo": lambda: OuterOptimizerPolicy.diloco(10),
    "SparseLoCo": lambda: OuterOptimizerPolicy.sparseloco(10),
    "streaming": lambda: StreamingDiLoCoPolicy(40, fragments=2),
    "eager": lambda: OneRoundLatePolicy.eager(10),
    "CO2": lambda: OneRoundLatePolicy.co2(10),
    "decoupled": lambda: DecoupledDiLoCoPolicy(40, fragments=2),
    "EDiT": lambda: EDiTPolicy(10),
    "NoLoCo": lambda: NoLoCoPolicy(10),
    "EASGD": lambda: EASGDPolicy(10),
    "SPARTA": lambda: SPARTAPolicy(10),
    "population": lambda: PopulationBasedTrainingPolicy(10),
}


def train(comm: Any, policy: str, iterations: int, every: int, step_s: float) -> None:
    """Train with all ranks that are alive."""
    model = torch.nn.Linear(10, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    acting, group = POLICIES[policy](), comm
    saved = comm.restore(model=model, optimizer=optimizer, policy=acting)
    iteration = 0 if saved is None else saved.iteration
    alone = comm.Is_revoked()  # this rank has restarted, and must join the others first
    while True:
        try:
            if alone:
                found = group.recover(iteration)
                group, iteration, alone = found.comm, found.step, False
            if iteration == iterations:
                group.Barrier()  # no rank leaves while another may need it to recover
                return
            with comm.compute(step_s):
                pass
            metric = float(comm.rng("metric").normal())
            model, optimizer, _ = acting(iteration, model, optimizer, local_metric=metric, group=group)
            comm.record(iteration=iteration, size=group.size)
            iteration += 1
            if every and iteration % every == 0:
                group.checkpoint(iteration=iteration, model=model, optimizer=optimizer, policy=acting)
        except (RankFailed, Revoked, Timeout):
            alone = True


def finished(run: Any) -> int:
    """Return the number of iterations that ranks have finished, each counted once."""
    table = run.table
    return len(np.unique(table["rank"].astype(np.int64) * 10**7 + table["iteration"].astype(np.int64)))


def plan(ranks: int, failures: int, length_s: float, *, requeued: bool = False) -> FaultPlan:
    """Return node failures that hit about `failures` ranks in a time; `requeued`: each failure ends the whole job."""
    nodes = [tuple(range(first, min(first + NODE, ranks))) for first in range(0, ranks, NODE)]
    drawn = Failures(0.0, length_s, mtbf_s=len(nodes) * length_s / (failures / NODE), repair_s=1.0)
    return FaultPlan(drawn.faults(nodes, seed=1, job=range(ranks) if requeued else ()), seed=1)


def main() -> None:
    """Run all policies, print a table, and draw it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--failures", type=int, default=2000, help="of ranks, about")
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--step-s", type=float, default=0.05, help="virtual length of an iteration")
    parser.add_argument("--checkpoint-every", type=int, default=100)
    parser.add_argument("--policy", action="append", choices=POLICIES)
    parser.add_argument(
        "--kept", type=Path, help="file of the results of each policy, from which the next call continues"
    )
    parser.add_argument("--out", help="figure of the goodput")
    options = parser.parse_args()
    plans = {
        requeued: plan(
            options.ranks, options.failures, options.iterations * options.step_s, requeued=requeued
        )
        for requeued in (False, True)
    }
    deaths = sum(isinstance(fault, Crash) for fault in plans[False].faults)
    print(f"{options.ranks} ranks, {deaths} failures, {options.iterations} iterations of {options.step_s} s")
    print(f"{'policy':14} {'goodput':>8} {'virtual s':>10} {'failed':>7} {'processor s':>12}")
    kept = json.loads(options.kept.read_text()) if options.kept and options.kept.exists() else {}
    for policy in options.policy or POLICIES:
        if policy not in kept:
            parameters = {
                "policy": policy, "iterations": options.iterations, "every": options.checkpoint_every,
                "step_s": options.step_s,
            }  # fmt: skip
            try:
                kept[policy] = measured(options.ranks, plans[policy == "requeued"], parameters)
            except SpawnsimError as error:
                print(f"{policy:14} {type(error).__name__}: {error}", flush=True)
                continue
            if options.kept:
                options.kept.write_text(json.dumps(kept))
        found = kept[policy]
        print(
            f"{policy:14} {found['goodput']:8.3f} {found['virtual_s']:10.1f} {found['failed']:7} "
            f"{found['processor_s']:12.1f}",
            flush=True,
        )
    if options.out:
        draw({policy: kept[policy]["goodput"] for policy in POLICIES if policy in kept}, options)


def measured(ranks: int, faults: FaultPlan, parameters: dict[str, Any]) -> dict[str, float]:
    """Run a policy, and return its results."""
    began_s = time.process_time()
    run = spawnsim.run(train, ranks=ranks, faults=faults, parameters=parameters)
    virtual_s = run.totals["virtual_seconds"]
    return {
        "goodput": finished(run) * parameters["step_s"] / (ranks * virtual_s),
        "virtual_s": virtual_s,
        "failed": sum(event["kind"] == "crash" for event in run.events),
        "processor_s": time.process_time() - began_s,
    }


def draw(shares: dict[str, float], options: argparse.Namespace) -> None:
    """Draw the goodput of each policy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 0.9 + 0.28 * len(shares)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(list(shares), list(shares.values()), color="#0072B2")
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.set(
        xlim=(0, 1.1), xlabel="goodput", title=f"{options.ranks:,} ranks, about {options.failures:,} failures"
    )
    axes.invert_yaxis()
    figure.savefig(options.out, dpi=150)


if __name__ == "__main__":
    main()
