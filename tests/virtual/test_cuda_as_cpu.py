"""`--cuda-as-cpu`: programs that were written for GPUs run on CPU tensors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spawnsim import cli
from spawnsim.errors import ParameterError, UnsupportedError
from spawnsim.run import Run, run

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
HEAD = """
import copy
import io
import os
import pickle

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
assert torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.is_bf16_supported()
torch.cuda.set_device(local)
device = torch.device("cuda", local)
"""


def _run(folder: Path, text: str, ranks: int = 2, **keywords: object) -> Run:
    path = folder / "program.py"
    path.write_text(HEAD + text)
    options = {"cuda_as_cpu": True, "prefix": False}
    return run(path, ranks, options=options, **keywords)  # type: ignore[arg-type]


PLACES = """
x, layer = torch.ones(3), nn.Linear(3, 3)
on_cpu = [
    x.cuda(), x.cuda(local), x.to("cuda"), x.to("cuda:1"), x.to(1), x.to(device), x.to(device=device),
    x.to(device, torch.float64), x.to(torch.zeros(1, device="cuda")), x.type("torch.cuda.DoubleTensor"),
    torch.zeros(2, device="cuda"), torch.randn(2, device=f"cuda:{rank}"), torch.arange(3, device=device),
    torch.tensor([1], device=0), torch.zeros_like(x, device="cuda"), x.new_zeros(2, device="cuda"),
    torch.fft.fftfreq(4, device="cuda"), torch.randint(3, (2,), device=torch.device("cuda")),
    torch.cuda.FloatTensor([1.0]), x.pin_memory(), x.pin_memory().to("cuda", non_blocking=True),
    torch.randn(2, device="cuda", generator=torch.Generator(device="cuda").manual_seed(3)),
    layer.cuda().weight, layer.to(rank).weight, layer.to("cuda").weight, layer.to(device=device).weight,
    nn.Linear(2, 2, device="cuda").weight, nn.Linear(2, 2, device="meta").to_empty(device="cuda").weight,
]
with torch.device("cuda"), torch.cuda.device(local):
    on_cpu.append(torch.ones(2))
torch.set_default_device("cuda")
on_cpu.append(torch.ones(2))
torch.set_default_device(None)
assert torch.device(local) == device == torch.device(torch.cuda.current_device()) and isinstance(device, torch.device)
assert copy.deepcopy(device) == pickle.loads(pickle.dumps(device)) == device and torch.device("cpu", 0).type == "cpu"
def annotated(x: torch.device | None, y: torch.Generator | None = None): pass
on_cpu.append(torch.ones(1, device=torch.device(rank)))
file = io.BytesIO()
torch.save(x, file)
for place in ("cuda:0", device, lambda storage, location: storage.cuda() if False else storage):
    file.seek(0)
    on_cpu.append(torch.load(file, map_location=place))
assert all(each.device.type == "cpu" and not each.is_cuda for each in on_cpu)
# A copy to the host is a copy, as from a GPU; the other direction is not.
assert x.cpu() is not x and x.to("cpu").data_ptr() != x.data_ptr() and x.to("cuda") is x
assert x.type() == "torch.FloatTensor" and isinstance(torch.Generator(), torch.Generator)
assert (device.type, device.index) == ("cuda", local)
"""

CALLS = """
assert torch.cuda.current_device() == local
assert torch.cuda.memory_allocated() == torch.cuda.max_memory_reserved(device) == 0
assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0 and torch.cuda.memory_summary() == ""
assert torch.cuda.mem_get_info()[0] == torch.cuda.get_device_properties(local).total_memory
state = torch.get_rng_state()
torch.cuda.manual_seed(rank), torch.cuda.manual_seed_all(3), torch.cuda.synchronize(device), torch.cuda.empty_cache()
torch.cuda.set_rng_state(torch.cuda.get_rng_state()), torch.cuda.reset_peak_memory_stats(), torch.cuda.ipc_collect()
assert torch.equal(state, torch.get_rng_state())
with torch.random.fork_rng(devices=[local]):
    torch.manual_seed(99)
assert torch.equal(state, torch.get_rng_state())
torch.cuda.nvtx.range_push("step"), torch.cuda.nvtx.range_pop()
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.benchmark = False

stream = torch.cuda.Stream()
stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(stream):
    assert torch.cuda.current_stream() is stream
    torch.ones(2, device="cuda").record_stream(stream)
assert torch.cuda.current_stream() is not stream and stream.query() and isinstance(stream, torch.cuda.Stream)
first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
first.record()
import time
time.sleep(0.25)
last.record(stream)
assert first.elapsed_time(last) == 250.0 and stream.record_event().query()
assert torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == "cuda"
assert torch.accelerator.current_device_index() == local
with torch.accelerator.device_index(1):
    assert torch.cuda.current_device() == 1
torch.accelerator.set_device_index(local), torch.accelerator.synchronize()
data = torch.utils.data.DataLoader(torch.arange(4.0), batch_size=2, pin_memory=True)
assert [batch.cuda(non_blocking=True).sum().item() for batch in data] == [1.0, 5.0]
"""

TRAINING = """
dist.init_process_group("nccl", device_id=device)
assert dist.is_nccl_available() and dist.get_backend() == "nccl"
dist.barrier(device_ids=[local])
torch.manual_seed(0)
model = DistributedDataParallel(torch.compile(nn.Linear(3, 1).cuda()), device_ids=[local], output_device=local)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
for scaler in (torch.amp.GradScaler("cuda"), torch.cuda.amp.GradScaler()):
    assert scaler.is_enabled()
    for kind in (torch.autocast("cuda"), torch.amp.autocast(device_type="cuda", dtype=torch.bfloat16)):
        with kind:
            assert torch.is_autocast_enabled() and torch.is_autocast_enabled("cuda")
            loss = model(torch.randn(4, 3, device="cuda")).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
class Square(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient

x = torch.tensor([3.0], device="cuda", requires_grad=True)
torch.utils.checkpoint.checkpoint(Square.apply, x, use_reentrant=False).backward()
assert x.grad.item() == 6.0
mean = model.module.weight.detach().clone()
dist.all_reduce(mean, op=dist.ReduceOp.AVG)
assert torch.equal(mean, model.module.weight)
objects = [None] * 2
dist.all_gather_object(objects, rank)
assert objects == [0, 1] and nn.DataParallel(nn.Linear(1, 1)).cuda()(torch.ones(1, 1)).shape == (1, 1)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("dp",))
assert mesh.device_type == "cpu" and distribute_tensor(torch.ones(4), mesh, [Shard(0)]).to_local().tolist() == [1, 1]
for sharded in (fully_shard(nn.Linear(4, 2).cuda(), mesh=mesh), fully_shard(nn.Linear(4, 2, device="cuda"))):
    sharded(torch.ones(1, 4, device="cuda")).sum().backward()
    assert isinstance(sharded.weight.grad, DTensor)
old = FullyShardedDataParallel(nn.Linear(4, 2).cuda(), device_id=torch.cuda.current_device())
old(torch.ones(1, 4)).sum().backward()

@torch.compile(dynamic=False)
def twice(x):
    return 2 * x

assert twice(3) == 6
nn.Linear(1, 1).compile()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("text", [PLACES, CALLS, TRAINING], ids=["places", "calls", "training"])
def test_a_program_for_gpus_runs_on_cpu_tensors(tmp_path: Path, text: str) -> None:
    """With one warning about the results, and one notice about `torch.compile`."""
    found = _run(tmp_path, text)
    used, *others = found.what["warnings"]
    assert used.startswith("CUDA as CPU: all tensors are CPU tensors")
    assert [each for each in others if "CUDA as CPU" in each] == [
        *(
            ["CUDA as CPU: torch.compile returns its argument, which runs eagerly"]
            if text is TRAINING
            else ()
        ),
    ]


def test_torch_is_itself_afterwards(tmp_path: Path) -> None:
    """No replacement stays, and none acts outside of ranks."""
    before = torch.Tensor.to, torch.zeros, torch.compile, torch.cuda.is_available, torch.device
    _run(tmp_path, "", ranks=1)
    assert before == (torch.Tensor.to, torch.zeros, torch.compile, torch.cuda.is_available, torch.device)
    with torch.device("meta"):
        assert torch.ones(2).is_meta
    assert torch.ones(2).cpu().device.type == "cpu"


AFTERWARDS = """
import sys
import torch
from spawnsim.run import run

run(sys.argv[1], 2, options={"cuda_as_cpu": True})

@torch.compile(fullgraph=True, backend="eager")
def f(x):
    return torch.zeros(3, device=x.device) + torch.zeros_like(x).to(x.device) + x.new_zeros(3) + x.cpu()

print(f(torch.ones(3)))
"""


def test_the_compiler_works_afterwards(tmp_path: Path) -> None:
    """Also if the run is the first of its process to load it: it keeps tables of torch's functions."""
    (tmp_path / "program.py").write_text(
        f"{HEAD}\ndist.init_process_group()\nDistributedDataParallel(nn.Linear(1, 1))\n"
    )
    command = [sys.executable, "-c", AFTERWARDS, str(tmp_path / "program.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout == "tensor([1., 1., 1.])\n", done.stderr


def test_devices_follow_the_platform(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their number is a node's ranks, or all ranks; the device is the one that computing is counted for."""
    text = (
        "print(torch.cuda.device_count(), torch.cuda.get_device_name(), torch.cuda.get_device_capability())\n"
    )
    run_ = _run(tmp_path, text, ranks=12, platform="nvlink-ib", compute="counted:l40s*0.5")
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["8 NVIDIA L40S (8, 9)"] * 8 + ["4 NVIDIA L40S (8, 9)"] * 4
    assert not [each for each in run_.what["warnings"] if "number above" in each]
    _run(tmp_path, text, ranks=2)
    assert capsys.readouterr().out == "2 CPU as CUDA (9, 0)\n" * 2


def test_a_device_that_no_node_has_is_reported(tmp_path: Path) -> None:
    """A cluster would end the program."""
    found = _run(tmp_path, "torch.zeros(1).cuda(rank)\n", ranks=12, platform="nvlink-ib")
    assert any("a number above 7" in each or "a number above 3" in each for each in found.what["warnings"])


def test_what_cannot_stand_for_a_gpu_is_refused_by_name(tmp_path: Path) -> None:
    """A captured graph has no operations to repeat, and a function outside the table no answer."""
    with pytest.raises(UnsupportedError, match="CUDA graphs are not available with --cuda-as-cpu"):
        _run(tmp_path, "def f(graph: torch.cuda.CUDAGraph | None): pass\ntorch.cuda.CUDAGraph()\n")
    with pytest.raises(UnsupportedError, match="--cuda-as-cpu does not cover this call"):
        _run(tmp_path, "torch.cuda.current_blas_handle()\n")


def test_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error of a program that needs it names it; a file with main(comm) has no use for it."""
    path = tmp_path / "program.py"
    path.write_text(HEAD.replace("assert ", "_ = ") + "print(torch.ones(2).cuda().sum())\n")
    line = ["run", str(path), "--ranks", "2"]
    assert cli.main(line) == 1
    assert "give --cuda-as-cpu" in capsys.readouterr().err
    assert cli.main([*line, "--cuda-as-cpu"]) == 0
    captured = capsys.readouterr()
    assert "[rank 1] tensor(2.)" in captured.out
    assert captured.err.count("CUDA as CPU") == 1
    path.write_text("def main(comm):\n    pass\n")
    with pytest.raises(ParameterError, match=r"cuda_as_cpu: for programs without a main"):
        run(path, 2, options={"cuda_as_cpu": True})


def test_an_mpi4py_program_may_use_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its ranks are greenlets."""
    path = tmp_path / "program.py"
    path.write_text(
        "import torch\nfrom mpi4py import MPI\nx = torch.empty(2, device='cuda')\n"
        "torch.cuda.set_device(MPI.COMM_WORLD.rank)\n"
        "MPI.COMM_WORLD.Allreduce(torch.ones(2).cuda(), x)\nprint(x, torch.cuda.current_device())\n"
    )
    run(path, 3, options={"cuda_as_cpu": True})
    lines = sorted(capsys.readouterr().out.splitlines())
    assert [line[9:] for line in lines] == [f"tensor([3., 3.]) {n}" for n in range(3)]


SPAWNING = """
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import wandb

def work(rank, size):
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "12355"}
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size)
    x = torch.full((1,), float(rank), device="cuda")
    dist.all_reduce(x)
    wandb.log({"sum": x, "devices": torch.cuda.device_count()})

if __name__ == "__main__":
    torch.cuda.init()
    mp.spawn(work, args=(torch.cuda.device_count(),), nprocs=torch.cuda.device_count())
"""


def test_a_main_program_starts_a_rank_for_each_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has eight, and its own stubs; without the options, its errors name them."""
    path = tmp_path / "program.py"
    path.write_text(SPAWNING)
    line = ["run", str(path), "--out", str(tmp_path / "out")]
    assert cli.main(line) == 1
    assert "raised ModuleNotFoundError; install it, or give --stub wandb" in capsys.readouterr().err
    line = [*line, "--stub", "wandb", "--overwrite"]
    assert cli.main(line) == 1
    assert "give --cuda-as-cpu to run it on CPU tensors" in capsys.readouterr().err
    assert cli.main([*line, "--cuda-as-cpu"]) == 0
    assert capsys.readouterr().err.count("CUDA as CPU") == 1
    table = Run.load(tmp_path / "out").table
    assert [list(table[name]) for name in ("rank", "sum", "devices")] == [[*range(8)], [28] * 8, [8] * 8]
    assert "wandb" not in sys.modules and torch.cuda.device_count() == 0
