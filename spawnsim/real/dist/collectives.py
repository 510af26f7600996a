"""Collectives that torch has: Barrier, Bcast, Reduce, Allreduce, Allgather, on the user's own memory.

Tensors on a GPU go to NCCL where the group has it, else over gloo by way of pinned memory. What torch cannot reduce
(other types, other ops, ops of the program) is combined in rank order over the wire. Knows torch's groups.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from spawnsim.comm.buffers import as_buffer
from spawnsim.comm.constants import IN_PLACE
from spawnsim.comm.ops import BAND, BOR, BXOR, MAX, MIN, PROD, SUM, Op
from spawnsim.errors import MismatchError, ParameterError, RankFailed, Timeout, UsageError
from spawnsim.real.dist.exchanges import Exchanges
from spawnsim.real.dist.memory import as_plain, flat, on_gpu, staged
from spawnsim.real.dist.requests import Together, Working
from spawnsim.real.ordered import ordered_allreduce
from spawnsim.real.pending import Pending
from spawnsim.real.watchdog import verdict

if TYPE_CHECKING:
    from spawnsim.real.dist.home import Home

NATIVE = {
    SUM.name: dist.ReduceOp.SUM, PROD.name: dist.ReduceOp.PRODUCT, MAX.name: dist.ReduceOp.MAX,
    MIN.name: dist.ReduceOp.MIN,
}  # fmt: skip
BITWISE = {BAND.name: dist.ReduceOp.BAND, BOR.name: dist.ReduceOp.BOR, BXOR.name: dist.ReduceOp.BXOR}


class Native(Exchanges):
    """The collectives of torch's groups, counted, bounded and watched."""

    _home: Home
    _gloo: Any
    _gpus: Any  # torch's group with NCCL, or None
    _sequence: int
    label: str
    members: tuple[int, ...]
    has_nccl: bool

    def _count(self, operation: str) -> int:
        self._live()
        self._sequence += 1
        return self._sequence

    # ---------------------------------------------------------------------------------------- running and waiting
    def _ran(self, operation: str, start: Callable[[], Any], details: Callable[[], str] | None = None) -> None:
        """Start a collective of torch and wait for it while the watchdog knows of it."""
        home, number = self._home, self._count(operation)
        limit_s = home.clock.limit_s()
        call = (operation, number, self, time.perf_counter(), limit_s)
        active, thread = home.watchdog.active, get_ident()
        active[thread] = (*call[:4], float("inf"))
        try:
            if home.fingerprints:
                self._same(f"{operation} number {number}, {details() if details else ''}")
            start().wait(timedelta(seconds=limit_s))
        except RuntimeError as error:
            raise self._failure(error, call) from None
        finally:
            home.watchdog.last = active.pop(thread, None)

    def _failure(self, error: RuntimeError, call: Any) -> Exception:
        if isinstance(error, UsageError):
            return error
        if "timed out" not in str(error).lower():
            what = f"rank {self.rank} of {self.label}: {call[0]} number {call[1]}"
            return RankFailed((), f"{what}: a rank has gone: {str(error).split('. ')[0]}")
        everyone = self._home.watchdog.ask_all()
        missing, text = verdict(call, [everyone[member] for member in self.members])
        return Timeout(missing, call[0], call[1], text)

    def _same(self, text: str) -> None:
        """Raise MismatchError, on all ranks, unless all are in the same collective with the same arguments."""
        word = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
        ends = torch.tensor([word, -word])
        self._gloo.allreduce([ends], _reduce_options(dist.ReduceOp.MIN)).wait()
        if int(ends[0]) != -int(ends[1]):
            everyone = self._texts(text)
            table = "\n".join(f"  rank {rank}: {what}" for rank, what in enumerate(everyone))
            raise MismatchError(f"ranks have met in different collectives:\n{table}\n  make the same call on every rank")

    def _texts(self, text: str) -> list[str]:
        """Gather one text per rank by fixed-size records."""
        mine = torch.zeros(256, dtype=torch.uint8)
        said = torch.frombuffer(bytearray(text.encode()[:256]), dtype=torch.uint8)
        mine[: said.numel()] = said
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        self._gloo.allgather([everyone], [mine]).wait()
        return [bytes(record.tolist()).rstrip(b"\0").decode(errors="replace") for record in everyone]

    # ------------------------------------------------------------------------------------------------- the calls
    def Barrier(self) -> None:
        self._ran("Barrier", self._barrier)

    barrier = Barrier

    def _barrier(self) -> Any:
        return self._gloo.barrier(dist.BarrierOptions())

    def _for(self, tensor: torch.Tensor) -> Any:
        """Return the group that reaches a tensor's memory."""
        return self._gloo if tensor.device.type == "cpu" else self._gpus

    def Ibarrier(self) -> Pending:
        return self._begun("Ibarrier", self._barrier)

    def _begun(self, operation: str, start: Callable[[], Any], after: Callable[[], object] | None = None) -> Working:
        self._count(operation)
        return Working.of(self._home, (operation, -1, self), start(), after)

    def Bcast(self, buf: Any, root: int = 0) -> None:
        self._root(root, "Bcast")
        tensor, after = self._native(buf)
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._ran("Bcast", lambda: self._for(tensor).broadcast([tensor], options), lambda: f"root {root}, {_shape(buf)}")
        after()

    def Ibcast(self, buf: Any, root: int = 0) -> Pending:
        self._root(root, "Ibcast")
        tensor, after = self._native(buf)
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._begun("Ibcast", lambda: self._for(tensor).broadcast([tensor], options), after)

    def _native(self, buf: Any) -> tuple[torch.Tensor, Callable[[], object]]:
        """Return a tensor to broadcast: any type as its bytes, staged if torch's group cannot reach it."""
        if on_gpu(buf) and not self.has_nccl:
            host = staged(buf).copy_(buf)
            return host.view(-1).view(torch.uint8), lambda: buf.copy_(host)
        if isinstance(buf, torch.Tensor) and buf.is_contiguous():
            return buf.detach().view(-1), int
        buffer = as_buffer(buf, writable=True)
        data = torch.from_numpy(buffer.pack().reshape(-1).view("u1"))
        return data, lambda: buffer.unpack(data.numpy())

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        if self._home.ordered and not on_gpu(recvbuf):
            ordered_allreduce(self, sendbuf, recvbuf, op)
            return
        tensor, after, options = self._reducible(sendbuf, recvbuf, op)
        if tensor is None:
            self._met(self._reduction("Allreduce", (sendbuf, recvbuf), op, None), "Allreduce")
            return
        self._ran(
            "Allreduce", lambda: self._for(tensor).allreduce([tensor], options), lambda: f"{op.name}, {_shape(recvbuf)}"
        )
        if after is not None:
            after()

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Pending:
        tensor, after, options = self._reducible(sendbuf, recvbuf, op)
        if tensor is None:
            return self._reduction("Iallreduce", (sendbuf, recvbuf), op, None)
        return self._begun("Iallreduce", lambda: self._for(tensor).allreduce([tensor], options), after)

    def _reducible(
        self, sendbuf: Any, recvbuf: Any, op: Op
    ) -> tuple[torch.Tensor | None, Callable[[], object] | None, Any]:
        """Return the contribution in the receiving memory, what to do afterwards, and torch's options, if torch can."""
        into = flat(recvbuf, writable=True)
        if sendbuf is not IN_PLACE:
            _agree(sendbuf, recvbuf)
        native = None if into is None else NATIVE.get(op.name) or (None if into.is_floating_point() else BITWISE.get(op.name))
        if into is None or native is None:
            return None, None, None
        if sendbuf is not IN_PLACE:
            given = flat(sendbuf)
            if given is None or given.dtype != into.dtype:
                return None, None, None
            if given.data_ptr() != into.data_ptr():
                into.copy_(given)
        if into.device.type != "cpu" and not self.has_nccl:
            host = staged(into).copy_(into)
            return host, lambda: into.copy_(host), _reduce_options(native)
        return into, None, _reduce_options(native)

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> None:
        self._root(root, "Reduce")
        self._met(self._reduction("Reduce", (sendbuf, recvbuf), op, root), "Reduce")

    def Ireduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> Together:
        self._root(root, "Ireduce")
        return self._reduction("Ireduce", (sendbuf, recvbuf), op, root)

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        into = flat(recvbuf, writable=True)
        given = None if sendbuf is IN_PLACE else flat(sendbuf)
        simple = given is not None and into is not None and as_plain(sendbuf) and as_plain(recvbuf)
        if not simple or into is None or given is None or given.dtype != into.dtype or given.numel() * self.size != into.numel():
            self._met(self._allgather("Allgather", sendbuf, recvbuf), "Allgather")
            return
        if into.device.type != "cpu" and not self.has_nccl:
            host = staged(into)
            source = given.to("cpu")
            self._ran("Allgather", lambda: self._gloo._allgather_base(host, source))
            into.copy_(host)
            return
        self._ran("Allgather", lambda: self._for(into)._allgather_base(into, given), lambda: _shape(sendbuf))

    if TYPE_CHECKING:

        def _live(self) -> None:
            """Refuse a freed communicator."""


@cache
def _reduce_options(op: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


def _agree(sendbuf: Any, recvbuf: Any) -> None:
    """Refuse a reduction between buffers of different counts or types."""
    if _shape(sendbuf) != _shape(recvbuf):
        raise ParameterError(f"mismatch in send ({_shape(sendbuf)}) and receive buffer ({_shape(recvbuf)})")


def _shape(buf: Any) -> str:
    """Return dtype and count, for fingerprints."""
    if isinstance(buf, torch.Tensor):
        return f"{buf.dtype} × {buf.numel()}".removeprefix("torch.")
    buffer = as_buffer(buf)
    return f"{buffer.dtype} × {buffer.count}"
