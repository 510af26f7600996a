"""One rank's endpoint on one communicator, its progress engine, and the wait for all ranks at the end.

`Endpoint` sends without waiting and receives arrived messages. `ProgressEngine` calls its owner whenever there may be
work: in a call of the rank's program, while that program waits, or from a background task. The owner interprets
messages and decides when actions are due. Every wait in this module is bounded. Policies that wait for known ranks
(`replay`, `noloco`, and `gossip` by `neighbours`) send and receive without an endpoint: polling for any message from
any rank would make their times depend on arrivals.
"""

from __future__ import annotations

import gc
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from spawnsim.comm import ANY_SOURCE, Comm, Request, Status, Task
from spawnsim.comm.objects import SILENT
from spawnsim.errors import RankFailed, Timeout, UsageError, WorldError
from spawnsim.phantoms import is_phantom
from spawnsim.policies.exchange.messages import Foreign, Message, Outgoing, Unreadable, decode, encode
from spawnsim.policies.state.arithmetic import new_memory, phantom_memory
from spawnsim.policies.state.codecs import Bytes

AT_ONCE_NBYTES = 4096  # every MPI delivers this much with the envelope: a receive after a probe does not wait
SLICE_S = 0.05  # how long a wait stays at one large message before it polls the other sources
# Between two polls if no wait for messages is possible, or if another thread makes the progress.
PAUSE_S = 0.01
LEAST_WAIT_S = 1e-3  # a deadline that its owner ignores must not become a busy loop
LONGEST_WAIT_S = 1.0  # longest wait between two looks at the clock

# Endpoints that are not closed, by rank (its clock; virtual ranks' communicators are equal), communicator and tag. A
# communicator lives as long as its endpoints.
_OPEN: WeakKeyDictionary[Any, WeakKeyDictionary[Comm, WeakValueDictionary[int, Endpoint]]] = (
    WeakKeyDictionary()
)


@dataclass(slots=True)
class _Receive:
    """A matched message; `request` is None once it has arrived completely."""

    source: int
    buffer: Bytes
    request: Request | None

    def release(self) -> Bytes:
        """Return the buffer, and drop the reference."""
        buffer, self.buffer = self.buffer, new_memory(0)  # not a slice, which would keep the whole buffer
        return buffer


class Endpoint:
    """Sends and receives one rank's messages on one communicator and tag.

    Sends never wait, waits for messages are bounded, and the messages of one rank stay in order. A message to this rank
    itself is delivered locally, since MPI may block; only the empty message of `wake` is sent.

    Args:
        comm: the communicator. It keeps the buffers of sends until they have completed (guaranteed by `Comm`).
        tag: tag of all messages.
        channel: 32 bits; messages of another channel are dropped and counted as "foreign".
        tracked: store the requests of sends, for callers that reuse the memory of their sends, or that must know when
            everything has been delivered (`reap`, `is_sending`, `unfinished`).
        prefix: prefix of the averager that owns it; None for a policy's endpoint.

    Attributes:
        failed: ranks found to be dead, by a send, by a receive, or by `find_failed`.
        counts: messages and bytes, dropped messages ("unreadable", "foreign", "undeliverable") and messages without
            their body ("damaged").
        sent, received: messages sent, by destination; and number of messages received.
        allocate: creates the receive buffers of large messages.

    Raises:
        UsageError: this rank has an open endpoint with this tag on this communicator: the two would receive each
            other's messages.
    """

    def __init__(
        self, comm: Comm, tag: int, *, channel: int = 0, tracked: bool = False, prefix: str | None = None
    ) -> None:
        self.comm, self.tag, self.rank, self.channel = comm, tag, comm.Get_rank(), channel
        self.prefix = prefix
        if tag in self._open():
            gc.collect()  # perhaps of an unreferenced policy with reference cycles
        other = self._open().setdefault(tag, self)
        if other is not self:
            raise UsageError(self._refused(other.prefix))
        self.counts: Counter[str] = Counter()
        self.failed: set[int] = set()
        self.sent: Counter[int] = Counter()
        self.received = 0
        self.allocate: Callable[[int], Bytes] = new_memory
        self._probe, self._status = comm.Iprobe, Status()
        self._to_self: deque[Message] = deque()
        self._tracked = tracked
        self._wakes = 0  # messages of `wake` that are not received yet
        self._sends: list[tuple[Request, Bytes]] = []
        # Large messages under way, and the messages that they hold up, in the order of their matching.
        self._receives: list[_Receive] = []
        # `Comm` declares the calls of every backend; Probe, Get_failed and Ack_failed are MPI's.
        self._any: Any = comm
        self._virtual = comm.capabilities().backend == "virtual"

    def _open(self) -> WeakValueDictionary[int, Endpoint]:
        of_rank = _OPEN.setdefault(self.comm.clock, WeakKeyDictionary())
        return of_rank.setdefault(self.comm, WeakValueDictionary())

    def _refused(self, other: str | None) -> str:
        begin = f"rank {self.rank}: there is "
        if self.prefix is None or other is None:
            return (
                f"{begin}a policy on this communicator already whose messages have the tag {self.tag}: shutdown() that "
                "one first, or give each its own communicator, made before the training loop: group=comm.Dup()"
            )
        if other == self.prefix:
            return (
                f"{begin}an averager with prefix={other!r} on this communicator already: shutdown() that one first, or "
                "give this one another prefix"
            )
        return (
            f"rank {self.rank}: the averagers with prefix={other!r} and prefix={self.prefix!r} have the tag {self.tag} "
            "in common: give one of them another, tag=..., on all ranks"
        )

    def close(self) -> None:
        """Let another endpoint receive messages with this tag. May be called twice."""
        if self._open().get(self.tag) is self:
            del self._open()[self.tag]

    # ------------------------------------------------------------------------------------------------ sending
    def send(self, rank: int, message: Message) -> bool:
        """Send a message to a rank of the communicator; return False if that rank is known to be dead."""
        if rank == self.rank:
            self._to_self.append(message)
            return True
        return self.send_packed(rank, encode(message, self.channel))

    def send_packed(self, rank: int, buffer: Bytes) -> bool:
        """Send an encoded message, like `send`. While `is_sending`, the buffer must not be modified."""
        if rank == self.rank:
            self._to_self.append(decode(buffer, self.channel))
            return True
        try:
            request = self.comm.Isend(buffer, rank, self.tag)
        except RankFailed:
            self.failed.add(rank)
            self.counts["undeliverable"] += 1
            return False
        if self._tracked:
            self._sends.append((request, buffer))
        self.sent[rank] += 1
        self.counts["messages_sent"] += 1
        self.counts["bytes_sent"] += buffer.size
        return True

    def send_all(self, messages: Iterable[Outgoing]) -> None:
        for rank, message in messages:
            self.send(rank, message)

    def send_queue(self, queue: deque[Outgoing]) -> None:
        # One by one: on real ranks the program's thread may append another message meanwhile, which must neither be
        # lost nor end the loop.
        while queue:
            self.send(*queue.popleft())

    def is_sending(self, memory: Bytes) -> bool:
        return any(memory is other for _, other in self._sends)

    def reap(self) -> bool:
        """Drop completed sends; return whether all have completed."""
        if self._sends:
            self._sends = [entry for entry in self._sends if not self._has_gone(entry[0])]
        return not self._sends

    def _has_gone(self, request: Request) -> bool:
        try:
            return request.Test()
        except RankFailed as error:  # the message will not be received
            self._note_failure(error)
            return True

    @property
    def unfinished(self) -> int:
        return len(self._sends) + len(self._receives)

    # ---------------------------------------------------------------------------------------------- receiving
    def poll(self) -> list[tuple[int, Message]]:
        """Return (source, message) for all arrived messages; never waits; a single probe if nothing has arrived."""
        return [*self.messages()]

    def messages(self) -> Iterator[tuple[int, Message]]:
        """Yield the results of `poll` one by one: a message's memory can be released before the next is complete."""
        yield from self.from_self()
        for source, buffer in self._complete():
            if is_phantom(buffer) and self.allocate is not phantom_memory:
                buffer = np.asarray(buffer)
            try:
                message = decode(buffer, self.channel)
            except Unreadable as error:
                self.counts["foreign" if isinstance(error, Foreign) else "unreadable"] += 1
            else:
                self.counts["damaged"] += message.damaged
                del buffer
                yield source, message

    def _complete(self) -> Iterator[tuple[int, Bytes]]:
        yield from self._finished() if self._receives else ()
        try:
            while self._probe(ANY_SOURCE, self.tag, self._status):
                receive = self._take()
                if receive is not None and receive.buffer.size:
                    yield receive.source, receive.release()
        except RankFailed as error:
            # On ULFM one dead rank fails every probe of ANY_SOURCE until its failure is acknowledged.
            self._note_failure(error)
            if self.comm.capabilities().survives:
                self._any.Ack_failed()

    def empty(self, patience_s: float) -> None:
        """Receive and drop messages of ranks that have left and wait for their delivery; at most `patience_s`."""
        clock = self.comm.clock
        end_s = clock.now() + patience_s
        quiet_s = clock.now() + PAUSE_S
        while (now_s := clock.now()) < end_s and (now_s < quiet_s or self._receives):
            if self.poll():
                quiet_s = now_s + PAUSE_S
            clock.sleep(LEAST_WAIT_S)

    def from_self(self) -> list[tuple[int, Message]]:
        return [(self.rank, self._to_self.popleft()) for _ in range(len(self._to_self))]

    def complete_receives(self, patience_s: float) -> None:
        """Complete and drop the receives that have begun; at most `patience_s`."""
        end_s = self.comm.clock.now() + patience_s if self._receives else 0.0
        with suppress(WorldError):
            while self._receives and (left_s := end_s - self.comm.clock.now()) > 0:
                self._wait_for(self._receives[0], left_s)
                deque(self._finished(), maxlen=0)

    def _take(self) -> _Receive | None:
        """Receive the probed message, or begin to; return it if it is complete.

        A small message is often complete before a large one that the same rank sent earlier. It is held back: the
        protocols rely on MPI's guarantee that messages do not overtake each other.
        """
        source, nbytes = self._status.Get_source(), self._status.Get_count()
        if source == self.rank:  # by `wake`: no other message to this rank is sent
            self._wakes -= 1
            self.comm.Recv(new_memory(0), source, self.tag)
            return None
        self.counts["bytes_received"] += nbytes
        self.received += 1
        # While large messages arrive, a small one may have to wait for them at the network card.
        if nbytes <= AT_ONCE_NBYTES and not self._receives:
            receive = _Receive(source, self._room(nbytes), None)
            self.comm.Recv(receive.buffer, source, self.tag)
        else:
            buffer = self._room(nbytes)
            receive = _Receive(source, buffer, self.comm.Irecv(buffer, source, self.tag))
        if any(earlier.source == source for earlier in self._receives) or not self._is_complete(receive):
            self._receives.append(receive)
            return None
        return receive

    def _room(self, nbytes: int) -> Bytes:
        """Return a receive buffer; for a small message plain memory, unless it is a phantom."""
        small = nbytes <= AT_ONCE_NBYTES
        # The messages under way to all virtual ranks may exceed the memory of one machine.
        phantom = self.allocate is phantom_memory or (self._virtual and not small)
        room: Bytes = (phantom_memory if phantom else new_memory if small else self.allocate)(nbytes)
        return room

    def _finished(self) -> Iterator[tuple[int, Bytes]]:
        """Yield the complete receives, but none before an earlier one of the same source."""
        incomplete: list[_Receive] = []
        held: set[int] = set()  # sources with an earlier incomplete message
        for receive in self._receives:
            if receive.source in held or not self._is_complete(receive):
                held.add(receive.source)
                incomplete.append(receive)
            elif receive.buffer.size:
                yield receive.source, receive.release()
        self._receives = incomplete

    def _is_complete(self, receive: _Receive) -> bool:
        return receive.request is None or self._has_ended(receive, receive.request.Test)

    def _has_ended(self, receive: _Receive, call: Callable[[], bool]) -> bool:
        """Return whether a receive has completed; `call` is a method of its request."""
        try:
            if not call():
                return False
        except RankFailed as error:  # the sender died: this message is dropped
            self._note_failure(error)
            receive.buffer = receive.buffer[:0]
        receive.request = None
        return True

    def _note_failure(self, error: RankFailed) -> None:
        self.failed.update(error.ranks)
        self.counts["peer failed"] += 1

    def wait(self, seconds: float) -> None:
        """Wait until a message has arrived, for at most `seconds`."""
        if seconds <= 0 or self._to_self:
            return
        try:
            if self._receives:
                self._wait_for(self._receives[0], min(seconds, SLICE_S))
            elif self.failed:  # a wait for any rank would end at once: dead ranks never send
                self.comm.clock.sleep(min(seconds, PAUSE_S))
            else:
                with self.comm.clock.deadline(seconds):
                    self._any.Probe(ANY_SOURCE, self.tag)
        except Timeout:
            pass
        except RankFailed as error:
            self._note_failure(error)

    def wake(self) -> None:
        """End a `wait` of another task of this rank, by an empty message to itself."""
        with suppress(WorldError):  # no task waits on a communicator that has ended
            self.comm.Isend(new_memory(0), self.rank, self.tag)
            self._wakes += 1

    def take_wakes(self) -> None:
        """Receive the messages of `wake` that no `poll` has received; the other task has ended."""
        with suppress(WorldError), self.comm.clock.deadline(PAUSE_S):
            while self._wakes:
                self._wakes -= 1
                self.comm.Recv(new_memory(0), self.rank, self.tag)

    def _wait_for(self, receive: _Receive, seconds: float) -> None:
        if receive.request is not None:
            with self.comm.clock.deadline(seconds):
                self._has_ended(receive, receive.request.Wait)

    def find_failed(self) -> set[int]:
        """Return `failed`, including ranks that died without any communication; costs a call of the backend."""
        if self.comm.capabilities().survives:  # elsewhere the job ends with the first death
            failed = self._any.Get_failed()
            if failed.Get_size():
                ranks = failed.Translate_ranks(None, self.comm.Get_group())
                self.failed.update(rank for rank in ranks if rank >= 0)
        return self.failed


class EngineOwner(Protocol):
    """Interface that a progress engine calls."""

    def advance(self, arrived: list[tuple[int, Message]], now_s: float, dead: set[int]) -> None:
        """Handle the arrived messages and execute due actions; `dead` are the newly detected dead ranks."""

    def wake_s(self) -> float:
        """Return when `advance` is needed next, even without messages; −∞ if there is more to do immediately."""


class ProgressEngine:
    """Makes progress for one owner on one endpoint.

    While a rank computes, neither MPI nor a virtual rank handles its messages: a protocol advances only when it is
    polled. The engine lets all protocols poll in the same way: in calls of the rank's program, in `drive`, or in a
    background task. If two tasks try at the same time, the lock admits one, and the other returns: a caller waiting for
    the lock would block its training loop for the duration of the other task's work.

    Args:
        endpoint, owner: the source of messages, and the object that handles them.
        lock: held while the owner is called; by default the engine's own lock.
        poll_interval_s: seconds between two attempts while another task holds the lock or makes the progress.
        background_wait_s: the longest wait of the background task.
        death_check_s: seconds between checks for ranks that died silently; by default there are no checks.
    """

    def __init__(
        self, endpoint: Endpoint, owner: EngineOwner, *, lock: Lock | None = None, poll_interval_s: float = PAUSE_S,
        background_wait_s: float = 10 * PAUSE_S, death_check_s: float = math.inf,
    ) -> None:  # fmt: skip
        self.endpoint, self.owner, self.poll_interval_s = endpoint, owner, poll_interval_s
        self._clock = endpoint.comm.clock
        self._lock = lock if lock is not None else Lock()
        self._background_wait_s, self._death_check_s = background_wait_s, death_check_s
        self._check_s = -math.inf if death_check_s < math.inf else math.inf
        self._known_dead: set[int] = set()
        self._task: Task | None = None
        self._stopping, self._ready = False, False

    def progress(self) -> bool:
        """Handle all arrived messages and due actions; never waits. False if another task holds the lock."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            arrived = self.endpoint.poll()
            now_s = self._clock.now()
            if now_s >= self._check_s:
                self._check_s = now_s + self._death_check_s
                self.endpoint.find_failed()
            dead = self.endpoint.failed - self._known_dead
            self._known_dead |= dead
            self.owner.advance(arrived, now_s, dead)
        finally:
            self._lock.release()
        return True

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Suspend progress: inside the block the owner's data may be read and changed."""
        while not self._lock.acquire(blocking=False):
            self._clock.sleep(self.poll_interval_s)
        try:
            yield
        finally:
            self._lock.release()

    def drive(self, done: Callable[[], bool], timeout_s: float, *, polling: bool = False) -> bool:
        """Make progress until `done()`, for at most `timeout_s`; return whether it is done.

        `polling`: evaluate `done` at intervals, because no message to the endpoint signals it.
        """
        end_s = self._clock.now() + timeout_s
        while True:
            self.progress()
            if done():
                return True
            now_s = self._clock.now()
            if now_s >= end_s:
                return False
            left_s = min(end_s - now_s, LONGEST_WAIT_S)
            if polling or (self._task is not None and self._task.alive):
                self._clock.sleep(min(self.poll_interval_s, left_s))
            else:
                self._wait(now_s, left_s)

    def _wait(self, now_s: float, most_s: float) -> None:
        """Wait for a message or for the next due action; not at all if the owner has more to do immediately."""
        due_s = self.owner.wake_s()
        if due_s > -math.inf:
            self.endpoint.wait(min(max(due_s - now_s, LEAST_WAIT_S), most_s))

    # ---------------------------------------------------------------------------------------------- background
    def run_in_background(self) -> None:
        """Make progress in parallel with the rank's program until `stop` or the communicator's end. May be repeated."""
        if self._task is None or not self._task.alive:
            self._stopping, self._ready = False, False
            self._task = self.endpoint.comm.background(self._loop)

    def await_ready(self, timeout_s: float) -> bool:
        """Wait until the background task has made progress once, at most `timeout_s`; return whether it has."""
        end_s = self._clock.now() + timeout_s
        while not self._ready and (left_s := end_s - self._clock.now()) > 0:
            self._clock.sleep(min(self.poll_interval_s, left_s))
        return self._ready

    def _loop(self) -> None:
        try:
            while not self._stopping:
                if self.progress():
                    self._ready = True
                    self._wait(self._clock.now(), self._background_wait_s)
                else:
                    self._clock.sleep(self.poll_interval_s)
        except WorldError:
            # Revoked: the rank's program notices it in its own next call, recovers, and creates a new engine.
            self._stopping = True

    def stop(self, timeout_s: float = 0.0, *, served: bool = False) -> bool:
        """End the background task, if any; return whether it ended in time. Without a timeout it is not awaited.

        Afterwards the tag is free for another endpoint. `served`: the rank continues to serve in its own task, so
        messages that are partly received are kept.
        """
        self._stopping = True
        self.endpoint.close()
        if timeout_s <= 0:
            return True
        if self._task is not None:
            if self._task.alive:
                # It may be waiting for a message that no rank will send.
                self.endpoint.wake()
            if not self._task.join(timeout_s):
                return False
            self.endpoint.take_wakes()
        if not served:
            self.endpoint.complete_receives(timeout_s)
        return True


# ------------------------------------------------------------------------------------------------ the end
# A rank may be arbitrarily late, so no time-out ends a wait for all ranks. It ends when all ranks have arrived, when a
# rank has died, or when the communicator reports that one has ended its program or does not answer.
FIRST = 1 / 32  # share of the patience after which absent ranks are first checked
# Each check comes later than the one before, without limit: once the time to the next check is infinite, ranks that
# wait for each other, one of them here, are a deadlock, which virtual ranks report.
GROWTH = 1.25
SHOWN = 4


class Absences:
    """Checks periodically for ranks of a communicator that will not arrive.

    A rank that does not answer is waited for up to `patience_s`; a dead or ended rank is not.
    """

    def __init__(self, comm: Comm, patience_s: float) -> None:
        self._comm, self._patience_s, self._slice_s = comm, patience_s, FIRST * patience_s
        self._began_s = comm.clock.now()
        self._due_s = self._began_s + self._slice_s

    def wait_s(self) -> float:
        return max(self._due_s - self._comm.clock.now(), 1e-6)

    def is_due(self) -> bool:
        """Return whether the next check is due; if so, schedule the one after it."""
        now_s = self._comm.clock.now()
        if now_s < self._due_s:
            return False
        self._slice_s *= GROWTH
        self._due_s = now_s + self._slice_s
        return True

    def check(self) -> dict[int, str]:
        """Return the ranks that will not arrive, with the reason. A check is expensive: see `is_due`."""
        late = self._comm.clock.now() >= self._began_s + self._patience_s
        return {rank: why for rank, why in self._comm.absent().items() if late or why != SILENT}


class Attendance:
    """One rank's wait for all ranks of a communicator. Construction is collective, and does not wait."""

    def __init__(self, comm: Comm, patience_s: float) -> None:
        self._comm, self.absences = comm, Absences(comm, patience_s)
        self._everyone: Request | None = None
        with suppress(RankFailed):  # `complete` reports it; until then this rank may have to serve
            self._everyone = comm.Ibarrier()

    def all_here(self) -> bool:
        with suppress(RankFailed):
            return self._everyone is not None and self._everyone.Test()
        return False

    def complete(self) -> dict[int, str]:
        """Wait until all ranks have arrived; return the ranks that will not arrive, with the reason.

        Raises:
            RankFailed: a rank has died.
        """
        if self._everyone is None:
            self._everyone = self._comm.Ibarrier()
        while True:
            try:
                with self._comm.clock.deadline(self.absences.wait_s()):
                    self._everyone.Wait()
                    return {}
            except Timeout:
                if self.absences.is_due() and (absent := self.absences.check()):
                    return absent


def shown(absent: Mapping[int, str]) -> str:
    """Format which ranks are absent, and why."""
    more = f", and {len(absent) - SHOWN} more like it" if len(absent) > SHOWN else ""
    return ", ".join(f"rank {rank} {absent[rank]}" for rank in sorted(absent)[:SHOWN]) + more
