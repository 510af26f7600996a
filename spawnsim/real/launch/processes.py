"""The processes of a job: the monitor of each rank, and what becomes of orphans.

A *monitor* is the parent process of a rank: it waits for the rank and writes down how it has ended
(`runtime.registry`). Processes that lose their parents are adopted by the launcher's process (Linux: subreaper).
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
REAP_LOOK_S = 1e-3


def _prctl() -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), "prctl", None)


def dying_with_parent(number: int) -> Callable[[], object] | None:
    """Return what a new process calls so that it gets this signal when its parent dies.

    None where the system has no such thing, and in a process of several threads: a copy of it may do nearly nothing.
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
    """Wait until those of these processes that are children of this one have ended, and kill those that do not."""
    known = list(processes)
    while any(_reaped(process) for process in known):  # each may have left children of its own
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
            time.sleep(REAP_LOOK_S)
    except ChildProcessError:
        return False
    return True


def stop_group(leader: int) -> None:
    """Stop what a rank that has ended has started and left in its process group, such as workers of loaders.

    They would live on, and hold open the pipes by which a launcher learns that a job is over.
    """
    with suppress(ProcessLookupError, PermissionError):  # there are none, or none of ours
        os.killpg(leader, signal.SIGTERM)
        end_s = time.monotonic() + GROUP_S
        while time.monotonic() < end_s and any(each.group == leader for each in _alive()):
            time.sleep(REAP_LOOK_S)
        os.killpg(leader, signal.SIGKILL)


def stop_orphans(leaders: AbstractSet[int]) -> None:
    """Stop the groups of ranks that children of this process belong to: what ranks have started, and left."""
    for group in leaders & {each.group for each in _alive() if each.parent == os.getpid()}:
        stop_group(group)


def children(process: int) -> list[int]:
    """Return the children of a process that it has not waited for yet."""
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
    return (each for each in _processes() if each.state != "Z")  # whose parent has not waited for it yet


# Begins what a monitor writes to stderr for a launcher whose folder it cannot reach.
SPOKEN = "[spawnsim monitor]"
# The system sends it when the launcher's thread that has started the monitor has ended.
ORPHANED = signal.SIGALRM
GROUP_S = 1.0  # how long a process that a rank has left may take to stop
STOP_S = 2  # how long a rank whose launcher has died may take to save what it has
HEARD_S = 0.2  # until the launcher has read what a rank has written
FORWARDED = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT,
)  # fmt: skip
AWAITED = (*FORWARDED, ORPHANED, signal.SIGCHLD)


def monitor(rank: int, environ: Mapping[str, str]) -> None:
    """Return as a child process, for whose end this one waits, where our launcher has started it on Linux.

    To be called while the process has one thread.
    """
    # Launchers do not report truly how a rank has ended: they see that a connection was closed, kill the other ranks,
    # and name the process that they look at first; MPICH's named the wrong rank in 28 of 100 kills. Only a parent gets
    # the true status, and the launcher's processes are not ours, so each rank gets a parent of our own in between. The
    # fork comes before anything is loaded: it costs 1 ms then, and is not safe later, when MPI or torch have threads.
    # The parent keeps open the connections to the launcher that it has inherited, so the launcher learns of the death
    # only after the monitor has written how it came. A rank whose monitor dies gets SIGKILL, or it would run on unseen.
    # It has a process group of its own, so that what it does to its group is not done to its monitor.
    die_with_parent, tell_of_parent = dying_with_parent(signal.SIGKILL), dying_with_parent(ORPHANED)
    if REGISTRY not in environ or die_with_parent is None or tell_of_parent is None:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    parent, launcher = os.getpid(), os.getppid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored by who started this, the rank would end unseen
    former = signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    if child := os.fork():
        tell_of_parent()
        RankMonitor(rank, child, launcher, environ).wait()
    die_with_parent()
    if os.getppid() != parent:  # it died before `die_with_parent` was in force
        os._exit(128 + signal.SIGKILL)
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, former)


@dataclass
class RankMonitor:
    """The parent of a rank's process, which is its `child`. `stopping`: the rank was told to stop."""

    rank: int
    child: int
    launcher: int
    environ: Mapping[str, str]
    stopping: bool = False

    def wait(self) -> None:
        """Wait for the rank's end, and end with the same status. Does not return."""
        status = 1
        try:
            for process in (os.getpid(), self.child):
                register(self.rank, self.environ, process)
            register("", self.environ, self.launcher)
            end = self._wait()
            if end or not self._has(ENDED):
                status = self._record(end)
                stop_group(self.child)  # after a good end what it has left running is the program's affair
            else:
                status = 0
        finally:
            os._exit(status)

    def _has(self, stage: str) -> bool:
        """Whether the rank has come to a stage. On other nodes the registry is out of reach: it counts as if it had."""
        ranks = ranks_at_stage(stage, self.environ)
        return ranks is None or self.rank in ranks

    def _wait(self) -> int:
        """Forward the signals that this process gets to the rank until it ends; return its exit code."""
        # The signals stay blocked and are taken one by one: a handler of Python's runs between bytecodes, so for a
        # signal that came just before a blocking `waitpid` it would run only at the rank's end.
        self._orphaned()  # the launcher may have died before its death would have sent a signal
        while not (ended := os.waitpid(self.child, os.WNOHANG))[0]:
            number = signal.sigwait(AWAITED)
            if number == ORPHANED:
                self._orphaned()
            elif number in FORWARDED and not (number == signal.SIGUSR1 and SURVIVE in self.environ):
                # SIGUSR1 is MPICH's, about the death of another rank: it would kill this one.
                self._forward(number)
        return os.waitstatus_to_exitcode(ended[1])

    def _forward(self, number: int) -> None:
        self.stopping |= number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        with suppress(ProcessLookupError):
            os.kill(self.child, number)
            if self.stopping:  # a process that SIGSTOP has stopped would not act on it
                os.kill(self.child, signal.SIGCONT)

    def _orphaned(self) -> None:
        if os.getppid() == self.launcher:  # only a thread of it has ended
            return
        text = f"the launcher's process {self.launcher}, which had started rank {self.rank}, has died"
        record_first_end(WORLD_ERROR, text, self.environ)
        self._forward(signal.SIGKILL if self.stopping else signal.SIGTERM)
        signal.alarm(STOP_S)  # which is ORPHANED again: then the rank is killed

    def _record(self, end: int) -> int:
        """Write how the rank has ended, if the job goes on or no other was first; return the status to end with."""
        status = 128 - end if end < 0 else end
        text = f"rank {self.rank} (process {self.child} on {os.uname().nodename}) {_how(end)}"
        register_stage(DEAD, self.rank, self.environ)
        if self.stopping and end < 0:  # the sender of the signal knows why
            return status
        # In a job that survives deaths the monitor ends with 0, so that the launcher sees no failure and lets the
        # others live; they learn of the death from the registry. Before all have met there is nothing to go on with.
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
    """End the job of a rank without a monitor, before its MPI is up: MPICH's mpiexec does not notice that it leaves.

    Other launchers see that a rank has left with a status, and end the job themselves (srun: with --kill-on-bad-exit).
    """
    # The abort command of MPICH's process manager interface (PMI-1), which the library would send
    if "PMI_FD" in environ and "MPI_LOCALRANKID" in environ:  # Slurm uses another protocol there
        sys.stderr.flush()
        time.sleep(HEARD_S)
        os.write(int(environ["PMI_FD"]), b"cmd=abort exitcode=%d\n" % status)
        time.sleep(HEARD_S)


def _how(end: int) -> str:
    if end < 0:
        return f"was killed by {signal_name(-end)}"
    return f"left with status {end}" if end else "left before its program had ended"


def _say(line: str) -> None:
    with suppress(OSError):  # the pipe is closed
        os.write(2, f"{line}\n".encode())


def python() -> list[str]:
    """Return the command line of this interpreter, with its options (-O, -W, -X), up to a program."""
    import subprocess  # which a rank does not need

    # The standard library's own way, by which `multiprocessing` starts processes; no public function has it.
    return [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
