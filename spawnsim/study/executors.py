"""Executors of sweeps: processes on this machine, and the ranks of mpi4py.futures.

Any other `concurrent.futures.Executor` can execute a sweep, too.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import CancelledError, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import Lock, Thread
from typing import Any

from spawnsim.errors import WorldError
from spawnsim.run import process_setup
from spawnsim.run.process_setup import one_thread

PRELOADED = [
    "spawnsim.run.preloading",  # unblocks the signal that `_forkserver` blocks
    "spawnsim.study",
    "spawnsim.policies",
    "spawnsim.virtual",
    "spawnsim.training",
    "torch._dynamo",  # every optimizer imports it: 1.5 s of each run
]  # modules that are not installed are skipped
STOPPING_S = 5.0  # how long a terminated run may continue to write its records


def prepare() -> None:
    """Prepare a process of a pool for its runs: one thread, and only the study's process stops it.

    One thread is a setting for numeric libraries that are loaded later: runs share the machine's cores. Ctrl-C on a
    terminal signals all processes; pool processes ignore it, and the study's process stops them.
    """
    process_setup.use_one_thread()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_the_study, daemon=True).start()


def load_ahead() -> None:
    """Start the process from which a pool forks, so that it loads the modules of runs in the meantime."""
    with one_thread():
        _forkserver()


def _forkserver() -> multiprocessing.context.ForkServerContext:
    # Not fork: the caller may have threads and a loaded BLAS, and a fork copies their locks in whatever state they
    # are in. Not spawn: loading torch takes longer than a short run.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # Until the first of these modules is loaded, Ctrl-C would end this process with a traceback.
    resource_tracker.ensure_running()  # else the fork server starts it, which unblocks the signal (Python 3.11)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


class Processes(Executor):
    """A fresh process for each task, up to `jobs` at once: a killed process fails only its own task.

    Not a `ProcessPoolExecutor`, which breaks as a whole when one of its processes ends, for example for lack of
    memory.
    """

    def __init__(self, jobs: int, limit_s: float | None = None) -> None:
        self._context, self._limit_s = _forkserver(), limit_s
        self._threads = ThreadPoolExecutor(jobs)  # each waits for one process
        self._lock, self._stopped = Lock(), False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._threads.submit(self._execute, partial(fn, *args, **kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more tasks; wait for the running ones."""
        self._stopped = cancel_futures
        self._threads.shutdown(wait, cancel_futures=cancel_futures)

    def _execute(self, task: Callable[[], Any]) -> Any:
        # One thread at a time: if two threads ask for the status of one process, the second gets a wrong status.
        with self._lock:
            # Checked under the lock: starting a process takes seconds when Ctrl-C has ended the fork server.
            if self._stopped:
                raise CancelledError
            receiving, sending = self._context.Pipe(duplex=False)
            process = self._context.Process(target=_answer, args=(sending, task), daemon=False)
            process.start()
        sending.close()
        in_time = receiving.poll(self._limit_s)
        if not in_time:
            process.terminate()
            # A process inside a library's loop does not react to the signal.
            if not receiving.poll(STOPPING_S):
                process.kill()
        try:
            succeeded, outcome = receiving.recv()
        except EOFError:
            succeeded, outcome = False, None
        with self._lock:
            process.join()
        if succeeded:
            return outcome
        if not in_time:
            raise out_of_time(self._limit_s)
        raise outcome if outcome is not None else WorldError(_ended(process.exitcode))


def out_of_time(limit_s: float | None) -> WorldError:
    """Return the error of a run that has exceeded its time limit."""
    return WorldError(
        f"the run took longer than {limit_s:g} s and was stopped: give a greater limit, or none"
    )


def _ended(status: int | None) -> str:
    if status is None or status >= 0:
        return f"the process of the run exited with status {status}, without an error message"
    memory = "; the system kills processes when memory runs out" if status == -signal.SIGKILL else ""
    return f"the process of the run was ended by {signal.Signals(-status).name}{memory}"


def _answer(sending: Connection, task: Callable[[], Any]) -> None:
    prepare()
    try:
        outcome = True, task()
    except process_setup.Stopped:
        return
    except Exception as error:  # noqa: BLE001  raised again where the result is requested
        outcome = False, _portable(error)
    sending.send(outcome)


def _portable(error: Exception) -> Exception:
    """Return an error that can be pickled, with its traceback as text, which pickling would lose."""
    text = traceback.format_exc()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  pickling runs the program's own code, which may raise anything
        error = WorldError(f"{type(error).__name__}: {error}")
    error.__dict__["remote"] = text
    return error


def _end_with_the_study() -> None:
    """Stop this process when the process that started the pool was killed: a new sweep starts the run again."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        # A signal to the process: raised in this thread, it would not wake the main thread from a sleep.
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def pool(jobs: int, *, fresh: bool = True, limit_s: float | None = None) -> Iterator[Executor]:
    """Give a pool of processes with one thread each: by default a fresh process per run, so peak memory is per run.

    The processes are forked from one that has loaded the modules of runs, which takes longer than a short run, and
    has started no work.

    When an exception, such as Ctrl-C, leaves the block, no further run starts, and running processes are terminated.

    Args:
        jobs: how many runs may execute at once, at least 1.
        fresh: whether each run gets its own process; otherwise `jobs` processes execute all runs.
        limit_s: seconds after which a fresh process is ended, and its run counts as failed.

    Returns:
        A context manager that gives the executor.
    """
    # The caller's other child processes must not be stopped.
    others = set(multiprocessing.active_children())
    with one_thread():  # libraries read the setting when they are loaded, before a run starts
        executor: Executor
        if fresh:
            executor = Processes(jobs, limit_s)
        else:
            context = _forkserver()
            # When this process has ended, all modules are loaded. A worker that is requested earlier, and starts
            # after Ctrl-C has ended this process, does not find its queues and prints a traceback.
            first = context.Process(target=prepare)
            first.start()
            first.join()
            executor = ProcessPoolExecutor(jobs, mp_context=context, initializer=prepare)
        try:
            yield executor
        # BaseException: KeyboardInterrupt, the common case, is not an Exception.
        except BaseException:
            _stop(executor, others)
            raise
        executor.shutdown()


def _stop(executor: Executor, others: Collection[BaseProcess]) -> None:
    """Start no more tasks, and terminate the processes of a pool once each, including late starters."""
    # In a thread, since `shutdown` waits for the processes that are stopped here.
    ending = Thread(target=partial(executor.shutdown, cancel_futures=True), daemon=True)
    ending.start()
    terminated: set[BaseProcess] = set()
    due_s = time.monotonic() + STOPPING_S
    while ending.is_alive():
        # Listed in each round: the executor may start a process while it shuts down.
        running = {*multiprocessing.active_children()} - {*others}
        for process in running - terminated:
            process.terminate()
        terminated |= running
        # A run inside a library's loop does not react to the signal.
        if time.monotonic() > due_s:
            for process in running:
                process.kill()
        ending.join(0.05)


def mpi_ranks(jobs: int) -> Executor:
    """Return the ranks of `mpiexec -n N python -m mpi4py.futures`, or `jobs` ranks that MPI starts, as an executor."""
    executor: Executor = import_module("mpi4py.futures").MPIPoolExecutor(max_workers=max(jobs, 1))
    return executor
