"""One script, under torchrun and on virtual ranks: it prints the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(240)

PROGRAMS = Path(__file__).parent.parent / "programs" / "torchrun"
NUMBER = re.compile(r"-?\d+\.\d+")
EXACT = re.compile(r"\d+ (plain|view|own) \d")


def lines(line: list[str], attempts: int = 1) -> list[str]:
    """Run a launcher's line; return what its ranks have printed, sorted."""
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    for _ in range(attempts):
        done = subprocess.run(
            [sys.executable, "-m", *line],
            capture_output=True,
            text=True,
            check=False,
            env=environ,
            timeout=120,
        )
        if "(SIGABRT)" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr[-4000:]
    return sorted(each for each in done.stdout.splitlines() if each[:1].isdigit())


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("collectives", 3), ("messages", 4), ("ddp", 2), ("ddp", 3), ("ddp", 4), ("optimizers", 4), ("mesh", 4)],
)
def test_torchrun_and_virtual_ranks_print_the_same(name: str, ranks: int, tmp_path: Path) -> None:
    """All lines of all ranks; sums that were made in another order may differ in their last digit."""
    file = str(PROGRAMS / f"{name}.py")
    folders = [[str(tmp_path / each)] if name == "mesh" else [] for each in ("real", "virtual")]
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", file, *folders[0]]
    # Now and then one of gloo's own threads aborts the reference as it ends.
    real = lines(torchrun, attempts=3)
    options = ["--no-prefix", "--quiet", f"--ranks={ranks}"]
    virtual = lines(["spawnsim", "run", file, *options, "--", *folders[1]])
    assert [NUMBER.sub("#", line) for line in virtual] == [NUMBER.sub("#", line) for line in real]
    for ours, theirs in zip(virtual, real, strict=True):
        found, expected = (list(map(float, NUMBER.findall(line))) for line in (ours, theirs))
        limit = 1.5e-3 if "weights" in ours else 1.5e-4
        assert found == pytest.approx(expected, abs=limit), (ours, theirs)
        if EXACT.match(ours):  # the loss of a rank's own, as long as gradients travel as they are
            assert found[0] == pytest.approx(expected[0], rel=1e-6), (ours, theirs)
    assert len(real) > 10
