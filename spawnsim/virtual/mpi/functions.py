"""The functions of `mpi4py.MPI`: start and end, time, memory, names; and functions that mpi4py's own modules need.

Each refers to the calling rank, found through the running task. Every function defined in this file that has one of
MPI's names, or a name that `mpi4py.util` uses, becomes a function of `module.MPI`.
"""

from __future__ import annotations

import platform as machine
import sys
from collections.abc import Hashable, Sequence
from threading import RLock
from typing import Any

import numpy as np

from spawnsim.comm import constants
from spawnsim.comm.datatypes import Datatype
from spawnsim.comm.failures import ERR_OTHER, CallError
from spawnsim.comm.handles import AINT, INFO_NULL, Info, integer
from spawnsim.comm.memory import address, buffer
from spawnsim.importing import amid_shared_import, versions
from spawnsim.virtual.engine.kernel import current_task, current_world
from spawnsim.virtual.engine.world import Rank, World
from spawnsim.virtual.mpi import point_to_point, topology
from spawnsim.virtual.mpi.communicators import Intercomm, Intracomm, held
from spawnsim.virtual.mpi.payload import OPTIONS
from spawnsim.virtual.mpi.requests import Request, request_over

TICK_S = 1e-9
SPIN_S = 1e-6  # cost of a clock reading in a program that only reads the clock
PATIENCE = 64  # readings in a row before the program counts as spinning
# Names under which a rank stores the state of this module.
STATE, READINGS = "MPI.state", "MPI.readings"


def _world() -> World:
    world: World = current_world()
    return world


def _here() -> Rank:
    return _world().here()


# -- beginning and end ---------------------------------------------------------------------------------------


OF_HANDLES = {"_identity", "handle"}


class Finished:
    """Replaces COMM_WORLD and COMM_SELF after Finalize: handles for comparisons, without calls."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        if name in OF_HANDLES:
            return getattr(self._comm, name)
        raise CallError(ERR_OTHER, f"{name} was called after MPI.Finalize")


def Init() -> None:
    """Start MPI: a virtual rank has started already."""
    Init_thread()


def Init_thread(required: int = constants.THREAD_MULTIPLE) -> int:
    """Start MPI; return the provided level of thread support."""
    if Is_finalized():
        raise CallError(ERR_OTHER, "Init after Finalize: MPI cannot begin twice")
    _here().attachments[STATE] = "initialized"
    return Query_thread()


def Finalize() -> None:
    """End MPI: the rank may continue, but may not make further MPI calls."""
    if Is_finalized():
        raise CallError(ERR_OTHER, "Finalize was called after MPI.Finalize")
    held_here = _here().attachments
    # MPI: Finalize begins with the attributes of COMM_SELF, through which libraries clean up while MPI still works.
    for comm in held("COMM_SELF"), held_here["COMM_WORLD"]:
        comm.delete_attributes()
    held_here[STATE] = "finalized"
    held_here |= {name: Finished(held_here[name]) for name in ("COMM_SELF", "COMM_WORLD")}


def Is_initialized() -> bool:
    """Return whether MPI has started: always, unless the program asked it to wait for Init."""
    held_here = _here().attachments
    options = held_here.get(OPTIONS)
    return STATE in held_here or options is None or bool(options.initialize)


def Is_finalized() -> bool:
    """Return whether Finalize was called."""
    return bool(_here().attachments.get(STATE) == "finalized")


def Query_thread() -> int:
    """Return THREAD_MULTIPLE if ranks are threads; otherwise THREAD_FUNNELED: only a rank's program may call."""
    return constants.THREAD_MULTIPLE if _world().kernel.threaded else constants.THREAD_FUNNELED


def Is_thread_main() -> bool:
    """Return whether the caller is a rank's program."""
    task = current_task()
    return task is not None and task is _here().tasks[0]


def _set_abort_status(status: int) -> None:
    """Do nothing: the simulator itself determines the status of a program that ends with an exception."""


# -- time ----------------------------------------------------------------------------------------------------


def Wtime() -> float:
    """Return the rank's virtual time in seconds.

    Two readings never return the same time. A second reading in direct succession costs a tick, and a program that only
    reads the clock, to wait for a time, pays a microsecond per reading.
    """
    world = _world()
    task = world.kernel.current
    rank = world.ranks[task.rank]
    if rank.observers and not amid_shared_import(sys._getframe()):
        world.kernel.observe()
    last_s, readings = rank.attachments.get(READINGS, (-1.0, 0))
    readings = readings + 1 if task.clock == last_s else 0
    if readings:
        rank.advance_to(task, task.clock + (TICK_S if readings < PATIENCE else SPIN_S))
    rank.attachments[READINGS] = task.clock, readings
    task.timed = True
    return rank.shown_s(task.clock)


def Wtick() -> float:
    """Return the resolution of the clock in seconds."""
    return TICK_S


# -- memory --------------------------------------------------------------------------------------------------


def Get_address(location: Any) -> int:
    """Return the start address of a buffer."""
    return address(location)


def Aint_add(base: int, disp: int) -> int:
    """Return an address plus an offset in bytes."""
    return base + disp


def Aint_diff(addr1: int, addr2: int) -> int:
    """Return the difference of two addresses in bytes."""
    return addr1 - addr2


def Alloc_mem(size: int, info: Info = INFO_NULL) -> buffer:
    """Return new memory of `size` bytes."""
    return buffer.allocate(integer(size, AINT))


def Free_mem(mem: buffer) -> None:
    """Do nothing: the last reference frees the memory."""


def Attach_buffer(buf: Any) -> None:
    """Attach a buffer for Bsend."""
    point_to_point.attach(_here().attachments, None, buf)


def Detach_buffer() -> Any:
    """Detach and return the buffer for Bsend."""
    return point_to_point.detach(_here().attachments, None)


def Flush_buffer() -> None:
    """Return when all buffered messages have left: they leave at once."""


def Iflush_buffer() -> Request:
    """Start Flush_buffer."""
    return request_over(_world())


# -- names ---------------------------------------------------------------------------------------------------


def Compute_dims(nnodes: int, dims: int | Sequence[int]) -> list[int]:
    """Return a balanced distribution of nodes over dimensions."""
    return topology.compute_dims(nnodes, dims)


def Get_processor_name() -> str:
    """Return the name of the virtual node of the calling rank."""
    world = _world()
    place = world.network.place(np.array([world.here().id]))
    return f"node{int(place[0])}"


def Get_hw_resource_info() -> Info:
    """Return the resources that a program may name: none."""
    return Info.Create()


def Get_version() -> tuple[int, int]:
    """Return the version of the MPI standard."""
    return constants.VERSION, constants.SUBVERSION


def Get_library_version() -> str:
    """Return the name of the library."""
    return f"spawnsim {_version()}: virtual MPI ranks on {machine.python_implementation()}"


def get_vendor() -> tuple[str, tuple[int, int, int]]:
    """Return the name and version of the implementation."""
    numbers = [int(part) if part.isdigit() else 0 for part in (*_version().split("."), "0", "0")[:3]]
    return "spawnsim", (numbers[0], numbers[1], numbers[2])


def _version() -> str:
    return versions(["spawnsim"]).get("spawnsim", "0+unknown")


def Pcontrol(level: int) -> None:
    """Do nothing: no profiler is present."""


def _comm_lock(comm: Any, key: Hashable | None = None) -> Any:
    """Return a lock. It is never contended, since a rank's calls come from one line of execution."""
    return RLock()


def _comm_lock_table(comm: Any) -> dict[Hashable, Any]:
    return {}


def _commctx_intra(comm: Intracomm) -> tuple[Intracomm, int]:
    """Return a communicator for messages hidden from the program, and a tag; the first call is collective."""
    notes = comm._context.notes.setdefault("contexts of pkl5", {})
    if comm._me not in notes:
        notes[comm._me] = [comm.Dup(), 0]
    entry = notes[comm._me]
    entry[1] += 1
    return entry[0], entry[1] - 1


def _commctx_inter(comm: Intercomm) -> tuple[Intercomm, int, Intracomm, bool]:
    """Return the same for two groups, a communicator of the local group, and whether the local group is the first."""
    notes = comm._context.notes.setdefault("contexts of pkl5", {})
    me = comm._side, comm._me
    if me not in notes:
        both = comm.Merge(high=bool(comm._side))
        notes[me] = [comm.Dup(), 0, both.Split(comm._side, comm._me)]
    entry = notes[me]
    entry[1] += 1
    return entry[0], entry[1] - 1, entry[2], comm._side == 0


def _typecode(datatype: Datatype) -> str | None:
    """Return the typecode of a datatype, or None."""
    return datatype.code or None


def _typealign(datatype: Datatype) -> int | None:
    """Return the alignment of a datatype in bytes, or None."""
    return int(np.dtype(datatype.dtype).alignment) if datatype.is_predefined and datatype.dtype else None
