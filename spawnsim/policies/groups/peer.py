"""One rank of averaging in groups, seen from its machines: what the desk, a step and a donor ask of it.

This room holds what survives a step: the tensors, the group key, the round, the directory's share, the donor. How a
user sees it is the averager's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch

from spawnsim.comm import Comm
from spawnsim.errors import UsageError
from spawnsim.policies.codecs import Codec
from spawnsim.policies.groups.butterfly import Group, Member
from spawnsim.policies.groups.compression import CompressionInfo, check_infos, codecs_for, described
from spawnsim.policies.groups.desk import Desk
from spawnsim.policies.groups.keys import next_bits
from spawnsim.policies.groups.loading import Donor, Loading
from spawnsim.policies.groups.parts import Values, Vector
from spawnsim.policies.groups.results import Averaged
from spawnsim.policies.groups.settings import Settings
from spawnsim.policies.groups.sharing import State
from spawnsim.policies.groups.steps import Steps
from spawnsim.policies.groups.words import Kind, Word

# Prefixes of the peers that have not been shut down, by rank (its clock; virtual ranks' communicators are equal),
# communicator and tag: two would take each other's words. A communicator lives as long as its peers do.
_LIVE: WeakKeyDictionary[Any, WeakKeyDictionary[Comm, dict[int, str]]] = WeakKeyDictionary()


class Peer:
    """One rank's state between steps, and what its machines call."""

    bits: str

    def __init__(
        self, tensors: Sequence[torch.Tensor], comm: Comm, settings: Settings,
        infos: Sequence[CompressionInfo] | None, *, shares: bool,
    ) -> None:  # fmt: skip
        self.settings, self.tensor_infos, self.comm = settings, infos, comm
        self.vector = Vector(tensors, self.codecs(tensors))
        self.residuals: list[Values] | None = self.vector.zeros() if settings.error_feedback else None
        self.rank, self.size, self.round = comm.Get_rank(), comm.Get_size(), 0
        self._register()
        self.desk = Desk(comm, settings, self)
        self.asker = self.desk.asker
        self.donor = Donor(self.desk, sharing=shares)
        self.steps = Steps(self, self.desk)
        self.loading: Loading | None = None
        self._tensors = Lock()

    def codecs(self, tensors: Sequence[torch.Tensor]) -> list[Codec]:
        """Return the codec of each averaged tensor."""
        if self.tensor_infos is not None:
            check_infos(self.tensor_infos, tensors)
        return codecs_for(self.settings.compression, self.tensor_infos or described(tensors))

    def _register(self) -> None:
        """Refuse to take the words of another averager of this rank."""
        live, tag = self._live(), self.settings.tag_or_default
        other = live.get(tag)
        if other == self.settings.prefix:
            raise UsageError(
                f"rank {self.rank}: there is an averager with prefix={other!r} on this communicator already: "
                "shutdown() that one first, or give this one another prefix"
            )
        if other is not None:
            raise UsageError(
                f"rank {self.rank}: the averagers with prefix={other!r} and prefix={self.settings.prefix!r} have the "
                f"tag {tag} in common: give one of them another, tag=..., on all ranks"
            )
        live[tag] = self.settings.prefix

    def deregister(self) -> None:
        """Let another averager of this rank take the prefix."""
        self._live().pop(self.settings.tag_or_default, None)

    def _live(self) -> dict[int, str]:
        """Return this rank's prefixes on this communicator, by tag."""
        return _LIVE.setdefault(self.comm.clock, WeakKeyDictionary()).setdefault(self.comm, {})

    # --------------------------------------------------------------------------------------------- the tensors
    def borrow(self) -> bool:
        """Take the tensors if nobody else has them."""
        return self._tensors.acquire(blocking=False)

    def hand_back(self) -> None:
        """Give the tensors back."""
        self._tensors.release()

    def get_current_state(self) -> State:
        """Return (small metadata, tensors, their `CompressionInfo`s or None) for newcomers. Meant to be overridden.

        An override may leave the third out. By default: the group key's bits, and the averaged tensors.
        """
        return {"group_key": self.bits}, self.vector.tensors, self.tensor_infos

    # ------------------------------------------------------------------------------------------- for the desk
    def handle(self, source: int, word: Word, now_s: float) -> None:
        """Take a word. The desk calls this."""
        if word.kind is Kind.FETCH:
            self.donor.asked(source, word)
        elif word.kind in (Kind.STATE, Kind.LISTED):
            if self.loading is not None:
                self.loading.handle(source, word, now_s)
        else:
            self.steps.handle(source, word, now_s)

    def listed(self, key: str, now_s: float) -> None:
        """Take note that the directory has answered. The desk calls this."""
        step = self.steps.current
        if step is not None and step.seeking is not None and key == step.seeking.key:
            step.seeking.listed(now_s)

    def tick(self, now_s: float, dead: set[int], changed: set[str]) -> None:
        """Do what is due. The desk calls this."""
        self.steps.tick(now_s, dead, changed)
        if self.loading is not None and not self.loading.done():
            self.loading.tick(now_s, dead)
        self.donor.declare(now_s)
        if self.donor.waiting and self.borrow():
            try:
                self.donor.answer(self.get_current_state)
            finally:
                self.hand_back()

    def wake_s(self) -> float:
        """Return when `tick` is next needed."""
        times = [self.donor.wake_s(), self.steps.wake_s()]
        if self.loading is not None and not self.loading.done():
            times.append(self.loading.wake_s())
        return min(times)

    @property
    def failed(self) -> set[int]:
        """The ranks that are known to be dead."""
        return self.desk.post.failed

    def early(self, number: int) -> list[tuple[int, Word]]:
        """Return the words of a group that came before the group was known here."""
        return self.steps.early(number)

    def formed(self, group: Group, led: bool) -> None:
        """Take note of a formed group: the members scatter over the keys of the next round."""
        self.steps.note_group(group.number)
        index, size = group.ranks.index(self.rank), len(group.members)
        target = self.settings.target_group_size
        self.bits = next_bits(self.bits, group.number, index=index, group_size=size, target=target)
        if led:
            self.comm.record.event(
                "group", key=group.key, members=list(group.ranks), size=size, round=self.round
            )

    def averaged(self, result: Averaged) -> None:
        """Take note of a result: one that is not whole is an event of the run."""
        self.donor.renew(self.comm.clock.now())
        if not result.complete:
            missing = {str(rank): share for rank, share in result.missing.items()}
            self.comm.record.event(
                "partial_average", round=self.round, received=result.received, missing=missing
            )

    def number(self) -> int:
        """Draw a number that nobody else draws."""
        return int(self.comm.rng("groups.number").integers(1, 2**62))

    def shuffled(self, members: list[Member]) -> list[Member]:
        """Return the members in a random order."""
        order = self.comm.rng("groups.order").permutation(len(members))
        return [members[index] for index in order]
