"""multiprocessing's queues, pipes, locks, events and barriers between a main program and its virtual ranks.

All processes share one object of each. A call acts at its caller's virtual time, costs no time, and waits in virtual
time. Objects that pass through queues and pipes are copied; tensors among them share their memory.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from spawnsim.virtual.engine.kernel import current_task
from spawnsim.virtual.scripts.copies import Copy, Shared, copied
from spawnsim.virtual.scripts.spawning import Session, Started, active


class ProcessObject(Shared):
    """An object of the active session."""

    def __init__(self) -> None:
        self._session: Session = active()

    def _wait(self, ready: Callable[[], bool], what: str, timeout: float | None = None) -> bool:
        return self._session.wait(ready, f"{type(self).__name__}.{what}()", timeout)


class SimpleQueue(ProcessObject):
    """A queue without a limit."""

    def __init__(self) -> None:
        super().__init__()
        self._items: deque[Copy] = deque()

    def put(self, obj: Any) -> None:
        self._append(copied(obj))

    def _append(self, item: Copy) -> None:
        self._session.look()
        self._items.append(item)
        self._session.changed()

    def get(self) -> Any:
        """Wait for an item, and take it."""
        self._wait(lambda: bool(self._items), "get")
        return self._take()

    def _take(self) -> Any:
        item = self._items.popleft()
        self._session.changed()
        return item.load()

    def empty(self) -> bool:
        """Return whether the queue is empty; the main program lets a little time pass."""
        return not self._session.look_for(lambda: bool(self._items))

    def close(self) -> None:
        """Do nothing: items that were put in can still be taken."""


class Queue(SimpleQueue):
    """A queue, perhaps with a maximal number of items."""

    def __init__(self, maxsize: int = 0) -> None:
        super().__init__()
        self._maxsize, self._unfinished = maxsize, 0

    def _has_room(self) -> bool:
        return self._maxsize <= 0 or len(self._items) < self._maxsize

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        """Append a copy of an object; raise `queue.Full` if there is no room in time."""
        item = copied(obj)
        if not self._wait(self._has_room, "put", timeout if block else 0.0):
            raise queue.Full
        self._unfinished += 1
        self._append(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Take the first item; raise `queue.Empty` if there is none in time."""
        found = lambda: bool(self._items)  # noqa: E731
        if not (self._wait(found, "get", timeout) if block else self._session.look_for(found)):
            raise queue.Empty
        return self._take()

    def put_nowait(self, obj: Any) -> None:
        self.put(obj, block=False)

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def qsize(self) -> int:
        """Return the number of items."""
        self._session.look()
        return len(self._items)

    def full(self) -> bool:
        self._session.look()
        return not self._has_room()

    def task_done(self) -> None:
        """Note that an item has been processed (`JoinableQueue`)."""
        self._session.look()
        if self._unfinished <= 0:
            raise ValueError("task_done() called too many times")
        self._unfinished -= 1
        self._session.changed()

    def join(self) -> None:
        """Wait until all items have been processed (`JoinableQueue`)."""
        self._wait(lambda: self._unfinished == 0, "join")

    def join_thread(self) -> None:
        """Do nothing: no thread sends the items."""

    cancel_join_thread = join_thread


class Semaphore(ProcessObject):
    """A counter that `acquire` reduces and never makes negative."""

    most: float = float("inf")

    def __init__(self, value: int = 1) -> None:
        super().__init__()
        self._value = value

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Wait until the counter is positive, and reduce it; return whether that succeeded in time."""
        if not self._wait(lambda: self._value > 0, "acquire", timeout if block else 0.0):
            return False
        self._value -= 1
        return True

    def release(self) -> None:
        """Increase the counter."""
        self._session.look()
        if self._value >= self.most:
            raise ValueError("semaphore or lock released too many times")
        self._value += 1
        self._session.changed()

    def get_value(self) -> int:
        self._session.look()
        return self._value

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class BoundedSemaphore(Semaphore):
    """A semaphore that refuses to exceed its first value."""

    def __init__(self, value: int = 1) -> None:
        super().__init__(value)
        self.most = value


class Lock(BoundedSemaphore):
    """A lock; any process may release it."""

    def __init__(self) -> None:
        super().__init__(1)


class RLock(Lock):
    """A lock that its owner may take repeatedly."""

    def __init__(self) -> None:
        super().__init__()
        self._owner: Any = None
        self._depth = 0

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Take the lock; return whether that succeeded in time."""
        me = current_task() or "main"
        if self._owner is not me:
            if not super().acquire(block, timeout):
                return False
            self._owner = me
        self._depth += 1
        return True

    def release(self) -> None:
        """Release the lock, once for each `acquire`."""
        if self._owner is not (current_task() or "main"):
            raise AssertionError("attempt to release recursive lock not owned by thread")
        self._depth -= 1
        if not self._depth:
            self._owner = None
            super().release()


class Condition(ProcessObject):
    """A condition that processes wait for, with its lock."""

    def __init__(self, lock: Any = None) -> None:
        super().__init__()
        self._lock = RLock() if lock is None else lock
        self.acquire, self.release = self._lock.acquire, self._lock.release
        self._sleepers: list[list[bool]] = []

    def __enter__(self) -> Any:
        return self._lock.__enter__()

    def __exit__(self, *exception: object) -> None:
        self._lock.__exit__(*exception)

    def wait(self, timeout: float | None = None) -> bool:
        """Release the lock, wait for a notification, and take the lock again; return whether there was one in time."""
        notified = [False]
        self._sleepers.append(notified)
        self.release()
        try:
            return self._wait(lambda: notified[0], "wait", timeout)
        finally:
            if not notified[0]:
                self._sleepers.remove(notified)
            self.acquire()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """Wait until a predicate holds."""
        found = predicate()
        while not found and self.wait(timeout):
            found = predicate()
        return found

    def notify(self, n: int = 1) -> None:
        """Wake processes that wait, at most `n`."""
        self._session.look()
        for notified in self._sleepers[:n]:
            notified[0] = True
        del self._sleepers[:n]
        self._session.changed()

    def notify_all(self) -> None:
        self.notify(len(self._sleepers))


class Event(ProcessObject):
    """A flag that processes wait for."""

    def __init__(self) -> None:
        super().__init__()
        self._flag = False

    def is_set(self) -> bool:
        """Return the flag; the main program lets a little time pass."""
        return self._session.look_for(lambda: self._flag)

    def set(self) -> None:
        self._change(flag=True)

    def clear(self) -> None:
        self._change(flag=False)

    def _change(self, *, flag: bool) -> None:
        self._session.look()
        self._flag = flag
        self._session.changed()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the flag; return it."""
        return self._wait(lambda: self._flag, "wait", timeout)


class Barrier(ProcessObject):
    """A barrier of a number of processes."""

    def __init__(
        self, parties: int, action: Callable[[], Any] | None = None, timeout: float | None = None
    ) -> None:
        super().__init__()
        self.parties, self._action, self._timeout = parties, action, timeout
        self.broken, self._round, self._arrived = False, 0, 0

    @property
    def n_waiting(self) -> int:
        return self._arrived

    def wait(self, timeout: float | None = None) -> int:
        """Wait for all parties; return the caller's place in the order of arrival, counted down."""
        self._session.look()
        mine, place = self._round, self.parties - 1 - self._arrived
        if self.broken:
            raise threading.BrokenBarrierError
        self._arrived += 1
        if self._arrived == self.parties:
            if self._action is not None:
                self._action()
            self._arrived, self._round = 0, self._round + 1
            self._session.changed()
            return place
        over = lambda: self._round != mine or self.broken  # noqa: E731
        if not self._wait(over, "wait", self._timeout if timeout is None else timeout):
            self.abort()
        if self._round == mine:
            raise threading.BrokenBarrierError
        return place

    def abort(self) -> None:
        """Break the barrier: its waits raise an error."""
        self.broken = True
        self._session.changed()

    def reset(self) -> None:
        """Break the present round, and begin with an empty one."""
        self.abort()
        self.broken, self._arrived = False, 0


class Connection(ProcessObject):
    """One end of a pipe."""

    def __init__(self) -> None:
        super().__init__()
        self._items: deque[Copy] = deque()
        self.peer: Any = None
        self.readable = self.writable = True
        self._holders: set[Any] = {_holder()}

    def given(self, process: Started | None) -> None:
        """Note that a process will hold this end until it ends."""
        if process is not None:
            self._holders.add(process)
            process.on_end.append(lambda: self._holders.discard(process))

    @property
    def closed(self) -> bool:
        return _holder() not in self._holders

    def close(self) -> None:
        """Close the caller's copy of this end."""
        self._holders.discard(_holder())
        self._session.changed()

    def fileno(self) -> int:
        raise OSError("a pipe between virtual ranks has no file descriptor")

    def send(self, obj: Any) -> None:
        """Send a copy of an object."""
        item = copied(obj)
        self._session.look()
        if not self.peer._holders:
            raise BrokenPipeError(32, "Broken pipe")
        self.peer._items.append(item)
        self._session.changed()

    def ready(self) -> bool:
        """Return whether `recv` would not wait."""
        return bool(self._items) or not self.peer._holders

    def recv(self) -> Any:
        """Wait for an object, and return it; raise `EOFError` if the other end is closed."""
        self._wait(self.ready, "recv")
        if not self._items:
            raise EOFError
        return self._items.popleft().load()

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Return whether there is anything to receive in time."""
        if timeout == 0.0:
            return self._session.look_for(self.ready)
        return self._wait(self.ready, "poll", timeout)

    def send_bytes(self, buf: Any, offset: int = 0, size: int | None = None) -> None:
        """Send bytes."""
        data = bytes(memoryview(buf).cast("B"))
        self.send(data[offset : None if size is None else offset + size])

    def recv_bytes(self, maxlength: int | None = None) -> bytes:
        """Wait for bytes."""
        return bytes(self.recv())

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _holder() -> Any:
    task = current_task()
    return None if task is None else active().group.started[task.rank]  # type: ignore[union-attr]


def pipe(duplex: bool = True) -> tuple[Connection, Connection]:
    """Return the two ends of a pipe; without `duplex` the first only receives and the second only sends."""
    ends = Connection(), Connection()
    ends[0].peer, ends[1].peer = ends[1], ends[0]
    return ends


def wait(object_list: Sequence[Any], timeout: float | None = None) -> list[Any]:
    """Wait until a process has ended, or a pipe can be read: `multiprocessing.connection.wait`."""

    def ready() -> list[Any]:
        return [
            each
            for each in object_list
            if (each.returncode is not None if isinstance(each, Started) else each.ready())
        ]

    active().wait(lambda: bool(ready()), "connection.wait()", timeout)
    return ready()


# Names that multiprocessing's modules hold, and what replaces them.
IN_QUEUES: dict[str, type[ProcessObject]] = {
    "Queue": Queue,
    "JoinableQueue": Queue,
    "SimpleQueue": SimpleQueue,
}
IN_SYNCHRONIZE: dict[str, type[ProcessObject]] = {
    each.__name__: each for each in (Semaphore, BoundedSemaphore, Lock, RLock, Condition, Event, Barrier)
}
