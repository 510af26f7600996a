"""The one Python interpreter that all virtual ranks share: patches for the time of runs, the collector, torch's modes.

*Patches* of modules last as long as any run does: of several runs at once, or one inside another, the first makes them
and the last undoes them. Each replacement finds out itself whether a virtual rank calls it.

*The collector of cycles* is made to run seldom, and watched while it works.

*torch's modes* are kept from leaking between greenlets, and torch's settings from leaking between ranks. torch is never
imported here.
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

Put = Callable[[Any, str, Any], None]  # put(owner, name, value), until the end
# Of `time`; each has a twin in _ns.
CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")


class Patches:
    """A set of changes: `install(put)` makes them."""

    def __init__(self, install: Callable[[Put], None]) -> None:
        self._install, self._lock, self._runs, self._undo = install, threading.Lock(), 0, ExitStack()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Keep the changes while the block runs."""
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
        before = vars(owner)[name] if name in vars(owner) else getattr(owner, name)  # a class method as it is
        self._undo.callback(setattr, owner, name, before)
        setattr(owner, name, value)


# By default the collector looks through all young objects after every 700 new ones. In a collective each rank makes
# some 10 that live on until the last rank has come. Looking through them meanwhile took a third of a run of 1,000
# ranks, and nearly half of one of 100,000, as the older generations fill too: the one cost that grew with the ranks. So
# what is there before a run is frozen, and looks are rarer than a collective is long. But what was frozen counts as old
# for good, and a run that is over is a cycle: before the next one is built, all is collected if memory has grown by
# half since the last time. Before the first one there is nothing to find, and to look through torch takes 0.3 s.
YOUNG_OBJECTS = 20_000  # new objects between two looks, at least
YOUNG_PER_RANK = 200  # and for each rank of the run
# Below which growth old runs are not worth a collection: blocks of memory, and bytes. Tensors are few blocks.
FEW_BLOCKS, FEW_NBYTES = 400_000, 256 << 20
# Blocks and bytes after the last whole collection: a fact about this process.
_after: list[tuple[int, int]] = []


@contextmanager
def rare_collections(ranks: int) -> Iterator[None]:
    """Let the collector look less often while a run of so many ranks is built and goes on."""
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
    """Return how many blocks Python has handed out, and the bytes that this process has: 0 where nothing tells it."""
    # To count objects, those that are frozen too, takes longer than many a run.
    return sys.getallocatedblocks(), resident_B()


def resident_B() -> int:
    """Return the bytes of memory that this process has: 0 where nothing tells it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        pages = 0
    return pages * resource.getpagesize()


@contextmanager
def watched_collections(collecting: Callable[[bool], None], ours: Callable[[], bool]) -> Iterator[None]:
    """Let the collector leave alone, within the block, what was there before.

    `collecting` is called when it begins (True) and when it is done (False) in a thread that is `ours`.
    """

    # All ranks have one collector. It starts wherever an object is made, and runs the finalizers of any rank's garbage
    # there: in another rank, or in the middle of a call of the library. The kernel must know, to refuse their calls.
    def tell(phase: str, _counts: dict[str, int]) -> None:
        if ours():
            collecting(phase == "start")

    frozen = gc.get_freeze_count() > 0  # somebody else's are not ours to thaw
    if not frozen:
        gc.freeze()
    gc.callbacks.append(tell)
    try:
        yield
    finally:
        gc.callbacks.remove(tell)
        if not frozen:
            gc.unfreeze()


# torch holds grad mode, inference mode and autocast per *thread*. Greenlets share one thread, so a rank parked inside
# `no_grad` would silently switch gradients off for the next rank. The rule: whenever a task leaves the processor, the
# modes are torch's defaults; a task that had others set gets them back when it returns. While a program keeps the
# defaults, this costs four look-ups a switch.
class AmidBackwardError(Exception):
    """A rank would leave amid torch's backward pass."""


def amid_backward() -> bool:
    """Return whether the calling thread is amid torch's backward pass, in the frames of its engine."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "_C") and torch._C._current_graph_task_id() != -1


def suspend_torch_modes() -> Callable[[], object] | None:
    """Set torch's defaults; return what brings the current modes back, or None when they were the defaults.

    Raises `AmidBackwardError` in a backward pass: torch's engine keeps per thread what it is at, and nobody can put
    that aside.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "is_autocast_enabled"):  # absent, or half imported
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
    """Enter guards that set the defaults; leaving them restores what stood before."""
    guards = ExitStack()
    if torch.is_inference_mode_enabled():
        guards.enter_context(torch.inference_mode(mode=False))
    # Not told by torch before 2.9.
    devices = getattr(torch._C, "_autocast_supported_devices", lambda: ("cpu", "cuda", "xpu", "mps"))
    for device in filter(torch.is_autocast_enabled, devices()):
        guards.enter_context(torch.autocast(device, enabled=False))
    guards.enter_context(torch.enable_grad())
    return guards.close


# What torch keeps per *process* is each rank's own: it starts as it was outside the run, and is swapped when another
# rank comes to run, as the state of torch's generator is (`reproducibility.TorchStates`).
TorchSettings = tuple[Any, int, dict[str, Any]]


def torch_settings(torch: Any) -> TorchSettings:
    """Return what the process has set: default dtype, mode of deterministic algorithms, print options."""
    options = vars(torch._tensor_str.PRINT_OPTS).copy()
    return torch.get_default_dtype(), torch.get_deterministic_debug_mode(), options


def torch_settings_differ(torch: Any, known: TorchSettings) -> bool:
    """Whether the process has set other than what is known."""
    return (
        torch.get_default_dtype() is not known[0]
        or torch.get_deterministic_debug_mode() != known[1]
        or vars(torch._tensor_str.PRINT_OPTS) != known[2]
    )


def set_torch_settings(torch: Any, wanted: TorchSettings, now: TorchSettings) -> None:
    """Set what differs."""
    if wanted[0] is not now[0]:
        torch.set_default_dtype(wanted[0])
    if wanted[1] != now[1]:
        torch.set_deterministic_debug_mode(wanted[1])
    vars(torch._tensor_str.PRINT_OPTS).update(wanted[2])
