"""Windows over the wire, seen from the rank that accesses: mpi4py's methods over requests to the parts' servers.

The owner's own loads and stores are not ordered with others' accesses: it locks its own part, or publishes whole
snapshots. Knows buffers, parcels and the server; knows nothing of what the memory holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from spawnsim.comm.buffers import as_buffer
from spawnsim.comm.constants import PROC_NULL
from spawnsim.comm.failures import ERR_RANK, CallError
from spawnsim.comm.memory import as_bytes
from spawnsim.comm.ops import SUM, Op
from spawnsim.comm.regions import Buffer
from spawnsim.comm.vectors import as_target
from spawnsim.errors import ParameterError, Timeout, UnsupportedError, UsageError
from spawnsim.real.rank.epochs import Epochs
from spawnsim.real.rank.locks import Locks
from spawnsim.real.rank.pending import Pending
from spawnsim.real.torch.memory import bytes_of
from spawnsim.real.torch.serving import (
    ACCUMULATE,
    CANCEL,
    GET,
    LOCK,
    PUT,
    REQUEST,
    SWAP,
    TOKEN,
    UNLOCK,
    Part,
    Wanted,
    accumulation,
)
from spawnsim.real.torch.wire import Bytes, Parcel

if TYPE_CHECKING:
    from spawnsim.real.torch.comm import TorchComm


class Access(Pending):
    """The request of `Rget` and `Rput`."""

    __slots__ = ("_wanted",)
    _wanted: Wanted

    @classmethod
    def of(cls, home: Any, what: tuple[str, int, Any], wanted: Wanted) -> Access:
        """Return the request of an access."""
        self = cls()
        self._wanted = wanted
        self.begin(home, what)
        return self

    def _try(self) -> bool:
        return self._wanted.complete


class TorchWin(Locks, Epochs):
    """A window: mpi4py's methods. Made by `comm.Win.Allocate` and `comm.Win.Create`; collective."""

    def __init__(self, comm: TorchComm, memory: Bytes, disp_unit: int) -> None:
        self._comm, self._home, self.memory = comm, comm._home, memory
        self._server = self._home.server
        comm._made["Win"] += 1
        self._ident = comm._context ^ (comm._made["Win"] << 1) ^ (1 << 60)
        self._begin_epochs()
        self._server.parts[self._ident] = Part(memory, told=self._hear)
        facts = comm.allgather((memory.nbytes, disp_unit))
        self._sizes, self._units = [size for size, _ in facts], [unit for _, unit in facts]
        self._open: dict[int, list[Wanted]] = {rank: [] for rank in range(comm.size)}
        self._held: dict[int, int] = {}
        self._versions: dict[int, int] = {}
        comm.Barrier()

    def tomemory(self) -> Any:
        """Return this rank's own part as a buffer of bytes."""
        return self.memory

    def version(self, rank: int) -> int:
        """Return the version of a rank's part that the last completed access has seen."""
        return self._versions.get(rank, 0)

    # ------------------------------------------------------------------------------------------------ accesses
    def _ask(self, rank: int, request: Parcel, wanted: Wanted, payload: Bytes | None = None) -> Wanted:
        if rank == PROC_NULL:
            wanted.complete = True
            return wanted
        request.kind, request.context, request.ident = REQUEST, self._ident, next(self._home.wire.idents)
        self._server.wanted[request.ident] = wanted
        self._open[rank].append(wanted)
        self._home.tally.access(wanted.into if payload is None else payload)
        self._home.wire.send(self._comm.members[rank], request, payload)
        return wanted

    def _range(self, rank: int, target: Any, origin: Buffer) -> tuple[int, int]:
        """Return first byte and number of bytes of an access; outside of the part is an error here, not there."""
        displacement, count, datatype = as_target(target, origin)
        if rank == PROC_NULL:
            return 0, count * datatype.size
        if not 0 <= rank < self._comm.size:
            raise CallError(ERR_RANK, f"rank {rank}: this window has ranks 0 to {self._comm.size - 1}")
        if not datatype.dense:
            raise UnsupportedError(
                "windows over torch take dense datatypes: access each block, or use --backend mpi"
            )
        start, nbytes = displacement * self._units[rank], count * datatype.size
        if start < 0 or start + nbytes > self._sizes[rank]:
            have = f"rank {rank}'s part has {self._sizes[rank]} bytes"
            raise UsageError(f"rank {self._comm.rank}: access to bytes {start} to {start + nbytes}; {have}")
        return start, nbytes

    def _get(self, origin: Any, rank: int, target: Any) -> Wanted:
        into = as_buffer(origin, writable=True)
        start, nbytes = self._range(rank, target, into)
        straight = into.datatype.is_predefined and into.datatype.dense and into.nbytes == nbytes
        memory = as_bytes(into.array) if straight else np.empty(nbytes, np.uint8)
        wanted = Wanted(memory, then=None if straight else lambda: into.unpack(memory))
        return self._ask(rank, Parcel(0, tag=start, first=GET, second=nbytes), wanted)

    def Get(self, origin: Any, target_rank: int, target: Any = None) -> None:
        self._get(origin, target_rank, target)

    def Rget(self, origin: Any, target_rank: int, target: Any = None) -> Pending:
        wanted = self._get(origin, target_rank, target)
        return Access.of(self._home, ("Win.Rget", target_rank, self._comm), wanted)

    def _put(self, origin: Any, rank: int, target: Any) -> Wanted:
        given = as_buffer(origin)
        start, _ = self._range(rank, target, given)
        return self._ask(rank, Parcel(0, tag=start, first=PUT), Wanted(), bytes_of(given))

    def Put(self, origin: Any, target_rank: int, target: Any = None) -> None:
        self._put(origin, target_rank, target)

    def Rput(self, origin: Any, target_rank: int, target: Any = None) -> Pending:
        wanted = self._put(origin, target_rank, target)
        return Access.of(self._home, ("Win.Rput", target_rank, self._comm), wanted)

    def Accumulate(self, origin: Any, target_rank: int, target: Any = None, op: Op = SUM) -> None:
        self._accumulate((origin, None), target_rank, target, op)

    def Get_accumulate(
        self, origin: Any, result: Any, target_rank: int, target: Any = None, op: Op = SUM
    ) -> None:
        self._accumulate((origin, result), target_rank, target, op)

    def _accumulate(self, buffers: tuple[Any, Any], rank: int, target: Any, op: Op) -> None:
        given = as_buffer(buffers[0])
        op.check(given.datatype, one_sided=True)
        start, _ = self._range(rank, target, given)
        code = accumulation(op, given.datatype)
        into = None if buffers[1] is None else as_bytes(as_buffer(buffers[1], writable=True).array)
        parcel = Parcel(0, tag=start, first=ACCUMULATE, second=code, third=int(into is not None))
        self._ask(rank, parcel, Wanted(into), bytes_of(given))

    def Fetch_and_op(
        self, origin: Any, result: Any, target_rank: int, target_disp: int = 0, op: Op = SUM
    ) -> None:
        self._accumulate((_one(origin), _one(result)), target_rank, target_disp, op)

    def Compare_and_swap(
        self, origin: Any, compare: Any, result: Any, target_rank: int, target_disp: int = 0
    ) -> None:
        given = as_buffer(_one(origin))
        if as_buffer(_one(compare)).nbytes != given.nbytes or as_buffer(compare).dtype != given.dtype:
            raise ParameterError("Compare_and_swap: give origin, compare and result of one type")
        start, _ = self._range(target_rank, target_disp, given)
        payload = np.concatenate([as_bytes(as_buffer(_one(compare)).pack()), as_bytes(given.pack())])
        into = as_bytes(as_buffer(_one(result), writable=True).array)
        self._ask(target_rank, Parcel(0, tag=start, first=SWAP), Wanted(into), payload)

    # ------------------------------------------------------------------------------------------ tokens of epochs
    def _tell(self, rank: int, token: int) -> None:
        parcel = Parcel(REQUEST, self._ident, first=TOKEN, second=token)
        self._home.wire.send(self._comm.members[rank], parcel)

    def _hear(self, sender: int, token: int) -> None:
        """Count a token; called by the wire's thread alone, and taken back by others under the condition."""
        with self._home.condition:
            self._told[self._comm.members.index(sender), token] += 1

    # ---------------------------------------------------------------------------------------------- completion
    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise unsupported(f"Win.{name}", "Lock, Put, Get, Flush or Fence")

    def Flush(self, rank: int) -> None:
        waiting, self._open[rank] = self._open[rank], []
        limit_s = self._home.clock.limit_s()
        call = (f"Win.Flush of rank {rank}", -1, self._comm)
        if not self._home.wait(lambda: all(wanted.complete for wanted in waiting), limit_s, call):
            text = f"rank {self._comm.rank}: Win.Flush of rank {rank} met its deadline of {limit_s:g} s"
            raise Timeout([rank], "Win.Flush", -1, text)
        if waiting:
            self._versions[rank] = waiting[-1].version

    def Flush_all(self) -> None:
        for rank in range(self._comm.size):
            self.Flush(rank)

    Flush_local, Flush_local_all = Flush, Flush_all

    def _acquire(self, rank: int, lock_type: int, limit_s: float, call: tuple[str, int, Any]) -> bool:
        request = Parcel(0, first=LOCK, second=lock_type)
        wanted = self._ask(rank, request, Wanted())
        self._open[rank].remove(wanted)
        if not self._home.wait(lambda: wanted.complete, limit_s, call):
            self._ask(rank, Parcel(0, first=CANCEL, second=request.ident), Wanted())
            self.Flush(rank)
        return wanted.complete

    def _release(self, rank: int, lock_type: int) -> None:
        self._ask(rank, Parcel(0, first=UNLOCK, second=lock_type), Wanted())
        self.Flush(rank)

    def Fence(self, assertion: int = 0) -> None:
        self.Flush_all()
        self._comm.Barrier()

    def Sync(self) -> None:
        """Make own and others' stores see each other: there is one memory, and nothing to do."""

    def Free(self) -> None:
        self.Flush_all()
        self._comm.Barrier()
        self._server.parts.pop(self._ident, None)


def unsupported(what: str, instead: str) -> UnsupportedError:
    """Return the error for a call that this building has not."""
    return UnsupportedError(f"{what}: not over torch.distributed; use {instead}, or --backend mpi")


def _one(spec: Any) -> Any:
    """Refuse more than one element: the atomic calls take one."""
    count = as_buffer(spec).count
    if count != 1:
        raise ParameterError(f"{count} elements: the atomic calls take one; use Get_accumulate for more")
    return spec


class Windows:
    """`comm.Win`: makes windows on a communicator, with mpi4py's names. All calls are collective."""

    def __init__(self, comm: TorchComm) -> None:
        self._comm = comm

    def Allocate(self, size: int, disp_unit: int = 1, info: Any = None, comm: Any = None) -> TorchWin:
        """Return a window over `size` new bytes on each rank."""
        return TorchWin(self._comm, np.zeros(size, np.uint8), disp_unit)

    def Create(self, memory: Any, disp_unit: int = 1, info: Any = None, comm: Any = None) -> TorchWin:
        """Return a window over memory that exists."""
        own = np.zeros(0, np.uint8) if memory is None else as_bytes(as_buffer(memory, writable=True).array)
        return TorchWin(self._comm, own, disp_unit)

    def __getattr__(self, name: str) -> Any:
        raise (
            unsupported(f"Win.{name}", "Win.Allocate or Win.Create")
            if name[:1].isupper()
            else AttributeError(name)
        )

    def Allocate_shared(self, size: int, disp_unit: int = 1, info: Any = None, comm: Any = None) -> TorchWin:
        """Refuse: there is no shared memory between these ranks."""
        raise unsupported("Win.Allocate_shared", "Win.Allocate with Get and Put")
