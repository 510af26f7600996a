"""Running programs in which ranks die on real ranks, and looking at what the survivors recorded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spawnsim import Run

PROGRAM = Path(__file__).parents[1] / "real" / "survivors.py"
DEADLINE_S = 1.5


@dataclass(frozen=True)
class Ended:
    """How a job ended, what its ranks recorded, and what they said."""

    status: int
    err: str
    run: Run
    shared: set[str]

    def column(self, name: str, number: int = -1) -> dict[int, Any]:
        """Return what each rank recorded under a name, last or in its row of this number."""
        found: dict[int, list[Any]] = {}
        for rank, value in zip(self.run.table["rank"].tolist(), self.run.table[name].tolist(), strict=True):
            found.setdefault(rank, []).append(value)
        return {rank: values[number] for rank, values in found.items() if number < len(values)}

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return all events of a kind."""
        return [event for event in self.run.events if event["kind"] == kind]


Survive = Callable[..., Ended]


@pytest.fixture
def survive(tmp_path: Path) -> Survive:
    """Run a case on n ranks: `survive("at_once", n=4)`; a job that hangs is ended, and nothing may be left running."""

    def run(
        case: str = "", at: str = "", *, n: int = 4, program: Path = PROGRAM, deadline_s: float = DEADLINE_S,
        given: Mapping[str, object] | None = None,
    ) -> Ended:  # fmt: skip
        out = tmp_path / "run"
        chosen = {"case": case, "at": at} | dict(given or {})
        command = [
            sys.executable, "-m", "spawnsim", "run", str(program), "--backend", "mpi", "-n", str(n), "--survive",
            "--quiet", "--deadline", str(deadline_s), "--out", str(out), *_settings(chosen),
        ]  # fmt: skip
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=_environment()) as started:
            shared = set[str]()
            err = _watched(started, str(out), shared)
        assert processes(str(out)) == []
        return Ended(started.returncode, err, Run.load(out), {name for name in shared if Path(name).exists()})

    return run


def _settings(chosen: Mapping[str, object]) -> list[str]:
    return [word for name, value in chosen.items() if value != "" for word in ("--set", f"{name}={value}")]


def _watched(started: subprocess.Popen[str], word: str, shared: set[str]) -> str:
    """Return what a job has said on standard error; note the shared memory that its processes have names for."""
    end_s = time.monotonic() + 100
    while time.monotonic() < end_s:
        for process in processes(word):
            shared |= _mapped(process)
        try:
            return started.communicate(timeout=0.2)[1]
        except subprocess.TimeoutExpired:
            continue
    started.send_signal(signal.SIGTERM)
    pytest.fail(f"the job hung\n{started.communicate()[1]}")


def _mapped(process: int) -> set[str]:
    try:
        lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    except OSError:  # it has just ended
        return set()
    return {line.split()[-1] for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")}


def _environment() -> dict[str, str]:
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
    return os.environ | allowed


def processes(word: str) -> list[int]:
    """Return the processes, this one aside, whose command line has a word."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes()
        except OSError:  # it has just ended
            continue
        if word.encode() in words and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def went_on(ended: Ended, *, dead: set[int], n: int = 4) -> None:
    """The survivors have finished, on a communicator without the dead, and so has the job."""
    assert ended.status == 0, ended.err
    assert ended.run.outcome == "finished"
    assert ended.column("size") == {rank: n - len(dead) for rank in range(n) if rank not in dead}, ended.err
