"""A vmapped function as the operations of torch that it comes to: recorded once for each number of rows, then repeated.

vmap and grad find out anew at each call what a function comes to, which takes half a millisecond for a small network.
What was recorded is repeated only as long as the function would still come to the same: `reading.Globals` knows what
that hangs on. Knows tensors and operations; must not know models in rows, or optimizers.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spawnsim.training.reading import Globals
from spawnsim.training.structure import Unequal

Call = Callable[..., Sequence[Tensor]]
# Calls with one number of rows before they are recorded. Recording takes as long as some ten calls, and a repeated one
# saves half of a call of a few rows.
CALLS_BEFORE = 32
MOST_OPERATIONS = 5_000  # what vmap computes row by row comes to operations for each row
# Of operations that give Python a number of a tensor's, or a comparison of two; what follows from it is not recorded.
TELLING = torch.Tag.data_dependent_output
# What TorchScript does itself, between operations.
_GLUE = {
    "prim::Constant",
    "prim::ListConstruct",
    "prim::TupleIndex",
    "prim::TupleUnpack",
    "prim::ListUnpack",
    "aten::__getitem__",
}
_COPY = torch.ops.aten._to_copy.default
_OF_TENSORS = {
    getattr(torch.ops.aten, name).Tensor
    for name in ("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_")
} | {torch.ops.aten.floor_divide.default}
PLACED = torch.ops.aten.as_strided.default  # at an offset from where the memory begins, if it is given one


class Unchanging(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses, while it is entered, what would change some tensors, before it does.

    Raises:
        Unequal: in the operation.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        held = [*tensors]
        self._foreign = {each.untyped_storage()._cdata for each in held}  # memory that was not made here
        self._held = {id(each): each for each in held}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # `squeeze_` and its like change a tensor, but no numbers: of a view of what was given nobody sees it.
        shapes = torch.Tag.inplace_view in func.tags and id(args[0]) not in self._held
        if func._schema.is_mutable and not shapes:
            self._require_own(func._schema, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _require_own(self, schema: Any, args: Any, kwargs: Any) -> None:
        named = dict(zip((each.name for each in schema.arguments), args, strict=False)) | kwargs
        changed = [each.name for each in schema.arguments if each.alias_info and each.alias_info.is_write]
        for each in tree_leaves([named.get(name) for name in changed]):
            if isinstance(each, Tensor) and self._is_foreign(each):
                raise Unequal("it changes a tensor that it was given")

    def _is_foreign(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._foreign


class _Recording(Unchanging):  # type: ignore[no-untyped-call]
    """What is done to tensors while it is entered, as a graph; of those that are given some may be changed."""

    def __init__(self, given: Sequence[Tensor], changes: slice = slice(0)) -> None:
        changed = {id(each) for each in given[changes]}
        super().__init__(each for each in given if id(each) not in changed)
        self.graph = fx.Graph()
        self._constants: list[Tensor] = []  # the first arguments of the graph
        self._nodes: dict[int, fx.Node] = {}
        self._places: dict[Any, fx.Node] = {}
        self._kept: list[Any] = []  # all tensors, so that neither identities nor memory come again
        for number, each in enumerate(given):
            self._note(each, self.graph.placeholder(f"given_{number}"))
        self._given = next(iter(self.graph.nodes))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if TELLING in func.tags:
            raise Unequal("it asks for a tensor's values")
        if func is PLACED and args[3:] not in ((), (None,)) and super()._is_foreign(args[0]):
            raise Unequal("it tells where in memory it reads, which is elsewhere for other rows")
        if func._schema.is_mutable:
            self._require_own(func._schema, args, kwargs or {})
        outcome = func(*args, **(kwargs or {}))
        if isinstance(outcome, Tensor) and not func._schema.is_mutable and self._known(outcome):
            return outcome
        node = self.graph.call_function(func, *map_aggregate((tuple(args), dict(kwargs or {})), self._of))
        self._kept.append((args, kwargs, outcome))
        if isinstance(outcome, Tensor):
            self._note(outcome, node)
        else:
            for number, each in enumerate(outcome or ()):
                if isinstance(each, Tensor):
                    self._note(each, self.graph.call_function(_item, (node, number)))
        return outcome

    def finish(self, outcomes: Sequence[Tensor]) -> functools.partial[Sequence[Tensor]]:
        """Return what gives these outcomes again, of other tensors in the place of those that were given.

        Its own arguments are the tensors that come from elsewhere.
        """
        self.graph.output([self._of(each) for each in outcomes])
        if len(self.graph.nodes) > MOST_OPERATIONS:
            raise Unequal("it comes to too many operations")
        self.graph.eliminate_dead_code()
        return functools.partial(_compiled(self.graph) or _interpreted(self.graph), *self._constants)

    def _is_foreign(self, tensor: Tensor) -> bool:
        # A constant, too: to try the record would change it again.
        return id(tensor) not in self._nodes or super()._is_foreign(tensor)

    def _known(self, view: Tensor) -> bool:
        """Whether a view lies as a tensor that is known already: turned twice, or expanded to the shape that it has."""
        node = self._places.get(_place(view))
        if node is None:
            return False
        self._kept.append(view)
        self._nodes[id(view)] = node
        return True

    def _note(self, tensor: Tensor, node: fx.Node) -> None:
        self._kept.append(tensor)
        self._nodes[id(tensor)] = node
        self._places.setdefault(_place(tensor), node)

    def _of(self, value: Any) -> Any:
        """Return the node of a tensor: of one that comes from elsewhere, one that refers to the tensor itself."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._nodes:
            with self.graph.inserting_before(self._given):
                node = self.graph.placeholder(f"constant_{len(self._constants)}")
            self._constants.append(value)
            self._foreign.add(value.untyped_storage()._cdata)
            self._note(value, node)
        return self._nodes[id(value)]


def _item(of: Sequence[Any], number: int) -> Any:
    return of[number]


def _interpreted(graph: fx.Graph) -> Call:
    """Return a graph as a function of Python."""
    # Of an `fx.GraphModule` torch keeps the text for as long as the process lives.
    code = graph.python_code("self")
    names = dict(code.globals)
    exec(code.src, names)
    return functools.partial(names.pop("forward"), None)


def _compiled(graph: fx.Graph) -> Call | None:
    """Return a graph as a function of TorchScript, or None if that would not call the same operations.

    Python is not needed between its operations: calls of four rows take half of the time, of 32 three quarters, and
    threads do not wait for each other. torch keeps TorchScript, and develops it no further; without it graphs are
    `_interpreted`.
    """
    lines, called = [], []
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"return {_text(node.args[0])}")
        elif node.target is _item:
            lines.append(f"{node} = {node.args[0]}[{node.args[1]}]")
        elif node.op == "call_function":
            schema = _of_numbers(node)._schema
            called.append(str(schema))
            name, given = schema.name.replace("::", "."), ", ".join(_given(node, schema))
            lines.append(f"{node} = torch.ops.{name}({given})")
    arguments = ", ".join(str(node) for node in graph.nodes if node.op == "placeholder")
    text = "\n    ".join([f"def forward({arguments}):", *lines]) + "\n"
    try:
        unit: Any = torch.jit.CompilationUnit()
        # By itself it looks for names in the calling frames, and from Python 3.13 on keeps these, with all they hold.
        unit.define(text, {"torch": torch}.get)
        function: Any = unit.forward
    except Exception:  # noqa: BLE001 - what it cannot express is of many kinds
        return None
    # Of several operations of one name it has chosen one by its arguments; it has left out those that nothing needs.
    chosen = [node.schema() for node in function.graph.nodes() if node.kind() not in _GLUE]
    rest = iter(called)
    return function if all(each in rest for each in chosen) else None


def _given(node: fx.Node, schema: Any) -> Iterator[str]:
    """Yield the arguments of an operation as TorchScript writes them: so that it knows which one of a name is meant."""
    for number, argument in enumerate(schema.arguments):
        if number < len(node.args):
            text = _text(node.args[number])
            # A list of tensors alone would be that of another operation.
            optional = str(argument.type) == "List[Optional[Tensor]]"
            yield f"torch.jit.annotate(List[Optional[Tensor]], {text})" if optional else text
        elif argument.name in node.kwargs or argument.kwarg_only:
            yield f"{argument.name}={_text(node.kwargs.get(argument.name, argument.default_value))}"


def _of_numbers(node: fx.Node) -> Any:
    """Return the operation of a node; where a number stands for a tensor, the same one of numbers, to the bit."""
    operation: Any = node.target
    number = [isinstance(each, (bool, int, float)) for each in node.args]
    if operation is _COPY and number[0] and "dtype" in node.kwargs:
        return torch.ops.aten.scalar_tensor.default
    if number == [False, True] and operation in _OF_TENSORS:
        return operation.overloadpacket.Scalar
    return operation


def _text(value: Any) -> str:
    """Return an argument as TorchScript writes it."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    return str(value) if isinstance(value, fx.Node) else repr(value)


def _place(tensor: Tensor) -> Any:
    """Return what two tensors have in common that are the same numbers in the same memory."""
    storage = tensor.untyped_storage()._cdata
    seen_as = tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return storage, seen_as, tensor.storage_offset(), tensor.shape, tensor.stride()


def as_recorded() -> AbstractContextManager[None]:
    """Have this thread repeat records as they are: not first with notes taken, then with operations joined."""
    made: AbstractContextManager[None] = torch.jit.optimized_execution(False)  # type: ignore[attr-defined]
    return made


class Traced:
    """A function from tensors, (rows, ...) each, to a list of tensors; repeated from a record where that is the same.

    Args:
        call: the function.
        reads: what its outcome hangs on besides the tensors; None: not known, so nothing is recorded.
        changes: which of the tensors it changes.
    """

    def __init__(self, call: Call, reads: Globals | None, changes: slice = slice(0)) -> None:
        self._call, self._reads, self._changes = call, reads, changes
        self._calls: Counter[int] = Counter()
        self._graphs: dict[int, functools.partial[Sequence[Tensor]]] = {}

    @property
    def recorded(self) -> bool:
        """Whether calls are recorded at all."""
        return self._reads is not None

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Let calls be repeated in this block, in which nothing changes that their outcome hangs on."""
        if self._reads is not None and not self._reads.unchanged():
            self._stop()
        with as_recorded():
            yield

    def ready(self, rows: int) -> bool:
        """Return whether a call of so many rows is repeated from a record."""
        return rows in self._graphs

    def constants(self, rows: int) -> Sequence[Tensor]:
        """Return the tensors that a record of so many rows reads beside those that it is given."""
        return self._graphs[rows].args

    def __call__(self, *given: Tensor) -> Sequence[Tensor]:
        """Call it: where calls of so many rows are `ready`, from any thread."""
        rows = len(given[0])
        if rows in self._graphs:
            return self._graphs[rows](*given)
        return self._record(rows, given) if self.repeats(rows) else self._call(*given)

    def repeats(self, rows: int) -> bool:
        """Return whether a call of so many rows is recorded, or repeated; if not, count it."""
        if not self.recorded:
            return False
        if self._calls[rows] >= CALLS_BEFORE:
            return True
        self._calls[rows] += 1
        return False

    def _record(self, rows: int, given: Sequence[Tensor]) -> Sequence[Tensor]:
        first, second = [*given], [*given]
        for trial in (first, second):
            trial[self._changes] = [each.clone() for each in given[self._changes]]
        try:
            with _Recording(first, self._changes) as recording:
                outcomes = self._call(*first)
            graph = recording.finish(outcomes)
            again = graph(*second)
        except Exception:  # noqa: BLE001 - the function's own errors come again, and torch's refusals are of many classes
            self._stop()
            return self._call(*given)
        for each, now in zip(given[self._changes], first[self._changes], strict=True):
            each.copy_(now)
        if not all(map(_equal, (*outcomes, *first[self._changes]), (*again, *second[self._changes]))):
            self._stop()
        else:
            self._graphs[rows] = graph
        return outcomes

    def _stop(self) -> None:
        self._reads = None
        self._graphs.clear()


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal, bit for bit but for the kinds of NaN."""
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
