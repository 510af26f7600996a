"""Carry out one cell in this process (virtual ranks) or through a launcher (real ranks), and say what it took.

This room knows how to start a run; it must not know what other cells there are. `execute` is a plain function of
picklable values, so that any executor can carry it to another process or machine.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from spawnsim.errors import ParameterError, WorldError
from spawnsim.run import run, threads
from spawnsim.run.interrupts import stoppable
from spawnsim.study.cell import Cell
from spawnsim.study.store import Cost, Store, write_cost

LAST_LINES = 12


def execute(cell: Cell, root: Path) -> Cost:
    """Carry out `cell` into its place under `root`; a cell that is there already costs nothing more."""
    store = Store(root)
    if store.done(cell):
        return store.cost(cell)
    if replace(cell).key != cell.key:
        raise ParameterError(
            f"files that {cell.name} depends on were edited since the study began: start it again"
        )
    load, began_s = os.getloadavg()[0], time.monotonic()
    # Only here a signal raises: one that waits for work, in a pool that is told to stop, just ends.
    with stoppable(), store.draft(cell) as folder:
        (_in_this_process if cell.backend == "virtual" else _launched)(cell, folder)
        cost = Cost(round(time.monotonic() - began_s, 3), _peak_memory(cell), round(load, 2))
        write_cost(folder, cost)
    return cost


def prepare() -> None:
    """Make a process of a pool ready for one run: one thread, and it is for the study to tell it to stop.

    Numeric libraries are told that are not loaded yet: runs share the machine's cores. Ctrl-C on a terminal reaches
    all processes; those of a pool leave it to the study's.
    """
    threads.use_one_thread()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _in_this_process(cell: Cell, folder: Path) -> None:
    run(
        cell.file, ranks=cell.ranks, seed=cell.seed, out=folder, parameters=dict(cell.parameters),
        **dict(cell.world),
    )  # fmt: skip


def _launched(cell: Cell, folder: Path) -> None:
    """Start the same command that a person would type, and word its failure with its last lines."""
    line = command(cell, folder)
    done = subprocess.run(
        line, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=dict.fromkeys(threads.VARIABLES, "1") | os.environ,
    )  # fmt: skip
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-LAST_LINES:])
        raise WorldError(f"{' '.join(line[1:])} ended with status {done.returncode}:\n{tail}")


def command(cell: Cell, folder: Path) -> list[str]:
    """Return the command line of a cell on real ranks; its values are Python literals, as `--set` reads them."""
    line = [
        sys.executable,
        "-m",
        "spawnsim",
        "run",
        str(cell.file),
        "--backend",
        cell.backend,
        "-n",
        str(cell.ranks),
    ]
    line += ["--seed", str(cell.seed), "--out", str(folder), "--quiet"]
    return line + [part for name, value in cell.parameters.items() for part in ("--set", f"{name}={value!r}")]


def _peak_memory(cell: Cell) -> int:
    """Return bytes: this process's, or, for launched ranks, the largest single process's."""
    whose = resource.RUSAGE_SELF if cell.backend == "virtual" else resource.RUSAGE_CHILDREN
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(whose).ru_maxrss * unit
