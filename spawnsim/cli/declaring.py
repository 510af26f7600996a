"""Commands as dataclasses: a field is an argument or an option; parser, help and completion follow from it.

    @dataclass(kw_only=True)
    class Verify(Command):
        \"\"\"Run a recorded run on virtual ranks again, and name the first event that differs.\"\"\"

        run: Path = argument("run folder", "RUN")
        json: bool = flag("print one JSON object")
        seed: Seed = 0

        def __call__(self) -> int: ...

Options that several commands share, such as `Seed`, are annotated types, at the end of this file.
"""

from __future__ import annotations

import argparse
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self

from spawnsim.errors import ParameterError
from spawnsim.options import nearest
from spawnsim.run.watched import OBSERVERS
from spawnsim.units import limit


def split_at_dashes(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before and after `--`: argparse would take the latter for its own positionals.

    >>> split_at_dashes(["train.py", "--", "--lr", "0.1"])
    (['train.py'], ['--lr', '0.1'])
    """
    own = list(argv)
    at = own.index("--") if "--" in own else len(own)
    return own[:at], own[at + 1 :]


@dataclass(frozen=True)
class Option:
    """An option with the field's name.

    Attributes:
        help: one line, without the default, which is added.
        metavar: the value's name in the help; with FILE or DIR a shell completes paths.
        short: a second name of one letter.
        parse: converts the text to the value; raises `ParameterError`.
        names: names that a shell completes, or a function that returns them; other values are allowed as well.
        choices: the only allowed values; a `Literal` need not repeat them.
        group: the title above it in the help.
    """

    help: str
    metavar: str = ""
    short: str = ""
    parse: Callable[[str], Any] | None = None
    names: Iterable[str] | Callable[[], Iterable[str]] = ()
    choices: Iterable[str] | None = None
    group: str = ""


class Argument(Option):
    """A positional argument."""


def option(*about: Any, default: Any = None, required: bool = False, **more: Any) -> Any:
    """Return a field that is an option; its arguments are the fields of `Option`."""
    return field(default=MISSING if required else default, metadata={"option": Option(*about, **more)})


def flag(about: str, group: str = "") -> Any:
    """Return a field that is an option without a value."""
    return option(about, default=False, group=group)


def argument(*about: Any, default: Any = MISSING, **more: Any) -> Any:
    """Return a field that is a positional argument; without a default it is required."""
    return field(default=default, metadata={"option": Argument(*about, **more)})


class Command:
    """A command, built from its command line: calling it runs the command and returns the exit code."""

    prog: ClassVar[str] = "spawnsim"
    launcher: ClassVar[str] = ""  # before it in the help
    missing: ClassVar[str] = ""  # a hint on finding the missing required argument
    examples: ClassVar[Sequence[str]] = ()
    takes_arguments: ClassVar[bool] = False
    arguments: Sequence[str] = ()  # a program's own, after --

    @classmethod
    def parse(cls, argv: Sequence[str]) -> Self:
        """Return the command of a command line."""
        own, rest = split_at_dashes(argv) if cls.takes_arguments else (argv, [])
        command = cls(**vars(parser_of(cls).parse_args(own)))
        command.arguments = rest
        return command

    def __call__(self) -> int:
        raise NotImplementedError


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are a `ParameterError` of one line, with the closest known word."""

    missing = ""
    examples: Sequence[str] = ()

    def __init__(self, **settings: Any) -> None:
        # An abbreviation that works today becomes ambiguous with the next option; it would also shorten a program's
        # own arguments.
        super().__init__(allow_abbrev=False, argument_default=argparse.SUPPRESS, **settings)
        # "-3s" is a value that its option may refuse, as "-3" is: argparse would treat it as an option.
        self._negative_number_matcher = re.compile(r"^-\.?\d")

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
        """Yield the words that are nearly an option of this parser, each with the option that may be meant."""
        for word in words:
            name = word.partition("=")[0]
            hint = nearest(name, self._option_string_actions, cutoff=0.85) if word.startswith("--") else ""
            if hint:
                yield name, hint

    def _hint(self, message: str) -> str:
        if message.startswith("the following arguments are required"):
            return self.missing
        known = self._option_string_actions
        # One option takes one setting, but a shell's user may well write several after it.
        settings = re.findall(r"(?<!\S)[^\W\d]\w*=\S*", message)
        if message.startswith("unrecognized arguments") and settings and "--set" in known:
            return f"repeat --set for each: --set {' --set '.join(settings)}."
        quoted = re.findall(r"'([^']+)'", message)  # invalid choice: 'x' (choose from 'y', 'z')
        if quoted:
            return nearest(quoted[0], quoted[1:])
        unknown = [word for word in re.findall(r"--[\w-]+", message) if word not in known]
        return nearest(unknown[0], known) if unknown else ""


def parser_of(command: type[Command]) -> Parser:
    """Return the parser of a command, from its fields: it sets only the given ones."""
    parser = Parser(prog=command.prog, description=" ".join((command.__doc__ or "").split()))
    parser.missing, parser.examples = command.missing, command.examples
    groups: dict[str, Any] = {"": parser}
    hints = typing.get_type_hints(command, include_extras=True)
    for each in fields(command):  # type: ignore[arg-type]  # each command is a dataclass
        kind, option = hints[each.name], each.metadata.get("option")
        if option is None:
            kind, option = typing.get_args(kind)
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        name, settings = (
            each.name.strip("_").replace("_", "-"),
            _settings(kind, option, required=each.default is MISSING),
        )
        settings["help"] = option.help
        if each.default not in (MISSING, None, (), "") and kind is not bool and "default" not in option.help:
            settings["help"] += f" (default: {each.default})"
        if isinstance(option, Argument):
            names = [each.name]
        else:
            names = [*filter(None, [option.short]), f"--{name}"]
            settings |= {"required": each.default is MISSING, "dest": each.name}
        action: Any = groups[option.group].add_argument(*names, **settings)
        action.names = option.names
    return parser


def _settings(kind: Any, option: Option, *, required: bool) -> dict[str, Any]:
    """Return argparse's settings for a field of a type."""
    if kind is bool:
        return {"action": "store_true"}
    settings: dict[str, Any] = {}
    if isinstance(kind, types.UnionType):  # with None
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) is Sequence:
        kind = typing.get_args(kind)[0]
        if isinstance(option, Argument):
            settings["nargs"] = "+" if required else "*"
        elif option.parse is None:  # otherwise parse makes a list of one text
            settings["action"] = "append"
    if typing.get_origin(kind) is Literal:
        settings["choices"] = typing.get_args(kind)
    elif option.choices is not None:
        settings["choices"] = tuple(option.choices)
    if option.metavar:
        settings["metavar"] = option.metavar
    if option.parse is not None:
        settings["type"] = _passing(option.parse)
    elif kind in (int, float, Path):
        settings["type"] = kind
    return settings


def _passing(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a function whose error messages argparse passes on unchanged."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ParameterError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


# ------------------------------------------------------------------------------------------- what commands share
def _platforms() -> list[str]:
    from spawnsim.models.platform import list_platforms

    return [platform.name for platform in list_platforms()]


def _picture(text: str) -> Path:
    """Return the file of a picture; a wrong ending raises an error before hours are spent on the picture's data."""
    found = Path(text)
    if found.suffix not in ("", ".png", ".pdf", ".svg"):
        raise ParameterError(f"{text}: figures are written as .png, .pdf or .svg")
    return found


def number_of_jobs(text: str) -> int:
    """Return the number of concurrent runs."""
    if not text.isdecimal():
        raise ParameterError(f"{text}: give the number of runs at once, or 0 for this process")
    return int(text)


JOBS = min(os.cpu_count() or 1, 4)

ProgramPath = Annotated[
    Path, Argument("file with main(comm), unmodified program, or name (`spawnsim list studies`)", "FILE")
]
Ranks = Annotated[int, Option("how many ranks", "N", "-n")]
Seed = Annotated[int, Option("of every random stream", "K")]
PlatformName = Annotated[
    str | None, Option("virtual network: a name (see `spawnsim list`) or a TOML file", "P", names=_platforms)
]
Straggler = Annotated[
    str | None, Option("virtual compute times, such as lognormal:0.3 or pareto:2.5", "KIND")
]
Deadline = Annotated[float | None, Option("seconds that one call may wait (default: 30)", "S", parse=limit)]
Settings = Annotated[Sequence[str], Option("a keyword argument of main; repeatable", "NAME=VALUE")]
Whole = Annotated[bool, Option("run the whole file on every rank, even if it does not seem to use MPI")]
Out = Annotated[str | None, Option("run folder to write: run.json, metrics.npz, events.jsonl", "DIR")]
Overwrite = Annotated[bool, Option("replace the run in DIR")]
Picture = Annotated[Path | None, Option("draw it: .png, .pdf or .svg", "FILE", parse=_picture)]
Jobs = Annotated[
    int,
    Option(
        "runs at once; 0: one after another, in this process (default: one per core, 4 at most)",
        "N",
        parse=number_of_jobs,
    ),
]
Json = Annotated[bool, Option("print one JSON object, and nothing else")]
Quiet = Annotated[bool, Option("no progress bar, notes or totals; warnings and errors remain")]
RunFolder = Annotated[Path, Argument("the run folder", "RUN")]
RunFolders = Annotated[Sequence[str], Argument("run folder", "RUN")]
KeptProgram = Annotated[Path | None, Option("the program, in place of the copy that RUN keeps", "FILE")]
Observers = Annotated[
    Sequence[str],
    Option(
        f"observers of the run: {', '.join(OBSERVERS)} (live: a page on 127.0.0.1, whose address is "
        "printed); repeatable. A run needs --out DIR",
        "NAME",
        names=OBSERVERS,
    ),
]
