"""`initialize_distributed_compute` starts torch.distributed itself, whoever has started the ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import spawnsim

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(180)]

PROGRAM = Path(__file__).parents[1] / "programs" / "starting.py"
MPIEXEC = [str(Path(sys.executable).with_name("mpiexec")), "-n", "3", sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize(("line", "size"), [(MPIEXEC, 3), (TORCHRUN, 2)], ids=["mpiexec", "torchrun"])
def test_a_program_that_only_a_launcher_has_started(line: list[str], size: int) -> None:
    """Groups that DistributedDataParallel takes, twice in one process; backends that are not here are refused."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*line, str(PROGRAM), str(size)], capture_output=True, text=True, check=False, timeout=150, env=env
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == size


def test_virtual_ranks_enter_torch_distributed_too(capfd: pytest.CaptureFixture[str]) -> None:
    """The same program, unmodified: its groups are torch's there, too."""
    spawnsim.run(PROGRAM, ranks=3, argv=["3"], options={"prefix": False})
    assert capfd.readouterr().out.count("done") == 3
