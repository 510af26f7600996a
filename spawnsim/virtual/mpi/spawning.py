"""Dynamic processes: `Spawn` starts Python programs as new virtual ranks, with a COMM_WORLD of their own.

This module reads the commands, agrees on them, and creates the communicator of both groups. The run of an unmodified
program creates the ranks; it has put a `Spawner` into the world's attachments.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spawnsim.comm.failures import ERR_SPAWN, SUCCESS, CallError
from spawnsim.comm.handles import Info, integer
from spawnsim.virtual.mpi.context import KINDS, Context

SPAWNER, PARENT = "MPI.spawner", "MPI.parent"  # attachments: of the world, of a spawned rank


@dataclass(frozen=True)
class Launch:
    """A program to start on `count` ranks. Without a path they serve the executor of the rank that spawns them."""

    count: int
    path: str = ""
    argv: tuple[str, ...] = ()


Spawner = Callable[[Context, Sequence[Launch]], Context]  # returns the context of both groups


def spawn(comm: Any, name: str, launches: tuple[Launch, ...] | CallError | None, root: int) -> Any:
    """Start the root's programs; return the intercommunicator with them. Collective; only the root gives `launches`."""
    comm._check_root(root)

    def make(parts: list[Any]) -> Any:
        given, start = parts[root], comm._world.attachments.get(SPAWNER)
        if start is None:
            return CallError(
                ERR_SPAWN, f"{name}: only unmodified programs spawn others, and main(comm) does not"
            )
        return given if isinstance(given, CallError) else start(comm._context, given)

    found = comm._agree(name, launches if comm._me == root else None, make)
    if isinstance(found, CallError):
        raise CallError(found.Get_error_code(), found.message)
    return comm._entered(found, KINDS["Intercomm"])


def spawn_one(comm: Any, given: tuple[Any, Any, int], root: int, errcodes: list[int] | None) -> Any:
    """`Spawn`: one program on `maxprocs` ranks."""
    root, (command, args, _), maxprocs = integer(root), given, integer(given[2])
    launches = _launches([(command, args, maxprocs)]) if comm._me == root else None
    made = spawn(comm, "Spawn", launches, root)
    if errcodes is not None:
        errcodes[:] = [SUCCESS] * maxprocs
    return made


def spawn_several(
    comm: Any, given: tuple[Any, Any, Any, Any], root: int, errcodes: list[list[int]] | None
) -> Any:
    """`Spawn_multiple`: several programs, with one COMM_WORLD."""
    commands, args, maxprocs, hints = given
    root, launches, counts = integer(root), None, maxprocs
    if comm._me == root:
        if isinstance(commands, (str, bytes, os.PathLike)):
            raise ValueError("Spawn_multiple: expecting a sequence of commands")
        commands = list(commands)
        each, _ = _each(args, len(commands)), _each(hints, len(commands))
        counts = _each(1 if maxprocs is None else maxprocs, len(commands))
        launches = _launches(list(zip(commands, each, map(integer, counts), strict=True)))
    made = spawn(comm, "Spawn_multiple", launches, root)
    if errcodes is not None:
        errcodes[:] = [[SUCCESS] * count for count in counts]
    return made


def _each(value: Any, count: int) -> list[Any]:
    """Return an argument for each command: the same one, unless it is a sequence of them."""
    if value is None or isinstance(value, (str, int, Info)):
        return [value] * count
    items = list(value)
    if len(items) != count:
        raise ValueError(f"Spawn_multiple: expecting {count} items, got {len(items)}")
    return items


def _launches(given: list[tuple[Any, Any, int]]) -> tuple[Launch, ...] | CallError:
    """Return the programs of commands with arguments; or the error, which all ranks raise."""
    try:
        return tuple(_launch(command, args, count) for command, args, count in given)
    except CallError as error:
        return error


def _launch(command: Any, args: Any, count: int) -> Launch:
    if count < 1:
        raise CallError(ERR_SPAWN, f"maxprocs={count}: give at least 1")
    words = [os.fsdecode(command), *([args] if isinstance(args, str) else map(os.fsdecode, args or ()))]
    if os.path.basename(words[0]).startswith(("python", "pypy")):
        del words[0]
        # Options of the interpreter, and `-m mpi4py`, which runs a file.
        while words and words[0].startswith("-") and words[0] != "-c":
            if words[0] == "-m" and words[1:2] not in (["mpi4py"], ["mpi4py.run"]):
                break
            del words[: 2 if words[0] in ("-m", "-W", "-X") else 1]
    elif not words[0].endswith(".py") and not _is_script(words[0]):
        words = []
    if not words or words[0].startswith("-") or not os.path.isfile(words[0]):
        raise CallError(
            ERR_SPAWN,
            f"Spawn({command!r}, {args!r}): virtual ranks run Python: give sys.executable and a file",
        )
    return Launch(count, os.path.abspath(words[0]), tuple(words[1:]))


def _is_script(path: str) -> bool:
    """Return whether the first line of a file names Python."""
    try:
        with open(path, "rb") as file:
            first = file.readline(200)
    except OSError:
        return False
    return first.startswith(b"#!") and b"python" in first
