"""`spawnsim completion SHELL`: what a shell needs to complete commands, options, names and files.

shtab makes the script from the parsers of the commands themselves, so there is nothing to keep in step with them. It
is static: a Tab starts no Python. The names that it knows are those of the day on which it was made.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from spawnsim.cli import COMMANDS, parser_of
from spawnsim.errors import UnsupportedError
from spawnsim.options import Parser

SHELLS = {
    "bash": "~/.local/share/bash-completion/completions/spawnsim",
    "zsh": "_spawnsim in a folder of $fpath",
    "fish": "~/.config/fish/completions/spawnsim.fish",
}
FILES = ("FILE", "PATH", "PAGE")
FOLDERS = ("DIR", "RUN")


def main(argv: Sequence[str]) -> int:
    """Print the script of a shell."""
    places = "; ".join(f"{shell}: {place}" for shell, place in SHELLS.items())
    parser = Parser(
        prog="spawnsim completion",
        description=f"Print a script that completes spawnsim's commands, options and names. Write it to {places}.",
    )
    parser.add_argument("shell", choices=tuple(SHELLS), help="which shell it is for")
    sys.stdout.write(script(parser.parse_args(argv).shell))
    return 0


def script(shell: str) -> str:
    """Return the script of a shell.

    Args:
        shell: one of `SHELLS`.

    Returns:
        Its text.

    Raises:
        UnsupportedError: shtab is not installed.
    """
    try:
        import shtab
    except ImportError as error:
        raise UnsupportedError("completion needs shtab: pip install 'spawnsim[completion]'") from error
    whole = argparse.ArgumentParser(prog="spawnsim", description="Simulate and run distributed training.")
    commands = whole.add_subparsers(dest="command")
    for name, (_, text) in COMMANDS.items():
        own = parser_of(name)
        if name == "resume":  # whose own help lists its own options alone
            _add_options_of_run(own)
        for action in own._actions:
            _complete(action, shtab)
        # Not `add_parser(parents=[own])`: it would lose the groups' titles, and copies each option.
        commands.add_parser(name, help=text, parents=[own], add_help=False)
    made: str = shtab.complete(whole, shell)
    if shell == "bash":
        # shtab's own words name a folder that bash does not look into by itself.
        made = re.sub(
            r"\A(# AUTO.*\n)(#.*\n)+", rf"\1# Write it to {SHELLS[shell]}: bash reads it from there.\n", made
        )
        # What is no known name may be a path.
        made = made.replace(" -F _shtab_spawnsim spawnsim", " -o default -F _shtab_spawnsim spawnsim")
    return made


def _add_options_of_run(resume: Parser) -> None:
    """Add those that `spawnsim resume` passes on: all but its own, and those that it gives by itself."""
    taken = {*resume._option_string_actions, "--resume", "--out", "--overwrite"}
    for action in parser_of("run")._actions:
        if action.option_strings and not taken.intersection(action.option_strings):
            resume._add_action(action)


def _complete(action: Any, shtab: Any) -> None:
    """Say what an argument takes, where its parser does not: known names, files or folders."""
    words = str(action.metavar or action.dest).upper().split("|")
    names = NAMES.get(action.dest) or NAMES.get(words[0].lower())
    if action.choices is not None:
        action.choices = list(action.choices)  # shtab takes a table for a set of subcommands
    elif names is not None:
        action.choices = list(names())
    elif any(word in FILES for word in words) or action.dest == "file":
        action.complete = shtab.FILE
    elif any(word in FOLDERS for word in words):
        action.complete = shtab.DIRECTORY


def _platforms() -> list[str]:
    from spawnsim.models.platform import list_platforms

    return [platform.name for platform in list_platforms()]


def _studies() -> list[str]:
    from spawnsim.cli.listing import names

    return names()


def _sections() -> list[str]:
    from spawnsim.cli.listing import SECTIONS

    return list(SECTIONS)


def _observers() -> list[str]:
    from spawnsim.run.watched import OBSERVERS

    return list(OBSERVERS)


def _policies() -> list[str]:
    from spawnsim.fidelity.goodput import POLICIES

    return [*POLICIES, "all"]


NAMES: dict[str, Callable[[], list[str]]] = {
    "platform": _platforms, "study": _studies, "what": _sections, "observe": _observers, "policy": _policies,
}  # fmt: skip
