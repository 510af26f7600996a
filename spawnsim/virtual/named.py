"""What communicators and windows have in common: a name, hints, an error handler.

This room knows MPI's words for them, and nothing of what its heirs do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

from spawnsim.comm.handles import ERRORS_RETURN, Errhandler
from spawnsim.comm.info import Info


class Named:
    """Name, hints, error handler. The heir keeps them in `_name`, `_info` and `_errhandler`."""

    __slots__ = ()
    _kind: ClassVar[str]  # COMM or WIN
    _identity: object | None
    _name: str
    _info: Info | None
    _errhandler: Errhandler | None

    def _exist(self) -> None:
        """Refuse a null or freed object. One that was revoked is still there: all calls of this class are local."""
        raise NotImplementedError

    def _abort(self, errorcode: int) -> NoReturn:
        """End the whole run, as an error handler may want it."""
        raise NotImplementedError

    def Get_name(self) -> str:
        """Return the name; null objects have one, too."""
        return f"MPI_{self._kind}_NULL" if self._identity is None else self._name

    def Set_name(self, name: str) -> None:
        """Set the name."""
        self._exist()
        self._name = name  # type: ignore[misc]  # the heir's slot

    name = property(Get_name, Set_name)

    def Get_info(self) -> Info:
        """Return a copy of the hints."""
        self._exist()
        return Info.Create(self._info)

    def Set_info(self, info: Info) -> None:
        """Set hints; no hint means anything here, all are kept."""
        self._exist()
        self._info = Info.Create(info)  # type: ignore[misc]  # the heir's slot

    info = property(Get_info, Set_info)

    def Get_errhandler(self) -> Errhandler:
        """Return the error handler."""
        self._exist()
        return Errhandler(self._errhandler or ERRORS_RETURN)

    def Set_errhandler(self, errhandler: Errhandler) -> None:
        """Set the error handler."""
        self._exist()
        self._errhandler = errhandler  # type: ignore[misc]  # the heir's slot

    def Call_errhandler(self, errorcode: int) -> None:
        """Let the error handler act on an error code."""
        handler = self.Get_errhandler()
        if handler.function is not None:
            handler.function(self, errorcode)
        elif handler.name != "ERRORS_RETURN":
            self._abort(errorcode)

    @classmethod
    def Create_errhandler(cls, errhandler_fn: Callable[[Any, int], None]) -> Errhandler:
        """Return an error handler that calls a function."""
        return Errhandler.of("user", errhandler_fn)
