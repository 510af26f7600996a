"""Judges the properties that a program states of its whole run: `comm.check(name, always=…)`.

Always, eventually and leads-to are judged on the rows that ranks record, in the order of virtual time: a rank that
records waits for its own time first, so no row of an earlier time can follow. Without properties nothing waits.
Linearizability is judged on the operations, at the end.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from spawnsim.comm.properties import Property
from spawnsim.errors import CheckFailed, ParameterError, UsageError
from spawnsim.virtual.engine import diagnosis
from spawnsim.virtual.engine.world import Rank, World
from spawnsim.virtual.linearizability import violation

SHOWN = 12  # values of one column in a message


class Row:
    """A recorded row, as the functions of properties receive it.

    `row["loss"]` is the row's value in a column, or None.

    Attributes:
        rank: the rank that recorded the row.
        time_s: its virtual time.
    """

    __slots__ = ("_properties", "_values", "rank", "time_s")

    def __init__(self, properties: Properties, rank: int, time_s: float, values: Mapping[str, Any]) -> None:
        self._properties, self.rank, self.time_s, self._values = properties, rank, time_s, values

    def __getitem__(self, column: str) -> Any:
        return self._values.get(column)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns in which the row has values."""
        return tuple(self._values)

    @property
    def alive(self) -> tuple[int, ...]:
        """The ranks that have neither died nor been given up; a rank whose program has ended is alive."""
        return tuple(
            rank.id for rank in self._properties.world.ranks if self._properties.lives(rank, rank.incarnation)
        )

    def latest(self, column: str) -> dict[int, Any]:
        """Return the last value of each rank that is alive and has recorded this column, by rank."""
        return self._properties.latest(column)

    def __str__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self._values.items())
        return f"{values or 'a row without values'} of rank {self.rank} at {self.time_s:.6g} s"


class Open(NamedTuple):
    """A row that the answer of a `leads_to` has yet to follow."""

    row: Row
    incarnation: int  # of its rank
    place: str


@dataclass
class Stated:
    """A property, the line that states it, and its state during the run."""

    of: Property
    place: str
    holds: bool = False  # eventually: whether it did in some row
    open: dict[Any, list[Open]] = field(default_factory=dict)  # leads_to


class Properties:
    """The properties of a run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._stated: dict[str, Stated] = {}
        self._latest: dict[str, dict[int, Any]] = {}  # column -> rank -> value
        self._incarnations: dict[int, int] = {}  # of the ranks that recorded these values
        self._rows, self._now_s = 0, 0.0
        self._last = Row(self, -1, 0.0, {})  # at the end of a run without rows

    def state(self, given: Property, frame: FrameType) -> None:
        """Add a property, unless another rank has stated it; `frame` is the caller's."""
        known = self._stated.get(given.name)
        place = diagnosis.place(frame)
        if known is None:
            self._stated[given.name] = Stated(given, place)
        elif not known.of.is_same(given):
            raise ParameterError(
                f"comm.check({given.name!r}) at {place}: {known.place} states another property of this name"
            )

    def row(self, rank: int, values: Mapping[str, Any], frame: FrameType) -> None:
        """Judge a row that the running task has recorded; end the run if a property does not hold."""
        kernel, world = self.world.kernel, self.world
        if kernel.closed:
            return
        task = kernel.current
        kernel.spent(task)  # wait for the row's time
        self._rows, self._now_s = self._rows + 1, task.clock
        if self._incarnations.setdefault(rank, incarnation := world.ranks[rank].incarnation) != incarnation:
            self._incarnations[rank] = incarnation
            for latest in self._latest.values():
                latest.pop(rank, None)
        for column, value in values.items():
            self._latest.setdefault(column, {})[rank] = value
        row = self._last = Row(self, rank, task.clock, values)
        for stated in self._stated.values():
            if wrong := self._judge(stated, row, frame):
                kernel.stop(CheckFailed(stated.of.name, wrong))

    def latest(self, column: str) -> dict[int, Any]:
        """Return the last values of living ranks in a column, by rank."""
        latest, known = dict(self._latest.get(column, {})), self._incarnations
        for rank in self.world.ranks:
            disturbed = rank.dead or rank.evicted or rank.incarnation  # few are
            if disturbed and rank.id in latest and not self.lives(rank, known[rank.id]):
                del latest[rank.id]
        return latest

    def lives(self, rank: Rank, incarnation: int) -> bool:
        """Return whether an incarnation of a rank has neither died nor been given up by now."""
        return not (rank.dead_at(self._now_s) or rank.evicted) and incarnation == rank.incarnation

    def error(self, end_s: float) -> BaseException | None:
        """Judge the end of a run without other errors; return the error of the first property that does not hold."""
        self._now_s = end_s
        for stated in self._stated.values():
            name = stated.of.name
            try:
                wrong = self._at_end(stated, end_s)
            except Exception as error:  # noqa: BLE001 - of the program's function
                if stated.of.kind == "linearizable":
                    return error
                failed = UsageError(
                    f"comm.check({name!r}), {stated.place}: {type(error).__name__}: {error}; at the end of the run, "
                    f"for {self._last}"
                )
                failed.__cause__ = error
                return failed
            if wrong:
                return CheckFailed(name, wrong)
        return None

    def unjudged(self) -> dict[tuple[str, str], str]:
        """Return a sentence on each object whose operations cannot be judged, by its property."""
        found, resumed = {each.object for each in self.world.operations}, self.world.checkpoints.resumed
        why = (
            "the operations before the checkpoint are unknown"
            if resumed
            else "the run has recorded no operation"
        )
        return {
            ("linearizable", name): f"comm.check({name!r}, linearizable=…) judges nothing: {why}"
            for name, stated in self._stated.items()
            if stated.of.kind == "linearizable" and (resumed or name not in found)
        }

    def _judge(self, stated: Stated, row: Row, frame: FrameType) -> str:
        """Return a sentence if this row violates a property, else ""."""
        given = stated.of
        if given.kind == "always" and not given.conditions[0](row):
            return (
                f"{given.name}: does not hold for {row}, {diagnosis.place(frame)}{self._values(row.columns)}"
            )
        if given.kind == "eventually" and not stated.holds:
            stated.holds = bool(given.conditions[0](row))
        if given.kind != "leads_to":
            return ""
        condition, answer = (_key(each(row), stated) for each in given.conditions)
        if condition is not None:
            incarnation = self.world.ranks[row.rank].incarnation
            stated.open.setdefault(condition, []).append(Open(row, incarnation, diagnosis.place(frame)))
        late = [each for each in stated.open.pop(answer, ()) if row.time_s - each.row.time_s > given.within_s]
        return self._unanswered(stated, late, f"only {row} follows")

    def _values(self, columns: Iterable[str]) -> str:
        """Return lines with the last values of all living ranks in these columns."""
        lines = ""
        for column in columns:
            latest = self.latest(column)
            shown = ", ".join(f"rank {rank}: {value!r}" for rank, value in [*latest.items()][:SHOWN])
            lines += f"\n  last {column}: {shown or 'of no rank that is alive'}{', …' if len(latest) > SHOWN else ''}"
        return lines

    def _at_end(self, stated: Stated, end_s: float) -> str:
        given, last = stated.of, self._last
        if given.kind == "linearizable" and not self.world.checkpoints.resumed:
            return violation(given.name, self.world.operations, given.conditions[0]) or ""
        # Once more for the last row: ranks may have died since, and are then missing in `latest`.
        if given.kind == "eventually" and not (stated.holds or given.conditions[0](last)):
            return (
                f"{given.name}: holds for none of {self._rows} rows, nor at the end of the run at {end_s:.6g} s "
                f"({stated.place}){self._values(self._latest)}"
            )
        never = [each for rows in stated.open.values() for each in rows]
        return self._unanswered(stated, never, f"no answer follows until the end of the run at {end_s:.6g} s")

    def _unanswered(self, stated: Stated, rows: list[Open], found: str) -> str:
        """Return a sentence about the first of these rows whose rank still lives, or ""."""
        ranks = self.world.ranks
        for row, incarnation, place in rows:
            if self.lives(ranks[row.rank], incarnation):
                within = "" if stated.of.within_s == math.inf else f" within {stated.of.within_s:.6g} s"
                return f"{stated.of.name}: {row}, {place}, is not answered{within}: {found}"
        return ""


def _key(value: Any, stated: Stated) -> Any:
    """Return the key that joins a row and its answer; None if the function said no: with None or False."""
    try:
        hash(value)
    except TypeError:
        raise UsageError(
            f"comm.check({stated.of.name!r}), {stated.place}: the functions of leads_to return keys, and a "
            f"{type(value).__name__} is none: {value!r}"
        ) from None
    return None if value is None or (isinstance(value, (bool, np.bool_)) and not value) else value


def state(world: World, given: Property) -> None:
    """Add a property to a run."""
    if world.properties is None:
        world.properties = Properties(world)
    world.properties.state(given, sys._getframe(2))
