"""The communicators: `Comm` and `Intracomm`, put together from the rooms of this folder, and the null one.

Beyond MPI's calls each carries the rank's own five members: clock, compute, rng, background, record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from spawnsim.virtual.comm.collectives import Collectives, IntraCollectives
from spawnsim.virtual.comm.context import Context, Member
from spawnsim.virtual.comm.making import Making
from spawnsim.virtual.comm.management import Management
from spawnsim.virtual.comm.objects import ObjectCollectives, ObjectIntraCollectives
from spawnsim.virtual.comm.persistent import (
    PersistentCollectives,
    PersistentIntraCollectives,
    PersistentMessages,
)
from spawnsim.virtual.comm.point_to_point import Objects
from spawnsim.virtual.comm.probing import Probes
from spawnsim.virtual.comm.surviving import Surviving
from spawnsim.virtual.comm.unsupported import Unsupported
from spawnsim.virtual.services import Background, Clock, Compute, Record


class Comm(
    PersistentMessages, Objects, Probes, Collectives, PersistentCollectives, ObjectCollectives, Surviving,
    Management, Unsupported,
):  # fmt: skip
    """A communicator of one virtual rank, under mpi4py's names."""

    __slots__ = ()

    def __new__(cls, comm: Member | None = None) -> Self:
        """Return a null communicator, or a copy of the handle of another."""
        self = super().__new__(cls)
        self._identity, self._attributes = None, {}
        if comm is not None and comm._identity is not None:
            for slot in Member.__slots__:
                setattr(self, slot, getattr(comm, slot))
            self._identity, self._attributes = comm._identity, comm._attributes
        return self

    @property
    def clock(self) -> Clock:
        """The rank's own time."""
        return self._own.clock  # type: ignore[no-any-return]

    @property
    def compute(self) -> Compute:
        """A block of computing: `with comm.compute(): ...`."""
        return self._own.compute  # type: ignore[no-any-return]

    @property
    def rng(self) -> Any:
        """The rank's random streams: `comm.rng("donors")`."""
        return self._own.rng

    @property
    def record(self) -> Record:
        """`comm.record(loss=…)` adds a row, `comm.record.event(kind, …)` an event."""
        return self._own.record  # type: ignore[no-any-return]

    @property
    def background(self) -> Callable[[Callable[[], Any]], Background]:
        """`comm.background(fn)` runs `fn` beside the rank's program."""
        return self._own.background  # type: ignore[no-any-return]

    @property
    def Win(self) -> Any:
        """The window class of this building: `comm.Win.Allocate(nbytes, comm=comm)`."""
        from spawnsim.virtual.onesided import Win

        return Win

    def __reduce__(self) -> str | tuple[Any, ...]:
        from spawnsim.virtual.comm.calling import predefined

        if self._identity is None:
            return type(self), ()
        if self._context.number <= 1 + len(self._world.ranks):
            return predefined, (self._context.everyone == (self._rank.id,) and self._context.number > 1,)
        raise ValueError("cannot pickle a communicator: it means something on its own rank only")

    def __repr__(self) -> str:
        if self._identity is None:
            return f"{type(self).__name__}(null)"
        return f"{type(self).__name__}({self._label}, rank {self._me} of {len(self._members)})"


class Intracomm(Comm, Making, IntraCollectives, PersistentIntraCollectives, ObjectIntraCollectives):
    """A communicator with one group."""

    __slots__ = ()


COMM_NULL = Comm()


def enter(context: Context, rank: int, name: str = "") -> Intracomm:
    """Return the handle of a world rank."""
    return Intracomm.enter(context, rank, name)
