"""The global random generators of Python, numpy and torch, one of each for every rank.

A rank's generators start from (seed, rank), as those of processes start from chance. Functions such as
`random.random` and `numpy.random.rand` go to the calling rank's own generator; numpy's singleton and torch's default
generator, which libraries reach in other ways, are swapped when a rank that has touched them comes to run.

This room knows generators. It loads torch never.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from spawnsim.random import Streams

_random: Any = np.random  # whose stub lacks the functions that put a bit generator in place
Who = Callable[[], "Generators | None"]  # the generators of the rank that runs


class Generators:
    """The three generators of one rank, made when they are first used."""

    __slots__ = ("_bits", "_numpy", "_opened", "_python", "_streams", "_torch")

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._python: random.Random | None = None
        self._numpy: np.random.RandomState | None = None
        self._bits: Any = None
        self._torch: Any = None
        self._opened = 0

    @property
    def python(self) -> random.Random:
        """The generator behind the functions of `random`."""
        if self._python is None:
            self._python = random.Random(self._streams.seed("program.random"))
        return self._python

    @property
    def numpy(self) -> np.random.RandomState:
        """The generator behind the functions of `numpy.random`."""
        if self._numpy is None:
            self._bits = np.random.MT19937()
            self._numpy = np.random.RandomState(self._bits)
            self._numpy.seed(self._streams.seed("program.numpy") & 0xFFFFFFFF)
            _random.set_bit_generator(self._bits)
        return self._numpy

    def default_rng(self, seed: Any = None) -> np.random.Generator:
        """Return numpy's new generator; without a seed, one of this rank's streams."""
        if seed is None:
            self._opened += 1
            seed = self._streams.seed(f"program.default_rng.{self._opened}")
        return _default_rng(seed)

    def suspend(self) -> None:
        """Keep torch's state: another rank comes to run."""
        torch: Any = sys.modules.get("torch")
        if torch is not None and hasattr(torch, "default_generator"):
            self._torch = torch.default_generator.get_state()

    def resume(self) -> None:
        """Put this rank's states in place."""
        if self._bits is not None:
            _random.set_bit_generator(self._bits)
        torch: Any = sys.modules.get("torch")
        if torch is None or not hasattr(torch, "default_generator"):
            return
        if self._torch is None:
            torch.default_generator.manual_seed(self._streams.seed("program.torch"))
        else:
            torch.default_generator.set_state(self._torch)


_default_rng = np.random.default_rng


@contextmanager
def per_rank(who: Who) -> Iterator[None]:
    """Let the functions of `random` and `numpy.random` mean the calling rank's generators while the block runs."""
    patches = [
        *((random, name, _routed(name, each, who, "python")) for name, each in _bound(random, random.Random)),
        *((np.random, name, _routed(name, each, who, "numpy")) for name, each in _singletons()),
    ]
    patches.append((np.random, "default_rng", _opening(who)))
    before = [(module, name, getattr(module, name)) for module, name, _ in patches]
    bits, torch_state = _random.get_bit_generator(), _torch_state()
    for module, name, function in patches:
        setattr(module, name, function)
    try:
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)
        _random.set_bit_generator(bits)
        if torch_state is not None:
            sys.modules["torch"].default_generator.set_state(torch_state)


def _torch_state() -> Any:
    torch: Any = sys.modules.get("torch")
    return None if torch is None else torch.default_generator.get_state()


def _bound(module: Any, kind: type) -> list[tuple[str, Any]]:
    """Return the functions of a module that are methods of its hidden generator."""
    return [
        (name, each)
        for name, each in vars(module).items()
        if isinstance(getattr(each, "__self__", None), kind)
    ]


def _singletons() -> list[tuple[str, Any]]:
    own = [*_bound(np.random, np.random.RandomState), ("seed", np.random.seed)]
    return own + [(name, getattr(np.random, name)) for name in ("ranf", "sample")]


def _routed(name: str, original: Any, who: Who, which: str) -> Callable[..., Any]:
    method = (
        {"ranf": "random_sample", "sample": "random_sample"}.get(name, name) if which == "numpy" else name
    )

    def routed(*args: Any, **kwargs: Any) -> Any:
        own = who()
        if own is None:
            return original(*args, **kwargs)
        return getattr(getattr(own, which), method)(*args, **kwargs)

    routed.__name__, routed.__doc__ = name, original.__doc__
    return routed


def _opening(who: Who) -> Callable[..., Any]:
    def default_rng(seed: Any = None) -> np.random.Generator:
        own = who()
        return _default_rng(seed) if own is None else own.default_rng(seed)

    return default_rng
