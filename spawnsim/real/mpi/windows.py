"""Windows on MPI that are accessible while their owners compute.

Measurements on both MPIs determined the method: memory from `Allocate`, one `Lock_all` from creation until `Free`, and
accesses completed by `Flush`. So spawnsim implements its own locks and epochs (`window_sync`). A lock is an atomic
operation on a small window of lock words, and a `Get` under a shared lock needs no extra message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from spawnsim.comm.constants import LOCK_EXCLUSIVE
from spawnsim.comm.datatypes import NAMED, Datatype
from spawnsim.comm.handles import integer
from spawnsim.comm.layouts import BF16
from spawnsim.comm.ops import SUM
from spawnsim.errors import UnsupportedError
from spawnsim.real.mpi import translation
from spawnsim.real.mpi.abortable import make_collectively, run_detached
from spawnsim.real.mpi.point_to_point import MPIRequest
from spawnsim.real.mpi.runtime import CommCore
from spawnsim.real.runtime.services import nbytes_of
from spawnsim.real.runtime.window_sync import WindowSync, window_comm

if TYPE_CHECKING:
    from spawnsim.real.runtime.staging import Stage


HALVES = ("float16", "bfloat16", str(BF16))
HALF_TYPES = (NAMED["MPI_FLOAT16_T"], NAMED["MPI_BFLOAT16_T"])
LISTS = (list, tuple)
UNKNOWN = -1  # how many bytes a part has
WRITER = 1 << 40  # added to a lock word by the one exclusive holder; shared holders add 1


@dataclass(frozen=True)
class WatchedTarget:
    """The part of a window that a call waits for, as a `Scope` of the watchdog."""

    label: str
    members: tuple[int, ...]


class MPIWin(WindowSync):
    """A window with mpi4py's methods; create it by `comm.Win.Allocate(nbytes)` or `comm.Win.Create(memory)`."""

    def __init__(self, raw: MPI.Win, comm: CommCore) -> None:
        self._raw, self._comm, self._runtime = raw, comm, comm.runtime
        # A lock word per rank.
        self._words: Any = make_collectively(comm, MPI.Win.Allocate, 8, 8, MPI.INFO_NULL)
        # of epochs, so that no receive of the program takes one
        self._tokens = make_collectively(comm, MPI.Intracomm.Dup)
        word: Any = self._words.tomemory()
        memoryview(word)[:] = bytes(8)
        self._sizes, self._units = self._parts()
        self.label = f"{comm.label}/Win{comm._sequence}"
        self._stages: list[tuple[int, Stage]] = []  # of calls with GPU tensors that are not flushed yet
        self._buffers_of: dict[int, list[Any]] = {}  # by target, of calls that are not flushed yet
        self._begin_sync()
        self._one, self._was = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self._runtime.windows.append(self)
        raw.Lock_all(MPI.MODE_NOCHECK)
        self._words.Lock_all(MPI.MODE_NOCHECK)
        self._targets = [WatchedTarget(f"the window of {comm.label}", (member,)) for member in comm.members]
        comm.Barrier()

    def _parts(self) -> tuple[list[int], list[int]]:
        """Return the bytes and the displacement unit of each rank's part, once all ranks have created theirs.

        Memory that is attached later is unknown, so accesses to it are not refused.
        """
        comm, raw = self._comm, self._raw
        known = raw.Get_attr(MPI.WIN_CREATE_FLAVOR) != MPI.WIN_FLAVOR_DYNAMIC
        parts = np.empty((comm.size, 2), np.int64)
        own = [raw.Get_attr(MPI.WIN_SIZE), raw.Get_attr(MPI.WIN_DISP_UNIT)] if known else [UNKNOWN, 1]
        comm.Allgather(np.array(own, np.int64), parts)
        return parts[:, 0].tolist(), parts[:, 1].tolist()

    # ------------------------------------------------------------------------------------------------ memory
    def tomemory(self) -> Any:
        return self._raw.tomemory()

    @property
    def memory(self) -> Any:
        return self._raw.tomemory()

    def Sync(self) -> None:
        self._raw.Sync()

    def Shared_query(self, rank: int) -> tuple[Any, int]:
        """Return a rank's part as a buffer, and its displacement unit (windows by `Allocate_shared`)."""
        memory, unit = self._raw.Shared_query(rank)
        return memory, unit

    # ------------------------------------------------------------------------------------------ tokens of epochs
    def _send_token(self, rank: int, token: int) -> None:
        MPIRequest.of(self._tokens.isend(None, rank, token), self._runtime, ("Win.Post", rank, self._comm))

    def _count_tokens(self) -> None:
        found = MPI.Status()
        while (message := self._tokens.improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, found)) is not None:
            message.recv()
            self._tokens_of[found.Get_source(), found.Get_tag()] += 1

    # ------------------------------------------------------------------------------------------------- locks
    # MPI's own locks are already held (`Lock_all`), so a lock is a word in a second window: an exclusive holder swaps
    # WRITER for 0, a shared holder adds 1 and subtracts it again if there is a writer. Both are atomic operations of
    # the library, in which the target's program takes no part. Each poll of the wait tries again, without a queue
    # and so without fairness, which MPI does not guarantee either.
    def _acquire(self, rank: int, lock_type: int, limit_s: float, call: tuple[str, int, Any]) -> bool:
        taken: bool = self._runtime.wait(lambda: self._take(rank, lock_type), limit_s, call)
        return taken

    def _take(self, rank: int, lock_type: int) -> bool:
        """Try once to take a lock word: the writer needs it at zero, a reader needs it without a writer."""
        if lock_type == LOCK_EXCLUSIVE:
            compare = np.zeros(1, np.int64)
            self._one[0] = WRITER
            self._words.Compare_and_swap(self._one, compare, self._was, rank)
            self._words.Flush(rank)
            return int(self._was[0]) == 0
        if self._add(rank, 1) < WRITER:
            return True
        self._add(rank, -1)
        return False

    def _release(self, rank: int, lock_type: int) -> None:
        self._add(rank, -(WRITER if lock_type == LOCK_EXCLUSIVE else 1))

    def _add(self, rank: int, share: int) -> int:
        self._one[0] = share
        self._words.Fetch_and_op(self._one, self._was, rank)
        self._words.Flush(rank)
        return int(self._was[0])

    # ---------------------------------------------------------------------------------------------- accesses
    def _check(self, rank: int, target: Any, origin: Any) -> None:
        """Count an access; refuse it outside of any epoch, or if it certainly leaves the target's part.

        For a derived datatype, or one given as a string, only the library knows the accessed bytes.
        """
        nbytes, rank = nbytes_of(origin), integer(rank)
        self._runtime.counters.part(nbytes)
        if not 0 <= rank < self._comm.size or self._comm.revoked:  # PROC_NULL, or the library's error
            return
        self._require_epoch(rank)
        size, displacement = self._sizes[rank], target
        count: tuple[Any, ...] = ()
        if type(target) in LISTS:
            displacement, count = target[0] if target else 0, tuple(target[1:])
        known = _is_plain(origin) and (not count or type(origin) not in LISTS or len(count) == 2)
        if size == UNKNOWN or not (known and _is_plain(count)):
            return
        if count:
            nbytes = nbytes_of([origin[0] if type(origin) in LISTS else origin, *count])
        self._require_inside(rank, int(displacement or 0) * self._units[rank], nbytes, size)

    def _buffers(self, operation: str, target_rank: int, *buffers: Any) -> tuple[Any, ...]:
        """Return an access's buffers as mpi4py takes them, kept until Flush; a GPU tensor is in main memory until then.

        mpi4py itself does not keep them, which MPI allows: a temporary object of the program would be lost.
        """
        translate = self._runtime.translate
        given = tuple([translate(buffer) for buffer in buffers])
        stage: Stage | None = translate.stage(self._raw, operation, given) if translate.devices else None
        if stage is not None:
            self._stages.append((target_rank, stage))
            return stage.args
        target_rank = integer(target_rank)
        kept = self._buffers_of.get(target_rank)
        if kept is None:
            self._buffers_of[target_rank] = [given]
        elif len(given) > 1 or kept[-1][0] is not given[0]:  # a loop over one buffer keeps it once
            kept.append(given)
        return given

    def _require_sums(self, operation: str, origin: Any, target: Any, op: MPI.Op) -> None:
        """Refuse an access that computes on types which MPI misinterprets: the results would be silently wrong.

        MPICH's `Accumulate` of float16 does not sum; bfloat16, fp8 and spawnsim's derived datatypes go to MPI as bytes.
        """
        kind = getattr(origin, "dtype", None)
        if (kind in _SUMMED and type(target) not in LISTS) or op in (MPI.REPLACE, MPI.NO_OP):
            return
        types = [
            part
            for spec in (origin, target)
            if type(spec) in LISTS
            for part in spec
            if type(part) is Datatype
        ]
        memory = origin[0] if type(origin) in LISTS else origin
        name = str(getattr(memory, "dtype", "")).removeprefix("torch.")
        derived = not all(each.is_predefined for each in types)
        if not (
            derived or name in HALVES or name.startswith("float8") or any(t in HALF_TYPES for t in types)
        ):
            if kind is not None:
                _SUMMED.add(kind)
            return
        what = f"{'a derived datatype' if derived else name} with {op.__reduce__()}"
        raise UnsupportedError(
            f"rank {self._comm.rank}: Win.{operation} of {what}: over MPI it would give wrong numbers; use a window "
            "of float32 (or another predefined type), or a lock, Get and Put"
        )

    def _computing(self, operation: str, target_rank: int, buffers: tuple[Any, Any], op: Any) -> MPI.Op:
        """Count and check an access that computes on origin and target; return its op as mpi4py's."""
        origin, target = buffers
        native: MPI.Op = self._runtime.translate(op)
        self._check(target_rank, target, origin)
        self._require_sums(operation, origin, target, native)
        return native

    def _land(self, rank: int | None) -> None:
        """Release the buffers of the complete calls to `rank` (None: to all ranks); copy to GPU tensors."""
        if rank is None:
            self._buffers_of.clear()
        else:
            self._buffers_of.pop(integer(rank), None)
        if not self._stages:
            return
        complete = [stage for target, stage in self._stages if rank is None or target == rank]
        self._stages = [(target, stage) for target, stage in self._stages if stage not in complete]
        for stage in complete:
            stage.end()

    def Get(self, origin: Any, target_rank: int, target: Any = None) -> None:
        self._check(target_rank, target, origin)
        (origin,) = self._buffers("Get", target_rank, origin)
        self._raw.Get(origin, translation.peer(target_rank), self._runtime.translate(target))

    def Put(self, origin: Any, target_rank: int, target: Any = None) -> None:
        self._check(target_rank, target, origin)
        (origin,) = self._buffers("Put", target_rank, origin)
        self._raw.Put(origin, translation.peer(target_rank), self._runtime.translate(target))

    def Accumulate(self, origin: Any, target_rank: int, target: Any = None, op: Any = SUM) -> None:
        translate = self._runtime.translate
        native = self._computing("Accumulate", target_rank, (origin, target), op)
        (origin,) = self._buffers("Accumulate", target_rank, origin)
        self._raw.Accumulate(origin, translation.peer(target_rank), translate(target), native)

    def Get_accumulate(
        self, origin: Any, result: Any, target_rank: int, target: Any = None, op: Any = SUM
    ) -> None:
        translate = self._runtime.translate
        native = self._computing("Get_accumulate", target_rank, (origin, target), op)
        origin, result = self._buffers("Get_accumulate", target_rank, origin, result)
        self._raw.Get_accumulate(origin, result, translation.peer(target_rank), translate(target), native)

    def Fetch_and_op(
        self, origin: Any, result: Any, target_rank: int, target_disp: int = 0, op: Any = SUM
    ) -> None:
        native = self._runtime.translate(op)
        self._check(target_rank, [target_disp, 1], origin)  # of one element; the library refuses more
        self._require_sums("Fetch_and_op", origin, None, native)
        origin, result = self._buffers("Fetch_and_op", target_rank, origin, result)
        self._raw.Fetch_and_op(origin, result, target_rank, target_disp, native)

    def Compare_and_swap(
        self, origin: Any, compare: Any, result: Any, target_rank: int, target_disp: int = 0
    ) -> None:
        self._check(target_rank, [target_disp, 1], origin)  # of one element; the library refuses more
        origin, compare, result = self._buffers("Compare_and_swap", target_rank, origin, compare, result)
        self._raw.Compare_and_swap(origin, compare, result, target_rank, target_disp)

    def Rget(self, origin: Any, target_rank: int, target: Any = None) -> MPIRequest:
        self._check(target_rank, target, origin)
        return self._requested("Rget", target_rank, (origin,), target)

    def Rput(self, origin: Any, target_rank: int, target: Any = None) -> MPIRequest:
        self._check(target_rank, target, origin)
        return self._requested("Rput", target_rank, (origin,), target)

    def Raccumulate(self, origin: Any, target_rank: int, target: Any = None, op: Any = SUM) -> MPIRequest:
        native = self._computing("Raccumulate", target_rank, (origin, target), op)
        return self._requested("Raccumulate", target_rank, (origin,), target, native)

    def Rget_accumulate(
        self, origin: Any, result: Any, target_rank: int, target: Any = None, op: Any = SUM
    ) -> MPIRequest:
        native = self._computing("Rget_accumulate", target_rank, (origin, target), op)
        return self._requested("Rget_accumulate", target_rank, (origin, result), target, native)

    def _requested(
        self, operation: str, target_rank: int, buffers: tuple[Any, ...], *rest: Any
    ) -> MPIRequest:
        """Start an access that has a request; `rest`: its target and its op."""
        translate = self._runtime.translate
        given = tuple([translate(buffer) for buffer in buffers])
        stage = translate.stage(self._raw, operation, given) if translate.devices else None
        if stage is not None:
            given = stage.args
        rank, after = translation.peer(target_rank), [translate(value) for value in rest]
        raw = getattr(self._raw, operation)(*given, rank, *after)
        return MPIRequest.of(raw, self._runtime, (f"Win.{operation}", target_rank, self._comm), stage)

    # -------------------------------------------------------------------------------------------- completion
    def Flush(self, rank: int) -> None:
        """Complete all calls to one rank; watched, since it waits for the target's next poll on some paths."""
        runtime, thread = self._runtime, get_ident()
        if runtime.abortable and rank != self._comm.rank:
            run_detached(self._comm, f"Win.Flush of rank {rank}", partial(self._raw.Flush, rank), [rank])
            self._land(rank)
            return
        active = runtime.watchdog.active
        active[thread] = (
            f"Win.Flush of rank {rank}",
            -1,
            self._targets[rank],
            perf_counter(),
            runtime.clock.limit_s(),
        )
        try:
            self._raw.Flush(rank)
        finally:
            active.pop(thread, None)
        self._land(rank)

    def Flush_all(self) -> None:
        self._raw.Flush_all()
        self._land(None)

    Flush_local = Flush
    Flush_local_all = Flush_all

    def Fence(self, assertion: int = 0) -> None:
        self.Flush_all()
        self._raw.Sync()
        self._comm.Barrier()
        self._raw.Sync()
        self._fence(assertion)

    def Get_attr(self, keyval: int) -> Any:
        """Return an attribute; spawnsim's keyvals of predefined attributes are translated."""
        return self._raw.Get_attr(translation.keyval(keyval))

    def __bool__(self) -> bool:
        return bool(self._raw)

    def __eq__(self, other: object) -> bool:
        if not other:  # a missing window appears as None, whereas mpi4py programs compare with WIN_NULL
            return not self
        return isinstance(other, MPIWin) and self._raw == other._raw

    __hash__ = None  # type: ignore[assignment]

    def Free(self) -> None:
        self._runtime.windows.remove(self)
        self._comm.Barrier()
        if self._runtime.abortable:
            run_detached(self._comm, "Win.Free", self.release)
        else:
            self.release()

    def release(self) -> None:
        """Free the memory; collective, and possible after the communicator was freed."""
        for raw in (self._raw, self._words):
            raw.Unlock_all()
            raw.Free()
        self._tokens.Free()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._raw, name)


_SUMMED: set[Any] = set()  # dtypes that MPI combines correctly


def _is_plain(spec: Any) -> bool:
    """Whether memory and counts, or a predefined type, determine the bytes of a buffer specification."""
    if type(spec) not in LISTS or not spec:
        return True
    return type(spec[-1]) is not str and bool(getattr(spec[-1], "is_predefined", True))


class Windows:
    """`comm.Win`: creates windows on a communicator, with mpi4py's names. All calls are collective."""

    def __init__(self, comm: CommCore) -> None:
        self._comm = comm

    def _make(self, given: Any, make: Callable[..., MPI.Win], *args: Any) -> MPIWin:
        comm = window_comm(self._comm, given)
        return MPIWin(make_collectively(comm, make, *args), comm)

    def Allocate(self, size: int, disp_unit: int = 1, info: Any = None, comm: Any = None) -> MPIWin:
        """Return a window over `size` new bytes on each rank; other ranks can access it while this rank computes."""
        return self._make(comm, MPI.Win.Allocate, size, disp_unit, info or MPI.INFO_NULL)

    def Allocate_shared(self, size: int, disp_unit: int = 1, info: Any = None, comm: Any = None) -> MPIWin:
        """Return a window that all ranks of one node map into their memory (see `Shared_query`)."""
        return self._make(comm, MPI.Win.Allocate_shared, size, disp_unit, info or MPI.INFO_NULL)

    def Create_dynamic(self, info: Any = None, comm: Any = None) -> MPIWin:
        """Return a window without memory: `Attach` adds some, and targets are addresses."""
        return self._make(comm, MPI.Win.Create_dynamic, info or MPI.INFO_NULL)

    def Create(self, memory: Any, disp_unit: int = 1, info: Any = None, comm: Any = None) -> MPIWin:
        """Return a window over existing memory, accessible only when this rank polls; `Allocate` is faster."""
        runtime = self._comm.runtime
        memory = runtime.translate(memory)
        memory = memory[0] if type(memory) is list else memory  # of bfloat16, with its type
        if runtime.translate.far(memory):
            raise UnsupportedError(
                "Win.Create over GPU memory: use Win.Allocate, and Put GPU tensors into it and Get them from it"
            )
        runtime.needy = True
        return self._make(comm, MPI.Win.Create, memory, disp_unit, info or MPI.INFO_NULL)
