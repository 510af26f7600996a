"""Many cases of one program, in parallel processes that are reused; failures, and the faults that struck.

A process imports packages once, and loads the program anew for each case, since programs keep state in their modules.
"""

from __future__ import annotations

import linecache
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from spawnsim.errors import (
    CheckFailed,
    Deadlock,
    Livelock,
    MismatchError,
    RankError,
    SpawnsimError,
    StorageError,
    Timeout,
    TruncationError,
    WorldError,
)
from spawnsim.fuzzing.cases import Calm, Case, Space
from spawnsim.fuzzing.checks import Watch
from spawnsim.fuzzing.coverage import Reached
from spawnsim.fuzzing.shrinking import shrunk
from spawnsim.record import manifest
from spawnsim.run import Run
from spawnsim.run.process_setup import one_thread
from spawnsim.run.program import MODULE, ProgramFile, program
from spawnsim.run.result import totals_of
from spawnsim.run.virtual import execute
from spawnsim.study.executors import pool
from spawnsim.waits import is_installed

LIMIT_S = 60.0  # processor time for one case
STARVED = 10  # wall-time factor: for a case on a busy machine, or one that waits for real
PORTION = 8  # cases that a process receives at once
SHRINKING = 200  # cases at most to reduce a failing one
DIFFERENT = 8  # failures of different kinds after which a campaign ends


class Overdue(BaseException):
    """A case takes too long."""


ENDLESS = {each.__name__ for each in (Deadlock, Livelock, Timeout, Overdue)}


@dataclass(frozen=True)
class Failure:
    """A failure and its case.

    Attributes:
        what: the invariant, or the kind of error.
        place: the line of the program, if known.
        message: the whole message.
        case: the case.
        table: calls and lines of all living ranks, unless the message lists them.
        waits: the calls and lines that cause a deadlock, or the line of a time-out.
    """

    what: str
    place: str
    message: str
    case: Case
    table: str = ""
    waits: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        return self.what, self.place

    def is_same(self, other: Failure) -> bool:
        """Return whether two errors are the same: equal types, and equal lines or, for waits, calls and lines."""
        return (*self.key, self.waits) == (*other.key, other.waits)


@dataclass(frozen=True)
class Target:
    """The program under test: a file, or a function of a communicator.

    Attributes:
        program: the file's path, or the function.
        whole: run the whole file on every rank, whatever it defines.
        check: called with each run that finished without an error; False, or an exception, marks the run as failed.
            None: the function `check(run)` that a file with a `main(comm)` may define.
    """

    program: Path | Callable[..., Any]
    whole: bool = False
    check: Callable[[Run], Any] | None = None

    @property
    def name(self) -> str:
        return str(self.program) if isinstance(self.program, Path) else self.program.__name__

    def load(self, parameters: Mapping[str, Any]) -> tuple[Any, Callable[[Run], Any] | None]:
        """Return the program in its state before any run, and the function `check(run)` that its file may define."""
        if not isinstance(self.program, Path):
            return program(self.program, parameters), self.check
        file = _file(self.program, self.whole)
        if file.is_whole:
            return file, self.check
        own = _own_modules(self.program)
        if len(own) > 1:  # it imports other modules of its folder
            for name, module in list(sys.modules.items()):
                if getattr(module, "__file__", None) in own:
                    del sys.modules[name]
        task = program(file, parameters)
        return task, self.check or getattr(sys.modules[MODULE], "check", None)


# Read once per process: parsing a file for each case would take a quarter of the time of a small one.
@cache
def _file(path: Path, whole: bool) -> ProgramFile:
    return ProgramFile.read(path, whole=whole)


@cache
def _own_modules(path: Path) -> frozenset[str]:
    return frozenset(str(each.resolve()) for each in manifest.own_files(path).values())


@dataclass
class Found(Reached):
    """The findings of a campaign, or of a part of one.

    Attributes:
        runs: number of cases that ran.
        ended: runs that faults have ended as MPI's rules allow (a rank died and the program does not survive that).
        failures: the first failure of each kind, as found.
        counts: number of failures of each kind.
        small: the same failures in their smallest case.
        seconds: wall time.
        steps: with randomized priorities, the calls of a run, by number of ranks.
        infeasible: number of cases whose record of choices no run can follow; they prove nothing.
    """

    runs: int = 0
    ended: int = 0
    infeasible: int = 0
    failures: dict[tuple[str, str], Failure] = field(default_factory=dict)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    small: dict[tuple[str, str], Failure] = field(default_factory=dict)
    seconds: float = 0.0
    steps: dict[int, int] = field(default_factory=dict)

    def add(self, other: Found) -> None:
        self.steps |= other.steps
        self.runs, self.ended = self.runs + other.runs, self.ended + other.ended
        self.infeasible += other.infeasible
        self.counts += other.counts
        self.gather(other)
        for key, failure in other.failures.items():
            known = self.failures.get(key)
            if known is None or failure.case.seed < known.case.seed:
                self.failures[key] = failure


# ------------------------------------------------------------------------------------------------------- one case


def attempt(target: Target, case: Case, *, census: bool = False) -> tuple[Failure | None, Watch, bool]:
    """Run one case; return the failure, the watch, and whether faults have ended the run. `census`: see `Watch`.

    A run that cannot follow its record of choices has no failure: `watch.infeasible`.
    """
    failure, watch, ended = _attempt(target, case, census=census)
    if watch.choices is not None:
        watch.infeasible = watch.choices.refused(waits=failure is None or failure.what in ENDLESS)
    return (None, watch, False) if watch.infeasible else (failure, watch, ended)


def _attempt(target: Target, case: Case, *, census: bool) -> tuple[Failure | None, Watch, bool]:
    watch, error = Watch(case, census=census), None
    try:
        task, check = target.load(case.parameters)
        with watch.in_place(), _overdue(LIMIT_S):
            counted = execute(
                task, case.scenario(watch.plan), watch, prepare=watch.prepare, on_error=watch.failed,
                argv=case.world.get("argv", ()),
            )  # fmt: skip
        if watch.broken_at_end() is None and check is not None:
            _user_check(check, watch, counted)
    except (Exception, Overdue) as raised:  # noqa: BLE001 - any exception is evaluated
        error = raised
    if error is None:
        broken = watch.broken_at_end()
        return (None if broken is None else Failure(broken[0], "", ": ".join(broken), case)), watch, False
    if _explained(error, case, watch):
        return None, watch, True
    return _failure(error, case, watch.table_of_ranks), watch, False


def _user_check(check: Callable[[Run], Any], watch: Watch, counted: Any) -> None:
    """Call the function `check(run)` of a program's file, with the totals that the simulator has counted."""
    case, table, events = watch.case, watch.table(), watch.events()
    known = {"ranks": case.ranks, "plan": case.faults} | asdict(counted)
    run = Run(asdict(case), table, events, totals_of(table, events, known))
    if check(run) is False:
        raise CheckFailed("check(run)", "check(run) returned False")


def _cause(error: BaseException) -> BaseException:
    """Return the exception that a rank's program raised, or the error itself."""
    return error.__cause__ if isinstance(error, RankError) and error.__cause__ is not None else error


def _explained(error: BaseException, case: Case, watch: Watch) -> bool:
    """Return whether the faults explain the error: MPI allows it, and the program does not promise to survive it."""
    cause = _cause(error)
    if case.survive or not watch.plan.faults:
        return False
    if isinstance(cause, Deadlock):
        return watch.lost
    if isinstance(cause, (MismatchError, TruncationError)):  # messages between ranks were corrupted
        return watch.spoiled
    return isinstance(cause, WorldError) and not isinstance(cause, StorageError)


def _failure(error: BaseException, case: Case, table: str) -> Failure:
    cause = _cause(error)
    what = cause.what if isinstance(cause, CheckFailed) else type(cause).__name__
    message = "\n".join([str(error) or what, *getattr(error, "__notes__", ())])
    if not isinstance(error, (SpawnsimError, Overdue)):
        message = f"{what}: {message}"
    if not isinstance(cause, (SpawnsimError, Overdue)):
        trace = traceback.extract_tb(cause.__traceback__)
        own = [frame for frame in trace if not is_installed(frame.filename)]
        message += "".join(f"\n  {frame.filename}:{frame.lineno}: {frame.line}" for frame in own[-2:])
    found = re.search(r"[\w.-]+\.py:\d+", message)
    place, waits = found[0] if found else "", getattr(cause, "causes", ())
    # Waits are named by a table of lines, which differs between cases.
    if isinstance(cause, (Deadlock, Timeout, Overdue)):
        place, waits = "", waits or ((place,) if isinstance(cause, Timeout) else ())
    table = "" if isinstance(cause, (Deadlock, Livelock)) else table
    return Failure(what, place, message, case, table, waits)


@contextmanager
def _silent() -> Iterator[None]:
    """Discard the output of programs while the block runs: the output of many cases would hide the failures."""
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
    ):
        yield


@contextmanager
def _overdue(limit_s: float) -> Iterator[None]:
    """Raise `Overdue` in the block after this processor time, and repeatedly, where a signal can be handled."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    began_s, processor_s = time.monotonic(), time.process_time()

    def ring(*_: object) -> None:
        took_s, spent_s = time.monotonic() - began_s, time.process_time() - processor_s
        if spent_s >= limit_s:
            why = f"{spent_s:.0f} s of processor time: an endless loop without a call?"
        elif took_s >= STARVED * limit_s:
            why = f"{took_s:.0f} s: does it wait for something outside of the simulation?"
        else:
            return
        raise Overdue(f"still running after {why}")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit_s, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ------------------------------------------------------------------------------------------------------ many cases

# The calm case of a target and a space, for each number of ranks: run once per process.
_rehearsed: dict[tuple[str, str], dict[int, Calm]] = {}


def portion(target: Target, space: Space, seeds: Sequence[int]) -> Found:
    """Run the cases of some seeds."""
    found, known = Found(), _rehearsed.setdefault((target.name, repr(space)), {})

    def calm(ranks: int) -> Calm:
        if ranks not in known:
            _, watch, _ = attempt(target, space.calm(ranks), census=True)
            clocks = [0.0] if watch.world is None else [task.clock for task in watch.world.kernel.tasks]
            gap_s = watch.longest_gap_s() if watch.world is not None else 0.0
            known[ranks] = Calm(
                max(clocks), gap_s, watch.has_policies, watch.steps, frozenset(watch.reached().calls)
            )
        return known[ranks]

    linecache.checkcache()
    with one_thread(), _silent() if len(seeds) > 1 else nullcontext():
        for seed in seeds:
            case = space.case(seed, calm)
            failure, watch, ended = attempt(target, case)
            found.runs, found.ended = found.runs + 1, found.ended + ended
            found.infeasible += watch.infeasible
            if space.depth:
                found.steps[case.ranks] = known[case.ranks].steps
            found.gather(watch.reached())
            found.calls |= known[case.ranks].calls if case.ranks in known else set()
            if failure is not None:
                found.counts[failure.key] += 1
                found.failures.setdefault(failure.key, failure)
    return found


def reduce(target: Target, failure: Failure, ranks: Sequence[int]) -> Failure:
    """Return the same failure in the smallest case found, with one of these numbers of ranks."""

    def fails(case: Case) -> Failure | None:
        found = attempt(target, case)[0]
        return found if found is not None and found.is_same(failure) else None

    with one_thread(), _silent():
        return shrunk(failure, fails, ranks, SHRINKING)


class _Here(Executor):
    """An executor that runs each task at once, in this process: its functions need not be importable."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a task; its errors are raised here."""
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def campaign(
    target: Target,
    space: Space,
    seeds: Sequence[int],
    *,
    jobs: int = 0,
    shrink: bool = True,
    progress: Callable[[Found], None] = lambda found: None,
    seconds: float = float("inf"),
    most: int = DIFFERENT,
    found: Found | None = None,
) -> Found:
    """Run many cases of a program, and shrink the failing ones.

    Args:
        target: the program.
        space: the space of cases.
        seeds: one case each.
        jobs: parallel processes; 0: run in this one.
        shrink: whether to reduce failing cases.
        progress: receives all findings so far, repeatedly.
        seconds: wall time after which no new case begins.
        most: failures of different kinds after which no new case begins.
        found: receives the findings as they come, so that they survive Ctrl-C (default: a new object).

    Returns:
        All findings.

    Raises:
        SpawnsimError: the program cannot be loaded.
    """
    target.load(space.parameters)  # raises an error of the file itself once
    found, began_s = Found() if found is None else found, time.monotonic()
    portions = [list(seeds[at : at + PORTION]) for at in range(0, len(seeds), PORTION)]

    with pool(jobs, fresh=False) if jobs > 0 else _Here() as executor:
        waiting: set[Future[Found]] = set()
        while portions or waiting:
            over = time.monotonic() - began_s > seconds or len(found.failures) >= most
            while portions and len(waiting) < max(2 * jobs, 1) and not over:
                waiting.add(executor.submit(portion, target, space, portions.pop(0)))
            if not waiting:
                break
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for each in done:
                found.add(each.result())
            found.seconds = time.monotonic() - began_s
            progress(found)
        failures = found.failures.items() if shrink else ()
        tasks = {key: executor.submit(reduce, target, each, space.ranks) for key, each in failures}
        for key, task in tasks.items():
            found.small[key] = task.result()
    found.seconds = time.monotonic() - began_s
    return found
