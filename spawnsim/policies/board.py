"""A board of metrics in one rank's window: each rank writes its line, any rank reads them all, nobody waits.

If the holder of the board does not answer in time, the next rank's board takes its place, and then the one's after it.
Who moves says so in its line of the board that it leaves, so that nobody stays behind with old lines when a holder was
only slow. When no deputy is left the board reads as empty: its loss costs the metrics, not the training.

This room knows a window and reports; it knows no model.
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
HERE, MOVED = 1.0, 2.0  # what WRITTEN says, of a line that is not blank
DEPUTIES = 2


class Board:
    """The board of a group, held by one of its ranks. Making it is collective.

    `holder` is the rank that holds it now; `moved` whether this rank has left the first holder, `lost` all of them.
    """

    def __init__(self, comm: Comm, *, holder: int = 0, timeout_s: float = 30.0) -> None:
        self.comm, self.holder, self.timeout_s = comm, holder, timeout_s
        self.moved = self.lost = False
        self._size, me = comm.Get_size(), comm.Get_rank()
        self._deputies = [(holder + step) % self._size for step in range(1, min(DEPUTIES + 1, self._size))]
        holding = me == holder or me in self._deputies
        nbytes = self._size * LINE_NBYTES + 8 if holding else 0  # the lines, and the verdict
        self._win: Any = cast("Any", comm).Win.Allocate(nbytes, 1, comm=comm)
        self._win.Lock_all()
        self._sent: Request | None = None
        self._line = np.asarray([np.nan, 0, 0, 0])
        self._lines = np.zeros((self._size, 4))
        if me == holder:
            self._put(np.zeros(4 * self._size + 1), 0)
            self._win.Flush(holder)
        elif holding:
            np.frombuffer(self._win.tomemory(), np.uint8)[:] = 0
            self._win.Sync()
        comm.Barrier()

    def write(self, metric: float, iteration: int, *, busy: bool = False) -> None:
        """Write the own line; it is on its way when this returns."""
        self._line = np.asarray([metric, iteration, busy, HERE])
        self._try(self._write)

    def read(self) -> dict[int, tuple[Report, bool]]:
        """Return each rank's report, and whether it is being replaced; only ranks that have written."""
        while self._try(self._read) and (self._lines[:, WRITTEN] == MOVED).any():
            self._move()
        if self.lost:
            return {}
        return {
            rank: (Report(rank, float(line[METRIC])), bool(line[BUSY]))
            for rank, line in enumerate(self._lines)
            if line[WRITTEN]
        }

    def agree(self, verdict: int) -> int:
        """Return the verdict (not 0) of the rank that gave one first: all ranks get the same."""
        first, none, mine = (np.asarray([number], np.int64) for number in (0, 0, verdict))
        self._win.Compare_and_swap(mine, none, first, self.holder, self._size * LINE_NBYTES)
        self._win.Flush(self.holder)
        return int(first[0]) or verdict

    def _write(self) -> None:
        self._put(self._line, self.comm.Get_rank() * LINE_NBYTES)

    def _put(self, line: NDArray[np.float64], at: int) -> None:
        if self._sent is not None:
            self._sent.Wait()  # the line before this one arrived long ago, unless the holder is gone
        target = [at, line.nbytes, BYTE]
        self._sent = self._win.Rput([line.view(np.uint8), line.nbytes, BYTE], self.holder, target)

    def _read(self) -> None:
        lines = self._lines = np.zeros((self._size, 4))  # not the last ones: a late answer goes there
        target = [0, lines.nbytes, BYTE]
        self._win.Rget([lines.view(np.uint8), lines.nbytes, BYTE], self.holder, target).Wait()

    def _try(self, access: Callable[[], None]) -> bool:
        """Carry out an access; move to the next board if its holder does not answer. False when none is left."""
        while not self.lost:
            try:
                with self.comm.clock.deadline(self.timeout_s):
                    access()
            except (Timeout, RankFailed):
                self._move()
            else:
                return True
        return False

    def _move(self) -> None:
        """Leave this board, which others learn when its holder comes back, and write the own line to the next."""
        gone = self._line.copy()
        gone[WRITTEN] = MOVED
        try:
            self._sent = None  # what is under way there may take for ever
            self._put(gone, self.comm.Get_rank() * LINE_NBYTES)
        except RankFailed:
            pass
        self._sent = None
        self.moved, self.lost = True, not self._deputies
        if not self.lost:
            self.holder = self._deputies.pop(0)
            if self._line[WRITTEN]:
                self._try(self._write)

    def free(self) -> None:
        """Give the window up; collective."""
        self._win.Unlock_all()
        self._win.Free()
