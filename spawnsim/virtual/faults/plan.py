"""The fault plan of a run, and the three questions that a kernel asks it.

This room knows faults as data. It must not know the kernel: each answer is a function of rank, time and message number
alone, so it does not matter in which order the questions come.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spawnsim.virtual.faults import text
from spawnsim.virtual.faults.events import (
    Crash,
    Fault,
    LinkFault,
    Partition,
    Pause,
    Restart,
    SlowDown,
)
from spawnsim.virtual.faults.verdict import DELIVERED, LOST, Verdict

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
RETRANSMIT_S = 0.2  # until data are sent again that were lost (TCP_RTO_MIN); twice as long each further time,
RETRANSMIT_MOST_S = 120.0  # but no longer than this (TCP_RTO_MAX)
TRIES = 16  # before a connection is given up (net.ipv4.tcp_retries2 = 15 retransmissions)

_Speeds = tuple[list[float], list[float]]  # ascending times, and the speed from each of them on


@dataclass(frozen=True)
class Plan:
    """Faults and the seed of their chances. Two equal plans do the same to every run."""

    faults: tuple[Fault, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "faults", tuple(self.faults))
        for rank in {fault.rank for fault in self.faults if isinstance(fault, (Crash, Restart))}:
            self._check_lives(rank)

    def _check_lives(self, rank: int) -> None:
        """Crashes and restarts of a rank must take turns."""
        lives = [fault for fault in self.faults if isinstance(fault, (Crash, Restart)) and fault.rank == rank]
        lives.sort(key=lambda fault: fault.at_s)
        for turn, fault in enumerate(lives):
            if isinstance(fault, Restart) != bool(turn % 2):
                state = "dead" if turn % 2 else "alive"
                raise fault.refuse(
                    f"rank {rank} is {state} at {fault.at_s:g} s; crashes and restarts take turns"
                )

    @classmethod
    def parse(cls, source: str | Plan | None, *, seed: int = 0) -> Plan:
        """Return the plan that a text names: "crash:17@3.5s; pause:3@1s+6s", JSON, or the path of a JSON file."""
        if isinstance(source, Plan):
            return source
        words = (source or "").strip()
        if words.endswith(".json"):
            words = text.read(Path(words))
        if words.startswith(("{", "[")):
            faults, own_seed = text.from_json(words)
            return cls(faults, seed if own_seed is None else own_seed)
        return cls(text.from_text(words), seed)

    def to_json(self) -> str:
        """Return the plan as JSON that `parse` reads back."""
        return text.to_json(self.faults, self.seed)

    def __str__(self) -> str:
        return text.to_text(self.faults)

    def __bool__(self) -> bool:
        return bool(self.faults)

    def check(self, ranks: int) -> None:
        """Raise ParameterError if a fault names a rank that a run of `ranks` ranks has not."""
        for fault in self.faults:
            beyond = [rank for rank in fault.ranks if rank >= ranks]
            if beyond:
                raise fault.refuse(f"the run has ranks 0 to {ranks - 1}, and no rank {beyond[0]}")
            if isinstance(fault, Partition) and len(fault.members) == ranks:
                raise fault.refuse(
                    f"all {ranks} ranks are on one side, so nobody is cut off: leave some out of members"
                )

    # ------------------------------------------------------------------------------------------- ranks

    def death_s(self, rank: int, after_s: float = 0.0) -> float:
        """Return when the rank next crashes, at or after `after_s`; inf if it does not."""
        return min(self._times(Crash, rank, after_s), default=math.inf)

    def restart_s(self, rank: int, after_s: float = 0.0) -> float:
        """Return when the rank next starts again, at or after `after_s`; inf if it does not."""
        return min(self._times(Restart, rank, after_s), default=math.inf)

    def _times(self, kind: type[Crash | Restart], rank: int, after_s: float) -> list[float]:
        return [
            fault.at_s
            for fault in self.faults
            if isinstance(fault, kind) and fault.rank == rank and fault.at_s >= after_s
        ]

    @cached_property
    def disturbed(self) -> frozenset[int]:
        """The ranks with pauses or slow-downs; for all others `stretch` and `awake_s` change nothing."""
        return frozenset(self._speeds)

    @cached_property
    def _speeds(self) -> dict[int, _Speeds]:
        """For each disturbed rank: when its speed changes, and to what. Overlapping faults multiply."""
        windows: defaultdict[int, list[Pause | SlowDown]] = defaultdict(list)
        for fault in self.faults:
            if isinstance(fault, (Pause, SlowDown)):
                windows[fault.rank].append(fault)
        return {rank: _speeds(faults) for rank, faults in windows.items()}

    def stretch(self, rank: int, start_s: float, duration_s: float) -> float:
        """Return when work of `duration_s` ends that the rank starts at `start_s`; inf if never."""
        timeline = self._speeds.get(rank)
        if timeline is None:
            return start_s + duration_s
        times_s, speeds = timeline
        at_s, left_s = start_s, duration_s
        for index in range(bisect_right(times_s, start_s) - 1, len(times_s)):
            end_s = times_s[index + 1] if index + 1 < len(times_s) else math.inf
            done_s = at_s + left_s / speeds[index] if speeds[index] else math.inf
            if done_s <= end_s:
                return done_s
            left_s -= (end_s - at_s) * speeds[index]
            at_s = end_s
        return math.inf

    def awake_s(self, rank: int, time_s: float) -> float:
        """Return the first time at or after `time_s` at which the rank is not paused."""
        timeline = self._speeds.get(rank)
        if timeline is None:
            return time_s
        times_s, speeds = timeline
        index = bisect_right(times_s, time_s) - 1
        while index < len(times_s) and speeds[index] == 0.0:
            index += 1
            time_s = times_s[index] if index < len(times_s) else math.inf
        return time_s

    @cached_property
    def mortal(self) -> bool:
        """Whether any rank crashes."""
        return any(isinstance(fault, Crash) for fault in self.faults)

    @cached_property
    def paused(self) -> frozenset[int]:
        """The ranks that are paused at some time."""
        return frozenset(fault.rank for fault in self.faults if isinstance(fault, Pause))

    def paused_s(self, rank: int, time_s: float) -> float:
        """Return since when the rank has been paused at `time_s`; inf if it is not."""
        times_s, speeds = self._speeds.get(rank, ([], []))
        index, since_s = bisect_right(times_s, time_s) - 1, math.inf
        while index >= 0 and speeds[index] == 0.0:
            since_s, index = times_s[index], index - 1
        return since_s

    # ------------------------------------------------------------------------------------------- links

    @cached_property
    def links(self) -> tuple[tuple[int, LinkFault | Partition], ...]:
        """The faults of links with their numbers in the plan; empty: every message is simply delivered."""
        return tuple(
            (i, fault) for i, fault in enumerate(self.faults) if isinstance(fault, (LinkFault, Partition))
        )

    def message(self, source: int, dest: int, sent_s: float, *sequence: int) -> Verdict:
        """Return what becomes of message number `sequence` from `source` to `dest`, sent at `sent_s`."""
        verdict = DELIVERED
        for number, fault in self.links:
            if fault.covers(source, dest, sent_s):
                chance = _chance(self.seed, number, source, dest, *sequence)
                verdict = verdict.then(fault.verdict(sent_s, chance))
        return verdict

    def carried(self, source: int, dest: int, sent_s: float, *key: int) -> Verdict:
        """Return what becomes of data on a reliable connection: lost is what was lost at every try.

        `key` tells these data from all others between the two. The times of the tries are those of TCP on Linux.
        """
        try_s, wait_s = sent_s, RETRANSMIT_S
        for resent in range(TRIES):
            verdict = self.message(source, dest, try_s, *key, resent)
            if not verdict.lost:
                return verdict._replace(delay_s=verdict.delay_s + (try_s - sent_s), resent=resent)
            try_s, wait_s = try_s + wait_s, min(2 * wait_s, RETRANSMIT_MOST_S)
        return LOST

    def covered(self, source: Ints, dest: Ints, sent_s: Floats) -> Ints:
        """Return the indices of those messages, of many, that meet any fault; NaN is never sent."""
        met = np.zeros(len(source), bool)
        for _, fault in self.links:
            met |= fault.touches(source, dest) & (fault.at_s <= sent_s) & (sent_s < fault.at_s + fault.for_s)
        return np.flatnonzero(met & (source != dest))

    def chance(self, *key: int) -> float:
        """Return a uniform number from [0, 1) that is a function of the plan's seed and the key."""
        return _chance(self.seed, *key)

    def quiet(self, begin_s: float, end_s: float) -> bool:
        """Whether no link has a fault from one time to another."""
        return all(fault.at_s > end_s or fault.at_s + fault.for_s <= begin_s for _, fault in self.links)


def _speeds(faults: list[Pause | SlowDown]) -> _Speeds:
    edges = {0.0} | {edge for fault in faults for edge in (fault.at_s, fault.at_s + fault.for_s)}
    times_s = sorted(edge for edge in edges if edge < math.inf)
    speeds = []
    for time_s in times_s:
        active = [fault.speed for fault in faults if fault.at_s <= time_s < fault.at_s + fault.for_s]
        speeds.append(math.prod(active))
    return times_s, speeds


def _chance(*key: int) -> float:
    """Return a uniform number from [0, 1) that is a function of the key: asking for one message moves no other's."""
    words = b"".join(number.to_bytes(8, "little") for number in key)
    return (int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 11) * 2.0**-53
