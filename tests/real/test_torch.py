"""`Comm` over torch.distributed, by four gloo processes under torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(180)

HEAD = """
import os, sys, time
import numpy as np
import torch
from spawnsim.comm.constants import *
from spawnsim.comm.ops import MAX, MAXLOC, SUM, Op
from spawnsim.errors import *
from spawnsim.real.torch import Options, guarded, world
comm = world(seed=7, deadline_s={deadline_s})
rank, size = comm.rank, comm.size
before, after = (rank - 1) % size, (rank + 1) % size
"""


def run(tmp_path: Path, text: str, *, n: int = 4, deadline_s: float = 20.0) -> tuple[int, str, str]:
    """Run a program on n processes under torchrun; return status, output, errors."""
    body = textwrap.indent(textwrap.dedent(text), "    ")
    file = tmp_path / "program.py"
    file.write_text(f"{HEAD.format(deadline_s=deadline_s)}\nwith guarded(comm):\n{body}\n")
    launcher = ["-m", "spawnsim.real.torchrun", "--standalone", f"--nproc-per-node={n}"]
    line = [sys.executable, *(launcher if n > 1 else []), str(file)]  # one process needs no launcher
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


def test_messages_collectives_and_windows(tmp_path):
    """One job tries what a policy needs; the contract suite tries the rest."""
    status, _, err = run(
        tmp_path,
        """
        # messages: tags, any source, any size, a dropped request, a receive that times out
        first = comm.irecv(source=before, tag=9)
        comm.send(b"x" * 3_000_000, after, tag=9)
        comm.Isend(np.full(10_000, float(rank)), after, tag=1)
        got = np.empty(10_000)
        comm.Recv(got, source=ANY_SOURCE, tag=1)
        assert (got == before).all() and len(first.wait()) == 3_000_000
        try:
            with comm.clock.deadline(0.2):
                comm.recv(source=1, tag=77)
        except Timeout as error:
            assert error.ranks == (1,) and "0.2 s" in str(error)
        else:
            raise AssertionError("no timeout")

        # collectives: torch's, ours, and those of sub-communicators
        total = torch.full((5,), float(rank))
        comm.Allreduce(IN_PLACE, total)
        assert (total == 6).all()
        half = torch.ones(3, dtype=torch.bfloat16)
        comm.Allreduce(IN_PLACE, half)
        assert (half == size).all()
        longs = np.full(3, rank, np.int16)
        comm.Allreduce(IN_PLACE, longs, op=MAX)
        assert (longs == size - 1).all()
        part = comm.Split(rank % 2, rank)
        assert part.allgather(rank) == [rank % 2, rank % 2 + 2]
        own = np.full(2, rank, np.float32)
        part.Allreduce(IN_PLACE, own)
        assert (own == 2 * (rank % 2) + 2).all()
        assert comm.bcast({"root": rank}, root=2) == {"root": 2}

        # windows: served while the owner computes, exclusive locks exclude
        window = comm.Win.Allocate(16, 8)
        memory = window.tomemory().view(np.int64)
        comm.Barrier()
        one, seen = np.ones(1, np.int64), np.empty(1, np.int64)
        for _ in range(10):
            window.Lock(0)
            window.Get(seen, 0)
            window.Flush(0)
            window.Put(seen + 1, 0)
            window.Unlock(0)
            window.Fetch_and_op(one, seen, 0, 1)
            window.Flush(0)
        comm.Barrier()
        assert rank or memory.tolist() == [10 * size, 10 * size], memory
        if rank == 1:
            end = time.perf_counter() + 1
            while time.perf_counter() < end: torch.ones(1000).sum()
        elif rank == 0:
            begin = time.perf_counter()
            window.Get(seen, 1)
            window.Flush(1)
            assert time.perf_counter() - begin < 0.5
        window.Free()
        """,
    )
    assert status == 0, err


def test_what_is_not_offered_names_the_alternative(tmp_path):
    """The error says what to use instead."""
    status, _, err = run(
        tmp_path,
        """
        for call, instead in ((lambda: comm.Create_cart([2]), "Split"), (lambda: comm.Send_init, "Isend"),
                              (lambda: comm.Win.Allocate_shared(8), "Win.Allocate"), (lambda: comm.Spawn, "torchrun")):
            try:
                call()
            except UnsupportedError as error:
                assert instead in str(error), error
            else:
                raise AssertionError(instead)
        """,
        n=1,
    )
    assert status == 0, err


def test_an_exception_ends_the_job_with_one_traceback(tmp_path):
    """The status is that of a program that raised; torchrun adds no report of its own."""
    status, _, err = run(tmp_path, "if rank == 1: raise ValueError('wrong step')\ncomm.Barrier()")
    assert status == 1
    assert err.count("Traceback") == 1, err
    assert "rank 1 of 4 raised" in err


def test_a_missing_rank_is_named(tmp_path):
    """A collective past its deadline says who is missing, and what that rank does."""
    status, _, err = run(
        tmp_path, "if rank == 3:\n    with comm.compute(): time.sleep(15)\ncomm.Barrier()", deadline_s=1.5
    )
    assert status == 4
    assert "missing: rank 3" in err
    assert "rank 3: computing for" in err
