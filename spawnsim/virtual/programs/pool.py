"""A pool of ranks that work for one of them: what the executors of `mpi4py.futures` stand on.

The master hands a task to a free worker when it is submitted, and takes results in while it waits for one. There is
no thread behind it. This room knows messages and futures; it must not know executors.
"""

from __future__ import annotations

import concurrent.futures as base
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from spawnsim.comm.constants import ANY_SOURCE
from spawnsim.comm.status import Status

TASK, RESULT = 2**20 + 1, 2**20 + 2  # tags
Task = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class RemoteTraceback(Exception):
    """The traceback of a worker, as text: the cause of an exception that a future raises."""


class Future(base.Future[Any]):
    """A result to come. Waiting for it lets the master take in what workers have done."""

    pool: Pool | None = None

    def _progress(self) -> None:
        while self.pool is not None and not self.done():
            self.pool.collect()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the result and return it."""
        self._progress()
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end; return the exception, if there was one."""
        self._progress()
        return super().exception(0)


class Pool:
    """The workers of a communicator and the tasks that wait for them."""

    def __init__(self, comm: Any, root: int) -> None:
        self._comm, self._root = comm, root
        self._idle = deque(rank for rank in range(comm.Get_size()) if rank != root)
        self._running: dict[int, Future] = {}
        self._queue: deque[tuple[Future, Task]] = deque()
        self.size = max(1, len(self._idle))
        self._alone = not self._idle

    def begin(self, initializer: Callable[..., Any] | None, initargs: tuple[Any, ...]) -> None:
        """Let every worker call an initializer."""
        if initializer is None:
            return
        if self._alone:
            initializer(*initargs)
        futures = [Future() for _ in self._idle]
        for future in futures:
            future.pool = self
            self._queue.append((future, (initializer, initargs, {})))
        self._hand_out()
        for future in futures:
            future.result()

    def submit(self, task: Task) -> Future:
        """Queue a task."""
        future = Future()
        future.pool = self
        self._queue.append((future, task))
        self._hand_out()
        return future

    def _hand_out(self) -> None:
        while self._queue and (self._idle or self._alone):
            future, task = self._queue.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            if self._alone:
                _settle(future, *carried_out(task))
            else:
                worker = self._idle.popleft()
                self._running[worker] = future
                self._comm.send(task, worker, TASK)

    def collect(self) -> None:
        """Wait for a worker's result."""
        self._hand_out()
        if not self._running:
            return
        status = Status()
        outcome = self._comm.recv(None, ANY_SOURCE, RESULT, status)
        future = self._running.pop(status.source)
        self._idle.append(status.source)
        self._hand_out()
        _settle(future, *outcome)

    def drain(self, cancel: bool = False) -> None:
        """Wait for all tasks; with `cancel`, only for those that run."""
        if cancel:
            for future, _ in self._queue:
                future.cancel()
            self._queue.clear()
        while self._running or self._queue:
            self.collect()

    def stop(self) -> None:
        """Let the workers go."""
        self.drain()
        for worker in sorted(self._idle):
            self._comm.send(None, worker, TASK)


def serve(comm: Any, root: int) -> None:
    """Work for the root until it lets this rank go."""
    while True:
        task = comm.recv(None, root, TASK)
        if task is None:
            return
        outcome = carried_out(task)
        try:
            comm.send(outcome, root, RESULT)
        except Exception as error:  # noqa: BLE001 - a result that cannot be pickled: the master shall hear of it
            comm.send((False, RuntimeError(f"the result cannot be sent: {error}"), ""), root, RESULT)


def carried_out(task: Task) -> tuple[bool, Any, str]:
    """Return (well, result or exception, traceback) of a task."""
    function, args, kwargs = task
    try:
        return True, function(*args, **kwargs), ""
    except Exception as error:  # noqa: BLE001 - the master raises it again
        text = "".join(traceback.format_exception(error))
        return False, error.with_traceback(None), text


def _settle(future: Future, well: bool, value: Any, trace: str) -> None:
    if well:
        future.set_result(value)
    else:
        value.__cause__ = RemoteTraceback(f'\n"""\n{trace}"""')
        future.set_exception(value)
