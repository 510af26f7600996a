"""What all communicators of one rank of torch.distributed share: the wire over gloo, torch's groups, NCCL's state.

A parcel is a header with a small payload behind it (gloo takes messages shorter than the receive's memory), or a
header and one more message with the payload. One thread always receives, so no send waits for a receiver's program.

NCCL takes one rank per GPU and waits for ever, or fails late, where ranks share one: so the ranks compare their GPUs
when they enter, and the watchdog sees collectives that the GPU has not finished.
"""

from __future__ import annotations

import itertools
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from spawnsim.comm.failures import ERR_TYPE, CallError
from spawnsim.errors import RankFailed, SpawnsimError
from spawnsim.real.base import WireRuntime
from spawnsim.real.runtime.services import Options, RankServices
from spawnsim.real.runtime.watchdog import Call, Watchdog
from spawnsim.real.runtime.wire import INLINE_NBYTES, Bytes, Parcel, Sent, Wire

FIELDS = struct.Struct("<8q")
HEADER_TAG, PAYLOAD_TAG = 1, 2
STOP = 0  # the kind of the parcel that ends the receiving thread
KEPT = 128  # finished sends are reaped once this many are pending


class GlooWire(Wire):
    """One per rank, over a group of gloo's of its own. Who waits for a payload to leave waits on the condition."""

    def __init__(self, group: Any, *, rank: int, size: int, condition: threading.Condition) -> None:
        super().__init__(rank, size)
        self._closing = False
        self._group, self._condition = group, condition
        self._order = [threading.Lock() for _ in range(size)]  # header and payload stay together
        self._kept: deque[tuple[list[Any], Any, Sent]] = deque()
        self._reap = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        if self.size > 1:
            for name, run in (("wire", self._receive_all), ("reaper", self._reap_all)):
                self._threads.append(threading.Thread(target=run, name=f"spawnsim-{name}", daemon=True))
                self._threads[-1].start()

    # ------------------------------------------------------------------------------------------------ sending
    # Headers are received from any rank, a payload from the rank that its header came from, each in the order in which
    # they were sent. Hence a lock per receiving rank: two threads that send to one rank must not send their headers in
    # one order and their payloads in the other.
    def carry(self, to: int, parcel: Parcel, payload: Bytes | None, sent: Sent) -> None:
        inline = payload if parcel.nbytes <= INLINE_NBYTES else None
        memory = np.empty(FIELDS.size + (0 if inline is None else inline.nbytes), np.uint8)
        where = (parcel.kind, parcel.context, parcel.tag, parcel.nbytes)
        FIELDS.pack_into(memory.data, 0, *where, parcel.ident, parcel.first, parcel.second, parcel.third)
        tensors = [torch.from_numpy(memory)]
        if inline is not None:
            memory[FIELDS.size :] = inline
        elif payload is not None:
            tensors.append(tensor_of(payload))
        with self._order[to]:
            tags = (HEADER_TAG, PAYLOAD_TAG)
            try:
                works = [
                    self._group.send([tensor], to, tag) for tensor, tag in zip(tensors, tags, strict=False)
                ]
            except RuntimeError as error:
                raise rank_gone(f"send to rank {to} of the world", error) from None
        self._kept.append((works, tensors, sent))
        if len(tensors) > 1 or len(self._kept) > KEPT:
            self._reap.release()

    def _reap_all(self) -> None:
        """Wait for sends, in order."""
        # In a thread, because gloo reports that a send is complete only to a caller that waits for it. Large payloads
        # are waited for at once, since a request depends on each; small ones were copied, so it is enough to let go of
        # their works from time to time. A work must not be dropped before it is complete: gloo then loses the message.
        while True:
            self._reap.acquire()
            while self._kept:
                works, _, sent = self._kept.popleft()
                try:
                    for work in works:
                        work.wait()
                    sent.finish()
                except (RuntimeError, RankFailed) as error:
                    self._broken(error)
                    return
                self._wake()
            if self._closing:
                return

    # ---------------------------------------------------------------------------------------------- receiving
    def _receive_all(self) -> None:
        header = torch.empty(FIELDS.size + INLINE_NBYTES, dtype=torch.uint8)
        memory = header.numpy()
        try:
            while True:
                work = self._group.recv_anysource([header], HEADER_TAG)
                work.wait()
                parcel = Parcel(*FIELDS.unpack_from(memory.data))
                parcel.source = work._source_rank()
                if parcel.kind == STOP:
                    return
                self._take(parcel, memory)
        except (RuntimeError, RankFailed) as error:  # of what it receives, and of what it answers
            self._broken(error)

    def _take(self, parcel: Parcel, header: Bytes) -> None:
        receiver = self.receivers[parcel.kind]
        memory = receiver.begin(parcel)
        if memory is None:
            memory = torch.empty(parcel.nbytes, dtype=torch.uint8).numpy()  # torch aligns for every dtype
        if parcel.nbytes <= INLINE_NBYTES:
            memory[:] = header[FIELDS.size : FIELDS.size + parcel.nbytes]
        else:
            self._group.recv([tensor_of(memory)], parcel.source, PAYLOAD_TAG).wait()
        receiver.done(parcel, memory)

    def _wake(self) -> None:
        with self._condition:
            self._condition.notify_all()

    def _broken(self, error: Exception) -> None:
        if not self._closing:
            self.fault = _reason(error)
        self._wake()

    # ------------------------------------------------------------------------------------------------ the end
    def stop(self) -> None:
        # Each rank tells the next one. The receiving thread is inside of a receive that gloo cannot cancel, so a
        # message must end it; the group must not be destroyed before, since a thread that is inside of gloo then ends
        # the process by `terminate`.
        self._closing = True
        if self.size > 1 and not self.fault:
            # It was killed at its very end: it hears nothing, and its monitor tells of it.
            with suppress(RankFailed):
                self.send((self.rank + 1) % self.size, Parcel(STOP))
        self._reap.release()
        for thread in self._threads:
            thread.join()


REFUSALS = ("scalar type", "data type", "cannot use reduceop", "unsupported", "not supported")
"""Of a type or an op that a library has not, in lower case."""


def rank_gone(what: str, error: Exception) -> SpawnsimError:
    """Return spawnsim's error for one of gloo's or NCCL's: another rank's end of a connection is closed.

    Unless the library has refused the call as it is: then that is the program's error.
    """
    reason = _reason(error)
    if any(words in reason.lower() for words in REFUSALS):
        return CallError(ERR_TYPE, f"{what}: {reason}")
    return RankFailed((), f"{what}: a rank has gone: {reason}")


def _reason(error: Exception) -> str:
    """Return an error of gloo's without the place in its source, and without its advice."""
    return str(error).split("] ", 1)[-1].split(". ")[0]


def tensor_of(memory: Bytes) -> torch.Tensor:
    """Return bytes as a tensor over the same memory; read-only memory is copied."""
    return torch.from_numpy(memory if memory.flags.writeable else memory.copy())


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


class TorchRuntime(WireRuntime):
    """One per rank and run. `group` is torch's group of all its ranks."""

    over = "torch.distributed"

    def __init__(self, group: Any, services: RankServices, options: Options) -> None:
        self.group = group
        rank, size = group.rank(), group.size()
        self._rank = rank
        self._store = PrefixStore(group.group_name, _get_default_store())
        # the same on all ranks, which all enter each run
        self.run_name = f"spawnsim/{self._store.add(f'spawnsim/runs/{rank}', 1)}"
        condition = threading.Condition()
        wire = GlooWire(self.gloo("wire", tuple(range(size))), rank=rank, size=size, condition=condition)
        super().__init__(wire, services, options, condition)
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

    # ------------------------------------------------------------------------------------------------ at the end
    def begin_barrier(self) -> Callable[[], bool]:
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

    def release(self) -> None:
        """Stop watchdog and wire, and leave torch.distributed if the run has entered it."""
        super().release()
        if self.leaves_torch:
            dist.destroy_process_group()
