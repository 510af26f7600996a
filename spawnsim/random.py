"""Random streams keyed by (seed, rank, purpose).

A stream depends on its key alone (numpy's `SeedSequence`): adding a rank, a fault or a policy does not
shift the draws of others.
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

WORLD = -1  # the rank whose streams belong to all ranks: faults, the platform, a data set that they share

# The streams in which the global generators of a rank's process start.
PYTHON, NUMPY, TORCH = "program.random", "program.numpy", "program.torch"


def _word(purpose: str) -> int:
    """Return a 64-bit number for a purpose; `hash()` would change from process to process."""
    return int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), "little")


def sequence(seed: int, rank: int, purpose: str) -> np.random.SeedSequence:
    """Return the seed sequence of one stream. `rank` may be `WORLD`."""
    if seed < 0:
        raise ParameterError(f"seed={seed}: give an integer of at least 0")
    # The rank is moved by one, since the world's is -1 and keys are unsigned.
    return np.random.SeedSequence(seed, spawn_key=(rank + 1, _word(purpose)))


def generator(seed: int, rank: int, purpose: str) -> np.random.Generator:
    """Return a fresh generator at the start of one stream."""
    return np.random.Generator(np.random.PCG64(sequence(seed, rank, purpose)))


class Streams:
    """All the streams of one rank: `comm.rng`.

    `rng("donors")` is the generator of that purpose; asking again goes on where it stopped. Used as a plain
    generator (`rng.normal()`), it is the stream of the purpose "main".

    >>> rng = Streams(seed=7, rank=3)
    >>> rng("donors") is rng("donors")
    True
    """

    __slots__ = ("__weakref__", "_open", "key")

    def __init__(self, seed: int, rank: int) -> None:
        self.key = (seed, rank)
        self._open: dict[str, np.random.Generator] | None = (
            None  # a rank of 100,000 that draws nothing stays small
        )

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

    torch's is seeded when torch is loaded, which may be in the middle of the block.
    """
    random.seed(streams.seed(PYTHON))
    np.random.seed(streams.seed(NUMPY) & 0xFFFFFFFF)
    with after_import("torch", lambda: sys.modules["torch"].manual_seed(streams.seed(TORCH))):
        yield
