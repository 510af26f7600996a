"""Windows in which a rank lays out whole snapshots of its state, and reads those of others.

Each window has a header and slots (`slots.py`). A reader that was overtaken by the writer notices and reads again:
nobody ever gets a mixture of versions. A slot describes its tensors, so models of different shapes can be read and
matched by name, and compressed ones by whoever knows the codec.

This room knows windows (`Allocate`, `Lock_all` held, stores to the own part, `Rget` from others, whose request can be
waited for with a deadline on every building, unlike a flush) and layouts; it knows no policy. All windows are made
collectively in the constructor; afterwards no call waits for a rank that it does not read from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TypeVar

import torch

from spawnsim.comm import Comm, Request
from spawnsim.errors import RankFailed, Timeout
from spawnsim.policies.codecs import Codec
from spawnsim.policies.compression import Compression
from spawnsim.policies.deadlines import Deadline
from spawnsim.policies.memory import CPU
from spawnsim.policies.messages import checksum
from spawnsim.policies.slots import ABSENT, WITHDRAWN, Header, Window, is_whole, slot_of
from spawnsim.policies.snapshot import laid_out
from spawnsim.policies.state import Layout, Tensors, digest_of

T = TypeVar("T")
TRIES = 8


@dataclass(frozen=True, slots=True)
class Taken:
    """A donor's snapshot: the iteration at which it was laid out, its tensors, and its size."""

    iteration: int
    tensors: Tensors
    nbytes: int


class Shelf:
    """A rank's snapshots for others to take: one window for all its state, or one per tensor.

    `counts`: reads that were `torn` or `unreadable` (damaged on their way), which were repeated; donors that were
    `missing` (out of time, dead) or had `nothing` to offer.
    """

    def __init__(
        self, comm: Comm, live: Tensors, deadline: Deadline, *, per_parameter: bool = False,
        compression: str | Codec | None = None, slots: int = 2, checksum: bool = True,
    ) -> None:  # fmt: skip
        self.comm = comm
        # Headers come in microseconds, and must not teach patience with models, which wait for each other on the wire.
        self._headers_in, self._slots_in = deadline, deepcopy(deadline)
        self._compression = Compression(compression)
        self.counts: Counter[str] = Counter()
        self.version = 0
        self.per_parameter = per_parameter
        keys = (
            sorted({name for names in comm.allgather(sorted(live)) for name in names})
            if per_parameter
            else [""]
        )
        own = self._cut(live)
        self._windows = {
            key: Window(comm, own.get(key), compression, slots=slots, checksum=checksum) for key in keys
        }
        self._layouts: dict[int, Layout] = {}  # by digest
        self._views: dict[tuple[int, int], Tensors] = {}  # by place in memory and digest; places are few
        self._device = CPU
        self._late: set[int] = set()  # donors whose answer to the latest reading may still come

    def _cut(self, live: Tensors) -> dict[str, Tensors]:
        return {name: {name: tensor} for name, tensor in live.items()} if self.per_parameter else {"": live}

    def publish(self, live: Tensors, iteration: int) -> int:
        """Lay out the state as it is now; return the bytes written. What does not fit any window is not offered."""
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
        """Offer nothing any more."""
        for window in self._windows.values():
            window.withdraw()

    def free(self) -> None:
        """Give the windows up; collective."""
        for window in self._windows.values():
            window.win.Unlock_all()
            window.win.Free()
        self._windows = {}

    def take(self, donors: Sequence[int], device: torch.device = CPU) -> dict[int, Taken]:
        """Return the current snapshot of each donor that has one and answers within the deadline.

        The tensors are on the device of who needs them, and stay valid until the next call.
        """
        self._device = device
        taken: dict[int, Taken] = {}
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
        if self._late:  # their memory is given up: nothing here may keep it
            self._views.clear()
        self._late = set()

    def _attempt(self, donors: Iterable[int], taken: dict[int, Taken]) -> list[int]:
        """Read all donors at once, add the whole snapshots to `taken`; return the donors that are to be read again."""
        heads, damaged = self._headers(donors)
        versions = {donor: _version(headers.values()) for donor, headers in heads.items()}
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
        """Return the headers of donors that offer something, and the donors of whom one is damaged."""

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
    ) -> dict[int, dict[str, torch.Tensor]]:
        def ask(donor: int) -> dict[str, tuple[Request, torch.Tensor]]:
            version = versions[donor]
            return {
                key: self._windows[key].get_slot(
                    donor, header, version, text=_digest(header, version) not in self._layouts
                )
                for key, header in heads[donor].items()
            }

        return self._arrived(self._asked(heads, ask), self._slots_in)

    def _asked(self, donors: Iterable[int], ask: Callable[[int], T]) -> dict[int, T]:
        """Ask all donors at once; those that are known to be dead are left out."""
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
        """Wait for what was asked of each donor; return what those have answered that did so in time."""
        clock = self.comm.clock
        began_s = clock.now()
        arrived: dict[int, dict[str, T]] = {}
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
        self, headers: dict[str, Header], version: int, slots: dict[str, torch.Tensor]
    ) -> Taken | None:
        """Return what was read; None if it was damaged on its way."""
        tensors: Tensors = {}
        iteration = nbytes = 0
        for key, data in slots.items():
            iteration, text_nbytes, sum_, body_nbytes, digest = slot_of(headers[key], version).tolist()
            text, body = data[:text_nbytes].numpy().tobytes(), data[data.numel() - body_nbytes :]
            if digest not in self._layouts:
                if digest_of(text) != digest:
                    return None
                self._layouts[digest] = Layout.parse(text)
            if sum_ and checksum(body.numpy()) != sum_:
                return None
            tensors |= self._laid_out(digest, body)
            nbytes += data.numel()
        return Taken(iteration, self._compression.undress(tensors), nbytes)

    def _laid_out(self, digest: int, body: torch.Tensor) -> Tensors:
        """Return the tensors of a body; memory that is read into again is not cut up again."""
        if self._device.type != "cpu":
            return laid_out(self._layouts[digest], body, self._device)
        place = body.data_ptr(), digest
        if place not in self._views:
            self._views[place] = laid_out(self._layouts[digest], body)
        return self._views[place]


def _digest(header: Header, version: int) -> int:
    return int(slot_of(header, version)["digest"])


def _version(headers: Collection[Header]) -> int:
    """Return the version that all windows of a donor hold; 0 if it offers none, -1 if it is just changing."""
    begun, done = ([int(header[field][0]) for header in headers] for field in ("begun", "done"))
    if not done or min(done) == 0 or WITHDRAWN in begun:
        return 0
    slots = min(int(header["count"][0]) for header in headers)
    return min(done) if max(begun) < min(done) + slots else -1
