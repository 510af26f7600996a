"""Stragglers, random and consistent: steps per second under data parallel, EDiT and A-EDiT. Timing alone.

    spawnsim study edit_stragglers [--quick]

Eight ranks take steps of 1 s. Random: in each step one rank, drawn anew, is delayed by a lag. Consistent: the same
rank is delayed in every step. Data parallel waits for all ranks in each step, EDiT every 16 steps, A-EDiT every 16 s.
The model has no memory, and averaging it takes little time compared with a step.
"""

import numpy as np
import torch

import spawnsim
from spawnsim.models.network import Hockney, LogGP, Switch
from spawnsim.plots import style
from spawnsim.policies import AverageAllPolicy, EDiTPolicy
from spawnsim.random import WORLD, generator
from spawnsim.study import Context

RANKS, STEP_S, EVERY = 8, 1.0, 16
POLICIES = {
    "data parallel": lambda: AverageAllPolicy(1),
    "EDiT": lambda: EDiTPolicy(EVERY),
    "A-EDiT": lambda: EDiTPolicy(every_s=EVERY * STEP_S),
}
NETWORKS = {"Hockney": Switch(Hockney(2e-5, 12.5e9)), "LogGP": Switch(LogGP(2e-5, 5e-6, 5e-6, 8e-11))}


def study(context: Context) -> None:
    """Measure throughput for increasing lags; state the claim."""
    lags = [0.0, 4.0] if context.quick else [0.0, 2.0, 4.0]
    seeds = context.seeds(range(1, 4))
    lasts_s = 160.0 if context.quick else 320.0
    rows = []
    for network in NETWORKS:
        for kind in ("random", "consistent"):
            for policy in POLICIES:
                for lag in lags:
                    rates = [rate(policy, kind, lag, (seed, lasts_s, network)) for seed in seeds]
                    low, high = min(rates), max(rates)
                    row = {"network": network, "kind": kind, "policy": policy, "lag_s": lag}
                    rows.append(row | {"steps_s": float(np.mean(rates)), "low": low, "high": high})
                context.say(
                    f"{network:8}{kind:11}{policy:14}"
                    + " ".join(f"{r['steps_s']:6.2f}" for r in rows[-len(lags) :])
                )
    context.save_table(rows, "throughput")
    context.save(figure(rows), "throughput")
    kept = {
        (row["network"], row["kind"], row["policy"]): row["steps_s"] / RANKS * STEP_S
        for row in rows
        if row["lag_s"] == lags[-1]
    }
    share = {
        (kind, policy): [kept[network, kind, policy] for network in NETWORKS]
        for kind in ("random", "consistent")
        for policy in POLICIES
    }
    # Ranks that never wait: each is delayed in one step of eight, or one rank in all of its steps.
    alone = {"random": 1 / (1 + lags[-1] / RANKS), "consistent": (RANKS - 1 + 1 / (1 + lags[-1])) / RANKS}
    text = "; ".join(
        f"{kind}: "
        + ", ".join(f"{policy} {100 * min(share[kind, policy]):.0f} %" for policy in POLICIES)
        + f", without waits {100 * alone[kind]:.0f} %"
        for kind in alone
    )
    context.claim(
        "EDiT evens out random stragglers but not consistent ones; A-EDiT keeps its throughput under both",
        source="arXiv 2412.07210",
        checks={
            "EDiT ahead of data parallel under random ones": min(share["random", "EDiT"])
            > 1.2 * max(share["random", "data parallel"]),
            "EDiT no better than data parallel under consistent ones": max(share["consistent", "EDiT"])
            < 1.2 * min(share["consistent", "data parallel"]),
            "A-EDiT above 80 % under both": min(share["random", "A-EDiT"] + share["consistent", "A-EDiT"])
            > 0.8,
        },
        found=f"of the throughput without stragglers, at a lag of {lags[-1]:g} steps: {text} ({RANKS} ranks, "
        f"H {EVERY}, {len(seeds)} seeds, the worst of {', '.join(NETWORKS)})",
    )


def rate(policy, kind, lag, where):
    """Return the steps per second of all ranks together."""
    seed, lasts_s, network = where

    def main(comm):
        model = torch.nn.Sequential(*(torch.nn.Linear(100, 100, device="meta") for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        chosen, iteration = POLICIES[policy](), 0
        chosen(0, model, optimizer, None, comm)
        late = generator(seed, WORLD, "who is late").integers(RANKS, size=int(lasts_s))
        # All ranks of data parallel and EDiT take the same number of steps, so that no rank waits for one that has
        # ended.
        while (
            iteration < int(lasts_s / (1 + lag) / EVERY) * EVERY
            if policy != "A-EDiT"
            else comm.clock.now() < lasts_s
        ):
            iteration += 1
            slow = late[iteration % len(late)] if kind == "random" else 0
            with comm.compute(STEP_S + lag * (comm.rank == slow)):
                pass
            model, optimizer, _ = chosen(iteration, model, optimizer, None, comm)
        comm.record(steps=iteration, ended=comm.clock.now())
        chosen.shutdown()

    run = spawnsim.run(main, ranks=RANKS, platform=NETWORKS[network], seed=seed, deadline_s=1e6)
    return float(run.table["steps"].sum() / run.table["ended"].max())


def figure(rows):
    """Draw throughput against the lag, with a panel for each kind of straggler."""
    from matplotlib.figure import Figure

    with style.talk():
        drawn = Figure(figsize=(11, 5))
        axes = drawn.subplots(1, 2, sharey=True)
        looks = style.looks(list(POLICIES))
        for ax, kind in zip(axes, ("random", "consistent"), strict=True):
            for policy in POLICIES:
                mine = [
                    r for r in rows if (r["network"], r["kind"], r["policy"]) == ("Hockney", kind, policy)
                ]
                lags = [row["lag_s"] for row in mine]
                ax.plot(lags, [row["steps_s"] for row in mine], color=looks[policy].colour, label=policy)
                ax.fill_between(
                    lags,
                    [row["low"] for row in mine],
                    [row["high"] for row in mine],
                    color=looks[policy].colour,
                    alpha=0.2,
                )
            ax.set_title(f"{kind} straggler")
            ax.set_xlabel("lag (steps)")
        axes[0].set_ylabel("steps a second, all ranks")
        axes[0].legend(frameon=False)
        caption = f"{RANKS} virtual ranks · steps of {STEP_S:g} s · bands: all seeds · timing alone"
        return style.frame(drawn, "By the clock, no rank waits for the slowest", caption)
