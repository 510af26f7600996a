"""torch's profiler on virtual ranks: each rank's profile has its own events, in virtual time.

Kineto, which both of torch's profilers use, has one trace per process. So on a virtual rank a dispatch mode replaces
the profiler's C++ half: it records each operation, forward and backward, and the ranges of `record_function`. The
process groups record their communication, by gloo's names. torch's Python half makes tables and averages of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.utils._python_dispatch import TorchDispatchMode

from spawnsim.errors import UnsupportedError, UsageError
from spawnsim.virtual.accounting import PENDING
from spawnsim.virtual.engine.kernel import Task, current_task
from spawnsim.virtual.interpreter import Put

PROFILES = "torch.profiles"
OPERATION, RANGE, COMMUNICATION = "cpu_op", "user_annotation", "communication"
_ENTER, _EXIT = "profiler::_record_function_enter_new", "profiler::_record_function_exit"
# Further attributes of Kineto events that torch's Python half reads, and their values.
ABSENT: dict[str, Any] = {
    "overload_name": "", "device_index": -1, "device_resource_id": 0, "linked_correlation_id": 0, "external_id": 0,
    "concrete_inputs": (), "kwinputs": {}, "device_type": DeviceType.CPU, "fwd_thread_id": 0,
    "stack": (), "scope": 0, "sequence_nr": -1, "flops": 0, "is_python_function": False, "is_hidden_event": False,
    "metadata_json": "", "extra_meta": {}, "flow_id": 0, "flow_type": 0, "flow_start": False,
    "structured_input_shapes": (), "structured_input_strides": (), "python_id": -1, "python_parent_id": -1,
    "python_module_id": -1, "nbytes": 0, "cuda_elapsed_us": -1, "privateuse1_elapsed_us": -1,
}  # fmt: skip


@dataclass(slots=True, eq=False)
class ProfiledEvent:
    """One operation, range or communication, in virtual time; `dtypes` has one entry per input shape, or is empty."""

    title: str
    kind: str
    begin_s: float
    input_shapes: Sequence[list[int]] = ()
    input_dtypes: Sequence[str] = ()
    end_s: float | None = None
    number: int = 0

    def __getattr__(self, name: str) -> Callable[[], Any]:
        found = _ANSWERS.get(name)
        if found is not None:
            return lambda: found(self)
        if name not in ABSENT:
            raise AttributeError(name)
        return lambda: ABSENT[name]


def _nanoseconds(seconds: float | None) -> int:
    return round((seconds or 0.0) * 1e9)


# By the names of Kineto's events, all methods.
_ANSWERS: dict[str, Callable[[ProfiledEvent], Any]] = {
    "name": lambda event: event.title,
    "start_ns": lambda event: _nanoseconds(event.begin_s),
    "end_ns": lambda event: _nanoseconds(event.end_s),
    "duration_ns": lambda event: _nanoseconds(event.end_s) - _nanoseconds(event.begin_s),
    "correlation_id": lambda event: event.number,
    "shapes": lambda event: list(event.input_shapes),
    "dtypes": lambda event: list(event.input_dtypes),
    "is_async": lambda event: event.kind == COMMUNICATION,
    "is_user_annotation": lambda event: event.kind != OPERATION,
    "activity_type": lambda event: OPERATION if event.kind == OPERATION else RANGE,
    "start_thread_id": lambda event: 1 + (event.kind == COMMUNICATION),
    "end_thread_id": lambda event: 1 + (event.kind == COMMUNICATION),
}


@dataclass
class ProfileResult:
    """The result of a profile, in the form that torch's Python half reads."""

    rank: int
    begin_s: float
    found: list[ProfiledEvent]
    metadata: dict[str, Any] = field(default_factory=dict)

    def events(self) -> list[Any]:
        """Return the events, in the order of their begins."""
        return self.found

    def trace_start_ns(self) -> int:
        return _nanoseconds(self.begin_s)

    def experimental_event_tree(self) -> Any:
        """Raise an error: only Kineto has this tree."""
        raise UnsupportedError(
            "virtual ranks have no tree of the profiler's C++ events: use events() or key_averages()"
        )

    def save(self, path: str) -> None:
        """Write a trace that Chrome, Perfetto and `spawnsim import kineto` read."""
        rows = [
            {
                "ph": "X", "cat": event.activity_type(), "name": event.title, "pid": self.rank,
                "tid": event.start_thread_id(), "ts": event.begin_s * 1e6,
                "dur": ((event.end_s or 0.0) - event.begin_s) * 1e6,
                "args": {"External id": event.number, "Input Dims": event.shapes(), "Input type": event.dtypes()},
            }
            for event in self.found
        ]  # fmt: skip
        lanes = [(1, "program"), (2, "communication")]
        names: list[Any] = [
            {"ph": "M", "name": "thread_name", "pid": self.rank, "tid": lane, "args": {"name": name}}
            for lane, name in lanes
        ]
        trace = {"schemaVersion": 1, **self.metadata, "displayTimeUnit": "ms", "traceEvents": names + rows}
        Path(path).write_text(json.dumps(trace), encoding="utf-8")


class Profile(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One rank's active profile. While it is entered, it records the thread's operations."""

    def __init__(self, task: Task) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._task = task
        self._pending = task.kernel.owner.attachments.get(PENDING)
        self._open: list[ProfiledEvent] = []
        self._begun: list[ProfiledEvent] = []
        self.begin_s = self._now()
        self.metadata: dict[str, Any] = {}

    def _now(self) -> float:
        """Return the rank's time, including the time of operations that its next call will pay."""
        return self._task.clock + (self._pending(self._task) if self._pending is not None else 0.0)

    def begun(
        self, title: str, kind: str, shapes: Sequence[list[int]] = (), dtypes: Sequence[str] = ()
    ) -> ProfiledEvent:  # fmt: skip
        """Record that an event begins now."""
        event = ProfiledEvent(title, kind, self._now(), shapes, dtypes, number=len(self._begun) + 1)
        self._begun.append(event)
        return event

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Execute an operation, and record it."""
        name, kwargs = func._schema.name, kwargs or {}
        if name == _ENTER:
            self._open.append(self.begun(args[0], RANGE))
        elif name == _EXIT and self._open:
            self._open.pop().end_s = self._now()
        if name.startswith("profiler::"):
            return func(*args, **kwargs)
        # An argument that is not a tensor counts as one without a shape.
        tensors = [isinstance(each, torch.Tensor) for each in args]
        shapes = [list(each.shape) if is_one else [] for each, is_one in zip(args, tensors, strict=True)]
        dtypes = [str(each.dtype) if is_one else "" for each, is_one in zip(args, tensors, strict=True)]
        event = self.begun(name, OPERATION, shapes, dtypes)
        try:
            return func(*args, **kwargs)
        finally:
            event.end_s = self._now()

    def result(self) -> ProfileResult:
        """Return the events found; open ranges end now, and incomplete communication is omitted."""
        for event in self._open:
            event.end_s = self._now()
        found = [event for event in self._begun if event.end_s is not None]
        return ProfileResult(
            self._task.rank, self.begin_s, sorted(found, key=lambda each: each.begin_s), self.metadata
        )


def _under_way() -> dict[Task | None, Profile]:
    """Return the active profiles of the calling rank, by the thread that profiles."""
    task = current_task()
    assert task is not None
    found: dict[Task | None, Profile] = task.kernel.owner.ranks[task.rank].attachments.setdefault(
        PROFILES, {}
    )
    return found


def communicating(title: str, shapes: Sequence[list[int]]) -> ProfiledEvent | None:
    """Record that the calling rank's group begins an operation, if the rank profiles; return the open event."""
    profile = _under_way().get(current_task())
    return None if profile is None else profile.begun(title, COMMUNICATION, shapes)


def _enable(*_: Any) -> None:
    task, under_way = current_task(), _under_way()
    if task in under_way:
        raise UsageError("this thread is already profiling: end that profile before the next one begins")
    assert task is not None
    profile = under_way[task] = Profile(task)
    profile.__enter__()  # type: ignore[no-untyped-call]


def _disable() -> ProfileResult:
    profile = _under_way().pop(current_task(), None)
    if profile is None:
        raise UsageError("no profile has begun in this thread")
    profile.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    return profile.result()


def _add_metadata(key: str, value: str) -> None:
    profile = _under_way().get(current_task())
    if profile is not None:
        profile.metadata[key] = json.loads(value)


def _on_ranks(original: Callable[..., Any], virtual: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (original if current_task() is None else virtual)(*args, **kwargs)

    return call


def install(put: Put) -> None:
    """Put virtual ranks' own profiler under torch's Python half."""
    profiler: Any = import_module("torch.autograd.profiler")
    for module, name, virtual in (
        (profiler, "_prepare_profiler", lambda *_, **__: None),
        (profiler, "_enable_profiler", _enable),
        (profiler, "_disable_profiler", _disable),
        (profiler, "_kineto_step", lambda: None),
        (torch.autograd, "_add_metadata_json", _add_metadata),
    ):
        put(module, name, _on_ranks(getattr(module, name), virtual))
