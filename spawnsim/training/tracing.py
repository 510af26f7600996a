"""A vmapped function as the operations of torch that it comes to: recorded once for each number of rows, then repeated.

vmap and grad find out anew at each call what a function comes to, which takes half a millisecond for a small network.
What was recorded is repeated only as long as the function would still come to the same: `structure.Globals` knows what
that hangs on. Knows tensors and operations; must not know models in rows, or optimizers.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spawnsim.training.structure import Globals, Unequal

Call = Callable[..., Sequence[Tensor]]
# Calls with one number of rows before they are recorded. Recording takes as long as some ten calls, and a repeated one
# saves half of a call of a few rows.
CALLS_BEFORE = 32
MOST_OPERATIONS = 5_000  # what vmap computes row by row comes to operations for each row
# Of operations that give Python a number of a tensor's, or a comparison of two; what follows from it is not recorded.
TELLING = torch.Tag.data_dependent_output
PLACED = torch.ops.aten.as_strided.default  # at an offset from where the memory begins, if it is given one


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What is done to tensors while it is entered, as a graph."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.constants = fx.Graph(), torch.nn.Module()
        self._nodes: dict[int, fx.Node] = {}
        self._places: dict[Any, fx.Node] = {}
        self._foreign = {each.untyped_storage()._cdata for each in given}  # memory that was not made here
        self._kept: list[Any] = []  # all tensors, so that neither identities nor memory come again
        for number, each in enumerate(given):
            self._note(each, self.graph.placeholder(f"given_{number}"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if TELLING in func.tags:
            raise Unequal("it asks for a tensor's values")
        if func is PLACED and args[3:] not in ((), (None,)) and self._foreign_memory(args[0]):
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

    def finish(self, outcomes: Sequence[Tensor]) -> Call:
        """Return what gives these outcomes again, of other tensors in the place of those that were given."""
        self.graph.output([self._of(each) for each in outcomes])
        if len(self.graph.nodes) > MOST_OPERATIONS:
            raise Unequal("it comes to too many operations")
        self.graph.eliminate_dead_code()
        # Of an `fx.GraphModule` torch keeps the text for as long as the process lives.
        code = self.graph.python_code("self")
        names = dict(code.globals)
        exec(code.src, names)
        return functools.partial(names.pop("forward"), self.constants)

    def _require_own(self, schema: Any, args: Any, kwargs: Any) -> None:
        """Refuse to record what changes a tensor that was not made here: to try the record would change it again."""
        named = dict(zip((each.name for each in schema.arguments), args, strict=False)) | kwargs
        changed = [each.name for each in schema.arguments if each.alias_info and each.alias_info.is_write]
        for each in tree_leaves([named.get(name) for name in changed]):
            if isinstance(each, Tensor) and (id(each) not in self._nodes or self._foreign_memory(each)):
                raise Unequal("it changes a tensor that it was given")

    def _foreign_memory(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._foreign

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
            name = f"constant_{len(self._nodes)}"
            self.constants.register_buffer(name, value)
            self._foreign.add(value.untyped_storage()._cdata)
            self._note(value, self.graph.get_attr(name))
        return self._nodes[id(value)]


def _item(of: Sequence[Any], number: int) -> Any:
    return of[number]


def _place(tensor: Tensor) -> Any:
    """Return what two tensors have in common that are the same numbers in the same memory."""
    storage = tensor.untyped_storage()._cdata
    seen_as = tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return storage, seen_as, tensor.storage_offset(), tensor.shape, tensor.stride()


class Traced:
    """A function from tensors, (rows, ...) each, to a list of tensors; repeated from a record where that is the same.

    Args:
        call: the function.
        reads: what its outcome hangs on besides the tensors; None: not known, so nothing is recorded.
    """

    def __init__(self, call: Call, reads: Globals | None) -> None:
        self._call, self._reads = call, reads
        self._calls: Counter[int] = Counter()
        self._graphs: dict[int, Call] = {}

    @property
    def recorded(self) -> bool:
        """Whether calls are recorded at all."""
        return self._reads is not None

    def __call__(self, *given: Tensor) -> Sequence[Tensor]:
        """Call it."""
        if self._reads is None:
            return self._call(*given)
        if not self._reads.unchanged():
            self._stop()
            return self._call(*given)
        rows = len(given[0])
        graph = self._graphs.get(rows)
        if graph is not None:
            return graph(*given)
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
        try:
            with _Recording(given) as recording:
                outcomes = self._call(*given)
            graph = recording.finish(outcomes)
            again = graph(*given)
        except Exception:  # noqa: BLE001 - the function's own errors come again, and torch's refusals are of many classes
            self._stop()
            return self._call(*given)
        if not all(map(_equal, outcomes, again)):
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
