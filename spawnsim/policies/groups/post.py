"""Words to and from ranks: sends never wait, a wait for words is bounded.

This room knows a communicator's calls and one tag; it does not know what words mean. The communicator keeps the
buffers of sends until they have gone (`Comm` promises it), so nothing is kept here. A word to the own rank takes no
wire. Ranks that are found dead are in `failed`.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Any

import numpy as np

from spawnsim.comm import ANY_SOURCE, Comm, Status
from spawnsim.errors import RankFailed, Timeout
from spawnsim.policies.groups.words import Bytes, Unreadable, Word, decode, encode

if TYPE_CHECKING:
    from spawnsim.comm import Request

AT_ONCE_NBYTES = 4096  # every MPI delivers so little with the envelope: a receive after a probe does not wait
LANDING_SLICE_S = 0.05  # how long a wait looks at one large message before it looks at the others again


class Post:
    """One rank's post on one communicator and tag."""

    def __init__(self, comm: Comm, tag: int, poll_interval_s: float = 0.01) -> None:
        self.comm, self.tag, self.rank = comm, tag, comm.Get_rank()
        self.poll_interval_s = poll_interval_s
        self.counts: Counter[str] = Counter()
        self.failed: set[int] = set()
        self._status = Status()
        self._own: deque[Word] = deque()
        self._landing: list[tuple[Request, int, Bytes]] = []
        self._any: Any = comm  # the protocol lists the calls of every building; Probe is mpi4py's too

    def send(self, rank: int, word: Word) -> None:
        """Send a word to a rank of the communicator."""
        if rank == self.rank:
            self._own.append(word)
            return
        buffer = encode(word)
        try:
            self.comm.Isend(buffer, rank, self.tag)
        except RankFailed:
            self.failed.add(rank)
            self.counts["undeliverable"] += 1
            return
        self.counts["words_sent"] += 1
        self.counts["bytes_sent"] += buffer.size

    def poll(self) -> list[tuple[int, Word]]:
        """Return (source, word) of everything that has arrived; never waits."""
        arrived = [(self.rank, self._own.popleft()) for _ in range(len(self._own))]
        buffers = self._landed() if self._landing else []
        try:
            while self.comm.Iprobe(ANY_SOURCE, self.tag, self._status):
                self._take(buffers)
        except RankFailed as error:
            self.failed.update(error.ranks)
        for source, buffer in buffers:
            try:
                arrived.append((source, decode(buffer)))
            except Unreadable:
                self.counts["unreadable"] += 1
        return arrived

    def _take(self, buffers: list[tuple[int, Bytes]]) -> None:
        source, nbytes = self._status.Get_source(), self._status.Get_count()
        buffer: Bytes = np.empty(nbytes, np.uint8)
        self.counts["bytes_received"] += nbytes
        if nbytes <= AT_ONCE_NBYTES:
            self.comm.Recv(buffer, source, self.tag)
            buffers.append((source, buffer))
            return
        request = self.comm.Irecv(buffer, source, self.tag)
        # A word must not overtake an earlier one of the same rank that is still landing.
        if any(other == source for _, other, _ in self._landing) or not request.Test():
            self._landing.append((request, source, buffer))
        else:
            buffers.append((source, buffer))

    def _landed(self) -> list[tuple[int, Bytes]]:
        landed, landing = [], []
        for request, source, buffer in self._landing:
            try:
                over = request.Test()
            except RankFailed as error:  # it died while sending
                self.failed.update(error.ranks)
                continue
            if over:
                landed.append((source, buffer))
            else:
                landing.append((request, source, buffer))
        self._landing = landing
        return landed

    def wait(self, seconds: float) -> None:
        """Return as soon as something is here, or after `seconds`."""
        if seconds <= 0 or self._own:
            return
        try:
            if self._landing:
                with self.comm.clock.deadline(min(seconds, LANDING_SLICE_S)):
                    self._landing[0][0].Wait()
            elif self.failed:  # a wait for anybody would end at once: some of them will never write
                self.comm.clock.sleep(min(seconds, self.poll_interval_s))
            else:
                with self.comm.clock.deadline(seconds):
                    self._any.Probe(ANY_SOURCE, self.tag)
        except Timeout:
            pass
        except RankFailed as error:
            self.failed.update(error.ranks)
            if self._landing and self._landing[0][1] in error.ranks:
                del self._landing[0]
