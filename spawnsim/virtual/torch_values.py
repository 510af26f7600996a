"""What torch keeps in its modules and context managers change: each rank's own, from the first change on.

torch's modules hold dictionaries and flags that a context manager sets for a while (handlers of `loss_parallel`, the
cache of parametrizations, hooks of all modules). Others run meanwhile, and a rank that leaves such a context would end
it for those within. So each value is a `process_state.State`, changed by the functions in `TABLE`. This module knows
names of torch's internals, and never imports torch; a value or function that a version lacks is left out.
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
# By module: the names of the functions that write, and the paths of the values, all within it.
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
_states: dict[tuple[int, str], State] = {}  # by owner and name: two modules write the handlers


def _state(module: Any, path: str) -> State | None:
    """Return the state that is a value at a path in a module, None if there is none."""
    *way, name = path.split(".")
    owner: Any = reduce(lambda found, each: getattr(found, each, None), way, module)
    if not hasattr(owner, name):
        return None
    if (id(owner), name) not in _states:
        get, put = partial(getattr, owner, name), partial(setattr, owner, name)
        if path == "_sdpa_kernel":  # which sets what is in C++
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
    """Let ranks that run within the block have values of their own, also of modules that are loaded there."""
    with ExitStack() as stack:

        def loaded() -> None:
            for module, install in _installed.items():
                stack.enter_context(after_import(module, partial(_enter, stack, install)))

        with after_import("torch", loaded):
            yield


def _enter(stack: ExitStack, install: Callable[[], AbstractContextManager[None]]) -> None:
    stack.enter_context(install())
