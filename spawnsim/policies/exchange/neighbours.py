"""Rounds in which each rank sends one buffer to some ranks and receives one buffer from each of several ranks.

The ranks may change from round to round; all ranks know them, so no requests are needed. A round may be finished
several rounds after it was begun: then its messages travel while the rank computes. The tag and the order of messages
between two ranks match their rounds, so messages need no number.
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
        tag: tag of all messages.
        nbytes: size of each buffer.
        allocate: creates the memory of sends and receives.
    """

    def __init__(self, comm: Comm, tag: int, *, nbytes: int, allocate: Callable[[int], Bytes]) -> None:
        self._comm, self._tag, self._nbytes, self._allocate = comm, tag, nbytes, allocate
        self._under_way: deque[_Round] = deque()
        self._free: list[Bytes] = []
        self._handed_out: list[Bytes] = []  # buffers returned by the latest `finish`

    @property
    def under_way(self) -> int:
        """Number of rounds that were begun and not finished."""
        return len(self._under_way)

    def begin(self, write: Callable[[Bytes], None], to: Sequence[int], sources: Sequence[int]) -> None:
        """Begin a round; does not wait.

        Args:
            write: fills the memory to send.
            to: destination ranks.
            sources: ranks to receive from.
        """
        self._free += self._handed_out
        self._handed_out = []
        mine, *theirs = (self._memory() for _ in range(1 + len(sources)))
        write(mine)
        # Receives first: large messages are then received in place, and no order of arrival can block a ring of sending
        # ranks.
        requests = [
            self._comm.Irecv(buffer, rank, self._tag) for buffer, rank in zip(theirs, sources, strict=True)
        ]
        requests += [self._comm.Isend(mine, rank, self._tag) for rank in to]
        self._under_way.append(_Round(sources, theirs, mine, requests))

    def finish(self) -> list[tuple[int, Bytes]]:
        """Wait for the oldest round.

        Returns:
            (source, its buffer), in the order of `sources`; valid until the next `begin`.

        Raises:
            RankFailed: one of its ranks has died.
            Timeout: a message did not arrive within the communicator's deadline; `finish` may be called again.
        """
        oldest = self._under_way[0]
        # An explicit deadline: a message that is permanently lost raises `Timeout` instead of causing a deadlock.
        with self._comm.clock.deadline(self._comm.clock.limit_s()):
            for request in oldest.requests:
                request.Wait()
        self._under_way.popleft()
        self._handed_out = [oldest.mine, *oldest.theirs]
        return list(zip(oldest.sources, oldest.theirs, strict=True))

    def _memory(self) -> Bytes:
        return self._free.pop() if self._free else self._allocate(self._nbytes)
