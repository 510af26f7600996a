"""Regional servers under a global one, against one server and synchronous rounds: steps per second. Timing alone.

    spawnsim study halos [--quick]

HALoS's published testbed: 16 workers in four regions, with the speeds and links of its examples/env.yaml, a model of
70.4 M float32 numbers, 238.391 ms per step at full speed. Latencies are 0, as in the authors' simulator.
"""

import math

import numpy as np
import torch

import spawnsim
from spawnsim.models.collectives.catalogue import Selection
from spawnsim.models.network import Hockney, Regions
from spawnsim.models.platform import Platform
from spawnsim.policies import HALOS, AsyncServerPolicy, AverageAllPolicy, ServerOptions, ServerRule, Tier
from spawnsim.study import Context
from spawnsim.units import extent

GBPS = (
    (100.0, 0.537, 0.935, 0.202),
    (0.537, 100.0, 0.386, 0.117),
    (0.935, 0.386, 100.0, 0.127),
    (0.202, 0.117, 0.127, 100.0),
)
SPEEDS = (
    0.232, 0.907, 0.828, 0.347, 0.574, 0.531, 0.722, 0.194, 0.852, 0.132, 0.896, 0.107, 0.827, 0.515, 0.527, 0.788,
)  # fmt: skip
PARAMETERS, STEP_S, LOCAL = 70_400_000, 0.238391, 32
ROUND_S = 105.0  # approximate length of a synchronous training round
# As in the authors' simulator, messages do not contend; or messages of one rank are sent one after the other.
NETWORKS = {"links apart": "none", "messages in turn": "serial"}


def policy_of(name):
    """Return the policy with a name."""
    if name == "synchronous":
        return AverageAllPolicy(LOCAL)
    if name == "asynchronous":
        rule = ServerRule(0.2, 0.9, 16, delayed=True)
        return AsyncServerPolicy(ServerOptions(rule), steps=LOCAL, dylu=True, patience_s=1e5)
    tier = Tier(lambda size: [rank * 4 // size for rank in range(size)])
    return AsyncServerPolicy(HALOS, steps=8, dylu=True, tier=tier, patience_s=1e5)


def study(context: Context) -> None:
    """Measure a synchronous round and throughput; state the claim."""
    lasts_s = 250.0 if context.quick else 4000.0
    rows = []
    for network in NETWORKS:
        for name in ("synchronous", "asynchronous", "two tiers"):
            row = {"network": network, "policy": name} | measured(network, name, lasts_s)
            rows.append(row)
            context.say(
                f"{network:16} {name:13} {row['steps_s']:6.2f} steps a second, {row['waiting']:.1%} of it waiting"
            )
    context.save_table(rows, "throughput")
    rates = {(row["network"], row["policy"]): row["steps_s"] for row in rows}
    gains = {
        other: [rates[network, "two tiers"] / rates[network, other] for network in NETWORKS]
        for other in ("synchronous", "asynchronous")
    }
    compute = LOCAL * STEP_S / min(SPEEDS)
    waits = [row["longest_s"] for row in rows if row["policy"] == "synchronous"]
    context.claim(
        "On HALoS's testbed a synchronous round of 32 steps takes 71.3 s of computing and 33.3 s of all-reduce; two "
        "tiers of servers are up to 7.5 times faster than synchronous training and 2.1 times than one server",
        source="arXiv 2506.04531; utnslab/halos, exec_diloco.py and examples/env.yaml",
        checks={
            "71.3 s of computing": abs(compute - 71.3) < 0.05,
            "33.3 s of all-reduce": all(abs(each - 33.3) < 0.4 for each in waits),
            "more than synchronous": min(gains["synchronous"]) > 1.5,
            "more than one server": min(gains["asynchronous"]) > 1.05,
            "at most the published gains, which are in time to a loss": max(gains["synchronous"]) <= 7.5 * 1.1
            and max(gains["asynchronous"]) <= 2.1 * 1.1,
        },
        found=f"computing {compute:.1f} s, all-reduce {extent(waits, '.2f')} s; steps a second: "
        + ", ".join(f"{extent(each, '.2f')} times as many as in {name}" for name, each in gains.items())
        + f" training ({', '.join(NETWORKS)}; steps alone, learning is not simulated here)",
    )


def measured(network, name, lasts_s):
    """Return the steps per second of all workers together, their share of waiting time, and the last rank's wait."""
    joins = tuple(tuple(Hockney(0.0, rate * 1e9 / 8) for rate in row) for row in GBPS)
    regions = Regions((4, 4, 4, 4), joins, contention=NETWORKS[network])
    platform = Platform("halos", regions, collectives=Selection(fixed=(("allreduce", "ring"),)))

    def main(comm):
        model = torch.nn.Linear(1000, PARAMETERS // 1000, bias=False, device="meta")
        optimizer, policy = torch.optim.SGD(model.parameters(), lr=0.1), policy_of(name)
        steps, waited_s, own_s = 0, 0.0, STEP_S / SPEEDS[comm.rank]
        # Rounds are collective: their number cannot depend on each rank's own clock.
        rounds = math.ceil(lasts_s / ROUND_S)
        while steps <= rounds * LOCAL if name == "synchronous" else comm.clock.now() < lasts_s:
            with comm.compute(own_s):
                pass
            _, _, info = policy(steps, model, optimizer, group=comm)
            waited_s += info["wait_s"]
            steps += 1
        comm.record(steps=steps, wait_s=waited_s, seconds=comm.clock.now(), last_s=info["wait_s"])
        policy.shutdown()

    table = spawnsim.run(main, ranks=len(SPEEDS), platform=platform, deadline_s=1e6).table
    slowest = int(np.argmin(SPEEDS))
    return {
        "steps_s": float((table["steps"] / table["seconds"]).sum()),
        "waiting": float((table["wait_s"] / table["seconds"]).mean()),
        "longest_s": float(table["last_s"][table["rank"] == slowest][0]),
    }
