"""What goes with a communicator: hints, an error handler, and the way to end the whole run.

This room knows one rank's handle of a communicator. It must not know how communicators are made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from spawnsim.comm.handles import ERRORS_RETURN, Errhandler
from spawnsim.comm.info import Info
from spawnsim.errors import UnsupportedError
from spawnsim.virtual.comm.context import Member


class ProgramAbort(BaseException):
    """`Comm.Abort`: ends the whole run."""

    def __init__(self, errorcode: int, rank: int, time_s: float) -> None:
        self.errorcode, self.rank, self.time_s = errorcode, rank, time_s
        super().__init__(errorcode, rank, time_s)


class Belongings(Member):
    """Hints, error handlers, Abort."""

    __slots__ = ()

    def Get_info(self) -> Info:
        """Return a copy of the hints."""
        self._need()
        return Info.Create(self._info)

    def Set_info(self, info: Info) -> None:
        """Set hints; no hint means anything here, all are kept."""
        self._need()
        self._info = Info.Create(info)

    @property
    def info(self) -> Info:
        """The hints."""
        return self.Get_info()

    @info.setter
    def info(self, value: Info) -> None:
        self.Set_info(value)

    def Get_errhandler(self) -> Errhandler:
        """Return the error handler."""
        self._need()
        return Errhandler(self._errhandler or ERRORS_RETURN)

    def Set_errhandler(self, errhandler: Errhandler) -> None:
        """Set the error handler."""
        self._need()
        self._errhandler = errhandler

    def Call_errhandler(self, errorcode: int) -> None:
        """Let the error handler act on an error code."""
        handler = self.Get_errhandler()
        if handler.function is not None:
            handler.function(self, errorcode)
        elif handler.name != "ERRORS_RETURN":
            self.Abort(errorcode)

    @classmethod
    def Create_errhandler(cls, errhandler_fn: Callable[[Any, int], None]) -> Errhandler:
        """Return an error handler that calls a function."""
        return Errhandler.of("user", errhandler_fn)

    def Abort(self, errorcode: int = 0) -> NoReturn:
        """End the whole run, with this exit status."""
        raise ProgramAbort(errorcode, self._rank.id, self._world.kernel.current.clock)

    @classmethod
    def Get_parent(cls) -> Any:
        """Return the null communicator: no program has spawned this one."""
        from spawnsim.virtual.comm.intercomm import Intercomm

        return Intercomm()

    @classmethod
    def Join(cls, fd: int) -> NoReturn:
        """Refuse: dynamic processes are outside the simulation."""
        raise UnsupportedError("Comm.Join: dynamic processes are not simulated; start all ranks at once")
