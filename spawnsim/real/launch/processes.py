"""The processes of a job: the registry that they write to, the monitor of each rank, and what becomes of orphans.

The *registry* is a folder of the launcher's, in which processes write who they are, how far they have come, and which
has ended first; ranks on other nodes may not reach it, and then write nothing. A *monitor* is the parent process of a
rank: it waits for the rank and writes down how it has ended. Processes that lose their parents are adopted by the
launcher's process (Linux: subreaper). Uses files, signals and processes alone.
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

from spawnsim.errors import WorldError

REGISTRY = "SPAWNSIM_REGISTRY"
"""Names the folder. Each process writes a file: its process id is the name, its rank the content, if it has one."""
SURVIVE = "SPAWNSIM_SURVIVE"
"""Set where the launcher lets the others live when a rank dies."""
CHECK_CALLS = "SPAWNSIM_CHECK_CALLS"
"""Set where collectives first compare their calls on all ranks."""
COMMAND = "SPAWNSIM_COMMAND"
"""What the user typed, for the record: ranks are started with other arguments."""
# The rank has met all others, and its program begins: from here on others may survive its death.
BEGUN = "begun"
ENDED = "ended"  # its program has ended, and nothing is left to do
DEAD = "dead"  # it has ended in any other way
FIRST_END = "first end"  # of a rank, by which the job ends: status and sentence
WORLD_ERROR = WorldError.exit_status  # the status of a job that something outside of its programs has ended
REREAD_S = 0.01  # how often at most a rank reads which ranks have died
KNOWN_S = 0.5  # how much later than its peers a monitor may learn of a rank's death


@dataclass(frozen=True)
class ProcessRegistry:
    """What the launcher reads."""

    folder: Path

    @property
    def processes(self) -> list[int]:
        """Return the process ids of all that have registered."""
        return [int(file.name) for file in self.folder.iterdir() if file.name.isdigit()]

    @property
    def launchers(self) -> list[int]:
        """Return the parents of monitors, which these have registered: the launcher's own processes on this node."""
        return [process for process in self.processes if not self.rank_of(process)]

    @property
    def of_ranks(self) -> set[int]:
        """Return the process ids of ranks and of their monitors."""
        return {process for process in self.processes if self.rank_of(process)}

    @property
    def ranks(self) -> set[int]:
        """Return the ranks that have registered."""
        return {int(self.rank_of(process)) for process in self.of_ranks}

    @property
    def ended_well(self) -> bool:
        """Whether a rank has come to the end of its program, or none has registered."""
        return bool(_reached(self.folder, ENDED)) or not any(self.folder.iterdir())

    @property
    def begun(self) -> set[int]:
        """Return the ranks whose program has begun."""
        return _reached(self.folder, BEGUN)

    def first_end(self) -> tuple[int, str] | None:
        """Return the status and the sentence of the first end; the sentence is empty if the rank has reported it."""
        return _first(self.folder)

    def rank_of(self, process: int) -> str:
        """Return the rank that a process is, or monitors; "" if that is not known."""
        file = self.folder / str(process)
        return file.read_text() if file.is_file() else ""


def register(rank: int | str, environ: Mapping[str, str], process: int) -> None:
    """Write which process a rank is, where the launcher asked for it and its folder can be reached from here."""
    if folder := _folder(environ):
        # Moved into its place as a whole: the launcher reads at any time, also while a process registers once more.
        draft = folder / f"{process} by {os.getpid()}"
        draft.write_text(str(rank))
        draft.replace(folder / str(process))


def register_stage(stage: str, rank: int, environ: Mapping[str, str]) -> None:
    """Write how far a rank has come: BEGUN, ENDED or DEAD."""
    if folder := _folder(environ):
        (folder / f"{stage} {rank}").touch()


def ranks_at_stage(stage: str, environ: Mapping[str, str]) -> set[int] | None:
    """Return the ranks that have come to a stage; None where that cannot be known from here."""
    folder = _folder(environ)
    return None if folder is None else _reached(folder, stage)


def record_first_end(status: int, sentence: str, environ: Mapping[str, str]) -> bool | None:
    """Write how a rank has ended, unless another was first; return whether this one was, None where it cannot be known.

    Only the first end counts: once it is known, launchers kill the other ranks, whose ends say nothing about the cause.
    """
    folder = _folder(environ)
    if folder is None:
        return None
    # The writer may be killed at any time, and several write at once. A hard link under the common name is atomic and
    # fails if the name exists, so the record appears as a whole or not at all, and once; opening with O_EXCL and then
    # writing could leave an empty record for good.
    draft = folder / f"{FIRST_END} seen by {os.getpid()}"
    draft.write_text(f"{status} {sentence}")
    try:
        os.link(draft, folder / FIRST_END)
    except FileExistsError:
        return False
    finally:
        draft.unlink()  # else what this process writes next would change the record, which is the same file
    return True


def first_end(environ: Mapping[str, str]) -> tuple[int, str] | None:
    """Return the status and the sentence of the first end, if there was one."""
    folder = _folder(environ)
    return None if folder is None else _first(folder)


def wait_for_first_end(environ: Mapping[str, str]) -> None:
    """Wait until the first end is known, for as long as a monitor may need to write it; not where it cannot."""
    due_s = time.monotonic() + KNOWN_S
    while _folder(environ) and first_end(environ) is None and time.monotonic() < due_s:
        time.sleep(REREAD_S)


def scratch_folder(environ: Mapping[str, str]) -> Path | None:
    """Return a run folder for a job that survives its ranks and keeps none: it is gone with the launcher."""
    folder = _folder(environ)
    return folder / "run" if folder and SURVIVE in environ else None


class KnownDeaths:
    """The world ranks that have died, as their monitors have written; reads at most every `REREAD_S` seconds."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._folder, self._due_s = _folder(environ), 0.0
        self._known = frozenset[int]()

    def __call__(self) -> frozenset[int]:
        """Return the world ranks."""
        now_s = time.monotonic()
        if self._folder is not None and now_s > self._due_s:
            self._due_s = now_s + REREAD_S
            with suppress(FileNotFoundError):  # the launcher is gone
                self._known = frozenset(_reached(self._folder, DEAD))
        return self._known


def _reached(folder: Path, stage: str) -> set[int]:
    names = (name.partition(" ") for name in os.listdir(folder))
    return {int(rank) for word, _, rank in names if word == stage}


def _first(folder: Path) -> tuple[int, str] | None:
    try:
        status, _, sentence = (folder / FIRST_END).read_text().partition(" ")
    except FileNotFoundError:
        return None
    return int(status), sentence


def _folder(environ: Mapping[str, str]) -> Path | None:
    folder = Path(environ.get(REGISTRY, "/nowhere"))
    return folder if folder.is_dir() else None


PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent has died
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37  # Linux: orphans become children of this process
PATIENCE_S = 2.0  # how long an orphan may take to end by itself
REAP_LOOK_S = 1e-3


def _prctl() -> Callable[..., int] | None:
    """Return Linux's control of processes, where there is one."""
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


def signal_name(number: int) -> str:
    """Return a signal's number, with its name if it has one."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _say(line: str) -> None:
    with suppress(OSError):  # the pipe is closed
        os.write(2, f"{line}\n".encode())
