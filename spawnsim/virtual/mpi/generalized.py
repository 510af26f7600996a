"""Generalized requests, `MPI.Grequest`: the program itself completes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

from spawnsim.comm.failures import ERR_REQUEST, CallError
from spawnsim.comm.handles import same_kind
from spawnsim.comm.status import Status
from spawnsim.virtual.engine.completion import Completion
from spawnsim.virtual.engine.kernel import current_world
from spawnsim.virtual.engine.waiting import Unbroken
from spawnsim.virtual.mpi.requests import Request, request_for


class WaitingForProgram(Unbroken):
    """A wait for the program's own `Complete`: no rank can end it."""

    def describe(self) -> str:
        """Return the call."""
        return "wait for a Grequest, until its Complete"

    def peers(self) -> Sequence[int]:
        return ()

    def missing(self, by_s: float = 0.0) -> Sequence[int]:
        return ()


class Grequest(Request):
    """A request that is complete once the program calls `Complete`."""

    __slots__ = ("_outcome",)
    _outcome: list[Any]  # the object that `complete` has given

    def __new__(cls, request: Request | None = None) -> Self:
        self = super().__new__(cls, request)
        if request:
            same_kind(Grequest, request)
            self._outcome = request._outcome  # type: ignore[attr-defined]
        return self

    @classmethod
    def Start(
        cls,
        query_fn: Callable[..., None] | None = None,
        free_fn: Callable[..., None] | None = None,
        cancel_fn: Callable[..., None] | None = None,
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> Self:
        """Begin an operation of the program. `query_fn(status, …)` and `free_fn(…)` are called at its collection."""
        world, outcome = current_world(), [None]
        completion = Completion(world.kernel)
        given, named = args or (), kwargs or {}

        def deliver(status: Status) -> Any:
            if query_fn is not None:
                query_fn(status, *given, **named)
            if free_fn is not None:
                free_fn(*given, **named)
            return outcome[0]

        def cancel(_: Any, now_s: float) -> None:
            if cancel_fn is not None:
                cancel_fn(completion.finish_s is not None, *given, **named)

        begun = request_for(world, completion, WaitingForProgram(), deliver, writes=False, withdraw=cancel)
        self = cls.__new__(cls)
        for name in Request.__slots__:
            setattr(self, name, getattr(begun, name))
        self._identity, self._outcome = begun._identity, outcome
        return self

    def Complete(self) -> None:
        """Complete the operation, at the rank's time."""
        self.complete()

    def complete(self, obj: Any = None) -> None:
        """Complete the operation; a wait or test in lower case returns `obj`."""
        completion = self._completion
        if completion is None or completion.finish_s is not None:
            raise CallError(ERR_REQUEST, "Complete of a Grequest that is complete already")
        self._outcome[0] = obj
        completion.complete(self._world.kernel.current.clock)
