"""GPU tensors as arguments of real communicators.

Without a card they are `Far` tensors, which only torch's copies can reach; with one, the same cases run on CUDA too.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.crew import first

DEVICES = ["far", *["cuda"] * torch.cuda.is_available()]
on_both_backends = pytest.mark.parametrize("backend", ["mpi", "torch"])
pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]

HEAD = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import numpy as np
import torch
from support.far import Far
from spawnsim.comm import DOUBLE, FLOAT, SUM
from spawnsim.comm.constants import *
from spawnsim.comm.failures import SpecBufferError
from spawnsim.errors import *
from spawnsim.real.launch.launchers import gpu_of_rank
from spawnsim.real.runtime.services import Options
from spawnsim.real.runtime.staging import Memory

class Dirty(Memory):
    '''New memory shows: what a call leaves alone must not come back as whatever lay there.'''
    def host(self, tensor):
        return super().host(tensor).fill_(1)

def on(values, dtype=torch.float32):
    '''Return a tensor on the device.'''
    tensor = torch.as_tensor(values).to(dtype).clone()
    return Far(tensor) if DEVICE == "far" else tensor.cuda()

def seen(tensor):
    '''Return a copy of a tensor in main memory.'''
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)

def holds(tensor, *values):
    assert seen(tensor).flatten().tolist() == list(values), seen(tensor)

def copies(buffers, make):
    return [
        spec if spec is IN_PLACE else [make(spec[0]), *spec[1:]] if isinstance(spec, list) else make(spec)
        for spec in buffers
    ]

def same(name, near, away):
    for one, other in zip(near, away):
        if one is not IN_PLACE:
            one, other = (spec[0] if isinstance(spec, list) else spec for spec in (one, other))
            assert torch.equal(one, seen(other)), (name, one, seen(other))
"""

READY = """
if DEVICE == "cuda":
    torch.cuda.set_device(gpu_of_rank(torch.cuda.device_count()))
"""
DIRTY = """
    if hasattr(comm.runtime, "translate"):
        comm.runtime.translate.memory = Dirty()
"""

Ranks = Callable[..., None]


@pytest.fixture(params=DEVICES)
def gpu_ranks(crews: Callable[..., Any], request: pytest.FixtureRequest) -> Ranks:
    """Run a text as the body of `main(comm)` on two ranks whose tensors lie on a device, and see that it goes well."""

    def run(text: str, options: str = "Options()", *, backend: str = "mpi", world: str = "gpu") -> None:
        crew = crews(n=4 if backend == "mpi" else 2, backend=backend)
        chosen = f"DEVICE, OPTIONS, WORLD = {request.param!r}, {options}, {world!r}\n"
        crew.run(HEAD + chosen + READY + first(2) + DIRTY + textwrap.indent(textwrap.dedent(text), "    "))

    return run


@on_both_backends
def test_a_receive_fills_what_has_come_and_no_more(gpu_ranks: Ranks, backend: str) -> None:
    """A shorter message, none at all, and a part of the tensor leave the rest as it was."""
    gpu_ranks(
        """
        if rank == 0:
            comm.Send(on([1, 2, 3]), 1)
            comm.Ssend([on([4, 5, 6]), 2, FLOAT], 1)
            comm.Send(np.full(2, 7, np.float32), 1)
        else:
            target = on([9] * 5)
            comm.Recv(target, source=PROC_NULL)
            holds(target, 9, 9, 9, 9, 9)
            comm.Recv(target, source=0)
            holds(target, 1, 2, 3, 9, 9)
            comm.Recv([target, 2, 3, FLOAT], source=0)
            holds(target, 1, 2, 3, 4, 5)
            first = comm.irecv(source=0, tag=99)  # an open object receive: later ones match by probing
            comm.Recv(target, source=0)
            holds(target, 7, 7, 3, 4, 5)
            first.Cancel()
        """,
        backend=backend,
    )


@on_both_backends
def test_both_at_once(gpu_ranks: Ranks, backend: str) -> None:
    """`Sendrecv` and `Sendrecv_replace` exchange tensors of every type, half precision and 0-dim included."""
    gpu_ranks(
        """
        other = 1 - rank
        for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64):
            mine, theirs = on([rank, 1, 0], dtype), on([0, 0, 0], dtype)
            comm.Sendrecv(mine, other, recvbuf=theirs, source=other)
            holds(theirs, *torch.tensor([other, 1, 0]).to(dtype).tolist())
            comm.Sendrecv_replace(mine, other, source=other)
            holds(mine, *torch.tensor([other, 1, 0]).to(dtype).tolist())
        scalar = on(float(rank))
        comm.Sendrecv_replace(scalar, other, source=other)
        holds(scalar, float(other))
        """,
        backend=backend,
    )


@on_both_backends
def test_requests_land_when_they_complete(gpu_ranks: Ranks, backend: str) -> None:
    """Also while the rank is in a Barrier, in a list of requests, and not at all when cancelled."""
    gpu_ranks(
        """
        other, targets = 1 - rank, [on([0.0] * 40_000) for _ in range(4)]
        receives = [comm.Irecv(target, other, tag) for tag, target in enumerate(targets)]
        sends = [comm.Isend(on([10.0 * rank + tag] * 40_000), other, tag) for tag in range(4)]
        comm.Barrier()
        type(sends[0]).Waitall(receives + sends)
        for tag, target in enumerate(targets):
            assert (seen(target) == 10 * other + tag).all()
        never = comm.Irecv(targets[0], other, 77)
        never.Cancel()
        never.Wait()
        assert (seen(targets[0]) == 10 * other).all()
        """,
        backend=backend,
    )


def test_persistent_requests_copy_at_every_start(gpu_ranks: Ranks) -> None:
    """What is sent is the tensor as it is at `Start`, not at `Send_init`."""
    gpu_ranks(
        """
        mine, theirs = on([0.0, 0.0]), on([0.0, 0.0])
        send, receive = comm.Send_init(mine, 1 - rank), comm.Recv_init(theirs, 1 - rank)
        for number in range(3):
            mine.copy_(torch.full((2,), 10.0 * rank + number))
            receive.Start(), send.Start()
            send.Wait(), receive.Wait()
            holds(theirs, *[10.0 * (1 - rank) + number] * 2)
        send.Free(), receive.Free()
        """
    )


@pytest.mark.parametrize("options", ["Options()", "Options(survive=True)", "Options(check_calls=True)"])
def test_they_do_what_they_do_on_the_cpu(gpu_ranks: Ranks, options: str) -> None:
    """Every buffer ends as it would in main memory, also those that a rank does not need, and in place."""
    gpu_ranks(
        """
        own, target = torch.arange(4.0) + 10 * rank, torch.full((4,), -1.0)
        long, wide = torch.arange(8.0) + 10 * rank, torch.full((8,), -1.0)
        counts, odd = ([3, 1], [0, 3]), ([1, 2], [4, 0])
        cases = [
            ("Bcast", [own], {"root": 1}), ("Bcast", [[own, 2, FLOAT]], {}),
            ("Reduce", [own, target], {"root": 1}), ("Allreduce", [own, target], {}),
            ("Gather", [own, wide], {"root": 1}), ("Gatherv", [own[:1 + rank], [wide, odd, FLOAT]], {"root": 1}),
            ("Scatter", [long, target], {"root": 1}), ("Scatterv", [[long, counts, FLOAT], target[:3 - 2 * rank]], {}),
            ("Allgather", [own, wide], {}), ("Allgatherv", [own[:1 + rank], [wide, odd, FLOAT]], {}),
            ("Alltoall", [long, wide], {}), ("Alltoall", [IN_PLACE, long], {}),
            ("Scan", [own, target], {}), ("Exscan", [own, target], {}),
            ("Reduce_scatter_block", [long, target], {}),
            ("Reduce_scatter", [own, target[:3 - 2 * rank]], {"recvcounts": [3, 1]}),
            ("Allreduce", [IN_PLACE, own], {}), ("Allgather", [IN_PLACE, long], {}),
            ("Reduce", [IN_PLACE, own] if rank == 0 else [own, target], {}), ("Scan", [IN_PLACE, own], {}),
            ("Gather", [IN_PLACE, long] if rank == 1 else [own, wide], {"root": 1}),
        ]
        for name, buffers, rest in cases:
            near, away = copies(buffers, torch.clone), copies(buffers, on)
            getattr(comm, name)(*near, **rest)
            getattr(comm, name)(*away, **rest)
            same(name, near, away)
            for non_blocking in ["I" + name.lower()] * (OPTIONS == Options()):
                away = copies(buffers, on)
                getattr(comm, non_blocking)(*away, **rest).Wait()
                same(non_blocking, near, away)
        """,
        options,
    )


def test_large_sums_of_ranks_with_and_without_a_gpu(gpu_ranks: Ranks) -> None:
    """One rank passes an array, the other a tensor on its GPU: both take the same way, and meet."""
    gpu_ranks(
        """
        length = 1_000_000
        mine = on([float(rank)] * length) if rank else np.zeros(length, np.float32)
        for _ in range(3):
            total = on([0.0] * length) if rank else np.empty(length, np.float32)
            comm.Allreduce(mine, total)
            assert ((seen(total) if rank else total) == 1).all()
        """
    )


def test_ordered_sums(gpu_ranks: Ranks) -> None:
    """`reduction="ordered"` takes GPU tensors, bfloat16 too, and gives the bits that it gives on the CPU."""
    gpu_ranks(
        """
        for dtype in (torch.float32, torch.bfloat16):
            own = torch.randn(1001, generator=torch.Generator().manual_seed(rank)).to(dtype)
            wanted, total = torch.empty_like(own), on([0] * 1001, dtype)
            comm.Allreduce(own, wanted)
            comm.Allreduce(on(own, dtype), total)
            assert torch.equal(seen(total), wanted)
            comm.Allreduce(IN_PLACE, total)
            assert torch.equal(seen(total), 2 * wanted)
        """,
        'Options(reduction="ordered")',
    )


def test_origins_and_results_may_be_on_a_gpu(gpu_ranks: Ranks) -> None:
    """What is fetched is there after Flush or Wait; what is put is the tensor as it was at the call."""
    gpu_ranks(
        """
        window, other = comm.Win.Allocate(4 * 8, 8, comm=comm), 1 - rank
        window.Lock_all()
        given = on([1.0, 2.0, 3.0, 4.0], torch.float64)
        window.Put(given, other)
        given.copy_(torch.zeros(4, dtype=torch.float64))
        window.Flush(other)
        comm.Barrier()
        found = on([0.0] * 4, torch.float64)
        window.Get(found, other)
        window.Flush(other)
        holds(found, 1, 2, 3, 4)
        window.Get(found, PROC_NULL)
        window.Flush_all()
        holds(found, 1, 2, 3, 4)
        part = on([0.0, 0.0], torch.float64)
        window.Rget(part, other, [2, 2, DOUBLE]).Wait()
        holds(part, 3, 4)
        window.Accumulate(part, other)
        before = on([0.0] * 4, torch.float64)
        window.Flush(other)
        comm.Barrier()
        window.Get_accumulate(found, before, other)
        window.Flush_all()
        holds(before, 4, 6, 3, 4)
        comm.Barrier()
        window.Rput(part, other).Wait()
        window.Fence()
        assert np.frombuffer(window.tomemory()).tolist() == [3, 4, 6, 8]
        comm.Barrier()
        number, result = on([5], torch.int64), on([0], torch.int64)
        window.Fetch_and_op(number, result, other, 0, SUM)
        window.Flush(other)
        assert seen(result).view(torch.float64).item() == 3
        window.Unlock_all()
        window.Free()
        """
    )


def test_a_window_over_gpu_memory_is_refused(gpu_ranks: Ranks) -> None:
    """The error names what to do."""
    gpu_ranks(
        """
        try:
            comm.Win.Create(on([0.0] * 4), 4, comm=comm)
        except UnsupportedError as error:
            assert "Win.Allocate" in str(error)
        else:
            raise AssertionError("accepted")
        """
    )


def test_an_mpi_that_reaches_gpu_memory_gets_the_tensor_itself(gpu_ranks: Ranks) -> None:
    """Messages and broadcasts then copy nothing, but wait for the GPU first; sums are staged all the same."""
    gpu_ranks(
        """
        class Shared(Far):
            '''A far tensor that MPI can reach.'''
            def __dlpack__(self, **wishes): return self.near.__dlpack__(**wishes)
            def __dlpack_device__(self): return self.near.__dlpack_device__()

        class Reached(Memory):
            hosts = waits = 0
            def host(self, tensor):
                self.hosts += 1
                return super().host(tensor)
            def reaches(self, tensor): return isinstance(tensor, Shared)
            def wait(self, tensor): self.waits += 1

        memory = comm.runtime.translate.memory = Reached()
        mine, theirs = Shared(torch.full((3,), float(rank))), Shared(torch.zeros(3))
        receive = comm.Irecv(theirs, 1 - rank)
        comm.Send(mine, 1 - rank)
        receive.Wait()
        assert (theirs.near == 1 - rank).all()
        comm.Bcast(mine, root=1)
        assert (mine.near == 1).all()
        assert (memory.hosts, memory.waits) == (0, 3)
        comm.Iallreduce(IN_PLACE, mine).Wait()
        comm.Allreduce(IN_PLACE, mine)
        assert (mine.near == 4).all() and memory.hosts == 2
        """
    )


def test_what_the_cpu_refuses_is_refused(gpu_ranks: Ranks) -> None:
    """A tensor that requires grad, one with gaps, and partitioned sends: errors that say what to do."""
    gpu_ranks(
        """
        matrix = on([[1.0, 2.0], [3.0, 4.0]])
        needy = on([1.0]).requires_grad_()
        for wrong, advice in ((matrix.t(), "contiguous()"), (needy, "detach()")):
            for call in (lambda: comm.Send(wrong, 1 - rank), lambda: comm.Allreduce(IN_PLACE, wrong)):
                try:
                    call()
                except SpecBufferError as error:
                    assert advice in str(error), error
                else:
                    raise AssertionError("accepted")
        try:
            comm.Psend_init(matrix, 1, 1 - rank)
        except UnsupportedError as error:
            assert "Isend" in str(error)
        else:
            raise AssertionError("accepted")
        """
    )


def test_programs_without_gpus_look_for_none(gpu_ranks: Ranks) -> None:
    """CPU tensors and arrays go on as they are: nothing looks through their calls' arguments."""
    gpu_ranks(
        """
        comm.Allreduce(IN_PLACE, torch.ones(3))
        comm.Sendrecv([torch.ones(3), FLOAT], 1 - rank, recvbuf=np.empty(3, np.float32), source=1 - rank)
        assert not comm.runtime.translate.devices
        """,
        world="none",  # of its own: those of other tests have seen GPUs
    )
