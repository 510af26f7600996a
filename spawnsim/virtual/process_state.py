"""State that Python and its packages keep once per process, made separate for every virtual rank.

`SWAPPED` lists the state that is exchanged when another rank runs, and the functions that change it. Nothing is
exchanged before a rank calls one of them: programs that change nothing pay nothing. `SHARED` lists functions whose
effect all ranks share: the first call of each function by any rank is reported, with its line. docs/unmodified.md has
the table.

`torch_values` covers more of torch's state. Some state is always swapped: modules, streams and the environment
(`scripts.rank_process`), random generators and torch's settings (`reproducibility`).
"""

from __future__ import annotations

import locale
import logging
import multiprocessing.context
import operator
import os
import signal
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial, wraps
from types import FrameType
from typing import Any, NamedTuple

from spawnsim.importing import after_import, amid_shared_import
from spawnsim.virtual.engine.diagnosis import place
from spawnsim.virtual.engine.kernel import Kernel, Task, current_task, current_world
from spawnsim.virtual.interpreter import Patches, Put
from spawnsim.waits import STANDARD, is_installed


@dataclass(frozen=True, eq=False)
class State:
    """A piece of a process's state: how to read it, how to set it, and which functions change it.

    Attributes:
        name: its name in reports.
        changed_by: the functions, "module.name".
        by_programs: whether to ignore calls within packages, which restore the state before they return.
        begin: maps the value outside the run to a rank's initial value.
        same: whether two values are equal, so that no exchange is needed.
    """

    name: str
    changed_by: str
    get: Callable[[], Any]
    set: Callable[[Any], object]
    by_programs: bool = False
    begin: Callable[[Any], Any] = lambda outside: outside
    same: Callable[[Any, Any], bool] = operator.eq


# -- the interpreter -------------------------------------------------------------------------------------------

# The original functions, before any run replaces them.
_umask, _chdir, _set_locale = os.umask, os.chdir, locale.setlocale


def _get_folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return None


def _set_folder(folder: str | None) -> None:
    if folder is not None:
        _chdir(folder)


def _get_umask() -> int:
    mask = _umask(0)
    _umask(mask)
    return mask


_warnings: Any = warnings  # its stub lacks the internals
# Names that `catch_warnings` and `logging.captureWarnings` replace, besides the list of filters and its content.
_SHOWING = (
    (warnings, "filters"), (warnings, "showwarning"), (warnings, "_showwarnmsg_impl"),
    (logging, "_warnings_showwarning"),
)  # fmt: skip


def _get_filters() -> tuple[Any, ...]:
    return tuple(getattr(owner, name) for owner, name in _SHOWING), tuple(warnings.filters)


def _set_filters(value: tuple[Any, ...]) -> None:
    for (owner, name), each in zip(_SHOWING, value[0], strict=True):
        setattr(owner, name, each)
    _warnings.filters[:] = value[1]
    if hasattr(warnings, "_filters_mutated"):
        _warnings._filters_mutated()
    else:  # from Python 3.14 on
        with _warnings._lock:
            _warnings._filters_mutated_lock_held()


def _begin_filters(value: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a separate list for the rank: a rank within `catch_warnings` restores the list object that it found."""
    return (list(value[1]), *value[0][1:]), value[1]


_start: Any = multiprocessing.context._default_context


# -- logging ---------------------------------------------------------------------------------------------------

_logging: Any = logging  # its stub lacks the internals
_set_attribute: Any = object.__setattr__


def _get_registry() -> tuple[Any, ...]:
    return (
        dict(_logging._handlers.data), list(_logging._handlerList), logging.root.manager.disable,
        _logging._logRecordFactory, _logging._loggerClass,
    )  # fmt: skip


def _set_registry(value: tuple[Any, ...]) -> None:
    by_name, handlers, disable, _logging._logRecordFactory, _logging._loggerClass = value
    _logging._handlers.data.clear()
    _logging._handlers.data.update(by_name)
    _logging._handlerList[:] = handlers  # in place: the default argument of `logging.shutdown`
    logging.root.manager.disable = disable
    _logging.root.manager._clear_cache()


REGISTRY = State(
    "logging", "logging._addHandlerRef logging.disable logging.setLogRecordFactory logging.setLoggerClass",
    _get_registry, _set_registry,
)  # fmt: skip


def _of_logger(logger: Any) -> State:
    """Return the state of one logger."""

    def get() -> tuple[Any, ...]:
        switches = logger.level, logger.propagate, logger.disabled
        return tuple(logger.handlers), tuple(logger.filters), switches

    def put_back(value: tuple[Any, ...]) -> None:
        logger.handlers[:], logger.filters[:], switches = value
        if switches != (logger.level, logger.propagate, logger.disabled):
            for name, each in zip(("level", "propagate", "disabled"), switches, strict=True):
                object.__setattr__(logger, name, each)
            _logging.root.manager._clear_cache()

    return State(f"the logger {logger.name}", "", get, put_back)


# -- the tables ------------------------------------------------------------------------------------------------

START = State(
    "the start method of multiprocessing", "multiprocessing.set_start_method",
    lambda: _start._actual_context, lambda value: setattr(_start, "_actual_context", value),
    begin=lambda outside: None,  # a process may choose once, and this one may have chosen
)  # fmt: skip
SWAPPED = (
    State("the working directory", "os.chdir os.fchdir", _get_folder, _set_folder),
    State("the umask", "os.umask", _get_umask, _umask),
    State(
        "the locale", "locale.setlocale",
        lambda: _set_locale(locale.LC_ALL), lambda value: _set_locale(locale.LC_ALL, value),
    ),
    State("socket's timeout", "socket.setdefaulttimeout", socket.getdefaulttimeout, socket.setdefaulttimeout),
    State(
        "the limit on digits", "sys.set_int_max_str_digits",
        sys.get_int_max_str_digits, sys.set_int_max_str_digits,
    ),
    State(
        "the folder of temporary files", "tempfile._get_default_tempdir",
        lambda: tempfile.tempdir, lambda value: setattr(tempfile, "tempdir", value),
    ),
    START,
    State(
        "the filters of warnings",
        "warnings.simplefilter warnings.filterwarnings warnings.resetwarnings warnings.catch_warnings.__enter__ "
        "logging.captureWarnings",
        _get_filters, _set_filters, by_programs=True, begin=_begin_filters,
    ),
    REGISTRY,
)  # fmt: skip
OF_A_LOGGER = ("addHandler", "removeHandler", "addFilter", "removeFilter")
ATTRIBUTES_OF_A_LOGGER = {"handlers", "filters", "level", "propagate", "disabled"}


def _of_torch(torch: Any) -> tuple[State, ...]:
    set_anomaly = torch.set_anomaly_enabled
    return (
        State(
            "torch's anomaly mode", "torch.set_anomaly_enabled",
            lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            lambda value: set_anomaly(*value),
        ),
        *(
            State(f"torch's {name}", f"torch.set_{name}", getattr(torch, get), getattr(torch, f"set_{name}"))
            for name, get in (
                ("float32_matmul_precision", "get_float32_matmul_precision"),
                ("num_threads", "get_num_threads"),
                ("warn_always", "is_warn_always_enabled"),
            )
        ),
        State("", "torch.multiprocessing.set_start_method", START.get, START.set),
    )  # fmt: skip


class Shared(NamedTuple):
    """A function whose effect all ranks share, and the reason why that matters."""

    function: str  # "module.name"
    why: str
    matters: Callable[..., bool] = lambda *args, **kwargs: True  # whether a call matters, by its arguments


PIDS = "process ids"  # attachment of a world whose ranks have process ids of their own
_SIGNALS = (
    "signal handlers and timers belong to the process, and the last one that is set counts for all ranks"
)
_STREAMS = "the descriptors of the standard streams belong to the process: the output of all ranks goes there"
SHARED = (
    Shared("signal.signal", _SIGNALS),
    Shared("signal.setitimer", _SIGNALS),
    Shared("signal.alarm", _SIGNALS),
    Shared("os.dup2", _STREAMS, lambda fd, fd2, *_, **__: fd2 in (0, 1, 2)),
    Shared("os.close", _STREAMS, lambda fd: fd in (0, 1, 2)),
    Shared(
        "os.getpid",
        "the process id is the same on all ranks: name files by the rank",
        lambda: PIDS not in current_world().attachments,
    ),
    Shared("resource.setrlimit", "limits of resources hold for all ranks"),
    Shared("time.tzset", "the time zone is the same on all ranks"),
)
SHARED_BY_TORCH = (
    Shared("torch.set_flush_denormal", "ranks that are greenlets share it: give --carrier threads"),
    Shared(
        "torch.set_num_interop_threads",
        "it can be set once in a process: the first call counts for all ranks",
    ),
)


# -- swapping --------------------------------------------------------------------------------------------------


class ProcessStates:
    """The state of each rank, as far as it differs from the process's state outside the run."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._outside: dict[State, Any] = {}  # of all state that any rank has changed
        self._kept: dict[tuple[int, int], dict[State, Any]] = {}  # by rank and incarnation
        self._here = OUTSIDE
        self._loggers: dict[Any, State] = {}

    def touch(self, state: State, task: Task) -> None:
        """Start swapping a state: the task's rank is about to change it."""
        if not self._outside:
            self._here = self._key(task)
            self._kernel.on_resume.append(self.enter)
            self._kernel.on_leave.append(self.leave)
        if state not in self._outside:
            self._outside[state] = outside = state.get()
            begun = state.begin(outside)
            if begun is not outside:
                state.set(begun)

    def touch_logger(self, logger: Any, task: Task) -> None:
        """Start swapping the state of a logger."""
        if logger not in self._loggers:
            self._loggers[logger] = _of_logger(logger)
        self.touch(self._loggers[logger], task)

    def _key(self, task: Task) -> tuple[int, int]:
        return task.rank, self._kernel.owner.ranks[task.rank].incarnation

    def enter(self, task: Task) -> None:
        """Put the state of a task's rank in place."""
        key = self._key(task)
        if key != self._here:
            self._switch(key)

    def leave(self) -> None:
        """Put the state outside the run in place: a program outside all ranks continues."""
        self._kept[OUTSIDE] = self._outside | self._kept.get(OUTSIDE, {})
        if self._here != OUTSIDE:
            self._switch(OUTSIDE)

    def _switch(self, key: tuple[int, int]) -> None:
        leaving, coming = self._kept.setdefault(self._here, {}), self._kept.get(key, {})
        self._here = key
        for state, outside in self._outside.items():
            now, wanted = state.get(), coming[state] if state in coming else state.begin(outside)
            leaving[state] = now
            if not state.same(wanted, now):
                self._set(state, wanted)

    def _set(self, state: State, value: Any) -> None:
        try:
            state.set(value)
        except OSError as error:  # such as a working directory that was deleted in the meantime
            self._kernel.owner.mistakes["process", state.name] = (
                f"rank {self._here[0]} continues with another rank's state: {state.name} cannot be restored: {error}"
            )

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let ranks change their state while the block runs; afterwards restore the original state."""
        self._kernel.owner.attachments[STATES] = self
        with _patches(), ExitStack() as stack:
            stack.enter_context(after_import("torch", lambda: stack.enter_context(_torch_patches())))
            try:
                yield
            finally:
                self._end()

    def _end(self) -> None:
        if self._outside:
            self._kernel.on_resume.remove(self.enter)
            self._kernel.on_leave.remove(self.leave)
            self.leave()
            self._shut_down_logging()

    def _shut_down_logging(self) -> None:
        """Flush and close the handlers that ranks have made, as each rank's process would at its end."""
        if REGISTRY in self._outside:
            common = {id(reference) for reference in self._outside[REGISTRY][1]}
            for kept in self._kept.values():
                _, handlers, *_ = kept.get(REGISTRY, self._outside[REGISTRY])
                logging.shutdown([each for each in handlers if id(each) not in common])


STATES = "process states"  # attachment of a world
OUTSIDE = -1, 0  # in the place of a rank and its incarnation


def _changing(task: Task | None, frame: FrameType, *, by_programs: bool = False) -> bool:
    """Return whether a rank makes the call, and not a module that all ranks share, during its import."""
    if task is None or STATES not in task.kernel.owner.attachments or amid_shared_import(frame):
        return False
    file = frame.f_code.co_filename
    return not (by_programs and (is_installed(file) or file.startswith(STANDARD)))


def swapping(state: State, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that changes a state; its first call by a rank makes the state separate for each rank."""

    @wraps(original)
    def change(*args: Any, **kwargs: Any) -> Any:
        task = current_task()
        if task is not None and _changing(task, sys._getframe(1), by_programs=state.by_programs):
            task.kernel.owner.attachments[STATES].touch(state, task)
        return original(*args, **kwargs)

    return change


def _swapping_logger(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def change(logger: Any, *args: Any) -> Any:
        task = current_task()
        # A logger under construction has no cache yet; setting its attributes is not a change.
        if task is not None and isinstance(logger, logging.Logger) and "_cache" in vars(logger):
            of_state = len(args) == 1 or args[0] in ATTRIBUTES_OF_A_LOGGER
            if of_state and _changing(task, sys._getframe(1)):
                task.kernel.owner.attachments[STATES].touch_logger(logger, task)
        return original(logger, *args)

    return change


def _reporting(shared: Shared, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        task = current_task()
        if task is not None and shared.matters(*args, **kwargs):
            frame, mistakes = sys._getframe(1), task.kernel.owner.mistakes
            kind = "process", shared.function
            if kind not in mistakes and _changing(task, frame, by_programs=True):
                line = place(frame)
                mistakes[kind] = (
                    f"rank {task.rank} at {task.clock:.6g} s ({line}) called {shared.function}: {shared.why}"
                )
        return original(*args, **kwargs)

    return call


def _in_the_main_thread(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `signal.signal` that keeps the old handler where Python would raise: a rank may be a thread."""

    @wraps(original)
    def set_handler(number: Any, handler: Any) -> Any:
        if current_task() is None or threading.get_ident() == threading.main_thread().ident:
            return original(number, handler)
        return signal.getsignal(number)

    return set_handler


def _once(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's setter that works once per process, as a function that each rank may call."""

    @wraps(original)
    def set_number(*args: Any) -> None:
        if current_task() is None:
            original(*args)
        else:
            with suppress(RuntimeError):
                original(*args)

    return set_number


ADAPTED = {"signal.signal": _in_the_main_thread, "torch.set_num_interop_threads": _once}


def _replace(put: Put, name: str, change: Callable[[Any], Any]) -> None:
    """Replace "module.name" or "module.class.name"; the module may be absent."""
    path, _, last = name.rpartition(".")
    owner = sys.modules.get(path)
    if owner is None:
        module, _, kind = path.rpartition(".")
        owner = getattr(sys.modules.get(module), kind, None)
    if hasattr(owner, last):
        put(owner, last, change(getattr(owner, last)))


def _install(put: Put, states: tuple[State, ...] = SWAPPED, shared: tuple[Shared, ...] = SHARED) -> None:
    for state in states:
        for name in state.changed_by.split():
            _replace(put, name, partial(swapping, state))
    for each in shared:
        if each.function in ADAPTED:
            _replace(put, each.function, ADAPTED[each.function])
        _replace(put, each.function, partial(_reporting, each))


def _install_all(put: Put) -> None:
    _install(put)
    for name in OF_A_LOGGER:
        _replace(put, f"logging.Logger.{name}", _swapping_logger)
    put(logging.Logger, "__setattr__", _swapping_logger(object.__setattr__))


def _install_torch(put: Put) -> None:
    _install(put, _of_torch(sys.modules["torch"]), SHARED_BY_TORCH)


_patches, _torch_patches = Patches(_install_all).in_place, Patches(_install_torch).in_place
