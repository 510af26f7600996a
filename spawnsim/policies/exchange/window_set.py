"""All windows of one rank: their configuration, the board of metrics, and their collective creation and freeing.

The board is in one rank's window: each rank writes its line, any rank reads all lines, and none waits. A line holds its
rank's last reports, so that ranks can be compared at one iteration (`rules/selection.py`): 16 in small groups, fewer in
large ones, so that reading the board takes less than 40 kB up to 1,000 ranks. If the holder of the board does not
answer in time, the next rank's board replaces it, and then the board of the rank after it. A rank that moves marks its
line on the old board, so that no rank continues with old lines if a holder was only slow. Without remaining deputies
the board reads as empty: its loss costs the metrics, not the training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from spawnsim.comm import Comm, Request
from spawnsim.comm.objects import DIED
from spawnsim.errors import ParameterError, RankFailed, Revoked, Timeout
from spawnsim.policies.exchange.endpoint import Attendance, shown
from spawnsim.policies.exchange.snapshot_window import MOST_SLOTS, SnapshotWindow
from spawnsim.policies.rules.cadence import Deadline, Every, Fixed, as_deadline
from spawnsim.policies.rules.selection import NEVER, ReportTable, check_choice
from spawnsim.policies.state.codecs import Codec
from spawnsim.policies.state.layout import Tensors
from spawnsim.policies.state.snapshot import Compression

# Format of a line: two numbers, then pairs of an iteration + 1 (0: none) and its metric.
BUSY, WRITTEN, REPORTS = 0, 1, 2
HERE, MOVED, FINISHED = 1.0, 2.0, 3.0  # values of WRITTEN in a line that is not blank
DEPUTIES = 2
MOST_REPORTS, ALL_REPORTS = 16, 2048  # per line; per board
PATIENCE = 4  # reports of this rank after which an unchanged line counts as a dead rank's


class MetricsBoard:
    """The board of a group, held by one of its ranks. Construction is collective.

    `holder` is the current holder's rank; `moved` whether this rank has left the first holder, `lost` all holders.
    """

    def __init__(self, comm: Comm, *, holder: int = 0, timeout_s: float = 30.0) -> None:
        self.comm, self.holder, self.timeout_s = comm, holder, timeout_s
        self.moved = self.lost = False
        self._size, me = comm.Get_size(), comm.Get_rank()
        self._deputies = [(holder + step) % self._size for step in range(1, min(DEPUTIES + 1, self._size))]
        holding = me == holder or me in self._deputies
        # The whole board stays below 40 kB up to 1,000 ranks: every read transfers all of it.
        self._kept = max(2, min(MOST_REPORTS, ALL_REPORTS // self._size))
        self._mine = np.zeros(REPORTS + 2 * self._kept)
        self.reports = 0  # number of reports of this rank
        self._nbytes = self._size * self._mine.nbytes
        # This rank's copy of the lines, of the size of the group: created at the first read, because of 100,000 ranks
        # hardly any ever reads. A new board starts empty: a line read before (`_known`) stays valid until its owner
        # writes again.
        self._lines: NDArray[np.float64]
        self._known: NDArray[np.float64] | None = None
        # Newest iteration at the latest read, and this rank's report count when it changed.
        self._newest: NDArray[np.int64]
        self._since: NDArray[np.int64]
        nbytes = self._nbytes + 8 if holding else 0  # the lines, and the verdict
        self._win: Any = cast("Any", comm).Win.Allocate(nbytes, 1, comm=comm)
        # One epoch for the board's whole life: Lock and Unlock around each report would cost two round trips.
        self._win.Lock_all()
        self._sent: Request | None = None
        if me == holder:
            # The holder puts to itself, because its part must be written and visible to all before the barrier.
            self._put(np.zeros(self._nbytes // 8 + 1), 0)
            self._win.Flush(holder)
        elif holding:
            np.frombuffer(self._win.tomemory(), np.uint8)[:] = 0
            self._win.Sync()
        comm.Barrier()

    def report(self, metric: float, iteration: int) -> None:
        """Write a report to this rank's line, over the oldest; it may still be under way on return."""
        # Only the changed values are written, a few contiguous bytes, so that no reader gets half a report.
        place = REPORTS + 2 * (self.reports % self._kept)
        self._mine[place : place + 2] = iteration + 1, metric
        self._mine[WRITTEN] = HERE
        # The first report writes the whole line: it is not on a deputy's board yet.
        if not self.reports:
            self._write(0, self._mine.size)
        else:
            self._write(place, place + 2)
        self.reports += 1

    def mark(self, *, busy: bool) -> None:
        """Mark in this rank's line whether it is being replaced; before the first report there is no such line."""
        self._mine[BUSY] = busy
        if self.reports:
            self._write(0, REPORTS)

    def finish(self) -> None:
        """Mark in this rank's line that it reports no more, and is not dead."""
        self._mine[WRITTEN] = FINISHED
        self.mark(busy=False)

    def read(self) -> ReportTable:
        """Return the lines of all ranks that have written one; this rank's line as it is locally."""
        if self._known is None:
            shape = (self._size, self._mine.size)
            self._lines, self._known = np.zeros(shape), np.zeros(shape)
            self._newest, self._since = np.full(self._size, NEVER), np.zeros(self._size, np.int64)
        # Again if other ranks have moved: a rank that stayed would continue with lines that no rank updates.
        while self._try(self._read) and (self._lines[:, WRITTEN] == MOVED).any():
            self._move()
        lines = self._known
        if self.lost:
            lines[:] = 0
        else:  # on a deputy's board some lines may be missing
            there = self._lines[:, WRITTEN] > 0
            lines[there] = self._lines[there]
            if self.reports:
                # This rank's line is taken from local memory: the one on the board may still be under way.
                lines[self.comm.Get_rank()] = self._mine
        iterations, metrics = _newest_first(lines[:, REPORTS:].reshape(self._size, self._kept, 2))
        changed = iterations[:, 0] != self._newest
        self._newest = iterations[:, 0].copy()
        self._since[changed] = self.reports
        # Counted in this rank's reports, not in seconds: ranks that train slowly report slowly, and are not dead.
        finished = lines[:, WRITTEN] == FINISHED
        alive = finished | (self.reports - self._since < PATIENCE)
        every = ReportTable(np.arange(self._size), iterations, metrics, lines[:, BUSY] > 0, alive, finished)
        return every.of(lines[:, WRITTEN] > 0)

    def agree(self, verdict: int) -> int:
        """Return the first verdict (not 0) of any rank: all ranks get the same one."""
        first, none, mine = (np.asarray([number], np.int64) for number in (0, 0, verdict))
        self._win.Compare_and_swap(mine, none, first, self.holder, self._nbytes)
        self._win.Flush(self.holder)
        return int(first[0]) or verdict

    def _write(self, first: int, last: int) -> None:
        at = self.comm.Get_rank() * self._mine.nbytes + first * self._mine.itemsize
        # A copy, because the line changes with the next report while this one may still be under way.
        self._try(lambda: self._put(self._mine[first:last].copy(), at))

    def _put(self, line: NDArray[np.float64], at: int) -> None:
        if self._sent is not None:
            # One access at a time keeps the order: an older report must not overwrite a newer one.
            self._sent.Wait()  # the previous access completed long ago, unless the holder is gone
        self._sent = self._win.Rput(line.view(np.uint8), self.holder, at)

    def _read(self) -> None:
        lines = self._lines = np.zeros_like(self._lines)  # a late answer goes to the old array
        self._win.Rget(lines.view(np.uint8), self.holder, 0).Wait()

    def _try(self, access: Callable[[], None]) -> bool:
        """Execute an access; move to the next board if its holder does not answer. False if none remains."""
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
        """Switch to the next board, and mark the line on the old one for its readers, in case its holder recovers."""
        gone = self._mine.copy()
        gone[WRITTEN] = MOVED
        try:
            # Dropped before the write, because `_put` would wait for it first.
            self._sent = None  # the access under way may never complete
            self._put(gone, self.comm.Get_rank() * gone.nbytes)
        except RankFailed:
            pass
        self._sent = None
        self.moved, self.lost = True, not self._deputies
        if not self.lost:
            self.holder = self._deputies.pop(0)
            if self.reports:
                self._write(0, self._mine.size)

    def free(self) -> None:
        """Free the window; collective."""
        self._win.Unlock_all()
        self._win.Free()


def _newest_first(pairs: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return iterations and metrics of pairs, shape (ranks, reports, 2), each row from its newest report on."""
    order = np.argsort(-pairs[:, :, 0], axis=1, kind="stable")
    iterations, metrics = (np.take_along_axis(pairs[:, :, column], order, axis=1) for column in (0, 1))
    return iterations.astype(np.int64) - 1, metrics


WindowLayout = Literal["flat", "per_parameter"]
FREE, KEEP = 1, 2


@dataclass(frozen=True, slots=True)
class WindowOptions:
    """Options of windows: how snapshots are published and read.

    Args:
        layout: "flat": one window for everything, any mix of dtypes; "per_parameter": one window per tensor.
        publish_every: iterations between snapshots (None: `average_every`); a replaced rank publishes immediately.
        slots: number of snapshots that a rank keeps published, 2 to 9, each as large as its state. Two suffice unless
            the rank publishes during a read: if a donor answers only between its steps, and publishes in each, use 4.
        deadline: seconds that a reader waits for its donors; None learns from past reads; a function creates a
            deadline.
        board_timeout_s: seconds that a reader waits for the holder of the board.
        holder: the rank of the group (in a smaller group, the last) whose window holds all metrics; if it does not
            answer, the next rank takes over, and then the one after.
        shutdown_timeout_s: seconds for which `shutdown` waits for a rank that does not answer. It waits without limit
            for a rank that still trains, and that rank may read this rank's last snapshot.
        checksum: check the weights too, at about 4 GB/s (headers are always checked): data damaged under way are
            refused, counted ("unreadable") and read again.

    Raises:
        ParameterError: an argument is out of range.
    """

    layout: WindowLayout = "flat"
    publish_every: int | None = None
    slots: int = 2
    deadline: float | Callable[[], Deadline] | None = None
    board_timeout_s: float = 30.0
    holder: int = 0
    shutdown_timeout_s: float = 5.0
    checksum: bool = True

    def __post_init__(self) -> None:
        check_choice("layout", self.layout, get_args(WindowLayout))
        if self.publish_every is not None:
            Every(self.publish_every)
        if self.slots not in range(2, MOST_SLOTS + 1):
            raise ParameterError(f"slots={self.slots!r}: give 2 to {MOST_SLOTS}")
        if isinstance(self.deadline, (int, float)):
            Fixed(self.deadline)
        if self.holder < 0:
            raise ParameterError(f"holder={self.holder}: give a rank of the group")
        for name in ("board_timeout_s", "shutdown_timeout_s"):
            if not getattr(self, name) > 0:
                raise ParameterError(f"{name}={getattr(self, name)!r}: give seconds above 0")

    def open(self, comm: Comm, live: Tensors, compression: str | Codec | None = None) -> OpenWindows:
        """Create the windows; collective over the communicator.

        Args:
            comm: the communicator.
            live: this rank's tensors by name, which determine the windows' sizes.
            compression: codec of the published snapshots.

        Returns:
            The windows, without a published snapshot.
        """
        deadline = self.deadline() if callable(self.deadline) else as_deadline(self.deadline)
        if name := Compression(compression).name:  # needed by a replay
            comm.record.event("transport", compression=name)
        apart = self.layout == "per_parameter"
        snapshots = SnapshotWindow(
            comm, live, deadline, per_parameter=apart, compression=compression, slots=self.slots, checksum=self.checksum
        )  # fmt: skip
        holder = min(self.holder, comm.Get_size() - 1)  # smaller after recoveries
        return OpenWindows(comm, snapshots, MetricsBoard(comm, holder=holder, timeout_s=self.board_timeout_s))


Windows = WindowOptions  # earlier name


@dataclass(frozen=True, slots=True)
class OpenWindows:
    """A rank's windows on one communicator."""

    comm: Comm
    snapshots: SnapshotWindow
    board: MetricsBoard

    def close(self, patience_s: float) -> str:
        """Free the windows once all ranks of the group have arrived; return why they stay, "" if they are freed.

        Until then this rank's last snapshot can be read. Freeing is collective, so if a rank does not arrive the
        windows stay; a rank that does not answer is waited for up to `patience_s`.
        """
        # Ranks give up at different times, so some may have seen all ranks arrive after other ranks gave up, and a
        # collective of only a part of the group would never end. The first verdict is therefore put on the board by
        # compare-and-swap, and all ranks adopt it: either all free or none.
        try:
            self.board.finish()
            if self.board.moved:  # the other ranks will not see all arrive, and give up as well
                return "the rank that holds the metrics did not answer"
            absent = Attendance(self.comm, patience_s).complete()
            if self.board.agree(KEEP if absent else FREE) != FREE:
                return shown(absent) if absent else "another rank has waited for a slot without success"
            # An explicit deadline, because a verdict may be lost under way.
            with self.comm.clock.deadline(self.comm.clock.limit_s()):
                self.snapshots.withdraw()
                self.snapshots.free()
                self.board.free()
        except RankFailed as error:  # also if a rank dies while all free
            return shown(dict.fromkeys(error.ranks, DIED))
        except (Timeout, Revoked) as error:
            return str(error)
        return ""
