"""Threads that a rank starts: lines of execution that run concurrently with its program, in virtual time.

This applies to ranks that are themselves carried by threads. `threading.Thread` then begins a background task of its
rank, which may communicate, sleep and read the clock like the program. The locks that ranks make are virtual: a task
that waits for a lock is parked. Python builds its conditions, events, semaphores, queues and thread pools from locks.
A thread runs when the other tasks of its rank wait or sleep, never while they compute, so a loop that polls without
waiting or sleeping never ends.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from types import TracebackType
from typing import Any

from spawnsim.errors import SpawnsimError, Timeout, UnsupportedError
from spawnsim.importing import loading
from spawnsim.virtual.engine.carriers import forget_thread
from spawnsim.virtual.engine.completion import Completion
from spawnsim.virtual.engine.kernel import Task, current_task, current_world
from spawnsim.virtual.engine.waiting import Unbroken, await_one, limited
from spawnsim.virtual.engine.world import World
from spawnsim.virtual.interpreter import Patches, Put
from spawnsim.virtual.mpi.communicators import held

STARTED = "threads"  # attachment of a rank: the threads it has started
PROCESS = (
    "rank {rank} starts a process ({name}), which would be outside of the simulation. If the main program starts its "
    "ranks itself, leave --ranks out: they become virtual ranks, which start none; a DataLoader needs num_workers=0"
)


class WaitingForLock(Unbroken):
    """A thread that waits for another thread of its rank."""

    __slots__ = ("_rank",)

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def describe(self) -> str:
        return "a lock, event or queue of threading"

    def peers(self) -> tuple[int, ...]:
        return (self._rank,)

    def missing(self, by_s: float = 0.0) -> tuple[int, ...]:
        """Return (): it waits for no other rank."""
        return ()


class Lock:
    """`threading.Lock` of a virtual rank. Its release hands it to the task that has waited longest."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: deque[Completion] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock; return whether that succeeded."""
        task = current_task()
        if not self._taken or not blocking or timeout == 0 or task is None:
            free, self._taken = not self._taken, True
            return free
        world, turn = task.kernel.owner, Completion(task.kernel)
        self._waiting.append(turn)
        try:
            with limited(task, timeout, explicit=True) if timeout > 0 else nullcontext():
                await_one(world, turn, WaitingForLock(task.rank))
        except Timeout:
            if turn.finish_s is not None:
                return True
            if timeout <= 0:
                raise
            return False
        finally:
            if turn.finish_s is None:
                self._waiting.remove(turn)
        return True

    def release(self) -> None:
        """Release the lock."""
        if not self._taken:
            raise RuntimeError("release unlocked lock")
        task = current_task()
        if self._waiting and task is not None:
            self._waiting.popleft().complete(max(task.clock, task.kernel.env.now))
        else:
            self._taken = False

    def locked(self) -> bool:
        return self._taken

    def _at_fork_reinit(self) -> None:
        self._taken = False

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _calling() -> Task | None:
    """Return the caller's task; None outside ranks and during the import of a module that all ranks share.

    A thread started by such a module belongs to all ranks, and no task may wait within its import.
    """
    task = current_task()
    return None if task is None or loading() else task


def _of_ranks(original: Callable[..., Any], virtual: Callable[..., Any]) -> Callable[..., Any]:

    @wraps(original, updated=())
    def make(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if _calling() is None else virtual(*args, **kwargs)

    return make


def _background(thread: Any) -> Any:
    """Return the background task of a virtual thread; None for other threads."""
    return vars(thread).get("_virtual_task")


def _starting(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def start(thread: Any) -> None:
        task = _calling()
        if task is None:
            original(thread)
            return
        if _background(thread) is not None:
            raise RuntimeError("threads can only be started once")
        vars(thread)["_virtual_task"] = held("COMM_WORLD")._own.background(lambda: _run(thread))
        task.kernel.owner.ranks[task.rank].attachments.setdefault(STARTED, []).append(thread)

    return start


def _run(thread: Any) -> None:
    """Run a thread, as `threading` does."""
    thread._set_ident()
    # From Python 3.13 on: the handle of a running thread.
    handle_of = getattr(threading, "_make_thread_handle", None)
    if handle_of is not None:
        thread._handle = handle_of(thread.ident)
    threading._active[thread.ident] = thread  # type: ignore[attr-defined]
    thread._started.set()
    world: World = thread._virtual_task._world
    try:
        with world.around_threads():
            thread.run()
    except SpawnsimError:
        raise  # errors of the run end it; other exceptions end the thread
    except Exception:  # noqa: BLE001 - printed, as by Python
        thread._invoke_excepthook(thread)
    finally:
        forget_thread()
        # For callers outside the run that inspect the thread.
        if handle_of is None:
            thread._is_stopped = True
        else:
            thread._handle._set_done()


def _joining(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def join(thread: Any, timeout: float | None = None) -> None:
        background = _background(thread)
        if background is None or current_task() is None:
            original(thread, timeout)
        elif thread is threading.current_thread():
            raise RuntimeError("cannot join current thread")
        else:
            background.join(timeout)

    return join


def _asking(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def is_alive(thread: Any) -> Any:
        background = _background(thread)
        return original(thread) if background is None else background.alive

    return is_alive


def _no_process(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def start(process: Any) -> None:
        task = current_task()
        if task is not None:
            raise UnsupportedError(PROCESS.format(rank=task.rank, name=process.name))
        original(process)

    return start


def _install(put: Put) -> None:
    thread: Any = threading.Thread
    for name, change in (("start", _starting), ("join", _joining), ("is_alive", _asking)):
        put(thread, name, change(getattr(thread, name)))
    recursive = threading._PyRLock  # type: ignore[attr-defined]
    for name, made in (("Lock", Lock), ("_allocate_lock", Lock), ("RLock", recursive)):
        if hasattr(threading, name):
            put(threading, name, _of_ranks(getattr(threading, name), made))
    put(queue, "SimpleQueue", _of_ranks(queue.SimpleQueue, queue._PySimpleQueue))  # type: ignore[attr-defined]
    # These modules bound their clocks for timeouts when they were imported.
    for module, name in ((threading, "_time"), (queue, "time")):
        put(module, name, _of_ranks(getattr(module, name), lambda: current_world().kernel.current.clock))
    processes: Any = sys.modules.get("multiprocessing.process")
    if processes is not None:
        put(processes.BaseProcess, "start", _no_process(processes.BaseProcess.start))


virtual_threads = Patches(_install).in_place


def has_threads() -> bool:
    """Return whether the calling rank has running threads in addition to its program."""
    return any(thread.is_alive() for thread in current_world().here().attachments.get(STARTED, ()))


def join_all() -> None:
    """Wait at the end of the calling rank's program for its non-daemon threads, as Python does."""
    # Workers of a pool that was never shut down wait for work for ever: Python wakes them to end them.
    pools = getattr(sys.modules.get("concurrent.futures.thread"), "_threads_queues", {})
    for thread in current_world().here().attachments.get(STARTED, ()):
        if not thread.daemon and thread not in pools:
            thread.join()
