"""A rank's keeper knows how the rank has really ended, says it first, and leaves nobody behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from surviving import processes

from spawnsim.real.launching.launch import find_library
from spawnsim.real.launching.orphans import adopted, see_off
from spawnsim.real.launching.roll import FIRST_DEATH, FIRST_EXIT, Roll, sign, sign_first

KEPT = """
import os, signal, sys, time
from spawnsim.real.launching.keeper import keep
started = os.getpid()
keep(1, os.environ)
print(os.getpid() != started, os.getppid() == started, os.getpgid(0) == os.getpid(), flush=True)
{body}
"""
TRAIN = """
import os, signal, sys, time

def main(comm, how, wait_s=0.3):
    comm.Barrier()
    if comm.rank == 1:
        if how == "socket":  # as the kernel does it: the launcher sees the socket closed before the process is dead
            os.close(int(os.environ["PMI_FD"]))
            time.sleep(wait_s)
        if how == "abort":
            from mpi4py import MPI
            MPI.COMM_WORLD.Abort(3)
        if how == "left":
            os._exit(7)
        os.kill(os.getppid() if how == "keeper" else os.getpid(), signal.SIGUSR2 if how != "keeper" else 9)
        time.sleep(60)  # the signal comes when it comes
    if how == "two" and comm.rank == 2:
        time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    comm.Barrier()
"""


def started(tmp_path: Path, body: str, **environ: str) -> subprocess.Popen[str]:
    """Start a program that is kept, as MPICH's launcher would."""
    given = os.environ | {"SPAWNSIM_ROLL": str(tmp_path), "PMI_FD": "9"} | environ
    line = [sys.executable, "-c", KEPT.format(body=body), str(tmp_path)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=given)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("", 0),
        ("sys.exit(7)", 7),
        ("sys.exit('no')", 1),
        ("os._exit(9)", 9),
        ("1 / 0", 1),
        ("sys.stdout.close()", 0),
    ],
)
def test_a_kept_rank_ends_with_its_own_status(tmp_path: Path, body: str, status: int) -> None:
    """The rank is a child in a process group of its own, and its keeper ends as it does."""
    keeper = started(tmp_path, body)
    out, _ = keeper.communicate(timeout=30)
    assert (keeper.returncode, out) == (status, "True True True\n")
    left = Roll(tmp_path).first(FIRST_EXIT)
    assert (left or (0, ""))[0] == status
    assert Roll(tmp_path).first(FIRST_DEATH) is None
    assert (Roll(tmp_path).rank_of(keeper.pid), Roll(tmp_path).kept) == ("1", True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGUSR1])
def test_a_death_is_told_once(tmp_path: Path, number: int) -> None:
    """The record names rank, process, node and signal; where ranks survive each other, a line does, and all is well."""
    body = (
        f"import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.kill(os.getpid(), {number:d})"
    )
    keeper = started(tmp_path, body)
    assert (keeper.communicate(timeout=30)[1], keeper.returncode) == ("", 128 + number)
    told = Roll(tmp_path).first(FIRST_DEATH)
    assert told is not None
    assert told[0] == 128 + number
    sentence = rf"rank 1 \(process \d+ on {os.uname().nodename}\) was killed by signal {number:d} \(SIG\w+\)"
    assert re.fullmatch(sentence, told[1])
    assert not sign_first(FIRST_DEATH, 9, "later", {})
    assert sign_first(FIRST_DEATH, 9, "later", {"SPAWNSIM_ROLL": str(tmp_path)})
    assert Roll(tmp_path).first(FIRST_DEATH) == told
    far = started(tmp_path, body, SPAWNSIM_ROLL=f"{tmp_path}/nowhere")
    assert re.fullmatch(rf"\[spawnsim keeper\] {sentence}\n", far.communicate(timeout=30)[1])
    survives = started(tmp_path, body, SPAWNSIM_SURVIVE="1")
    assert re.fullmatch(rf"spawnsim: {sentence}\n", survives.communicate(timeout=30)[1])
    assert (far.returncode, survives.returncode) == (128 + number, 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_reach_the_rank(tmp_path: Path, number: int) -> None:
    """Whoever signals the launcher's process means the rank."""
    body = f"signal.signal({number:d}, lambda *_: sys.exit(5)); print('ready', flush=True); time.sleep(30)"
    keeper = started(tmp_path, body)
    assert keeper.stdout is not None
    assert [keeper.stdout.readline() for _ in range(2)][1] == "ready\n"
    keeper.send_signal(number)
    assert keeper.wait(timeout=30) == 5
    keeper.communicate()


def test_a_rank_dies_with_its_keeper_and_is_seen_off(tmp_path: Path) -> None:
    """A launcher that kills the keeper has killed the rank; whoever adopts orphans leaves no zombie."""
    with adopted():
        keeper = started(tmp_path, "print(os.getpid(), flush=True); time.sleep(60)")
        assert keeper.stdout is not None
        rank = int([keeper.stdout.readline() for _ in range(2)][1])
        sign(1, {"SPAWNSIM_ROLL": str(tmp_path)}, rank)
        keeper.kill()
        keeper.communicate(timeout=30)
        see_off([rank])
    assert not Path(f"/proc/{rank}").exists()
    assert Roll(tmp_path).first(FIRST_DEATH) is None


def test_what_does_not_end_by_itself_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody else's process is touched."""
    monkeypatch.setattr("spawnsim.real.launching.orphans.PATIENCE_S", 0.05)
    child = subprocess.Popen(["sleep", "60"])
    see_off([os.getppid(), child.pid, 2**22 + 1])
    assert not Path(f"/proc/{child.pid}").exists()
    assert child.wait() == 0  # somebody else has heard of its end


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("socket", 140, r"spawnsim: rank 1 \(process \d+ on .*\) was killed by signal 12 \(SIGUSR2\)\n"),
        (
            "two",
            0,
            r"spawnsim: rank [12] \(process \d+ on .*\) was killed by signal (12 \(SIGUSR2|9 \(SIGKILL)\)\n",
        ),
        ("abort", 3, ""),
        ("left", 7, r"spawnsim: rank 1 \(process \d+ on .*\) left with status 7\n"),
        ("keeper", 137, r"spawnsim: a rank and its keeper were killed by signal 9 \(SIGKILL\)\n"),
    ],
)
def test_the_first_death_is_the_one_that_is_told(tmp_path: Path, how: str, status: int, said: str) -> None:
    """Not the ones that MPICH's launcher brings about, and these leave nobody behind either."""
    if find_library().name != "MPICH":
        pytest.skip("Open MPI's launcher names the rank itself")
    file = tmp_path / "train.py"
    file.write_text(TRAIN)
    line = [
        sys.executable,
        "-m",
        "spawnsim",
        "run",
        str(file),
        "--backend",
        "mpi",
        "-n",
        "3",
        "--set",
        f"how={how}",
    ]
    begin_s = time.monotonic()
    ended = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert re.fullmatch(said, ended.stderr), ended
    assert (ended.returncode, ended.stdout) == (
        status or 128 + int(re.findall(r"signal (\d+)", ended.stderr)[0]),
        "",
    )
    assert time.monotonic() - begin_s < 20
    assert processes(str(file)) == []
