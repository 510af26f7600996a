"""Replace the worst ranks, or average all of them: where does each method win?

    spawnsim study selective_or_average [--quick] [--jobs N]

The question: does selective replacement get further than averaging in the same time, and in which settings does it
lose?

The method: 16 ranks learn digits, 100 iterations of 10 ms, and exchange every 10. "average": the mean of all, in
step. "selective": the worst quarter, by accuracy on images that are the same for all, takes the mean of up to eight
others. They are compared with no exchange ("none"), and with the mean of all without waiting ("clock", every 100 ms).
The result of a policy is the accuracy of the median rank or of the mean of all models, whichever is higher, on other
images: at the time at which an unhindered rank ends, and, with a straggler, also after equally many iterations. 8
samplers search for the 16 modes of HyperGrid 4 x 8: the result is the number of modes that all have found together.
Seeds are the same for all policies, so differences are paired; a win is a 90 % bootstrap interval of their median
above zero. Times are under two models of one network.

The finding: it depends on the differences among ranks. If learning rates differ so much that some ranks diverge, an
average includes these ranks and is lost, and replacement wins by far. If one rank is ten times slower, replacement
wins over time, as no rank waits; but so does an average that does not wait, which is far ahead if data differ (and
lost if rates do). If data differ, replacement loses, the more clearly the more they differ: the model that a replaced
rank takes over knows the donors' digits and not the rank's own. On even data with even rates the method does not
matter. After equally many iterations a straggler does not change these results. The modes of HyperGrid are found
equally soon with either method, and without exchange.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from spawnsim.plots import series, style
from spawnsim.study import Cell, Context

STEP_S = 0.01
DIGITS = {"iterations": 100, "average_every": 10, "replacement_ratio": 0.25, "judge": "accuracy", "alpha": None,
          "interval_ms": 100.0, "consensus_every_s": 0.25}  # fmt: skip
MODES = {"iterations": 100, "dimensions": 4, "height": 8, "average_every": 10, "replacement_ratio": 0.25,
         "cooldown": 20}  # fmt: skip
NETWORKS = {"Hockney": "hockney-doubling", "LogGP": "loggp-doubling"}
SLOW = "rank:5,10"
REFERENCES = {"none": "no exchange", "clock": "an average that does not wait"}


@dataclass(frozen=True, eq=False)
class Setting:
    """Differences among ranks: `learning` changes the program's arguments, `slow` makes one rank ten times slower."""

    name: str
    learning: Mapping[str, float] = field(default_factory=dict)
    slow: bool = False
    modes: bool = False  # HyperGrid instead of digits

    @property
    def networks(self) -> list[str]:
        """The network models: both if time decides."""
        return [*NETWORKS] if self.slow else ["Hockney"]

    def policies(self, network):
        """Return the policies to compare; under the second network, only the two of the question."""
        references = () if self.modes and self.slow else ("none", *(("clock",) if self.slow else ()))
        return ("average", "selective", *(references if network == "Hockney" else ()))

    def cell(self, context, policy, network, seed):
        """Return one run."""
        file, own, ranks = ("hypergrid.py", MODES, 8) if self.modes else ("digits.py", DIGITS, 16)
        world = {
            "platform": str(context.file(f"platforms/{NETWORKS[network]}.toml")),
            "compute": f"{STEP_S} s",
        }
        return Cell(
            file=context.file(file), ranks=ranks, seed=seed, parameters={"policy": policy} | own | self.learning,
            world=world | ({"stragglers": SLOW} if self.slow else {}),
        )  # fmt: skip


SETTINGS = (
    Setting("even data"),
    Setting("data differ (α 0.3)", {"alpha": 0.3}),
    Setting("data differ much (α 0.1)", {"alpha": 0.1}),
    Setting("learning rates differ (σ 1)", {"spread": 1.0}),
    Setting("learning rates differ (σ 2)", {"spread": 2.0}),
    Setting("data (α 0.3) and rates (σ 2) differ", {"alpha": 0.3, "spread": 2.0}),
    Setting("one slow rank, even data", slow=True),
    Setting("one slow rank, data differ (α 0.3)", {"alpha": 0.3}, slow=True),
    Setting("one slow rank, rates differ (σ 2)", {"spread": 2.0}, slow=True),
    Setting("modes of HyperGrid", modes=True),
    Setting("modes, one slow rank", modes=True, slow=True),
)


def study(context: Context) -> None:
    """Run all settings; draw the results of the policies; state which method wins where."""
    seeds = context.seeds(range(1, 6))
    chosen = [SETTINGS[at] for at in (1, 4)] if context.quick else SETTINGS
    keys = [
        (setting, network, policy, seed)
        for setting in chosen
        for network in setting.networks
        for policy in setting.policies(network)
        for seed in seeds
    ]
    results = context.sweep([s.cell(context, policy, network, seed) for s, network, policy, seed in keys])
    runs = {key: result.run for key, result in zip(keys, results, strict=True)}
    rows = []
    for setting in chosen:
        for network in setting.networks:
            # A straggler costs time; after equally many iterations the network hardly matters.
            for by_time in (True, False) if setting.slow and network == "Hockney" else (True,):
                rows.append(compared(setting, runs, network, seeds, by_time))
                context.say("{name:49} {network:8} {verdict:6} by {told}{others}".format(**rows[-1]))
    context.save_table(rows, "settings")
    context.save(figure(rows, seeds), "settings")
    by_verdict = {
        verdict: [row for row in rows if row["verdict"] == verdict] for verdict in ("wins", "level", "loses")
    }
    context.claim(
        "Replacing the worst ranks by the mean of better ones achieves more in the same time than averaging all",
        source="this project's own question",
        checks={row["label"]: row["verdict"] == "wins" for row in rows if row["by_time"]},
        found="; ".join(
            f"**{verdict}** by " + ", ".join("{told} ({label}{others})".format(**row) for row in some)
            for verdict, some in by_verdict.items() if some
        ) + f"; median of paired differences with its 90 % interval, {len(seeds)} seeds; accuracy of digits, or modes",
    )  # fmt: skip


def compared(setting, runs, network, seeds, by_time):
    """Return a row: each policy's results over seeds, and selective less average, paired."""
    until_s = (MODES if setting.modes else DIGITS)["iterations"] * STEP_S * 1.02 if by_time else np.inf
    measure = modes if setting.modes else accuracy
    ends = {
        policy: [measure(runs[setting, network, policy, seed], until_s) for seed in seeds]
        for policy in setting.policies(network)
    }
    gain = series.over_seeds(np.subtract(ends["selective"], ends["average"]))
    # Further policies that are ahead of replacement: a win over an average that waits is not a win over all policies.
    leads = {
        policy: series.over_seeds(np.subtract(values, ends["selective"]))
        for policy, values in ends.items() if policy in REFERENCES
    }  # fmt: skip
    form = "+.1f" if setting.modes else "+.2f"
    others = [
        f"; but {REFERENCES[policy]} is ahead of it by {lead.median:{form}}"
        for policy, lead in leads.items()
        if lead.low > 0
    ]
    name = setting.name + ("" if by_time else ", by iterations")
    return {
        "name": name, "label": f"{name}, {network}" if len(setting.networks) > 1 and by_time else name,
        "network": network, "by_time": by_time, "modes": setting.modes, "ends": ends,
        "gain": gain._asdict(), "others": "".join(others),
        "verdict": "wins" if gain.low > 0 else "loses" if gain.high < 0 else "level",
        "told": f"{gain.median:{form}} [{gain.low:{form}}, {gain.high:{form}}]",
    }  # fmt: skip


def accuracy(run, until_s):
    """Return the accuracy at a time: the median rank's or the mean model's, whichever is higher."""
    table = run.table
    own = series.per_rank_last(table.where(table["time_s"] <= until_s), "accuracy")
    # A rank without a measurement so far counts as accuracy 0.
    ranks = np.r_[own, np.zeros(int(table["rank"].max()) + 1 - len(own))]
    mean = [event for event in run.events if event["kind"] == "consensus" and event["at_s"] <= until_s]
    return max(float(np.median(ranks)), max(mean, key=lambda event: event["at_s"])["accuracy"])


def modes(run, until_s):
    """Return the number of modes that all ranks together have found by a time."""
    return len({e["mode"] for e in run.events if e["kind"] == "mode" and e["time_s"] <= until_s})


def figure(rows, seeds):
    """Draw the results of the policies: a line per setting, a mark per policy, with the range over seeds."""
    from matplotlib.figure import Figure

    some = {name: [row for row in rows if row["modes"] == (name == "modes")] for name in ("digits", "modes")}
    some = {name: found for name, found in some.items() if found}
    with style.talk():
        drawn = Figure(figsize=(12, 1.9 + 0.42 * len(rows)))
        axes = drawn.subplots(
            len(some), 1, squeeze=False, height_ratios=[len(found) for found in some.values()]
        )
        looks, named = style.looks(["none", "average", "selective", "clock"]), set()
        for ax, (name, found) in zip(axes[:, 0], some.items(), strict=True):
            for place, row in enumerate(found):
                for policy, values in row["ends"].items():
                    spread = series.over_seeds(values)
                    look = looks[policy]
                    ax.plot(
                        [spread.low, spread.high], [place, place], color=look.colour, alpha=0.5, linewidth=4
                    )
                    label = None if policy in named else policy
                    named.add(policy)
                    ax.plot(
                        spread.median,
                        place,
                        look.marker,
                        color=look.colour,
                        markersize=9,
                        label=label,
                        alpha=0.9,
                    )
                colour = {"wins": looks["selective"], "loses": looks["average"]}.get(
                    row["verdict"], looks["none"]
                )
                words = {"wins": "selective", "loses": "average", "level": "neither"}[row["verdict"]]
                ax.text(1.015, place, f"{words} ahead, {row['told']}", transform=ax.get_yaxis_transform(),
                        va="center", fontsize=10, color=colour.colour)  # fmt: skip
            ax.set_yticks(
                range(len(found)),
                [row["name"] + (f" · {row['network']}" if "slow" in row["name"] else "") for row in found],
                fontsize=10,
            )
            ax.set_ylim(len(found) - 0.5, -0.5)
            ax.set_xlabel("accuracy" if name == "digits" else "modes found together, of 16")
        axes[0, 0].legend(frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1.0))
        caption = (
            "16 ranks learn digits for 1 s of virtual time, 8 look for modes · an exchange each 10 iterations of 10 ms "
            f"· marks: median of {len(seeds)} seeds; bars: its 90 % interval · right: selective less average, paired"
        )
        return style.frame(
            drawn, "Replace the worst, or average all? It depends on what differs among ranks", caption
        )
