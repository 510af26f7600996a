"""Windows in which a rank lays out whole snapshots of its state, and reads those of others.

Each window has a header and two slots. A writer fills the slot that is not current and then makes it current; it says
so before and after, so a reader that was overtaken knows it and reads again: nobody ever gets a mixture of versions.
A slot describes its tensors, so models of different shapes can be read and matched by name.

This room knows windows (`Allocate`, `Lock_all` held, `Put` to the own part, `Rget` from others, whose request can be
waited for with a deadline on every building, unlike a flush) and layouts; it knows no policy. All windows are made
collectively in the constructor; afterwards no call waits for a rank that it does not read from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from spawnsim.comm import BYTE, Comm, Request
from spawnsim.errors import RankFailed, Timeout
from spawnsim.policies.deadlines import Deadline
from spawnsim.policies.state import ALIGN_NBYTES, Layout, Tensors, assign

T = TypeVar("T")
Header = NDArray[np.int64]
HEADER_NBYTES = 128
BEGUN, DONE, SLOT_NBYTES = 0, 1, 2
ITERATION, TEXT_NBYTES, BODY_NBYTES, DIGEST = 0, 1, 2, 3  # of a slot, from 4 + 4 · slot on
WITHDRAWN, ABSENT = (
    -1,
    -2,
)  # the rank offers nothing any more; it has no such tensor, or one that does not fit
TRIES = 8


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGN_NBYTES) * ALIGN_NBYTES


def _slot(header: Header, version: int) -> Header:
    start = 4 + 4 * (version % 2)
    return header[start : start + 4]


@dataclass(frozen=True, slots=True)
class Taken:
    """A donor's snapshot: the iteration at which it was laid out, its tensors, and its size."""

    iteration: int
    tensors: Tensors
    nbytes: int


class _Window:
    """One window: the own two slots, and access to those of others."""

    def __init__(self, comm: Comm, layout: Layout | None) -> None:
        self.comm, self.rank = comm, comm.Get_rank()
        self.slot_nbytes = 0 if layout is None else _padded(len(layout.text)) + layout.nbytes + ALIGN_NBYTES
        self.win: Any = cast("Any", comm).Win.Allocate(HEADER_NBYTES + 2 * self.slot_nbytes, 1, comm=comm)
        self.win.Lock_all()
        self.header: Header = np.zeros(HEADER_NBYTES // 8, np.int64)
        self.header[SLOT_NBYTES] = self.slot_nbytes
        self.header[BEGUN] = 0 if layout is not None else ABSENT
        self._spare: list[NDArray[np.uint8]] = []
        self._lent: dict[int, NDArray[np.uint8]] = {}
        self._stage = torch.empty(self.slot_nbytes, dtype=torch.uint8)
        self._put_header()

    def _put_header(self) -> None:
        self._put(self.header.view(np.uint8), 0)

    def _put(self, data: NDArray[np.uint8], at: int) -> None:
        self.win.Put([data, data.size, BYTE], self.rank, [at, data.size, BYTE])
        self.win.Flush(self.rank)

    def publish(self, layout: Layout, live: Tensors, version: int, iteration: int) -> bool:
        """Lay out the tensors as a new version; return False if they do not fit, and offer nothing from then on."""
        start = _padded(len(layout.text))
        fits = start + layout.nbytes <= self.slot_nbytes
        self.header[BEGUN] = version if fits else ABSENT
        self._put_header()
        if not fits:
            return False
        stage = self._stage.numpy()
        stage[: len(layout.text)] = np.frombuffer(layout.text, np.uint8)
        assign(layout.views(self._stage[start : start + layout.nbytes]), live)
        self._put(stage[: start + layout.nbytes], HEADER_NBYTES + version % 2 * self.slot_nbytes)
        digest = np.uint64(layout.digest).view(np.int64)
        _slot(self.header, version)[:] = (iteration, len(layout.text), layout.nbytes, digest)
        self.header[DONE] = version
        self._put_header()
        return True

    def withdraw(self, why: int = WITHDRAWN) -> None:
        """Offer nothing any more."""
        self.header[BEGUN] = why
        self._put_header()

    def get_header(self, donor: int) -> tuple[Request, Header]:
        """Start to read a donor's header; it is there when the request is over."""
        header = np.empty(HEADER_NBYTES // 8, np.int64)
        return self._get(header.view(np.uint8), donor, 0), header

    def get_slot(
        self, donor: int, header: Header, version: int, *, text: bool
    ) -> tuple[Request, torch.Tensor]:
        """Start to read a slot, with or without its description; the memory is the window's, until `reclaim`."""
        _, text_nbytes, body_nbytes, _ = (int(value) for value in _slot(header, version))
        skip = 0 if text else _padded(text_nbytes)
        length = _padded(text_nbytes) + body_nbytes - skip
        fitting = (index for index, buffer in enumerate(self._spare) if buffer.size >= length)
        index = next(fitting, None)
        buffer = np.empty(length, np.uint8) if index is None else self._spare.pop(index)
        self._lent[donor] = buffer
        at = HEADER_NBYTES + version % 2 * int(header[SLOT_NBYTES]) + skip
        return self._get(buffer[:length], donor, at), torch.from_numpy(buffer[:length])

    def _get(self, into: NDArray[np.uint8], donor: int, at: int) -> Request:
        request: Request = self.win.Rget([into, into.size, BYTE], donor, [at, into.size, BYTE])
        return request

    def reclaim(self, *, but: Collection[int]) -> None:
        """Take back the memory of earlier reads, but not from donors whose answer may still come."""
        self._spare += [buffer for donor, buffer in self._lent.items() if donor not in but]
        self._lent = {}


class Shelf:
    """A rank's snapshots for others to take: one window for all its state, or one per tensor.

    `counts`: `torn` reads that were repeated, donors that were `missing` (out of time, dead) or had `nothing` to offer.
    """

    def __init__(self, comm: Comm, live: Tensors, deadline: Deadline, *, per_parameter: bool = False) -> None:
        self.comm, self.deadline = comm, deadline
        self.counts: Counter[str] = Counter()
        self.version = 0
        self.per_parameter = per_parameter
        keys = (
            sorted({name for names in comm.allgather(sorted(live)) for name in names})
            if per_parameter
            else [""]
        )
        own = self._cut(live)
        self._windows = {key: _Window(comm, own.get(key)) for key in keys}
        self._layouts: dict[int, Layout] = {}  # by digest
        self._late: set[int] = set()  # donors whose answer to the latest reading may still come

    def _cut(self, live: Tensors) -> dict[str, Layout]:
        if not self.per_parameter:
            return {"": Layout.of(live)}
        return {name: Layout.of({name: tensor}) for name, tensor in live.items()}

    def publish(self, live: Tensors, iteration: int) -> int:
        """Lay out the state as it is now; return the bytes written. What does not fit any window is not offered."""
        self.version += 1
        layouts = self._cut(live)
        written = 0
        for key, window in self._windows.items():
            layout = layouts.get(key)
            if layout is None:
                window.withdraw(ABSENT)
            elif window.publish(layout, live, self.version, iteration):
                written += layout.nbytes
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

    def take(self, donors: Sequence[int]) -> dict[int, Taken]:
        """Return the current snapshot of each donor that has one and answers within the deadline.

        The tensors stay valid until the next call.
        """
        taken: dict[int, Taken] = {}
        self._reclaim()
        waiting = list(donors)
        for _ in range(TRIES):
            waiting = self._attempt(waiting, taken)
            if not waiting:
                break
            self.counts["torn"] += len(waiting)
        return {donor: taken[donor] for donor in donors if donor in taken}

    def _reclaim(self) -> None:
        for window in self._windows.values():
            window.reclaim(but=self._late)
        self._late = set()

    def _attempt(self, donors: Iterable[int], taken: dict[int, Taken]) -> list[int]:
        """Read all donors at once, add the whole snapshots to `taken`; return the donors whose read was torn."""
        heads = self._headers(donors)
        versions = {donor: _version(headers.values()) for donor, headers in heads.items()}
        self.counts["nothing"] += sum(version == 0 for version in versions.values())
        slots = self._slots(
            {donor: heads[donor] for donor, version in versions.items() if version > 0}, versions
        )
        torn = [donor for donor, version in versions.items() if version < 0]
        for donor, headers in self._headers(slots).items():
            if any(header[BEGUN] >= versions[donor] + 2 for header in headers.values()):
                torn.append(donor)
            else:
                taken[donor] = self._unpacked(heads[donor], versions[donor], slots[donor])
        return torn

    def _headers(self, donors: Iterable[int]) -> dict[int, dict[str, Header]]:
        def ask(donor: int) -> dict[str, tuple[Request, Header]]:
            return {key: window.get_header(donor) for key, window in self._windows.items()}

        return {
            donor: {key: header for key, header in headers.items() if header[BEGUN] != ABSENT}
            for donor, headers in self._arrived(self._asked(donors, ask)).items()
        }

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

        return self._arrived(self._asked(heads, ask))

    def _asked(self, donors: Iterable[int], ask: Callable[[int], T]) -> dict[int, T]:
        """Ask all donors at once; those that are known to be dead are left out."""
        asked = {}
        for donor in donors:
            try:
                asked[donor] = ask(donor)
            except RankFailed:
                self.counts["missing"] += 1
        return asked

    def _arrived(self, asked: dict[int, dict[str, tuple[Request, T]]]) -> dict[int, dict[str, T]]:
        """Wait for what was asked of each donor; return what those have answered that did so in time."""
        clock = self.comm.clock
        began_s = clock.now()
        arrived: dict[int, dict[str, T]] = {}
        for donor, requests in asked.items():
            left_s = self.deadline.limit_s(len(arrived) / len(asked)) - (clock.now() - began_s)
            try:
                with clock.deadline(max(left_s, 1e-6)):
                    for request, _ in requests.values():
                        request.Wait()
            except (Timeout, RankFailed):
                self.counts["missing"] += 1
                self._late.add(donor)
            else:
                arrived[donor] = {key: data for key, (_, data) in requests.items()}
                self.deadline.observe(clock.now() - began_s)
        return arrived

    def _unpacked(self, headers: dict[str, Header], version: int, slots: dict[str, torch.Tensor]) -> Taken:
        tensors: Tensors = {}
        iteration = nbytes = 0
        for key, data in slots.items():
            iteration, text_nbytes, body_nbytes, _ = (int(value) for value in _slot(headers[key], version))
            digest = _digest(headers[key], version)
            if data.numel() > body_nbytes and digest not in self._layouts:
                self._layouts[digest] = Layout.parse(data[:text_nbytes].numpy().tobytes())
            tensors.update(self._layouts[digest].views(data[data.numel() - body_nbytes :]))
            nbytes += data.numel()
        return Taken(iteration, tensors, nbytes)


def _digest(header: Header, version: int) -> int:
    return int(_slot(header, version)[DIGEST : DIGEST + 1].view(np.uint64)[0])


def _version(headers: Collection[Header]) -> int:
    """Return the version that all windows of a donor hold; 0 if it offers none, -1 if it is just changing."""
    begun, done = ([int(header[field]) for header in headers] for field in (BEGUN, DONE))
    if not done or min(done) == 0 or WITHDRAWN in begun:
        return 0
    return min(done) if max(begun) < min(done) + 2 else -1
