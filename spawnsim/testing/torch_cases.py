"""PyTorch's test cases that start processes or threads, on virtual ranks.

`MultiProcessTestCase` starts a process for each rank before a test, and joins them in the test. Here the test runs the
ranks; each executes `_run`, the function of its process, and the test case judges their exit codes. Ranks also replace
the threads of `MultiThreadedTestCase` and the workers of `MultiProcContinuousTest`. This module uses names of torch's
internals.
"""

from __future__ import annotations

import sys
import time
import traceback
import unittest
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from spawnsim.importing import after_import
from spawnsim.testing.ranks import SharedModules, TestModules, folder_of, hide_frames, on_ranks
from spawnsim.virtual.interpreter import Patches, Put
from spawnsim.virtual.scripts.main_program import processes_as_ranks

CASES = "torch.testing._internal.common_distributed"
KINDS = ("MultiProcessTestCase", "MultiThreadedTestCase", "MultiProcContinuousTest")
BODIES = "torch.testing._internal.distributed.distributed_test"


class RankProcess:
    """A rank, as the test case that started it sees it: a process with an exit code, and a pipe from it."""

    def __init__(self, rank: int) -> None:
        self.pid = self.rank = rank
        self.exitcode: int | None = None
        self._sent: deque[Any] = deque()

    def terminate(self) -> None:
        """Do nothing: the run has ended."""

    def send(self, value: Any) -> None:
        self._sent.append(value)

    def recv(self) -> Any:
        """Return the first of the values sent."""
        if not self._sent:
            raise EOFError
        return self._sent.popleft()

    def close(self) -> None:
        """Do nothing: values are still to be received."""


class TestEndedError(Exception):
    """A rank has failed, and ends the others, as the test case would."""

    __test__ = False


def _start_processes(self: Any, _proc: Any) -> None:
    self.processes = [RankProcess(rank) for rank in range(int(self.world_size))]
    self.pid_to_pipe = {process.pid: process for process in self.processes}


def _join_processes(self: Any, fn: Callable[[], Any]) -> None:
    __tracebackhide__ = True
    kind, name, failed = type(self), self._current_test_name(), self.TEST_ERROR_EXIT_CODE
    modules = TestModules(sys.modules[kind.__module__])
    more = {"fake_pg": getattr(self, "fake_pg", False)}

    def body(rank: int) -> None:
        process = self.processes[rank]
        try:
            modules.twin(kind)._run(rank, name, self.file_name, process, **more)
            process.exitcode = 0
        except SystemExit as end:
            process.exitcode = end.code if isinstance(end.code, int) else int(end.code is not None)
        except Exception:  # noqa: BLE001 - as a process prints it, and ends
            traceback.print_exc()
            process.exitcode = 1
        if process.exitcode == failed:
            raise TestEndedError

    began_s = time.perf_counter()
    if self.processes:
        _run(len(self.processes), body, modules, lambda: self._check_return_codes(fn, 0.0))
    self._check_return_codes(fn, time.perf_counter() - began_s)


def _run(ranks: int, body: Callable[[int], Any], modules: Any, judge: Callable[[], Any]) -> None:
    """Run the ranks of a test; if one has failed, raise the test case's own error with the calls of the others."""
    __tracebackhide__ = True
    try:
        on_ranks(ranks, body, modules)
    except Exception as error:
        error.__traceback__ = None
        if not isinstance(error.__cause__, TestEndedError):
            raise
        try:
            judge()
        except Exception as told:
            for note in getattr(error, "__notes__", ()):
                told.add_note(note)
            raise told from None


# -- threads ---------------------------------------------------------------------------------------------------


class RankThread:
    """A thread that is still to be run, of a test case."""

    def __init__(self, case: Any) -> None:
        self.case = case


def _spawn_threads(self: Any) -> None:
    self.threads = [RankThread(self)]


def _joining(original: Any) -> Any:
    def join_threads(cls: Any, threads: Any, fn: Callable[[], Any]) -> None:
        __tracebackhide__ = True
        if not (threads and isinstance(threads[0], RankThread)):
            original.__func__(cls, threads, fn)
            return
        case, kind, failures = threads[0].case, type(threads[0].case), list[Any]()
        name, ranks = case._current_test_name, case.world_size
        kind.global_store = None  # ranks meet by their variables

        def body(rank: int) -> None:
            kind._run(name, rank, ranks)
            while not kind.exception_queue.empty():
                failures.append(kind.exception_queue.get())
            if any(isinstance(info[1], Exception) and not _skips(info[1]) for _, info in failures):
                raise TestEndedError

        judge = partial(kind._check_return_codes, failures, 0.0, fn)
        _run(ranks, body, SharedModules(folder_of(sys.modules[kind.__module__])), judge)
        judge()

    return classmethod(join_threads)


def _skips(error: BaseException) -> bool:
    return isinstance(error, unittest.SkipTest)


# -- processes that run all tests of a class -------------------------------------------------------------------


def _spawn_workers(cls: Any, world_size: int) -> None:
    cls.processes, cls.task_queues, cls.completion_queues, cls.rdvz_file = [], [], [], ""


def _worker_run(self: Any, fn: Callable[[], Any]) -> Any:
    def wrapper() -> None:
        __tracebackhide__ = True
        if self.rank != self.MAIN_PROCESS_RANK:
            fn()
            return
        kind, name, cases = type(self), self.id(), sys.modules[CASES]
        modules, ranks, results = (
            TestModules(sys.modules[type(self).__module__]),
            self.world_size,
            deque[Any](),
        )

        def body(rank: int) -> None:
            tasks = RankProcess(rank)
            for task in (name, None):
                tasks.send(task)
            tasks.get, results_put = tasks.recv, results.append  # type: ignore[attr-defined]
            done = RankProcess(rank)
            done.put = results_put  # type: ignore[attr-defined]
            modules.twin(kind)._worker_loop(rank, ranks, name, tasks, done)
            if any(isinstance(each, Exception) and not _skips(each) for each in results):
                raise TestEndedError

        def judge() -> None:
            for each in results:
                if isinstance(each, BaseException):
                    raise each

        assert cases is not None
        _run(ranks, body, modules, judge)
        judge()

    return wrapper


# -- everything ------------------------------------------------------------------------------------------------


def _meet(cls: Any, wait_for: int | None = None, timeout: float = 10) -> None:
    """Wait for the other ranks, as the barrier of torch's bodies does with files named after processes."""
    dist = sys.modules[BODIES].dist
    store = dist.PrefixStore("barrier", dist.distributed_c10d._get_default_store())
    key = str(store.add(f"calls of {dist.get_rank()}", 1))
    if store.add(key, 1) == (wait_for or dist.get_world_size()):
        store.set(f"{key} is over", "")
    store.wait([f"{key} is over"], timedelta(seconds=timeout))


def _install(put: Put) -> None:
    cases = sys.modules[CASES]
    put(cases.MultiProcessTestCase, "_start_processes", _start_processes)
    put(cases.MultiProcessTestCase, "_join_processes", _join_processes)
    put(cases.MultiProcessTestCase, "_event_listener", staticmethod(lambda *_: None))
    put(cases.MultiThreadedTestCase, "_spawn_threads", _spawn_threads)
    put(
        cases.MultiThreadedTestCase,
        "_join_threads",
        _joining(vars(cases.MultiThreadedTestCase)["_join_threads"]),
    )
    if hasattr(cases, "MultiProcContinuousTest"):
        put(cases.MultiProcContinuousTest, "_spawn_processes", classmethod(_spawn_workers))
        put(cases.MultiProcContinuousTest, "_worker_run_main_wait", _worker_run)


def _install_bodies(put: Put) -> None:
    put(sys.modules[BODIES].Barrier, "sync", classmethod(_meet))


_cases, _bodies = Patches(_install).in_place, Patches(_install_bodies).in_place


class Starting:
    """The plugin that turns processes that a test starts into virtual ranks."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Any:
        """Run a test; processes that still run at its end are awaited."""
        cases = sys.modules.get(CASES)
        kinds = [getattr(cases, name) for name in KINDS if hasattr(cases, name)]
        own = getattr(item, "cls", None)
        if own is not None and issubclass(own, tuple(kinds)):
            return (yield)
        try:
            with processes_as_ranks():
                return (yield)
        finally:
            hide_frames()


def on_virtual_ranks(enter: Callable[[Any], Any]) -> None:
    """Let torch's test cases run on virtual ranks, from when they are imported until `enter`'s stack ends."""
    enter(after_import(CASES, lambda: enter(_cases())))
    enter(after_import(BODIES, lambda: enter(_bodies())))
