"""A pytest session on virtual ranks: each rank collects and runs the tests, as under `mpiexec -n N pytest`.

Ranks meet after each test. The outer session shows each test once: it has failed if it has failed on any rank. If a
rank's test ends while others wait in it for ever, their calls raise the deadlock, and the session continues.
"""

from __future__ import annotations

import io
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

from spawnsim.errors import Deadlock, Livelock, SpawnsimError
from spawnsim.testing.ranks import hide_frames, on_ranks
from spawnsim.virtual.engine import diagnosis
from spawnsim.virtual.engine.kernel import Task, current_task, current_world
from spawnsim.virtual.engine.waiting import Unbroken
from spawnsim.virtual.engine.world import World
from spawnsim.virtual.scripts.rank_process import SHARED_PACKAGES, RankModules
from spawnsim.waits import is_program

# Options of the ranks' sessions: the outer session writes reports and watches the time.
INNER = ("--capture=sys", "-pno:threadexception", "-pno:unraisableexception", "-ofaulthandler_timeout=0")
# Options of plugins, by an option that exists if the plugin does: pytest-mpi skips its tests without its own.
OF_PLUGINS = {"xmlpath": "--junitxml=", "timeout": "--timeout=0", "with_mpi": "--with-mpi"}
PHASES = ("setup", "call", "teardown")
USES_TORCH = re.compile(rb"^\s*(import|from)\s+torch\b", re.MULTILINE)


def ranks_of(item: pytest.Item) -> tuple[int, ...]:
    """Return the numbers of ranks that a test's mark asks for: 1 without a mark.

    `parallel(3)`, `parallel([1, 3])` are mpi-pytest's (default: 3), `mpi(min_size=4)` is pytest-mpi's (default: 2).
    """
    parallel, mpi = item.get_closest_marker("parallel"), item.get_closest_marker("mpi")
    if parallel is not None:
        chosen = getattr(getattr(item, "callspec", None), "params", {}).get("_nprocs")
        wanted = chosen or (*parallel.args, *parallel.kwargs.values(), 3)[0]
        return (wanted,) if isinstance(wanted, int) else tuple(wanted)
    return (1,) if mpi is None else (max(2, mpi.kwargs.get("min_size") or 0),)


class SessionModules(RankModules):
    """All modules below the session's root folder: each rank imports them for itself.

    Args:
        root: the root folder.
        private: installed packages that each rank imports for itself.
    """

    def __init__(self, root: Path, private: Sequence[str] = ()) -> None:
        super().__init__(root, private)
        self._root = f"{root}/"
        self._folders |= {entry for entry in self._common if self._inside(f"{entry}/")}
        self._common -= self._folders

    def _inside(self, file: str) -> bool:
        return file.startswith(self._root) and is_program(file)

    def hidden(self) -> dict[str, ModuleType]:
        """Return the modules that the session has imported and each rank imports again."""
        loaded = {
            name: module
            for name, module in [*sys.modules.items()]
            if self._inside(str(getattr(module, "__file__", None)))
            and name.partition(".")[0] not in SHARED_PACKAGES
        }
        return super().hidden() | loaded


class EndOfTest(Unbroken):
    """The wait of a rank for the other ranks at the end of a test."""

    def __init__(self, meeting: Meeting, what: str) -> None:
        self._meeting, self._what = meeting, what

    def describe(self) -> str:
        """Return the end of the test."""
        return self._what

    def peers(self) -> Sequence[int]:
        """Return the absent ranks."""
        here = {task.rank for task in self._meeting.here}
        return [rank for rank in range(self._meeting.ranks) if rank not in here]

    def missing(self, by_s: float = 0.0) -> Sequence[int]:
        return self.peers()


class Meeting:
    """Where all ranks meet, outside of MPI and in no virtual time."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.here = ranks, list[Task]()

    def wait(self, what: str, last: Callable[[], None] = lambda: None) -> None:
        """Wait until all ranks are here; the last one calls `last`."""
        world = current_world()
        task = world.kernel.current
        self.here.append(task)
        if len(self.here) < self.ranks:
            world.kernel.block(EndOfTest(self, what))
            return
        others, self.here = self.here[:-1], []
        last()
        latest_s = max(each.clock for each in (*others, task))
        for each in (*others, task):
            each.clock = max(latest_s, world.kernel.env.now)
        for each in others:
            world.kernel.resume(each)

    def attend(self, world: World) -> None:
        """Let tests that never end fail, instead of ending the run."""
        kernel, stop = world.kernel, type(world.kernel).stop

        def end(error: BaseException) -> NoReturn:
            if isinstance(error, Livelock):  # of the caller, which polls
                raise error
            stop(kernel, error)

        kernel.stalled, kernel.stop = lambda: self.break_deadlock(world), end  # type: ignore[method-assign]

    def break_deadlock(self, world: World) -> bool:
        """Raise the deadlock in all ranks that wait within a test. Return whether there are any."""
        waiting = [task for task in world.kernel.tasks if task.parked]
        stuck = [task for task in waiting if not task.background and not isinstance(task.wait, EndOfTest)]
        if not stuck:
            return False
        text = str(diagnosis.deadlock([task for task in waiting if not task.background], []))
        for task in stuck:
            world.kernel.throw(task, Deadlock(text))
        return True


def _realign(world: World) -> None:
    """Remove what a failed test has left: messages, and collectives that some ranks never joined."""
    for context in world.open_contexts:
        for mailbox in context.mailboxes.values():
            mailbox.clear()
        context.instances.clear()
        done = max(context.calls.values(), default=0)
        context.calls = dict.fromkeys(context.everyone, done)


@dataclass
class Results:
    """The reports of all ranks, and the outer session, which shows them."""

    session: pytest.Session
    ranks: int
    show: Callable[[list[pytest.TestReport]], None]
    reports: dict[str, dict[int, list[Any]]] = field(default_factory=lambda: defaultdict(dict))
    names: dict[int, list[str]] = field(default_factory=dict)  # by rank, of the collected tests
    broken: dict[str, Any] = field(default_factory=dict)  # reports of failed collections
    # Tests whose marks ask for another number of ranks; None: marks do not count.
    others: dict[int, list[str]] | None = None
    problem: str = ""  # why a rank's session could not run

    def finish(self, test: str) -> None:
        """Show a test that all ranks have finished."""
        found = self.reports.pop(test)
        merged = []
        for phase in PHASES:
            of_phase = {rank: [each for each in found[rank] if each.when == phase] for rank in sorted(found)}
            if any(of_phase.values()):
                merged.append(
                    _merged({rank: _whole(each) for rank, each in of_phase.items() if each}, self.ranks)
                )
        if any(each.failed for each in merged):
            _realign(current_world())
        self.show(merged)


def _whole(reports: list[Any]) -> Any:
    """Return a rank's report of a phase, with the first of its failed subtests."""
    *subtests, report = reports
    failed = next((each for each in subtests if each.failed), None)
    if failed is not None:
        report.outcome = "failed"
        report.sections.insert(0, ("first failed subtest", failed.longreprtext))
    return report


def _merged(found: dict[int, Any], ranks: int) -> Any:
    """Return one report for a phase of a test on all ranks: the report of the first rank with the worst outcome."""
    order = {"failed": 0, "passed": 1, "skipped": 2}
    rank, report = min(
        found.items(), key=lambda each: (order[each[1].outcome], getattr(each[1], "deadlock", ""), each[0])
    )
    report.sections = [
        (f"{title} (rank {each})", text) for each in sorted(found) for title, text in found[each].sections
    ]
    if report.failed:
        alike = [each for each, other in found.items() if other.failed]
        text = f"failed on rank{'s' * (len(alike) > 1)} {', '.join(map(str, alike))} of {ranks}; rank {rank} is shown"
        shown = {report.deadlock or report.longreprtext}
        for each in alike:
            other = found[each].deadlock or found[each].longreprtext
            if other not in shown:
                shown.add(other)
                report.sections.insert(0, (f"rank {each}", other))
        report.sections.insert(0, ("virtual ranks", text))
    return report


class RankPlugin:
    """The plugin of one rank's session."""

    def __init__(self, rank: int, results: Results, meeting: Meeting, only: frozenset[str] | None) -> None:
        self._rank, self._results, self._meeting, self._only = rank, results, meeting, only
        self._reports: list[Any] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        others = self._results.others
        if others is not None:
            for item in items:
                for ranks in {*ranks_of(item)} - {1}:
                    others.setdefault(ranks, []).append(item.nodeid)
        if self._only is not None:
            items[:] = [item for item in items if item.nodeid in self._only]
        elif others is not None:
            items[:] = [item for item in items if 1 in ranks_of(item)]

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._results.broken.setdefault(report.nodeid, report)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Compare the ranks' tests."""
        names = self._results.names
        names[self._rank] = [item.nodeid for item in session.items]
        self._meeting.wait("the end of the collection")
        if any(each != names[0] for each in names.values()):
            other = next(rank for rank, each in names.items() if each != names[0])
            unequal = {*names[other]} ^ {*names[0]}
            session.items = []
            self._results.problem = (
                f"ranks 0 and {other} have collected different tests: {min(unequal, default='another order')}"
            )

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._reports = []
        result = yield
        results, test = self._results, item.nodeid
        results.reports[test][self._rank] = self._reports
        failed = any(report.failed for report in self._reports)
        end = f"{'failed' if failed else 'ended'} {test.rpartition('::')[2]}"
        self._meeting.wait(end, lambda: results.finish(test))
        item.session.shouldstop = results.session.shouldfail or results.session.shouldstop
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: Any) -> Any:
        report = yield
        error = None if call.excinfo is None else call.excinfo.value
        report.deadlock = str(error) if isinstance(error, Deadlock) else ""
        return report


def run_session(results: Results, only: Sequence[str] | None = None) -> None:
    """Run a session's tests on virtual ranks.

    Args:
        results: receives the results.
        only: node ids of the tests; None: all.
    """
    config, meeting = results.session.config, Meeting(results.ranks)
    keep = None if only is None else frozenset(only)
    more = [option for name, option in OF_PLUGINS.items() if hasattr(config.option, name)]
    args = [*config.invocation_params.args, *INNER, *more]

    def body(rank: int) -> None:
        meeting.attend(current_world())
        sys.stdout = sys.stderr = shown = io.StringIO()
        status = pytest.main(args, plugins=[RankPlugin(rank, results, meeting, keep)])
        if status in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
            results.problem = f"rank {rank}: {shown.getvalue()}"

    hide_frames()
    modules = SessionModules(config.rootpath, config.getoption("spawnsim_private") or ())
    on_ranks(results.ranks, body, modules, carrier="threads" if _uses_torch(config) else "greenlets")


def _uses_torch(config: pytest.Config) -> bool:
    places = [config.invocation_params.dir / arg.partition("::")[0] for arg in config.args]
    files = [file for place in places for file in (place.rglob("*.py") if place.is_dir() else [place])]
    return any(USES_TORCH.search(file.read_bytes()) for file in files if file.is_file())


class Outer:
    """The plugin of the outer session, whose tests all run on ranks: it shows their results.

    Args:
        ranks: their number; None: as each test's mark asks for.
    """

    def __init__(self, ranks: int | None) -> None:
        self._ranks = ranks

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> bool:
        """Collect nothing: the ranks do."""
        session.items = []
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the ranks' sessions."""
        if self._ranks is not None:
            self._run(session, self._ranks)
            return True
        for ranks, tests in sorted(self._run(session, 1, others={}).items()):
            self._run(session, ranks, tests)
        return True

    def _run(
        self, session: pytest.Session, ranks: int, only: Sequence[str] | None = None, others: Any = None
    ) -> dict[int, list[str]]:
        """Run tests on so many ranks; return the tests that ask for another number."""
        results = Results(session, ranks, lambda reports: self._show(session, reports), others=others)
        try:
            run_session(results, only)
        except SpawnsimError as error:
            raise pytest.UsageError("\n".join([str(error), *getattr(error, "__notes__", ())])) from error
        for report in results.broken.values():
            session.ihook.pytest_collectreport(report=report)
        if results.broken:
            raise session.Interrupted(f"{len(results.broken)} errors during collection")
        if results.problem:
            raise pytest.UsageError(results.problem)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        return results.others or {}

    def _show(self, session: pytest.Session, reports: list[pytest.TestReport]) -> None:
        hook, first = session.ihook, reports[0]
        session.testscollected += 1
        hook.pytest_runtest_logstart(nodeid=first.nodeid, location=first.location)
        for report in reports:
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=first.nodeid, location=first.location)


def is_on_a_rank() -> bool:
    """Return whether the caller is a rank's own session."""
    return current_task() is not None
