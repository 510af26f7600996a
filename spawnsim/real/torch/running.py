"""How a rank is in a collective of torch: counted, bounded by its deadline, known to the watchdog, compared on demand.

The way through is short, because between two calls each line costs several times what it costs in a loop of its own.
Knows torch's groups and their works; knows no buffers but by type and count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from spawnsim.comm.buffers import as_buffer
from spawnsim.errors import MismatchError, Timeout, UsageError
from spawnsim.real.rank.watchdog import verdict
from spawnsim.real.torch.wire import gone

if TYPE_CHECKING:
    from spawnsim.real.torch.home import Home

Fingerprint = tuple[str, Any]
"""What all ranks must agree on beside the operation: a text, and a buffer whose type and count count."""
NEVER = float("inf")
SHORTEST_S = 1e-3  # torch counts milliseconds, and means for ever by 0
AGREEING: Any = dist.AllreduceOptions()
AGREEING.reduceOp = dist.ReduceOp.MIN


class Running:
    """Starting a collective of a group and waiting for it."""

    _home: Home
    _gloo: Any
    _sequence: int
    label: str
    members: tuple[int, ...]
    _freed: bool
    _active: dict[int, Any]  # the watchdog's
    clock: Any
    rank: int
    size: int

    if TYPE_CHECKING:

        def _live(self) -> None:
            """Refuse a freed communicator."""

        def _on_gpus(self) -> Any:
            """Return NCCL's group of these ranks."""

    def _count(self, operation: str) -> int:
        self._live()
        self._sequence += 1
        return self._sequence

    # ---------------------------------------------------------------------------------------- running and waiting
    def _ran(
        self, operation: str, start: Callable[..., Any], args: Any, what: Fingerprint | None = None
    ) -> None:
        """Start a collective of torch, `start(*args)`, and wait for it while the watchdog knows of it."""
        if self._freed:
            self._live()
        home, thread, began = self._home, get_ident(), perf_counter()
        self._sequence = number = self._sequence + 1
        active, limit_s = self._active, self.clock.limit_s() + 0.0
        home.tally.native(operation, args, self.rank)
        active[thread] = (operation, number, self, began, NEVER)
        try:
            if home.fingerprints:
                self._agreed(operation, number, what)
            start(*args).wait(limit_s if limit_s > SHORTEST_S else SHORTEST_S)
        except RuntimeError as error:
            raise self._failure(error, (operation, number, self, began, limit_s)) from None
        finally:
            home.watchdog.last = active.pop(thread, None)

    def _streamed(
        self, operation: str, start: Callable[..., Any], args: Any, what: Fingerprint | None = None
    ) -> None:
        """Start a collective of NCCL: the caller's stream waits for it, and the host does not.

        So the call returns before its deadline, whatever happens; the watchdog ends the job, and says who is missing,
        when the GPU has not finished by then.
        """
        home, number = self._home, self._count(operation)
        if home.fingerprints:
            self._agreed(operation, number, what)
        call = (operation, number, self, perf_counter(), home.clock.limit_s())
        home.tally.native(operation, args, self.rank)
        work = start(*args)
        work.wait()
        home.unfinished.add(call, work)

    def _way(self, tensor: torch.Tensor) -> tuple[Any, Callable[..., None]]:
        """Return torch's group that reaches a tensor's memory, and how its calls are waited for."""
        return (self._gloo, self._ran) if tensor.is_cpu else (self._on_gpus(), self._streamed)

    def _failure(self, error: RuntimeError, call: Any) -> Exception:
        if isinstance(error, UsageError):
            return error
        if "timed out" not in str(error).lower():
            what = f"rank {self.rank} of {self.label}: {call[0]} number {call[1]}"
            return gone(what, error)
        everyone = self._home.watchdog.ask_all()
        missing, text = verdict(call, [everyone[member] for member in self.members])
        return Timeout(missing, call[0], call[1], text)

    def _agreed(self, operation: str, number: int, what: Fingerprint | None) -> None:
        self._same(f"{operation} number {number}, " + (f"{what[0]}, {shape(what[1])}" if what else ""))

    def _same(self, text: str) -> None:
        """Raise MismatchError, on all ranks, unless all are in the same collective with the same arguments."""
        word = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
        ends = torch.tensor([word, -word])
        self._gloo.allreduce([ends], AGREEING).wait()
        if int(ends[0]) != -int(ends[1]):
            everyone = self._texts(text)
            table = "\n".join(f"  rank {rank}: {what}" for rank, what in enumerate(everyone))
            text = f"ranks have met in different collectives:\n{table}\n  make the same call on every rank"
            raise MismatchError(text)

    def _texts(self, text: str) -> list[str]:
        """Gather one text per rank by fixed-size records."""
        mine = torch.zeros(256, dtype=torch.uint8)
        said = torch.frombuffer(bytearray(text.encode()[:256]), dtype=torch.uint8)
        mine[: said.numel()] = said
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        self._gloo.allgather([everyone], [mine]).wait()
        return [bytes(record.tolist()).rstrip(b"\0").decode(errors="replace") for record in everyone]


def shape(buf: Any) -> str:
    """Return dtype and count, for fingerprints."""
    if isinstance(buf, torch.Tensor):
        return f"{buf.dtype} × {buf.numel()}".removeprefix("torch.")
    buffer = as_buffer(buf)
    return f"{buffer.dtype} × {buffer.count}"
