"""Programs that start their own ranks: `multiprocessing.Process`, `torch.multiprocessing.spawn` and their relatives.

The main program runs outside the virtual cluster. The processes that it starts become virtual ranks when it first waits
for them: their number is known then. While the main program waits, virtual time passes and ranks run; while it runs,
virtual time stands still. The kernel runs in a greenlet of the main program's thread, which switches to the main
program when its wait is over.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from threading import get_ident
from types import ModuleType
from typing import Any

from greenlet import getcurrent, greenlet

from spawnsim.errors import Deadlock, Timeout, UnsupportedError
from spawnsim.scenario import Scenario
from spawnsim.virtual.cluster import Totals
from spawnsim.virtual.engine.completion import Completion
from spawnsim.virtual.engine.event_queue import LATE
from spawnsim.virtual.engine.kernel import current_task
from spawnsim.virtual.engine.waiting import Unbroken, await_one, limited
from spawnsim.virtual.engine.world import Rank, Recorder
from spawnsim.virtual.interpreter import rare_collections
from spawnsim.virtual.scripts.copies import Copy, Forked, Shared, copied
from spawnsim.virtual.scripts.rank_process import RankModules
from spawnsim.virtual.scripts.script import Script, compiled
from spawnsim.virtual.scripts.spawned import SIGKILL, SIGTERM, Group, ProcessExit

POLL_S = 1e-3  # virtual seconds that pass when the main program polls
FIRST_PID = 5_000_000  # above those of the operating system
# Attributes of a process object that its copy does not get.
OF_THE_PARENT = ("_popen", "_sentinel", "_config", "_closed")


@dataclass(eq=False)
class Started(Shared):
    """A process that the main program has started: in the place of multiprocessing's `Popen`."""

    process: Any
    method: str
    session: Session
    pid: int
    start_s: float
    environ: dict[Any, Any]
    call: Copy | None = None  # the process object; None: in `names`
    names: Forked | None = None  # of modules that the process shares with the main program
    begins: bool = True  # whether it was not ended before its begin
    generators: dict[str, Any] | None = None  # states that a forked process starts with
    rank: Rank | None = None
    returncode: int | None = None
    ending: int = -SIGKILL  # its exit code if it is ended from outside
    modules: dict[str, ModuleType] = field(default_factory=dict)
    on_end: list[Callable[[], None]] = field(default_factory=list)

    @property
    def sentinel(self) -> Started:
        return self

    def poll(self, flag: int = 0) -> int | None:
        """Return the exit code; None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for its end."""
        name = self.process.name
        self.session.wait(lambda: self.returncode is not None, f"join() of {name}", timeout)
        return self.returncode

    def terminate(self) -> None:
        self.kill(SIGTERM)

    def kill(self, signal: int = SIGKILL) -> None:
        """End it as a signal does."""
        self.session.end(self, -signal)

    interrupt = terminate

    def close(self) -> None:
        """Forget it; its results are kept."""


_active: list[Session] = []


def active() -> Session:
    """Return the session whose main program or rank is the caller."""
    return _active[-1]


@contextmanager
def entered(session: Session) -> Iterator[None]:
    """Make a session the active one while the block runs."""
    if _active:
        raise UnsupportedError("a main program whose processes are virtual ranks cannot start another one")
    _active.append(session)
    try:
        yield
    finally:
        _active.pop()


class WaitingForProcess(Unbroken):
    """A rank that waits for an object that processes share."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def describe(self) -> str:
        return f"{self._what} of multiprocessing"

    def peers(self) -> tuple[int, ...]:
        """Return (): any rank might end the wait, and so might the main program."""
        return ()

    def missing(self, by_s: float = math.inf) -> tuple[int, ...]:
        """Return (): any rank might end the wait."""
        return ()


class MainProgram:
    """Stands for the main program in the kernel's queue of ready tasks. The hub runs it, so its carrier is false."""

    rank = -1

    def __init__(self, session: Session) -> None:
        self.carrier = self
        self._session = session

    def __bool__(self) -> bool:
        return False

    def switch(self) -> None:
        """Let the main program run until it waits again."""
        session = self._session
        for leave in session.kernel.on_leave:
            leave()
        session.main.switch()


class Session:
    """The processes of one main program, and its clock.

    Args:
        script: the main program's file and how its ranks run; None for the file: ranks share its modules.
        scenario: the circumstances; its number of ranks is replaced by that of the processes.
        recorder: receives rows and events.
        how: hooks, as for `ScriptRun`.
    """

    def __init__(self, script: Script, scenario: Scenario, recorder: Recorder, **how: Any) -> None:
        self.script, self.scenario, self.recorder, self.how = script, scenario, recorder, how
        self._on_ranks = how.pop("on_ranks", None)
        self.owned = how.pop("owned", True)  # whether the program is a script whose modules each rank imports
        self.code: Any = compiled(script.path) if self.owned else None
        self.main: Any = getcurrent()
        self._thread = get_ident()
        self.now_s = 0.0  # the main program's clock
        self.pending: list[Started] = []
        self.group: Group | None = None
        self.hub: Any = None
        self.totals: list[Totals] = []
        self.most_ranks = 0
        self.warnings: list[str] = []
        self._waiting: list[tuple[Callable[[], bool], Completion]] = []
        self._ready: Callable[[], bool] | None = None
        self.starting = False  # whether a cluster is being built, in the main program's thread
        self._pids = FIRST_PID

    @property
    def kernel(self) -> Any:
        assert self.group is not None
        return self.group.cluster.world.kernel

    @property
    def running(self) -> bool:
        return self.hub is not None and not self.hub.dead

    # -- starting --------------------------------------------------------------------------------------------

    def start(self, process: Any, method: str) -> Started:
        """Start a process of the main program: it becomes a virtual rank."""
        if self.running:
            raise UnsupportedError(
                f"{process.name} was started at {self.now_s:.6g} s, while earlier processes run, for which the main "
                "program has already waited: start all processes of a group before the first join, get, wait or sleep "
                "after their start"
            )
        self._pids += 1
        started = Started(process, method, self, self._pids, self.now_s, dict(os.environ._data))  # type: ignore[attr-defined]
        self._copy(started)
        self.pending.append(started)
        return started

    def _copy(self, started: Started) -> None:
        """Copy what the process starts with, at the time of its start."""
        process = started.process
        state = {name: value for name, value in vars(process).items() if name not in OF_THE_PARENT}
        call = type(process), state
        if started.method == "fork":
            started.generators = _generator_states()
        else:
            started.call = copied(call, receiver=started)
            if self.owned:
                return
        modules = started.modules = self._modules(process)
        given = call if started.call is None else None
        started.names = Forked.of(
            given, list({id(each): each for each in modules.values()}.values()), started
        )
        if self.owned and started.names.uncopied:
            names = ", ".join(sorted(started.names.uncopied))
            sentence = f"forked processes share {names} with the main program: pickle cannot copy all of it"
            self.warnings += [] if sentence in self.warnings else [sentence]

    def _modules(self, process: Any) -> dict[str, ModuleType]:
        """Return the modules whose names a forked process may set without an effect on others."""
        main = {"__main__": sys.modules["__main__"]}
        if self.owned:
            return RankModules(self.script.path.resolve().parent, self.script.private).hidden() | main
        target = getattr(process, "_target", None)
        inner = [target, *getattr(process, "_args", ())[:1]]
        names = {str(getattr(each, "__module__", None)) for each in inner} - {"torch.multiprocessing.spawn"}
        return main | {name: sys.modules[name] for name in sorted(names) if name in sys.modules}

    def _begin(self) -> None:
        """Make the started processes ranks of a cluster, which runs until the main program's clock."""
        if not self.pending:
            return
        started, self.pending = self.pending, []
        scenario = replace(self.scenario, ranks=len(started))
        self.most_ranks = max(self.most_ranks, len(started))
        if self._on_ranks is not None:
            self._on_ranks(self.most_ranks)
        self.starting = True
        try:
            self.group = group = Group(self, started, scenario)
        finally:
            self.starting = False

        def run() -> None:
            try:
                with rare_collections(len(started)):
                    self.totals.append(group.run())
            finally:
                group.unname()
                for each in started:  # those that an error of the run has ended
                    each.returncode = each.ending if each.returncode is None else each.returncode

        self.hub = greenlet(run, getcurrent())
        self._pump(lambda: False, self.now_s)

    # -- waiting ---------------------------------------------------------------------------------------------

    def wait(self, ready: Callable[[], bool], what: str, timeout: float | None = None) -> bool:
        """Wait until a condition holds; return whether it does, before the time-out.

        Args:
            ready: the condition.
            what: the call, for reports.
            timeout: virtual seconds; None: without limit.

        Returns:
            Whether the condition holds.

        Raises:
            Deadlock: nothing can end the main program's wait.
        """
        task = current_task()
        if task is not None:
            return self._rank_waits(task, ready, what, timeout)
        self.catch_up()
        if ready():
            return True
        until_s = math.inf if timeout is None else self.now_s + max(timeout, 0.0)
        self._begin()
        self._pump(ready, until_s)
        if not ready() and timeout is None:
            raise Deadlock(
                f"deadlock: the main program waits in {what} at {self.now_s:.6g} s, and no process runs that could "
                "end the wait",
            )  # fmt: skip
        if not ready():
            self.now_s = max(self.now_s, until_s)
        return ready()

    def _rank_waits(self, task: Any, ready: Callable[[], bool], what: str, timeout: float | None) -> bool:
        kernel, world = task.kernel, task.kernel.owner
        kernel.observe()
        end_s = math.inf if timeout is None else task.clock + max(timeout, 0.0)
        while not ready():
            if task.clock >= end_s:
                kernel.fruitless()
                return False
            entry = ready, Completion(kernel)
            self._waiting.append(entry)
            try:
                limit = nullcontext() if timeout is None else limited(task, end_s - task.clock, explicit=True)
                with limit:
                    await_one(world, entry[1], WaitingForProcess(what))
            except Timeout:
                if timeout is None:
                    raise
                return ready()
            finally:
                self._waiting.remove(entry)
        return True

    def look(self) -> None:
        """Wait until the state of shared objects at the caller's time is known."""
        task = current_task()
        if task is None:
            self.catch_up()
        else:
            task.kernel.observe()

    def look_for(self, ready: Callable[[], bool]) -> bool:
        """Return whether a condition holds now; a poll without a result takes the main program a little time."""
        task = current_task()
        self.look()
        if not ready():
            if task is None:
                self.poll()
            else:
                task.kernel.fruitless()
        return ready()

    def changed(self) -> None:
        """Wake the tasks, and the main program, whose condition holds now."""
        if not self.running:
            return
        kernel = self.kernel
        kernel.idle = 0
        for ready, completion in list(self._waiting):
            if completion.finish_s is None and ready():
                completion.complete(kernel.env.now)
        if all(each.returncode is not None for each in self.group.started):  # type: ignore[union-attr]
            self._ready = None  # the main program continues once the cluster has ended
        if self._ready is not None and self._ready():
            self._wake()

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass for the main program."""
        # Ranks begin later, at the times of their starts: programs sleep between starts, too.
        until_s = self.now_s + seconds
        if self.running:
            self._pump(lambda: False, until_s)
        self.now_s = max(self.now_s, until_s)

    def poll(self) -> None:
        """Let a little time pass: the main program asks for news."""
        self._begin()
        self.sleep(POLL_S)

    def catch_up(self) -> None:
        """Let ranks run until the main program's clock."""
        if any(each.start_s < self.now_s for each in self.pending):
            self._begin()

    def _pump(self, ready: Callable[[], bool], until_s: float) -> None:
        """Run the kernel until a condition holds or a time has come, or until all ranks have ended."""
        if get_ident() != self._thread:
            raise UnsupportedError("only the main program's main thread may wait for its processes")
        while self.running and not ready():
            begun = self.hub  # false until its first switch
            if begun and self.kernel.env.now >= until_s:
                return
            self._ready = ready
            if until_s < math.inf:
                self.kernel.env.at(
                    max(until_s, self.kernel.env.now), LATE + self.most_ranks, lambda: self._due(ready)
                )
            try:
                self.hub.switch()
            finally:
                self._ready = None
            over = self.hub.dead
            self.now_s = max(self.now_s, self.totals[-1].virtual_seconds if over else self.kernel.env.now)

    def _due(self, ready: Callable[[], bool]) -> None:
        if self._ready is ready:
            self._wake()

    def _wake(self) -> None:
        self._ready = None
        self.kernel.ready.append(MainProgram(self))

    # -- ending ----------------------------------------------------------------------------------------------

    def end(self, started: Started, code: int) -> None:
        """End a process from outside, with an exit code."""
        self.look()
        self._begin()
        rank = started.rank
        if started.returncode is not None or rank is None:
            return
        started.ending = code
        task = rank.tasks[0]
        if task is self.kernel.current:
            raise ProcessExit(code)
        if not task.carrier and not task.carrier.dead:
            started.begins = False
        for each in rank.tasks:
            if each.alive:
                self.kernel.throw(each, ProcessExit(code))

    def process(self, pid: int) -> Started | None:
        """Return the process with a number."""
        known = [*self.pending, *(self.group.started if self.group is not None else ())]
        return next((each for each in known if each.pid == pid), None)

    def finish(self) -> None:
        """Wait for the processes that the main program has not joined, as Python does at its end."""
        self._begin()
        if self.group is None:
            return
        for each in self.group.started:
            if each.process.daemon:
                self.end(each, -SIGTERM)
        self._pump(lambda: False, math.inf)

    def abandon(self) -> None:
        """End the processes that still run, after an error of the main program."""
        for each in self.pending:
            each.returncode = -SIGTERM
        self.pending.clear()
        if self.running and self.group is not None:
            for each in self.group.started:
                self.end(each, -SIGTERM)
            self._pump(lambda: False, math.inf)


def _generator_states() -> dict[str, Any]:
    """Return the states of the main program's generators, with which a forked process starts."""
    import random

    import numpy as np

    torch: Any = sys.modules.get("torch")
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.default_generator.get_state() if hasattr(torch, "default_generator") else None,
    }
