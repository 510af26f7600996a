"""Estimates the memory of very large runs from their first ranks, and rejects a run before memory is used up.

The operating system kills a process that exceeds the available memory, and the last records are lost. Ranks begin one
after another, each at its first call once the previous rank waits; so when the thousandth begins, the memory of nine
hundred programs is known. Memory that a program allocates after its first wait is not included.
"""

from __future__ import annotations

from collections.abc import Callable

from greenlet import GreenletExit

from spawnsim.errors import ParameterError
from spawnsim.scenario import COLUMNAR, MANY, available_B
from spawnsim.virtual.engine.kernel import Kernel, Program
from spawnsim.virtual.interpreter import resident_B

# The ranks at whose begin memory is measured. All ranks share the data that the first ones load, such as packages.
FIRST, SECOND = 100, 1000
NOTED = 100_000  # number of ranks from which the estimate is reported


class MemoryEstimate:
    """Measures memory when two of a run's ranks begin; `note` receives a sentence about runs of very many ranks."""

    def __init__(self, kernel: Kernel, ranks: int) -> None:
        self._kernel, self._ranks, self._before_B = kernel, ranks, 0
        self.note: Callable[[str], None] | None = None

    def around(self, rank: int, program: Program) -> Program:
        """Return a rank's program; for one of the two ranks, it measures memory first."""
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
        """End the run if the remaining ranks will not fit in memory."""
        taken, left = resident_B(), available_B()
        more = max(taken - self._before_B, 0) / (SECOND - FIRST) * (self._ranks - SECOND)
        total, room = f"{(taken + more) / 1e9:,.1f} GB", f"{(taken + left) / 1e9:,.1f} GB"
        if more > left:
            error = ParameterError(
                f"ranks={self._ranks:,}: they would need about {total}, estimated from the first {SECOND:,}, but only "
                f"{room} are available; {COLUMNAR}"
            )
            self._kernel.failure = self._kernel.failure or error  # not a rank's error: no rank has failed
            raise GreenletExit
        if self._ranks >= NOTED and self.note is not None:
            self.note(
                f"{self._ranks:,} ranks will need about {total} of {room}; `spawnsim columnar` times policies on "
                "that many as rows of arrays"
            )
