"""Properties of a whole run, as `comm.check(name, always=…)` states them; `virtual.properties` judges them.

Functions receive each row that any rank records, in the order of virtual time: `row.rank`, `row.time_s`, `row[column]`
(None if the row lacks the column), `row.latest(column)` (a dictionary with the last value of each rank that is alive)
and `row.alive` (these ranks). State a property on every rank before its first row.

* `always` must be true for each row.
* `eventually` must be true for some row, or for the last one at the end of the run, when more ranks may be dead
  (without rows: for one of rank -1 without values).
* `leads_to` is (condition, answer) or (condition, answer, seconds), two functions that return a key, or None or False.
  If a row has a key by the condition, then the same or a later row must have it by the answer, within these virtual
  seconds. A row whose rank dies needs no answer.
* `linearizable` is a class, the sequential specification of an object that ranks share, with a method for each of its
  operations: an order of the operations on the object of the property's name (`comm.record.operation`) must keep their
  order in virtual time and give each the result that the specification returns. A method that raises is impossible
  there. An operation without an end may have taken effect or not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

from spawnsim.errors import ParameterError
from spawnsim.units import check_duration

Condition = Callable[[Any], Any]


class Kinds(TypedDict, total=False):
    """The kinds of properties: exactly one is given."""

    always: Condition | None
    eventually: Condition | None
    leads_to: tuple[Any, ...] | None
    linearizable: Callable[[], Any] | None


@dataclass(frozen=True)
class Property:
    """A named property.

    Attributes:
        name: its name, part of the error.
        kind: "always", "eventually", "leads_to" or "linearizable".
        conditions: the functions of a row, or the specification.
        within_s: for "leads_to": virtual seconds from a row to its answer.
    """

    name: str
    kind: str
    conditions: tuple[Callable[..., Any], ...]
    within_s: float = math.inf

    def is_same(self, other: Property) -> bool:
        """Return whether two ranks have stated one property: by the code of its functions."""
        return (self.kind, self.within_s, self._codes()) == (other.kind, other.within_s, other._codes())

    def _codes(self) -> list[Any]:
        # Functions without code (classes, partial objects) may differ between ranks that have separate modules.
        return [getattr(each, "__code__", None) for each in self.conditions]


def stated(name: Any, message: str = "", **given: Unpack[Kinds]) -> Property:
    """Return the property that the arguments of `comm.check` state.

    Raises:
        ParameterError: no name, not exactly one kind of property, or a condition that cannot be called.
    """
    kinds = [(kind, value) for kind, value in given.items() if value is not None]
    known = Kinds.__annotations__
    if not isinstance(name, str) or not name or message or len(kinds) != 1 or given.keys() - known:
        raise ParameterError(
            f"comm.check({name!r}, {', '.join(f'{kind}=…' for kind in given)}): a property has a name, no message, and "
            f"one of {', '.join(known)}"
        )
    ((kind, value),) = kinds
    functions: Any = value if kind == "leads_to" else (value,)
    within_s = math.inf
    if kind == "leads_to" and isinstance(functions, (tuple, list)) and len(functions) == 3:
        *functions, within_s = functions
        check_duration("leads_to", within_s)
    wrong = not isinstance(functions, (tuple, list)) or len(functions) != 1 + (kind == "leads_to")
    if wrong or not all(callable(each) for each in functions):
        takes = "two functions and perhaps seconds" if kind == "leads_to" else "a class or function"
        raise ParameterError(f"comm.check({name!r}): {kind} takes {takes}, not {value!r}")
    return Property(name, kind, tuple(functions), float(within_s))
