"""Mistakes that users of torch.distributed report again and again, each on 12 virtual ranks: found, and named."""

from __future__ import annotations

import time
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
    "a key that nobody sets": Bug(
        "store = dist.distributed_c10d._get_default_store()\nif R:\n    store.set(f'rank{R}', 'here')\n"
        "else:\n    store.wait([f'rank{other}' for other in range(N)])",
        Deadlock, ("rank 0", "rank0", "TCPStore", "program.py:11")),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
def test_it_is_found_and_named(name: str, tmp_path: Path) -> None:
    """With rank, operation and line, in less than a minute of the processor."""
    bug, file, began_s = BUGS[name], tmp_path / "program.py", time.process_time()
    file.write_text(HEAD + bug.text + "\n")
    with pytest.raises(bug.error) as found, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own about the same
        spawnsim.run(file, ranks=12, argv=[str(tmp_path / "written")])
    said = "\n".join([str(found.value), *getattr(found.value, "__notes__", ())])
    place = 0
    for word in bug.words:
        place = said.find(word, place)
        assert place >= 0, f"{word!r} is not said, or not here:\n{said}"
    assert time.process_time() - began_s < 60


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
