"""After a death: a communicator of the survivors, on two paths of real MPI.

With ULFM switched on (Open MPI under `--with-ft ulfm`) the library revokes and shrinks. Without it, watchdogs find out
who still answers, and the survivors make a group of their own; for that the job must have been started to survive
(`launch(survive=True)`), and collectives must be such that can be left (`Options(survive=True)`). Knows mpi4py and the
rank's home.
"""

from __future__ import annotations

import atexit
import os
import queue
import signal
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from spawnsim.comm.recovery import Capabilities, Recovery
from spawnsim.errors import RankFailed, Revoked
from spawnsim.real.watchdog import GRACE_S

if TYPE_CHECKING:
    from spawnsim.real.home import Home
    from spawnsim.real.mpi import MPIComm

NOWHERE = np.iinfo(np.int64).max  # the step of a rank that gives none
SURVIVE = "SPAWNSIM_SURVIVE"
"""Set by `launch(survive=True)`: the launcher lets the others live when a rank dies."""


def ulfm() -> bool:
    """Whether this MPI's fault tolerance is switched on; that the calls exist says nothing."""
    switch = "OMPI_MCA_mpi_ft_enable"  # set by mpiexec --with-ft ulfm
    return MPI.get_vendor()[0] == "Open MPI" and os.environ.get(switch) in ("1", "true")


def capabilities(home: Home) -> Capabilities:
    """Return what can be done, without trying it."""
    vendor, version = MPI.get_vendor()
    survives = ulfm() or (home.options.survive and SURVIVE in os.environ)
    flag = "mpiexec --with-ft ulfm" if vendor == "Open MPI" else "mpiexec -disable-auto-cleanup"
    advice = f"to survive a rank's death start with launch(survive=True), or {flag} by hand"
    return Capabilities(
        backend="mpi",
        library=f"{vendor} {'.'.join(map(str, version))}",
        survives=survives,
        ulfm=ulfm(),
        progress="poll",  # Win.Allocate on one node: always; else at polls and ends of compute blocks
        threads={0: "single", 1: "funneled", 2: "serialized"}.get(MPI.Query_thread(), "multiple"),
        missing=() if survives else (advice,),
    )


def prepare(home: Home) -> None:
    """Make a rank fit to survive others: called once MPI is up, since before it MPICH puts its own handler there."""
    heard = home.watchdog.heard
    heard |= {"alive": lambda sender, message: _heard(home, sender, message)}
    heard |= {"ack": lambda sender, _: home.answered.add(sender)}
    heard |= {"fenced": lambda _, message: home.fenced.append(message["epoch"])}
    if home.options.survive and MPI.get_vendor()[0] == "MPICH":
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _heard(home: Home, sender: int, message: dict[str, Any]) -> None:
    """Another rank recovers: say that this one lives, and let its next call end in Revoked."""
    if sender in home.lost:
        home.watchdog.channel.send(sender, {"kind": "fenced", "epoch": home.epoch})
        return
    if message["epoch"] >= home.epoch:
        home.revoked = True
    home.watchdog.channel.send(sender, {"kind": "ack"})


def recover(comm: MPIComm, step: int | None = None) -> Recovery:
    """Return the communicator of the survivors. All of them must call; `step` is where this one stands.

    Raises `Revoked` on a rank that the others have given up meanwhile (it was stopped): it must leave.
    """
    home = comm._home
    new = _shrunk(comm) if ulfm() else _regrouped(comm)
    home.revoked = False
    agreed = np.array([NOWHERE if step is None else step], np.int64)
    new.Allreduce(MPI.IN_PLACE, agreed, MPI.MIN)
    home.epoch += 1
    home.farewell = new.Dup()
    home.poll_by(new)
    survivors = type(comm)(new, home, f"{comm.label}/recovered{home.epoch}")
    old = {comm.members.index(member): rank for rank, member in enumerate(survivors.members)}
    dead = tuple(sorted(set(range(comm.size)) - set(old)))
    home.lost |= {comm.members[rank] for rank in dead}
    comm.record.event("recovered", dead=list(dead), size=survivors.size, step=int(agreed[0]))
    return Recovery(survivors, old, None if agreed[0] == NOWHERE else int(agreed[0]), dead)


def _shrunk(comm: MPIComm) -> Any:
    """ULFM's way: revoke, so that all come here, and shrink."""
    raw: Any = comm._raw
    if not raw.Is_revoked():
        raw.Revoke()
    return raw.Shrink()


def _regrouped(comm: MPIComm) -> Any:
    """The way of all others: who answers within the grace time is a survivor."""
    home = comm._home
    if not home.options.survive:
        raise RankFailed(
            (), f"rank {comm.rank}: recover() needs Options(survive=True), and launch(survive=True)"
        )
    found: queue.SimpleQueue[set[int]] = queue.SimpleQueue()
    home.watchdog.do(lambda: found.put(_who_answers(home, comm.members)))
    alive = found.get()
    if home.fenced:
        raise Revoked(
            f"rank {comm.rank}: the others went on without this rank (epoch {home.fenced[-1]}): it must leave"
        )
    members = [member for member in comm.members if member in alive]
    if len(members) < comm.size:
        atexit.register(_leave_quietly)
    return home.raw.Create_group(home.raw.Get_group().Incl(members), home.epoch + 1)


def _who_answers(home: Home, members: tuple[int, ...]) -> set[int]:
    """Ask all members whether they live; in the watchdog's thread."""
    home.answered.clear()
    home.fenced.clear()
    me = home.own.rank
    wanted = {member for member in members if member != me}
    for member in wanted:
        home.watchdog.channel.send(member, {"kind": "alive", "epoch": home.epoch})
    home.watchdog.serve_until(lambda: wanted <= home.answered or bool(home.fenced), GRACE_S)
    return {me, *home.answered}


def _leave_quietly() -> None:
    """Leave without MPI's own end, which would wait for the dead."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
