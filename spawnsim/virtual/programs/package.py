"""`mpi4py` as programs on virtual ranks find it: the virtual MPI, and the pure Python modules of the installed one.

This room knows `sys.modules`. It imports nothing of mpi4py's binary part, and works without mpi4py.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from spawnsim.errors import UnsupportedError
from spawnsim.virtual.mpi import MPI
from spawnsim.virtual.programs import futures

NAME = "mpi4py"


class Rc:
    """`mpi4py.rc`: options. Most mean nothing on virtual ranks; all are kept."""

    def __init__(self) -> None:
        self.initialize, self.threads, self.thread_level = True, True, "multiple"
        self.finalize: bool | None = None
        self.fast_reduce, self.recv_mprobe, self.irecv_bufsz, self.errors = True, True, 32768, "exception"

    def __call__(self, **options: Any) -> None:
        """Set options."""
        for name, value in options.items():
            if name not in vars(self):
                raise TypeError(f"unexpected argument {name!r}")
            setattr(self, name, value)

    def __repr__(self) -> str:
        return "<mpi4py.rc>"


def stand_in() -> dict[str, Any]:
    """Return the entries for `sys.modules`."""
    package: Any = ModuleType(NAME, "The virtual mpi4py of spawnsim.")
    place = _installed()
    package.__path__ = [str(place)] if place is not None else []
    package.__spec__ = ModuleSpec(NAME, None, is_package=True)
    package.__package__, package.__version__ = NAME, _version()
    package.MPI, package.rc, package.futures = MPI, Rc(), futures.build()
    package.__file__ = str(place / "__init__.py") if place is not None else __file__
    package.get_include = lambda: str(place / "include") if place is not None else ""
    package.get_config = dict
    package.profile = _profile
    MPI.__package__ = NAME
    MPI.__spec__ = ModuleSpec(f"{NAME}.MPI", None)
    MPI.__file__ = __file__
    return {
        NAME: package, f"{NAME}.MPI": MPI, f"{NAME}.rc": package.rc, f"{NAME}.futures": package.futures,
    }  # fmt: skip


def _profile(name: str, *, path: Any = None) -> None:
    raise UnsupportedError(f"mpi4py.profile({name!r}): there is no C library to profile on virtual ranks")


def _installed() -> Path | None:
    spec = importlib.util.find_spec(NAME)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _version() -> str:
    try:
        return version(NAME)
    except PackageNotFoundError:
        return "4.1.0"


@contextmanager
def installed_as_mpi4py() -> Iterator[Rc]:
    """Let `import mpi4py` find the virtual one while the block runs; then what was there before."""
    entries = stand_in()
    before = {name: module for name, module in sys.modules.items() if _is_mpi4py(name)}
    known = set(sys.modules)
    for name in before:
        del sys.modules[name]
    sys.modules.update(entries)
    try:
        yield entries[f"{NAME}.rc"]
    finally:
        for name in [name for name in sys.modules if _is_mpi4py(name) or _bound(name, known)]:
            del sys.modules[name]
        sys.modules.update(before)


def _is_mpi4py(name: str) -> bool:
    return name == NAME or name.startswith(f"{NAME}.")


def _bound(name: str, known: set[str]) -> bool:
    """Return whether a module was imported meanwhile and holds the virtual MPI."""
    if name in known or name.startswith("spawnsim"):
        return False
    values = getattr(sys.modules[name], "__dict__", {}).values()
    return any(value is MPI or value is MPI.COMM_WORLD for value in list(values))
