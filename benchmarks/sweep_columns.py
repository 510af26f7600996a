"""A sweep over columns against single runs: `python benchmarks/sweep_columns.py [--seeds 100] [--singles 4]`.

Digits on 64 ranks, 200 iterations, under "average" and "selective", with two jobs. Single runs of fewer seeds
(`--singles`) are timed, and their time per run is scaled: it does not depend on the number of seeds. The time of the
command is included in both, and all runs of the columns must be there at the end.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import spawnsim

GIVEN = [
    "digits",
    "--ranks",
    "64",
    "--set",
    "policy=average,selective",
    "--set",
    "iterations=200",
    "--compute",
    "10 ms",
]
POLICIES = 2


def seconds(seeds: int, out: Path, *more: str) -> float:
    """Return how long a sweep takes, in wall seconds."""
    command = [
        sys.executable,
        "-m",
        "spawnsim",
        "sweep",
        *GIVEN,
        "--seeds",
        str(seeds),
        "--jobs",
        "2",
        "--out",
        str(out),
    ]
    began_s = time.perf_counter()
    subprocess.run([*command, *more], check=True, stdout=subprocess.DEVNULL)
    taken_s = time.perf_counter() - began_s
    assert len([*spawnsim.Sweep.load(out).runs()]) == seeds * POLICIES
    return taken_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--singles", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        single_s = seconds(options.singles, Path(folder, "singles")) / (options.singles * POLICIES)
        columns_s = seconds(options.seeds, Path(folder, "columns"), "--columns")
    count = options.seeds * POLICIES
    print(
        f"single runs: {single_s:.2f} s a run, of {options.singles * POLICIES}; {count}: {single_s * count:.0f} s"
    )
    print(f"columns:     {columns_s / count:.2f} s a run; {count}: {columns_s:.0f} s")
    print(f"ratio:       {single_s * count / columns_s:.1f}")


if __name__ == "__main__":
    main()
