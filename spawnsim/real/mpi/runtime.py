"""What all communicators of one MPI rank share, and what the parts of one communicator share.

How a rank polls, waits and ends on MPI (`MPIRuntime`), the watchdogs' messages over a communicator of their own
(`ControlChannel`), and what point-to-point calls, collectives and windows use of a communicator (`CommCore`).
"""

from __future__ import annotations

import array
import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer, get_ident
from typing import Any, NoReturn, cast

from mpi4py import MPI

from spawnsim.comm.constants import ANY_SOURCE
from spawnsim.errors import Revoked, SpawnsimError
from spawnsim.real.mpi.translation import Translator, failure, ulfm
from spawnsim.real.runtime.rank import RankComm, RankRuntime
from spawnsim.real.runtime.requests import SPINS, wait_until
from spawnsim.real.runtime.services import Options, RankServices

CONTROL_TAG = 1
SERVING_POLLS = 32
ABORT_S = 2.0  # how long MPI may take to end this process


class ControlChannel:
    """Small messages between watchdogs over a communicator of their own. Silent without THREAD_MULTIPLE."""

    def __init__(self, comm: MPI.Comm) -> None:
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._comm = comm
        self._usable = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._sent: list[MPI.Request] = []

    def send(self, to: int, message: dict[str, Any]) -> None:
        """Send without waiting; the handle is kept until the message has left. To a dead rank nothing is sent."""
        if not self._usable:
            return
        self.sent()
        try:
            self._sent.append(self._comm.isend(message, to, CONTROL_TAG))
        except MPI.Exception:  # the peer has failed: it will not answer, which is what the caller finds out
            return

    def sent(self) -> bool:
        self._sent = [request for request in self._sent if not over(request)]
        return not self._sent

    def receive(self) -> tuple[int, dict[str, Any]] | None:
        """Return the next message and who sent it, or None."""
        if not self._usable:
            return None
        status = MPI.Status()
        for _ in range(2):
            try:
                found = self._comm.improbe(MPI.ANY_SOURCE, CONTROL_TAG, status)
                return None if found is None else (status.Get_source(), found.recv())
            except MPI.Exception:  # a failed rank spoils ANY_SOURCE until it is acknowledged
                acknowledge(self._comm)
        return None


class MPIRuntime(RankRuntime):
    """One per rank and run. `survival` is made by `recovery.prepare`, before any call is waited for."""

    survival: Any

    def __init__(self, raw: MPI.Intracomm, services: RankServices, options: Options) -> None:
        self.raw = raw
        self.channel = ControlChannel(raw.Dup())
        self._closing = raw.Dup()  # for the collectives at the end, which must not meet one of the program's
        super().__init__(services, options, self.channel, abort)
        self.windows: list[Any] = []
        self.needy = False  # whether there are windows that others reach only while this rank polls
        self.translate = Translator(raw.Get_group())
        self.comms: list[CommCore] = []
        self.watchdog.progress = self._progress
        self._iprobe = polling(raw, options)
        services.compute.poll = self.serve
        self.abortable, self.epoch = options.survive, 0

    # --------------------------------------------------------------------------------------------- while running
    def poll(self) -> None:
        """Let MPI make progress, and let go of requests that are complete: under 1 us."""
        self._iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
        if self.registry:
            self.registry.sweep()

    def probe_by(self, probe: Any) -> None:
        """From now on poll by this call, of source and tag: a probe on a communicator with dead members fails."""
        self._iprobe = probe

    @contextmanager
    def unpolled(self) -> Iterator[None]:
        """Call nothing of the library at polls of this rank's threads, for a call that bears no other beside it."""
        probe, self._iprobe = self._iprobe, lambda _source, _tag: False
        try:
            yield
        finally:
            self._iprobe = probe

    def serve(self) -> None:
        """Poll at the end of a compute block; where windows need it, often enough to serve some hundred kB."""
        self.poll()
        if self.needy:
            probe = self._iprobe
            for _ in range(SERVING_POLLS):
                probe(MPI.ANY_SOURCE, MPI.ANY_TAG)

    def wait(
        self, done: Callable[[], bool], limit_s: float, call: tuple[str, int, Any], peer: int | None = None
    ) -> bool:
        """Wait as every runtime does; in a job that survives deaths, a wait for a dead rank ends in `RankFailed`."""
        for _ in range(SPINS):
            if done():
                return True
        registry = self.registry

        def look() -> bool:
            if registry:  # other requests go on while this one is awaited
                registry.sweep()
            if call[2].revoked:
                raise Revoked(f"{call[0]} {call[2].revoked}")
            if done():
                return True
            if self.abortable:
                self.survival.require(call, peer)
            return False

        active, thread = self.watchdog.active, get_ident()
        active[thread] = entry = (*call, time.perf_counter(), float("inf"))
        try:
            return wait_until(look, limit_s)
        finally:
            self.watchdog.last = entry
            active.pop(thread, None)

    def _progress(self) -> None:
        """Called by the watchdog: receives that were posted go on while the rank is inside a blocking collective."""
        if self.registry and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            for _ in range(len(self.registry)):
                self.registry.sweep()

    # ------------------------------------------------------------------------------------------------ at the end
    def begin_barrier(self) -> Callable[[], bool]:
        """Begin to wait for all ranks; in a job that survives deaths, for those that live."""
        if self.survival.shutdown is not None:
            here: Callable[[], bool] = self.survival.shutdown.begin_barrier()
            return here
        request = self._closing.Ibarrier()

        def all_here() -> bool:
            try:
                return request.Test()
            except MPI.Exception as error:
                raise failure(error, self._closing, f"rank {self.services.rank}: at the end") from None

        return all_here

    def lowest(self) -> int:
        found: int = 0 if self.survival.shutdown is None else self.survival.shutdown.lowest()
        return found

    def take_leftovers(self) -> int:
        """Take messages that were not received out of the library, on all communicators."""
        return sum(_taken(comm._raw) for comm in self.comms if comm._raw)

    def release(self) -> None:
        """Free windows, and stop the watchdog."""
        if self.survival.shutdown is None or not self.survival.end():
            self._release_windows()
        self.watchdog.stop()

    def _release_windows(self) -> None:
        """Free what the program has left, if all ranks have left the same: freeing is collective and must not hang."""
        labels = ",".join(window.label for window in self.windows)
        digest = zlib.crc32(labels.encode())
        ends = array.array("q", [digest, -digest])  # the maximum of both tells whether all are equal
        self._closing.Allreduce(MPI.IN_PLACE, ends, MPI.MAX)
        if ends[0] == -ends[1]:
            for window in self.windows:
                window.release()


class CommCore(RankComm):
    """What the parts of a communicator share.

    Attributes:
        members: the world ranks, in the order of the communicator's.
        revoked: why the communicator can no longer be used, once it cannot; "" until then.
    """

    runtime: MPIRuntime
    revoked = ""
    Barrier: Callable[[], None]  # `collectives` adds them; abortable calls and windows are built on them
    Allgather: Callable[..., None]
    Allgatherv: Callable[..., None]

    def __init__(self, raw: MPI.Comm, runtime: MPIRuntime, label: str) -> None:
        super().__init__(runtime, label)
        self._raw, self._sequence = cast("MPI.Intracomm", raw), 0  # and the number of its collectives so far
        self.rank, self.size = raw.Get_rank(), raw.Get_size()
        self.members = self._in_world(raw.Get_group())
        self._inter = raw.Is_inter()

    def _error(self, error: MPI.Exception, what: str, peer: int = ANY_SOURCE) -> SpawnsimError:
        """Return spawnsim's error for one of mpi4py's; `peer`: the rank whose process the call needs, if it is one."""
        return failure(error, self._raw, f"rank {self.rank} of {self.label}: {what}", peer)

    def _in_world(self, group: MPI.Group) -> tuple[int, ...]:
        return tuple(
            int(rank) for rank in MPI.Group.Translate_ranks(group, None, self.runtime.raw.Get_group())
        )


def abort(status: int) -> NoReturn:
    """End all ranks at once.

    MPICH's `Abort` comes back, a moment before its launcher kills the process: the program must not go on meanwhile.
    While Slurm cancels a step, Abort only waits to be killed: half a minute, for which all its nodes are held.
    """
    leave = Timer(ABORT_S, os._exit, (status & 0xFF,))
    leave.daemon = True
    leave.start()
    MPI.COMM_WORLD.Abort(status)
    os._exit(status & 0xFF)


def polling(comm: MPI.Comm, options: Options) -> Callable[[int, int], bool]:
    """Return the probe to poll by, of source and tag: all that matters is that the library makes progress.

    Where the library tells of deaths, a rank that only sends learns of them here; not in a job that survives them,
    since there the others tell it, and a policy may wish to go on without the dead.
    """
    if not ulfm():
        return comm.Iprobe
    if options.survive:
        return MPI.COMM_SELF.Iprobe

    def probe(source: int, tag: int) -> bool:
        try:
            return comm.Iprobe(source, tag)
        except MPI.Exception as error:
            raise failure(error, comm, "poll") from None

    return probe


def acknowledge(comm: Any) -> None:
    """Receive from any rank again, after some have failed."""
    if hasattr(comm, "Ack_failed"):
        comm.Ack_failed()


def over(request: MPI.Request) -> bool:
    """Whether a request has ended, well or not."""
    try:
        return request.Test()
    except MPI.Exception:
        return True


def _taken(raw: MPI.Comm) -> int:
    """Receive and drop all messages that have arrived on a communicator; return how many."""
    count, status = 0, MPI.Status()
    while (message := raw.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
        message.Recv([bytearray(status.Get_count(MPI.BYTE)), MPI.BYTE])
        count += 1
    return count
