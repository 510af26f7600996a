"""Which models are made alike, and what may change in a value: what `arena`, `settings` and `reading` ask of objects.

Two ranks build their models apart, and their losses too: equal objects, not the same.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
import types
from collections.abc import Callable, Hashable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

# What nn.Module keeps of itself. Tensors are compared by shape, modules by name; hooks may do anything.
_OWN = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook"}
# Its parameters again, brought up to date in each forward pass.
_OF_RNN = {"_flat_weights", "_flat_weight_refs"}
_HOOKS = {name for name in vars(nn.Module()) if "hook" in name} - _OWN
CALLED = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CHANGED = ("running_mean", "running_var", "num_batches_tracked")  # buffers of torch's own normalizations
_NORMALIZATIONS = {
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
}  # not those that inherit from them, or communicate
KEPT_BY_TORCH = _OWN | _HOOKS | _OF_RNN
# What these packages define is taken to compute the same at each call.
_LIBRARIES = {
    "torch",
    "spawnsim",
    "math",
    "numpy",
    "builtins",
    "functools",
    "itertools",
    "operator",
    "typing",
    "enum",
    "abc",
    "dataclasses",
    "reprlib",  # whose function each class of `dataclasses` has, from Python 3.13 on
}
# Of these classes alone: objects of those that inherit from them have attributes.
CONSTANTS = {bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None)}
OWN_VARIABLES = "__own_variables__"  # among those of a function that is a copy: nobody else has them
COPIED_NBYTES = 1 << 20  # of a tensor or an array; larger ones are taken for data, and not copied


class Unequal(Exception):
    """Why something cannot be compared."""


def of_model(model: nn.Module) -> Hashable:
    """Return a key of how a model is made, and of all that it computes with besides its parameters: also of attributes.

    Also of those that no code is seen to read: what reads them may be out of sight.

    Raises:
        Unequal: it has hooks, buffers that a forward pass changes, or attributes that cannot be compared, or is a
            ScriptModule.
    """
    parts: list[Hashable] = []
    if any(isinstance(each, torch.jit.ScriptModule) for each in model.modules()):
        raise Unequal("it is TorchScript's")
    hooked = hooks_of(model)
    if hooked:
        raise Unequal(f"it has hooks ({hooked})")
    for name, module in model.named_modules():
        own = statistics_of(module)
        changed = next((each for each in _CHANGED if module._buffers.get(each) is not None), None)
        if changed is not None and not own:
            raise Unequal(f"its forward pass changes buffers ({'.'.join(filter(None, [name, changed]))})")
        apart = _OWN | _HOOKS | (_OF_RNN if isinstance(module, nn.RNNBase) else set())
        kept = {key: value for key, value in vars(module).items() if key not in apart}
        kept |= {key: value for key, value in module._buffers.items() if value is not None and key not in own}
        parts.append((name, kind_of(module), of_value(kept)))
    shapes = [(name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()]
    return tuple(parts), tuple(shapes)


def kind_of(module: nn.Module) -> Any:
    """Return the class of a module; where torch has made one for this module alone, what that was made of."""
    kind = type(module)
    if kind.__module__ != parametrize.__name__ or not parametrize.is_parametrized(module):
        return kind
    return kind.__mro__[1], *getattr(module, "parametrizations", ())


def statistics_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of one module that each of its forward passes brings up to date, if they can lie in rows.

    Of torch's own BatchNorm, by the momentum that it has: a mean of all batches is a number that Python must know.
    """
    if type(module) not in _NORMALIZATIONS or module.momentum is None:
        return {}
    return {name: each for name in _CHANGED if (each := module._buffers.get(name)) is not None}


def statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return such buffers of a whole model, by their names in it: each once."""
    return {
        f"{name}.{each}" if name else each: buffer
        for name, module in model.named_modules()
        for each, buffer in statistics_of(module).items()
    }


def hooks_of(model: nn.Module) -> str:
    """Return what of a model has hooks that are called as it computes, or all modules have; "" for nothing.

    Torch numbers all hooks but those that are written into its dictionaries: `RemovableHandle.next_id`.
    """
    if torch.nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
        return "of all modules"
    for name, module in model.named_modules():
        if any(vars(module)[hooks] for hooks in CALLED):
            return name or type(model).__name__
    with torch._C.DisableTorchFunctionSubclass():
        hooked = (
            name for name, p in model.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks
        )
        return next(hooked, "")


def attributes(model: nn.Module) -> list[Any]:
    """Return the names and values of what a program keeps in the modules of a model, their classes and buffers.

    But no statistics: where two names are those of one module, torch leaves them exchanged after a call.
    """
    modules = [*model.modules()]
    kinds = dict.fromkeys(each for module in modules for each in type(module).__mro__)
    parts: list[Mapping[str, Any]] = [vars(kind) for kind in kinds if not of_library(kind)]
    parts += [vars(module) for module in modules]
    parts += [
        {name: each for name, each in module._buffers.items() if name not in statistics_of(module)}
        for module in modules
    ]
    items = [item for part in parts for item in part.items() if item[0] not in KEPT_BY_TORCH]
    return [*chain.from_iterable(items)]


def is_trained(value: Any) -> bool:
    """Return whether it is a module that has parameters."""
    return isinstance(value, nn.Module) and next(value.parameters(), None) is not None


def digits_of(value: Any) -> Hashable:
    """Return a key of a value of CONSTANTS: of numbers all digits, for -0.0 equals 0.0, and NaN not even itself."""
    return repr(value) if isinstance(value, (float, complex)) else value


def of_function(function: Callable[..., Any]) -> Hashable:
    """Return a key of a function: the function itself, or where each rank makes its own, code and what it refers to.

    Raises:
        Unequal: it refers to something that cannot be compared.
    """
    if isinstance(function, functools.partial):
        parts = (function.func, function.args, function.keywords)
        return "partial", of_function(parts[0]), of_value(parts[1]), of_value(parts[2])
    if isinstance(function, types.MethodType):
        return "method", of_function(function.__func__), of_value(function.__self__)
    if isinstance(function, types.FunctionType):
        given = function.__defaults__, function.__kwdefaults__
        if function.__closure__ is None and given == (None, None):
            return function.__code__, id(function.__globals__)
        cells = tuple(map(of_value, references(function)))
        return function.__code__, id(function.__globals__), cells, *map(of_value, given)
    return of_value(function)


def references(function: Callable[..., Any]) -> tuple[Any, ...]:
    """Return the present values of the variables around a function to which it refers.

    Raises:
        Unequal: one of them has no value yet.
    """
    try:
        return tuple(cell.cell_contents for cell in getattr(function, "__closure__", None) or ())
    except ValueError as error:
        raise Unequal("it refers to a variable that has no value yet") from error


def of_library(value: Any) -> bool:
    """Return whether a module, a class or a function is one of a library's."""
    if isinstance(value, types.ModuleType):
        return is_library(value.__name__)
    if isinstance(value, types.FunctionType):  # whose `__module__` may be that of another one, which it wraps
        return is_library(value.__globals__.get("__name__", ""))
    return is_library(getattr(value, "__module__", None) or type(value).__module__)


def is_library(module: str) -> bool:
    """Return whether a module, by its name, is one of a library."""
    return module.partition(".")[0] in _LIBRARIES


def users_of(tensor: Tensor) -> int:
    """Return how many tensors use a tensor's memory, itself included."""
    storage = tensor.untyped_storage()  # a user itself, while it is asked
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Return the attributes that an object keeps in a dictionary, whatever its class does when they are asked for."""
    try:
        own: Any = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return own if isinstance(own, dict) else None


def of_value(value: Any) -> Hashable:
    """Return a key that is equal for equal values.

    Raises:
        Unequal: values of this kind cannot be compared.
    """
    if isinstance(value, Mapping):
        return "mapping", tuple((key, of_value(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(of_value(each) for each in value)
    if isinstance(value, nn.Module):
        if next(value.parameters(), None) is not None:
            raise Unequal(f"it refers to a {type(value).__name__} with parameters of its own")
        if statistics(value):
            raise Unequal(f"it refers to a {type(value).__name__}, whose forward pass changes buffers")
        return of_model(value)
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        return of_function(value)
    if isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)):
        return value
    if isinstance(value, torch.Tensor):
        return of_tensor(value)
    if by_value(value):
        return type(value), digits_of(value)
    try:
        return type(value), pickle.dumps(value)
    except Exception as error:
        raise Unequal(f"it refers to a {type(value).__name__}, which cannot be compared: {error}") from error


def by_value(value: Any) -> bool:
    """Return whether a value is compared by what it holds, and can be hashed; many others are compared by identity."""
    if "__hash__" not in {name for kind in type(value).__mro__[:-1] for name in vars(kind)}:
        return False
    try:
        hash(value)
    except TypeError:
        return False
    return not isinstance(value, (torch.Tensor, nn.Module))


def of_tensor(tensor: torch.Tensor) -> Hashable:
    """Return a key that is equal for tensors of equal numbers.

    Raises:
        Unequal: it is sparse, quantized, or has no numbers.
    """
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise Unequal("it refers to a tensor that cannot be compared")
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    digest = hashlib.blake2b(digest_size=16)
    if plain.numel():
        digest.update(plain.view(torch.uint8).numpy().data)
    return tensor.dtype, tensor.device, tensor.shape, digest.digest()
