"""What is counted while a script runs: the cost of computing between its calls, and what it leaves open.

Computing between two calls of MPI costs nothing, a constant, or what it really took; each call of the virtual MPI is
charged for the computing before it. A run whose computing costs nothing is not touched. Left open are requests never
completed, messages never received, windows and communicators not freed: they report here as they come and go
(`World.resource_leaks`).
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from spawnsim import units
from spawnsim.errors import ParameterError
from spawnsim.virtual.diagnosis import is_program, line, outside
from spawnsim.virtual.engine.kernel import Task, current_task
from spawnsim.virtual.engine.matching import undelivered
from spawnsim.virtual.engine.world import World
from spawnsim.virtual.mpi.communicators import held
from spawnsim.virtual.mpi.module import MPI
from spawnsim.virtual.timeline import being_watched, watched

NONE = "none"
PENDING = "pending computing"  # of a world's attachments: what tells the seconds that a task has not paid yet


@dataclass(frozen=True)
class Cost:
    """What computing costs: `call_s` before each call; `sites` by "file.py:line"; `factor` × measured; or at a device's
    rates what torch's operations count: (operations, bytes) a second.
    """

    call_s: float = 0.0
    sites: Mapping[str, float] = field(default_factory=dict)
    factor: float | None = None
    rates: tuple[float, float] | None = None

    @classmethod
    def of(cls, text: Any, device: tuple[float, float] | None = None) -> Cost:
        """Return the cost that a word, a number of seconds, or a mapping of call sites names.

        "none"; "5 us"; "measured"; "measured*2.5"; "jacobi.py:31=2ms,jacobi.py:44=0.5ms"; "counted:h100",
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
        """Whether computing costs nothing."""
        return not self.call_s and not self.sites and not self.runs

    @property
    def runs(self) -> bool:
        """Whether computing itself takes time, so that what comes after a rank's last call counts, too."""
        return self.factor is not None or self.rates is not None

    @property
    def reproducible(self) -> bool:
        """Whether two runs cost the same."""
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


# Peak rates by the makers' data sheets, dense, of bfloat16 and of the memory (80 GB SXM versions; L40S: PCIe).
DEVICES = {
    "a100": (312e12, 2.039e12), "h100": (989e12, 3.35e12), "h200": (989e12, 4.8e12), "l40s": (362e12, 864e9),
}  # fmt: skip


def _rates(text: str, own: tuple[float, float] | None) -> tuple[float, float]:
    """Return operations and bytes a second; `own` are those of the platform, if it has any."""
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
    """Where one rank stands: inside a call or not, and since when it computes."""

    depth: int = 0
    since_s: float = field(default_factory=time.perf_counter)
    counted_s: float = 0.0  # that its torch operations take, since it was last charged


# The real clock, bound before any run: `time.perf_counter` itself tells virtual time while programs run.
_clock = time.perf_counter


class CallCosts:
    """Collects the costs of the calling rank."""

    def __init__(self, cost: Cost) -> None:
        self.cost = cost
        self._meters: dict[Task, CallMeter] = {}  # of a rank's program, and of each thread beside it
        self._unmet = set(cost.sites)

    def warnings(self) -> list[str]:
        """Return a line about the call sites that have a cost and that no call came from."""
        if not self._unmet:
            return []
        return [
            f"no call was made at {', '.join(sorted(self._unmet))}: what --compute says of it has no effect"
        ]

    def enter(self) -> CallMeter | None:
        """Pay for the computing before a call; None inside another call, or outside ranks."""
        # The library's calls use each other (Sendrecv sends and receives): only the outermost is the program's.
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
        """Note that the rank computes from now on."""
        meter.depth, meter.since_s = 0, _clock()

    def begin(self) -> None:
        """Note that the calling rank begins to compute."""
        task = current_task()
        if task is not None:
            self._meters[task] = CallMeter(since_s=_clock())

    def pending(self, task: Task) -> float:
        """Return the seconds that a task has computed since its last call, which the next one charges."""
        meter = self._meters.get(task)
        if meter is None or meter.depth:
            return 0.0
        return meter.counted_s if self.cost.factor is None else (_clock() - meter.since_s) * self.cost.factor

    def counting(self) -> AbstractContextManager[Any]:
        """Return what counts the calling rank's torch operations, if they are to be counted."""
        task = current_task()
        if self.cost.rates is None or task is None:
            return nullcontext()
        from spawnsim.virtual.torch.counting import Counting  # which imports torch

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
        """Make a call after it was charged."""
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


SHOWN = 4  # of each kind


class ResourceLeaks:
    """The open requests, messages, windows and communicators of one run."""

    def __init__(self) -> None:
        self._requests: dict[Any, tuple[int, Any]] = {}
        self._contexts: dict[Any, str] = {}  # and the program's line that made each
        self._freed: Counter[Any] = Counter()  # how many members have

    def opened(self, completion: Any, rank: int, waiting: Any) -> None:
        """Note a request."""
        self._requests[completion] = rank, waiting

    def closed(self, completion: Any) -> None:
        """Note that a request was collected, or freed."""
        self._requests.pop(completion, None)

    def made(self, context: Any) -> None:
        """Note a communicator."""
        # Not `diagnosis.place`, which looks at the whole stack: a tenth of the time of a Split into many.
        frame: FrameType | None = sys._getframe()
        while frame is not None and not is_program(frame.f_code.co_filename):
            frame = frame.f_back
        self._contexts[context] = "" if frame is None else _line(frame.f_code.co_filename, frame.f_lineno)

    def freed(self, context: Any) -> None:
        """Note that one more member has freed a communicator."""
        self._freed[context] += 1

    def warnings(self, world: World) -> list[str]:
        """Return what was left open, a line for each kind."""
        return [
            *self._left_requests(),
            *self.left_messages(),
            *self._left_windows(world),
            *self._left_communicators(world),
        ]

    def _left_requests(self) -> Iterator[str]:
        left = Counter(
            (rank, waiting.describe() if waiting else "send") for rank, waiting in self._requests.values()
        )
        if left:
            shown = [f"rank {rank}: {_times(count)}{call}" for (rank, call), count in sorted(left.items())]
            yield f"{_count(left.total(), 'request')} never completed by Wait or Test: {_list(shown)}"

    def left_messages(self) -> Iterator[str]:
        """Yield a sentence about messages that were not received, if there are any."""
        left = Counter(
            (context.number, message.source, context.places[0][rank], message.tag)
            for context in self._contexts
            if len(context.groups) == 1
            for rank, mailbox in sorted(context.mailboxes.items())
            for message in undelivered(mailbox)
        )
        if left:
            named = {context.number: context for context in self._contexts}
            shown = [
                f"{_times(count)}rank {source} to rank {dest}, tag {tag}, on {_where(named[number], source, dest)}"
                for (number, source, dest, tag), count in sorted(left.items())
            ]
            yield f"{_count(left.total(), 'message')} never received: {_list(shown)}"

    def _left_windows(self, world: World) -> Iterator[str]:
        left = Counter(
            (rank.id, self._contexts[window._comm._context])
            for rank in world.ranks
            for window in rank.attachments.get("windows", ())
        )
        if left:
            shown = [
                f"{_times(count)}rank {rank} at {where}" for (rank, where), count in sorted(left.items())
            ]
            yield f"{_count(left.total(), 'window')} never freed: {_list(shown)}"

    def _left_communicators(self, world: World) -> Iterator[str]:
        # No COMM_WORLD, no COMM_SELF.
        own = [each for each in self._contexts if each.number > len(world.ranks) + 1]
        outer = [context for context in own if not context.inner and not context.lasting]
        left = [context for context in outer if not self._freed[context]]
        partly = [context for context in outer if 0 < self._freed[context] < len(context.everyone)]
        if left:
            yield f"{_count(len(left), 'communicator')} never freed{self._made_at(left)}"
        if partly:
            yield f"{_count(len(partly), 'communicator')} freed by some of the members only{self._made_at(partly)}"

    def _made_at(self, contexts: Iterable[Any]) -> str:
        lines = Counter(filter(None, (self._contexts[context] for context in contexts)))
        shown = [f"{_times(count)}{where}" for where, count in lines.items()]
        return f": made at {_list(shown)}" if shown else ""


@cache  # a Split makes many at one line
def _line(file: str, number: int) -> str:
    return line([(file, number)])


def _where(context: Any, *ranks: int) -> str:
    """Return the name of a communicator, and what its ranks are in the world if that differs."""
    world = [context.everyone[rank] for rank in ranks]
    if world == [*ranks]:
        return str(context.label)
    return f"{context.label} (ranks {' and '.join(map(str, world))} of the world)"


def _times(count: int) -> str:
    return f"{count} × " if count > 1 else ""


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'s were' if count > 1 else ' was'}"


def _list(items: Iterable[str]) -> str:
    shown = list(items)
    more = f", and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return ", ".join(shown[:SHOWN]) + more
