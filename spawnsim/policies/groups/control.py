"""One averaging step as its caller sees it: while it is under way, and what has come of it.

This room knows stages and results; what drives the step is handed in as functions.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from enum import Enum

from spawnsim.errors import ParameterError, Timeout, UsageError, WorldError
from spawnsim.policies.groups.results import Averaged


class AveragingFailed(WorldError):
    """An averaging step ended without an average: too few peers, a lost leader, or no reducer that answered."""


class Cancelled(WorldError):
    """An averaging step was cancelled."""


class Stage(Enum):
    """How far a step has come."""

    IDLE = "idle"
    LOOKING_FOR_GROUP = "looking for group"
    AWAITING_TRIGGER = "awaiting trigger"
    RUNNING_ALLREDUCE = "running all-reduce"
    FINISHED = "finished"


def check_weight(weight: float) -> float:
    """Return the weight, or raise `ParameterError`."""
    if not (weight > 0 and math.isfinite(weight)):
        raise ParameterError(f"weight={weight!r}: give a finite number above 0")
    return float(weight)


Drive = Callable[[Callable[[], bool], float], bool]


class StepControl:
    """Handle of a step: look at its stage, change its weight, trigger it, cancel it, wait for its result.

    `result()` returns what the averaged ranks gave to `gather`, by rank, and says how whole the average is.
    """

    def __init__(self, drive: Drive, *, weight: float, scheduled_s: float, triggered: bool) -> None:
        self.stage = Stage.IDLE
        self.triggered = triggered
        self.began_allreduce = False
        self.cancel_requested = False
        self.rank_count = 0  # members of the group, once formed
        self._drive = drive
        self._weight, self._scheduled_s = weight, scheduled_s
        self._result: Averaged | None = None
        self._error: BaseException | None = None

    @property
    def averaged(self) -> Averaged | None:
        """The result, if there is one yet."""
        return self._result

    @property
    def received(self) -> float:
        """The share of this rank's elements that came back averaged; 0 as long as there is no result."""
        return self._result.received if self._result is not None else 0.0

    @property
    def missing(self) -> dict[int, float]:
        """Ranks whose values are not in all that came back, with the share in which they are not."""
        return self._result.missing if self._result is not None else {}

    @property
    def complete(self) -> bool:
        """Whether there is an average of all of the group, in all elements."""
        return self._result is not None and self._result.complete

    @property
    def weight(self) -> float:
        """This rank's weight; may be changed until the all-reduce begins."""
        return self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self._may_change("weight")
        self._weight = check_weight(weight)

    @property
    def scheduled_time(self) -> float:
        """When the all-reduce is expected to begin, in seconds of `comm.clock`; may be changed until it begins."""
        return self._scheduled_s

    @scheduled_time.setter
    def scheduled_time(self, time_s: float) -> None:
        self._may_change("scheduled_time")
        self._scheduled_s = time_s

    def _may_change(self, name: str) -> None:
        if self.began_allreduce:
            warnings.warn(
                f"{name} was changed after the all-reduce began: too late for this step", stacklevel=3
            )

    def allow_allreduce(self) -> None:
        """Let the all-reduce begin when the group is formed. May be called again."""
        self.triggered = True

    def cancel(self) -> bool:
        """End the step without a result; return whether that was still possible. Members learn of it at once."""
        if self.done():
            return False
        self.cancel_requested = True
        self._drive(self.done, 0.0)
        return True

    def done(self) -> bool:
        """Whether the step has ended, in whatever way."""
        return self.stage is Stage.FINISHED

    def cancelled(self) -> bool:
        """Whether the step was cancelled."""
        return isinstance(self._error, Cancelled)

    def exception(self) -> BaseException | None:
        """Return what ended the step, if it failed."""
        return self._error

    def result(self, timeout: float | None = None) -> Averaged:
        """Wait for the end, at most `timeout` seconds, and return the result.

        Raises:
            AveragingFailed: no average came about.
            Cancelled: `cancel` was called.
            Timeout: `timeout` is over and the step goes on.
        """
        if not (self.done() or self._drive(self.done, math.inf if timeout is None else timeout)):
            raise Timeout(
                (), "StepControl.result", -1, f"the averaging step is not over ({self.stage.value})"
            )
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise UsageError("the averaging step has no result: it was never started")
        return self._result

    def finish(self, result: Averaged | None = None, error: BaseException | None = None) -> None:
        """End the step. The averager calls this."""
        self._result, self._error, self.stage = result, error, Stage.FINISHED

    def __del__(self) -> None:
        if not self.triggered and not self.done() and self.stage is not Stage.IDLE:
            warnings.warn(
                "an averaging step was dropped before allow_allreduce(): its group waits", stacklevel=2
            )
