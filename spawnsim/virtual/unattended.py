"""What becomes of an operation whose request was freed: it goes on, and fills its buffer when it is over.

Until then its rank does not run ahead, as if its memory were exposed: the data are there from their arrival on, whoever
looks, and not before. This room knows completions and the memory that is to be filled; it must not know messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spawnsim.comm.status import Status
from spawnsim.virtual.engine.completion import AllOf, Completion
from spawnsim.virtual.engine.world import World


class FreedOperation(AllOf):
    """Runs the delivery of a completion at its end, in the place of the request that has let go of it."""

    __slots__ = ("_deliver", "_part", "_rank")

    def __init__(self, world: World, part: Completion, deliver: Callable[[Status], Any]) -> None:
        self._part, self._deliver, self._rank = part, deliver, world.here()
        self._rank.company += 1
        super().__init__(world.kernel, (part,))

    def part_over(self) -> None:
        """Deliver at the end, now that it is known; it may yet be taken back, or turn out to be later."""
        end_s, env = self._part.finish_s, self.kernel.env
        if end_s is not None and self.finish_s is None:
            env.at(max(end_s, env.now), self._rank.id, self._arrive)

    def reopen(self) -> None:
        """Go on waiting: the part has not ended after all."""

    def _arrive(self) -> None:
        now_s, part = self.kernel.env.now, self._part
        if self.finish_s is not None or part.finish_s is None or self._rank.dead:
            return
        if part.final() > now_s:
            self.part_over()
            return
        self.finish_s = now_s
        self._rank.company -= 1
        try:
            self._deliver(Status())
        except Exception as error:  # noqa: BLE001 - it is the program's fault, and ends the run as its own error would
            self.kernel.fail(error, self._rank.tasks[0])
