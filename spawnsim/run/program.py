"""Programs: load a file and give its `main(comm, ...)` the run's parameters; recognise unmodified programs.

The same on virtual ranks and on real ones.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from spawnsim.errors import ParameterError, ProgramError, SpawnsimError, UsageError, did_you_mean
from spawnsim.importing import notice_imports
from spawnsim.options import nearest

MODULE = "__program__"  # never "__main__": a file's own `if __name__ == "__main__"` must not start it
WORKERS = Path(__file__).parent / "workers"  # where that is a module that can be imported
FILE = "SPAWNSIM_PROGRAM"  # of which file, for `WORKERS`

Main = Callable[..., object]


@dataclass(frozen=True)
class Program:
    """A `main` with its parameters. Called with a communicator, it runs on that rank.

    Attributes:
        main: the function, as the file defines it.
        parameters: every keyword parameter of `main` with the value of this run, defaults included.
    """

    main: Main
    parameters: Mapping[str, Any]
    given: Mapping[str, Any]

    def __call__(self, comm: Any) -> None:
        """Run `main` on one rank; `sys.exit()` without a status, or with 0, is an ordinary end.

        Args:
            comm: the communicator of all ranks, as this rank holds it.
        """
        try:
            self.main(comm, **self.given)
            if (policies := sys.modules.get("spawnsim.policies.base")) is not None:
                policies.warn_of_the_open(comm)
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                raise
        except (AttributeError, TypeError, ValueError) as error:
            if _met_mpi4py(error):
                raise UsageError(f"{error}. {NOT_MPI4PYS}").with_traceback(error.__traceback__) from error
            for name, default in _parameters(self.main).defaults.items():
                value = self.parameters[name]
                # Not refused before: a program may well take a text, or several numbers, for one.
                if type(default) in (int, float) and isinstance(value, (str, tuple, list)):
                    error.add_note(f"{name} was given {value!r}; its default is {default!r}")
            raise


NOT_MPI4PYS = (
    "Constants, operations, datatypes, Status, Request for calls of comm are spawnsim's, not mpi4py's: "
    "from spawnsim.comm import IN_PLACE, MAX, Request; comm.Win makes windows"
)


def _met_mpi4py(error: Exception) -> bool:
    """Return whether an error is that of mpi4py's object in a call of ours, or of our object in a call of mpi4py's."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    # What a program's own lines raise is its own affair: it may use mpi4py beside its communicator.
    where = "" if frame is None else frame.tb_frame.f_code.co_filename
    # A name that a communicator does not have, such as a mistyped call: over MPI mpi4py's object says so.
    if frame is not None and frame.tb_frame.f_code.co_name == "__getattr__":
        return False
    ours = where.startswith((str(Path(__file__).parents[1]) + os.sep, "src/mpi4py/"))
    return "expected mpi4py.MPI." in str(error) or (ours and "mpi4py.MPI." in str(error))


def program(main: Main | str | Path, parameters: Mapping[str, Any] | None = None) -> Program:
    """Return a checked program, from a function or from a file that defines `main(comm)`.

    Args:
        main: the function, or the file's path.
        parameters: keyword arguments of `main`.

    Returns:
        The program: called with a communicator, it runs on that rank.

    Raises:
        ParameterError: no such file, no `main`, or a parameter that `main` does not take.
    """
    # Before the file is loaded: its imports are what shall be noticed.
    notice_imports()
    function = load(Path(main)) if isinstance(main, (str, Path)) else main
    if not callable(function):
        raise ParameterError(
            f"main is a {type(function).__name__}: give a function of the communicator, or a file"
        )
    given = dict(parameters or {})
    takes = _parameters(function)
    # Checked before the run: as a TypeError on each rank it would come after the ranks have been made.
    unknown = [name for name in given if name not in takes.names and not takes.anything]
    if unknown:
        known = ", ".join(takes.names) or "none"
        hint = nearest(unknown[0], takes.names) or f"its parameters: {known}"
        raise ParameterError(f"main takes no parameter {', '.join(unknown)}; {hint}")
    missing = [name for name in takes.names if name not in takes.defaults and name not in given]
    if missing:
        raise ParameterError(f"main needs a value for {', '.join(missing)}: give --set {missing[0]}=VALUE")
    for name, parameter in takes.named.items():
        if name in given:
            require_kind(given[name], parameter)
    return Program(function, takes.defaults | given, given)


@dataclass(frozen=True)
class _Takes:
    named: dict[str, inspect.Parameter]
    anything: bool

    @property
    def names(self) -> list[str]:
        return list(self.named)

    @property
    def defaults(self) -> dict[str, Any]:
        return {name: each.default for name, each in self.named.items() if each.default is not each.empty}


def _parameters(function: Main) -> _Takes:
    parameters = list(inspect.signature(function).parameters.values())
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not parameters or parameters[0].kind not in (*positional, inspect.Parameter.VAR_POSITIONAL):
        raise ParameterError("main takes no argument: its first one is the communicator, main(comm)")
    # A first parameter with a default is one of the program's own: the communicator would silently take its place.
    if parameters[0].default not in (inspect.Parameter.empty, None):
        given = ", ".join(str(each) for each in parameters)
        raise ParameterError(
            f"main({given}): the first argument is the communicator: write main(comm, {given})"
        )
    # Positional-only parameters cannot be given by name, so they are none of the run's.
    named = [each for each in parameters[1:] if each.kind in (positional[1], inspect.Parameter.KEYWORD_ONLY)]
    names = getattr(function, "__globals__", {})
    return _Takes(
        named={each.name: each.replace(annotation=_hint(each.annotation, names)) for each in named},
        anything=any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters),
    )


def written_parameters(function: ast.FunctionDef) -> dict[str, inspect.Parameter]:
    """Return what a `main` that is not loaded takes by name, as far as its text tells: without the communicator."""
    own, empty, named = function.args, inspect.Parameter.empty, {}
    positional = [*own.posonlyargs, *own.args]
    defaults = [None] * (len(positional) - len(own.defaults)) + [*own.defaults, *own.kw_defaults]
    for arg, default in [*zip([*positional, *own.kwonlyargs], defaults, strict=True)][1:]:
        if arg in own.posonlyargs:  # as in `_parameters`
            continue
        try:
            value = empty if default is None else ast.literal_eval(default)
        except ValueError:  # it is no literal
            value = empty
        hint = empty if arg.annotation is None else _hint(ast.unparse(arg.annotation), vars(typing))
        kind = inspect.Parameter.KEYWORD_ONLY
        named[arg.arg] = inspect.Parameter(arg.arg, kind, default=value, annotation=hint)
    return named


def _hint(annotation: Any, names: Mapping[str, Any]) -> Any:
    """Return the type that an annotation names, which may be text; none if the names in it are not known."""
    try:
        return eval(annotation, dict(names)) if isinstance(annotation, str) else annotation
    except (AttributeError, NameError, SyntaxError, TypeError):
        return inspect.Parameter.empty


# What can be written after --set: the types of values that are taken for each type that is named, in words.
KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "text (in quotes, if it reads as a number)"),
    tuple: ((tuple, list), "values in brackets, as (64,)"),
    list: ((tuple, list), "values in brackets, as [64]"),
    None: ((type(None),), "None"),
    type(None): ((type(None),), "None"),
}
WRITTEN = {kind for kinds, _ in KINDS.values() for kind in kinds}


def require_kind(value: Any, parameter: inspect.Parameter) -> None:
    """Raise `ParameterError` if a parameter's value is not of the type that `main` says it takes.

    Its annotation says so. Without one, a default of true or false says that a text is none: each would count as true.
    """
    name, default, also, hint = parameter.name, parameter.default, "", parameter.annotation
    if name == "iterations" and isinstance(value, int) and value < 0:
        raise ParameterError(f"iterations={value}: give 0 or more; below it a loop over range() does nothing")
    if hint is parameter.empty and isinstance(default, bool) and isinstance(value, str):
        hint, also = bool, f"; if main takes text as well, say so there: {name}: bool | str"
    if (
        hint is parameter.empty
        or type(value) not in WRITTEN
        or (type(default) in WRITTEN and value == default)
    ):
        return
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    takes: list[str] = []
    for each in typing.get_args(hint) if union else [hint]:
        kind = typing.get_origin(each) or each
        if kind is typing.Literal:
            fits, words = value in typing.get_args(each), [*map(str, typing.get_args(each))]
        elif kind in KINDS:
            fits, words = type(value) in KINDS[kind][0], [KINDS[kind][1]]
        else:  # what it may be is not told here
            return
        if fits:
            return
        takes += words
    given = " or ".join(filter(None, [", ".join(takes[:-1]), takes[-1]]))
    raise ParameterError(f"{name}={value!r}: give {given}{also}")


def load(path: Path) -> Main:
    """Run a Python file as a module, once for all virtual ranks, and return its `main`.

    The file's folder goes first on `sys.path`, as Python itself does for a script.

    Args:
        path: the file.

    Returns:
        The function `main`.

    Raises:
        ParameterError: the file cannot be read, is not Python, or defines no `main`.
        ProgramError: the file raised, or called `sys.exit()`.
    """
    # Read before it is run: a file without main may do anything at its top level.
    require_main(path)
    main: Main = load_module(path).main
    return main


def load_module(path: Path) -> types.ModuleType:
    """Run a Python file as a module, once for all virtual ranks.

    Args:
        path: the file.

    Returns:
        The module.

    Raises:
        ParameterError: the file cannot be read, or is not Python.
        ProgramError: the file raised, or called `sys.exit()`.
    """
    tree_of(path)
    spec = importlib.util.spec_from_file_location(MODULE, path)
    if spec is None or spec.loader is None:
        raise ParameterError(f"{path} is not a Python file")
    folder = str(path.resolve().parent)
    # It stays there: programs import their own modules also while they run.
    if folder not in sys.path:
        sys.path.insert(0, folder)
    _share_with_workers(path)
    # In `sys.modules` before it runs, as dataclasses and pickle look a class's module up there.
    module = sys.modules[MODULE] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    # A program may call spawnsim at its top level; what that raises already says what is wrong.
    except SpawnsimError:
        raise
    # SystemExit is no Exception, and would end the launcher with the program's status and no line.
    except (Exception, SystemExit) as error:
        raise ProgramError(
            f"{path} raised {type(error).__name__} while it was loaded{did_you_mean(error)}"
        ) from error
    return module


def _share_with_workers(path: Path) -> None:
    """Let processes that a program starts by `multiprocessing`, and that are not forked from it, find its file."""
    os.environ[FILE] = str(path.absolute())  # and not where a link leads: data may lie beside the link
    if str(WORKERS) not in sys.path:
        sys.path.append(str(WORKERS))


def require_main(path: Path, ranks: int | None = None) -> None:
    """Raise `ParameterError` unless a file can be read and defines `main`; nothing of it is run.

    `ranks`: how many real ranks were asked for, if that is known.
    """
    # Text alone decides, since running the file to look would already start an unmodified program.
    if has_main(path):
        return
    lacks = f"{path} has no main(comm)"
    # On virtual ranks such a program does not come here: it is run whole.
    for speaks, starter in ((_speaks_mpi, "mpiexec -n"), (speaks_torch, "torchrun --nproc-per-node")):
        if speaks(path):
            raise ParameterError(
                f"{lacks}: unmodified programs are run whole on virtual ranks only; for real ranks: "
                f"{starter} {ranks or 'N'} {'python ' * (speaks is _speaks_mpi)}{path}"
            )
    raise ParameterError(
        f"{lacks}: define it; it is called once per rank with a communicator. "
        "On virtual ranks a program without one is run whole if it speaks MPI, or with --whole"
    )


def has_main(path: Path) -> bool:
    """Return whether a file binds the name `main` at its top level. Reads the file, and runs nothing of it."""
    return any("main" in _bound(statement) for statement in tree_of(path).body)


def tree_of(path: Path) -> ast.Module:
    """Return a file's syntax tree. Raises `ParameterError` if there is no such file, or it is not Python."""
    try:
        return ast.parse(path.read_bytes(), str(path))  # which may begin with a mark, or name its encoding
    except OSError as error:
        raise ParameterError(f"cannot read {path}: {error.strerror}") from error
    # A byte that is 0 raises a ValueError in some versions of Python.
    except (SyntaxError, ValueError) as error:
        raise ParameterError(f"{path} is not a Python program: {error}") from error


def _bound(statement: ast.stmt) -> set[str]:
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name for alias in statement.names}
    if isinstance(statement, ast.Assign):
        return {target.id for target in statement.targets if isinstance(target, ast.Name)}
    return set()


def is_unmodified(path: Path) -> bool:
    """Return whether a file is to be run whole, and not through its `main(comm)`. Runs nothing of it.

    It is if it speaks MPI (itself, through a module beside it, or through a package that requires mpi4py) or names
    torch.distributed, and has no `main`, or one without arguments; if it calls its `main()` without arguments; or if it
    calls `main` where it is run as a script and imports one of the two (or calls the first argument something else than
    comm).
    """
    if not has_main(path):
        return _speaks_mpi(path) or speaks_torch(path)
    tree = tree_of(path)
    main = next(
        (each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == "main"), None
    )
    # Bound by an import or an assignment: its arguments cannot be read here, and are checked when it is loaded.
    if main is None:
        return False
    first = next(iter([*main.args.posonlyargs, *main.args.args, *filter(None, [main.args.vararg])]), None)
    if first is None:
        return _calls_main(tree) or _requires_mpi(path)
    # A file that has a main with arguments and calls it is either a script of its own, or one of ours that can also
    # be started by hand: that mpi4py is imported, or the argument's name, tells which.
    speaks = "mpi4py" in _imported(tree) or speaks_torch(path)
    return _calls_main(tree) and (speaks or first.arg != "comm")


def _requires_mpi(path: Path) -> bool:
    """Return true if a file that has `main()` is an mpi4py program; else its author has forgotten the argument."""
    if _speaks_mpi(path) or speaks_torch(path):
        return True
    raise ParameterError(
        f"{path}: main() takes no argument; its first one is the communicator: write def main(comm). "
        "A file with main() is run whole only if it calls main(), or if it speaks MPI"
    )


def _speaks_mpi(path: Path) -> bool:
    """Return whether a file, or a module of its folder that it imports, imports mpi4py or a package that needs it."""
    from spawnsim.record import manifest

    # A program may import MPI in a helper module beside it alone, so all modules of its folder are read.
    own = manifest.own_files(path).values()
    names = _imported(tree_of(path)).union(*(_imported(manifest.tree(file)) for file in own))
    # Modules of the folder hide installed packages of the same name, as on `sys.path`.
    names -= sys.stdlib_module_names | {file.stem for file in own}
    return "mpi4py" in names or bool(names & _packages_with_mpi())


def speaks_torch(path: Path) -> bool:
    """Return whether a file, or a module of its folder that it imports, names torch.distributed."""
    from spawnsim.record import manifest

    trees = [tree_of(path), *(manifest.tree(file) for file in manifest.own_files(path).values())]
    return any(_names_torch_distributed(node) for tree in trees for node in ast.walk(tree))


def _names_torch_distributed(node: ast.AST) -> bool:
    """Return whether a node imports torch.distributed, its wrapper of models or torchft, or names the first."""
    if isinstance(node, ast.Import):
        return any(f"{alias.name}.".startswith(("torch.distributed.", "torchft.")) for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        names = {alias.name for alias in node.names}
        return (
            f"{node.module}.".startswith(("torch.distributed.", "torchft."))
            or (node.module == "torch" and "distributed" in names)
            or ((node.module or "").startswith("torch.nn.parallel") and "DistributedDataParallel" in names)
        )
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "distributed"
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    )


@cache
def _packages_with_mpi() -> Set[str]:
    """Return the installed packages whose distribution requires mpi4py, perhaps for an extra; but for ours."""
    from importlib import metadata  # takes 30 ms, and most ranks do not need it

    # Asked of the metadata: importing a package to see whether it loads mpi4py would start MPI.
    found = set()
    for package, distributions in metadata.packages_distributions().items():
        needed = [each for name in distributions for each in metadata.requires(name) or ()]
        if any(re.match(r"mpi4py\b", each) for each in needed):
            found.add(package)
    return found - {"spawnsim"}


def _calls_main(tree: ast.Module) -> bool:
    """Return whether the file calls `main` when it is run, on its top level or below an `if`."""
    # A call within a function or a class is not made when the file is run as a script.
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
