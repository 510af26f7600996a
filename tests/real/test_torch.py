"""`Comm` over torch.distributed, by four gloo processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.crew import first

from spawnsim.errors import UnsupportedError
from spawnsim.real.launch import launchers
from spawnsim.real.launch.launchers import LaunchContext
from spawnsim.real.torch import comm as torch_comm
from spawnsim.real.torch.runtime import UnfinishedNccl, can_use_nccl

pytestmark = pytest.mark.timeout(180)

HEAD = """
import os, sys, time
import numpy as np
import torch
from spawnsim.comm.constants import *
from spawnsim.comm import DOUBLE
from spawnsim.comm.ops import MAX, MAXLOC, SUM, Op
from spawnsim.errors import *
from spawnsim.real.torch import Options, guarded, world
"""
NEXT = "    before, after = (rank - 1) % size, (rank + 1) % size\n"
WORLD = "comm = world(seed=7, deadline_s={deadline_s})\nrank = comm.rank\n"


@pytest.fixture
def gloo(crews):
    """Run a text on n of four processes, which stay for other tests, and see that it goes well."""

    def run(text: str, *, n: int = 4) -> None:
        body = first(n) + NEXT + textwrap.indent(textwrap.dedent(text), "    ")
        crews(backend="torch", line=launchers.forked(4)).run(HEAD + body)

    return run


def run(tmp_path: Path, text: str, *, n: int = 4, deadline_s: float = 20.0) -> tuple[int, str, str]:
    """Run a program on n processes of its own; return status, output, errors."""
    body = textwrap.indent(textwrap.dedent(text), "    ")
    file = tmp_path / "program.py"
    file.write_text(f"{HEAD}{WORLD.format(deadline_s=deadline_s)}\nwith guarded(comm):\n{body}\n")
    line = [*(launchers.forked(n) if n > 1 else [sys.executable]), str(file)]  # one process needs no launcher
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(line, **pipes, env=environ, start_new_session=True) as started:
        try:
            out, err = started.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            out, err = started.communicate()
            pytest.fail(f"the job hung\n{out}\n{err}")
    return started.returncode, out, err


def test_collectives_of_every_kind_of_buffer(gloo):
    """Torch's types and others, plain and not, short deadlines, contributions that must stay as they are."""
    gloo(
        """
        short = torch.full((3,), rank, dtype=torch.int16)  # a type that gloo does not sum
        comm.Allreduce(IN_PLACE, short)
        assert (short == 6).all()
        square, into = torch.full((2, 2), float(rank)), torch.zeros(4)
        comm.Allreduce(square, into)
        assert (into == 6).all() and (square == rank).all()
        for root in range(size):
            total = np.zeros(5)
            comm.Reduce(np.full(5, float(rank)), total if rank == root else None, root=root)
            assert rank != root or (total == 6).all()
            given = torch.full((1000,), float(rank))
            comm.Reduce(IN_PLACE if rank == root else given, given, MAX, root)
            assert (given == (3 if rank == root else rank)).all()
        for given, table in ((np.full(2, rank), np.zeros(8, int)), (torch.full((2,), rank), torch.zeros(8, dtype=int))):
            comm.Allgather(given, table)
            assert table.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
            table[:] = 0
            later = comm.Iallgather(given + 1, table)
            later.Wait()
            assert table.tolist() == [1, 1, 2, 2, 3, 3, 4, 4]
        mixed = np.zeros(8)  # spelt in different ways on different ranks
        comm.Allgather(np.full(2, float(rank)), mixed if rank % 2 else [mixed, 2, DOUBLE])
        assert mixed.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        if rank:
            try:
                with comm.clock.deadline(0):
                    comm.Barrier()
            except Timeout as late:
                assert 0 in late.ranks, late
            else:
                raise AssertionError("no deadline")
            comm.send(None, 0)
        else:
            [comm.recv(source=other) for other in range(1, size)]
            comm.Barrier()
        comm.recv(source=before) if rank else None
        comm.send(1, after)
        comm.recv(source=before) if not rank else None
        """,
    )


def test_a_large_get_sees_puts_as_wholes(gloo):
    """A Get leaves straight from the part; Puts to the same bytes wait meanwhile, others do not."""
    gloo(
        """
        window = comm.Win.Allocate(4_000_008, 1)
        whole, seen = np.zeros(1_000_000, np.float32), np.zeros(1_000_000, np.float32)
        one, count = np.ones(1, np.int64), np.zeros(1, np.int64)
        window.Lock_all()
        for step in range(30):
            if rank == 1:
                whole[:] = step
                window.Put(whole, 0)
                window.Flush(0)
            elif rank == 2:
                window.Get(seen, 0)
                window.Fetch_and_op(one, count, 0, 4_000_000)
                window.Flush(0)
                assert (seen == seen[0]).all() and count[0] == step, (seen.min(), seen.max(), count)
        comm.Barrier()
        window.Unlock_all()
        assert rank or (window.tomemory()[:4_000_000].view(np.float32) == 29).all()
        window.Free()
        """,
        n=3,
    )


def test_a_program_without_guarded_ends_well(tmp_path):
    """At its end the ranks part; torn from its receiving, a wire's thread would end the process by a signal."""
    file = tmp_path / "bare.py"
    file.write_text(HEAD + WORLD.format(deadline_s=20) + "for _ in range(20): comm.allgather(rank)\n")
    line = [*launchers.forked(2), str(file)]
    found = subprocess.run(line, capture_output=True, text=True, timeout=100, check=False)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(
    ("cards", "nccl", "said"),
    [
        ([("", False)] * 2, False, ""),
        ([("a 1", True), ("b 1", True)], True, ""),
        ([("a 1", True), ("a 1", True)], False, "2 ranks share the GPU a 1"),
        ([("a 1", True), ("", False)], False, "rank 1 sees no GPU"),
        ([("a 1", True), ("a 2", False)], False, "not all ranks have it"),
    ],
)
def test_nccl_is_used_with_a_gpu_for_each_rank_alone(cards, nccl, said):
    """All ranks come to the same verdict, since NCCL hangs where two of them do not."""
    found, why = can_use_nccl(cards)
    assert found is nccl
    assert said in why
    assert bool(said) == bool(why)


def test_a_build_with_nccl_is_of_no_use_without_a_gpu(monkeypatch):
    """As on the login node of a cluster."""
    monkeypatch.setattr(torch_comm.dist, "is_backend_available", lambda name: name in ("gloo", "nccl"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="no backend 'nccl' here, but gloo: use"):
        torch_comm.join(LaunchContext("torchrun", 0, 1, "RANK"), "nccl")


def test_the_watchdog_sees_what_the_gpu_has_not_finished():
    """A collective of NCCL stays among the calls that its rank is in until the GPU has done it."""
    dog = SimpleNamespace(active={}, progress=None)
    unfinished, works = UnfinishedNccl(dog), [SimpleNamespace(is_completed=lambda: done) for _ in range(2)]
    done = False
    for number, work in enumerate(works):
        unfinished.add(("Allreduce", number, None, 0.0, 1.0), work)
    dog.progress()
    assert [call[1] for call in dog.active.values()] == [0, 1]
    done = True
    dog.progress()
    assert dog.active == {}


def test_what_is_not_offered_names_the_alternative(gloo):
    """The error says what to use instead."""
    gloo(
        """
        for call, instead in ((lambda: comm.Create_cart([2]), "Split"), (lambda: comm.Send_init, "Isend"),
                              (lambda: comm.Win.Allocate_shared(8), "Win.Allocate"), (lambda: comm.Spawn, "torchrun"),
                              (comm.recover, "to survive a rank's death use torchrun --max-restarts")):
            try:
                call()
            except UnsupportedError as error:
                assert instead in str(error), error
            else:
                raise AssertionError(instead)
        assert not any(hasattr(comm, name) for name in ("Revoke", "Shrink", "Get_failed", "Create_cart"))
        """
    )


def test_a_rank_that_is_stopped_is_named_also_by_who_would_recover(tmp_path):
    """Nobody can: what the program wanted to recover from ends the job, in these words."""
    text = """
    comm.Barrier()
    if rank == 1: import signal; os.kill(os.getpid(), signal.SIGSTOP)
    try:
        comm.Barrier()
    except Timeout:
        comm.recover()
    """
    status, _, err = run(tmp_path, text, n=2, deadline_s=1.5)
    assert status == 122
    assert err.count("missed its deadline") == 1, err
    assert "missing: rank 1\n  rank 1: no answer" in err
    assert "recover: not available over torch.distributed; to survive a rank's death use" in err


def test_calls_that_need_a_rank_that_has_gone_say_so(tmp_path):
    """Each as `RankFailed`, whoever notices first: a raw error of gloo's was taken for one of the program's."""
    text = """
    import socket
    from pathlib import Path
    done = Path(__file__).with_name("done")
    comm.Barrier()
    if rank == 1:  # all that it is connected by ends, as if it were killed; but no launcher notices
        for number in map(int, os.listdir("/proc/self/fd")):
            try:
                end = socket.socket(fileno=os.dup(number))
                end.getpeername()  # gloo also listens, which must go on
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        while not done.exists():
            time.sleep(0.05)
        os._exit(0)
    memory = np.zeros(100_000)
    calls = {
        "isend": lambda: comm.isend("small", 1), "Isend": lambda: comm.Isend(memory, 1),
        "Ibarrier": lambda: comm.Ibarrier().Wait(), "Iallreduce": lambda: comm.Iallreduce(IN_PLACE, memory).Wait(),
        "Alltoall": lambda: comm.Alltoall(np.zeros(2), np.zeros(2)), "Barrier": comm.Barrier,
    }
    for name, call in calls.items():
        end_s = time.monotonic() + 2
        while time.monotonic() < end_s:
            try:
                call()
            except RankFailed as failed:
                print(f"{name}: {failed}", flush=True)
                break
            time.sleep(0.01)
    done.touch()
    os._exit(0)
    """
    _, out, err = run(tmp_path, text, n=2)
    reported = [line.partition(":")[0] for line in out.splitlines() if "a rank has gone: " in line]
    assert reported == ["isend", "Isend", "Ibarrier", "Iallreduce", "Alltoall", "Barrier"], out + err
