"""The main job: 1,000 virtual ranks learn digits under three policies, then 4 real MPI ranks run the same file.

    spawnsim study demo            (three to five minutes on 2 cores)
    spawnsim study demo --quick    (64 virtual ranks)

It writes, into runs/demo or the folder given by --out: convergence and diversity against seconds and iterations,
who was replaced when and by whom, and real ranks (markers) over virtual ones (lines).
"""

import numpy as np

from spawnsim.plots import convergence, diversity, lineage, raster
from spawnsim.study import Cell, Context

POLICIES = ("none", "average", "selective")
LEARNING = {
    "iterations": 200,
    "alpha": 1.0,
    "judge": "accuracy",
    "accuracy_every": 5,
    "replacement_ratio": 0.3,
}
CLUSTER = {"platform": "ethernet-10g", "stragglers": "lognormal:0.3", "compute": "10 ms"}
WIDER = {
    "hidden": (256, 256),
    "iterations": 400,
}  # on real ranks, a step that takes a millisecond rather than 0.1


def study(context: Context) -> None:
    """Run the virtual cluster, draw; run real ranks and their virtual twins, draw; print the table."""
    cluster = context.sweep(cells(context, ranks=64 if context.quick else 1000, world=CLUSTER))
    runs = [each.run for each in cluster]
    for name in ("accuracy", "loss"):
        context.save(convergence.figure(runs, name), f"convergence-{name}")
    context.save(diversity.figure(runs), "diversity")
    context.save(raster.figure(runs[-1]), "replacement-raster")
    context.save(lineage.figure(runs[-1]), "replacement-lineage")

    real = context.alone().sweep(cells(context, WIDER, ranks=4, backend="mpi"))
    twins = on_virtual_twins(context, real)
    both = [each.run for each in twins + real]
    context.save(convergence.figure(both, title="One file, virtual and real"), "real-and-virtual")

    show(context, cluster + real)


def cells(context, more=None, **where):
    """One run of studies/digits.py per policy, at some place."""
    file, learning = context.file("digits.py"), LEARNING | (more or {})
    return [Cell(file=file, seed=7, parameters={"policy": name, **learning}, **where) for name in POLICIES]


def on_virtual_twins(context, real):
    """4 virtual ranks that compute for as long as the real ones did without any policy: nothing else is fitted."""
    step_s = seconds_per_iteration(real[POLICIES.index("none")].run)
    context.say(f"an iteration took {1e3 * step_s:.2g} ms on a real rank; its virtual twin is given that")
    return context.sweep(cells(context, WIDER, ranks=4, world={"platform": "laptop", "compute": step_s}))


def seconds_per_iteration(run):
    """The mean time between a rank's rows, to two digits: a measurement, not a constant of nature."""
    steps_s = np.diff(run.table["time_s"])[np.diff(run.table["rank"]) == 0]
    return float(f"{steps_s.mean():.2g}")


COLUMNS = "{policy:10} {ranks:>13} {accuracy:>9} {seconds:>9} {replaced:>9} {wall:>9} {memory:>9}  {digest}"


def show(context, results):
    """Print a table, one line per run, and keep it as JSON."""
    names = ("policy", "ranks", "accuracy", "seconds", "replaced", "wall", "memory", "digest")
    rows = [row(each) for each in results]
    for each in [dict(zip(names, names, strict=True)), *rows]:
        context.say(COLUMNS.format(**each))
    context.save_table(rows, "summary")
    context.say(f"all of it is in {context.out}/")


def row(result):
    """What a run came to: the accuracy is the median over ranks at the end."""
    totals, cost, real = result.run.totals, result.cost, result.cell.backend != "virtual"
    return {
        "policy": result.cell.parameters["policy"],
        "ranks": f"{result.cell.ranks:,} {'real' if real else 'virtual'}",
        "accuracy": f"{convergence.curve(result.run.table, 'accuracy', over='iteration').median[-1]:.3f}",
        "seconds": f"{convergence.training_s(result.run):.3g} s",
        "replaced": f"{totals['replacements']:,}",
        "wall": f"{cost.wall_s:.1f} s",
        "memory": f"{cost.peak_memory_B / 2**20:.0f} MiB",
        "digest": totals["digest"] or "(real time has none)",
    }
