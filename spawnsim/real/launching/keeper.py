"""Stands between a launcher and a rank: knows how the rank has really ended, and says so before anybody else.

When a rank dies, launchers stop the others, and then tell of whichever process they look at first; one that ends before
MPI is up MPICH's does not even notice. So each rank that our own launcher has started forks, before it loads anything:
the child goes on as the rank, and its parent waits for it and signs the roll. There the launcher sees that the job must
end, and survivors see who has died. In a job that survives a death the keeper ends as if all were well, because MPICH's
launcher would stop to forward output. Knows processes and signals alone.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from spawnsim.real.launching.orphans import dying_with_parent
from spawnsim.real.launching.roll import (
    BEGUN,
    DEAD,
    ENDED,
    ROLL,
    SURVIVE,
    WORLD,
    first_end,
    reached,
    sign,
    sign_first_end,
    sign_stage,
)

SPOKEN = "[spawnsim keeper]"  # begins what a keeper says to a launcher whose folder it cannot reach
ORPHANED = (
    signal.SIGALRM
)  # what the system sends when a thread of the launcher has ended that had started the keeper
STOP_S = 2  # for the last words of a rank whose launcher has died
HEARD_S = 0.2  # from what a rank says to what the launcher has heard
HANDED_ON = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT,
)  # fmt: skip
AWAITED = (*HANDED_ON, ORPHANED, signal.SIGCHLD)


def keep(rank: int, environ: Mapping[str, str]) -> None:
    """Go on as a child whose end this process waits for, where our launcher has started it and the system allows it.

    To be called while the process has one thread. What a rank does in its process group is not done to its keeper, nor
    the other way round: when a launcher kills the keeper's, the rank dies with its keeper, which has said nothing.
    """
    die_with_parent, tell_of_parent = dying_with_parent(signal.SIGKILL), dying_with_parent(ORPHANED)
    if ROLL not in environ or die_with_parent is None or tell_of_parent is None:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    keeper, launcher = os.getpid(), os.getppid()
    former = signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    if child := os.fork():
        tell_of_parent()
        Keeper(rank, child, launcher, environ).wait()
    die_with_parent()
    if os.getppid() != keeper:  # it died in between
        os._exit(128 + signal.SIGKILL)
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, former)


@dataclass
class Keeper:
    """The parent of a rank's process, which is its `child`. `stopping`: somebody has told the rank to stop."""

    rank: int
    child: int
    launcher: int
    environ: Mapping[str, str]
    stopping: bool = False

    def wait(self) -> None:
        """Wait for the rank's end, and end likewise. Does not return."""
        status = 1
        try:
            for process in (os.getpid(), self.child):
                sign(self.rank, self.environ, process)
            sign("", self.environ, self.launcher)
            end = self._attend()
            status = self._tell(end) if end or not self._has(ENDED) else 0
        finally:
            os._exit(status)

    def _has(self, stage: str) -> bool:
        """Whether the rank has come to a stage. On other nodes the roll is out of reach: it counts as if it had."""
        ranks = reached(stage, self.environ)
        return ranks is None or self.rank in ranks

    def _attend(self) -> int:
        """Give the signals that this process gets to the rank until it ends; return its exit code.

        They stay blocked, and are taken one by one: a handler of Python's would not run when its signal came just
        before the wait. MPICH's own SIGUSR1 about a death is for nobody.
        """
        self._orphaned()  # unless it was too early for the signal
        while not (ended := os.waitpid(self.child, os.WNOHANG))[0]:
            number = signal.sigwait(AWAITED)
            if number == ORPHANED:
                self._orphaned()
            elif number in HANDED_ON and not (number == signal.SIGUSR1 and SURVIVE in self.environ):
                self._hand_on(number)
        return os.waitstatus_to_exitcode(ended[1])

    def _hand_on(self, number: int) -> None:
        self.stopping |= number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        with suppress(ProcessLookupError):
            os.kill(self.child, number)
            if self.stopping:  # one that is stopped would never hear it
                os.kill(self.child, signal.SIGCONT)

    def _orphaned(self) -> None:
        if os.getppid() == self.launcher:  # only a thread of it has ended
            return
        text = f"the launcher's process {self.launcher}, which had started rank {self.rank}, has died"
        sign_first_end(WORLD, text, self.environ)
        self._hand_on(signal.SIGKILL if self.stopping else signal.SIGTERM)
        signal.alarm(STOP_S)  # and again

    def _tell(self, end: int) -> int:
        """Say how the rank has ended, if the job goes on or nobody was first; return the status to end with."""
        status = 128 - end if end < 0 else end
        text = f"rank {self.rank} (process {self.child} on {os.uname().nodename}) {_how(end)}"
        sign_stage(DEAD, self.rank, self.environ)
        if self.stopping and end < 0:  # whoever has told it to stop knows why
            return status
        if SURVIVE in self.environ and self._has(BEGUN):
            if first_end(self.environ):
                return status
            _say(f"spawnsim: {text}")
            return 0
        if SURVIVE in self.environ:
            text += " before its program had begun: no job survives that"
        if sign_first_end(status or WORLD, text, self.environ) is None:
            _say(f"{SPOKEN} {status or WORLD} {text}")
        return status


def end_job(status: int, environ: Mapping[str, str]) -> None:
    """End the job of a rank that nobody keeps, before its MPI is up: MPICH's mpiexec does not notice that it leaves.

    By the word of MPICH's launcher that its library would say. Other launchers see that a rank has left with a status,
    and end the job themselves; srun does so with --kill-on-bad-exit.
    """
    if "PMI_FD" in environ and "MPI_LOCALRANKID" in environ:  # Slurm speaks another language there
        sys.stderr.flush()
        time.sleep(HEARD_S)
        os.write(int(environ["PMI_FD"]), b"cmd=abort exitcode=%d\n" % status)
        time.sleep(HEARD_S)


def _how(end: int) -> str:
    if end < 0:
        return f"was killed by {name(-end)}"
    return f"left with status {end}" if end else "left before its program had ended"


def name(number: int) -> str:
    """Return a signal's number, with its name if it has one."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _say(line: str) -> None:
    with suppress(OSError):  # nobody listens
        os.write(2, f"{line}\n".encode())
