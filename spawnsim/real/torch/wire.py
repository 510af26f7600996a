"""Framed parcels between all ranks over gloo, received by one thread.

A parcel is a header with a small payload behind it (gloo takes messages shorter than the receive's memory), or a header
and one more message with the payload. The thread always receives, so no send waits for a receiver's program. Knows
torch's process group and numbers; knows neither communicators nor what parcels mean: each kind has its receiver.
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from spawnsim.errors import RankFailed

Bytes = NDArray[np.uint8]

FIELDS = struct.Struct("<8q")
INLINE_NBYTES = 1 << 16  # copied behind the header: cheaper than a second message, which waits for the first
HEADER_TAG, PAYLOAD_TAG = 1, 2
STOP = 0
KEPT = 128  # so many small sends may be under way before the reaper looks after them


@dataclass(slots=True)
class Parcel:
    """What travels: `kind` names the receiver, the other numbers are the receiver's own business."""

    kind: int
    context: int = 0
    tag: int = 0
    nbytes: int = 0
    ident: int = 0
    first: int = 0
    second: int = 0
    third: int = 0
    source: int = -1
    token: Any = None  # between `begin` and `done`, the receiver's

    def pack_into(self, memory: Bytes) -> None:
        """Write the numbers as they travel."""
        where = (self.kind, self.context, self.tag, self.nbytes)
        FIELDS.pack_into(memory.data, 0, *where, self.ident, self.first, self.second, self.third)


class Receiver(Protocol):
    """Who takes parcels of one kind; called by the wire's thread (or the sender, for parcels to itself)."""

    def begin(self, parcel: Parcel) -> Bytes | None:
        """Return memory of `parcel.nbytes` bytes for the payload, or None for new memory."""

    def done(self, parcel: Parcel, payload: Bytes) -> None:
        """Take the payload."""


class Sent:
    """A payload on its way; `complete` once its memory may be used again, and then `then` is called."""

    __slots__ = ("complete", "then")

    def __init__(self, complete: bool, then: Callable[[], object] | None = None) -> None:
        self.complete, self.then = complete, then


class Wire:
    """One per rank: `send` from any thread, receivers by kind."""

    def __init__(self, group: Any, *, rank: int, size: int, wake: Callable[[], None]) -> None:
        self.rank, self.size = rank, size
        self.receivers: dict[int, Receiver] = {}
        self.fault = ""
        self.closing = False
        self.idents = itertools.count(1)
        self._group, self._wake = group, wake
        self._order = [threading.Lock() for _ in range(size)]  # header and payload stay together
        self._kept: deque[tuple[list[Any], Any, Sent]] = deque()
        self._reap = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin to receive."""
        if self.size > 1:
            for name, run in (("wire", self._receive_all), ("reaper", self._reap_all)):
                self._threads.append(threading.Thread(target=run, name=f"spawnsim-{name}", daemon=True))
                self._threads[-1].start()

    # ------------------------------------------------------------------------------------------------ sending
    def send(
        self,
        to: int,
        parcel: Parcel,
        payload: Bytes | None = None,
        then: Callable[[], object] | None = None,
    ) -> Sent:
        """Send a parcel; the payload's memory must stay as it is until the result is complete.

        `then` is called by another thread when a payload above `INLINE_NBYTES` to another rank has left. To one
        that has gone, this is a `RankFailed`.
        """
        parcel.nbytes = 0 if payload is None else payload.nbytes
        if to == self.rank:
            self._deliver_here(parcel, payload)
            return Sent(True)
        small = parcel.nbytes <= INLINE_NBYTES
        memory = np.empty(FIELDS.size + (parcel.nbytes if small else 0), np.uint8)
        parcel.pack_into(memory)
        if small and payload is not None:
            memory[FIELDS.size :] = payload
        header, sent = torch.from_numpy(memory), Sent(small, then)
        self._put(to, [header] if small else [header, tensor_of(payload)], sent)
        return sent

    def _put(self, to: int, tensors: list[torch.Tensor], sent: Sent) -> None:
        with self._order[to]:
            tags = (HEADER_TAG, PAYLOAD_TAG)
            try:
                works = [
                    self._group.send([tensor], to, tag) for tensor, tag in zip(tensors, tags, strict=False)
                ]
            except RuntimeError as error:
                raise gone(f"send to rank {to} of the world", error) from None
        self._kept.append((works, tensors, sent))
        if len(tensors) > 1 or len(self._kept) > KEPT:
            self._reap.release()

    def _deliver_here(self, parcel: Parcel, payload: Bytes | None) -> None:
        parcel.source = self.rank
        receiver = self.receivers[parcel.kind]
        memory = receiver.begin(parcel)
        if memory is None:
            memory = np.empty(parcel.nbytes, np.uint8)
        if payload is not None:
            memory[:] = payload
        receiver.done(parcel, memory)

    def _reap_all(self) -> None:
        """Wait for sends in order; gloo says that a send is complete only to one who waits for it."""
        while True:
            self._reap.acquire()
            while self._kept:
                works, _, sent = self._kept.popleft()
                try:
                    for work in works:
                        work.wait()
                    sent.complete = True
                    if sent.then is not None:
                        sent.then()
                except (RuntimeError, RankFailed) as error:
                    self._broken(error)
                    return
                self._wake()
            if self.closing:
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

    def _broken(self, error: Exception) -> None:
        if not self.closing:
            self.fault = reason(error)
        self._wake()

    # ------------------------------------------------------------------------------------------------ the end
    def stop(self) -> None:
        """End both threads. Collective: each rank tells the next one, once all have nothing more to send."""
        self.closing = True
        if self.size > 1 and not self.fault:
            with suppress(
                RankFailed
            ):  # it was killed at its very end: it hears nothing, and its keeper tells of it
                self.send((self.rank + 1) % self.size, Parcel(STOP))
        self._reap.release()
        for thread in self._threads:
            thread.join()


def gone(what: str, error: Exception) -> RankFailed:
    """Return what an error of gloo's means to who has called it: another rank's end of a connection is closed."""
    return RankFailed((), f"{what}: a rank has gone: {reason(error)}")


def reason(error: Exception) -> str:
    """Return an error of gloo's without the place in its source, and without its advice."""
    return str(error).split("] ", 1)[-1].split(". ")[0]


def tensor_of(memory: Bytes | None) -> torch.Tensor:
    """Return bytes as a tensor over the same memory; read-only memory is copied."""
    if memory is None:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(memory if memory.flags.writeable else memory.copy())
