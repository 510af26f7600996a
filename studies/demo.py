"""The main job: 1,000 virtual ranks learn digits under three policies, then 4 real MPI ranks run the same file.

    spawnsim study demo            (about as long as a coffee takes on 2 cores)
    spawnsim study demo --quick    (64 virtual ranks)

It writes, into runs/demo or the folder given by --out: convergence and diversity against seconds and iterations,
who was replaced when and by whom, and real ranks (markers) over virtual ones (lines).
"""

import numpy as np

from spawnsim.plots import convergence, diversity, lineage, raster
from spawnsim.study import Cell, Context

POLICIES = ("none", "average", "selective")
CLUSTER = {"platform": "ethernet-10g", "stragglers": "lognormal:0.3", "compute": "10 ms"}


def study(context: Context) -> None:
    """Run the virtual cluster, draw; run real ranks and their virtual twins, draw; print the table."""
    cluster = on_the_cluster(context)
    for name in ("accuracy", "loss"):
        context.save(convergence.figure([each.run for each in cluster], name), f"convergence-{name}")
    context.save(diversity.figure([each.run for each in cluster]), "diversity")
    context.save(raster.figure(cluster[-1].run), "replacement-raster")
    context.save(lineage.figure(cluster[-1].run), "replacement-lineage")

    real = on_real_ranks(context)
    twins = on_virtual_twins(context, real)
    context.save(
        convergence.figure([each.run for each in twins + real], title="Virtual and real"), "real-and-virtual"
    )

    show(context, cluster + real)


def on_the_cluster(context):
    """1,000 ranks on a straggling 10 GbE cluster, one run per policy."""
    return context.sweep(
        context.grid(
            "digits.py", ranks=[64 if context.quick else 1000], seeds=[7],
            over={"policy": POLICIES, "iterations": [60 if context.quick else 200]}, **CLUSTER,
        )
    )  # fmt: skip


def real_parameters(policy):
    """The same file, with what is the same for real and virtual twins."""
    return {"policy": policy, "iterations": 200}


def on_real_ranks(context):
    """4 processes under mpiexec, one run per policy, one after another."""
    file = context.file("digits.py")
    cells = [
        Cell(file=file, ranks=4, seed=7, backend="mpi", parameters=real_parameters(name)) for name in POLICIES
    ]
    return context.alone().sweep(cells)


def on_virtual_twins(context, real):
    """4 virtual ranks that compute as long as the real ones did (measured without any policy)."""
    step_s = seconds_per_iteration(real[POLICIES.index("none")].run)
    context.say(f"an iteration took {1e3 * step_s:.3g} ms on a real rank; the virtual twins are given that")
    file = context.file("digits.py")
    world = {"platform": "laptop", "compute": step_s}
    cells = [
        Cell(file=file, ranks=4, seed=7, parameters=real_parameters(name), world=world) for name in POLICIES
    ]
    return context.sweep(cells)


def seconds_per_iteration(run):
    """The median time between two rows of one rank, to two digits: a measurement, not a constant of nature."""
    steps = np.diff(run.table["time_s"])[np.diff(run.table["rank"]) == 0]
    return float(f"{np.median(steps):.2g}")


def show(context, results):
    """Print one line per run."""
    context.say(
        f"{'policy':10} {'ranks':>10} {'accuracy':>9} {'seconds':>9} {'replaced':>9} {'wall':>8} {'memory':>9}  digest"
    )
    rows = [row(each) for each in results]
    for each in rows:
        context.say(
            "{policy:10} {ranks:>10} {accuracy:>9.3f} {seconds:>9.3g} {replacements:>9,} {wall_s:>6.1f} s"
            " {peak_memory_MiB:>5,} MiB  {digest}".format(**each)
        )
    context.save_table(rows, "summary")


def row(result):
    """What a run came to."""
    totals, cost = result.run.totals, result.cost
    last = convergence.curve(result.run.table, "accuracy", over="iteration").median[-1]
    return {
        "policy": result.cell.parameters["policy"],
        "ranks": f"{result.cell.ranks:,} {'real' if result.cell.backend == 'mpi' else 'virt.'}",
        "accuracy": round(float(last), 4),
        "seconds": float(result.run.table["time_s"].max()),
        "replacements": totals.get("replacements") or 0,
        "wall_s": cost.wall_s,
        "peak_memory_MiB": round(cost.peak_memory_B / 2**20),
        "load": cost.load,
        "digest": totals.get("digest") or "-",
    }
