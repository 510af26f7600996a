"""The one Python interpreter that all virtual ranks share: patches during runs, the garbage collector, torch's modes.

*Patches* of modules last as long as any run: with several runs at once, or nested runs, the first applies them and the
last removes them. Each replacement determines itself whether a virtual rank calls it.

*The garbage collector* runs less often, and the kernel is notified while it works.

*torch's modes* do not leak between greenlets, and torch's settings do not leak between ranks. This module never
imports torch.
"""

from __future__ import annotations

import gc
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

Put = Callable[[Any, str, Any], None]  # put(owner, name, value), undone at the end
# Functions of `time`; each has a variant with the suffix _ns.
CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")


class Patches:
    """A set of changes, made by `install(put)`."""

    def __init__(self, install: Callable[[Put], None]) -> None:
        self._install, self._lock, self._runs, self._undo = install, threading.Lock(), 0, ExitStack()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Keep the changes in place while the block runs."""
        with self._lock:
            self._runs += 1
            if self._runs == 1:
                self._install(self._put)
        try:
            yield
        finally:
            with self._lock:
                self._runs -= 1
                if not self._runs:
                    self._undo.close()

    def _put(self, owner: Any, name: str, value: Any) -> None:
        before = vars(owner)[name] if name in vars(owner) else getattr(owner, name)  # unbound
        self._undo.callback(setattr, owner, name, before)
        setattr(owner, name, value)


# By default the collector scans all young objects after every 700 new ones. In a collective each rank makes some 10
# objects that live until the last rank arrives. Scanning them in the meantime took a third of a run of 1,000 ranks,
# and nearly half of one of 100,000, as the older generations fill too: the only cost that grew with the ranks. So
# objects that exist before a run are frozen, and scans are rarer than collectives. But frozen objects count as old for
# good, and a finished run is a cycle: before the next run is built, everything is collected if memory has grown by
# half since the last full collection. Before the first run there is nothing to find, and scanning torch takes 0.3 s.
YOUNG_OBJECTS = 20_000  # new objects between two scans, at least
YOUNG_PER_RANK = 200  # and for each rank of the run
# Growth below which old runs are not worth a collection: blocks of memory, and bytes. Tensors are few blocks.
FEW_BLOCKS, FEW_NBYTES = 400_000, 256 << 20
# Blocks and bytes after the last full collection: a property of this process.
_after: list[tuple[int, int]] = []


@contextmanager
def rare_collections(ranks: int) -> Iterator[None]:
    """Let the collector scan less often while a run of so many ranks is built and executed."""
    before = gc.get_threshold()
    now = _memory()
    if before[0] and _after:
        (blocks, nbytes), (blocks_then, nbytes_then) = now, _after[0]
        if blocks > blocks_then * 3 // 2 + FEW_BLOCKS or nbytes > nbytes_then * 3 // 2 + FEW_NBYTES:
            gc.collect()
            now, _after[:] = _memory(), []
    if not _after:
        _after.append(now)
    if before[0]:
        gc.set_threshold(max(before[0], YOUNG_OBJECTS, YOUNG_PER_RANK * ranks), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _memory() -> tuple[int, int]:
    """Return the number of blocks that Python has allocated, and the bytes of this process: 0 if unknown."""
    # Counting objects, including frozen ones, takes longer than many runs.
    return sys.getallocatedblocks(), resident_B()


def resident_B() -> int:
    """Return the resident bytes of this process: 0 if unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        pages = 0
    return pages * resource.getpagesize()


@contextmanager
def watched_collections(collecting: Callable[[bool], None], ours: Callable[[], bool]) -> Iterator[None]:
    """Exempt objects that existed before the block from garbage collection within it.

    `collecting` is called at the begin (True) and at the end (False) of a collection in a thread that is `ours`.
    """

    # All ranks share one collector. It starts wherever an object is made, and runs the finalizers of any rank's
    # garbage there: in another rank, or in the middle of a call of the library. The kernel must know this, to refuse
    # their calls.
    def on_collection(phase: str, _counts: dict[str, int]) -> None:
        if ours():
            collecting(phase == "start")

    frozen = gc.get_freeze_count() > 0  # objects that someone else froze stay frozen
    if not frozen:
        gc.freeze()
    gc.callbacks.append(on_collection)
    try:
        yield
    finally:
        gc.callbacks.remove(on_collection)
        if not frozen:
            gc.unfreeze()


# torch holds grad mode, inference mode and autocast per *thread*. Greenlets share one thread, so a rank parked inside
# `no_grad` would silently switch gradients off for the next rank. The rule: whenever a task leaves the processor, the
# modes are reset to torch's defaults; a task with other modes gets them back when it returns. While a program keeps
# the defaults, this costs four look-ups per switch.
class AmidBackwardError(Exception):
    """A rank tried to switch away during torch's backward pass."""


def amid_backward() -> bool:
    """Return whether the calling thread is in torch's backward pass, in the frames of its engine."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "_C") and torch._C._current_graph_task_id() != -1


def suspend_torch_modes() -> Callable[[], object] | None:
    """Set torch's defaults; return a function that restores the current modes, or None when they were the defaults.

    Raises `AmidBackwardError` in a backward pass: torch's engine keeps its progress per thread, and it cannot be
    saved.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "is_autocast_enabled"):  # absent, or partly imported
        return None
    if torch._C._current_graph_task_id() != -1:
        raise AmidBackwardError
    if (
        torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and not torch._C._is_any_autocast_enabled()
    ):
        return None
    return _default_torch_modes(torch)


def _default_torch_modes(torch: Any) -> Callable[[], object]:
    """Enter guards that set the defaults; leaving them restores the earlier modes."""
    guards = ExitStack()
    if torch.is_inference_mode_enabled():
        guards.enter_context(torch.inference_mode(mode=False))
    # torch before 2.9 lacks the function.
    devices = getattr(torch._C, "_autocast_supported_devices", lambda: ("cpu", "cuda", "xpu", "mps"))
    for device in filter(torch.is_autocast_enabled, devices()):
        guards.enter_context(torch.autocast(device, enabled=False))
    guards.enter_context(torch.enable_grad())
    return guards.close


# torch's state per *process* is separate for each rank: it starts from the state outside the run and is swapped when
# another rank runs, like the state of torch's generator (`reproducibility.TorchStates`).
TorchSettings = tuple[Any, int, dict[str, Any]]


def torch_settings(torch: Any) -> TorchSettings:
    """Return the process's settings: default dtype, mode of deterministic algorithms, print options."""
    options = vars(torch._tensor_str.PRINT_OPTS).copy()
    return torch.get_default_dtype(), torch.get_deterministic_debug_mode(), options


def torch_settings_differ(torch: Any, known: TorchSettings) -> bool:
    """Return whether the process's settings differ from `known`."""
    return (
        torch.get_default_dtype() is not known[0]
        or torch.get_deterministic_debug_mode() != known[1]
        or vars(torch._tensor_str.PRINT_OPTS) != known[2]
    )


def set_torch_settings(torch: Any, wanted: TorchSettings, now: TorchSettings) -> None:
    """Apply the settings that differ."""
    if wanted[0] is not now[0]:
        torch.set_default_dtype(wanted[0])
    if wanted[1] != now[1]:
        torch.set_deterministic_debug_mode(wanted[1])
    vars(torch._tensor_str.PRINT_OPTS).update(wanted[2])
