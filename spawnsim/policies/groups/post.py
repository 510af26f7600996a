"""Words to and from ranks: sends never wait, a wait for words is bounded, the words of one rank stay in order.

This room knows a communicator's calls and one tag; it does not know what words mean. The communicator keeps the
buffers of sends until they have gone (`Comm` promises it), so nothing is kept here. A word to the own rank takes no
wire. Ranks that are found dead are in `failed`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from spawnsim.comm import ANY_SOURCE, Comm, Status
from spawnsim.errors import RankFailed, Timeout
from spawnsim.policies.groups.words import Bytes, Foreign, Unreadable, Word, decode, encode

if TYPE_CHECKING:
    from spawnsim.comm import Request

AT_ONCE_NBYTES = 4096  # every MPI delivers so little with the envelope: a receive after a probe does not wait
SLICE_S = 0.05  # how long a wait looks at one large message before it looks at the others again


@dataclass(slots=True)
class _Receive:
    """A message that has been matched; `request` is None once all of it is here."""

    source: int
    buffer: Bytes
    request: Request | None


class Post:
    """One rank's post on one communicator and tag; words of another `channel` are dropped and counted."""

    def __init__(self, comm: Comm, tag: int, poll_interval_s: float = 0.01, channel: int = 0) -> None:
        self.comm, self.tag, self.rank, self.channel = comm, tag, comm.Get_rank(), channel
        self.poll_interval_s = poll_interval_s
        self.counts: Counter[str] = Counter()
        self.failed: set[int] = set()
        self._status = Status()
        self._own: deque[Word] = deque()
        self._receives: list[_Receive] = []  # in the order in which they were matched
        self._any: Any = comm  # the protocol lists the calls of every building; Probe is mpi4py's too

    def send(self, rank: int, word: Word) -> None:
        """Send a word to a rank of the communicator."""
        if rank == self.rank:
            self._own.append(word)
            return
        buffer = encode(word, self.channel)
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
        try:
            while self.comm.Iprobe(ANY_SOURCE, self.tag, self._status):
                self._receive()
        except RankFailed as error:
            self.failed.update(error.ranks)
        for source, buffer in self._in_order():
            try:
                word = decode(buffer, self.channel)
            except Unreadable as error:
                self.counts["foreign" if isinstance(error, Foreign) else "unreadable"] += 1
            else:
                self.counts["damaged"] += word.damaged
                arrived.append((source, word))
        return arrived

    def _receive(self) -> None:
        """Receive the message that was probed, or begin to."""
        source, nbytes = self._status.Get_source(), self._status.Get_count()
        buffer: Bytes = np.empty(nbytes, np.uint8)
        self.counts["bytes_received"] += nbytes
        request = None
        if nbytes <= AT_ONCE_NBYTES:
            self.comm.Recv(buffer, source, self.tag)
        else:
            request = self.comm.Irecv(buffer, source, self.tag)
        self._receives.append(_Receive(source, buffer, request))

    def _in_order(self) -> list[tuple[int, Bytes]]:
        """Return what is complete. A small message often is before a large one that was sent earlier: it waits."""
        complete: list[tuple[int, Bytes]] = []
        incomplete: list[_Receive] = []
        held: set[int] = set()  # sources with an earlier message under way
        for receive in self._receives:
            if receive.source in held or not self._is_complete(receive):
                held.add(receive.source)
                incomplete.append(receive)
            elif receive.buffer.size:
                complete.append((receive.source, receive.buffer))
        self._receives = incomplete
        return complete

    def _is_complete(self, receive: _Receive) -> bool:
        return receive.request is None or self._ended(receive, receive.request.Test)

    def _ended(self, receive: _Receive, call: Callable[[], bool]) -> bool:
        """Return whether a receive is over, as `call` of its request says."""
        try:
            if not call():
                return False
        except RankFailed as error:  # it died while sending: nothing of this message will be used
            self.failed.update(error.ranks)
            receive.buffer = receive.buffer[:0]
        receive.request = None
        return True

    def wait(self, seconds: float) -> None:
        """Return as soon as something is here, or after `seconds`."""
        if seconds <= 0 or self._own:
            return
        try:
            if self._receives:
                self._wait_for(self._receives[0], min(seconds, SLICE_S))
            elif self.failed:  # a wait for anybody would end at once: some of them will never write
                self.comm.clock.sleep(min(seconds, self.poll_interval_s))
            else:
                with self.comm.clock.deadline(seconds):
                    self._any.Probe(ANY_SOURCE, self.tag)
        except Timeout:
            pass
        except RankFailed as error:
            self.failed.update(error.ranks)

    def _wait_for(self, receive: _Receive, seconds: float) -> None:
        if receive.request is not None:
            with self.comm.clock.deadline(seconds):
                self._ended(receive, receive.request.Wait)
