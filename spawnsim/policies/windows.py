"""All the windows of one rank: how they are configured, and making them together.

This room knows the shelf (models) and the board (metrics) and that making them is collective; it decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from spawnsim.comm import Comm
from spawnsim.errors import ParameterError, RankFailed, Revoked, Timeout
from spawnsim.policies.board import Board
from spawnsim.policies.cadence import Every
from spawnsim.policies.codecs import Codec
from spawnsim.policies.compression import Compression
from spawnsim.policies.deadlines import Deadline, Fixed, as_deadline
from spawnsim.policies.selection import Report
from spawnsim.policies.shelf import Shelf
from spawnsim.policies.slots import MOST_SLOTS
from spawnsim.policies.state import Tensors

WindowLayout = Literal["flat", "per_parameter"]
FREE, KEEP = 1, 2
WINDOW_LAYOUTS: tuple[str, ...] = ("flat", "per_parameter")


@dataclass(frozen=True, slots=True)
class Windows:
    """How state is laid out and read.

    `layout`: "flat" is one window for everything, any mix of dtypes; "per_parameter" one window per tensor.
    `publish_every`: iterations between snapshots (None: `average_every`); a replaced rank publishes at once.
    `slots`: snapshots that a rank keeps laid out, 2 to 9, each as large as its state. Two will do unless it publishes
    while a read is under way: where a donor answers between its steps alone, and publishes in each, give 4.
    `deadline`: seconds that a reader gives its donors; None learns from past reads.
    `board_timeout_s`: seconds that it gives the rank which holds the board.
    `holder`: the rank of the group (of a smaller one, the last) whose window holds everybody's metric; if it does not
    answer, the next takes over, and then the one after. `shutdown_timeout_s`: how long `shutdown` waits for the others.
    `checksum`: check the weights, too, at about 4 GB/s (headers always are): what was damaged on its way is refused,
    counted ("unreadable") and read again.
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
        if self.layout not in WINDOW_LAYOUTS:
            raise ParameterError(f"layout={self.layout!r}: choose one of {', '.join(WINDOW_LAYOUTS)}")
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

    def open(self, comm: Comm, live: Tensors, compression: str | Codec | None = None) -> Opened:
        """Make the windows; collective over the communicator."""
        deadline = self.deadline() if callable(self.deadline) else as_deadline(self.deadline)
        if name := Compression(compression).name:  # a replay needs it
            comm.record.event("transport", compression=name)
        apart = self.layout == "per_parameter"
        shelf = Shelf(
            comm, live, deadline, per_parameter=apart, compression=compression, slots=self.slots, checksum=self.checksum
        )  # fmt: skip
        holder = min(self.holder, comm.Get_size() - 1)  # after recoveries groups are smaller
        return Opened(comm, shelf, Board(comm, holder=holder, timeout_s=self.board_timeout_s))


@dataclass(frozen=True, slots=True)
class Opened:
    """A rank's windows on one communicator."""

    comm: Comm
    shelf: Shelf
    board: Board

    def _all_come(self, timeout_s: float) -> bool:
        try:
            with self.comm.clock.deadline(timeout_s):
                return self.comm.Ibarrier().Wait()
        except (Timeout, RankFailed):
            return False

    def close(self, timeout_s: float) -> bool:
        """Offer nothing any more; free the windows if all ranks of the group come to do so within the time-out.

        Freeing is collective, so a rank that does not come would hold up the others: then the windows stay. Whether all
        have come or somebody's time was up first is decided once for all, on the board: either all free or none.
        """
        try:
            self.shelf.withdraw()
            if self.board.moved:  # without a word to the others, who will not see all come
                return False
            if self.board.agree(FREE if self._all_come(timeout_s) else KEEP) != FREE:
                return False
            with self.comm.clock.deadline(
                self.comm.clock.limit_s()
            ):  # stated, for a verdict may be lost on its way
                self.shelf.free()
                self.board.free()
        except (Timeout, RankFailed, Revoked):  # also of a rank that dies while all free
            return False
        return True


def span(reports: list[Report]) -> tuple[float, float]:
    """Return the lowest and highest finite metric; NaN if there is none."""
    finite = [report.metric for report in reports if math.isfinite(report.metric)]
    return (min(finite), max(finite)) if finite else (math.nan, math.nan)
