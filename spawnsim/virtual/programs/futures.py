"""`mpi4py.futures` on virtual ranks: executors whose workers are ranks.

This room knows the names and habits of executors; it must not know the carrier.
"""

from __future__ import annotations

import concurrent.futures as base
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

from spawnsim.errors import UnsupportedError
from spawnsim.virtual.comm.calling import COMM_WORLD
from spawnsim.virtual.kernel import current_task
from spawnsim.virtual.programs.pool import Future, Pool, serve


class Executor(base.Executor):
    """The executor of a pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool: Pool | None = pool

    def _open(self) -> Pool:
        if self._pool is None:
            raise RuntimeError("cannot submit after shutdown")
        return self._pool

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return 0 if self._pool is None else self._pool.size

    _max_workers = num_workers

    def bootup(self, wait: bool = True) -> Executor:
        """Return the executor: its workers are there."""
        self._open()
        return self

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        """Queue a call."""
        return self._open().submit((fn, args, kwargs))

    def map(self, fn: Callable[..., Any], *iterables: Iterable[Any], **options: Any) -> Iterator[Any]:
        """Return the results of `fn` over iterables, in order; `unordered=True`: as they come."""
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

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for all calls; no more are taken."""
        if self._pool is not None:
            self._pool.drain(cancel_futures)
        self._pool = None


def _each(function: Callable[..., Any], chunk: list[tuple[Any, ...]]) -> list[Any]:
    return [function(*args) for args in chunk]


def _results(futures: Iterator[Any]) -> Iterator[Any]:
    for future in futures:
        yield from future.result()


class MPIPoolExecutor(Executor):
    """An executor over all other ranks, for a program that rank 0 alone runs."""

    Future = Future

    def __init__(
        self, max_workers: int | None = None, initializer: Any = None, initargs: tuple[Any, ...] = (), **kwargs: Any
    ) -> None:  # fmt: skip
        pool = None if current_task() is None else COMM_WORLD._rank.attachments.get("futures")
        if pool is None:
            raise UnsupportedError(
                "MPIPoolExecutor starts processes, and virtual ranks start all at once: run the program with --futures "
                "(as `python -m mpi4py.futures` does: rank 0 runs it, the others work), or use MPICommExecutor"
            )
        super().__init__(pool)
        pool.begin(initializer, tuple(initargs))


class MPICommExecutor:
    """`with MPICommExecutor(comm) as executor`: the root gets an executor, the others work until it is done."""

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
    """Yield futures as they end."""
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
    """Wait for futures; return those that are done and those that are not."""
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
    """Refuse: there is one pool."""
    raise UnsupportedError("mpi4py.futures.get_comm_workers: workers of virtual ranks share no communicator")


def build() -> Any:
    """Return the module `mpi4py.futures`."""
    module: Any = ModuleType("mpi4py.futures", "Executors over virtual ranks.")
    own = (Future, Executor, MPIPoolExecutor, MPICommExecutor, as_completed, wait, get_comm_workers)
    vars(module).update({each.__name__: each for each in own})
    module.BrokenExecutor, module.ThreadPoolExecutor = base.BrokenExecutor, base.ThreadPoolExecutor
    module.ProcessPoolExecutor = base.ProcessPoolExecutor
    for name in ("FIRST_COMPLETED", "FIRST_EXCEPTION", "ALL_COMPLETED", "CancelledError", "TimeoutError",
                 "InvalidStateError"):  # fmt: skip
        setattr(module, name, getattr(base, name))
    return module
