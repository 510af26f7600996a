"""The calls of an intracommunicator that make communicators of other kinds, and those that spawnsim does not have.

The kinds are built on `Intracomm`, so their rooms are opened when first called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from spawnsim.comm.group import Group
from spawnsim.comm.info import INFO_NULL, Info
from spawnsim.comm.integers import integer
from spawnsim.errors import UnsupportedError
from spawnsim.virtual.comm.context import Member

ALTERNATIVE = "dynamic processes are not simulated; start all ranks at once with --ranks N"


class Making(Member):
    """Communicators with a shape, from a group, between two groups."""

    __slots__ = ()

    def Create_group(self, group: Group, tag: int = 0) -> Any:
        """Return a communicator of a group's members; they alone call."""
        from spawnsim.virtual.comm.subgroups import create_group

        return create_group(self, group, integer(tag))

    @classmethod
    def Create_from_group(
        cls, group: Group, stringtag: str = "org.mpi4py", info: Info = INFO_NULL, errhandler: Any = None
    ) -> Any:
        """Return a communicator of a group's members, who alone call, out of COMM_WORLD."""
        from spawnsim.virtual.comm.subgroups import create_from_group

        return create_from_group(group, stringtag, errhandler)

    def Create_cart(
        self, dims: Sequence[int], periods: Sequence[bool] | None = None, reorder: bool = False
    ) -> Any:
        """Return a grid of the first ranks; those left over get COMM_NULL."""
        from spawnsim.virtual.comm.shaping import create_cart

        return create_cart(self, dims, periods)  # type: ignore[arg-type]

    def Create_graph(self, index: Sequence[int], edges: Sequence[int], reorder: bool = False) -> Any:
        """Return a graph of the first ranks; those left over get COMM_NULL."""
        from spawnsim.virtual.comm.shaping import create_graph

        return create_graph(self, index, edges)  # type: ignore[arg-type]

    def Create_dist_graph_adjacent(
        self, sources: Sequence[int], destinations: Sequence[int], sourceweights: Sequence[int] | None = None,
        destweights: Sequence[int] | None = None, info: Info = INFO_NULL, reorder: bool = False,
    ) -> Any:  # fmt: skip
        """Return a graph of which each rank tells its own edges."""
        from spawnsim.virtual.comm.shaping import create_dist_graph_adjacent

        return create_dist_graph_adjacent(self, sources, destinations, (sourceweights, destweights))  # type: ignore[arg-type]

    def Create_dist_graph(
        self, sources: Sequence[int], degrees: Sequence[int], destinations: Sequence[int],
        weights: Sequence[int] | None = None, info: Info = INFO_NULL, reorder: bool = False,
    ) -> Any:  # fmt: skip
        """Return a graph of which each rank tells any edges."""
        from spawnsim.virtual.comm.shaping import create_dist_graph

        return create_dist_graph(self, sources, degrees, destinations, weights=weights)  # type: ignore[arg-type]

    def Create_intercomm(self, local_leader: int, peer_comm: Any, remote_leader: int, tag: int = 0) -> Any:
        """Join this communicator's group with another one; the leaders meet on `peer_comm`."""
        from spawnsim.virtual.comm.intercomm import create_intercomm

        return create_intercomm(self, local_leader, peer_comm, remote_leader, tag)  # type: ignore[arg-type]

    def Cart_map(self, dims: Sequence[int], periods: Sequence[bool] | None = None) -> int:
        """Return the rank that this one would have in a grid."""
        from spawnsim.virtual.comm.shaping import mapped

        return mapped(self, dims)

    def Graph_map(self, index: Sequence[int], edges: Sequence[int]) -> int:
        """Return the rank that this one would have in a graph."""
        from spawnsim.virtual.comm.shaping import ends_of, mapped

        return mapped(self, [len(ends_of(index, edges))])

    def Spawn(
        self, command: str, args: Sequence[str] | None = None, maxprocs: int = 1, info: Info = INFO_NULL,
        root: int = 0, errcodes: list[int] | None = None,
    ) -> NoReturn:  # fmt: skip
        """Refuse."""
        raise UnsupportedError(f"Intracomm.Spawn: {ALTERNATIVE}")

    def Spawn_multiple(
        self, command: Sequence[str], args: Any = None, maxprocs: Sequence[int] | None = None, info: Any = INFO_NULL,
        root: int = 0, errcodes: list[list[int]] | None = None,
    ) -> NoReturn:  # fmt: skip
        """Refuse."""
        raise UnsupportedError(f"Intracomm.Spawn_multiple: {ALTERNATIVE}")

    def Accept(self, port_name: str, info: Info = INFO_NULL, root: int = 0) -> NoReturn:
        """Refuse."""
        raise UnsupportedError(f"Intracomm.Accept: {ALTERNATIVE}")

    def Connect(self, port_name: str, info: Info = INFO_NULL, root: int = 0) -> NoReturn:
        """Refuse."""
        raise UnsupportedError(f"Intracomm.Connect: {ALTERNATIVE}")
