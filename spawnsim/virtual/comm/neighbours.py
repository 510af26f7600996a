"""Neighbourhood collectives under mpi4py's names: blocking, non-blocking, persistent, and of objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spawnsim.comm.failures import ERR_COUNT, ArgumentError
from spawnsim.comm.info import INFO_NULL, Info
from spawnsim.virtual.comm import exchanges
from spawnsim.virtual.comm.nonblocking import Starts
from spawnsim.virtual.comm.payload import dumps, loads
from spawnsim.virtual.requests import Prequest, Request


class Neighbours(Starts):
    """Exchanges with the neighbours of a topology."""

    __slots__ = ()

    @property
    def _edges(self) -> exchanges.Edges:
        self._need()
        shape = self._context.topology
        return shape.sources(self._me), shape.destinations(self._me)

    def Neighbor_allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Exchange with the neighbours: allgather."""
        self._run(exchanges.allgather(sendbuf, recvbuf, self._edges))

    def Ineighbor_allgather(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start Neighbor_allgather."""
        return self._start(exchanges.allgather(sendbuf, recvbuf, self._edges))

    def Neighbor_allgather_init(self, sendbuf: Any, recvbuf: Any, info: Info = INFO_NULL) -> Prequest:
        """Prepare Neighbor_allgather."""
        return Prequest.prepare(lambda: self.Ineighbor_allgather(sendbuf, recvbuf))

    def Neighbor_allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Exchange with the neighbours: allgatherv."""
        self._run(exchanges.allgather(sendbuf, recvbuf, self._edges, vector=True))

    def Ineighbor_allgatherv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start Neighbor_allgatherv."""
        return self._start(exchanges.allgather(sendbuf, recvbuf, self._edges, vector=True))

    def Neighbor_allgatherv_init(self, sendbuf: Any, recvbuf: Any, info: Info = INFO_NULL) -> Prequest:
        """Prepare Neighbor_allgatherv."""
        return Prequest.prepare(lambda: self.Ineighbor_allgatherv(sendbuf, recvbuf))

    def Neighbor_alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        """Exchange with the neighbours: alltoall."""
        self._run(exchanges.alltoall(sendbuf, recvbuf, self._edges))

    def Ineighbor_alltoall(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start Neighbor_alltoall."""
        return self._start(exchanges.alltoall(sendbuf, recvbuf, self._edges))

    def Neighbor_alltoall_init(self, sendbuf: Any, recvbuf: Any, info: Info = INFO_NULL) -> Prequest:
        """Prepare Neighbor_alltoall."""
        return Prequest.prepare(lambda: self.Ineighbor_alltoall(sendbuf, recvbuf))

    def Neighbor_alltoallv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Exchange with the neighbours: alltoallv."""
        self._run(exchanges.alltoall(sendbuf, recvbuf, self._edges, vector=True))

    def Ineighbor_alltoallv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start Neighbor_alltoallv."""
        return self._start(exchanges.alltoall(sendbuf, recvbuf, self._edges, vector=True))

    def Neighbor_alltoallv_init(self, sendbuf: Any, recvbuf: Any, info: Info = INFO_NULL) -> Prequest:
        """Prepare Neighbor_alltoallv."""
        return Prequest.prepare(lambda: self.Ineighbor_alltoallv(sendbuf, recvbuf))

    def Neighbor_alltoallw(self, sendbuf: Any, recvbuf: Any) -> None:
        """Exchange with the neighbours: alltoallw."""
        self._run(exchanges.alltoall(sendbuf, recvbuf, self._edges, vector=True, types=True))

    def Ineighbor_alltoallw(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start Neighbor_alltoallw."""
        return self._start(exchanges.alltoall(sendbuf, recvbuf, self._edges, vector=True, types=True))

    def Neighbor_alltoallw_init(self, sendbuf: Any, recvbuf: Any, info: Info = INFO_NULL) -> Prequest:
        """Prepare Neighbor_alltoallw."""
        return Prequest.prepare(lambda: self.Ineighbor_alltoallw(sendbuf, recvbuf))

    def neighbor_allgather(self, sendobj: Any) -> list[Any]:
        """Return the objects of the incoming neighbours."""
        return self._exchange("neighbor_allgather", [dumps(sendobj)] * len(self._edges[1]))

    def neighbor_alltoall(self, sendobj: Sequence[Any] | None) -> list[Any]:
        """Send an object to each outgoing neighbour; return one from each incoming one."""
        items = [None] * len(self._edges[1]) if sendobj is None else list(sendobj)
        if len(items) != len(self._edges[1]):
            raise ArgumentError(
                ERR_COUNT, f"expecting {len(self._edges[1])} items, one per neighbour; got {len(items)}"
            )
        return self._exchange("neighbor_alltoall", [dumps(item) for item in items])

    def _exchange(self, name: str, parts: list[bytes]) -> list[Any]:
        received = self._meet(exchanges.call(name, parts, [len(part) for part in parts], self._edges))
        return [None if part is None else loads(part) for part in received]
