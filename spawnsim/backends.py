"""The backends: what can run ranks. One entry in a table and one package are a new backend.

The table is filled above the packages that it names (`spawnsim/__init__.py`), and read by all that are given a name or
another library's group: `spawnsim run --backend`, studies, the contract suite, torchgfn's toolkit, `as_comm`.
Nothing is imported before a backend is used: launchers, which must start quickly, read the table too.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import Any

from spawnsim.errors import ParameterError


@dataclass(frozen=True)
class Backend:
    """One entry. The package of a real backend has `world()`, `wrap(group)`, `guarded(comm)`, `namespace(comm)`.

    Attributes:
        name: what `--backend` takes.
        package: the package, by its dotted name.
        wraps: the class of its library's groups, as "module:class"; "" for virtual ranks, which wrap nothing.
        group: where that library keeps the group of all ranks, as "module:attribute".
        launcher: what starts its ranks: "mpiexec" or "torchrun"; "" where no processes are started.
        survives: whether a job can be started that goes on when ranks die.
        aliases: further names by which toolkits ask for it, such as "nccl".
        preloads: modules that one process loads for all ranks of a node before it forks them, where its launcher forks.
    """

    name: str
    package: str
    wraps: str = ""
    group: str = ""
    launcher: str = ""
    survives: bool = False
    aliases: tuple[str, ...] = ()
    preloads: tuple[str, ...] = ()

    @property
    def is_real(self) -> bool:
        return bool(self.launcher)

    def load(self) -> Any:
        return import_module(self.package)

    def has(self, group: Any) -> bool:
        """Return whether a group is one of its library's."""
        kind = _loaded(self.wraps)
        return kind is not None and isinstance(group, kind)

    def group_of_all(self, *, load: bool = False) -> Any:
        """Return the library's own group of all ranks; None if there is none yet.

        A library that is not loaded has none; `load` loads it first.
        """
        if load:
            self.load()
        return _loaded(self.group)


def _loaded(address: str) -> Any:
    """Return the attribute at "module:attribute"; None if it is not loaded."""
    module, _, attribute = address.partition(":")
    try:
        return attrgetter(attribute)(sys.modules[module])
    except (KeyError, AttributeError):  # not loaded; a build of torch without torch.distributed
        return None


BACKENDS: dict[str, Backend] = {}
"""Name → entry, in the order of registration."""


def register(backend: Backend) -> None:
    """Add a backend to the table."""
    BACKENDS[backend.name] = backend


def real_backends() -> tuple[str, ...]:
    """Return the names of those whose ranks are processes."""
    return tuple(name for name, backend in BACKENDS.items() if backend.is_real)


def backend_of(name: str, among: tuple[str, ...] = ()) -> Backend:
    """Return the backend of a name.

    Args:
        name: as the user gave it.
        among: the names that will do; empty: all of the table.

    Raises:
        ParameterError: another name.
    """
    known = among or tuple(BACKENDS)
    if name not in known:
        # The first words are torchgfn's.
        raise ParameterError(f"Unknown backend {name!r}: choose one of {', '.join(known)}")
    return BACKENDS[name]
