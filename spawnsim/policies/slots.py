"""One window: the slots that its owner fills in turn, and reading those of others.

The owner stores into the slot behind the current one and then makes it current; it says so before and after, so a
reader that was overtaken knows it. A reader asks three times (the header, the slot, the header again), and each may
have to wait for the owner's next step: with two slots it is overtaken by an owner that lays out in every step, with
four it is not. The store goes straight to the exposed memory, one pass and no copy beside it; the header
is written by `Put`, after `Sync` has made the store visible. Headers carry a checksum, and one of each slot's tensors
if that is wanted; a slot's description is known by its digest.

This room knows a communicator's windows and how a state is laid out; it knows no donors and no versions but its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from spawnsim.comm import Comm, Request
from spawnsim.policies.codecs import Codec
from spawnsim.policies.compression import Compression
from spawnsim.policies.memory import CPU
from spawnsim.policies.messages import checksum
from spawnsim.policies.snapshot import Room, device_of, lay_out, room_for
from spawnsim.policies.state import ALIGN_NBYTES, Tensors

MOST_SLOTS = 9  # whose descriptions fit into a header
SLOT = np.dtype(
    [("iteration", "<i8"), ("text_nbytes", "<u4"), ("sum", "<u4"), ("body_nbytes", "<i8"), ("digest", "<u8")]
)
HEADER = np.dtype(
    [
        ("begun", "<i8"),
        ("done", "<i8"),
        ("slot_nbytes", "<i8"),
        ("count", "<u4"),
        ("sum", "<u4"),
        ("slots", SLOT, MOST_SLOTS),
    ]
)
Header = NDArray[np.void]  # one of `HEADER`: the latest version begun and done, and what is in each slot
WITHDRAWN = -1  # the rank offers nothing any more
ABSENT = -2  # it has no such tensor, or one that does not fit


def padded(nbytes: int) -> int:
    """Return the bytes rounded up, so that what follows is aligned."""
    return -(-nbytes // ALIGN_NBYTES) * ALIGN_NBYTES


def slot_of(header: Header, version: int) -> Any:
    """Return what a header says of the slot that holds a version."""
    return header["slots"][0, version % int(header["count"][0])]


def _sum_of(header: Header) -> int:
    """Return the checksum of a header, whose own field it leaves out."""
    bare = header.copy()
    bare["sum"] = 0
    return zlib.crc32(bare.view(np.uint8).data)


def is_whole(header: Header) -> bool:
    """Return whether a header that was read is one that was written."""
    return int(header["sum"][0]) == _sum_of(header)


class Window:
    """One window: the own slots, and access to those of others."""

    def __init__(
        self, comm: Comm, live: Tensors | None, compression: str | Codec | None = None, *, slots: int = 2,
        checksum: bool = True,
    ) -> None:  # fmt: skip
        self.comm, self.rank, self._checksum = comm, comm.Get_rank(), checksum
        self._compression = Compression(compression)
        self.slot_nbytes = 0
        if live is not None:
            text_nbytes, body_nbytes = self._compression.most_nbytes(live)
            self.slot_nbytes = padded(text_nbytes) + body_nbytes + ALIGN_NBYTES
        self.win: Any = cast("Any", comm).Win.Allocate(
            HEADER.itemsize + slots * self.slot_nbytes, 1, comm=comm
        )
        self.win.Lock_all()
        self._slots = np.frombuffer(self.win.tomemory(), np.uint8)[HEADER.itemsize :]
        self.header: Header = np.zeros(1, HEADER)
        self.header["slot_nbytes"], self.header["count"] = self.slot_nbytes, slots
        self.header["begun"] = 0 if live is not None else ABSENT
        self._spare: list[NDArray[np.uint8]] = []
        self._lent: dict[int, NDArray[np.uint8]] = {}
        self._room: Room = room_for(CPU if live is None else device_of(live))
        self._put_header()

    def _put_header(self) -> None:
        self.header["sum"] = _sum_of(self.header)
        self.win.Put(self.header.view(np.uint8), self.rank, 0)
        self.win.Flush(self.rank)

    def publish(self, live: Tensors, version: int, iteration: int) -> int:
        """Lay out the tensors as a new version; return the bytes of them.

        If they do not fit, return -1, and offer nothing from then on.
        """
        dressed = self._compression.dress(live)
        layout = dressed.layout
        start = padded(len(layout.text))
        fits = start + layout.nbytes <= self.slot_nbytes
        self.header["begun"] = version if fits else ABSENT
        self._put_header()
        if not fits:
            return -1
        slot = self._slots[version % int(self.header["count"][0]) * self.slot_nbytes :][
            : start + layout.nbytes
        ]
        slot[: len(layout.text)] = np.frombuffer(layout.text, np.uint8)
        lay_out(layout, torch.from_numpy(slot[start:]), dressed.sources, device_of(live))
        self.win.Sync()
        sum_ = checksum(slot[start:]) if self._checksum else 0
        told = (iteration, len(layout.text), sum_, layout.nbytes, layout.digest)
        self.header["slots"][0, version % int(self.header["count"][0])] = told
        self.header["done"] = version
        self._put_header()
        return layout.nbytes

    def withdraw(self, why: int = WITHDRAWN) -> None:
        """Offer nothing any more."""
        self.header["begun"] = why
        self._put_header()

    def get_header(self, donor: int) -> tuple[Request, Header]:
        """Start to read a donor's header; it is there when the request is over."""
        header = np.empty(1, HEADER)
        return self._get(header.view(np.uint8), donor, 0), header

    def get_slot(
        self, donor: int, header: Header, version: int, *, text: bool
    ) -> tuple[Request, torch.Tensor]:
        """Start to read a slot, with or without its description; the memory is the window's, until `reclaim`."""
        slot = slot_of(header, version)
        body_at = padded(int(slot["text_nbytes"]))
        skip = 0 if text else body_at
        length = body_at + int(slot["body_nbytes"]) - skip
        fitting = (index for index, buffer in enumerate(self._spare) if buffer.size >= length)
        index = next(fitting, None)
        buffer = self._room(length) if index is None else self._spare.pop(index)
        self._lent[donor] = buffer
        at = HEADER.itemsize + version % int(header["count"][0]) * int(header["slot_nbytes"][0]) + skip
        return self._get(buffer[:length], donor, at), torch.from_numpy(buffer[:length])

    def _get(self, into: NDArray[np.uint8], donor: int, at: int) -> Request:
        request: Request = self.win.Rget(into, donor, at)
        return request

    def reclaim(self, *, but: Collection[int]) -> None:
        """Take back the memory of earlier reads, but not from donors whose answer may still come."""
        self._spare += [buffer for donor, buffer in self._lent.items() if donor not in but]
        self._lent = {}
