"""What goes with a communicator: hints, an error handler, and the way to end the whole run.

This room knows one rank's handle of a communicator. It must not know how communicators are made.
"""

from __future__ import annotations

from typing import Any, NoReturn

from spawnsim.comm.integers import integer
from spawnsim.errors import UnsupportedError
from spawnsim.virtual.comm.context import Member
from spawnsim.virtual.named import Named


class ProgramAbort(BaseException):
    """`Comm.Abort`: ends the whole run."""

    def __init__(self, errorcode: int, rank: int, time_s: float) -> None:
        self.errorcode, self.rank, self.time_s = errorcode, rank, time_s
        super().__init__(errorcode, rank, time_s)


class Belongings(Member, Named):
    """Hints, error handlers, Abort."""

    __slots__ = ()
    _kind = "COMM"

    def Abort(self, errorcode: int = 0) -> NoReturn:
        """End the whole run, with this exit status."""
        raise ProgramAbort(integer(errorcode), self._rank.id, self._world.kernel.current.clock)

    def _abort(self, errorcode: int) -> NoReturn:
        self.Abort(errorcode)

    @classmethod
    def Get_parent(cls) -> Any:
        """Return the null communicator: no program has spawned this one."""
        from spawnsim.virtual.comm.intercomm import Intercomm

        return Intercomm()

    @classmethod
    def Join(cls, fd: int) -> NoReturn:
        """Refuse: dynamic processes are outside the simulation."""
        raise UnsupportedError("Comm.Join: dynamic processes are not simulated; start all ranks at once")
