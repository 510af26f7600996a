"""Ranks that make no call for long: who stands where is said while it lasts, and signals end the run."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import spawnsim
from spawnsim.errors import UnsupportedError
from spawnsim.virtual import stalls

HERE = Path(__file__).name


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let notes come soon."""
    monkeypatch.setattr(stalls, "POLL_S", 0.01)
    monkeypatch.setattr(stalls, "NOTED_S", (0.05, 0.3))


def spin(seconds: float) -> None:
    """Compute."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        sum(range(1000))


def test_a_rank_that_computes_for_ever_is_named_with_its_line(
    soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An endless loop says nothing by itself: notes do, at growing intervals, and change nothing of the run."""
    monkeypatch.setattr(stalls, "BUSY", 0.0)  # a busy machine may give this process no time before the note
    notes: list[str] = []

    def main(comm: spawnsim.Comm) -> None:
        comm.Barrier()
        while comm.rank == 10 and len(notes) < 2:
            pass

    line = main.__code__.co_firstlineno + 2
    with_notes = spawnsim.run(main, ranks=12, on_note=notes.append)
    said = rf"rank 10 has been at {HERE}:({line}|{line + 1}) for \d+ s of real time; no other rank can run "
    assert re.fullmatch(said + r"\(virtual time stands at \S+ s\)", notes[0])
    assert with_notes.totals["digest"] == spawnsim.run(main, ranks=12).totals["digest"]


def test_long_steps_at_one_line_are_reported_once(soon: None) -> None:
    """A program of many long steps is not in trouble."""
    notes: list[str] = []

    def main(comm: spawnsim.Comm) -> None:
        for _ in range(3):
            spin(0.2)
            comm.Barrier()

    spawnsim.run(main, ranks=1, on_note=notes.append)
    assert len({re.sub(r":\d+", "", each) for each in notes}) == 1
    assert len(notes) <= 3  # a loop has several lines


@pytest.mark.parametrize("carrier", ["greenlets", "threads"])
def test_a_rank_that_waits_outside_of_mpi_is_reported_with_advice(
    soon: None, tmp_path: Path, carrier: str
) -> None:
    """It uses no processor: it waits for something, and if that is another rank it waits for ever."""
    reading, writing = os.pipe()
    program = tmp_path / "program.py"
    program.write_text(
        f"from mpi4py import MPI\nimport os\nMPI.COMM_WORLD.Barrier()\nos.read({reading}, 1)\n"
    )
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        if "waiting" in text:
            os.write(writing, b"1")

    spawnsim.run(program, ranks=1, on_note=note, options={"carrier": carrier})
    found = next(each for each in notes if "program.py" in each)
    assert found.startswith(
        "rank 0 has been at program.py:4 for 0 s of real time, waiting; no other rank can run"
    )
    assert "Use real ranks (--backend mpi)" in found
    assert ("--carrier threads" in found) == (carrier == "greenlets")
    os.close(reading)
    os.close(writing)


def test_a_slow_import_is_called_one(soon: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module that the program asks for is named, and not what that imports."""
    (tmp_path / "quick_outside.py").write_text("import slow_inside")
    (tmp_path / "slow_inside.py").write_text("import time\ntime.sleep(0.5)")
    monkeypatch.syspath_prepend(tmp_path)
    notes: list[str] = []

    def main(comm: spawnsim.Comm) -> None:
        import quick_outside  # noqa: F401

    spawnsim.run(main, ranks=1, on_note=notes.append)
    assert notes
    assert all(each.startswith("rank 0 has been importing quick_outside at ") for each in notes)
    assert not any("--backend" in each for each in notes)


def started(tmp_path: Path, text: str, *arguments: str, before: str = "") -> subprocess.Popen[str]:
    """Return a run of a program that has printed "ready"."""
    program = tmp_path / "program.py"
    program.write_text(text)
    line = f"import sys\nfrom spawnsim.virtual import stalls\n{before}\nfrom spawnsim.cli import main\nsys.exit(main())"
    command = [
        sys.executable,
        "-c",
        line,
        "run",
        str(program),
        "--ranks",
        "2",
        "--set",
        "prefix=false",
        *arguments,
    ]
    found = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert found.stdout is not None
    assert found.stdout.readline() == "ready\n"
    return found


IN_C = """
import ctypes
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    print("ready", flush=True)
    {call}
MPI.COMM_WORLD.Barrier()
"""
# Locked twice by one thread: no signal ends that wait.
MUTEX = "lock = ctypes.create_string_buffer(64)\n    for _ in range(2): ctypes.CDLL(None).pthread_mutex_lock(lock)"


def test_a_call_that_keeps_pythons_lock_is_shown_by_its_stack(tmp_path: Path) -> None:
    """No thread of Python runs then, so C prints where all stand."""
    soon = "stalls.NOTED_S, stalls.POLL_S = (0.2,), 0.1"
    run = started(tmp_path, IN_C.format(call="ctypes.PyDLL(None).sleep(2)"), before=soon)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 0
    assert "no_rank_can_run_while_one_call_into_C_lasts" in said
    assert re.search(r'program\.py", line 6 in <module>', said)


@pytest.mark.parametrize("carrier", ["greenlets", "threads"])
def test_a_signal_ends_a_run_whose_rank_stands_in_c(tmp_path: Path, carrier: str) -> None:
    """Where Python's handlers do not run, or a thread takes no note of its end; what was recorded is kept."""
    run = started(tmp_path, IN_C.format(call=MUTEX), "--carrier", carrier)
    time.sleep(0.3)
    run.send_signal(signal.SIGTERM)
    _, said = run.communicate(timeout=30)
    assert run.returncode == 128 + signal.SIGTERM
    assert "spawnsim: stopped by SIGTERM" in said
    assert "Traceback" not in said
    assert ("program.py:7" in said) == (carrier == "greenlets")


def test_a_forked_childs_signal_is_its_own(tmp_path: Path) -> None:
    """It would otherwise end its parent, which has not heard of it."""
    text = (
        "import os, signal, time\nfrom mpi4py import MPI\nprint('ready', flush=True)\nchild = os.fork()\n"
        "if not child:\n    signal.signal(signal.SIGTERM, lambda *_: os._exit(3))\n    while True: pass\n"
        "end = time.clock_gettime(time.CLOCK_MONOTONIC) + 0.3\n"
        "while time.clock_gettime(time.CLOCK_MONOTONIC) < end: pass\n"
        "os.kill(child, signal.SIGTERM)\nprint(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "end += 3.0\nwhile time.clock_gettime(time.CLOCK_MONOTONIC) < end: pass\n"
    )
    run = started(
        tmp_path, text.replace("MPI\nprint", "MPI\nif MPI.COMM_WORLD.rank: raise SystemExit\nprint")
    )
    out, said = run.communicate(timeout=30)
    assert (run.returncode, out.splitlines()[0]) == (0, "3"), said


def test_a_rank_that_would_wait_for_a_connection_is_refused_by_name() -> None:
    """No other rank could make it. What is there already is taken, and a limit is the program's own business."""

    def waits(comm: spawnsim.Comm) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            comm.bcast(listening.getsockname())
            listening.accept()

    with pytest.raises(
        UnsupportedError, match=r"outside of MPI\. Use real ranks \(--backend mpi\)"
    ) as caught:
        spawnsim.run(waits, ranks=2)
    assert HERE in "".join(caught.value.__notes__)

    def ready(comm: spawnsim.Comm) -> None:
        listening: Any = socket.create_server(("127.0.0.1", 0)) if comm.rank == 0 else None
        place = comm.bcast(listening and listening.getsockname())
        if comm.rank:
            with socket.create_connection(place) as made:
                made.sendall(b"hello")
        comm.Barrier()
        if comm.rank == 0:
            with listening, listening.accept()[0] as taken:
                comm.record(heard=taken.recv(5).decode())
            with socket.create_server(("127.0.0.1", 0)) as other:
                other.settimeout(0.01)
                with pytest.raises(TimeoutError):
                    other.accept()

    assert spawnsim.run(ready, ranks=2).table["heard"].tolist() == ["hello"]


def test_sockets_to_outside_work() -> None:
    """A server in a thread that is no rank's, and whoever asks it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for _ in range(3):
                with listening.accept()[0] as taken:
                    taken.sendall(b"hello")

        outside = threading.Thread(target=serve)
        outside.start()

        def main(comm: spawnsim.Comm) -> None:
            with socket.create_connection(listening.getsockname()) as made:
                comm.record(heard=made.recv(5).decode())

        assert spawnsim.run(main, ranks=3).table["heard"].tolist() == ["hello"] * 3
        outside.join()
