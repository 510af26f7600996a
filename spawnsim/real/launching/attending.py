"""Attending a launcher: what stops it reaches its ranks, their text is handed on, and one line says why it ended.

mpiexec and its kin say in ten lines that a process was killed, and in none which rank it was. So their own words are
taken out of what comes from standard error. Which rank died is known from the roll that ranks and their keepers sign;
only where nobody has, from those words. Knows what launchers print and signals; loads neither MPI nor torch.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from spawnsim.real.launching.keeper import SPOKEN, name
from spawnsim.real.launching.orphans import adopted, dying_with_parent, see_off
from spawnsim.real.launching.roll import FIRST_DEATH, FIRST_EXIT, ROLL, SURVIVE, Roll
from spawnsim.real.rank.stopping import TOLD, outcome

NOBODY = 4  # the status of a job that was to survive, and of which nobody is left
STOP_S = 6.0  # a launcher that is told to stop gets this long for its ranks' last words before it is killed
NUL = b"\0"  # Open MPI's launcher writes one when a rank has aborted the job, where a line begins
LOOK_S = 0.2  # how soon at the latest a signal is acted upon
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_OWN = (
    b"=====", b"-----", b"=   BAD", b"[mpiexec", b"[proxy", b"Abort(", b"torchrun noticed", b"prterun", b"prun",
    b"mpirun", b"mpiexec", b"MPI_ABORT", b"NBC_Progress", b"WARNING: The selected", SPOKEN.encode(),
)  # fmt: skip
"""How lines of a launcher's own begin."""
_BEGINS = re.compile(
    rb"=   BAD TERMINATION|(prte?run|mpirun|mpiexec|MPI_ABORT)\b.*\b(noticed|invoked|exited|detected)"
    rb"|WARNING: The selected '\w+' module"  # is not tested to go on after a death
)
_RULE = re.compile(rb"(={20,}|-{20,})\s*")
_ENDS = re.compile(rb"Please see the FAQ page|-{20,}")
_ALONE = re.compile(
    rb"\[(mpiexec|proxy)[@:]|Abort\(\d+\) on node \d+ .*MPI_Abort|torchrun noticed|"
    rb"NBC_Progress: an error|\d+ more process(es have| has) sent help message"
)
_PROCESS = re.compile(rb"PID\s+(\d+)\s+(?:RUNNING AT|on\s+node)\s+(\S+)")
_RANK = re.compile(rb"process\s+rank\s+(\d+)\s+with\s+PID")
_SPOKEN = re.compile(re.escape(SPOKEN).encode() + rb" (rank .* was killed by signal (\d+).*)\n")
_SIGNAL = re.compile(rb"\(signal (\d+)\)|exited\s+on\s+signal\s+(\d+)")


@dataclass
class Ended:
    """How a job ended. `cause` is a sentence, where the ranks themselves could not say it."""

    status: int
    cause: str = ""


@dataclass
class Filter:
    """Takes what comes out of a launcher, gives back what the ranks said, and keeps who was killed by what."""

    process: int = -1
    node: str = ""
    rank: int = -1
    signal: int = 0
    spoken: Ended | None = None  # by the keeper that spoke first
    _tail: bytes = b""  # the beginning of a line that may be the launcher's own
    _begun: bool = False  # the beginning of the line was shown already
    _held: list[bytes] = field(default_factory=list)  # empty lines and a rule, which may begin a banner
    _banner: bytes = b""
    _gap: bool = False  # an empty line that comes now is the library's

    def __call__(self, chunk: bytes) -> bytes:
        """Return what can be shown now."""
        *lines, tail = (self._tail + chunk).split(b"\n")
        shown = b"".join(self._line(line + b"\n") for line in lines)
        if tail and (self._begun or not (self._banner or _may_be_own(tail))):
            shown, self._begun, tail = shown + self._release() + tail, True, b""
        self._tail = tail
        return shown

    def rest(self) -> bytes:
        """Return what was held back, at the end."""
        return self._release() + (b"" if self._banner or not self._tail.strip(NUL) else self._tail)

    def _release(self) -> bytes:
        held, self._held = b"".join(self._held), []
        return held

    def _line(self, line: bytes) -> bytes:
        if self._begun:
            self._begun = False
            return line
        gap, self._gap = self._gap, line.startswith(b"NBC_Progress")
        if gap and line == b"\n":
            return b""
        text = line.lstrip(NUL)
        if self._banner or _BEGINS.match(text):
            self._take(line)
            return b""
        if _ALONE.match(text):
            self._learn(line)
            return b""
        if found := _SPOKEN.match(line):
            self.spoken = self.spoken or Ended(128 + int(found[2]), found[1].decode())
            return b""
        if not line.strip() or _RULE.fullmatch(text):
            before = self._release() if len(self._held) > 1 else b""
            self._held.append(line)
            return before
        return self._release() + line

    def _take(self, line: bytes) -> None:
        """Add a line to the banner, up to its last one."""
        self._held, self._banner = [], self._banner + line
        if _ENDS.match(line):
            self._learn(self._banner)
            self._banner = b""

    def _learn(self, text: bytes) -> None:
        if found := _PROCESS.search(text):
            self.process, self.node = int(found[1]), found[2].decode()
        if found := _RANK.search(text):
            self.rank = int(found[1])
        if found := _SIGNAL.search(text):
            self.signal = int(found[1] or found[2])


def _may_be_own(tail: bytes) -> bool:
    tail = tail.lstrip(NUL)
    return any(own.startswith(tail) or tail.startswith(own) for own in _OWN)


def attend(line: Sequence[str], environ: Mapping[str, str] | None = None) -> Ended:
    """Run a launcher until it ends. Its ranks are gone when this returns."""
    with tempfile.TemporaryDirectory(prefix="spawnsim-") as folder, adopted():
        given = dict(os.environ if environ is None else environ) | {TOLD: "1", ROLL: folder}
        started = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=given,
            start_new_session=True, preexec_fn=dying_with_parent(signal.SIGTERM),
        )  # fmt: skip
        told, roll = list[int](), Roll(Path(folder))
        filters = [Filter(), Filter()]  # MPICH says on standard output that a process was killed
        pipes = zip((started.stdout, started.stderr), (1, 2), filters, strict=True)
        readers = [threading.Thread(target=_hand_on, args=pipe, name="spawnsim-log") for pipe in pipes]
        for reader in readers:
            reader.start()
        with _forwarding(started, told):
            status = _wait(started, told, readers)
        for reader in readers:
            reader.join()
        see_off(roll.processes)
        if told:
            return Ended(128 + told[0], outcome(told[0]))
        return _death(roll, filters) or _ended(status, roll, survive=SURVIVE in given)


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


def _wait(started: subprocess.Popen[bytes], told: list[int], readers: Sequence[threading.Thread]) -> int:
    """Wait for the end of a launcher; one that was told to stop is killed in the end."""
    try:
        for reader in readers:  # the end of its output is seen at once, unlike that of a process
            while reader.is_alive() and not told:
                reader.join(LOOK_S)
        while not told:
            try:
                return started.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                continue
        return started.wait(STOP_S)
    except subprocess.TimeoutExpired:
        return _kill(started)
    except BaseException:
        _kill(started)
        raise


def _kill(started: subprocess.Popen[bytes]) -> int:
    started.kill()
    return started.wait()


def _ended(status: int, roll: Roll, *, survive: bool) -> Ended:
    if status == 0 and survive and not roll.ended_well:
        return Ended(NOBODY, "no rank has lived to the end")
    return Ended(status if status >= 0 else 128 - status)


def _death(roll: Roll, filters: Sequence[Filter]) -> Ended | None:
    """Return the death that has ended the job: its keeper's word comes before the launcher's."""
    if recorded := roll.first(FIRST_DEATH):
        return Ended(*recorded)
    if spoken := next((each.spoken for each in filters if each.spoken), None):
        return spoken
    found = max(filters, key=lambda each: each.signal)
    if not found.signal:
        return None
    if left := roll.first(FIRST_EXIT):  # which the launcher takes for a death, and so kills the others
        return Ended(*left)
    if roll.kept:  # only the keeper would know which
        return Ended(128 + found.signal, f"a rank and its keeper were killed by {name(found.signal)}")
    return Ended(128 + found.signal, f"{_who(found, roll)} was killed by {name(found.signal)}")


def _who(found: Filter, roll: Roll) -> str:
    rank = roll.rank_of(found.process) or (str(found.rank) if found.rank >= 0 else "")
    process = f"process {found.process} on {found.node}"
    return f"rank {rank} ({process})" if rank else process
