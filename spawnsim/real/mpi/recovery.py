"""Recovery after a death: creating a communicator of the survivors.

`recover(comm)` revokes the old communicator (`Revocation`) and creates a new one of the surviving ranks (`Survival`).
It uses the watchdogs' agreement (`agreement`) in a job that was started with survival enabled, and ULFM's own calls in
a job that was started by hand under `mpiexec --with-ft ulfm`.
"""

# Why there are two ways: the agreement works on any MPI, and excludes a stopped rank as well as a dead one. But it
# needs collectives that can be abandoned (`Options(survive=True)`), and therefore does without the library's blocking
# calls and sums in shared memory. A program under ULFM without that option uses the fast calls, which the library ends
# when a rank dies. There Revoke and Shrink suffice, and take 1 to 12 ms instead of 25. They wait forever for a stopped
# rank, so they cannot be the only way.

from __future__ import annotations

import atexit
import os
import queue
import signal
import socket
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from spawnsim.comm.constants import ANY_SOURCE
from spawnsim.comm.protocols import Capabilities, Recovery
from spawnsim.errors import RankFailed, Revoked, SpawnsimError, Timeout, WorldError
from spawnsim.real.mpi.abortable import DetachedCall
from spawnsim.real.mpi.agreement import FENCED, Agreement, Decision, Round, ShutdownBarrier
from spawnsim.real.mpi.collectives import LibrarySum, SharedMemorySum
from spawnsim.real.mpi.runtime import CommCore, MPIRuntime, abort, acknowledge, over, polling
from spawnsim.real.mpi.translation import DETECTED_S, failed_ranks, failure, ulfm
from spawnsim.real.runtime.abort import refuse_recovery
from spawnsim.real.runtime.registry import SURVIVE, KnownDeaths
from spawnsim.real.runtime.requests import wait_until

ALLOWED = ("tomemory", "Get_group", "Is_inter", "handle", "name")


class RevokedHandle:
    """Replaces the library's handle in a revoked communicator or window: any call raises `Revoked`.

    So no call has to check for a revocation first, which would slow down every message of a run without deaths.
    """

    def __init__(self, beneath: Any, why: str) -> None:
        self._beneath, self._why = beneath, why

    def __getattr__(self, name: str) -> Any:
        if name in ALLOWED:
            return getattr(self._beneath, name)
        raise Revoked(f"{name} {self._why}")

    def Free(self) -> None:
        """Do nothing: freeing is collective, and some members are dead."""

    def Abort(self, errorcode: int = 0) -> None:
        abort(errorcode)


class Revocation:
    """One rank's revoked communicators. `dropped` counts late messages by the sender's world rank.

    MPI cannot end open calls on a communicator with dead members, and freeing it is collective. So the handles stay
    alive, but the program cannot use them. Buffers of open calls are kept for the rest of the run, since the library
    may still write to them. Late messages are received and dropped one by one, at polls.
    """

    def __init__(self, runtime: MPIRuntime) -> None:
        self._runtime = runtime
        self.kept: list[Any] = []  # requests, buffers and windows that the library may still access
        self.dropped: Counter[int] = Counter()
        self._old: list[tuple[Any, tuple[int, ...]]] = []
        self._next, self._landing = 0, list[Any]()

    def __call__(self, lineage: str, why: str) -> None:
        """Revoke the communicators of a lineage ("": all), their windows and requests; callable from any thread."""
        runtime = self._runtime
        for comm in list(runtime.comms):
            inside = not lineage or comm.label == lineage or comm.label.startswith(f"{lineage}/")
            if inside and not comm.revoked:
                self._take(comm, f"on {comm.label}, which was revoked: {why}")
        theirs = [
            window
            for window in runtime.windows
            if not isinstance(window, SharedMemorySum) and window._comm.revoked
        ]
        for window in theirs:
            runtime.windows.remove(window)
            self.kept.append((window._raw, window._words))
            why_not = f"on {window.label}, whose communicator was revoked: {why}"
            for handle in ("_raw", "_words", "_tokens"):
                setattr(window, handle, RevokedHandle(getattr(window, handle), why_not))
        for request in runtime.registry.held():
            self._end(request)

    def _take(self, comm: Any, why: str) -> None:
        raw = comm._raw
        comm.revoked, comm._raw = why, RevokedHandle(raw, why)
        if comm._node in self._runtime.windows:  # freeing its memory would need the dead ranks
            self._runtime.windows.remove(comm._node)
            self.kept.append(comm._node)
        comm._node = LibrarySum(comm._raw)
        for name in [name for name, value in vars(comm).items() if isinstance(value, FunctionType)]:
            del comm.__dict__[name]  # methods that were bound to the handle
        self._old.append((raw, comm.members))

    def _end(self, request: Any) -> None:
        """End an open request of a revoked communicator with `Revoked`; cancel a receive."""
        operation, _, comm = request._what
        if not comm.revoked or request.advance():
            return
        with request._lock:
            if request.complete():
                return
            self.kept.append(request._raw)
            if operation.endswith(("recv", "Recv")) and request._raw != MPI.REQUEST_NULL:
                request._raw.Cancel()
            request._error, request._complete = Revoked(f"{operation} {comm.revoked}"), True

    # ---------------------------------------------------------------------------------------- late messages
    def probe_by(self, current: Callable[[int, int], bool]) -> Callable[[int, int], bool]:
        def probe(source: int, tag: int) -> bool:
            self._drop_one()
            return current(source, tag)

        return probe

    def _drop_one(self) -> None:
        self._next = (self._next + 1) % len(self._old)
        raw, members = self._old[self._next]
        status = MPI.Status()
        try:
            message = raw.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status) if raw else None
        except MPI.Exception:
            acknowledge(raw)
            return
        if self._landing:
            self._landing = [request for request in self._landing if not over(request)]
        if message is None:
            return
        nbytes, source = status.Get_count(MPI.BYTE), members[status.Get_source()]
        self._landing.append(message.Irecv([bytearray(nbytes), MPI.BYTE]))
        self.dropped[source] += 1
        self._runtime.services.record.event("late_message", source=source, nbytes=nbytes)


T = TypeVar("T")
ROUNDS = 16  # maximum number of rounds of one recovery
TRIES = 3  # failed creations in a row without another death: the library then cannot create communicators any more
ALONE_S = 1.0  # how long the creation may be the rank's only library call; shorter than the limit of silence
LEFT_S = 1.0  # how long a last message may take to leave
FUTILE = 5  # maximum number of recoveries in a row from one step, without a death
NOWHERE = np.iinfo(np.int64).max  # the step of a rank that passes none


def capabilities(runtime: MPIRuntime) -> Capabilities:
    """Return the capabilities, without testing them."""
    vendor, version = MPI.get_vendor()
    survives = ulfm() or (runtime.options.survive and SURVIVE in os.environ)
    flag = "mpiexec --with-ft ulfm" if vendor == "Open MPI" else "mpiexec -disable-auto-cleanup"
    advice = f"to survive a rank's death start with spawnsim run --survive, or {flag} by hand"
    return Capabilities(
        backend="mpi",
        library=f"{vendor} {'.'.join(map(str, version))}",
        survives=survives,
        ulfm=ulfm(),
        progress="poll",  # Win.Allocate on one node: always; otherwise at polls and ends of compute blocks
        threads={0: "single", 1: "funneled", 2: "serialized"}.get(MPI.Query_thread(), "multiple"),
        devices=("cpu", "cuda"),  # GPU tensors are staged if MPI cannot access them
        missing=() if survives else (advice,),
    )


class Survival:
    """One rank's state for surviving the deaths of other ranks; each runtime has one."""

    def __init__(self, runtime: MPIRuntime) -> None:
        self._runtime = runtime
        self.revoking = Revocation(runtime)
        self.kept = self.revoking.kept
        self.agreement = Agreement(runtime.abort, self._revoke, lambda: runtime.abort.program_ended)
        runtime.abort.given_up = lambda: self.agreement.fenced
        self.shutdown: ShutdownBarrier | None = None  # the final barrier, which does not use the library
        self.acknowledged: dict[str, set[int]] = {}  # world ranks, by communicator
        self._futile, self._step = 0, -1
        self._alone = False
        self._places: list[tuple[str, int]] = []
        self._base: Any = None
        self._recorded = KnownDeaths(os.environ)

    def prepare(self) -> None:
        """Prepare the rank to survive deaths; after `MPI_Init`, since MPICH's `MPI_Init` sets a SIGUSR1 handler."""
        runtime = self._runtime
        raw = runtime.raw
        self._base = raw.Dup()
        self.agreement.dead = runtime.abort.dead = self.dead
        self._places = raw.allgather((socket.gethostname(), os.getpid()))
        runtime.give_up = self.give_up
        self.shutdown = ShutdownBarrier(runtime.abort, self._gone, self.fence)
        if runtime.options.survive and MPI.get_vendor()[0] == "MPICH":
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    # -------------------------------------------------------------------------------------------------- deaths
    def dead(self) -> set[int]:
        """Return the world ranks that have died according to the library or their monitors."""
        library = failed_ranks(self._base) if ulfm() else ()
        return {*library, *self._recorded()}

    def failed(self, comm: CommCore) -> list[int]:
        gone = self._gone()
        return [rank for rank, member in enumerate(comm.members) if member in gone]

    def acknowledge(self, comm: CommCore, number: int | None) -> int:
        """Let receives from any rank continue without dead ranks; return the number of acknowledged ranks."""
        dead = [comm.members[rank] for rank in self.failed(comm)][:number]
        self.acknowledged[comm.label] = set(dead)
        return len(dead)

    def require(self, call: tuple[str, int, Any], peer: int | None) -> None:
        """Raise `RankFailed` if a call waits for a dead rank; for the arguments see `RankRuntime.wait`."""
        operation, number, comm = call
        dead = self._recorded()
        if not dead or comm._inter or (number < 0 and peer is None):
            return
        if number >= 0:
            awaited = set(comm.members)
        elif peer == ANY_SOURCE:
            awaited = set(comm.members) - self.acknowledged.get(comm.label, set())
        else:
            awaited = {comm.members[peer]} if peer in range(comm.size) else set()
        if awaited & dead:
            ranks = [comm.members.index(member) for member in sorted(awaited & dead)]
            who = ", ".join(map(str, ranks))
            text = f"rank {comm.rank} of {comm.label}: {operation} waits for dead ranks; missing: rank {who}"
            raise RankFailed(ranks, text)

    def give_up(self, ranks: set[int]) -> None:
        self.fence()
        self.agreement.lost |= ranks

    def _revoke(self, lineage: str) -> None:
        self.revoking(
            lineage, FENCED if self.agreement.fenced else "ranks recover from a death; recover() too"
        )

    def fence(self) -> None:
        if self.agreement.fenced:
            # `from None`: the only error that this rank reports.
            raise Revoked(f"rank {self._runtime.services.rank}: {FENCED}") from None

    def regroup(self, comm: CommCore, step: int | None) -> tuple[Any, Decision]:
        """Return a library communicator of the survivors, and their decision."""
        runtime, lineage = self._runtime, lineage_of(comm)
        state, limit_s = self.agreement.lineages[lineage], runtime.clock.limit_s()
        self._revoke(lineage)
        number, tries, gone = state.done + 1, 0, set[int]()
        for _ in range(ROUNDS):
            meeting = Round(lineage, comm.members, max(number, state.highest), step, limit_s)
            number = meeting.number
            decision = self._watched(partial(self.agreement.meet, meeting))
            if decision is not None and self._watched(partial(self.agreement.agreed, meeting, decision)):
                tries, gone = tries * (gone == self._gone()) + 1, self._gone()
                if (made := self._watched(partial(self._made, meeting, decision))) is not None:
                    return made.result(), decision
            number += decision is not None
            self.fence()
            if tries == TRIES and gone == self._gone():
                break
        rounds, name = number - state.done - 1, MPI.get_vendor()[0]
        raise WorldError(
            f"rank {comm.rank} of {comm.label}: no communicator of the survivors after {rounds} rounds. A call of "
            f"{name} that creates one may prevent it from creating others if a rank died during the call"
        )

    def _gone(self) -> set[int]:
        return self.agreement.lost | self.dead()

    def _made(self, meeting: Round, decision: Decision) -> DetachedCall[Any] | None:
        """Return the call that has created the communicator on all members, or None if it was given up.

        This runs in the watchdog's thread, which makes no other library call meanwhile; neither do the polls of other
        threads. While a rank is creating a communicator, Open MPI 5 loses a message on it if another thread of the rank
        receives the message: it is kept with the long header that `Create_from_group` needs, and so matches no receive
        (`mca_pml_ob1_add_comm`).
        """
        known = self._recorded()
        with self._runtime.unpolled():
            made = DetachedCall(partial(self._make, meeting, decision))  # after a death, it may never return
            wait_until(lambda: made.over() or self._recorded() != known, ALONE_S)
        if self.agreement.confirm(meeting, decision, made.well):
            return made
        self.kept.append(made)
        return None

    def _make(self, meeting: Round, decision: Decision) -> Any:
        group = self._base.Get_group().Incl(list(decision.members))
        name = f"spawnsim {meeting.lineage} {meeting.number} {decision.by}"  # a new name for each attempt
        if ulfm():  # Open MPI refuses `Create_group` on a communicator with dead members
            self.settle()
            return MPI.Intracomm.Create_from_group(group, name, errhandler=MPI.ERRORS_RETURN)
        return self._base.Create_group(group, 1 + zlib.crc32(name.encode()) % 2**14)

    def settle(self) -> None:
        """Wait until the library has also detected all deaths.

        Its failure handler iterates over all communicators, and crashes on an incomplete one.
        """

        def known() -> bool:
            MPI.COMM_SELF.Iprobe()  # it detects deaths only in its progress engine, and this may be the only caller
            return self._recorded() <= set(failed_ranks(self._base))

        wait_until(known, DETECTED_S)

    def _watched(self, job: Callable[[], T]) -> T:
        """Run a part of the agreement in the watchdog's thread, which owns the channel."""
        found: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def run() -> None:
            try:
                found.put((job(), None))
            except BaseException as error:  # noqa: BLE001  the calling thread raises it
                found.put((None, error))

        self._runtime.watchdog.do(run)
        result, error = found.get()
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def refuse_futile(self, comm: CommCore, step: int | None, dead: tuple[int, ...]) -> None:
        """Refuse endless recovery if the cause is not a death: a program that tries again would never end."""
        self._futile = 0 if dead or step is None or step != self._step else self._futile + 1
        self._step = -1 if step is None else step
        if self._futile >= FUTILE:
            raise WorldError(
                f"rank {comm.rank} of {comm.label}: {FUTILE} recoveries in a row have begun at step {step}, but no "
                f"rank has died; the last one was caused by {sys.exc_info()[1]!r}"
            ) from None

    def leave_alone(self) -> None:
        """End this rank without `MPI_Finalize` from now on, since `MPI_Finalize` would wait for dead ranks."""
        if not self._alone:
            self._alone = True
            atexit.register(self._leave)

    def end(self) -> bool:
        """Wait until the last messages have left; return whether this rank ends without `MPI_Finalize`.

        It does so if the launcher allows it. A plain mpiexec treats such an end as a failure and kills the other ranks,
        so under it ranks finalize together, unless one of them has died.
        """
        self._watched(self.agreement.notify_lost)
        self._watched(partial(wait_until, self._runtime.channel.sent, LEFT_S))
        if ulfm() or SURVIVE in os.environ or self.agreement.lost or self.dead():
            self.leave_alone()
        return self._alone

    def _leave(self) -> None:
        """Exit without `MPI_Finalize`; send SIGCONT to ranks that were given up, so that stopped ones exit too."""
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in sorted(self.agreement.lost) if self._places else ():
            host, process = self._places[rank]
            if host == self._places[self._runtime.services.rank][0]:
                _continue(process)
        os._exit(0)


def _continue(process: int) -> None:
    try:
        os.kill(process, signal.SIGCONT)
    except OSError:  # it has ended
        return


def lineage_of(comm: CommCore) -> str:
    """Return the name that a communicator shares with all communicators that recoveries create from it."""
    head, _, last = comm.label.rpartition("/")
    return head if last.startswith("recovered") else comm.label


def prepare(runtime: MPIRuntime) -> None:
    """Prepare recovery; called on all ranks after MPI is initialized."""
    runtime.survival = Survival(runtime)
    if runtime.options.survive or ulfm():
        runtime.survival.prepare()


def recover(comm: CommCore, step: int | None = None) -> Recovery:
    """Return the communicator of the survivors. All survivors must call it; `step` is this rank's current step.

    It ends `comm` and all objects created from it (communicators, windows, open requests): calls on them raise
    `Revoked`. Living ranks that do not take part within the deadline are given up, like dead ranks.

    Raises:
        Revoked: the other ranks have given up this rank meanwhile (it was stopped): it must leave.
        WorldError: the ranks have recovered `FUTILE` times from one step without a death, so it has another cause.
    """
    runtime, survival = comm.runtime, comm.runtime.survival
    survival.fence()
    if ulfm() and not runtime.abortable:
        raw, agreed = _shrink_by_ulfm(comm, step)
        survival.revoking(
            lineage_of(comm), "it has been recovered; use the communicator that recover() returned"
        )
        runtime.probe_by(polling(raw, runtime.options))
    else:
        if not runtime.options.survive:
            refuse_recovery("recover() needs a job that was started by spawnsim run --survive")
        raw, decision = survival.regroup(comm, step)
        agreed = decision.step
        runtime.probe_by(survival.revoking.probe_by(polling(raw, runtime.options)))
    return _recovered(comm, raw, agreed)


def _recovered(comm: CommCore, raw: Any, step: int | None) -> Recovery:
    runtime, survival, lineage = comm.runtime, comm.runtime.survival, lineage_of(comm)
    runtime.epoch += 1
    label = f"{lineage}/recovered{survival.agreement.lineages[lineage].done or runtime.epoch}"
    survivors = type(comm)(raw, runtime, label)
    old = {comm.members.index(member): rank for rank, member in enumerate(survivors.members)}
    dead = tuple(sorted(set(range(comm.size)) - set(old)))
    # World ranks, as in all events.
    lost = {comm.members[rank] for rank in dead} - survival.agreement.lineages[lineage].ended
    survival.agreement.lost |= lost
    if dead:
        survival.leave_alone()
    state = survival.agreement.lineages[lineage]
    if state.highest > state.done:  # another round has begun since
        survival.revoking(lineage, "ranks recover from a death; recover() too")
    survival.refuse_futile(survivors, step, dead)
    facts = {"dead": sorted(lost), "size": survivors.size, "step": -1 if step is None else step}
    comm.record.event("recovered", **facts)
    return Recovery(survivors, old, step, dead)


def _shrink_by_ulfm(comm: CommCore, step: int | None) -> tuple[Any, int | None]:
    """Revoke, so that all ranks take part, and shrink until no rank dies meanwhile; all with ULFM's own calls."""
    raw: Any = comm._raw
    error: SpawnsimError | None = None
    for _ in range(ROUNDS):
        if not raw.Is_revoked():
            raw.Revoke()
        raw = raw.Shrink()
        agreed = np.array([NOWHERE if step is None else step], np.int64)
        whole = 1
        try:
            raw.Allreduce(MPI.IN_PLACE, agreed, MPI.MIN)
        except MPI.Exception as found:
            whole, error = 0, failure(found, raw, f"rank {comm.rank} of {comm.label}: recover")
        if _all_agree(raw, whole):
            return raw, None if agreed[0] == NOWHERE else int(agreed[0])
    raise error or Timeout(
        (), "recover", -1, f"rank {comm.rank} of {comm.label}: no agreement after {ROUNDS} rounds"
    )


def _all_agree(raw: Any, flag: int) -> bool:
    """Return whether all survivors pass 1; all survivors get the same result, even if one dies during the call."""
    try:
        return bool(raw.Agree(flag))
    except MPI.Exception:
        return False
