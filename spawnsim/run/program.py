"""Programs: load a file and give its `main(comm, ...)` the run's parameters; recognise unmodified programs.

Virtual and real ranks share this module.
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
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from spawnsim.errors import ParameterError, ProgramError, SpawnsimError, UsageError, did_you_mean
from spawnsim.importing import notice_imports
from spawnsim.options import nearest

MODULE = "__program__"  # never "__main__": a file's own `if __name__ == "__main__"` must not start it
WORKERS = Path(__file__).parent / "workers"  # makes that module importable
FILE = "SPAWNSIM_PROGRAM"  # the environment variable with the program's file, for `WORKERS`

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
        """Run `main` on one rank; `sys.exit()` without a status, or with 0, is a normal end."""
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
                # Not refused before: a program may accept a text, or several numbers, for a number.
                if type(default) in (int, float) and isinstance(value, (str, tuple, list)):
                    error.add_note(f"{name} was given {value!r}; its default is {default!r}")
            raise


NOT_MPI4PYS = (
    "Constants, operations, datatypes, Status, Request in calls of comm come from spawnsim, not from mpi4py: "
    "from spawnsim.comm import IN_PLACE, MAX, Request; comm.Win makes windows"
)


def _met_mpi4py(error: Exception) -> bool:
    """Return whether an error comes from mpi4py's object in a call of ours, or our object in a call of mpi4py's."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    # Errors of the program's own lines do not count: it may use mpi4py in addition to its communicator.
    where = "" if frame is None else frame.tb_frame.f_code.co_filename
    # An attribute that a communicator lacks, such as a mistyped call: over MPI, mpi4py's object reports it.
    if frame is not None and frame.tb_frame.f_code.co_name == "__getattr__":
        return False
    ours = where.startswith((str(Path(__file__).parents[1]) + os.sep, "src/mpi4py/"))
    return "expected mpi4py.MPI." in str(error) or (ours and "mpi4py.MPI." in str(error))


def program(main: Main | str | Path | ProgramFile, parameters: Mapping[str, Any] | None = None) -> Program:
    """Return a checked program, from a function or from a file that defines `main(comm)`.

    Args:
        main: the function, or the file.
        parameters: keyword arguments of `main`.

    Returns:
        The program: called with a communicator, it runs on that rank.

    Raises:
        ParameterError: no such file, no `main`, or a parameter that `main` does not take.
    """
    # Before the file is loaded, in order to notice its imports.
    notice_imports()
    if isinstance(main, (str, Path)):
        main = ProgramFile.read(Path(main))
    function = main.load() if isinstance(main, ProgramFile) else main
    if not callable(function):
        raise ParameterError(
            f"main is a {type(function).__name__}: give a function of the communicator, or a file"
        )
    given = dict(parameters or {})
    return Program(function, checked(function, given), given)


def checked(function: Main, given: Mapping[str, Any], name: str = "main") -> dict[str, Any]:
    """Return every keyword parameter of a `main` with its value, defaults included; refuse unknown parameters."""
    takes = _parameters(function)
    # Checked before the run: a TypeError on each rank would appear only after the ranks have been made.
    unknown = [each for each in given if each not in takes.named and not takes.anything]
    if unknown:
        hint = nearest(unknown[0], takes.named) or f"its parameters: {', '.join(takes.named) or 'none'}"
        raise ParameterError(f"{name} takes no parameter {', '.join(unknown)}; {hint}")
    missing = [each for each in takes.named if each not in takes.defaults and each not in given]
    if missing:
        raise ParameterError(f"{name} needs a value for {', '.join(missing)}: give --set {missing[0]}=VALUE")
    for each, parameter in takes.named.items():
        if each in given:
            require_kind(given[each], parameter)
    return takes.defaults | dict(given)


@dataclass(frozen=True)
class _Takes:
    named: dict[str, inspect.Parameter]
    anything: bool

    @property
    def defaults(self) -> dict[str, Any]:
        return {name: each.default for name, each in self.named.items() if each.default is not each.empty}


def _parameters(function: Main) -> _Takes:
    parameters = list(inspect.signature(function).parameters.values())
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not parameters or parameters[0].kind not in (*positional, inspect.Parameter.VAR_POSITIONAL):
        raise ParameterError("main takes no argument, but needs one, the communicator: main(comm)")
    # A first parameter with a default is the program's own: the communicator would silently replace it.
    if parameters[0].default not in (inspect.Parameter.empty, None):
        given = ", ".join(str(each) for each in parameters)
        raise ParameterError(
            f"main({given}): the first argument is the communicator: write main(comm, {given})"
        )
    # Positional-only parameters cannot be given by name, so a run cannot set them.
    named = [each for each in parameters[1:] if each.kind in (positional[1], inspect.Parameter.KEYWORD_ONLY)]
    names = getattr(function, "__globals__", {})
    return _Takes(
        named={each.name: each.replace(annotation=_hint(each.annotation, names)) for each in named},
        anything=any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters),
    )


def _hint(annotation: Any, names: Mapping[str, Any]) -> Any:
    """Return the type that an annotation names, which may be text; none if its names are unknown."""
    try:
        return eval(annotation, dict(names)) if isinstance(annotation, str) else annotation
    except (AttributeError, NameError, SyntaxError, TypeError):
        return inspect.Parameter.empty


# The types that --set accepts: for each named type, the types of its values, and their description.
KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "text (in quotes, if it reads as a number)"),
    tuple: ((tuple, list), "values in brackets, such as (64,)"),
    list: ((tuple, list), "values in brackets, such as [64]"),
    None: ((type(None),), "None"),
    type(None): ((type(None),), "None"),
}
WRITTEN = {kind for kinds, _ in KINDS.values() for kind in kinds}


def require_kind(value: Any, parameter: inspect.Parameter) -> None:
    """Raise `ParameterError` if a parameter's value is not of the type that `main` declares.

    Its annotation declares the type. Without one, a default of true or false excludes texts: every text would count
    as true.
    """
    name, default, also, hint = parameter.name, parameter.default, "", parameter.annotation
    if name == "iterations" and isinstance(value, int) and value < 0:
        raise ParameterError(f"iterations={value}: give 0 or more; below 0, a loop over range() does nothing")
    if hint is parameter.empty and isinstance(default, bool) and isinstance(value, str):
        hint, also = bool, f"; if main also takes text, annotate it: {name}: bool | str"
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
        else:  # its kinds of values are unknown here
            return
        if fits:
            return
        takes += words
    given = " or ".join(filter(None, [", ".join(takes[:-1]), takes[-1]]))
    raise ParameterError(f"{name}={value!r}: give {given}{also}")


@dataclass(frozen=True)
class ProgramFile:
    """A program's file, read once: its text says how to run it. None of it is executed.

    Attributes:
        path: the file.
        tree: its syntax tree.
        whole: whether to run it whole, whatever it defines.
    """

    path: Path
    tree: ast.Module
    whole: bool = False

    @classmethod
    def read(cls, path: Path, *, whole: bool = False) -> ProgramFile:
        """Return the file of a path.

        Args:
            path: the file.
            whole: see the attribute.

        Returns:
            The file.

        Raises:
            ParameterError: there is no such file, or it is not Python.
        """
        try:
            # Bytes, which may begin with a byte order mark, or declare their encoding.
            return cls(path, ast.parse(path.read_bytes(), str(path)), whole)
        except OSError as error:
            raise ParameterError(f"cannot read {path}: {error.strerror}") from error
        # A zero byte raises a ValueError in some versions of Python.
        except (SyntaxError, ValueError) as error:
            raise ParameterError(f"{path} is not a Python program: {error}") from error

    @cached_property
    def main(self) -> ast.FunctionDef | None:
        """The function `main`; None if it is missing, or bound by an import or an assignment."""
        found = (node for node in self.tree.body if isinstance(node, ast.FunctionDef) and node.name == "main")
        return next(found, None)

    @cached_property
    def has_main(self) -> bool:
        """Whether the file binds the name `main` at its top level."""
        return any("main" in _bound(statement) for statement in self.tree.body)

    @cached_property
    def is_whole(self) -> bool:
        """Whether the file is run whole on every rank, and not through its `main(comm)`.

        There are four cases. First, it uses MPI (itself, through a module next to it, or through a package that
        requires mpi4py) or names torch.distributed, and has no `main`, or one without arguments. Second, it calls its
        `main()` without arguments. Third, it calls `main` when run as a script and imports one of the two libraries
        (or names the first argument differently from comm). Fourth, it imports one of them and gives a `main` without
        comm to a parser of arguments, as `@app.default`, `@hydra.main` and `fire.Fire(main)` do.
        """
        if self.whole:
            return True
        if not self.has_main:
            return self.speaks_mpi or self.speaks_torch
        # Bound by an import or an assignment: its arguments are unknown here, and are checked when the file is
        # loaded.
        if self.main is None:
            return False
        own = self.main.args
        first = next(iter([*own.posonlyargs, *own.args, *filter(None, [own.vararg])]), None)
        if first is not None:
            # A file that calls a main with arguments is either an independent script, or a spawnsim program that can
            # also be started by hand: an import of mpi4py, or the argument's name, decides.
            speaks = "mpi4py" in _imported(self.tree) or self.speaks_torch
            if speaks and first.arg != "comm" and self._hands_main_on:
                return True
            return self._calls_main and (speaks or first.arg != "comm")
        if self._calls_main or self.speaks_mpi or self.speaks_torch:
            return True
        raise ParameterError(
            f"{self.path}: main() takes no argument, but needs one, the communicator: write def main(comm). "
            "A file with main() runs as a whole only if it calls main() or uses MPI"
        )

    @cached_property
    def _own(self) -> list[tuple[Path, ast.Module]]:
        """The modules of its folder that it imports, and itself: any of them may import MPI."""
        from spawnsim.record import manifest

        return [(file, manifest.tree(file)) for file in manifest.own_files(self.path).values()]

    @cached_property
    def speaks_mpi(self) -> bool:
        """Whether the file, or a module of its folder that it imports, imports mpi4py or a package that needs it."""
        names = {name for _, tree in self._own for name in _imported(tree)}
        # Modules of the folder hide installed packages of the same name, as on `sys.path`.
        names -= sys.stdlib_module_names | {file.stem for file, _ in self._own}
        return "mpi4py" in names or bool(names & _packages_with_mpi())

    @cached_property
    def speaks_torch(self) -> bool:
        """Whether the file, or a module of its folder that it imports, names torch.distributed."""
        return any(_names_torch_distributed(node) for _, tree in self._own for node in ast.walk(tree))

    @cached_property
    def starts_ranks(self) -> bool:
        """Whether the file starts its ranks itself: it, or a module of its folder, names multiprocessing."""
        own = [] if self.main is None else self.main.args.args[:1]
        takes_comm = [each.arg for each in own] == ["comm"]
        return not takes_comm and any(
            _names_multiprocessing(node) for _, tree in self._own for node in ast.walk(tree)
        )

    @property
    def _calls_main(self) -> bool:
        """Whether the file calls `main` when it is run, at its top level or below an `if`."""
        # A call within a function or a class does not run when the file is run as a script.
        return any(_is_main(call.func) for call in self._calls)

    @property
    def _hands_main_on(self) -> bool:
        """Whether the file gives `main` to a parser of arguments: by a decorator, or in a call when it is run."""
        decorated = self.main is not None and bool(self.main.decorator_list)
        return decorated or any(_is_main(argument) for call in self._calls for argument in call.args)

    @property
    def _calls(self) -> list[ast.Call]:
        """The calls that the file makes when it is run, at its top level or below an `if`."""
        definitions = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
        statements = [each for each in self.tree.body if not isinstance(each, definitions)]
        return [node for each in statements for node in ast.walk(each) if isinstance(node, ast.Call)]

    @property
    def parameters(self) -> tuple[dict[str, inspect.Parameter], bool]:
        """The named parameters of `main`, as far as its text shows them, and whether it takes anything else."""
        if self.main is None:
            return {}, True
        own, empty, named = self.main.args, inspect.Parameter.empty, {}
        positional = [*own.posonlyargs, *own.args]
        defaults = [None] * (len(positional) - len(own.defaults)) + [*own.defaults, *own.kw_defaults]
        for arg, default in [*zip([*positional, *own.kwonlyargs], defaults, strict=True)][1:]:
            if arg in own.posonlyargs:  # as in `_parameters`
                continue
            try:
                value = empty if default is None else ast.literal_eval(default)
            except ValueError:  # not a literal
                value = empty
            hint = empty if arg.annotation is None else _hint(ast.unparse(arg.annotation), vars(typing))
            kind = inspect.Parameter.KEYWORD_ONLY
            named[arg.arg] = inspect.Parameter(arg.arg, kind, default=value, annotation=hint)
        return named, own.kwarg is not None

    def require_main(self, ranks: int | None = None) -> None:
        """Raise `ParameterError` unless the file defines `main`."""
        # The text alone decides: running the file to find out would already start an unmodified program.
        if self.has_main:
            return
        lacks = f"{self.path} has no main(comm)"
        # On virtual ranks such a program does not get here: it is run whole.
        for speaks, starter in (
            (self.speaks_mpi, f"mpiexec -n {ranks or 'N'} python"),
            (self.speaks_torch, f"torchrun --nproc-per-node {ranks or 'N'}"),
        ):
            if speaks:
                raise ParameterError(
                    f"{lacks}: unmodified programs run as a whole on virtual ranks only; for real ranks: {starter} "
                    f"{self.path}"
                )
        raise ParameterError(
            f"{lacks}: define it; it is called once per rank with a communicator. "
            "On virtual ranks a program without it runs as a whole if it uses MPI, or with --whole"
        )

    def load(self) -> Main:
        """Return the function `main` of `module()`, if the file's text defines one."""
        # Checked before it is run: a file without main may do anything at its top level.
        self.require_main()
        main: Main = self.module().main
        return main

    def module(self) -> types.ModuleType:
        """Run the file as a module, once for all virtual ranks.

        Returns:
            The module.

        Raises:
            ParameterError: its name is not a Python file's name.
            ProgramError: the file raised, or called `sys.exit()`.
        """
        spec = importlib.util.spec_from_file_location(MODULE, self.path)
        if spec is None or spec.loader is None:
            raise ParameterError(f"{self.path} is not a Python file")
        folder = str(self.path.resolve().parent)
        # It stays there: programs import their own modules during the run, too.
        if folder not in sys.path:
            sys.path.insert(0, folder)
        # Processes that the program starts by `multiprocessing` without a fork find its file there. The path does not
        # resolve links: data may lie next to the link.
        os.environ[FILE] = str(self.path.absolute())
        if str(WORKERS) not in sys.path:
            sys.path.append(str(WORKERS))
        # In `sys.modules` before it runs: dataclasses and pickle look up a class's module there.
        module = sys.modules[MODULE] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        # A program may call spawnsim at its top level; spawnsim's errors already explain the problem.
        except SpawnsimError:
            raise
        # SystemExit is not an Exception, and would end the launcher with the program's status and no line.
        except (Exception, SystemExit) as error:
            raise ProgramError(
                f"{self.path} raised {type(error).__name__} while it was loaded{did_you_mean(error)}"
            ) from error
        return module


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
    return ProgramFile.read(path).load()


def _is_main(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "main"


def _bound(statement: ast.stmt) -> set[str]:
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name for alias in statement.names}
    if isinstance(statement, ast.Assign):
        return {target.id for target in statement.targets if isinstance(target, ast.Name)}
    return set()


def _names_torch_distributed(node: ast.AST) -> bool:
    """Return whether a node imports torch.distributed, its model wrapper or torchft, or names torch.distributed."""
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


def _names_multiprocessing(node: ast.AST) -> bool:
    """Return whether a node imports multiprocessing, of Python or of torch, or names torch.multiprocessing."""
    packages = ("multiprocessing.", "torch.multiprocessing.")
    if isinstance(node, ast.Import):
        return any(f"{alias.name}.".startswith(packages) for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        names = {alias.name for alias in node.names}
        return f"{node.module}.".startswith(packages) or (
            node.module == "torch" and "multiprocessing" in names
        )
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "multiprocessing"
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    )


@cache
def _packages_with_mpi() -> Set[str]:
    """Return the installed packages whose distribution requires mpi4py, perhaps for an extra, except spawnsim."""
    from importlib import metadata  # takes 30 ms, and most ranks do not need it

    # The metadata answer this: importing a package to see whether it loads mpi4py would start MPI.
    found = set()
    for package, distributions in metadata.packages_distributions().items():
        needed = [each for name in distributions for each in metadata.requires(name) or ()]
        if any(re.match(r"mpi4py\b", each) for each in needed):
            found.add(package)
    return found - {"spawnsim"}


def _imported(tree: ast.Module) -> set[str]:
    """Return the first names of all modules that a syntax tree imports."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def refuse_arguments(argv: Sequence[str]) -> None:
    """Raise `ParameterError` for arguments of a script that has a `main(comm)`."""
    if argv:
        raise ParameterError(
            f"unrecognized arguments: {' '.join(argv)}; main(comm) has parameters: give --set NAME=VALUE"
        )
