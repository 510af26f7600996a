"""Does the network model decide the ranking? The same policies under two models of one 10 Gbit/s wire.

    spawnsim study networks [--quick]

Averaging by a ring moves the fewest bytes, by recursive doubling sends the fewest messages. Under Hockney (α, β) a
message costs nothing but its wire; under LogGP it costs the processors at both ends, too. A ranking of policies that
is reported under one model only may be the model's.
"""

import numpy as np

from spawnsim.plots import style
from spawnsim.study import Cell, Context

MODELS = ("hockney", "loggp")
TITLES = ("Hockney: α + n/B", "LogGP: 150 µs of processor at each end")
WAYS = (("average", "ring"), ("average", "doubling"), ("selective", "ring"))


def study(context: Context) -> None:
    """Run three ways to exchange under two models; rank them, and draw the bars."""
    ranks = 8 if context.quick else 16
    cells = [
        Cell(
            file=context.file("exchange.py"),
            ranks=ranks,
            seed=7,
            parameters={"policy": policy, "parameters": 65_536 if context.quick else 262_144},
            world={"platform": str(context.file(f"platforms/{model}-{algorithm}.toml"))},
        )
        for model in MODELS
        for policy, algorithm in WAYS
    ]
    took = [1e3 * float(np.mean(each.run.table["seconds"])) for each in context.sweep(cells)]
    table = np.reshape(took, (len(MODELS), len(WAYS)))
    rows = []
    for model, costs in zip(MODELS, table, strict=True):
        ranking = [name(*WAYS[place]) for place in np.argsort(costs)]
        context.say(
            f"{model:8}"
            + " < ".join(f"{way} {cost:.2f} ms" for way, cost in zip(ranking, sorted(costs), strict=True))
        )
        rows += [
            {"model": model, "way": name(*way), "milliseconds": cost}
            for way, cost in zip(WAYS, costs, strict=True)
        ]
    context.save_table(rows, "ranking")
    context.save(figure(table, ranks, 4 * cells[0].parameters["parameters"]), "ranking")


def name(policy, algorithm):
    """How a way is called in tables and figures."""
    return policy if policy == "selective" else f"{policy}, {algorithm}"


def title(table):
    """What the bars say: whether both models put the ways into one order."""
    first, second = (tuple(np.argsort(costs, kind="stable")) for costs in table)
    return "The network model decides the ranking" if first != second else "Both network models rank alike"


def figure(table, ranks, nbytes):
    """Bars: milliseconds per iteration beyond computing, a group per model."""
    from matplotlib.figure import Figure

    with style.talk():
        drawn = Figure(figsize=(9, 5))
        ax = drawn.add_subplot()
        looks = style.looks([name(*way) for way in WAYS])
        for place, way in enumerate(WAYS):
            at = np.arange(len(MODELS)) + 0.26 * (place - 1)
            bars = ax.bar(at, table[:, place], 0.24, color=looks[name(*way)].colour, label=name(*way))
            ax.bar_label(bars, fmt="%.2f", padding=2)
        ax.set_xticks(range(len(MODELS)), TITLES)
        ax.set_ylabel("mean time beyond computing (ms)")
        ax.legend(frameon=False)
        ax.grid(visible=False, axis="x")
        size = f"{nbytes / 2**20:g} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:g} KiB"
        caption = f"{ranks} virtual ranks · 10 Gbit/s · {size} of float32 · mean over ranks and iterations"
        return style.frame(drawn, title(table), caption)
