"""The cases of the contract: what they may claim, how they are found, and how a rank runs them with the others.

Claims are about values and errors, and never send anything themselves, so that they hold on any communicator. A rank
that runs cases uses a communicator's `Dup` and `allgather` alone to agree on how each ended, and logs what happens at
once, so that a watching process sees a failure even when the other ranks wait for ever.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from contract import themes
from spawnsim.errors import ParameterError, UnsupportedError

Test = TypeVar("Test", bound=Callable[..., None])


class Skipped(Exception):
    """A test that has nothing to say here: too few ranks, or an optional library is missing."""


def same(found: Any, wanted: Any) -> None:
    """Claim that two values are equal in type of sequence, shape and content; arrays are compared exactly."""
    if isinstance(found, np.ndarray) or isinstance(wanted, np.ndarray):
        equal = np.array_equal(np.asarray(found), np.asarray(wanted))
    else:
        equal = bool(found == wanted)
    if not equal:
        raise AssertionError(f"found {found!r}, wanted {wanted!r}")


def close(found: Any, wanted: Any, relative: float = 1e-12) -> None:
    """Claim that numbers agree but for rounding."""
    if not np.allclose(found, wanted, rtol=relative, atol=0.0):
        raise AssertionError(f"found {found!r}, wanted {wanted!r}")


def claim(truth: Any, what: str) -> None:
    """Claim that something holds; `what` says it in words."""
    if not truth:
        raise AssertionError(what)


Errors = type[BaseException] | tuple[type[BaseException], ...]


def refused(kinds: Errors, call: Callable[..., Any] | None = None, *arguments: Any, **options: Any) -> Any:
    """Claim that a call raises one of these errors; without one, that a block does: as `pytest.raises`."""
    return _raises(_refused(kinds), call, arguments, options)


def fails(
    mpi: Any, code: int, call: Callable[..., Any] | None = None, *arguments: Any, **options: Any
) -> Any:
    """Claim that a call, or a block, raises `MPI.Exception` of an error class."""
    return _raises(_fails(mpi, code), call, arguments, options)


def _raises(
    block: AbstractContextManager[None], call: Callable[..., Any] | None, arguments: Any, options: Any
) -> Any:
    if call is None:
        return block
    with block:
        call(*arguments, **options)
    return None


@contextmanager
def _refused(kinds: Errors) -> Iterator[None]:
    try:
        yield
    except kinds:
        return
    raise AssertionError(f"nothing was raised; wanted {kinds}")


@contextmanager
def _fails(mpi: Any, code: int) -> Iterator[None]:
    try:
        yield
    except mpi.Exception as error:
        found = error.Get_error_class()
        if found != code:
            text = mpi.Get_error_string(code)
            raise AssertionError(f"wanted error class {code} ({text}), found {found}: {error}") from error
        return
    raise AssertionError(f"nothing was raised; wanted {mpi.Get_error_string(code)}")


def needs(ranks: int) -> Callable[[Test], Test]:
    """Mark a test as one that makes sense from a number of ranks on."""

    def mark(test: Test) -> Test:
        test.__dict__["ranks"] = ranks
        return test

    return mark


def ring(comm: Any) -> tuple[int, int, int, int]:
    """Return (rank, size, left neighbour, right neighbour) on a ring of all ranks."""
    rank, size = comm.Get_rank(), comm.Get_size()
    return rank, size, (rank - 1) % size, (rank + 1) % size


def poll(attempt: Callable[[], Any], tries: int = 100_000, limit_s: float = 30.0) -> Any:
    """Call until the result is true and return it; each call to the library lets time pass.

    Gives up after so many tries and so many seconds of wall time, both: on a busy machine the other ranks may not have
    run at all while this one polled a hundred thousand times.
    """
    end, polls = time.monotonic() + limit_s, 0
    while polls < tries or time.monotonic() < end:
        found = attempt()
        if found:
            return found
        polls += 1
    raise AssertionError(f"still waiting after {polls} polls")


PASSED, FAILED, SKIPPED, ABSENT = "passed", "failed", "skipped", "absent"
"""How a case can end; "absent": the communicator says that it does not offer a call (`UnsupportedError`)."""


@dataclass(frozen=True)
class Case:
    """One test: `test(MPI, comm)`, run by all ranks of `comm` together."""

    theme: str
    name: str
    test: Callable[..., None]
    form: str = ""
    """Of collective calls by `call`: blocking "", "nonblocking" or "persistent"."""

    @property
    def id(self) -> str:
        """Theme, name and form: "collectives.allgather_nonblocking"."""
        return "_".join(filter(None, (f"{self.theme}.{self.name}", self.form)))

    @property
    def claim(self) -> str:
        """What the test claims, in a sentence."""
        return (inspect.getdoc(self.test) or "").partition("\n")[0]

    def fits(self, ranks: int) -> bool:
        """Return whether the test makes sense on a number of ranks."""
        return ranks >= getattr(self.test, "ranks", 1)

    def run(self, MPI: Any, comm: Any) -> list[Any]:
        """Run the test with the arguments that it names; return the handles to free when all ranks are through."""
        owned: list[Any] = []

        def own(handle: Any) -> Any:
            owned.append(handle)
            return handle

        given = dict(zip(("rank", "size", "left", "right"), ring(comm), strict=True)) | {
            "own": own,
            "call": self.call,
        }
        self.test(
            MPI, comm, **{name: given[name] for name in list(inspect.signature(self.test).parameters)[2:]}
        )
        return owned[::-1]

    def call(self, comm: Any, name: str, *arguments: Any, **options: Any) -> None:
        """Make a collective call in the form of this case."""
        if not self.form:
            getattr(comm, name)(*arguments, **options)
        elif self.form == "nonblocking":
            getattr(comm, f"I{name.lower()}")(*arguments, **options).Wait()
        else:
            request = getattr(comm, f"{name}_init")(*arguments, **options)
            request.Start()
            request.Wait()
            request.Free()


@dataclass(frozen=True)
class Outcome:
    """How one case ended, and what the ranks said if it did not pass."""

    case: str
    status: str
    text: str = ""


def _tests(module: ModuleType) -> Iterator[Case]:
    for name, test in vars(module).items():
        if inspect.isfunction(test) and test.__module__ == module.__name__:
            signature = inspect.signature(test)
            names = list(signature.parameters)
            # By signature and not by name: no case can be forgotten in a list. A helper says what it returns.
            if names[:2] == ["MPI", "comm"] and signature.return_annotation is signature.empty:
                for form in ("", "nonblocking", "persistent") if "call" in names else ("",):
                    yield Case(module.__name__.rpartition(".")[2], name, test, form)


@cache
def every_case() -> tuple[Case, ...]:
    """Return all cases, theme by theme."""
    names = sorted(found.name for found in pkgutil.iter_modules(themes.__path__))
    modules = (importlib.import_module(f"{themes.__name__}.{name}") for name in names)
    return tuple(case for module in modules for case in _tests(module))


def find_cases(ranks: int, match: str | None = None) -> list[Case]:
    """Return the cases that make sense on so many ranks.

    Args:
        ranks: the size of the communicator.
        match: words; a case is returned if its id holds one of them. None: all cases.

    Returns:
        The cases, theme by theme.

    Raises:
        ParameterError: no case matches.
    """
    words = (match or "").split()
    found = [case for case in every_case() if case.fits(ranks) and any(w in case.id for w in words or [""])]
    if words and not found:
        themes = sorted({case.theme for case in every_case()})
        raise ParameterError(f"no case on {ranks} ranks matches {match!r}; themes: {', '.join(themes)}")
    return found


def cases_by_id(ids: Iterable[str]) -> list[Case]:
    """Return the cases with these ids, in this order; an unknown theme is a module of the caller's."""
    by_id = {case.id: case for case in every_case()}
    return [by_id.get(one) or _users_case(*one.rpartition(".")[::2]) for one in ids]


def _users_case(module: str, name: str) -> Case:
    return Case(module, name, getattr(importlib.import_module(module), name))


_RANKING = (FAILED, ABSENT, SKIPPED, PASSED)


def run_case(case: Case, MPI: Any, comm: Any) -> tuple[str, str, list[Any]]:  # mpi4py's name
    """Run a case on this rank; return its status, why it did not pass, and the handles that it leaves."""
    try:
        return PASSED, "", case.run(MPI, comm)
    # Before Exception, of which it is one.
    except Skipped as reason:
        return SKIPPED, str(reason), []
    except UnsupportedError as reason:
        return ABSENT, str(reason), []
    except Exception:  # noqa: BLE001  # whatever a case raises is its result
        return FAILED, traceback.format_exc(limit=-4), []


def free_all(comm: Any, owned: list[Any]) -> None:
    """Free what a case leaves, and its communicator, when all ranks are through with it."""
    # MPI asks that all accesses to a window have ended before Free, and a target does not know of those to its part.
    comm.Barrier()
    for handle in (*owned, comm):
        handle.Free()


def merge_verdicts(case: str, verdicts: list[tuple[str, str]]) -> Outcome:
    """Return the outcome of a case from the verdicts of all ranks: the worst one, with what its ranks said."""
    worst = min((status for status, _ in verdicts), key=_RANKING.index)
    said: dict[str, list[str]] = {}
    for rank, (status, text) in enumerate(verdicts):
        if status == worst and text:
            said.setdefault(text, []).append(str(rank))
    return Outcome(case, worst, "\n".join(f"rank {', '.join(ranks)}: {text}" for text, ranks in said.items()))


def run_together(MPI: Any, comm: Any, cases: Iterable[Case], log: Path | None = None) -> Iterator[Outcome]:
    """Run cases on all ranks of a communicator, each on a duplicate of it, and yield the outcomes that all agree on.

    A rank that fails goes to the agreement at once; if others wait for it inside the case, the run stands still:
    let `contract.run_real` watch it, which starts a new job behind the case.

    Args:
        MPI: a namespace with mpi4py's names.
        comm: the communicator; collective over its ranks.
        cases: the same on all ranks.
        log: a file of this rank, which gets a JSON line for each step; None: no log.

    Returns:
        An iterator of outcomes, one per case, the same on all ranks.
    """
    notes = CaseLog(log)
    for case in cases:
        # Before the case begins: if it kills the job, the watcher knows which one it was.
        notes.write(case=case.id)
        # Each case has a context of its own: messages that a failed case left cannot match in the next.
        own = comm.Dup()
        *verdict, owned = run_case(case, MPI, own)
        notes.write(case=case.id, status=verdict[0], text=verdict[1])
        free_all(own, owned)
        # On the parent communicator, which no case has touched.
        outcome = merge_verdicts(case.id, comm.allgather(verdict))
        notes.write(case=case.id, agreed=outcome.status, text=outcome.text)
        yield outcome


class CaseLog:
    """A log of JSON lines, or none."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("w", encoding="utf-8") if path is not None else None

    def write(self, **fields: Any) -> None:
        """Add a line that survives this process."""
        if self._file is not None:
            self._file.write(json.dumps({"time_s": time.time(), **fields}) + "\n")
            # Flushed at each line: a killed process loses what Python still holds.
            self._file.flush()
