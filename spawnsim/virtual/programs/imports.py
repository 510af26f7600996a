"""Which modules are a rank's own: the script, and what it imports from its own folder.

Installed packages are imported once and shared. This room knows import paths; it must not know ranks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from spawnsim.importing import of_a_rank

SHARED = {"spawnsim", "mpi4py"}  # never a rank's own, wherever they lie


class OwnModules:
    """A finder for `sys.meta_path` that finds ranks' own modules and remembers their names.

    A folder holds own modules if it is the script's, or named in PYTHONPATH, or was added to `sys.path` by the
    program. `private` names installed packages that each rank shall import for itself.
    """

    def __init__(self, folder: Path, private: Sequence[str] = ()) -> None:
        self.folder, self.private = str(folder), frozenset(private)
        self.names = {"__main__"}
        python_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        self._folders = {self.folder, *(os.path.realpath(entry) for entry in python_path if entry)}
        self._common = {os.path.realpath(entry) for entry in sys.path} - self._folders

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """Return where an own module is, or None for others."""
        top, _, rest = name.partition(".")
        if top in SHARED or (rest and name.rpartition(".")[0] not in self.names):
            return None
        if path is None:
            path = None if top in self.private else self._own(sys.path)
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or isinstance(spec.loader, ExtensionFileLoader):
            return None
        self.names.add(name)
        of_a_rank(name)
        return spec

    def _own(self, entries: Sequence[str]) -> list[str]:
        return [
            entry
            for entry in entries
            if os.path.realpath(entry) in self._folders or os.path.realpath(entry) not in self._common
        ]

    def hidden(self) -> dict[str, ModuleType]:
        """Return the modules loaded already that would stand in the way of own ones."""
        tops = {
            entry.stem for entry in Path(self.folder).iterdir() if entry.is_dir() or entry.suffix == ".py"
        }
        tops = (tops | self.private) - SHARED - set(sys.stdlib_module_names)
        return {name: module for name, module in sys.modules.items() if self._hides(name, module, tops)}

    def _hides(self, name: str, module: Any, tops: set[str]) -> bool:
        top = name.partition(".")[0]
        origin = getattr(getattr(module, "__spec__", None), "origin", None) or ""
        installed = "site-packages" in origin and top not in self.private
        return top in tops and not installed and not origin.endswith((".so", ".pyd"))
