"""Stands between MPICH's launcher and a rank: knows how the rank has really ended, and says so before anybody else.

When a rank dies, MPICH's launcher sees its socket closed, kills the others, and then tells of whichever process it
looks at first. So each rank that our own launcher has started forks, before it loads anything: the child goes on as
the rank, and its parent keeps the socket open until it has said which signal killed the rank. A job that is to survive
its ranks needs it too: after a death by a signal the launcher would stop to forward output, so there the keeper ends
as if all were well. Knows processes and signals alone.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress

from spawnsim.real.launching.orphans import dying_with_parent
from spawnsim.real.launching.roll import FIRST_DEATH, FIRST_EXIT, ROLL, SURVIVE, sign, sign_first

SPOKEN = "[spawnsim keeper]"  # begins what a keeper says to a launcher whose folder it cannot reach
HANDED_ON = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT,
)  # fmt: skip


def keep(rank: int, environ: Mapping[str, str]) -> None:
    """Go on as a child whose end this process waits for, where our launcher is MPICH's and the system allows it.

    To be called while the process has one thread. What a rank does in its process group is not done to its keeper, nor
    the other way round: when a launcher kills the keeper's, the rank dies with its keeper, which has said nothing.
    """
    die_with_parent = dying_with_parent(signal.SIGKILL)
    if ROLL not in environ or "PMI_FD" not in environ or die_with_parent is None:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    keeper, former = os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON)
    if child := os.fork():
        _wait(rank, child, environ)
    die_with_parent()
    if os.getppid() != keeper:  # it died in between
        os._exit(128 + signal.SIGKILL)
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _wait(rank: int, child: int, environ: Mapping[str, str]) -> None:
    """Wait for the rank's end, and end likewise. Does not return."""
    status = 1
    try:
        sign(rank, environ, os.getpid())
        sign(rank, environ, child)
        sign("", environ, os.getppid())
        _hand_on(child, but=[signal.SIGUSR1] if SURVIVE in environ else [])
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        who = f"rank {rank} (process {child} on {os.uname().nodename})"
        if status > 0:
            sign_first(FIRST_EXIT, status, f"{who} left with status {status}", environ)
        if status < 0:
            status = _killed(who, -status, environ)
    finally:
        os._exit(status)


def _hand_on(child: int, *, but: list[int]) -> None:
    """Give the signals that this process gets to the rank. MPICH's own SIGUSR1 about a death is for nobody."""

    def handler(number: int, _frame: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(child, number)

    for number in HANDED_ON:
        signal.signal(number, signal.SIG_IGN if number in but else handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDED_ON)


def _killed(who: str, number: int, environ: Mapping[str, str]) -> int:
    """Say who was killed by what; return the status to end with."""
    text = f"{who} was killed by {name(number)}"
    if SURVIVE in environ:
        _say(f"spawnsim: {text}")
        return 0
    if not sign_first(FIRST_DEATH, 128 + number, text, environ):
        _say(f"{SPOKEN} {text}")
    return 128 + number


def name(number: int) -> str:
    """Return a signal's number, with its name if it has one."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _say(line: str) -> None:
    with suppress(OSError):  # nobody listens
        os.write(2, f"{line}\n".encode())
