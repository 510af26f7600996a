"""Programs that define no `main(comm)`: unmodified mpi4py programs, run whole on every virtual rank.

This room tells them apart from files with a `main(comm)`, and knows one function of the carrier.
"""

from __future__ import annotations

import ast
import math
import re
import sys
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spawnsim.errors import ParameterError
from spawnsim.importing import notice_imports
from spawnsim.run.building import (
    Keeper,
    OnError,
    OnNote,
    Progress,
    aborting,
    describe_named,
    listener,
    require_possible,
)
from spawnsim.run.program import has_main, tree_of
from spawnsim.run.result import Run

if TYPE_CHECKING:
    from spawnsim.record.manifest import Files

NO_COST = (
    "computing between two calls costs nothing: give compute (--compute measured, or 5us) where it counts"
)


@dataclass(frozen=True)
class Script:
    """An unmodified program and its circumstances. `options` are those of the carrier's `Script`."""

    path: Path
    argv: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def describe(self, circumstances: dict[str, Any]) -> tuple[dict[str, Any], Files]:
        """Return the "what" of run.json, and the files that the run depends on."""
        from spawnsim.record import manifest

        named = {"file": self.path.name, "main": None, "file_digest": manifest.file_digest(self.path)}
        parameters = {"argv": list(self.argv), **self.options}
        return describe_named(
            named | {"parameters": parameters, "backend": "virtual"}, self.path, **circumstances
        )


def run_unmodified(
    script: Script,
    *,
    out: Path | None = None,
    deadline_s: float | None = None,
    progress: bool | Progress = False,
    on_error: OnError | None = None,
    on_note: OnNote | None = None,
    trace: bool = False,
    **circumstances: Any,
) -> Run:
    """Run an unmodified program on virtual ranks; see `spawnsim.run` for the circumstances.

    `run.what["notes"]` and `run.what["warnings"]` hold what the user should know, a sentence each.
    """
    from spawnsim.virtual.programs import Cost, run_program

    deadline_s = math.inf if deadline_s is None else deadline_s
    _require_installed(script)
    notice_imports()
    what, inputs = script.describe(
        circumstances | {"deadline_s": None if math.isinf(deadline_s) else deadline_s}
    )
    what |= {"notes": [NO_COST] if circumstances["compute"] in (None, "none") else [], "warnings": []}
    given = {"compute_s": circumstances.pop("compute"), "deadline_s": deadline_s, **circumstances}
    if out is not None:
        Cost.of(given["compute_s"])
        require_possible(**given | {"compute_s": 0.0})
    keeper = Keeper(what, out, on_error, inputs, trace=trace)
    with keeper, listener(progress, keeper.recorder, given["ranks"]) as told, aborting():
        keeper.counted = run_program(
            script.path, script.argv, recorder=keeper.recorder, progress=told, warn=what["warnings"],
            on_error=keeper.tell, on_note=on_note, trace=keeper.trace, **given, **script.options,
        )  # fmt: skip
    return keeper.run


def _require_installed(script: Script) -> None:
    """Raise `ParameterError` for a private package that is not there: naming it would do nothing."""
    for name in script.options.get("private", ()):
        beside = script.path.resolve().parent / name
        found = name.isidentifier() and (
            beside.exists() or beside.with_suffix(".py").exists() or find_spec(name)
        )
        if not found:
            raise ParameterError(
                f"private={name!r}: no installed package has this name; give the one that is imported"
            )


def is_unmodified(path: Path) -> bool:
    """Return whether a file is to be run whole, and not through its `main(comm)`. Runs nothing of it.

    It is if it speaks MPI (itself, through a module beside it, or through a package that requires mpi4py) and has no
    `main`, or one without arguments; if it calls its `main()` without arguments; or if it calls `main` where it is run
    as a script and imports mpi4py (or calls the first argument something else than comm).
    """
    if not has_main(path):
        return _speaks_mpi(path)
    tree = tree_of(path)
    main = next(
        (each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == "main"), None
    )
    if main is None:
        return False
    first = next(iter([*main.args.posonlyargs, *main.args.args, *filter(None, [main.args.vararg])]), None)
    if first is None:
        return _calls_main(tree) or _requires_mpi(path)
    return _calls_main(tree) and ("mpi4py" in _imported(tree) or first.arg != "comm")


def _requires_mpi(path: Path) -> bool:
    """Return true if a file that has `main()` is an mpi4py program; else its author has forgotten the argument."""
    if _speaks_mpi(path):
        return True
    raise ParameterError(
        f"{path}: main() takes no argument; its first one is the communicator: write def main(comm). "
        "A file with main() is run whole only if it calls main(), or if it speaks MPI"
    )


def _speaks_mpi(path: Path) -> bool:
    """Return whether a file, or a module of its folder that it imports, imports mpi4py or a package that needs it."""
    from spawnsim.record import manifest

    own = manifest.own_files(path).values()
    names = _imported(tree_of(path)).union(*(_imported(manifest.tree(file)) for file in own))
    names -= sys.stdlib_module_names | {file.stem for file in own}
    return "mpi4py" in names or bool(names & _packages_with_mpi())


@cache
def _packages_with_mpi() -> Set[str]:
    """Return the installed packages whose distribution requires mpi4py, perhaps for an extra; but for ours."""
    from importlib import metadata  # takes 30 ms, and most ranks do not need it

    found = set()
    for package, distributions in metadata.packages_distributions().items():
        needed = [each for name in distributions for each in metadata.requires(name) or ()]
        if any(re.match(r"mpi4py\b", each) for each in needed):
            found.add(package)
    return found - {"spawnsim"}


def _calls_main(tree: ast.Module) -> bool:
    """Return whether the file calls `main` when it is run, on its top level or below an `if`."""
    definitions = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
    statements = [each for each in tree.body if not isinstance(each, definitions)]
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "main"
        for each in statements
        for node in ast.walk(each)
    )


def _imported(tree: ast.Module) -> set[str]:
    return set(_modules(tree))


def _modules(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def refuse_arguments(argv: Sequence[str]) -> None:
    """Raise `ParameterError` for arguments of a script that has a `main(comm)`."""
    if argv:
        raise ParameterError(
            f"unrecognized arguments: {' '.join(argv)}; main(comm) has parameters: give --set NAME=VALUE"
        )
