"""Supervise a launcher: forward signals to the ranks, forward their output, and report in one line why a job ended.

Launchers print ten lines about a killed process, none of which names the rank. So `LauncherOutput` removes the
launcher's own messages from its output. `JobState` takes the dead rank from the registry, in which ranks and monitors
record it, and falls back to the launcher's messages only if the registry has no entry. If a launcher does not end a job
that has lost a rank, this module ends the launcher. It also removes shared memory that MPI has left in /dev/shm. It
loads neither numpy, MPI nor torch.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from spawnsim.real.launch.processes import (
    SPOKEN,
    children,
    dying_with_parent,
    reap,
    stop_orphans,
    subreaper,
)
from spawnsim.real.runtime.abort import STARTED
from spawnsim.real.runtime.registry import REGISTRY, SURVIVE, WORLD_ERROR, ProcessRegistry
from spawnsim.signals import outcome_of_signal, signal_name

NUL = b"\0"  # Open MPI's launcher starts a line with it when a rank has died or has aborted the job
OURS = b"spawnsim: "

_OWN_LINES = (
    b"=====", b"-----", b"=   BAD", b"[mpiexec", b"[proxy", b"Abort(", b"launcher noticed", b"prterun", b"prun",
    b"mpirun", b"mpiexec", b"MPI_ABORT", b"NBC_Progress", b"WARNING: The selected",
    b"YOUR APPLICATION TERMINATED", SPOKEN.encode(), OURS,
)  # fmt: skip
"""Prefixes of a launcher's own lines, and of ours, before which a launcher may insert bytes."""
_BEGINS = re.compile(
    rb"=   BAD TERMINATION|(prte?run|mpirun|mpiexec|MPI_ABORT)\b.*\b(noticed|invoked|exited|detected)"
    rb"|WARNING: The selected '\w+' module"  # Open MPI: not tested after a death
    rb"|YOUR APPLICATION TERMINATED WITH THE EXIT STRING"  # and nothing else, in jobs that survive deaths
)
_RULE = re.compile(rb"(={20,}|-{20,})\s*")
_ENDS = re.compile(rb"Please see the FAQ page|-{20,}")
_ALONE = re.compile(
    rb"\[(mpiexec|proxy)[@:]|Abort\(\d+\) on node \d+ .*MPI_Abort|launcher noticed|"
    rb"NBC_Progress: an error|\[\S+:\d+\] PMIX ERROR: |\d+ more process(es have| has) sent help message"
)
_PROCESS = re.compile(rb"PID\s+(\d+)\s+(?:RUNNING AT|on\s+node)\s+(\S+)")
_RANK = re.compile(rb"process\s+rank\s+(\d+)\s+with\s+PID")
_SPOKEN = re.compile(re.escape(SPOKEN).encode() + rb" (\d+) (.*)\n")
_MISMATCH = re.compile(rb"gloo::EnforceNotMet|MPI_ERR_TRUNCATE|[Mm]essage\b[^\n]* truncated")
_SIGNAL = re.compile(rb"\(signal (\d+)\)|exited\s+on\s+signal\s+(\d+)")


@dataclass
class JobEnd:
    """The end of a job. `cause` is a sentence if the ranks themselves could not report the cause.

    `mismatch`: whether the job failed and MPI or gloo reported a message longer than its receive buffer.
    """

    status: int
    cause: str = ""
    mismatch: bool = False


@dataclass
class LauncherOutput:
    """Filter the output of a launcher: return the output of the ranks; record the killed process and its signal.

    Output arrives in chunks that may end anywhere. An incomplete line is shown unless it may become one of the
    launcher's own: a rank's progress bar must not wait for a newline. Launchers' banners begin with an empty line or a
    rule, and so may a table of the program; such lines are held until the next line decides. Unrecognised text, such as
    the message of another version, is shown: at worst the user reads about one death twice.
    """

    process: int = -1
    node: str = ""
    rank: int = -1
    signal: int = 0
    mismatch: bool = False  # whether a library reported mismatched calls
    spoken: JobEnd | None = None  # the report of the first monitor that cannot reach the registry
    _tail: bytes = b""  # the beginning of a line that may be the launcher's own
    _begun: bool = False  # whether the beginning of the line has been shown
    _held: list[bytes] = field(default_factory=list)  # empty lines and a rule, which may begin a banner
    _banner: bytes = b""
    _gap: bool = False  # whether an empty line at this point is the library's

    def __call__(self, chunk: bytes) -> bytes:
        self.mismatch = self.mismatch or _MISMATCH.search(chunk) is not None
        *lines, tail = (self._tail + chunk).split(b"\n")
        shown = b"".join(self._line(line + b"\n") for line in lines)
        if tail and (self._begun or not (self._banner or _may_be_own(tail))):
            shown, self._begun, tail = shown + self._release() + tail, True, b""
        self._tail = tail
        return shown

    def rest(self) -> bytes:
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
            self.spoken = self.spoken or JobEnd(int(found[1]), found[2].decode())
            return b""
        if not line.strip() or _RULE.fullmatch(text):
            before = self._release() if len(self._held) > 1 else b""
            self._held.append(line)
            return before
        return self._release() + line

    def _take(self, line: bytes) -> None:
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
    return any(own.startswith(tail) or tail.startswith(own) for own in _OWN_LINES)


# Time for a launcher to end a job that has lost a rank: most end it themselves, once ranks have saved their data.
DOOMED_S = 6.0
UNBEGUN_S = 1.0  # the same before all programs have begun, when no rank has anything to save
UNSURVIVED = ": no job survives that"
STARTING_S = 3.0  # how much later than the first rank's program a launcher may start the last rank


@dataclass
class JobState:
    """The state of a job's ranks while it runs. `ranks`: the number of ranks on this node, 0 if unknown."""

    registry: ProcessRegistry
    ranks: int
    survive: bool
    filters: tuple[LauncherOutput, LauncherOutput] = field(
        default_factory=lambda: (LauncherOutput(), LauncherOutput())
    )  # one per stream
    _lost_s: float = 0.0  # when it became known that the job must end
    _unmonitored: JobEnd | None = None
    _alone_s: float = field(default_factory=time.monotonic)  # since when all living ranks have had monitors

    def doomed(self) -> bool:
        """Whether the job has lost a rank, and its launcher has had enough time to end it."""
        now_s = time.monotonic()
        if not self._lost_s and self._first() is not None:
            # When the loss of an unmonitored rank is detected, the launcher has had more time than UNBEGUN_S.
            self._lost_s = now_s if self._unmonitored is None else self._alone_s
        patience_s = DOOMED_S if len(self.registry.begun) >= self.ranks else UNBEGUN_S
        return self._lost_s > 0.0 and now_s - self._lost_s > patience_s

    def ended(self, status: int) -> JobEnd:
        """Return how the job ended, given the exit status of its launcher. The first recorded end decides."""
        # Sources in order of reliability: the end that a rank or monitor recorded; the signal that the launcher
        # reports, which names at most a process; the launcher's status, which names nothing. One exception: the SIGTERM
        # that stopped a rank may come from the launcher, because of a death that only the launcher has seen (on another
        # node, or of a rank without a monitor).
        first, found = self._first(), max(self.filters, key=lambda each: each.signal)
        # SIGTERM may be the launcher's work.
        stopped = first is not None and first.status == 128 + signal.SIGTERM
        if first is not None and not (stopped and found.rank >= 0 and found.signal):
            return first
        if found.signal:
            which = UNSURVIVED if self.survive and self._unmonitored_ranks() else ""
            return JobEnd(
                128 + found.signal, f"{self._who(found)} was killed by {signal_name(found.signal)}{which}"
            )
        if status == 0 and self.survive and not self.registry.ended_well:
            return JobEnd(WORLD_ERROR, "no rank survived to the end")
        if status == 0:
            return JobEnd(0)
        how = f"has ended with status {status}" if status > 0 else f"was killed by {signal_name(-status)}"
        unmonitored = self._unmonitored_ranks()
        why = (
            f"{_list_ranks(unmonitored)} died at {_its_or_their(unmonitored)} start"
            if unmonitored
            else "no rank reported a reason"
        )
        return JobEnd(status if status > 0 else 128 - status, f"the launcher {how}: {why}")

    def _first(self) -> JobEnd | None:
        if recorded := self.registry.first_end():
            return JobEnd(*recorded)
        return next((each.spoken for each in self.filters if each.spoken), None) or self._unmonitored_death()

    def _unmonitored_death(self) -> JobEnd | None:
        """Return the death of a rank that had no monitor yet, once all other ranks have one."""
        # Between its start and its fork a rank has no monitor for 0.1 s. If it dies in that time, MPICH's mpiexec waits
        # for it forever. Counts reveal the death: the launcher's process has fewer children than ranks, and as many
        # ranks are missing in the registry. A launcher that is still starting ranks looks the same, so STARTING_S must
        # pass first.
        launchers, unmonitored, now_s = self.registry.launchers, self._unmonitored_ranks(), time.monotonic()
        if self._unmonitored is not None:
            return self._unmonitored
        if (
            len(launchers) != 1
            or not unmonitored
            or len(unmonitored) != self.ranks - len(children(launchers[0]))
        ):
            self._alone_s = now_s
        elif now_s - self._alone_s > STARTING_S:
            which = UNSURVIVED if self.survive else ""
            self._unmonitored = JobEnd(
                WORLD_ERROR, f"{_list_ranks(unmonitored)} died at {_its_or_their(unmonitored)} start{which}"
            )
        return self._unmonitored

    def _unmonitored_ranks(self) -> list[int]:
        return sorted(set(range(self.ranks)) - self.registry.ranks)

    def _who(self, found: LauncherOutput) -> str:
        """Return the process that the launcher reports; with monitored ranks, MPICH's launcher may name any process."""
        unmonitored = self._unmonitored_ranks()
        if found.process < 0 and unmonitored:  # MPICH reports only the signal in jobs that survive deaths
            which = f"{'one of ' if len(unmonitored) > 1 else ''}{_list_ranks(unmonitored)}"
            return f"{which}, at {_its_or_their(unmonitored)} start,"
        process = f"process {found.process} on {found.node}" if found.process >= 0 else "a process"
        rank = str(found.rank) if found.rank >= 0 else ""
        if not (rank or self.registry.launchers):
            rank = self.registry.rank_of(found.process)
        if not rank and len(unmonitored) == 1:
            rank = str(unmonitored[0])
        if rank:
            return f"rank {rank} ({process})"
        if unmonitored:
            return f"one of {_list_ranks(unmonitored)} ({process}), at their start,"
        return "a rank's monitor" if self.registry.launchers else process


def _list_ranks(ranks: Sequence[int]) -> str:
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def _its_or_their(ranks: Sequence[int]) -> str:
    return "their" if len(ranks) > 1 else "its"


SHM_FOLDER = Path("/dev/shm")
SHM_NAMES = ("mpich_shm_*", "mpich_shar_tmp*", "sm_segment.*", "osc_rdma.*")  # of MPICH and of Open MPI
FILE_TIME_S = 1.0  # resolution of file times
MAPPING_S = 0.02  # from the creation of such a file until its creator has mapped it


@contextmanager
def shared_memory_removed() -> Iterator[None]:
    """Remove MPI's files in /dev/shm that this user has created while the block ran, and that no process has mapped.

    A killed rank leaves its segments there, and they occupy memory. Their names do not identify the job, and this user
    may run other jobs at the same time; this is why all three conditions are needed.
    """
    began_s = time.time() - FILE_TIME_S
    try:
        yield
    finally:
        if left := [file for name in SHM_NAMES for file in SHM_FOLDER.glob(name) if _is_ours(file, began_s)]:
            time.sleep(MAPPING_S)
            used = _mapped_shared_memory()
            for file in left:
                if str(file) not in used:
                    file.unlink(missing_ok=True)


def _is_ours(file: Path, since_s: float) -> bool:
    try:
        found = file.stat()
    except FileNotFoundError:
        return False
    return found.st_uid == os.getuid() and found.st_ctime >= since_s


def _mapped_shared_memory() -> set[str]:
    found = set[str]()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # the process has just ended, or belongs to another user
            lines = maps.read_text(errors="replace").splitlines()
            found.update(line.partition(f" {SHM_FOLDER}/")[2] for line in lines if f"{SHM_FOLDER}/" in line)
    return {f"{SHM_FOLDER}/{name}" for name in found}


STOP_S = 6.0  # time between stopping and killing a launcher, in which its ranks save their data
POLL_S = 0.2  # maximum delay before a signal takes effect
# Batch systems can send SIGUSR1 or SIGUSR2 before the time limit; by default, these would end this process alone.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def supervise(
    line: Sequence[str],
    environ: Mapping[str, str] | None = None,
    *,
    ranks: int = 0,
    registry: Path | None = None,
) -> JobEnd:
    """Run a launcher until it ends. Its ranks have ended when this returns.

    `ranks`: the number of ranks, if all are on this node. `registry`: the folder of the job's `ProcessRegistry`.
    """
    own = tempfile.TemporaryDirectory(prefix="spawnsim-") if registry is None else nullcontext(str(registry))
    with own as folder, subreaper(), shared_memory_removed():
        given = dict(os.environ if environ is None else environ) | {STARTED: "1", REGISTRY: folder}
        started = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=given,
            start_new_session=True, preexec_fn=_prepared(survive=SURVIVE in given),
        )  # fmt: skip
        signals, job = list[int](), JobState(ProcessRegistry(Path(folder)), ranks, survive=SURVIVE in given)
        pipes = zip((started.stdout, started.stderr), (1, 2), job.filters, strict=True)
        readers = [
            threading.Thread(target=_forward_output, args=pipe, name="spawnsim-log", daemon=True)
            for pipe in pipes
        ]
        for reader in readers:
            reader.start()
        with _forwarding(started, signals):
            status = _wait(started, signals, readers, job)
        reap(job.registry.processes)  # before the output is read to its end: they may hold the pipes open
        if status or signals:
            stop_orphans(job.registry.of_ranks)  # for the same reason
        for reader in readers:
            reader.join(STOP_S)
        if signals:
            return JobEnd(128 + signals[0], outcome_of_signal(signals[0]))
        end = job.ended(status)
        return replace(end, mismatch=end.status != 0 and any(each.mismatch for each in job.filters))


def _prepared(*, survive: bool) -> Callable[[], None] | None:
    """Return the function that a launcher's process calls before `exec`."""
    die_with_parent = dying_with_parent(signal.SIGTERM)
    if die_with_parent is None:
        return None

    def prepare() -> None:
        die_with_parent()
        # MPICH sends this signal to all ranks after a death, including ranks that do not ignore it yet.
        if survive:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    return prepare


def _forward_output(stream: IO[bytes] | None, to: int, filter_: LauncherOutput) -> None:
    assert stream is not None
    with stream:
        while chunk := os.read(stream.fileno(), 65536):
            _write(to, filter_(chunk))
        _write(to, filter_.rest())


def _write(to: int, text: bytes) -> None:
    with suppress(BrokenPipeError):  # the reader has gone, but the job continues
        while text:
            text = text[os.write(to, text) :]


@contextmanager
def _forwarding(started: subprocess.Popen[bytes], signals: list[int]) -> Iterator[None]:
    """Forward the first stop signal as SIGTERM, which all launchers pass to their ranks; the second one kills."""

    def handler(number: int, _frame: object) -> None:
        signals.append(number)
        started.send_signal(signal.SIGTERM if len(signals) == 1 else signal.SIGKILL)

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
    started: subprocess.Popen[bytes], signals: list[int], readers: Sequence[threading.Thread], job: JobState
) -> int:
    """Wait for the end of a launcher; kill it if it does not end after a stop signal or after its job is doomed."""
    try:
        while started.poll() is None and not signals:
            if job.doomed():
                started.send_signal(signal.SIGTERM)
                break
            _wait_briefly(started, readers)
        return started.wait(STOP_S)
    except subprocess.TimeoutExpired:
        return _kill(started)
    except BaseException:
        _kill(started)
        raise


def _wait_briefly(started: subprocess.Popen[bytes], readers: Sequence[threading.Thread]) -> None:
    """Wait briefly. The end of a launcher's output is noticed immediately, unlike the end of its process."""
    reading = next((reader for reader in readers if reader.is_alive()), None)
    if reading is not None:
        reading.join(POLL_S)
        return
    with suppress(subprocess.TimeoutExpired):
        started.wait(POLL_S)


def _kill(started: subprocess.Popen[bytes]) -> int:
    started.kill()
    return started.wait()
