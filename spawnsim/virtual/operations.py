"""Operations on objects that ranks share, as programs declare them: `comm.record.operation`.

The world keeps them from their beginning: a rank that dies leaves a pending one, whose effect may have taken place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from types import FrameType
from typing import Any

from spawnsim.virtual.engine import diagnosis
from spawnsim.virtual.engine.world import World

WIDTH = 60  # characters of a value in a message


@dataclass(eq=False, slots=True)
class Operation:
    """An operation on an object. Operations of one `thread` follow each other. Without an `end_s` it is pending."""

    rank: int
    thread: Any
    object: str
    method: str
    arguments: tuple[Any, ...]
    begin_s: float
    line: str = ""
    result: Any = None
    end_s: float | None = None
    written: bool = False  # whether its event was recorded

    def __str__(self) -> str:
        call = f"{self.method}({', '.join(map(short, self.arguments))})"
        return call if self.end_s is None else f"{call} → {short(self.result)}"

    def until_s(self) -> float:
        """Return its end; infinity while it is pending."""
        return math.inf if self.end_s is None else self.end_s

    def precedes(self, other: Operation) -> bool:
        """Return whether it ended before a later one began."""
        return self.until_s() < other.begin_s or (
            self.thread == other.thread and self.until_s() <= other.begin_s
        )


def plain(value: Any) -> Any:
    """Return a value without numpy's types, and with lists for tuples: values that are equal in JSON are equal.

    >>> plain((1, [2.5, (3,)]))
    [1, [2.5, [3]]]
    """
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, float) and math.isnan(value):
        return math.nan  # the same object, so that lists of it are equal
    return plain(value.tolist()) if is_array(value) else value


def is_array(value: Any) -> bool:
    """Whether a value is an array, a tensor, or a scalar of numpy."""
    return hasattr(value, "tolist")


def short(value: Any) -> str:
    """Return a value as a text for a message."""
    text = re.sub(r" at 0x[0-9A-Fa-f]+", "", repr(plain(value)))  # addresses differ from run to run
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"


@contextmanager
def recorded(world: World, call: tuple[str, str, tuple[Any, ...]], frame: FrameType) -> Iterator[Operation]:
    """Record the block as an operation of the running task: object, method, arguments. An exception leaves it pending.

    Arguments are copied now, since arrays among them may change.
    """
    task, (name, method, given) = world.kernel.current, call
    arguments = tuple(plain(each) if is_array(each) else deepcopy(each) for each in given)
    operation = Operation(task.rank, task, name, method, arguments, task.clock, diagnosis.place(frame))
    world.operations.append(operation)
    try:
        yield operation
        operation.result, operation.end_s = plain(operation.result), task.clock
    finally:
        write(world, operation)


def write(world: World, operation: Operation) -> None:
    """Record the event of an operation, unless that was done: at its end, or at the beginning of a pending one."""
    if operation.written:
        return
    operation.written, end_s = True, operation.end_s
    fields = {
        "object": operation.object, "method": operation.method, "arguments": operation.arguments,
        "result": None if end_s is None else operation.result, "begin_s": operation.begin_s, "end_s": end_s,
    }  # fmt: skip
    time_s = operation.begin_s if end_s is None else end_s
    world.recorder.event(operation.rank, time_s, "operation", fields)
