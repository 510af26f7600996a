"""The state of a model as named tensors, and the layout of these tensors in one flat buffer.

This is the only module that reads or writes a model's tensors, always in place, so that views into a shared arena
remain valid. Names: `parameter/fc.weight`, `buffer/bn.running_mean`, `optimizer/fc.weight/exp_avg`. `Collector` caches
the collected tensors, since a walk over many modules takes longer than the sum of their small tensors. `one_storage`
moves a model's tensors end to end into one memory. Must not know communicators or policies.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from operator import is_
from typing import Any, Literal, get_args

import torch

from spawnsim.errors import ParameterError, UsageError
from spawnsim.policies.rules.selection import check_choice
from spawnsim.policies.state.arithmetic import all_finite, new_buffer, without_data

Tensors = dict[str, torch.Tensor]
ModelAndOptimizer = tuple[torch.nn.Module, torch.optim.Optimizer]
OptimizerState = Literal["copy", "average", "reset", "keep"]
ALIGN_NBYTES = 64


@dataclass(frozen=True, slots=True)
class StateScope:
    """The parts of a model that are exchanged.

    Trained parameters are always exchanged.

    Args:
        frozen: whether to exchange parameters that require no gradient.
        buffers: whether to exchange the persistent buffers of a state_dict (BatchNorm statistics).
        optimizer_state: "keep" the rank's own, "reset" it, "copy" the heaviest donor's, or "average" it like the
            parameters.
        settings: names of settings of the optimizer's parameter groups, such as "lr", to copy from the heaviest
            donor; only with "copy".

    Raises:
        ParameterError: `optimizer_state` is unknown, or `settings` are given without "copy".
    """

    frozen: bool = True
    buffers: bool = True
    optimizer_state: OptimizerState = "keep"
    settings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_choice("optimizer_state", self.optimizer_state, get_args(OptimizerState))
        if self.settings and self.optimizer_state != "copy":
            raise ParameterError(
                f"settings={self.settings!r} are copied only with optimizer_state='copy' alone"
            )

    @property
    def with_optimizer(self) -> bool:
        return self.optimizer_state in ("copy", "average")


Travels = StateScope  # its original name


def collect(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, travels: StateScope) -> Tensors:
    """Return the live tensors that travel, by name: detached, sharing memory with the model."""
    tensors = {
        f"parameter/{name}": parameter.detach()
        for name, parameter in model.named_parameters()
        if travels.frozen or parameter.requires_grad
    }
    if travels.buffers:
        tensors.update((f"buffer/{name}", buffer.detach()) for name, buffer in _persistent_buffers(model))
    if travels.with_optimizer and optimizer is not None:
        tensors.update(_optimizer_tensors(model, optimizer))
        for number, group in enumerate(optimizer.param_groups):
            for key in travels.settings:
                tensors[f"{_SETTING}{number}/{key}"] = torch.tensor(float(group[key]), dtype=torch.float64)
    return tensors


_SETTING = "optimizer/group "  # prefix of settings; parameter names have no blanks


def as_real(tensors: Tensors) -> Tensors:
    """Return the tensors, with complex ones as views of pairs of real numbers."""
    return {name: torch.view_as_real(t) if t.is_complex() else t for name, t in tensors.items()}


def _persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def _named(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    # By identity: parameters with equal values are different parameters, and tensors compare element by element.
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            yield names.get(id(parameter), f"{number}.{index}"), parameter


def _optimizer_tensors(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in _named(model, optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                yield f"optimizer/{name}/{key}", value.detach()
            elif isinstance(value, (int, float)):
                # Some optimizers count steps in Python numbers; as tensors they travel like other state.
                yield f"optimizer/{name}/{key}", torch.tensor(float(value), dtype=torch.float64)


def assign(live: Tensors, values: Mapping[str, torch.Tensor]) -> None:
    """Copy values into the live tensors of the same names, in place."""
    names = [name for name in values if name in live]
    if names:
        # One call for all tensors: for small tensors, the overhead of separate calls exceeds the copies.
        torch._foreach_copy_([live[name] for name in names], [values[name] for name in names])


def assign_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, values: Mapping[str, torch.Tensor]
) -> None:
    """Set the optimizer state named in `values`; create missing entries."""
    parameters = dict(_named(model, optimizer))
    for full, value in values.items():
        if full.startswith(_SETTING):
            number, _, key = full.removeprefix(_SETTING).partition("/")
            if int(number) < len(optimizer.param_groups):
                _put(optimizer.param_groups[int(number)], key, value)
            continue
        kind, _, rest = full.partition("/")
        name, _, key = rest.rpartition("/")
        if kind == "optimizer" and name in parameters:
            _put(optimizer.state[parameters[name]], key, value, parameters[name])


def _put(
    state: dict[str, object], key: str, value: torch.Tensor, parameter: torch.nn.Parameter | None = None
) -> None:
    old = state.get(key)
    if without_data(value) and not (isinstance(old, torch.Tensor) and without_data(old)) and not value.dim():
        return  # a step count in main memory, which a phantom does not have
    if isinstance(old, torch.Tensor):
        old.copy_(value)
    elif isinstance(old, (int, float)):
        state[key] = type(old)(value.item())
    elif parameter is not None:  # a scalar such as Adam's step stays on the CPU
        state[key] = value.clone() if value.dim() == 0 else value.to(parameter.device, copy=True)


def reset_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Clear all state of an optimizer (moments, step counts); its settings stay."""
    optimizer.state.clear()


def reset_if_not_finite(optimizer: torch.optim.Optimizer) -> None:
    """Clear an optimizer's state if any of it is not finite: its next step would damage healed weights again."""
    held = [value for state in optimizer.state.values() for value in state.values()]
    real = as_real({str(n): value for n, value in enumerate(held) if isinstance(value, torch.Tensor)})
    if not all(all_finite(value) for value in real.values() if value.is_floating_point()):
        reset_optimizer(optimizer)


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor's name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


class Layout:
    """Layout of tensors in one flat byte buffer: one aligned segment per dtype, tensors in the given order.

    Two ranks with equal digests have equal layouts, so their buffers can be summed or copied as a whole.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        # By the dtype's name, as dtypes have no order; a stable sort keeps the order of each dtype's tensors.
        self.entries = tuple(sorted(entries, key=lambda entry: str(entry.dtype)))
        self.text = json.dumps([[e.name, str(e.dtype)[6:], e.shape] for e in self.entries]).encode()
        self.digest = digest_of(self.text)
        self.segments: dict[torch.dtype, tuple[int, int]] = {}  # dtype → (first byte, elements)
        self._counts: dict[torch.dtype, list[int]] = {}
        self.nbytes = 0
        for dtype in dict.fromkeys(entry.dtype for entry in self.entries):
            counts = self._counts[dtype] = [entry.count for entry in self.entries if entry.dtype == dtype]
            self.segments[dtype] = (self.nbytes, sum(counts))
            # Segments begin on cache lines, so that no segment begins within a line of another one.
            self.nbytes += -(-sum(counts) * dtype.itemsize // ALIGN_NBYTES) * ALIGN_NBYTES

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Layout:
        return layout_of(tuple(Entry(name, each.dtype, tuple(each.shape)) for name, each in tensors.items()))

    @classmethod
    def parse(cls, text: bytes) -> Layout:
        """Return the layout that another rank described with `text`."""
        try:
            rows = json.loads(text)
            entries = tuple(
                Entry(str(name), _dtype(dtype), tuple(map(int, shape))) for name, dtype, shape in rows
            )
            return layout_of(entries)
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"a rank sent a description of its model that cannot be read: {error}"
            ) from error

    def matches(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return whether the tensors match this layout: names, dtypes, shapes."""
        return len(tensors) == len(self.entries) and all(
            (tensor := tensors.get(entry.name)) is not None
            and tensor.dtype == entry.dtype
            and tuple(tensor.shape) == entry.shape
            for entry in self.entries
        )

    def views(self, buffer: torch.Tensor) -> Tensors:
        """Return each tensor as a view into a uint8 buffer of `nbytes`."""
        # Not `torch.split`, which adds two Python calls.
        rows = (row.split_with_sizes(self._counts[dtype]) for dtype, row in self.flat(buffer).items())
        pieces = zip(self.entries, chain.from_iterable(rows), strict=True)
        return {it.name: piece if len(it.shape) == 1 else piece.view(it.shape) for it, piece in pieces}

    def flat(self, buffer: torch.Tensor) -> dict[torch.dtype, torch.Tensor]:
        """Return each dtype's segment of a uint8 buffer as one flat tensor."""
        return {
            dtype: buffer[at : at + count * dtype.itemsize].view(dtype)
            for dtype, (at, count) in self.segments.items()
        }

    def clear_gaps(self, buffer: torch.Tensor) -> None:
        """Zero the padding after each segment of a uint8 buffer of `nbytes`: it travels as well."""
        for dtype, (at, count) in self.segments.items():
            end = at + count * dtype.itemsize
            buffer[end : -(-end // ALIGN_NBYTES) * ALIGN_NBYTES] = 0

    def split(self, limit_nbytes: int) -> list[Layout]:
        """Return layouts of whole tensors, each at most `limit_nbytes` unless a single tensor is larger."""
        parts: list[list[Entry]] = [[]]
        for entry in self.entries:
            if parts[-1] and sum(other.nbytes for other in parts[-1]) + entry.nbytes > limit_nbytes:
                parts.append([])
            parts[-1].append(entry)
        return [Layout(part) for part in parts]

    def difference(self, other: Layout) -> str:
        """Return a sentence about the first entry in which two layouts differ."""
        mine, theirs = ({e.name: e for e in layout.entries} for layout in (self, other))
        for name in [*mine, *theirs]:
            if mine.get(name) != theirs.get(name):
                return f"{name} is {_shown(mine.get(name))} here and {_shown(theirs.get(name))} there"
        return "they hold the same tensors in another order"


@lru_cache(maxsize=256)
def layout_of(entries: tuple[Entry, ...]) -> Layout:
    """Return the layout of tensors; cached, since virtual ranks have models of equal layout."""
    return Layout(entries)


def digest_of(text: bytes) -> int:
    """Return a 64-bit digest of the description of a layout."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is not a dtype")
    return dtype


def _shown(entry: Entry | None) -> str:
    return "absent" if entry is None else f"{str(entry.dtype)[6:]}{list(entry.shape)}"


class Collector:
    """Collects live tensors; returns the same mapping as long as their memory is unchanged.

    With `real`, for sums, complex tensors are viewed as real ones, and only lengths are compared, not shapes; otherwise
    tensors are collected unchanged. Collected tensors keep their memory alive, so no new tensor can have the same
    address.
    """

    # A walk over a model's modules by `named_parameters` takes longer than the sum of its small tensors. Its result
    # depends on a few properties that can be compared without Python code per tensor: the modules (`is_` over their
    # dictionaries), the address of each tensor (`data_ptr`, which detects replaced and moved tensors), its length, and,
    # if frozen parameters are excluded, whether it is trained. Identity of the tensor objects is not enough:
    # `tensor.data = other` keeps the object and changes its memory.

    def __init__(self, travels: StateScope, *, real: bool = True) -> None:
        self._travels, self._real = travels, real
        self._live: Tensors = {}
        self._root: object = None  # the dictionary of the model's direct children
        self._children: list[dict[str, Any]] = []  # children of each module
        self._modules: list[object] = []  # all modules in these
        self._tensors: list[dict[str, Any]] = []  # parameters and buffers of each module
        self._memory: tuple[Sequence[Any], ...] = ()

    def __call__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Tensors:
        """Return the tensors that travel, by name."""
        # Optimizer state changes often, and TorchScript stores its modules in C++, where they cannot be compared.
        if self._travels.with_optimizer or isinstance(model, torch.jit.ScriptModule):
            return self._collect(model, optimizer)
        if not (self._same_modules(model) and self._read() == self._memory):
            self._walk(model)
            self._live = self._collect(model, None)
        return self._live

    def _collect(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Tensors:
        live = collect(model, optimizer, self._travels)
        return as_real(live) if self._real else live

    def _same_modules(self, model: torch.nn.Module) -> bool:
        """Return whether the modules are unchanged: any added or removed module is a child of a known one."""
        # Compare counts first: an added module lengthens a dictionary, while all known modules are still there.
        if model._modules is not self._root or sum(map(len, self._children)) != len(self._modules):
            return False
        return all(map(is_, chain.from_iterable(map(dict.values, self._children)), self._modules))

    def _read(self) -> tuple[Sequence[Any], ...]:
        """Return addresses, lengths and other properties of the tensors on which the collection depends."""
        values = chain.from_iterable(map(dict.values, self._tensors))
        held = [each for each in values if each is not None]
        trained = [] if self._travels.frozen else [each.requires_grad for each in held]
        places = [*map(torch.Tensor.data_ptr, held)]
        if self._real:  # sums run over flat memory, where only the length matters
            return places, [*map(torch.Tensor.numel, held)], trained
        return places, [*map(torch.Tensor.size, held)], [*map(torch.Tensor.stride, held)], trained

    def _walk(self, model: torch.nn.Module) -> None:
        self._root, modules = model._modules, list(model.modules())
        self._children = [module._modules for module in modules]
        self._modules = [*chain.from_iterable(map(dict.values, self._children))]
        self._tensors = [place for module in modules for place in (module._parameters, module._buffers)]
        self._memory = self._read()


def one_storage(model: torch.nn.Module) -> None:
    """Move all parameters and buffers of one dtype and device into one memory, end to end, keeping their values.

    `AverageAllPolicy` then sums them in place, which halves its cost for a model of many small tensors. Parameters stay
    the same objects, so optimizers are unaffected. Other references to the old memory (a view, a captured CUDA graph)
    no longer see changes, so call this right after the model is built.

    Args:
        model: a model on any devices, with any dtypes; changed in place.

    Raises:
        UsageError: tensors of the model share memory, which they could not do afterwards.
    """
    live = [tensor for tensor in collect(model, None, StateScope()).values() if tensor.numel()]
    # Tied tensors must stay tied, but would get two separate places.
    if len({tensor.data_ptr() for tensor in live}) < len(live):
        raise UsageError(
            "one_storage: parameters or buffers of this model share memory; tie them as one Parameter"
        )
    held = {tensor.data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.numel()}
    for kind in dict.fromkeys((tensor.dtype, tensor.device) for tensor in live):
        group = [held[tensor.data_ptr()] for tensor in live if (tensor.dtype, tensor.device) == kind]
        memory = new_buffer(sum(tensor.numel() for tensor in group), *kind)
        for tensor, row in zip(group, torch.split(memory, [t.numel() for t in group]), strict=True):
            place = row.view(tensor.shape)
            place.copy_(tensor.detach())
            # Through `.data`, since optimizers hold the Parameter objects.
            tensor.data = place
