"""The monitor of a rank records how the rank has ended, before any other does, and leaves no process behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Timer

import pytest
from support.surviving import processes

from spawnsim.cli.run import _never_began
from spawnsim.errors import RankFailed
from spawnsim.real.launch.launchers import LaunchContext, find_library
from spawnsim.real.launch.processes import children, reap, subreaper
from spawnsim.real.runtime.registry import (
    BEGUN,
    DEAD,
    ENDED,
    KnownDeaths,
    ProcessRegistry,
    ranks_at_stage,
    record_first_end,
    register,
)

KEPT = """
import os, signal, sys, time
from spawnsim.real.launch.processes import monitor
from spawnsim.real.runtime.registry import BEGUN, ENDED, register_stage
started = os.getpid()
monitor(1, os.environ)
print(os.getpid() != started, os.getppid() == started, os.getpgid(0) == os.getpid(), flush=True)
{body}
"""
NO_CORE = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); "
TRAIN = """
import os, signal, sys, time

def main(comm, how, wait_s=0.3):
    comm.Barrier()
    if comm.rank == 1:
        if how == "socket":  # as the kernel does it: the launcher sees the socket closed before the process is dead
            os.close(int(os.environ["PMI_FD"]))
            time.sleep(wait_s)
        if how == "abort":
            comm.Abort(3)
            print("went on", flush=True)  # the library's own comes back, and the launcher kills a moment later
        if how == "left":
            os._exit(7)
        os.kill(os.getppid() if how == "monitor" else os.getpid(), signal.SIGUSR2 if how != "monitor" else 9)
        time.sleep(60)  # the signal comes when it comes
    if how == "two" and comm.rank == 2:
        time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    comm.Barrier()
"""


def started(tmp_path: Path, body: str, **environ: str) -> subprocess.Popen[str]:
    """Start a program under a monitor, as a launcher would."""
    given = os.environ | {"SPAWNSIM_REGISTRY": str(tmp_path)} | environ
    line = [sys.executable, "-c", KEPT.format(body=body), str(tmp_path)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=given)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("register_stage(ENDED, 1, os.environ)", 0, None),
        ("", 0, "left before its program had ended"),
        ("register_stage(ENDED, 1, os.environ); sys.exit('no')", 1, "left with status 1"),
        ("os._exit(9)", 9, "left with status 9"),
    ],
)
def test_a_monitored_rank_ends_with_its_own_status(
    tmp_path: Path, body: str, status: int, said: str | None
) -> None:
    """It is a child in a process group of its own; its monitor ends as it does, and tells of any end but a good one."""
    monitor = started(tmp_path, body)
    out, _ = monitor.communicate(timeout=30)
    assert (monitor.returncode, out) == (status, "True True True\n")
    registry, environ = ProcessRegistry(tmp_path), {"SPAWNSIM_REGISTRY": str(tmp_path)}
    found = registry.first_end()
    assert (found and found[0], found and found[1].partition(") ")[2]) == (said and (status or 122), said)
    assert ranks_at_stage(DEAD, environ) == KnownDeaths(environ)() == ({1} if said else set())
    assert (registry.rank_of(monitor.pid), registry.ranks, registry.launchers) == ("1", {1}, [os.getpid()])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1])
def test_a_death_is_reported_once(tmp_path: Path, number: int) -> None:
    """The record names rank, process, node and signal; on a node that cannot reach it, a line does."""
    body = f"{NO_CORE}os.kill(os.getpid(), {number:d})"
    monitor = started(tmp_path, body)
    assert (monitor.communicate(timeout=30)[1], monitor.returncode) == ("", 128 + number)
    reported = ProcessRegistry(tmp_path).first_end()
    assert reported is not None
    assert reported[0] == 128 + number
    sentence = rf"rank 1 \(process \d+ on {os.uname().nodename}\) was killed by signal {number:d} \(SIG\w+\)"
    assert re.fullmatch(sentence, reported[1])
    assert record_first_end(9, "later", {}) is None
    assert record_first_end(9, "later", {"SPAWNSIM_REGISTRY": str(tmp_path)}) is False
    assert ProcessRegistry(tmp_path).first_end() == reported
    far = started(tmp_path, body, SPAWNSIM_REGISTRY=f"{tmp_path}/nowhere")
    spoken = rf"\[spawnsim monitor\] {128 + number} {sentence}\n"
    assert re.fullmatch(spoken, far.communicate(timeout=30)[1])
    assert far.returncode == 128 + number


@pytest.mark.parametrize("begun", [True, False])
def test_a_death_ends_a_job_that_survives_if_the_program_had_not_begun(tmp_path: Path, begun: bool) -> None:
    """Else a line tells of it, survivors can read who it was, and the launcher sees nothing amiss."""
    stage = "register_stage(BEGUN, 1, os.environ); " if begun else ""
    monitor = started(tmp_path, f"{stage}os.kill(os.getpid(), 9)", SPAWNSIM_SURVIVE="1")
    said, found = monitor.communicate(timeout=30)[1], ProcessRegistry(tmp_path).first_end()
    assert ranks_at_stage(DEAD, {"SPAWNSIM_REGISTRY": str(tmp_path)}) == {1}
    if begun:
        assert (said.count("spawnsim: rank 1"), monitor.returncode, found) == (1, 0, None)
    else:
        assert (said, monitor.returncode, found and found[0]) == ("", 137, 137)
        assert "before its program had begun: no job survives that" in (found or (0, ""))[1]


def test_a_rank_that_cannot_begin_leaves_the_word_to_the_keeper_of_the_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its peers see the closed connection sooner than the monitor sees the death."""
    monkeypatch.setenv("SPAWNSIM_REGISTRY", str(tmp_path))
    environ = {"SPAWNSIM_REGISTRY": str(tmp_path)}
    later = Timer(0.1, record_first_end, (137, "rank 0 was killed", environ))
    later.start()
    assert (
        _never_began(RankFailed((), "allgather: a rank has gone"), LaunchContext("torchrun", 1, 2, "")) == 122
    )
    assert (ProcessRegistry(tmp_path).first_end(), capsys.readouterr().err) == (
        (137, "rank 0 was killed"),
        "",
    )
    later.join()


def test_who_writes_the_record_again_does_not_change_it(tmp_path: Path) -> None:
    """Nor does it look like a first one."""
    environ = {"SPAWNSIM_REGISTRY": str(tmp_path)}
    assert [record_first_end(status, f"at {status}", environ) for status in (3, 5, 7)] == [True, False, False]
    assert ProcessRegistry(tmp_path).first_end() == (3, "at 3")
    assert not ProcessRegistry(tmp_path).ranks
    assert not ProcessRegistry(tmp_path).ended_well
    (tmp_path / f"{ENDED} 2").touch()
    (tmp_path / f"{BEGUN} 12").touch()
    assert (ProcessRegistry(tmp_path).ended_well, ProcessRegistry(tmp_path).begun) == (True, {12})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_reach_the_rank(tmp_path: Path, number: int) -> None:
    """Whoever signals the launcher's process means the rank."""
    body = f"signal.signal({number:d}, lambda *_: sys.exit(5)); print('ready', flush=True); time.sleep(30)"
    monitor = started(tmp_path, body)
    assert monitor.stdout is not None
    assert [monitor.stdout.readline() for _ in range(2)][1] == "ready\n"
    monitor.send_signal(number)
    assert monitor.wait(timeout=30) == 5
    monitor.communicate()


def test_a_rank_that_is_stopped_reports_that_it_was_asked_to_stop(tmp_path: Path) -> None:
    """And whoever dies because it was told so is no first death."""
    monitor = started(tmp_path, "os.kill(os.getpid(), signal.SIGSTOP)")
    assert monitor.stdout is not None
    assert monitor.stdout.readline()
    (rank,) = children(monitor.pid)
    end_s = time.monotonic() + 20
    while " T " not in Path(f"/proc/{rank}/stat").read_text() and time.monotonic() < end_s:
        time.sleep(0.01)
    monitor.send_signal(signal.SIGTERM)
    assert monitor.wait(timeout=30) == 143
    monitor.communicate()
    assert ProcessRegistry(tmp_path).first_end() is None


def test_a_rank_ends_with_its_launcher(tmp_path: Path) -> None:
    """Whatever part of the launcher had started the monitor: without it nobody else would end the rank."""
    given = os.environ | {"SPAWNSIM_REGISTRY": str(tmp_path)}
    body = KEPT.format(
        body="signal.signal(signal.SIGTERM, lambda *_: sys.exit(6)); print('up', flush=True); time.sleep(60)"
    )
    start = (
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', sys.argv[1]]); time.sleep(60)"
    )
    with subreaper():
        line = [sys.executable, "-c", start, body]
        launcher = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=given)
        assert launcher.stdout is not None
        assert [launcher.stdout.readline() for _ in range(2)][1] == "up\n"
        launcher.kill()
        launcher.wait()
        reap(ProcessRegistry(tmp_path).processes)
    launcher.stdout.close()
    text = f"the launcher's process {launcher.pid}, which had started rank 1, has died"
    assert ProcessRegistry(tmp_path).first_end() == (122, text)


def test_a_rank_dies_with_its_keeper_and_is_seen_off(tmp_path: Path) -> None:
    """A launcher that kills the monitor has killed the rank; whoever adopts orphans leaves no zombie."""
    with subreaper():
        monitor = started(tmp_path, "print(os.getpid(), flush=True); time.sleep(60)")
        assert monitor.stdout is not None
        rank = int([monitor.stdout.readline() for _ in range(2)][1])
        register(1, {"SPAWNSIM_REGISTRY": str(tmp_path)}, rank)
        monitor.kill()
        monitor.communicate(timeout=30)
        reap([rank])
    assert not Path(f"/proc/{rank}").exists()
    assert ProcessRegistry(tmp_path).first_end() is None


def test_what_does_not_end_by_itself_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody else's process is touched."""
    monkeypatch.setattr("spawnsim.real.launch.processes.PATIENCE_S", 0.05)
    child = subprocess.Popen(["sleep", "60"])
    reap([os.getppid(), child.pid, 2**22 + 1])
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
        ("abort", 3, r"spawnsim: (rank 1 .* left with status 3|the launcher has ended with status 3: .*)\n"),
        ("left", 7, r"spawnsim: rank 1 \(process \d+ on .*\) left with status 7\n"),
        (
            "monitor",
            137,
            r"spawnsim: (a rank's monitor|rank 1 .*) was killed by signal 9 \(SIGKILL\)\n",
        ),
    ],
)
def test_the_first_death_is_the_one_that_is_reported(
    tmp_path: Path, how: str, status: int, said: str
) -> None:
    """Not the ones that MPICH's launcher brings about, and these leave nobody behind either."""
    if how == "socket" and find_library().name != "MPICH":
        how = "two"  # Open MPI's ranks have no such socket
        status = 0
    file = tmp_path / "train.py"
    file.write_text(TRAIN)
    line = [sys.executable, *f"-m spawnsim run {file} --backend mpi -n 3 --set how={how}".split()]
    begin_s = time.monotonic()
    ended = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert re.fullmatch(said, ended.stderr), ended
    assert (ended.returncode, ended.stdout) == (
        status or 128 + int(re.findall(r"signal (\d+)", ended.stderr)[0]),
        "",
    )
    assert time.monotonic() - begin_s < 20
    assert processes(str(file)) == []
