"""Attending a launcher: what stops it reaches its ranks, their text is handed on, and one line says why it ended.

mpiexec and its kin say in ten lines that a process was killed, and in none which rank it was. So their own words are
taken out of what comes from standard error. Which rank died is known from the roll that ranks and their keepers sign;
only where nobody has, from those words. Where a launcher does not end a job that has lost a rank, it is ended here.
Knows what launchers print and signals; loads neither MPI nor torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from spawnsim.real.launching.filtering import Ended, Filter
from spawnsim.real.launching.job import Job
from spawnsim.real.launching.orphans import adopted, dying_with_parent, see_off
from spawnsim.real.launching.roll import ROLL, SURVIVE, Roll
from spawnsim.real.launching.sweeping import swept
from spawnsim.real.rank.stopping import TOLD, outcome

STOP_S = 6.0  # a launcher that is told to stop gets this long for its ranks' last words before it is killed
LOOK_S = 0.2  # how soon at the latest a signal is acted upon
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def attend(line: Sequence[str], environ: Mapping[str, str] | None = None, *, ranks: int = 0) -> Ended:
    """Run a launcher until it ends. Its ranks are gone when this returns.

    `ranks`: how many it starts on this node, if all are here.
    """
    with tempfile.TemporaryDirectory(prefix="spawnsim-") as folder, adopted(), swept():
        given = dict(os.environ if environ is None else environ) | {TOLD: "1", ROLL: folder}
        started = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=given,
            start_new_session=True, preexec_fn=_prepared(survive=SURVIVE in given),
        )  # fmt: skip
        told, job = list[int](), Job(Roll(Path(folder)), ranks, survive=SURVIVE in given)
        pipes = zip((started.stdout, started.stderr), (1, 2), job.filters, strict=True)
        readers = [
            threading.Thread(target=_hand_on, args=pipe, name="spawnsim-log", daemon=True) for pipe in pipes
        ]
        for reader in readers:
            reader.start()
        with _forwarding(started, told):
            status = _wait(started, told, readers, job)
        see_off(job.roll.processes)  # before all is read: they may hold the pipes open
        for reader in readers:
            reader.join(STOP_S)
        return Ended(128 + told[0], outcome(told[0])) if told else job.ended(status)


def _prepared(*, survive: bool) -> Callable[[], None] | None:
    """Return what a launcher's process does before it becomes that."""
    die_with_parent = dying_with_parent(signal.SIGTERM)
    if die_with_parent is None:
        return None

    def prepare() -> None:
        die_with_parent()
        if (
            survive
        ):  # by which MPICH tells all ranks of a death, also those that do not ignore it by themselves yet
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    return prepare


def _hand_on(stream: IO[bytes] | None, to: int, filter_: Filter) -> None:
    assert stream is not None
    with stream:
        while chunk := os.read(stream.fileno(), 65536):
            _write(to, filter_(chunk))
        _write(to, filter_.rest())


def _write(to: int, text: bytes) -> None:
    with suppress(BrokenPipeError):  # nobody listens any more: the job goes on
        while text:
            text = text[os.write(to, text) :]


@contextmanager
def _forwarding(started: subprocess.Popen[bytes], told: list[int]) -> Iterator[None]:
    """Hand on the first signal to stop as SIGTERM, which all launchers give to their ranks; the second one kills."""

    def handler(number: int, _frame: object) -> None:
        told.append(number)
        started.send_signal(signal.SIGTERM if len(told) == 1 else signal.SIGKILL)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.signal(number, handler) for number in STOPPING}
    try:
        yield
    finally:
        for number, before in former.items():
            signal.signal(number, before)


def _wait(
    started: subprocess.Popen[bytes], told: list[int], readers: Sequence[threading.Thread], job: Job
) -> int:
    """Wait for the end of a launcher; one that was told to stop, or whose job is doomed, is killed in the end."""
    try:
        while started.poll() is None and not told:
            if job.doomed():
                started.send_signal(signal.SIGTERM)
                break
            _look(started, readers)
        return started.wait(STOP_S)
    except subprocess.TimeoutExpired:
        return _kill(started)
    except BaseException:
        _kill(started)
        raise


def _look(started: subprocess.Popen[bytes], readers: Sequence[threading.Thread]) -> None:
    """Wait for a moment: the end of a launcher's output is seen at once, unlike that of a process."""
    reading = next((reader for reader in readers if reader.is_alive()), None)
    if reading is not None:
        reading.join(LOOK_S)
        return
    with suppress(subprocess.TimeoutExpired):
        started.wait(LOOK_S)


def _kill(started: subprocess.Popen[bytes]) -> int:
    started.kill()
    return started.wait()
