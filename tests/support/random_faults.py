"""Random programs under random fault plans: each ends in time, for a reason that its plan gives, with right results.

usage: PYTHONPATH=tests python tests/support/random_faults.py [--runs N] [--first SEED] [KIND...]

A run is drawn from its kind and its seed alone; `broken(kind, seed)` tells what is wrong with it: nothing, as a rule.

Damage (corrupt) is left out where it is by design: a program's own collectives and windows carry no checksums, nor do
those in which `AverageAllPolicy` and the warm-up by the clock average, and in which ranks tell each other the names of
their tensors before they make a window for each.
"""

from __future__ import annotations

import argparse
import logging
import math
import signal
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from support.random_calls import CALLS, SHARED, Given
from support.random_policies import CHECKED, ON_GRAPHS_AND_SERVERS, POLICIES, WHOLE, Draw, Mixed

import spawnsim
from spawnsim.errors import RankError, RankFailed, Revoked, Timeout, WorldError
from spawnsim.models.faults import Crash, FaultPlan, Partition, Restart, Swarm
from spawnsim.models.faults.events import LinkFault

FAILED = (RankFailed, Revoked, Timeout)
BLOCK_S = 0.01  # of computing, in each step
LIMIT_S, VIRTUAL_LIMIT_S = 60.0, 300.0  # of a run: calls under lasting faults meet many deadlines
STUCK = 12  # recoveries at one step, after which a program gives up
QUIET_S, PROGRESS_S = 0.2, 0.5  # all faults are over; all have averaged again, so much later
RANK_FAULTS, LINK_FAULTS = ("crash", "pause", "slow"), ("down", "drop", "delay", "duplicate", "partition")
AGAIN = 8  # each so many runs one is repeated


class Broken(AssertionError):
    """A promise that a run has not kept."""


class Overdue(BaseException):
    """A run takes too long."""


def hold(promise: bool, otherwise: str) -> None:
    """Raise `Broken` unless a promise was kept."""
    if not promise:
        raise Broken(otherwise)


# ---------------------------------------------------------------------------------------------------- programs


class Program:
    """A loop of steps that goes on without the dead, as the guide shows it. Subclasses say what a rank does."""

    def __init__(self, steps: int, *, recovers: bool = True, until_s: float = math.inf) -> None:
        self.steps, self.recovers, self.until_s = steps, recovers, until_s
        self.begin()

    def begin(self) -> None:
        self.stages: list[tuple[int, str, float, float]] = []  # rank, name, from when, until when
        self.finished: set[int] = set()

    def loop(self, comm: Any, step: Callable[[Any, int], None]) -> None:
        group, number, again = comm, 0, Counter[int]()
        while number < self.steps and comm.clock.now() < self.until_s:
            try:
                with self.stage(comm, "step" if number else "first step"):
                    step(group, number)
                number += 1
            except FAILED:
                again[number] += 1
                if not self.recovers or again[number] > STUCK:
                    raise
                with self.stage(comm, "recovery"):
                    found = group.recover(number)
                group, number = found.comm, found.step

    @contextmanager
    def stage(self, comm: Any, name: str) -> Iterator[None]:
        """Note from when to when a rank is in a stage of its program."""
        began_s = comm.clock.now()
        try:
            yield
        finally:
            self.stages.append((comm.Get_rank(), name, began_s, comm.clock.now()))

    def check(self, run: spawnsim.Run) -> None:
        """Hold what was noted to what is promised."""


class Calls(Program):
    """Ranks that make random collective calls, and hold each result to what the members gave."""

    def __init__(self, draw: Draw, **how: Any) -> None:
        super().__init__(**how)
        names = list(CALLS)
        self.calls = [
            (draw.one(*names), draw.count(), draw.one(*"ifd"), draw.one(*range(16)))
            for _ in range(self.steps)
        ]

    def __call__(self, comm: Any) -> None:

        def step(group: Any, number: int) -> None:
            name, count, dtype, root = self.calls[number]
            with comm.compute(BLOCK_S):
                pass
            size = group.Get_size()
            share = -(-count // size) if name in SHARED else count
            got, wanted = CALLS[name](Given(group, number, share, dtype, root % size))
            if not np.array_equal(got, wanted):
                raise Broken(f"{name} returned {got} instead of {wanted}")

        self.loop(comm, step)
        self.finished.add(comm.Get_rank())


class Training(Program):
    """Ranks that train models under a policy. They learn nothing, so that every number can be accounted for.

    All begin with the same number, or with 1 and more: with zeros a loss of mass would not be seen.
    """

    def __init__(
        self, policy: str, draw: Draw, *, ranks: int, damaged: bool, mortal: bool, **how: Any
    ) -> None:
        self.policy, self.choices, self.ranks, self.damaged, self.mortal = (
            policy,
            draw.key,
            ranks,
            damaged,
            mortal,
        )
        self.width, self.equal, self.meet = draw.count(), draw.one(True, False), draw.one(0, 0, 3, 5)
        super().__init__(**how)

    def begin(self) -> None:
        super().begin()
        self.models: dict[int, Mixed] = {}
        self.acted_s: dict[int, float] = {}  # when a rank last averaged, or had a part in a replacement
        self.means: defaultdict[tuple[int, int], dict[int, list[float]]] = defaultdict(dict)

    def value(self, rank: int) -> float:
        return 1.7 if self.equal else rank + 1.0

    def __call__(self, comm: Any) -> None:
        rank = comm.Get_rank()
        model = self.models[rank] = Mixed(self.value(rank), self.width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hurried = math.isfinite(self.until_s)
        draw = Draw(*self.choices, 1, hurried=hurried, damaged=self.damaged, mortal=self.mortal)
        policy = (POLICIES | ON_GRAPHS_AND_SERVERS)[self.policy](draw)
        begun_again, known = comm.clock.now() > 0.0, comm

        def step(group: Any, number: int) -> None:
            nonlocal begun_again, known
            if group is not known and not self.damaged:  # whoever joins lacks the weights
                lacking = group.allgather(begun_again)
                if any(lacking) and not all(lacking):
                    model.load_state_dict(group.bcast(model.state_dict(), lacking.index(False)))
                begun_again = False
            known = group
            with comm.compute(BLOCK_S):
                pass
            self.call(policy, group, number, (rank, model, optimizer))
            if self.meet and number % self.meet == 0:
                group.Barrier()

        self.loop(comm, step)
        with self.stage(comm, "shutdown"):
            policy.shutdown()
        with self.stage(comm, "end"):
            comm.clock.sleep(BLOCK_S)
        self.finished.add(rank)

    def call(self, policy: Any, group: Any, number: int, whose: tuple[int, Mixed, Any]) -> None:
        """Call the policy on one rank; note what an average was made of."""
        rank, model, optimizer = whose
        before, key = model.logZ.item(), (group._context.number, number)
        averages = self.policy == "average_all" and policy.cadence.due(number)
        if averages:
            self.means[key][rank] = [before]
        worst = number // 2 % group.Get_size() == group.Get_rank()  # each in its turn
        last = (
            -1.0 - number * (rank + 1) * 0.618 % 1
        )  # a rank that is behind meets another's turn: either may be worse
        try:
            same, _, info = policy(number, model, optimizer, last if worst else rank + 3.0, group)
        except FAILED:
            hold(not averages or model.logZ.item() == before, "a call that failed has changed the model")
            raise
        hold(same is model, "the policy has returned another model")
        if averages:
            self.means[key][rank] += [model.logZ.item(), policy.momentum, group.Get_size()]
        if info["averaged_this_iteration"]:
            self.acted_s[rank] = group.clock.now()

    def check(self, run: spawnsim.Run) -> None:
        for rank in self.finished:
            self._check_model(rank, self.models[rank].ends())
        for told in self.means.values():
            mean = sum(each[0] for each in told.values()) / len(told)
            for before, *after in told.values():
                if after:
                    now, momentum, size = after
                    hold(len(told) == size, "an average of others than the members")
                    wanted = momentum * before + (1 - momentum) * mean
                    hold(math.isclose(now, wanted, rel_tol=1e-9), f"{now} instead of the mean, {wanted}")
        for event in run.events:
            if event["kind"] == "replacement":  # in which donors have a part
                self.acted_s |= dict.fromkeys((event["rank"], *event["donors"]), event["time_s"])
        since_s = self.until_s - PROGRESS_S
        behind = {
            rank: self.acted_s.get(rank) for rank in self.finished if self.acted_s.get(rank, 0.0) < since_s
        }
        if math.isfinite(self.until_s) and len(self.finished) > 1:
            hold(not behind, f"left behind, with the time of their last averaging: {behind}")

    def _check_model(self, rank: int, ends: dict[str, tuple[float, float]]) -> None:
        starts = [self.value(rank) for rank in range(self.ranks)]
        # Differences that come late meet weights that other exchanges have moved meanwhile: they may overshoot.
        beyond = (max(starts) - min(starts)) / 2 if self.policy in ("by_clock", "warm_up") else 0.0
        for name, (low, high) in ends.items():
            slack = {"coarse": 0.02 * self.ranks, "seen": 1.0}.get(name, 1e-3) + beyond
            hold(math.isfinite(low) and math.isfinite(high), f"rank {rank}: {name} is not finite")
            inside = min(starts) - slack <= low and high <= max(starts) + slack
            hold(inside, f"rank {rank}: {name} from {low} to {high} is beyond what there was")
        if self.policy in WHOLE:
            lows, highs = zip(*(end for name, end in ends.items() if name != "seen"), strict=True)
            hold(max(highs) - min(lows) <= 0.02 * self.ranks, f"rank {rank}: a mixture of two models, {ends}")


# ------------------------------------------------------------------------------------------------------- runs


@dataclass
class Case:
    """One run: who does what, under which faults."""

    seed: int
    ranks: int
    plan: FaultPlan
    program: Any
    platform: str | None
    straggler: str | None
    deadline_s: float

    def carry_out(self) -> str:
        """Run it, and hold it to what it promises; return the digest, or the error in which it ended rightly."""
        self.program.begin()
        try:
            run = spawnsim.run(
                self.program, ranks=self.ranks, faults=self.plan, seed=self.seed, platform=self.platform,
                stragglers=self.straggler, deadline_s=self.deadline_s,
            )  # fmt: skip
        except (RankError, WorldError) as error:
            cause = error.__cause__ if isinstance(error, RankError) else error
            if not isinstance(cause, WorldError):
                raise
            self._explain(cause)
            return f"{type(cause).__name__}: {cause}"
        hold(run.totals["virtual_seconds"] < VIRTUAL_LIMIT_S, f"it took {run.totals['virtual_seconds']} s")
        self._nobody_is_missing(run)
        self.program.check(run)
        return str(run.totals["digest"])

    def _explain(self, error: WorldError) -> None:
        """The plan holds the reason why a program has ended in an error."""
        recovers, kinds = self.program.recovers, {fault.kind for fault in self.plan.faults}
        lasting = any(isinstance(f, LinkFault | Partition) and math.isinf(f.for_s) for f in self.plan.faults)
        hold(lasting or not recovers, f"a program that recovers has ended in {error!r}")
        if isinstance(error, Timeout):
            hold(bool(kinds), f"no reason for {error!r}")
            hold(bool(error.ranks), f"nobody is named in {error!r}")
        elif isinstance(error, RankFailed):
            crashed = {fault.rank for fault in self.plan.faults if isinstance(fault, Crash)}
            elsewhere = "on MPI_COMM_WORLD" not in str(error)  # there ranks have other numbers
            hold(
                bool(error.ranks) and (elsewhere or crashed.issuperset(error.ranks)),
                f"blamed wrongly: {error!r}",
            )
        else:
            hold(recovers or "restart" in kinds, f"no reason for {error!r}")

    def _nobody_is_missing(self, run: spawnsim.Run) -> None:
        """All have finished who have neither died nor (in a program that does not recover) begun again in vain."""
        given_up, outside = (
            {event["rank"] for event in run.events if event["kind"] == kind}
            for kind in ("given_up", "not_joined")
        )
        hold(not given_up, f"ranks {sorted(given_up)} were given up")
        hold(not (outside and self.program.recovers), f"ranks {sorted(outside)} could not join")
        died = {event["rank"]: event["time_s"] for event in run.events if event["kind"] == "crash"}
        dead = {rank for rank, time_s in died.items() if math.isinf(self.plan.restart_s(rank, time_s))}
        missing = set(range(self.ranks)) - self.program.finished - dead - outside
        hold(not missing, f"ranks {sorted(missing)} have neither finished nor died")


def _case(draw: Draw, kinds: tuple[str, ...], policy: str = "", most: int = 16, **how: Any) -> Case:
    """Draw a run of a policy, or of calls."""
    ranks, steps, seed = min(draw.ranks(), most), draw.one(6, 10, 15), draw.key[-1]
    damaged = policy in CHECKED and draw.one(True, False)
    horizon_s = how.pop("horizon_s", steps * 0.8 * BLOCK_S)
    plan = Swarm(ranks, horizon_s, (*kinds, "corrupt") if damaged else kinds).plan(seed)
    how = {"steps": steps} | how
    if policy:
        program: Program = Training(policy, draw, ranks=ranks, damaged=damaged, mortal=plan.mortal, **how)
    else:
        program = Calls(draw, **how)
    # Whoever waits for others needs more patience than their policies have.
    patient = isinstance(program, Training) and program.meet > 0
    return Case(
        seed, ranks, plan, program, draw.one(None, None, "ethernet-10g"), draw.one(None, None, "lognormal:0.3"),
        2.0 if patient else draw.one(2.0, 2.0, 0.1),
    )  # fmt: skip


def recovering(seed: int) -> Case:
    """A policy whose program recovers; nobody comes back."""
    draw = Draw(1, seed)
    return _case(draw, RANK_FAULTS + LINK_FAULTS, draw.one(*POLICIES))


def restarting(seed: int) -> Case:
    """A policy whose program recovers; ranks begin again, and join."""
    draw = Draw(2, seed)
    return _case(draw, ("restart", *RANK_FAULTS, *draw.one(LINK_FAULTS, ())), draw.one(*POLICIES))


def unattended(seed: int) -> Case:
    """A policy or calls in a program that knows nothing of recovery."""
    draw = Draw(3, seed)
    kinds = ("restart", *RANK_FAULTS, *LINK_FAULTS)
    return _case(
        draw, kinds if draw.one(True, False) else LINK_FAULTS, draw.one(*POLICIES, ""), recovers=False
    )


def collectives(seed: int) -> Case:
    """Collectives and windows under faults of links, of which some last, and of ranks."""
    draw = Draw(4, seed)
    case = _case(draw, draw.one(LINK_FAULTS, (*RANK_FAULTS, *LINK_FAULTS)))
    if draw.one(True, False, False, False):
        faults = [
            replace(f, for_s=math.inf) if isinstance(f, LinkFault | Partition) else f
            for f in case.plan.faults
        ]
        case.plan = FaultPlan(tuple(faults), seed)
    return case


def stages(seed: int) -> Case:
    """A rank is killed in a stage of its program that a rehearsal has shown, at its begin or end or in between."""
    draw = Draw(5, seed)
    case = _case(draw, draw.one((), ("crash",), ("crash", "restart", "drop")), draw.one(*POLICIES, "", ""))
    return _with_a_death_in_a_stage(case, draw)


def _with_a_death_in_a_stage(case: Case, draw: Draw) -> Case:
    case.carry_out()
    mortal = {fault.rank for fault in case.plan.faults if isinstance(fault, Crash)}
    shown = [stage for stage in case.program.stages if stage[0] not in mortal]
    if len(mortal) < case.ranks - 1 and shown:
        name = draw.one(*sorted({stage[1] for stage in shown}))
        rank, _, began_s, ended_s = draw.one(*(stage for stage in shown if stage[1] == name))
        at_s = began_s + (ended_s - began_s) * draw.one(0.0, 1.0, 0.5, draw.rng.random())
        again = [Restart(rank, at_s + draw.one(1e-4, 5e-3, 0.05))] if draw.one(True, False) else []
        case.plan = FaultPlan((*case.plan.faults, Crash(rank, at_s), *again), case.seed)
    return case


def liveness(seed: int) -> Case:
    """All faults end; then everybody who lives averages again, or is replaced."""
    draw = Draw(6, seed)
    policy, kinds = draw.one(*POLICIES), RANK_FAULTS + LINK_FAULTS
    if policy == "average_all":  # collectives need equal steps: all come to the end
        return _case(draw, kinds, policy, horizon_s=QUIET_S, steps=40)
    case = _case(draw, kinds, policy, 9, horizon_s=QUIET_S, steps=10**6, until_s=QUIET_S + 2 * PROGRESS_S)
    case.program.meet, case.program.width = 0, min(case.program.width, 3000)
    return case


def graphs(seed: int) -> Case:
    """Graphs, servers, outer optimizers, populations, in programs that recover; ranks begin again, and join.

    Every other one has a death in a stage that a rehearsal has shown.
    """
    draw = Draw(7, seed)
    kinds = ("restart", *RANK_FAULTS, *draw.one(LINK_FAULTS, ()))
    case = _case(draw, kinds, draw.one(*ON_GRAPHS_AND_SERVERS))
    return _with_a_death_in_a_stage(case, draw) if seed % 2 else case


KINDS: dict[str, Callable[[int], Case]] = {
    "recovering": recovering, "restarting": restarting, "unattended": unattended, "collectives": collectives,
    "stages": stages, "liveness": liveness, "graphs": graphs,
}  # fmt: skip


@contextmanager
def overdue(limit_s: float) -> Iterator[None]:
    """Raise `Overdue` in the block after so many seconds."""

    def ring(*_: object) -> None:
        raise Overdue(f"still running after {limit_s} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def broken(kind: str, seed: int) -> str:
    """Return what is wrong with the run of a kind and a seed; "" if nothing is."""
    case = None
    try:
        with overdue(LIMIT_S):
            case = KINDS[kind](seed)
            first = case.carry_out()
            if seed % AGAIN == 0:
                hold(case.carry_out() == first, "the same again has another digest")
    except (Exception, Overdue) as error:  # noqa: BLE001 - whatever it is, it is told
        cause = error.__cause__ or error
        where = "".join(traceback.format_tb(cause.__traceback__)[-2:])
        return f"{describe(case) if case else ''}\n{type(cause).__name__}: {cause}\n{where}"
    return ""


def describe(case: Case) -> str:
    """Return what a run is made of, in a line."""
    program = {
        name: value for name, value in vars(case.program).items() if isinstance(value, (str, int, float))
    }
    told = {name: value for name, value in vars(case).items() if name not in ("plan", "program")}
    return f"{told | program} faults={str(case.plan)!r}"


def campaign() -> None:
    """Carry out many runs of each kind; print which are broken, and how."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    asked = parser.parse_args()
    logging.disable(logging.CRITICAL)
    for kind in asked.kinds:
        wrong, began_s = [], time.process_time()
        for seed in range(asked.first, asked.first + asked.runs):
            if found := broken(kind, seed):
                wrong.append(seed)
                print(f"-- {kind} {seed}: {found}", flush=True)  # noqa: T201
        each_s = (time.process_time() - began_s) / asked.runs
        told = f"{len(wrong)} of {asked.runs} broken {wrong[:8]}, {each_s:.3f} s of CPU each"
        print(f"{kind:12} {told}", flush=True)  # noqa: T201


if __name__ == "__main__":
    campaign()
