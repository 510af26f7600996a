"""The table of backends, which run ranks. A new backend needs one entry in the table and one package.

`spawnsim/__init__.py` fills the table. All code that accepts a backend's name or another library's group reads it:
`spawnsim run --backend`, studies, the contract suite, torchgfn's toolkit, `as_comm`. A backend's package is imported
only when it is used, because launchers, which must start quickly, read the table too.
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
        name: the name for `--backend`.
        package: the dotted name of the package.
        wraps: the class of its library's groups, as "module:class"; "" for virtual ranks, which wrap nothing.
        group: the library's attribute that holds the group of all ranks, as "module:attribute".
        launcher: the launcher of its ranks: "mpiexec" or "torchrun"; "" if no processes are started.
        survives: whether the backend can start a job that continues when ranks die.
        aliases: further names that toolkits use for it, such as "nccl".
        preloads: modules that a forking launcher loads once per node, before it forks the ranks.
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
        """Return whether a group belongs to this backend's library."""
        kind = _loaded(self.wraps)
        return kind is not None and isinstance(group, kind)

    def group_of_all(self, *, load: bool = False) -> Any:
        """Return the library's own group of all ranks; None if it does not exist yet.

        It does not exist while the library is not loaded; `load` loads the library first.
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
    """Return the names of the backends whose ranks are processes."""
    return tuple(name for name, backend in BACKENDS.items() if backend.is_real)


def backend_of(name: str, among: tuple[str, ...] = ()) -> Backend:
    """Return the backend of a name.

    Args:
        name: the name that the user gave.
        among: the accepted names; empty: all names of the table.

    Raises:
        ParameterError: the name is not accepted.
    """
    known = among or tuple(BACKENDS)
    if name not in known:
        # torchgfn's message has the same first words.
        raise ParameterError(f"Unknown backend {name!r}: choose one of {', '.join(known)}")
    return BACKENDS[name]
