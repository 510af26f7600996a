"""The ranks of one cluster that are processes of a main program: from their begin to their exit codes."""

from __future__ import annotations

import multiprocessing.process
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from greenlet import GreenletExit

from spawnsim.errors import program_traceback
from spawnsim.scenario import Scenario
from spawnsim.virtual.engine.kernel import RankDied, current_task
from spawnsim.virtual.engine.world import Rank
from spawnsim.virtual.process_state import PIDS
from spawnsim.virtual.reproducibility import generators_of
from spawnsim.virtual.scripts.rank_process import RankModules
from spawnsim.virtual.scripts.script import ScriptRun, status_of
from spawnsim.virtual.threads import join_all

if TYPE_CHECKING:
    from spawnsim.virtual.scripts.spawning import Session, Started

SIGKILL, SIGTERM = 9, 15
_process: Any = multiprocessing.process  # its stub lacks the internals


class ProcessExit(GreenletExit):  # type: ignore[misc]  # greenlet has no types
    """Ends a rank's process at once, as `os._exit` does. No `except Exception` catches it."""


class Group(ScriptRun):
    """Processes that were started together: the ranks of one cluster."""

    def __init__(self, session: Session, started: list[Started], scenario: Scenario) -> None:
        self.session, self.started = session, started
        self._own: dict[int, Any] = {}  # the process objects, as the ranks have them
        self._main_process = _process._current_process
        super().__init__(session.script, scenario, session.recorder, **session.how)
        self.cluster.world.attachments[PIDS] = True
        self.cluster.world.kernel.on_resume.append(self._name)
        self.cluster.world.kernel.on_leave.append(self.unname)

    def _compile(self) -> Any:
        return self.session.code

    def _modules(self) -> RankModules:
        if not self.session.owned:
            return SharedModules(self.script.path)
        modules = super()._modules()
        modules.names.add("__mp_main__")
        return modules

    def _start(self, rank: int) -> None:
        started = self.started[rank]
        started.rank = self.cluster.world.ranks[rank]
        self.cluster.start(rank, self._program, started.start_s)

    def _equip(self, rank: Rank) -> None:
        super()._equip(rank)
        started = self.started[rank.id]
        process = self.processes.add(rank.id, {})
        process.environ = dict(started.environ)
        if started.modules:
            process.modules = dict(started.modules)
        elif started.method != "fork" and self.session.owned:
            process.modules["__mp_main__"] = process.modules["__main__"]

    def _name(self, task: Any) -> None:
        _process._current_process = self._own.get(task.rank, self.started[task.rank].process)

    def unname(self) -> None:
        """Let the main program be multiprocessing's current process."""
        _process._current_process = self._main_process

    def _program(self, _rank: int) -> None:
        task = current_task()
        assert task is not None
        started = self.started[task.rank]
        if not started.begins:
            self._end(started, started.ending)
            return
        self.call_costs.begin()
        try:
            with self.call_costs.counting():
                self._bootstrap(started)
            join_all()
            code = 0
        except SystemExit as leaving:
            code = status_of(leaving)
        except ProcessExit as leaving:
            code = leaving.args[0]
        except RankDied:
            started.returncode = -SIGKILL
            self.session.changed()
            raise
        except GreenletExit:
            if task.kernel.closed:
                raise
            code = started.ending
        except BaseException as error:  # noqa: BLE001 - printed, as by multiprocessing
            code = 1
            sys.stderr.write(f"Process {started.process.name}:\n{program_traceback(error)}\n")
        self._end(started, code)

    def _bootstrap(self, started: Started) -> None:
        """Run a process from its beginning to its end."""
        assert started.rank is not None
        process = self.processes.calling()
        assert process is not None
        call = None
        if started.names is not None:
            call, process.globals = started.names.load()
            self.processes.swap_globals(process)
        else:
            main: Any = sys.modules["__main__"]
            main.__name__, main.__file__ = "__mp_main__", self.code.co_filename
            exec(self.code, main.__dict__)
        if started.call is not None:
            call = started.call.load()
        if started.generators is not None:
            task = current_task()
            assert task is not None
            generators_of(task).set_state(started.generators)
        assert call is not None
        kind, state = call
        own = kind.__new__(kind)
        vars(own).update(state, _popen=None, _config=dict(vars(started.process)["_config"]), _closed=False)
        own._parent_pid = started.process._parent_pid
        self._own[started.rank.id] = own
        _process._current_process = own
        own.run()

    def _end(self, started: Started, code: int) -> None:
        task = current_task()
        assert task is not None and started.rank is not None
        if not task.kernel.closed:
            task.kernel.observe()
        if code:  # other ranks find their connections closed
            started.rank.death_s = min(started.rank.death_s, task.clock)
        self.outcome.ends_s[task.rank] = task.clock
        started.returncode = code
        for note in started.on_end:
            note()
        self.session.changed()


class SharedModules(RankModules):
    """No module belongs to a rank: all share those of the main program."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Return None."""

    def hidden(self) -> dict[str, ModuleType]:
        return {}
