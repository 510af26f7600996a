"""Mistakes that users of torch.distributed report again and again, each on 12 virtual ranks: found, and named."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import spawnsim
from spawnsim.errors import Deadlock, MismatchError, RankError

HEAD = """
import time, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
R, N = dist.get_rank(), dist.get_world_size()
"""


class Bug(NamedTuple):
    """A program with a mistake, and what is said of it: words of the error, in this order."""

    text: str
    error: type[Exception]
    words: tuple[str, ...]


TRAINING = """
torch.manual_seed(0)
model = DDP(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
BUGS = {
    "the order of two collectives depends on the rank": Bug(
        "a, b = torch.ones(5), torch.ones(7)\nfor each in (a, b) if R != 9 else (b, a):\n    dist.all_reduce(each)",
        MismatchError, ("number 0 on default_pg", "rank 9", "shape=[7]", "program.py:9", "rank 0", "shape=[5]")),
    "one rank leaves out a collective, since its loss is not finite": Bug(
        "loss = torch.tensor(float('nan') if R == 7 else 1.0)\nif torch.isfinite(loss):\n    dist.all_reduce(loss)\n"
        "dist.broadcast(torch.ones(3), 0)",
        MismatchError, ("number 0 on default_pg", "rank 7 calls broadcast", "program.py:10", "all_reduce",
                        "program.py:9")),
    "one rank catches an error, and goes on without the others": Bug(
        "for step in range(3):\n    try:\n        if R == 4 and step == 1: raise MemoryError\n"
        "        dist.all_reduce(torch.ones(6))\n    except MemoryError:\n        pass",
        Deadlock, ("rank 0", "waits for rank 4, whose program has ended", "all_reduce", "program.py:10", "number 2")),
    "one rank has a batch less": Bug(
        TRAINING + "for batch in range(5 - (R == 11)):\n    optimizer.zero_grad()\n"
        "    model(torch.ones(3, 4)).sum().backward()\n    optimizer.step()",
        Deadlock, ("waits for rank 11, whose program has ended", "program.py:13")),
    "parameters that take no part in the loss": Bug(
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)\n"
        "    def forward(self, x): return self.used(x)\nmodel = DDP(Net())\n"
        "for step in range(2):\n    model(torch.ones(1, 4)).sum().backward()",
        RankError, ("rank 0", "Expected to have finished reduction in the prior iteration", "program.py:14")),
    "a group that only its members make": Bug(
        "if R < 4:\n    few = dist.new_group([0, 1, 2, 3])\nmany = dist.new_group(list(range(N)))",
        Deadlock, ("12 of 12 ranks wait", "rank 0", "world_size=12", "program.py:9")),
    "a source that is counted in the group": Bug(
        "group = dist.new_group([4, 5, 6])\nif R in (4, 5, 6):\n    dist.broadcast(torch.ones(1), src=0, group=group)",
        RankError, ("rank 4", "Global rank 0 is not part of group", "program.py:9")),
    "shapes differ, for the last batch is smaller": Bug(
        "mine = torch.ones(32 if R < 11 else 20)\ndist.all_gather([torch.empty(32) for _ in range(N)], mine)",
        MismatchError, ("number 0 on default_pg", "rank 11", "shape=[20]", "program.py:8", "rank 0", "shape=[32]")),
    "types differ": Bug(
        "mine = torch.ones(3, dtype=torch.float64 if R == 5 else torch.float32)\ndist.all_reduce(mine)",
        MismatchError, ("rank 5", "dtype=float64", "program.py:8", "dtype=float32")),
    "all send before they receive": Bug(
        "dist.send(torch.ones(1), (R + 1) % N)\ndist.recv(torch.ones(1), (R - 1) % N)",
        Deadlock, ("rank 0 → rank 1", "send(dest=1", "program.py:7")),
    "a file is read before it is written": Bug(
        "import sys\nif R == 0:\n    time.sleep(0.5)\n    open(sys.argv[1], 'w').write('x')\n"
        "else:\n    time.sleep(0.1)\n    open(sys.argv[1]).read()",
        RankError, ("raised FileNotFoundError", "at 0.1", "program.py:13")),
    "a collective in one branch": Bug(
        "loss = torch.tensor(float(R))\nif R < 8:\n    dist.all_reduce(loss)",
        Deadlock, ("8 of 12 ranks wait", "rank 0 waits for ranks 8, 9, 10, 11, whose programs have ended",
                   "program.py:9")),
    "a root that depends on the rank": Bug(
        "dist.broadcast(torch.ones(2), src=5 if R == 5 else 0)",
        MismatchError, ("rank 5 calls broadcast", "root=5", "root=0", "program.py:7")),
    "an operation that depends on the rank": Bug(
        "dist.all_reduce(torch.ones(3), op=dist.ReduceOp.MAX if R == 2 else dist.ReduceOp.SUM)",
        MismatchError, ("rank 2 calls all_reduce", "op=MAX", "op=SUM", "program.py:7")),
    "a barrier in an except clause": Bug(
        "try:\n    if R == 3: raise ValueError\n    dist.all_reduce(torch.ones(1))\n"
        "except ValueError:\n    dist.barrier()",
        MismatchError, ("rank 3 calls barrier", "program.py:11", "all_reduce", "program.py:9")),
    "a barrier for the rank that writes a file": Bug(
        "if R == 0:\n    dist.barrier()\ndist.all_reduce(torch.ones(3))",
        MismatchError, ("calls all_reduce", "program.py:9", "rank 0 called barrier()", "program.py:8")),
    "a group whose ranks depend on the rank": Bug(
        "group = dist.new_group([R, (R + 1) % N])\ndist.all_reduce(torch.ones(2), group=group)",
        Deadlock, ("rank 1 → rank 2 → rank 1", "program.py:7")),
    "a wrong source": Bug(
        "x = torch.ones(2)\nif R == 0:\n    for other in range(1, N): dist.send(x, other)\nelse:\n"
        "    dist.recv(x, 6 if R == 7 else 0)",
        Deadlock, ("rank 7 waits for rank 6, whose program has ended", "send(dest=7", "program.py:9", "program.py:11",
                   "rank 0 to rank 7")),
    "a parameter that one rank does not use": Bug(
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)\n"
        "    def forward(self, x): return self.a(x) if R == 6 else self.a(x) + self.b(x)\nmodel = DDP(Net())\n"
        "for step in range(2):\n    model(torch.ones(1, 4)).sum().backward()",
        RankError, ("rank 6", "Expected to have finished reduction", "did not receive grad for rank 6",
                    "program.py:14")),
    "a model of another size": Bug(
        "model = DDP(nn.Linear(4, 3 if R == 3 else 2))",
        RankError, ("rank 3", "sizes [3, 4]", "process 0", "program.py:7")),
    "a key that nobody sets": Bug(
        "store = dist.distributed_c10d._get_default_store()\nif R:\n    store.set(f'rank{R}', 'here')\n"
        "else:\n    store.wait([f'rank{other}' for other in range(N)])",
        Deadlock, ("rank 0", "rank0", "TCPStore", "program.py:11")),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
def test_it_is_found_and_named(name: str, tmp_path: Path) -> None:
    """With rank, operation and line."""
    bug, file = BUGS[name], tmp_path / "program.py"
    file.write_text(HEAD + bug.text + "\n")
    with pytest.raises(bug.error) as found, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own about the same
        spawnsim.run(file, ranks=12, argv=[str(tmp_path / "written")])
    said = "\n".join([str(found.value), *getattr(found.value, "__notes__", ())])
    place = 0
    for word in bug.words:
        place = said.find(word, place)
        assert place >= 0, f"{word!r} is not said, or not here:\n{said}"


def test_silent_mistakes_are_warned_of(tmp_path: Path) -> None:
    """A tensor is changed before its operation is over, or another type is received: a sum or a message is wrong."""
    file = tmp_path / "program.py"
    file.write_text(
        HEAD + "x = torch.ones(1000)\nwork = dist.all_reduce(x, async_op=True)\nx.zero_()\nwork.wait()\n"
        "work = dist.all_reduce(x, async_op=True)\nwork.wait()\nx += 1\nif R == 3:\n"
        "    work = dist.isend(x, 9)\n    x.zero_()\n    work.wait()\n    dist.send(torch.ones(10), 9)\n"
        "elif R == 9:\n    dist.recv(x, 3)\n    dist.recv(torch.ones(5, dtype=torch.float64), 3)\n"
    )
    run: Any = spawnsim.run(file, ranks=12)
    said = "\n".join(run.what["warnings"])
    assert "(program.py:10) changed the buffer of its all_reduce before" in said
    assert "(program.py:17) changed the buffer of its send to rank 9 before" in said
    assert "(program.py:21 (in distributed_c10d.py:" in said
    assert "received float32 from rank 3 with tag 0 on default_pg into float64" in said
    assert len(run.what["warnings"]) == 3


def test_a_wait_that_is_forgotten_is_reported(tmp_path: Path) -> None:
    """What is read is not there yet, as on real ranks; the run warns of the operation that nobody has waited for."""
    file = tmp_path / "program.py"
    file.write_text(
        HEAD + "got = torch.zeros(4)\nwork = dist.all_reduce(torch.ones(4), async_op=True)\n"
        "mine = dist.irecv(got, (R - 1) % N)\ndist.send(torch.ones(4), (R + 1) % N)\nprint(got.sum().item())\n"
    )
    found: Any = spawnsim.run(file, ranks=12)
    (reported,) = (each for each in found.what["warnings"] if "never completed" in each)
    assert "24 requests" in reported
    assert "rank 0: all_reduce" in reported
