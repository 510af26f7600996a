"""Test suites of other projects on virtual ranks: torch's test cases, and suites for `mpiexec -n N pytest`."""

import re

import pytest
from test_testing import pytest_in

MPI_SUITE = """
import unittest

import pytest
from mpi4py import MPI

import helper

comm = MPI.COMM_WORLD
rank = comm.rank


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    yield comm.bcast(str(tmp_path_factory.mktemp("a")) if rank == 0 else None)
    comm.Barrier()


def test_modules_belong_to_ranks(shared):
    helper.seen.append(rank)
    assert helper.seen == [rank]
    assert comm.allgather(shared) == [shared] * comm.size


def test_one_rank_fails():
    print("before", rank)
    found = comm.allreduce(1)
    comm.isend(b"left", (rank + 1) % comm.size)
    if rank == 1:
        assert found == 7
    comm.Barrier()


def test_deadlock():
    comm.recv(source=(rank + 1) % comm.size)


def test_after_them():
    assert not comm.iprobe()
    assert comm.allgather(rank) == list(range(comm.size))


@pytest.mark.parametrize("root", range(comm.size))
def test_root(root):
    assert comm.bcast(rank, root) == root


@pytest.mark.skipif(comm.size > 2, reason="for two")
def test_skipped():
    pass


class TestCase(unittest.TestCase):
    def setUp(self):
        self.own = comm.Dup()

    def tearDown(self):
        self.own.Free()

    def test_sum(self):
        self.assertEqual(self.own.allreduce(1), comm.size)
"""


def test_a_suite_for_mpiexec(tmp_path):
    """Modules and fixtures belong to ranks; a failure names rank, line and the calls of all; the next test is clean."""
    (tmp_path / "test_suite.py").write_text(MPI_SUITE)
    (tmp_path / "helper.py").write_text("seen = []\n")
    text = pytest_in(tmp_path, "-p", "spawnsim.testing", "--spawnsim-ranks", "11")
    assert "2 failed, 14 passed, 1 skipped" in text
    assert re.findall(r"FAILED test_suite.py::(\w+)", text) == ["test_one_rank_fails", "test_deadlock"]
    assert re.search(r">\s+assert found == 7\nE\s+assert 11 == 7", text)
    assert "rank 1 is shown" in text
    assert re.search(r"rank 0\s+\S+ s\s+Barrier\(\), number \d+ on MPI_COMM_WORLD\s+test_suite.py:\d+", text)
    assert re.search(r"rank 1\s+\S+ s\s+failed test_one_rank_fails", text)
    assert "Captured stdout call (rank 10)" in text
    assert "a cycle of waits: rank 0 → rank 1 → " in text
    assert "spawnsim/virtual" not in text


def test_other_ways_to_end(tmp_path):
    """A file that does not load, and ranks that collect different tests, are errors; `-x` ends all ranks."""
    (tmp_path / "test_broken.py").write_text("import nothing_of_this_name\n")
    text = pytest_in(tmp_path, "-p", "spawnsim.testing", "--spawnsim-ranks", "2")
    assert "No module named 'nothing_of_this_name'" in text
    assert "1 error" in text
    (tmp_path / "test_broken.py").write_text(
        "from mpi4py import MPI\nif MPI.COMM_WORLD.rank == 1:\n    def test_more():\n        pass\n"
    )
    text = pytest_in(tmp_path, "-p", "spawnsim.testing", "--spawnsim-ranks", "2")
    assert "ranks 0 and 1 have collected different tests: test_broken.py::test_more" in text
    (tmp_path / "test_broken.py").write_text(
        "from mpi4py import MPI\ndef test_polls():\n    request = MPI.COMM_SELF.irecv()\n"
        "    while not request.Test():\n        pass\ndef test_more():\n    pass\n"
    )
    text = pytest_in(tmp_path, "-p", "spawnsim.testing", "--spawnsim-ranks", "2")
    assert "livelock" in text
    assert "1 failed, 1 passed" in text
    (tmp_path / "test_broken.py").write_text("def test_a():\n    assert 0\ndef test_b():\n    pass\n")
    text = pytest_in(tmp_path, "-x", "-p", "spawnsim.testing", "--spawnsim-ranks", "3")
    assert "1 failed in" in text


MARKED = """
import pytest
from mpi4py import MPI

comm = MPI.COMM_WORLD


def test_alone():
    assert comm.size == 1


@pytest.mark.parallel(4)
def test_four():
    assert comm.allreduce(1) == 4


@pytest.mark.parallel([1, 2, 5])
def test_several():
    assert comm.allreduce(1) == comm.size


@pytest.mark.parallel
def test_default():
    assert comm.size == 3


@pytest.mark.mpi(min_size=3)
def test_min_size():
    assert comm.size == 3


@pytest.mark.mpi
def test_mpi():
    assert comm.size == 2
    assert comm.rank == 0
"""


def test_marks_choose_the_ranks(tmp_path):
    """Each test of mpi-pytest and pytest-mpi runs on as many ranks as its mark asks for."""
    (tmp_path / "test_marked.py").write_text(MARKED)
    text = pytest_in(tmp_path, "-p", "spawnsim.testing", "--spawnsim-ranks", "marks")
    assert "1 failed, 7 passed" in text
    assert "failed on rank 1 of 2" in text


TORCH_SUITE = """
import torch
import other_numbers
import torch.distributed as dist
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest, MultiProcessTestCase, MultiThreadedTestCase, skip_if_lt_x_gpu,
)

COUNT = 0


class TestProcesses(MultiProcessTestCase):
    @property
    def world_size(self):
        return 4

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def begin(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)

    def test_a_step(self):
        global COUNT
        COUNT += 1
        assert COUNT == 1
        other_numbers.append(self.rank)
        assert other_numbers.NUMBERS == [self.rank]
        self.begin()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.full((2, 4), float(self.rank))).sum().backward()
        optimizer.step()

    def test_one_fails(self):
        self.begin()
        total = torch.ones(3)
        dist.all_reduce(total)
        if self.rank == 2:
            assert total[0].item() == 5
        dist.all_reduce(total)

    def test_deadlock(self):
        self.begin()
        if self.rank == 1:
            dist.recv(torch.ones(1), 0)
        else:
            dist.barrier()

    @skip_if_lt_x_gpu(2)
    def test_gpus(self):
        pass


class TestThreads(MultiThreadedTestCase):
    @property
    def world_size(self):
        return 11

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_sum(self):
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total[0] == 11

    def test_one_thread_fails(self):
        if self.rank == 3:
            raise ValueError("rank 3 is wrong")
        dist.barrier()


class TestOneGroup(MultiProcContinuousTest):
    world_size = 4

    @classmethod
    def backend_str(cls):
        return "gloo"

    def test_sum(self):
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total[0] == 4

    def test_worker_fails(self):
        assert self.rank != 3
        dist.barrier()
"""


def test_test_cases_of_torch(tmp_path):
    """A process is a rank, with its own module; a failure has its traceback, and the calls of the others."""
    pytest.importorskip("expecttest")
    (tmp_path / "test_torch.py").write_text(TORCH_SUITE)
    (tmp_path / "other_numbers.py").write_text("NUMBERS = []\nappend = NUMBERS.append\n")
    text = pytest_in(tmp_path, "-p", "spawnsim.testing", "--spawnsim", "-p", "no:logging")
    assert "4 failed, 3 passed, 1 skipped" in text
    assert re.search(r"Process 2 exited with error code 10(?s:.*)assert 4.0 == 5", text)
    # A set: with CI in the environment, pytest's summary repeats the whole error.
    assert len({*re.findall(r"rank [013]\s+\S+ s\s+all_reduce\(.* at test_torch.py:\d+", text)}) == 3
    assert re.search(r"deadlock: 4 of 4 ranks wait", text)
    assert "ValueError: rank 3 is wrong" in text
    assert len(re.findall(r"rank \d+\s+\S+ s\s+barrier\(.* at test_torch.py:\d+", text)) >= 6


SPAWNING = """
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def begin(rank, size):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29501", rank=rank, world_size=size)


def total_of(rank, size, queue):
    begin(rank, size)
    total = torch.ones(2) * rank
    dist.all_reduce(total)
    if rank == 0:
        queue.put(total[0].item())


def wrong(rank, size):
    begin(rank, size)
    assert rank != 1, "one is wrong"
    dist.barrier()


def wait(rank, size):
    begin(rank, size)
    if rank == 1:
        dist.recv(torch.ones(1), 0)
    dist.barrier()


@pytest.mark.parametrize("size", [2, 11])
def test_spawn(size):
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(total_of, (size, queue), nprocs=size)
    assert queue.get() == sum(range(size))


def test_wrong():
    mp.spawn(wrong, (3,), nprocs=3)


def test_deadlock():
    mp.spawn(wait, (3,), nprocs=3)
"""


def test_tests_that_start_processes(tmp_path):
    """`mp.spawn` in a test starts ranks; errors and deadlocks arrive in the test."""
    (tmp_path / "test_spawning.py").write_text(SPAWNING)
    text = pytest_in(tmp_path, "-p", "spawnsim.testing", "--spawnsim")
    assert "2 failed, 2 passed" in text
    assert "one is wrong" in text
    assert (
        re.search(r"rank 1\s+\S+ s\s+recv\(.*test_spawning.py:\d+", text) or "deadlock: 3 of 3 ranks" in text
    )


def test_nothing_happens_unasked(tmp_path):
    """Without its options the plugin changes nothing, and a session that does not name it does not load it."""
    (tmp_path / "test_plain.py").write_text(
        "import sys\ndef test_plain():\n    assert not [n for n in sys.modules if n.startswith('spawnsim')]\n"
    )
    assert "1 passed" in pytest_in(tmp_path)
    (tmp_path / "conftest.py").write_text("pytest_plugins = 'spawnsim.testing'\n")
    (tmp_path / "test_plain.py").write_text(
        "import sys\ndef test_plain():\n    assert 'spawnsim.virtual.cluster' not in sys.modules\n"
    )
    assert "1 passed" in pytest_in(tmp_path)
