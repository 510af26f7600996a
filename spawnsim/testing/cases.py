"""The tests of the contract, found and named.

This room knows which tests there are, and how one ended. It runs none.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from spawnsim.errors import ParameterError
from spawnsim.testing import contract

PASSED, FAILED, SKIPPED, ABSENT = "passed", "failed", "skipped", "absent"
"""How a case can end; "absent": the communicator says that it does not offer a call (`UnsupportedError`)."""


@dataclass(frozen=True)
class Case:
    """One test: `test(MPI, comm)`, run by all ranks of `comm` together."""

    theme: str
    name: str
    test: Callable[[Any, Any], None]

    @property
    def id(self) -> str:
        """Theme and name: "p2p_objects.tags_choose"."""
        return f"{self.theme}.{self.name}"

    @property
    def claim(self) -> str:
        """What the test claims, in a sentence."""
        return (inspect.getdoc(self.test) or "").partition("\n")[0]

    def fits(self, ranks: int) -> bool:
        """Whether the test makes sense on a number of ranks."""
        least, most = getattr(self.test, "ranks", (1, None))
        return ranks >= least and (most is None or ranks <= most)


@dataclass(frozen=True)
class Outcome:
    """How one case ended, and what the ranks said if it did not pass."""

    case: str
    status: str
    text: str = ""


def _tests(module: ModuleType) -> Iterator[Case]:
    for name, test in vars(module).items():
        own = inspect.isfunction(test) and test.__module__ == module.__name__ and not name.startswith("_")
        if own and _is_test(inspect.signature(test)):
            yield Case(module.__name__.rpartition(".")[2], name, test)


def _is_test(signature: inspect.Signature) -> bool:
    return list(signature.parameters) == ["MPI", "comm"] and signature.return_annotation in (None, "None")


@cache
def every_case() -> tuple[Case, ...]:
    """Return all cases, theme by theme."""
    names = sorted(found.name for found in pkgutil.iter_modules(contract.__path__))
    modules = (importlib.import_module(f"{contract.__name__}.{name}") for name in names)
    return tuple(case for module in modules for case in _tests(module))


def find_cases(ranks: int, match: str | None = None) -> list[Case]:
    """Return the cases that make sense on `ranks` ranks and whose id holds one of the words of `match`."""
    words = (match or "").split()
    found = [case for case in every_case() if case.fits(ranks) and any(w in case.id for w in words or [""])]
    if words and not found:
        themes = sorted({case.theme for case in every_case()})
        raise ParameterError(f"no case on {ranks} ranks matches {match!r}; themes: {', '.join(themes)}")
    return found


def named(ids: Iterable[str]) -> list[Case]:
    """Return the cases with these ids, in this order; a theme that is not ours is a module of yours."""
    by_id = {case.id: case for case in every_case()}
    return [by_id.get(one) or _foreign(*one.rpartition(".")[::2]) for one in ids]


def _foreign(module: str, name: str) -> Case:
    return Case(module, name, getattr(importlib.import_module(module), name))
