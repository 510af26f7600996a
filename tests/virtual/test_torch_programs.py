"""Unmodified programs of torch.distributed on virtual ranks: their launch, times, ends and refusals."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import spawnsim
from spawnsim.errors import (
    Deadlock,
    MismatchError,
    ParameterError,
    RankError,
    SpawnsimError,
    UnsupportedError,
    UsageError,
)
from spawnsim.fidelity.inputs import read_kineto
from spawnsim.models.collectives import Selection
from spawnsim.models.network import Hockney, Switch
from spawnsim.models.platform import Platform, load_platform
from spawnsim.models.platform.files import to_toml

PROGRAMS = Path(__file__).parent.parent / "programs" / "torchrun"
HEAD = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
dist.init_process_group("gloo")
R, N = dist.get_rank(), dist.get_world_size()
"""


@pytest.fixture
def program(torch_program: Any) -> Any:
    """Run a text behind HEAD, or a file; return the run and the lines that it has printed, sorted."""
    return partial(torch_program, HEAD)


def test_ranks_find_what_torchrun_gives(program: Any) -> None:
    """Variables by the platform's nodes, of each rank its own, and no port is opened."""
    text = """
os.environ["OWN"] = str(R)
dist.barrier()
assert os.environ["OWN"] == os.environ["RANK"] == str(R)
names = "LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK WORLD_SIZE".split()
print(R, *[os.environ[name] for name in names], sys.argv[1:], __name__, torch.distributed.is_torchelastic_launched())
import socket
with socket.socket() as s:
    R or s.bind((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
    dist.barrier()
"""
    _, lines = program(text, 12, "--lr", "1", platform="nvlink-ib")
    assert lines[0] == "0 0 8 0 12 ['--lr', '1'] __main__ True"
    assert lines[3] == "11 3 4 1 12 ['--lr', '1'] __main__ True"


@pytest.mark.parametrize("way", [
    "dist.init_process_group()", "dist.init_process_group('nccl')", "dist.init_process_group('mpi')",
    "dist.init_process_group('gloo', init_method='tcp://10.0.0.1:23456', rank=int(os.environ['RANK']), world_size=3)",
    "dist.init_process_group('gloo', init_method='file:///nowhere/file', rank=int(os.environ['RANK']), world_size=3)",
    "dist.init_process_group('gloo', rank=2 - int(os.environ['RANK']), world_size=3, "
    "store=dist.TCPStore('h', again, 3, is_master=os.environ['RANK'] == '2'))",
])  # fmt: skip
def test_any_backend_method_and_store_gives_the_virtual_group(way: str, torch_program: Any) -> None:
    """Also with ranks in another order, and again after the group was destroyed."""
    text = f"""
import os, torch, torch.distributed as dist
for again in range(1, 3):
    {way}
    sum, own = torch.tensor([1.0 + dist.get_rank()]), [None] * 3
    dist.all_reduce(sum)
    dist.all_gather_object(own, os.environ["RANK"])
    assert sum.item() == 6.0
    print(dist.get_rank(), own[dist.get_rank()] == os.environ["RANK"])
    dist.destroy_process_group()
"""
    assert torch_program("", text, 3)[1] == [f"{rank} True" for rank in range(3) for _ in range(2)]


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("collectives", 1), ("collectives", 33), ("optimizers", 5), ("mesh", 6), ("sharding", 12)],
)
def test_programs_run_on_other_numbers_of_ranks(name: str, ranks: int, program: Any, tmp_path: Path) -> None:
    """What they print is held to torchrun's in tests/real; here they only have to come to their end, as one."""
    _, lines = program(PROGRAMS / f"{name}.py", ranks, *([str(tmp_path)] if name == "mesh" else []))
    assert len({line.partition(" ")[0] for line in lines if line[:1].isdigit()}) == ranks
    if name == "mesh":
        assert sum("loaded True" in line for line in lines) == ranks


@pytest.mark.parametrize("step_s", [0.05, 0.002, 0.0001])
@pytest.mark.parametrize("buckets", [1, 6])
def test_buckets_overlap_in_virtual_time(step_s: float, buckets: int, program: Any) -> None:
    """A bucket's all-reduce begins when backward hands it over, after the one before: the closed form, within 1 %."""
    _, (line,) = program(PROGRAMS / "overlap.py", 8, str(step_s), "25" if buckets == 1 else "0.2")
    alone, took = map(float, line.split())
    one = 6 * step_s + alone
    assert took == pytest.approx(one if buckets == 1 else max(one, step_s + 6 * alone), rel=0.01)


def test_torch_draws_as_under_torchrun(program: Any) -> None:
    """Without a seed, each rank draws other numbers, as processes do; they repeat, and follow the seed of the run."""
    text = "print(torch.rand(1).item())"
    drawn = program(text, 3)[1]
    assert len(set(drawn)) == 3 and program(text, 3)[1] == drawn
    assert not set(program(text, 3, seed=1)[1]) & set(drawn)
    assert len(set(program("torch.manual_seed(3)\n" + text, 3)[1])) == 1


def test_mpi4py_and_torch_share_ranks_and_clock(program: Any) -> None:
    """One program may speak both."""
    text = """
from mpi4py import MPI
time.sleep(R)
dist.barrier()
assert abs(MPI.Wtime() - time.time()) < 1e-3 and MPI.Wtime() >= N - 1
assert MPI.COMM_WORLD.allreduce(R) == N * (N - 1) // 2
"""
    assert program(text, 4)[0].totals["virtual_seconds"] > 3


def test_reductions_that_gloo_lacks(program: Any) -> None:
    """AVG and PREMUL_SUM, of one tensor, of several at once and scattered, against sums of our own; of integers."""
    text = """
half = dist._make_nccl_premul_sum(0.5)
def mine(rank, dtype=torch.float32):
    return (torch.arange(3 * N) * (rank + 1) % 7).to(dtype)
total = sum(mine(rank, torch.float64) for rank in range(N))
for op, expected in ((dist.ReduceOp.AVG, total / N), (half, total / 2)):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        one, two = mine(R, dtype), mine(R, dtype)[:5].clone()
        dist.all_reduce(one, op)
        assert torch.allclose(one.double(), expected, rtol=1e-6 if dtype != torch.bfloat16 else 0.05), (op, dtype, one)
        one = mine(R, dtype)
        dist.all_reduce_coalesced([one, two], op)
        assert torch.allclose(one.double(), expected, rtol=1e-6 if dtype != torch.bfloat16 else 0.05)
        assert torch.equal(two, one[:5])
        part = torch.empty(3, dtype=dtype)
        dist.reduce_scatter_tensor(part, mine(R, dtype), op)
        assert torch.equal(part, one[3 * R:3 * R + 3])
        root = mine(R, dtype)
        dist.reduce(root, 2, op)
        assert R != 2 or torch.equal(root, one)
whole = torch.tensor([R - 5, 3, -3])
dist.all_reduce(whole, dist.ReduceOp.AVG)
assert whole.tolist() == [int((N - 1) / 2 - 5), 3, -3]
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
assert ddp._get_ddp_logging_data()["backend_name"] == dist.get_backend() == "gloo"
"""
    program(text, 11)


def test_a_reduction_takes_the_time_of_its_dtype(program: Any, tmp_path: Path) -> None:
    """1 MB in bfloat16 at half the default speed; each reducing collective, and a gathering one, which has none."""
    text = """
def took(name, work):
    dist.barrier()
    began = time.time()
    work()
    dist.barrier()
    print(name, f"{1e6 * (time.time() - began):.3f}")
for dtype in (torch.float32, torch.bfloat16):
    whole = torch.zeros(1_000_000 // dtype.itemsize, dtype=dtype)
    part, name = torch.zeros_like(whole[:len(whole) // N]), str(dtype).removeprefix("torch.")
    took(f"{name}-all_reduce", lambda: dist.all_reduce(whole))
    took(f"{name}-reduce", lambda: dist.reduce(whole, 0))
    took(f"{name}-reduce_scatter", lambda: dist.reduce_scatter_tensor(part, whole))
    took(f"{name}-all_gather", lambda: dist.all_gather_into_tensor(whole, part))
"""
    place = tmp_path / "own.toml"
    network = 'topology = "switch"\nreduction = { default = "1 GB/s", bfloat16 = "0.5 GB/s" }'
    link = '[network.link]\nlatency = "1 us"\nbandwidth = "1 GB/s"\n[collectives]\nallreduce = "ring"\n'
    place.write_text(f'[network]\n{network}\n{link}reduce = "binomial"\nreduce_scatter = "pairwise"\n')
    _, lines = program(text, 2, platform=str(place))
    found = {name: float(number) for name, number in (line.split() for line in lines if "-" in line)}
    more = {name: found[f"bfloat16-{name}"] - found[f"float32-{name}"] for name in
            ("all_reduce", "reduce", "reduce_scatter", "all_gather")}  # fmt: skip
    assert more == pytest.approx(
        {"all_reduce": 500, "reduce": 1000, "reduce_scatter": 500, "all_gather": 0}, abs=0.01
    )


def test_counted_computing(program: Any, tmp_path: Path) -> None:
    """Products of matrices by their operations, all else by its bytes; in backward passes, too."""
    text = """
dist.barrier()
def took(work):
    began = time.time()
    work()
    print(work.__name__, f"{1e6 * (time.time() - began):.3f}")
a, b = torch.ones(100, 200), torch.ones(200, 300, requires_grad=True)
def forward(): global c; c = a @ b
def backward(): torch.autograd.grad(c, b, torch.ones(100, 300))
def views(): a.view(-1)[5:].t()
def add(): a.add_(1.0)
def idle(): dist.barrier()
for each in (forward, backward, views, add): took(each)
"""
    _, lines = program(text, 1, compute="counted:10 GFLOP/s, 100 GB/s")
    ones_us = 4 * 100 * 300 / 1e5
    flops_us = 2 * 100 * 200 * 300 / 1e4
    expected = {
        "forward": flops_us,
        "backward": flops_us + ones_us,
        "views": 0.0,
        "add": 2 * 4 * 100 * 200 / 1e5,
    }
    found = {name: float(number) for name, number in map(str.split, lines)}
    assert found == pytest.approx(expected, abs=0.01)
    place = tmp_path / "own.toml"
    network = '[network]\ntopology = "switch"\n[network.link]\nlatency = "1 us"\nbandwidth = "1 GB/s"\n'
    place.write_text(network + '[device]\noperations = "10 GFLOP/s"\nmemory = "100 GB/s"\n')
    assert program(text, 1, platform=str(place), compute="counted")[1] == lines
    slow = program(text, 1, platform=str(place), compute="counted*0.5")[1]
    assert {name: float(number) / 2 for name, number in map(str.split, slow)} == pytest.approx(
        expected, abs=0.01
    )
    again = load_platform(place)
    place.write_text(to_toml(again))
    assert load_platform(place).device == again.device == (1e10, 1e11)
    with pytest.raises(ParameterError, match="counted: and a device"):
        program(text, 1, compute="counted")
    with pytest.raises(ParameterError, match="counted: and a device"):
        program(text, 1, compute="counted:abacus")
    with pytest.raises(ParameterError, match="counted: and a device"):
        program(text, 1, compute="counted:10 TFLOP, 100 GB/s")


MISMATCHED = {
    "if R == 2: dist.broadcast(torch.ones(2, 3), 0)\nelse: dist.all_reduce(torch.ones(3))": (
        MismatchError, r"number 0 on default_pg: rank 2 calls broadcast\(shape=\[2, 3\], dtype=float32, root=0\) at "
        r"program.py:7 .* rank 0 called all_reduce\(shape=\[3\], op=SUM, dtype=float32\) at program.py:8"),
    "dist.all_reduce(torch.ones(3 + (R == 1)))": (MismatchError, r"shape=\[4\].*shape=\[3\]"),
    "dist.barrier()\nif R != 1: dist.all_reduce(torch.ones(3, 4))": (
        Deadlock, r"rank 0 waits for rank 1, whose program has ended(.|\n)*shape=\[3, 4\].*number 1 on default_pg"),
    "dist.send(torch.ones(1), (R + 1) % N)\ndist.recv(torch.ones(1), (R - 1) % N)": (Deadlock, r"rank 0 → rank 1"),
    "if R != 1: dist.new_group([0, 1])": (Deadlock, "waits for rank 1, whose program has ended"),
    "dist.distributed_c10d._get_default_store().get('nobody')": (Deadlock, r"wait\(/default_pg/0//nobody\)"),
    "dist.broadcast(torch.ones(2), 7)": (UsageError, "invalid root rank 7: the group has the ranks 0 to 2"),
    "dist.broadcast(torch.ones(2, dtype=torch.int16), 0)": (UsageError, "broadcast of torch.int16, a type that gloo"),
    "dist.all_to_all([torch.ones(1 + R) for _ in range(N)], [torch.ones(1 + k) for k in range(N)])": (
        UsageError, "all_to_all: the tensor at index 1 has the shape"),
    "dist.scatter(torch.ones(4), [torch.ones(2, 2)] * N if R == 0 else None)": (UsageError, "scatter: the tensor at"),
    "dist.init_process_group('gloo')": (RankError, "rank 0 raised ValueError: trying to initialize the default"),
    "import torch.multiprocessing as mp\nmp.spawn(print, nprocs=2)": (
        UnsupportedError, "rank 0 starts a process .*leave --ranks out"),
    "import torch.distributed.rpc as rpc\nrpc.init_rpc('a', rank=R, world_size=N)": (UnsupportedError, "rpc is not"),
    "p = torch.autograd.profiler.profile\nwith p(), p(): dist.barrier()": (UsageError, "is already profiling"),
    "dist.all_reduce(torch.ones(1, device='meta'))": (UnsupportedError, "compute with CPU tensors"),
    "import multiprocessing\nmultiprocessing.get_context('spawn').Process(target=print).start()": (
        UnsupportedError, "rank 0 starts a process .SpawnProcess-"),
    "from torch.utils.data import DataLoader\nnext(iter(DataLoader([1, 2], num_workers=1)))": (
        UnsupportedError, "a DataLoader needs num_workers=0"),
}  # fmt: skip


@pytest.mark.parametrize("masked", [0, 629_146])
def test_a_step_of_data_parallel_training_by_buckets(masked: int, program: Any) -> None:
    """Buckets take as long as one all-reduce of all gradients; buffers in addition, which rank 0 sends twice."""
    platform = Platform("p", Switch(Hockney(50e-6, 1.24e8)), collectives=Selection("gloo"))
    _, (line,) = program(PROGRAMS / "buckets.py", 4, str(masked), platform=platform)
    step_s, alone_s = map(float, line.split())
    buckets = 3
    assert alone_s == pytest.approx(6 * 50e-6 + 1.5 * 4 * 3_084_672 / 1.24e8, rel=1e-3)
    buffers_s = 2 * (50e-6 + 4 * masked / 1.24e8) if masked else 0.0
    assert step_s == pytest.approx(alone_s + (buckets - 1) * 6 * 50e-6 + buffers_s, rel=2e-3)


@pytest.mark.parametrize("text", MISMATCHED)
def test_mistakes_are_named(text: str, program: Any) -> None:
    """Group, sequence number, operation, shapes, type and line, or what else is wrong: at once."""
    error, words = MISMATCHED[text]
    with pytest.raises(error, match=words) as found:
        program(text, 3)
    said = str(found.value) + "".join(getattr(found.value, "__notes__", ()))
    assert "program.py:" in said


def test_a_mismatch_reaches_all_members_as_a_runtime_error(program: Any) -> None:
    """As over gloo: whoever waits already gets it, too, and the program may go on."""
    text = """
for issue in (lambda: dist.all_reduce(torch.ones(3 + (R == 1))),
              lambda: dist.all_reduce(torch.ones(3 + (R == 1)), async_op=True).wait(),
              lambda: dist.all_gather([torch.zeros(1 + k) for k in range(N)], torch.ones(1 + R))):
    try:
        issue()
    except RuntimeError as error:
        print(R, type(error).__name__)
dist.barrier()
print(R, "end")
"""
    expected = [line for rank in range(3) for line in [f"{rank} MismatchError"] * 3 + [f"{rank} end"]]
    assert sorted(program(text, 3)[1]) == sorted(expected)


STRIDED = {
    "broadcast": "dist.broadcast(column, 1)",
    "all_reduce": "dist.all_reduce(column)",
    "reduce": "dist.reduce(column, 0)",
    "scatter": "dist.scatter(torch.empty(4), [column] * N if R == 0 else None)",
}


@pytest.mark.parametrize("name", STRIDED)
def test_silent_mistakes_of_gloo_are_reported(name: str, program: Any) -> None:
    """A column of a matrix, which gloo takes for one piece of memory: once. A transposed matrix is one piece."""
    text = f"column = torch.ones(4, 4)[:, 1]\n{STRIDED[name]}\ndist.broadcast(torch.ones(4, 4).t(), 0)\n"
    (words,) = gaps(program(text, 3)[0])
    assert f"(program.py:8) gave {name} a tensor of shape [4] with gaps in memory (strides [4])" in words
    assert not gaps(program(text.replace("[:, 1]", "[1]"), 3)[0])


def gaps(run: Any) -> list[str]:
    """Return the sentences about tensors with gaps."""
    return [each for each in run.what.get("warnings", ()) if "gaps in memory" in each]


def test_time_outs_and_deaths_end_calls_in_the_words_of_gloo(program: Any) -> None:
    """After their limit in virtual time, which the program has set; they are RuntimeErrors, and it may go on."""
    text = """
group = dist.new_group(timeout=timedelta(seconds=5))
try:
    if R != 1: dist.all_reduce(torch.ones(3), group=group)
except RuntimeError as error:
    print(R, f"{time.time():.0f}", str(error)[:60])
try:
    if R != 1: dist.monitored_barrier(timeout=timedelta(seconds=2))
except RuntimeError as error:
    print(R, f"{time.time():.0f}", str(error)[:62])
"""
    _, lines = program(text, 3)
    assert lines[0] == "0 5 [gloo] Timed out waiting 5000ms for recv operation to comple"
    assert lines[1] == "0 7 [Rank 0]: Rank 1 failed to pass monitoredBarrier in 2000 ms (["
    assert lines[3] == "2 7 Rank 2 successfully reached monitoredBarrier, but received err"
    assert len(lines) == 4
    text = """
try:
    while True:
        time.sleep(1.0)
        dist.all_reduce(torch.ones(3))
except RuntimeError as error:
    print(R, str(error)[:40])
"""
    _, lines = program(text, 3, faults="crash:1@2.5s")
    assert lines == [f"{rank} [gloo] Connection closed by peer [rank 1" for rank in (0, 2)]


def test_each_rank_profiles_its_own_operations_in_virtual_time(program: Any, tmp_path: Path) -> None:
    """All ranks at a time: operations, forward and backward, ranges, communication; the traces can be read back."""
    text = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3000, 40))
own_s = 0.01 * (1 + R % 3)
with torch.profiler.profile() as profiler:
    for step in range(2):
        with torch.profiler.record_function(f"ProfilerStep#{step}"):
            time.sleep(own_s)
            model(torch.ones(2, 3000)).sum().backward()
            if step and R == 4: dist.send(torch.ones(7), 5)
            if step and R == 5: dist.recv(torch.ones(7))
found = [each for each in profiler.events() if each.name == "gloo:all_reduce"]
assert [each.time_range.end for each in found] == sorted(each.time_range.end for each in found)
rows = {each.key: each for each in profiler.key_averages(group_by_input_shape=True)}
assert rows["gloo:all_reduce"].input_shapes == [[120040]] and rows["gloo:all_reduce"].count == 2
assert found[0].cpu_time_total / 1e6 > 0.03 - own_s
assert rows["aten::addmm"].input_shapes == [[40], [2, 3000], [3000, 40]]
assert "aten::mm" in rows and "DistributedDataParallel.forward" in rows
told = [name for name in rows if name.startswith("gloo:") and name != "gloo:all_reduce"]
assert told == {4: ["gloo:broadcast", "gloo:send"], 5: ["gloo:broadcast", "gloo:recvAnySource"]}.get(R, told[:1]), told
profiler.export_chrome_trace(f"{sys.argv[1]}/{R}.json")
"""
    run, _ = program(text, 12, str(tmp_path))
    assert run.totals["digest"] == program(text, 12, str(tmp_path))[0].totals["digest"]
    rows = read_kineto([tmp_path / f"{rank}.json" for rank in range(12)]).rows
    for rank, row in enumerate(rows):  # without what they have waited for others
        assert row == pytest.approx([0.01 * (1 + rank % 3)] * 2, rel=1e-6)


def test_a_monitored_barrier_without_time_ends_at_once(program: Any) -> None:
    """As over gloo, where 0 is a limit for this call alone."""
    text = """
group = dist.new_group()
try:
    if R == 0: group.monitored_barrier(timedelta(0), wait_all_ranks=True)
except RuntimeError as error:
    print(f"{time.time():.2f}", str(error)[:106])
"""
    _, lines = program(text, 3)
    words = (
        "Ranks 1, 2 failed to pass monitoredBarrier in 0 ms; Rank 0 timed out in monitoredBarrier after 0 ms"
    )
    assert lines == [f"0.00 [Rank 0]: {words[:96]}"]


def test_a_rank_dies_within_backward(program: Any) -> None:
    """It unwinds through frames of C++, and the others are told in the same way."""
    with pytest.raises(RankError, match="Connection closed by peer"):
        program(PROGRAMS / "overlap.py", 4, "0.5", "0.2", faults="crash:2@4.2s")


def test_nothing_is_left_behind(program: Any) -> None:
    """A run that has failed leaves torch as it was."""
    before = dist.TCPStore, dist.distributed_c10d._world, torch._C.Future.wait
    with pytest.raises(SpawnsimError):
        program("1 / 0", 3)
    assert (dist.TCPStore, dist.distributed_c10d._world, torch._C.Future.wait) == before


LATE = (
    HEAD
    + """
import inspect
import torch.nn.functional as F
def later():
    import library
    import torch.distributed.nn.functional as df
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
    from torch.distributed.optim import zero_redundancy_optimizer as zero
    x = torch.full((2,), float(R), requires_grad=True)
    df.all_reduce(x.clone()).sum().backward()
    made = library.Made().group is dist.group.WORLD
    for each in (library.mean, df.broadcast, zero._broadcast_object, ShardedGradScaler.__init__):
        assert not any(isinstance(d.default, dist.ProcessGroup) for d in inspect.signature(each).parameters.values())
    print(R, library.mean(torch.ones(1) * R).item(), x.grad.tolist(), made, dist.group.WORLD.size())
assert dist.group.WORLD.size() == N  # this module is the rank's own
later()
dist.destroy_process_group()
"""
)
LIBRARY = """
import torch.distributed as dist
def mean(x, group=dist.group.WORLD):
    dist.all_reduce(x, group=group)
    return x / dist.get_world_size(group)
class Made:
    default = dist.GroupMember.WORLD
    def __init__(self, group=dist.group.WORLD):
        self.group = dist.group.WORLD if group is None else group
"""


def test_modules_that_are_imported_late_know_no_ranks_group(tmp_path: Path) -> None:
    """A default `group=group.WORLD` was the group of the rank that first imported the module, for all others, too."""
    file, library = tmp_path / "rank" / "late.py", tmp_path / "installed"
    for each in (file.parent, library):
        each.mkdir()
    file.write_text(LATE)
    (library / "library.py").write_text(LIBRARY)
    text = (
        f"import sys\nsys.path.append({str(library)!r})\nimport spawnsim\n"
        f"for ranks in (3, 2): spawnsim.run({str(file)!r}, ranks=ranks, options={{'prefix': False}})"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for ranks, found in ((3, lines[:3]), (2, lines[3:])):
        mean = sum(range(ranks)) / ranks
        assert sorted(found) == [
            f"{rank} {mean} [{ranks:.1f}, {ranks:.1f}] True {ranks}" for rank in range(ranks)
        ]


@pytest.mark.parametrize("loaded", [True, False])
def test_a_folder_named_as_a_library_hides_no_part_of_it(loaded: bool, tmp_path: Path) -> None:
    """A folder "torch" beside the program is where nothing of torch is from, be that loaded already or not."""
    for name in ("torch", "numpy", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes" / "first.py").write_text("RANK = []\n")
    program = tmp_path / "program.py"
    program.write_text(
        "from mpi4py import MPI\nimport torch._C._dynamo\nimport numpy.linalg, torch.nn\nimport notes.first\n"
        "notes.first.RANK.append(MPI.COMM_WORLD.Get_rank())\nMPI.COMM_WORLD.Barrier()\n"
        "assert len(notes.first.RANK) == 1 and MPI.COMM_WORLD.Get_size() == 2\n"
    )
    if loaded:
        spawnsim.run(program, ranks=2)
    else:
        line = [sys.executable, "-m", "spawnsim", "run", str(program), "--ranks", "2", "--quiet"]
        subprocess.run(line, check=True, timeout=120)
