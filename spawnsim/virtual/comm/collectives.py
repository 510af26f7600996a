"""Blocking collectives of buffers. What each means is told in `plans`; this room only runs them.

It must not know clocks: `Member._meet` waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spawnsim.comm.buffers import as_buffer
from spawnsim.comm.failures import Truncated
from spawnsim.comm.integers import each_integer, integer
from spawnsim.comm.ops import SUM, Op
from spawnsim.virtual.comm import plans
from spawnsim.virtual.comm.context import Member
from spawnsim.virtual.comm.plans import Plan


class Plans(Member):
    """What the blocking, non-blocking and persistent calls share."""

    __slots__ = ()

    @property
    def _place(self) -> tuple[int, int]:
        """This rank, and the number of ranks."""
        return self._me, len(self._peers)

    def _root(self, root: int) -> int:
        root = integer(root)
        self._check_root(root)
        return root

    def _counts(self, recvbuf: Any, counts: Sequence[int] | None) -> Sequence[int] | None:
        """Return the elements per rank; not given, each rank tells how many it receives."""
        if counts is not None:
            return each_integer(counts)
        return self._meet(plans.counts(as_buffer(recvbuf).count))  # type: ignore[no-any-return]

    def _run(self, plan: Plan) -> None:
        self._take(plan, self._meet(plan.call))

    def _take(self, plan: Plan, outcome: Any) -> None:
        """Put the outcome where it belongs; what does not fit is named."""
        try:
            plan.collect(outcome)
        except Truncated as error:
            text = f"{error.message}; it is from {plan.call.describe()} on {self._label}"
            raise Truncated(message=text) from None


class Collectives(Plans):
    """Blocking collectives of buffers, with mpi4py's names."""

    __slots__ = ()

    def Barrier(self) -> None:
        """Wait until all ranks have arrived."""
        self._run(plans.barrier())

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """Send the root's buffer to all ranks."""
        self._run(plans.bcast(buf, self._root(root), self._me))

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Collect equal blocks at the root."""
        self._run(plans.gather(sendbuf, recvbuf, self._root(root), self._place))

    def Gatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Collect unequal blocks at the root."""
        self._run(plans.gather(sendbuf, recvbuf, self._root(root), self._place, vector=True))

    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Hand out equal blocks of the root's buffer."""
        self._run(plans.scatter(sendbuf, recvbuf, self._root(root), self._place))

    def Scatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Hand out unequal blocks of the root's buffer."""
        self._run(plans.scatter(sendbuf, recvbuf, self._root(root), self._place, vector=True))

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Collect equal blocks at all ranks."""
        self._run(plans.allgather(sendbuf, recvbuf, self._place, lend=True))

    def Allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Collect unequal blocks at all ranks."""
        self._run(plans.allgather(sendbuf, recvbuf, self._place, vector=True))

    def Alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        """Exchange equal blocks between all pairs of ranks."""
        self._run(plans.alltoall(sendbuf, recvbuf, self._place))

    def Alltoallv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Exchange unequal blocks between all pairs of ranks."""
        self._run(plans.alltoall(sendbuf, recvbuf, self._place, vector=True))

    def Alltoallw(self, sendbuf: Any, recvbuf: Any) -> None:
        """Exchange blocks of different types between all pairs of ranks."""
        self._run(plans.alltoall(sendbuf, recvbuf, self._place, vector=True, types=True))

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> None:
        """Combine all ranks' buffers at the root."""
        self._run(plans.reduce(sendbuf, recvbuf, op, root=self._root(root), me=self._me))

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """Combine all ranks' buffers at all ranks."""
        self._run(plans.allreduce(sendbuf, recvbuf, op, lend=True))

    def Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """Combine all ranks' buffers and hand out equal blocks."""
        self._run(plans.reduce_scatter(sendbuf, recvbuf, None, op, place=self._place, lend=True))

    def Reduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None = None, op: Op = SUM
    ) -> None:
        """Combine all ranks' buffers and hand out blocks of `recvcounts` elements."""
        counts = self._counts(recvbuf, recvcounts)
        self._run(plans.reduce_scatter(sendbuf, recvbuf, counts, op, place=self._place, lend=True))


class IntraCollectives(Plans):
    """Blocking collectives that only intracommunicators have."""

    __slots__ = ()

    def Scan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """Combine the buffers of ranks 0 to this one."""
        self._run(plans.scan(sendbuf, recvbuf, op, inclusive=True))

    def Exscan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """Combine the buffers of the ranks before this one."""
        self._run(plans.scan(sendbuf, recvbuf, op, inclusive=False))
