"""The process group of a virtual rank: torch.distributed's calls as collectives and messages of the simulator.

The Python half of torch calls these methods by their names; C++ (autograd's reducer, functional collectives) does the
same. Each returns a `Work` that began at the rank's clock.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from spawnsim.comm.constants import ANY_SOURCE
from spawnsim.comm.status import Status
from spawnsim.errors import Timeout, UnsupportedError, UsageError
from spawnsim.virtual.engine.diagnosis import place
from spawnsim.virtual.engine.wire import SYNCHRONOUS
from spawnsim.virtual.mpi import payload
from spawnsim.virtual.mpi.instance import CollectiveInstance
from spawnsim.virtual.mpi.requests import request_for
from spawnsim.virtual.timeline import watched
from spawnsim.virtual.torch.collectives import (
    Bytes,
    Target,
    Tensors,
    TorchCall,
    combination,
    described,
    memory,
    name_of,
    nbytes_of,
    op_name,
    raw,
    scattered,
    sum_sparse,
    write,
)
from spawnsim.virtual.torch.communicators import communicator, free, process_group
from spawnsim.virtual.torch.gloo import check, check_equal, root_of
from spawnsim.virtual.torch.profiling import communicating
from spawnsim.virtual.torch.work import GroupTimeout, VirtualWork, Works

VIRTUAL = "virtual"
Base: Any = dist.ProcessGroup  # its stub has other overloads than C++ calls


def _seconds(timeout: Any) -> float:
    """Return the seconds of an option; NaN if it is not set."""
    return timeout.total_seconds() if isinstance(timeout, timedelta) and timeout > timedelta(0) else math.nan


def _everything(instance: CollectiveInstance, rank: int) -> Any:
    return instance.parts()


def _same_dtype(tensors: Tensors) -> None:
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise UsageError(
            f"tensors of several types in one call: {sorted({str(each.dtype) for each in tensors})}; make one call "
            "for each type"
        )


class VirtualProcessGroup(Base):  # type: ignore[misc]
    """A group of virtual ranks: one rank's handle.

    Args:
        comm: the communicator of the members.
        names: the name and description of the group.
        timeout: the limit of its operations, and whether the program has chosen it.
        store: the group's store.
        backend: the name that the program has requested.
    """

    def __init__(
        self, comm: Any, names: tuple[str, str], timeout: tuple[timedelta, bool], store: Any, *, backend: str
    ) -> None:  # fmt: skip
        super().__init__(comm.rank, comm.size)
        self.comm, self._name, self._desc, self._store, self._backend = comm, *names, store, backend
        self._limit = timeout[0].total_seconds(), timeout[1]
        self._batch: list[Any] | None = None

    # -- names ---------------------------------------------------------------------------------------------------

    def size(self) -> int:
        return self.comm.size  # type: ignore[no-any-return]

    def rank(self) -> int:
        return self.comm.rank  # type: ignore[no-any-return]

    def name(self) -> str:
        return self._backend

    _get_backend_name = name

    def getBackendName(self) -> str:
        """Return the name that C++ sees: for "gloo" and "nccl" it expects its own classes."""
        return VIRTUAL

    group_name = pg_name = property(lambda self: self._name)
    group_desc = property(lambda self: self._desc)

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._desc

    def as_comm(self) -> Any:
        """Return the communicator of the members; `spawnsim.comm.as_comm` calls this."""
        return communicator(self)

    def group_of(self, comm: Any) -> Any:
        """Return the process group of a communicator's members. Collective on the first call."""
        return process_group(comm)

    def freed(self, comm: Any) -> None:
        free(comm)

    def get_group_store(self) -> Any:
        return self._store

    def __repr__(self) -> str:
        return f"VirtualProcessGroup({self.comm._label}, rank {self.comm.rank} of {self.comm.size})"

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: Any = None) -> VirtualProcessGroup:
        return self

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def set_timeout(self, timeout: timedelta) -> None:
        self._limit = timeout.total_seconds(), True

    _set_default_timeout = set_timeout

    def _has_hooks(self) -> bool:
        return False

    def _get_sequence_number_for_group(self) -> int:
        return self.comm._context.calls.get(self.comm._rank.id, 0)  # type: ignore[no-any-return]

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the numbers begin at 0."""

    def shutdown(self) -> None:
        """Do nothing: no connections are open."""

    abort = shutdown

    # -- running a collective ------------------------------------------------------------------------------------

    def _run(
        self, call: TorchCall, collect: Callable[[Any], object], opts: Any = None, *, outputs: Any = ()
    ) -> VirtualWork:  # fmt: skip
        """Begin a collective; `collect(outcome)` fills the outputs when it is complete."""
        call.line = place(sys._getframe()).partition(" (in ")[0]  # without torch's own frames
        departure = self.comm._join(call)
        instance, me = departure.instance, departure.me
        deliver = lambda _: collect(instance.outcome(me))  # noqa: E731
        request = request_for(self.comm._world, departure, departure, deliver)
        work = VirtualWork(request, outputs, self._limit_of(opts), lambda: instance.keep(me))
        return self._kept(work, call.name, call.shapes)

    def _limit_of(self, opts: Any) -> tuple[float, bool]:
        seconds = _seconds(getattr(opts, "timeout", opts))
        return self._limit if seconds != seconds else (seconds, True)

    def _kept(self, work: VirtualWork, name: str, shapes: Sequence[list[int]]) -> VirtualWork:
        work.profiled = communicating(f"{self._backend}:{name}", shapes)
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _start_coalescing(self, device: Any = None) -> None:
        self._batch = []

    def _end_coalescing(self, device: Any = None) -> Works:
        works, self._batch = self._batch or [], None
        return Works(works)

    # -- reductions ----------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> VirtualWork:
        """Combine tensors on all ranks."""
        tensors = _listed(tensors)
        return self._allreduce("all_reduce", tensors, _op(opts), opts if timeout is None else timeout)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> VirtualWork:
        return self._allreduce("all_reduce_coalesced", tensors, _op(opts), opts)

    def _allreduce_sparse(self, tensor: torch.Tensor, op: Any, opts: Any) -> VirtualWork:
        """Add sparse tensors, as gloo does: each rank receives all elements and adds them in the order of ranks."""
        if op_name(op) not in ("SUM", "AVG"):
            raise UnsupportedError(
                f"all_reduce({op_name(op)}) of sparse tensors: use SUM or AVG, or make them dense"
            )
        mine = tensor.coalesce()
        data = np.concatenate([raw(mine.indices()), raw(mine.values())])
        call = TorchCall(
            "all_reduce", "allgather", data, len(data), sizes="each", shapes=[list(tensor.shape)],
            agree=(("op", op_name(op)), ("dtype", name_of(tensor)), ("sparse", tuple(tensor.shape))),
            outcome=_everything,
        )  # fmt: skip

        def collect(found: list[Bytes]) -> None:
            total = sum_sparse(found, tensor)
            tensor.copy_(total / len(found) if op_name(op) == "AVG" else total)

        return self._run(call, collect, opts, outputs=[tensor])

    def _allreduce(self, name: str, tensors: Tensors, op: Any, opts: Any) -> VirtualWork:
        if len(tensors) == 1 and tensors[0].layout is torch.sparse_coo:
            return self._allreduce_sparse(tensors[0], op, opts)
        check(name, self._backend, tensors)
        shapes, agree = described(tensors)
        call = TorchCall(
            name, "allreduce", nbytes=nbytes_of(tensors), agree=(("op", op_name(op)), *agree), shapes=shapes
        )
        dtypes = [tensor.dtype for tensor in tensors]
        if len(tensors) > 1 and len(set(dtypes)) == 1:  # gloo joins them, and cuts the result into blocks
            call.part, dtypes = np.concatenate([raw(tensor, borrowed=True) for tensor in tensors]), dtypes[:1]
            cuts = np.cumsum([nbytes_of([tensor]) for tensor in tensors])[:-1]
            collect = lambda found: _fill(tensors, np.split(found[0], cuts))  # noqa: E731
        else:
            # One tensor is borrowed. The program may not write to it before the operation is complete, and copying
            # costs as much as adding.
            call.borrowed = len(tensors) == 1
            call.part = (
                raw(tensors[0], borrowed=True) if call.borrowed else [raw(tensor) for tensor in tensors]
            )
            compare = _changes(self.comm._world, name, tensors, opts)

            def collect(found: Any) -> None:
                compare()
                _fill(tensors, found)

        call.outcome = combination(op, dtypes)
        return self._run(call, collect, opts, outputs=list(tensors))

    def reduce(self, tensors: Any, opts: Any = None, *rest: Any) -> VirtualWork:
        """Combine tensors at the root."""
        tensors, root = _listed(tensors), root_of(opts, self.size())
        op = _op(opts)
        check("reduce", self._backend, tensors)
        shapes, agree = described(tensors)
        whole = combination(op, [tensor.dtype for tensor in tensors], rooted=True)
        call = TorchCall(
            "reduce", "reduce", [raw(tensor) for tensor in tensors], nbytes_of(tensors), root,
            agree=(("op", op_name(op)), *agree), shapes=shapes,
            outcome=lambda instance, rank: whole(instance, rank) if rank == root else None,
        )  # fmt: skip
        collect = lambda found: None if found is None else _fill(tensors, found)  # noqa: E731
        return self._run(call, collect, opts, outputs=list(tensors))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *rest: Any) -> VirtualWork:
        """Combine lists of tensors; each rank receives one of the results."""
        outputs, inputs = _listed(outputs), _rows(inputs)
        return self._reduce_scatter("reduce_scatter", outputs, inputs, opts)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> VirtualWork:  # noqa: A002 - torch's
        """Combine tensors; each rank receives a block."""
        return self._reduce_scatter("reduce_scatter_single", [output], [self._blocks(input)], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> VirtualWork:
        """Combine several tensors; each rank receives a block of each."""
        rows = [self._blocks(tensor) for tensor in inputs]
        return self._reduce_scatter("reduce_scatter_single_coalesced", outputs, rows, opts)

    _reduce_scatter_base = reduce_scatter_tensor = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, name: str, outputs: Tensors, rows: Sequence[Tensors], opts: Any) -> VirtualWork:
        op, size = _op(opts), self.size()
        for row in rows:
            _same_dtype(row)
            if len(row) != size:
                raise ValueError(f"{name}: {len(row)} tensors are given for {size} ranks")
        flat = [tensor for row in rows for tensor in row]
        shapes, agree = described([row[0] for row in rows])
        counts = np.array([nbytes_of(flat[rank::size]) for rank in range(size)], np.int64)
        call = TorchCall(
            name, "reduce_scatter", [raw(tensor) for tensor in flat], counts, agree=(("op", op_name(op)), *agree),
            sizes="same", shapes=shapes,
            outcome=scattered(op, [row[0].dtype for row in rows], apart=name == "reduce_scatter"),
        )  # fmt: skip
        return self._run(call, lambda found: _fill(outputs, found), opts, outputs=list(outputs))

    def _blocks(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return a tensor's equal blocks for all ranks."""
        size = self.size()
        if tensor.numel() % size:
            raise ValueError(f"{tensor.numel()} elements do not divide into blocks for {size} ranks")
        with torch.no_grad():
            return (
                list(tensor.detach().reshape(-1).chunk(size)) if tensor.numel() else [tensor.detach()] * size
            )

    # -- one to all, all to one ----------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, *rest: Any) -> VirtualWork:
        """Send the root's tensors to all ranks."""
        tensors, root = _listed(tensors), root_of(opts, self.size())
        check("broadcast", self._backend, tensors)
        shapes, agree = described(tensors)
        mine = self.rank() == root
        call = TorchCall(
            "broadcast", "bcast", [raw(tensor) for tensor in tensors] if mine else None, nbytes_of(tensors), root,
            agree=agree, sizes="root", shapes=shapes, outcome=lambda instance, _: instance.calls[root].part,  # type: ignore[union-attr]
        )  # fmt: skip
        collect = lambda found: None if mine else _fill(tensors, found)  # noqa: E731
        return self._run(call, collect, opts, outputs=list(tensors))

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *rest: Any) -> VirtualWork:
        """Collect a tensor of each rank at the root."""
        (given,), root = _listed(inputs), root_of(opts, self.size())
        shapes, agree = described([given])
        call = TorchCall(
            "gather", "gather", raw(given), nbytes_of([given]), root, agree=agree, sizes="all", shapes=shapes,
            outcome=lambda instance, rank: instance.parts() if rank == root else None,
        )  # fmt: skip
        targets = _rows(outputs)[0] if outputs else []
        collect = lambda found: None if found is None else _fill(targets, found)  # noqa: E731
        return self._run(call, collect, opts, outputs=list(targets))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *rest: Any) -> VirtualWork:
        """Distribute the root's tensors."""
        (target,), root, size = _listed(outputs), root_of(opts, self.size()), self.size()
        given = _rows(inputs)[0] if self.rank() == root and inputs else []
        check("scatter", self._backend, [target, *given])
        check_equal("scatter", self._backend, [target, *given])
        shapes, agree = described([target])
        sizes = np.array([nbytes_of([tensor]) for tensor in given] or [0] * size, np.int64)
        call = TorchCall(
            "scatter", "scatter", [raw(tensor) for tensor in given] or None, sizes, root, agree=agree, sizes="root",
            shapes=shapes, outcome=lambda instance, rank: instance.calls[root].part[rank],  # type: ignore[union-attr]
        )  # fmt: skip
        return self._run(call, lambda found: write(target, found), opts, outputs=[target])

    # -- all to all ------------------------------------------------------------------------------------------------

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, *rest: Any) -> VirtualWork:
        return self._allgather("all_gather", _rows(outputs), _listed(inputs), opts)

    def allgather_coalesced(self, outputs: Any, inputs: Tensors, opts: Any = None) -> VirtualWork:
        """Collect several tensors of each rank on all ranks; `outputs` has a list for each rank."""
        rows = [[row[place] for row in outputs] for place in range(len(inputs))]
        return self._allgather("all_gather_coalesced", rows, inputs, opts)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> VirtualWork:  # noqa: A002 - torch's
        return self._gathered("all_gather_single", [output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> VirtualWork:
        return self._gathered("all_gather_single_coalesced", outputs, inputs, opts)

    _allgather_base = all_gather_into_tensor = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _allgather(self, name: str, rows: Sequence[Tensors], inputs: Tensors, opts: Any) -> VirtualWork:
        def collect(found: list[list[Bytes]]) -> None:
            for place_, row in enumerate(rows):
                _fill(row, [part[place_] for part in found])

        return self._gather_all(
            name, inputs, collect, opts, outputs=[tensor for row in rows for tensor in row]
        )

    def _gathered(self, name: str, outputs: Tensors, inputs: Tensors, opts: Any) -> VirtualWork:
        def collect(found: list[list[Bytes]]) -> None:
            for place_, output in enumerate(outputs):
                write(output, np.concatenate([part[place_] for part in found]))

        return self._gather_all(name, inputs, collect, opts, outputs=list(outputs))

    def _gather_all(
        self, name: str, inputs: Tensors, collect: Callable[[Any], None], opts: Any, *, outputs: Any
    ) -> VirtualWork:  # fmt: skip
        shapes, agree = described(inputs)
        call = TorchCall(
            name, "allgather", [raw(tensor) for tensor in inputs], nbytes_of(inputs), agree=agree, sizes="each",
            shapes=shapes, outcome=_everything,
        )  # fmt: skip
        return self._run(call, collect, opts, outputs=outputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None, *rest: Any) -> VirtualWork:
        """Send a tensor to each rank, and receive one from each."""
        for tensors in (inputs, outputs):
            check_equal("all_to_all", self._backend, tensors)
        blocks = [raw(tensor) for tensor in inputs]
        collect = lambda found: _fill(outputs, found)  # noqa: E731
        return self._alltoall("all_to_all", (inputs, blocks), collect, opts, outputs=list(outputs))

    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Any = (), input_splits: Any = (), opts: Any = None  # noqa: A002
    ) -> VirtualWork:  # fmt: skip
        """Send a block of a tensor to each rank, and receive one from each."""
        data, cuts = raw(input), self._cuts(input, input_splits)
        expected = np.diff(self._cuts(output, output_splits))

        def collect(found: list[Bytes]) -> None:
            sizes = np.array([len(part) for part in found])
            if (sizes != expected).any():
                source = int(np.flatnonzero(sizes != expected)[0])
                raise UsageError(
                    f"all_to_all_single: rank {source} has sent {sizes[source]} bytes, and output_split_sizes make "
                    f"room for {expected[source]}"
                )
            write(output, np.concatenate(found))

        blocks = [data[first:last] for first, last in pairwise(cuts)]
        return self._alltoall("all_to_all_single", ([input], blocks), collect, opts, outputs=[output])

    alltoall_base = all_to_all_single

    def _cuts(self, tensor: torch.Tensor, splits: Any) -> Any:
        """Return where a tensor's blocks begin and end, in bytes."""
        size, whole = self.size(), nbytes_of([tensor])
        if not len(splits):
            if tensor.shape and tensor.shape[0] % size:
                raise ValueError(
                    f"Tensor's dim 0 ({tensor.shape[0]}) does not divide equally across group size {size}"
                )
            return np.arange(size + 1) * (whole // size)
        if len(splits) != size or sum(splits) != tensor.shape[0]:
            raise ValueError(
                f"split sizes {list(splits)} do not fit {size} ranks and a dim 0 of {tensor.shape[0]}"
            )
        row = whole // max(int(tensor.shape[0]), 1)
        return np.concatenate([[0], np.cumsum(np.asarray(splits, np.int64))]) * row

    def _alltoall(
        self, name: str, given: tuple[Tensors, list[Bytes]], collect: Callable[[Any], None], opts: Any, *, outputs: Any
    ) -> VirtualWork:  # fmt: skip
        inputs, blocks = given
        if len(blocks) != self.size():
            raise ValueError(f"{name}: {len(blocks)} tensors are given for {self.size()} ranks")
        sizes = np.array([len(block) for block in blocks], np.int64)
        call = TorchCall(
            name, "alltoall", blocks, sizes, sizes="matrix", shapes=described(inputs)[0],
            outcome=lambda instance, rank: [part[rank] for part in instance.parts()],
        )  # fmt: skip
        return self._run(call, collect, opts, outputs=outputs)

    def barrier(self, opts: Any = None) -> VirtualWork:
        return self._run(TorchCall("barrier", "barrier"), lambda _: None, opts)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks arrive; rank 0 names the late ranks, the others refer to rank 0."""
        rank, at_once = self.rank(), timeout == timedelta(0)  # here, unlike elsewhere, 0 is a limit, too
        limit = timedelta.resolution if at_once else timeout
        work = self._run(TorchCall("monitored_barrier", "barrier"), lambda _: None, limit)
        try:
            work.wait()
        except Timeout as error:
            shown = error.ranks if wait_all_ranks else error.ranks[:1]
            whom = f"Rank{'s' if len(shown) > 1 else ''} {', '.join(map(str, shown))}"
            limit_ms = 0.0 if at_once else self._limit_of(timeout)[0] * 1e3
            words = f"[Rank {rank}]: {whom} failed to pass monitoredBarrier in {limit_ms:.0f} ms"
            if rank != 0:
                words = (
                    f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for "
                    "send/recv from rank 0. Please check rank 0 logs for faulty rank."
                )
            elif at_once:
                words += f"; Rank {rank} timed out in monitoredBarrier after 0 ms"
            raise GroupTimeout(error.ranks, error.operation, error.sequence, f"{words} ({error})") from None

    # -- point to point --------------------------------------------------------------------------------------------

    def send(self, tensors: Any, dst: int, tag: int = 0) -> VirtualWork:
        """Send a tensor. As over gloo, the send completes when the receiver reaches its receive, whatever the size."""
        (tensor,) = _listed(tensors)
        request = self.comm._isend(raw(tensor), dst, tag, SYNCHRONOUS, operation="send", buf=memory(tensor))
        return self._kept(VirtualWork(request, [tensor], self._limit), "send", [list(tensor.shape)])

    def recv(self, tensors: Any, src: int, tag: int = 0) -> VirtualWork:
        """Receive a tensor."""
        (tensor,) = _listed(tensors)
        request = self.comm._irecv(src, tag, "recv", Target(tensor))
        name = "recvAnySource" if src == ANY_SOURCE else "recv"  # gloo's own name, in profiles
        return self._kept(VirtualWork(request, [tensor], self._limit), name, [list(tensor.shape)])

    def recv_anysource(self, tensors: Any, tag: int = 0) -> VirtualWork:
        return self.recv(tensors, ANY_SOURCE, tag)

    # -- unsupported -----------------------------------------------------------------------------------------------

    def split_group(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error: no backend with communicators that could be split is behind the group."""
        raise UnsupportedError("split_group splits NCCL's communicators: use new_group on virtual ranks")

    def merge_remote_group(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError("merge_remote_group is not offered on virtual ranks: use new_group")


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _rows(tensors: Any) -> list[list[torch.Tensor]]:
    """Return lists of tensors; a single list becomes the only one."""
    return (
        [list(tensors)]
        if tensors and isinstance(tensors[0], torch.Tensor)
        else [list(row) for row in tensors]
    )


def _changes(world: Any, name: str, tensors: Tensors, opts: Any) -> Callable[[], None]:
    """Return a function that warns if the program has changed the tensors meanwhile, before they are filled."""
    found = [memory(tensor) for tensor in tensors] if getattr(opts, "asyncOp", True) else []
    watches = [payload.watched(world, each, each, name) for each in found if each is not None and each.size]

    def compare() -> None:
        for watch in filter(None, watches):
            watch(Status())

    return compare


def _op(opts: Any) -> Any:
    op = getattr(opts, "reduceOp", opts)
    return ReduceOp.SUM if op is None else op


def _fill(tensors: Tensors, found: Sequence[Bytes]) -> None:
    if len(tensors) != len(found):
        raise UsageError(f"{len(tensors)} tensors are given for the data of {len(found)} ranks")
    for tensor, data in zip(tensors, found, strict=True):
        write(tensor, data)


# The calls by which a program communicates: a watched run records them, and charges earlier computing to them.
for _name in (
    "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "broadcast", "gather", "scatter", "allgather", "allgather_coalesced",
    "all_gather_single", "all_gather_single_coalesced", "alltoall", "all_to_all_single", "barrier", "monitored_barrier",
    "send", "recv", "recv_anysource",
):  # fmt: skip
    setattr(VirtualProcessGroup, _name, watched(_name, vars(VirtualProcessGroup)[_name]))
VirtualWork.wait = watched("wait", VirtualWork.wait)  # type: ignore[method-assign]
