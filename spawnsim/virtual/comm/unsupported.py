"""Calls of mpi4py's communicators that the simulation does not offer: they are there, and refuse by name.

This room knows words only; a room that offers a call comes before it in `Comm`.
"""

from __future__ import annotations

from typing import Any, NoReturn

from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG
from spawnsim.comm.info import INFO_NULL, Info
from spawnsim.errors import UnsupportedError

PARTITIONS = "partitioned communication is not simulated: send each partition as a message of its own"


class Unsupported:
    """Refusals."""

    __slots__ = ()

    def Psend_init(
        self, buf: Any, partitions: int, dest: int, tag: int = 0, info: Info = INFO_NULL
    ) -> NoReturn:
        """Refuse."""
        raise UnsupportedError(f"Comm.Psend_init: {PARTITIONS}")

    def Precv_init(
        self, buf: Any, partitions: int, source: int = ANY_SOURCE, tag: int = ANY_TAG, info: Info = INFO_NULL
    ) -> NoReturn:
        """Refuse."""
        raise UnsupportedError(f"Comm.Precv_init: {PARTITIONS}")
