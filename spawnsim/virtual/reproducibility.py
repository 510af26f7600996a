"""What a program draws from its process: random generators, one set for each rank, and what no seed repeats.

Each rank has global random generators of Python, numpy and torch of its own, as a process has. They start from (seed,
rank, purpose). A generator that a rank makes without a seed takes its seed from a stream of the rank.
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
from spawnsim.virtual.engine.diagnosis import STANDARD, is_installed, is_program
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

_bits: Any = np.random.bit_generator  # whose stub lacks the source of seeds
_hidden: Any = np.random.mtrand
HEAD = 24  # bytes of torch's state that every draw changes: seed, how many are left, which is next
# Of torch's generator: its head, 624 words and their position, and normal numbers that are kept.
GENERATOR_NBYTES = 2624


TORCHS_OWN = 67280421310721  # the seed of torch's generator in a process that sets none


class Generators:
    """The generators of one rank, made when they are first used; torch's from a seed of its own, if one is given."""

    __slots__ = ("_fresh", "_given", "_gpus", "_numpy", "_python", "_seed", "_streams", "_torch", "settings")

    def __init__(self, streams: Streams, torch_seed: int | None = None) -> None:
        self._streams, self._given = streams, torch_seed
        self._python: random.Random | None = None
        self._numpy: np.random.RandomState | None = None
        self._seed = -1  # where torch's generator starts
        self._fresh = b""  # the head of its state before the first draw
        self._torch: Any = None  # torch's state; None before the first draw
        self._gpus: GPUStates | None = None  # likewise, on each GPU
        self.settings: TorchSettings | None = None  # torch's; None: those that stood outside of the run

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
        """Return a seed for a generator that is made without one."""
        return int.from_bytes(self._streams("program.entropy").bytes(-(-bits // 8)), "little") & (
            (1 << bits) - 1
        )

    def state(self) -> dict[str, Any]:
        """Return where the generators stand, of the rank that runs: None for those that were never used."""
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
        """Put the generators, of the rank that runs, where they stood."""
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
        """Keep torch's state, if this rank has changed it: another rank comes to run."""
        state = torch.default_generator.get_state()
        if self._torch is not None or _head(state) != self._fresh:
            self._torch = state

    def resume(self, torch: Any) -> None:
        """Put this rank's state of torch in place."""
        if self._torch is not None:
            torch.default_generator.set_state(self._torch)
            return
        first = self._seed < 0
        if first:
            self._seed = self._streams.seed(TORCH) if self._given is None else self._given
        torch.default_generator.manual_seed(self._seed)
        if first:
            self._fresh = _head(torch.default_generator.get_state())

    def suspend_gpus(self, torch: Any) -> None:
        """Keep torch's states on GPUs, if a program uses any: another rank comes to run."""
        if torch.cuda.default_generators:
            self._gpus = gpu_states(torch)

    def resume_gpus(self, torch: Any) -> None:
        """Put this rank's states on GPUs in place, which begin where `torch.manual_seed` puts them."""
        count = len(torch.cuda.default_generators)
        if count:
            set_gpu_states(torch, self._gpus or [(torch.default_generator.initial_seed(), 0)] * count)


def _head(state: Any) -> bytes:
    # The caller holds the state: read behind `get_state().data_ptr()` it was freed memory, and each rank kept 5 kB.
    return ctypes.string_at(state.data_ptr(), HEAD)


def _memory_of_generator(torch: Any) -> Any:
    """Return the memory in which torch's default generator lies, to be looked at: each draw changes something in it.

    None if that is not so: the layout of torch's objects is torch's own. So it is tried on another generator.
    """
    other = torch.Generator()
    memory = (ctypes.c_char * GENERATOR_NBYTES).from_address(other._cdata)
    # Of two normal numbers the second is kept for the next draw.
    for draw in (torch.rand, torch.randn, torch.randn):
        before = memory.raw
        draw(1, dtype=torch.float64, device="cpu", generator=other)
        if memory.raw == before:
            return None
    return (ctypes.c_char * GENERATOR_NBYTES).from_address(torch.default_generator._cdata)


def generators_of_caller() -> Generators | None:
    """Return the generators of the rank whose program runs; None outside virtual ranks."""
    task = current_task()
    # Not a rank's while it lets the work of many be carried out: to look at them would make them.
    return generators_of(task) if task is not None and task.kernel.current is task else None


def generators_of(task: Task) -> Generators:
    """Return the generators of a task's rank."""
    rank = task.kernel.owner.ranks[task.rank]
    if rank.generators is None:
        rank.generators = Generators(rank.streams, task.kernel.owner.torch_seed)
    found: Generators = rank.generators
    return found


# ----------------------------------------------------------------------------------------------------- torch


class TorchStates:
    """Swaps the state of torch's default generator, and its settings, when another rank comes to run."""

    # torch's default generator is an object in C++ that cannot be replaced, so its state is swapped: 1 to 3 µs a switch
    # of ranks, and only once torch is loaded. It is never loaded here: a run that does without it starts sooner. To ask
    # torch for the state is half of that. Most ranks have drawn nothing since they came to run, and have set nothing.

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._torch: Any = None
        self._here: Generators | None = None
        self._outside: Any = None
        self._of_torch: Any = None  # what finds torch's GPUs
        self._gpus_outside: GPUStates = []
        self._settings: Any = None  # torch's, that stood outside
        self._standing: Any = None  # torch's, since the rank that runs came to run
        self._memory: Any = None  # that of torch's generator, to be looked at, if it was found
        self._seen = b""  # what it held when the rank that runs came to run

    def enter(self, task: Task) -> None:
        """Put the state of a task's rank in place."""
        generators = generators_of(task)
        if generators is not self._here:
            if self._here is not None:
                self._leave(self._here)
            self._here = generators
            generators.resume(self._torch)
            if self._torch.cuda.default_generators:  # here, for ranks change all the time
                generators.resume_gpus(self._torch)
            self._set(generators.settings)
            if self._memory is not None:
                self._seen = self._memory.raw

    def _leave(self, generators: Generators) -> None:
        """Keep what the rank that has run until now has changed."""
        if self._memory is None or self._memory.raw != self._seen:
            generators.suspend(self._torch)
        if self._torch.cuda.default_generators:
            generators.suspend_gpus(self._torch)
        if torch_settings_differ(self._torch, self._standing):
            self._standing = now = torch_settings(self._torch)
            generators.settings = None if now == self._settings else now

    def _set(self, wanted: TorchSettings | None) -> None:
        """Set what a rank has set; None: what stood outside."""
        wanted = self._settings if wanted is None else wanted
        if wanted is not self._standing:
            set_torch_settings(self._torch, wanted, self._standing)
            self._standing = wanted

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let ranks come and go while the block runs, also if torch is first loaded by one of them."""
        with after_import("torch", self._loaded):
            try:
                yield
            finally:
                if self._torch is not None:
                    self._kernel.on_resume.remove(self.enter)
                    self._torch.default_generator.set_state(self._outside)
                    set_gpu_states(self._torch, self._gpus_outside)
                    if self._torch.cuda._lazy_init == self._find_gpus:
                        self._torch.cuda._lazy_init = self._of_torch
                    self._here = None
                    self._standing = torch_settings(self._torch)
                    self._set(None)

    def _loaded(self) -> None:
        """Begin, now that torch is there."""
        self._torch = sys.modules["torch"]
        self._outside = self._torch.default_generator.get_state()
        self._gpus_outside = gpu_states(self._torch)
        if not self._gpus_outside:
            self._of_torch, self._torch.cuda._lazy_init = self._torch.cuda._lazy_init, self._find_gpus
        self._settings = self._standing = torch_settings(self._torch)
        self._memory = _memory_of_generator(self._torch)
        self._kernel.on_resume.append(self.enter)
        task = current_task()
        if task is not None and task.kernel is self._kernel:
            self.enter(task)

    def _find_gpus(self) -> None:
        """Let torch find its GPUs, when a program first uses one: their generators stand then where this rank's do."""
        # What torch has put off until then are the seeds of all ranks, of which the last one counts.
        before = len(self._torch.cuda.default_generators)
        self._of_torch()
        if not before:
            self._gpus_outside = gpu_states(self._torch)
            if self._here is not None:
                self._here.resume_gpus(self._torch)


# ---------------------------------------------------------------------------------------- Python and numpy


class _CallersState(np.random.RandomState):
    """Stands for numpy's hidden generator, which libraries (scipy) take where a caller gives none."""

    def __getattribute__(self, name: str) -> Any:
        own = generators_of_caller()
        return getattr(_original if own is None else own.numpy, name)


_original: Any = _hidden._rand


def _route_generators(put: Put) -> None:
    # A function imported by name (`from random import shuffle`) is the module's at the time of the import. So it is not
    # enough to replace the functions of `random` and `numpy.random`: programs' modules that are loaded already are
    # looked through for them. Libraries are not; those take the hidden generator, which is replaced as well.
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


# The wall clock, the system's entropy and threads are what no seed repeats. The first use of each kind is noted, if the
# program itself is the user, and then the run does not call itself reproducible. What cannot be noticed:
# `datetime.now()`, the order of sets (the command line fixes PYTHONHASHSEED), numbers from `id()`, and when the
# collector runs finalizers.
def _notice_leaks(put: Put) -> None:
    put(os, "urandom", _noticed(os.urandom, "the system's entropy was read"))
    put(random, "_urandom", os.urandom)
    put(threading.Thread, "start", _noticed(threading.Thread.start, "a thread was started"))
    for name in (*CLOCKS, *(f"{name}_ns" for name in CLOCKS), *DATES):
        if isinstance(getattr(time, name), BuiltinFunctionType):  # else it is virtual
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
    """Return the file and line of a program that calls, maybe through the standard library; None: a library does.

    What a library reads for itself, and `logging` for its records, seldom comes back to the program, and a note about
    each would drown the one that matters. `private` packages are the program's own: they hold its state.
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
