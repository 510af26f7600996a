"""Stands between MPICH's launcher and one rank, so that the death of the rank is no death of the launcher's process.

`python -m spawnsim.real.launching.keeper COMMAND…` runs a command and ends with its status, or with 0 if a signal has
killed it. MPICH's launcher lets others live when a process ends (`-disable-auto-cleanup`), but when a signal kills one,
it stops to forward output, and the next line that anybody writes ends the job; so does the first survivor that ends.
Knows processes and signals alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent has died


def _die_with_parent() -> None:
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(command: Sequence[str]) -> int:
    """Run a command; return its status, 0 if it was killed."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    kept = subprocess.Popen(command, close_fds=False, preexec_fn=_die_with_parent)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: kept.send_signal(number))
    status = kept.wait()
    if status >= 0:
        return status
    rank = os.environ.get("PMI_RANK", "?")
    sys.stderr.write(
        f"spawnsim: rank {rank} (process {kept.pid}) was killed by {signal.Signals(-status).name}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
