"""What context managers of torch change in its modules is each rank's own, and as before after the run."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel
from torch.nn.utils import parametrize

import spawnsim

HEAD = """
import time, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
dist.init_process_group("gloo")
R, N = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (N,))
"""
LOSS = """
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
handlers = dict(DTensor._op_dispatcher._custom_op_handlers)
for again in range(2):
    torch.manual_seed(0)
    part, whole = nn.Linear(4, 2 * N), nn.Linear(4, 2 * N)
    whole.load_state_dict(part.state_dict())
    layout = ColwiseParallel(use_local_output=False, output_layouts=Shard(-1))
    part = parallelize_module(part, mesh, layout)
    with loss_parallel():
        loss = nn.functional.cross_entropy(part(torch.ones(2, 4)), torch.tensor([1, 2 * N - 1]))
        time.sleep(R)
        loss.backward()
    assert DTensor._op_dispatcher._custom_op_handlers == handlers
    wanted = nn.functional.cross_entropy(whole(torch.ones(2, 4)), torch.tensor([1, 2 * N - 1]))
    wanted.backward()
    torch.testing.assert_close(loss.full_tensor(), wanted)
    torch.testing.assert_close(part.weight.grad.full_tensor(), whole.weight.grad)
"""
REPLICATED = """
from torch.distributed.tensor.experimental import implicit_replication
whole = distribute_tensor(torch.ones(N), mesh, [Replicate()])
def add():
    try:
        return (whole + torch.ones(N)).to_local().sum().item()
    except RuntimeError:
        return None
if R % 2:
    with implicit_replication():
        dist.barrier()
        assert add() == 2 * N
        dist.barrier()
else:
    dist.barrier()
    assert add() is None
    dist.barrier()
dist.barrier()
assert add() is None
"""
CONTEXT = """
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional
original = functional.scaled_dot_product_attention
buffers = [torch.ones(2, 4, 4 * N, 8) for _ in range(3)]
dist.barrier()
if R:
    time.sleep(R)
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2]):
        dist.get_world_size()
        time.sleep(1.5)
        assert functional.scaled_dot_product_attention is not original
        assert buffers[0].shape[2] == 4
else:
    for _ in range(2 * N):
        time.sleep(0.7)
        assert functional.scaled_dot_product_attention is original
assert functional.scaled_dot_product_attention is original
"""


@pytest.mark.parametrize(
    "text", [LOSS, REPLICATED, CONTEXT, LOSS + CONTEXT], ids=["loss", "replicated", "context", "both"]
)
def test_ranks_do_not_end_each_others_contexts(text: str, torch_program: Any) -> None:
    """`loss_parallel`, `implicit_replication` and `context_parallel`, entered and left at other times on each rank."""
    before = dict(DTensor._op_dispatcher._custom_op_handlers)
    partial(torch_program, HEAD)(text, 3)
    assert DTensor._op_dispatcher._custom_op_handlers == before
    assert not DTensor._op_dispatcher._allow_implicit_replication


@pytest.mark.parametrize("carrier", ["greenlets", "threads"])
def test_contexts_of_nn(carrier: str) -> None:
    """The cache of parametrizations, kernels of attention and hooks of all modules."""

    class Double(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    seen: dict[int, int] = {}

    def main(comm: Any) -> None:
        layer = nn.Linear(2, 2)
        parametrize.register_parametrization(layer, "weight", Double())
        if comm.rank == 1:
            comm.Barrier()
            assert layer.weight is not layer.weight
            layer(torch.ones(2))
            assert SDPBackend.FLASH_ATTENTION in _cur_sdpa_kernel_backends()
            comm.Barrier()
            return
        handle = nn.modules.module.register_module_forward_hook(
            lambda *_: seen.update({comm.rank: seen.get(comm.rank, 0) + 1})
        )
        with parametrize.cached(), sdpa_kernel(SDPBackend.MATH):
            held = layer.weight
            comm.Barrier()
            assert layer.weight is held
            layer(torch.ones(2))
            comm.Barrier()
            assert _cur_sdpa_kernel_backends() == [SDPBackend.MATH]
            assert layer.weight is held
        handle.remove()
        layer(torch.ones(2))

    before = _cur_sdpa_kernel_backends(with_priority=True)
    spawnsim.run(main, ranks=3, options={"carrier": carrier})
    assert set(seen) == {0, 2}
    assert _cur_sdpa_kernel_backends(with_priority=True) == before
    assert not nn.modules.module._global_forward_hooks
    assert not parametrize._cache_enabled
