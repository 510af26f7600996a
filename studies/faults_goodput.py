"""Faults and goodput: the share of time in which ranks train, as machines fail more often, under each policy.

    spawnsim study faults_goodput [--quick]

The question: how much does a failure cost the ranks that did not fail?

The method: timing alone, 16 ranks (8 with --quick), steps of 1 s for 120 s. Each rank fails at random (Poisson) and
restarts 10 s later without state. A rank that notices a death or a joining rank recovers: all meet, agree on the
living ranks and on the step, and continue. Goodput is the time that all ranks spent in finished steps, over all time
of all ranks. It is compared with the share of time in which a rank is alive, 1/(1 + repair/MTBF), which no policy can
exceed. Both network models, seeds with their range.

The finding: under an average, one failure costs the other 15 ranks 30 s together: one step of each when the death is
noticed during an exchange, and another when the rank joins. Averaging every 10 steps saves only a part of the first
loss. Under replacement no rank notices the death, and 16 s are lost, one step of each at the joining. At an MTBF of
300 s goodput is 0.84 and 0.88 against 0.90, where ranks are alive for 0.97 of the time. Both network models agree.
Steps that a rollback to a checkpoint would lose are not counted: the survivors' models are the checkpoint.
"""

import numpy as np

import spawnsim
from spawnsim.errors import RankFailed, Revoked
from spawnsim.models.network import Hockney, LogGP, Switch
from spawnsim.plots import series, style
from spawnsim.policies import AsyncSelectiveAveragingPolicy, AverageAllPolicy
from spawnsim.study import Context
from spawnsim.workloads.mlp import without_data

STEP_S, LASTS_S, REPAIR_S = 1.0, 120.0, 10.0
MTBFS_S = (3_000.0, 1_000.0, 300.0)  # for one rank
POLICIES = {
    "average, each step": lambda: AverageAllPolicy(1),
    "average, each 10 steps": lambda: AverageAllPolicy(10),
    "selective, each 10 steps": lambda: AsyncSelectiveAveragingPolicy(None, 10, 0.2, cooldown=0),
}
NETWORKS = {"Hockney": Switch(Hockney(2e-5, 1.18e9)), "LogGP": Switch(LogGP(2e-5, 5e-6, 5e-6, 1 / 1.18e9))}
PARAMETERS = 250_000


def main(comm, policy="selective, each 10 steps", lasts_s=LASTS_S):
    """Train by the clock, recover whenever a rank has died or joins; record a row for each finished step."""
    model, optimizer = without_data(PARAMETERS)
    chosen, group, step = POLICIES[policy](), comm, 0
    joins = comm.clock.now() > 0  # this rank has restarted
    while comm.clock.now() < lasts_s:
        try:
            if joins:
                raise Revoked("joins the others")
            with comm.compute(STEP_S):
                pass
            metric = float(comm.rng("metric").random())
            model, optimizer, _ = chosen(step, model, optimizer, metric, group)
            step += 1
            comm.record(step=step)
        except (RankFailed, Revoked):
            recovery = group.recover(step)
            group, step, joins = recovery.comm, recovery.step, False
            chosen = POLICIES[policy]()


def study(context: Context) -> None:
    """Run policies × failures over seeds; draw goodput; report the cost of a failure."""
    ranks, seeds = 8 if context.quick else 16, context.seeds(range(1, 6))
    networks = ["Hockney"] if context.quick else [*NETWORKS]
    rows = []
    for network in networks:
        seeds = seeds if network == networks[0] else seeds[:2]  # two seeds show whether the model matters
        for policy in POLICIES:
            without, _ = goodput(network, policy, np.inf, (ranks, seeds[0]))
            for mtbf_s in MTBFS_S:
                found = [goodput(network, policy, mtbf_s, (ranks, seed)) for seed in seeds]
                shown = series.over_seeds([share for share, _ in found])
                failed = sum(deaths for _, deaths in found)
                lost_s = (
                    ranks * LASTS_S * sum(without - share for share, _ in found) / max(failed, 1) - REPAIR_S
                )
                row = {
                    "network": network,
                    "policy": policy,
                    "mtbf_s": mtbf_s,
                    "failures": failed,
                    "lost_s": lost_s,
                }
                rows.append(row | shown._asdict())
                context.say(
                    f"{network:8}{policy:26}MTBF {mtbf_s:6.0f} s: goodput {shown.median:.3f} [{shown.low:.3f}, "
                    f"{shown.high:.3f}], {failed} failures, {lost_s:.1f} s lost by other ranks for each"
                )
    context.save_table(rows, "goodput")
    context.save(figure([row for row in rows if row["network"] == networks[0]], ranks), "goodput")


def alive(mtbf_s):
    """Return the share of time in which a rank is alive, if all ranks are alive at the start."""
    rate, up = 1 / mtbf_s + 1 / REPAIR_S, 1 / (1 + REPAIR_S / mtbf_s)
    return up + (1 - up) * (1 - np.exp(-rate * LASTS_S)) / (rate * LASTS_S)


def goodput(network, policy, mtbf_s, drawn):
    """Return the share of all ranks' time that was spent in finished steps, and the number of deaths."""
    ranks, seed = drawn
    run = spawnsim.run(
        main, ranks=ranks, platform=NETWORKS[network], seed=seed, deadline_s=1e6, parameters={"policy": policy},
        faults=f"mtbf:*@0s+{LASTS_S - REPAIR_S}s,{mtbf_s}s,{REPAIR_S}s" if mtbf_s < np.inf else None,
    )  # fmt: skip
    steps = np.count_nonzero(run.table["time_s"] <= LASTS_S + STEP_S)
    return steps * STEP_S / (ranks * LASTS_S), sum(event["kind"] == "crash" for event in run.events)


def figure(rows, ranks):
    """Draw goodput against the mean time between failures, with its upper limit."""
    from matplotlib.figure import Figure

    with style.talk():
        drawn = Figure(figsize=(9.5, 5.2))
        ax = drawn.add_subplot()
        line = np.geomspace(min(MTBFS_S), max(MTBFS_S), 50)
        ax.plot(
            line, [100 * alive(each) for each in line], color="#777777", linestyle="--", label="time alive"
        )
        names = ("average", "rarer", "selective")  # known policies keep their looks
        looks = style.looks(names)
        for shift, (policy, name) in enumerate(zip(POLICIES, names, strict=True), -1):
            look = looks[name]
            mine = [row for row in rows if row["policy"] == policy]
            at = [row["mtbf_s"] * 1.03**shift for row in mine]  # bars next to each other
            median, low, high = (
                np.array([100 * row[name] for row in mine]) for name in ("median", "low", "high")
            )
            ax.errorbar(
                at, median, [median - low, high - median], marker=look.marker, color=look.colour, label=policy,
                linestyle=look.dashes, capsize=3, elinewidth=1.5,
            )  # fmt: skip
        ax.set_xscale("log")
        ax.set_xticks(MTBFS_S, [f"{each:,.0f}" for each in MTBFS_S])
        ax.minorticks_off()
        ax.set_xlabel("mean time between failures of a rank (s)")
        ax.set_ylabel("goodput (% of all ranks' time)")
        ax.legend(frameon=False, loc="lower right")
        caption = (
            f"{ranks} virtual ranks · steps of {STEP_S:g} s · back after {REPAIR_S:g} s · median over seeds, "
            f"{rows[0]['kind']} · timing alone"
        )
        return style.frame(drawn, "What failures cost the ranks that did not fail", caption)
