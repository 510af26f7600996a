"""Partitioned communication: a message whose parts the sender marks as ready one by one (`Psend_init`, `Pready`).

Each partition travels as a message of its own, when it is ready, on a communicator that the program does not see.
Sends and receives match in the order in which they are prepared, as MPI requires; wildcards do not exist.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from spawnsim.comm.buffers import as_buffer
from spawnsim.comm.constants import PROC_NULL
from spawnsim.comm.failures import ERR_ARG, ERR_REQUEST, CallError
from spawnsim.comm.handles import integer
from spawnsim.comm.status import Status
from spawnsim.errors import UnsupportedError
from spawnsim.virtual.engine.completion import AllOf, Completion
from spawnsim.virtual.engine.wire import STANDARD
from spawnsim.virtual.mpi.context import Context, Member, receive_nothing
from spawnsim.virtual.mpi.requests import Request, fill, request_for


class Growing(AllOf):
    """Complete when a known number of parts, which are added one by one, are."""

    __slots__ = ("count",)

    def __init__(self, world: Any, count: int) -> None:
        self.count = count
        super().__init__(world.kernel, [])

    def add(self, part: Completion) -> None:
        """Add a part."""
        self.parts = [*self.parts, part]
        part.dependents = [*(part.dependents or ()), self]
        self.part_over()

    def part_over(self) -> None:
        if len(self.parts) == self.count:
            super().part_over()


class Partitioned:
    """One end of a partitioned message: its partitions, and their tags on the hidden communicator."""

    def __init__(self, comm: Member, buf: Any, partitions: int, peer: int, tag: int, *, sends: bool) -> None:
        self.comm, self.partitions = comm, integer(partitions)
        self.peer, self.tag, self.sends = integer(peer), integer(tag), sends
        if self.partitions < 1:
            raise CallError(ERR_ARG, f"{self.partitions} partitions: give at least 1")
        if self.peer == PROC_NULL:
            comm._need()
        else:
            comm._check_peer(self.peer, self.tag)
        self.buffer: Any = as_buffer(buf, blocks=self.partitions, writable=not sends)
        self.hidden = comm._entered(_hidden(comm._context))
        self.first = self._match()
        self.unready: set[int] = set()
        self.sent: Growing | None = None
        self.parts: list[Request] = []

    def _match(self) -> int:
        """Return the tag of the first partition: the same one for the n-th send and the n-th receive of a pair."""
        if self.peer == PROC_NULL:
            return 0
        here, there = self.comm._rank.id, self.comm._peers[self.peer]
        pair = (here, there, self.tag) if self.sends else (there, here, self.tag)
        notes = self.hidden._context.notes
        turn = notes[self.sends, pair] = notes.get((self.sends, pair), -1) + 1
        first, count = notes.setdefault((pair, turn), (notes.get("tags", 0), self.partitions))
        notes["tags"] = max(notes.get("tags", 0), first + count)
        if count != self.partitions:
            raise UnsupportedError(
                f"{self._name()}: {self.partitions} partitions, and rank {self.peer} has {count}; virtual ranks need "
                "the same number at both ends"
            )
        return int(first)

    def _name(self) -> str:
        return "Psend_init" if self.sends else "Precv_init"

    # -- the sender's end --------------------------------------------------------------------------------------

    def begin_sending(self) -> Request:
        """Start to send: no partition is ready."""
        world = self.comm._world
        self.unready, self.sent = set(range(self.partitions)), Growing(world, self.partitions)
        about = self.comm, "Psend, until all partitions are ready", self.peer, self.tag, "dest"
        return request_for(world, self.sent, None if self.peer == PROC_NULL else about)

    def ready(self, partitions: Iterable[int]) -> None:
        """Send partitions, with the content that the buffer has now."""
        world = self.comm._world
        for partition in map(integer, partitions):
            if not self.sends or partition not in self.unready or self.sent is None:
                raise CallError(
                    ERR_REQUEST if 0 <= partition < self.partitions else ERR_ARG,
                    f"Pready({partition}) of {self._name()}: partitions {sorted(self.unready)} can become ready",
                )
            self.unready.remove(partition)
            payload = self.buffer.block(partition).pack()
            transfer = self.hidden._dispatch(
                payload, self.peer, self.first + partition, STANDARD, buf=self.buffer
            )
            self.sent.add(transfer or Completion(world.kernel, world.kernel.current.clock))

    # -- the receiver's end ------------------------------------------------------------------------------------

    def begin_receiving(self) -> Request:
        """Post the receive of each partition; return their common request."""
        self.parts = [
            self.hidden._irecv(self.peer, self.first + partition, "Precv", self.buffer.block(partition))
            for partition in range(self.partitions)
        ]
        world, parts = self.comm._world, [part._completion for part in self.parts]
        for part in self.parts:
            part._close()  # the program gets a single handle, and can free only that handle
        about = None if self.peer == PROC_NULL else (self.comm, "Precv", self.peer, self.tag)
        completions = [part for part in parts if part is not None]
        return request_for(world, AllOf(world.kernel, completions), about, self._collect)

    def arrived(self, partition: int) -> bool:
        """Return whether a partition is in the buffer; an observation. True for a request that is not active."""
        partition = integer(partition)
        if self.sends or not 0 <= partition < self.partitions:
            raise CallError(
                ERR_ARG, f"Parrived({partition}) of {self._name()} of {self.partitions} partitions"
            )
        return not self.parts or self.parts[partition].Get_status()

    def _collect(self, status: Status) -> None:
        parts, self.parts = self.parts, []
        for part in parts:
            part._collect(None)
        if self.peer == PROC_NULL:
            receive_nothing(status)
        else:
            fill(status, self.peer, self.tag, self.buffer.nbytes)


def _hidden(context: Context) -> Context:
    """Return the context on which partitions travel."""
    hidden: Context | None = context.notes.get("partitioned")
    if hidden is None:
        hidden = context.notes["partitioned"] = context.derive(*context.groups)
        hidden.lasting = True
    return hidden
