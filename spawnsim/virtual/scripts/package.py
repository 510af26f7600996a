"""`mpi4py` as programs on virtual ranks see it: the virtual MPI, executors, and the installed pure-Python modules.

It is put into `sys.modules`, imports nothing of mpi4py's binary part, and works without mpi4py.

The executors of `mpi4py.futures` use ranks as workers, in a pool that works for one rank, the master. The master sends
a task to a free worker when it is submitted, and receives results while it waits for one.
"""

from __future__ import annotations

import concurrent.futures as base
import importlib.util
import os
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from spawnsim.comm.constants import ANY_SOURCE
from spawnsim.comm.status import Status
from spawnsim.errors import UnsupportedError
from spawnsim.virtual.engine.kernel import current_task, current_world
from spawnsim.virtual.mpi.communicators import COMM_SELF, COMM_WORLD
from spawnsim.virtual.mpi.module import MPI
from spawnsim.virtual.mpi.payload import OPTIONS, pickler
from spawnsim.virtual.mpi.spawning import Launch, spawn

TASK, RESULT = 2**20 + 1, 2**20 + 2  # tags
PoolTask = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class RemoteTraceback(Exception):
    """The traceback of a worker, as text: the cause of an exception that a future raises."""


class Future(base.Future[Any]):
    """The future result of a task."""

    # No thread serves a pool: virtual ranks share one thread, and no virtual clock would see another. So a task that
    # waits for a future lets the master receive results until this one has arrived.

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
    """The workers of a communicator and the queued tasks; without workers the master executes them."""

    def __init__(self, comm: Any, root: int) -> None:
        self._comm, self._root = comm, root
        self._idle = deque(rank for rank in range(comm.Get_size()) if rank != root)
        self._running: dict[int, Future] = {}
        self._queue: deque[tuple[Future, PoolTask]] = deque()
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

    def submit(self, task: PoolTask) -> Future:
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
                _settle(future, *run_task(task))
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
        """Wait for all tasks; with `cancel`, only for running ones."""
        if cancel:
            for future, _ in self._queue:
                future.cancel()
            self._queue.clear()
        while self._running or self._queue:
            self.collect()

    def free(self) -> None:
        """Free the communicator with spawned workers."""
        self._comm.Free()

    def stop(self) -> None:
        """Stop the workers."""
        self.drain()
        for worker in sorted(self._idle):
            self._comm.send(None, worker, TASK)


def serve(comm: Any, root: int) -> None:
    """Execute tasks of the root until it stops this rank."""
    while True:
        task = comm.recv(None, root, TASK)
        if task is None:
            return
        outcome = run_task(task)
        try:
            comm.send(outcome, root, RESULT)
        except Exception as error:  # noqa: BLE001 - a result that cannot be pickled: report it to the master
            comm.send((False, RuntimeError(f"the result cannot be sent: {error}"), ""), root, RESULT)


def serve_parent() -> None:
    """Execute tasks of the rank that has spawned this one, as a worker of its executor."""
    parent = MPI.Comm.Get_parent()
    pool = parent.Merge(high=True)
    serve(pool, 0)
    pool.Free()
    parent.Disconnect()


def run_task(task: PoolTask) -> tuple[bool, Any, str]:
    """Return (success, result or exception, traceback) of a task."""
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


class _Mapping(base.Executor):
    """Methods of mpi4py's executors beyond `submit`: results over iterables, also unordered, and over arguments."""

    def map(self, fn: Callable[..., Any], *iterables: Iterable[Any], **options: Any) -> Iterator[Any]:
        """Return the results of `fn` over iterables, in order; with `unordered=True`, in order of completion."""
        return self.starmap(fn, zip(*iterables, strict=False), **options)

    def starmap(
        self, fn: Callable[..., Any], iterable: Iterable[Any], timeout: float | None = None, chunksize: int = 1,
        buffersize: int | None = None, unordered: bool = False,
    ) -> Iterator[Any]:  # fmt: skip
        """Return the results of `fn(*args)` for each args."""
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        items = [tuple(args) for args in iterable]
        chunks = [items[first : first + chunksize] for first in range(0, len(items), chunksize)]
        futures = [self.submit(_each, fn, chunk) for chunk in chunks]
        return _results(as_completed(futures) if unordered else iter(futures))


class Executor(_Mapping):
    """The executor of a pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool: Pool | None = pool

    def _open(self) -> Pool:
        if self._pool is None:
            raise RuntimeError("cannot submit after shutdown")
        return self._pool

    @property
    def num_workers(self) -> int:
        return 0 if self._pool is None else self._pool.size

    _max_workers = num_workers

    def bootup(self, wait: bool = True) -> Executor:
        """Return the executor: its workers already run."""
        self._open()
        return self

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        return self._open().submit((fn, args, kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for all calls; later submissions are rejected."""
        if self._pool is not None:
            self._pool.drain(cancel_futures)
        self._pool = None


def _each(function: Callable[..., Any], chunk: list[tuple[Any, ...]]) -> list[Any]:
    return [function(*args) for args in chunk]


def _results(futures: Iterator[Any]) -> Iterator[Any]:
    for future in futures:
        yield from future.result()


class ThreadPoolExecutor(_Mapping, base.ThreadPoolExecutor):
    """Threads of the program, with the method names of mpi4py's executors."""

    @property
    def num_workers(self) -> int:
        return 0 if self._shutdown else self._max_workers

    def bootup(self, wait: bool = True) -> ThreadPoolExecutor:
        """Return the executor: its threads start with the first task."""
        if self._shutdown:
            raise RuntimeError("cannot bootup after shutdown")
        return self


class MPIPoolExecutor(Executor):
    """An executor over ranks that it spawns; or over all other ranks, for a program that rank 0 alone runs."""

    Future = Future

    def __init__(
        self, max_workers: int | None = None, initializer: Any = None, initargs: tuple[Any, ...] = (), **kwargs: Any
    ) -> None:  # fmt: skip
        pool, self._workers = COMM_WORLD._rank.attachments.get("futures"), None
        if pool is None:
            count = max_workers or int(os.environ.get("MPI4PY_FUTURES_MAX_WORKERS") or 1)
            self._workers = spawn(COMM_SELF, "MPIPoolExecutor", (Launch(count),), 0)
            pool = Pool(self._workers.Merge(), 0)
            COMM_WORLD._rank.attachments.setdefault("pools", []).append(self)
        super().__init__(pool)
        pool.begin(initializer, tuple(initargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for all calls, and end the workers if they were spawned for this executor."""
        pool = self._pool
        super().shutdown(wait, cancel_futures=cancel_futures)
        if pool is not None and self._workers is not None:
            pool.stop()
            pool.free()
            self._workers.Disconnect()
            COMM_WORLD._rank.attachments["pools"].remove(self)


class MPICommExecutor:
    """`with MPICommExecutor(comm) as executor`: the root gets an executor, the other ranks work until it is done."""

    def __init__(self, comm: Any = None, root: int = 0, **kwargs: Any) -> None:
        self._comm = COMM_WORLD if comm is None else comm
        if not 0 <= root < self._comm.Get_size():
            raise ValueError("Expecting root in range(comm.size)")
        self._root, self._options = root, kwargs
        self._pool: Pool | None = None
        self._executor: Executor | None = None

    def __enter__(self) -> Executor | None:
        if self._comm.Get_rank() != self._root:
            serve(self._comm, self._root)
            return None
        self._pool = Pool(self._comm, self._root)
        self._pool.begin(self._options.get("initializer"), tuple(self._options.get("initargs", ())))
        self._executor = Executor(self._pool)
        return self._executor

    def __exit__(self, *error: Any) -> None:
        if self._executor is not None and self._pool is not None:
            self._executor.shutdown()
            self._pool.stop()


# -- waiting for several -------------------------------------------------------------------------------------


def as_completed(fs: Iterable[Any], timeout: float | None = None) -> Iterator[Any]:
    """Yield futures in order of completion."""
    left = list(dict.fromkeys(fs))
    while left:
        over = [future for future in left if future.done()]
        if not over:
            _progress(left)
            continue
        for future in over:
            left.remove(future)
            yield future


def wait(fs: Iterable[Any], timeout: float | None = None, return_when: str = base.ALL_COMPLETED) -> Any:
    """Wait for futures; return the completed and the pending ones."""
    every = set(fs)
    while True:
        over = {future for future in every if future.done()}
        failed = any(not future.cancelled() and future.exception() is not None for future in over)
        if over == every or (over and return_when == base.FIRST_COMPLETED):
            break
        if failed and return_when == base.FIRST_EXCEPTION:
            break
        _progress(list(every - over))
    return base._base.DoneAndNotDoneFutures(over, every - over)


def _progress(futures: list[Any]) -> None:
    own = next((future for future in futures if isinstance(future, Future)), None)
    if own is None:
        next(iter(base.as_completed(futures)))
    elif own.pool is not None:
        own.pool.collect()


def get_comm_workers() -> Any:
    """Raise `UnsupportedError`: there is one pool."""
    raise UnsupportedError(
        "mpi4py.futures.get_comm_workers: workers of virtual ranks do not share a communicator"
    )


def build_futures() -> Any:
    """Return the module `mpi4py.futures`."""
    module: Any = ModuleType("mpi4py.futures", "Executors over virtual ranks.")
    own = (
        Future, Executor, MPIPoolExecutor, MPICommExecutor, ThreadPoolExecutor, as_completed, wait, get_comm_workers,
    )  # fmt: skip
    vars(module).update({each.__name__: each for each in own})
    module.BrokenExecutor, module.ProcessPoolExecutor = base.BrokenExecutor, base.ProcessPoolExecutor
    for name in ("FIRST_COMPLETED", "FIRST_EXCEPTION", "ALL_COMPLETED", "CancelledError", "TimeoutError",
                 "InvalidStateError"):  # fmt: skip
        setattr(module, name, getattr(base, name))
    return module


NAME = "mpi4py"


class Options:
    """The values of `mpi4py.rc` on one rank. Most have no effect on virtual ranks; all are stored."""

    def __init__(self) -> None:
        self.initialize, self.threads, self.thread_level = True, True, "multiple"
        self.finalize: bool | None = None
        self.fast_reduce, self.recv_mprobe, self.irecv_bufsz, self.errors = True, True, 32768, "exception"

    def read_environment(self) -> None:
        """Read MPI4PY_RC_* and MPI4PY_PICKLE_*, as mpi4py does when MPI is imported."""
        for name, usual in vars(self).items():
            text = os.environ.get(f"MPI4PY_RC_{name.upper()}")
            if text is not None:
                setattr(self, name, _value(text, usual))
        for name in ("PROTOCOL", "THRESHOLD"):
            if (text := os.environ.get(f"MPI4PY_PICKLE_{name}")) is not None:
                setattr(pickler, name, int(text))  # for all ranks


_TRUTH = dict.fromkeys(("1", "on", "yes", "true", "y", "t"), True) | dict.fromkeys(
    ("0", "off", "no", "false", "n", "f"), False
)


def _value(text: str, usual: Any) -> Any:
    if type(usual) is int and text.isdigit():
        return int(text)
    return _TRUTH.get(text.lower(), text.lower())


OUTSIDE = Options()  # of code that no rank runs


class Rc:
    """`mpi4py.rc`: the options of the calling rank."""

    def __init__(self, **options: Any) -> None:
        self(**options)

    def _here(self) -> Any:
        if current_task() is None:
            return OUTSIDE
        return current_world().here().attachments.get(OPTIONS, OUTSIDE)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._here(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in vars(self._here()):
            raise TypeError(f"mpi4py.rc has no option {name!r}")
        setattr(self._here(), name, value)

    def __call__(self, **options: Any) -> None:
        for name, value in options.items():
            setattr(self, name, value)

    def __dir__(self) -> list[str]:
        return [*vars(self._here())]

    def __repr__(self) -> str:
        return "<mpi4py.rc>"


class Package(ModuleType):
    """`mpi4py`; it detects the first access to `MPI` by each rank."""

    @property
    def MPI(self) -> Any:
        """The module. The first access by a rank reads its options from its environment."""
        if current_task() is not None:
            held = current_world().here().attachments
            if ASKED not in held:
                held[ASKED] = True
                held[OPTIONS].read_environment()
        return MPI


ASKED = "mpi4py.MPI"  # attachment of a rank that has imported MPI


def stand_in() -> dict[str, Any]:
    """Return the entries for `sys.modules`."""
    package: Any = Package(NAME, "The virtual mpi4py of spawnsim.")
    place = _installed()
    package.__path__ = [str(place)] if place is not None else []
    package.__spec__ = ModuleSpec(NAME, None, is_package=True)
    package.__package__, package.__version__ = NAME, _version()
    package.rc, package.futures = Rc(), build_futures()
    package.__file__ = str(place / "__init__.py") if place is not None else __file__
    package.get_include = lambda: str(place / "include") if place is not None else ""
    package.get_config = dict
    package.profile = _profile
    MPI.__package__ = NAME
    MPI.__spec__ = ModuleSpec(f"{NAME}.MPI", None)
    MPI.__file__ = __file__
    return {
        NAME: package, f"{NAME}.MPI": MPI, f"{NAME}.rc": package.rc, f"{NAME}.futures": package.futures,
    }  # fmt: skip


def _profile(name: str, *, path: Any = None) -> None:
    raise UnsupportedError(f"mpi4py.profile({name!r}): there is no C library to profile on virtual ranks")


def _installed() -> Path | None:
    spec = importlib.util.find_spec(NAME)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _version() -> str:
    try:
        return version(NAME)
    except PackageNotFoundError:
        return "4.1.0"


@contextmanager
def installed_as_mpi4py() -> Iterator[None]:
    """Make `import mpi4py` find the virtual one while the block runs, then restore the previous modules."""
    # All modules of a real mpi4py are hidden, not only the package: a program's `import mpi4py.MPI` must not find the
    # binary part, which would call MPI_Init in this process. Afterwards, modules that were imported in the meantime
    # and hold the virtual MPI are removed as well (a library that did `from mpi4py import MPI`); otherwise the next
    # real program would use it.
    entries = stand_in()
    before = {name: module for name, module in sys.modules.items() if _is_mpi4py(name)}
    known = set(sys.modules)
    for name in before:
        del sys.modules[name]
    sys.modules.update(entries)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if _is_mpi4py(name) or _holds_virtual_mpi(name, known)]:
            del sys.modules[name]
        sys.modules.update(before)


def _is_mpi4py(name: str) -> bool:
    return name == NAME or name.startswith(f"{NAME}.")


def _holds_virtual_mpi(name: str, known: set[str]) -> bool:
    if name in known or name.startswith("spawnsim"):
        return False
    values = getattr(sys.modules[name], "__dict__", {}).values()
    return any(value is MPI or value is MPI.COMM_WORLD for value in list(values))
