"""What an averager is told once: sizes, times and roles. Checked when it is made.

This room knows numbers; no communicator, no tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spawnsim.errors import ParameterError
from spawnsim.policies.groups.butterfly import Limits, Role
from spawnsim.policies.groups.compression import Choices, as_compression
from spawnsim.policies.groups.keys import digest
from spawnsim.policies.groups.static import Matchmaking

FIRST_TAG, LAST_TAG = 16384, 32767  # every MPI has these; policies and examples use smaller ones


@dataclass(frozen=True, slots=True)
class Settings:
    """The parameters of `DecentralizedAverager`, under the same names. Times are seconds of `comm.clock`."""

    prefix: str
    target_group_size: int | None = None
    min_group_size: int = 2
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
    bandwidth: float | None = None
    min_vector_size: int = 0
    auxiliary: bool = False
    client_mode: bool = False
    declare_state_period: float = 30.0
    shutdown_timeout: float = 5.0
    step_timeout: float | None = None
    error_feedback: bool = False
    matchmaking: Matchmaking | None = None
    burst: int = 64
    poll_interval_s: float = 0.01
    tag: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "min_matchmaking_time",
            "request_timeout",
            "declare_state_period",
            "poll_interval_s",
        ):
            self._above_zero(name)
        for name in (
            "allreduce_timeout",
            "next_chunk_timeout",
            "sender_timeout",
            "reducer_timeout",
            "step_timeout",
            "target_group_size",
        ):
            if getattr(self, name) is not None:
                self._above_zero(name)
        for name in ("part_size_bytes", "burst", "shutdown_timeout"):
            self._above_zero(name)
        self._check_sizes()
        self._check_times()
        as_compression(self.compression)
        as_compression(self.state_compression)

    def _above_zero(self, name: str) -> None:
        value = getattr(self, name)
        if not (value > 0 and math.isfinite(value)):
            raise ParameterError(f"{name}={value!r}: give a finite number above 0")

    def _check_sizes(self) -> None:
        if self.min_group_size < 1 or (self.target_group_size or math.inf) < self.min_group_size:
            raise ParameterError(
                f"min_group_size={self.min_group_size}, target_group_size={self.target_group_size}: "
                "give 1 <= min_group_size <= target_group_size"
            )
        if self.auxiliary and self.client_mode:
            raise ParameterError(
                "auxiliary and client_mode: an auxiliary only reduces, a client only sends; choose one"
            )
        if not 0 < self.averaging_alpha <= 1:
            raise ParameterError(f"averaging_alpha={self.averaging_alpha!r}: give a number in (0, 1]")
        if self.bandwidth is not None and not (self.bandwidth >= 0 and math.isfinite(self.bandwidth)):
            raise ParameterError(
                f"bandwidth={self.bandwidth!r}: give bytes a second, 0 to let others reduce, or None"
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
        """Return how long a sender and a reducer may be silent. What is not given is the communicator's patience."""
        sender_s = self.sender_timeout if self.sender_timeout is not None else self.next_chunk_timeout
        if sender_s is None:
            sender_s = (
                patience_s if self.reducer_timeout is None else min(patience_s, self.reducer_timeout / 2)
            )
        return sender_s, 2 * sender_s if self.reducer_timeout is None else self.reducer_timeout

    def limits(self, patience_s: float) -> Limits:
        """Return the limits of an all-reduce; no message is awaited for longer than `patience_s` by default."""
        sender_s, reducer_s = self._awaited_s(patience_s)
        allreduce_s = math.inf if self.allreduce_timeout is None else self.allreduce_timeout
        return Limits(self.part_size_bytes, self.min_vector_size, sender_s, reducer_s, allreduce_s)

    @property
    def channel(self) -> int:
        """32 bits that the words of all averagers of this prefix carry."""
        return digest(self.prefix) & 0xFFFFFFFF

    @property
    def tag_or_default(self) -> int:
        """The tag of all words. Prefixes have tags of their own, so that averagers of two do not mix."""
        return FIRST_TAG + digest(self.prefix) % (LAST_TAG + 1 - FIRST_TAG) if self.tag is None else self.tag

    @property
    def role(self) -> Role:
        """What this peer does in a group."""
        return Role.CLIENT if self.client_mode else Role.AUX if self.auxiliary else Role.NODE
