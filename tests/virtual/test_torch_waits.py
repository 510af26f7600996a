"""Where C++ waits for a work or a future with no frame of Python in between: all end, with the right values."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

HEAD = """
import itertools, sys, tempfile, threading
import torch, torch.distributed as dist, torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("{backend}")
R, N = dist.get_rank(), dist.get_world_size()
KINDS = dist.BuiltinCommHookType
LOSS = lambda out: out.square().mean()
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 40), nn.ReLU(), nn.Linear(40, 2))
def batch(rank, step):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))
def expected(steps, ranks=lambda step: range(N), net=net):
    "The parameters after plain steps with the mean gradient of all ranks."
    model = net()
    for step in range(steps):
        grads = [torch.autograd.grad(LOSS(model(batch(rank, step))), list(model.parameters())) for rank in ranks(step)]
        with torch.no_grad():
            for parameter, *each in zip(model.parameters(), *grads):
                parameter -= 0.1 * sum(each) / N
    return list(model.parameters())
def trained(model, steps=3, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        LOSS(model(batch(R, step))).backward()
        optimizer.step()
    return list(model.parameters())
def check(found, wanted, tolerance=1e-5):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
"""
SETTINGS = """
for static, view, bucket_mb in itertools.product((False, True), (False, True), (25, 0.0001)):
    for hook in (None, *KINDS.__members__.values(), default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        model = DDP(net(), static_graph=static, gradient_as_bucket_view=view, bucket_cap_mb=bucket_mb)
        if hook in KINDS.__members__.values():
            model._register_builtin_comm_hook(hook)
            assert model._get_ddp_logging_data()["comm_hook"] == str(hook)
        elif hook:
            model.register_comm_hook(None, hook)
        check(trained(model), expected(3), 1e-2 if "16" in str(hook) else 1e-5)
"""
UNUSED = """
class Sides(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.idle = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)
    def forward(self, x):
        return self.left(x), self.right(x)
LOSS = lambda out: out[0].square().mean()
for how in ({"static_graph": True}, {"find_unused_parameters": True}):
    model = DDP(Sides(), **how)
    LOSS(model(batch(R, 0))).backward()
    side = Sides()
    sum(LOSS(side(batch(rank, 0))) for rank in range(N)).backward()
    check([each.grad for each in model.module.left.parameters()], [each.grad / N for each in side.left.parameters()])
model = DDP(net(), static_graph=True)
LOSS = lambda out: out.square().mean()
LOSS(model(batch(R, 0))).backward()
with model.no_sync():
    LOSS(model(batch(R, 1))).backward()
LOSS(model(batch(R, 2))).backward()
"""
CHECKPOINTED = """
from torch.utils.checkpoint import checkpoint
class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()
    def forward(self, x):
        return checkpoint(self.net, x, use_reentrant=False)
check(trained(DDP(Wrapped(), static_graph=True)), expected(3))
"""
UNEVEN = """
steps = lambda rank: 2 + rank
wanted = expected(steps(N - 1), lambda step: [rank for rank in range(N) if step < steps(rank)])
for static in (False, True):
    for kind in (None, KINDS.FP16_COMPRESS):
        model = DDP(net(), static_graph=static)
        if kind:
            model._register_builtin_comm_hook(kind)
        with Join([model]):
            trained(model, steps(R))
        check(model.parameters(), wanted, 1e-2 if kind else 1e-5)
    model = DDP(net(), static_graph=static)
    check(trained(model, 3, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)), expected(3))
"""
ERRORS = """
def hook(state, bucket):
    raise ValueError("mine")
model = DDP(net(), static_graph=True)
model.register_comm_hook(None, hook)
try:
    trained(model)
except ValueError as error:
    assert str(error) == "mine"
else:
    sys.exit("no error")
check(trained(DDP(net(), static_graph=True)), expected(3))
"""
OVERLAPPED = """
for hook in (ddp_zero_hook.hook_with_zero_step, ddp_zero_hook.hook_with_zero_step_interleaved):
    for static in (False, True):
        model = DDP(net(), static_graph=static, gradient_as_bucket_view=True, bucket_cap_mb=0.0001)
        zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
        model.register_comm_hook(None, hook(default_hooks.allreduce_hook, model, zero))
        for step in range(8):
            LOSS(model(batch(R, step))).backward()
            zero.step()
        weights = [torch.empty_like(each) for each in model.parameters()]
        for each, other in zip(weights, model.parameters()):
            dist.all_reduce(each.copy_(other))
        check(model.parameters(), [each / N for each in weights])
"""
FUNCTIONAL = """
group, x = dist.group.WORLD, torch.arange(2.0 * N) + R
total = sum(torch.arange(2.0 * N) + rank for rank in range(N))
pending = funcol.all_reduce(x, "sum", group)
assert isinstance(pending, funcol.AsyncCollectiveTensor)
check([pending + 1], [total + 1])
check([funcol.reduce_scatter_tensor(x, "sum", 0, group)], [total[2 * R : 2 * R + 2]])
check([funcol.all_gather_tensor(x[:1], 0, group)], [torch.arange(float(N))])
exchanged = torch.cat([x[2 * R : 2 * R + 2] - R + rank for rank in range(N)])
check([funcol.all_to_all_single(x, None, None, group)], [exchanged])
check(funcol.all_reduce_coalesced([x, 2 * x], "sum", group), [total, 2 * total])
native = torch.ops._c10d_functional
check([native.wait_tensor(native.all_reduce(x, "max", group.group_name))], [x - R + N - 1])
y = torch.ones(2 * N, requires_grad=True)
for z in (funcol.all_gather_tensor_autograd(y, 0, group), funcol.reduce_scatter_tensor_autograd(y, "sum", 0, group),
          funcol.all_to_all_single_autograd(y, None, None, group)):
    y.grad = None
    z.sum().backward()
    assert y.grad.sum() == z.numel() * (N if z.numel() < 2 * N else 1), (z, y.grad)
"""
PIPELINE = """
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
def stages(count):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(count)]
x = torch.arange(8.0 * N).view(2 * N, 4) / 8
for kind in (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B):
    mine = [R, R + N] if kind is ScheduleInterleaved1F1B else [R]
    count = N * len(mine)
    parts, whole = stages(count), nn.Sequential(*stages(count))
    made = [PipelineStage(parts[place], place, count, torch.device("cpu")) for place in mine]
    loss = lambda out, wanted: LOSS(out - wanted)
    schedule = kind(made if len(made) > 1 else made[0], n_microbatches=2 * N, loss_fn=loss)
    last = {"target": torch.ones(2 * N, 4)} if count - 1 in mine else {}
    schedule.step(*([x] if R == 0 else []), **last)
    LOSS(whole(x) - 1).backward()
    check([each.grad for place in mine for each in parts[place].parameters()],
          [each.grad for place in mine for each in whole[place].parameters()])
"""
SAVED = """
import torch.distributed.checkpoint as dcp
folder = [tempfile.mkdtemp() if R == 0 else None]
dist.broadcast_object_list(folder)
model = DDP(net(), static_graph=True)
saving = dcp.async_save({"model": model.module.state_dict()}, checkpoint_id=folder[0])
trained(model)
saving.result()
found = {"model": {name: torch.zeros_like(each) for name, each in model.module.state_dict().items()}}
dcp.load(found, checkpoint_id=folder[0])
check(found["model"].values(), net().state_dict().values())
"""
FUTURES = """
works = [dist.all_reduce(torch.full((2,), R + 1.0), async_op=True) for _ in range(3)]
found = torch.futures.collect_all([work.get_future() for work in works]).wait()
assert [each.value()[0][0] for each in found] == [N * (N + 1) / 2] * 3
future = torch.futures.Future()
def complete():
    dist.barrier()
    future.set_result(7)
threading.Thread(target=complete).start()
assert future.then(lambda done: done.value() + 1).wait() == 8
total = torch.ones(5)
dist.all_reduce(total)
total.resize_(9)
"""
COMPILED = """
model = torch.compile(DDP(net(), static_graph=True), backend="eager")
threading.Thread(target=dist.barrier).start()
check(trained(model), expected(3))
@torch.compile(backend="aot_eager")
def summed(x):
    dist.all_reduce(x)
    return funcol.all_reduce(x + 1, "sum", dist.group.WORLD) * 2
check([summed(torch.ones(3))], [torch.full((3,), (N + 1.0) * N * 2)])
"""
PROGRAMS = {
    "settings": SETTINGS, "unused": UNUSED, "checkpointed": CHECKPOINTED, "uneven": UNEVEN, "errors": ERRORS,
    "overlapped": OVERLAPPED, "functional": FUNCTIONAL, "pipeline": PIPELINE, "saved": SAVED, "futures": FUTURES,
    "compiled": COMPILED,
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_they_end_with_the_values_of_one_process(name: str, torch_program: Any) -> None:
    """DDP, Join, ZeRO, functional collectives, pipelines, checkpoints, futures and torch.compile."""
    head = HEAD.format(
        backend="nccl" if name == "overlapped" else "gloo"
    )  # torch refuses the overlap over gloo
    partial(torch_program, head)(PROGRAMS[name], 3)
