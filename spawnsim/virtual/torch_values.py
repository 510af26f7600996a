"""Values in torch's modules that context managers change: separate for each rank after the first change.

torch's modules hold dictionaries and flags that a context manager sets for a while (handlers of `loss_parallel`, the
cache of parametrizations, hooks of all modules). Other ranks run in the meantime, and a rank that leaves such a
context would end it for ranks that are still within it. So each value is a `process_state.State`, changed by the
functions in `TABLE`. This module uses names of torch's internals, and never imports torch; values and functions that a
version lacks are skipped.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, reduce
from typing import Any

from spawnsim.importing import after_import
from spawnsim.virtual.interpreter import Patches, Put
from spawnsim.virtual.process_state import State, swapping

HANDLERS = "DTensor._op_dispatcher._custom_op_handlers"
HOOKS = (
    "backward_pre_hooks", "backward_hooks", "is_full_backward_hook", "forward_pre_hooks", "forward_hooks",
    "forward_hooks_always_called", "forward_hooks_with_kwargs", "buffer_registration_hooks",
    "module_registration_hooks", "parameter_registration_hooks",
)  # fmt: skip
# By module: the names of the functions that change values, and the paths of the values within the module.
TABLE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "torch.distributed.tensor.parallel.loss": (("_enable_custom_loss_ops",), (HANDLERS,)),
    "torch.distributed.tensor.experimental._context_parallel._attention": (
        ("_create_default_load_balancer", "_enable_context_parallel_dispatcher_impl", "_context_parallel_shard"),
        (HANDLERS, "existing_custom_ops", "F.scaled_dot_product_attention", "_cp_options.enable_load_balance",
         "_dispatch_mode"),
    ),
    "torch.distributed.tensor._redistribute": (
        ("use_min_cost_redistribution_plan", "disable_redistribute_transform_optimization"),
        ("_FORCE_MIN_COST_REDISTRIBUTION_PLAN", "_DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION"),
    ),
    "torch.distributed._shard.api": (("load_with_process_group",), ("_CURRENT_PROCESS_GROUP",)),
    "torch.nn.attention": (("_sdpa_kernel",), ("_sdpa_kernel",)),
    "torch.nn.utils.parametrize": (("cached",), ("_cache_enabled", "_cache")),
    "torch.nn.modules.module": (
        tuple(f"register_module_{name}" for name in (
            "forward_pre_hook", "forward_hook", "backward_hook", "full_backward_pre_hook", "full_backward_hook",
            "buffer_registration_hook", "module_registration_hook", "parameter_registration_hook",
        )),
        tuple(f"_global_{name}" for name in HOOKS),
    ),
    "torch.utils.checkpoint": (
        ("set_checkpoint_debug_enabled", "set_checkpoint_early_stop"),
        ("_checkpoint_debug_enabled", "_enable_checkpoint_early_stop"),
    ),
    "torch.autograd.graph": (
        ("allow_mutation_on_saved_tensors",), ("_allow_mutation_on_saved_tensors_enabled",)
    ),
}  # fmt: skip
_states: dict[tuple[int, str], State] = {}  # by owner and name: two modules change the handlers


def _state(module: Any, path: str) -> State | None:
    """Return the state for the value at a path in a module, None if the value does not exist."""
    *way, name = path.split(".")
    owner: Any = reduce(lambda found, each: getattr(found, each, None), way, module)
    if not hasattr(owner, name):
        return None
    if (id(owner), name) not in _states:
        get, put = partial(getattr, owner, name), partial(setattr, owner, name)
        if path == "_sdpa_kernel":  # sets a value in C++
            get, put = partial(module._cur_sdpa_kernel_backends, True), partial(_set_kernels, module)
        # Functions change a dictionary in place: each rank begins with a copy.
        _states[id(owner), name] = State(f"torch's {path}", "", get, put, begin=_copied, same=operator.is_)
    return _states[id(owner), name]


def _set_kernels(module: Any, kernels: Any) -> None:
    module._sdpa_kernel(kernels, True)


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, dict) else value


def _install(module: str, put: Put) -> None:
    owner = sys.modules[module]
    writers, values = TABLE[module]
    states = [state for path in values if (state := _state(owner, path))]
    for name in filter(partial(hasattr, owner), writers):
        put(
            owner,
            name,
            reduce(lambda function, state: swapping(state, function), states, getattr(owner, name)),
        )


_installed = {module: Patches(partial(_install, module)).in_place for module in TABLE}


@contextmanager
def values_per_rank() -> Iterator[None]:
    """Give ranks separate values while the block runs, also for modules that are loaded in it."""
    with ExitStack() as stack:

        def loaded() -> None:
            for module, install in _installed.items():
                stack.enter_context(after_import(module, partial(_enter, stack, install)))

        with after_import("torch", loaded):
            yield


def _enter(stack: ExitStack, install: Callable[[], AbstractContextManager[None]]) -> None:
    stack.enter_context(install())
