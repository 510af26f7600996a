"""A board of metrics in one rank's window: each rank writes its line, any rank reads them all, nobody waits.

This room knows a window and reports; it knows no model. If the holder of the board does not answer in time, the board
is given up and reads as empty: its loss costs the metrics, not the training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from spawnsim.comm import BYTE, Comm, Request
from spawnsim.errors import RankFailed, Timeout
from spawnsim.policies.selection import Report

LINE_NBYTES = 32
METRIC, ITERATION, BUSY, WRITTEN = range(4)


class Board:
    """The board of a group, held by one of its ranks. Making it is collective."""

    def __init__(self, comm: Comm, *, holder: int = 0, timeout_s: float = 30.0) -> None:
        self.comm, self.holder, self.timeout_s = comm, holder, timeout_s
        self.lost = False
        self._size = comm.Get_size()
        nbytes = (
            self._size * LINE_NBYTES + 8 if comm.Get_rank() == holder else 0
        )  # the lines, and the verdict
        self._win: Any = cast("Any", comm).Win.Allocate(nbytes, 1, comm=comm)
        self._win.Lock_all()
        self._sent: Request | None = None
        if comm.Get_rank() == holder:
            self._put(np.zeros(4 * self._size + 1), 0)
            self._win.Flush(holder)
        comm.Barrier()

    def write(self, metric: float, iteration: int, *, busy: bool = False) -> None:
        """Write the own line; it is on its way when this returns."""
        line = np.asarray([metric, iteration, busy, 1.0])
        self._try(lambda: self._put(line, self.comm.Get_rank() * LINE_NBYTES))

    def read(self) -> dict[int, tuple[Report, bool]]:
        """Return each rank's report, and whether it is being replaced; only ranks that have written."""
        lines = np.zeros((self._size, 4))
        if not self._try(lambda: self._get(lines)):
            return {}
        return {
            rank: (Report(rank, float(line[METRIC])), bool(line[BUSY]))
            for rank, line in enumerate(lines)
            if line[WRITTEN]
        }

    def agree(self, verdict: int) -> int:
        """Return the verdict (not 0) of the rank that gave one first: all ranks get the same."""
        first, none, mine = (np.asarray([number], np.int64) for number in (0, 0, verdict))
        self._win.Compare_and_swap(mine, none, first, self.holder, self._size * LINE_NBYTES)
        self._win.Flush(self.holder)
        return int(first[0]) or verdict

    def _put(self, line: NDArray[np.float64], at: int) -> None:
        if self._sent is not None:
            self._sent.Wait()  # the line before this one arrived long ago, unless the holder is gone
        target = [at, line.nbytes, BYTE]
        self._sent = self._win.Rput([line.view(np.uint8), line.nbytes, BYTE], self.holder, target)

    def _get(self, lines: NDArray[np.float64]) -> None:
        target = [0, lines.nbytes, BYTE]
        self._win.Rget([lines.view(np.uint8), lines.nbytes, BYTE], self.holder, target).Wait()

    def _try(self, access: Callable[[], None]) -> bool:
        """Carry out an access; give the board up if its holder does not answer."""
        if not self.lost:
            try:
                with self.comm.clock.deadline(self.timeout_s):
                    access()
            except (Timeout, RankFailed):
                self.lost = True
        return not self.lost

    def free(self) -> None:
        """Give the window up; collective."""
        self._win.Unlock_all()
        self._win.Free()
