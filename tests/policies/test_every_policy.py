"""Every policy × strategy × mode on virtual(4) and on four processes: no torn, shared or runaway model anywhere."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from programs.every_policy import CASES, Case, check

import spawnsim

PROGRAM = Path(__file__).parents[1] / "programs" / "every_policy.py"


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_on_virtual_ranks(case: Case) -> None:
    """Something happens within a few steps, and every rank ends with one whole model of its own."""
    spawnsim.run(lambda comm: check(case, comm), ranks=4)


@pytest.mark.mpi
def test_on_real_ranks(tmp_path: Path) -> None:
    """The same cases, in one job of four processes."""
    line = [sys.executable, "-m", "spawnsim", "run", PROGRAM, "--backend", "mpi", "-n", 4, "--out", tmp_path]
    done = subprocess.run(
        [str(word) for word in line], capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr
    held = Counter(event["case"] for event in spawnsim.Run.load(tmp_path).events if event["kind"] == "held")
    assert held == {" ".join(case): 4 for case in CASES}
