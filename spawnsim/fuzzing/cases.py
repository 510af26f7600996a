"""The cases of a fuzzer: a case is one run of a program, a space is the set from which cases are drawn.

A case is a function of the space and its seed. It consists of text and numbers, so it can be written as options of
`spawnsim fuzz`, which repeat the same run, and reduced part by part.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from spawnsim.errors import ParameterError
from spawnsim.models.compute.stragglers import Straggler, StreamKey
from spawnsim.models.faults import FaultPlan, Swarm
from spawnsim.models.faults.events import KINDS, LinkFault, Partition
from spawnsim.models.network import Hockney, Switch
from spawnsim.models.network.cost import FREE, Cost, Costs
from spawnsim.models.platform import Platform
from spawnsim.options import arguments_of, nearest
from spawnsim.random import WORLD, generator
from spawnsim.scenario import Scenario
from spawnsim.virtual.engine.event_queue import PCT, tie_order

DEADLINE_S = 2.0  # of a call: short, so that a wait for dead ranks does not outlast the run
# Faults that MPI's rules allow. MPI rules out lost, duplicated and corrupted messages, and most programs rely on this:
# such faults are drawn only on request. Only a program that survives a death can handle a restarting rank.
DEFAULT_FAULTS = "crash; pause; slow; skew; down; delay; reorder; partition; clog"
SURVIVED = "; restart"  # drawn in addition if the program promises to survive
LOSING = {"crash", "restart", "drop", "corrupt"}  # kinds after which a wait may end at its deadline
JITTERS_S = (1e-5, 1e-4, 1e-3, 1e-2)  # of every message in a case with delays
QUIET = 0.25  # share of the program's time for faults, if the case must show progress afterwards
UNSAID: tuple[Any, ...] = ("", "fifo", None, {}, False)  # default values of a case
RANDOM = "*"  # in the place of a fault's ranks, links and times: drawn anew in each case


class Timeless(Switch):
    """A network whose messages arrive at the time of their send."""

    def cost(self, source: int, dest: int, nbytes: int) -> Cost:
        return FREE

    def costs(self, source: Any, dest: Any, nbytes: Any) -> Costs:
        return Costs(*FREE)


# Polls advance time, so that a loop of polls lets the other ranks act.
TIMELESS = Platform("timeless", Timeless(Hockney(0.0, 1.0), call_overhead_s=1e-9, eager_bytes=1 << 60))


class Still(Straggler):
    """Blocks that take no time."""

    @property
    def mean(self) -> float:
        """Mean factor: 0."""
        return 0.0

    def open(self, key: StreamKey) -> Callable[[float, float], float]:
        return lambda _duration_s, _now_s: 0.0


class Calm(NamedTuple):
    """A program's behavior without faults: its duration, and the longest time of any rank without progress.

    `waits`: whether it has policies, whose own timers may make ranks wait for each other. `steps`: its calls, in a
    space with priorities. `calls`: their names.
    """

    lasts_s: float
    step_s: float
    waits: bool = False
    steps: int = 0
    calls: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run: everything that it depends on except the program.

    Attributes:
        seed: seeds every random stream of the run, and the chances of its faults.
        ranks: number of ranks.
        faults: the fault plan as text, "" for none.
        ties: the order of ranks at equal times.
        straggler: as for `spawnsim run`, or None.
        parameters: keyword arguments of `main`.
        world: further settings, the same in all cases: platform, compute, deadline_s, races, argv.
        alive_s: virtual seconds after the last fault within which each rank must have made progress; inf: not
            required.
        survive: whether the program promises to continue when ranks die or calls meet their deadlines.
        choices: a record of choices as text, which virtual time completes; None: the run records none. See
            `spawnsim.virtual.choices`.
    """

    seed: int
    ranks: int
    faults: str = ""
    ties: str = "fifo"
    straggler: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    world: Mapping[str, Any] = field(default_factory=dict)
    alive_s: float = math.inf
    survive: bool = False
    choices: str | None = None

    @property
    def plan(self) -> FaultPlan:
        return FaultPlan.parse(self.faults, seed=self.seed)

    def scenario(self, faults: Any = None) -> Scenario:
        """Return the scenario of the run; `faults`, if given, replaces the fault plan."""
        world = {name: value for name, value in self.world.items() if name != "argv"}
        stragglers: Any = self.straggler
        if self.ties.startswith(PCT):  # no time passes, so that priorities alone order the ranks
            world, stragglers = world | {"platform": TIMELESS}, Still()
        return Scenario(
            self.ranks, faults=self.faults if faults is None else faults, seed=self.seed, ties=self.ties,
            stragglers=stragglers, **({"deadline_s": DEADLINE_S} | world),
        )  # fmt: skip

    def options(self) -> list[str]:
        """Return the options of `spawnsim fuzz` that run only this case."""
        words = ["--runs", "1", "--seed", str(self.seed), "--ranks", str(self.ranks)]
        words += ["--faults", self.faults or "none", "--ties", self.ties]
        words += ["--straggler", self.straggler or "none", *arguments_of(self.parameters)]
        for name, word in (
            ("platform", "--platform"),
            ("compute", "--compute"),
            ("deadline_s", "--deadline"),
        ):
            words += [word, str(self.world[name])] if name in self.world else []
        words += ["--alive", "none" if math.isinf(self.alive_s) else repr(self.alive_s)]
        words += ["--survive"] if self.survive else []
        words += ["--choices", self.choices] if self.choices is not None else []
        words += ["--races"] if self.world.get("races") else []
        argv = self.world.get("argv", ())
        return [*words, *(["--", *argv] if argv else [])]

    def command(self, file: str) -> str:
        return shlex.join(["spawnsim", "fuzz", file, *self.options()])

    def to_json(self) -> str:
        """Return the case as text for `from_json`, without its world, which may hold objects."""
        values = {part.name: getattr(self, part.name) for part in fields(self) if part.name != "world"}
        values["alive_s"] = None if math.isinf(self.alive_s) else self.alive_s  # JSON has no infinity
        return json.dumps({n: v for n, v in values.items() if v not in UNSAID or type(v) in (int, float)})

    @classmethod
    def from_json(cls, text: str, world: Mapping[str, Any] | None = None) -> Case:
        """Return the case that `to_json` has written; `ParameterError` for other texts."""
        try:
            values = json.loads(text)
            alive_s = float(math.inf if (given := values.pop("alive_s", None)) is None else given)
            return cls(alive_s=alive_s, world=dict(world or {}), **values)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ParameterError(f"{text!r} is not a case ({error}); copy one from a failure") from error

    def quiet_s(self) -> float:
        """Return when the last fault ends; a permanent fault counts as ending when it begins."""
        ends = [0.0]
        for fault in self.plan.faults:
            at_s, for_s = fault.at_s, getattr(fault, "for_s", 0.0)  # type: ignore[attr-defined]
            late_s = getattr(fault, "delay_s", 0.0) + getattr(fault, "spread_s", 0.0)  # of the last message
            ends.append(at_s + late_s + (0.0 if math.isinf(for_s) else for_s))
        return max(ends)


@dataclass(frozen=True, kw_only=True)
class Space:
    """The space from which a program's cases are drawn. A dimension with one value is fixed.

    Attributes:
        ranks: numbers of ranks.
        faults: possible faults, separated by ";": kinds ("crash", or "crash:*@*"), and faults as in a fault plan,
            which happen in every case. "" or "none": no faults.
        ties: orders of simultaneous events; "random" draws a seed for each case.
        stragglers: as for `spawnsim run`; None: none.
        parameters: keyword arguments of `main`.
        world: further settings, the same in all cases.
        alive_s: as in `Case`; None: in half of the cases, ten times the longest time without progress in a fault-free
            run; plus two deadlines if policies wait, or if a fault loses data that another rank waits for.
        survive: as in `Case`.
        choices: as in `Case`.
        depth: randomized priorities look for bugs of this depth, in place of delays, drawn faults and ties; 0: none.

    Raises:
        ParameterError: unknown kind of fault or order of ties, or no number of ranks.
    """

    ranks: Sequence[int] = tuple(range(2, 9))
    faults: str = DEFAULT_FAULTS
    ties: Sequence[str] = ("fifo", "reverse", "random")
    stragglers: Sequence[str | None] = (None, "lognormal:0.3")
    parameters: Mapping[str, Any] = field(default_factory=dict)
    world: Mapping[str, Any] = field(default_factory=dict)
    alive_s: float | None = None
    survive: bool = False
    choices: str | None = None
    depth: int = 0

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 1:
            raise ParameterError(f"ranks={list(self.ranks)}: give numbers of at least 1")
        _ = self.kinds  # raises for an unknown kind
        for ties in self.ties:
            tie_order(ties if ties != "random" else "random:0")
        plan = FaultPlan.parse("; ".join(self.fixed))  # raises for an invalid plan
        for fault in plan.faults:
            if any(rank >= max(self.ranks) for rank in fault.ranks):
                raise fault.refuse(f"no case has more than {max(self.ranks)} ranks")

    @cached_property
    def _parts(self) -> list[str]:
        parts = [part.strip() for part in self.faults.split(";")]
        return [part for part in parts if part and part != "none"]

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of fault that are drawn."""
        drawn = [part.partition(":") for part in self._parts if part not in self.fixed]
        for kind, _, where in drawn:
            if where.strip("*>@"):
                raise ParameterError(
                    f"{kind}:{where}: give {kind} alone, whose ranks and times are drawn, or a time"
                )
        found = [kind for kind, _, _ in drawn]
        unknown = [kind for kind in found if kind not in KINDS]
        if unknown:
            hint = nearest(unknown[0], KINDS) or f"kinds: {', '.join(KINDS)}"
            raise ParameterError(f"no kind of fault {unknown[0]!r}; {hint}")
        return tuple(dict.fromkeys(found))

    @cached_property
    def fixed(self) -> tuple[str, ...]:
        return tuple(part for part in self._parts if ":" in part and not part.endswith(f"@{RANDOM}"))

    def calm(self, ranks: int) -> Case:
        """Return the case without faults; its duration determines when faults can strike."""
        ties = f"{PCT}:0:1:1" if self.depth else "fifo"
        return Case(
            seed=0, ranks=ranks, ties=ties, parameters=self.parameters, world=self.world, survive=self.survive
        )

    def case(self, seed: int, calm: Callable[[int], Calm]) -> Case:
        """Return the case of a seed; `calm` returns the behavior of the calm case on a number of ranks."""
        draw = generator(seed, WORLD, "fuzzing.case")
        ranks = int(draw.choice(self.ranks))
        if self.depth:
            ties = f"{PCT}:{seed}:{self.depth}:{calm(ranks).steps}"
            return replace(self.calm(ranks), seed=seed, ties=ties, faults="; ".join(self.fixed))
        ties = self.ties[int(draw.integers(len(self.ties)))]
        ties = f"random:{seed}" if ties == "random" else ties
        straggler = self.stragglers[int(draw.integers(len(self.stragglers)))]
        alive_s = self.alive_s
        whole = calm(ranks) if self.kinds or alive_s is None else Calm(0.0, 0.0)
        quiet = draw.random() < 0.5 if alive_s is None else math.isfinite(alive_s)
        horizon_s = whole.lasts_s * (QUIET if quiet else 1.0)
        faults = "; ".join([*self.fixed, *self._drawn(ranks, horizon_s, seed, draw)])
        if alive_s is None:
            alive_s = self._alive_s(whole, faults) if quiet else math.inf
        return Case(
            seed=seed, ranks=ranks, faults=faults, ties=ties, straggler=straggler, parameters=self.parameters,
            world=self.world, alive_s=alive_s, survive=self.survive, choices=self.choices,
        )  # fmt: skip

    def every(self, points: Callable[[Case], Iterable[tuple[int, float]]]) -> Iterator[Case]:
        """Yield all cases for an exploration: each number of ranks, order of ties, straggler and crash.

        Crashes are drawn from a finite set if `faults` names their kind: `points` returns ranks and times at which one
        may occur in a case.

        Raises:
            ParameterError: there are infinitely many cases.
        """
        wide = [kind for kind in self.kinds if kind != "crash"]
        wide += [f"--ties {ties}" for ties in self.ties if ties == "random"]
        if wide:
            raise ParameterError(
                f"{wide[0]}: an exploration needs a finite set. Give faults with their times, 'crash' for one at any "
                "point, and fixed orders of ties"
            )
        for ranks, ties, straggler in product(self.ranks, self.ties, self.stragglers):
            case = replace(
                self.calm(ranks), faults="; ".join(self.fixed), ties=ties, straggler=straggler, choices="",
                alive_s=math.inf if self.alive_s is None else self.alive_s,
            )  # fmt: skip
            yield case
            for rank, time_s in points(case) if self.kinds else ():
                yield replace(case, faults="; ".join([*self.fixed, f"crash:{rank}@{time_s!r}s"]))

    def _alive_s(self, calm: Calm, faults: str) -> float:
        # A call that meets its deadline because of a fault ends that much after it, and so may `recover`. If all
        # messages arrive, no call meets a deadline: then a stuck rank is detected in a short program, too.
        lost = any(fault.kind in LOSING for fault in FaultPlan.parse(faults).faults)
        deadline_s = min(float(self.world.get("deadline_s", DEADLINE_S)), DEADLINE_S)
        return float(f"{10 * calm.step_s + 2 * deadline_s * (calm.waits or lost):.3g}")

    def _drawn(self, ranks: int, horizon_s: float, seed: int, draw: np.random.Generator) -> list[str]:
        """Return the faults of one case, as texts."""
        kinds = [
            kind for kind in self.kinds if ranks > 1 or not issubclass(KINDS[kind], (LinkFault, Partition))
        ]
        found = []
        if "delay" in kinds and draw.random() < 0.4 and horizon_s > 0:  # the network as a whole
            jitter_s = JITTERS_S[int(draw.integers(len(JITTERS_S)))]
            found.append(f"delay:*>*@0s+{horizon_s:.3g}s,0s,{jitter_s:g}s")
        if kinds and draw.random() < 0.85 and horizon_s > 0:
            # In units that make short times short to write: programs of a few milliseconds have faults, too.
            scale = 10.0 ** -math.floor(math.log10(horizon_s))
            most = int(draw.integers(1, 3))
            plan = Swarm(ranks, horizon_s * scale, kinds, most).plan(seed)
            found += [_scaled(part, scale) for part in str(plan).split("; ") if part]
        return found


def _scaled(fault: str, scale: float) -> str:
    """Convert a fault's times, drawn in other units, to seconds with few digits."""
    if fault.startswith("restart"):  # on its own it would not be a valid plan
        head, _, at = fault.partition("@")
        return f"{head}@{float(format(float(at.rstrip('s')) / scale, '.4g'))}s"
    parts = []
    for each in FaultPlan.parse(fault.strip()).faults:
        times_s = {name: getattr(each, name, math.inf) for name in ("at_s", "for_s", "delay_s", "spread_s")}
        values = {
            name: float(f"{time_s / scale:.4g}") for name, time_s in times_s.items() if math.isfinite(time_s)
        }
        parts.append(replace(each, **values))
    return str(FaultPlan(tuple(parts)))
