"""Operations under way: `Work`, its future, and the errors in which a wait for it ends.

A work begins at the clock at which it was issued; `wait` moves the rank's clock to its end. C++ waits for a future by
stopping the thread, so a future must be complete by then: those of a backward pass (the buckets of
DistributedDataParallel) are completed by a callback that autograd runs at the end of the pass, before the reducer's
own; others by the wait itself, in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work
from torch.futures import Future

from spawnsim.comm.status import Status
from spawnsim.errors import RankFailed, Timeout
from spawnsim.virtual.engine.kernel import current_task
from spawnsim.virtual.mpi.requests import Request
from spawnsim.virtual.torch.stores import limited

PENDING = "torch.pending"  # a rank's works whose futures C++ may wait for, in the order issued


class GroupTimeout(Timeout, RuntimeError):
    """An operation has met its time-out: spawnsim's `Timeout`, and the RuntimeError that gloo raises."""


class PeerClosed(RankFailed, RuntimeError):
    """A member of the group has died: spawnsim's `RankFailed`, and the RuntimeError that gloo raises."""


def pending_works() -> dict[VirtualWork, None]:
    """Return the calling rank's works whose futures are open."""
    task = current_task()
    assert task is not None
    found: dict[VirtualWork, None] = task.kernel.owner.ranks[task.rank].attachments.setdefault(PENDING, {})
    return found


def settle_pending() -> None:
    """Complete the futures of all open works of the calling rank, in the order issued."""
    pending = pending_works()
    while pending:
        next(iter(pending)).settle()


class VirtualFuture(Future):  # type: ignore[misc, type-arg]
    """The future of a work, or of what follows it. Its waits are in virtual time."""

    def __init__(self, work: VirtualWork) -> None:
        super().__init__()
        self._work = work

    def wait(self) -> Any:
        """Wait for the work; return the value."""
        self._work.settle()
        return super().wait()

    def value(self) -> Any:
        """Return the value of a future that is done."""
        return super().value()

    def done(self) -> bool:
        """Return whether it is done; an observation."""
        if not super().done() and self._work.is_completed():
            self._work.settle()
        return super().done()

    def then(self, callback: Callable[[Any], Any]) -> VirtualFuture:
        """Return the future of what a callback makes of this one."""
        after = VirtualFuture(self._work)

        def follow(done: Any) -> None:
            try:
                made = callback(done)
            except Exception as error:  # noqa: BLE001 - as torch does: who waits for it is told
                after.set_exception(error)
            else:
                after.set_result(made)

        super().add_done_callback(lambda _: follow(self))
        return after


class VirtualWork(Work):  # type: ignore[misc]
    """One operation of one rank.

    Args:
        request: what is under way.
        outputs: the tensors that it fills.
        limit: the seconds after its issue at which it ends in `GroupTimeout`, and whether the program has set them.
        leave: is called when a wait has ended badly, so that lent memory is kept for the others.
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

    # -- waiting -----------------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end; its outputs are filled then."""
        if self._error is not None:
            raise self._error
        if not self._over:
            self._finish(timeout)
        return True

    def _finish(self, timeout: timedelta | None) -> None:
        task = current_task()
        assert task is not None
        seconds, explicit = self._limit
        left_s = self._issued_s + seconds - task.clock
        if timeout is not None and timeout.total_seconds() > 0:
            seconds = left_s = timeout.total_seconds()
            explicit = True
        try:
            with limited(task, max(left_s, 1e-9), explicit=explicit):
                self._request.wait(self._status)
        except BaseException as error:
            self._leave()
            raise self._failed(error, seconds) from None
        self._over = True

    def _failed(self, error: BaseException, seconds: float) -> BaseException:
        """Return what a wait raises: gloo's words, and behind them ours."""
        if type(error) is Timeout:
            words = f"Timed out waiting {seconds * 1e3:.0f}ms for recv operation to complete: {error}"
            self._error = GroupTimeout(error.ranks, error.operation, error.sequence, words)
        elif type(error) is RankFailed:
            who = ", ".join(f"rank {rank}" for rank in error.ranks)
            self._error = PeerClosed(error.ranks, f"Connection closed by peer [{who}]: {error}")
        return error if self._error is None else self._error

    def is_completed(self) -> bool:
        """Return whether it is over; an observation."""
        if not self._over and self._error is None and self._request.Get_status(self._status):
            self._finish(None)
        return self._over or self._error is not None

    def is_success(self) -> bool:
        """Return whether it is over, and well."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error in which it has ended."""
        return self._error

    def synchronize(self) -> None:
        """Wait for the end."""
        self.wait()

    block_current_stream = synchronize

    def result(self) -> Any:
        """Wait for the end; return the outputs."""
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        """Return the rank, in the group, from which a receive from anybody has received."""
        return self._status.source

    _source_rank = source_rank

    # -- the future --------------------------------------------------------------------------------------------

    def get_future(self) -> VirtualFuture:
        """Return the future of the outputs."""
        if self._future is None:
            self._future = VirtualFuture(self)
            if self._over or self._error is not None:
                self._complete(self._future)
            else:
                pending = pending_works()
                pending[self] = None
                if torch._C._current_graph_task_id() >= 0:
                    # Before the reducer's own callback, which it queues when its last bucket has been handed over.
                    torch.autograd.Variable._execution_engine.queue_callback(settle_pending)
        return self._future

    def settle(self) -> None:
        """Wait for the end, and complete the future."""
        future = self._future
        waits = pending_works().pop(self, self) is None
        if future is None or not waits:
            return
        try:
            self.wait()
        except Exception:  # noqa: BLE001 - kept in the work: the future raises it
            pass
        self._complete(future)

    def _complete(self, future: VirtualFuture) -> None:
        if self._error is not None:
            future.set_exception(self._error)
        else:
            future.set_result(self._outputs)


class Works(Work):  # type: ignore[misc]
    """Several works as one."""

    def __init__(self, works: list[Any]) -> None:
        super().__init__()
        self.works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all."""
        return all([work.wait(timeout) for work in self.works])

    def is_completed(self) -> bool:
        """Return whether all are over."""
        return all([work.is_completed() for work in self.works])

    def result(self) -> list[Any]:
        """Wait for all; return their outputs."""
        return [tensor for work in self.works for tensor in work.result()]

    def get_future(self) -> Any:
        """Return the future of all their outputs."""
        return torch.futures.collect_all([work.get_future() for work in self.works])
