"""Ranks that communicate within torch's backward pass: threads may wait there, greenlets are told that they cannot."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

NET = "net = torch.nn.Sequential(torch.nn.Linear(11, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))\n"
INPUT = "x = torch.randn(6, 11, generator=torch.Generator().manual_seed(comm.rank))\n"
MEAN = """
def mean(grad):
    out = torch.empty_like(grad)
    comm.Allreduce(grad.contiguous().numpy(), out.numpy())
    return out / comm.size
"""
HOOKS = """
for each in net.parameters():
    each.register_hook(mean)
for _ in range(3):
    net.zero_grad()
    net(x).square().mean().backward()
"""
FUNCTION = """
class Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return mean(x.detach())
    @staticmethod
    def backward(ctx, grad):
        return mean(grad)
Mean.apply(net(x)).square().mean().backward()
"""
SHOW = "print(comm.rank, sum(each.grad.sum().item() for each in net.parameters()))\n"
# Much that needs no wait may be begun within backward, more than a rank may do before it waits for the others.
BEGUN = """
begun = []
def begin(grad):
    begun.extend(comm.isend(i, (comm.rank + 1) % comm.size) for i in range(5000))
    begun.append(comm.Iallreduce(np.ones(2), total))
total, x = np.zeros(2), torch.ones(3, requires_grad=True)
x.register_hook(begin)
x.sum().backward()
assert [comm.recv(source=(comm.rank - 1) % comm.size) for _ in range(5000)] == list(range(5000))
MPI.Request.waitall(begun)
print(comm.rank, total.tolist())
"""
RUNS = """
import sys
import spawnsim
from spawnsim.errors import UsageError
folder, ranks = sys.argv[1], int(sys.argv[2])
for name in ("hooks", "function", "native"):
    try:
        spawnsim.run(f"{folder}/{name}.py", ranks=ranks)
        print(name, "ended well")
    except UsageError as error:
        print(name, "error:", type(error).__name__, error)
spawnsim.run(f"{folder}/begun.py", ranks=ranks, options={"prefix": False})
for name in ("hooks", "function"):
    spawnsim.run(f"{folder}/{name}.py", ranks=ranks, options={"prefix": False, "carrier": "threads"})
"""


@pytest.mark.parametrize("ranks", [3, 12])
def test_a_wait_within_backward(ranks: int, tmp_path: Path) -> None:
    """One error names rank, call, line, time and the way out; the process is sound afterwards."""
    head = "import numpy as np, torch\nfrom mpi4py import MPI\ncomm = MPI.COMM_WORLD\ntorch.manual_seed(0)\n"
    texts = {
        "hooks": NET + INPUT + MEAN + HOOKS + SHOW,
        "function": NET + INPUT + MEAN + FUNCTION + SHOW,
        "begun": BEGUN,
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(head + text)
    native = "".join(f"    {line}\n" for line in texts["hooks"].splitlines())
    (tmp_path / "native.py").write_text("import torch\ndef main(comm):\n" + native)
    line = [sys.executable, "-c", RUNS, str(tmp_path), str(ranks)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    # A rank that comes last has nobody to wait for, and may come to its end before the error does.
    found = [text for text in done.stdout.splitlines() if not text.startswith("[rank ")]
    for name, text in zip(("hooks", "function", "native"), found[:3], strict=True):
        what = r"rank \d+ has to wait in Allreduce\(op=SUM, count=\d+, datatype=MPI_FLOAT\), number \d on MPI_COMM_W"
        assert re.match(
            rf"{name} error: UsageError {what}ORLD at [\d.e-]+ s \({name}.py:\d+\), within backward\(\)", text
        )
        assert "--carrier threads" in text
    begun, hooks, function = (sorted(found[3 + i * ranks : 3 + (i + 1) * ranks]) for i in range(3))
    assert begun == sorted(f"{rank} [{ranks:.1f}, {ranks:.1f}]" for rank in range(ranks))
    for lines in (hooks, function):
        assert sorted(int(text.split()[0]) for text in lines) == list(range(ranks))
    assert len({text.split()[1] for text in hooks}) == 1  # all ranks have the same gradients
