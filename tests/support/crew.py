"""Ranks that stay for many tests: each text that they are given runs on a communicator of its own.

Starting four ranks with torch takes seconds of every core, most texts take milliseconds. A text may choose `OPTIONS`
of the world that it runs in, and by the name `WORLD` one that other texts leave alone. A text that fails on a rank ends
the job, as any program does that raises; the next text gets new ranks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

MEMBER = """
import itertools, os, sys, time, warnings
from contextlib import ExitStack
from pathlib import Path
from spawnsim.real.{backend} import Options, guarded, world
warnings.filterwarnings("ignore", "NCCL is not used, because .* ranks share the GPU")  # a machine with one for all
FOLDER, TESTS = Path(sys.argv[1]), int(sys.argv[2])

def texts():
    # files, since a rank that waits in MPI would keep a core busy
    for number in itertools.count():
        text = FOLDER / f"{{number}}.py"
        while not text.exists():
            os.kill(TESTS, 0)  # an error when the tests are no more
            if (FOLDER / "over").exists():
                return
            time.sleep(0.05)
        yield text

with ExitStack() as open_world:
    comm = current = None
    for text in texts():
        scope = {{"__name__": "text"}}
        exec(compile(text.read_text(), text, "exec"), scope)
        kind = scope.get("WORLD", ""), scope.get("OPTIONS") or Options()
        if kind != current:  # one at a time: each has a thread that looks around
            open_world.close()
            comm, current = open_world.enter_context(guarded(world(seed=7, deadline_s=30, options=kind[1]))), kind
        own = comm.Dup()
        scope["main"](own)
        own.Free()
        text.with_suffix(f".{{own.rank}}").touch()
"""

LATE_RECEIVES = """
if rank == 0: comm.send(1, 1, 3)
comm.Barrier()
if rank == 1:
    calls = (lambda: comm.Recv(bytearray(1), 0, 4), lambda: comm.recv(source=0, tag=4), lambda: comm.Probe(0, 4))
    for receive in calls:
        try:
            with comm.clock.deadline(0.2): receive()
        except Timeout as late:
            assert "from rank 0, tag 4, missed its deadline of 0.2 s" in str(late), late
            assert "; a message from rank 0 with tag 3 is not received" in str(late), late
        else:
            raise AssertionError("no deadline")
    assert comm.recv(source=0, tag=3) == 1
comm.Barrier()
"""


def first(n: int) -> str:
    """Return the head of a `main(comm)` for the first n ranks alone."""
    return f"""
def main(comm):
    comm = comm.Split(0 if comm.rank < {n} else UNDEFINED) if comm.size > {n} else comm
    if comm is None:
        return
    rank, size = comm.rank, comm.size
"""


class Crew:
    """Ranks that a launcher starts once, and what tests ask of them."""

    def __init__(
        self, line: Sequence[str], member: str, *, n: int, folder: Path, env: dict[str, str]
    ) -> None:
        """Start `line program` with the text of a member's program."""
        self.n, self.folder, self.err = n, folder, folder / "err"
        self.asked, self.failed = 0, False
        program = folder / "program.py"
        program.write_text(member)
        with self.err.open("w") as sink:
            given = [*line, str(program), str(folder), str(os.getpid())]
            kind = {"stdin": subprocess.DEVNULL, "stdout": sink, "stderr": sink, "start_new_session": True}
            self.job = subprocess.Popen(given, **kind, cwd=folder, env=env)

    def run(self, text: str, limit_s: float = 60.0) -> None:
        """Let every rank run a text, which defines `main(comm)`; the test fails where a rank does."""
        new, self.asked = self.folder / f"{self.asked}.py", self.asked + 1
        done = [new.with_suffix(f".{rank}") for rank in range(self.n)]
        new.with_suffix(".new").write_text(text)
        new.with_suffix(".new").rename(new)  # they see all of it or none
        end = time.monotonic() + limit_s
        while not all(file.exists() for file in done):
            if self.job.poll() is not None or time.monotonic() > end:
                self._fail("ended" if self.job.returncode is not None else "hung")
            time.sleep(0.01)

    def dismiss(self) -> None:
        """Let the ranks part: their job ends well, and they have said nothing."""
        (self.folder / "over").touch()
        try:
            self.job.wait(60.0)
        except subprocess.TimeoutExpired:
            self._fail("did not end")
        if self.job.returncode or self.err.read_text():
            self._fail("ended, but not silently")

    def _fail(self, how: str) -> NoReturn:
        self.failed = True
        if self.job.poll() is None:
            os.killpg(self.job.pid, signal.SIGKILL)
        pytest.fail(f"the job {how}; status {self.job.wait()}\n{self.err.read_text()}")
