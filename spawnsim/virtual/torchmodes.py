"""torch's thread-local modes, kept from leaking between greenlets.

torch holds grad mode, inference mode and autocast per *thread*; greenlets share one thread, so a rank parked
inside `no_grad` would silently switch gradients off for the next rank. The rule here: whenever a task leaves
the processor, the modes are torch's defaults; a task that had others set gets them back when it returns.

What torch keeps per *process* (default dtype, deterministic algorithms, print options) is each rank's own: it starts as
it stood outside, and is put in place when another rank comes to run.

This room knows torch's modes, imports torch never, and costs three look-ups while a program keeps the defaults.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

DEVICE = "cpu"


def suspend() -> Callable[[], object] | None:
    """Set torch's defaults; return what brings the current modes back, or None when they were the defaults."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "is_autocast_enabled"):  # absent, or half imported
        return None
    if (
        torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and not torch.is_autocast_enabled(DEVICE)
    ):
        return None
    return _defaults(torch)


def _defaults(torch: Any) -> Callable[[], object]:
    """Enter guards that set the defaults; leaving them restores what stood before."""
    guards = ExitStack()
    if torch.is_inference_mode_enabled():
        guards.enter_context(torch.inference_mode(mode=False))
    if torch.is_autocast_enabled(DEVICE):
        guards.enter_context(torch.autocast(DEVICE, enabled=False))
    guards.enter_context(torch.enable_grad())
    return guards.close


Settings = tuple[Any, int, dict[str, Any]]


def settings(torch: Any) -> Settings:
    """Return what the process has set: default dtype, mode of deterministic algorithms, print options."""
    options = vars(torch._tensor_str.PRINT_OPTS).copy()
    return torch.get_default_dtype(), torch.get_deterministic_debug_mode(), options


def set_again(torch: Any, wanted: Settings, now: Settings) -> None:
    """Set what differs."""
    if wanted[0] is not now[0]:
        torch.set_default_dtype(wanted[0])
    if wanted[1] != now[1]:
        torch.set_deterministic_debug_mode(wanted[1])
    vars(torch._tensor_str.PRINT_OPTS).update(wanted[2])
