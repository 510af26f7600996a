"""The GPUs in name of a rank with `--cuda-as-cpu`, their streams and events. This module does not import torch."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

GIB = 1 << 30
# Name, compute capability, multiprocessors and GiB of memory, from the maker's data sheets.
MODELS = {
    "a100": ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 80), "h100": ("NVIDIA H100 80GB HBM3", (9, 0), 132, 80),
    "h200": ("NVIDIA H200", (9, 0), 132, 141), "l40s": ("NVIDIA L40S", (8, 9), 142, 48),
}  # fmt: skip
UNNAMED = ("CPU as CUDA", *MODELS["h100"][1:])
OF_MAIN = 8  # devices of a main program that starts its ranks: usually one process for each


@dataclass
class Devices:
    """The devices of a rank's node.

    Args:
        count: how many there are: one for each rank of the node; without a platform, one for each rank.
        model: a key of `MODELS`; with any other text the device is named "CPU as CUDA".
        warn: receives a sentence about the run, which it may have received before.
        current: the number of the rank's current device.
        stream: the rank's current stream, once there is one.
    """

    count: int
    model: str
    warn: Callable[[str], None]
    current: int = 0
    stream: Any = None

    @property
    def facts(self) -> tuple[str, tuple[int, int], int, int]:
        """Name, compute capability, multiprocessors and GiB of memory."""
        return MODELS.get(self.model, UNNAMED)

    def index(self, device: Any) -> int:
        """Return a device's number: the current one's for None, "cuda", the CPU, and numbers below 0."""
        if isinstance(device, str):
            number = device.partition(":")[2]
            device = int(number) if number.isdigit() else None
        elif not isinstance(device, int):
            device = getattr(device, "index", None)
        found: int = self.current if device is None or device < 0 else device
        if found >= self.count:
            self.warn(
                f"CUDA as CPU: a rank used a device with a number above {self.count - 1}, which its node lacks: "
                "use LOCAL_RANK, or a --platform with more ranks on a node"
            )
        return found

    @contextmanager
    def of_main(self) -> Iterator[None]:
        """Let a program that runs outside of ranks have these devices while the block runs."""
        outside.append(self)
        try:
            yield
        finally:
            outside.remove(self)

    def set_device(self, device: Any) -> int:
        """Change the current device; return the earlier one's number."""
        before, self.current = self.current, self.index(device)
        return before

    def current_stream(self, device: Any = None) -> Any:
        """Return the rank's current stream."""
        if self.stream is None:
            self.stream = Stream()
        return self.stream

    def set_stream(self, stream: Any) -> None:
        """Change the current stream."""
        self.stream = stream


outside: list[Devices] = []  # of the main programs that run


class Stream:
    """A stream in name: its operations have ended when they return, in the order of the program."""

    stream_id = cuda_stream = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        torch: Any = sys.modules["torch"]
        self.device = torch.device("cuda", torch.cuda.current_device() if device is None else device)
        self.device_index, self.priority = self.device.index, priority
        self._outer: list[Any] = []

    def wait_stream(self, stream: Any) -> None:
        """Return: the stream's operations have ended."""

    def wait_event(self, event: Any) -> None:
        """Return: the event has happened."""

    def synchronize(self) -> None:
        """Return: all operations have ended."""

    def query(self) -> bool:
        """Return whether all operations have ended."""
        return True

    def is_capturing(self) -> bool:
        """Return whether operations are recorded for a graph: never."""
        return False

    def record_event(self, event: Any = None) -> Any:
        """Return an event that happens now."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        cuda: Any = sys.modules["torch.cuda"]
        self._outer.append(cuda.current_stream())
        cuda.set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.modules["torch.cuda"].set_stream(self._outer.pop())


class Event:
    """An event in name, at a virtual time."""

    def __init__(self, enable_timing: Any = False, *_: Any, **options: Any) -> None:
        # The first argument of `torch.Event` is a device.
        self._timed, self._at_s = options.get("enable_timing", enable_timing) is True, math.nan

    def record(self, stream: Any = None) -> None:
        """Set the event's time to the rank's virtual time."""
        self._at_s = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Return the virtual milliseconds from this event to a later one."""
        if not (self._timed and end._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if math.isnan(self._at_s + end._at_s):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end._at_s - self._at_s) * 1e3

    def query(self) -> bool:
        """Return whether the event has happened."""
        return True

    def wait(self, stream: Any = None) -> None:
        """Return: the event has happened."""

    def synchronize(self) -> None:
        """Return: the event has happened."""
