"""The interface of an averager to its caller: settings, static rules of groups, handles and results of steps.

A static rule is any object with `members(rank, size, round)`, which returns the sorted ranks of the group, including
`rank`. In every round it defines a partition of the ranks, the same on every rank. Settings are checked at creation. A
step's handle receives the function that drives the step. Must not know communicators or tensors.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np

from spawnsim.errors import ParameterError, Timeout, UsageError, WorldError
from spawnsim.policies.averaging.butterfly import Butterfly, Limits, Role
from spawnsim.policies.averaging.vector import digest
from spawnsim.policies.state.codecs import Choices, CompressionInfo, as_compression
from spawnsim.random import generator


def check_bits(bits: str) -> str:
    """Return the bits, or raise `ParameterError`."""
    if set(bits) - {"0", "1"}:
        raise ParameterError(f"group bits {bits!r}: give a string of 0 and 1, such as '0110', or ''")
    return bits


def next_bits(bits: str, group: int, *, index: int, group_size: int, target: int | None) -> str:
    """Return a member's bits after its group has formed, so that the members scatter in the next round (Moshpit).

    All members draw the same distinct buckets from the group's number, one each; the bucket's bits are appended and
    the oldest bits dropped. Bucket numbers have enough bits for `target` buckets (default: the group's
    size). Source: Ryabinin et al., "Moshpit SGD" (2021), section 3.
    """
    if not bits:
        return ""
    count = max(int(target or group_size), group_size, 2)
    width = (count - 1).bit_length()
    stream = np.random.Generator(np.random.PCG64(group))
    bucket = int(stream.permutation(count)[index])
    return (bits + format(bucket, f"0{width}b"))[-len(bits) :]


class Matchmaking(Protocol):
    """A static rule: which ranks average with each other in a round."""

    def members(self, rank: int, size: int, round_: int) -> tuple[int, ...]:
        """Return the sorted ranks of this rank's group, itself included."""


@dataclass(frozen=True, slots=True)
class Everyone:
    """All ranks, in every round."""

    def members(self, rank: int, size: int, round_: int) -> tuple[int, ...]:
        return tuple(range(size))


@dataclass(frozen=True, slots=True)
class Grid:
    """Ranks on a grid; round t averages along axis t mod d. N = M₁·…·M_d ranks agree exactly after d rounds.

    `shape` lists the sides; None means a nearly square pair. If the ranks do not fill the grid, its last lines are
    short.
    """

    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.shape is not None and (not self.shape or min(self.shape) < 1):
            raise ParameterError(f"shape={self.shape!r}: give at least one side, each of at least 1")

    def sides(self, size: int) -> tuple[int, ...]:
        if self.shape is None:
            side = math.isqrt(size - 1) + 1 if size > 1 else 1
            return (-(-size // side), side)
        if math.prod(self.shape) < size:
            raise ParameterError(
                f"a grid of {self.shape} has {math.prod(self.shape)} places for {size} ranks"
            )
        return self.shape

    def members(self, rank: int, size: int, round_: int) -> tuple[int, ...]:
        sides = self.sides(size)
        axis = len(sides) - 1 - round_ % len(sides)
        stride = math.prod(sides[axis + 1 :])
        first = rank - (rank // stride % sides[axis]) * stride
        line = range(first, first + stride * sides[axis], stride)
        return tuple(member for member in line if member < size)


@dataclass(frozen=True, slots=True)
class RandomGroups:
    """New random groups of `size` in each round; the remaining ranks form a smaller group.

    In expectation, variance contracts by (N/M − 1)/(N − 1) per round.
    """

    size: int
    seed: int = 0

    def __post_init__(self) -> None:
        if int(self.size) != self.size or self.size < 2:
            raise ParameterError(f"group size {self.size!r}: give a whole number of at least 2")

    def members(self, rank: int, size: int, round_: int) -> tuple[int, ...]:
        order = generator(self.seed, -1, f"groups.{round_}.{size}").permutation(size)
        place = int(np.flatnonzero(order == rank)[0]) // self.size * self.size
        return tuple(sorted(int(member) for member in order[place : place + self.size]))


@dataclass(frozen=True, slots=True)
class Exponential:
    """Round t pairs ranks whose numbers differ in bit t mod k. N = 2ᵏ ranks agree exactly after k rounds.

    Ranks without a partner (if N is not a power of two) skip the round.
    """

    def members(self, rank: int, size: int, round_: int) -> tuple[int, ...]:
        bits = max((size - 1).bit_length(), 1)
        peer = rank ^ (1 << round_ % bits)
        return tuple(sorted((rank, peer))) if peer < size else (rank,)


FIRST_TAG, LAST_TAG = 16384, 32767  # every MPI supports these; policies and examples use smaller tags


@dataclass(frozen=True, slots=True)
class Settings:
    """The checked parameters of `DecentralizedAverager`, with the same names. Times are seconds of `comm.clock`."""

    prefix: str
    target_group_size: int | None = None
    min_group_size: int = 2
    initial_group_bits: str = ""
    min_matchmaking_time: float = 5.0
    request_timeout: float = 3.0
    averaging_alpha: float = 1.0
    part_size_bytes: int = 2**19
    allreduce_timeout: float | None = None
    next_chunk_timeout: float | None = None
    sender_timeout: float | None = None
    reducer_timeout: float | None = None
    compression: Choices = None
    state_compression: Choices = None
    tensor_infos: Sequence[CompressionInfo] | None = None
    bandwidth: float | None = None
    min_vector_size: int = 0
    auxiliary: bool = False
    allow_state_sharing: bool | None = None
    client_mode: bool | None = None
    declare_state_period: float = 30.0
    shutdown_timeout: float = 5.0
    step_timeout: float | None = None
    matchmaking: Matchmaking | None = None
    tag: int | None = None

    def __post_init__(self) -> None:
        for name in _ABOVE_ZERO:
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ParameterError(f"{name}={value!r}: give a finite number above 0")
        check_bits(self.initial_group_bits)
        as_compression(self.compression)
        as_compression(self.state_compression)
        self._check_times()
        if self.min_group_size < 1 or (self.target_group_size or math.inf) < self.min_group_size:
            raise ParameterError(
                f"min_group_size={self.min_group_size}, target_group_size={self.target_group_size}: "
                "give 1 <= min_group_size <= target_group_size"
            )
        if self.auxiliary and self.client_mode:
            raise ParameterError(
                "auxiliary and client_mode: an auxiliary peer only reduces, a client only sends; choose one"
            )
        if not 0 < self.averaging_alpha <= 1:
            raise ParameterError(f"averaging_alpha={self.averaging_alpha!r}: give a number in (0, 1]")
        if self.bandwidth is not None and not (self.bandwidth >= 0 and math.isfinite(self.bandwidth)):
            raise ParameterError(
                f"bandwidth={self.bandwidth!r}: give bytes a second, 0 to let other ranks reduce, or None"
            )

    def _check_times(self) -> None:
        if self.request_timeout >= self.min_matchmaking_time:
            raise ParameterError(
                f"request_timeout={self.request_timeout} s must be smaller than min_matchmaking_time="
                f"{self.min_matchmaking_time} s: a search that one silent leader can use up finds no group"
            )
        sender_s, reducer_s = self._awaited_s(math.inf)
        if not reducer_s > sender_s and math.isfinite(sender_s):
            raise ParameterError(
                f"reducer_timeout={reducer_s} s must be larger than sender_timeout={sender_s} s: a reducer that "
                "waits for a slow sender would seem to have failed"
            )

    def _awaited_s(self, patience_s: float) -> tuple[float, float]:
        """Return how long a sender and a reducer may be silent, by default the maximum wait of a call."""
        sender_s = self.sender_timeout if self.sender_timeout is not None else self.next_chunk_timeout
        # Half of the reducers' time-out, if only that is given: a reducer waits for its senders first, and must still
        # answer in time.
        if sender_s is None:
            sender_s = min(patience_s, math.inf if self.reducer_timeout is None else self.reducer_timeout / 2)
        return sender_s, 2 * sender_s if self.reducer_timeout is None else self.reducer_timeout

    def limits(self, patience_s: float) -> Limits:
        """Return the limits of an all-reduce; by default senders may be silent for `patience_s`."""
        sender_s, reducer_s = self._awaited_s(patience_s)
        allreduce_s = math.inf if self.allreduce_timeout is None else self.allreduce_timeout
        return Limits(self.part_size_bytes, self.min_vector_size, sender_s, reducer_s, allreduce_s)

    @property
    def channel(self) -> int:
        """A 32-bit number in the messages of all averagers with this prefix."""
        return digest(self.prefix) & 0xFFFFFFFF

    @property
    def tag_or_default(self) -> int:
        """The tag of all messages. Prefixes have different tags, so that their averagers do not interfere."""
        return FIRST_TAG + digest(self.prefix) % (LAST_TAG + 1 - FIRST_TAG) if self.tag is None else self.tag

    @property
    def role(self) -> Role:
        return Role.CLIENT if self.client_mode else Role.AUX if self.auxiliary else Role.NODE


_ABOVE_ZERO = (
    "min_matchmaking_time", "request_timeout", "declare_state_period", "part_size_bytes", "shutdown_timeout",
    "allreduce_timeout", "next_chunk_timeout", "sender_timeout", "reducer_timeout", "step_timeout", "target_group_size",
)  # fmt: skip


class Averaged(dict[int, Any]):
    """The result of a step: the `gather` object of each averaged rank, by rank, and the completeness of the average.

    It excludes ranks of the group whose values are not in the average at all.

    Attributes:
        received: the share of this rank's elements that came back averaged. All other elements keep local values: a
            reducer failed, or this rank's values were late or damaged.
        missing: ranks that are missing in a part of the average, with the share of elements without them (1: all).
        complete: whether all ranks of the group were averaged in all elements.
    """

    def __init__(
        self, members: Mapping[int, Any], *, received: float = 1.0, missing: Mapping[int, float]
    ) -> None:
        super().__init__(members)
        self.received, self.missing = received, dict(missing)

    @property
    def complete(self) -> bool:
        return self.received == 1 and not self.missing


def why_no_average(butterfly: Butterfly) -> str | None:
    """Return why a finished all-reduce has averaged nothing; None if it has averaged values."""
    if butterfly.received == 0:
        return "no reducer answered"
    # All elements came back, but without values of any other member: the step must not count as an average, although no
    # reducer failed, and a new search may help.
    others = set(butterfly.reducer.senders) - {butterfly.rank}
    missing = butterfly.missing()
    if butterfly.sends and others and all(missing.get(rank) == 1 for rank in others):
        return "no values of other members arrived"
    return None


def result_of(butterfly: Butterfly) -> Averaged:
    """Return the result of a finished all-reduce, without members whose values are not in the average."""
    missing = butterfly.missing()
    failed = {rank for rank in butterfly.sending.failed if not butterfly.sending.answers[rank]}
    members = {
        member.rank: member.gathered
        for member in butterfly.group.members
        if not (missing.get(member.rank) == 1 or (member.role is Role.AUX and member.rank in failed))
    }
    return Averaged(members, received=butterfly.received, missing=missing)


class AveragingFailed(WorldError):
    """An averaging step ended without an average: too few peers, a lost leader, or no reducer that answered."""


class Cancelled(WorldError):
    """An averaging step was cancelled."""


class Stage(Enum):
    """Stage of a step."""

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


Done = Callable[[], bool]


class StepControl:
    """Handle of a step: read its stage, change its weight, trigger it, cancel it, wait for its result.

    `result()` returns the `gather` objects of the averaged ranks, by rank, and the completeness of the average.
    """

    def __init__(
        self, drive: Callable[[Done, float], bool], *, weight: float, scheduled_s: float, triggered: bool
    ) -> None:
        self.stage, self.triggered = Stage.IDLE, triggered
        self.began_allreduce = self.cancel_requested = False
        self._drive = drive
        self._weight, self._scheduled_s = weight, scheduled_s
        self._result: Averaged | None = None
        self._error: BaseException | None = None

    @property
    def averaged(self) -> Averaged | None:
        """The result, if there is one yet."""
        return self._result

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
        """Allow the all-reduce to begin when the group is formed. May be called repeatedly."""
        self.triggered = True

    def cancel(self) -> bool:
        """End the step without a result; return whether that was still possible. Members are notified at once."""
        if self.done():
            return False
        self.cancel_requested = True
        self._drive(self.done, 0.0)
        return True

    def done(self) -> bool:
        return self.stage is Stage.FINISHED

    def cancelled(self) -> bool:
        return isinstance(self._error, Cancelled)

    def exception(self) -> BaseException | None:
        """Return the error that ended the step, if it failed."""
        return self._error

    def result(self, timeout: float | None = None) -> Averaged:
        """Wait for the end, at most `timeout` seconds, and return the result.

        Raises:
            AveragingFailed: the step ended without an average.
            Cancelled: `cancel` was called.
            Timeout: the step did not end within `timeout`.
        """
        if not (self.done() or self._drive(self.done, math.inf if timeout is None else timeout)):
            unfinished = f"the averaging step is not over ({self.stage.value})"
            raise Timeout((), "StepControl.result", -1, unfinished)
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise UsageError("the averaging step has no result: it was never started")
        return self._result

    def finish(self, result: Averaged | None = None, error: BaseException | None = None) -> None:
        """End the step. The averager calls this."""
        self._result, self._error, self.stage = result, error, Stage.FINISHED
