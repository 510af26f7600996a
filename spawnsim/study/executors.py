"""Executors of sweeps: processes of this machine, and the ranks of mpi4py.futures.

Any other `concurrent.futures.Executor` carries a sweep, too.
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
    "spawnsim.run.preloading",  # unblocks what `_forkserver` blocks
    "spawnsim.study",
    "spawnsim.policies",
    "spawnsim.virtual",
    "spawnsim.training",
    "torch._dynamo",  # every optimizer imports it: 1.5 s of each run
]  # those there are
STOPPING_S = 5.0  # for which a run that is told to stop may go on writing what it has recorded


def prepare() -> None:
    """Make a process of a pool ready for one run: one thread, and it is for the study to tell it to stop.

    Numeric libraries are told that are not loaded yet: runs share the machine's cores. Ctrl-C on a terminal reaches
    all processes; those of a pool leave it to the study's.
    """
    process_setup.use_one_thread()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def load_ahead() -> None:
    """Let the process from which a pool forks begin to load what runs need, while the caller does something else."""
    with one_thread():
        _forkserver()


def _forkserver() -> multiprocessing.context.ForkServerContext:
    # Not fork: the caller may have threads and a loaded BLAS, whose locks a fork copies as they stand. Not spawn:
    # loading torch takes longer than a short run.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # Until it has loaded the first of these, Ctrl-C would end it with a traceback.
    resource_tracker.ensure_running()  # or it is started with the other one, and unblocks (Python 3.11)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


class Processes(Executor):
    """A fresh process for each task, so many at once: one that is killed fails its own task alone.

    Not a `ProcessPoolExecutor`, which breaks as a whole when one of its processes ends, such as for want of memory.
    """

    def __init__(self, jobs: int, limit_s: float | None = None) -> None:
        self._context, self._limit_s = _forkserver(), limit_s
        self._threads = ThreadPoolExecutor(jobs)  # each waits for one process
        self._lock, self._stopped = Lock(), False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._threads.submit(self._carry_out, partial(fn, *args, **kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more tasks; wait for those that go on."""
        self._stopped = cancel_futures
        self._threads.shutdown(wait, cancel_futures=cancel_futures)

    def _carry_out(self, task: Callable[[], Any]) -> Any:
        # One at a time: where two threads ask for the status of one process, the second is told a wrong one.
        with self._lock:
            # Meanwhile: it would take seconds where Ctrl-C has ended the process from which it forks.
            if self._stopped:
                raise CancelledError
            receiving, sending = self._context.Pipe(duplex=False)
            process = self._context.Process(target=_answer, args=(sending, task), daemon=False)
            process.start()
        sending.close()
        in_time = receiving.poll(self._limit_s)
        if not in_time:
            process.terminate()
            # In a library's own loop it hears nothing.
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
    """Return the error of a run that has taken longer than it may."""
    return WorldError(
        f"the run took longer than {limit_s:g} s, and was ended: a greater limit, or none, lets it go on"
    )


def _ended(status: int | None) -> str:
    if status is None or status >= 0:
        return f"the process of the run left with status {status}, and said nothing"
    memory = "; the system does so when memory runs out" if status == -signal.SIGKILL else ""
    return f"the process of the run was ended by {signal.Signals(-status).name}{memory}"


def _answer(sending: Connection, task: Callable[[], Any]) -> None:
    prepare()
    Thread(target=_end_with_the_study, daemon=True).start()
    try:
        outcome = True, task()
    except process_setup.Stopped:
        return
    except Exception as error:  # noqa: BLE001  raised again where the result is asked for
        outcome = False, _portable(error)
    sending.send(outcome)


def _portable(error: Exception) -> Exception:
    """Return an error as another process can be told it, with the traceback as text, which is lost otherwise."""
    text = traceback.format_exc()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  a program's own class may do anything there
        error = WorldError(f"{type(error).__name__}: {error}")
    error.__dict__["remote"] = text
    return error


def _end_with_the_study() -> None:
    """Stop this process when the one that started the sweep has gone, killed: its successor begins the run anew."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        # To the process: a signal raised in this thread would not wake the main one out of a sleep.
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def pool(jobs: int, *, fresh: bool = True, limit_s: float | None = None) -> Iterator[Executor]:
    """Give a pool of processes of one thread each: fresh ones, one per run, so that a run's peak memory is its own.

    They are forked from one that has loaded what runs need, which takes longer than a short run, and begun nothing.

    When the block is left by an exception, such as Ctrl-C, nothing more begins, and what runs is told to stop.

    Args:
        jobs: how many runs may go on at once, at least 1.
        fresh: whether each run gets a process of its own; without, `jobs` processes carry out all of them.
        limit_s: after which a fresh process is ended, and its run has failed.

    Returns:
        A context manager that gives the executor.
    """
    # Children of the caller's own are not ours to stop.
    others = set(multiprocessing.active_children())
    with one_thread():  # libraries ask when they are loaded, which is before a run begins
        executor: Executor
        if fresh:
            executor = Processes(jobs, limit_s)
        else:
            context = _forkserver()
            # Once this is over, all is loaded. A worker that is asked for before, and begins when Ctrl-C has ended this
            # process, does not find its queues, and says so in a traceback.
            first = context.Process(target=prepare)
            first.start()
            first.join()
            executor = ProcessPoolExecutor(jobs, mp_context=context, initializer=prepare)
        try:
            yield executor
        # KeyboardInterrupt is no Exception, and is the common case.
        except BaseException:
            _stop(executor, others)
            raise
        executor.shutdown()


def _stop(executor: Executor, others: Collection[BaseProcess]) -> None:
    """Let nothing more begin, and tell the processes of a pool to stop: each once, those that begin meanwhile, too."""
    # In a thread, since `shutdown` waits for the processes that are to be stopped here.
    ending = Thread(target=partial(executor.shutdown, cancel_futures=True), daemon=True)
    ending.start()
    told: set[BaseProcess] = set()
    due_s = time.monotonic() + STOPPING_S
    while ending.is_alive():
        # Asked in each round: the executor may begin a process while it is shut down.
        running = {*multiprocessing.active_children()} - {*others}
        for process in running - told:
            process.terminate()
        told |= running
        # A run in a library's own loop hears no signal.
        if time.monotonic() > due_s:
            for process in running:
                process.kill()
        ending.join(0.05)


def mpi_ranks(jobs: int) -> Executor:
    """Return the ranks of `mpiexec -n N python -m mpi4py.futures`, or `jobs` that MPI starts, as an executor."""
    executor: Executor = import_module("mpi4py.futures").MPIPoolExecutor(max_workers=max(jobs, 1))
    return executor
