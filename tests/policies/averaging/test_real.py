"""The same program on virtual ranks and under mpiexec: the same groups, the same numbers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spawnsim

PROGRAM = Path(__file__).parent / "programs" / "averaging.py"
pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]


def read(folder: Path) -> list[Any]:
    """Return what each rank wrote."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Run four processes, once for all tests."""
    folder = tmp_path_factory.mktemp("real")
    beside = Path(sys.executable).parent / "mpiexec"
    launcher = str(beside) if beside.exists() else shutil.which("mpiexec") or "mpiexec"
    surroundings = os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }  # fmt: skip
    command = [launcher, "-n", "4", sys.executable, str(PROGRAM), str(folder)]
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return read(folder)


@pytest.fixture(scope="module")
def virtual(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Run four virtual ranks."""
    folder = tmp_path_factory.mktemp("virtual")
    spawnsim.run(PROGRAM, ranks=4, seed=7, parameters={"folder": str(folder)})
    return read(folder)


@pytest.mark.parametrize("case", range(3), ids=["grid", "random, uniform8", "exponential, float16"])
def test_static_groups_are_the_same_everywhere(real: list[Any], virtual: list[Any], case: int) -> None:
    """Groups and values agree to the last bit, compressed or not."""
    assert [each[case] for each in real] == [each[case] for each in virtual]


def test_dynamic_groups_average_on_real_ranks(real: list[Any]) -> None:
    """All four find each other, and end with the mean; halves round up."""
    expected = np.mean([np.random.default_rng(rank).normal(size=1000) for rank in range(4)], axis=0)
    for each in (found[3] for found in real):
        assert each["groups"] == [[0, 1, 2, 3]]
        np.testing.assert_allclose(each["values"][0], expected, atol=1e-12)
        assert each["values"][1] == [0, 2, 3, 5, 6]
