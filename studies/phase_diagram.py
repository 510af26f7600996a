"""Replacement, averaging, or both: a map of which policy wins, over data, learning rates, stragglers and cadence.

    spawnsim study phase_diagram [--quick] [--jobs N]

The question: when does replacing the worst ranks win, when averaging all, and when both together, at equal virtual time
and at equal bytes?

The method: 16 ranks learn digits, 101 iterations of 10 ms, over columns. Axes: the label skew of the ranks' data
(Dirichlet α: even, 0.3, 0.1), the spread σ of their learning rates (0.1 · exp(σ · N(0, 1)), σ from 0 to 2), and three
circumstances: an exchange every 5 iterations, every 20, and every 5 with one rank five times slower. Policies: "none";
"average" (mean of all); "selective" (the worst quarter takes the mean of eight others); "population" (PBT: the worst
quarter copies one of the best, with a perturbed learning rate); "both" (selective, then the mean of all); "gossip"
(exponential graph). All act in lockstep, so that a straggler delays each exchange; `selective_or_average` has the
forms that do not wait. The result of a run is the accuracy of the median rank or of the mean of all models, whichever
is higher, before an exchange, on images that do not decide: at the time at which an unhindered rank ends, or when the
policy has sent as many bytes as the most frugal policy that exchanges has sent in the end. 20 seeds, the same for all
policies; a policy wins a cell if the 90 % interval of the median paired difference to the second best is above zero.
Boundaries: where the mean of (selective − average) over seeds becomes positive, by lines between the measured σ, with
bootstrap intervals. At the corners of the map, the same with another network (LogGP), model (two hidden layers of 64)
and data set (Gaussian classes without end).

The finding: at equal time without a straggler, averaging is ahead or level up to σ = 1, by 0.02 to 0.03 if data differ
much (α 0.1, an exchange every 5), and population based training from σ = 1.5 (even data) or 2 on, by up to 0.12. Both
together are clearly ahead in one of 45 cells. Replacement by means ("selective") beats averaging from σ = 0.7
[0.6, 1.1] on even data and 1.6 [1.5, 1.8] at α 0.3, but not up to 2 at α 0.1 (every 5); every 20 from 0.7, 1.3 and
1.6. At equal bytes, a sixteenth of an average's, population based training wins 28 of 45 cells and loses none: an
average is then judged after its first rounds, and a rarer one is not in the map. If data differ, all policies stay far
below an average at equal time there (0.3 to 0.6 against 0.7 to 0.9), since models that were never averaged know the
digits of few ranks. With a slow rank, in lockstep, ranks that train alone win at equal time, unless data differ and
rates do not. LogGP, a larger model and Gaussian classes change the winner neither on even data with σ = 2 (population)
nor at α 0.1 with σ = 0 (average), at equal time. A form that does not wait (`selective_or_average`) would change the
map with a straggler; more ranks, longer runs and other judges are open.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from spawnsim.plots import series, style
from spawnsim.random import WORLD, generator
from spawnsim.study import Cell, Context

STEP_S, ITERATIONS, RANKS = 0.01, 101, 16
ALPHAS, SPREADS = (None, 0.3, 0.1), (0.0, 0.5, 1.0, 1.5, 2.0)
POLICIES = {
    "none": {"policy": "none"},
    "average": {"policy": "average"},
    "selective": {"policy": "selective", "replacement_ratio": 0.25},
    "population": {"policy": "population", "quantile": 0.25},
    "both": {"policy": "selective+average", "replacement_ratio": 0.25},
    "gossip": {"policy": "gossip", "graph": "exponential"},
}
MEASURES = {"time": "equal time", "bytes": "equal bytes"}


@dataclass(frozen=True, eq=False)
class Circumstance:
    """Everything that is equal for all cells of a map."""

    name: str
    every: int = 5
    slow: bool = False
    network: str = "hockney-doubling"
    file: str = "digits.py"
    model: Mapping[str, object] = field(default_factory=dict)

    def cell(self, context, place, policy, seed):
        """Return one run."""
        alpha, spread = place
        world = {"platform": str(context.file(f"platforms/{self.network}.toml")), "compute": f"{STEP_S} s"}
        return Cell(
            file=context.file(self.file),
            ranks=RANKS,
            seed=seed,
            parameters={
                "alpha": alpha, "spread": spread, "iterations": ITERATIONS, "average_every": self.every,
                "judge": "accuracy", **POLICIES[policy], **self.model,
            },
            world=world | {"columns": True} | ({"stragglers": "rank:5,5"} if self.slow else {}),
        )  # fmt: skip


MAPS = (
    Circumstance("every 5 iterations"),
    Circumstance("every 20", every=20),
    Circumstance("every 5, one rank 5 times slower", slow=True),
)
VARIANTS = (
    Circumstance("LogGP", network="loggp-doubling"),
    Circumstance("two layers of 64", model={"hidden": (64, 64)}),
    Circumstance("Gaussian classes", file="phase_mixtures.py"),
)
CORNERS = tuple(itertools.product((None, 0.1), (0.0, 2.0)))


def study(context: Context) -> None:
    """Run the maps and their variants; draw who wins where; fit the boundaries."""
    seeds = context.seeds(range(1, 21))
    alphas, spreads = (ALPHAS[::2], SPREADS[::4]) if context.quick else (ALPHAS, SPREADS)
    places = [*itertools.product(alphas, spreads)]
    asked = [(each, place) for each in (MAPS[:1] if context.quick else MAPS) for place in places]
    asked += [] if context.quick else [(each, place) for each in VARIANTS for place in CORNERS]
    keys = [(each, place, policy, seed) for each, place in asked for policy in POLICIES for seed in seeds]
    cells = [each.cell(context, place, policy, seed) for each, place, policy, seed in keys]
    results = context.sweep(cells)
    ends = {key: result.run for key, result in zip(keys, results, strict=True)}
    rows = [compared(each, place, ends, seeds, measure) for each, place in asked for measure in MEASURES]
    for row in rows:
        context.say("{map:32} {place:16} {by:11} {verdict}".format(**row))
    context.save_table(rows, "phase_diagram")
    boundaries = fitted(rows, len(seeds)) if len(places) > 4 else []
    for found in boundaries:
        context.say("{map:32} {by:11} α {alpha}: selective beats average from σ = {told}".format(**found))
    context.save_table(boundaries, "boundaries")
    context.save(
        figure([row for row in rows if row["map"] in {each.name for each in MAPS}], len(seeds)), "phases"
    )
    state(context, rows, len(seeds))


def state(context, rows, count):
    """State the claims about the corners of the first map."""
    first = {(row["by"], row["alpha"], row["spread"]): row for row in rows if row["map"] == MAPS[0].name}
    time = MEASURES["time"]
    even, skewed, rates, both = (
        first[time, alpha, spread]
        for alpha, spread in ((None, 0.0), (ALPHAS[-1], 0.0), (None, SPREADS[-1]), (ALPHAS[-1], SPREADS[-1]))
    )
    replaces = {"selective", "population"}
    context.claim(
        "Averaging wins if data differ, replacement if learning rates differ, and both together if both differ",
        source="this project's own question",
        checks={
            "data differ (α 0.1, σ 0)": skewed["best"] not in replaces,
            "rates differ (even, σ 2)": rates["best"] in replaces,
            "both differ (α 0.1, σ 2)": both["best"] == "both",
        },
        found="; ".join(f"{row['place']}: {row['verdict']}" for row in (even, skewed, rates, both))
        + f"; equal time, exchange every 5, {count} seeds",
    )


def compared(circumstance, place, runs, seeds, measure):
    """Return a row: the results of each policy over seeds, and the best one's lead over the second."""
    own = {policy: [runs[circumstance, place, policy, seed] for seed in seeds] for policy in POLICIES}
    until_s = ITERATIONS * STEP_S * 1.02 if measure == "time" else np.inf
    exchanging = [run.totals["bytes"] for policy, some in own.items() if policy != "none" for run in some]
    most = min(exchanging) if measure == "bytes" else np.inf
    ends = {policy: [accuracy(run, until_s, most) for run in some] for policy, some in own.items()}
    order = sorted(ends, key=lambda policy: -np.median(ends[policy]))
    lead = series.over_seeds(np.subtract(ends[order[0]], ends[order[1]]))
    clear = lead.low > 0
    alpha, spread = place
    told = f"{np.median(ends[order[0]]):.2f}, {lead.median:+.2f} [{lead.low:+.2f}, {lead.high:+.2f}] to {order[1]}"
    return {
        "map": circumstance.name, "by": MEASURES[measure], "alpha": alpha, "spread": spread,
        "place": f"{'even' if alpha is None else f'α {alpha}'}, σ {spread:g}",
        "best": order[0], "second": order[1], "clear": bool(clear), "lead": lead._asdict(), "ends": ends,
        "verdict": f"{order[0]} {'wins' if clear else 'is level with ' + order[1]}: {told}",
    }  # fmt: skip


def accuracy(run, until_s, most_bytes):
    """Return the accuracy at a time, or after some bytes: of the median rank or the mean model, whichever is higher."""
    rounds = [event for event in run.events if event["kind"] == "round"]
    sent = np.cumsum([0, *[event["bytes"] for event in rounds]])[:-1]  # before each exchange
    last = max(event["iteration"] for event, before in zip(rounds, sent, strict=True) if before <= most_bytes)
    table = run.table
    known = (table["time_s"] <= until_s) & (table["iteration"] <= last)
    own = series.per_rank_last(table.where(known), "accuracy")
    ranks = np.r_[own, np.zeros(RANKS - len(own))]  # a rank without a measurement so far counts as accuracy 0
    mean = [e["mean_accuracy"] for e in rounds if e["iteration"] <= last and e["time_s"] <= until_s]
    return max(float(np.median(ranks)), *mean[-1:], 0.0)


def fitted(rows, count):
    """Return the σ above which "selective" beats "average", by map, measure and α, with bootstrap intervals."""
    found = []
    for name, by, alpha in itertools.product([each.name for each in MAPS], MEASURES.values(), ALPHAS):
        own = [row for row in rows if (row["map"], row["by"], row["alpha"]) == (name, by, alpha)]
        if not own:
            continue
        spreads = [row["spread"] for row in own]
        gains = np.array([np.subtract(row["ends"]["selective"], row["ends"]["average"]) for row in own])
        draw = generator(0, WORLD, "phase_diagram.bootstrap")
        edges = [boundary(spreads, gains[:, some].mean(1)) for some in draw.integers(0, count, (400, count))]
        low, high = np.quantile(edges, [0.05, 0.95], method="nearest")
        at = boundary(spreads, gains.mean(1))
        found.append({"map": name, "by": by, "alpha": "even" if alpha is None else alpha, "sigma": at,
                      "low": low, "high": high, "told": f"{at:.2f} [{low:.2f}, {high:.2f}]"})  # fmt: skip
    return found


def boundary(spreads, gains):
    """Return the σ from which on a gain is positive, by lines between measured ones; infinite if it ends below 0."""
    below = [place for place, gain in enumerate(gains) if gain <= 0]
    if not below:
        return 0.0
    last = below[-1]
    if last + 1 == len(gains):
        return np.inf
    share = -gains[last] / (gains[last + 1] - gains[last])
    return float(spreads[last] + share * (spreads[last + 1] - spreads[last]))


def figure(rows, count):
    """Draw maps of the winner: a panel for each circumstance and measure."""
    from matplotlib.figure import Figure

    maps = [*dict.fromkeys(row["map"] for row in rows)]
    alphas = [*dict.fromkeys(row["alpha"] for row in rows)]
    spreads = [*dict.fromkeys(row["spread"] for row in rows)]
    looks = style.looks([*POLICIES])
    with style.talk():
        drawn = Figure(figsize=(2.4 + 4.2 * len(maps), 2.2 + 2.0 * len(MEASURES)))
        axes = drawn.subplots(len(MEASURES), len(maps), squeeze=False, sharex=True, sharey=True)
        for (line, by), (column, name) in itertools.product(enumerate(MEASURES.values()), enumerate(maps)):
            ax = axes[line, column]
            for row in (row for row in rows if (row["map"], row["by"]) == (name, by)):
                x, y = spreads.index(row["spread"]), alphas.index(row["alpha"])
                colour = looks[row["best"]].colour
                ax.add_patch(_tile(x, y, colour, clear=row["clear"]))
                lead = f"{row['lead']['median']:+.2f}" if row["clear"] else "level"
                ax.text(x, y, f"{row['best']}\n{lead}", ha="center", va="center", fontsize=8)
            ax.set_xlim(-0.5, len(spreads) - 0.5)
            ax.set_ylim(len(alphas) - 0.5, -0.5)
            ax.set_xticks(range(len(spreads)), [f"{spread:g}" for spread in spreads])
            ax.set_yticks(range(len(alphas)), ["even" if alpha is None else f"α {alpha}" for alpha in alphas])
            ax.grid(visible=False)
            ax.set_title(f"{name}, {by}" if len(maps) > 1 else by, fontsize=10, loc="left")
        for ax in axes[-1]:
            ax.set_xlabel("spread σ of learning rates")
        caption = (
            f"16 ranks learn digits, all policies in lockstep, {count} seeds · each tile: the best policy and its lead "
            'over the second, in accuracy · pale: "level", the 90 % interval of the lead includes 0'
        )
        return style.frame(drawn, "Who wins: replacement, averaging, or both", caption)


def _tile(x, y, colour, *, clear):
    from matplotlib.patches import Rectangle

    return Rectangle(
        (x - 0.48, y - 0.48), 0.96, 0.96, facecolor=colour, alpha=0.55 if clear else 0.18, linewidth=0
    )
