"""Rules of style, kept by reading the source: sizes, arguments, and which package imports which library."""

from __future__ import annotations

import ast
import importlib.util
import re
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import spawnsim

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "spawnsim").rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in FILES]

# The seeds' signatures are kept verbatim, as their users call them.
KEPT_SIGNATURES = (
    "spawnsim/policies/", "spawnsim/torchgfn/", "spawnsim/virtual/scripts/package", "spawnsim/virtual/torch/",
)  # fmt: skip


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _functions(path: Path) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(_tree(path)) if isinstance(node, ast.FunctionDef))


def _lines(function: ast.FunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


@cache
def _names_of_mpi4py() -> frozenset[str]:
    spec = importlib.util.find_spec("mpi4py")
    assert spec is not None
    assert spec.origin is not None
    stub = Path(spec.origin).with_name("MPI.pyi").read_text(encoding="utf-8")
    return frozenset(re.findall(r"def (\w+)\(", stub))


# Under 60 lines for a reason of their own, beside __init__ and __main__.
SHORT_FILES = {
    "spawnsim/policies/easgd.py": "one policy, one file",
    "spawnsim/run/workers/__program__.py": "imported by that name",
    "spawnsim/run/preloading.py": "does what it is for when it is imported",
}


def test_files_are_neither_long_nor_tiny() -> None:
    """No file has more than 550 lines, comments not counted: reasons are welcome. Few have less than 60."""
    texts = {
        name: path.read_text(encoding="utf-8").splitlines() for name, path in zip(NAMES, FILES, strict=True)
    }
    long = {name: sum(not line.lstrip().startswith("#") for line in lines) for name, lines in texts.items()}
    assert {name: size for name, size in long.items() if size > 550} == {}
    entries = ("__init__.py", "__main__.py")
    short = {name for name, lines in texts.items() if len(lines) < 60 and not name.endswith(entries)}
    assert short == set(SHORT_FILES)


def test_no_function_is_long() -> None:
    """None has more than 60 lines of code; the docstring does not count."""
    lengths = {f"{name}:{f.name}": _lines(f) - _lines_of_docstring(f) for name, f in _all_functions()}
    assert {name: length for name, length in lengths.items() if length > 60} == {}


def _all_functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    return ((name, f) for name, path in zip(NAMES, FILES, strict=True) for f in _functions(path))


def _lines_of_docstring(function: ast.FunctionDef) -> int:
    first = function.body[0]
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return (first.end_lineno or first.lineno) - first.lineno + 1 if is_text else 0


def test_the_median_function_is_short() -> None:
    """Half of all functions have at most eight lines, definition and docstring included."""
    assert statistics.median(_lines(f) for _, f in _all_functions()) <= 8


def test_few_positional_arguments() -> None:
    """At most four, then keywords or a dataclass; mpi4py's, torch's and the seeds' signatures are kept as they are."""
    many = [
        f"{name}:{f.name}"
        for name, f in _all_functions()
        if not name.startswith(KEPT_SIGNATURES)
        and len([a for a in (*f.args.posonlyargs, *f.args.args) if a.arg not in ("self", "cls")]) > 4
        and f.name.strip("_").lower() not in map(str.lower, _names_of_mpi4py())
        and f.name != "__exit__"
    ]
    assert many == []


def test_each_module_says_what_it_is() -> None:
    """A module has a docstring, and its name is none of those that say nothing."""
    assert [name for name, path in zip(NAMES, FILES, strict=True) if not ast.get_docstring(_tree(path))] == []
    assert {path.stem for path in FILES} & {"utils", "util", "helpers", "common", "manager", "misc"} == set()


def test_torch_distributed_is_imported_in_one_package() -> None:
    """`torch.distributed` is imported in real/torch/ and virtual/torch/, and by the doctor and what forks ranks.

    import-linter cannot see into foreign packages.
    """
    others = [
        path
        for path in FILES
        if not ("torch" in path.parts or ("real" in path.parts and path.stem in ("forked", "doctor")))
    ]
    assert [
        path for path in others if any(name.startswith("torch.distributed") for name in _imports(path))
    ] == []


def _imports(path: Path) -> Iterator[str]:
    return (name for node in ast.walk(_tree(path)) for name in _imported_names(node))


# ------------------------------------------------------------------------------------------------------ layers
@cache
def _edges() -> frozenset[tuple[str, str]]:
    """Return (module, imported module) for all imports at run time, also those within functions and by name."""
    modules = {_module(path): path for path in FILES}
    edges = set()
    for module, path in modules.items():
        skipped = {
            id(each) for node in ast.walk(_tree(path)) if _is_for_types(node) for each in ast.walk(node)
        }
        for node in ast.walk(_tree(path)):
            if id(node) not in skipped:
                edges |= {(module, name) for name in _imported_names(node)}
    return frozenset((module, found) for module, name in edges if (found := _nearest(name, modules)))


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _imported_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.findall(r"^spawnsim(?:\.\w+)+$", node.value)  # for import_module, or python -m
    return []


def _nearest(name: str, modules: dict[str, Path]) -> str:
    while name not in modules and name:
        name = name.rpartition(".")[0]
    return name


PACKAGES = sorted({_module(path) for path in FILES if path.name == "__init__.py"})


@pytest.mark.parametrize("package", PACKAGES)
def test_no_circles_within_a_package(package: str) -> None:
    """Members of a package, modules and subpackages alike, import one another in one direction only."""
    below: dict[str, set[str]] = {}
    for source, target in _edges():
        if source.startswith(f"{package}.") and target.startswith(f"{package}."):
            first, second = (name[len(package) + 1 :].split(".")[0] for name in (source, target))
            below.setdefault(first, set()).update({second} - {first})
    while free := {name for name in below if not below[name] & below.keys()}:
        below = {name: others for name, others in below.items() if name not in free}
    assert below == {}


# ------------------------------------------------------------------------------------------------ import spawnsim
def _python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def test_importing_spawnsim_is_light() -> None:
    """`import spawnsim` loads neither torch nor MPI nor pyplot nor numpy."""
    heavy = "('torch', 'mpi4py.MPI', 'matplotlib.pyplot', 'matplotlib', 'simpy', 'greenlet', 'numpy')"
    assert _python(f"import sys, spawnsim; print([n for n in {heavy} if n in sys.modules])") == "[]"


def test_studies_load_matplotlib_for_their_figures_alone() -> None:
    """Each process of a sweep, or of a search for failures, would take three times as long to begin."""
    code = "import sys, spawnsim.study, spawnsim.fuzzing.campaign; print('matplotlib' in sys.modules)"
    assert _python(code) == "False"


def test_importing_spawnsim_is_quick() -> None:
    """It loads few modules; most of the package comes with the first use of a name."""
    code = "import sys; old = set(sys.modules); import spawnsim; print(len(set(sys.modules) - old))"
    assert int(_python(code)) < 120


def test_the_diagram_of_the_layers_is_the_contract() -> None:
    """The docstring of the package, which the docs include, and what lint-imports checks."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(each["layers"] for each in contracts if each["id"] == "layers")
    drawn = re.findall(r"^ {4}(\S.*)$", spawnsim.__doc__ or "", re.MULTILINE)
    assert [re.split(r" [·|] ", line) for line in drawn] == [re.findall(r"\w+", layer) for layer in layers]
    assert [line for line in drawn if "|" in line] == [
        re.sub(r"[()]", "", layer) for layer in layers if "|" in layer
    ]


def test_run_stays_the_function() -> None:
    """`spawnsim.run` is the function, also after the package of that name was imported by its full name."""
    code = "import spawnsim.run.result, spawnsim; print(callable(spawnsim.run), spawnsim.run.__name__)"
    assert _python(code) == "True run"


@pytest.mark.parametrize("name", spawnsim.__all__)
def test_public_names_are_there(name: str) -> None:
    """Each name of `__all__` loads, and `dir` lists it."""
    assert getattr(spawnsim, name) is not None
    assert name in dir(spawnsim)


def test_an_unknown_name_lists_the_known_ones() -> None:
    """The AttributeError helps."""
    with pytest.raises(AttributeError, match=r"no attribute 'Rum'; its names are: .*Run"):
        _ = spawnsim.Rum


# --------------------------------------------------------------------------------------------------- the package
def test_the_readme_is_short_and_has_the_two_commands() -> None:
    """A screen and a half; `make demo` and `make test` have lines of their own."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 85
    assert {"make demo", "make test"} <= {line.split("#")[0].strip() for line in lines}


def test_the_citation_has_the_version() -> None:
    """CI compares a release's tag with the wheel, whose version is `__version__`."""
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    assert f"version: {spawnsim.__version__}" in citation


def test_ci_calls_make_test_alone() -> None:
    """`.ci/run` has no steps of its own."""
    commands = [line for line in (ROOT / ".ci/run").read_text().splitlines() if not line.startswith("#")]
    assert commands[-1] == "exec make test"
    assert (ROOT / ".ci/run").stat().st_mode & 0o100
