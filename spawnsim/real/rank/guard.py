"""A rank's program from its first line to its end: it ends together with the others, or loudly.

Knows that a communicator of any real building has a home with an ending and a goodbye.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from spawnsim.errors import SpawnsimError
from spawnsim.real.rank.ending import Ending
from spawnsim.real.rank.stopping import stoppable

C = TypeVar("C", bound=Any)


def close(comm: Any) -> None:
    """Say goodbye: wait for all ranks, complete what is open, stop the watchdog. Collective."""
    comm._home.goodbye()


@contextmanager
def guarded(comm: C) -> Iterator[C]:
    """Run a rank's program: an exception or a non-zero exit ends the whole job loudly, the end is a goodbye."""
    ending = comm._home.ending
    stopping = nullcontext() if comm._home.options.survive else stoppable(ending)
    with stopping, _loud(comm, ending):
        yield comm


@contextmanager
def _loud(comm: Any, ending: Ending) -> Iterator[None]:
    try:
        yield
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            status = leaving.code if isinstance(leaving.code, int) else 1
            ending.end(f"spawnsim: rank {comm.rank} called sys.exit({leaving.code!r})", status=status)
        _part(comm, ending)
        raise
    except BaseException as error:
        ending.fail(error)
        raise
    _part(comm, ending)


def _part(comm: Any, ending: Ending) -> None:
    try:
        close(comm)
    except SpawnsimError as error:  # such as: the others have given this rank up
        ending.fail(error)
