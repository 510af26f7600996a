"""Group keys: their text, who keeps them, and how they change from round to round.

Pure functions of text and numbers. A key is `prefix.0b` and a string of bits; peers with equal keys may form a group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

import numpy as np

from spawnsim.errors import ParameterError

KEEPERS = 2  # ranks that keep each key: one may die, compute or sleep


def digest(text: str) -> int:
    """Return a 63-bit number for a text, the same on every rank."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def check_bits(bits: str) -> str:
    """Return the bits, or raise `ParameterError`."""
    if set(bits) - {"0", "1"}:
        raise ParameterError(f"group bits {bits!r}: give a string of 0 and 1, such as '0110', or ''")
    return bits


def group_key(prefix: str, bits: str) -> str:
    """Return the key under which peers with these bits look for each other.

    >>> group_key("run", "01")
    'run.0b01'
    """
    return f"{prefix}.0b{bits}"


def keepers(key: str, size: int, suspects: Collection[int] = ()) -> list[int]:
    """Return the ranks of a communicator of `size` that keep a key: the first of its order that are no suspects.

    The order is the key's own, and the same on every rank. With nobody left but suspects, the first of them are asked.
    """
    order = (
        np.random.Generator(np.random.PCG64(digest(key))).permutation(size)
        if size < 64
        else _probed(key, size)
    )
    ranks = [int(rank) for rank in order]
    trusted = [rank for rank in ranks if rank not in suspects]
    return (trusted or ranks)[:KEEPERS]


def _probed(key: str, size: int, count: int = 32) -> list[int]:
    """Return the first ranks of a long order: enough for `KEEPERS` even if many are suspects."""
    draws = np.random.Generator(np.random.PCG64(digest(key))).integers(0, size, count).tolist()
    return list(dict.fromkeys(draws))


def next_bits(bits: str, group: int, *, index: int, group_size: int, target: int | None) -> str:
    """Return a member's bits after its group has formed, so that its members scatter next time (Moshpit).

    All members draw the same distinct buckets from the group's number, one each; the bucket's bits are appended and
    the oldest fall out. There are `target` buckets, rounded up to a power of two (by default the group's size, so).
    Source: Ryabinin et al., "Moshpit SGD" (2021), section 3.
    """
    if not bits:
        return ""
    count = max(int(target or group_size), group_size, 2)
    width = (count - 1).bit_length()
    stream = np.random.Generator(np.random.PCG64(group))
    bucket = int(stream.permutation(count)[index])
    return (bits + format(bucket, f"0{width}b"))[-len(bits) :]
