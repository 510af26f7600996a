"""Python's imports: which distributions are installed, which names were imported, and callbacks on loading.

A callback runs when a module has been loaded and before it can be used. Versions are read without importing
the packages. Launchers use this module: it must stay quick to load.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.machinery import ModuleSpec, SourceFileLoader
from threading import get_ident
from types import FrameType, ModuleType
from typing import Any


def versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of the installed ones among the named distributions, in the order of `names`."""
    places = tuple((place, _changed_ns(place)) for place in sys.path)
    found = ((name, _version(name, places)) for name in names)
    return {name: version for name, version in found if version is not None}


# Reading the metadata of eight packages takes as long as a short run, and a sweep has thousands of runs in one
# process. A later installation, as by %pip in a notebook, changes its folder, and is noticed.
@lru_cache(maxsize=256)
def _version(name: str, places: tuple[tuple[str, int], ...]) -> str | None:
    from importlib import metadata  # takes 30 ms, and most ranks do not need it

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _changed_ns(place: str) -> int:
    """Return the last change of a folder of `sys.path`; an empty name is the current folder."""
    try:
        return os.stat(place or ".").st_mtime_ns
    except OSError:
        return -1


_before: set[str] = set()
_of_ranks: set[str] = set()
exclusive: list[int] = []  # threads that hold a lock that all ranks need


def notice_imports() -> None:
    """Remember the loaded modules before the first program of this process is loaded."""
    # Only the first time: later runs of the process find modules of earlier programs loaded, which are their inputs,
    # too.
    _before.update(sys.modules if not _before else ())


def of_a_rank(name: str) -> None:
    """Remember a module that each virtual rank imports separately: `sys.modules` holds it only while a rank runs."""
    _of_ranks.add(name)


def is_of_a_rank(name: str) -> bool:
    """Return whether each virtual rank imports the module separately."""
    return name in _of_ranks


def loading() -> bool:
    """Return whether a module is being imported that all virtual ranks share."""
    locks = getattr(sys.modules["importlib._bootstrap"], "_module_locks", {})
    return not _of_ranks.issuperset(locks)


def amid_shared_import(frame: FrameType | None) -> bool:
    """Return whether the virtual rank at this frame is importing a module that all ranks share.

    Then it should not wait for other ranks unnecessarily: they would find the module incomplete, or, in threads, wait
    for the end of its import for ever. The same holds for a thread that holds a lock that all ranks need
    (`exclusive`).
    """
    if exclusive and get_ident() in exclusive:
        return True
    if not loading():  # almost always: no import is in progress
        return False
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if frame.f_code.co_name == "<module>" and name != "__main__" and name not in _of_ranks:
            return True
        frame = frame.f_back
    return False


def imported_names() -> frozenset[str]:
    """Return the first parts of the names of all modules that were imported since, by any means."""
    return frozenset(name.partition(".")[0] for name in {*sys.modules, *_of_ranks} - _before)


@contextmanager
def after_import(name: str, then: Callable[[], None]) -> Iterator[None]:
    """Call `then` when a module is loaded while the block runs; at once if it is loaded already."""
    if name in sys.modules:
        then()
    finder = _Finder(name, then)
    # First: otherwise the real finder would answer and the callback never run.
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder:
    """A finder for `sys.meta_path` that lets one module's loader call back."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then, self._asking = name, then, False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec from the other finders, with a loader that calls back."""
        # Two finders for one module query each other: a finder that is already searching returns None.
        if name != self._name or self._asking:
            return None
        # Queries all other finders in their order, so that hooks of other packages keep working.
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        self._asking = True
        try:
            spec = next((each for each in found if each is not None), None)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec, spec.loader, self._then)
        return spec


class _Loader(SourceFileLoader):
    """Returns the module to the loader that it replaces, and then calls back."""

    def __init__(self, spec: ModuleSpec, loader: Any, then: Callable[[], None]) -> None:
        super().__init__(spec.name, spec.origin or "")
        self._spec, self._loader, self._then = spec, loader, then

    def exec_module(self, module: ModuleType) -> None:
        # Restored before the module runs: it may use its own loader, as pickles and resources do.
        self._spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then()
