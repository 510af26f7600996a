"""Process state that a program draws from: random generators, one set per rank, and sources that no seed reproduces.

Each rank has its own global random generators of Python, numpy and torch, as a process has. They start from (seed,
rank, purpose). A generator that a rank makes without a seed is seeded from a stream of the rank.
"""

from __future__ import annotations

import ctypes
import logging
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_stack
from types import BuiltinFunctionType, FrameType, ModuleType
from typing import Any

import numpy as np

from spawnsim.importing import after_import
from spawnsim.random import NUMPY, PYTHON, TORCH, GPUStates, Streams, gpu_states, set_gpu_states
from spawnsim.virtual.engine.kernel import Kernel, Task, current_task
from spawnsim.virtual.interpreter import (
    CLOCKS,
    Patches,
    Put,
    TorchSettings,
    set_torch_settings,
    torch_settings,
    torch_settings_differ,
)
from spawnsim.waits import STANDARD, is_installed, is_program

_bits: Any = np.random.bit_generator  # its stub lacks the source of seeds
_hidden: Any = np.random.mtrand
HEAD = 24  # bytes of torch's state that every draw changes: seed, remaining count, next index
# Of torch's generator: its head, 624 words and their position, and cached normal numbers.
GENERATOR_NBYTES = 2624


class Generators:
    """The generators of one rank, made when they are first used. Each rank starts differently, as processes do."""

    __slots__ = ("_fresh", "_gpus", "_numpy", "_python", "_seed", "_streams", "_torch", "settings")

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._python: random.Random | None = None
        self._numpy: np.random.RandomState | None = None
        self._seed = -1  # initial seed of torch's generator
        self._fresh = b""  # the head of its state before the first draw
        self._torch: Any = None  # torch's state; None before the first draw
        self._gpus: GPUStates | None = None  # torch's state on each GPU; None before the first draw
        self.settings: TorchSettings | None = None  # torch's; None: the settings outside the run

    @property
    def python(self) -> random.Random:
        """The generator behind the functions of `random`."""
        if self._python is None:
            self._python = random.Random(self._streams.seed(PYTHON))
        return self._python

    @property
    def numpy(self) -> np.random.RandomState:
        """The generator behind the functions of `numpy.random`."""
        if self._numpy is None:
            self._numpy = np.random.RandomState(self._streams.seed(NUMPY) & 0xFFFFFFFF)
        return self._numpy

    def entropy(self, bits: int) -> int:
        """Return a seed for a generator that the rank makes without one."""
        return int.from_bytes(self._streams("program.entropy").bytes(-(-bits // 8)), "little") & (
            (1 << bits) - 1
        )

    def state(self) -> dict[str, Any]:
        """Return the states of the running rank's generators: None for unused ones."""
        if "torch" in sys.modules:
            self.suspend(sys.modules["torch"])
            self.suspend_gpus(sys.modules["torch"])
        return {
            "python": None if self._python is None else self._python.getstate(),
            "numpy": None if self._numpy is None else self._numpy.get_state(),
            "torch": self._torch,
            "gpus": self._gpus,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the states of the running rank's generators."""
        if state["python"] is not None:
            self.python.setstate(state["python"])
        if state["numpy"] is not None:
            self.numpy.set_state(state["numpy"])
        if state["torch"] is not None:
            self._torch = state["torch"]
            self.resume(sys.modules["torch"])
        if state.get("gpus") is not None:
            self._gpus = [(seed, offset) for seed, offset in state["gpus"]]
            self.resume_gpus(sys.modules["torch"])

    def suspend(self, torch: Any) -> None:
        """Save torch's state before a switch to another rank, if this rank has changed it."""
        state = torch.default_generator.get_state()
        if self._torch is not None or _head(state) != self._fresh:
            self._torch = state

    def resume(self, torch: Any) -> None:
        """Restore this rank's state of torch."""
        if self._torch is not None:
            torch.default_generator.set_state(self._torch)
            return
        first = self._seed < 0
        if first:
            self._seed = self._streams.seed(TORCH)
        torch.default_generator.manual_seed(self._seed)
        if first:
            self._fresh = _head(torch.default_generator.get_state())

    def suspend_gpus(self, torch: Any) -> None:
        """Save torch's states on GPUs before a switch to another rank, if a program uses any GPU."""
        if torch.cuda.default_generators:
            self._gpus = gpu_states(torch)

    def resume_gpus(self, torch: Any) -> None:
        """Restore this rank's states on GPUs; they start from the state that `torch.manual_seed` sets."""
        count = len(torch.cuda.default_generators)
        if count:
            set_gpu_states(torch, self._gpus or [(torch.default_generator.initial_seed(), 0)] * count)


def _head(state: Any) -> bytes:
    # The caller holds the state: read through `get_state().data_ptr()`, it was freed memory, and each rank kept 5 kB.
    return ctypes.string_at(state.data_ptr(), HEAD)


def _memory_of_generator(torch: Any) -> Any:
    """Return the memory of torch's default generator, to be read directly: each draw changes some of its bytes.

    Return None if it does not: the layout of torch's objects is private, so the function tests it on another
    generator.
    """
    other = torch.Generator()
    memory = (ctypes.c_char * GENERATOR_NBYTES).from_address(other._cdata)
    # The second of two normal numbers is cached for the next draw.
    for draw in (torch.rand, torch.randn, torch.randn):
        before = memory.raw
        draw(1, dtype=torch.float64, device="cpu", generator=other)
        if memory.raw == before:
            return None
    return (ctypes.c_char * GENERATOR_NBYTES).from_address(torch.default_generator._cdata)


def generators_of_caller() -> Generators | None:
    """Return the generators of the rank whose program runs; None outside virtual ranks."""
    task = current_task()
    # Not while the rank only executes a batch of many ranks' steps: reading its generators would create them.
    return generators_of(task) if task is not None and task.kernel.current is task else None


def generators_of(task: Task) -> Generators:
    """Return the generators of a task's rank."""
    rank = task.kernel.owner.ranks[task.rank]
    if rank.generators is None:
        rank.generators = Generators(rank.streams)
    found: Generators = rank.generators
    return found


# ----------------------------------------------------------------------------------------------------- torch


class TorchStates:
    """Swaps the state of torch's default generator, and torch's settings, when another rank runs."""

    # torch's default generator is an object in C++ that cannot be replaced, so its state is swapped: 1 to 3 µs per
    # switch of ranks, and only once torch is loaded. This class never loads torch: a run without torch starts sooner.
    # Half of that time is the query of torch's state. Most ranks have drawn nothing and set nothing since the last
    # switch to them.

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._torch: Any = None
        self._here: Generators | None = None
        self._resumed = False  # whether a program outside all ranks has continued in the middle of the run
        self._outside: Any = None
        self._of_torch: Any = None  # torch's own function that finds the GPUs
        self._gpus_outside: GPUStates = []
        self._settings: Any = None  # torch's settings outside the run
        self._standing: Any = None  # torch's current settings, as last read or set here
        self._memory: Any = None  # memory of torch's generator, to be read directly, if it was found
        self._seen = b""  # its content at the last switch to the running rank

    def enter(self, task: Task) -> None:
        """Restore the state of a task's rank."""
        generators = generators_of(task)
        if generators is not self._here:
            if self._here is not None:
                self._leave(self._here)
            elif self._resumed:  # the program outside all ranks may have drawn
                self._outside = self._torch.default_generator.get_state()
                self._settings = self._standing = torch_settings(self._torch)
            self._here = generators
            generators.resume(self._torch)
            if self._torch.cuda.default_generators:  # tested here, since switches of ranks are frequent
                generators.resume_gpus(self._torch)
            self._set(generators.settings)
            if self._memory is not None:
                self._seen = self._memory.raw

    def leave(self) -> None:
        """Put the state outside the run in place: a program outside all ranks continues."""
        self._resumed = True
        if self._here is not None:
            self._leave(self._here)
            self._here = None
            self._torch.default_generator.set_state(self._outside)
            set_gpu_states(self._torch, self._gpus_outside)
            self._set(None)

    def _leave(self, generators: Generators) -> None:
        """Save the changes of the rank that has run until now."""
        if self._memory is None or self._memory.raw != self._seen:
            generators.suspend(self._torch)
        if self._torch.cuda.default_generators:
            generators.suspend_gpus(self._torch)
        if torch_settings_differ(self._torch, self._standing):
            self._standing = now = torch_settings(self._torch)
            generators.settings = None if now == self._settings else now

    def _set(self, wanted: TorchSettings | None) -> None:
        """Apply a rank's settings; None: the settings outside the run."""
        wanted = self._settings if wanted is None else wanted
        if wanted is not self._standing:
            set_torch_settings(self._torch, wanted, self._standing)
            self._standing = wanted

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap states while the block runs, also if a rank loads torch first."""
        with after_import("torch", self._loaded):
            try:
                yield
            finally:
                if self._torch is not None:
                    self._kernel.on_resume.remove(self.enter)
                    self._kernel.on_leave.remove(self.leave)
                    if self._here is not None or not self._resumed:
                        self._torch.default_generator.set_state(self._outside)
                    set_gpu_states(self._torch, self._gpus_outside)
                    if self._torch.cuda._lazy_init == self._find_gpus:
                        self._torch.cuda._lazy_init = self._of_torch
                    self._here = None
                    self._standing = torch_settings(self._torch)
                    self._set(None)

    def _loaded(self) -> None:
        """Start swapping once torch is loaded."""
        self._torch = sys.modules["torch"]
        self._outside = self._torch.default_generator.get_state()
        self._gpus_outside = gpu_states(self._torch)
        if not self._gpus_outside:
            self._of_torch, self._torch.cuda._lazy_init = self._torch.cuda._lazy_init, self._find_gpus
        self._settings = self._standing = torch_settings(self._torch)
        self._memory = _memory_of_generator(self._torch)
        self._kernel.on_resume.append(self.enter)
        self._kernel.on_leave.append(self.leave)
        task = current_task()
        if task is not None and task.kernel is self._kernel:
            self.enter(task)

    def _find_gpus(self) -> None:
        """Let torch find its GPUs when a program first uses one, and set their generators to this rank's states."""
        # torch has deferred the seeds of all ranks until then, and applies the last one.
        before = len(self._torch.cuda.default_generators)
        self._of_torch()
        if not before:
            self._gpus_outside = gpu_states(self._torch)
            if self._here is not None:
                self._here.resume_gpus(self._torch)


# ---------------------------------------------------------------------------------------- Python and numpy


class _CallersState(np.random.RandomState):
    """Stands for numpy's hidden generator, which libraries (scipy) use where a caller gives none."""

    def __getattribute__(self, name: str) -> Any:
        own = generators_of_caller()
        return getattr(_original if own is None else own.numpy, name)


_original: Any = _hidden._rand


def _route_generators(put: Put) -> None:
    # A function imported by name (`from random import shuffle`) is the function that the module had at the import. So
    # replacing the functions of `random` and `numpy.random` is not enough: the loaded modules of programs are searched
    # for them. Libraries are not; they use the hidden generator, which is replaced as well.
    routed = {id(each): _routed(each, "python", name) for name, each in _bound(random, random.Random)}
    for name, each in (*_bound(np.random, np.random.RandomState), ("seed", np.random.seed)):
        routed[id(each)] = _routed(each, "numpy", name)
    for name in ("ranf", "sample"):
        routed[id(getattr(np.random, name))] = _routed(getattr(np.random, name), "numpy", "random_sample")
    for module in (random, np.random, *_programs()):
        for name, value in list(vars(module).items()):
            if id(value) in routed:
                put(module, name, routed[id(value)])
    put(_hidden, "_rand", _CallersState(np.random.MT19937(0)))
    put(_bits, "randbits", _seeding(_bits.randbits))
    put(random.Random, "seed", _reseeding(random.Random.seed))


def _bound(module: Any, kind: type) -> list[tuple[str, Any]]:
    """Return the functions of a module that are methods of its hidden generator."""
    return [
        (name, each)
        for name, each in vars(module).items()
        if isinstance(getattr(each, "__self__", None), kind)
    ]


def _programs() -> list[ModuleType]:
    """Return the loaded modules that are neither Python's nor installed: they may have imported functions by name."""
    return [
        module
        for module in list(sys.modules.values())
        if isinstance(file := getattr(module, "__file__", None), str) and is_program(file)
    ]


def _routed(original: Any, which: str, method: str) -> Callable[..., Any]:
    def routed(*args: Any, **kwargs: Any) -> Any:
        own = generators_of_caller()
        if own is None:
            return original(*args, **kwargs)
        return getattr(getattr(own, which), method)(*args, **kwargs)

    routed.__name__, routed.__doc__ = getattr(original, "__name__", method), original.__doc__
    return routed


def _seeding(original: Callable[[int], int]) -> Callable[[int], int]:
    def randbits(bits: int) -> int:
        own = generators_of_caller()
        return original(bits) if own is None else own.entropy(bits)

    return randbits


def _reseeding(original: Callable[..., None]) -> Callable[..., None]:
    def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        own = generators_of_caller() if a is None else None
        original(self, a if own is None else own.entropy(256), version)

    seed.__doc__ = original.__doc__
    return seed


generators_per_rank = Patches(_route_generators).in_place


DATES = ("localtime", "gmtime", "ctime", "asctime", "strftime")


# No seed reproduces the wall clock, the system's entropy and threads. The first use of each kind by the program itself
# is recorded, and the run is then not reported as reproducible. Undetected: `datetime.now()`, the order of sets (the
# command line fixes PYTHONHASHSEED), numbers from `id()`, and when the collector runs finalizers.
def _notice_leaks(put: Put) -> None:
    put(os, "urandom", _noticed(os.urandom, "the system's entropy was read"))
    put(random, "_urandom", os.urandom)
    put(threading.Thread, "start", _noticed(threading.Thread.start, "a thread was started"))
    for name in (*CLOCKS, *(f"{name}_ns" for name in CLOCKS), *DATES):
        if isinstance(getattr(time, name), BuiltinFunctionType):  # otherwise it is virtual
            put(time, name, _noticed(getattr(time, name), f"the wall clock was read (time.{name})"))


def _noticed(original: Callable[..., Any], what: str) -> Callable[..., Any]:
    kind = what.partition(" (")[0]

    def noticed(*args: Any, **kwargs: Any) -> Any:
        task = current_task()
        if task is not None:
            found = task.kernel.owner.leaks
            if kind not in found:
                place = _program_line(sys._getframe(1), task.kernel.owner.private)
                if place is not None:
                    found[kind] = f"{what} by rank {task.rank} ({place})"
        return original(*args, **kwargs)

    noticed.__name__, noticed.__doc__ = getattr(original, "__name__", ""), original.__doc__
    return noticed


def _program_line(frame: FrameType | None, private: Set[str]) -> str | None:
    """Return file and line of the program that calls, possibly through the standard library; None if a library calls.

    Values that a library, or `logging`, reads for itself seldom reach the program, and a note about each would hide
    the important one. `private` packages count as the program: they hold its state.
    """
    for each, number in walk_stack(frame):
        file = each.f_code.co_filename
        own = str(each.f_globals.get("__name__")).partition(".")[0] in private
        if not own and (is_installed(file) or file == logging.__file__):
            return None
        if own or not file.startswith((*STANDARD, "<frozen")):
            return f"{Path(file).name}:{number}"
    return None


leaks_noticed = Patches(_notice_leaks).in_place
