"""How much memory a run of very many ranks will take, from what its first ranks take: refused before it is used up.

The operating system ends a process that takes more than there is, and all that was recorded last is lost. Ranks begin
one after another, each at its first call once the one before it waits; so when the thousandth begins, what nine hundred
programs hold is known. A program that takes its memory later, behind its first wait, is not seen through.
"""

from __future__ import annotations

from collections.abc import Callable

from greenlet import GreenletExit

from spawnsim.errors import ParameterError
from spawnsim.scenario import COLUMNAR, MANY, available_B
from spawnsim.virtual.engine.kernel import Kernel, Program
from spawnsim.virtual.interpreter import resident_B

# The ranks at whose begin memory is looked at. What the first ones load, such as packages and data, is all ranks'.
FIRST, SECOND = 100, 1000
NOTED = 100_000  # ranks from which on the estimate is reported


class MemoryEstimate:
    """Looks at memory when two of a run's ranks begin; `note` is given a sentence about runs of very many ranks."""

    def __init__(self, kernel: Kernel, ranks: int) -> None:
        self._kernel, self._ranks, self._before_B = kernel, ranks, 0
        self.note: Callable[[str], None] | None = None

    def around(self, rank: int, program: Program) -> Program:
        """Return a rank's program, with a look at memory before it if the rank is one of the two."""
        if self._ranks < MANY or rank not in (FIRST, SECOND):
            return program

        def begin(me: int) -> None:
            if rank == FIRST:
                self._before_B = resident_B()
            else:
                self._judge()
            program(me)

        return begin

    def _judge(self) -> None:
        """End the run if the ranks that are still to begin will not find room."""
        taken, left = resident_B(), available_B()
        more = max(taken - self._before_B, 0) / (SECOND - FIRST) * (self._ranks - SECOND)
        total, room = f"{(taken + more) / 1e9:,.1f} GB", f"{(taken + left) / 1e9:,.1f} GB"
        if more > left:
            error = ParameterError(
                f"ranks={self._ranks:,}: they would take about {total}, by what the first {SECOND:,} have taken, and "
                f"{room} are available; {COLUMNAR}"
            )
            self._kernel.failure = self._kernel.failure or error  # no rank's: none has done anything wrong
            raise GreenletExit
        if self._ranks >= NOTED and self.note is not None:
            self.note(
                f"{self._ranks:,} ranks will take about {total} of {room}; `spawnsim columnar` times policies on so "
                "many as rows of arrays"
            )
