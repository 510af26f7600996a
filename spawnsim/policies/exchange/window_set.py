"""All the windows of one rank: how they are configured, the board of metrics, and making and freeing them together.

The board lies in one rank's window: each rank writes its line, any rank reads them all, none waits. A line holds its
rank's last reports, so that ranks can be compared at one iteration (`rules/selection.py`): 16 in small groups, fewer
in large ones, so that reading the board takes less than 40 kB up to 1,000 ranks. If the holder of the board does not
answer in time, the next rank's board takes its place, and then that of the rank after it. A rank that moves says so in
its line of the board that it leaves, so that no rank goes on with old lines when a holder was only slow. When no deputy
is left the board reads as empty: its loss costs the metrics, not the training.
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

# Of a line: two numbers, then pairs of an iteration + 1 (0: none) and its metric.
BUSY, WRITTEN, REPORTS = 0, 1, 2
HERE, MOVED, FINISHED = 1.0, 2.0, 3.0  # what WRITTEN says, of a line that is not blank
DEPUTIES = 2
MOST_REPORTS, ALL_REPORTS = 16, 2048  # of a line; of a board
PATIENCE = 4  # reports of this rank after which a line that has not changed is taken for that of a dead rank


class MetricsBoard:
    """The board of a group, held by one of its ranks. Making it is collective.

    `holder` is the rank that holds it now; `moved` whether this rank has left the first holder, `lost` all of them.
    """

    def __init__(self, comm: Comm, *, holder: int = 0, timeout_s: float = 30.0) -> None:
        self.comm, self.holder, self.timeout_s = comm, holder, timeout_s
        self.moved = self.lost = False
        self._size, me = comm.Get_size(), comm.Get_rank()
        self._deputies = [(holder + step) % self._size for step in range(1, min(DEPUTIES + 1, self._size))]
        holding = me == holder or me in self._deputies
        # The whole board stays below 40 kB up to 1,000 ranks: every look reads all of it.
        self._kept = max(2, min(MOST_REPORTS, ALL_REPORTS // self._size))
        self._mine = np.zeros(REPORTS + 2 * self._kept)
        self.reports = 0  # of this rank
        self._nbytes = self._size * self._mine.nbytes
        # What this rank knows of the others, as long as there are ranks: made when it first looks, for of 100,000 ranks
        # hardly any ever does. A board that moved begins empty: what was read before (`_known`) still counts until
        # its owner writes again.
        self._lines: NDArray[np.float64]
        self._known: NDArray[np.float64] | None = None
        # As of the latest look, and how many reports of this rank ago it changed.
        self._newest: NDArray[np.int64]
        self._since: NDArray[np.int64]
        nbytes = self._nbytes + 8 if holding else 0  # the lines, and the verdict
        self._win: Any = cast("Any", comm).Win.Allocate(nbytes, 1, comm=comm)
        # One epoch for the board's whole life: Lock and Unlock around each report would cost two round trips.
        self._win.Lock_all()
        self._sent: Request | None = None
        if me == holder:
            # The holder puts to itself, since its part must have been written before the barrier for all to see.
            self._put(np.zeros(self._nbytes // 8 + 1), 0)
            self._win.Flush(holder)
        elif holding:
            np.frombuffer(self._win.tomemory(), np.uint8)[:] = 0
            self._win.Sync()
        comm.Barrier()

    def report(self, metric: float, iteration: int) -> None:
        """Write a report to this rank's line, over the oldest; it is on its way when this returns."""
        # Only what has changed is written, a few bytes in a row, so that no reader gets half of it.
        place = REPORTS + 2 * (self.reports % self._kept)
        self._mine[place : place + 2] = iteration + 1, metric
        self._mine[WRITTEN] = HERE
        # The first report writes the whole line: on a deputy's board it is not there yet.
        if not self.reports:
            self._write(0, self._mine.size)
        else:
            self._write(place, place + 2)
        self.reports += 1

    def mark(self, *, busy: bool) -> None:
        """Say in this rank's line that this rank is being replaced, or no longer; without a report there is no line."""
        self._mine[BUSY] = busy
        if self.reports:
            self._write(0, REPORTS)

    def finish(self) -> None:
        """Say in this rank's line that it reports no more, and is not dead."""
        self._mine[WRITTEN] = FINISHED
        self.mark(busy=False)

    def read(self) -> ReportTable:
        """Return the lines of the ranks that have written one; this rank's as it is here."""
        if self._known is None:
            shape = (self._size, self._mine.size)
            self._lines, self._known = np.zeros(shape), np.zeros(shape)
            self._newest, self._since = np.full(self._size, NEVER), np.zeros(self._size, np.int64)
        # Again if others have moved on: a rank that stayed would go on with lines that nobody writes any more.
        while self._try(self._read) and (self._lines[:, WRITTEN] == MOVED).any():
            self._move()
        lines = self._known
        if self.lost:
            lines[:] = 0
        else:  # on a deputy's board, some have not written theirs yet
            there = self._lines[:, WRITTEN] > 0
            lines[there] = self._lines[there]
            if self.reports:
                # Its own line is taken from here: the one on the board may still be under way.
                lines[self.comm.Get_rank()] = self._mine
        iterations, metrics = _newest_first(lines[:, REPORTS:].reshape(self._size, self._kept, 2))
        changed = iterations[:, 0] != self._newest
        self._newest = iterations[:, 0].copy()
        self._since[changed] = self.reports
        # Counted in own reports, not in seconds: ranks that train slowly report slowly, and are not dead.
        finished = lines[:, WRITTEN] == FINISHED
        alive = finished | (self.reports - self._since < PATIENCE)
        every = ReportTable(np.arange(self._size), iterations, metrics, lines[:, BUSY] > 0, alive, finished)
        return every.of(lines[:, WRITTEN] > 0)

    def agree(self, verdict: int) -> int:
        """Return the verdict (not 0) of the rank that gave one first: all ranks get the same."""
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
            # One access at a time keeps the order: a newer report must not be overwritten by an older one.
            self._sent.Wait()  # the line before this one arrived long ago, unless the holder is gone
        self._sent = self._win.Rput(line.view(np.uint8), self.holder, at)

    def _read(self) -> None:
        lines = self._lines = np.zeros_like(self._lines)  # not the last ones: a late answer goes there
        self._win.Rget(lines.view(np.uint8), self.holder, 0).Wait()

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
        """Switch to the next board. If this board's holder comes back, its readers see that this rank has moved."""
        gone = self._mine.copy()
        gone[WRITTEN] = MOVED
        try:
            # Forgotten before the write, since `_put` would wait for it first.
            self._sent = None  # what is under way there may take for ever
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
        """Give the window up; collective."""
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
    """How snapshots are published and read.

    Args:
        layout: "flat" is one window for everything, any mix of dtypes; "per_parameter" one window per tensor.
        publish_every: iterations between snapshots (None: `average_every`); a replaced rank publishes at once.
        slots: snapshots that a rank keeps published, 2 to 9, each as large as its state. Two will do unless it
            publishes while a read is under way: where a donor answers only between its steps, and publishes in each,
            give 4.
        deadline: seconds that a reader gives its donors; None learns from past reads; a function makes a deadline.
        board_timeout_s: seconds that a reader gives the rank which holds the board.
        holder: the rank of the group (of a smaller one, the last) whose window holds all metrics; if it does not
            answer, the next takes over, and then the one after.
        shutdown_timeout_s: seconds for which `shutdown` waits for a rank that does not answer. One that still trains is
            waited for as long as it takes, and may read this rank's last snapshot.
        checksum: check the weights too, at about 4 GB/s (headers always are): what was damaged on its way is refused,
            counted ("unreadable") and read again.

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
        """Make the windows; collective over the communicator.

        Args:
            comm: the communicator.
            live: this rank's tensors by name: what the windows must have room for.
            compression: of what is published.

        Returns:
            The windows, with nothing published.
        """
        deadline = self.deadline() if callable(self.deadline) else as_deadline(self.deadline)
        if name := Compression(compression).name:  # a replay needs it
            comm.record.event("transport", compression=name)
        apart = self.layout == "per_parameter"
        snapshots = SnapshotWindow(
            comm, live, deadline, per_parameter=apart, compression=compression, slots=self.slots, checksum=self.checksum
        )  # fmt: skip
        holder = min(self.holder, comm.Get_size() - 1)  # after recoveries groups are smaller
        return OpenWindows(comm, snapshots, MetricsBoard(comm, holder=holder, timeout_s=self.board_timeout_s))


Windows = WindowOptions  # the name that it had first


@dataclass(frozen=True, slots=True)
class OpenWindows:
    """A rank's windows on one communicator."""

    comm: Comm
    snapshots: SnapshotWindow
    board: MetricsBoard

    def close(self, patience_s: float) -> str:
        """Free the windows once all ranks of the group come to do so; return why they stay, "" if they are freed.

        Until then this rank's last snapshot can be read. Freeing is collective, so where a rank does not come the
        windows stay: one that does not answer is waited for as long as `patience_s`.
        """
        # Ranks give up at different moments, so some may have seen all come where others have given up, and a
        # collective of a part of the group would never end. The first verdict is therefore put on the board by
        # compare-and-swap, and all take that one: either all free or none.
        try:
            self.board.finish()
            if self.board.moved:  # the others will not see all come, and give up as well
                return "the rank that holds the metrics did not answer"
            absent = Attendance(self.comm, patience_s).complete()
            if self.board.agree(KEEP if absent else FREE) != FREE:
                return shown(absent) if absent else "another rank has waited for one in vain"
            # Stated, for a verdict may be lost on its way.
            with self.comm.clock.deadline(self.comm.clock.limit_s()):
                self.snapshots.withdraw()
                self.snapshots.free()
                self.board.free()
        except RankFailed as error:  # also of a rank that dies while all free
            return shown(dict.fromkeys(error.ranks, DIED))
        except (Timeout, Revoked) as error:
            return str(error)
        return ""
