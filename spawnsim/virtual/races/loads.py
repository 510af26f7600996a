"""Loads and stores in a program's own file: its expressions report the arrays and tensors that they read and write.

`a[i]`, `a[i] = x`, operands of arithmetic and comparisons, formatted values, arguments of print, of builtins such as
sum, and of numpy's functions, and methods such as `a.sum()` report the bytes of their array or tensor. Views (`a[2:]`,
`np.frombuffer`) report nothing by themselves, and neither do arguments of the program's own functions or MPI's.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from spawnsim.comm.memory import start_of
from spawnsim.virtual.engine.kernel import current_task
from spawnsim.virtual.races.accesses import Runs
from spawnsim.virtual.races.memory import places_of, runs_of_array, runs_of_tensor

AT, LOAD = "__spawnsim_at__", "__spawnsim_load__"
BUILTINS = frozenset(
    [
        "print",
        "sum",
        "list",
        "tuple",
        "set",
        "max",
        "min",
        "sorted",
        "any",
        "all",
        "repr",
        "str",
        "float",
        "int",
        "bool",
        "bytes",
        "complex",
        "abs",
        "round",
    ]
)
VIEWS = frozenset(
    [
        "frombuffer",
        "asarray",
        "asanyarray",
        "ascontiguousarray",
        "reshape",
        "ravel",
        "ndarray",
        "shares_memory",
        "may_share_memory",
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "shape",
        "ndim",
        "size",
        "broadcast_to",
        "copyto",
        "dtype",
        "squeeze",
        "transpose",
        "atleast_1d",
    ]
)
METHODS = frozenset(
    [
        "sum",
        "mean",
        "tolist",
        "copy",
        "all",
        "any",
        "max",
        "min",
        "item",
        "tobytes",
        "std",
        "var",
        "dot",
        "astype",
        "argmax",
        "argmin",
        "nonzero",
        "prod",
        "cumsum",
        "round",
        "tofile",
        "clone",
        "norm",
    ]
)


class Reporting(ast.NodeTransformer):
    """Wraps the expressions that read arrays, and the arrays that are indexed."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Del):
            node.value = _call(AT, node.value)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        node.left, node.right = _load(node.left), _load(node.right)
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        node.operand = _load(node.operand)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if not any(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
            node.left, node.comparators = _load(node.left), [_load(each) for each in node.comparators]
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        node.value = _load(node.value)
        return node

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.AST:
        self.generic_visit(node)
        node.value = _load(node.value)
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        node.iter = _load(node.iter)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        function = node.func
        reads = isinstance(function, ast.Name) and function.id in BUILTINS
        if isinstance(function, ast.Attribute):
            module = function.value.id if isinstance(function.value, ast.Name) else ""
            reads = module in ("np", "numpy") and function.attr not in VIEWS
        self.generic_visit(node)
        if isinstance(function, ast.Attribute) and function.attr in METHODS:
            function.value = _load(function.value)
        if reads:
            node.args = [each if isinstance(each, ast.Starred) else _load(each) for each in node.args]
        return node


def _call(name: str, value: ast.expr) -> ast.expr:
    return ast.copy_location(ast.Call(ast.Name(name, ast.Load()), [value], []), value)


def _load(value: ast.expr) -> ast.expr:
    return value if isinstance(value, (ast.Constant, ast.JoinedStr)) else _call(LOAD, value)


def reporting(source: bytes) -> ast.Module:
    """Return a program, to compile, that reports its loads and stores."""
    tree = Reporting().visit(ast.parse(source))
    # A docstring and imports from __future__ stay in front.
    first = 0
    while first < len(tree.body) and (
        isinstance(tree.body[first], ast.Expr) or getattr(tree.body[first], "module", "") == "__future__"
    ):
        first += 1
    names = [ast.alias(at.__name__, AT), ast.alias(load.__name__, LOAD)]
    tree.body.insert(first, ast.ImportFrom(__name__, names, 0))
    return ast.fix_missing_locations(tree)  # type: ignore[no-any-return]


def _races() -> tuple[Any, int]:
    """Return the detector, if the calling rank has memory in which races can be, and the rank."""
    task = current_task()
    if task is None:
        return None, -1
    rank, races = task.rank, task.kernel.owner.races
    return (races if races is not None and races.exposes(rank) else None), rank


def load(value: Any) -> Any:
    """Report that an expression reads a whole array or tensor; return it, or whatever else it is."""
    if isinstance(value, np.ndarray):
        bytes_of: Callable[[Any], Runs] = runs_of_array
    elif isinstance(value, _tensors()) and value.layout == sys.modules["torch"].strided and value.is_cpu:
        bytes_of = runs_of_tensor
    else:
        return value
    races, rank = _races()
    if races is not None and (runs := bytes_of(value)):
        races.seen(rank, runs, writes=False, line=_line())
    return value


def _tensors() -> Any:
    """Return the class of tensors, or no class if the program has not loaded torch."""
    return getattr(sys.modules.get("torch"), "Tensor", ())


def at(value: Any) -> Any:
    """Return an object that reports its accesses in place of an array that is indexed; other values as they are."""
    if not isinstance(value, (np.ndarray, memoryview)):
        return value
    races, rank = _races()
    return value if races is None else _Elements(value, races, rank)


def _line() -> tuple[str, int]:
    frame = sys._getframe(2)
    return frame.f_code.co_filename, frame.f_lineno


class _Elements:
    """An array, or a memoryview, that reports which of its elements are read and written."""

    __slots__ = ("_races", "_rank", "_value")

    def __init__(self, value: Any, races: Any, rank: int) -> None:
        self._value, self._races, self._rank = value, races, rank

    def __getitem__(self, key: Any) -> Any:
        found = self._value[key]
        if not isinstance(found, (np.ndarray, memoryview)):
            self._races.seen(self._rank, self._runs(key), writes=False, line=_line())
        return found

    def __setitem__(self, key: Any, new: Any) -> None:
        if isinstance(new, np.ndarray):
            self._races.seen(self._rank, runs_of_array(new), writes=False, line=_line())
        runs = self._runs(key)
        self._value[key] = new
        self._races.seen(self._rank, runs, writes=True, line=_line())
        self._races.accept(self._rank, runs)

    def _runs(self, key: Any) -> Any:
        """Return the bytes of the elements that a key selects."""
        array = np.asarray(self._value)
        keys = (*key, ...) if isinstance(key, tuple) else (key, ...)
        if Ellipsis in [each for each in keys[:-1] if not isinstance(each, np.ndarray)]:
            keys = keys[:-1]
        view = array[keys]
        # A key of numbers or booleans selects a copy: then the elements' addresses are selected, too.
        if not view.size or np.may_share_memory(view, array):
            return runs_of_array(view)
        lows = np.unique(places_of(array.shape, array.strides)[keys]) + start_of(array)
        return tuple((low, low + array.itemsize) for low in lows.tolist())
