"""Loads and stores in a program's own file: its expressions report the arrays that they read and write.

`a[i]`, `a[i] = x`, operands of arithmetic and comparisons, formatted values, arguments of print, of builtins such as
sum, and of numpy's functions, and numpy's methods such as `a.sum()` report the bytes of their array. Views (`a[2:]`,
`np.frombuffer`) report nothing by themselves, and neither do arguments of the program's own functions or MPI's.
"""

from __future__ import annotations

import ast
import sys
from typing import Any

import numpy as np

from spawnsim.virtual.engine.kernel import current_task
from spawnsim.virtual.races.memory import runs_of_array

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


def _races() -> Any:
    """Return the detector, if the calling rank has memory in which races can be."""
    task = current_task()
    races = None if task is None else task.kernel.owner.races
    return races if races is not None and task is not None and races.exposes(task.rank) else None


def load(value: Any) -> Any:
    """Report that an expression reads a whole array; return the array, or whatever else it is."""
    if isinstance(value, np.ndarray) and value.size and (races := _races()) is not None:
        races.seen(runs_of_array(np.asarray(value)), writes=False, line=_line())
    return value


def at(value: Any) -> Any:
    """Return an object that reports its accesses in place of an array that is indexed; other values as they are."""
    if not isinstance(value, (np.ndarray, memoryview)) or (races := _races()) is None:
        return value
    return _Elements(value, races)


def _line() -> str:
    frame = sys._getframe(2)
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


class _Elements:
    """An array, or a memoryview, that reports which of its elements are read and written."""

    __slots__ = ("_array", "_races", "_value")

    def __init__(self, value: Any, races: Any) -> None:
        self._value, self._races, self._array = value, races, np.asarray(value)

    def __getitem__(self, key: Any) -> Any:
        found = self._value[key]
        if not isinstance(found, (np.ndarray, memoryview)):
            self._races.seen(self._runs(key), writes=False, line=_line())
        return found

    def __setitem__(self, key: Any, new: Any) -> None:
        if isinstance(new, np.ndarray):
            self._races.seen(runs_of_array(new), writes=False, line=_line())
        runs = self._runs(key)
        self._races.look(current_task().rank)  # type: ignore[union-attr]
        self._value[key] = new
        self._races.seen(runs, writes=True, line=_line())
        self._races.accept(current_task().rank, runs)  # type: ignore[union-attr]

    def _runs(self, key: Any) -> Any:
        """Return the bytes of the elements that a key selects."""
        keys = (*key, ...) if isinstance(key, tuple) else (key, ...)
        if Ellipsis in [each for each in keys[:-1] if not isinstance(each, np.ndarray)]:
            keys = keys[:-1]
        view = self._array[keys]
        # A key of numbers or booleans selects a copy: then the elements' addresses are selected, too.
        if not view.size or np.may_share_memory(view, self._array):
            return runs_of_array(view)
        lowest, size = int(self._array.__array_interface__["data"][0]), self._array.itemsize
        places = np.zeros((), np.int64)
        for count, stride in zip(self._array.shape, self._array.strides, strict=True):
            places = np.add.outer(places, np.arange(count) * stride)
        lows = np.unique(places[keys]) + lowest
        return tuple((int(low), int(low) + size) for low in lows)
