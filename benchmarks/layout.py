"""Measure the structure of the package: files, lines, circles, ancestry, reading distance, reasons, docstrings.

    python benchmarks/layout.py

prints one table. Counting rules: a line of code is neither blank, nor only a comment, nor docstring; imports inside
functions and under TYPE_CHECKING count for circles; a public callable is in the `__all__` of `spawnsim`, the
policies, `run`, `study`, `plots` or `testing`, or is a public method of such a class.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import sys
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import spawnsim

PACKAGE = Path(spawnsim.__file__).parent
PUBLIC = (
    "spawnsim",
    "spawnsim.policies",
    "spawnsim.run",
    "spawnsim.study",
    "spawnsim.plots",
    "spawnsim.testing",
)


def files() -> list[Path]:
    """Return every Python file of the package, sorted by path."""
    return sorted(PACKAGE.rglob("*.py"))


def _docstrings(tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def count(path: Path) -> tuple[int, int, int]:
    """Count one file's lines, its lines of code, and its comments.

    Returns:
        (lines, lines of code, comments); comments that only control tools ("noqa", "type:", "fmt:") are left out.
    """
    text = path.read_text(encoding="utf-8")
    docstrings = _docstrings(ast.parse(text))
    alone, comments = set(), 0
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if lines[token.start[0] - 1].lstrip().startswith("#"):
                alone.add(token.start[0])
            comments += not token.string.lstrip("# ").startswith(("noqa", "type:", "fmt:", "pragma", "--"))
    code = sum(
        1
        for number, line in enumerate(lines, 1)
        if line.strip() and number not in docstrings and number not in alone
    )
    return len(lines), code, comments


def circles() -> list[list[str]]:
    """Find the import circles between files.

    Returns:
        The strongly connected components of more than one module, each sorted.
    """
    modules = {_module(path): path for path in files()}
    graph: dict[str, set[str]] = defaultdict(set)
    for module, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for target in _imported(node, modules):
                if target != module:
                    graph[module].add(target)
    return [sorted(each) for each in _components(graph) if len(each) > 1]


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(node: ast.AST, modules: dict[str, Path]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in modules)
    elif isinstance(node, ast.ImportFrom) and node.module in modules:
        for alias in node.names:
            submodule = f"{node.module}.{alias.name}"
            yield submodule if submodule in modules else node.module


def _components(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the strongly connected components: nodes that reach each other."""
    reached = {node: _reach(graph, node) for node in graph}
    found: list[set[str]] = []
    for node in graph:
        if not any(node in each for each in found):
            found.append({node} | {other for other in reached[node] if node in reached.get(other, ())})
    return found


def _reach(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    pending = [start]
    while pending:
        for target in graph.get(pending.pop(), ()):
            if target not in seen:
                seen.add(target)
                pending.append(target)
    return seen


def ancestry() -> int:
    """Count our classes in a virtual communicator's method resolution order."""
    kinds: list[type] = []
    spawnsim.run(lambda comm: kinds.append(type(comm)), ranks=2)
    return sum(kind.__module__.startswith("spawnsim.") for kind in kinds[0].__mro__)


def crossed() -> list[str]:
    """List the files that one virtual `Allreduce` of 10 float64 passes through, on rank 0 of 4."""
    seen: set[str] = set()

    def profiled(frame: Any, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            seen.add(str(Path(frame.f_code.co_filename).relative_to(PACKAGE)))

    def main(comm: Any) -> None:
        ours, total = np.ones(10), np.zeros(10)
        first = comm.Get_rank() == 0
        comm.Allreduce(ours, total)  # objects made once, such as a schedule, are not part of the distance
        if first:
            sys.setprofile(profiled)
        comm.Allreduce(ours, total)
        sys.setprofile(None)

    spawnsim.run(main, ranks=4)
    return sorted(seen)


def public_callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield each public function and method with its dotted name, once."""
    given: set[int] = set()
    for name in PUBLIC:
        module = importlib.import_module(name)
        for each in getattr(module, "__all__", ()):
            value = getattr(module, each)
            for label, function in _callables(f"{name}.{each}", value):
                if id(function) not in given:
                    given.add(id(function))
                    yield label, function


def _callables(label: str, value: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    if inspect.isfunction(value):
        yield label, value
    elif (
        inspect.isclass(value)
        and value.__module__.startswith("spawnsim.")
        and not issubclass(value, BaseException)
    ):
        fields = getattr(value, "__dataclass_fields__", {})  # a function as a field's default is not a method
        for name, member in vars(value).items():
            if (
                inspect.isfunction(member)
                and name not in fields
                and (name == "__call__" or not name.startswith("_"))
            ):
                yield f"{label}.{name}", member


def _documentation(function: Callable[..., Any]) -> str:
    """Return a callable's docstring with the docstrings of the methods that it overrides, which it need not repeat."""
    texts = [inspect.getdoc(function) or ""]
    owner: Any = sys.modules[function.__module__]
    for part in function.__qualname__.split(".")[:-1]:
        owner = getattr(owner, part, None)
    if inspect.isclass(owner):
        texts += [inspect.getdoc(vars(base).get(function.__name__)) or "" for base in owner.__mro__[1:]]
    return "\n".join(texts)


def undocumented() -> tuple[int, list[str]]:
    """Find the public callables whose docstring lacks a section that it needs.

    Returns:
        How many there are in all; and "name: section" for each that takes arguments and has no `Args:`, or is annotated
        to return something and has no `Returns:`. (`Yields:` counts; MPI's own names are documented by the standard.)
    """
    total, lacking = 0, []
    for label, function in public_callables():
        total += 1
        text = _documentation(function)
        signature = inspect.signature(function)
        if any(name not in ("self", "cls") for name in signature.parameters) and "Args:" not in text:
            lacking.append(f"{label}: Args")
        if signature.return_annotation not in ("None", None, inspect.Signature.empty) and not (
            "Returns:" in text or "Yields:" in text
        ):
            lacking.append(f"{label}: Returns")
    return total, lacking


def main() -> None:
    """Print the table; with `-v`, also the counted items."""
    counts = [count(path) for path in files()]
    lines, code, comments = (sum(column) for column in zip(*counts, strict=True))
    found, distance = circles(), crossed()
    total, lacking = undocumented()
    rows = [
        ("files", len(counts)),
        ("lines", lines),
        ("lines of code", code),
        ("files under 60 lines", sum(each[0] < 60 for each in counts)),
        ("classes of ours in a virtual communicator's ancestry", ancestry()),
        ("import circles between files", len(found)),
        ("files that one virtual Allreduce crosses", len(distance)),
        ("comments per 100 lines of code", f"{100 * comments / code:.1f}"),
        (f"public callables ({total}): sections lacking", len(lacking)),
    ]
    for name, value in rows:
        print(f"{name:55} {value:>8}")
    if "-v" in sys.argv:
        print(*(" -> ".join(each) for each in found), *distance, *lacking, sep="\n")


if __name__ == "__main__":
    main()
