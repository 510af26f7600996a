"""COMM_WORLD and COMM_SELF as objects that may be captured anywhere and always mean the *calling rank's*.

A module imported once and shared by all ranks may keep `comm = MPI.COMM_WORLD` in a global, a class body or a default
argument. Each use looks up the rank whose task is running.
"""

from __future__ import annotations

from typing import Any, Self

from spawnsim.errors import UsageError
from spawnsim.virtual.comm.communicators import Intracomm
from spawnsim.virtual.engine.kernel import current_task


def held(name: str) -> Any:
    """Return what the calling rank holds under a name. Raises `UsageError` outside virtual ranks."""
    task = current_task()
    if task is None:
        raise UsageError(
            f"{name} was used outside a virtual rank: it means the rank that calls, and none does"
        )
    return task.kernel.owner.ranks[task.rank].attachments[name]


class CallingComm(Intracomm):
    """A stand-in for the calling rank's own communicator."""

    __slots__ = ("_which",)

    @classmethod
    def called(cls, which: str) -> Self:
        """Return the stand-in for one of the rank's predefined communicators."""
        self = object.__new__(cls)
        object.__setattr__(self, "_which", which)
        return self

    def __getattribute__(self, name: str) -> Any:
        return getattr(held(object.__getattribute__(self, "_which")), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(held(object.__getattribute__(self, "_which")), name, value)

    def __repr__(self) -> str:
        return f"MPI.{object.__getattribute__(self, '_which')}"


COMM_WORLD = CallingComm.called("COMM_WORLD")
COMM_SELF = CallingComm.called("COMM_SELF")


def predefined(own: bool) -> CallingComm:
    """Return COMM_SELF or COMM_WORLD: what a pickle of theirs becomes, on whatever rank."""
    return COMM_SELF if own else COMM_WORLD
