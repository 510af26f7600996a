"""Scores `spawnsim run --races` on the programs of tests/virtual/races, and measures what the search costs.

`python benchmarks/races.py`: races found and false alarms by category, and the times of programs with and without it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import spawnsim

CASES = Path(__file__).parents[1] / "tests/virtual/races/cases.py"
RING = """
from mpi4py import MPI
import numpy as np

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
data, into = np.ones(8), np.ones(8)
for step in range({steps}):
    comm.Sendrecv(data, (rank + 1) % size, recvbuf=into, source=(rank - 1) % size)
"""
HALO = """
from mpi4py import MPI
import numpy as np

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
field = np.zeros({cells})
win = MPI.Win.Create(field, 8, comm=comm)
for step in range({steps}):
    win.Fence()
    win.Put(field[1:2], (rank - 1) % size, {cells} - 1)
    win.Put(field[-2:-1], (rank + 1) % size, 0)
    win.Fence()
    field[1:-1] = (field[:-2] + field[2:]) / 2 + rank
win.Free()
"""
QUEUE = """
from mpi4py import MPI
import numpy as np

comm = MPI.COMM_WORLD
one, task = np.ones(1, int), np.zeros(1, int)
win = MPI.Win.Allocate(8, 8, comm=comm)
comm.Barrier()
win.Lock_all()
while task[0] < {steps}:
    win.Fetch_and_op(one, task, 0)
    win.Flush(0)
win.Unlock_all()
win.Free()
"""
PROGRAMS = {
    "ring of 64 ranks": (RING, 64, {"steps": 200}),
    "halo exchange of 16 ranks, 100 cells": (HALO, 16, {"steps": 200, "cells": 100}),
    "halo exchange of 16 ranks, 10,000 cells": (HALO, 16, {"steps": 200, "cells": 10_000}),
    "halo exchange of 4 ranks, 1,000,000 cells": (HALO, 4, {"steps": 20, "cells": 1_000_000}),
    "task queue of 16 ranks": (QUEUE, 16, {"steps": 2000}),
}


def cases() -> Any:
    """Return the module with the programs."""
    spec = importlib.util.spec_from_file_location("race_cases", CASES)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["race_cases"] = module
    spec.loader.exec_module(module)
    return module


def score(folder: Path) -> None:
    """Print how many races were found, and how many programs without one caused an alarm."""
    made, table = cases(), Counter[tuple[str, str]]()
    for case in made.cases():
        with contextlib.redirect_stdout(io.StringIO()):
            found, text = made.judged(case, folder)
        verdict = ("TP" if case.racy else "FP") if found else ("FN" if case.racy else "TN")
        for category in (case.category, "total"):
            table[category, verdict] += 1
        if verdict in ("FP", "FN"):
            print(verdict, case.category, case.name, text)
    for category in (*dict.fromkeys(each for each, _ in table if each != "total"), "total"):
        print(f"{category:10}", *(f"{name} {table[category, name]:4}" for name in ("TP", "FP", "TN", "FN")))


def cost(folder: Path) -> None:
    """Print the best of five times without and with the search."""
    for name, (text, ranks, sizes) in PROGRAMS.items():
        path = folder / "program.py"
        path.write_text(text.format(**sizes))
        best = {False: float("inf"), True: float("inf")}
        for _ in range(5):
            for races in best:
                begin = time.perf_counter()
                spawnsim.run(path, ranks=ranks, races=races)
                best[races] = min(best[races], time.perf_counter() - begin)
        print(
            f"{name:42} {best[False]:.3f} s, with races {best[True]:.3f} s: {best[True] / best[False]:.2f} times"
        )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        score(Path(place))
        cost(Path(place))
