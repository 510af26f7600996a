"""What a launcher says of its own, among what its ranks say: it is taken out, and who was killed by what is kept.

Knows what mpiexec of MPICH and of Open MPI and our torchrun print, and what keepers say; knows no process.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from spawnsim.real.launching.keeper import SPOKEN

NUL = b"\0"  # Open MPI's launcher writes one when a rank has died or has aborted the job, where a line begins
OURS = b"spawnsim: "

_OWN = (
    b"=====", b"-----", b"=   BAD", b"[mpiexec", b"[proxy", b"Abort(", b"torchrun noticed", b"prterun", b"prun",
    b"mpirun", b"mpiexec", b"MPI_ABORT", b"NBC_Progress", b"WARNING: The selected",
    b"YOUR APPLICATION TERMINATED", SPOKEN.encode(), OURS,
)  # fmt: skip
"""How lines of a launcher's own begin, and what it may put something before."""
_BEGINS = re.compile(
    rb"=   BAD TERMINATION|(prte?run|mpirun|mpiexec|MPI_ABORT)\b.*\b(noticed|invoked|exited|detected)"
    rb"|WARNING: The selected '\w+' module"  # is not tested to go on after a death
    rb"|YOUR APPLICATION TERMINATED WITH THE EXIT STRING"  # and no more, where ranks are survived
)
_RULE = re.compile(rb"(={20,}|-{20,})\s*")
_ENDS = re.compile(rb"Please see the FAQ page|-{20,}")
_ALONE = re.compile(
    rb"\[(mpiexec|proxy)[@:]|Abort\(\d+\) on node \d+ .*MPI_Abort|torchrun noticed|"
    rb"NBC_Progress: an error|\[\S+:\d+\] PMIX ERROR: |\d+ more process(es have| has) sent help message"
)
_PROCESS = re.compile(rb"PID\s+(\d+)\s+(?:RUNNING AT|on\s+node)\s+(\S+)")
_RANK = re.compile(rb"process\s+rank\s+(\d+)\s+with\s+PID")
_SPOKEN = re.compile(re.escape(SPOKEN).encode() + rb" (\d+) (.*)\n")
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
        if text.startswith(OURS):
            line = text
        if self._banner or _BEGINS.match(text):
            self._take(line)
            return b""
        if _ALONE.match(text):
            self._learn(line)
            return b""
        if found := _SPOKEN.match(line):
            self.spoken = self.spoken or Ended(int(found[1]), found[2].decode())
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
