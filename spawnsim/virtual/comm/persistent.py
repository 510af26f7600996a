"""Persistent requests: sends, receives and collectives that are prepared once and started often."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG
from spawnsim.comm.info import INFO_NULL, Info
from spawnsim.comm.integers import integer
from spawnsim.comm.ops import SUM, Op
from spawnsim.virtual.comm.buffering import BufferedSends
from spawnsim.virtual.comm.nonblocking import NonblockingCollectives, NonblockingIntraCollectives
from spawnsim.virtual.comm.point_to_point import Buffers
from spawnsim.virtual.requests import Prequest


class PersistentMessages(BufferedSends, Buffers):
    """Persistent point-to-point requests."""

    __slots__ = ()

    def Send_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """Prepare Isend."""
        dest, tag = integer(dest), integer(tag)
        return Prequest.prepare(lambda: self.Isend(buf, dest, tag))

    def Bsend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """Prepare Ibsend."""
        dest, tag = integer(dest), integer(tag)
        return Prequest.prepare(lambda: self.Ibsend(buf, dest, tag))

    def Ssend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """Prepare Issend."""
        dest, tag = integer(dest), integer(tag)
        return Prequest.prepare(lambda: self.Issend(buf, dest, tag))

    def Rsend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """Prepare Irsend."""
        dest, tag = integer(dest), integer(tag)
        return Prequest.prepare(lambda: self.Irsend(buf, dest, tag))

    def Recv_init(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Prequest:
        """Prepare Irecv."""
        source, tag = integer(source), integer(tag)
        return Prequest.prepare(lambda: self.Irecv(buf, source, tag))


class PersistentCollectives(NonblockingCollectives):
    """Persistent collectives."""

    __slots__ = ()

    def Barrier_init(self, info: Info = INFO_NULL) -> Prequest:
        """Prepare Barrier."""
        return Prequest.prepare(lambda: self.Ibarrier())

    def Bcast_init(self, buf: Any, root: int = 0, info: Info = INFO_NULL) -> Prequest:
        """Prepare Bcast."""
        root = integer(root)
        return Prequest.prepare(lambda: self.Ibcast(buf, root))

    def Gather_init(self, sendbuf: Any, recvbuf: Any, root: int = 0, info: Info = INFO_NULL) -> Prequest:
        """Prepare Gather."""
        root = integer(root)
        return Prequest.prepare(lambda: self.Igather(sendbuf, recvbuf, root))

    def Gatherv_init(self, sendbuf: Any, recvbuf: Any, root: int = 0, info: Info = INFO_NULL) -> Prequest:
        """Prepare Gatherv."""
        root = integer(root)
        return Prequest.prepare(lambda: self.Igatherv(sendbuf, recvbuf, root))

    def Scatter_init(self, sendbuf: Any, recvbuf: Any, root: int = 0, info: Info = INFO_NULL) -> Prequest:
        """Prepare Scatter."""
        root = integer(root)
        return Prequest.prepare(lambda: self.Iscatter(sendbuf, recvbuf, root))

    def Scatterv_init(self, sendbuf: Any, recvbuf: Any, root: int = 0, info: Info = INFO_NULL) -> Prequest:
        """Prepare Scatterv."""
        root = integer(root)
        return Prequest.prepare(lambda: self.Iscatterv(sendbuf, recvbuf, root))

    def Allgather_init(self, sendbuf: Any, recvbuf: Any, info: Info = INFO_NULL) -> Prequest:
        """Prepare Allgather."""
        return Prequest.prepare(lambda: self.Iallgather(sendbuf, recvbuf))

    def Allgatherv_init(self, sendbuf: Any, recvbuf: Any, info: Info = INFO_NULL) -> Prequest:
        """Prepare Allgatherv."""
        return Prequest.prepare(lambda: self.Iallgatherv(sendbuf, recvbuf))

    def Alltoall_init(self, sendbuf: Any, recvbuf: Any, info: Info = INFO_NULL) -> Prequest:
        """Prepare Alltoall."""
        return Prequest.prepare(lambda: self.Ialltoall(sendbuf, recvbuf))

    def Alltoallv_init(self, sendbuf: Any, recvbuf: Any, info: Info = INFO_NULL) -> Prequest:
        """Prepare Alltoallv."""
        return Prequest.prepare(lambda: self.Ialltoallv(sendbuf, recvbuf))

    def Alltoallw_init(self, sendbuf: Any, recvbuf: Any, info: Info = INFO_NULL) -> Prequest:
        """Prepare Alltoallw."""
        return Prequest.prepare(lambda: self.Ialltoallw(sendbuf, recvbuf))

    def Reduce_init(
        self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0, info: Info = INFO_NULL
    ) -> Prequest:
        """Prepare Reduce."""
        root = integer(root)
        return Prequest.prepare(lambda: self.Ireduce(sendbuf, recvbuf, op, root))

    def Allreduce_init(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, info: Info = INFO_NULL) -> Prequest:
        """Prepare Allreduce."""
        return Prequest.prepare(lambda: self.Iallreduce(sendbuf, recvbuf, op))

    def Reduce_scatter_block_init(
        self, sendbuf: Any, recvbuf: Any, op: Op = SUM, info: Info = INFO_NULL
    ) -> Prequest:
        """Prepare Reduce_scatter_block."""
        return Prequest.prepare(lambda: self.Ireduce_scatter_block(sendbuf, recvbuf, op))

    def Reduce_scatter_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Sequence[int] | None = None,
        op: Op = SUM,
        info: Info = INFO_NULL,
    ) -> Prequest:
        """Prepare Reduce_scatter."""
        return Prequest.prepare(lambda: self.Ireduce_scatter(sendbuf, recvbuf, recvcounts, op))


class PersistentIntraCollectives(NonblockingIntraCollectives):
    """Persistent collectives that only intracommunicators have."""

    __slots__ = ()

    def Scan_init(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, info: Info = INFO_NULL) -> Prequest:
        """Prepare Scan."""
        return Prequest.prepare(lambda: self.Iscan(sendbuf, recvbuf, op))

    def Exscan_init(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, info: Info = INFO_NULL) -> Prequest:
        """Prepare Exscan."""
        return Prequest.prepare(lambda: self.Iexscan(sendbuf, recvbuf, op))
