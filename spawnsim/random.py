"""Random streams keyed by (seed, rank, purpose).

A stream depends on its key alone (numpy's `SeedSequence`): adding a rank, a fault or a policy does not shift other
draws.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from spawnsim.errors import ParameterError
from spawnsim.importing import after_import

WORLD = -1  # the rank of streams that belong to all ranks: faults, the platform, a shared data set

# The streams in which the global generators of a rank's process start.
PYTHON, NUMPY, TORCH = "program.random", "program.numpy", "program.torch"

GPUStates = list[tuple[int, int]]
"""Seed and offset of torch's generator on each GPU."""


def _word(purpose: str) -> int:
    """Return a 64-bit number for a purpose; `hash()` would change from process to process."""
    return int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), "little")


def sequence(seed: int, rank: int, purpose: str) -> np.random.SeedSequence:
    """Return the seed sequence of one stream. `rank` may be `WORLD`."""
    if seed < 0:
        raise ParameterError(f"seed={seed}: give an integer of at least 0")
    # The rank is shifted by one, since the world's is -1 and keys are unsigned.
    return np.random.SeedSequence(seed, spawn_key=(rank + 1, _word(purpose)))


def generator(seed: int, rank: int, purpose: str) -> np.random.Generator:
    """Return a fresh generator at the start of one stream."""
    return np.random.Generator(np.random.PCG64(sequence(seed, rank, purpose)))


def generators(seed: int, ranks: int, purpose: str) -> Iterator[np.random.Generator]:
    """Yield the streams of ranks 0 to `ranks` - 1, each as `generator` returns it, at a tenth of the cost.

    It is one object throughout: draw from it before requesting the next one.
    """
    # A seed sequence is 26 multiplications of 32-bit words, a generator a few of 128 bits; creating the objects takes
    # most of the 20 µs. So the words are mixed for many ranks at once, and one generator is set to each state.
    bits = np.random.PCG64(0)
    stream, state = np.random.Generator(bits), bits.state
    for first in range(0, ranks, _AT_ONCE):
        for high, low, inc_high, inc_low in _seeds(
            seed, np.arange(first, min(first + _AT_ONCE, ranks)), purpose
        ):
            inc = (((inc_high << 64 | inc_low) << 1) | 1) & _MASK
            begun = ((inc + (high << 64 | low)) * _PCG_MULTIPLIER + inc) & _MASK
            state["state"] = {"state": begun, "inc": inc}
            bits.state = state
            yield stream


_AT_ONCE = 1 << 15
_MASK = (1 << 128) - 1
_PCG_MULTIPLIER = 0x2360ED051FC65DA44385DF649FCCF645


def _seeds(seed: int, ranks: np.ndarray[Any, Any], purpose: str) -> list[list[int]]:
    """Return `sequence(seed, rank, purpose).generate_state(4, uint64)` of many ranks: numpy's algorithm on columns."""
    key = [_words(seed), _words(_word(purpose))]
    words: list[Any] = [*key[0], *[0] * (4 - len(key[0])), (ranks + 1).astype(np.uint32), *key[1]]
    entropy = [np.broadcast_to(np.asarray(word, np.uint32), len(ranks)) for word in words]
    constant = 0x43B0D7E5

    def hashed(value: Any) -> Any:
        nonlocal constant
        value = value ^ np.uint32(constant)
        constant = constant * 0x931E8875 & 0xFFFFFFFF
        value = value * np.uint32(constant)
        return value ^ value >> np.uint32(16)

    def mixed(one: Any, other: Any) -> Any:
        found = np.uint32(0xCA01F9DD) * one - np.uint32(0x4973F715) * other
        return found ^ found >> np.uint32(16)

    pool = [hashed(word) for word in entropy[:4]]
    for source in range(4):
        for place in range(4):
            if source != place:
                pool[place] = mixed(pool[place], hashed(pool[source]))
    for word in entropy[4:]:
        pool = [mixed(each, hashed(word)) for each in pool]
    drawn, constant = np.empty((len(ranks), 8), np.uint32), 0x8B51F9DD
    for place in range(8):
        value = pool[place % 4] ^ np.uint32(constant)
        constant = constant * 0x58F38DED & 0xFFFFFFFF
        value = value * np.uint32(constant)
        drawn[:, place] = value ^ value >> np.uint32(16)
    seeds: list[list[int]] = drawn.astype("<u4").view("<u8").tolist()
    return seeds


def _words(number: int) -> list[int]:
    return [number >> shift & 0xFFFFFFFF for shift in range(0, max(number.bit_length(), 1), 32)]


class Streams:
    """All the streams of one rank: `comm.rng`.

    `rng("donors")` is the generator of that purpose; a second call continues where it stopped. Used as a plain
    generator (`rng.normal()`), it is the stream of the purpose "main".

    >>> rng = Streams(seed=7, rank=3)
    >>> rng("donors") is rng("donors")
    True
    """

    __slots__ = ("__weakref__", "_open", "key")

    def __init__(self, seed: int, rank: int) -> None:
        self.key = (seed, rank)
        # None until the first draw: most of 100,000 ranks draw nothing.
        self._open: dict[str, np.random.Generator] | None = None

    def __call__(self, purpose: str) -> np.random.Generator:
        """Return the (continuing) generator of a purpose."""
        if self._open is None:
            self._open = {}
        stream = self._open.get(purpose)
        if stream is None:
            stream = self._open[purpose] = generator(*self.key, purpose)
        return stream

    def seed(self, purpose: str) -> int:
        """Return a 63-bit integer seed for generators of other libraries, such as `torch.Generator`."""
        return int(sequence(*self.key, purpose).generate_state(1, np.uint64)[0] >> np.uint64(1))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self("main"), name)

    def __repr__(self) -> str:
        return f"Streams(seed={self.key[0]}, rank={self.key[1]})"


@contextmanager
def seeded(streams: Streams) -> Iterator[None]:
    """Start this process's global generators (`random`, `numpy.random`, torch) where a virtual rank's start.

    torch's generator is seeded when torch is loaded, possibly within the block.
    """
    random.seed(streams.seed(PYTHON))
    np.random.seed(streams.seed(NUMPY) & 0xFFFFFFFF)
    with after_import("torch", lambda: sys.modules["torch"].manual_seed(streams.seed(TORCH))):
        yield


GlobalStates = tuple[Any, Any, Any]
"""States of the global generators of Python, numpy and torch."""


def global_states(torch: Any) -> GlobalStates:
    """Return the states of this process's global generators, except GPUs' generators."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_global_states(torch: Any, states: GlobalStates) -> None:
    """Set this process's global generators, except GPUs' generators."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def gpu_states(torch: Any) -> GPUStates:
    """Return the states of torch's generators on GPUs; empty before the program uses a GPU."""
    return [(each.initial_seed(), each.get_offset()) for each in torch.cuda.default_generators]


def set_gpu_states(torch: Any, states: GPUStates) -> None:
    """Set torch's generators on GPUs, as far as there are states and GPUs."""
    for each, (seed, offset) in zip(torch.cuda.default_generators, states, strict=False):
        each.manual_seed(seed)
        each.set_offset(offset)
