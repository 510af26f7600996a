"""Selective replacement by its settings: how often, how many, from which donors, how old; and which founders survive.

    spawnsim study selective_settings [--quick]
    spawnsim run studies/selective_settings.py --ranks 16 --compute "10 ms" --set strategy=pbt --seed 7 --out runs/a

The question: which cadence, ratio and strategy are best where replacement is worth while (learning rates differ, σ
2), how much does the age of a donor's weights matter at their arrival, and how many of the first models have
descendants at the end?

The method: 10 ranks learn digits, 40 iterations of 10 ms, judged by accuracy on images that are the same for all; the
result is the accuracy of the median rank on other images. The strategies are "mean" and "weighted_mean" of up to 8
survivors, "best_only", and population based training ("pbt": one of the best quarter, and its learning rate times 0.8
or 1.2). Every combination of cadence and ratio runs, over seeds. Age: models that travel for longer. Descent: the
events of one run each (`plots/genealogy.py`).

The finding: with one good donor ("best_only", "pbt") cadence and ratio hardly matter: 0.80 to 0.86, compared with
0.54 without any exchange (3 seeds). A mean of survivors, some of which diverge themselves, needs many replacements:
0.60 if a tenth is replaced every 10 iterations, 0.84 if half are. Weights that are 6 iterations old at their arrival
are worth no more than no exchange (0.54 against 0.70 at an age of 1), but three seeds differ too much to be sure. The
effective number of 10 founders at the end is 5.8 under the mean, as many as by chance; 3.6 under the weighted mean,
2.0 under "best_only", 1.2 in a population: as good a median rank, at the price of diversity.
"""

from typing import Literal

import numpy as np

import spawnsim
from spawnsim.models.network import Hockney, Switch
from spawnsim.plots import genealogy, series, style, sweeps
from spawnsim.policies import AsyncSelectiveAveragingPolicy, PopulationBasedTrainingPolicy
from spawnsim.study import Context
from spawnsim.units import counted
from spawnsim.workloads import Digits

NAMES = {
    "mean": "mean",
    "weighted_mean": "weighted mean",
    "best_only": "best only",
    "pbt": "population based",
}
CADENCES, RATIOS = (2, 5, 10), (0.1, 0.25, 0.5)
ITERATIONS, STEP_S, SPREAD = 40, 0.01, 2.0
AGES = (0.0, 0.02, 0.05, 0.1, 0.15)  # seconds that a message travels
MIDDLE = {"every": 5, "ratio": 0.25}


def main(
    comm,
    strategy: Literal["none", "pbt", "mean", "weighted_mean", "best_only", "reset_weights"] = "mean",
    every=5,
    ratio=0.25,
    iterations=ITERATIONS,
    spread=SPREAD,
):
    """Train on an even share of the digits, with a learning rate that differs between ranks."""
    lr = 0.1 * float(comm.rng("rate").lognormal(0.0, spread))
    digits = Digits(comm.rng, comm.Get_rank(), comm.Get_size(), lr=lr)
    model, optimizer = digits.build()
    policy = None
    if strategy == "pbt":
        policy = PopulationBasedTrainingPolicy(every, quantile=ratio)
    elif strategy != "none":
        policy = AsyncSelectiveAveragingPolicy(digits.build, every, ratio, strategy, cooldown=0)
    info = {}
    for iteration in range(iterations):
        with comm.compute():
            digits.step(model, optimizer)
            if iteration % every == 0:
                metric = digits.accuracy(model, slice(0, None, 2))
        if policy is not None:
            model, optimizer, info = policy(iteration, model, optimizer, local_metric=metric, group=comm)
        if (iteration + 1) % 10 == 0:
            comm.record(iteration=iteration, accuracy=digits.accuracy(model, slice(1, None, 2)), **info)
    if policy is not None:
        policy.shutdown()


def study(context: Context) -> None:
    """Run all combinations; draw heat maps, ages and family trees; report the findings."""
    ranks, seeds = (8, context.seeds(range(1, 3))) if context.quick else (10, context.seeds(range(1, 4)))
    cadences, ratios = ((2, 10), (0.25,)) if context.quick else (CADENCES, RATIOS)
    strategies = ("mean", "pbt") if context.quick else NAMES
    ages = AGES[::2] if context.quick else AGES
    nothing = over(seeds, ranks, strategy="none")
    rows = [
        {"strategy": strategy, "every": every, "ratio": ratio}
        | over(seeds, ranks, strategy=strategy, every=every, ratio=ratio)
        for strategy in strategies for every in cadences for ratio in ratios
    ]  # fmt: skip
    context.save_table(rows, "settings")
    context.save(heat_figure(rows, (cadences, ratios), nothing, seeds), "settings")
    aged = [{"age_s": age_s} | over(seeds, ranks, latency_s=age_s, **MIDDLE) for age_s in ages]
    context.save_table(aged, "ages")
    aged = [row for row in aged if np.isfinite(row["staleness"])]  # else no weights arrived before the end
    context.save(age_figure(aged, nothing, seeds), "ages")
    trees = {NAMES[strategy]: run(seeds[0], ranks, strategy=strategy, **MIDDLE) for strategy in strategies}
    context.save(
        genealogy.figure(trees, "Whose models survive? One donor each makes a few families"), "genealogy"
    )
    left = {name: genealogy.of_run(each).founders[-1] for name, each in trees.items()}

    context.say(f"no exchange: {shown(nothing)}")
    for strategy in strategies:
        mine = sorted((row for row in rows if row["strategy"] == strategy), key=lambda row: row["median"])
        best, worst = ("every {every}, ratio {ratio}: {median:.2f}".format(**mine[at]) for at in (-1, 0))
        context.say(
            f"{strategy:14} best {best}; worst {worst}; {left[NAMES[strategy]]:.1f} founders left of {ranks}"
        )
    for row in aged:
        context.say(f"messages of {row['age_s']:g} s: {row['staleness']:.0f} iterations old, {shown(row)}")


def run(seed, ranks, latency_s=0.0, **parameters):
    """Return one run; messages take `latency_s` in addition to the wire."""
    where = Switch(Hockney(latency_s, 1.25e9)) if latency_s else "ethernet-10g"
    return spawnsim.run(main, ranks=ranks, seed=seed, platform=where, compute=STEP_S, parameters=parameters)


def over(seeds, ranks, **how):
    """Return the median rank's accuracy over seeds with its interval, and the age of the weights that arrived."""
    runs = [run(seed, ranks, **how) for seed in seeds]
    ends = [series.spread_at_end(each.table, "accuracy")[1] for each in runs]
    ages = [
        event["iteration"] - version
        for each in runs for event in each.events if event["kind"] == "replacement" for version in event["versions"]
    ]  # fmt: skip
    return series.over_seeds(ends)._asdict() | {"staleness": float(np.median(ages)) if ages else float("nan")}


def shown(row):
    """Return a median with its interval as text."""
    return f"{row['median']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"


# ----------------------------------------------------------------------------------------------------------- figures
def heat_figure(rows, axes_of, nothing, seeds):
    """Draw a heat map of cadence × ratio per strategy: the median accuracy over seeds, its interval below it."""
    from matplotlib.figure import Figure

    cadences, ratios = axes_of
    strategies = list(dict.fromkeys(row["strategy"] for row in rows))
    low = min(nothing["median"], *(row["median"] for row in rows))
    names = tuple(f"{ratio:.0%}" for ratio in ratios), tuple(map(str, cadences))
    with style.talk():
        drawn = Figure(figsize=(3.2 * len(strategies) + 0.6, 4.8))
        axes = drawn.subplots(1, len(strategies), sharey=True, squeeze=False)[0]
        for ax, strategy in zip(axes, strategies, strict=True):
            mine = {(row["every"], row["ratio"]): row for row in rows if row["strategy"] == strategy}
            values = np.array([[mine[every, ratio]["median"] for ratio in ratios] for every in cadences])
            sweeps.draw_heat(sweeps.Heat(*names, values), ax, limits=(low, 1.0))
            for (up, across), value in np.ndenumerate(values):
                row = mine[cadences[up], ratios[across]]
                ink = "white" if value - low > 0.55 * (1 - low) else "#222222"  # as the number above it
                text = f"{row['low']:.2f} to {row['high']:.2f}"
                ax.text(across, up - 0.22, text, ha="center", va="center", color=ink, fontsize=8)
            ax.set_xlabel("ranks replaced a round")
            ax.set_title(NAMES[strategy])
        axes[0].set_ylabel("iterations between rounds")
        caption = (
            f"accuracy of the median rank · digits, learning rates differ (σ {SPREAD:g}) · {ITERATIONS} iterations · "
            f"median of {counted(len(seeds), 'seed')}, below it {nothing['kind']} · no exchange: {shown(nothing)}"
        )
        return style.frame(drawn, "How often, how many, from whom", caption)


def age_figure(rows, nothing, seeds):
    """Draw accuracy against the age of the weights taken over."""
    from matplotlib.figure import Figure

    with style.talk():
        drawn = Figure(figsize=(8, 4.8))
        ax = drawn.add_subplot()
        at = [row["staleness"] for row in rows]
        look = style.looks(["selective"])["selective"]
        ax.errorbar(
            at, [row["median"] for row in rows], fmt=look.marker + "-", color=look.colour, capsize=3, label="selective",
            yerr=[[row["median"] - row["low"] for row in rows], [row["high"] - row["median"] for row in rows]],
        )  # fmt: skip
        ax.axhspan(nothing["low"], nothing["high"], color="#777777", alpha=0.2)
        ax.axhline(nothing["median"], color="#777777", linestyle="--", label="no exchange")
        ax.set_xlabel("age of the donors' weights when taken over (iterations)")
        ax.set_ylabel("accuracy of the median rank")
        ax.set_ylim(0, 1)
        ax.legend(frameon=False)
        caption = (
            f"digits, learning rates differ · {ITERATIONS} iterations, a quarter replaced every 5 · median of "
            f"{counted(len(seeds), 'seed')}, {nothing['kind']}"
        )
        return style.frame(drawn, "How old may the weights be?", caption)
