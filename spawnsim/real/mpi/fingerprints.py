"""Fingerprints of collectives: before each one, all ranks check that they are in the same one.

Both MPIs accept a `Bcast` against an `Allreduce`, and SUM against MAX, without a word. One small `Allreduce` of a hash
finds that; only on a mismatch the texts are exchanged. Knows what is comparable between ranks of a call.
"""

from __future__ import annotations

import hashlib
import inspect
from functools import lru_cache
from typing import Any

import numpy as np
from mpi4py import MPI

from spawnsim.errors import MismatchError

SAME_BUFFER = {
    "Allreduce": 1, "Reduce": 0, "Bcast": 0, "Allgather": 0, "Alltoall": 0, "Reduce_scatter_block": 0, "Scan": 0,
    "Exscan": 0,
}  # fmt: skip
"""Which argument must have the same dtype and count on all ranks."""


@lru_cache(maxsize=64)
def _parameters(operation: str) -> list[str]:
    found = inspect.signature(getattr(MPI.Intracomm, operation)).parameters
    return [name for name in found if name != "self"]


def describe(operation: str, sequence: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return what must be equal on all ranks: operation, number, root, op, dtype and count."""
    given = {**dict(zip(_parameters(operation), args, strict=False)), **kwargs}
    words = [f"{operation} number {sequence}"]
    if "root" in _parameters(operation):
        words.append(f"root {given.get('root', 0)}")
    if "op" in _parameters(operation):
        op = given.get("op", MPI.SUM)
        reduced = op.__reduce__() if isinstance(op, MPI.Op) else "a function"
        words.append(reduced if isinstance(reduced, str) else "a user's op")
    if operation in SAME_BUFFER:
        words.append(_buffer([*args, *kwargs.values()], SAME_BUFFER[operation]))
    return ", ".join(words)


def _buffer(buffers: list[Any], which: int) -> str:
    spec: Any = buffers[which] if which < len(buffers) else None
    if spec is MPI.IN_PLACE or spec is None:
        spec = buffers[1] if len(buffers) > 1 else None
    if isinstance(spec, (list, tuple)) and spec:
        spec = spec[0]
    if hasattr(spec, "dtype") and hasattr(spec, "shape"):
        return f"{str(spec.dtype).removeprefix('torch.')} × {int(np.prod(tuple(spec.shape)))}"
    return "" if spec is None else f"{memoryview(spec).nbytes} bytes"


def check(
    raw: MPI.Intracomm, operation: str, sequence: int, args: tuple[Any, ...], *, kwargs: dict[str, Any]
) -> None:
    """Raise MismatchError, on all ranks, unless all are in the same collective with the same arguments."""
    text = describe(operation, sequence, args, kwargs)
    word = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
    ends = np.array([word, -word], np.int64)
    raw.Allreduce(MPI.IN_PLACE, ends, MPI.MIN)
    if ends[0] != -ends[1]:
        everyone = raw.allgather(text)
        table = "\n".join(f"  rank {rank}: {what}" for rank, what in enumerate(everyone))
        raise MismatchError(
            f"ranks have met in different collectives:\n{table}\n  make the same call on every rank"
        )
