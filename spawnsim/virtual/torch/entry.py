"""torch.distributed on virtual ranks: available to ranks in threads (`virtual.torch`), rejected on greenlets.

On greenlets it would wait within frames of C++, which greenlets cannot leave, or for other processes, and freeze this
one. During a run, the three functions that all of torch.distributed uses raise the same error: asking for the default
group, rendezvous, and making a store. A group of the process around the run is not visible. Other threads, and all
code outside virtual ranks, continue as before; after the run torch.distributed is unchanged. This module uses names of
torch's internals, and never imports torch.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from importlib import import_module
from typing import Any

from spawnsim.errors import UnsupportedError
from spawnsim.importing import after_import
from spawnsim.virtual.engine.carriers import TaskThread
from spawnsim.virtual.engine.kernel import Task, current_task
from spawnsim.virtual.engine.world import World
from spawnsim.virtual.interpreter import Patches, Put
from spawnsim.virtual.torch import CUDA

# Parts of the messages with which torch ends a program that requests an absent GPU.
_NO_GPU = (
    "not compiled with CUDA", "Cannot access accelerator device", "has no attribute '_cuda_", "requires CUDA support",
    "instantiate dummy base class", "deserialize object on a CUDA device", "accelerator support: None",
    "No CUDA GPUs are available", "Found no NVIDIA driver", "invalid device ordinal",
    "device_ids and output_device arguments only work",
)  # fmt: skip
C10D, RENDEZVOUS = "torch.distributed.distributed_c10d", "torch.distributed.rendezvous"
STORES = ("TCPStore", "FileStore")
ASKING = ("_get_default_group", "init_process_group")  # callers that need the default group
_OWN_FOLDERS = ("torch.distributed", "torch.nn.parallel")


class NotOnVirtualRanks(UnsupportedError, ValueError):
    """The program used torch.distributed or a GPU. Also the `ValueError` that torch raises without a group."""

    placed = False  # whether the message contains the place


@contextmanager
def refused() -> Iterator[None]:
    """Reject torch.distributed on virtual ranks while the block runs, also if it is imported there."""
    with ExitStack() as stack, after_import("torch.distributed", lambda: stack.enter_context(_refusals())):
        yield


@contextmanager
def offered(world: World) -> Iterator[None]:
    """Make torch.distributed available to virtual ranks while the block runs, also if it is imported there."""
    with ExitStack() as stack:

        def loaded() -> None:
            import_module("torch.distributed")  # since importing torch may not load it
            from spawnsim.virtual.torch.installation import installed  # imports torch

            stack.enter_context(installed(world))

        def torchft_loaded() -> None:
            from spawnsim.virtual.torch.installation import torchft_installed

            stack.enter_context(torchft_installed())

        # Only when all of torch is loaded: torch.distributed is loaded in the middle of it.
        stack.enter_context(after_import("torch", loaded))
        stack.enter_context(after_import("torchft", torchft_loaded))
        yield


@contextmanager
def cuda_as_cpu() -> Iterator[None]:
    """Let CPU tensors take the place of CUDA's while the block runs, on ranks with the attachment `CUDA`."""
    with ExitStack() as stack:

        def loaded() -> None:
            from spawnsim.virtual.torch.cuda import installed  # imports torch

            stack.enter_context(installed())

        stack.enter_context(after_import("torch", loaded))
        yield


def is_offered() -> bool:
    """Return whether the calling virtual rank may use torch.distributed."""
    task = current_task()
    return task is not None and isinstance(task.carrier, TaskThread)


def needs_gpu(error: BaseException) -> bool:
    """Return whether torch has raised the error for lack of a GPU."""
    return any(part in str(error).partition("\n")[0] for part in _NO_GPU)


def without_gpu(error: BaseException, task: Task, line: str) -> NotOnVirtualRanks | None:
    """Return a one-line error for a program that has requested a GPU from torch; None for other errors."""
    text = str(error).partition("\n")[0]
    if not needs_gpu(error):
        return None
    remedy = (
        "give --cuda-as-cpu to run it on them (options={'cuda_as_cpu': True} in Python), or use `device = 'cuda' if "
        "torch.cuda.is_available() else 'cpu'`, and no device_ids"
    )
    if CUDA in task.kernel.owner.ranks[task.rank].attachments:
        remedy = "--cuda-as-cpu does not cover this call"
    found = NotOnVirtualRanks(
        f"{task.name} asked for a GPU at {task.clock:.6g} s{line}: virtual ranks have CPU tensors; {remedy} "
        f"(torch: {text.partition(', but got')[0]})"
    )
    found.__cause__, found.placed = error, True
    return found


def _refuse(put: Put) -> None:
    """Replace the entry points. A name that another version of torch lacks is skipped."""
    import_module(C10D)  # loaded already; if another thread is still importing it, this waits
    modules = sys.modules
    world, native = (
        getattr(modules[C10D], "_World", None),
        getattr(modules["torch._C"], "_distributed_c10d", None),
    )
    ways: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (world, "default_pg", _unseen),
        (modules.get(RENDEZVOUS), "_rendezvous_helper", partial(_refusing, "rendezvous")),
        *((getattr(native, store, None), "__init__", partial(_refusing, store)) for store in STORES),
    ]
    for owner, name, by in ways:
        if owner is not None and hasattr(owner, name):
            put(owner, name, by(vars(owner)[name] if name in vars(owner) else getattr(owner, name)))


_refusals = Patches(_refuse).in_place


def _refusing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        task = current_task()
        if task is None:
            return function(*args, **kwargs)
        raise _refusal(task, name)

    return call


def _unseen(default: property) -> property:
    """Return torch's property of the default group; virtual ranks see no group of the process."""
    get: Any = default.fget

    def visible(world: Any) -> Any:
        task = current_task()
        if task is None:
            return get(world)
        asking: Any = sys._getframe(1)
        while asking is not None and asking.f_globals.get("__name__") == C10D:
            if asking.f_code.co_name in ASKING:
                raise _refusal(task, asking.f_code.co_name)
            asking = asking.f_back
        return None

    return property(visible, default.fset)


def _refusal(task: Task, name: str) -> NotOnVirtualRanks:
    called, line = _called(name)
    error = NotOnVirtualRanks(
        f"{task.name} called {called} at {task.clock:.6g} s{line}: virtual ranks that are greenlets share one thread, "
        "which torch.distributed would stop for ever. Use the communicator (`comm` in main(comm), MPI.COMM_WORLD in an "
        "mpi4py program), a program without main(comm) (--carrier threads), or real ranks (torchrun … -m spawnsim run "
        "FILE --backend torch)"
    )
    error.placed = True  # the message contains rank, time and line
    return error


def _called(name: str) -> tuple[str, str]:
    """Return torch's function that the program has called (torch's outermost frame), and the program's line."""
    called, line = f"torch.distributed.{name}", ""
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_OWN_FOLDERS):
            if frame.f_code.co_name != "wrapper":  # torch's own logging of calls
                package = "torch.nn.parallel" if module.startswith("torch.nn") else "torch.distributed"
                called = f"{package}.{frame.f_code.co_qualname.removesuffix('.__init__')}"
            line = ""
        elif not line and module != __name__:
            line = f" ({frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno})"
        frame = frame.f_back
    return called, line
