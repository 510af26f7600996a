"""torch.distributed on virtual ranks that are greenlets: refused by name at once, and left as it was."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import all_reduce, init_process_group  # taken before any run

import spawnsim
from spawnsim.errors import UnsupportedError
from spawnsim.virtual.torch.entry import C10D, RENDEZVOUS, STORES

CALLS: dict[str, Callable[[], Any]] = {
    "init_process_group": lambda: init_process_group(
        "gloo", rank=1, world_size=2, init_method="tcp://127.0.0.1:1"
    ),
    "init_device_mesh": lambda: dist.device_mesh.init_device_mesh("cpu", (2,)),
    "all_reduce": lambda: all_reduce(torch.ones(1)),
    "broadcast_object_list": lambda: dist.broadcast_object_list([1]),
    "send": lambda: dist.send(torch.ones(1), 0),
    "barrier": lambda: dist.barrier(),
    "new_group": lambda: dist.new_group([0]),
    "get_rank": lambda: dist.get_rank(),
    "DistributedDataParallel": lambda: torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1)),
    "init_rpc": lambda: dist.rpc.init_rpc("one", rank=1, world_size=2),
    "TCPStore": lambda: dist.TCPStore("127.0.0.1", 1, 2, is_master=False),
}


def touched() -> list[Any]:
    """Return all that a run replaces in torch."""
    stores = [getattr(torch._C._distributed_c10d, store).__init__ for store in STORES]
    return [*stores, sys.modules[C10D]._World.default_pg, sys.modules[RENDEZVOUS]._rendezvous_helper]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Whatever a test does, torch.distributed is afterwards what it was."""
    before, finders = touched(), list(sys.meta_path)
    yield
    assert touched() == before
    assert sys.meta_path == finders


@pytest.mark.parametrize("name", CALLS)
def test_it_is_refused_by_name(name: str) -> None:
    """With rank, virtual time, line, and what to do instead; the run ends there and then."""

    def main(comm: Any) -> None:
        with comm.compute(0.25):
            pass
        assert not dist.is_initialized()
        if comm.rank == 1:
            CALLS[name]()

    with pytest.raises(UnsupportedError) as found:
        spawnsim.run(main, ranks=2)
    text = str(found.value)
    assert text.startswith("rank 1 called torch.")
    assert f".{name} at 0.25 s (test_torch_distributed.py:" in text
    assert "--backend torch" in text


@pytest.mark.parametrize("kind", ["native", "mpi4py"])
def test_a_program_that_imports_torch_by_itself(kind: str, tmp_path: Path) -> None:
    """Torch is not there when the run begins: it is refused all the same, with status 1 and one line."""
    native = "def main(comm):\n    from torch.distributed import init_process_group\n    init_process_group('gloo')\n"
    whole = "from mpi4py import MPI\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"
    file = tmp_path / "program.py"
    file.write_text(native if kind == "native" else whole)
    carrier = [] if kind == "native" else ["--carrier", "greenlets"]  # by itself it would get threads
    line = [sys.executable, "-m", "spawnsim", "run", str(file), "--ranks", "2", "--quiet", *carrier]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1, done.stderr
    assert "rank 0 called torch.distributed.init_process_group at 0 s (program.py:3)" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def group() -> Iterator[None]:
    """A group of torch.distributed in the process around the run."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_group_around_the_run_is_not_seen_and_goes_on() -> None:
    """Virtual ranks do not reduce over it by mistake; other threads use it during the run, and everybody after it."""
    found: list[bool] = []

    def reduce() -> None:
        all_reduce(torch.ones(1))
        found.append(dist.is_initialized())

    def main(comm: Any) -> None:
        assert not dist.is_initialized()
        with pytest.raises(ValueError, match="all_reduce"):
            all_reduce(torch.ones(1))
        if comm.rank == 0:
            beside = threading.Thread(target=reduce)
            beside.start()
            beside.join()
            spawnsim.run(lambda comm: comm.Barrier(), ranks=2)  # a run in a run
            assert not dist.is_initialized()

    spawnsim.run(main, ranks=2)
    reduce()
    assert found == [True, True]


def test_a_run_without_it_does_not_import_it() -> None:
    """Neither torch nor any part of it."""
    code = (
        "import sys, spawnsim; spawnsim.run(lambda comm: comm.Barrier(), ranks=2); "
        "sys.exit(any(name.split('.')[0] == 'torch' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
