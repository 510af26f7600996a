"""A virtual cluster from start to finish: build it, run a program on every rank, evaluate the end of the run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

from greenlet import GreenletExit

from spawnsim.comm.backends import register_world
from spawnsim.comm.ops import check_order
from spawnsim.errors import (
    Livelock,
    RankError,
    RankFailed,
    SpawnsimError,
    UnsupportedError,
    WorldError,
    did_you_mean,
)
from spawnsim.models.collectives import Timing
from spawnsim.models.compute import ComputeModel
from spawnsim.models.faults import FaultPlan, Pause, Skew, SlowDown
from spawnsim.models.platform import Platform, load_platform
from spawnsim.random import Streams
from spawnsim.scenario import Scenario
from spawnsim.virtual.batching import BatchedCalls
from spawnsim.virtual.digest import RankDigest
from spawnsim.virtual.engine import diagnosis
from spawnsim.virtual.engine.cores import Cores
from spawnsim.virtual.engine.diagnosis import LivelockWatchdog
from spawnsim.virtual.engine.event_queue import tie_order
from spawnsim.virtual.engine.injection import Crashes, FaultyLinks
from spawnsim.virtual.engine.kernel import Kernel, Program, Task, current_task
from spawnsim.virtual.engine.matching import undelivered
from spawnsim.virtual.engine.strays import strays_refused
from spawnsim.virtual.engine.world import Rank, Recorder, World
from spawnsim.virtual.interpreter import rare_collections
from spawnsim.virtual.left_open import left_open
from spawnsim.virtual.memory_estimate import MemoryEstimate
from spawnsim.virtual.mpi.checkpoints import Checkpoints
from spawnsim.virtual.mpi.comm import ProgramAbort
from spawnsim.virtual.mpi.communicators import Intracomm, held, make_comm_self
from spawnsim.virtual.mpi.context import Context
from spawnsim.virtual.mpi.module import MPI  # and all classes that communicators make
from spawnsim.virtual.operations import write
from spawnsim.virtual.process_state import ProcessStates
from spawnsim.virtual.reproducibility import TorchStates, generators_per_rank, leaks_noticed
from spawnsim.virtual.services import RankServices
from spawnsim.virtual.stalls import accepts_refused, stalls_noted
from spawnsim.virtual.threads import join_all, virtual_threads
from spawnsim.virtual.torch import entry as torch_distributed
from spawnsim.virtual.torch_values import values_per_rank
from spawnsim.waits import line

if TYPE_CHECKING:
    from spawnsim.virtual.races.detector import Races
    from spawnsim.virtual.timeline import Timeline

WORLD = "MPI_COMM_WORLD"

Main = Callable[[Intracomm], Any]
Progress = Callable[[float, int, int], None]
OnError = Callable[[BaseException], None]
OnNote = Callable[[str], None]
Prepare = Callable[[World], None]  # called with the finished world before its ranks begin


@dataclass(frozen=True)
class Totals:
    """Totals of a run.

    `events` counts the actions of ranks (sends, receives, collectives, compute blocks). `scheduled` counts the events
    that SimPy processed for them. `leaks` lists the values that the program read and that no seed reproduces.
    `mistakes` lists actions that MPI leaves undefined, faults planned after the end of the run, and the death of all
    ranks, which `all_dead` also records.
    """

    virtual_seconds: float
    wall_seconds: float
    events: int
    scheduled: int
    messages: int
    bytes: int
    digest: str
    leaks: tuple[str, ...] = ()
    mistakes: tuple[str, ...] = ()
    all_dead: bool = False


@dataclass(frozen=True)
class Saving:
    """The checkpoint folder of a run (None: no checkpoints), and whether to start from its newest checkpoint."""

    folder: Path | None = None
    resume: bool = False


NOT_SAVED = Saving()


def parts(scenario: Scenario) -> tuple[Platform, FaultPlan, ComputeModel]:
    """Return the platform, fault plan and compute model of a scenario, after checking each; nothing runs."""
    platform = load_platform(scenario.platform)
    platform.check(scenario.ranks)
    tie_order(scenario.ties)
    check_order(scenario.sums)
    plan = FaultPlan.parse(
        scenario.faults, seed=scenario.seed, ranks=scenario.ranks, network=platform.network
    )
    plan.check(scenario.ranks)
    return platform, plan, platform.compute_model(scenario.compute, scenario.stragglers)


class Cluster:
    """A world, the program of each rank, and the end of the run."""

    def __init__(
        self,
        scenario: Scenario,
        recorder: Recorder,
        progress: Progress | None = None,
        trace: Recorder | None = None,
        *,
        carrier: str = "greenlets",
        saving: Saving = NOT_SAVED,
    ) -> None:
        platform, plan, model = parts(scenario)
        self._carrier = carrier
        kernel = Kernel(scenario.deadline_s, carrier, ties=scenario.ties)
        ranks = [
            Rank(rank, kernel, RankDigest(rank), Streams(scenario.seed, rank), death_s=plan.death_s(rank))
            for rank in range(scenario.ranks)
        ]
        timing = Timing(platform.network, platform.collectives)
        self.world = World(
            kernel, ranks, platform, platform.network, timing, recorder, scenario.seed, plan or None
        )
        self.world.sums = scenario.sums
        if platform.cores is not None and platform.crowded(scenario.ranks):
            self.world.cores = Cores(self.world, platform.places(scenario.ranks), platform.cores.count)
        if plan.links:
            self.world.links = FaultyLinks(self.world)
        self.world.batching = BatchedCalls(
            self.world, eager=scenario.eager, check=scenario.check_steps,
            compute_of=lambda rank: self._services[rank].compute,
        )  # fmt: skip
        for disturbed in plan.disturbed:
            ranks[disturbed].awake = partial(plan.awake_s, disturbed)
        self._unreported: list[Pause | SlowDown | Skew] = []
        for fault in plan.of_machines:
            self._announce(fault)
        for rank in ranks:
            rank.observers = self.world.observers_of(rank.id)
        if plan.paused:
            kernel.on_wake = self._on_wake
        self.crashes = self.world.crashes = Crashes(self.world, self.renew, self._begin_job)
        self.world.checkpoints = Checkpoints(
            saving.folder, saving.resume, again=plan.restarts, flush=getattr(recorder, "flush", int)
        )
        kernel.owner, kernel.on_end, kernel.stuck = self.world, self._ended, diagnosis.amid_backward
        LivelockWatchdog(kernel, self._under_way, self._livelock)
        self._whole = Context(self.world, (tuple(range(scenario.ranks)),))
        self.world.contexts += scenario.ranks  # each rank's COMM_SELF: see `communicators.held`
        self.world.predefined, self._model = self.world.contexts, model
        self._services = [
            RankServices(self.world, rank, model.open(scenario.seed, rank.id)) for rank in ranks
        ]
        self._compute_given = scenario.compute, scenario.stragglers
        self._memory = MemoryEstimate(kernel, scenario.ranks)
        self._finished = 0
        self._progress = progress
        self._timeline = _timeline(self.world, trace)
        self._races = _races(self.world) if scenario.races else None
        self._counted: Totals | None = None
        self._error: BaseException | None = None

    def _announce(self, fault: Pause | SlowDown | Skew) -> None:
        """Record a fault of a rank's machine when it begins, if the rank still runs then."""
        rank = self.world.ranks[fault.rank]
        if isinstance(fault, Skew):
            rank.skews = (*rank.skews, fault)

        self._unreported.append(fault)
        self.world.kernel.env.at(fault.at_s, rank.id, lambda: self._record_fault(fault))

    def _record_fault(self, fault: Pause | SlowDown | Skew) -> None:
        """Record that a fault has begun, unless the rank had already ended or died."""
        rank = self.world.ranks[fault.rank]
        if fault in self._unreported:
            self._unreported.remove(fault)
            if min(rank.ended_s, rank.death_s if rank.dead else math.inf) >= fault.at_s:
                fields = {name: value for name, value in vars(fault).items() if name not in ("rank", "at_s")}
                self.world.recorder.event(rank.id, fault.at_s, fault.kind, fields)

    # -- building --------------------------------------------------------------------------------------------

    def renew(self, rank: int) -> None:
        """Give a restarted rank new services and a new COMM_SELF; its machine stays the same."""
        self._services[rank] = RankServices(
            self.world, self.world.ranks[rank], self._services[rank].compute.sampler
        )
        alone = Context(self.world, ((rank,),), lasting=True)
        make_comm_self(self.world.ranks[rank], self._services[rank], alone)

    def _begin_job(self, members: tuple[int, ...]) -> None:
        again = {rank: self.world.ranks[rank].incarnation + 1 for rank in members}
        self._whole = Context(self.world, (members,), incarnations=again)

    def add_ranks(self, count: int) -> tuple[int, ...]:
        """Add ranks that a program spawns; return their numbers."""
        world, first = self.world, len(self.world.ranks)
        world.platform.check(first + count)
        # These have the size of the world at its start; the last are vector clocks.
        sized = (world.plan, world.contention, world.ordering)
        if world.platform.crowded(first + count) or any(each is not None for each in sized):
            raise UnsupportedError(
                "Spawn: not with a fault plan, contention of links, more ranks than cores, a search for races "
                "(--races), or explored schedules (--exhaustive)"
            )
        for rank in range(first, first + count):
            new = Rank(rank, world.kernel, RankDigest(rank), Streams(world.seed, rank))
            new.observers = world.observers_of(rank)
            world.ranks.append(new)
            self._services.append(RankServices(world, new, self._model.open(world.seed, rank)))
            make_comm_self(new, self._services[rank], Context(world, ((rank,),), lasting=True))
        if self._timeline:
            self._timeline.add_ranks(count)
        return tuple(range(first, first + count))

    def comm_world(self, rank: int, whole: Context | None = None) -> Intracomm:
        """Return COMM_WORLD as one rank holds it; `whole` is the context of spawned ranks."""
        comm: Intracomm = MPI.Intracomm.enter(whole or self._whole, rank, WORLD)
        comm._own = self._services[rank]
        self.world.ranks[rank].attachments["COMM_WORLD"] = comm
        return comm

    def start(self, rank: int, program: Program, clock_s: float = 0.0) -> None:
        """Start a rank's program at a time."""
        if clock_s and self.world.plan is not None:
            self.crashes.skip(self.world.ranks[rank], clock_s)
        self.crashes.begin(self.world.ranks[rank], self._memory.around(rank, program), clock_s)

    # -- endings ---------------------------------------------------------------------------------------------

    def _on_wake(self, task: Task) -> None:
        self.world.ranks[task.rank].advance_to(task, task.clock)
        self.world.kernel.observe()

    def _left(self, rank: Rank, task: Task) -> bool:
        """Return whether a leaving rank was evicted or never joined; the other ranks then continue without it."""
        left = (rank.evicted or rank.outside) and isinstance(task.error, WorldError)
        if left:
            kind = "given_up" if rank.evicted else "not_joined"
            self.world.recorder.event(rank.id, task.clock, kind, {"error": str(task.error)})
        return left

    def _ended(self, task: Task) -> None:
        rank = self.world.ranks[task.rank]
        if self.world.kernel.closed:  # the run was stopped or abandoned
            return
        if self.world.races is not None:
            self.world.races.leaves(task)
        if task.error is not None and not self._left(rank, task):
            self._fails(task, task.error)
        else:
            self.crashes.ended(task)
        if task is rank.tasks[0]:
            self._finished += 1
            for other in rank.tasks[1:]:  # background tasks end with their program, as daemon threads do
                if other.alive:
                    self.world.kernel.throw(other, GreenletExit())
            if self._progress is not None:
                self._progress(task.clock, self._finished, len(self.world.ranks))

    def _fails(self, task: Task, error: BaseException) -> None:
        """End the run with a task's error at the task's time, so earlier actions of other ranks still happen."""
        kernel = self.world.kernel
        error.__dict__.setdefault("_task", task)

        def end() -> None:
            kernel.failure = kernel.failure or error

        # A rank's clock can be ahead of SimPy's, so the end is scheduled. An interrupt ends the run at once.
        if task.clock <= kernel.env.now or isinstance(error, KeyboardInterrupt):
            end()
        else:
            kernel.env.at(task.clock, task.rank, end)

    def run(self, on_error: OnError = lambda error: None, on_note: OnNote | None = None) -> Totals:
        """Run to the end.

        Args:
            on_error: called with the error that ended the run, before the ranks' programs are ended.
            on_note: called with a sentence when a rank computes for long.

        Returns:
            The totals of the run.

        Raises:
            SpawnsimError: the error that ended the run; its `totals` holds the totals.
        """
        # Report the error while every rank is still where it stopped: `finally` blocks of programs that are being
        # ended may hang, and the report would never appear.
        kernel, self._began_s, self._on_error = self.world.kernel, time.perf_counter(), on_error
        self._memory.note = on_note
        threads = self._carrier == "threads"
        with (
            ProcessStates(kernel).in_place(), generators_per_rank(), TorchStates(kernel).in_place(),
            nullcontext() if threads else strays_refused(), leaks_noticed(), values_per_rank(),
            torch_distributed.offered(self.world) if threads else torch_distributed.refused(),
            stalls_noted(kernel, on_note), accepts_refused(),
            self._timeline.followed() if self._timeline else nullcontext(),
            self._races.followed() if self._races else nullcontext(),
            virtual_threads() if threads else nullcontext(),
        ):  # fmt: skip
            kernel.run(self._judge)
        if self._error is not None:
            raise self._error
        assert self._counted is not None
        return self._counted

    def _judge(self) -> None:
        """Compute the totals, and report the error with which the run ended, if any."""
        for fault in [*self._unreported]:  # ranks that ran ahead ended before these were due
            if fault.at_s <= max((task.clock for task in self.world.ranks[fault.rank].tasks), default=0.0):
                self._record_fault(fault)
        # An infinite clock means that the rank is paused for ever.
        clocks = [task.clock for task in self.world.kernel.tasks if task.clock < math.inf]
        end_s = max(clocks, default=0.0)
        if self.world.plan is not None and (missed := _missed(self.world.plan, end_s)):
            self.world.mistakes["faults", ""] = missed
        if all(rank.dead and rank.ended_s == math.inf for rank in self.world.ranks):
            self.world.mistakes["dead", ""] = (
                f"no rank reached the end of its program: all were dead at {end_s:.6g} s"
            )
        elif self.world.kernel.failure is None and (idle := self._idle()):
            self.world.mistakes["compute", ""] = idle
        if self._ended_well():
            self.world.mistakes |= {("open", sentence): sentence for sentence in left_open(self.world)}
        if self.world.properties and self.world.kernel.failure is None:
            self.world.mistakes |= self.world.properties.unjudged()
        self._counted = self._totals(end_s, time.perf_counter() - self._began_s)
        for operation in self.world.operations:
            write(self.world, operation)
        if self._timeline:
            self._timeline.finish(self._counted.virtual_seconds)
        self._error = self._wrong(end_s)
        if self._error is not None:
            self._error.totals = self._counted  # type: ignore[attr-defined]
            for mistake in self._counted.mistakes:
                self._error.add_note(f"warning: {mistake}")
            self._on_error(self._error)

    def _ended_well(self) -> bool:
        """Return whether all ranks of a program with `main(comm)` finished, without faults and without an error."""
        world = self.world
        struck = world.plan is not None or world.kernel.failure is not None
        alive = any(task.alive for task in world.kernel.tasks) or any(rank.evicted for rank in world.ranks)
        # `World.resource_leaks` reports what unmodified programs leave open.
        return not (struck or alive) and world.resource_leaks is None

    def _idle(self) -> str:
        """Return a sentence about given compute times that no block used, or ""."""
        given, stragglers = self._compute_given
        if not (given or stragglers):
            return ""
        counts = [service.compute.sampler_counts() for service in self._services]
        if given and not any(unstated for _, unstated in counts):
            return f"compute={given} had no effect: no block `with comm.compute():` ran without a duration"
        if stragglers and given != 0 and not any(blocks for blocks, _ in counts):
            return "stragglers had no effect: they stretch blocks `with comm.compute(...):`, and no such block ran"
        return ""

    def _wrong(self, end_s: float) -> BaseException | None:
        """Return the error with which the run ended, or None."""
        kernel = self.world.kernel
        if kernel.failure is not None:
            return self._explain(kernel.failure)
        waiting = [task for task in kernel.tasks if task.alive]
        if waiting:
            alive = {task.rank for task in waiting}
            ended = [rank.id for rank in self.world.ranks if rank.id not in alive]
            return diagnosis.deadlock(waiting, ended, diagnosis.dead(self.world.ranks))
        if self._races and (race := self._races.error()):
            return race
        return self.world.properties.error(end_s) if self.world.properties else None

    def _livelock(self, polls: int, since_s: float) -> Livelock:
        alive = [task for task in self.world.kernel.tasks if task.alive]
        return diagnosis.livelock(alive, polls, since_s, diagnosis.dead(self.world.ranks))

    def _under_way(self) -> bool:
        """Return whether a message is in flight."""
        now_s = self.world.kernel.env.now
        return any(
            message.envelope_s > now_s
            for context in self.world.open_contexts
            for mailbox in context.mailboxes.values()
            for message in undelivered(mailbox)
        )

    def _explain(self, error: BaseException) -> BaseException:
        """Wrap an exception of a rank's program with its rank and time; spawnsim's own errors already contain both."""
        task: Task | None = error.__dict__.pop("_task", None)
        if task is None:  # it occurred while no rank ran
            return error
        if isinstance(error, (ProgramAbort, Livelock, KeyboardInterrupt)) or (
            isinstance(error, SpawnsimError) and not isinstance(error, RankFailed)
        ):
            return _placed(error, task) if isinstance(error, SpawnsimError) else error
        kind = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        place = _line(error)
        if refused := torch_distributed.without_gpu(error, task, place):
            return refused
        text = f"{task.name} raised {kind}{did_you_mean(error)} at {task.clock:.6g} s{place}"
        # RankFailed contains the time of death; the task's clock is the time of the call.
        if isinstance(error, RankFailed):
            text = f"{task.name} raised {type(error).__name__}{place}: {error}"
        wrapped = RankError(task.rank, task.clock, text)
        wrapped.__cause__ = error
        return wrapped

    def _totals(self, virtual_s: float, wall_s: float) -> Totals:
        ranks = self.world.ranks
        return Totals(
            virtual_seconds=virtual_s,
            wall_seconds=wall_s,
            events=sum(rank.digest.count for rank in ranks),
            scheduled=self.world.kernel.steps,
            messages=sum(rank.messages for rank in ranks),
            bytes=sum(rank.nbytes for rank in ranks),
            digest=self.world.digest(),
            leaks=tuple(self.world.leaks.values()),
            mistakes=tuple(self.world.mistakes.values()),
            all_dead=("dead", "") in self.world.mistakes,
        )


def _missed(plan: FaultPlan, end_s: float) -> str:
    """Return a sentence if no fault of the plan had begun by the end of the run, else ""."""
    first: Any = min(plan.faults, key=lambda fault: vars(fault)["at_s"], default=None)
    if first is None or first.at_s <= end_s:
        return ""
    rest = "" if len(plan.faults) == 1 else f", the first of {len(plan.faults)} faults,"
    return (
        f"no fault took effect: {FaultPlan((first,))}{rest} begins after the end of the run, at {end_s:.6g} s"
    )


def _timeline(world: World, trace: Recorder | None) -> Timeline | None:
    """Return the timeline of a traced run. Untraced runs do not load the module."""
    if trace is None:
        return None
    from spawnsim.virtual.timeline import Timeline

    return Timeline(world, trace)


def _races(world: World) -> Races:
    """Return the detector of races. Other runs do not load the module."""
    from spawnsim.virtual.races.detector import Races

    return Races(world)


def _placed(error: SpawnsimError, task: Task) -> SpawnsimError:
    if not getattr(error, "placed", False) and not isinstance(error, (RankError, Livelock)):
        error.add_note(f"on {task.name} at {task.clock:.6g} s{_line(error)}")
        error.placed = True  # type: ignore[attr-defined]
    return error


def _line(error: BaseException) -> str:
    stack = [(frame.f_code.co_filename, number) for frame, number in walk_tb(error.__traceback__)]
    found = line(stack[::-1])
    return f" ({found})" if found else ""


def _world_of_caller() -> Any:
    return None if current_task() is None else held("COMM_WORLD")


# Virtual ranks share one process, so `world()` asks here which rank is calling. This module is loaded wherever virtual
# ranks run; a real job never loads the simulator only to find that its ranks are real.
register_world(_world_of_caller)


def simulate(
    main: Main,
    scenario: Scenario,
    *,
    recorder: Recorder,
    progress: Progress | None = None,
    on_error: OnError = lambda error: None,
    on_note: OnNote | None = None,
    trace: Recorder | None = None,
    prepare: Prepare | None = None,
    carrier: str = "greenlets",
    saving: Saving = NOT_SAVED,
) -> Totals:
    """Run `main(comm)` on every rank of a virtual cluster.

    Args:
        main: the program.
        scenario: ranks, platform, stragglers, faults, seed, compute times and deadline.
        recorder: receives rows and events.
        progress: called when a rank finishes.
        on_error: called with the error that ended the run, before the ranks are ended.
        on_note: called with a sentence when a rank computes for long.
        trace: receives the timeline; see `spawnsim.virtual.timeline`.
        prepare: called with the world before its ranks begin, to observe or stop them.
        carrier: "greenlets", or "threads" for programs that wait inside frames of C++.
        saving: the checkpoint folder, and whether to start from the newest checkpoint.

    Returns:
        The totals.

    Raises:
        SpawnsimError: the error that ended the run (RankError, Deadlock, Timeout, …), after everything was recorded;
            its `totals` holds the totals up to that time.
    """
    with rare_collections(scenario.ranks):
        cluster = Cluster(scenario, recorder, progress, trace, carrier=carrier, saving=saving)
        if prepare is not None:
            prepare(cluster.world)

        def program(rank: int) -> None:
            """Run the program of a rank. A restarted rank is not a member of its world until it recovers."""
            main(cluster.comm_world(rank))
            join_all()

        for rank in range(scenario.ranks):
            cluster.start(rank, program)
        return cluster.run(on_error, on_note)
