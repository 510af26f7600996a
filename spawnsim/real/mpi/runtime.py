"""The state that all communicators of one MPI rank share, and the state that the parts of one communicator share.

`MPIRuntime` implements polling, waiting and the end of a rank on MPI. `ControlChannel` carries the watchdogs' messages
over a separate communicator. `CommCore` is the base of point-to-point calls, collectives and windows.
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
    """Small messages between watchdogs over a separate communicator. Sends nothing without THREAD_MULTIPLE."""

    def __init__(self, comm: MPI.Comm) -> None:
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._comm = comm
        self._usable = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._sent: list[MPI.Request] = []

    def send(self, to: int, message: dict[str, Any]) -> None:
        """Send without waiting; keep the handle until the message has left. A dead rank gets no message."""
        if not self._usable:
            return
        self.sent()
        try:
            self._sent.append(self._comm.isend(message, to, CONTROL_TAG))
        except MPI.Exception:  # the peer has failed; the caller will notice that it does not answer
            return

    def sent(self) -> bool:
        self._sent = [request for request in self._sent if not over(request)]
        return not self._sent

    def receive(self) -> tuple[int, dict[str, Any]] | None:
        """Return the sender and the next message, or None."""
        if not self._usable:
            return None
        status = MPI.Status()
        for _ in range(2):
            try:
                found = self._comm.improbe(MPI.ANY_SOURCE, CONTROL_TAG, status)
                return None if found is None else (status.Get_source(), found.recv())
            except MPI.Exception:  # after a failure, ANY_SOURCE raises until the failure is acknowledged
                acknowledge(self._comm)
        return None


class MPIRuntime(RankRuntime):
    """One per rank and run. `recovery.prepare` creates `survival` before the first wait."""

    survival: Any

    def __init__(self, raw: MPI.Intracomm, services: RankServices, options: Options) -> None:
        self.raw = raw
        self.channel = ControlChannel(raw.Dup())
        self._closing = raw.Dup()  # for the final collectives, which must not match the program's
        super().__init__(services, options, self.channel, abort)
        self.windows: list[Any] = []
        self.needy = False  # whether some window is accessible only while this rank polls
        self.translate = Translator(raw.Get_group())
        self.comms: list[CommCore] = []
        self.watchdog.progress = self._progress
        self._iprobe = polling(raw, options)
        services.compute.poll = self.serve
        self.abortable, self.epoch = options.survive, 0

    # --------------------------------------------------------------------------------------------- while running
    def poll(self) -> None:
        """Let MPI make progress, and drop complete requests: under 1 us."""
        self._iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
        if self.registry:
            self.registry.sweep()

    def probe_by(self, probe: Any) -> None:
        """Poll by `probe(source, tag)` from now on: a probe on a communicator with dead members fails."""
        self._iprobe = probe

    @contextmanager
    def unpolled(self) -> Iterator[None]:
        """Make the polls of this rank's threads skip the library, during a call that allows no concurrent call."""
        probe, self._iprobe = self._iprobe, lambda _source, _tag: False
        try:
            yield
        finally:
            self._iprobe = probe

    def serve(self) -> None:
        """Poll at the end of a compute block; if windows need it, often enough to serve some hundred kB."""
        self.poll()
        if self.needy:
            probe = self._iprobe
            for _ in range(SERVING_POLLS):
                probe(MPI.ANY_SOURCE, MPI.ANY_TAG)

    def wait(
        self, done: Callable[[], bool], limit_s: float, call: tuple[str, int, Any], peer: int | None = None
    ) -> bool:
        """Wait as in every runtime; in a job that survives deaths, a wait for a dead rank raises `RankFailed`."""
        for _ in range(SPINS):
            if done():
                return True
        registry = self.registry

        def poll() -> bool:
            if registry:  # other requests make progress during this wait
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
            return wait_until(poll, limit_s)
        finally:
            self.watchdog.last = entry
            active.pop(thread, None)

    def _progress(self) -> None:
        """Let posted receives make progress while the rank is in a blocking collective; the watchdog calls this."""
        if self.registry and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            for _ in range(len(self.registry)):
                self.registry.sweep()

    # ------------------------------------------------------------------------------------------------ at the end
    def begin_barrier(self) -> Callable[[], bool]:
        """Begin to wait for all ranks; in a job that survives deaths, for all living ranks."""
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
        """Take unreceived messages out of the library, on all communicators."""
        return sum(_taken(comm._raw) for comm in self.comms if comm._raw)

    def release(self) -> None:
        """Free windows and stop the watchdog."""
        if self.survival.shutdown is None or not self.survival.end():
            self._release_windows()
        self.watchdog.stop()

    def _release_windows(self) -> None:
        """Free leftover windows if they are the same on all ranks: freeing is collective and must not hang."""
        labels = ",".join(window.label for window in self.windows)
        digest = zlib.crc32(labels.encode())
        ends = array.array("q", [digest, -digest])  # the maxima of both show whether all are equal
        self._closing.Allreduce(MPI.IN_PLACE, ends, MPI.MAX)
        if ends[0] == -ends[1]:
            for window in self.windows:
                window.release()


class CommCore(RankComm):
    """The state that the parts of a communicator share.

    Attributes:
        members: the world ranks, in the order of the communicator's ranks.
        revoked: the reason why the communicator can no longer be used; "" while it can.
    """

    runtime: MPIRuntime
    revoked = ""
    Barrier: Callable[[], None]  # `collectives` adds these three; abortable calls and windows use them
    Allgather: Callable[..., None]
    Allgatherv: Callable[..., None]

    def __init__(self, raw: MPI.Comm, runtime: MPIRuntime, label: str) -> None:
        super().__init__(runtime, label)
        self._raw, self._sequence = cast("MPI.Intracomm", raw), 0  # `_sequence`: number of collectives so far
        self.rank, self.size = raw.Get_rank(), raw.Get_size()
        self.members = self._in_world(raw.Get_group())
        self._inter = raw.Is_inter()

    def _error(self, error: MPI.Exception, what: str, peer: int = ANY_SOURCE) -> SpawnsimError:
        """Return spawnsim's error for an mpi4py error; `peer`: the rank that the call needs, if it needs one."""
        return failure(error, self._raw, f"rank {self.rank} of {self.label}: {what}", peer)

    def _in_world(self, group: MPI.Group) -> tuple[int, ...]:
        return tuple(
            int(rank) for rank in MPI.Group.Translate_ranks(group, None, self.runtime.raw.Get_group())
        )


def abort(status: int) -> NoReturn:
    """End all ranks immediately.

    MPICH's `Abort` returns shortly before its launcher kills the process; the program must not continue meanwhile.
    While Slurm cancels a step, `Abort` only waits to be killed: for half a minute, in which all nodes stay allocated.
    """
    leave = Timer(ABORT_S, os._exit, (status & 0xFF,))
    leave.daemon = True
    leave.start()
    MPI.COMM_WORLD.Abort(status)
    os._exit(status & 0xFF)


def polling(comm: MPI.Comm, options: Options) -> Callable[[int, int], bool]:
    """Return a function `probe(source, tag)` for polling; its purpose is that the library makes progress.

    If the library reports deaths, a rank that only sends notices them in this probe. In a job that survives deaths the
    probe does not report them, since other ranks do, and a policy may want to continue without the dead ranks.
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
    """Allow receives from ANY_SOURCE again, after ranks have failed."""
    if hasattr(comm, "Ack_failed"):
        comm.Ack_failed()


def over(request: MPI.Request) -> bool:
    """Whether a request has ended, with or without an error."""
    try:
        return request.Test()
    except MPI.Exception:
        return True


def _taken(raw: MPI.Comm) -> int:
    """Receive and drop all messages that have arrived on a communicator; return their number."""
    count, status = 0, MPI.Status()
    while (message := raw.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
        message.Recv([bytearray(status.Get_count(MPI.BYTE)), MPI.BYTE])
        count += 1
    return count
