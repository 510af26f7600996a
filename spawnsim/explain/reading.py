"""Files that a hang leaves: dumps of PyTorch's flight recorder (pickle or JSON), stacks of py-spy or faulthandler.

A file is recognized by its content, its rank by its name: the number after "rank", or else the last number.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from spawnsim.errors import ParameterError

THREAD = re.compile(r'Thread \S+ \([a-z+]+\)(?:: "(?P<name>.*)")?')  # py-spy
FRAME = re.compile(r"    (?P<name>\S.*) \((?P<file>[^()]+?)(?::(?P<line>\d+))?\)")
LOCAL = re.compile(r"            (?P<name>\w+): (?P<value>.*)")
FAULT_THREAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+.* \(most recent call first\):")
FAULT_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.+)')
OTHER_RANKS = 10  # more ranks without a dump for each dump: the number is not a rank


@dataclass(frozen=True)
class Frame:
    """A frame of a stack; `line` is 0 in a C library, `values` are arguments and variables as text."""

    name: str
    file: str
    line: int
    values: dict[str, str] = field(default_factory=dict)


@dataclass
class Dump:
    """The dumps of a rank: its flight recorder, and its main thread's stack, innermost frame first."""

    rank: int
    recorder: dict[str, Any] | None = None
    stack: Sequence[Frame] | None = None


class _Plain(pickle.Unpickler):
    """Reads containers, numbers and strings: a pickle from elsewhere must not run code."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}; a flight recorder writes plain values")


def read(paths: Iterable[Path]) -> dict[int, Dump]:
    """Return the dumps of all ranks, from files and from all files of folders."""
    dumps, seen = dict[int, Dump](), dict[tuple[int, str], Path]()
    for path in _files(paths):
        rank = _rank(path)
        kind, content = _content(path)
        if (rank, kind) in seen:
            raise ParameterError(
                f"{path}: {kind} of rank {rank}, as in {seen[rank, kind]}; give one file for each rank"
            )
        seen[rank, kind] = path
        setattr(dumps.setdefault(rank, Dump(rank)), kind, content)
    if max(dumps) >= OTHER_RANKS * len(dumps) + OTHER_RANKS:
        file = next(path for (rank, _), path in seen.items() if rank == max(dumps))
        raise ParameterError(
            f"{file}: is {max(dumps)} its rank? Give each file a name that ends with the rank"
        )
    return dict(sorted(dumps.items()))


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.is_dir():
            yield path
        elif found := sorted(each for each in path.iterdir() if each.is_file()):
            yield from found
        else:
            raise ParameterError(f"{path}: the folder has no files")


def _rank(path: Path) -> int:
    numbers = re.findall(r"rank\D?(\d+)", path.name) or re.findall(r"\d+", path.name)
    if not numbers:
        raise ParameterError(f"{path}: no rank in the file's name; call it such as dump_rank3")
    return int(numbers[-1])


def _content(path: Path) -> tuple[str, Any]:
    """Return which field of `Dump` a file is, and the field's value."""
    data = path.read_bytes()
    if not data.strip():
        raise ParameterError(f"{path}: the file is empty: was the process gone, or the dump not finished?")
    if data[:1] == b"\x80":
        try:
            return "recorder", _recorder(path, _Plain(io.BytesIO(data)).load())
        except (
            pickle.UnpicklingError,
            EOFError,
            ValueError,
            IndexError,
            KeyError,
            TypeError,
            AttributeError,
        ) as error:
            raise ParameterError(f"{path}: not a whole pickle of plain values: {error}") from None
    text = data.decode(errors="replace")
    if text.lstrip()[0] in "{[":
        try:
            loaded = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ParameterError(f"{path}: not whole JSON: {error}") from None
        return (
            ("stack", _from_json(path, loaded))
            if isinstance(loaded, list)
            else ("recorder", _recorder(path, loaded))
        )
    if stack := _py_spy(text) or _faulthandler(text):
        return "stack", stack
    raise _unknown(path)


def _unknown(path: Path) -> ParameterError:
    return ParameterError(
        f"{path}: neither a dump of PyTorch's flight recorder nor a Python stack of `py-spy dump` or faulthandler"
    )


def _recorder(path: Path, loaded: Any) -> dict[str, Any]:
    if (
        not isinstance(loaded, dict)
        or "version" not in loaded
        or not isinstance(loaded.get("entries", []), list)
    ):
        raise _unknown(path)
    entries = loaded.setdefault("entries", [])  # missing in JSON if nothing was recorded
    for entry in entries:
        needed = ("process_group", "profiling_name", "state")
        lacking = [key for key in needed if key not in entry] if isinstance(entry, dict) else needed
        if lacking:
            raise ParameterError(
                f"{path}: an entry has no {lacking[0]} (version {loaded.get('version', '?')})"
            )
    return dict(loaded)


def _from_json(path: Path, threads: list[Any]) -> list[Frame]:
    """Return the main thread of `py-spy dump --json`."""
    try:
        main = next((each for each in threads if each["os_thread_id"] == each["pid"]), threads[0])
        found = [
            Frame(
                each["name"], each["filename"], each["line"],
                {value["name"]: str(value["repr"]) for value in each["locals"] or ()},
            )
            for each in main["frames"]
        ]  # fmt: skip
    except (KeyError, TypeError, IndexError):
        raise _unknown(path) from None
    if not found:
        raise _unknown(path)
    return found


def _py_spy(text: str) -> list[Frame]:
    """Return the main thread of `py-spy dump`, which is the first one."""
    stacks, names = list[list[Frame]](), list[str]()
    for row in text.splitlines():
        if found := THREAD.fullmatch(row):
            stacks.append([])
            names.append(found["name"] or "")
        elif stacks and (found := FRAME.fullmatch(row)):
            stacks[-1].append(Frame(found["name"], found["file"], int(found["line"] or 0)))
        elif stacks and stacks[-1] and (found := LOCAL.fullmatch(row)):
            stacks[-1][-1].values[found["name"]] = found["value"]
    return stacks[names.index("MainThread") if "MainThread" in names else 0] if stacks else []


def _faulthandler(text: str) -> list[Frame]:
    """Return the main thread of faulthandler's traceback, which is the last one, anywhere in a log."""
    stack = list[Frame]()
    for row in text.splitlines():
        if FAULT_THREAD.fullmatch(row):
            stack = []
        elif found := FAULT_FRAME.fullmatch(row):
            stack.append(Frame(found["name"], found["file"], int(found["line"])))
    return stack
