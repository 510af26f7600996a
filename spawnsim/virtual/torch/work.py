"""Pending operations: `Work`, its future, and the errors that a wait for it raises.

A work begins at the clock at which it was issued; `wait` moves the rank's clock to its end. C++ waits for a future by
stopping the thread, so a future must be complete by then. In a backward pass, the futures (of the buckets of
DistributedDataParallel) are completed by a callback that autograd runs at the end of the pass, before the reducer's
own; all other futures are completed by the wait itself, in Python. A static graph's first pass issues its buckets and
waits for them in one call of C++: there, a work completes before its future is returned (`unbroken`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
from torch.distributed import Work
from torch.futures import Future

from spawnsim.comm.status import Status
from spawnsim.errors import MismatchError, RankFailed, Timeout
from spawnsim.virtual.engine.kernel import current_task
from spawnsim.virtual.engine.waiting import limited
from spawnsim.virtual.mpi.requests import Request
from spawnsim.virtual.threads import has_threads
from spawnsim.virtual.torch.profiling import ProfiledEvent

OPEN = "torch.futures"  # attachment of a rank: its open futures


class GroupTimeout(Timeout, RuntimeError):
    """An operation has met its time-out: spawnsim's `Timeout`, and the RuntimeError that gloo raises."""


class PeerClosed(RankFailed, RuntimeError):
    """A member of the group has died: spawnsim's `RankFailed`, and the RuntimeError that gloo raises."""


class OpenFutures:
    """A rank's works with open futures, in the order issued, and the work that each future depends on."""

    def __init__(self) -> None:
        self.works: dict[VirtualWork, list[Any]] = {}
        self.by_id: dict[int, VirtualWork] = {}
        self.unbroken = False  # during a call of C++ that issues works and waits for their futures

    def add(self, future: Any, work: VirtualWork) -> None:
        """Record that a future depends on a work. The future is kept until then, so that its id stays unique."""
        self.works.setdefault(work, []).append(future)
        self.by_id[id(future)] = work

    def remove(self, work: VirtualWork) -> bool:
        """Forget a work; return whether it was open."""
        futures = self.works.pop(work, None)
        for future in futures or ():
            del self.by_id[id(future)]
        return futures is not None


def open_futures() -> OpenFutures:
    """Return the calling rank's open futures."""
    task = current_task()
    assert task is not None
    found: OpenFutures = task.kernel.owner.ranks[task.rank].attachments.setdefault(OPEN, OpenFutures())
    return found


def settle_all() -> None:
    """Complete the futures of all open works of the calling rank."""
    # A failed work raises its error here, and its future stays open: C++ would take the error for the value.
    pending = open_futures()
    while pending.works:
        work = next(iter(pending.works))
        work.wait()
        work.settle()


def waiting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return C++'s wait of a future; before it, the rank completes the works that the future depends on."""

    def wait(self: Any) -> Any:
        if current_task() is not None and not self.done():
            work = open_futures().by_id.get(id(self))
            if work is None:
                settle_all()  # a combined future, or one made in C++: its works are unknown
                _await_threads(self)
            else:
                work.settle()
        return original(self)

    return wait


def _await_threads(future: Any) -> None:
    if not future.done() and has_threads():
        over = threading.Event()
        future.add_done_callback(lambda _: over.set())
        over.wait()


def unbroken(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return C++'s reduction of all buckets at once; during it, the rank completes each work when it is issued."""

    @wraps(original)
    def reduce(reducer: Any) -> Any:
        if current_task() is None:
            return original(reducer)
        settle_all()
        pending = open_futures()
        pending.unbroken = True
        try:
            return original(reducer)
        finally:
            pending.unbroken = False

    return reduce


def following(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return C++'s `then` of a future; it records the dependency of the new future."""

    def then(self: Any, callback: Callable[[Any], Any]) -> Any:
        after = original(self, callback)
        if current_task() is not None:
            pending = open_futures()
            work = pending.by_id.get(id(self))
            if work is not None and not after.done():
                pending.add(after, work)
        return after

    return then


class VirtualFuture(Future):  # type: ignore[type-arg]
    """The future of a work; waits for it are in virtual time."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self._work = work

    def done(self) -> bool:
        """Return whether the future is complete; this call is an observation."""
        if not super().done() and self._work.is_completed():
            self._work.settle()
        return super().done()


class VirtualWork(Work):
    """One operation of one rank.

    Args:
        request: the pending request.
        outputs: the tensors that it fills.
        limit: the seconds after its issue at which it ends in `GroupTimeout`, and whether the program has set them.
        leave: called when a wait fails, so that borrowed memory is kept for the other ranks.
    """

    def __init__(
        self, request: Request, outputs: Any, limit: tuple[float, bool], leave: Callable[[], None] = lambda: None
    ) -> None:  # fmt: skip
        super().__init__()
        task = current_task()
        assert task is not None
        self._request, self._outputs, self._limit, self._leave = request, outputs, limit, leave
        self._issued_s, self._status = task.clock, Status()
        self._future: VirtualFuture | None = None
        self._error: BaseException | None = None
        self._over = False
        self.profiled: ProfiledEvent | None = None

    _new_future = VirtualFuture

    # -- waiting -----------------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end; the outputs are filled then."""
        if self._error is not None:
            raise self._error
        if not self._over:
            self._finish(timeout)
            self._pass_on()
        return True

    def _finish(self, timeout: timedelta | None) -> None:
        task = current_task()
        assert task is not None
        seconds, explicit = self._limit
        left_s = self._issued_s + seconds - task.clock
        if timeout is not None and timeout.total_seconds() > 0:
            seconds = left_s = timeout.total_seconds()
            explicit = True
        completion = self._request._completion
        try:
            with limited(task, max(left_s, 1e-9), explicit=explicit):
                self._request.wait(self._status)
        except BaseException as error:  # noqa: BLE001 - including exceptions that end the rank
            self._leave()
            raise self._failed(error, seconds) from None
        self._over = True
        if self.profiled is not None and completion is not None:
            self.profiled.end_s = min(completion.final(), task.clock)

    def _failed(self, error: BaseException, seconds: float) -> BaseException:
        """Return the error that a wait raises: gloo's message, followed by ours."""
        if isinstance(error, (Timeout, RankFailed)) and self._request._world.resource_leaks is not None:
            self._request._world.resource_leaks.closed(self._request._completion)
        if isinstance(error, Timeout):
            way = "send" if error.operation.startswith("send") else "recv"
            words = f"[gloo] Timed out waiting {seconds * 1e3:.0f}ms for {way} operation to complete: {error}"
            self._error = GroupTimeout(error.ranks, error.operation, error.sequence, words)
        elif isinstance(error, RankFailed):
            who = ", ".join(f"rank {rank}" for rank in error.ranks)
            self._error = PeerClosed(error.ranks, f"[gloo] Connection closed by peer [{who}]: {error}")
        elif isinstance(error, MismatchError):
            self._error = error
        return error if self._error is None else self._error

    def is_completed(self) -> bool:
        """Return whether the operation is complete; this call is an observation."""
        if not self._over and self._error is None and self._request.Get_status(self._status):
            self._finish(None)
        return self._over or self._error is not None

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def result(self) -> Any:
        """Wait for the end; return the outputs."""
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        return self._status.source

    _source_rank = source_rank

    # -- the future --------------------------------------------------------------------------------------------

    def get_future(self) -> VirtualFuture:
        """Return the future of the outputs."""
        if self._future is None:
            if open_futures().unbroken:
                self.wait()
            self._future = self._new_future(self)
            if self._over or self._error is not None:
                self._complete(self._future)
            else:
                open_futures().add(self._future, self)
                if torch._C._current_graph_task_id() >= 0:
                    # Before the reducer's own callback, which it queues after its last bucket has been issued.
                    torch.autograd.Variable._execution_engine.queue_callback(settle_all)
        return self._future

    def settle(self) -> None:
        """Wait for the end, and complete the future."""
        try:
            self.wait()
        except Exception:
            if self._error is None:
                raise
        self._pass_on()

    def _pass_on(self) -> None:
        """Complete the future, if it is open; this calls its callbacks."""
        if self._future is not None and open_futures().remove(self):
            self._complete(self._future)

    def _complete(self, future: VirtualFuture) -> None:
        if self._error is not None:
            future.set_exception(self._error)
        else:
            future.set_result(self._outputs)


class Works(Work):
    """Several works as one."""

    def __init__(self, works: list[Any]) -> None:
        super().__init__()
        self.works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all."""
        for work in self.works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def result(self) -> list[Any]:
        """Wait for all; return their outputs."""
        return [tensor for work in self.works for tensor in work.result()]

    def get_future(self) -> Any:
        return torch.futures.collect_all([work.get_future() for work in self.works])
