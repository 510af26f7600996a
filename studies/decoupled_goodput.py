"""Goodput and uptime of decoupled learners as chips fail, and the effect of radial-directional averaging on lengths.

    spawnsim study decoupled_goodput [--quick]

1.2 million chips, each of which fails once a year, form M learners. A failure stops its learner for 19.7 s: the one
constant that gives the published goodput of a single elastic learner on 2.4 million chips (40 %). Everything else is
the policy: learners take steps of 4 s, push a fragment in each, and never wait. Goodput is the share of time in which
chips compute; uptime is the share in which at least one learner computes. The model has no memory.
"""

import math

import numpy as np
import torch

import spawnsim
from spawnsim.models.network import Hockney, LogGP, Switch
from spawnsim.plots import style
from spawnsim.policies import DecoupledDiLoCoPolicy
from spawnsim.policies.state.outer import FlatFloats, radial_directional_mean
from spawnsim.random import WORLD, generator
from spawnsim.study import Context

CHIPS, FAILS_EVERY_S, LOST_S, STEP_S = 1_200_000, 365.25 * 86400, 19.7, 4.0
PUBLISHED = {1: 58, 2: 70, 8: 88, 16: 93}  # learners → goodput, percent (second hand)
NETWORKS = {"Hockney": Switch(Hockney(1e-3, 1.25e9)), "LogGP": Switch(LogGP(1e-3, 1e-4, 1e-4, 8e-10))}


def study(context: Context) -> None:
    """Run learners under failures, for several numbers of learners; state the two claims."""
    seeds = context.seeds(range(1, 4))
    networks = ["Hockney"] if context.quick else [*NETWORKS]
    rows = []
    for network in networks:
        for learners in (1, 2, 4, 8, 16):
            lasts_s = 250.0 * min(8, 16 / learners)  # about the same number of learner failures each time
            found = [lived(learners, seed, lasts_s, NETWORKS[network]) for seed in seeds]
            goodput, uptime = np.array(found).T
            row = {
                "network": network,
                "learners": learners,
                "goodput": goodput.mean(),
                "uptime": uptime.mean(),
            }
            rows.append(row | {"low": goodput.min(), "high": goodput.max(), "least_uptime": uptime.min()})
            context.say(
                f"{network:8}{learners:3} learners: goodput {goodput.mean():.3f}, uptime {uptime.mean():.4f}"
            )
    context.save_table(rows, "goodput")
    context.save(figure([row for row in rows if row["network"] == networks[0]]), "goodput")
    shown = {row["learners"]: 100 * row["goodput"] for row in rows if row["network"] == networks[0]}
    apart = [
        abs(100 * row["goodput"] - PUBLISHED[row["learners"]]) for row in rows if row["learners"] in PUBLISHED
    ]
    up = {
        count: 100 * min(row["least_uptime"] for row in rows if row["learners"] == count)
        for count in (1, 2, 4, 8, 16)
    }
    context.claim(
        "At 1.2 million chips goodput is 58, 70, 88 and 93 % for 1, 2, 8 and 16 learners, and some learner is up all "
        "the time from 4 on",
        source="arXiv 2604.21428 (second hand)",
        checks={
            "goodput within 5 points": max(apart) <= 5,
            "goodput rises with learners": all(
                a < b for a, b in zip(shown.values(), [*shown.values()][1:], strict=False)
            ),
            "up above 99 % from 4 on": min(up[4], up[8], up[16]) > 99,
        },
        found=f"goodput {', '.join(f'{shown[count]:.0f}' for count in PUBLISHED)} %; at least one up "
        f"{', '.join(f'{up[count]:.1f}' for count in up)} % for 1, 2, 4, 8, 16 learners (the worst of {len(seeds)} "
        f"seeds; {', '.join(networks)}; 19.7 s a failure, fitted at 2.4 million chips)",
    )
    lengths(context)


def lived(learners, seed, lasts_s, network):
    """Return goodput and uptime of one run."""
    draw = generator(seed, WORLD, "failures")
    rate = CHIPS / learners / FAILS_EVERY_S
    outages = [outages_of(draw, rate, lasts_s) for _ in range(learners)]
    faults = ";".join(f"pause:{rank}@{at!r}s+{LOST_S}s" for rank, mine in enumerate(outages) for at in mine)

    def main(comm):
        layers = [torch.nn.Linear(1000, 1000, bias=False, device="meta") for _ in range(24)]
        model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policy, step = DecoupledDiLoCoPolicy(24, fragments=24), 0
        policy.attach(model, comm)
        while comm.clock.now() < lasts_s:
            step += 1
            with comm.compute(STEP_S):
                pass
            model, optimizer, _ = policy(step, model, optimizer, None, comm)
        comm.record(goodput=step * STEP_S / comm.clock.now())
        policy.shutdown()

    run = spawnsim.run(
        main, ranks=learners, platform=network, faults=faults or None, seed=seed, deadline_s=1e6
    )
    return float(run.table["goodput"].mean()), 1 - all_down(outages, lasts_s) / lasts_s


def outages_of(draw, rate, lasts_s):
    """Return the times at which a learner fails: exponential working times between outages."""
    found, now = [], float(draw.exponential(1 / rate))
    while now < lasts_s:
        found.append(now)
        now += LOST_S + float(draw.exponential(1 / rate))
    return found


def all_down(outages, lasts_s):
    """Return the seconds in which no learner is up."""
    edges = sorted(
        (at + shift, change) for mine in outages for at in mine for shift, change in ((0, 1), (LOST_S, -1))
    )
    down, since, total = 0, 0.0, 0.0
    for at, change in edges:
        if down == len(outages):
            total += min(at, lasts_s) - min(since, lasts_s)
        down, since = down + change, at
    return total


def lengths(context):
    """Merge random differences of increasing numbers of learners, and state the length of the result."""
    draw, ratios = generator(1, WORLD, "directions"), {}
    for learners in (2, 4, 8, 16):
        parts = [torch.from_numpy(draw.normal(size=100_000)) for _ in range(learners)]
        flats = [FlatFloats.of({"w": part}) for part in parts]
        alone = float(np.mean([flat.norm() for flat in flats]))
        merged = radial_directional_mean(flats, [1.0] * learners).norm() / alone
        ratios[learners] = merged, float(torch.stack(parts).mean(0).norm()) / alone
    context.claim(
        "Radial-directional averaging keeps the length of the merged updates for any number of learners; the plain "
        "mean shrinks by the square root of that number",
        source="arXiv 2604.21428 (second hand)",
        checks={
            "radial within 1 %": all(abs(merged - 1) < 0.01 for merged, _ in ratios.values()),
            "plain mean within 2 % of 1/√M": all(
                abs(mean * math.sqrt(count) - 1) < 0.02 for count, (_, mean) in ratios.items()
            ),
        },
        found=f"length relative to one learner: radial {', '.join(f'{merged:.3f}' for merged, _ in ratios.values())}, "
        f"plain {', '.join(f'{mean:.3f}' for _, mean in ratios.values())} for {', '.join(map(str, ratios))} random "
        "directions",
    )


def figure(rows):
    """Draw goodput and uptime against the number of learners, with the published points."""
    from matplotlib.figure import Figure

    with style.talk():
        drawn = Figure(figsize=(9, 5))
        ax = drawn.add_subplot()
        learners = [row["learners"] for row in rows]
        looks = style.looks(["goodput", "uptime", "published goodput"])
        for name in ("goodput", "uptime"):
            ax.semilogx(
                learners,
                [100 * row[name] for row in rows],
                "o-",
                base=2,
                color=looks[name].colour,
                label=name,
            )
        low, high = [100 * row["low"] for row in rows], [100 * row["high"] for row in rows]
        ax.fill_between(learners, low, high, color=looks["goodput"].colour, alpha=0.2)
        colour = looks["published goodput"].colour
        ax.plot([*PUBLISHED], [*PUBLISHED.values()], "x", color=colour, label="published goodput")
        ax.set_xlabel("learners")
        ax.set_ylabel("share of time (%)")
        ax.legend(frameon=False)
        caption = "1.2 million chips, one failure a year each · 19.7 s a failure · timing alone"
        return style.frame(drawn, "Decoupled learners do not stop for each other", caption)
