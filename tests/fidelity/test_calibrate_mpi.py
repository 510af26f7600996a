"""The two commands on a real MPI: calibrate writes a platform that loads, validate compares a run on it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from spawnsim.models.platform import load_platform
from spawnsim.real.launch.launchers import find_library, flags

pytestmark = pytest.mark.mpi

PROGRAM = """
import numpy as np

def main(comm, iterations=40):
    own, total = np.ones(1000), np.empty(1000)
    for _ in range(iterations):
        with comm.compute():
            np.linalg.eigvals(np.eye(60))
        comm.Allreduce(own, total)
"""


def _on_two_ranks(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    library = find_library()
    line = [library.mpiexec, *flags(library, 2), "-n", "2", sys.executable, "-m", "spawnsim", *arguments]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=240, check=False)


def test_a_real_communicator_is_calibrated(tmp_path: Path) -> None:
    """The file loads, names its software, draws its picture; on a machine too busy to measure there is none."""
    command = ("calibrate", "--quick", "--out", "here.toml", "--picture", "fit.png")
    for _ in range(2):
        done = _on_two_ranks(*command, folder=tmp_path)
        if "measure again" not in done.stderr:  # others compute here, too: it does as it is told
            break
    else:
        assert done.returncode == 122, done.stderr
        assert "fit no network" in done.stderr and "no file was written" in done.stderr
        assert not (tmp_path / "here.toml").exists()
        return
    assert done.returncode == 0, done.stderr
    platform = load_platform(tmp_path / "here.toml")
    assert dict(platform.fitted)["ranks"] == "2"
    assert 1e-8 < platform.network.cost(0, 1, 8).flight_s < 0.1
    assert "held out" in done.stdout
    assert (tmp_path / "fit.png").stat().st_size > 10_000


def test_runs_of_a_real_communicator_are_predicted(tmp_path: Path) -> None:
    """Both runs, with all measures and models, and a picture."""
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    done = _on_two_ranks(
        "validate", "train.py", "--platform", "laptop", "--set", "iterations=20,30", "--json", "--picture",
        "errors.png", folder=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    cases = json.loads(done.stdout)["cases"]
    assert [case["name"] for case in cases] == ["2 ranks, iterations=20", "2 ranks, iterations=30"]
    assert (tmp_path / "errors.png").stat().st_size > 10_000
    rows = {row["measure"]: row for row in cases[1]["rows"]}
    assert set(rows) == {"iteration", "policy", "waiting share", "total"}
    assert set(rows["total"]["errors"]) == {"replayed", "fitted", "constant"}
    assert rows["total"]["measured"] > 0.0


def test_one_message_for_all_ranks(tmp_path: Path) -> None:
    """A file that is not there is one line, not one per rank."""
    done = _on_two_ranks("validate", "nosuch.py", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("cannot read nosuch.py") == 1
