"""`Win`: creating, querying and freeing windows. Their epochs and accesses are in `rma`."""

from __future__ import annotations

from typing import Any, NoReturn, Self

import numpy as np

from spawnsim.comm import constants
from spawnsim.comm.constants import BOTTOM, PROC_NULL
from spawnsim.comm.failures import ERR_DISP, CallError
from spawnsim.comm.group import Group
from spawnsim.comm.handles import AINT, INFO_NULL, Info, Named, integer, same_kind
from spawnsim.comm.memory import address, as_bytes, buffer, flat
from spawnsim.phantoms import is_phantom
from spawnsim.virtual.mpi.comm import abort
from spawnsim.virtual.mpi.communicators import COMM_SELF
from spawnsim.virtual.mpi.context import KINDS, Context, Member
from spawnsim.virtual.mpi.instance import Call
from spawnsim.virtual.mpi.rma import Accesses, Epoch
from spawnsim.virtual.mpi.rma_service import Target, WindowState


class Win(Accesses, Named, np.ndarray[Any, np.dtype[np.uint8]]):  # type: ignore[misc]
    """Memory that other ranks access without this rank's participation.

    It is an array of this rank's part, so that `memoryview(win)` and `np.frombuffer(win)` work, as with mpi4py.
    """

    __slots__ = (
        "_attributes", "_comm", "_epoch", "_errhandler", "_identity", "_info", "_name", "_place", "_windows",
    )  # fmt: skip
    _kind = "WIN"

    def __new__(cls, win: Win | None = None) -> Self:
        """Return a null window, or a copy of another handle."""
        if win is not None:
            same_kind(Win, win)
        live = win is not None and win._identity is not None
        self = cls._over(win._windows.targets[win._place].memory if live else None)  # type: ignore[union-attr]
        self._identity, self._attributes = None, {}
        if live:
            for slot in Win.__slots__:
                setattr(self, slot, getattr(win, slot))
        return self

    @classmethod
    def _over(cls, memory: Any) -> Self:
        """Return a handle over memory; the caller sets its state."""
        if memory is None or not memory.nbytes or is_phantom(memory):
            return np.ndarray.__new__(cls, (0,), np.uint8)
        return memory.view(cls)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"Win({self._label})" if self._identity is not None else "Win(null)"

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        if self._identity is not None:
            raise ValueError("cannot pickle a window: it means something on its own rank only")
        return type(self), ()

    # -- creation ----------------------------------------------------------------------------------------------

    @classmethod
    def Create(cls, memory: Any, disp_unit: int = 1, info: Info = INFO_NULL, comm: Any = COMM_SELF) -> Self:
        """Open a window on memory of the program; collective."""
        own = np.zeros(0, np.uint8) if memory is None or memory is BOTTOM else as_bytes(flat(memory))
        return cls._open(
            "Win.Create", (own, disp_unit, None), constants.WIN_FLAVOR_CREATE, comm=comm, info=info
        )

    @classmethod
    def Allocate(cls, size: int, disp_unit: int = 1, info: Info = INFO_NULL, comm: Any = COMM_SELF) -> Self:
        """Open a window on new memory of `size` bytes; collective."""
        own = np.zeros(integer(size, AINT), np.uint8)
        return cls._open(
            "Win.Allocate", (own, disp_unit, None), constants.WIN_FLAVOR_ALLOCATE, comm=comm, info=info
        )

    @classmethod
    def Allocate_shared(
        cls, size: int, disp_unit: int = 1, info: Info = INFO_NULL, comm: Any = COMM_SELF
    ) -> Self:
        """Open a window on one piece of memory that all members can load and store; collective."""
        return cls._open(
            "Win.Allocate_shared",
            (None, disp_unit, integer(size, AINT)),
            constants.WIN_FLAVOR_SHARED,
            comm=comm,
            info=info,
        )

    @classmethod
    def Create_dynamic(cls, info: Info = INFO_NULL, comm: Any = COMM_SELF) -> Self:
        """Open a window without memory, to which Attach adds memory; collective."""
        own = np.zeros(0, np.uint8)
        return cls._open(
            "Win.Create_dynamic", (own, 1, None), constants.WIN_FLAVOR_DYNAMIC, comm=comm, info=info
        )

    @classmethod
    def _open(
        cls, name: str, part: tuple[Any, int, int | None], flavor: int, *, comm: Any, info: Info
    ) -> Self:
        comm._need()
        part = part[0], integer(part[1]), part[2]
        if part[1] <= 0:
            raise CallError(ERR_DISP, f"{name}: disp_unit {part[1]} must be above 0")
        context, windows = comm._agree(name, part, lambda parts: _build(comm, parts, flavor))
        self = cls._over(windows.targets[comm._me].memory)
        self._attributes = {}
        self._identity = self._windows = windows
        self._comm = comm._entered(context, Member)
        self._comm._name = comm._label
        self._place, self._name, self._errhandler = comm._me, "", None
        self._info = Info.of(info) if info else None
        self._epoch = Epoch()
        comm._rank.observers += 1
        comm._world.kernel.observe()
        comm._rank.attachments.setdefault("windows", []).append(self)
        return self

    def Attach(self, memory: Any) -> None:
        self._need()
        part = self._windows.targets[self._place]
        part.regions = [*part.regions, as_bytes(flat(memory))]

    def Detach(self, memory: Any) -> None:
        self._need()
        first, part = address(memory), self._windows.targets[self._place]
        part.regions = [region for region in part.regions if address(region) != first]

    def Free(self) -> None:
        """Close the window; collective, unless its communicator was revoked."""
        if self._identity is None or not self._comm._why_revoked():
            self._need()
            self._refuse_open_epoch()
            self._flush_all("Free")
            self.delete_attributes()
            self._comm._meet(Call("Win.Free", "barrier"))
        self._comm._rank.observers -= 1
        self._comm._rank.attachments["windows"].remove(self)
        self._identity = None

    # -- queries ---------------------------------------------------------------------------------------------

    def tomemory(self) -> buffer:
        """Return this rank's part as bytes."""
        self._need()
        return buffer.frombuffer(self._windows.targets[self._place].memory)

    def Shared_query(self, rank: int) -> tuple[buffer, int]:
        self._need()
        rank = integer(rank)
        if rank == PROC_NULL:
            rank = next((place for place, part in enumerate(self._windows.targets) if part.memory.nbytes), 0)
        part = self._windows.targets[rank]
        return buffer.frombuffer(part.memory), part.disp_unit

    def Get_group(self) -> Group:
        self._need()
        return Group.of(self._comm._members, self._comm._rank.id)

    def Get_attr(self, keyval: int) -> Any:
        """Return an attribute: MPI's own (WIN_BASE, WIN_SIZE, …) or the program's."""
        self._need()
        part = self._windows.targets[self._place]
        own = {
            constants.WIN_BASE: part.memory.ctypes.data if part.memory.nbytes else 0,
            constants.WIN_SIZE: part.memory.nbytes,
            constants.WIN_DISP_UNIT: part.disp_unit,
            constants.WIN_CREATE_FLAVOR: self._windows.flavor,
            constants.WIN_MODEL: constants.WIN_UNIFIED,
        }
        return own.get(keyval, super().Get_attr(keyval))

    @property
    def attrs(self) -> tuple[int, int, int]:
        """Base address, size in bytes, displacement unit."""
        return (
            self.Get_attr(constants.WIN_BASE),
            self.Get_attr(constants.WIN_SIZE),
            self.Get_attr(constants.WIN_DISP_UNIT),
        )

    @property
    def flavor(self) -> int:
        return int(self.Get_attr(constants.WIN_CREATE_FLAVOR))

    @property
    def model(self) -> int:
        """The memory model: unified."""
        return int(self.Get_attr(constants.WIN_MODEL))

    group = property(Get_group)

    @property
    def group_size(self) -> int:
        self._exist()
        return len(self._comm._members)

    @property
    def group_rank(self) -> int:
        self._exist()
        return int(self._comm._me)

    def _abort(self, errorcode: int) -> NoReturn:
        abort(self._windows.world, errorcode)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._identity is not None:
            self.Free()


def _build(
    comm: Member, parts: list[tuple[Any, int, int | None]], flavor: int
) -> tuple[Context, WindowState]:
    """Create the state that all members of a window share, once."""
    world, members = comm._world, comm._members
    memories = [memory for memory, _, _ in parts]
    shared = None
    if flavor == constants.WIN_FLAVOR_SHARED:
        sizes = [size or 0 for _, _, size in parts]
        ends = np.cumsum(sizes)
        shared = np.zeros(int(ends[-1]), np.uint8)
        memories = [shared[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    targets = [
        Target(world.ranks[rank], memory, unit)
        for rank, memory, (_, unit, _) in zip(members, memories, parts, strict=True)
    ]
    context = comm._context.derive(tuple(members), inner=True)
    return context, WindowState(world, targets, flavor, context, shared)


class Windows:
    """`comm.Win`: creates windows of its communicator, unless another is given; the methods of `Win` use COMM_SELF."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def _of(self, comm: Any) -> Any:
        return self._comm if comm is None else comm

    def Create(self, memory: Any, disp_unit: int = 1, info: Info = INFO_NULL, comm: Any = None) -> Win:
        """Open a window on memory of the program; collective."""
        return Win.Create(memory, disp_unit, info, self._of(comm))

    def Allocate(self, size: int, disp_unit: int = 1, info: Info = INFO_NULL, comm: Any = None) -> Win:
        """Open a window on new memory of `size` bytes; collective."""
        return Win.Allocate(size, disp_unit, info, self._of(comm))

    def Allocate_shared(self, size: int, disp_unit: int = 1, info: Info = INFO_NULL, comm: Any = None) -> Win:
        """Open a window on one piece of memory that all members can load and store; collective."""
        return Win.Allocate_shared(size, disp_unit, info, self._of(comm))

    def Create_dynamic(self, info: Info = INFO_NULL, comm: Any = None) -> Win:
        """Open a window without memory, to which Attach adds memory; collective."""
        return Win.Create_dynamic(info, self._of(comm))


KINDS["Windows"] = Windows
