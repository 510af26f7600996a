"""The communicators: `Intracomm` and `Intercomm`, and the predefined COMM_WORLD and COMM_SELF.

Besides MPI's calls, each has the rank's own services: clock, compute, rng, background, record and check. COMM_WORLD and
COMM_SELF are objects that may be captured anywhere (a module imported once and shared by all ranks may keep `comm =
MPI.COMM_WORLD` in a global or a default argument): each use looks up the rank of the running task. In a collective of
an intercommunicator, each group gets the contribution of the other group.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from spawnsim.comm import ops
from spawnsim.comm.failures import ERR_COMM, CallError, SpecTypeError, lacking
from spawnsim.comm.group import Group
from spawnsim.comm.handles import INFO_NULL, Info, integer
from spawnsim.comm.ops import SUM, Op
from spawnsim.errors import UsageError
from spawnsim.importing import is_of_a_rank, loading
from spawnsim.virtual.engine.kernel import current_task, refuse_stray
from spawnsim.virtual.engine.world import Rank, World
from spawnsim.virtual.mpi.between_groups import BetweenGroups
from spawnsim.virtual.mpi.collectives import agreed_op, collective, folded
from spawnsim.virtual.mpi.comm import COMM_NULL, Comm
from spawnsim.virtual.mpi.context import KINDS, Context
from spawnsim.virtual.mpi.instance import Call, CollectiveInstance
from spawnsim.virtual.mpi.payload import dumps, loads
from spawnsim.virtual.mpi.spawning import spawn_one, spawn_several
from spawnsim.virtual.services import RankServices

COLLECTIVE = {"Dup", "Split"}
OF_ONE_RANK = {
    "rank",
    "Get_rank",
} | COLLECTIVE  # of COMM_WORLD: their results, which packages keep, differ between ranks


def __getattr__(name: str) -> Any:
    """Return one of MPI's names: packages look for them in the module of a communicator's class, as in mpi4py."""
    from spawnsim import comm

    if name.startswith("_") or not hasattr(comm, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(comm, name)


@lacking
class Intracomm(Comm):
    """A communicator with one group."""

    __slots__ = ()

    @classmethod
    def _check_context(cls, context: Context) -> None:
        if len(context.groups) > 1:
            raise SpecTypeError(f"{cls.__name__}(): expecting an intracommunicator")

    def Create_group(self, group: Group, tag: int = 0) -> Any:
        """Return a communicator of a group's members; only the members call."""
        return create_group(self, group, integer(tag))

    @classmethod
    def Create_from_group(
        cls, group: Group, stringtag: str = "org.mpi4py", info: Info = INFO_NULL, errhandler: Any = None
    ) -> Any:
        return create_from_group(group, stringtag, errhandler)

    def Create_cart(
        self, dims: Sequence[int], periods: Sequence[bool] | None = None, reorder: bool = False
    ) -> Any:
        """Return a grid of the first ranks; the remaining ranks get COMM_NULL."""
        # KINDS instead of an import: topology.py subclasses Intracomm, so importing it here would close a cycle.
        return KINDS["Cartcomm"]._create(self, dims, periods)

    def Create_graph(self, index: Sequence[int], edges: Sequence[int], reorder: bool = False) -> Any:
        """Return a graph of the first ranks; the remaining ranks get COMM_NULL."""
        return KINDS["Graphcomm"]._create(self, index, edges)

    def Create_dist_graph_adjacent(
        self, sources: Sequence[int], destinations: Sequence[int], sourceweights: Sequence[int] | None = None,
        destweights: Sequence[int] | None = None, info: Info = INFO_NULL, reorder: bool = False,
    ) -> Any:  # fmt: skip
        return KINDS["Distgraphcomm"]._create_adjacent(
            self, sources, destinations, (sourceweights, destweights)
        )

    def Create_dist_graph(
        self, sources: Sequence[int], degrees: Sequence[int], destinations: Sequence[int],
        weights: Sequence[int] | None = None, info: Info = INFO_NULL, reorder: bool = False,
    ) -> Any:  # fmt: skip
        return KINDS["Distgraphcomm"]._create(self, (sources, degrees, destinations), weights)

    def Create_intercomm(self, local_leader: int, peer_comm: Any, remote_leader: int, tag: int = 0) -> Any:
        """Join this communicator's group with another group; the leaders meet on `peer_comm`."""
        return create_intercomm(self, local_leader, peer_comm, remote_leader, tag)

    def Spawn(
        self, command: Any, args: Sequence[str] | None = None, maxprocs: int = 1, info: Info = INFO_NULL,
        root: int = 0, errcodes: list[int] | None = None,
    ) -> Any:  # fmt: skip
        """Start a Python program on new ranks; return the intercommunicator with them. Collective."""
        return spawn_one(self, (command, args, maxprocs), root, errcodes)

    def Spawn_multiple(
        self, command: Sequence[Any], args: Any = None, maxprocs: Any = None, info: Any = INFO_NULL, root: int = 0,
        errcodes: list[list[int]] | None = None,
    ) -> Any:  # fmt: skip
        """Start several Python programs, which share a COMM_WORLD; collective."""
        return spawn_several(self, (command, args, maxprocs, info), root, errcodes)

    def Cart_map(self, dims: Sequence[int], periods: Sequence[bool] | None = None) -> int:
        return KINDS["Cartcomm"]._map(self, dims)  # type: ignore[no-any-return]

    def Graph_map(self, index: Sequence[int], edges: Sequence[int]) -> int:
        return KINDS["Graphcomm"]._map(self, index, edges)  # type: ignore[no-any-return]

    def __reduce__(self) -> str | tuple[Any, ...]:
        # The predefined communicators are pickled as a name, which refers to the receiver's own COMM_WORLD or COMM_SELF
        # instead of the sender's.
        if name := self._predefined:
            own = predefined(name == "COMM_SELF")
            # A copy is pickled as a copy.
            return (predefined, (own is COMM_SELF,)) if held(name) is self else (type(self), (own,))
        return super().__reduce__()

    # -- collectives of a single group -------------------------------------------------------------------------

    @collective
    def Scan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Call:
        return self._scan(sendbuf, recvbuf, op, inclusive=True)

    @collective
    def Exscan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Call:
        return self._scan(sendbuf, recvbuf, op, inclusive=False)

    def scan(self, sendobj: Any, op: Op = SUM) -> Any:
        return self._prefix("scan", sendobj, op, 1)

    def exscan(self, sendobj: Any, op: Op = SUM) -> Any:
        """Return the combination of the objects of the ranks before this one; None on rank 0."""
        return self._prefix("exscan", sendobj, op, 0)

    def _prefix(self, name: str, sendobj: Any, op: Op, own: int) -> Any:
        part = dumps(sendobj)

        def outcome(instance: CollectiveInstance, rank: int) -> Any:
            # A rank may leave a prefix before later ranks arrive, so only the parts up to this rank may be read.
            parts = instance.parts()[: rank + own]
            # Strictly in rank order: MPI allows non-commutative operations, and a tree would change the bits of floats.
            return ops.reduce_ordered(parts, folded(op)) if parts else None

        combined = self._meet(Call(name, name, part, len(part), agree=agreed_op(op), outcome=outcome))
        return None if combined is None else loads(combined)


def held(name: str) -> Any:
    """Return the calling rank's object of this name. Raises `UsageError` outside virtual ranks."""
    task = current_task()
    if task is None:
        refuse_stray()
        raise UsageError(
            f"{name} was used outside a virtual rank: it stands for the calling rank, and no rank calls it"
        )
    world = task.kernel.owner
    rank = world.ranks[task.rank]
    if name == "COMM_SELF" and name not in rank.attachments:
        own = Context(world, ((rank.id,),), number=2 + rank.id)
        return make_comm_self(rank, rank.attachments["COMM_WORLD"]._own, own)
    return rank.attachments[name]


def make_comm_self(rank: Rank, services: RankServices, context: Context) -> Intracomm:
    """Return the COMM_SELF of a rank, which is created when it is first used.

    Most programs never use it, and it would take a quarter of a rank's memory. Its number is the same as if all were
    created at the beginning, after COMM_WORLD.
    """
    if rank.evicted:
        context.shut_out(rank.id)
    comm = Intracomm.enter(context, rank.id, "MPI_COMM_SELF")
    comm._own = services
    rank.attachments["COMM_SELF"] = comm
    return comm


def _mind_shared_import(name: str) -> None:
    """Warn of a package that reads its rank while it is imported: all ranks will have the first rank's value.

    Raises:
        UsageError: The package creates a communicator. The other ranks do not import it again, so would never join.
    """
    task, frame = current_task(), sys._getframe(2)
    module = frame.f_globals.get("__name__", "")
    if task is None or is_of_a_rank(module):
        return
    package, line = module.partition(".")[0], f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    world: World = task.kernel.owner
    why = f"{name} of COMM_WORLD ({line}), but is imported once for all ranks: give --set private={package}"
    if name in COLLECTIVE and len(world.ranks) > 1:
        raise UsageError(f"{package} calls, during its import, {why}")
    world.mistakes["import", package] = (
        f"rank {task.rank} at {task.clock:.6g} s imported {package}, which calls, during its import, {why} if "
        "it keeps the result"
    )


class CurrentComm(Intracomm):
    """A stand-in for the calling rank's own communicator."""

    __slots__ = ("_which",)

    @classmethod
    def called(cls, which: str) -> Self:
        """Return the stand-in for one of the rank's predefined communicators."""
        # Not `cls()`: __new__ and __setattr__ go to the calling rank's communicator, and at import no rank is calling.
        self = object.__new__(cls)
        object.__setattr__(self, "_which", which)
        return self

    def __getattribute__(self, name: str) -> Any:
        # `object.__getattribute__`, since a plain `self._which` would recurse into this method endlessly.
        which = object.__getattribute__(self, "_which")
        if name in OF_ONE_RANK and which == "COMM_WORLD" and loading():
            _mind_shared_import(name)
        return getattr(held(which), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(held(object.__getattribute__(self, "_which")), name, value)

    def __repr__(self) -> str:
        return f"MPI.{object.__getattribute__(self, '_which')}"


COMM_WORLD = CurrentComm.called("COMM_WORLD")
COMM_SELF = CurrentComm.called("COMM_SELF")


def predefined(own: bool) -> CurrentComm:
    """Return COMM_SELF or COMM_WORLD: a pickled one becomes the receiving rank's own."""
    return COMM_SELF if own else COMM_WORLD


def create_group(comm: Any, group: Group, tag: int | str) -> Any:
    """Return a communicator of a group's members, each of which calls.

    The first member to call creates the context; a barrier on it then synchronizes the members.
    """
    comm._check_group(group)
    if comm._rank.id not in group.members:
        return COMM_NULL
    calls = comm._context.notes.setdefault(("Create_group", group.members, tag), {})
    # Counted per member, because these calls are not a collective of the parent: between them, members of several
    # groups may make calls with other ranks (MPI allows this), so no call counter of the parent is the same on all of
    # them.
    turn = calls[comm._rank.id] = calls.get(comm._rank.id, -1) + 1
    key = ("Create_group", group.members, tag, turn)
    context = comm._context.notes.get(key)
    if context is None:
        context = comm._context.notes[key] = comm._context.derive(group.members)
    new = comm._entered(context, Intracomm)
    # MPI: the call is collective over the group. Without the barrier, the first caller could send on a communicator
    # that the other members have not yet entered.
    new.barrier()
    return new


def create_from_group(group: Group, name: str, errhandler: Any) -> Any:
    """Return a communicator of a group's members, each of which calls with the same name; the parent is COMM_WORLD."""
    new = create_group(held("COMM_WORLD"), group, name)
    if errhandler is not None and new:
        new.Set_errhandler(errhandler)
    return new


class Intercomm(BetweenGroups, Comm):
    """A communicator with two groups. Ranks in its calls are ranks of the *other* group."""

    __slots__ = ()

    @classmethod
    def _check_context(cls, context: Context) -> None:
        if len(context.groups) == 1:
            raise SpecTypeError(f"{cls.__name__}(): expecting an intercommunicator")

    def Get_remote_group(self) -> Group:
        self._need()
        return Group.of(tuple(self._peers), self._rank.id)

    def Get_remote_size(self) -> int:
        self._need()
        return len(self._peers)

    remote_group = property(Get_remote_group)
    remote_size = property(Get_remote_size)

    def Merge(self, high: bool = False) -> Intracomm:
        """Return a communicator of both groups; ranks with `high` are last."""

        def make(parts: list[bool]) -> Context:
            # All ranks must derive the same order, so it is decided once, from the context's groups, instead of on each
            # rank from its own "local" and "remote".
            first, second = self._context.groups
            # MPI: if both groups give the same flag, the order is arbitrary; the context's order makes runs repeatable.
            swap = parts[0] and not parts[len(first)]
            return self._context.derive(second + first if swap else first + second)

        new: Intracomm = self._entered(self._agree("Merge", bool(high), make), Intracomm)
        return new

    @classmethod
    def Create_from_groups(
        cls, local_group: Group, local_leader: int, remote_group: Group, remote_leader: int,
        stringtag: str = "org.mpi4py", info: Info = INFO_NULL, errhandler: Any = None,
    ) -> Intercomm:  # fmt: skip
        """Return an intercommunicator of two groups of COMM_WORLD; only their members call."""
        local, world = create_from_group(local_group, stringtag, errhandler), held("COMM_WORLD")
        # The peer communicator is COMM_WORLD: the remote leader is named by its rank there.
        leader = remote_group.members[integer(remote_leader)]
        made: Intercomm = local.Create_intercomm(local_leader, world, leader)
        if errhandler is not None:
            made.Set_errhandler(errhandler)
        # Freed at once: the local group's communicator was needed only for the leaders' meeting, and a leak of it would
        # be reported as the program's.
        local.Free()
        return made


def create_intercomm(
    self: Intracomm, local_leader: int, peer_comm: Intracomm, remote_leader: int, tag: int = 0
) -> Intercomm:
    """Join this communicator's group with another group; the leaders meet on `peer_comm`."""
    self._need()
    local_leader, remote_leader, tag = integer(local_leader), integer(remote_leader), integer(tag)
    key, context = ("intercomm", tag), None
    if self._me == local_leader:
        # Only the leaders communicate, as MPI specifies: the other members need neither belong to `peer_comm` nor know
        # it.
        theirs = peer_comm.sendrecv(self._members, remote_leader, tag, None, remote_leader, tag)
        if set(theirs) & set(self._members):
            raise CallError(ERR_COMM, "Create_intercomm: the two groups share ranks")
        # Sorted, so that both leaders look up the same key, although each sees its own group as the local one.
        groups = tuple(sorted((tuple(self._members), tuple(theirs))))
        made = peer_comm._context.notes.setdefault(key, {})
        # Popped, so that a second intercommunicator of the same groups and tag gets a new context.
        context = made.pop(groups, None)  # the second leader takes the first one's context
        if context is None:
            context = made[groups] = self._context.derive(*groups)
            # Ancestors of both sides: a recovery that ends either parent must also end the contexts made across both.
            context.ancestors |= peer_comm._context.ancestors | {peer_comm._context.number}
    shared = self._agree("Create_intercomm", context, lambda parts: parts[local_leader])
    new: Intercomm = self._entered(shared, Intercomm)
    return new


KINDS.update(Intracomm=Intracomm, Intercomm=Intercomm)
