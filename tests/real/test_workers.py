"""Processes that a program starts on real ranks, as loaders do: they find the program, and their ends are their own."""

from __future__ import annotations

import subprocess
import sys
import time
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


def place_of(_):
    return __file__


def by_hand(kind):
    # The status with which a child has ended that acts as the rank would.
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if kind == "raises":
        raise ValueError("in the child")
    if kind == "leaves":
        sys.exit(4)
    raise SystemExit


def main(comm, status: int = 0, methods: str = "fork,spawn"):
    if status and comm.rank == 1 and not os.fork():
        return  # from main, in the child alone
    for method in methods.split(","):
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.map(square, range(5)) == [0, 1, 4, 9, 16]
            assert pool.map(place_of, [0]) == [__file__]
    for method in ("fork", "forkserver") if "forkserver" in methods else ("fork",):
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
        assert [by_hand(kind) for kind in ("raises", "leaves", "goes on")] == [1, 4, 0]
    comm.Barrier()
    time.sleep(0.2)  # in which a signal would be acted upon
    comm.Barrier()
    if comm.rank == 0:
        print("well", sys.flags.optimize, sys.warnoptions)
    if comm.rank == 1 and status:
        sys.exit(status)
"""
IGNORING = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.mpi
@pytest.mark.timeout(180)
@pytest.mark.parametrize("backend", ["mpi", "torch"])
def test_programs_may_start_processes(tmp_path: Path, backend: str) -> None:
    """By each of Python's ways; ranks have the options of the interpreter, and whoever starts them may ignore ends."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "real.py").write_text(PROGRAM)
    (tmp_path / "program.py").symlink_to(tmp_path / "elsewhere" / "real.py")
    line = [sys.executable, *f"-W once -m spawnsim run program.py --backend {backend} -n 2".split()]
    ignoring = [sys.executable, "-c", IGNORING, *line, "--set", "status=3"]
    if backend == "mpi":
        ignoring += ["--set", "methods=fork,spawn,forkserver"]
    ended = subprocess.run(ignoring, cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False)
    assert ended.stdout.startswith("well 0 ['once']\n"), ended
    assert ended.returncode == 3
    assert "spawnsim: rank 1 called sys.exit(3)\n" in ended.stderr


LEFT = """
import multiprocessing
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from spawnsim.errors import RankFailed, Revoked


class Deadly(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        if i == 22:
            os.kill(os.getpid(), 9)
        return torch.tensor(i)


def main(comm, how: str = "raises"):
    if comm.rank == 1:
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,), daemon=True)
        worker.start()
        Path("worker").write_text(str(worker.pid))
    comm.Barrier()
    if comm.rank == 1 and how == "raises":
        raise ValueError("of the rank")
    if comm.rank == 1 and how == "dies":
        os.kill(os.getpid(), 9)
    if comm.rank == 1 and how == "loses a worker":
        for _ in DataLoader(Deadly(), batch_size=4, num_workers=2, persistent_workers=True):
            pass
    try:
        comm.Barrier()
    except (RankFailed, Revoked):
        comm = comm.recover().comm
    print("left", comm.size)
"""


@pytest.mark.mpi
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("backend", "how"),
    [("mpi", "raises"), ("mpi", "loses a worker"), ("mpi", "dies"), ("torch", "raises"), ("torch", "dies")],
)
def test_what_a_rank_has_started_ends_with_it(tmp_path: Path, backend: str, how: str) -> None:
    """Where it ends badly: at once, with its cause. What goes on does so without the dead rank and its workers."""
    (tmp_path / "program.py").write_text(LEFT)
    survives = backend == "mpi" and how == "dies"
    line = [sys.executable, "-m", "spawnsim", "run", "program.py", "--backend", backend, "-n", "3"]
    line += ["--set", f"how={how}", *["--survive"] * survives]
    begin_s = time.monotonic()
    ended = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert time.monotonic() - begin_s < 25, ended  # a deadline takes 30 s
    status, words = {
        "raises": (1, "rank 1 of 3 raised ValueError: of the rank"),
        "loses a worker": (1, "rank 1 of 3 raised "),
        "dies": (0 if survives else 137, "was killed by signal 9 (SIGKILL)"),
    }[how]
    assert ended.returncode == status, ended
    assert words in ended.stderr
    assert how != "raises" or ended.stderr.count("Traceback") == 1
    assert ended.stdout.count("left 2") == (2 if survives else 0)
    worker = Path("/proc", (tmp_path / "worker").read_text(), "stat")
    assert not worker.exists() or worker.read_text().rpartition(")")[2].split()[0] == "Z"


def test_workers_of_virtual_ranks_find_the_program(tmp_path: Path) -> None:
    """They hung, as their pool began ever new ones."""
    (tmp_path / "program.py").write_text(
        "import multiprocessing\n\ndef square(x):\n    return x * x\n\ndef main(comm):\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(square, [comm.rank + 2]))\n"
    )
    line = [sys.executable, "-m", "spawnsim", "run", "program.py", "-n", "2", "--quiet"]
    ended = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.splitlines()[:2] == ["[4]", "[9]"]
