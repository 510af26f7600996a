"""Two large machines, predicted from one size each: LUMI from 16 nodes, MareNostrum 5 from 16 GPUs.

    spawnsim study large_machines [--quick]

`data/pico_fit.csv` has measured all-reduces of the public data set HLC-Lab/pico (MIT): LUMI with 16 nodes and one
rank each (a ring and recursive doubling over messages of Cray MPICH), and MareNostrum 5 with 4 nodes of 4 GPUs
(NCCL's ring and double tree). `spawnsim calibrate --from` fits a platform to each, and the platforms predict other
numbers of nodes, and on LUMI Rabenseifner's algorithm, which the fit has not seen.

Known besides the rows: a core of LUMI's processors has 32 MiB of cache, beyond which it combines operands more slowly;
MareNostrum's GPUs are of the Hopper generation, its processors Intel's. Assumed: the network is as fast between 32
nodes as between 16, which no row tests; and NCCL keeps its channels.
"""

import csv
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

from spawnsim.fidelity.tablefit import fit_table, report
from spawnsim.fidelity.tables import read_table
from spawnsim.models.collectives import Selection, Timing
from spawnsim.plots import style

HERE = Path(__file__).parent
DATA = HERE / "data" / "pico_fit.csv"
CACHE_BYTES = {"lumi": 32 << 20, "mare_nostrum": None}
RANKS_PER_NODE = {"lumi": 1, "mare_nostrum": 4}
CASES = (
    *product(["lumi"], (8, 32), ("ring", "recursive_doubling", "rabenseifner")),
    ("lumi", 16, "rabenseifner"),
    *product(["mare_nostrum"], (8, 16, 32), ("ring", "tree")),
)
SIZES = [1 << k for k in range(5, 30)]  # 32 B to 512 MiB
COLUMNS = ("machine", "nodes", "algorithm", "bytes", "seconds")


def fits():
    """Return each machine's rows and its fit."""
    found = {}
    for machine, cache_bytes in CACHE_BYTES.items():
        rows = read_table(DATA, machine=machine)
        found[machine] = rows, fit_table(rows, machine, cache_bytes=cache_bytes)
    return found


def predictions(platforms, sizes=SIZES):
    """Yield (machine, nodes, algorithm, bytes, seconds) of every case."""
    for machine, nodes, algorithm in CASES:
        timing = Timing(platforms[machine].network, selection(platforms[machine], algorithm))
        ranks = nodes * RANKS_PER_NODE[machine]
        for nbytes in sizes:
            finish = timing.finish("allreduce", np.zeros(ranks), nbytes)
            yield machine, nodes, algorithm, nbytes, float(finish.times.max())


def selection(platform, algorithm):
    """Return the choice that fixes an algorithm on this platform."""
    nccl = platform.collectives.nccl
    if nccl is None:
        return Selection(fixed=(("allreduce", algorithm),))
    return Selection("nccl", nccl=replace(nccl, algorithm=algorithm))


def study(context):
    """Fit both machines, write the predictions, and draw them with the fitted rows."""
    found = fits()
    for machine, (rows, fit) in found.items():
        context.say(f"{machine}:\n{report(rows, fit)}")
    table = [*predictions({name: fit.platform for name, (_, fit) in found.items()})]
    path = context.out / "large_machines_predictions.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows((*row[:4], f"{row[4]:.6g}") for row in table)
    context.say(f"table: {path} ({len(table)} rows)")
    context.save(figure(found, table), "large_machines")


def figure(found, table):
    """Return the predicted times over bytes: a panel per machine and algorithm, a line per number of nodes."""
    from matplotlib.figure import Figure

    panels = [*dict.fromkeys((machine, algorithm) for machine, _, algorithm, *_ in table)]
    with style.talk():
        drawn = Figure(figsize=(12, 7))
        axes = drawn.subplots(2, 3, sharex=True, sharey=True).flat
        looks = style.looks(["8", "16", "32"])
        for ax, (machine, algorithm) in zip(axes, panels, strict=False):
            for nodes in ("8", "16", "32"):
                points = [
                    (nbytes, seconds)
                    for name, count, kind, nbytes, seconds in table
                    if (name, kind, str(count)) == (machine, algorithm, nodes)
                ]
                if points:
                    ax.plot(*zip(*points, strict=True), color=looks[nodes].colour, label=f"{nodes} nodes")
            fitted = [row for row in found[machine][0] if row.algorithm == algorithm]
            if fitted:
                label = f"measured, {fitted[0].nodes} nodes"
                ax.plot([r.nbytes for r in fitted], [r.seconds for r in fitted], "k.", ls="", label=label)
            ax.set(xscale="log", yscale="log", title=f"{machine} {algorithm}")
            ax.legend(frameon=False)
        for ax in [*axes][len(panels) :]:
            ax.set_visible(False)
        drawn.supxlabel("bytes")
        drawn.supylabel("seconds")
        return style.frame(
            drawn,
            "Two large machines, predicted from one size each",
            "Lines: predicted all-reduces, log scales. Points: the measurements to which the platforms were fitted.",
        )
