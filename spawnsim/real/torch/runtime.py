"""What all communicators of one rank of torch.distributed share, and what the parts of one communicator share.

`TorchRuntime` has the wire, the mailbox and torch's groups; this rank waits on one condition that the wire's thread
notifies. NCCL takes one rank per GPU and waits for ever, or fails late, where ranks share one: so the ranks compare
their GPUs when they enter, and the watchdog sees collectives that the GPU has not finished.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from spawnsim.comm.failures import ERR_COMM, CallError
from spawnsim.comm.packing import Pickle
from spawnsim.errors import RankFailed, UnsupportedError
from spawnsim.real.runtime.rank import RankComm, RankRuntime
from spawnsim.real.runtime.services import Options, RankServices
from spawnsim.real.runtime.watchdog import Call, Watchdog
from spawnsim.real.torch.transport import Bytes, Mailbox, Parcel, Receiver, Wire, as_payload, rank_gone

GpuReport = tuple[str, bool]
"""A rank's GPU, empty without one, and whether its group of torch has NCCL."""


def backend_of(group: Any, device: str) -> Any:
    """Return the part of a group of torch that serves "cpu" or "cuda", or None."""
    try:
        return group._get_backend(torch.device(device))
    except RuntimeError:  # torch has no question to which "none" is the answer
        return None


def gpu_report(group: Any) -> GpuReport:
    """Return this rank's GPU, and whether NCCL is there."""
    if not torch.cuda.is_available():
        return "", False
    index = torch.cuda.current_device()
    ident = getattr(torch.cuda.get_device_properties(index), "uuid", index)
    found = backend_of(group, "cuda")
    return f"{socket.gethostname()} {ident}", found is not None and found.name() == "nccl"


def can_use_nccl(reports: Sequence[GpuReport]) -> tuple[bool, str]:
    """Return whether NCCL serves all ranks, and if they have GPUs and it does not, why and what to do."""
    held = [where for where, _ in reports]
    if not any(held):
        return False, ""
    if len(set(held)) == len(held) and all(nccl for _, nccl in reports):
        return True, ""
    why = "not all ranks have it"
    if not all(held):
        why = f"rank {held.index('')} sees no GPU"
    elif len(set(held)) < len(held):
        where = next(one for one in held if held.count(one) > 1)
        why = f"{held.count(where)} ranks share the GPU {where}, and it takes one"
    instead = "GPU tensors go over gloo by way of pinned memory; one rank per GPU is faster"
    return False, f"NCCL is not used, since {why}: {instead}"


class UnfinishedNccl:
    """NCCL's collectives that the GPU has not finished: the watchdog sees them as calls that their rank is in.

    A collective of NCCL returns to the host at once. If the GPU has not done it by its deadline, the watchdog ends the
    job and names the missing ranks. `add` and the watchdog's looks drop what is done.
    """

    def __init__(self, watchdog: Watchdog) -> None:
        self._active, self._works = watchdog.active, dict[int, Any]()
        self._keys = itertools.count(-2, -1)  # threads, the other keys there, are positive
        watchdog.progress = self.look

    def add(self, call: Call, work: Any) -> None:
        """Watch a collective until the GPU has done it."""
        self.look(2)
        key = next(self._keys)
        self._works[key] = work
        self._active[key] = call

    def look(self, most: int | None = None) -> None:
        """Drop what is done, the oldest first; `most`: of so many."""
        for key, work in list(itertools.islice(self._works.items(), most)):
            if work.is_completed():
                self._works.pop(key, None)
                self._active.pop(key, None)


FOREVER = timedelta(days=30)  # our own deadlines rule, so torch's must not come first
CONTROL, EXIT = 3, 4
LOOK_S = 2e-3  # a wait on the condition looks again this often, for what does not notify it


class ControlChannel(Receiver):
    """Small messages between watchdogs over the wire."""

    def __init__(self, wire: Wire) -> None:
        self.rank, self.size = wire.rank, wire.size
        self._wire = wire
        self._pickle = Pickle()
        self._heard: deque[tuple[int, dict[str, Any]]] = deque()
        wire.receivers[CONTROL] = self

    def send(self, to: int, message: dict[str, Any]) -> None:
        """Send without waiting. To a rank that has gone nothing is sent: it will not answer."""
        with suppress(RankFailed):
            self._wire.send(to, Parcel(CONTROL), as_payload(self._pickle.dumps(message)))

    def receive(self) -> tuple[int, dict[str, Any]] | None:
        """Return the next message and who sent it, or None."""
        return self._heard.popleft() if self._heard else None

    def done(self, parcel: Parcel, payload: Bytes) -> None:
        """Keep a message for the watchdog."""
        self._heard.append((parcel.source, self._pickle.loads(payload.tobytes())))


class AbortReceiver(Receiver):
    """Receiver of the order to leave: another rank has ended the job."""

    def done(self, parcel: Parcel, payload: Bytes) -> None:
        """Leave."""
        sys.stderr.flush()
        os._exit(parcel.tag)


class TorchRuntime(RankRuntime):
    """One per rank and run. `group` is torch's group of all its ranks."""

    def __init__(self, group: Any, services: RankServices, options: Options) -> None:
        self.group = group
        rank, size = group.rank(), group.size()
        everyone, self._rank = tuple(range(size)), rank
        self._store = PrefixStore(group.group_name, _get_default_store())
        # the same on all ranks, which all enter each run
        self.run_name = f"spawnsim/{self._store.add(f'spawnsim/runs/{rank}', 1)}"
        self.pickle, self.condition = Pickle(), threading.Condition()
        self.wire = Wire(self.gloo("wire", everyone), rank=rank, size=size, wake=self.notify)
        super().__init__(services, options, ControlChannel(self.wire), self.end_job)
        self.mailbox = Mailbox(self.condition, self.wire, self.counters)
        self.wire.receivers[EXIT] = AbortReceiver()
        self._barriers = 0
        self.unfinished, self.has_nccl, self.lacks = UnfinishedNccl(self.watchdog), False, ""
        self.leaves_torch = False  # whether `release` ends torch.distributed too

    def gloo(self, label: str, members: tuple[int, ...]) -> Any:
        """Return a gloo group of some of the ranks, of its own; collective among them alone.

        Made without torch's registry of groups: that one numbers groups by calls that all ranks must make.
        """
        store = PrefixStore(f"{self.run_name}/{label}", self._store)
        try:
            return dist.ProcessGroupGloo(store, members.index(self._rank), len(members), FOREVER)
        except RuntimeError as error:
            raise rank_gone(f"rank {self._rank} connects to ranks {members} of the world", error) from None

    def nccl(self, label: str, members: tuple[int, ...]) -> Any:
        """Return an NCCL group of some of the ranks, made in the same way; they meet when they first use it."""
        store = PrefixStore(f"{self.run_name}/nccl/{label}", self._store)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = FOREVER
        return dist.ProcessGroupNCCL(store, members.index(self._rank), len(members), options)

    # --------------------------------------------------------------------------------------------- while running
    def poll(self) -> None:
        """Let go of requests that are complete, and let the wire's thread have the interpreter if it waits for it."""
        time.sleep(0)
        if self.registry:
            self.registry.sweep()

    def notify(self) -> None:
        """Wake the threads that wait."""
        with self.condition:
            self.condition.notify_all()

    def wait(
        self, done: Callable[[], bool], limit_s: float, call: tuple[str, int, Any], peer: int | None = None
    ) -> bool:
        """Wait as every runtime does; `peer` makes no difference, since a dead rank ends all waits here."""
        # On a condition, where MPI's ranks spin: what is waited for is done by the wire's thread, and a thread that
        # spins would hold the interpreter that the other one needs. A wait also polls now and then, since torch's own
        # works notify nothing when they are complete.
        if done():
            return True
        active, thread, began = self.watchdog.active, get_ident(), time.perf_counter()
        active[thread] = entry = (*call, began, float("inf"))
        try:
            with self.condition:
                while not done():
                    left = limit_s - (time.perf_counter() - began)
                    if self.wire.fault:
                        raise RankFailed((), f"{call[0]}: a rank has gone: {self.wire.fault}")
                    if left <= 0:
                        return False
                    if not self.condition.wait(min(left, LOOK_S)):
                        self.poll()
            self.registry.sweep()
            return True
        finally:
            self.watchdog.last = entry
            active.pop(thread, None)

    # ------------------------------------------------------------------------------------------------ at the end
    def begin_barrier(self) -> Callable[[], bool]:
        """Begin to wait for all ranks."""
        self._barriers += 1
        group = self.gloo(f"barrier{self._barriers}", tuple(range(self.wire.size)))
        work = group.barrier(dist.BarrierOptions())

        def met() -> bool:
            if not work.is_completed():
                return False
            try:
                work.wait()
            except RuntimeError as error:
                raise rank_gone("the end of the run", error) from None
            return group is not None  # refers to the group, which must live until the barrier is complete

        return met

    def take_leftovers(self) -> int:
        """Drop messages that were not received."""
        return self.mailbox.clear()

    def release(self) -> None:
        """Stop watchdog and wire, and leave torch.distributed if the run has entered it."""
        self.barrier()  # after they have settled ranks merge what they recorded, and may still wait for each other
        self.watchdog.stop()
        self.wire.stop()
        if self.leaves_torch:
            dist.destroy_process_group()

    def end_job(self, status: int) -> None:
        """End all ranks: tell those who hear, then leave; launchers end the others when one leaves like this."""
        for rank in range(self.wire.size):
            if rank != self.wire.rank:
                with suppress(RankFailed):
                    self.wire.send(rank, Parcel(EXIT, tag=status))
        time.sleep(0.05)
        sys.stderr.flush()
        os._exit(status)


class MissingCall(UnsupportedError, AttributeError):
    """A name that is not here, so that `hasattr` says False."""


def missing_call(name: str, instead: str = "") -> MissingCall:
    """Return the error for one of mpi4py's calls that is not here, with what to use instead."""
    if instead:
        return MissingCall(f"{name}: not over torch.distributed; use {instead}, or --backend mpi")
    return MissingCall(f"{name}: not over torch.distributed; --backend mpi has all of mpi4py's calls")


class CommCore(RankComm):
    """What the parts of a communicator share. `members`: world ranks; `context` tells its messages from others'."""

    runtime: TorchRuntime

    def __init__(self, runtime: TorchRuntime, members: tuple[int, ...], label: str, context: int) -> None:
        super().__init__(runtime, label)
        self.members = members
        self.rank, self.size = members.index(runtime.wire.rank), len(members)
        self._context, self._freed = context, False
        self._sequence = 0  # the number of its collectives so far
        runtime.mailbox.open(context, members)

    def _live(self) -> None:
        """Refuse a freed communicator."""
        if self._freed:
            raise CallError(ERR_COMM, f"{self.label} was freed: make another one")

    def _count(self) -> int:
        """Count a collective and return its number."""
        self._live()
        self._sequence += 1
        return self._sequence
