"""What torch keeps in its modules and context managers change: each rank's own, from the first change on.

torch's modules hold dictionaries and flags that a context manager sets for a while (handlers of `loss_parallel`, the
cache of parametrizations, hooks of all modules). Others run meanwhile, and a rank that leaves such a context would end
it for those within. Of each such value `TABLE` has the function that writes it: its first call in a run makes the value
each rank's own, swapped when another rank comes to run. Programs that call none pay nothing. This module knows names of
torch's internals, and never imports torch; what a version lacks is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, reduce, wraps
from typing import Any, NamedTuple

from spawnsim.importing import after_import
from spawnsim.virtual.engine.kernel import Kernel, Task, current_task
from spawnsim.virtual.engine.world import World
from spawnsim.virtual.interpreter import Patches, Put


class Value(NamedTuple):
    """A value that torch keeps for the process."""

    get: Callable[[], Any]
    set: Callable[[Any], object]


class Kept(NamedTuple):
    """What a module keeps: the names of the functions that write, and the paths of the values, all within it."""

    writers: tuple[str, ...]
    values: tuple[str, ...]


HANDLERS = "DTensor._op_dispatcher._custom_op_handlers"
HOOKS = (
    "backward_pre_hooks", "backward_hooks", "is_full_backward_hook", "forward_pre_hooks", "forward_hooks",
    "forward_hooks_always_called", "forward_hooks_with_kwargs", "buffer_registration_hooks",
    "module_registration_hooks", "parameter_registration_hooks",
)  # fmt: skip
TABLE = {
    "torch.distributed.tensor.parallel.loss": Kept(("_enable_custom_loss_ops",), (HANDLERS,)),
    "torch.distributed.tensor.experimental._context_parallel._attention": Kept(
        ("_create_default_load_balancer", "_enable_context_parallel_dispatcher_impl", "_context_parallel_shard"),
        (HANDLERS, "existing_custom_ops", "F.scaled_dot_product_attention", "_cp_options.enable_load_balance",
         "_dispatch_mode"),
    ),
    "torch.distributed.tensor._redistribute": Kept(
        ("use_min_cost_redistribution_plan", "disable_redistribute_transform_optimization"),
        ("_FORCE_MIN_COST_REDISTRIBUTION_PLAN", "_DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION"),
    ),
    "torch.distributed._shard.api": Kept(("load_with_process_group",), ("_CURRENT_PROCESS_GROUP",)),
    "torch.nn.attention": Kept(("_sdpa_kernel",), ("_sdpa_kernel",)),
    "torch.nn.utils.parametrize": Kept(("cached",), ("_cache_enabled", "_cache")),
    "torch.nn.modules.module": Kept(
        tuple(f"register_module_{name}" for name in (
            "forward_pre_hook", "forward_hook", "backward_hook", "full_backward_pre_hook", "full_backward_hook",
            "buffer_registration_hook", "module_registration_hook", "parameter_registration_hook",
        )),
        tuple(f"_global_{name}" for name in HOOKS),
    ),
    "torch.utils.checkpoint": Kept(
        ("set_checkpoint_debug_enabled", "set_checkpoint_early_stop"),
        ("_checkpoint_debug_enabled", "_enable_checkpoint_early_stop"),
    ),
    "torch.autograd.graph": Kept(
        ("allow_mutation_on_saved_tensors",), ("_allow_mutation_on_saved_tensors_enabled",)
    ),
}  # fmt: skip


class OwnValues:
    """The values that ranks of a run have changed: each rank has its own."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._values: dict[tuple[str, str], Value] = {}
        self._outside: dict[tuple[str, str], Any] = {}
        self._own: dict[tuple[int, int], dict[tuple[str, str], Any]] = {}
        self._here = (-1, 0)  # the rank that runs, and its incarnation

    def own(self, module: str) -> None:
        """Make what a module keeps each rank's own: the calling rank is about to change it."""
        new: dict[tuple[str, str], Value] = {}
        for path in TABLE[module].values:
            name = "" if path == HANDLERS else module, path  # two modules write the handlers
            value = None if name in self._values else _value(sys.modules[module], path)
            if value is not None:
                new[name] = value
        if not new:
            return
        task = current_task()
        assert task is not None
        if not self._values:
            self._kernel.on_resume.append(self.enter)
            self._here = self._incarnation(task)
        self._values |= new  # first: some are set by the very functions that are replaced
        for name, value in new.items():
            self._outside[name] = value.get()
            value.set(_copied(self._outside[name]))

    def _incarnation(self, task: Task) -> tuple[int, int]:
        return task.rank, task.kernel.owner.ranks[task.rank].incarnation

    def enter(self, task: Task) -> None:
        """Put the values of a task's rank in place."""
        rank = self._incarnation(task)
        if rank != self._here:
            self._own[self._here] = {name: value.get() for name, value in self._values.items()}
            self._here, own = rank, self._own.get(rank, {})
            for name, value in self._values.items():
                value.set(own[name] if name in own else _copied(self._outside[name]))

    def leave(self) -> None:
        """Put back what stood outside of the run."""
        if self._values:
            self._kernel.on_resume.remove(self.enter)
        for name, value in self._values.items():
            value.set(self._outside[name])


def _copied(value: Any) -> Any:
    """Return a value for another rank: of a dictionary a copy, as functions change those in place."""
    return value.copy() if isinstance(value, dict) else value


def _value(module: Any, path: str) -> Value | None:
    """Return the value at a path in a module."""
    if path == "_sdpa_kernel":  # in C++
        return Value(
            partial(module._cur_sdpa_kernel_backends, True), lambda found: module._sdpa_kernel(found, True)
        )
    *way, name = path.split(".")
    owner: Any = reduce(lambda found, each: getattr(found, each, None), way, module)
    return (
        Value(partial(getattr, owner, name), partial(setattr, owner, name)) if hasattr(owner, name) else None
    )


def _writing(original: Callable[..., Any], module: str) -> Callable[..., Any]:
    """Return a function that writes what a module keeps, by then the calling rank's own."""

    @wraps(original)
    def write(*args: Any, **kwargs: Any) -> Any:
        task = current_task()
        own = None if task is None else task.kernel.owner.attachments.get(OwnValues)
        if own is not None:
            own.own(module)
        return original(*args, **kwargs)

    return write


def _install(module: str, put: Put) -> None:
    owner = sys.modules[module]
    for name in TABLE[module].writers:
        if hasattr(owner, name):
            put(owner, name, _writing(getattr(owner, name), module))


_installed = {module: Patches(partial(_install, module)).in_place for module in TABLE}


@contextmanager
def values_per_rank(world: World) -> Iterator[None]:
    """Let ranks that run within the block have values of their own, also of modules that are loaded there."""
    own = world.attachments[OwnValues] = OwnValues(world.kernel)
    with ExitStack() as stack:
        stack.callback(own.leave)

        def loaded() -> None:
            for module, install in _installed.items():
                stack.enter_context(after_import(module, partial(_enter, stack, install)))

        with after_import("torch", loaded):
            yield


def _enter(stack: ExitStack, install: Callable[[], AbstractContextManager[None]]) -> None:
    stack.enter_context(install())
