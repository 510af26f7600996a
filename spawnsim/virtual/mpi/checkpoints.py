"""`comm.checkpoint` and `comm.restore` on virtual ranks: a cut through all ranks at the end of an iteration.

All members bring what they exchange to an end (`SpawnPolicy.drain`), meet, and each keeps what it is: its program's
states, and its own (clock, random streams, counters, digest, messages that nobody has received yet). The last one to
do so writes all of them in one shard. A greenlet's stack cannot be kept, so a resumed run begins its program again, and
`restore()` puts each rank where the cut was: whatever it did before is forgotten, its clock and its digest included.
From there on it is the run that was not interrupted, with the same digest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spawnsim import checkpoints
from spawnsim.checkpoints import Found, Part, Saved, Shard
from spawnsim.errors import ParameterError, UsageError
from spawnsim.virtual.engine.completion import Message
from spawnsim.virtual.engine.matching import undelivered
from spawnsim.virtual.reproducibility import generators_of

if TYPE_CHECKING:
    from spawnsim.virtual.engine.world import Rank, World
    from spawnsim.virtual.mpi.context import Member

LEAST_S = 1e-6  # of virtual time between two ranks' last act before a cut and their first one after it


@dataclass
class Checkpoints:
    """What the ranks of a run have saved.

    Args:
        folder: the run folder; None: kept in memory, for ranks that the fault plan restarts.
        resumed: begin with the newest checkpoint of the folder.
        flush: called before a checkpoint is written: rows of before it must not be lost after it.
        again: whether ranks may ask during the run for what they have saved, since the plan restarts some.
    """

    folder: Path | None = None
    resumed: bool = False
    again: bool = False
    flush: Callable[[], object] = int
    # By iteration and communicator, by world rank: what a death has cut short is not mixed with what comes after it.
    _parts: dict[tuple[int, int], dict[int, Shard]] = field(default_factory=dict)
    _latest: dict[int, Shard] = field(default_factory=dict)  # by world rank
    _found: Found | None = None  # the checkpoint to begin with
    _whole: tuple[Shard, dict[str, Any]] | None = None  # its file, if it is one

    def keep(self, iteration: int, rank: int, shard: Shard, comm: Member) -> None:
        """Take a rank's part; the last one of the communicator writes all."""
        parts, members = self._parts.setdefault((iteration, comm._context.number), {}), comm._members
        parts[rank] = shard
        if len(parts) < len(members):
            return
        # Rounds that a death has cut short are not waited for any more.
        self._parts = {later: each for later, each in self._parts.items() if later[0] > iteration}
        if self.folder is not None:
            self.flush()
            together = Shard()
            for member in members:
                together.document |= parts[member].document
                together.tensors |= parts[member].tensors
            clocks_s = [parts[member].document[f"{member}/rank"]["clock_s"] for member in members]
            about = {"iteration": iteration, "ranks": list(members), "clocks_s": clocks_s}
            checkpoints.write(checkpoints.shard_path(self.folder, iteration, len(members)), together, about)
            checkpoints.prune(self.folder)
        if self.again:
            self._latest |= parts

    def latest(self, rank: int, incarnation: int, ranks: int) -> Part | None:
        """Return what a rank of so many is to begin with: None if there is nothing."""
        if incarnation and rank in self._latest:
            return Part(self._latest[rank], f"{rank}/", rank, False)
        if not self.resumed:
            return None
        assert self.folder is not None
        if self._found is None:
            self._found = checkpoints.newest(self.folder)
            if len(self._found.files) == 1:
                self._whole = checkpoints.read(self._found.files[0])
        return checkpoints.part_of(self._found, rank, self._whole, size=ranks)


# ------------------------------------------------------------------------------------------------------------- calls
def checkpoint(comm: Member, iteration: int, *, policy: Any, **states: Any) -> None:
    """Keep what all members are; collective."""
    iteration = checkpoints.require_iteration(iteration)
    world, rank = comm._world, comm._rank
    if policy is not None and hasattr(policy, "drain"):
        policy.drain()
    meet: Any = comm
    meet.Barrier()  # whatever was sent before the cut is on its way
    shard = Shard()
    place = f"{rank.id}/"
    states = checkpoints.states_of(**states, policy=policy)
    for name, state in {"iteration": iteration, **states, "messages": _messages(world, rank)}.items():
        shard.put(place + name, state)
    storage = world.platform.storage
    comm._own.clock.sleep(max(storage.seconds(shard.nbytes), LEAST_S))
    meet.Barrier()  # nobody goes on before all have kept what was sent to them
    comm._own.record.event("checkpoint", iteration=iteration, nbytes=shard.nbytes)
    # Later than all that was recorded before it, and not later than what comes after it: rows are told apart so.
    comm._own.clock.sleep(LEAST_S)
    shard.put(place + "rank", _rank_state(comm))
    world.checkpoints.keep(iteration, rank.id, shard, comm)


def restore(comm: Member, **whose: Any) -> Saved | None:
    """Return what was saved, or None; in a resumed run collective: all go on where the cut was."""
    world, rank = comm._world, comm._rank
    meet: Any = comm
    if world.checkpoints.resumed and not rank.incarnation:
        meet.Barrier()  # nobody is where the cut was before all have come so far
    part: Part | None = world.checkpoints.latest(rank.id, rank.incarnation, len(world.ranks))
    if part is None:
        return None
    saved, own = part.saved(), part.get("rank")
    try:
        if rank.incarnation:
            # A rank that was restarted has lost its memory, and not the others' time: it reads what it had saved.
            checkpoints.set_streams(rank.streams, own["streams"])
            comm._own.clock.sleep(world.platform.storage.seconds(part.nbytes))
        elif part.same and "digest" in own:
            _set_rank(comm, own, part.get("messages"))
        else:  # other ranks, or a checkpoint of real ones: it is another run from here on
            if part.donor == rank.id:
                checkpoints.set_streams(rank.streams, own["streams"])
            rank.advance_to(world.kernel.current, float(own["clock_s"]))
            world.kernel.observe()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ParameterError):
            raise
        raise ParameterError(f"the checkpoint is damaged: rank {part.donor}: {error!r}") from error
    checkpoints.load(saved, **whose)
    return saved


# ------------------------------------------------------------------------------------------------------ a rank's own
def _rank_state(comm: Member) -> dict[str, Any]:
    """Return what a rank is beside its program's states, at the end of a checkpoint."""
    world, rank = comm._world, comm._rank
    links, batching = world.links, world.batching
    return {
        "clock_s": world.kernel.current.clock,
        "digest": rank.digest.cut(),
        "counts": [rank.digest.count, rank.digest.contents, rank.messages, rank.nbytes],
        "compute_s": rank.compute_s,
        "free_s": [rank.nic_free_s, rank.bulk_free_s],
        "streams": checkpoints.streams_state(rank.streams),
        "generators": None if rank.generators is None else rank.generators.state(),
        "sampled": comm._own.compute.sampler_counts(),
        "calls": comm._context.calls.get(rank.id, 0),
        "contexts": world.contexts,
        "links": None if links is None else links.sent_by(rank.id),
        "batched": batching.batched,
        "told": batching.warned(rank.id),
    }


def _set_rank(comm: Member, state: Mapping[str, Any], messages: list[Any]) -> None:
    """Put a rank where a cut was."""
    world, rank = comm._world, comm._rank
    clock_s = float(state["clock_s"])
    if not world.kernel.current.clock <= clock_s < math.inf:
        raise ParameterError(
            f"rank {rank.id} comes to restore() at {world.kernel.current.clock:.6g} s, and was saved at {clock_s:.6g} "
            "s: is this the program that saved it?"
        )
    count, contents, messages_sent, nbytes = state["counts"]
    rank.digest.resume(bytes.fromhex(state["digest"]), int(count), int(contents))
    rank.messages, rank.nbytes, rank.compute_s = int(messages_sent), int(nbytes), float(state["compute_s"])
    rank.nic_free_s, rank.bulk_free_s = map(float, state["free_s"])
    checkpoints.set_streams(rank.streams, state["streams"])
    if state["generators"] is not None:
        generators_of(world.kernel.current).set_state(state["generators"])
    comm._own.compute.sample_on(*map(int, state["sampled"]))
    comm._context.calls[rank.id] = int(state["calls"])
    world.contexts = max(world.contexts, int(state["contexts"]))
    if world.links is not None and state["links"] is not None:
        world.links.go_on(rank.id, state["links"])
    world.batching.go_on(rank.id, batched=bool(state["batched"]), warned=state.get("told", ()))
    for number, each in messages:
        _deliver(world, rank, int(number), each)
    world.crashes.skip(rank, clock_s)  # deaths of before the cut are past
    rank.advance_to(world.kernel.current, clock_s)
    world.kernel.observe()


def _messages(world: World, rank: Rank) -> list[Any]:
    """Return the messages to a rank that nobody has received: (number of the context, what is known of it)."""
    found = []
    for context in sorted(world.open_contexts, key=lambda each: each.number):
        mailbox = None if context.inner else context.mailboxes.get(rank.id)
        if mailbox is None or not context.takes(rank.id):
            continue
        left = sorted(undelivered(mailbox), key=lambda each: each.number)
        found += [(context.number, _message_state(rank, context.label, each)) for each in left]
    return found


def _message_state(rank: Rank, label: str, message: Message) -> dict[str, Any]:
    if message.arrival_s is None or message.sender is not None:
        raise UsageError(
            f"rank {rank.id}: a checkpoint cuts through a message of {message.nbytes:,} bytes from rank "
            f"{message.source} on {label}, tag {message.tag}, whose sender waits: receive it before"
        )
    payload = message.payload
    if isinstance(payload, (bytes, bytearray)):
        import numpy as np

        payload = [np.frombuffer(bytes(payload), np.uint8)]
    return {
        "source": message.source, "tag": message.tag, "nbytes": message.nbytes, "payload": payload,
        "times_s": [message.envelope_s, message.arrival_s, message.receive_s, message.drain_s],
    }  # fmt: skip


def _deliver(world: World, rank: Rank, number: int, state: Mapping[str, Any]) -> None:
    """Put a message back into a rank's mailbox."""
    for context in world.open_contexts:
        if context.number == number:
            payload = state["payload"]
            if isinstance(payload, list):
                payload = payload[0].tobytes()
            message = Message(int(state["source"]), int(state["tag"]), payload, int(state["nbytes"]))
            message.envelope_s, message.arrival_s, message.receive_s, message.drain_s = map(
                float, state["times_s"]
            )
            context.mailbox(rank.id).deliver(message)
            return
    raise ParameterError(
        f"rank {rank.id} was saved with a message on communicator {number}, which this program has not made before "
        "restore()"
    )
