"""GPU tensors as arguments: staged through pinned main memory, or passed on if the library can access GPU memory.

Data to send are copied before the call; received data are copied when the call is complete, on the stream that was
current when it began. Pinning memory takes milliseconds, so pinned memory is reused: torch's host allocator keeps it.
mpi4py's parameter names show which arguments send and which receive. torch is imported only when there is a tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spawnsim.comm.failures import SpecBufferError
from spawnsim.errors import UnsupportedError
from spawnsim.phantoms import NO_DATA, PhantomError
from spawnsim.real.runtime.services import IN_PLACE_TYPE

if TYPE_CHECKING:
    import torch

SENT, RECEIVED, BOTH = 1, 2, 3
INTO = {"recvbuf", "result", "inoutbuf", "outbuf"}
"""Arguments that receive. Data that a call may leave unchanged must be copied in first, so that they are preserved."""
FILLED = {"allreduce", "reduce", "allgather", "gather", "scatter", "alltoall", "scan", "reduce_scatter_block"}
"""Collectives that overwrite the whole receiving tensor, unless they work in place."""
AT_ROOT = {"reduce", "gather", "gatherv"}
"""Collectives that use the receive buffer only on the root."""
MESSAGES = {"send", "ssend", "rsend", "recv"}
BLOCKING = {
    "bcast", "gather", "gatherv", "scatter", "scatterv", "allgather", "allgatherv", "alltoall", "alltoallv",
}  # fmt: skip
"""With `MESSAGES`, the calls that a CUDA-aware MPI gets unchanged. Open MPI accepts no GPU memory in non-blocking
collectives and one-sided calls, and stages sums itself: all these are staged here, with every library."""


def device_tensor(spec: Any) -> torch.Tensor | None:
    """Return the tensor of a buffer specification if it lies outside of main memory, else None."""
    memory = spec[0] if type(spec) in (list, tuple) and spec else spec
    if getattr(memory, "is_cpu", True) or "torch" not in sys.modules:
        return None
    import torch

    if not isinstance(memory, torch.Tensor):
        return None
    # Subclasses may report "meta" and still have memory.
    if memory.is_meta and type(memory) in (torch.Tensor, torch.nn.Parameter):
        raise PhantomError(NO_DATA)
    return memory


class Memory:
    """Main memory for the tensors of a device, and the order of copies. `aware`: whether MPI can access GPU memory."""

    def __init__(self, *, aware: bool = False) -> None:
        self._aware = aware

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return main memory of a tensor's shape and type, for one use: pinned for a CUDA tensor, else plain."""
        import torch

        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)

    def reaches(self, tensor: torch.Tensor) -> bool:
        return self._aware and tensor.is_cuda

    def stream(self, tensor: torch.Tensor) -> Any:
        """Return the stream in which the program works on the tensor; None for a device without streams."""
        import torch

        return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None

    def wait(self, tensor: torch.Tensor) -> None:
        """Wait for pending work on the tensor, since MPI does not know of streams."""
        if tensor.is_cuda:
            import torch

            torch.cuda.current_stream(tensor.device).synchronize()


@dataclass(frozen=True, slots=True)
class Move:
    """One tensor, its copy in main memory, and the direction in which it is copied."""

    tensor: torch.Tensor
    host: torch.Tensor
    way: int
    stream: Any

    def _on_stream(self) -> AbstractContextManager[Any]:
        # Another thread may complete a request; its copy, too, must follow the program's earlier work on the tensor.
        if self.stream is None:
            return nullcontext()
        import torch

        return torch.cuda.stream(self.stream)

    def begin(self) -> None:
        if self.way & SENT:
            with self._on_stream():
                self.host.copy_(self.tensor)

    def end(self, nbytes: int | None) -> None:
        """Copy received data to the device: the first `nbytes`, or all."""
        if not self.way & RECEIVED or nbytes == 0:
            return
        tensor, host = self.tensor, self.host
        if nbytes is not None and nbytes < host.nbytes:
            tensor, host = _bytes(tensor)[:nbytes], _bytes(host)[:nbytes]
        with self._on_stream():
            tensor.copy_(host)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.view(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Call:
    """A call with GPU tensors among its arguments. `names`: parameter names; `rank`: None on an intercommunicator."""

    operation: str
    names: Sequence[str]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    rank: int | None = None

    @property
    def family(self) -> str:
        return self.operation.lower().removesuffix("_init").removeprefix("i")

    def named(self) -> Iterator[tuple[str, Any]]:
        yield from zip(self.names, self.args, strict=False)
        yield from self.kwargs.items()

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for _, spec in self.named() if (tensor := device_tensor(spec)) is not None]

    def root(self) -> Any:
        return dict(self.named()).get("root", 0)

    def in_place(self) -> bool:
        return any(type(spec).__name__ == IN_PLACE_TYPE for _, spec in self.named())

    def direct(self) -> bool:
        return self.family in MESSAGES or self.operation.lower() in BLOCKING

    def way(self, name: str, *, bare: bool) -> int:
        """Return the direction in which an argument is copied; `bare`: whether it is memory alone, without counts."""
        if name in INTO:
            if self.family in AT_ROOT and self.rank not in (None, self.root()):
                return 0
            return RECEIVED if bare and self.family in FILLED and not self.in_place() else BOTH
        if name == "buf":
            return self._way_of_buf(bare)
        return BOTH if name == "origin" and self.family in ("get", "rget") else SENT

    def _way_of_buf(self, bare: bool) -> int:
        if self.family == "recv":
            return RECEIVED if bare else BOTH
        if self.family == "bcast" and self.rank is not None:
            return SENT if self.rank == self.root() else RECEIVED if bare else BOTH
        return BOTH if self.family in ("bcast", "sendrecv_replace") else SENT


class Stage:
    """The GPU tensors of one call, in main memory while it lasts. `args` and `kwargs`: the arguments of the call."""

    __slots__ = ("_call", "_memory", "_moves", "args", "kwargs")

    def __init__(self, memory: Memory, call: Call) -> None:
        self._memory, self._call = memory, call
        self._moves: list[Move] = []
        self.args = tuple([self._place(*named) for named in zip(call.names, call.args, strict=False)])
        self.kwargs = {name: self._place(name, spec) for name, spec in call.kwargs.items()}
        self.begin()

    def _place(self, name: str, spec: Any) -> Any:
        tensor = device_tensor(spec)
        if tensor is None:
            return spec
        way = self._call.way(name, bare=tensor is spec)
        if not way:
            return None
        host = self._memory.host(checked(tensor))
        self._moves.append(Move(tensor, host, way, self._memory.stream(tensor)))
        return host if tensor is spec else [host, *spec[1:]]

    @property
    def partial(self) -> bool:
        return self._call.family == "recv" and all(move.way == RECEIVED for move in self._moves)

    def begin(self) -> None:
        for move in self._moves:
            move.begin()

    def end(self, nbytes: int | None = None) -> None:
        """Copy received data to the device; for a `partial` receive, only `nbytes`."""
        for move in self._moves:
            move.end(nbytes)


def checked(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor if it would be accepted on the CPU, else raise the error of a CPU tensor."""
    if tensor.requires_grad:
        raise SpecBufferError("the tensor requires grad: pass tensor.detach()")
    if not tensor.is_contiguous():
        raise SpecBufferError(
            f"the tensor is not contiguous (strides {tensor.stride()}): pass tensor.contiguous()"
        )
    return tensor


def stage(memory: Memory, call: Call, *, direct: bool = True) -> Stage | None:
    """Return the stage of a call; None if nothing has to be staged and the call can use its arguments unchanged.

    `direct`: whether the call is made unchanged, so that an MPI with access to GPU memory may get the tensors.
    """
    tensors = call.tensors()
    if not tensors:
        return None
    if direct and call.direct() and all(memory.reaches(tensor) for tensor in tensors):
        for tensor in tensors:
            memory.wait(tensor)
        return None
    if call.family in ("psend", "precv"):
        raise UnsupportedError(
            f"{call.operation} of a GPU tensor: its parts would be staged one by one; use Isend and Irecv"
        )
    return Stage(memory, call)
