"""What a contract test may claim, and on how many ranks it makes sense.

This room knows values and errors. It must work on any communicator, so it never sends anything itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

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


@contextmanager
def refused(*kinds: type[BaseException]) -> Iterator[None]:
    """Claim that the block raises one of these errors."""
    try:
        yield
    except kinds:
        return
    raise AssertionError(f"nothing was raised; wanted {' or '.join(kind.__name__ for kind in kinds)}")


@contextmanager
def fails(mpi: Any, error_class: int) -> Iterator[None]:
    """Claim that the block raises `MPI.Exception` of an error class."""
    try:
        yield
    except mpi.Exception as error:
        found = error.Get_error_class()
        if found != error_class:
            text = mpi.Get_error_string(error_class)
            raise AssertionError(
                f"wanted error class {error_class} ({text}), found {found}: {error}"
            ) from error
        return
    raise AssertionError(f"nothing was raised; wanted {mpi.Get_error_string(error_class)}")


def needs(ranks: int = 1, at_most: int | None = None) -> Callable[[Test], Test]:
    """Mark a test as one that makes sense from (and up to) a number of ranks."""

    def mark(test: Test) -> Test:
        test.__dict__["ranks"] = (ranks, at_most)
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
