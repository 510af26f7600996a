"""Runs an unmodified mpi4py program on every virtual rank.

This module assembles the parts: the cluster, the virtual mpi4py, and each rank's process, clocks and streams.
"""

from __future__ import annotations

import builtins
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from greenlet import GreenletExit

from spawnsim.errors import Deadlock, ParameterError, RankError, UsageError
from spawnsim.models.platform import load_platform
from spawnsim.scenario import Scenario
from spawnsim.virtual.accounting import CallCosts, Cost, counted_device
from spawnsim.virtual.cluster import Cluster, OnError, OnNote, Prepare, Progress, Totals
from spawnsim.virtual.engine.kernel import NoTask, current_task
from spawnsim.virtual.engine.world import Rank, Recorder
from spawnsim.virtual.interpreter import rare_collections
from spawnsim.virtual.left_open import ResourceLeaks
from spawnsim.virtual.mpi.communicators import COMM_WORLD
from spawnsim.virtual.mpi.context import Context
from spawnsim.virtual.mpi.module import MPI
from spawnsim.virtual.mpi.payload import OPTIONS, pickler
from spawnsim.virtual.mpi.spawning import PARENT, SPAWNER, Launch
from spawnsim.virtual.races.loads import reporting
from spawnsim.virtual.scripts.environment import as_mpiexec, as_torchrun, placements
from spawnsim.virtual.scripts.event_loops import EventLoops
from spawnsim.virtual.scripts.package import Options, Pool, installed_as_mpi4py, serve, serve_parent
from spawnsim.virtual.scripts.rank_process import Lines, Processes, RankModules, virtual_time
from spawnsim.virtual.threads import join_all
from spawnsim.virtual.torch import CUDA
from spawnsim.virtual.torch.devices import Devices
from spawnsim.virtual.torch.entry import cuda_as_cpu


@dataclass(frozen=True)
class Script:
    """A program's file and how it is run.

    Attributes:
        path: the file.
        argv: its arguments, `sys.argv[1:]`.
        prefix: whether each line that a rank prints begins with `[rank 3] `.
        virtual_time: "all": `time.time()` and similar clocks return virtual seconds from 0, and `time.sleep` takes
            virtual time; "sleep": only `time.sleep` is virtual; "none": all are real.
        private: installed packages that each rank imports separately, because they query the rank at import.
        carrier: "greenlets"; or "threads" for programs of torch.distributed, which then find torchrun's environment.
        futures: rank 0 alone runs the program, the others work for its MPIPoolExecutor (`python -m mpi4py.futures`).
        cuda_as_cpu: CPU tensors take the place of CUDA's; see `virtual/torch/cuda.py`.
        stubs: trackers, such as wandb, that accept every call and record scalars; see `scripts/stubs.py`.
        body: called on each rank with its number, in place of the file's code; the path is then a folder.
        modules: the modules that belong to each rank; None: those of the file's folder, and `private`.
    """

    path: Path
    argv: tuple[str, ...] = ()
    prefix: bool = True
    virtual_time: str = "all"
    private: tuple[str, ...] = ()
    futures: bool = False
    carrier: str = "greenlets"
    cuda_as_cpu: bool = False
    stubs: tuple[str, ...] = ()
    body: Callable[[int], Any] | None = None
    modules: RankModules | None = None

    @property
    def folder(self) -> Path:
        """The folder of the program."""
        path = self.path.resolve()
        return path.parent if self.body is None else path


@dataclass
class ScriptOutcome:
    """How the ranks of a run ended."""

    statuses: dict[int, Any] = field(default_factory=dict)  # rank -> its argument of sys.exit
    ends_s: dict[int, float] = field(default_factory=dict)


class ScriptRun:
    """One run of a script."""

    def __init__(self, script: Script, scenario: Scenario, recorder: Recorder, **how: Any) -> None:
        self.script, self.scenario = script, scenario
        self.cost = Cost.of(scenario.compute, load_platform(scenario.platform).device)
        if self.cost.rates is not None and script.carrier != "threads":
            raise ParameterError(
                "compute=counted counts torch's operations only for ranks in threads: give --carrier threads"
            )
        self.code: Any = self._compile()
        self._spawned: dict[int, Any] = {}  # rank -> its code; None: it serves an executor
        # A training step that is batched with other ranks' steps costs nothing at its call.
        self.cluster = Cluster(
            replace(scenario, compute=0.0, eager=scenario.eager or self.cost.runs),
            recorder,
            how.get("progress"),
            how.get("trace"),
            carrier=script.carrier,
        )
        self.outcome, self.call_costs, self.resource_leaks = (
            ScriptOutcome(),
            CallCosts(self.cost),
            ResourceLeaks(),
        )
        self.on_error: OnError = how.get("on_error") or (lambda error: None)
        self.on_note: OnNote | None = how.get("on_note")
        self.prepare: Prepare | None = how.get("prepare")
        self.out = Lines(sys.stdout, _rank, script.prefix, _output_is_shown, on_output=self._printed)
        self.err = Lines(sys.stderr, _rank, script.prefix, _output_is_shown)
        self.notices: list[str] = how.get("notices", [])
        self.processes = Processes(self._modules(), self._attributes())

    def _compile(self) -> Any:
        if self.script.body is not None:
            return None
        return compiled(self.script.path, reports=self.scenario.races)

    def _modules(self) -> RankModules:
        script = self.script
        return script.modules or RankModules(script.folder, script.private, script.stubs)

    def _attributes(self) -> dict[str, Any]:
        folder = str(self.script.folder)
        return {
            "argv": [str(self.script.path), *self.script.argv],
            "path": [folder, *(entry for entry in sys.path if entry != folder)],
            "stdin": sys.stdin, "stdout": self.out, "stderr": self.err, "displayhook": sys.displayhook,
        }  # fmt: skip

    def run(self) -> Totals:
        """Run the script to its end on all ranks."""
        world = self.cluster.world
        world.resource_leaks, world.around_threads = self.resource_leaks, self._around_thread
        world.private = frozenset(self.script.private)
        world.attachments[SPAWNER] = self._spawn
        self.resource_leaks.made(self.cluster.comm_world(0)._context)
        if self.prepare is not None:
            self.prepare(world)
        self._placements = placements(world)
        for rank in world.ranks:
            self._equip(rank)
            self._start(rank.id)
        world.kernel.on_resume.append(self.processes.enter)
        world.kernel.on_leave.append(self.processes.leave)
        with self._surroundings():
            return self.cluster.run(self._report, self.on_note)

    def _start(self, rank: int) -> None:
        self.cluster.start(rank, self._program)

    def _equip(self, rank: Rank) -> None:
        """Give a rank, or its next incarnation, its communicators and its process."""
        rank.attachments["OWN"] = self.cluster.comm_world(rank.id)._own
        rank.attachments[OPTIONS] = Options()
        where = self._placements[rank.id]
        variables = as_mpiexec(where)
        if self.script.carrier == "threads":  # then the program is one of torch.distributed
            variables |= as_torchrun(where, rank.incarnation)
        self.processes.add(rank.id, variables)
        if self.script.cuda_as_cpu:  # without a platform, as on one machine
            count = where.size if self.scenario.platform is None else where.local_size
            rank.attachments[CUDA] = Devices(count, counted_device(self.scenario.compute), self._notice)

    def _notice(self, sentence: str) -> None:
        if sentence not in self.notices:
            self.notices.append(sentence)

    def _spawn(self, parents: Context, launches: Sequence[Launch]) -> Context:
        """Start programs on new ranks, at the time of the running task; return the context of both groups."""
        cluster, world = self.cluster, self.cluster.world
        ranks = cluster.add_ranks(sum(launch.count for launch in launches))
        whole, both = Context(world, (ranks,), lasting=True), parents.derive(parents.groups[0], ranks)
        where = placements(world)
        programs = [(launch, self._code_of(launch)) for launch in launches for _ in range(launch.count)]
        for place, (rank, (launch, code)) in enumerate(zip(ranks, programs, strict=True)):
            self._spawned[rank] = code
            world.ranks[rank].attachments |= {
                "OWN": cluster.comm_world(rank, whole)._own, OPTIONS: Options(),
                PARENT: MPI.Intercomm.enter(both, rank),
            }  # fmt: skip
            world.ranks[rank].attachments[PARENT]._own = world.ranks[rank].attachments["OWN"]
            variables = as_mpiexec(where[rank]._replace(rank=place, size=len(ranks)))
            self.processes.add(rank, variables, [launch.path, *launch.argv] if launch.path else None)
            world.crashes.begin(world.ranks[rank], self._program, world.kernel.current.clock)
        return both

    def _code_of(self, launch: Launch) -> Any:
        return compiled(Path(launch.path)) if launch.path else None

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        limit = sys.getrecursionlimit()
        with ExitStack() as stack:
            stack.callback(sys.setrecursionlimit, limit)
            # A program may have passed its own functions to the library's pickler (`MPI.pickle.__init__`).
            stack.callback(pickler.__init__)  # type: ignore[misc]
            stack.callback(self.err.finish)
            stack.callback(self.out.finish)
            stack.enter_context(installed_as_mpi4py())
            if self.script.cuda_as_cpu:
                stack.enter_context(cuda_as_cpu())
            stack.enter_context(virtual_time(self.script.virtual_time))
            if self.script.virtual_time == "all":
                stack.enter_context(EventLoops(self.cluster.world.kernel).in_place())
            stack.enter_context(self.call_costs.collected(self.cluster.world))
            stack.enter_context(self.processes.in_place())
            yield

    # -- one rank ----------------------------------------------------------------------------------------------

    def _program(self, _rank: int) -> None:
        """Run the script on the calling rank, from its first line to its last `atexit` function."""
        task = current_task()
        assert task is not None
        rank = self.cluster.world.ranks[task.rank]
        if rank.incarnation:
            self._equip(rank)
            self.processes.enter(task)
        self.call_costs.begin()
        try:
            with self.call_costs.counting():
                self._execute()
            join_all()
            for executor in [*rank.attachments.get("pools", ())]:
                executor.shutdown()
        except SystemExit as leaving:
            self.outcome.statuses[task.rank] = status_of(leaving)
        except GreenletExit:
            raise
        except BaseException as error:
            _ask_the_hook(error)
            self._run_at_exit_apart()
            raise
        meter = self.call_costs.enter() if self.cost.runs else None
        if meter is not None:
            self.call_costs.leave(meter)
        self._run_at_exit()
        self.outcome.ends_s[task.rank] = task.clock

    @contextmanager
    def _around_thread(self) -> Iterator[None]:
        self.call_costs.begin()
        with self.call_costs.counting():
            yield

    def _execute(self) -> None:
        if self.script.body is not None:
            self.script.body(self.cluster.world.here().id)
            return
        main: Any = sys.modules["__main__"]
        code = self._spawned.get(self.cluster.world.here().id, self.code)
        main.__file__, main.__builtins__, main.__cached__ = (code or self.code).co_filename, builtins, None
        if code is None:
            main.__name__ = "__worker__"
            exec(self.code, main.__dict__)
            serve_parent()
        elif code is not self.code or not self.script.futures:
            exec(code, main.__dict__)
        elif _rank() == 0:
            pool = self.cluster.world.here().attachments["futures"] = Pool(COMM_WORLD, 0)
            try:
                exec(self.code, main.__dict__)
            finally:
                pool.stop()
        else:
            main.__name__ = "__worker__"
            exec(self.code, main.__dict__)
            serve(COMM_WORLD, 0)

    def _printed(self, rank: int, text: str) -> None:
        self.cluster.world.ranks[rank].digest.cover(text.encode("utf-8", "surrogatepass"))

    def _run_at_exit(self) -> None:
        process = self.processes.calling()
        while process is not None and process.at_exit:
            process.at_exit.pop()()

    def _run_at_exit_apart(self) -> None:
        """Run the `atexit` functions of a rank that has failed, without communication.

        A deadlock among them would hide the error.
        """
        kernel, process = self.cluster.world.kernel, self.processes.calling()
        task, kernel.current = kernel.current, FAILED
        try:
            while process is not None and process.at_exit:
                try:
                    process.at_exit.pop()()
                except UsageError:
                    pass  # a call of MPI
                except Exception:  # noqa: BLE001 - printed, as by Python, which then continues
                    traceback.print_exc()
        finally:
            kernel.current = task

    def _report(self, error: BaseException) -> None:
        """Report an error, with the ranks that called `sys.exit` and, after a deadlock, the unreceived messages.

        Output that ranks have already printed appears first. Output of ranks that continue after they were ended is
        dropped.
        """
        if isinstance(error, Deadlock):
            for sentence in self.resource_leaks.left_messages():
                error.add_note(sentence)
        left = [f"rank {rank} (status {status})" for rank, status in sorted(self.outcome.statuses.items())]
        if left and hasattr(error, "add_note"):
            error.add_note(f"sys.exit was called by {', '.join(left[:8])}")
        self.out.finish()
        self.err.finish()
        self.on_error(error)


FAILED: Any = NoTask(lambda: UsageError("a rank that has failed cannot communicate in its atexit functions"))


def _rank() -> int | None:
    task = current_task()
    return None if task is None else task.rank


def _output_is_shown() -> bool:
    """Return whether the caller's output is shown: not after the caller has ignored its end."""
    task = current_task()
    return task is None or not task.refused


def compiled(path: Path, *, reports: bool = False) -> Any:
    """Return the code of a program's file; one that `reports` its loads and stores, for the detector of races."""
    try:
        source = path.read_bytes()
        return compile(
            reporting(source) if reports else source, str(path.absolute()), "exec", dont_inherit=True
        )
    except OSError as error:
        raise ParameterError(f"cannot read {path}: {error.strerror}") from error
    except (SyntaxError, ValueError) as error:
        raise ParameterError(f"{path} is not a Python program: {error}") from error


def status_of(leaving: SystemExit) -> int:
    """Return the exit status of `sys.exit(...)`; print a text, as Python does."""
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code & 0xFF
    sys.stderr.write(f"{leaving.code}\n")
    return 1


def _ask_the_hook(error: BaseException) -> None:
    """Call the rank's own `sys.excepthook`, if it has set one; it may call Abort."""
    # torch's own hook only prints the traceback, which the run's report already contains.
    own = getattr(sys.excepthook, "__module__", "") != "torch.distributed.distributed_c10d"
    if own and sys.excepthook is not sys.__excepthook__:
        sys.excepthook(type(error), error, error.__traceback__)


def run_program(
    path: str | Path,
    argv: Sequence[str],
    scenario: Scenario,
    *,
    recorder: Recorder,
    progress: Progress | None = None,
    warn: list[str] | None = None,
    on_error: OnError | None = None,
    on_note: OnNote | None = None,
    trace: Recorder | None = None,
    prepare: Prepare | None = None,
    **options: Any,
) -> Totals:
    """Run an unmodified mpi4py program on every rank of a virtual cluster.

    Args:
        path: the program's file.
        argv: its arguments.
        scenario: as for `simulate`. Its `compute` is the cost of computing between two calls: None (free), "5 us" for
            each, "measured*2" (the measured time, times two; two runs then differ), or {"file.py:12": seconds} for
            single calls. Programs may wait long: set `deadline_s` to `math.inf`.
        recorder: receives rows and events.
        progress: called when a rank finishes.
        warn: a list that receives warnings: substitutes that the program used, and a line for each kind of resource
            that it left open.
        on_error: called with the error that ended the run, before the ranks' programs are ended.
        on_note: called with a sentence when a rank computes for long.
        trace: receives the timeline; see `spawnsim.virtual.timeline`.
        prepare: called with the world before its ranks begin.
        options: see `Script`.

    Returns:
        The totals of the run.

    Raises:
        RankError: a rank has ended with an exit status other than 0, or by an exception, which is its cause.
        SpawnsimError: any other error that ended the run: Deadlock, Livelock, Timeout, ...
    """
    script = Script(Path(path), tuple(map(str, argv)), **options)
    with rare_collections(scenario.ranks):
        run = ScriptRun(
            script,
            scenario,
            recorder,
            progress=progress,
            on_error=on_error,
            on_note=on_note,
            trace=trace,
            prepare=prepare,
            notices=[] if warn is None else warn,
        )
        totals = run.run()
    if warn is not None:
        warn.extend([*run.resource_leaks.warnings(run.cluster.world), *run.call_costs.warnings()])
    failed = {rank: status for rank, status in sorted(run.outcome.statuses.items()) if status}
    for rank, status in failed.items():
        time_s = run.outcome.ends_s.get(rank, totals.virtual_seconds)
        error = RankError(rank, time_s, f"rank {rank} ended with exit status {status} at {time_s:.6g} s")
        error.__dict__ |= {"totals": totals, "status": status}
        raise error
    return totals
