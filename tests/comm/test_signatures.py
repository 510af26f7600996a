"""The virtual `MPI` has every name of mpi4py's, with the same parameters, or refuses it: see its stub."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from spawnsim.comm.failures import ABSENT, Absent
from spawnsim.errors import UnsupportedError
from spawnsim.virtual.mpi.module import MPI

# Our `buffer` is a numpy array: its own methods are numpy's.
NUMPYS = {"buffer.tobytes", "buffer.cast"}
Parameters = list[tuple[str, Any]]


@cache
def _stub() -> ast.Module:
    spec = importlib.util.find_spec("mpi4py")
    assert spec is not None
    assert spec.origin is not None
    return ast.parse(Path(spec.origin).with_name("MPI.pyi").read_text(encoding="utf-8"))


def _of(kind: type[Any]) -> list[Any]:
    return [node for node in _stub().body if isinstance(node, kind)]


def _is_absent(owner: Any, name: str) -> bool:
    return isinstance(owner, Absent) or isinstance(getattr(owner, name, None), Absent)


CLASSES = {node.name: node for node in _of(ast.ClassDef)}
FUNCTIONS = {node.name: node for node in _of(ast.FunctionDef) if not _is_absent(MPI, node.name)}
CONSTANTS = [node.target.id for node in _of(ast.AnnAssign)]


def _methods() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield what the stub's classes define, without Python's own methods and the setters of properties."""
    for owner, node in CLASSES.items():
        for each in node.body:
            setter = isinstance(each, ast.FunctionDef) and any(
                isinstance(mark, ast.Attribute) for mark in each.decorator_list
            )
            if isinstance(each, ast.FunctionDef) and not each.name.startswith("__") and not setter:
                yield f"{owner}.{each.name}", each


METHODS = dict(_methods())


def _split(name: str) -> tuple[Any, str]:
    owner, _, attribute = name.partition(".")
    return getattr(MPI, owner), attribute


ATTRIBUTES = [
    f"{owner}.{each.target.id}"
    for owner, node in CLASSES.items()
    for each in node.body
    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
]


def _wanted(function: ast.FunctionDef, *, bound: bool) -> Parameters:
    """Return names and defaults of the positional parameters that the stub gives."""
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    defaults: list[Any] = [inspect.Parameter.empty] * (len(names) - len(function.args.defaults))
    defaults += [
        eval(ast.unparse(each), dict(vars(MPI))) if ast.unparse(each) != "..." else ...
        for each in function.args.defaults
    ]
    return list(zip(names, defaults, strict=True))[bound:]


def _found(function: Any, *, bound: bool) -> Parameters:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [each for each in inspect.signature(function).parameters.values() if each.kind in kinds]
    return [(each.name, each.default) for each in parameters][bound:]


def _same(wanted: Parameters, found: Parameters) -> bool:
    return [name for name, _ in wanted] == [name for name, _ in found] and all(
        one is other or one is ... or (type(one) is type(other) and one == other)
        for (_, one), (_, other) in zip(wanted, found, strict=True)
    )


@pytest.mark.parametrize("name", [*CONSTANTS, *CLASSES, *FUNCTIONS])
def test_every_name_is_there(name: str) -> None:
    """Constants, classes and functions."""
    assert hasattr(MPI, name)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_the_same_arguments(name: str) -> None:
    """Names, order and defaults."""
    assert _same(_wanted(FUNCTIONS[name], bound=False), _found(getattr(MPI, name), bound=False))


@pytest.mark.parametrize(
    "name", [name for name in METHODS if name not in NUMPYS and not _is_absent(*_split(name))]
)
def test_methods_take_the_same_arguments(name: str) -> None:
    """Names, order and defaults; class methods and properties are such."""
    (cls, method), stub = _split(name), METHODS[name]
    raw, marks = inspect.getattr_static(cls, method), {ast.unparse(mark) for mark in stub.decorator_list}
    assert isinstance(raw, classmethod) == bool(marks & {"classmethod", "staticmethod"})
    if "property" in marks:
        assert isinstance(raw, property)
        return
    static = "staticmethod" in marks
    found = _found(getattr(cls, method), bound=not static and not isinstance(raw, classmethod))
    assert _same(_wanted(stub, bound=not static), found)


@pytest.mark.parametrize("name", [name for name in ATTRIBUTES if not _is_absent(*_split(name))])
def test_attributes_are_there(name: str) -> None:
    """Properties of handles, fields of options."""
    cls, attribute = _split(name)
    assert hasattr(cls, attribute) or hasattr(cls(), attribute)


@pytest.mark.parametrize("name", ["Comm", "Intracomm", "Cartcomm", "Intercomm", "Win", "Request", "Message"])
def test_null_handles_are_false_and_equal(name: str) -> None:
    """As in mpi4py, a class called without arguments gives the null handle."""
    cls = getattr(MPI, name)
    assert not cls()
    assert cls() == cls()


@pytest.mark.parametrize(
    ("owner", "name"),
    [(owner, name) for owner, names in ABSENT.items() for each in names for name in each.split()],
)
def test_absent_names_are_refused_when_they_are_used(owner: str, name: str) -> None:
    """A program may mention them; the error of a call has the name, and the advice is there."""
    holder = {"": MPI, "Identity": MPI.Comm, "Named": MPI.Win}.get(owner) or getattr(MPI, owner)
    held = getattr(holder, name)
    for use in (held, lambda: held.Start):
        with pytest.raises(UnsupportedError, match=rf"{name}.* is not available on virtual ranks: \w"):
            use()
