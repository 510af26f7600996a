"""Processes that a program starts on real ranks, as loaders do: they find the program, and their ends are their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import multiprocessing
import os
import signal
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, i):
        return torch.tensor(i) ** 2


def square(x):
    return x * x


def main(comm, status: int = 0):
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.map(square, range(5)) == [0, 1, 4, 9, 16]
    for method in ("fork", "forkserver"):
        batches = DataLoader(Squares(), batch_size=5, num_workers=1, multiprocessing_context=method)
        assert sum(int(each.sum()) for each in batches) == 2470
    if comm.rank == 1:  # by a signal to stop, which is none for the rank
        for number, code, after_s in ((signal.SIGTERM, -15, 0), (signal.SIGTERM, -15, 0.2), (signal.SIGINT, 1, 0.5)):
            worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            worker.start()
            time.sleep(after_s)
            os.kill(worker.pid, number)
            worker.join(30)
            assert worker.exitcode == code, worker.exitcode
    comm.Barrier()
    time.sleep(0.2)  # in which a signal would be acted upon
    comm.Barrier()
    if comm.rank == 0:
        print("well", sys.flags.optimize, sys.warnoptions)
    if comm.rank == 1 and status:
        sys.exit(status)
"""
IGNORING = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"


@pytest.mark.mpi
@pytest.mark.timeout(180)
@pytest.mark.parametrize("backend", ["mpi", "torch"])
def test_programs_may_start_processes(tmp_path: Path, backend: str) -> None:
    """By each of Python's ways; ranks have the options of the interpreter, and whoever starts them may ignore ends."""
    (tmp_path / "program.py").write_text(PROGRAM)
    line = [
        sys.executable,
        "-W",
        "once",
        "-m",
        "spawnsim",
        "run",
        "program.py",
        "--backend",
        backend,
        "-n",
        "2",
    ]
    ignoring = [sys.executable, "-c", IGNORING, *line, "--set", "status=3"]
    ended = subprocess.run(ignoring, cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False)
    assert ended.stdout.startswith("well 0 ['once']\n"), ended
    assert ended.returncode == 3
    assert "spawnsim: rank 1 called sys.exit(3)\n" in ended.stderr
