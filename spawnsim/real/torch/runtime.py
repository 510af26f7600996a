"""The state that all communicators of one torch.distributed rank share: the gloo wire, torch's groups, NCCL's state.

A parcel is a header followed by a small payload in one message (gloo accepts messages shorter than the receive
buffer), or a header and a second message with the payload. One thread always receives, so no send waits for a
receiver's program.

NCCL supports one rank per GPU; if ranks share a GPU, it waits forever or fails late. So the ranks compare their GPUs at
the start, and the watchdog monitors unfinished collectives.
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
    """One wire per rank, over a separate gloo group. A thread that waits for a payload to leave uses the condition."""

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
    # A header is received from any rank, its payload from the header's sender, both in the order in which they were
    # sent. So there is one lock per receiving rank: two threads that send to one rank must send their headers and their
    # payloads in the same order.
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
        # A thread is needed because gloo reports the completion of a send only to a caller that waits for it. Large
        # payloads are awaited immediately, since a request depends on each. Small payloads were copied, so their works
        # need only occasional release. A work must not be dropped before it is complete: gloo then loses the message.
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
        except (RuntimeError, RankFailed) as error:  # from a receive, or from a reply
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
        # Each rank sends a final message to the next rank. The receiving thread is inside a receive that gloo cannot
        # cancel, so only a message can end it. The group must not be destroyed before that: a thread inside gloo would
        # then end the process by `terminate`.
        self._closing = True
        if self.size > 1 and not self.fault:
            # The next rank may have been killed at its very end. It needs no message, and its monitor reports the kill.
            with suppress(RankFailed):
                self.send((self.rank + 1) % self.size, Parcel(STOP))
        self._reap.release()
        for thread in self._threads:
            thread.join()


REFUSALS = ("scalar type", "data type", "cannot use reduceop", "unsupported", "not supported")
"""Phrases in a library's errors about an unsupported type or op, in lower case."""


def rank_gone(what: str, error: Exception) -> SpawnsimError:
    """Return spawnsim's error for an error of gloo or NCCL: another rank's end of a connection is closed.

    If instead the library has refused the call itself, it is the program's error.
    """
    reason = _reason(error)
    if any(words in reason.lower() for words in REFUSALS):
        return CallError(ERR_TYPE, f"{what}: {reason}")
    return RankFailed((), f"{what}: a rank has gone: {reason}")


def _reason(error: Exception) -> str:
    """Return gloo's error text without the source location and without its advice."""
    return str(error).split("] ", 1)[-1].split(". ")[0]


def tensor_of(memory: Bytes) -> torch.Tensor:
    """Return bytes as a tensor over the same memory; read-only memory is copied."""
    return torch.from_numpy(memory if memory.flags.writeable else memory.copy())


GpuReport = tuple[str, bool]
"""A rank's GPU ("" without one), and whether its torch group has NCCL."""


def backend_of(group: Any, device: str) -> Any:
    """Return the backend of a torch group that serves "cpu" or "cuda", or None."""
    try:
        return group._get_backend(torch.device(device))
    except RuntimeError:  # torch raises instead of returning None
        return None


def gpu_report(group: Any) -> GpuReport:
    """Return this rank's GPU, and whether its group has NCCL."""
    if not torch.cuda.is_available():
        return "", False
    index = torch.cuda.current_device()
    ident = getattr(torch.cuda.get_device_properties(index), "uuid", index)
    found = backend_of(group, "cuda")
    return f"{socket.gethostname()} {ident}", found is not None and found.name() == "nccl"


def can_use_nccl(reports: Sequence[GpuReport]) -> tuple[bool, str]:
    """Return whether NCCL can serve all ranks; if ranks have GPUs and it cannot, also the reason and the remedy."""
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
        why = f"{held.count(where)} ranks share the GPU {where}, and NCCL allows one"
    instead = "GPU tensors go over gloo through pinned memory; one rank per GPU is faster"
    return False, f"NCCL is not used, because {why}: {instead}"


class UnfinishedNccl:
    """NCCL collectives that the GPU has yet to finish: the watchdog treats them as active calls of their rank.

    An NCCL collective returns to the host immediately. If the GPU does not finish it by its deadline, the watchdog
    ends the job and names the missing ranks. `add` and the watchdog's polls drop finished collectives.
    """

    def __init__(self, watchdog: Watchdog) -> None:
        self._active, self._works = watchdog.active, dict[int, Any]()
        self._keys = itertools.count(-2, -1)  # threads, the other keys there, are positive
        watchdog.progress = self.drop_finished

    def add(self, call: Call, work: Any) -> None:
        """Watch a collective until the GPU has finished it."""
        self.drop_finished(2)
        key = next(self._keys)
        self._works[key] = work
        self._active[key] = call

    def drop_finished(self, most: int | None = None) -> None:
        """Drop finished collectives; `most`: check only this many, the oldest."""
        for key, work in list(itertools.islice(self._works.items(), most)):
            if work.is_completed():
                self._works.pop(key, None)
                self._active.pop(key, None)


FOREVER = timedelta(days=30)  # our own deadlines apply, so torch's must not expire first


class TorchRuntime(WireRuntime):
    """One per rank and run. `group` is torch's group of all ranks of the run."""

    over = "torch.distributed"

    def __init__(self, group: Any, services: RankServices, options: Options) -> None:
        self.group = group
        rank, size = group.rank(), group.size()
        self._rank = rank
        self._store = PrefixStore(group.group_name, _get_default_store())
        # The number is the same on all ranks, since every rank enters each run.
        self.run_name = f"spawnsim/{self._store.add(f'spawnsim/runs/{rank}', 1)}"
        condition = threading.Condition()
        wire = GlooWire(self.gloo("wire", tuple(range(size))), rank=rank, size=size, condition=condition)
        super().__init__(wire, services, options, condition)
        self.unfinished, self.has_nccl, self.lacks = UnfinishedNccl(self.watchdog), False, ""
        self.leaves_torch = False  # whether `release` ends torch.distributed too

    def gloo(self, label: str, members: tuple[int, ...]) -> Any:
        """Return a separate gloo group of some of the ranks; collective among these ranks only.

        It bypasses torch's registry of groups, which numbers groups by calls that all ranks must make.
        """
        store = PrefixStore(f"{self.run_name}/{label}", self._store)
        try:
            return dist.ProcessGroupGloo(store, members.index(self._rank), len(members), FOREVER)
        except RuntimeError as error:
            raise rank_gone(f"rank {self._rank} connects to ranks {members} of the world", error) from None

    def nccl(self, label: str, members: tuple[int, ...]) -> Any:
        """Return an NCCL group of some of the ranks, made in the same way; they connect at its first use."""
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
            return group is not None  # keeps the group alive until the barrier is complete

        return met

    def release(self) -> None:
        """Stop watchdog and wire, and leave torch.distributed if the run initialized it."""
        super().release()
        if self.leaves_torch:
            dist.destroy_process_group()
