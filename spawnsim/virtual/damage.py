"""What a damaged link makes of data: one bit of one byte is the other way round.

This room knows payloads: arrays, bytes, and lists and mappings of them. It must not know messages or times.
"""

from __future__ import annotations

from typing import Any

import numpy as np

MIDDLE = 0.5


def damaged(payload: Any, place: float = MIDDLE) -> Any:
    """Return a payload with the highest bit of one byte flipped; of a list or mapping, of one in one of its members.

    Args:
        payload: An array, bytes, or a list or mapping of them. Anything else comes back as it is.
        place: Which byte: from 0, the first, up to but not including 1.
    """
    if isinstance(payload, np.ndarray):
        return _flipped_array(payload, place)
    if isinstance(payload, (bytes, bytearray)):
        return _flipped(np.frombuffer(bytearray(payload), np.uint8), place).tobytes()
    if isinstance(payload, (list, dict)) and payload:
        keys = list(payload) if isinstance(payload, dict) else range(len(payload))
        share = place * len(keys)
        return replaced(payload, keys[int(share)], share % 1.0)
    return payload


def replaced(payload: Any, key: Any, place: float) -> Any:
    """Return a copy of a list or mapping in which one member is damaged."""
    copy = payload.copy()
    copy[key] = damaged(copy[key], place)
    return copy


def can_be_damaged(payload: Any) -> bool:
    """Whether there is anything to damage: a barrier has no payload, and what the library tells itself is checked."""
    if isinstance(payload, (list, dict)):
        members = payload.values() if isinstance(payload, dict) else payload
        return any(map(can_be_damaged, members))
    if isinstance(payload, np.ndarray):
        return payload.nbytes > 0
    return isinstance(payload, (bytes, bytearray)) and len(payload) > 0


def _flipped_array(array: Any, place: float) -> Any:
    copy = np.ascontiguousarray(array).copy()
    _flipped(copy.reshape(-1).view(np.uint8), place)
    return copy


def _flipped(raw: Any, place: float) -> Any:
    if raw.size:
        raw[int(raw.size * place)] ^= 0x80
    return raw
