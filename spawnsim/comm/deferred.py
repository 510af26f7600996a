"""Work that ranks of one process put off, to be carried out for many of them at once before anybody sees the outcome.

A training step takes virtual time, in which other ranks begin theirs. Who looks at an outcome waits for its own time
first: by then all have put off what they do meanwhile, and it is carried out together. Knows ranks, the order of
each one's work and who looks; must not know what the work is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

WAITING: list[Deferred] = []
"""The runs of this process in which anything is put off, or an error not raised yet: so a look costs one test."""


class Work(Protocol):
    """One thing that a rank has put off."""

    rank: int
    stage: int  # of what is due on several ranks, lower stages are carried out first
    batch: Batch  # what can be carried out together has the same
    put_s: float  # when it was put off, by its rank's clock

    def fail(self) -> None:
        """Leave everything as it would be after a call that raised."""
        ...

    def drop(self) -> None:
        """Leave everything as it is: the program would not have come to it."""
        ...


class Batch(Hashable, Protocol):
    """What carries out the work of many ranks at once."""

    def carry_out(self, queues: Sequence[Sequence[Any]]) -> None:
        """Carry out work of different ranks, given in the order of ranks: as much of each, one after the other."""
        ...


class Deferred:
    """What the ranks of one run have put off.

    Args:
        ranks: how many ranks there are.
        wait: lets the calling rank wait until the others have come to its time, unless they have passed the time that
            is given; does nothing outside ranks.
        clock: tells the time of the rank that runs.
        warn: records a warning of the calling rank.
        apart: makes the context in which work is carried out: that of no rank.

    Attributes:
        batched: whether anything was put off in this run.
        unknown: the class of values that are put off.
        fill_in: puts numbers in the place of what rows waited for, where that takes less time for many rows at once.
        attachments: what those that put off share in this run, until they begin anew; closed then, and at the end.
    """

    def __init__(
        self,
        ranks: int,
        *,
        wait: Callable[[float], None],
        clock: Callable[[], float],
        warn: Callable[[str], None],
        apart: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.ranks, self._wait, self._clock, self._warn, self.apart = ranks, wait, clock, warn, apart
        self.batched = False
        self.unknown: type = Deferred
        self.fill_in: Callable[[Sequence[dict[str, Any]]], None] = lambda rows: None
        self.attachments: dict[Any, Any] = {}
        self._held: list[tuple[Any, Callable[[], None], dict[str, Any]]] = []
        self._holders: set[Any] = set()
        self._work: dict[int, list[Work]] = {}
        self._put_s: dict[int, float] = {}  # when each last put off, by its clock
        self._errors: dict[int, Exception] = {}
        self._left: set[int] = set()  # ranks that have come to their end
        self._told: dict[str, int] = {}

    def put_off(self, work: Work) -> None:
        """Add to what its rank has put off."""
        if self not in WAITING:
            WAITING.append(self)
        self.batched = True
        self._put_s[work.rank] = work.put_s = self._clock()
        self._work.setdefault(work.rank, []).append(work)

    def settle(self, rank: int, *, wait: bool = True) -> None:
        """Have a rank's work carried out, with whatever the others have put off by its time.

        Args:
            rank: who is about to look.
            wait: whether it may wait for the others; where no rank calls, it may not.

        Raises:
            Exception: what the rank's own work raised, if it may wait.
        """
        if rank in self._work and wait:
            # Once time has passed since, the others have put off what they do meanwhile: to wait again brings no more.
            self._wait(self._put_s[rank])  # meanwhile another may look, and carry out ours with its own
        if rank in self._work:
            self.carry_out()
        if wait and rank in self._errors:
            raise self._error(rank)

    def look(self, rank: int | None, unknown: Callable[[], bool]) -> None:
        """Have an outcome carried out that somebody looks at: perhaps another rank than the one whose it is.

        Args:
            rank: who looks, if a rank does.
            unknown: whether what is looked at is still to be carried out.

        Raises:
            Exception: what the rank's own work raised.
        """
        if rank is not None:
            self._wait(self._put_s.get(rank, math.inf))
        if unknown():  # while this rank waited, another may have looked
            self.carry_out()
        if rank in self._errors:
            raise self._error(rank)

    def owes(self, rank: int) -> bool:
        """Return whether a rank's work has failed, and it has not been told."""
        return rank in self._errors

    def _error(self, rank: int) -> Exception:
        error = self._errors.pop(rank)
        self._rest()
        return error

    def _rest(self) -> None:
        if not self._work and not self._errors and self in WAITING:
            WAITING.remove(self)

    def leave(self, rank: int) -> None:
        """Let a rank come to its end: what it has put off is carried out when another looks, or the run is over.

        Raises:
            Exception: what its work has raised so far.
        """
        # Carried out now, the last steps of ranks that end at different times would be done one by one.
        if rank in self._errors:
            raise self._error(rank)
        self._left.add(rank)

    def close(self, dead: Collection[int] = ()) -> dict[int, Exception]:
        """Carry out what is left when the run is over.

        Args:
            dead: ranks that have died, perhaps before anybody looked.

        Returns:
            What the work of ranks that had come to their end, or have died, has raised. Errors of others are theirs.
        """
        self.carry_out()
        found = {rank: error for rank, error in self._errors.items() if rank in self._left or rank in dead}
        self._errors.clear()
        self._rest()
        self._close_attachments()
        return found

    def _close_attachments(self) -> None:
        for each in self.attachments.values():
            each.close()
        self.attachments.clear()

    def holds(self, holder: Any, values: Iterable[Any]) -> bool:
        """Return whether values are to be kept until they are known, or others of their holder are, before them."""
        return bool(self._work) and (holder in self._holders or self.unknown in map(type, values))

    def hold(self, holder: Any, keep: Callable[[], None], values: dict[str, Any]) -> None:
        """Call `keep` once all is carried out, in the order of these calls: `values` are known then."""
        self._holders.add(holder)
        self._held.append((holder, keep, values))

    def carry_out(self) -> None:
        """Carry out all that is put off, and keep what was held."""
        if not self._work:
            return
        queues, self._work = [self._work[rank] for rank in sorted(self._work)], {}
        try:
            with self.apart():
                self._in_stages(queues)
        finally:
            self._rest()
        held, self._held = self._held, []
        self._holders.clear()
        self.fill_in([values for _, _, values in held])
        for holder, keep, _ in held:
            try:
                keep()
            except Exception as error:  # noqa: BLE001 - raised in the rank whose it is
                self._errors.setdefault(holder, error)
                if self not in WAITING:
                    WAITING.append(self)

    def _in_stages(self, queues: list[list[Work]]) -> None:
        """Carry out each rank's work in order: what fits together at once."""
        while queues:
            # Ranks have several things to do here and there: an evaluation, then a step. If those with an evaluation do
            # it first, all are at their steps together.
            stage = min(queue[0].stage for queue in queues)
            together: dict[Batch, list[list[Work]]] = {}
            for queue in queues:
                if queue[0].stage == stage:
                    together.setdefault(queue[0].batch, []).append(queue)
            for batch, some in together.items():
                # As much of each rank as all of them have in a row, so that what they do next finds them together.
                count = min(map(_in_a_row, some))
                batch.carry_out([queue[:count] for queue in some])
                for queue in some:
                    del queue[:count]
            if self._errors:
                self._drop(queues)
            queues = [queue for queue in queues if queue]

    def _drop(self, queues: list[list[Work]]) -> None:
        """Take back what ranks have put off behind what has failed."""
        for queue in queues:
            if queue and queue[0].rank in self._errors:
                for work in queue:
                    work.drop()
                queue.clear()

    def failed(self, work: Work, error: Exception) -> None:
        """Keep an error for the rank whose work it is: it is raised in its next look or call."""
        work.fail()
        self._errors.setdefault(work.rank, error)

    def warn(self, sentence: str) -> None:
        """Record a warning, once a run."""
        if sentence not in self._told:
            found = caller()
            self._told[sentence] = -1 if found is None else found[1]
            self._warn(sentence)

    def told(self, rank: int) -> list[str]:
        """Return the warnings that a rank has recorded."""
        return [sentence for sentence, teller in self._told.items() if teller == rank]

    def begin_anew(self, rank: int) -> None:
        """Have all carried out, and those who put off begin as in a run that is resumed, which knows nothing of them.

        Raises:
            Exception: what the rank's own work raised.
        """
        self.settle(rank)
        self.carry_out()
        self._close_attachments()

    def resume(self, rank: int, *, batched: bool, told: Iterable[str]) -> None:
        """Go on with what a rank of an earlier part of this run has put off, and recorded."""
        self.batched = self.batched or batched
        self._told |= dict.fromkeys(told, rank)


def _in_a_row(queue: list[Work]) -> int:
    """Return how much a rank has put off that begins with one batch, before another one comes."""
    batch = queue[0].batch
    return next((number for number, work in enumerate(queue) if work.batch is not batch), len(queue))


Caller = tuple[Deferred, int]
_callers: list[Callable[[], Caller | None]] = []


def register_callers(of_caller: Callable[[], Caller | None]) -> None:
    """Let a backend whose ranks may put off work tell the calling rank's run, and the rank; None elsewhere."""
    _callers.append(of_caller)


def caller() -> Caller | None:
    """Return the calling rank's run and its rank; None where work is not put off: real ranks, or outside a run."""
    for of_caller in _callers:
        found = of_caller()
        if found is not None:
            return found
    return None


def settle(*, wait: bool = True) -> None:
    """Have the calling rank's work carried out: it hands memory to a call that may read or write its weights.

    Call it only `if WAITING`.
    """
    found = caller()
    if found is not None:
        found[0].settle(found[1], wait=wait)
