"""Generalized requests: operations of the program itself, with MPI's face.

This room knows completions and the program's callbacks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from spawnsim.comm.status import Status
from spawnsim.virtual.engine.completion import Completion
from spawnsim.virtual.engine.kernel import current_world
from spawnsim.virtual.requests import Request
from spawnsim.virtual.waiting import WaitingForAny


class Grequest(Request):
    """A request that the program completes."""

    __slots__ = ("_over",)
    _over: tuple[Completion, list[Any]]

    @classmethod
    def Start(
        cls, query_fn: Callable[..., None] | None = None, free_fn: Callable[..., None] | None = None,
        cancel_fn: Callable[..., None] | None = None, args: tuple[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> Self:  # fmt: skip
        """Return an active request; `Complete` ends it. The callbacks are called as MPI says."""
        world = current_world()
        completion, held = Completion(world.kernel), [None]
        more, named = args or (), kwargs or {}

        def deliver(status: Status) -> Any:
            if query_fn is not None:
                query_fn(status, *more, **named)
            if free_fn is not None:
                free_fn(*more, **named)
            return held[0]

        self = cls.start(world, completion, WaitingForAny("generalized request", ()), deliver, writes=False)
        self._over = completion, held
        if cancel_fn is not None:
            self._withdraw = lambda request, now_s: cancel_fn(completion.finish_s is not None, *more, **named)
        return self

    def Complete(self) -> None:
        """End the operation."""
        self.complete()

    def complete(self, obj: Any = None) -> None:
        """End the operation with an object."""
        self._need()
        completion, held = self._over
        held[0] = obj
        completion.complete(completion.kernel.current.clock)
