"""Quantities as people read and write them: "25 Gbit/s", "2 us" and "64 KiB" become SI floats (seconds, bytes,
bytes/s); rows of values become a table of text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from spawnsim.errors import ParameterError

LONGEST_S = 1e12  # thirty thousand years: no clock reaches it
SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
BYTES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
BYTES_PER_SECOND = {f"{unit}/s": factor for unit, factor in BYTES.items()} | {
    "bit/s": 0.125, "kbit/s": 125.0, "Mbit/s": 125e3, "Gbit/s": 125e6, "Tbit/s": 125e9,
}  # fmt: skip

FLOP_PER_SECOND = {"GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15}

_N = TypeVar("_N")
_QUANTITY = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([A-Za-zµ/]*)\s*")


def _parse(text: str | float, units: dict[str, float], what: str) -> float:
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        return float(text)
    match = _QUANTITY.fullmatch(str(text))
    if match is None or match[2] not in units:
        raise ParameterError(
            f"{text!r} is not a {what}: write a number and one of {', '.join(filter(None, units))}"
        )
    return float(match[1]) * units[match[2]]


def number(text: str) -> float:
    """Return a number without a unit; ParameterError if the text is not a number.

    >>> number("5%")
    Traceback (most recent call last):
    spawnsim.errors.ParameterError: '5%' is not a number: write 0.05
    """
    try:
        return _plain(text, float, "number")
    except ParameterError as error:
        share = re.fullmatch(r"(\d+(?:\.\d*)?)\s*%", text)
        raise ParameterError(f"{error}: write {float(share[1]) / 100:g}") if share else error from None


def whole(text: str) -> int:
    """Return a whole number without a unit; ParameterError if the text is not one."""
    return _plain(text, int, "whole number")


def _plain(text: str, read: Callable[[str], _N], what: str) -> _N:
    try:
        return read(text)
    except ValueError:
        raise ParameterError(f"{text!r} is not a {what}") from None


def seconds(text: str | float) -> float:
    """Return a duration in seconds; a bare number is in seconds.

    >>> seconds("2 us")
    2e-06
    """
    length = _parse(text, SECONDS | {"": 1.0}, "duration")
    if isinstance(text, str) and not abs(length) <= LONGEST_S:
        raise ParameterError(f"{text!r} is too long: give a duration of at most {LONGEST_S:g} s")
    return length


def check_duration(call: str, given: object) -> None:
    """Refuse any value but a number of seconds of at least 0, in a call of a program.

    >>> check_duration("compute", "5 ms")
    Traceback (most recent call last):
    spawnsim.errors.ParameterError: compute('5 ms'): give seconds, a number of at least 0
    """
    try:
        right = given >= 0  # type: ignore[operator]
    except TypeError:
        right = False
    if not right:  # also refuses NaN
        raise ParameterError(f"{call}({given!r}): give seconds, a number of at least 0")


def limit(text: str | float) -> float:
    """Return a time limit in seconds, as `seconds` does, or "inf" for no limit."""
    return math.inf if text == "inf" else seconds(text)


def nbytes(text: str | float) -> int:
    """Return a size in bytes; a number is in bytes, text must have a unit: "2" hardly means 2 bytes.

    >>> nbytes("2 GB")
    2000000000
    """
    size = _parse(text, BYTES, "size")
    if not math.isfinite(size):
        raise ParameterError(f"{text!r} is not a size: give a finite one")
    return round(size)


def bytes_per_second(text: str | float) -> float:
    """Return a bandwidth in bytes per second; text must have a unit, as bits and bytes are easily mixed up.

    >>> bytes_per_second("25 Gbit/s")
    3125000000.0
    """
    return _parse(text, BYTES_PER_SECOND, "bandwidth")


def flop_per_second(text: str | float) -> float:
    """Return a rate of floating-point operations.

    >>> flop_per_second("10 TFLOP/s")
    10000000000000.0
    """
    return _parse(text, FLOP_PER_SECOND, "rate of operations")


def counted(number: float, noun: str = "") -> str:
    """Return a whole number with thousands separated, and the noun, singular or plural.

    >>> counted(12345)
    '12,345'
    >>> counted(1, "replacement")
    '1 replacement'
    """
    return f"{int(number):,}" + (f" {noun}{'s' * (number != 1)}" if noun else "")


def extent(values: Collection[float], form: str) -> str:
    """Return the least and the largest number as a text, or one number if both look alike.

    >>> extent([2.0, 1.5, 1.0], ".1f"), extent([1.001, 1.002], ".2f")
    ('1.0 to 2.0', '1.00')
    """
    return " to ".join(dict.fromkeys(f"{each:{form}}" for each in (min(values), max(values))))


def spans(ranks: Collection[int]) -> str:
    """Return ranks as a text.

    >>> spans([0, 1, 2, 7])
    '0-2,7'
    """
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and found[-1][-1] == rank - 1:
            found[-1][1:] = [rank]
        else:
            found.append([rank])
    shown = ["-".join(map(str, each)) for each in found[:8]]
    return ",".join(shown) + (", …" if len(found) > 8 else "")


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1, indent: str = "") -> str:
    """Return aligned columns: the first `left` ones aligned left, the rest, which hold numbers, aligned right.

    >>> print(text_table(("step", "s"), [("forward", "1.5"), ("sum", "10.0")]))
    step        s
    forward   1.5
    sum      10.0
    """
    lines = [head, *rows] if head else list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    layout = "  ".join(f"{{:{'<' if at < left else '>'}{width}}}" for at, width in enumerate(widths))
    return "\n".join((indent + layout.format(*line)).rstrip() for line in lines)
