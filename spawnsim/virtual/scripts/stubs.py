"""Stand-ins for trackers that a program imports (`--stub wandb`): they accept every use, and record scalars.

Each attribute and each result of a stub is a stub. Calls by which trackers log scalars add a row to the run's table, as
`comm.record` does: `LOGGING` names them. Each virtual rank imports its own stubs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from spawnsim.virtual.engine.kernel import current_task
from spawnsim.virtual.mpi.communicators import COMM_WORLD

ALSO = {"tensorboard": ("torch.utils.tensorboard",)}  # modules of other packages that need one
LOGGED = "logged"  # attachment of a rank: the number of its last call that logs
STEP, TAKEN = "iteration", ("rank", "time_s")  # columns for the step, and of every row


def stub_names(given: Sequence[str]) -> frozenset[str]:
    """Return the modules that stubs replace."""
    return frozenset({*given, *(also for name in given for also in ALSO.get(name, ()))})


def stub_spec(name: str) -> ModuleSpec:
    """Return the spec of a stub module."""
    return ModuleSpec(name, _Loader(), is_package=True)


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StubModule(spec.name, "A stand-in: accepts every use, and records scalars.")

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module as it is: attributes are made when they are used."""


class Finder:
    """A finder for `sys.meta_path` that finds stubs."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a stub, or None for other modules."""
        return stub_spec(name) if self.finds(name) else None

    def finds(self, name: str) -> bool:
        """Return whether a module is a stub."""
        return name in self._names or name.partition(".")[0] in self._names


@contextmanager
def stubbed(given: Sequence[str]) -> Iterator[None]:
    """Let a main program outside of ranks import stubs while the block runs; there they record nothing."""
    finder = Finder(stub_names(given))
    hidden = {name: module for name, module in list(sys.modules.items()) if finder.finds(name)}
    for name in hidden:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in list(filter(finder.finds, sys.modules)):
            del sys.modules[name]
        sys.modules.update(hidden)


class Config(dict[str, Any]):
    """The parameters of a tracked run: a dictionary whose entries are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def update(self, given: Any = (), /, *_: Any, **values: Any) -> None:
        """Add the entries of a mapping, or the attributes of an object."""
        super().update(given if isinstance(given, (Mapping, list, tuple)) else vars(given))
        super().update({name: value for name, value in values.items() if name != "allow_val_change"})


class Stub:
    """Accepts every use: calls, attributes, items, loops (over nothing), `with`, `if` (true), and as a decorator.

    Args:
        name: its path, such as `wandb.init()`; an item's is its key.
        config: the parameters of the tracked run.
    """

    def __init__(self, name: str, config: Config) -> None:
        self.__dict__["_stub"] = name
        self.__dict__["config"] = config

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_stub" not in self.__dict__:
            raise AttributeError(name)
        made = self.__dict__[name] = Stub(f"{self._stub}.{name}", self.config)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        path, _, name = self._stub.rpartition(".")
        if len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], Stub):
            return args[0]  # a decorator
        if kwargs.get("config"):
            self.config.update(kwargs["config"])
        log = LOGGING.get(name)
        if log is not None:
            try:
                values, step = log(path, *args, **kwargs)
            except TypeError:  # another use of the name
                return None
            record(values, step)
            return None
        return Stub(f"{self._stub}()", self.config)

    def __getitem__(self, key: Any) -> Any:
        return Stub(str(key), self.config)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Keep nothing: such values describe the run."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True

    def __contains__(self, _: object) -> bool:
        return False

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        """Let exceptions pass."""

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Stub)

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (Base,)

    def __repr__(self) -> str:
        return f"<stub {self._stub}>"


class Base:
    """The base of a program's class that derives from a stub's."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Accept everything."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(f"{type(self).__name__}.{name}", Config())


class StubModule(ModuleType):
    """A module whose attributes are stubs."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        config = vars(self).setdefault("config", Config())
        if name == "config":
            return config
        made = Stub(f"{self.__name__}.{name}", config)
        setattr(self, name, made)
        return made


# -- calls that log scalars: each returns values by column, and the step ------------------------------------------
Logged = tuple[Mapping[Any, Any], Any]


def _log(path: str, first: Any, value: Any = None, step: Any = None, *_: Any, **options: Any) -> Logged:
    """Read `log({"loss": 1.0}, step=3)` (wandb, trackio, swanlab), and `run["loss"].log(1.0)` (neptune)."""
    if isinstance(first, Mapping):
        return first, options.get("step", value if step is None else step)
    return {path: first}, options.get("step", step)


def _metric(_: str, name: Any, value: Any, step: Any = None, *__: Any, **options: Any) -> Logged:
    """Read `log_metric("loss", 1.0, step=3)` (mlflow, comet), and `add_scalar("loss", 1.0, 3)` (tensorboard)."""
    return {name: value}, options.get("global_step", step)


def _metrics(_: str, values: Any, step: Any = None, *__: Any, **___: Any) -> Logged:
    """Read `log_metrics({"loss": 1.0}, step=3)` (mlflow, comet)."""
    return dict(values), step


def _scalars(_: str, tag: Any, values: Any, global_step: Any = None, *__: Any, **___: Any) -> Logged:
    """Read `add_scalars("loss", {"train": 1.0}, 3)` (tensorboard)."""
    return {f"{tag}/{name}": value for name, value in values.items()}, global_step


def _report(_: str, title: Any, series: Any, value: Any, *step: Any, iteration: Any = None) -> Logged:
    """Read `report_scalar("loss", "train", 1.0, 3)` (clearml)."""
    return {f"{title}/{series}": value}, next(iter(step), iteration)


def _track(_: str, value: Any, name: Any = None, step: Any = None, *__: Any, **___: Any) -> Logged:
    """Read `track(1.0, name="loss", step=3)` (aim)."""
    return value if isinstance(value, Mapping) else {name or "value": value}, step


LOGGING: dict[str, Callable[..., Logged]] = {
    "log": _log, "append": _log, "log_metric": _metric, "add_scalar": _metric, "report_single_value": _metric,
    "log_metrics": _metrics, "add_scalars": _scalars, "report_scalar": _report, "track": _track,
}  # fmt: skip


def record(values: Mapping[Any, Any], step: Any) -> None:
    """Add a row with the numbers among the values, and their step as `iteration`; other values are dropped.

    Without a step, the number of the rank's calls so far is the step, as in wandb. Entries of mappings within mappings
    get names with a slash.
    """
    if current_task() is None:
        return
    rank = COMM_WORLD._rank.attachments
    count = rank[LOGGED] = rank.get(LOGGED, -1) + 1
    row: dict[str, Any] = {STEP: int(step) if isinstance(step, (int, float)) else count}
    for name, value in _flat(values):
        number = _number(value)
        if number is not None:
            row[f"logged/{name}" if name in TAKEN else name] = number
    if row.keys() - {STEP}:
        COMM_WORLD.record(**row)


def _number(value: Any) -> Any:
    """Return a number of Python, numpy or torch; None for anything else."""
    if hasattr(value, "item") and math.prod(getattr(value, "shape", ())) == 1:
        value = value.item()
    return value if isinstance(value, (bool, int, float)) else None


def _flat(values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{inner}", each) for inner, each in _flat(value))
        else:
            yield str(name), value
