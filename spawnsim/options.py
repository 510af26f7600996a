"""Options on a command line: how they are read, and one line that says what is wrong with them.

Words and values alone; what an option means, the command knows.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from spawnsim.errors import ParameterError
from spawnsim.units import limit

WORDS = {"true": True, "false": False, "null": None}
OPTIONS = {
    "ranks": "--ranks", "seed": "--seed", "backend": "--backend", "platform": "--platform", "stragglers": "--straggler",
    "faults": "--faults", "compute": "--compute", "deadline_s": "--deadline", "ties": "--ties", "sums": "--sums",
    "eager": "--eager", "check_steps": "--check-steps", "whole": "--whole", "record_every": "--record-every",
    "record_ranks": "--record-ranks",
}  # fmt: skip
"""Keyword argument of `spawnsim.run` → option of the command; those that are True are options alone."""
VIRTUAL_ONLY = ("platform", "stragglers", "faults", "compute", "ties", "sums")


def of_virtual_ranks(given: Sequence[str]) -> str:
    """Return the words that refuse options of virtual ranks where ranks are real."""
    return f"{', '.join(given)} {'describes' if len(given) == 1 else 'describe'} virtual ranks"


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are a `ParameterError` of one line, with the known word that comes closest.

    Attributes:
        examples: of the command that is served: the help ends with them.
    """

    examples: ClassVar[Sequence[str]] = ()
    missing = ""  # said where a required argument is not given: where to find one
    _shown: ClassVar[list[Parser] | None] = None  # whose help was asked for, where it is not to be printed

    def __init__(self, **settings: Any) -> None:
        # An abbreviation that is right today is ambiguous with the next option; arguments of a program's own would be
        # cut, too.
        super().__init__(allow_abbrev=False, **settings)
        # "-3s" is a value that its option may refuse, as "-3" is: argparse would take it for an option.
        self._negative_number_matcher = re.compile(r"^-\.?\d")

    @classmethod
    @contextmanager
    def caught(cls) -> Iterator[list[Parser]]:
        """Print no help while the block runs: it ends where help is asked for, and the list has that parser."""
        found: list[Parser] = []
        Parser._shown = found
        with suppress(SystemExit):
            try:
                yield found
            finally:
                Parser._shown = None

    def print_help(self, file: Any = None) -> None:
        """Print the help, or keep whose it is."""
        if Parser._shown is None:
            super().print_help(file)
        else:
            Parser._shown.append(self)

    def format_help(self) -> str:
        """Return the help, with examples at its end, a line each."""
        lines = "".join(f"  {example}\n" for example in self.examples)
        return super().format_help() + (f"\nexamples:\n{lines}" if lines else "")

    def error(self, message: str) -> NoReturn:
        """Raise `ParameterError`."""
        if found := re.fullmatch(r"argument (\S+): invalid (int|float) value: '(.*)'", message):
            kind = "a whole number" if found[2] == "int" else "a number"
            raise ParameterError(f"{found[1].rpartition('/')[2]} {found[3]}: give {kind}")
        hint = self._hint(message)
        raise ParameterError(f"{message}; {f'{hint} See' if hint else 'see'} `{self.prog} --help`")

    def mistyped(self, words: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Yield those of some words that are nearly an option of this parser, each with which one was perhaps meant."""
        for word in words:
            name = word.partition("=")[0]
            hint = nearest(name, self._option_string_actions, cutoff=0.85) if word.startswith("--") else ""
            if hint:
                yield name, hint

    def _hint(self, message: str) -> str:
        if message.startswith("the following arguments are required"):
            return self.missing
        # One option takes one setting; a shell's user may well write several after it.
        settings = re.findall(r"(?<!\S)[^\W\d]\w*=\S*", message)
        if (
            message.startswith("unrecognized arguments")
            and settings
            and "--set" in self._option_string_actions
        ):
            return f"repeat --set for each: --set {' --set '.join(settings)}."
        return self._nearest(message)

    def _nearest(self, message: str) -> str:
        quoted = re.findall(r"'([^']+)'", message)  # invalid choice: 'x' (choose from 'y', 'z')
        if quoted:
            return nearest(quoted[0], quoted[1:])
        options = re.findall(r"--[\w-]+", self.format_help())
        unknown = [word for word in re.findall(r"--[\w-]+", message) if word not in options]
        return nearest(unknown[0], options) if unknown else ""


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return "did you mean ...?" if one of the known words is close, else nothing; `cutoff` 1: the same alone."""
    found = get_close_matches(word, [*known], n=1, cutoff=cutoff)
    return f"did you mean {found[0]}?" if found else ""


def picture(text: str) -> Path:
    """Return the file of `--picture`; a wrong ending is told before hours are spent on what it shows."""
    found = Path(text)
    if found.suffix not in ("", ".png", ".pdf", ".svg"):
        raise argparse.ArgumentTypeError(f"{text}: figures are written as .png, .pdf or .svg")
    return found


def time_limit(text: str) -> float:
    """Return the seconds that an option allows, such as 5, "5 s", 200ms or inf."""
    try:
        return limit(text)
    except ParameterError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parameters(settings: Sequence[str]) -> dict[str, Any]:
    """Return the keyword arguments that `--set name=value` options ask for.

    Values are Python literals, or true, false, null; whatever else is text.
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
    # A word that is read as nothing else needs no quotes, which a shell would need quoted again.
    plain = isinstance(value, str) and value.isidentifier() and _value(value) == value
    return value if plain else repr(value)


def split_at_dashes(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before and behind `--`: argparse would take those behind for its own positionals.

    >>> split_at_dashes(["train.py", "--", "--lr", "0.1"])
    (['train.py'], ['--lr', '0.1'])
    """
    own = list(argv)
    at = own.index("--") if "--" in own else len(own)
    return own[:at], own[at + 1 :]


def listed(text: str) -> list[str]:
    """Return the values of a list with commas between them; those within quotes or brackets separate nothing.

    >>> listed("none,'slow:0.05,10'"), listed("(32,),(64, 64)")
    (['none', "'slow:0.05,10'"], ['(32,)', '(64, 64)'])
    """
    found, depth, quote = [""], 0, ""
    for sign in text:
        if sign == "," and not depth and not quote:
            found.append("")
            continue
        # A quote within a word, such as an apostrophe, opens nothing.
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"" and (depth or not found[-1].strip()):
            quote = sign
        depth += 0 if quote else (sign in "([{") - (sign in ")]}")
        found[-1] += sign
    found = [each.strip() for each in found]
    if depth or quote:
        raise ParameterError(f"{text}: a quote or bracket is not closed")
    if len(found) > 1 and "" in found:
        raise ParameterError(f"{text}: a value is missing between two commas")
    return found


def unquoted(text: str) -> str:
    """Return a value without the quotes around it."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def choices(settings: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values that `--set name=value,value` options ask for; those of a repeated name are put together."""
    found: dict[str, list[Any]] = {}
    for setting in settings:
        name, sign, values = setting.partition("=")
        for text in listed(values) if sign else [""]:
            for key, value in parameters([f"{name}{sign}{text}"]).items():
                found.setdefault(key, []).append(value)
    return found
