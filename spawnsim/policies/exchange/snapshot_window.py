"""RMA windows in which a rank exposes complete snapshots of its state, and reads other ranks' snapshots.

Each window has a header and slots, which its owner fills in turn: it stores into the slot after the current one and
then makes that slot current. The header announces both before and after, so a reader that was overtaken detects it and
reads again, and no rank ever gets a mixture of versions. A reader makes three requests (the header, the slot, the
header again), and each may have to wait for the owner's next step: an owner that publishes in every step overtakes it
with two slots, but not with four. A store is one pass, directly into the exposed memory; `Put` writes the header, after
`Sync` has made the store visible. Headers carry a checksum, and optionally a checksum of each slot's tensors. A slot
describes its tensors, so models of different shapes can be read and matched by name, and compressed ones by any rank
that knows the codec.

`Lock_all` is held from the constructor, which is collective, to the end. Reads are `Rget`, whose request supports a
deadline on every backend, unlike a flush. No call waits for a rank that it does not read from.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from spawnsim.comm import Comm, Request
from spawnsim.errors import RankFailed, Timeout
from spawnsim.policies.exchange.messages import checksum
from spawnsim.policies.rules.cadence import Deadline
from spawnsim.policies.state.arithmetic import CPU, META, as_tensor
from spawnsim.policies.state.codecs import Codec
from spawnsim.policies.state.layout import ALIGN_NBYTES, Layout, Tensors, digest_of
from spawnsim.policies.state.snapshot import (
    Allocator,
    Compression,
    allocator_for,
    device_of,
    laid_out,
    lay_out,
)

MOST_SLOTS = 9  # limited by the descriptions in a header
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
Header = NDArray[np.void]  # one of `HEADER`: the latest version begun and done, and the content of each slot
# The part before the slots, and a slot, as struct formats: numpy's fields take ten times as long.
FRONT_OUT, SLOT_OUT = struct.Struct("<qqqII"), struct.Struct("<qIIqQ")
NO_SUM = bytes(4)  # placeholder of the checksum, the front's last field, while it is computed
WITHDRAWN = -1  # the rank no longer offers a snapshot
ABSENT = -2  # it has no such tensor, or one that does not fit


def padded(nbytes: int) -> int:
    """Return the bytes rounded up, so that the next object is aligned."""
    return -(-nbytes // ALIGN_NBYTES) * ALIGN_NBYTES


def slot_of(header: Header, version: int) -> Any:
    """Return a header's description of the slot that holds a version."""
    return header["slots"][0, version % int(header["count"][0])]


def _sum_of(header: memoryview) -> int:
    before = zlib.crc32(header[: FRONT_OUT.size - len(NO_SUM)])
    return zlib.crc32(header[FRONT_OUT.size :], zlib.crc32(NO_SUM, before))


def is_whole(header: Header) -> bool:
    """Return whether a header that was read is intact."""
    return int(header["sum"][0]) == _sum_of(header.view(np.uint8).data)


class SlottedWindow:
    """One window: this rank's slots, and access to other ranks' slots."""

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
        nbytes, windows = HEADER.itemsize + slots * self.slot_nbytes, cast("Any", comm).Win
        self._room: Allocator = allocator_for(CPU if live is None else device_of(live))
        if live is not None and device_of(live) == META:
            memory: Any = self._room(nbytes)
            self.win: Any = windows.Create(memory, 1, comm=comm)
        else:
            self.win = windows.Allocate(nbytes, 1, comm=comm)
            memory = np.frombuffer(self.win.tomemory(), np.uint8)
        self.win.Lock_all()
        self._slots = memory[HEADER.itemsize :]
        self.count, self._done = slots, 0
        self._header = np.zeros(HEADER.itemsize, np.uint8)
        self._spare: list[NDArray[np.uint8]] = []
        self._borrowed: dict[int, NDArray[np.uint8]] = {}
        self._write_header(0 if live is not None else ABSENT)

    def _write_header(self, begun: int) -> None:
        """Put the header, which announces that the owner has begun version `begun`."""
        header, fields = self._header.data, (begun, self._done, self.slot_nbytes, self.count)
        FRONT_OUT.pack_into(header, 0, *fields, 0)
        FRONT_OUT.pack_into(header, 0, *fields, zlib.crc32(header))
        self.win.Put(self._header, self.rank, 0)
        self.win.Flush(self.rank)

    def publish(self, live: Tensors, version: int, iteration: int) -> int:
        """Store the tensors as a new version; return their bytes, or -1 if they do not fit: then none is offered."""
        encoded = self._compression.encode(live)
        layout = encoded.layout
        # This order makes reads safe. "begun" is visible before the slot changes, so a reader whose version may have
        # been overwritten sees it in the header that it reads last. "done" is visible after the slot, which `Sync` has
        # made visible: without it MPI does not order plain stores and other ranks' accesses. Every header is written by
        # `Put` and `Flush` and carries a checksum, so that no reader accepts a partial header.
        start = padded(len(layout.text))
        fits = start + layout.nbytes <= self.slot_nbytes
        self._write_header(version if fits else ABSENT)
        if not fits:
            return -1
        place = version % self.count
        slot = self._slots[place * self.slot_nbytes :][: start + layout.nbytes]
        slot[: len(layout.text)] = np.frombuffer(layout.text, np.uint8)
        lay_out(layout, as_tensor(slot[start:]), encoded.sources, device_of(live))
        self.win.Sync()
        sum_ = checksum(slot[start:]) if self._checksum else 0
        fields = iteration, len(layout.text), sum_, layout.nbytes, layout.digest
        SLOT_OUT.pack_into(self._header.data, FRONT_OUT.size + place * SLOT_OUT.size, *fields)
        self._done = version
        self._write_header(version)
        return layout.nbytes

    def withdraw(self, why: int = WITHDRAWN) -> None:
        self._write_header(why)

    def get_header(self, donor: int) -> tuple[Request, Header]:
        """Start to read a donor's header; it is valid when the request has completed."""
        header = np.empty(1, HEADER)
        return self._get(header.view(np.uint8), donor, 0), header

    def get_slot(
        self, donor: int, header: Header, version: int, *, text: bool
    ) -> tuple[Request, NDArray[np.uint8]]:
        """Start to read a slot, with or without its description; the window owns the memory, until `reclaim`."""
        # Memory is reused, because fresh memory is mapped page by page while it is filled; but not while a late answer
        # may still be written into it.
        slot = slot_of(header, version)
        body_at = padded(int(slot["text_nbytes"]))
        skip = 0 if text else body_at
        length = body_at + int(slot["body_nbytes"]) - skip
        fitting = (index for index, buffer in enumerate(self._spare) if buffer.size >= length)
        index = next(fitting, None)
        buffer = self._room(length) if index is None else self._spare.pop(index)
        self._borrowed[donor] = buffer
        at = HEADER.itemsize + version % int(header["count"][0]) * int(header["slot_nbytes"][0]) + skip
        return self._get(buffer[:length], donor, at), buffer[:length]

    def _get(self, into: NDArray[np.uint8], donor: int, at: int) -> Request:
        request: Request = self.win.Rget(into, donor, at)
        return request

    def reclaim(self, *, but: Collection[int]) -> None:
        """Reclaim the memory of earlier reads, except from donors whose answer may still arrive."""
        self._spare += [buffer for donor, buffer in self._borrowed.items() if donor not in but]
        self._borrowed = {}


T = TypeVar("T")
TRIES = 8


@dataclass(frozen=True, slots=True)
class RemoteSnapshot:
    """A donor's snapshot: the iteration of its publication, its tensors, and its size."""

    iteration: int
    tensors: Tensors
    nbytes: int


class SnapshotWindow:
    """A rank's snapshots for other ranks to read: one window for all its state, or one per tensor.

    `counts`: reads that were `torn` or `unreadable` (damaged under way), which were repeated; donors that were
    `missing` (out of time, dead) or had `nothing` to offer.
    """

    def __init__(
        self, comm: Comm, live: Tensors, deadline: Deadline, *, per_parameter: bool = False,
        compression: str | Codec | None = None, slots: int = 2, checksum: bool = True,
    ) -> None:  # fmt: skip
        self.comm = comm
        # Headers arrive in microseconds, and must not teach a deadline for models, which queue on the network.
        self._headers_in = deadline
        self._slots_in: Deadline | None = None  # a copy, made at the first read: few ranks read
        self._compression = Compression(compression)
        self.counts: Counter[str] = Counter()
        self.version = 0
        self.per_parameter = per_parameter
        # Creating a window is collective, so all ranks create one for each name on any rank, in the same order.
        names = comm.allgather(sorted(live)) if per_parameter else [[""]]
        keys = sorted({name for each in names for name in each})
        own = self._cut(live)
        self._windows = {
            key: SlottedWindow(comm, own.get(key), compression, slots=slots, checksum=checksum)
            for key in keys
        }
        self._layouts: dict[int, Layout] = {}  # by digest
        self._views: dict[tuple[int, int], Tensors] = {}  # by address and digest; addresses are few
        self._device = CPU
        self._late: set[int] = set()  # donors whose answer to the latest read may still arrive

    def _cut(self, live: Tensors) -> dict[str, Tensors]:
        return {name: {name: tensor} for name, tensor in live.items()} if self.per_parameter else {"": live}

    def publish(self, live: Tensors, iteration: int) -> int:
        """Publish the current state; return the bytes written. Tensors that do not fit any window are not offered."""
        self.version += 1
        cut = self._cut(live)
        written = 0
        for key, window in self._windows.items():
            own = cut.get(key)
            if own is None:
                window.withdraw(ABSENT)
            elif (nbytes := window.publish(own, self.version, iteration)) >= 0:
                written += nbytes
            else:
                self.counts["too large"] += 1
        return written

    def withdraw(self) -> None:
        """Stop offering snapshots."""
        for window in self._windows.values():
            window.withdraw()

    def free(self) -> None:
        """Free the windows; collective."""
        for window in self._windows.values():
            window.win.Unlock_all()
            window.win.Free()
        self._windows = {}

    def take(self, donors: Sequence[int], device: torch.device = CPU) -> dict[int, RemoteSnapshot]:
        """Return the current snapshot of each donor that has one and answers within the deadline.

        The tensors are on `device`, and stay valid until the next call.
        """
        self._device = device
        if self._slots_in is None:
            self._slots_in = deepcopy(self._headers_in)
        taken: dict[int, RemoteSnapshot] = {}
        self._reclaim()
        waiting = list(donors)
        for _ in range(TRIES):
            waiting = self._attempt(waiting, taken)
            if not waiting:
                break
        return {donor: taken[donor] for donor in donors if donor in taken}

    def _reclaim(self) -> None:
        for window in self._windows.values():
            window.reclaim(but=self._late)
        if self._late:  # the memory of late donors is dropped: no view may keep it
            self._views.clear()
        self._late = set()

    def _attempt(self, donors: Iterable[int], taken: dict[int, RemoteSnapshot]) -> list[int]:
        """Read all donors concurrently, add complete snapshots to `taken`; return the donors to read again."""
        heads, damaged = self._headers(donors)
        # Three round trips: the header names the current slot, then the slot, then the header again. The slot is intact
        # unless its owner has begun by then the version that goes into the same slot, `count` versions later.
        versions = {donor: _common_version(headers.values()) for donor, headers in heads.items()}
        self.counts["nothing"] += sum(version == 0 for version in versions.values())
        slots = self._slots(
            {donor: heads[donor] for donor, version in versions.items() if version > 0}, versions
        )
        torn = [donor for donor, version in versions.items() if version < 0]
        later, again = self._headers(slots)
        damaged += again
        for donor, headers in later.items():
            version = versions[donor]
            if any(header["begun"][0] >= version + header["count"][0] for header in headers.values()):
                torn.append(donor)
            elif (found := self._unpacked(heads[donor], version, slots[donor])) is not None:
                taken[donor] = found
            else:
                damaged.append(donor)
        self.counts["torn"] += len(torn)
        self.counts["unreadable"] += len(damaged)
        return torn + damaged

    def _headers(self, donors: Iterable[int]) -> tuple[dict[int, dict[str, Header]], list[int]]:
        """Return the headers of donors that offer a snapshot, and the donors with a damaged header."""

        def ask(donor: int) -> dict[str, tuple[Request, Header]]:
            return {key: window.get_header(donor) for key, window in self._windows.items()}

        arrived = self._arrived(self._asked(donors, ask), self._headers_in)
        damaged = [donor for donor, headers in arrived.items() if not all(map(is_whole, headers.values()))]
        heads = {
            donor: {key: header for key, header in headers.items() if header["begun"][0] != ABSENT}
            for donor, headers in arrived.items()
            if donor not in damaged
        }
        return heads, damaged

    def _slots(
        self, heads: dict[int, dict[str, Header]], versions: dict[int, int]
    ) -> dict[int, dict[str, NDArray[np.uint8]]]:
        def ask(donor: int) -> dict[str, tuple[Request, NDArray[np.uint8]]]:
            version = versions[donor]
            return {
                key: self._windows[key].get_slot(
                    donor, header, version, text=_slot_digest(header, version) not in self._layouts
                )
                for key, header in heads[donor].items()
            }

        assert self._slots_in is not None
        return self._arrived(self._asked(heads, ask), self._slots_in)

    def _asked(self, donors: Iterable[int], ask: Callable[[int], T]) -> dict[int, T]:
        """Send requests to all donors; skip donors that are known to be dead."""
        asked = {}
        for donor in donors:
            try:
                asked[donor] = ask(donor)
            except RankFailed:
                self.counts["missing"] += 1
        return asked

    def _arrived(
        self, asked: dict[int, dict[str, tuple[Request, T]]], deadline: Deadline
    ) -> dict[int, dict[str, T]]:
        """Wait for each donor's answers; return the answers of donors that were in time."""
        clock = self.comm.clock
        began_s = clock.now()
        arrived: dict[int, dict[str, T]] = {}
        # All donors were asked at the same time, so the limit counts from then on, not anew for each donor; a learned
        # deadline applies once half of them have answered.
        for donor, requests in asked.items():
            left_s = deadline.limit_s(len(arrived) / len(asked)) - (clock.now() - began_s)
            try:
                with clock.deadline(max(left_s, 1e-6)):
                    for request, _ in requests.values():
                        request.Wait()
            except (Timeout, RankFailed):
                self.counts["missing"] += 1
                self._late.add(donor)
            else:
                arrived[donor] = {key: data for key, (_, data) in requests.items()}
                deadline.observe(clock.now() - began_s)
        return arrived

    def _unpacked(
        self, headers: dict[str, Header], version: int, slots: dict[str, NDArray[np.uint8]]
    ) -> RemoteSnapshot | None:
        """Return the received snapshot; None if it was damaged under way."""
        tensors: Tensors = {}
        iteration = nbytes = 0
        for key, data in slots.items():
            iteration, text_nbytes, sum_, body_nbytes, digest = slot_of(headers[key], version).tolist()
            body = data[data.size - body_nbytes :]
            if digest not in self._layouts:
                text = data[:text_nbytes].tobytes()
                if digest_of(text) != digest:
                    return None
                self._layouts[digest] = Layout.parse(text)
            if sum_ and checksum(body) != sum_:
                return None
            tensors |= self._laid_out(digest, as_tensor(body))
            nbytes += data.size
        return RemoteSnapshot(iteration, self._compression.decode(tensors), nbytes)

    def _laid_out(self, digest: int, body: torch.Tensor) -> Tensors:
        """Return the tensors of a body; views of reused memory are cached."""
        if self._device.type != "cpu":
            return laid_out(self._layouts[digest], body, self._device)
        place = body.data_ptr(), digest
        if place not in self._views:
            self._views[place] = laid_out(self._layouts[digest], body)
        return self._views[place]


def _slot_digest(header: Header, version: int) -> int:
    return int(slot_of(header, version)["digest"])


def _common_version(headers: Collection[Header]) -> int:
    """Return the version that all windows of a donor hold; 0 if it offers none, -1 if it is currently changing."""
    begun, done = ([int(header[field][0]) for header in headers] for field in ("begun", "done"))
    if not done or min(done) == 0 or WITHDRAWN in begun:
        return 0
    slots = min(int(header["count"][0]) for header in headers)
    return min(done) if max(begun) < min(done) + slots else -1
