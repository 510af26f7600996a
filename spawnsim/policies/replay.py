"""A recorded run's decisions, repeated: same ranks, same iterations, same donors, same snapshots, same weights.

It reads "replacement" events, makes no decisions and compares no metrics. Where the recorded run did not wait, a replay
waits, so it works on any backend and gives the same parameters wherever the training itself is reproducible.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch

from spawnsim.comm import Comm, Status
from spawnsim.errors import UsageError
from spawnsim.policies.base import Info, SpawnPolicy
from spawnsim.policies.exchange.messages import Message, decode
from spawnsim.policies.exchange.replacement import (
    Explore,
    Gathering,
    ModelBuilder,
    Packer,
    Replacement,
    ReplacementRecord,
    Served,
)
from spawnsim.policies.state.codecs import Bytes, Codec
from spawnsim.policies.state.layout import ModelAndOptimizer, StateScope, Tensors, collect
from spawnsim.policies.state.snapshot import Compression

TAG = 7003


@dataclass(frozen=True, slots=True)
class RecordedReplacement:
    """One recorded replacement; ranks are ranks of the whole run."""

    iteration: int
    round: int
    replaced: int
    donors: tuple[int, ...]
    weights: tuple[float, ...]
    versions: tuple[int, ...]
    asked: int
    served: Served
    replacement: Replacement

    @classmethod
    def of(cls, event: Mapping[str, Any], replacement: Replacement) -> RecordedReplacement:
        """Return the replacement of one event, with the event's options and the given builder and explorer."""
        try:
            travels = replace(replacement.travels, optimizer_state=event["optimizer_state"])
            how: dict[str, Any] = {name: event[name] for name in ("strategy", "momentum", "rule")}
            numbers: dict[str, Any] = {
                name: int(event[name]) for name in ("iteration", "round", "replaced", "asked")
            }
            lists: dict[str, Any] = {name: tuple(event[name]) for name in ("donors", "weights", "versions")}
            replacement = replace(replacement, travels=travels, **how)
            return cls(**numbers, **lists, served=event["served"], replacement=replacement)
        except KeyError as missing:
            raise UsageError(
                f"a recorded replacement has no {missing}: was it recorded by spawnsim's policies?"
            ) from None


def replay(
    events: Iterable[Mapping[str, Any]], model_builder: ModelBuilder | None = None, *, explore: Explore | None = None,
    travels: StateScope | None = None, compression: str | Codec | None = None,
) -> ReplayPolicy:  # fmt: skip
    """Create a policy that repeats recorded decisions.

    Args:
        events: events of `Run.events`, or the lines of an events.jsonl.
        model_builder: the recorded run's `model_builder`.
        explore: the recorded run's `explore`.
        travels: the recorded run's; the events define the handling of the optimizer's state.
        compression: the recorded run's, if it was a custom codec; the events contain the name of any other codec.

    Returns:
        The policy, to be called like the recorded one.

    Raises:
        UsageError: a replacement in the events was not recorded by one of spawnsim's policies.
    """
    replacement = Replacement(model_builder, explore=explore, travels=travels or StateScope())
    return ReplayPolicy(events, replacement, compression)


class ReplayPolicy(SpawnPolicy):
    """Repeats recorded decisions; created by `replay`."""

    states = ("average", "replacement")

    def __init__(
        self,
        events: Iterable[Mapping[str, Any]],
        replacement: Replacement,
        compression: str | Codec | None = None,
    ) -> None:
        super().__init__()
        events = list(events)
        self.recorded = [
            RecordedReplacement.of(event, replacement)
            for event in events
            if event.get("kind") == "replacement"
        ]
        self._compressed: dict[int, str] = {
            event["rank"]: event["compression"] for event in events if event.get("kind") == "transport"
        }
        self._codec = Compression(compression)
        self._unpacker = Packer(2**62, compression=self._codec)
        self._due: dict[tuple[int, int], RecordedReplacement] = {
            (r.replaced, r.iteration): r for r in self.recorded
        }
        self._asked = {(r.replaced, r.asked): r for r in self.recorded}
        self._given: dict[tuple[int, int, str], list[RecordedReplacement]] = defaultdict(list)
        for each in self.recorded:
            for donor, version in zip(each.donors, each.versions, strict=True):
                self._given[donor, version, each.served].append(each)
        self._packer: Packer | None = None
        self._requests: list[tuple[Any, Bytes]] = []
        self._reference: Tensors = {}
        self._early: dict[tuple[int, int], Bytes] = {}  # (donor, round) → a snapshot for a later replacement
        self.idle_info["replacement_mode"] = "replay"

    def act(
        self,
        iteration: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        metric: float | None,
        comm: Comm,
        info: Info,
    ) -> ModelAndOptimizer:
        # Repeat this iteration's sends and replacements in the order of the recorded policy: in the two-sided policy
        # donors give before their own replacement, in the one-sided policy after it.
        me = comm.Get_group().members[comm.Get_rank()]
        self._give(comm, (me, iteration, "before"), model, optimizer)
        asking, due = self._asked.get((me, iteration)), self._due.get((me, iteration))
        if asking is not None:
            self._reference = asking.replacement.reference(model)
        if due is not None:
            model, optimizer = self._take_over(comm, due, (model, optimizer), info)
        self._give(comm, (me, iteration, "after"), model, optimizer)
        return model, optimizer

    def _give(
        self, comm: Comm, key: tuple[int, int, str], model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        members = comm.Get_group().members
        for each in self._given.get(key, ()):
            live = collect(model, optimizer, each.replacement.travels)
            for message in self._packing(key[0]).pack(live, each.round, key[1]):
                self._requests.append((comm.Isend(message, members.index(each.replaced), TAG), message))

    def _packing(self, me: int) -> Packer:
        """Return a packer with this rank's recorded compression."""
        if self._packer is None:
            named = self._compressed.get(me)
            same = named == self._codec.name
            self._packer = Packer(2**62, compression=self._codec if same else Compression(named))
        return self._packer

    def _take_over(
        self, comm: Comm, due: RecordedReplacement, whose: ModelAndOptimizer, info: Info
    ) -> ModelAndOptimizer:
        began_s, members = comm.clock.now(), comm.Get_group().members
        donors = [members.index(donor) for donor in due.donors]
        weights = dict(zip(donors, due.weights, strict=True))
        gathering, nbytes = Gathering(weights, due.replacement.travels, guard=False), 0
        for donor in donors:
            message = self._receive(comm, donor, due.round)
            gathering.add(donor, message.iteration, self._unpacker.unpack([message]), whose)
            nbytes += message.body.size
        contributions, recorded = gathering.finish(comm, whose)
        new = due.replacement(*whose, contributions, reference=self._reference, rng=comm.rng("explore"))
        self._reference = {}
        self.count_replacement()
        record = ReplacementRecord(
            due.iteration, due.round, due.asked, info["local_metric"], recorded,
            nbytes=nbytes, wait_s=comm.clock.now() - began_s,
            unmatched=new.unmatched,
        )  # fmt: skip
        record.publish(comm, info, self.num_replacements, due.replacement, served=due.served)
        return new.model, new.optimizer

    def _receive(self, comm: Comm, donor: int, round_: int) -> Message:
        """Return the donor's snapshot for a round; keep earlier messages for other rounds."""
        status = Status()
        while (donor, round_) not in self._early:
            # The recorded size is the tensors' size, not the message's, so each message is measured before it is
            # received. A donor may have sent snapshots for other rounds first: they are kept for later.
            cast("Any", comm).Probe(donor, TAG, status)
            buffer: Bytes = np.empty(status.Get_count(), np.uint8)
            comm.Recv(buffer, donor, TAG)
            self._early[donor, decode(buffer).number] = buffer
        return decode(self._early.pop((donor, round_)))

    def drain(self) -> None:
        """Refuse: a snapshot under way is received only at a later iteration.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "a replay cannot be cut by a checkpoint: take the recorded run's own checkpoint instead"
        )

    def shutdown(self) -> None:
        """Wait until all sent snapshots have been received; bounded by the communicator's deadline."""
        self._closed()
        while self._requests:
            self._requests.pop()[0].Wait()
