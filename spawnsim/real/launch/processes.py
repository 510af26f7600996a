"""The processes of a job: the monitor of each rank, and the handling of orphans.

A *monitor* is the parent process of a rank: it waits for the rank and records how it ended (`runtime.registry`).
Processes that lose their parents are adopted by the launcher's process (Linux: subreaper).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from spawnsim.real.runtime.registry import (
    BEGUN,
    DEAD,
    ENDED,
    REGISTRY,
    SURVIVE,
    WORLD_ERROR,
    first_end,
    ranks_at_stage,
    record_first_end,
    register,
    register_stage,
)
from spawnsim.signals import signal_name

PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent has died
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37  # Linux: orphans become children of this process
PATIENCE_S = 2.0  # how long an orphan may take to end by itself
REAP_POLL_S = 1e-3


def _prctl() -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), "prctl", None)


def dying_with_parent(number: int) -> Callable[[], object] | None:
    """Return a function that a new process calls to get this signal when its parent dies.

    None where the system lacks this feature, and in a process with several threads: a forked copy of such a process
    may execute almost nothing safely.
    """
    prctl = _prctl()
    if prctl is None or len(os.listdir("/proc/self/task")) > 1:
        return None
    return partial(prctl, PR_SET_PDEATHSIG, int(number))


@contextmanager
def subreaper() -> Iterator[None]:
    """While the block runs, adopt descendants of this process that lose their parents, where the system allows it."""
    prctl = _prctl()
    if prctl is None:
        yield
        return
    before = ctypes.c_int()
    prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def reap(processes: Iterable[int]) -> None:
    """Wait until the given processes that are children of this one have ended; kill any that do not end."""
    known = list(processes)
    while any(_reaped(process) for process in known):  # each may have left children
        pass


def _reaped(process: int) -> bool:
    """Wait for one process; return whether it was a child of this one."""
    try:
        end_s = time.monotonic() + PATIENCE_S
        while os.waitpid(process, os.WNOHANG) == (0, 0):
            if time.monotonic() > end_s:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                break
            time.sleep(REAP_POLL_S)
    except ChildProcessError:
        return False
    return True


def stop_group(leader: int) -> None:
    """Stop the processes that an ended rank has left in its process group, such as workers of loaders.

    They would continue to run and hold pipes open, and a launcher notices the end of a job by the end of its pipes.
    """
    with suppress(ProcessLookupError, PermissionError):  # the group is empty, or has no process of this user
        os.killpg(leader, signal.SIGTERM)
        end_s = time.monotonic() + GROUP_S
        while time.monotonic() < end_s and any(each.group == leader for each in _alive()):
            time.sleep(REAP_POLL_S)
        os.killpg(leader, signal.SIGKILL)


def stop_orphans(leaders: AbstractSet[int]) -> None:
    """Stop the ranks' process groups that contain children of this process: processes that ranks have left behind."""
    for group in leaders & {each.group for each in _alive() if each.parent == os.getpid()}:
        stop_group(group)


def children(process: int) -> list[int]:
    """Return the children of a process that it has yet to wait for."""
    return [each.number for each in _processes() if each.parent == process]


class _Process(NamedTuple):
    number: int
    state: str
    parent: int
    group: int


def _processes() -> Iterator[_Process]:
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            state, parent, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            yield _Process(int(entry.name), state, int(parent), int(group))


def _alive() -> Iterator[_Process]:
    return (each for each in _processes() if each.state != "Z")  # Z: ended, not yet awaited by its parent


# Prefix of the line that a monitor writes to stderr if it cannot reach the launcher's registry folder.
SPOKEN = "[spawnsim monitor]"
# The system sends this signal when the launcher's thread that started the monitor has ended.
ORPHANED = signal.SIGALRM
GROUP_S = 1.0  # how long a process that a rank has left behind may take to stop
STOP_S = 2  # how long a rank whose launcher has died may take to save its data
FLUSH_S = 0.2  # time for the launcher to read the output of a rank
FORWARDED = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT,
)  # fmt: skip
AWAITED = (*FORWARDED, ORPHANED, signal.SIGCHLD)


def monitor(rank: int, environ: Mapping[str, str]) -> None:
    """Fork and return in the child, while this process waits for the child's end; only under our launcher on Linux.

    Call it while the process has one thread.
    """
    # Launchers misreport how a rank ended: they notice a closed connection, kill the other ranks, and name the process
    # that they check first. MPICH's launcher named the wrong rank in 28 of 100 kills. Only a parent gets the true
    # status, and the launcher's processes are not ours, so we insert a parent of our own for each rank. The fork comes
    # before anything is loaded: there it costs 1 ms, and it is not safe once MPI or torch have threads. The parent
    # keeps the inherited connections to the launcher open, so the launcher notices the death only after the monitor has
    # recorded its cause. A rank whose monitor dies gets SIGKILL, since it would otherwise continue unmonitored. The
    # rank has a separate process group, so that signals to its group do not reach its monitor.
    die_with_parent, report_parent = dying_with_parent(signal.SIGKILL), dying_with_parent(ORPHANED)
    if REGISTRY not in environ or die_with_parent is None or report_parent is None:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    parent, launcher = os.getpid(), os.getppid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an inherited SIG_IGN would hide the rank's end
    former = signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    if child := os.fork():
        report_parent()
        RankMonitor(rank, child, launcher, environ).wait()
    die_with_parent()
    if os.getppid() != parent:  # it died before `die_with_parent` was in force
        os._exit(128 + signal.SIGKILL)
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, former)


@dataclass
class RankMonitor:
    """The parent of a rank's process (`child`). `stopping`: whether a stop signal was forwarded to the rank."""

    rank: int
    child: int
    launcher: int
    environ: Mapping[str, str]
    stopping: bool = False

    def wait(self) -> None:
        """Wait for the rank's end and exit with the same status. Does not return."""
        status = 1
        try:
            for process in (os.getpid(), self.child):
                register(self.rank, self.environ, process)
            register("", self.environ, self.launcher)
            end = self._wait()
            if end or not self._has(ENDED):
                status = self._record(end)
                # Only after a failure: after a normal end, leftover processes are the program's responsibility.
                stop_group(self.child)
            else:
                status = 0
        finally:
            os._exit(status)

    def _has(self, stage: str) -> bool:
        """Whether the rank has reached a stage; assumed on other nodes, where the registry is out of reach."""
        ranks = ranks_at_stage(stage, self.environ)
        return ranks is None or self.rank in ranks

    def _wait(self) -> int:
        """Forward this process's signals to the rank until it ends; return its exit code."""
        # The signals stay blocked and are read one by one. A Python handler runs between bytecodes, so for a signal
        # that arrives just before a blocking `waitpid` it would run only at the rank's end.
        self._orphaned()  # the launcher may have died before its death would have sent a signal
        while not (ended := os.waitpid(self.child, os.WNOHANG))[0]:
            number = signal.sigwait(AWAITED)
            if number == ORPHANED:
                self._orphaned()
            elif number in FORWARDED and not (number == signal.SIGUSR1 and SURVIVE in self.environ):
                # MPICH sends SIGUSR1 after the death of another rank; it would kill this one.
                self._forward(number)
        return os.waitstatus_to_exitcode(ended[1])

    def _forward(self, number: int) -> None:
        self.stopping |= number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        with suppress(ProcessLookupError):
            os.kill(self.child, number)
            if self.stopping:  # a process stopped by SIGSTOP would not act on it
                os.kill(self.child, signal.SIGCONT)

    def _orphaned(self) -> None:
        if os.getppid() == self.launcher:  # only a thread of the launcher has ended
            return
        text = f"the launcher's process {self.launcher}, which had started rank {self.rank}, has died"
        record_first_end(WORLD_ERROR, text, self.environ)
        self._forward(signal.SIGKILL if self.stopping else signal.SIGTERM)
        signal.alarm(STOP_S)  # it sends ORPHANED again, and then the rank is killed

    def _record(self, end: int) -> int:
        """Record how the rank ended, if the job continues or no earlier end is recorded; return the exit status."""
        status = 128 - end if end < 0 else end
        text = f"rank {self.rank} (process {self.child} on {os.uname().nodename}) {_how(end)}"
        register_stage(DEAD, self.rank, self.environ)
        if self.stopping and end < 0:  # the sender of the signal knows why
            return status
        # In a job that survives deaths the monitor exits with 0, so that the launcher sees no failure and does not kill
        # the other ranks; they read the death from the registry. Before all programs have begun, no job can continue.
        if SURVIVE in self.environ and self._has(BEGUN):
            if first_end(self.environ):
                return status
            _say(f"spawnsim: {text}")
            return 0
        if SURVIVE in self.environ:
            text += " before its program had begun: no job survives that"
        if record_first_end(status or WORLD_ERROR, text, self.environ) is None:
            _say(f"{SPOKEN} {status or WORLD_ERROR} {text}")
        return status


def end_job(status: int, environ: Mapping[str, str]) -> None:
    """End the job of a rank without a monitor before MPI is initialized: MPICH's mpiexec does not notice its exit.

    Other launchers notice the exit status of a rank and end the job themselves (srun: with --kill-on-bad-exit).
    """
    # The abort command of MPICH's process manager interface (PMI-1), which the library would send
    if "PMI_FD" in environ and "MPI_LOCALRANKID" in environ:  # Slurm uses another protocol there
        sys.stderr.flush()
        time.sleep(FLUSH_S)
        os.write(int(environ["PMI_FD"]), b"cmd=abort exitcode=%d\n" % status)
        time.sleep(FLUSH_S)


def _how(end: int) -> str:
    if end < 0:
        return f"was killed by {signal_name(-end)}"
    return f"left with status {end}" if end else "left before its program had ended"


def _say(line: str) -> None:
    with suppress(OSError):  # the pipe is closed
        os.write(2, f"{line}\n".encode())


def python() -> list[str]:
    """Return the command line of this interpreter, with its options (-O, -W, -X), up to a program."""
    import subprocess  # here, because ranks do not need it

    # `multiprocessing` starts processes with this function; the standard library has no public equivalent.
    return [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
