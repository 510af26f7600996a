"""Collectives that torch implements: Barrier, Bcast, Reduce, Allreduce, Allgather, on the user's own memory.

Each call is counted, limited by its deadline, visible to the watchdog and, on request, compared between ranks. The code
path is short, because a line between two calls costs several times as much as in a tight loop. GPU tensors go to NCCL
if the group has it, otherwise over gloo through pinned memory. Reductions that torch does not support (other types,
other ops, user-defined ops) are computed from messages, as on virtual ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from threading import get_ident
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from spawnsim.comm.buffers import as_buffer
from spawnsim.comm.constants import IN_PLACE, is_in_place
from spawnsim.comm.layouts import BF16
from spawnsim.comm.ops import BAND, BOR, BXOR, MAX, MIN, PROD, SUM, Op
from spawnsim.errors import ParameterError, Timeout, UsageError
from spawnsim.real.base import WireComm
from spawnsim.real.runtime.collectives import (
    NOTHING,
    Compared,
    as_blocks,
    describe,
    ordered_allreduce,
    require_same_call,
)
from spawnsim.real.runtime.messages import HOST, CompositeRequest, bytes_of
from spawnsim.real.runtime.requests import RealRequest
from spawnsim.real.runtime.staging import checked, device_tensor
from spawnsim.real.runtime.watchdog import verdict
from spawnsim.real.torch.runtime import backend_of, rank_gone, tensor_of

NEVER = float("inf")
SHORTEST_S = 1e-3  # torch counts milliseconds, and 0 means no limit
MINIMUM: Any = dist.AllreduceOptions()
MINIMUM.reduceOp = dist.ReduceOp.MIN
TEXT_NBYTES = 512


def on_gpu(spec: Any) -> bool:
    """Whether a buffer specification is a tensor in GPU memory."""
    return device_tensor(spec) is not None and isinstance(spec, torch.Tensor)


def staged(tensor: torch.Tensor) -> torch.Tensor:
    """Return pinned main memory of a GPU tensor's shape and type."""
    return HOST.host(tensor)


def flat_tensor(spec: Any, *, writable: bool = False) -> torch.Tensor | None:
    """Return the user's memory as a flat tensor for a torch collective, or None if gloo lacks its type."""
    if isinstance(spec, torch.Tensor):
        checked(spec)
        if spec.is_cpu and spec.dtype not in GLOO_TYPES:
            return None
        return spec if spec.dim() == 1 else spec.view(-1)
    buffer = as_buffer(spec, writable=writable)
    if not (buffer.datatype and buffer.datatype.is_predefined):
        return None
    array = np.asarray(buffer.array)
    if array.dtype == BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if array.dtype.name not in TORCH_NAMES:
        return None
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def as_plain(spec: Any) -> bool:
    """Whether a buffer specification is memory alone, without counts or types."""
    return isinstance(spec, (np.ndarray, torch.Tensor))


TORCH_NAMES = {"float16", "float32", "float64", "int8", "uint8", "int32", "int64"}
"""Types that gloo reduces."""
GLOO_TYPES = {torch.bfloat16, torch.bool, *(getattr(torch, name) for name in TORCH_NAMES)}
"""Types that gloo can move. It rejects other types ("Invalid scalar type"); these travel as bytes."""


class WorkRequest(RealRequest):
    """A torch collective that makes progress by itself."""

    __slots__ = ("_after", "_work")
    _work: Any
    _after: Callable[[], object] | None

    @classmethod
    def of(
        cls, runtime: Any, what: tuple[str, int, Any], work: Any, after: Callable[[], object] | None = None
    ) -> WorkRequest:
        """Return the request over a `Work`; `after` runs when the work is complete."""
        self = cls()
        self._work, self._after = work, after
        self.begin(runtime, what)
        return self

    def _try(self) -> bool:
        if not self._work.is_completed():
            return False
        try:
            self._work.wait()
        except RuntimeError as error:
            raise rank_gone(self._text(), error) from None
        if self._after is not None:
            self._after()
        return True


def dtype_and_count(buf: Any) -> str:
    """Return dtype and count as text."""
    if isinstance(buf, torch.Tensor):
        return f"{buf.dtype} × {buf.numel()}".removeprefix("torch.")
    buffer = as_buffer(buf)
    return f"{buffer.dtype} × {buffer.count}"


Tensor = torch.Tensor
NATIVE = {
    SUM.name: dist.ReduceOp.SUM, PROD.name: dist.ReduceOp.PRODUCT, MAX.name: dist.ReduceOp.MAX,
    MIN.name: dist.ReduceOp.MIN,
}  # fmt: skip
BITWISE = {BAND.name: dist.ReduceOp.BAND, BOR.name: dist.ReduceOp.BOR, BXOR.name: dist.ReduceOp.BXOR}
REALS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)


def _filled(options: Any, **values: Any) -> Any:
    for name, value in values.items():
        setattr(options, name, value)
    return options


REDUCING = {
    (dtype, name): _filled(dist.AllreduceOptions(), reduceOp=op)
    for dtype in (*REALS, *INTEGERS)
    for name, op in (NATIVE if dtype in REALS else NATIVE | BITWISE).items()
}
"""torch's options for the reductions that gloo supports, by type and op."""
BARRIER = dist.BarrierOptions()


@cache
def _rooted(root: int) -> Any:
    return _filled(dist.BroadcastOptions(), rootRank=root)


@cache
def _reduced(op: str, root: int) -> Any:
    return _filled(dist.ReduceOptions(), reduceOp=(NATIVE | BITWISE)[op], rootRank=root)


class NativeCollectives(WireComm):
    """The collectives of torch's groups, counted, with deadlines and under the watchdog."""

    _gloo: Any
    _nccl: Any
    _active: dict[int, Any]  # the watchdog's

    def _on_gpus(self) -> Any:
        """Return NCCL's group of these ranks, created when all of them first need it."""
        if self._nccl is None:
            runtime, whole = self.runtime, self.label == "world"
            self._nccl = (
                backend_of(runtime.group, "cuda") if whole else runtime.nccl(self.label, self.members)
            )
        return self._nccl

    # ---------------------------------------------------------------------------------------- running and waiting
    def _run_watched(
        self, operation: str, start: Callable[..., Any], args: Any, what: Compared = NOTHING
    ) -> None:
        """Start a torch collective, `start(*args)`, and wait for it as an active call of the watchdog."""
        if self._freed:
            self._live()
        runtime, thread, began = self.runtime, get_ident(), perf_counter()
        self._sequence = number = self._sequence + 1
        active, limit_s = self._active, self.clock.limit_s() + 0.0
        runtime.counters.native(operation, args, self.rank)
        active[thread] = (operation, number, self, began, NEVER)
        try:
            if runtime.check_calls:
                self._agreed(operation, number, what)
            start(*args).wait(limit_s if limit_s > SHORTEST_S else SHORTEST_S)
        except RuntimeError as error:
            raise self._failure(error, (operation, number, self, began, limit_s)) from None
        finally:
            runtime.watchdog.last = active.pop(thread, None)

    def _run_on_stream(
        self, operation: str, start: Callable[..., Any], args: Any, what: Compared = NOTHING
    ) -> None:
        """Start an NCCL collective: the caller's stream waits for it, the host does not.

        So the call always returns before its deadline. If the GPU does not finish by then, the watchdog ends the job
        and names the missing ranks.
        """
        runtime, number = self.runtime, self._count()
        if runtime.check_calls:
            self._agreed(operation, number, what)
        call = (operation, number, self, perf_counter(), runtime.clock.limit_s())
        runtime.counters.native(operation, args, self.rank)
        work = start(*args)
        work.wait()
        runtime.unfinished.add(call, work)

    def _group_for(self, tensor: torch.Tensor) -> tuple[Any, Callable[..., None]]:
        return (self._gloo, self._run_watched) if tensor.is_cpu else (self._on_gpus(), self._run_on_stream)

    def _failure(self, error: RuntimeError, call: Any) -> Exception:
        if isinstance(error, UsageError):
            return error
        if "timed out" not in str(error).lower():
            what = f"rank {self.rank} of {self.label}: {call[0]} number {call[1]}"
            return rank_gone(what, error)
        everyone = self.runtime.watchdog.ask_all()
        missing, text = verdict(call, [everyone[member] for member in self.members])
        return Timeout(missing, call[0], call[1], text)

    def _agreed(self, operation: str, number: int, what: Compared) -> None:
        limit_s = max(self.clock.limit_s() + 0.0, SHORTEST_S)
        call = operation, number, self, perf_counter(), limit_s
        active, thread = self._active, get_ident()
        outer = active.get(thread)
        active[thread] = call  # `_run_watched` limits only its own wait
        try:
            require_same_call(
                describe(operation, what),
                lambda ends: self._gloo.allreduce([torch.from_numpy(ends)], MINIMUM).wait(limit_s),
                self._texts,
            )
        except RuntimeError as error:
            raise self._failure(error, call) from None
        finally:
            if outer is None:
                active.pop(thread)
            else:
                active[thread] = outer

    def _texts(self, text: str) -> list[str]:
        mine = torch.zeros(TEXT_NBYTES, dtype=torch.uint8)
        data = torch.frombuffer(bytearray(text.encode()[:TEXT_NBYTES]), dtype=torch.uint8)
        mine[: data.numel()] = data
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        self._gloo.allgather([everyone], [mine]).wait()
        return [bytes(record.tolist()).rstrip(b"\0").decode(errors="replace") for record in everyone]

    # ------------------------------------------------------------------------------------------------- the calls
    def Barrier(self) -> None:
        self._run_watched("Barrier", self._gloo.barrier, (BARRIER,))

    barrier = Barrier

    def Ibarrier(self) -> RealRequest:
        return self._begun("Ibarrier", self._gloo.barrier, (BARRIER,))

    def _begun(
        self, operation: str, start: Callable[..., Any], args: Any, after: Callable[[], object] | None = None
    ) -> WorkRequest:
        self._count()
        self.runtime.counters.native(operation, args, self.rank)
        return WorkRequest.of(self.runtime, (operation, -1, self), start(*args), after)

    def Bcast(self, buf: Any, root: int = 0) -> None:
        self._root(root, "Bcast")
        tensor, after = self._native(buf)
        group, ran = self._group_for(tensor)
        ran("Bcast", group.broadcast, ([tensor], _rooted(root)), (f"root {root}", buf))
        if after is not None:
            after()

    def Ibcast(self, buf: Any, root: int = 0) -> RealRequest:
        self._root(root, "Ibcast")
        tensor, after = self._native(buf)
        return self._begun("Ibcast", self._group_for(tensor)[0].broadcast, ([tensor], _rooted(root)), after)

    def _native(self, buf: Any) -> tuple[Tensor, Callable[[], object] | None]:
        """Return a tensor to broadcast: unsupported types as bytes, staged if torch's group cannot access it."""
        plain = type(buf) is Tensor and buf.is_cpu and buf.is_contiguous()
        if plain and buf.dtype in GLOO_TYPES and not buf.requires_grad:  # the fast path of a plain tensor
            return buf, None
        if on_gpu(buf) and not self.runtime.has_nccl:
            host = staged(buf).copy_(buf)
            return host.view(-1).view(torch.uint8), lambda: buf.copy_(host)
        flat = flat_tensor(buf, writable=True)
        if flat is not None:
            return flat, None
        buffer = as_buffer(buf, writable=True)
        data = torch.from_numpy(buffer.pack().reshape(-1).view("u1"))
        return data, lambda: buffer.unpack(data.numpy())

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        if sendbuf is IN_PLACE and type(recvbuf) is Tensor and recvbuf.is_cpu and not self.runtime.ordered:
            options = None if recvbuf.requires_grad else REDUCING.get((recvbuf.dtype, op.name))
            if options is not None and recvbuf.is_contiguous():  # the fast path of a plain tensor
                self._run_watched("Allreduce", self._gloo.allreduce, ([recvbuf], options), (op.name, recvbuf))
                return
        if self._staged(recvbuf, op):
            self._by_host(self.Allreduce, sendbuf, recvbuf, op)
        elif self.runtime.ordered and not on_gpu(recvbuf):
            ordered_allreduce(self, sendbuf, recvbuf, op)
        else:
            tensor, options = self._reducible(sendbuf, recvbuf, op)
            if tensor is None:
                self._met(self._allreduce("Allreduce", sendbuf, recvbuf, op))
                return
            group, ran = self._group_for(tensor)
            ran("Allreduce", group.allreduce, ([tensor], options), (op.name, tensor))

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> RealRequest:
        if self._staged(recvbuf, op):
            host = staged(recvbuf).copy_(recvbuf if is_in_place(sendbuf) else sendbuf)
            inner = [self.Iallreduce(IN_PLACE, host, op)]
            return CompositeRequest.of(
                self.runtime, ("Iallreduce", -1, self), inner, lambda: recvbuf.copy_(host)
            )
        tensor, options = self._reducible(sendbuf, recvbuf, op)
        if tensor is None:
            return self._allreduce("Iallreduce", sendbuf, recvbuf, op)
        return self._begun("Iallreduce", self._group_for(tensor)[0].allreduce, ([tensor], options))

    def _staged(self, buf: Any, op: Op) -> bool:
        return on_gpu(buf) and not (
            self.runtime.has_nccl and op.name in NATIVE and (buf.dtype, op.name) in REDUCING
        )

    def _by_host(self, call: Callable[..., None], sendbuf: Any, recvbuf: Any, op: Op) -> None:
        host = staged(recvbuf).copy_(recvbuf if is_in_place(sendbuf) else sendbuf)
        call(IN_PLACE, host, op)
        recvbuf.copy_(host)

    def _reducible(self, sendbuf: Any, recvbuf: Any, op: Op) -> tuple[Tensor | None, Any]:
        """Return the contribution in the receive buffer, and torch's options; None if torch cannot reduce it."""
        plain = type(recvbuf) is Tensor and not recvbuf.requires_grad and recvbuf.is_contiguous()
        into = recvbuf if plain else flat_tensor(recvbuf, writable=True)
        options = None if into is None else REDUCING.get((into.dtype, op.name))
        if is_in_place(sendbuf):
            return (None if options is None else into), options
        _require_same_shape(sendbuf, recvbuf)
        given = None if options is None else flat_tensor(sendbuf)
        if into is None or given is None or given.dtype != into.dtype:
            return None, None
        if given.data_ptr() != into.data_ptr():
            into.view(-1).copy_(given)
        return into, options

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> None:
        self._root(root, "Reduce")
        given = recvbuf if is_in_place(sendbuf) else sendbuf
        if on_gpu(given):
            host = staged(given).copy_(given)
            self.Reduce(IN_PLACE if self.rank == root else host, host, op, root)
            if self.rank == root:
                recvbuf.copy_(host)
            return
        tensor = None if self.runtime.ordered else self._contribution(sendbuf, recvbuf, op, root=root)
        if tensor is None:
            self._met(self._reduce("Reduce", sendbuf, recvbuf, op, root))
            return
        what = f"root {root}, {op.name}", tensor
        self._run_watched("Reduce", self._gloo.reduce, ([tensor], _reduced(op.name, root)), what)

    def _contribution(self, sendbuf: Any, recvbuf: Any, op: Op, *, root: int) -> Tensor | None:
        """Return the tensor in which torch may sum: the receive buffer on the root, else a copy; None if it cannot."""
        if self.rank == root:
            return self._reducible(sendbuf, recvbuf, op)[0]
        given = flat_tensor(sendbuf)
        return given.clone() if given is not None and (given.dtype, op.name) in REDUCING else None

    def Ireduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> RealRequest:
        self._root(root, "Ireduce")
        on_host = not on_gpu(recvbuf if is_in_place(sendbuf) else sendbuf)
        tensor = self._contribution(sendbuf, recvbuf, op, root=root) if on_host else None
        if tensor is None:
            return self._reduce("Ireduce", sendbuf, recvbuf, op, root)
        return self._begun("Ireduce", self._gloo.reduce, ([tensor], _reduced(op.name, root)))

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        into, given, after = self._table(sendbuf, recvbuf)
        if into is None:
            self._met(self._allgather("Allgather", sendbuf, recvbuf))
            return
        group, ran = self._group_for(into)
        ran("Allgather", group._allgather_base, (into, given), ("", sendbuf))
        if after is not None:
            after()

    def Iallgather(self, sendbuf: Any, recvbuf: Any) -> RealRequest:
        into, given, after = self._table(sendbuf, recvbuf)
        if into is None:
            return self._allgather("Iallgather", sendbuf, recvbuf)
        return self._begun("Iallgather", self._group_for(into)[0]._allgather_base, (into, given), after)

    def _table(self, sendbuf: Any, recvbuf: Any) -> tuple[Tensor | None, Any, Callable[[], object] | None]:
        """Return the table that torch fills, this rank's part, and a final step; None if table and part do not fit.

        Ranks may specify their parts in different forms, since all forms yield the same bytes.
        """
        into = flat_tensor(recvbuf, writable=True) if as_plain(recvbuf) else None
        given = flat_tensor(sendbuf) if as_plain(sendbuf) else None
        if into is not None and given is not None and given.dtype == into.dtype:
            if given.numel() * self.size != into.numel():
                return None, None, None
            if into.is_cpu or self.runtime.has_nccl:
                return into, given, None
            host = staged(into)
            return host, given.to("cpu"), lambda: recvbuf.view(-1).copy_(host)
        blocks = as_blocks(recvbuf, self.size, writable=True)
        own = bytes_of(blocks[self.rank] if is_in_place(sendbuf) else as_buffer(sendbuf))
        if any(block.nbytes != own.nbytes for block in blocks):
            return None, None, None
        table = torch.empty(self.size * own.nbytes, dtype=torch.uint8)

        def after() -> None:
            for block, data in zip(blocks, table.numpy().reshape(self.size, -1), strict=True):
                block.unpack(data)

        return table, tensor_of(own), after


def _require_same_shape(sendbuf: Any, recvbuf: Any) -> None:
    plain = type(sendbuf) is type(recvbuf) is Tensor  # a fast check, which builds no strings
    if plain and sendbuf.dtype == recvbuf.dtype and sendbuf.numel() == recvbuf.numel():
        return
    if dtype_and_count(sendbuf) != dtype_and_count(recvbuf):
        raise ParameterError(
            f"mismatch in send ({dtype_and_count(sendbuf)}) and receive buffer ({dtype_and_count(recvbuf)})"
        )
