"""Rounds in which each rank sends one buffer to some ranks and receives one from each of some others.

Which ranks these are may change from round to round; all know it, so nothing is asked. A round may be finished some
rounds after it was begun: then its messages travel while the rank computes. The tag and the order of messages between
two ranks pair the rounds of one with those of the other, so that no message needs a number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spawnsim.comm import Comm
from spawnsim.policies.state.codecs import Bytes

if TYPE_CHECKING:
    from spawnsim.comm import Request


@dataclass(frozen=True, slots=True)
class _Round:
    sources: Sequence[int]
    theirs: list[Bytes]
    mine: Bytes
    requests: list[Request]


class NeighbourRounds:
    """One rank's rounds on one communicator.

    Args:
        comm: the communicator.
        tag: of all messages.
        nbytes: of each buffer.
        allocate: makes memory to send from and receive into.
    """

    def __init__(self, comm: Comm, tag: int, *, nbytes: int, allocate: Callable[[int], Bytes]) -> None:
        self._comm, self._tag, self._nbytes, self._allocate = comm, tag, nbytes, allocate
        self._under_way: deque[_Round] = deque()
        self._free: list[Bytes] = []
        self._lent: list[Bytes] = []  # what the latest `finish` has handed out

    @property
    def under_way(self) -> int:
        """Rounds that were begun and not finished."""
        return len(self._under_way)

    def begin(self, write: Callable[[Bytes], None], to: Sequence[int], sources: Sequence[int]) -> None:
        """Begin a round; waits for nobody.

        Args:
            write: fills the memory that is sent.
            to: ranks that it is sent to.
            sources: ranks whose buffers are awaited.
        """
        self._free += self._lent
        self._lent = []
        mine, *theirs = (self._memory() for _ in range(1 + len(sources)))
        write(mine)
        # Receives first: large messages then go straight to their place, and no order of arrival can block a ring of
        # ranks that all send.
        requests = [
            self._comm.Irecv(buffer, rank, self._tag) for buffer, rank in zip(theirs, sources, strict=True)
        ]
        requests += [self._comm.Isend(mine, rank, self._tag) for rank in to]
        self._under_way.append(_Round(sources, theirs, mine, requests))

    def finish(self) -> list[tuple[int, Bytes]]:
        """Wait for the oldest round.

        Returns:
            (source, its buffer), as `sources` were given; valid until the next `begin`.

        Raises:
            RankFailed: one of its ranks has died.
            Timeout: one has not come within the communicator's deadline; `finish` may be called again.
        """
        oldest = self._under_way[0]
        # An explicit deadline: a message that is lost for good ends in `Timeout`, and not in a deadlock.
        with self._comm.clock.deadline(self._comm.clock.limit_s()):
            for request in oldest.requests:
                request.Wait()
        self._under_way.popleft()
        self._lent = [oldest.mine, *oldest.theirs]
        return list(zip(oldest.sources, oldest.theirs, strict=True))

    def _memory(self) -> Bytes:
        return self._free.pop() if self._free else self._allocate(self._nbytes)
