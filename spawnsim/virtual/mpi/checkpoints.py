"""`comm.checkpoint` and `comm.restore` on virtual ranks: a cut through all ranks at the end of an iteration.

At a checkpoint all members complete their pending exchanges (`SpawnPolicy.drain`) and meet. Each member then saves the
states of its program and its own state: clock, random streams, counters, digest and the messages that are not received
yet. The last member to save writes all parts in one shard. A greenlet's stack cannot be saved, so a resumed run starts
its program from the beginning. `restore()` then moves each rank to the cut and discards everything that the rank did
before, including its clock and digest. From there on the run equals the uninterrupted run and has the same digest.
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

LEAST_S = 1e-6  # of virtual time between a rank's last event before a cut and its first one after it


@dataclass
class Checkpoints:
    """The parts that the ranks of a run have saved.

    Args:
        folder: The run folder. None keeps the parts in memory, for ranks that the fault plan restarts.
        resumed: Whether the run begins with the newest checkpoint of the folder.
        flush: Called before a checkpoint is written, so that rows recorded before it are not lost.
        again: Whether the plan restarts ranks, which then ask during the run for the parts that they have saved.
    """

    folder: Path | None = None
    resumed: bool = False
    again: bool = False
    flush: Callable[[], object] = int
    # By iteration and communicator, then by world rank: a checkpoint that a death interrupted does not mix with later
    # ones.
    _parts: dict[tuple[int, int], dict[int, Shard]] = field(default_factory=dict)
    _latest: dict[int, Shard] = field(default_factory=dict)  # by world rank
    _found: Found | None = None  # the checkpoint to begin with
    _whole: tuple[Shard, dict[str, Any]] | None = None  # the file's contents, if it is one file

    def keep(self, iteration: int, rank: int, shard: Shard, comm: Member) -> None:
        """Store a rank's part; the last part of the communicator triggers the write."""
        parts, members = self._parts.setdefault((iteration, comm._context.number), {}), comm._members
        parts[rank] = shard
        if len(parts) < len(members):
            return
        # Checkpoints that a death interrupted are no longer awaited.
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
        """Return the part with which a rank of `ranks` ranks begins, or None."""
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
    """Save the state of all members; collective."""
    iteration = checkpoints.require_iteration(iteration)
    world, rank = comm._world, comm._rank
    if policy is not None and hasattr(policy, "drain"):
        policy.drain()
    meet: Any = comm
    meet.Barrier()  # every message sent before the cut is now on its way
    shard = Shard()
    place = f"{rank.id}/"
    states = checkpoints.states_of(**states, policy=policy)
    for name, state in {"iteration": iteration, **states, "messages": _messages(world, rank)}.items():
        shard.put(place + name, state)
    storage = world.platform.storage
    comm._own.clock.sleep(max(storage.seconds(shard.nbytes), LEAST_S))
    meet.Barrier()  # no rank continues before every rank has saved the messages sent to it
    comm._own.record.event("checkpoint", iteration=iteration, nbytes=shard.nbytes)
    # Later than everything recorded before it, and not later than anything after it: this separates the rows.
    comm._own.clock.sleep(LEAST_S)
    shard.put(place + "rank", _rank_state(comm))
    world.checkpoints.keep(iteration, rank.id, shard, comm)


def restore(comm: Member, **whose: Any) -> Saved | None:
    """Return the saved states, or None. In a resumed run it is collective: all ranks continue from the cut."""
    world, rank = comm._world, comm._rank
    meet: Any = comm
    if world.checkpoints.resumed and not rank.incarnation:
        meet.Barrier()  # no rank moves to the cut before all ranks have called restore()
    part: Part | None = world.checkpoints.latest(rank.id, rank.incarnation, len(world.ranks))
    if part is None:
        return None
    saved, own = part.saved(), part.get("rank")
    try:
        if rank.incarnation:
            # A restarted rank has lost its memory, but virtual time does not go back: it reads its saved part.
            checkpoints.set_streams(rank.streams, own["streams"])
            comm._own.clock.sleep(world.platform.storage.seconds(part.nbytes))
        elif part.same and "digest" in own:
            _set_rank(comm, own, part.get("messages"))
        else:  # other ranks, or a checkpoint of real ranks: from here on it is a different run
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


# ------------------------------------------------------------------------------------------------ state of one rank
def _rank_state(comm: Member) -> dict[str, Any]:
    """Return the state of a rank at the end of a checkpoint, without its program's states."""
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
    """Move a rank to the cut."""
    world, rank = comm._world, comm._rank
    clock_s = float(state["clock_s"])
    if not world.kernel.current.clock <= clock_s < math.inf:
        raise ParameterError(
            f"rank {rank.id} reached restore() at {world.kernel.current.clock:.6g} s, but was saved at {clock_s:.6g} "
            "s: restore a checkpoint in the program that saved it"
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
        world.links.resume(rank.id, state["links"])
    world.batching.resume(rank.id, batched=bool(state["batched"]), warned=state.get("told", ()))
    for number, each in messages:
        _deliver(world, rank, int(number), each)
    world.crashes.skip(rank, clock_s)  # deaths before the cut are past
    rank.advance_to(world.kernel.current, clock_s)
    world.kernel.observe()


def _messages(world: World, rank: Rank) -> list[Any]:
    """Return the messages to a rank that are not received yet: (context number, state of the message)."""
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
            f"{message.source} on {label}, tag {message.tag}, whose sender waits: receive it before the checkpoint"
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
        f"rank {rank.id} was saved with a message on communicator {number}, which this program did not create before "
        "restore(): create the same communicators first"
    )
