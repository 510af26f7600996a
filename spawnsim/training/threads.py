"""Threads that compute chunks of rows side by side, where a process has been given several of torch's.

torch's own threads divide one operation, and small ones gain nothing from that. Chunks are large and need nothing of
each other. Each of these threads has one of torch's, so its sums are those of a process that has one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from spawnsim.comm.deferred import Deferred
from spawnsim.training.tracing import as_recorded

Given = TypeVar("Given")
Found = TypeVar("Found")


class Threads:
    """Threads of a run.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        begun = threading.Barrier(count)

        def begin(_: int) -> None:
            torch.set_num_threads(1)  # of this thread, and of those that begin after it
            torch.get_num_threads()  # a thread takes the number that was set last when it first asks: now
            begun.wait()

        self._pool = ThreadPoolExecutor(count, thread_name_prefix="spawnsim-training")
        list(self._pool.map(begin, range(count)))
        torch.set_num_threads(count)  # again, for threads of the program

    @classmethod
    def of(cls, deferred: Deferred, count: int) -> Threads:
        """Return so many threads of a run, which last as long as it does."""
        key = cls, count
        if key not in deferred.attachments:
            deferred.attachments[key] = cls(count)
        threads: Threads = deferred.attachments[key]
        return threads

    def map(self, call: Callable[[Given], Found], items: Sequence[Given]) -> list[Found]:
        """Return what a function returns for each item; it is called without gradients, in any order."""

        def called(item: Given) -> Found:
            # Of each thread its own.
            with torch.no_grad(), as_recorded():
                return call(item)

        return list(self._pool.map(called, items))

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
