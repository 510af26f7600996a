"""A board of metrics in one rank's window: each rank writes its line, any rank reads them all, nobody waits.

This room knows a window and reports; it knows no model. If the holder of the board does not answer in time, the board
is given up and reads as empty: its loss costs the metrics, not the training.
"""

from __future__ import annotations

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
        nbytes = self._size * LINE_NBYTES if comm.Get_rank() == holder else 0
        self._win: Any = cast("Any", comm).Win.Allocate(nbytes, 1, comm=comm)
        self._win.Lock_all()
        self._sent: Request | None = None
        if comm.Get_rank() == holder:
            self._put(np.zeros(4 * self._size), 0)
            self._win.Flush(holder)
        comm.Barrier()

    def write(self, metric: float, iteration: int, *, busy: bool = False) -> None:
        """Write the own line; it is on its way when this returns."""
        # the line before this one arrived long ago, unless the holder is gone
        if not self.lost and (self._sent is None or self._over(self._sent)):
            self._put(np.asarray([metric, iteration, busy, 1.0]), self.comm.Get_rank() * LINE_NBYTES)

    def read(self) -> dict[int, tuple[Report, bool]]:
        """Return each rank's report, and whether it is being replaced; only ranks that have written."""
        if self.lost:
            return {}
        lines = np.zeros((self._size, 4))
        target = [0, lines.nbytes, BYTE]
        if not self._over(self._win.Rget([lines.view(np.uint8), lines.nbytes, BYTE], self.holder, target)):
            return {}
        return {
            rank: (Report(rank, float(line[METRIC])), bool(line[BUSY]))
            for rank, line in enumerate(lines)
            if line[WRITTEN]
        }

    def _put(self, line: NDArray[np.float64], at: int) -> None:
        target = [at, line.nbytes, BYTE]
        self._sent = self._win.Rput([line.view(np.uint8), line.nbytes, BYTE], self.holder, target)

    def _over(self, request: Request) -> bool:
        """Wait for a request; give the board up if it takes too long."""
        try:
            with self.comm.clock.deadline(self.timeout_s):
                request.Wait()
        except (Timeout, RankFailed):
            self.lost = True
        return not self.lost

    def free(self) -> None:
        """Give the window up; collective."""
        self._win.Unlock_all()
        self._win.Free()
