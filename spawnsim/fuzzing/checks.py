"""Invariants of every run, whatever the seed, the faults and the order of events; and a record of faults that struck.

After each call of a policy: the model has the same shapes, is finite, and shares no memory with another rank's; the
clock is monotone, and deadlines and faults explain the duration of the call; the policy's promises hold
(`SpawnPolicy.promises`). At the end: in a run without faults and policies, every message was received; and after the
last fault, each rank has made progress soon. The simulator itself detects stuck ranks.

A violated invariant ends the run at once, in a way that the program cannot catch.
"""

from __future__ import annotations

import functools
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from spawnsim.errors import CheckFailed
from spawnsim.fuzzing.cases import Case
from spawnsim.fuzzing.coverage import AFTER, BEFORE, BETWEEN, DEADLY, RECOVERED, WITH_DEAD, Reached
from spawnsim.models.faults import DELIVERED, FaultPlan, Pause, Skew, SlowDown, Verdict
from spawnsim.record import Recorder
from spawnsim.virtual.choices import Choices, parsed
from spawnsim.virtual.choosing import chosen, stepped
from spawnsim.virtual.engine import diagnosis
from spawnsim.virtual.engine.event_queue import PCT, Priorities
from spawnsim.virtual.engine.kernel import RankDied, Task, current_task
from spawnsim.virtual.engine.matching import undelivered
from spawnsim.virtual.engine.world import World
from spawnsim.virtual.interpreter import Patches, Put
from spawnsim.virtual.timeline import being_watched

ROUNDING = 64  # units in the last place by which sums may differ
COMPRESSED = 2e-3  # relative error of weights that travelled as float16
WAITS = 10  # deadlines that one call of a policy may take: it makes several calls
DAMAGE = "corrupt"  # a kind of fault after which numbers may be arbitrary
# Events that are no states of policies or programs: of faults and ranks, and of a policy's settings.
NO_STATES = frozenset(
    ("crash", "restart", "skew", "pause", "slow", "link", "requeue", "warning", "late_message", "transport")
)


@dataclass(frozen=True)
class WatchedPlan(FaultPlan):
    """A fault plan that records which of its faults have struck, and in which calls."""

    fired: Counter[tuple[str, str]] = field(default_factory=Counter, compare=False)

    def message(self, source: int, dest: int, sent_s: float, *sequence: int) -> Verdict:
        verdict = super().message(source, dest, sent_s, *sequence)
        if verdict != DELIVERED:
            for number, fault in self.links:
                if fault.covers(source, dest, sent_s):
                    chance = self.chance(number, source, dest, *sequence)
                    if fault.verdict(sent_s, chance) != DELIVERED:
                        self.fired[fault.kind, _call()] += 1
        return verdict

    def place(self, call: str) -> None:
        """Assign a call to the faults that were recorded without one: the event with the call follows the fault."""
        for kind, known in list(self.fired):
            if not known and call:
                self.fired[kind, call] += self.fired.pop((kind, known))

    def stretch(self, rank: int, start_s: float, duration_s: float) -> float:
        end_s = super().stretch(rank, start_s, duration_s)
        if end_s > start_s + duration_s:
            for fault in self.faults:
                ours = isinstance(fault, (Pause, SlowDown)) and fault.rank == rank
                if ours and fault.at_s < end_s and start_s < fault.at_s + fault.for_s:  # type: ignore[attr-defined]
                    self.fired[fault.kind, "compute"] += 1
        return end_s

    def awake_s(self, rank: int, time_s: float) -> float:
        awake_s = super().awake_s(rank, time_s)
        if awake_s > time_s:
            self.fired[Pause.kind, _call()] += 1
        return awake_s


@dataclass(frozen=True)
class WatchedSkew:
    """A fault of a rank's clock that records when the clock has shown a wrong time."""

    fault: Skew
    struck: Counter[tuple[str, str]]

    def error_s(self, time_s: float) -> float:
        """Return the clock's error at a time, as the fault does."""
        wrong_s = self.fault.error_s(time_s)
        if wrong_s:
            self.struck[Skew.kind, "now"] += 1
        return wrong_s


def _call() -> str:
    """Return the call of the running rank; "" during an event, on whichever rank's stack it runs."""
    task = current_task()
    if task is None or task.kernel.env.happening:
        return ""
    return diagnosis.calling(sys._getframe(2))


class Watch(Recorder):
    """Observes one run: records it, checks the invariants of its policies, and records which faults struck."""

    def __init__(self, case: Case, *, census: bool = False) -> None:
        """Observe a run of `case`; with `census`, record the calls that the program makes, too."""
        super().__init__()
        self.case, self.census = case, census
        self.calls: set[str] = set()  # of a census
        self.states: Counter[tuple[str, str]] = Counter()  # states of policies, and when they were reached
        self.possible: set[str] = set()  # the states that these policies declare
        self.plan = WatchedPlan(case.plan.faults, case.seed)
        self.world: World | None = None
        self.choices: Choices | None = None
        self.infeasible = False  # whether no run can follow the record of choices
        self.progress_s: defaultdict[int, list[float]] = defaultdict(list)  # by rank: times of progress
        self.struck: Counter[tuple[str, str]] = Counter()  # crashes, restarts, skewed clocks, with calls
        self.lost = False  # whether a message was lost permanently
        # Whether numbers may be arbitrary.
        self.spoiled = any(fault.kind == DAMAGE for fault in self.plan.faults)
        self.table_of_ranks = ""  # calls and lines of the ranks when the run failed
        # Whether any policy was called: then their averages count as progress, otherwise recorded rows.
        self.has_policies = False
        self._members: dict[int, Sequence[int]] = {}  # by rank: the ranks of its policy's group
        self._deaths: dict[int, str] = {}  # by rank: the call in which it has reached its death
        self._inside: dict[Task, float] = {}
        self._clocks: dict[Task, float] = {}
        self._models: dict[int, tuple[Any, set[int]]] = {}  # each rank's storages, and their addresses
        self._largest: dict[str, float] = {}
        self._sums: defaultdict[Any, dict[int, tuple[Any, Any]]] = defaultdict(dict)
        self._limit_s = _limit_s(case)

    @property
    def steps(self) -> int:
        """The calls of a run with randomized priorities, 0 in other runs."""
        order = None if self.world is None else self.world.kernel.env.place
        return order.taken if isinstance(order, Priorities) else 0

    # -- records -----------------------------------------------------------------------------------------------

    def row(self, rank: int, time_s: float, values: Mapping[str, Any]) -> None:
        super().row(rank, time_s, values)
        if not self.has_policies:
            self.progress_s[rank].append(time_s)

    def event(self, rank: int, time_s: float, kind: str, fields: Mapping[str, Any]) -> None:
        """Record one event."""
        super().event(rank, time_s, kind, fields)
        if kind in ("crash", "restart", "skew"):
            self.struck[kind, self._where(rank)] += 1
        elif kind == "link":
            self.lost = self.lost or "lost" in str(fields.get("what", ""))
            self.plan.place(str(fields.get("call", "")))
        if kind not in NO_STATES:
            state = f"{fields['object']}.{fields['method']}" if kind == "operation" else kind
            self._reach(rank, time_s, state)

    def _where(self, rank: int) -> str:
        if rank in self._deaths:
            return self._deaths.pop(rank)
        tasks = self.world.ranks[rank].tasks if self.world is not None else []
        if not tasks:
            return BETWEEN
        if tasks[0].wait is not None:
            # "Win.Free(…) on …": a call counts by its name alone.
            return tasks[0].wait.describe().partition("(")[0].partition(" ")[0].rpartition(".")[2]
        # An event may happen on the rank's own stack.
        frame = sys._getframe() if tasks[0] is current_task() else tasks[0].carrier.gr_frame
        return diagnosis.calling(frame) or BETWEEN

    def _reach(self, rank: int, time_s: float, state: str) -> None:
        """Count a state of a policy of a rank."""
        ranks = [] if self.world is None else self.world.ranks
        members = self._members.get(rank, ()) if state != RECOVERED else ()  # those of the group before
        dead = ranks and any(ranks[each].dead_at(time_s) for each in members)
        failed = self.world is not None and self.world.failed
        later = failed and any(each.incarnation or each.dead_at(time_s) for each in ranks)
        self.states[state, WITH_DEAD if dead else AFTER if later else BEFORE] += 1

    def _die(self, die: Callable[[], RankDied]) -> RankDied:
        """Note the call of the running rank, which has reached its death; its crash is recorded after the call."""
        rank = self.world.kernel.current.rank if self.world is not None else -1
        if self.world is not None and rank >= 0 and not self.world.ranks[rank].dead:
            self._deaths[rank] = _call() or BETWEEN
        return die()

    def _count(self, name: str, _subject: Any, call: Callable[[], Any]) -> Any:
        """Note a call of the program and make it: calls within it are part of it."""
        self.calls.add(diagnosis.calling(sys._getframe(1)) or name)
        return call()

    # -- policies ----------------------------------------------------------------------------------------------

    @contextmanager
    def in_place(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(Patches(self._wrap).in_place())
            if self.census:
                stack.enter_context(being_watched())
            if self.case.choices is not None:
                stack.enter_context(chosen())
            if self.case.ties.startswith(PCT):
                stack.enter_context(stepped())
            yield

    def prepare(self, world: World) -> None:
        self.world = world
        if self.census:
            world.watchers.append(self._count)
        kernel: Any = world.kernel
        kernel.die = functools.partial(self._die, kernel.die)
        if self.case.choices is not None:
            self.choices = world.choices = Choices(world, parsed(self.case.choices))
        for rank in world.ranks:
            rank.skews = [WatchedSkew(fault, self.struck) for fault in rank.skews]

    def failed(self, _error: BaseException) -> None:
        if self.world is not None:
            alive = [task for task in self.world.kernel.tasks if task.alive]
            self.table_of_ranks = diagnosis.standing(alive) if alive else ""

    def _wrap(self, put: Put) -> None:
        base = sys.modules.get("spawnsim.policies.base")  # a program without policies need not load torch
        waiting: list[Any] = [base.SpawnPolicy] if base is not None else []
        while waiting:
            policy = waiting.pop()
            waiting += policy.__subclasses__()
            if "__call__" in vars(policy):
                put(policy, "__call__", self._watched(vars(policy)["__call__"]))

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def watched(policy: Any, *args: Any, **kwargs: Any) -> Any:
            task, name = current_task(), type(policy).__name__
            self.possible |= {f"{name}'s {each}" if each == "average" else each for each in policy.states}
            # If a policy's call contains another policy's call, only the outer call is checked.
            if task is None or task in self._inside or self.world is None or task.background:
                return call(policy, *args, **kwargs)
            return self._called(task, policy, functools.partial(call, policy, *args, **kwargs))

        return watched

    def _called(self, task: Task, policy: Any, call: functools.partial[Any]) -> Any:
        """Make a policy's call, and check its invariants."""
        given = dict(
            zip(("iteration", "model", "optimizer", "local_metric", "group"), call.args[1:], strict=False)
        )
        given |= call.keywords
        if not hasattr(given.get("model"), "named_parameters"):
            return call()
        self.has_policies = True
        if hasattr(given.get("group"), "_context"):
            self._members[task.rank] = given["group"]._context.everyone
        before = _extents(given["model"])
        self.spoiled = self.spoiled or not _finite(before)
        self._enlarge(before)
        key = self._enter(task, policy, given)
        self._inside[task] = began_s = task.clock
        self._hold(
            began_s >= self._clocks.get(task, 0.0),
            "monotone clocks",
            f"the clock moved back to {began_s:.6g} s",
        )
        try:
            model, optimizer, info = call()
        finally:
            del self._inside[task]
            self._clocks[task] = task.clock
        took_s = task.clock - began_s
        self._hold(
            took_s <= self._limit_s, "bounded waits",
            f"{type(policy).__name__} took {took_s:.6g} virtual s; deadlines and faults explain {self._limit_s:.6g} s",
        )  # fmt: skip
        averaged = bool(info.get("averaged_this_iteration") or info.get("is_replaced"))
        if info.get("averaged_this_iteration"):
            self._reach(task.rank, task.clock, f"{type(policy).__name__}'s average")
        # A replacement policy may find no donor for long: its completed calls count as progress.
        if averaged or "progress" not in policy.promises:
            self.progress_s[task.rank].append(task.clock)
        self._check_call(task, policy, model, before)
        if key is not None and averaged:
            self._leave(task, policy, key, model)
        return model, optimizer, info

    def _check_call(self, task: Task, policy: Any, model: Any, before: dict[str, Extent]) -> None:
        """Check the invariants of the model that a policy returns."""
        name, after = type(policy).__name__, _extents(model)
        shapes = {key: each.shape for key, each in before.items()}
        now = {key: each.shape for key, each in after.items()}
        self._hold(
            shapes == now, "same shapes", f"{name} returned a model with other tensors: {now}, not {shapes}"
        )
        self._no_aliasing(task.rank, name, model)
        if self.spoiled:
            return
        self._hold(_finite(after), "finite parameters", f"{name} returned parameters that are not finite")
        if "range" in policy.promises:
            for key, each in after.items():
                most = self._largest[key]
                self._hold(
                    each.largest <= most * (1 + COMPRESSED), "range of parameters",
                    f"{name}: {key} has {each.largest:.6g}, but no rank ever had more than {most:.6g}: not a "
                    "mixture of models",
                )  # fmt: skip
        self._enlarge(after)

    def _enlarge(self, extents: dict[str, Extent]) -> None:
        for key, each in extents.items():
            self._largest[key] = max(self._largest.get(key, 0.0), each.largest)

    def _no_aliasing(self, rank: int, name: str, model: Any) -> None:
        """Check that ranks' models share no memory; models that ranks have released do not count."""
        tensors = (*model.parameters(), *model.buffers())
        held = [each.untyped_storage() for each in tensors if each.numel()]
        own = {each.data_ptr() for each in held}
        for other, (_, theirs) in self._models.items():
            shared = other != rank and not own.isdisjoint(theirs)
            self._hold(
                not shared, "no aliasing", f"{name}: the models of ranks {rank} and {other} share memory"
            )
        self._models[rank] = held, own  # kept, so that no other rank reuses the memory in the meantime

    def _enter(self, task: Task, policy: Any, given: dict[str, Any]) -> Any:
        """Record a rank's input to an average whose mean must be kept; return the average's key."""
        group: Any = given.get("group")
        if not {"mean", "equal"} & set(policy.promises) or self.spoiled or not hasattr(group, "_context"):
            return None
        key = type(policy).__name__, group._context.number, given.get("iteration"), group.Get_size()
        self._sums[key][task.rank] = _numbers(given["model"]), None
        return key

    def _leave(self, task: Task, policy: Any, key: Any, model: Any) -> None:
        """Compare a rank's result of an average with the other ranks' inputs and results."""
        met, after = self._sums[key], _numbers(model)
        taken = [each for _, each in met.values() if each is not None]
        met[task.rank] = met[task.rank][0], after
        if self.spoiled:
            return
        if "equal" in policy.promises and taken:
            for name in (
                name for name, each in model.named_parameters() if each.requires_grad and name in after
            ):
                self._hold(
                    bool((after[name] == taken[0][name]).all()), "equal models",
                    f"{type(policy).__name__}: {name} differs from another rank's after the same average",
                )  # fmt: skip
        if len(taken) + 1 == key[3]:
            del self._sums[key]
            if "mean" in policy.promises:
                self._keeps_mean(policy, met, after)

    def _keeps_mean(self, policy: Any, met: dict[int, tuple[Any, Any]], after: dict[str, Any]) -> None:
        for name, tensor in after.items():
            brought = sum(before[name].double() for before, _ in met.values())
            taken = sum(each[name].double() for _, each in met.values())
            slack = ROUNDING * _ulp(tensor) * max(_largest(each[0][name]) for each in met.values()) * len(met)
            off = _largest(taken - brought)
            self._hold(
                off <= slack, "mean preserved",
                f"{type(policy).__name__}: the sum of {name} over {len(met)} ranks changed by {off:.6g} in an average",
            )  # fmt: skip

    def _hold(self, promise: bool, what: str, otherwise: str) -> None:
        """End the run unless a promise was kept."""
        if not promise and self.world is not None:
            kernel = self.world.kernel
            task = kernel.current
            place = diagnosis.place(sys._getframe(1))
            kernel.stop(
                CheckFailed(what, f"{what}: {otherwise} ({task.name} at {task.clock:.6g} s, {place})")
            )

    # -- the end -----------------------------------------------------------------------------------------------

    def broken_at_end(self) -> tuple[str, str] | None:
        """Return the invariant that a completed run has violated, and how; or None."""
        assert self.world is not None
        if not self.plan.faults:
            left = [
                (context.name, message.source, mailbox.rank, message.tag)
                for context in self.world.open_contexts
                for mailbox in context.mailboxes.values()
                for message in undelivered(mailbox)
            ]
            if left and not self.has_policies:
                name, source, dest, tag = min(left, key=str)
                return "no lost message", (
                    f"{len(left)} messages were never received, such as one from rank {source} to rank {dest} "
                    f"with tag {tag} on {name}"
                )
        return self._behind()

    def _behind(self) -> tuple[str, str] | None:
        """Return the ranks that made no progress in the required time after the last fault."""
        assert self.world is not None
        quiet_s = self.case.quiet_s()
        until_s = quiet_s + self.case.alive_s
        behind = [
            rank.id
            for rank in self.world.ranks
            if not rank.dead and not rank.outside and not rank.evicted and rank.ended_s > until_s
            and not any(quiet_s <= time_s <= until_s for time_s in self.progress_s[rank.id])
        ]  # fmt: skip
        living = sum(not rank.dead for rank in self.world.ranks)
        if not behind or not math.isfinite(until_s) or not self.plan.faults or living == 1:
            return None
        return "progress after faults", (
            f"ranks {behind} made no progress from {quiet_s:.6g} s, when the last fault ended, to {until_s:.6g} s"
        )

    def longest_gap_s(self) -> float:
        """Return the longest time of any rank without progress; the whole run if a rank has made none."""
        assert self.world is not None
        longest = 0.0
        for rank in self.world.ranks:
            end_s = rank.ended_s if math.isfinite(rank.ended_s) else 0.0
            times_s = [0.0, *sorted(self.progress_s[rank.id])]
            gap_s = max((after - before for before, after in pairwise(times_s)), default=end_s)
            longest = max(longest, gap_s)
        return longest

    def fired(self) -> Counter[tuple[str, str]]:
        return self.struck + self.plan.fired

    def reached(self) -> Reached:
        """Return the coverage of this run."""
        drawn = Counter({fault.kind for fault in self.plan.faults})
        busy = self.census and self.world is not None and any(rank.compute_s for rank in self.world.ranks)
        calls = self.calls | ({"compute"} if busy else set())
        continues = self.case.survive and self.has_policies and DEADLY & set(drawn)
        possible = self.possible | ({RECOVERED} if continues else set())
        return Reached(drawn, self.fired(), calls, self.states, possible)


def _limit_s(case: Case) -> float:
    """Return the maximum duration of one call of a policy: several deadlines, and the duration of faults."""
    lasting = [getattr(fault, "for_s", 0.0) for fault in case.plan.faults]
    late = [getattr(fault, "delay_s", 0.0) + getattr(fault, "spread_s", 0.0) for fault in case.plan.faults]
    return WAITS * (case.scenario().deadline_s + sum(late)) + sum(lasting) + case.quiet_s()


class Extent(NamedTuple):
    """A tensor's shape, and its largest absolute value: infinite or NaN if an element is."""

    shape: tuple[int, ...]
    largest: float


def _extents(model: Any) -> dict[str, Extent]:
    return {
        name: Extent(tuple(each.shape), _largest(each.detach()))
        for name, each in model.named_parameters()
        if each.is_floating_point()
    }


def _numbers(model: Any) -> dict[str, Any]:
    return {
        name: each.detach().clone() for name, each in model.named_parameters() if each.is_floating_point()
    }


def _finite(extents: Mapping[str, Extent]) -> bool:
    return all(math.isfinite(each.largest) for each in extents.values())


def _largest(tensor: Any) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _ulp(tensor: Any) -> float:
    return float(sys.modules["torch"].finfo(tensor.dtype).eps)
