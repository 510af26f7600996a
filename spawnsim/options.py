"""Options on a command line: parsing, and one-line error messages.

This module handles only words and values; each command defines the meaning of its options.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from spawnsim.errors import ParameterError

WORDS = {"true": True, "false": False, "null": None}
OPTIONS = {
    "ranks": "--ranks", "seed": "--seed", "backend": "--backend", "platform": "--platform", "stragglers": "--straggler",
    "faults": "--faults", "compute": "--compute", "deadline_s": "--deadline", "ties": "--ties", "sums": "--sums",
    "eager": "--eager", "check_steps": "--check-steps", "races": "--races", "whole": "--whole",
    "record_every": "--record-every", "record_ranks": "--record-ranks",
}  # fmt: skip
"""Keyword argument of `spawnsim.run` → option of the command; a value of True gives the option without a value."""
VIRTUAL_ONLY = ("platform", "stragglers", "faults", "compute", "ties", "sums")


def of_virtual_ranks(given: Sequence[str]) -> str:
    """Return the message that refuses options of virtual ranks for real ranks."""
    return f"{', '.join(given)} {'describes' if len(given) == 1 else 'describe'} virtual ranks"


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return "did you mean ...?" if a known word is close, else an empty text; `cutoff` 1: equal words only."""
    found = get_close_matches(word, [*known], n=1, cutoff=cutoff)
    return f"did you mean {found[0]}?" if found else ""


def parameters(settings: Sequence[str]) -> dict[str, Any]:
    """Return the keyword arguments that `--set name=value` options give.

    Values are Python literals, or true, false, null; everything else is text.
    """
    pairs = [setting.partition("=") for setting in settings]
    wrong = [name + sign for name, sign, _ in pairs if not sign or not name.isidentifier()]
    if wrong:
        raise ParameterError(f"--set {wrong[0]}: write --set name=value")
    return {name: _value(text) for name, _, text in pairs}


def _value(text: str) -> Any:
    # Words of JSON and of shells; Python's own are literals.
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def arguments_of(values: Mapping[str, Any]) -> list[str]:
    """Return `--set` options that `parameters` reads back as these values."""
    return [part for name, value in values.items() for part in ("--set", f"{name}={_text(value)}")]


def _text(value: Any) -> str:
    # A word that can only be read as text needs no quotes, which a shell would need quoted again.
    plain = isinstance(value, str) and value.isidentifier() and _value(value) == value
    return value if plain else repr(value)


def listed(text: str) -> list[str]:
    """Return the values of a list with commas between them; commas within quotes or brackets do not separate.

    >>> listed("none,'slow:0.05,10'"), listed("(32,),(64, 64)")
    (['none', "'slow:0.05,10'"], ['(32,)', '(64, 64)'])
    """
    found: list[str] = []
    for part in text.split(","):
        if found and _left_open(found[-1]) > 0:
            found[-1] += f",{part}"
        else:
            found.append(part)
    found = [each.strip() for each in found]
    if any(map(_left_open, found)):
        raise ParameterError(f"{text}: a quote or bracket is not closed")
    if len(found) > 1 and "" in found:
        raise ParameterError(f"{text}: a value is missing between two commas")
    return found


def _left_open(value: str) -> int:
    """Return the number of open quotes or brackets of a value; below 0: closed without being opened."""
    value = value.strip()
    if value[:1] in ("'", '"'):  # a quote within a word, such as an apostrophe, does not open
        return int(len(value) == 1 or value[-1] != value[0])
    return sum(value.count(sign) for sign in "([{") - sum(value.count(sign) for sign in ")]}")


def unquoted(text: str) -> str:
    """Return a value without the quotes around it."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def settings_of(given: Sequence[str], known: Mapping[str, Callable[[str], Any]], what: str) -> dict[str, Any]:
    """Return the values that `--set name=value` options give for a command's own settings."""
    parameters(given)  # raises for texts other than NAME=VALUE
    found = {}
    for name, _, text in (each.partition("=") for each in given):
        if name not in known:
            hint = nearest(name, known) or f"it has {', '.join(known) or 'none'}"
            raise ParameterError(f"--set {name}: {what} has no such setting; {hint}")
        try:
            found[name] = known[name](text)
        except ValueError as error:
            raise ParameterError(f"--set {name}={text}: {error}") from error
    return found


def choices(settings: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values that `--set name=value,value` options give; values of a repeated name are combined."""
    found: dict[str, list[Any]] = {}
    for setting in settings:
        name, sign, values = setting.partition("=")
        for text in listed(values) if sign else [""]:
            for key, value in parameters([f"{name}{sign}{text}"]).items():
                found.setdefault(key, []).append(value)
    return found
