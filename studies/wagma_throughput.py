"""Steps per second with uneven work: small groups that do not wait, against all-reduce. Timing alone.

    spawnsim study wagma_throughput [--quick]

Up to 1,024 ranks, a model of 8.5 M float32 numbers (no memory), links of 10 GB/s. The time of a step is drawn anew on
each rank. The paper's reinforcement learning, whose episodes have varying lengths, is assumed to have a lognormal
distribution with a median of 1.9 s, cut off at 1.7 and 43.5 s; a mild distribution is measured, too.
"""

import numpy as np
import torch

import spawnsim
from spawnsim.models.network import Hockney, LogGP, Switch
from spawnsim.models.platform import Platform
from spawnsim.policies import AverageAllPolicy, GossipPolicy, WAGMAPolicy, graphs
from spawnsim.study import Context
from spawnsim.units import extent

PARAMETERS, MEDIAN_S, LEAST_S, MOST_S, RATE_BPS, SYNC = 8_500_000, 1.9, 1.7, 43.5, 1e10, 10
UNEVEN = {"mild": 0.3, "episodes": 1.0}  # standard deviations of the logarithm
POLICIES = {
    "all-reduce": lambda: AverageAllPolicy(1),
    "D-PSGD": lambda: GossipPolicy(graph=graphs.ring),
    "SGP": lambda: GossipPolicy(graph=graphs.one_peer_exponential, push_sum=True),
    "local SGD": lambda: AverageAllPolicy(SYNC),
    "WAGMA": lambda: WAGMAPolicy(sync_every=SYNC + 1),  # the rounds begin with step 0, which takes no time
}
NETWORKS = {
    "Hockney": Switch(Hockney(1.5e-6, RATE_BPS)),
    "LogGP": Switch(LogGP(1.5e-6, 5e-7, 5e-7, 1 / RATE_BPS)),
}


def study(context: Context) -> None:
    """Measure steps per second for increasing numbers of ranks; state the claim."""
    sizes, seeds = ([8, 32], range(1, 2)) if context.quick else ([32, 1024], range(1, 3))
    rows = []
    for network in NETWORKS:
        for uneven in UNEVEN:
            for ranks in sizes:
                found = {
                    name: [rate(network, uneven, name, (ranks, seed)) for seed in seeds] for name in POLICIES
                }
                gains = {name: np.asarray(each) / found["all-reduce"] for name, each in found.items()}
                shown = ", ".join(f"{name} {np.mean(each):.2f}" for name, each in gains.items())
                context.say(f"{network:8}{uneven:9}{ranks:5} ranks: {shown} times all-reduce")
                rows += [
                    {
                        "network": network, "uneven": uneven, "ranks": ranks, "policy": name,
                        "rate": float(np.mean(found[name])), "gain": float(np.min(gains[name])),
                        "best": float(np.max(gains[name])),
                    }
                    for name in POLICIES
                ]  # fmt: skip
    context.save_table(rows, "rates")

    def gain(policy, uneven, ranks=sizes[-1]):
        """Return the least and the largest gain over networks and seeds."""
        mine = [r for r in rows if (r["policy"], r["uneven"], r["ranks"]) == (policy, uneven, ranks)]
        return min(r["gain"] for r in mine), max(r["best"] for r in mine)

    def shown(policy):
        return ", ".join(f"{uneven} {extent(gain(policy, uneven), '.2f')}" for uneven in UNEVEN)

    context.claim(
        "WAGMA's throughput is 2.1 times that of the state of the art on 1,024 ranks with uneven work",
        source="arXiv 2005.00124, abstract",
        checks={
            "2.1 times all-reduce with episodes": gain("WAGMA", "episodes")[0] >= 2.1,
            "ahead of SGP and D-PSGD": all(
                gain("WAGMA", uneven)[0] > max(gain("SGP", uneven)[1], gain("D-PSGD", uneven)[1])
                for uneven in UNEVEN
            ),
            "more ranks, more gain": gain("WAGMA", "episodes")[0] > gain("WAGMA", "episodes", sizes[0])[1],
        },
        found=f"against all-reduce: WAGMA {shown('WAGMA')}, SGP {shown('SGP')}, D-PSGD {shown('D-PSGD')} times at "
        f"{sizes[-1]:,} ranks; local SGD that meets as rarely, each {SYNC}th step, {shown('local SGD')}: the "
        f"gain is the waits in between ({', '.join(NETWORKS)}, {len(seeds)} seeds; steps of the median rank)",
    )


def rate(network, uneven, policy, drawn):
    """Return the median rank's steps per second."""
    ranks, seed = drawn

    def main(comm):
        model = torch.nn.Linear(1000, PARAMETERS // 1000, bias=False, device="meta")
        optimizer, chosen = torch.optim.SGD(model.parameters(), lr=0.1), POLICIES[policy]()
        draws = np.exp(comm.rng("steps").normal(np.log(MEDIAN_S), UNEVEN[uneven], SYNC))
        chosen(0, model, optimizer, group=comm)  # policies set up their state, and round 0 is complete
        began_s = comm.clock.now()
        for step, seconds in enumerate(np.clip(draws, LEAST_S, MOST_S), 1):
            with comm.compute(float(seconds)):
                pass
            chosen(step, model, optimizer, group=comm)
        comm.record(seconds=comm.clock.now() - began_s)
        chosen.shutdown()

    platform = Platform("cluster", NETWORKS[network])
    run = spawnsim.run(main, ranks=ranks, platform=platform, seed=seed, deadline_s=1e6)
    return float(SYNC / np.median(run.table["seconds"]))
