"""The main demonstration: five exchange policies over time, in two settings; then 1,000 virtual ranks; then real ranks.

    spawnsim study demo --seeds 1    (what `make demo` runs)
    spawnsim study demo              (three seeds: the picture and the table of the README)
    spawnsim study demo --quick      (fewer ranks, one seed)

One rank in twenty of the cluster is ten times slower than the others. Ranks learn digits twice: once their data
differ, once their learning rates differ. The output folder (runs/demo, or --out) gets: accuracy against virtual time,
and a table with the time to a target; for 1,000 ranks, the replacements with times and donors; and real ranks
(markers) over virtual ranks (lines).
"""

import math
from dataclasses import replace

import numpy as np

from spawnsim.plots import convergence, curves, replacement, series
from spawnsim.record import Table
from spawnsim.study import Cell, Context

POLICIES = ("none", "average", "selective", "groups", "clock")
SETTINGS = {
    "Data differ": {"alpha": 0.3, "spread": 0.0},
    "Learning rates differ": {"alpha": None, "spread": 2.0},
}
LEARNING = {"iterations": 200, "average_every": 10, "replacement_ratio": 0.5, "judge": "accuracy"}
CROWD = SETTINGS["Learning rates differ"] | {"replacement_ratio": 0.1}  # few enough to see each of them
MEASURED = {"consensus_every_s": 0.1}  # as a round begins, like the accuracy: just after it, both are higher
CLUSTER = {"platform": "ethernet-10g", "stragglers": "slow:0.05,10", "compute": "10 ms"}
SEEDS = (7, 8, 9)
TARGET = 0.8
# A step takes a millisecond there instead of 0.1.
REAL = {"alpha": 1.0, "hidden": (256, 256), "iterations": 400}
ON_REAL_RANKS = ("none", "average", "selective")  # one after the other, in one job


def study(context: Context) -> None:
    """Run each part and draw it; print the tables, and at the end the findings."""
    findings = [*virtual(context), real(context)]
    for line in (*findings, f"Open {context.out}/race.png first; docs/average-or-replace.md explains it."):
        context.say(line)


def virtual(context):
    """Run all policies in both settings, over seeds; and many ranks, to show the replacements."""
    ranks, crowd = (32, 100) if context.quick else (64, 1000)
    crowded = cell(context, "selective", ranks=crowd, seed=SEEDS[0], world=CLUSTER, **CROWD)
    cells = {
        setting: [
            cell(context, policy, ranks=ranks, seed=seed, world=CLUSTER, **how, **MEASURED)
            for policy in POLICIES
            for seed in context.seeds(SEEDS)
        ]
        for setting, how in SETTINGS.items()
    }
    wanted = [each.key for some in cells.values() for each in some]
    found, findings = {}, []

    def draw(result):
        """Draw the available results while other runs execute."""
        if result.cell.key == crowded.key:
            findings.append(show_crowd(context, result))
            return
        found[result.cell.key] = result.run
        if len(found) == len(wanted):
            runs = {setting: [found[each.key] for each in some] for setting, some in cells.items()}
            findings[:0] = race(context, runs)

    # The longest runs first, so that no core is idle at the end: the last policies take two to three times as long.
    others = sorted(
        (each for some in cells.values() for each in some),
        key=lambda each: -POLICIES.index(each.parameters["policy"]),
    )
    context.sweep([crowded, *others], each=draw)
    return findings


def race(context, runs):
    """Draw all policies over time, and print the results of each; return a finding for each setting."""
    title = "Which exchange of weights? It depends on what differs among ranks"
    context.save(convergence.race(runs, TARGET, title), "race")
    tables = [[*rows(setting, some)] for setting, some in runs.items()]
    show(context, [row for table in tables for row in table], "race")
    return [finding(table) for table in tables]


def finding(table):
    """Return a sentence about one setting: the best and the worst policy, by the ranks' models and by their mean."""

    def ranked(column):
        ordered = sorted(table, key=lambda row: float(row[column].split()[0]))
        return ordered[-1], ordered[0]

    own, (mean, _) = "ranks' accuracy", ranked("mean model")
    best, worst = ranked(own)
    return (
        f"Where {table[0]['setting']}: the ranks' models are best under {best['policy']!r} ({best[own]}) and worst "
        f"under {worst['policy']!r} ({worst[own]}); "
        f"the mean model is best under {mean['policy']!r} ({mean['mean model']})."
    )


def show_crowd(context, many):
    """Draw the replacements among many ranks; return the cost of the run."""
    context.save(replacement.raster_figure(many.run), "replacement-raster")
    context.save(replacement.lineage_figure(many.run), "replacement-lineage")
    cost = f"{many.cost.wall_s:.0f} s and {many.cost.peak_memory_B / 2**20:.0f} MiB"
    return f"{many.cell.ranks:,} virtual ranks that train and replace each other took {cost} on this machine."


def real(context):
    """Run four real ranks, and four virtual ranks with the compute time that the real ones had without a policy."""
    in_turn = "+".join(ON_REAL_RANKS)
    [job] = context.alone().sweep([cell(context, in_turn, ranks=4, backend="mpi", **REAL)])
    measured = [*apart(job.run)]
    step_s = seconds_per_iteration(measured[ON_REAL_RANKS.index("none")])
    context.say(f"an iteration took {1e3 * step_s:.2g} ms on a real rank; its virtual twin is given that")
    world = {"platform": "laptop", "compute": step_s}
    [twin] = context.sweep([cell(context, in_turn, ranks=4, world=world, **REAL)])
    twins = [*apart(twin.run)]
    context.save(convergence.figure(twins + measured, title="One file, virtual and real"), "real-and-virtual")
    table = [ended(*both) for both in zip(twins, measured, strict=True)]
    show(context, table, "real")
    apart_by = max(abs(float(row["accuracy, virtual"]) - float(row["real"])) for row in table)
    return f"The same file on 4 real ranks: accuracies differ from the virtual run by {apart_by:.3f} at most."


def apart(run):
    """Yield each policy's part of a run that had them in turn, as a run whose time begins with that part."""
    turn = np.cumsum(run.table["iteration"] == 0)  # rows are ordered by rank, and by time
    for number, policy in enumerate(ON_REAL_RANKS, start=1):
        table = run.table.where((turn - number) % len(ON_REAL_RANKS) == 0)
        begun_s = (table["time_s"] - table["compute_s"])[table["iteration"] == 0].min()
        parameters = run.what["parameters"] | {"policy": policy}
        yield replace(
            run, what=run.what | {"parameters": parameters},
            table=Table({**table, "time_s": table["time_s"] - begun_s}),
        )  # fmt: skip


def cell(context, policy, *, ranks, seed=SEEDS[0], backend="virtual", world=None, **parameters):
    """Return the cell of one run of studies/digits.py."""
    learning = {"policy": policy} | LEARNING | parameters
    return Cell(
        file=context.file("digits.py"),
        ranks=ranks,
        seed=seed,
        backend=backend,
        parameters=learning,
        world=world or {},
    )


def seconds_per_iteration(run):
    """Return the mean time between a rank's rows, to two digits: it is a measurement, not a constant."""
    steps_s = np.diff(run.table["time_s"])[np.diff(run.table["rank"]) == 0]
    return float(f"{steps_s.mean():.2g}")


# ------------------------------------------------------------------------------------------------------- tables
def rows(setting, runs):
    """Return each policy's results: the median over seeds, and over ranks for the ranks' own models."""
    for policy in POLICIES:
        some = [run for run in runs if run.what["parameters"]["policy"] == policy]
        own = [curves.curve(run.table, "accuracy", points=convergence.POINTS) for run in some]
        mean = [curves.of_mean_model(run) for run in some]
        yield {
            "setting": setting.lower(),
            "policy": policy,
            "ranks' accuracy": over_seeds([info.end for info in own], ".2f"),
            f"at {TARGET:g}": over_seeds([curves.first_at(info, TARGET) for info in own], ".1f", " s"),
            "mean model": over_seeds([info.end for info in mean], ".2f"),
            f"mean at {TARGET:g}": over_seeds([curves.first_at(info, TARGET) for info in mean], ".1f", " s"),
            "median rank ended": over_seeds(
                [float(np.median(series.per_rank_last(run.table, "time_s"))) for run in some], ".1f", " s"
            ),
        }  # fmt: skip


def over_seeds(values, form, unit=""):
    """Return the median over seeds, with the least and largest value; "never" if half of them missed the target."""
    median, low, high = (float(f(values)) for f in (np.median, min, max))
    if not math.isfinite(median):
        return "never" if not math.isfinite(low) else f"never (one: {low:{form}}{unit})"
    shown = f"{median:{form}}{unit}"
    highest = f"{high:{form}}" if math.isfinite(high) else "never"
    return shown if len(values) == 1 else f"{shown} ({low:{form}} to {highest})"


def ended(virtual, measured):
    """Return the final results of a run on virtual ranks and on real ranks."""
    ends = [float(np.median(series.per_rank_last(each.table, "accuracy"))) for each in (virtual, measured)]
    seconds = [curves.training_s(each) for each in (virtual, measured)]
    return {
        "policy": virtual.what["parameters"]["policy"],
        "accuracy, virtual": f"{ends[0]:.4f}",
        "real": f"{ends[1]:.4f}",
        "seconds, virtual": f"{seconds[0]:.2f}",
        "real ": f"{seconds[1]:.2f}",
    }


def show(context, table, stem):
    """Print a table, one line per row, and save it as JSON."""
    widths = {name: max(len(name), *(len(row[name]) for row in table)) for name in table[0]}
    for row in [dict(zip(widths, widths, strict=True)), *table]:
        context.say("  ".join(f"{row[name]:<{width}}" for name, width in widths.items()).rstrip())
    context.save_table(table, stem)
