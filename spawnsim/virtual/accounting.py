"""The cost of computing between the calls of a script.

Computing is free, or costs a constant, its measured time, or a time counted from torch operations. Each call of the
virtual MPI charges the computing before it. A run with free computing is not instrumented.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spawnsim import units
from spawnsim.errors import ParameterError
from spawnsim.virtual.engine.diagnosis import outside
from spawnsim.virtual.engine.kernel import Task, current_task
from spawnsim.virtual.engine.world import World
from spawnsim.virtual.mpi.communicators import held
from spawnsim.virtual.mpi.module import MPI
from spawnsim.virtual.timeline import being_watched, watched

NONE = "none"
PENDING = "pending computing"  # attachment of a world: returns a task's seconds of uncharged computing


@dataclass(frozen=True)
class Cost:
    """The cost of computing.

    `call_s` is charged before each call; `sites` maps "file.py:line" to seconds; `factor` multiplies measured time;
    `rates` are a device's (operations, bytes) per second, for the counted cost of torch operations.
    """

    call_s: float = 0.0
    sites: Mapping[str, float] = field(default_factory=dict)
    factor: float | None = None
    rates: tuple[float, float] | None = None

    @classmethod
    def of(cls, text: Any, device: tuple[float, float] | None = None) -> Cost:
        """Parse a cost: a word, a number of seconds, or a mapping of call sites.

        Examples: "none"; "5 us"; "measured"; "measured*2.5"; "jacobi.py:31=2ms,jacobi.py:44=0.5ms"; "counted:h100",
        "counted:h100*0.4", "counted:10 TFLOP/s, 800 GB/s"; "counted": at the rates of the platform's `device`.
        """
        if text is None or text == NONE:
            return cls()
        if isinstance(text, Mapping):
            return cls(sites={site: units.seconds(seconds) for site, seconds in text.items()})
        if isinstance(text, str) and text.startswith("measured"):
            return cls(factor=_factor(text))
        if isinstance(text, str) and text.startswith("counted"):
            return cls(rates=_rates(text, device))
        if isinstance(text, str) and "=" in text:
            pairs = [part.partition("=") for part in text.split(",")]
            return cls(sites={site.strip(): units.seconds(seconds) for site, _, seconds in pairs})
        seconds = units.seconds(text)
        if seconds < 0:
            raise ParameterError(f"compute={text!r}: give a time of at least 0 s")
        return cls(call_s=seconds)

    @property
    def free(self) -> bool:
        return not self.call_s and not self.sites and not self.runs

    @property
    def runs(self) -> bool:
        """Whether the computing itself takes time; then the time after a rank's last call counts, too."""
        return self.factor is not None or self.rates is not None

    @property
    def reproducible(self) -> bool:
        return self.factor is None


def _factor(text: str) -> float:
    rest = text.removeprefix("measured").strip().lstrip("*×x ")
    try:
        factor = float(rest or 1.0)
    except ValueError:
        factor = -1.0
    if factor <= 0:
        raise ParameterError(f"compute={text!r}: write measured, or measured*2.5")
    return factor


# Dense bfloat16 and memory peak rates from the makers' data sheets (80 GB SXM versions; L40S: PCIe).
DEVICES = {
    "a100": (312e12, 2.039e12), "h100": (989e12, 3.35e12), "h200": (989e12, 4.8e12), "l40s": (362e12, 864e9),
}  # fmt: skip


def counted_device(text: Any) -> str:
    """Return the name in `DEVICES` that a cost counts for, or ""."""
    device = str(text).removeprefix("counted:").partition("*")[0].strip().lower()
    return device if device in DEVICES else ""


def _rates(text: str, own: tuple[float, float] | None) -> tuple[float, float]:
    """Return operations and bytes per second; `own` are the platform's rates, if it states any."""
    device, _, share = text.removeprefix("counted").lstrip(":").partition("*")
    flops, comma, memory = device.partition(",")
    try:
        factor = float(share or 1.0)
        if own and not device.strip():
            found = own
        elif not comma:
            found = DEVICES[device.strip().lower()]
        else:
            found = units.flop_per_second(flops), units.bytes_per_second(memory)
    except (KeyError, ValueError) as error:
        raise ParameterError(
            f"compute={text!r}: write counted: and a device ({', '.join(DEVICES)}), maybe with the share of its peak "
            'that is reached (counted:h100*0.4), or its rates ("counted:10 TFLOP/s, 800 GB/s"), or give the platform a '
            "[device] and write counted"
        ) from error
    if not min(*found, factor) > 0:
        raise ParameterError(f"compute={text!r}: rates are above 0")
    return found[0] * factor, found[1] * factor


@dataclass
class CallMeter:
    """The state of one task: whether it is inside a call, and since when it computes."""

    depth: int = 0
    since_s: float = field(default_factory=time.perf_counter)
    counted_s: float = 0.0  # counted seconds of its torch operations since the last charge


# The real clock, bound before any run: `time.perf_counter` itself returns virtual time while programs run.
_clock = time.perf_counter


class CallCosts:
    """Charges the costs of computing to the calling rank."""

    def __init__(self, cost: Cost) -> None:
        self.cost = cost
        self._meters: dict[Task, CallMeter] = {}  # of each rank's program and of each of its threads
        self._unmet = set(cost.sites)

    def warnings(self) -> list[str]:
        """Return a warning about call sites that have a cost but were never reached."""
        if not self._unmet:
            return []
        return [f"no call was made at {', '.join(sorted(self._unmet))}: --compute has no effect there"]

    def enter(self) -> CallMeter | None:
        """Charge the computing before a call; return None inside another call, or outside ranks."""
        # The library's calls use each other (Sendrecv sends and receives): only the outermost belongs to the program.
        task = current_task()
        if task is None:
            return None
        meter = self._meters.get(task)
        if meter is None:
            meter = self._meters[task] = CallMeter(since_s=_clock())
        if meter.depth:
            return None
        meter.depth = 1
        self._pay(meter)
        return meter

    def leave(self, meter: CallMeter) -> None:
        meter.depth, meter.since_s = 0, _clock()

    def begin(self) -> None:
        """Record that the calling rank begins to compute."""
        task = current_task()
        if task is not None:
            self._meters[task] = CallMeter(since_s=_clock())

    def pending(self, task: Task) -> float:
        """Return the seconds that a task has computed since its last call; the next call charges them."""
        meter = self._meters.get(task)
        if meter is None or meter.depth:
            return 0.0
        return meter.counted_s if self.cost.factor is None else (_clock() - meter.since_s) * self.cost.factor

    def counting(self) -> AbstractContextManager[Any]:
        """Return a context manager that counts the calling rank's torch operations, if counting is enabled."""
        task = current_task()
        if self.cost.rates is None or task is None:
            return nullcontext()
        from spawnsim.virtual.counting import Counting  # which imports torch

        return Counting(self._meters[task], self.cost.rates)

    def _pay(self, meter: CallMeter) -> None:
        cost = self.cost
        if cost.rates is not None:
            seconds, meter.counted_s = meter.counted_s, 0.0
        elif cost.factor is not None:
            seconds = (_clock() - meter.since_s) * cost.factor
        else:
            seconds = cost.call_s
            if cost.sites:
                site = _site()
                self._unmet.discard(site)
                seconds += cost.sites.get(site, 0.0)
        if seconds > 0:
            held("OWN").compute.spend(seconds, call_cost=True)

    @contextmanager
    def collected(self, world: World) -> Iterator[None]:
        """Charge every call while the block runs."""
        if self.cost.free:
            yield
            return
        world.watchers.append(self.watching)
        world.attachments[PENDING] = self.pending
        reads = MPI.Wtime
        with being_watched():
            if self.cost.runs:
                MPI.Wtime = watched("Wtime", reads)
            try:
                yield
            finally:
                MPI.Wtime = reads

    def watching(self, name: str, subject: Any, call: Callable[[], Any]) -> Any:
        """Charge the computing before a call, then make the call."""
        meter = self.enter()
        if meter is None:
            return call()
        try:
            return call()
        finally:
            self.leave(meter)


def _site() -> str:
    frame, _ = outside(sys._getframe())
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else ""
