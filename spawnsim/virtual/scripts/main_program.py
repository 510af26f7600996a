"""Turns the processes of a main program into virtual ranks: `multiprocessing` is replaced while the program runs.

`run_main` runs a script; `processes_as_ranks` serves code of an ordinary process, such as a test. multiprocessing's own
classes stay: only the parts below them that fork, exec and share memory between processes are replaced. Pools
and the workers of data loaders in the main program remain real processes.
"""

from __future__ import annotations

import builtins
import math
import multiprocessing.connection
import multiprocessing.context
import multiprocessing.managers
import multiprocessing.popen_fork
import multiprocessing.popen_forkserver
import multiprocessing.popen_spawn_posix
import multiprocessing.process
import multiprocessing.queues
import multiprocessing.sharedctypes
import multiprocessing.synchronize
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np
from greenlet import getcurrent

from spawnsim.errors import ParameterError, ProgramError, SpawnsimError, did_you_mean
from spawnsim.importing import after_import
from spawnsim.random import NUMPY, PYTHON, TORCH, WORLD, Streams
from spawnsim.scenario import Scenario
from spawnsim.virtual.accounting import counted_device
from spawnsim.virtual.cluster import Totals
from spawnsim.virtual.engine.kernel import current_task
from spawnsim.virtual.engine.world import Recorder
from spawnsim.virtual.interpreter import CLOCKS, Patches, Put
from spawnsim.virtual.scripts import process_objects
from spawnsim.virtual.scripts.process_managers import Manager
from spawnsim.virtual.scripts.rank_process import RankModules
from spawnsim.virtual.scripts.script import Script, status_of
from spawnsim.virtual.scripts.spawned import ProcessExit
from spawnsim.virtual.scripts.spawning import Session, Started, active, entered
from spawnsim.virtual.scripts.stubs import stubbed
from spawnsim.virtual.torch.devices import OF_MAIN, Devices
from spawnsim.virtual.torch.entry import cuda_as_cpu, needs_gpu

mp: Any = multiprocessing
NONE_STARTED = (
    "the main program has started no process that is a rank (pools remain real processes); if each rank runs the "
    "program, as under torchrun, give --ranks N"
)
POPENS = {
    "fork": multiprocessing.popen_fork, "spawn": multiprocessing.popen_spawn_posix,
    "forkserver": multiprocessing.popen_forkserver,
}  # fmt: skip
# Modules whose processes and locks are their own: real ones.
LIBRARIES = (
    "multiprocessing.",
    "concurrent.futures",
    "torch.utils.data",
    "torch.multiprocessing.pool",
    "joblib",
    "loky",
)
TRANSPARENT = ("multiprocessing.context", "multiprocessing.sharedctypes", "spawnsim.")


def _of_a_library(name: str | None) -> bool:
    return name is not None and name.startswith(LIBRARIES) and not name.startswith(TRANSPARENT)


def _for_a_library(frame: FrameType | None) -> bool:
    """Return whether the first caller that is not a context of multiprocessing is a library."""
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(TRANSPARENT):
        frame = frame.f_back
    return frame is not None and _of_a_library(str(frame.f_globals.get("__name__")))


def _starting(original: Any, method: str) -> Callable[[Any], Any]:
    def start(process: Any) -> Any:
        target = getattr(process, "_target", None)
        module = getattr(target, "__module__", None) or getattr(type(target), "__module__", None)
        own = getattr(getattr(target, "__func__", None), "__module__", module)
        if _of_a_library(own):
            with _originals():
                return original(process)
        return active().start(process, "fork" if method == "fork" else "spawn")

    return start


ORIGINALS: list[tuple[Any, str, Any]] = []  # classes that are replaced: module, name, class


@contextmanager
def _originals() -> Iterator[None]:
    """Put the replaced classes back while the block starts a real process: pickle finds them by their names."""
    now = [(module, name, getattr(module, name)) for module, name, _ in ORIGINALS]
    try:
        for module, name, original in ORIGINALS:
            setattr(module, name, original)
        yield
    finally:
        for module, name, replaced in now:
            setattr(module, name, replaced)


def _made(original: Any, virtual: type) -> type:
    """Return a class that makes virtual objects, and for libraries original ones."""

    def __new__(cls: Any, *args: Any, ctx: Any = None, **kwargs: Any) -> Any:  # noqa: N807
        if _for_a_library(sys._getframe(1)):
            return original(*args, ctx=ctx, **kwargs)
        return virtual(*args, **kwargs)

    return type(original.__name__, (virtual,), {"__new__": __new__, "__doc__": virtual.__doc__})


def _piping(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def pipe(duplex: bool = True) -> Any:
        return original(duplex) if _for_a_library(sys._getframe(1)) else process_objects.pipe(duplex)

    return pipe


def _waiting(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def wait(object_list: Any, timeout: float | None = None) -> Any:
        objects = list(object_list)
        if any(isinstance(each, (Started, process_objects.Connection)) for each in objects):
            return process_objects.wait(objects, timeout)
        return original(objects, timeout)

    return wait


def _polling(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a question about a process that lets a little time pass while the process runs."""

    @wraps(original)
    def ask(process: Any) -> Any:
        started = process._popen
        if isinstance(started, Started) and started.returncode is None and current_task() is None:
            started.session.poll()
        return original(process)

    return ask


def _here() -> Started | None:
    """Return the process of the calling rank; None in the main program."""
    task = current_task()
    group = active().group
    return None if task is None or group is None else group.started[task.rank]


def _exiting(original: Callable[[int], Any]) -> Callable[[int], Any]:
    @wraps(original)
    def leave(status: int) -> Any:
        if _here() is None:
            return original(status)
        raise ProcessExit(status)

    return leave


def _killing(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def kill(pid: int, number: int) -> None:
        found = active().process(pid)
        if found is None:
            original(pid, number)
        elif number:
            active().end(found, -int(number))

    return kill


def _identifying(original: Callable[[], int], of: Callable[[Started], int]) -> Callable[[], int]:
    @wraps(original)
    def identify() -> int:
        here = _here()
        return original() if here is None else of(here)

    return identify


def _install(put: Put) -> None:
    for method, module in POPENS.items():
        put(module, "Popen", _starting(vars(module)["Popen"], method))
    ORIGINALS.clear()
    replaced = {mp.queues: process_objects.IN_QUEUES, mp.synchronize: process_objects.IN_SYNCHRONIZE}
    for module, kinds in replaced.items():
        for name, virtual in kinds.items():
            ORIGINALS.append((module, name, getattr(module, name)))
            put(module, name, _made(getattr(module, name), virtual))
    put(mp.managers, "SyncManager", Manager)
    put(mp.connection, "Pipe", _piping(mp.connection.Pipe))
    put(mp.connection, "wait", _waiting(mp.connection.wait))
    base: Any = mp.process.BaseProcess
    put(base, "is_alive", _polling(base.is_alive))
    put(base, "exitcode", property(_polling(base.exitcode.fget)))
    put(os, "_exit", _exiting(os._exit))
    put(os, "kill", _killing(os.kill))
    put(os, "getpid", _identifying(os.getpid, lambda here: here.pid))
    put(os, "getppid", _identifying(os.getppid, lambda here: here.process._parent_pid))


def _install_torch(put: Put) -> None:
    """Keep the threads of ranks from asking for a signal at the end of the main program."""
    spawn: Any = sys.modules["torch.multiprocessing.spawn"]
    put(spawn, "_prctl_pr_set_pdeathsig", lambda number: None)


_installed, _torch_installed = Patches(_install).in_place, Patches(_install_torch).in_place


@contextmanager
def _clocks(session: Session, which: str) -> Iterator[None]:
    """Let the main program's `time.sleep` take virtual time, and with "all" its clocks show it."""
    getpid, here = os.getpid, os.getpid()  # real processes, as of a pool, keep the real clocks

    def is_main() -> bool:
        return getcurrent() is session.main and not session.starting and getpid() == here

    def sleeping(original: Callable[[float], None]) -> Callable[[float], None]:
        return lambda seconds: session.sleep(seconds) if is_main() else original(seconds)

    def install(put: Put) -> None:
        if which != "none":
            put(time, "sleep", sleeping(time.sleep))
        for name in CLOCKS if which == "all" else ():
            seconds, nanoseconds = getattr(time, name), getattr(time, f"{name}_ns")
            put(time, name, lambda s=seconds: session.now_s if is_main() else s())
            put(time, f"{name}_ns", lambda n=nanoseconds: round(session.now_s * 1e9) if is_main() else n())

    with Patches(install).in_place():
        yield


@contextmanager
def _in_place(session: Session, virtual_time: str) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(entered(session))
        stack.enter_context(_installed())
        stack.enter_context(after_import("torch", lambda: stack.enter_context(_torch_installed())))
        stack.enter_context(_clocks(session, virtual_time))
        yield


class Discarded:
    """A recorder that keeps nothing."""

    def row(self, rank: int, time_s: float, values: Any) -> None: ...

    def event(self, rank: int, time_s: float, kind: str, fields: Any) -> None:
        """Discard an event."""


@contextmanager
def processes_as_ranks(
    scenario: Scenario | None = None, recorder: Recorder | None = None
) -> Iterator[Session]:
    """Let the processes that the block starts be virtual ranks of this process.

    `multiprocessing.Process`, `torch.multiprocessing.spawn` and `start_processes`, queues, pipes, events, locks and
    barriers work as between processes, in virtual time. The ranks share all modules but those of the functions that
    they run: these have names of their own on each rank, which start with copies of the values in this process. At the
    end of the block the processes that still run are awaited; after an exception they are ended.

    Args:
        scenario: the circumstances; its number of ranks does not count.
        recorder: receives rows and events.

    Yields:
        The session: its `totals` has an entry for each group of processes that has run.
    """
    scenario = scenario or Scenario(ranks=1, deadline_s=math.inf)
    script = Script(Path("main program"), prefix=False, carrier="threads")
    session = Session(script, scenario, recorder or Discarded(), owned=False)
    with _in_place(session, "sleep"):
        try:
            yield session
        except BaseException:
            session.abandon()
            raise
        session.finish()


def run_main(
    path: str | Path, argv: Sequence[str], scenario: Scenario, *, recorder: Recorder, **how: Any
) -> Totals:
    """Run a script whose processes become virtual ranks.

    Args:
        path: the script.
        argv: its arguments.
        scenario: as for `run_program`; its number of ranks does not count.
        recorder: receives rows and events.
        how: hooks and options, as for `run_program`; and `on_ranks`, which is called with the number of ranks when
            processes begin.

    Returns:
        The totals of all its processes.

    Raises:
        ProgramError: the main program has raised an exception, or ended with a status other than 0.
        SpawnsimError: any other error that ended the run.
    """
    warn: list[str] | None = how.pop("warn", None)
    names = ("progress", "on_error", "on_note", "trace", "prepare", "on_ranks")
    hooks = {name: how.pop(name, None) for name in names}
    script = Script(Path(path), tuple(map(str, argv)), **how)
    if script.futures or script.carrier != "threads":
        raise ParameterError("processes of a main program are ranks in threads, without futures")
    session = Session(script, scenario, recorder, **hooks)
    with _as_main(session), _in_place(session, script.virtual_time), _substitutes(session):
        try:
            status = _execute(session)
            session.finish()
        except BaseException:
            session.abandon()
            raise
    totals = _sum(session.totals)
    if warn is not None:
        warn.extend([*session.warnings, *([] if session.most_ranks else [NONE_STARTED])])
    if status:
        error = ProgramError(f"the main program ended with exit status {status} at {session.now_s:.6g} s")
        error.__dict__ |= {"totals": totals, "status": status}
        raise error
    return totals


@contextmanager
def _substitutes(session: Session) -> Iterator[None]:
    """Give a main program its stubs, and its GPUs in name."""
    script, warnings = session.script, session.warnings
    session.how["notices"] = warnings
    with ExitStack() as stack:
        stack.enter_context(stubbed(script.stubs))
        if script.cuda_as_cpu:
            device = counted_device(session.scenario.compute)
            devices = Devices(OF_MAIN, device, lambda text: warnings.extend({text}.difference(warnings)))
            stack.enter_context(devices.of_main())
            stack.enter_context(cuda_as_cpu())
        yield


def _execute(session: Session) -> int:
    """Run the main program; return its exit status."""
    main: Any = sys.modules["__main__"]
    try:
        exec(session.code, main.__dict__)
    except SystemExit as leaving:
        return status_of(leaving)
    except SpawnsimError:
        raise
    except Exception as error:
        raised = ProgramError(
            f"the main program raised {type(error).__name__}{did_you_mean(error)} at {session.now_s:.6g} s"
            + ("; give --cuda-as-cpu to run it on CPU tensors" if needs_gpu(error) else "")
        )
        if not session.most_ranks:
            raised.add_note(f"warning: {NONE_STARTED}")
        raise raised from error
    return 0


@contextmanager
def _as_main(session: Session) -> Iterator[None]:
    """Give a script its own `__main__`, arguments and path; restore the modules and settings afterwards."""
    path = session.script.path
    folder, main = str(path.resolve().parent), ModuleType("__main__")
    main.__dict__.update(__file__=session.code.co_filename, __builtins__=builtins, __cached__=None)
    before, argv, places = dict(sys.modules), sys.argv, list(sys.path)
    context: Any = mp.context._default_context
    method, handler = context._actual_context, signal.getsignal(signal.SIGINT)
    sys.argv = [str(path), *session.script.argv]
    sys.path[:0] = [folder]
    hidden = RankModules(path.resolve().parent, session.script.private).hidden()
    for name in hidden:  # modules of an earlier program, in this process
        del sys.modules[name]
    sys.modules |= {"__main__": main, "__mp_main__": main}
    environ = dict(os.environ)
    try:
        with _generators(session.scenario.seed):
            yield
    finally:
        sys.argv, sys.path[:] = argv, places
        for name in [
            name for name in sys.modules if _beside(sys.modules[name], folder) or name == "__mp_main__"
        ]:
            del sys.modules[name]
        sys.modules.update(hidden)
        sys.modules["__main__"] = before["__main__"]
        if "__mp_main__" in before:
            sys.modules["__mp_main__"] = before["__mp_main__"]
        context._actual_context = method
        signal.signal(signal.SIGINT, handler)
        os.environ.clear()
        os.environ.update(environ)


@contextmanager
def _generators(seed: int) -> Iterator[None]:
    """Let the generators of a main program start from the seed; restore them afterwards."""
    streams, python, numpy = Streams(seed, WORLD), random.getstate(), np.random.get_state()
    random.seed(streams.seed(PYTHON))
    np.random.seed(streams.seed(NUMPY) & 0xFFFFFFFF)
    with ExitStack() as stack:

        def loaded() -> None:
            torch: Any = sys.modules["torch"]
            stack.callback(torch.default_generator.set_state, torch.default_generator.get_state())
            torch.manual_seed(streams.seed(TORCH))

        stack.enter_context(after_import("torch", loaded))
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _beside(module: Any, folder: str) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and file.startswith(folder + os.sep) and "site-packages" not in file


def _sum(totals: Sequence[Totals]) -> Totals:
    """Return the totals of all groups of processes: one digest, and the sums of the counts."""
    if len(totals) == 1:
        return totals[0]
    import hashlib

    digest = hashlib.blake2b("".join(each.digest for each in totals).encode(), digest_size=16)
    counts = {
        name: sum(getattr(each, name) for each in totals)
        for name in ("wall_seconds", "events", "scheduled", "messages", "bytes")
    }
    return Totals(
        virtual_seconds=max((each.virtual_seconds for each in totals), default=0.0),
        digest=digest.hexdigest(),
        leaks=tuple(dict.fromkeys(leak for each in totals for leak in each.leaks)),
        mistakes=tuple(dict.fromkeys(mistake for each in totals for mistake in each.mistakes)),
        all_dead=any(each.all_dead for each in totals),
        **counts,
    )
