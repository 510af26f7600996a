"""The distributed toolkit on virtual ranks, on MPI, and on torch.distributed: one body of checks for all.

The original was tested with one process (D14); here every check has four ranks.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from programs.toolkit import CHECKS, Check
from torchgfn.toolkit_defects import DEFECTS

import spawnsim
from spawnsim.errors import ParameterError, RankError
from spawnsim.torchgfn import distributed as toolkit

PROGRAM = Path(__file__).parents[1] / "programs" / "toolkit.py"
NAMES = [
    "AsyncSendHandle", "DistributedContext", "DistributedContextMPI4Py", "Group", "_first_env",
    "_get_MPI", "all_gather", "all_reduce", "average_gradients", "average_models", "barrier",
    "broadcast", "default_backend", "gather_distributed_data", "get_rank", "get_world_size",
    "initialize_distributed_compute", "initialize_distributed_compute_mpi4py", "isend", "logger", "recv",
    "report_load_imbalance", "report_time_info", "send",
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_virtual_ranks(check: Check) -> None:
    """Each check passes on four virtual ranks."""
    spawnsim.run(check, ranks=4)


@pytest.mark.mpi
@pytest.mark.parametrize("backend", ["mpi", "torch"])
def test_on_processes(backend: str, tmp_path: Path) -> None:
    """All checks pass on four processes; where no group is given, the backend's world is meant."""
    line = ["run", str(PROGRAM), "--backend", backend, "-n", "4", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "spawnsim", *line], capture_output=True, text=True, check=False, timeout=180
    )
    assert done.returncode == 0, done.stderr
    events = spawnsim.Run.load(tmp_path).events
    passed = Counter(event["check"] for event in events if event["kind"] == "checked")
    assert passed == {check.__name__: 4 for check in CHECKS}


@pytest.mark.parametrize("name", NAMES)
def test_the_names_of_the_original_are_there(name: str) -> None:
    """Importable from `spawnsim.torchgfn.distributed`."""
    assert hasattr(toolkit, name)


def test_a_wrong_place_ends_in_a_clear_error() -> None:
    """Too few places for the ranks, an unknown operation, an unknown backend."""
    import torch

    def gather(comm: object) -> None:
        toolkit.all_gather([torch.ones(1)], torch.ones(1), group=comm)

    with pytest.raises(spawnsim.errors.UsageError, match="1 tensors for the 2 ranks"):
        spawnsim.run(gather, ranks=2)
    for call in (
        lambda comm: toolkit.all_reduce(torch.ones(1), "PROD", group=comm),
        lambda comm: toolkit.barrier("carrier pigeon", comm),
        lambda comm: toolkit.initialize_distributed_compute("smoke", 0, 1, comm=comm),
    ):
        with pytest.raises((RankError, ParameterError), match="choose one of"):
            spawnsim.run(call, ranks=2)


def test_the_environment_is_asked_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first variable that is set and not empty."""
    monkeypatch.setenv("TOOLKIT_B", "")
    monkeypatch.setenv("TOOLKIT_C", "3")
    assert toolkit._first_env("TOOLKIT_A", "TOOLKIT_B", "TOOLKIT_C") == "3"
    assert toolkit._first_env("TOOLKIT_A", default="none") == "none"


def test_one_process_trains_alone() -> None:
    """A job of one rank is a training rank whose groups are the world."""

    def main(comm: object) -> None:
        place = toolkit.initialize_distributed_compute("mpi", 1, 1, comm=comm)
        assert (place.role, place.num_training_ranks, place.get_train_group()) == ("training", 1, comm)
        place.cleanup()

    spawnsim.run(main, ranks=1)


def test_every_defect_of_the_original_has_its_test() -> None:
    """B7 and D1 to D14, each by a test that exists."""
    assert set(DEFECTS) == {"B7", *(f"D{number}" for number in range(1, 15))}
    here = Path(__file__).parent
    text = "\n".join(path.read_text() for path in [PROGRAM, *here.glob("test_*.py")])
    for place in (place for places in DEFECTS.values() for place in places):
        name = place.rpartition("::")[2]
        assert f"def {name.partition('[')[2].rstrip(']') or name}(" in text, place


def test_an_unknown_backend_is_refused_in_the_originals_words() -> None:
    """A ValueError, by each function that takes a backend."""
    for call in (
        lambda: toolkit.get_rank("nccl2"),
        lambda: toolkit.barrier("nccl2"),
        lambda: toolkit.all_reduce(torch.zeros(1), backend="nccl2"),
        lambda: toolkit.isend(torch.zeros(1), 0, "nccl2"),
        lambda: toolkit.initialize_distributed_compute("nccl2", 0, 1),
    ):
        with pytest.raises(ValueError, match="Unknown backend 'nccl2'"):
            call()
