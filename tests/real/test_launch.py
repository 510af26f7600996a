"""Starting ranks, and recognising who has started this process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from spawnsim.errors import ParameterError, UnsupportedError
from spawnsim.real import launch
from spawnsim.real.launch import Library, command, find_library, flags, one_node, recognise


@pytest.mark.parametrize(
    ("environ", "launcher", "rank", "size"),
    [
        ({}, "none", 0, 1),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, "mpiexec (Open MPI)", 3, 4),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "mpiexec (MPICH)", 1, 2),
        ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8"}, "srun", 5, 8),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "torchrun", 1, 2),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, "none", 0, 1),  # a batch script's own shell is no rank
    ],
)
def test_launchers_are_recognised(environ, launcher, rank, size):
    """Each launcher's variables say which rank this is."""
    here = recognise(environ)
    assert (here.launcher, here.rank, here.size) == (launcher, rank, size)


@pytest.mark.parametrize(
    "environ",
    [{"RANK": "1"}, {"RANK": "1", "WORLD_SIZE": "2"}, {"PMI_RANK": "x", "PMI_SIZE": "2"}, {"PMI_RANK": "0"}],
)
def test_half_a_launcher_is_an_error_that_says_what_was_seen(environ):
    """Guessing a rank would start the program twice."""
    with pytest.raises(ParameterError, match=next(iter(environ))):
        recognise(environ)


def test_flags_are_those_that_each_mpi_needs(monkeypatch):
    """MPICH needs none; Open MPI is told about root, too many ranks, and its transports."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    ours, theirs = Library("MPICH", "mpiexec", ""), Library("Open MPI", "mpiexec", "")
    assert flags(ours, 64) == []
    assert flags(ours, 4, survive=True) == ["-disable-auto-cleanup"]
    assert {"--allow-run-as-root", "--oversubscribe", "self,sm"} <= set(flags(theirs, 4))
    assert flags(theirs, 2, survive=True)[:2] == ["--with-ft", "ulfm"]
    assert not one_node({"SLURM_JOB_NUM_NODES": "2"})


def test_a_missing_mpi_is_one_clear_error(monkeypatch):
    """The message says what to install."""
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"pip install 'spawnsim\[mpi\]'"):
        find_library()


def test_the_torch_backend_is_started_by_torchrun():
    """`--backend torch` needs no MPI."""
    line = command("train.py", 4, ["--backend", "torch"])
    assert line[:3] == [sys.executable, "-m", "spawnsim.real.torchrun"]
    assert line[-6:] == ["-m", "spawnsim", "run", "train.py", "--backend", "torch"]


@pytest.mark.mpi
def test_a_job_is_started_and_its_status_comes_back(tmp_path):
    """`launch` returns what the ranks' program ended with."""
    file = tmp_path / "train.py"
    file.write_text(
        "def main(comm):\n    assert comm.allreduce(1) == 2\n    if comm.rank: raise ValueError('no')\n"
    )
    starting = f"sys.exit(launch({str(file)!r}, 2, ['--backend', 'mpi']))"
    program = f"import sys; from spawnsim.real.launch import launch; {starting}"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1, ended
    assert ended.stderr.count("ValueError: no") == 1
