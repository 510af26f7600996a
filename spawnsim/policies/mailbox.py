"""Bytes to and from ranks, without ever waiting for anybody.

This room knows a communicator's non-blocking calls and one tag; it does not know what the bytes mean. One `Iprobe`
finds all there is. Requests and buffers are kept until they complete. A message to the own rank takes no wire.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from spawnsim.comm import ANY_SOURCE, Comm, Status
from spawnsim.errors import RankFailed
from spawnsim.policies.messages import Bytes

if TYPE_CHECKING:
    from spawnsim.comm import Request

AT_ONCE_NBYTES = 4096  # every MPI delivers so little with the envelope: a receive after a probe does not wait


def _fresh(nbytes: int) -> Bytes:
    return np.empty(nbytes, np.uint8)


class Mailbox:
    """One rank's post on one communicator and tag. `room` makes the memory that large messages are received into."""

    def __init__(self, comm: Comm, tag: int) -> None:
        self.comm, self.tag, self.rank = comm, tag, comm.Get_rank()
        self.counts: Counter[str] = Counter()
        self._probe, self._status = comm.Iprobe, Status()
        self.sent: Counter[int] = Counter()  # messages put on the wire, by rank
        self.received = 0
        self.room: Callable[[int], Bytes] = _fresh
        self._own: deque[Bytes] = deque()
        self._sends: list[tuple[Request, Bytes]] = []
        self._receives: list[tuple[Request, int, Bytes]] = []

    def send(self, rank: int, message: Bytes) -> bool:
        """Send bytes to a rank; False if it is known to be dead. The buffer must not be written to afterwards."""
        if rank == self.rank:
            self._own.append(message)
            return True
        try:
            self._sends.append((self.comm.Isend(message, rank, self.tag), message))
            self.sent[rank] += 1
            self.counts["bytes_sent"] += message.size
        except RankFailed:
            self.counts["undeliverable"] += 1
            return False
        return True

    def poll(self) -> list[tuple[int, Bytes]]:
        """Return (source, bytes) of everything that has arrived; no wait, one probe if there is nothing."""
        arrived = self.own()
        if self._receives:
            arrived += self._finished()
        try:
            while self._probe(ANY_SOURCE, self.tag, self._status):
                self._take(arrived)
        except RankFailed:
            self.counts["peer failed"] += 1
        return arrived

    def own(self) -> list[tuple[int, Bytes]]:
        """Return what this rank has sent to itself."""
        return [(self.rank, self._own.popleft()) for _ in range(len(self._own))]

    def _take(self, arrived: list[tuple[int, Bytes]]) -> None:
        source, nbytes = self._status.Get_source(), self._status.Get_count()
        buffer = self.room(nbytes) if nbytes > AT_ONCE_NBYTES else _fresh(nbytes)
        self.counts["bytes_received"] += nbytes
        self.received += 1
        if nbytes <= AT_ONCE_NBYTES:
            self.comm.Recv(buffer, source, self.tag)
            arrived.append((source, buffer))
            return
        request = self.comm.Irecv(buffer, source, self.tag)
        if request.Test():
            arrived.append((source, buffer))
        else:
            self._receives.append((request, source, buffer))

    def _finished(self) -> list[tuple[int, Bytes]]:
        finished, receives = [], []
        for request, source, buffer in self._receives:
            try:
                over = request.Test()
            except RankFailed:  # it died while sending
                self.counts["peer failed"] += 1
                continue
            if over:
                finished.append((source, buffer))
            else:
                receives.append((request, source, buffer))
        self._receives = receives
        return finished

    def sending(self, message: Bytes) -> bool:
        """Return whether this memory is still being sent, as far as is known since `reap`."""
        return any(message is other for _, other in self._sends)

    def reap(self) -> bool:
        """Let go of sends that have completed; return whether all have."""
        if self._sends:
            self._sends = [entry for entry in self._sends if not self._gone(entry[0])]
        return not self._sends

    def _gone(self, request: Request) -> bool:
        try:
            return request.Test()
        except RankFailed:  # nobody will take it any more
            self.counts["peer failed"] += 1
            return True

    def dead(self) -> list[int]:
        """Return the ranks of the group that are known to have died; none where the job ends with the first."""
        if not self.comm.capabilities().survives:
            return []
        failed = cast("Any", self.comm).Get_failed()
        return [rank for rank in failed.Translate_ranks(None, self.comm.Get_group()) if rank >= 0]

    @property
    def unfinished(self) -> int:
        """Number of sends and receives under way."""
        return len(self._sends) + len(self._receives)
