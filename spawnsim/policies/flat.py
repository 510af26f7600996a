"""Means over a group: one Allreduce per wire dtype for the small tensors, and the large ones piece by piece.

This room knows tensors and a communicator's collectives; it knows no cadence and no policy. The result is the same
on every backend: half precision is summed in float32, float64 stays (`reducing.py`).

Where a rank's death can be survived, all tensors go through one buffer and are written last: a group that did not meet
leaves them as they were. Where it ends the job, nobody could tell, so large tensors are summed where they lie.

Floats that are not finite are left out (`finite.py`), and the mean of equal models is that model (`sameness.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from spawnsim.comm import IN_PLACE, MIN, Comm
from spawnsim.errors import MismatchError
from spawnsim.policies.arithmetic import sum_dtype
from spawnsim.policies.finite import Healed, heal
from spawnsim.policies.memory import CPU, one_run
from spawnsim.policies.reducing import Gathered, Large
from spawnsim.policies.sameness import all_same
from spawnsim.policies.state import Entry, Layout, Tensors

logger = logging.getLogger(__name__)

LARGE = 16_384  # elements from which a tensor's own Allreduce costs less than two more passes over its memory
PIECE_NBYTES = 1 << 21  # what has been summed is divided while it is still in the cache
PIECE_ON_GPU_NBYTES = 1 << 26  # a launch costs more than a pass over memory there
SHARE_NBYTES = 1 << 18  # of each rank in a piece: shorter messages do not fill a network


def _wire(dtype: torch.dtype) -> torch.dtype:
    return sum_dtype(dtype) if dtype.is_floating_point else torch.int64


class GroupMean:
    """Averages one schema of tensors over one group. Making it checks, collectively, that all ranks agree.

    With `guard`, numbers that are not finite are left out, and who is healed by the others is told so: by a warning
    and an event "healed". All ranks of a group must give the same.
    """

    def __init__(self, comm: Comm, live: Tensors, *, guard: bool = True) -> None:
        self.layout, self._guard = Layout.of(live), guard
        check_same(comm, self.layout, guard=guard)
        able = comm.capabilities()
        in_place = not able.survives and all(t.device.type in able.devices for t in live.values())
        self._parts: list[Gathered | Large] = []
        for wire in dict.fromkeys(_wire(entry.dtype) for entry in self.layout.entries):
            entries = [entry for entry in self.layout.entries if _wire(entry.dtype) == wire]
            if in_place and wire != torch.int64:
                entries = self._lift(comm, live, entries)
            if entries:
                device = live[entries[0].name].device
                place = device if device.type in able.devices else CPU
                self._parts.append(Gathered(wire, entries, place, guard=guard))
        self.nbytes = sum(part.nbytes for part in self._parts)

    def _lift(self, comm: Comm, live: Tensors, entries: list[Entry]) -> list[Entry]:
        """Take out what is summed where it lies; return the entries that are left."""
        wire = _wire(entries[0].dtype)
        together, near = _agreed(comm, [live[entry.name] for entry in entries])
        nbytes = max(PIECE_NBYTES if near else PIECE_ON_GPU_NBYTES, comm.Get_size() * SHARE_NBYTES)
        if together and sum(entry.count for entry in entries) >= LARGE:
            self._parts.append(Large(wire, entries, nbytes, guard=self._guard))
            return []
        large = [entry for entry in entries if entry.count >= LARGE]
        self._parts += [Large(wire, [entry], nbytes, guard=self._guard) for entry in large]
        return [entry for entry in entries if entry.count < LARGE]

    def __call__(self, comm: Comm, live: Tensors, momentum: float = 0.0) -> Healed:
        """Average the live tensors in place; return what became of this rank's numbers that were not finite."""
        size = comm.Get_size()
        if size & (size - 1) and all_same(comm, live):  # by a power of two, equal numbers are divided exactly
            return Healed()
        healed = Healed()
        for part in self._parts:
            healed += part.average(comm, live, momentum)
        healed += heal(comm, [piece for part in self._parts for piece in part.pending])
        for part in self._parts:
            part.store()
        if healed != Healed():
            _tell(comm, healed)
        return healed


def _tell(comm: Comm, healed: Healed) -> None:
    comm.record.event("healed", numbers=healed.numbers, lost=healed.lost)
    logger.warning(
        "rank %d: %d numbers of this rank were NaN or infinite, and are now the mean of the other ranks'; "
        "%d are NaN on all ranks", comm.rank, healed.numbers, healed.lost,
    )  # fmt: skip


def _agreed(comm: Comm, tensors: Sequence[torch.Tensor]) -> tuple[bool, bool]:
    """Return whether on all ranks of the group the tensors lie end to end, and whether in main memory."""
    near = all(tensor.device.type == "cpu" for tensor in tensors)
    words = np.asarray([one_run(tensors) is not None, near], np.int32)
    comm.Allreduce(IN_PLACE, words, MIN)
    return bool(words[0]), bool(words[1])


def check_same(comm: Comm, layout: Layout, *, guard: bool) -> None:
    """Raise `MismatchError` on every rank of the group unless all have the same layout, and the same guard."""
    digest = np.uint64(layout.digest)
    rows = np.empty((comm.Get_size(), 2), np.uint64)
    comm.Allgather(
        np.asarray([digest, ~digest ^ np.uint64(guard)]), rows
    )  # the second shows whether both are whole
    told = rows[:, 0] ^ ~rows[:, 1]
    if (rows == rows[0]).all() and told[0] <= 1:
        return
    who = f"rank {comm.Get_rank()}"
    off, on, damaged = (np.flatnonzero(each).tolist() for each in (told == 0, told == 1, told > 1))
    if damaged:
        raise MismatchError(
            f"{who}: what ranks {damaged} have told of their models was damaged on its way here, so nobody can say "
            f"whether the models of this group agree. Collectives carry no checksums: see the events of kind link"
        )
    if (rows[:, 0] == rows[0, 0]).all():
        raise MismatchError(f"{who}: ranks {off} average with guard=False, ranks {on} with guard=True: agree")
    others = [int(rank) for rank in np.flatnonzero(rows[:, 0] != rows[0, 0])]
    texts = comm.allgather(layout.text)
    difference = Layout.parse(texts[0]).difference(Layout.parse(texts[others[0]]))
    raise MismatchError(
        f"{who}: the models of this group differ, so they cannot be averaged: between rank 0 (here) "
        f"and rank {', '.join(map(str, others))} (there), {difference}. Build equal models on all ranks, "
        f"or use a selective policy, which matches tensors by name"
    )
