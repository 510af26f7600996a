"""`mpiexec -n N spawnsim calibrate`: measure this cluster, and write a platform file. Rank 0 alone fits and prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from spawnsim.errors import ParameterError
from spawnsim.fidelity.fitting import fit
from spawnsim.fidelity.measuring import Measured, doubts, measure
from spawnsim.fidelity.microbenchmarks import Effort
from spawnsim.fidelity.scoring import Pair, Score, compare, require_fit, score_table, scores
from spawnsim.options import Parser
from spawnsim.virtual.platform import Platform, to_toml

QUICK = Effort(budget_s=0.002, most=10, passes=3, largest_nbytes=4 << 20)


def main(argv: Sequence[str]) -> int:
    """Measure, fit, write and print."""
    options = parser().parse_args(argv)
    measured = measure_here(QUICK if options.quick else Effort())
    if measured is None:
        return 0
    platform = fit(measured, options.out.stem)
    pairs = compare(measured, platform)
    if options.picture:  # it shows, too, why measurements are refused
        draw(pairs, platform, options.picture)
    found = scores(pairs)
    require_fit(platform, found)
    write(options.out, platform, found)
    return 0


def measure_here(effort: Effort) -> Measured | None:
    """Measure the communicator of this job. Collective; None on all ranks but 0."""
    from spawnsim.real.launch.launchers import detect_launcher

    if detect_launcher().size < 2:
        raise ParameterError("a calibration needs at least 2 ranks: mpiexec -n 2 spawnsim calibrate")
    from spawnsim.real.mpi import guarded, world

    load = os.getloadavg()[0]
    comm: Any = world()
    with guarded(comm):
        measured = measure(comm, effort)
    if comm.Get_rank() != 0:
        return None
    warn(measured.ranks_per_node, load)
    return measured


def warn(ranks_per_node: int, load: float) -> None:
    """Say on standard error why the measurements are doubtful, if they are."""
    for doubt in doubts(ranks_per_node, os.cpu_count() or 1, load):
        sys.stderr.write(f"spawnsim: warning: {doubt}\n")


def write(out: Path, platform: Platform, found: Sequence[Score]) -> None:
    """Write the platform file, with its errors in comments, and print both."""
    errors = score_table(found).splitlines()
    comments = [
        f"Measured by `spawnsim calibrate` on {date.today().isoformat()}. Predicted against measured times, absolute",
        "relative errors: the median over the sizes that were fitted, over those held out, and the largest.",
        *errors,
        "",
    ]
    out.write_text(to_toml(platform, comments), encoding="utf-8")
    sys.stdout.write("\n".join([*errors, f"written: {out}", ""]))


def draw(pairs: Sequence[Pair], platform: Platform, picture: Path) -> None:
    """Draw measured against fitted times."""
    from spawnsim.plots import fidelity, style

    names = dict.fromkeys(pair.measured.operation for pair in pairs if pair.measured.nbytes)
    info = {
        name: fidelity.curve(
            (pair.measured.nbytes, pair.measured.seconds, pair.predicted_s, pair.held_out)
            for pair in pairs
            if pair.measured.operation == name and pair.where == ""
        )
        for name in names
    }
    drawn = fidelity.calibration_figure(
        {name: curve for name, curve in info.items() if len(curve.nbytes) > 2}, platform.description
    )
    style.save_as(drawn, picture)
    sys.stdout.write(f"drawn: {picture}\n")


def parser() -> Parser:
    """Return the options of `spawnsim calibrate`."""
    parser = Parser(
        prog="mpiexec -n N spawnsim calibrate",
        description="Measure messages, collectives and compute steps on this job's ranks, and fit a platform.",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("measured.toml"), metavar="FILE", help="default: measured.toml"
    )
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw measured against fitted: .png, .pdf or .svg"
    )
    parser.add_argument(
        "--quick", action="store_true", help="seconds instead of half a minute; larger errors"
    )
    return parser
