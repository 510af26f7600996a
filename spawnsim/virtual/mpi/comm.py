"""The calls of every communicator about itself: naming, comparing, duplicating, splitting, aborting, freeing.

The members agree on a new communicator in a collective of the old one, which creates one shared `Context`; every member
then enters it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NoReturn, Self

import numpy as np

from spawnsim.checkpoints import Saved
from spawnsim.comm.backends import default_group
from spawnsim.comm.constants import (
    COMM_TYPE_HW_GUIDED,
    COMM_TYPE_RESOURCE_GUIDED,
    COMM_TYPE_SHARED,
    CONGRUENT,
    IDENT,
    IO,
    LASTUSEDCODE,
    PROC_NULL,
    SIMILAR,
    TAG_UB,
    TAG_UB_VALUE,
    UNDEFINED,
    UNEQUAL,
    UNIVERSE_SIZE,
    WTIME_IS_GLOBAL,
)  # fmt: skip
from spawnsim.comm.failures import ERR_ARG, ERR_COMM, ERR_GROUP, ERR_LASTCODE, CallError, lacking
from spawnsim.comm.group import Group
from spawnsim.comm.handles import INFO_NULL, Info, Named, integer, same_kind
from spawnsim.comm.protocols import Capabilities, Recovery
from spawnsim.virtual.engine.kernel import Kernel, current_task
from spawnsim.virtual.mpi import checkpoints, fault_tolerance
from spawnsim.virtual.mpi.collectives import Collectives
from spawnsim.virtual.mpi.context import KINDS, NOWHERE, Context, Member
from spawnsim.virtual.mpi.instance import Call
from spawnsim.virtual.mpi.point_to_point import PointToPoint
from spawnsim.virtual.mpi.requests import Request, request_for
from spawnsim.virtual.mpi.spawning import PARENT
from spawnsim.virtual.services import Background, Clock, Compute, Record


class ProgramAbort(BaseException):
    """`Comm.Abort`: ends the whole run."""

    def __init__(self, errorcode: int, rank: int, time_s: float) -> None:
        self.errorcode, self.rank, self.time_s = errorcode, rank, time_s
        super().__init__(errorcode, rank, time_s)


def abort(world: Any, errorcode: int) -> NoReturn:
    """End the run with this status, whatever the calling program catches, as on real ranks."""
    kernel: Kernel = world.kernel
    kernel.stop(ProgramAbort(errorcode, world.here().id, kernel.current.clock))


@lacking
class Comm(PointToPoint, Collectives):
    """A communicator of one virtual rank, under mpi4py's names."""

    __slots__ = ()
    _kind = "COMM"

    def __new__(cls, comm: Member | None = None) -> Self:
        """Return a null communicator, or a copy of another handle."""
        self = super().__new__(cls)
        self._identity, self._attributes, self._name, self._side, self._me = None, {}, "", 0, 0
        self._context = self._world = self._rank = self._peers = self._own = NOWHERE
        self._errhandler = self._info = self._box = None
        if comm is not None:
            same_kind(Comm, comm)
            if comm._identity is not None:
                cls._check_context(comm._context)
                for slot in Member.__annotations__:
                    setattr(self, slot, getattr(comm, slot))
        return self

    @classmethod
    def _check_context(cls, context: Context) -> None:
        """Raise `SpecTypeError` if the communicator lacks the topology that this class needs."""

    @property
    def clock(self) -> Clock:
        return self._own.clock  # type: ignore[no-any-return]

    @property
    def compute(self) -> Compute:
        """A block of computing: `with comm.compute(): ...`."""
        return self._own.compute  # type: ignore[no-any-return]

    @property
    def rng(self) -> Any:
        """The rank's random streams: `comm.rng("donors")`."""
        return self._own.rng

    @property
    def record(self) -> Record:
        """`comm.record(loss=…)` adds a row, `comm.record.event(kind, …)` an event."""
        return self._own.record  # type: ignore[no-any-return]

    @property
    def background(self) -> Callable[[Callable[[], Any]], Background]:
        """`comm.background(fn)` runs `fn` next to the rank's program."""
        return self._own.background  # type: ignore[no-any-return]

    @property
    def check(self) -> Callable[..., None]:
        """`comm.check(condition, message)` and properties of the whole run: see `spawnsim.comm.Comm.check`."""
        return self._own.check  # type: ignore[no-any-return]

    @property
    def Win(self) -> Any:
        """The factory of this communicator's windows: `comm.Win.Allocate(nbytes)`."""
        return KINDS["Windows"](self)

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self._identity is None:
            return "COMM_NULL" if self is COMM_NULL else (type(self), ())
        raise ValueError("cannot pickle a communicator: it means something on its own rank only")

    def __repr__(self) -> str:
        if self._identity is None:
            return f"{type(self).__name__}(null)"
        return f"{type(self).__name__}({self._label}, rank {self._me} of {len(self._members)})"

    # -- the communicator itself -------------------------------------------------------------------------------

    def Abort(self, errorcode: int = 0) -> NoReturn:
        abort(self._world, integer(errorcode))

    def _abort(self, errorcode: int) -> NoReturn:
        self.Abort(errorcode)

    @classmethod
    def Get_parent(cls) -> Any:
        """Return the communicator with the ranks that have spawned this one; the null one if none has."""
        task = current_task()
        parent = None if task is None else task.kernel.owner.ranks[task.rank].attachments.get(PARENT)
        return KINDS["Intercomm"]() if parent is None else parent

    def Set_name(self, name: str) -> None:
        super().Set_name(name)
        self._context.name = name

    name = property(Named.Get_name, Set_name)

    def Get_rank(self) -> int:
        if self._identity is None:
            self._need()
        return self._me

    def Get_size(self) -> int:
        if self._identity is None:
            self._need()
        return len(self._members)

    def Get_group(self) -> Group:
        if self._identity is None:
            self._need()
        return Group.of(self._members, self._rank.id)

    rank = property(Get_rank)
    size = property(Get_size)
    group = property(Get_group)

    def Get_attr(self, keyval: int) -> int | Any | None:
        """Return an attribute: MPI's own (TAG_UB, UNIVERSE_SIZE, …) or the program's."""
        self._exist()
        own = {
            TAG_UB: TAG_UB_VALUE, IO: PROC_NULL, WTIME_IS_GLOBAL: True,
            UNIVERSE_SIZE: len(self._world.ranks), LASTUSEDCODE: ERR_LASTCODE,
        }  # fmt: skip
        return own[keyval] if keyval in own else super().Get_attr(keyval)

    def Is_inter(self) -> bool:
        if self._identity is None:
            self._need()
        return len(self._context.groups) > 1

    def Is_intra(self) -> bool:
        return not self.Is_inter()

    is_inter = property(Is_inter)
    is_intra = property(Is_intra)

    def Compare(self, comm: Member) -> int:
        """Return IDENT, CONGRUENT (same group and order), SIMILAR (same members) or UNEQUAL."""
        self._need()
        comm._need()
        mine, other = self._context, comm._context
        if mine is other:
            return IDENT
        if mine.groups == other.groups:
            return CONGRUENT
        same = len(mine.groups) == len(other.groups)
        members = [sorted(side) for side in mine.groups] == [sorted(side) for side in other.groups]
        return SIMILAR if same and members else UNEQUAL

    # -- new communicators -----------------------------------------------------------------------------------

    def _agree(self, name: str, part: Any, make: Callable[[list[Any]], Any]) -> Any:
        """Meet all members; `make(parts)` runs once and every member gets its result."""
        call = Call(name, "allgather", part, 8, outcome=lambda m, rank: m.shared(lambda: make(m.parts())))
        return self._meet(call)

    def _copy(self) -> Context:
        return self._context.derive(*self._context.groups, topology=self._context.topology)

    def Dup(self, info: Info | None = None) -> Self:
        return self._duplicate(self._agree("Dup", None, lambda parts: self._copy()), info)

    def Clone(self) -> Self:
        return self.Dup()

    def Dup_with_info(self, info: Info) -> Self:
        return self.Dup(info)

    def Idup(self, info: Info | None = None) -> tuple[Self, Request]:
        """Start Dup; return the communicator, usable once the request is complete, and the request."""
        outcome = lambda m, rank: None  # noqa: E731
        departure = self._join(Call("Idup", "allgather", None, 8, outcome=outcome))
        context = departure.instance.shared(self._copy)
        deliver = lambda _: departure.instance.outcome(departure.me)  # noqa: E731
        request = request_for(self._world, departure, departure, deliver, writes=False)
        return self._duplicate(context, info), request

    def Idup_with_info(self, info: Info) -> tuple[Self, Request]:
        return self.Idup(info)

    def _duplicate(self, context: Context, info: Info | None) -> Self:
        new: Self = self._entered(context)
        self.copy_attributes(new)
        hints = info if info is not None else self._info
        new._info = Info.of(hints) if hints else None
        return new

    def _subset(self, context: Context | None) -> Any:
        # In `places`, not in `groups`: a search through tuples on each rank was quadratic in the ranks.
        if context is None or not any(self._rank.id in places for places in context.places):
            return COMM_NULL
        return self._entered(context, KINDS["Intracomm"] if len(context.groups) == 1 else None)

    def Split(self, color: int = 0, key: int = 0) -> Any:
        """Return a communicator of the ranks with this color, in the order of their keys (ties: by rank)."""
        color, key = integer(color), integer(key)
        if color != UNDEFINED and color < 0:
            raise CallError(ERR_ARG, f"color {color}: give a number of at least 0, or UNDEFINED")
        return self._split("Split", color, key)

    def _split(self, name: str, color: Hashable, key: int) -> Any:
        contexts = self._agree(name, (color, key, self._rank.id, self._side), self._sort_by_color)
        return self._subset(contexts.get(color))

    def _sort_by_color(self, parts: list[tuple[Hashable, int, int, int]]) -> dict[Hashable, Context]:
        # One pass: often there are as many colors as ranks / 4, and a pass for each would be quadratic in the ranks.
        members: dict[Hashable, list[list[tuple[int, int, int]]]] = {}
        for place, (color, key, rank, side) in enumerate(parts):
            if color != UNDEFINED:
                members.setdefault(color, [[] for _ in self._context.groups])[side].append((key, place, rank))
        found: dict[Hashable, Context] = {}
        for color, sides in members.items():
            groups = [tuple(rank for _, _, rank in sorted(side)) for side in sides]
            if all(groups):
                found[color] = self._context.derive(*groups)
        return found

    def Split_type(self, split_type: int, key: int = 0, info: Info = INFO_NULL) -> Any:
        """Return a communicator of the ranks that share a resource: for COMM_TYPE_SHARED, a node's memory."""
        split_type, key = integer(split_type), integer(key)
        if split_type == UNDEFINED:
            return self._split("Split_type", UNDEFINED, key)
        guided = split_type in (COMM_TYPE_HW_GUIDED, COMM_TYPE_RESOURCE_GUIDED)
        if guided and info and info.Get("mpi_hw_resource_type") == "mpi_shared_memory":
            split_type = COMM_TYPE_SHARED
        # The virtual hardware has no other parts that a program could name.
        if split_type != COMM_TYPE_SHARED:
            return self._split("Split_type", UNDEFINED, key)
        node = int(self._world.network.place(np.array([self._rank.id]))[0])
        return self._split("Split_type", ("node", node), key)

    def Create(self, group: Group) -> Any:
        """Return a communicator of a group's members; all ranks of this one call it."""
        self._check_group(group)
        made = self._agree("Create", (group.members, self._rank.id), self._make_groups)
        return self._subset(made.get(self._rank.id))

    def _make_groups(self, parts: list[tuple[tuple[int, ...], int]]) -> dict[int, Context]:
        wanted = {members for members, rank in parts if rank in members}
        contexts = {members: self._context.derive(members) for members in sorted(wanted)}
        return {rank: contexts[members] for members, rank in parts if rank in members}

    def _check_group(self, group: Group) -> None:
        self._need()
        places = self._context.places[self._side]
        strangers = [rank for rank in group.live() if rank not in places]
        if strangers:
            raise CallError(
                ERR_GROUP, f"the group has members that are not in {self._label}: {strangers[:5]}"
            )

    def Free(self) -> None:
        """Give up the communicator. All members do so, each at its own time: messages on their way still arrive.

        MPI calls this collective, but expects implementations to make it local; programs rely on that. It needs no time
        and no rank, so that finalizers may call it wherever they run.
        """
        self._check_freed("freed")
        if self._context.notes and (default := default_group()) is not None:
            default.freed(self)
        self.delete_attributes()
        self._note_freed()

    def as_process_group(self) -> Any:
        """Return the torch.distributed group of these ranks, or itself before the program enters torch.distributed.

        Collective on the first call. `as_comm` returns the group as this communicator.
        """
        default = default_group()
        return self if default is None else default.group_of(self)

    def Disconnect(self) -> None:
        """Wait until all members have called, then give up the communicator. A revoked one needs no wait."""
        self._check_freed("disconnected")
        if not self._why_revoked():
            self._meet(Call("Disconnect", "barrier"))
        self.delete_attributes()
        self._note_freed()

    def _check_freed(self, what: str) -> None:
        """Raise an error if the communicator is null or predefined."""
        if self._identity is None:
            self._need()
        if self._predefined:
            raise CallError(ERR_COMM, f"MPI_{self._predefined} cannot be {what}")

    def _number(self) -> int:
        if self._identity is None:
            return 0
        # The context is the same object on all ranks, and their handles differ.
        return id(self._rank.attachments.setdefault(("number", self._context), object()))

    @property
    def _predefined(self) -> str:
        """COMM_WORLD or COMM_SELF, if it is one of them."""
        held = self._rank.attachments if self._identity is not None else {}
        names = (name for name in ("COMM_WORLD", "COMM_SELF") if name in held)
        return next((name for name in names if held[name]._identity is self._identity), "")

    def _note_freed(self) -> None:
        if self._world.resource_leaks is not None:
            self._world.resource_leaks.freed(self._context)
        self._identity = None

    def Get_topology(self) -> int:
        return getattr(self._context.topology, "kind", UNDEFINED)

    topology = property(Get_topology)

    @property
    def is_topo(self) -> bool:
        """Whether the communicator has a topology."""
        return self.Get_topology() != UNDEFINED

    # -- checkpoints -------------------------------------------------------------------------------------------

    def checkpoint(
        self,
        *,
        iteration: int,
        model: Any = None,
        optimizer: Any = None,
        policy: Any = None,
        extra: Any = None,
    ) -> None:
        """Save the state of all members at the end of an iteration; collective. See `protocols.Comm.checkpoint`."""
        self._need()
        states = {"model": model, "optimizer": optimizer, "extra": extra}
        checkpoints.checkpoint(self, iteration, policy=policy, **states)

    def restore(self, *, model: Any = None, optimizer: Any = None, policy: Any = None) -> Saved | None:
        """Return the saved states, or None. See `Comm.restore` of the protocol."""
        self._exist()
        return checkpoints.restore(self, model=model, optimizer=optimizer, policy=policy)

    # -- recovery from dead ranks ----------------------------------------------------------------------------------

    def capabilities(self) -> Capabilities:
        """Return the capabilities of this communicator."""
        return Capabilities(
            backend="virtual",
            library="spawnsim",
            survives=True,
            ulfm=True,
            progress=self._world.platform.progress,
            threads="multiple",
            sums=self._context.sums,
        )

    def absent(self) -> dict[int, str]:
        """Return, by rank, why a rank cannot respond now: it is dead, is paused, or has ended its program."""
        return fault_tolerance.absent(self)

    def recover(self, step: int | None = None) -> Recovery:
        """Meet all survivors; return their new communicator, and the smallest `step` that any of them passed.

        Recovery ends this communicator and everything derived from it (communicators, windows, pending requests): calls
        on them raise `Revoked`. Living ranks that do not arrive within the deadline are given up, like the dead.

        A restarted rank joins with this call: calls of the other ranks end in `Revoked`, and they meet it in their
        recovery. Its own `step` does not count, and it gives up no rank: it waits until its deadline, and then raises
        `Timeout`.

        Raises `Revoked` on a rank that the other ranks have given up meanwhile (it was paused): it must leave.
        """
        return fault_tolerance.recover(self, step)

    def Revoke(self) -> None:
        """Make every call of every member on this communicator end in `Revoked`, including calls in progress."""
        fault_tolerance.revoke([self._context])

    def Is_revoked(self) -> bool:
        return bool(self._why_revoked())

    is_revoked = property(Is_revoked)

    def Get_failed(self) -> Group:
        return Group.of(fault_tolerance.find_dead(self), self._rank.id)

    def Ack_failed(self, num_to_ack: int | None = None) -> int:
        """Acknowledge failures: receives from any source continue without these dead ranks. Return their number."""
        dead = fault_tolerance.dead_members(self)[: None if num_to_ack is None else max(num_to_ack, 0)]
        self._context.notes["acknowledged", self._rank.id] = frozenset(dead)
        return len(dead)

    def Agree(self, flag: int) -> int:
        """Return the bitwise AND of all survivors' flags; the same on all ranks."""
        return fault_tolerance.agree(self, flag)

    def Iagree(self, flag: Any) -> Request:
        return fault_tolerance.start_agree(self, flag)

    def Shrink(self) -> Any:
        return self._entered(fault_tolerance.shrink(self))


COMM_NULL = Comm()
