"""Intercommunicators: two groups that talk to each other.

In a collective of an intercommunicator each group gets what the other contributes. This room knows those rules; the
meeting is that of all ranks of both groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spawnsim.comm import reductions
from spawnsim.comm.buffers import as_buffer
from spawnsim.comm.constants import PROC_NULL, ROOT
from spawnsim.comm.failures import ERR_COMM, CallError
from spawnsim.comm.group import Group
from spawnsim.comm.info import INFO_NULL, Info
from spawnsim.comm.integers import integer
from spawnsim.comm.ops import SUM, Op
from spawnsim.virtual.comm import plans
from spawnsim.virtual.comm.communicators import Comm, Intracomm
from spawnsim.virtual.comm.context import Context
from spawnsim.virtual.comm.payload import dumps, loads
from spawnsim.virtual.meeting import Call, Meeting


def _theirs(meeting: Meeting, me: int) -> list[Any]:
    return meeting.parts(me)


class Intercomm(Comm):
    """A communicator with two groups. Ranks in its calls are ranks of the *other* group."""

    __slots__ = ()

    def Get_remote_group(self) -> Group:
        """Return the other group."""
        self._need()
        return Group.of(tuple(self._peers), self._rank.id)

    def Get_remote_size(self) -> int:
        """Return the number of ranks of the other group."""
        self._need()
        return len(self._peers)

    @property
    def remote_group(self) -> Group:
        """The other group."""
        return self.Get_remote_group()

    @property
    def remote_size(self) -> int:
        """The number of ranks of the other group."""
        return self.Get_remote_size()

    def Merge(self, high: bool = False) -> Intracomm:
        """Return a communicator of both groups; those with `high` come last."""

        def make(parts: list[bool]) -> Context:
            first, second = self._context.sides
            swap = parts[0] and not parts[len(first)]
            return self._context.derive(second + first if swap else first + second)

        new = Intracomm.enter(self._agree("Merge", bool(high), make), self._rank.id)
        new._own = self._own
        return new

    @classmethod
    def Create_from_groups(
        cls, local_group: Group, local_leader: int, remote_group: Group, remote_leader: int,
        stringtag: str = "org.mpi4py", info: Info = INFO_NULL, errhandler: Any = None,
    ) -> Intercomm:  # fmt: skip
        """Return an intercommunicator of two groups, whose members alone call, out of COMM_WORLD."""
        from spawnsim.virtual.comm.calling import held
        from spawnsim.virtual.comm.subgroups import create_from_group

        local, world = create_from_group(local_group, stringtag, errhandler), held("COMM_WORLD")
        leader = remote_group.members[integer(remote_leader)]
        made: Intercomm = local.Create_intercomm(local_leader, world, leader)
        if errhandler is not None:
            made.Set_errhandler(errhandler)
        local.Free()
        return made

    # -- collectives -------------------------------------------------------------------------------------------

    def _root(self, root: int) -> int:
        root = integer(root)
        if root not in (ROOT, PROC_NULL):
            self._check_root(root)
        return root

    # Rooted collectives: ROOT at the root, PROC_NULL beside it, the root's rank in the other group.

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """Send the root's buffer to all ranks of the other group."""
        self._rooted("Bcast", as_buffer(buf).pack() if root == ROOT else None, root, as_buffer(buf).unpack)

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Collect the blocks of the other group at the root."""
        self._to_root("Gather", sendbuf, root, lambda: plans._fill(recvbuf, blocks=len(self._peers)))

    def Gatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Collect unequal blocks of the other group at the root."""
        self._to_root(
            "Gather", sendbuf, root, lambda: plans._fill(recvbuf, vector=True, blocks=len(self._peers))
        )

    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Hand out blocks of the root's buffer to the other group."""
        self._from_root(sendbuf, recvbuf, root, vector=False)

    def Scatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Hand out unequal blocks of the root's buffer to the other group."""
        self._from_root(sendbuf, recvbuf, root, vector=True)

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> None:
        """Combine the other group's buffers at the root."""

        def collect() -> Any:
            target = as_buffer(recvbuf, writable=True)
            merge = plans.merger(op, target)
            return lambda parts: target.unpack(reductions.tree(list(parts), merge))

        self._to_root("Reduce", sendbuf, root, collect)

    def _rooted(self, name: str, part: Any, root: int, receive: Any) -> None:
        root = self._root(root)
        received = self._meet(
            Call(name, "allgather", part, 0 if part is None else part.nbytes, outcome=_theirs)
        )
        if root >= 0:
            receive(received[root])

    def _to_root(self, name: str, sendbuf: Any, root: int, collect: Callable[[], Any]) -> None:
        root = self._root(root)
        part = as_buffer(sendbuf).pack() if root >= 0 else None
        received = self._meet(
            Call(name, "allgather", part, 0 if part is None else part.nbytes, outcome=_theirs)
        )
        if root == ROOT:
            collect()(received)

    def _from_root(self, sendbuf: Any, recvbuf: Any, root: int, vector: bool) -> None:
        blocks, root = None, self._root(root)
        if root == ROOT:
            blocks = [block.pack() for block in as_buffer(sendbuf, vector=vector, blocks=len(self._peers))]
        nbytes = sum(block.nbytes for block in blocks or ())
        received = self._meet(Call("Scatter", "allgather", blocks, nbytes, outcome=_theirs))
        if root >= 0:
            as_buffer(recvbuf, writable=True).unpack(received[root][self._me])

    # Objects

    def _objects(self, name: str, part: Any) -> list[Any]:
        return self._meet(Call(name, "allgather", part, 8, outcome=_theirs))  # type: ignore[no-any-return]

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the root's object in the other group, None in its own."""
        root = self._root(root)
        received = self._objects("bcast", dumps(obj) if root == ROOT else None)
        return loads(received[root]) if root >= 0 else None

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Return the other group's objects at the root."""
        root = self._root(root)
        received = self._objects("gather", dumps(sendobj) if root >= 0 else None)
        return [loads(part) for part in received] if root == ROOT else None

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        """Return this rank's item of the root's sequence."""
        root = self._root(root)
        received = self._objects("scatter", self._one_each(sendobj) if root == ROOT else None)
        return loads(received[root][self._me]) if root >= 0 else None

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return the other group's objects."""
        return [loads(part) for part in self._objects("allgather", dumps(sendobj))]

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Return, from every rank of the other group, its item for this one."""
        return [loads(part[self._me]) for part in self._objects("alltoall", self._one_each(sendobj))]

    def reduce(self, sendobj: Any, op: Op = SUM, root: int = 0) -> Any:
        """Return the combination of the other group's objects at the root."""
        root = self._root(root)
        received = self._objects("reduce", dumps(sendobj) if root >= 0 else None)
        return reductions.binomial([loads(part) for part in received], op) if root == ROOT else None

    def allreduce(self, sendobj: Any, op: Op = SUM) -> Any:
        """Return the combination of the other group's objects."""
        return reductions.binomial([loads(part) for part in self._objects("allreduce", dumps(sendobj))], op)


def create_intercomm(
    self: Intracomm, local_leader: int, peer_comm: Intracomm, remote_leader: int, tag: int = 0
) -> Intercomm:
    """Join this communicator's group with another one; the leaders meet on `peer_comm`."""
    self._need()
    local_leader, remote_leader, tag = integer(local_leader), integer(remote_leader), integer(tag)
    key, context = ("intercomm", tag), None
    if self._me == local_leader:
        theirs = peer_comm.sendrecv(self._members, remote_leader, tag, None, remote_leader, tag)
        if set(theirs) & set(self._members):
            raise CallError(ERR_COMM, "Create_intercomm: the two groups share ranks")
        sides = tuple(sorted((tuple(self._members), tuple(theirs))))
        meetings = peer_comm._context.notes.setdefault(key, {})
        context = meetings.pop(sides, None)  # the leader that comes second takes what the first has made
        if context is None:
            context = meetings[sides] = self._context.derive(*sides)
            context.ancestors |= peer_comm._context.ancestors | {peer_comm._context.number}
    shared = self._agree("Create_intercomm", context, lambda parts: parts[local_leader])
    new = Intercomm.enter(shared, self._rank.id)
    new._own = self._own
    return new
