"""Runs that are killed at random moments and resumed: are they complete, and on virtual ranks equal to a whole run?

    python benchmarks/killed_runs.py --kills 20 [--backend mpi -n 3] [--seed 0]

`tests/programs/resumable.py` runs once without interruption. Then, for each kill, it starts again in a new folder,
all of its processes get SIGKILL at a random moment after the first checkpoint, and `spawnsim resume` finishes it. On
virtual ranks, digest and rows must equal the uninterrupted run's; on real ranks, each rank must have a row for each
iteration. Every second run is killed twice.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import spawnsim

PROGRAM = Path(__file__).parents[1] / "tests" / "programs" / "resumable.py"
POLICIES = ("selective", "one-sided", "all", "diloco", "groups", "clock", "decoupled")
DELAY_S = 0.3  # the longest delay of a kill after a checkpoint
SPAWNSIM = (sys.executable, "-m", "spawnsim")


def begun(command: list[str]) -> subprocess.Popen[bytes]:
    """Start a command in a new process group."""
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def saved(out: Path) -> int:
    """Return the iteration of the newest checkpoint, or 0 without a checkpoint."""
    return max((int(each.name) for each in out.glob("checkpoints/*") if each.name.isdigit()), default=0)


def killed(command: list[str], out: Path, iteration: int, delay_s: float) -> int:
    """Start a command and kill all its processes after a checkpoint and a delay; return its status."""
    process = begun(command)
    while process.poll() is None and saved(out) < iteration:
        time.sleep(0.005)
    try:
        return process.wait(delay_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def same(whole: spawnsim.Run, other: spawnsim.Run) -> bool:
    """Return whether two virtual runs are equal: digest, rows and times."""
    columns = ("rank", "time_s", "iteration", "loss", "weight", "total")
    equal = (np.array_equal(whole.table[name], other.table[name]) for name in columns)
    return whole.totals["digest"] == other.totals["digest"] and all(equal)


def complete(run: spawnsim.Run, ranks: int, iterations: int) -> bool:
    """Return whether each rank has one row for each iteration."""
    rows = sorted(zip(run.table["rank"].tolist(), run.table["iteration"].tolist(), strict=True))
    return rows == [(rank, iteration) for rank in range(ranks) for iteration in range(iterations)]


def campaign(how: Any, folder: Path) -> int:
    """Kill and resume; print a line for each kill; return the number of wrong runs."""
    draw, wrong, wholes = random.Random(how.seed), 0, set[str]()
    world = ["--backend", how.backend, "-n", how.n] if how.backend != "virtual" else ["--ranks", how.n]
    world += ["--seed", "7", *([] if how.backend != "virtual" else ["--straggler", "lognormal:0.3"])]
    for number in range(how.kills):
        policy = POLICIES[number % len(POLICIES)]
        given = ["--set", f"policy={policy!r}", "--set", f"iterations={how.iterations}", "--set", "every=10"]

        def command(name: str, given: list[str] = given) -> list[str]:
            return [
                *SPAWNSIM,
                "run",
                str(PROGRAM),
                *map(str, world),
                *given,
                "--quiet",
                "--out",
                str(folder / name),
            ]

        if policy not in wholes:
            assert begun(command(f"whole {policy}")).wait() == 0
            wholes.add(policy)
        name = f"{number} {policy}"
        resume, out = [*SPAWNSIM, "resume", str(folder / name), "--quiet"], folder / name
        after = sorted(10 * draw.randrange(1, how.iterations // 10) for _ in range(1 + number % 2))
        stati = [killed(command(name), out, after[0], draw.uniform(0, DELAY_S))]
        stati += [killed(resume, out, each, draw.uniform(0, DELAY_S)) for each in after[1:]]
        if stati[-1]:
            stati.append(begun(resume).wait())
        run = spawnsim.Run.load(folder / name)
        good = complete(run, how.n, how.iterations) and run.outcome == "finished"
        if how.backend == "virtual":
            good = good and same(spawnsim.Run.load(folder / f"whole {policy}"), run)
        wrong += not good
        verdict = "as it should be" if good else "WRONG"
        print(f"{name}: killed after the checkpoints at {after}; statuses {stati}; {verdict}", flush=True)
    return wrong


def main() -> int:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--backend", default="virtual", choices=["virtual", "mpi", "torch"])
    parser.add_argument("-n", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    how = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wrong = campaign(how, Path(folder))
    print(f"{how.kills} runs killed and resumed, {wrong} not as they should be")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
