"""Tensors that are not what they should be yet: whoever looks at one has the work that they wait for carried out first.

Parameters, optimizer state and results of a rank stay ordinary tensors; only while work is put off do they belong to a
class of which torch tells us each use. So a look costs nothing otherwise, and nobody holds a strange object.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from spawnsim.comm.deferred import WAITING, Deferred, caller

# What may be asked of a tensor without a look at its values.
METADATA = {
    getattr(Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "is_leaf",
        "requires_grad",
        "is_cuda",
        "is_meta",
    )
} | {Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point, Tensor.__len__}


# What reads a tensor's memory without asking its class.
READERS: tuple[tuple[Any, str], ...] = (
    *((torch, name) for name in ("tensor", "as_tensor", "asarray", "full", "full_like", "scalar_tensor")),
    *((Tensor, name) for name in ("new_tensor", "new_full", "as_subclass", "_make_subclass")),
    (nn.Parameter, "__new__"),
    (torch.utils, "swap_tensors"),
)
NUMBERS = {bool, int, float}


def _of_classes(value: Any, classes: set[Any]) -> list[Tensor]:
    """Return the tensors of some classes among the arguments of a call."""
    if type(value) in classes:
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)) or NUMBERS.issuperset(map(type, value)):  # perhaps a million
        return []
    return [found for each in value for found in _of_classes(each, classes)]


class Watch:
    """The two classes, of parameters and of other tensors, whose looks one run is told of."""

    def __init__(self, deferred: Deferred) -> None:
        def look(args: Any, kwargs: Any = None) -> None:
            unknown = _of_classes(args, ours) + (_of_classes(kwargs, ours) if kwargs else [])
            if not unknown:
                return
            found = caller()
            rank = found[1] if found is not None and found[0] is deferred else None
            if _within():
                # At once, for no other rank may run now; in a thread, for these are each thread's own.
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(deferred.carry_out).result()
                if rank is not None:
                    deferred.settle(rank)
            else:
                deferred.look(rank, lambda: not ours.isdisjoint(map(type, unknown)))
            # Copies are made of the class of their original, and there is nothing to be carried out for them.
            for each in unknown:
                if type(each) in ours:
                    each.__class__ = nn.Parameter if isinstance(each, nn.Parameter) else Tensor

        def looked(
            cls: type, function: Callable[..., Any], kinds: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function in METADATA:
                with torch._C.DisableTorchFunctionSubclass():
                    return function(*args, **(kwargs or {}))
            look(args, kwargs)
            return function(*args, **(kwargs or {}))

        def as_number(method: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
            def number(self: Tensor) -> Any:
                look((self,))
                return method(self)

            return number

        def copied(self: Tensor, memo: dict[int, Any]) -> Tensor:
            look((self,))  # before torch takes the class, which the copy would have
            copy: Tensor = type(self).__deepcopy__(self, memo)  # type: ignore[no-untyped-call]
            return copy

        members: dict[str, Any] = {"__torch_function__": classmethod(looked), "__deepcopy__": copied}
        # What losses are looked at by, as a rule, comes here directly: by way of torch it takes twice as long.
        numbers = {name: as_number(getattr(Tensor, name)) for name in ("item", "__float__")}
        self.parameter: Any = type("PendingParameter", (nn.Parameter,), members)
        self.tensor: Any = type("PendingTensor", (Tensor,), members | numbers)
        ours = {self.parameter, self.tensor}
        deferred.unknown, deferred.fill_in, self.look = self.tensor, _fill_in, look
        _readers.watch(look)

    def close(self) -> None:
        """Be told of no more looks that are not a tensor's."""
        _readers.leave(self.look)

    def watch(self, parameters: Iterable[nn.Parameter], tensors: Iterable[Tensor]) -> None:
        """Be told of looks from now on."""
        for parameter in parameters:
            parameter.__class__ = self.parameter
        for tensor in tensors:
            tensor.__class__ = self.tensor

    def result(self, like: Tensor) -> Tensor:
        """Return a tensor that is not known yet: NaN, if it is read by a way that nobody tells us of."""
        tensor = like.clone()
        tensor.__class__ = self.tensor
        return tensor


def _within() -> bool:
    """Return whether this thread is amid something of torch's that neither other ranks nor their work may see.

    A vmap, a trace, a mode, hooks of what autograd saves; or a call in C++, without autograd, that asks for a number.
    """
    of_torch: Any = torch._C
    keys, excluded = of_torch.DispatchKey, of_torch._dispatch_tls_is_dispatch_key_excluded
    return (
        excluded(keys.Python)
        or (excluded(keys.AutogradCPU) and not torch.is_inference_mode_enabled())
        or of_torch._functorch.peek_interpreter_stack() is not None
        or of_torch._is_tracing()
        or in_a_mode()
        or of_torch._autograd._top_saved_tensors_default_hooks(True) is not None
    )


def in_a_mode() -> bool:
    """Return whether a program has a mode of torch's around this call, which others' work may not see."""
    of_torch: Any = torch._C
    if of_torch._len_torch_dispatch_stack():
        return True
    functions: int = of_torch._len_torch_function_stack()
    if not functions:
        return False
    return functions > (
        getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None) is not None
    )  # of all ranks


class _Readers:
    """Torch's `READERS`, replaced by what looks first, while there are runs that are told of looks."""

    def __init__(self) -> None:
        self._looks: list[Callable[[Any, Any], None]] = []
        self._before: list[Any] = []  # None: inherited

    def watch(self, look: Callable[[Any, Any], None]) -> None:
        """Have one more run told."""
        self._looks.append(look)
        if len(self._looks) == 1:
            self._before = [vars(place).get(name) for place, name in READERS]
            for (place, name), looking in zip(READERS, self._looking(), strict=True):
                setattr(place, name, looking)

    def leave(self, look: Callable[[Any, Any], None]) -> None:
        """Have one run told no more."""
        self._looks.remove(look)
        if self._looks:
            return
        for (place, name), before in zip(READERS, self._before, strict=True):
            if before is None:
                delattr(place, name)
            else:
                setattr(place, name, before)

    @functools.cache  # noqa: B019 - there is one of this class, for ever
    def _looking(self) -> list[Any]:
        return [self._looks_first(place, name) for place, name in READERS]

    def _looks_first(self, place: Any, name: str) -> Any:
        function = getattr(place, name)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for look in self._looks if WAITING else ():
                look(args, kwargs)
            return function(*args, **kwargs)

        # TorchScript knows operations by the identity of their functions.
        builtin = torch.jit._builtins._find_builtin(function)  # type: ignore[no-untyped-call]
        if builtin is not None:
            torch.jit._builtins._register_builtin(call, builtin)
        if place is torch:
            call.__module__, call.__qualname__ = "torch", name  # as which they are pickled
        return staticmethod(call) if name in {"__new__", "_make_subclass"} else call


_readers = _Readers()


def release(parameters: Iterable[nn.Parameter], tensors: Iterable[Tensor]) -> None:
    """Make them ordinary tensors again."""
    for parameter in parameters:
        parameter.__class__ = nn.Parameter
    for tensor in tensors:
        tensor.__class__ = Tensor


def _fill_in(rows: Sequence[dict[str, Any]]) -> None:
    """Put numbers in the place of results that lie on a GPU: in one copy, for to fetch each takes 10 us."""
    found: dict[Any, list[tuple[dict[str, Any], str, Tensor]]] = {}
    for values in rows:
        for name, each in values.items():
            if type(each) is Tensor and not each.is_cpu and each.ndim == 0:
                found.setdefault((each.device, each.dtype), []).append((values, name, each))
    for alike in found.values():
        numbers = torch.stack([each for _, _, each in alike]).tolist()
        for (values, name, _), number in zip(alike, numbers, strict=True):
            values[name] = number


def known(tensors: list[Tensor], values: list[Tensor]) -> None:
    """Give results their values."""
    with torch.no_grad():
        release((), tensors)
        torch._foreach_copy_(tensors, values)
