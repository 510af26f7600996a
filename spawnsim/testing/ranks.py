"""Functions of a test session on virtual ranks: each rank has its own test modules, variables and output.

A process that a test starts imports the test's module again, with the modules of its folder. So does a rank.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Sequence
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from spawnsim.errors import Deadlock, Livelock
from spawnsim.importing import of_a_rank
from spawnsim.record import Recorder
from spawnsim.run.process_setup import one_thread
from spawnsim.scenario import Scenario
from spawnsim.virtual.engine import diagnosis
from spawnsim.virtual.engine.world import World
from spawnsim.virtual.scripts import run_program
from spawnsim.virtual.scripts.rank_process import RankModules
from spawnsim.waits import is_program


def hide_frames() -> None:
    """Let pytest show the error of a call at the test's line, without the frames of the engine."""
    for name, module in [*sys.modules.items()]:
        if name.startswith(("spawnsim.virtual.", "spawnsim.testing.")):
            vars(module)["__tracebackhide__"] = True


class TestModules(RankModules):
    """A test's module and the modules of its folder, which each rank imports for itself.

    Args:
        module: the module, as the session has imported it. An installed one is shared.
    """

    __test__ = False

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._separate = is_program(str(module.__file__))
        super().__init__(folder_of(module))

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        """Return the spec of a rank's own module, or None for shared ones."""
        return super().find_spec(name, path, target) if self._separate else None

    def hidden(self) -> dict[str, ModuleType]:
        """Return the modules that the session has imported and each rank imports again."""
        name = self._module.__name__
        return super().hidden() | {name: self._module} if self._separate else {}

    def twin(self, kind: type) -> Any:
        """Return the calling rank's copy of a class of the module."""
        found: Any = self._module
        if self._separate:
            found = self._imported()
        for part in kind.__qualname__.split("."):
            found = getattr(found, part, kind)
        return found

    def _imported(self) -> ModuleType:
        name, spec = self._module.__name__, self._module.__spec__
        if name in sys.modules or spec is None or spec.loader is None:
            return importlib.import_module(name)
        if "." in name:
            importlib.import_module(name.rpartition(".")[0])
        # By the loader that pytest has chosen, which shows the values of assertions.
        found = module_from_spec(spec)
        self.names.add(name)
        of_a_rank(name)
        sys.modules[name] = found
        spec.loader.exec_module(found)
        return found


class SharedModules(RankModules):
    """No modules of a rank's own: what a test starts are threads."""

    def find_spec(self, *_: Any, **__: Any) -> None:
        """Return None: all modules are shared."""

    def hidden(self) -> dict[str, ModuleType]:
        """Return no modules."""
        return {}


def folder_of(module: ModuleType) -> Path:
    """Return the folder from which a module's whole name is imported."""
    file, parts = Path(str(module.__file__)).resolve(), module.__name__.split(".")
    whole = list(file.with_suffix("").parts[-len(parts) :]) == parts
    return file.parents[len(parts) - 1] if whole else file.parent


def on_ranks(
    ranks: int, body: Callable[[int], Any], modules: RankModules, *, carrier: str = "threads"
) -> None:
    """Call a function on each of several virtual ranks.

    Args:
        ranks: their number.
        body: called with the rank.
        modules: the modules that belong to each rank.
        carrier: how ranks are carried; "threads" for torch.distributed.

    Raises:
        SpawnsimError: the error that ended the run, with the calls of all ranks.
    """
    worlds: list[World] = []

    def show(error: BaseException) -> None:
        alive = [task for task in worlds[0].kernel.tasks if task.alive] if worlds else []
        if alive and not isinstance(error, (Deadlock, Livelock)):  # their messages have it
            error.add_note(f"The other ranks:\n{diagnosis.standing(alive)}")

    with one_thread():
        run_program(
            modules.folder, sys.argv[1:], Scenario(ranks, deadline_s=math.inf), recorder=Recorder(),
            on_error=show, prepare=worlds.append, body=body, modules=modules, carrier=carrier,
        )  # fmt: skip
