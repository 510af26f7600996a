"""CUDA as CPU: on virtual ranks that ask for it, torch's GPUs exist in name, and CPU tensors take their place.

`_install` is the table of names and replacements, in place while such a run lasts. Functions of `torch.cuda` and
`torch.accelerator` answer for a rank's node; wherever torch takes a device, a GPU becomes the CPU. A replacement acts
on ranks with `--cuda-as-cpu` alone: all other code gets torch's own function.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._device import _device_constructors

from spawnsim.errors import UnsupportedError
from spawnsim.virtual.engine.kernel import current_task
from spawnsim.virtual.interpreter import Patches, Put
from spawnsim.virtual.torch import CUDA
from spawnsim.virtual.torch.devices import GIB, Devices, Event, Stream, outside

DEVICE, CPU = torch.device, torch.device("cpu")
USED = "CUDA as CPU: all tensors are CPU tensors (`tensor.device` is cpu), and results are a CPU's"
COMPILED = "CUDA as CPU: torch.compile returns its argument, which runs eagerly"


def here() -> Devices | None:
    """Return the devices of the calling rank or main program; None elsewhere, and without `--cuda-as-cpu`."""
    task, found = current_task(), None
    if task is not None:
        found = task.kernel.owner.ranks[task.rank].attachments.get(CUDA)
    elif outside:
        found = outside[-1]
    if found is not None:
        found.warn(USED)
    return found


def placed(device: Any) -> Any:
    """Return the place of a device's tensors: the CPU for a GPU, as a text, a device or a number."""
    if isinstance(device, int) and not isinstance(device, bool):
        gpu: bool = True
    elif isinstance(device, str):
        gpu = device.partition(":")[0] == "cuda"
    else:
        gpu = isinstance(device, DEVICE) and device.type == "cuda"
    if not gpu:
        return device
    devices = here()
    if devices is None:
        return device
    devices.index(device)
    return "cpu" if isinstance(device, str) else CPU


# -- kinds of replacements: each takes torch's function and returns one for ranks with GPUs in name ---------------
Kind = Callable[[Any], Any]


def answering(answer: Callable[..., Any]) -> Kind:
    """A function of the rank's `Devices` and the call's arguments."""

    def kind(original: Any) -> Any:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            devices = here()
            return original(*args, **kwargs) if devices is None else answer(devices, *args, **kwargs)

        return call

    return kind


def constant(value: Any) -> Kind:
    """A function that returns a value, whatever its arguments."""
    return answering(lambda devices, *args, **kwargs: value)


def placing(name: str = "device", at: int | None = None) -> Kind:
    """The same function, with the CPU for a GPU in one argument: `name`, or the positional argument `at`."""

    def kind(original: Any) -> Any:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get(name) is not None:
                kwargs[name] = placed(kwargs[name])
            elif at is not None and len(args) > at:
                args = (*args[:at], placed(args[at]), *args[at + 1 :])
            return original(*args, **kwargs)

        return call

    return kind


def adapting(adapt: Callable[..., Any]) -> Kind:
    """The same function, with the arguments that `adapt` returns: a tuple and a mapping."""

    def kind(original: Any) -> Any:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if here() is not None:
                args, kwargs = adapt(*args, **kwargs)
            return original(*args, **kwargs)

        return call

    return kind


def making(make: Callable[..., Any], *kinds: type) -> Kind:
    """A class that makes objects by `make` on ranks with GPUs in name, and torch's elsewhere; `kinds` are its kinds."""

    def kind(original: Any) -> Any:
        class Choice(type):
            def __call__(cls, *args: Any, **kwargs: Any) -> Any:
                return (original if here() is None else make)(*args, **kwargs)

            def __instancecheck__(cls, value: Any) -> bool:
                return isinstance(value, (original, *kinds))

        names = {
            "__doc__": original.__doc__,
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
        }
        return Choice(original.__name__, (), names)

    return kind


def standing_in(virtual: type) -> Kind:
    """A class that makes a virtual object on ranks with GPUs in name."""
    return making(virtual, virtual)


# -- answers of torch.cuda and torch.accelerator ------------------------------------------------------------------
def _properties(devices: Devices, device: Any = None) -> Any:
    name, (major, minor), processors, memory_gib = devices.facts
    return SimpleNamespace(
        name=name, major=major, minor=minor, multi_processor_count=processors, total_memory=memory_gib * GIB,
        warp_size=32, max_threads_per_multi_processor=2048, is_integrated=0, is_multi_gpu_board=0,
        gcnArchName="", regs_per_multiprocessor=65536, L2_cache_size=50 << 20, shared_memory_per_block=49152,
        shared_memory_per_multiprocessor=228 << 10, shared_memory_per_block_optin=227 << 10, uuid=f"GPU-{device}",
    )  # fmt: skip


def _memory_info(devices: Devices, device: Any = None) -> tuple[int, int]:
    return (devices.facts[3] * GIB,) * 2


class Graph:
    """A captured graph, which has no operations to repeat."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise UnsupportedError("CUDA graphs are not available with --cuda-as-cpu: run the operations eagerly")


NOTHING, ZERO, YES = constant(None), constant(0), constant(True)
_names: dict[Kind, str] = {
    NOTHING: "synchronize empty_cache ipc_collect init manual_seed manual_seed_all seed seed_all "
    "set_rng_state set_rng_state_all reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached "
    "reset_accumulated_memory_stats set_per_process_memory_fraction set_sync_debug_mode "
    "_record_memory_history _dump_snapshot",
    ZERO: "memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached "
    "max_memory_cached utilization memory_usage get_sync_debug_mode initial_seed",
    YES: "is_available is_initialized is_bf16_supported is_tf32_supported can_device_access_peer",
    constant(False): "is_current_stream_capturing _is_in_bad_fork",
    constant(""): "memory_summary",
    answering(lambda devices, *args: []): "memory_snapshot get_arch_list",
    answering(lambda devices, *args: defaultdict(int)): "memory_stats memory_stats_as_nested_dict",
    answering(lambda devices, *args: devices.count): "device_count",
    answering(lambda devices: devices.current): "current_device",
    answering(Devices.set_device): "set_device _exchange_device _maybe_exchange_device",
    answering(_properties): "get_device_properties",
    answering(lambda devices, *args: devices.facts[0]): "get_device_name",
    answering(lambda devices, *args: devices.facts[1]): "get_device_capability",
    answering(_memory_info): "mem_get_info",
    answering(lambda devices, *args: torch.get_rng_state()): "get_rng_state",
    answering(lambda devices: [torch.get_rng_state()] * devices.count): "get_rng_state_all",
    answering(Devices.current_stream): "current_stream default_stream",
    answering(Devices.set_stream): "set_stream",
    standing_in(Stream): "Stream",
    standing_in(Event): "Event",
}
OF_CUDA = {name: kind for kind, names in _names.items() for name in names.split()} | {
    name: standing_in(Graph) for name in ("CUDAGraph", "graph", "make_graphed_callables")
}
OF_ACCELERATOR = {name: OF_CUDA[name] for name in (
    "synchronize", "empty_cache", "reset_peak_memory_stats", "reset_accumulated_memory_stats", "memory_allocated",
    "max_memory_allocated", "memory_reserved", "max_memory_reserved", "is_available", "memory_stats", "device_count",
    "current_stream", "set_stream",
)} | {
    "current_device_index": OF_CUDA["current_device"], "current_device_idx": OF_CUDA["current_device"],
    "set_device_index": OF_CUDA["set_device"], "set_device_idx": OF_CUDA["set_device"],
    "get_memory_info": OF_CUDA["mem_get_info"],
    "current_accelerator": answering(lambda devices, check_available=False: torch.device("cuda")),
}  # fmt: skip


# -- wherever torch takes a device --------------------------------------------------------------------------------
def _to(original: Any) -> Any:
    """`Tensor.to`: a GPU is the CPU; a move to the text "cpu" copies, as from a GPU."""

    @wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        named = kwargs.get("device", args[0] if args else None)
        if isinstance(named, (str, int, DEVICE)) and here() is not None:
            if named == "cpu" and isinstance(named, str):
                kwargs["copy"] = True
            elif "device" in kwargs:
                kwargs["device"] = placed(named)
            else:
                args = (placed(named), *args[1:])
        return original(self, *args, **kwargs)

    return to


def _module_to(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    if "device" in kwargs:
        kwargs["device"] = placed(kwargs["device"])
    return (self, *map(placed, args[:1]), *args[1:]), kwargs


def _cuda(devices: Devices, self: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
    devices.index(device)
    return self


def _on_host(devices: Devices, self: Any, memory_format: Any = torch.preserve_format) -> Any:
    return self.to(CPU, copy=True, memory_format=memory_format)


def _pinned(devices: Devices, self: Any, device: Any = None) -> Any:
    return self.clone()


def _untyped(name: Any) -> Any:
    return name.replace("torch.cuda.", "torch.") if isinstance(name, str) else name


def _autocast(self: Any, device_type: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    if device_type == "cuda":
        device_type, dtype = "cpu", dtype or torch.float16
    return (self, device_type, dtype, *args), kwargs


def _no_ids(
    self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
) -> tuple[Any, Any]:
    return (self, module, None, None, *args), kwargs


def _group(backend: Any = None, *args: Any, device_id: Any = None, **kwargs: Any) -> tuple[Any, Any]:
    return (backend or (None if device_id is None else "nccl"), *args), kwargs


def _eager(devices: Devices, model: Any = None, **_: Any) -> Any:
    devices.warn(COMPILED)
    return (lambda function: function) if model is None else model


_Generator = torch.Generator


def _generator(device: Any = CPU) -> Any:
    return _Generator(placed(device))


def _device(*args: Any, **kwargs: Any) -> Any:
    """Return a device; a number alone is a GPU's."""
    number = bool(args) and isinstance(args[0], int)
    return DEVICE("cuda", *args) if number else DEVICE(*args, **kwargs)


TENSOR: dict[str, Kind] = {
    "to": _to,
    "cuda": answering(_cuda),
    "cpu": answering(_on_host),
    "pin_memory": answering(_pinned),
    "record_stream": NOTHING,
    "type": adapting(lambda self, dtype=None, *args, **kwargs: ((self, _untyped(dtype), *args), kwargs)),
    **dict.fromkeys(
        ("new_tensor", "new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"), placing()
    ),
}
LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
GROUPS: dict[str, Kind] = {
    "init_process_group": adapting(_group),
    "barrier": adapting(lambda *args, device_ids=None, **kwargs: (args, kwargs)),
    "is_nccl_available": YES,
}
# Everything else, by the place of its owner.
TABLE: dict[str, dict[str, Kind]] = {
    "torch.Tensor": TENSOR,
    "torch.nn.Module": {
        "to": adapting(_module_to),
        "compile": answering(lambda devices, self, *args, **kwargs: devices.warn(COMPILED)),
    },
    "torch": {
        "compile": answering(_eager),
        "set_default_device": placing(at=0),
        "set_default_tensor_type": adapting(lambda kind: ((_untyped(kind),), {})),
        "is_autocast_enabled": adapting(lambda kind="cuda": (("cpu" if kind == "cuda" else kind,), {})),
        "get_autocast_dtype": adapting(lambda kind="cuda": (("cpu" if kind == "cuda" else kind,), {})),
        "get_autocast_gpu_dtype": answering(lambda devices: torch.get_autocast_dtype("cpu")),
        "Generator": making(_generator),
        "device": making(_device),
        "Stream": standing_in(Stream),
        "Event": standing_in(Event),
        **dict.fromkeys(LIKE, placing()),
    },
    "torch.accelerator.device_index": {
        "__enter__": answering(lambda devices, self: setattr(self, "prev_idx", devices.set_device(self.idx))),
        "__exit__": answering(lambda devices, self, *_: devices.set_device(self.prev_idx) and None),
    },
    "torch.utils._device.DeviceContext": {"__init__": placing(at=1)},
    "torch.serialization": {"default_restore_location": placing("location", 1)},
    "torch.amp.autocast_mode.autocast": {"__init__": adapting(_autocast)},
    "torch.amp.grad_scaler.GradScaler": {
        "__init__": adapting(lambda self, device="cuda", *args, **kwargs: ((self, "cpu", *args), kwargs))
    },
    "torch.nn.parallel.DistributedDataParallel": {"__init__": adapting(_no_ids)},
    "torch.nn.parallel.data_parallel": {"_get_available_device_type": NOTHING},
    "torch.distributed.fsdp.FullyShardedDataParallel": {
        "__init__": adapting(lambda *args, device_id=None, **kwargs: (args, kwargs | {"device_id": CPU}))
    },
    "torch.distributed.device_mesh.DeviceMesh": {"__init__": placing("device_type", 1)},
    "torch.distributed.distributed_c10d": GROUPS,
    "torch.distributed": GROUPS,
}
NVTX = ("range_push", "range_pop", "range_start", "range_end", "mark")


def _owner(path: str) -> Any:
    """Return the module or class at a path, None where this torch lacks it."""
    name, found = path, None
    while name and found is None:
        try:
            found = import_module(name)
        except ImportError:
            name = name.rpartition(".")[0]
    for part in path[len(name) + 1 :].split(".") if path != name else ():
        found = getattr(found, part, None)
    return found


def _install(put: Put) -> None:
    # The compiler keeps tables of torch's functions from its import, for the rest of the process.
    import_module("torch._dynamo")
    tables = [(_owner(path), kinds) for path, kinds in TABLE.items()]
    parts = ("", ".memory", ".random", ".streams", ".graphs")
    tables += [(_owner(f"torch.cuda{part}"), OF_CUDA) for part in parts]
    tables.append((torch.accelerator, OF_ACCELERATOR))
    tables.append((_owner("torch.cuda.nvtx"), dict.fromkeys(NVTX, NOTHING)))
    tables.append((_owner("torch.cuda.profiler"), dict.fromkeys(("start", "stop"), NOTHING)))
    factories = _device_constructors()  # torch keeps this set for good: it must hold its own functions
    for holder in (torch, torch.fft, torch.sparse, torch.nested):
        held = [name for name, value in vars(holder).items() if callable(value) and _among(value, factories)]
        tables.append((holder, dict.fromkeys(held, placing())))
    for owner, kinds in tables:
        for name, kind in kinds.items():
            if hasattr(owner, name):
                put(owner, name, kind(getattr(owner, name)))
    for name in [each for each in vars(torch.cuda) if each.endswith("Tensor") and hasattr(torch, each)]:
        put(torch.cuda, name, getattr(torch, name))


def _among(value: Any, known: Any) -> bool:
    try:
        return value in known
    except TypeError:  # not hashable
        return False


installed = Patches(_install).in_place
