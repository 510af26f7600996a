"""Real users' job: torchgfn trains on its own HyperGrid with our policies, on virtual ranks and under mpiexec."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import spawnsim

STUDY = Path(__file__).parents[2] / "studies" / "gfn_hypergrid.py"
SMALL = {"iterations": 12, "average_every": 3, "hidden": 16, "height": 8}


def on_mpi(out: Path, **parameters: object) -> spawnsim.Run:
    """Run the study on three processes from the command line, as its users do."""
    settings = [f"--set={name}={value}" for name, value in (SMALL | parameters).items()]
    where = ["--backend", "mpi", "-n", "3", "--seed", "7", "--out", str(out)]
    line = [sys.executable, "-m", "spawnsim", "run", str(STUDY), *where, *settings]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    return spawnsim.Run.load(out)


def on_virtual(ranks: int, **parameters: object) -> spawnsim.Run:
    """Run the study on virtual ranks."""
    return spawnsim.run(STUDY, ranks=ranks, seed=7, compute="20 ms", parameters=SMALL | parameters)


def test_the_package_is_the_one_that_users_have() -> None:
    """2.4.1, from the index."""
    assert metadata.version("torchgfn") == "2.4.1"


@pytest.mark.parametrize("policy", ["average", "selective", "one-sided"])
def test_torchgfn_trains_on_virtual_ranks(policy: str) -> None:
    """Every policy exchanges models of torchgfn, logZ included, and modes are found."""
    found = on_virtual(8, policy=policy)
    assert found.totals["iterations"] == SMALL["iterations"]
    assert found.table["averaged_this_iteration"].any()
    assert (found.totals["replacements"] > 0) == (policy != "average")
    assert [event["together"] > 0 for event in found.events if event["kind"] == "modes"] == [True]


def test_torchgfns_own_toolkit_starts_torch_distributed(tmp_path: Path, capfd: Any) -> None:
    """`initialize_distributed_compute("gloo")` of the package, as it is, finds all virtual ranks."""
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, torch.distributed as dist\n"
        "from gfn.utils.distributed import average_models, gather_distributed_data, initialize_distributed_compute\n"
        "found = initialize_distributed_compute('gloo', num_remote_buffers=0, num_agent_groups=1)\n"
        "model = torch.nn.Linear(2, 2)\n"
        "torch.nn.init.constant_(model.weight, float(dist.get_rank()))\n"
        "average_models(model, found.train_global_group)\n"
        "print('mean', found.world_size, model.weight[0, 0].item())\n"
    )
    spawnsim.run(program, ranks=11, options={"prefix": False})
    assert [line for line in capfd.readouterr().out.splitlines() if line.startswith("mean")] == [
        "mean 11 5.0"
    ] * 11


@pytest.mark.mpi
def test_torchgfn_trains_the_same_on_mpi(tmp_path: Path) -> None:
    """Three processes and three virtual ranks average the same models: losses, modes and logZ are the same bits."""
    real = on_mpi(tmp_path, policy="average", gradients=True)
    virtual = on_virtual(3, policy="average", gradients=True)
    for name in ("rank", "iteration", "loss", "logZ", "modes_found"):
        assert real.table[name].tolist() == virtual.table[name].tolist(), name


@pytest.mark.mpi
def test_torchgfn_trains_with_replacement_on_mpi(tmp_path: Path) -> None:
    """Nobody hangs, all ranks end, and ranks are replaced."""
    found = on_mpi(tmp_path, policy="selective", iterations=40)
    assert found.totals["iterations"] == 40
    assert found.totals["replacements"] > 0
