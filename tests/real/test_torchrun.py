"""One script, under torchrun and on virtual ranks: it prints the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import spawnsim

PROGRAMS = Path(__file__).parent.parent / "programs" / "torchrun"
NUMBER = re.compile(r"-?\d+\.\d+")
EXACT = re.compile(r"\d+ (plain|view|own) \d")
CASES = (
    *(("collectives", 3), ("messages", 4), ("ddp", 2), ("ddp", 3), ("ddp", 4)),
    *(("optimizers", 4), ("mesh", 4), ("sharding", 2), ("sharding", 4), ("groups", 3)),
)


@pytest.fixture(scope="module")
def real(tmp_path_factory: Any) -> Path:
    """Return the folder of what all programs print under torchrun: one launch, since each loads torch on each rank."""
    folder: Path = tmp_path_factory.mktemp("torchrun")
    reported = [f"{name}:{ranks}" + f",{folder / 'saved'}" * (name == "mesh") for name, ranks in CASES]
    line = [
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=4",
        PROGRAMS / "several.py",
        folder,
        *reported,
    ]
    done = subprocess.run(
        [sys.executable, "-m", *map(str, line)], capture_output=True, text=True, check=False, timeout=230,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_torchrun_and_virtual_ranks_print_the_same(
    name: str, ranks: int, real: Path, tmp_path: Path, capfd: Any
) -> None:
    """All lines of all ranks; sums that were made in another order may differ in their last digit."""
    printed = [(real / f"{name}:{ranks}.{rank}").read_text().splitlines() for rank in range(ranks)]
    theirs = sorted(line for each in printed for line in each if line[:1].isdigit())
    capfd.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of what is old
        spawnsim.run(
            PROGRAMS / f"{name}.py",
            ranks=ranks,
            argv=[str(tmp_path)] * (name == "mesh"),
            options={"prefix": False},
        )
    ours = sorted(line for line in capfd.readouterr().out.splitlines() if line[:1].isdigit())
    assert [NUMBER.sub("#", line) for line in ours] == [NUMBER.sub("#", line) for line in theirs]
    for line, expected_line in zip(ours, theirs, strict=True):
        found, expected = (list(map(float, NUMBER.findall(each))) for each in (line, expected_line))
        limit = 1.5e-3 if "weights" in line else 1.5e-4
        assert found == pytest.approx(expected, abs=limit), (line, expected_line)
        if EXACT.match(line):  # the loss of a rank's own, as long as gradients travel as they are
            assert found[0] == pytest.approx(expected[0], rel=1e-6), (line, expected_line)
    assert len(theirs) > 10
