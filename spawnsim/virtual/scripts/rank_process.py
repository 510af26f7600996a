"""Makes a virtual rank look like a process: its own modules, `sys.argv`, streams and clocks.

A rank's state is put in place when the rank runs, and removed when another rank runs. Its own modules are the script
and the modules imported from the script's folder; installed packages are imported once and shared. Output of ranks
appears in whole lines, each prefixed with its rank. The clocks of `time` show virtual seconds, from zero.
"""

from __future__ import annotations

import atexit
import builtins
import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder
from itertools import takewhile
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, TextIO

from spawnsim.errors import ParameterError
from spawnsim.importing import of_a_rank
from spawnsim.virtual.engine.kernel import Task, current_task
from spawnsim.virtual.interpreter import CLOCKS, Patches, Put
from spawnsim.virtual.mpi.communicators import held
from spawnsim.virtual.mpi.module import MPI
from spawnsim.virtual.scripts.environment import CEnvironment, set_environ
from spawnsim.virtual.scripts.stubs import stub_names, stub_spec

SHARED_PACKAGES = {"spawnsim", "mpi4py"}  # never a rank's own, wherever they are installed


class RankModules:
    """A finder for `sys.meta_path` that finds ranks' own modules, and remembers their names.

    These are modules in the script's folder, in the folders of PYTHONPATH, and in folders that the program has added
    to `sys.path`. `private` names installed packages that each rank imports separately, and `stubs` trackers that are
    replaced by modules of `stubs.py`.
    """

    def __init__(self, folder: Path, private: Sequence[str] = (), stubs: Sequence[str] = ()) -> None:
        self.folder, self.stubs = str(folder), stub_names(stubs)
        self.private = frozenset(private) | self.stubs
        self.names = {"__main__"}
        python_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        self._folders = {self.folder, *(os.path.realpath(entry) for entry in python_path if entry)}
        self._common = {os.path.realpath(entry) for entry in sys.path} - self._folders
        self._finders: list[Any] = []  # all finders before the program

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """Return the spec of a rank's own module, or None for shared ones."""
        top, _, rest = name.partition(".")
        parts = path
        if name in self.stubs or top in self.stubs:
            self.names.add(name)
            of_a_rank(name)
            return stub_spec(name)
        if top in SHARED_PACKAGES or (rest and name.rpartition(".")[0] not in self.names):
            return None
        if path is None:
            path = None if top in self.private else self._own(sys.path)
        spec = PathFinder.find_spec(name, path, target)
        # An extension module exists once per process, whatever its spec: most refuse to be loaded twice. A folder that
        # is not a package, such as one for notes on torch, hides no package: Python uses such a folder only if it
        # finds nothing else.
        if spec is None or isinstance(spec.loader, ExtensionFileLoader):
            return None
        if path is not None and not rest and not spec.has_location and _is_package(name):
            return None
        self.names.add(name)
        of_a_rank(name)
        found = (finder.find_spec(name, parts, target) for finder in self._at_the_head())
        return next((each for each in found if each is not None), spec)

    def _at_the_head(self) -> list[Any]:
        """Return the finders that the program has put before all others: they determine how a module is loaded."""
        return list(takewhile(lambda finder: finder not in self._finders, list(sys.meta_path)[1:]))

    def add_folder(self, file: str) -> str:
        """Make the modules beside a file ranks' own; return their folder."""
        folder = os.path.dirname(os.path.realpath(file))
        self._folders.add(folder)
        return folder

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Make imports within the block ask this finder first."""
        before, self._finders = sys.meta_path, list(sys.meta_path)
        sys.meta_path = finders = Finders(self, before)
        try:
            yield
        finally:
            before[:] = list(finders)[1:]  # finders that packages have added stay for the rest of the process
            sys.meta_path = before

    def _own(self, entries: Sequence[str]) -> list[str]:
        return [
            entry
            for entry in entries
            if os.path.realpath(entry) in self._folders or os.path.realpath(entry) not in self._common
        ]

    def hidden(self) -> dict[str, ModuleType]:
        """Return the loaded modules that would hide ranks' own modules."""
        return self.hidden_by(self.folder)

    def hidden_by(self, folder: str) -> dict[str, ModuleType]:
        """Return the loaded modules that would hide the modules of a folder."""
        entries = list(Path(folder).iterdir())
        tops = {entry.stem for entry in entries if entry.suffix == ".py" or (entry / "__init__.py").exists()}
        tops |= {
            entry.name for entry in entries if entry.is_dir() and not _origin(sys.modules.get(entry.name))
        }
        tops = (tops | self.private) - SHARED_PACKAGES - set(sys.stdlib_module_names)
        return {name: module for name, module in sys.modules.items() if self._hides(name, module, tops)}

    def _hides(self, name: str, module: Any, tops: set[str]) -> bool:
        if name in self.stubs:  # as `torch.utils.tensorboard`
            return True
        top = name.partition(".")[0]
        origin = _origin(module)
        # Extension submodules have no file (`torch._C._dynamo`): their place is their package's.
        place = origin or _origin(sys.modules.get(top))
        installed = "site-packages" in place and top not in self.private
        return top in tops and not installed and not origin.endswith((".so", ".pyd"))


class Finders(list[Any]):
    """`sys.meta_path` that keeps the finder of ranks' modules first, even when programs insert theirs at the head.

    pytest does so, to rewrite assertions: without this class, it would find all test modules, and all ranks would
    share them.
    """

    def __init__(self, own: RankModules, others: Sequence[Any]) -> None:
        super().__init__(others)
        self._own = own

    def __iter__(self) -> Iterator[Any]:
        yield self._own
        yield from super().__iter__()


def _is_package(name: str) -> bool:
    """Return whether a name on `sys.path` is a module or package, and not only a folder."""
    spec = PathFinder.find_spec(name)
    return spec is not None and spec.has_location


def _origin(module: Any) -> str:
    """Return a module's file, or "" if it has no file."""
    return getattr(getattr(module, "__spec__", None), "origin", None) or ""


# Attributes of sys that are separate for each rank.
ATTRIBUTES = ("argv", "path", "stdin", "stdout", "stderr", "excepthook", "displayhook")
# Builtins: programs replace `print` by a function that does nothing on all ranks but the first.
BUILTINS = ("print", "input", "open")


_locks: dict[str, Any] = getattr(sys.modules["importlib._bootstrap"], "_module_locks", {})


def _builtins() -> tuple[Any, ...]:
    return tuple(map(vars(builtins).get, BUILTINS))


def _set_builtins(values: tuple[Any, ...]) -> None:
    vars(builtins).update(zip(BUILTINS, values, strict=True))


@dataclass(eq=False)
class Process:
    """The process state of one rank."""

    attributes: dict[str, Any]
    modules: dict[str, ModuleType] = field(default_factory=dict)
    environ: dict[Any, Any] = field(default_factory=dict)  # as `os.environ` keeps it
    locks: dict[str, Any] = field(default_factory=dict)  # of modules that it is importing
    at_exit: list[Callable[[], Any]] = field(default_factory=list)
    builtins: tuple[Any, ...] | None = None  # None: as outside the run
    written: dict[bytes, bytes | None] = field(default_factory=dict)  # to C's environment; None: deleted
    # Modules shared with the program that has started the rank: the names that are not in place.
    globals: dict[ModuleType, dict[str, Any]] = field(default_factory=dict)


class Processes:
    """All ranks' processes; at most one is in place."""

    def __init__(self, own: RankModules, attributes: dict[str, Any]) -> None:
        self.own = own
        self._attributes = attributes
        self._c_environment = CEnvironment(self.calling)
        self._all: dict[int, Process] = {}
        self._here: Process | None = None
        self._attributes_outside: dict[str, Any] = {}
        self._hidden: dict[str, ModuleType] = {}
        self._builtins = _builtins()

    def add(self, rank: int, variables: Mapping[str, str], argv: Sequence[str] | None = None) -> Process:
        """Add a rank, at the start of its program; `variables` extend the environment that all ranks share.

        `argv` is the file and the arguments of another program that this one spawns.
        """
        attributes = self._attributes | {
            "argv": list(argv or self._attributes["argv"]), "path": list(self._attributes["path"]),
            "excepthook": sys.__excepthook__,
        }  # fmt: skip
        if argv is not None:
            folder = attributes["path"][0] = self.own.add_folder(argv[0])
            for name in (
                self.own.hidden_by(folder).keys() - self.own.names
            ):  # of another program, in this process
                self._hidden[name] = sys.modules.pop(name)
        if rank:
            attributes["stdin"] = io.StringIO()  # as under mpiexec: rank 0 reads the terminal
        main = ModuleType("__main__")
        environ = self._c_environment.with_variables(variables)
        self._all[rank] = process = Process(attributes, {"__main__": main}, environ=environ)
        return process

    def enter(self, task: Task) -> None:
        """Put the process of a task's rank in place."""
        # Called at each switch of tasks, so state is swapped only when the rank changes. A rank's modules are
        # collected when the rank is swapped out: only then are its imports known.
        process = self._all[task.rank]
        here = self._here
        if process is here:
            return
        if here is not None:
            self._put_away(here)
        else:
            self._hide()
        self._here = process
        for name, value in process.attributes.items():
            setattr(sys, name, value)
        if process.builtins is not None:
            _set_builtins(process.builtins)
        set_environ(process.environ)
        sys.modules.update(process.modules)
        _locks.update(process.locks)
        self.swap_globals(process)

    @staticmethod
    def swap_globals(process: Process) -> None:
        """Exchange the names of a rank's modules and those in place."""
        for module, coming in process.globals.items():
            names = vars(module)
            process.globals[module] = dict(names)
            for name in names.keys() - coming.keys():
                del names[name]
            names.update(coming)

    def leave(self) -> None:
        """Put the original state in place: a program outside all ranks continues."""
        if self._here is not None:
            self._put_away(self._here)
            for name, value in self._attributes_outside.items():
                setattr(sys, name, value)
            self._c_environment.leave()
            sys.modules.update(self._hidden)
        self._here = None

    def _hide(self) -> None:
        """Remove the modules that would hide ranks' own from `sys.modules`."""
        for name in {*self._hidden, *self.own.names}:
            if name in sys.modules:
                self._hidden[name] = sys.modules.pop(name)

    def _put_away(self, process: Process) -> None:
        self.swap_globals(process)
        for name in ATTRIBUTES:
            process.attributes[name] = getattr(sys, name)
        now = _builtins()
        if now != self._builtins:
            _set_builtins(self._builtins)
        process.builtins = now if now != self._builtins else None
        loaded = sys.modules
        process.modules = {name: loaded.pop(name) for name in self.own.names if name in loaded}
        # A rank may wait within the import of a module. Other ranks import their own modules by that name, and must
        # not wait for it: ranks in threads would all block.
        process.locks = {name: _locks.pop(name) for name in self.own.names if name in _locks}

    def calling(self) -> Process | None:
        """Return the process of the running rank."""
        task = current_task()
        return None if task is None else self._all.get(task.rank)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap processes while the block runs; afterwards restore the original state."""
        self._attributes_outside = {name: getattr(sys, name) for name in ATTRIBUTES}
        self._hidden = self.own.hidden() | {"__main__": sys.modules["__main__"]}
        self._hide()
        environs = [process.environ for process in self._all.values()]
        try:
            with self.own.asked(), Patches(self._install).in_place(), self._c_environment.shared(environs):
                yield
        finally:
            self.leave()
            sys.modules.update(self._hidden)

    def _install(self, put: Put) -> None:
        put(atexit, "register", self._registering(atexit.register))
        put(atexit, "unregister", self._unregistering(atexit.unregister))
        self._c_environment.install(put)

    # -- atexit ------------------------------------------------------------------------------------------------

    def _registering(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return an `atexit.register` that keeps a rank's functions for the end of that rank."""

        def register(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
            process = self.calling()
            if process is None or not self._by_a_rank(sys._getframe(1)):
                original(function, *args, **kwargs)
            else:
                call = lambda: function(*args, **kwargs)  # noqa: E731
                call.function = function  # type: ignore[attr-defined]
                process.at_exit.append(call)
            return function

        return register

    def _by_a_rank(self, frame: FrameType | None) -> bool:
        """Return whether a rank registers a function, and not a module that all ranks share.

        A registration by a shared module during its import is for all ranks, and so is one by the standard library,
        which often registers only once, at the first use.
        """
        names = [""]
        while frame is not None:
            names.append(str(frame.f_globals.get("__name__")))
            if names[1].partition(".")[0] in sys.stdlib_module_names or frame.f_code.co_name == "<module>":
                break
            frame = frame.f_back
        return names[-1] in self.own.names

    def _unregistering(self, original: Callable[..., Any]) -> Callable[[Callable[..., Any]], None]:
        def unregister(function: Callable[..., Any]) -> None:
            original(function)
            process = self.calling()
            if process is not None:
                process.at_exit = [call for call in process.at_exit if call.function != function]  # type: ignore[attr-defined]

        return unregister


Who = Callable[[], int | None]  # the running rank, or None outside ranks
OnOutput = Callable[[int, str], None]  # receives a rank's output, in pieces of any length


class Lines(io.TextIOBase):
    """A text stream for all ranks: buffers each rank's unfinished line, so that lines are not mixed."""

    def __init__(
        self,
        target: TextIO,
        who: Who,
        prefix: bool = True,
        shown: Callable[[], bool] = lambda: True,
        *,
        on_output: OnOutput = lambda rank, text: None,
    ) -> None:
        self._target, self._who, self._prefix, self._shown, self._on_output = (
            target,
            who,
            prefix,
            shown,
            on_output,
        )
        self._unfinished: dict[int, str] = {}
        self._bytes = RawLines(self)

    @property
    def buffer(self) -> Any:
        """The underlying byte stream."""
        return self._bytes

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._target, "encoding", None) or "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        """The handling of characters that cannot be encoded."""
        return getattr(self._target, "errors", None) or "strict"

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._target.fileno()

    def write(self, text: str) -> int:
        """Write text of the calling rank; complete lines appear, the rest is buffered until its line ends."""
        rank = self._who()
        if rank is None:
            return self._target.write(text)
        if not self._shown():
            return len(text)
        self._on_output(rank, text)
        # A rank may print part of a line, wait in a call, and print the rest: other ranks print in the meantime.
        lines = (self._unfinished.pop(rank, "") + text).split("\n")
        if lines[-1]:
            self._unfinished[rank] = lines[-1]
        if len(lines) > 1:
            front = f"[rank {rank}] " if self._prefix else ""
            self._target.write("".join(f"{front}{line}\n" for line in lines[:-1]))
        return len(text)

    def flush(self) -> None:
        self._target.flush()

    def close(self) -> None:
        """Stay open: all ranks share the stream."""

    def finish(self) -> None:
        """Write the unfinished lines of all ranks."""
        for rank, line in sorted(self._unfinished.items()):
            front = f"[rank {rank}] " if self._prefix else ""
            self._target.write(f"{front}{line}\n")
        self._unfinished.clear()
        self._target.flush()


class RawLines(io.RawIOBase):
    """The byte stream under `Lines`: decodes bytes and writes them as text."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Write bytes of the calling rank."""
        raw = bytes(data)
        self._lines.write(raw.decode(self._lines.encoding, "replace"))
        return len(raw)

    def flush(self) -> None:
        self._lines.flush()

    def close(self) -> None:
        """Stay open."""


VIRTUAL_TIME = ("all", "sleep", "none")


@contextmanager
def virtual_time(which: str = "all") -> Iterator[None]:
    """Make `time.sleep` ("sleep"), or also the clocks ("all"), virtual for ranks while the block runs."""
    if which not in VIRTUAL_TIME:
        raise ParameterError(f"virtual_time={which!r}: give one of {', '.join(VIRTUAL_TIME)}")

    def install(put: Put) -> None:
        if which != "none":
            put(time, "sleep", _sleeping(time.sleep))
        for name in CLOCKS if which == "all" else ():
            put(time, name, _reading(getattr(time, name)))
            put(time, f"{name}_ns", _counting(getattr(time, f"{name}_ns")))

    with Patches(install).in_place():
        yield


def _sleeping(original: Callable[[float], None]) -> Callable[[float], None]:
    def sleep(seconds: float, /) -> None:
        if current_task() is None:
            original(seconds)
            return
        if seconds < 0:
            raise ValueError("sleep length must be non-negative")
        held("OWN").clock.sleep(seconds)

    return sleep


def _reading(original: Callable[[], float]) -> Callable[[], float]:
    return lambda: original() if current_task() is None else MPI.Wtime()


def _counting(original: Callable[[], int]) -> Callable[[], int]:
    return lambda: original() if current_task() is None else round(MPI.Wtime() * 1e9)
