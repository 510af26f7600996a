"""A rank's program from its first line to its end: ranks part all together, or the job ends loudly (`abort`).

`guarded(comm)` runs the program; at its end all meet: then no program sends any more, so a receive that is still open
is cancelled; messages that nobody received are taken from the library, counted and dropped, because one MPI aborts at
its end when it still holds some. A job that survives its ranks does not come to the library's end, where it would
wait for the dead: it drops all that is open. Knows a rank's runtime by what `Finalizable` names; knows neither MPI
nor torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

from spawnsim.errors import SpawnsimError
from spawnsim.real.runtime.abort import AbortProtocol, stoppable
from spawnsim.real.runtime.requests import RequestRegistry, wait_until
from spawnsim.real.runtime.services import RankServices

RECEIVES = ("recv", "Recv")
LAST_LOOKS = 64  # at messages that may still be under way when all have met: under 1 ms


class Finalizable(Protocol):
    """A home, seen from the end of its run."""

    own: RankServices
    ending: AbortProtocol
    registry: RequestRegistry

    def meet(self) -> Callable[[], bool]:
        """Begin to wait for all ranks; the result says whether all have come."""

    def take_leftovers(self) -> int:
        """Drop messages that have arrived and that nobody received; return how many."""

    def release(self) -> None:
        """Give back what the run holds: the last step, after which the rank is alone."""


class Finalizer:
    """The end of one rank's run, in two steps: `settle`, after which ranks may still compare notes, and `leave`."""

    def __init__(self, home: Finalizable) -> None:
        self._home, self._settled, self._left = home, False, False
        # Gives up ranks that are silent, so that the others part without them; None in a job that ends with any rank.
        self.give_up: Callable[[set[int]], object] | None = None
        self._leftovers = 0

    def note(self) -> str:
        """Return what the rank does outside any call, for other ranks' messages."""
        began = self._home.own.compute.began_s
        if self._home.ending.over:
            return "has ended its program"
        return "" if began is None else f"computing for {time.perf_counter() - began:.1f} s"

    def settle(self) -> None:
        """Wait until all programs have ended; complete or drop what they left open, and record how much it was."""
        if self._settled:
            return
        home, self._settled = self._home, True
        home.ending.over = True
        self.meet()
        cancelled = self._cancel_receives()
        if self.give_up is None:
            self._drain()
        for kind, count in (
            ("leftover_requests", cancelled + len(home.registry)),
            ("leftover_messages", self._leftovers),
        ):
            if count:
                home.own.record.event(kind, count=count)

    def _drain(self) -> None:
        wait_until(self._drained, self._home.own.clock.limit_s())  # sends end when their messages were taken
        self._met(self._drained)
        for _ in range(LAST_LOOKS):
            self._drained()

    def leave(self) -> None:
        """Part from the others."""
        self.settle()
        if not self._left:
            self._left = True
            self._home.release()

    def meet(self) -> None:
        """Wait for all, while requests go on."""
        self._met(self._home.registry.sweep)

    def _met(self, meanwhile: Callable[[], object]) -> None:
        """Wait for all. Silence of a rank (not slowness) ends the job loudly, or the waiting if the job survives it."""
        home, all_here = self._home, self._home.meet()

        def look() -> bool:
            home.ending.hold()
            meanwhile()
            return all_here()

        while not wait_until(look, max(home.own.clock.limit_s(), 1.0)):
            silent = [where for where in home.ending.watchdog.ask_all() if not where.answered]
            if self.give_up is not None:
                self.give_up(self._still({where.rank for where in silent}))
            elif silent and not all_here():
                table = "\n".join(f"  {where}" for where in silent)
                home.ending.end(f"spawnsim: the job cannot end\n{table}")

    def _still(self, silent: set[int]) -> set[int]:
        """Return which of those who were silent are so when they are asked again."""
        if not silent - self._home.ending.lost:
            return set()
        return {where.rank for where in self._home.ending.watchdog.ask_all() if not where.answered} & silent

    def _cancel_receives(self) -> int:
        """Cancel the receives that are open; return how many there were. Nobody will send to them."""
        waiting: list[Any] = [each for each in self._home.registry.held() if each._what[0].endswith(RECEIVES)]
        waiting = [request for request in waiting if not request.advance()]
        for request in waiting:
            request.Cancel()
        return len(waiting)

    def _drained(self) -> bool:
        self._leftovers += self._home.take_leftovers()
        self._home.registry.sweep()
        return not self._home.registry


C = TypeVar("C", bound=Any)


def close(comm: Any) -> None:
    """Say goodbye: wait for all ranks, complete what is open, stop the watchdog. Collective."""
    comm._home.goodbye()


@contextmanager
def guarded(comm: C) -> Iterator[C]:
    """Run a rank's program: an exception or a non-zero exit ends the whole job loudly, the end is a goodbye."""
    ending = comm._home.ending
    stopping = nullcontext() if comm._home.options.survive else stoppable(ending)
    with stopping, _abort_on_error(comm, ending):
        yield comm


@contextmanager
def _abort_on_error(comm: Any, ending: AbortProtocol) -> Iterator[None]:
    try:
        yield
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            status = leaving.code if isinstance(leaving.code, int) else 1
            ending.end(f"spawnsim: rank {comm.rank} called sys.exit({leaving.code!r})", status=status)
        _finalize(comm, ending)
        raise
    except BaseException as error:
        ending.fail(error)
        raise
    _finalize(comm, ending)


def _finalize(comm: Any, ending: AbortProtocol) -> None:
    try:
        close(comm)
    except SpawnsimError as error:  # such as: the others have given this rank up
        ending.fail(error)
