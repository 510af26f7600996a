"""Non-blocking collectives of buffers: the same plans, a request instead of a wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spawnsim.comm.ops import SUM, Op
from spawnsim.virtual.comm import plans
from spawnsim.virtual.comm.collectives import Plans
from spawnsim.virtual.comm.plans import Plan
from spawnsim.virtual.requests import Request


class Starts(Plans):
    """Starting a plan without waiting."""

    __slots__ = ()

    def _start(self, plan: Plan) -> Request:
        completion, waiting = self._join(plan.call)

        def deliver(_: Any) -> None:
            self._take(plan, waiting.meeting.outcome(waiting.me))

        return Request.start(self._world, completion, waiting, deliver)


class NonblockingCollectives(Starts):
    """Non-blocking collectives of buffers, with mpi4py's names. A receiving buffer is filled when it is waited for."""

    __slots__ = ()

    def Ibarrier(self) -> Request:
        """Start Barrier."""
        return self._start(plans.barrier())

    def Ibcast(self, buf: Any, root: int = 0) -> Request:
        """Start Bcast."""
        return self._start(plans.bcast(buf, self._root(root), self._me))

    def Igather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """Start Gather."""
        return self._start(plans.gather(sendbuf, recvbuf, self._root(root), self._place))

    def Igatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """Start Gatherv."""
        return self._start(plans.gather(sendbuf, recvbuf, self._root(root), self._place, vector=True))

    def Iscatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """Start Scatter."""
        return self._start(plans.scatter(sendbuf, recvbuf, self._root(root), self._place))

    def Iscatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """Start Scatterv."""
        return self._start(plans.scatter(sendbuf, recvbuf, self._root(root), self._place, vector=True))

    def Iallgather(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start Allgather."""
        return self._start(plans.allgather(sendbuf, recvbuf, self._place))

    def Iallgatherv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start Allgatherv."""
        return self._start(plans.allgather(sendbuf, recvbuf, self._place, vector=True))

    def Ialltoall(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start Alltoall."""
        return self._start(plans.alltoall(sendbuf, recvbuf, self._place))

    def Ialltoallv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start Alltoallv."""
        return self._start(plans.alltoall(sendbuf, recvbuf, self._place, vector=True))

    def Ialltoallw(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start Alltoallw."""
        return self._start(plans.alltoall(sendbuf, recvbuf, self._place, vector=True, types=True))

    def Ireduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> Request:
        """Start Reduce."""
        return self._start(plans.reduce(sendbuf, recvbuf, op, root=self._root(root), me=self._me))

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """Start Allreduce."""
        return self._start(plans.allreduce(sendbuf, recvbuf, op))

    def Ireduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """Start Reduce_scatter_block."""
        return self._start(plans.reduce_scatter(sendbuf, recvbuf, None, op, place=self._place))

    def Ireduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None = None, op: Op = SUM
    ) -> Request:
        """Start Reduce_scatter."""
        return self._start(
            plans.reduce_scatter(sendbuf, recvbuf, self._counts(recvbuf, recvcounts), op, place=self._place)
        )


class NonblockingIntraCollectives(Starts):
    """Non-blocking collectives that only intracommunicators have."""

    __slots__ = ()

    def Iscan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """Start Scan."""
        return self._start(plans.scan(sendbuf, recvbuf, op, inclusive=True))

    def Iexscan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """Start Exscan."""
        return self._start(plans.scan(sendbuf, recvbuf, op, inclusive=False))
