"""Ranks carried by threads: the same runs as with greenlets, and the same ends."""

from __future__ import annotations

import _thread
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from support.virtual_run import run

from spawnsim.errors import Deadlock, RankError, Timeout
from spawnsim.virtual.engine.kernel import current_task
from spawnsim.virtual.mpi.comm import ProgramAbort

RANKS = 12


def everything(comm):
    """Collectives, messages of both kinds, a wildcard, windows, background tasks, random numbers, a smaller group."""
    half = comm.Split(comm.rank % 2)
    data = np.full(1000, float(comm.rank))
    comm.Allreduce(data.copy(), data)
    half.Allreduce(data.copy(), data)
    peer = (comm.rank + 1) % comm.size
    request = comm.Isend(data, peer, 1)
    comm.Recv(np.empty_like(data), (comm.rank - 1) % comm.size, 1)
    request.Wait()
    comm.send(comm.rank, 0)
    heard = [comm.recv() for _ in range(comm.size)] if comm.rank == 0 else []
    window = comm.Win.Allocate(8, comm=comm)
    window.Lock(peer)
    window.Put(np.array([comm.clock.now()]), peer)
    window.Unlock(peer)
    comm.Barrier()
    beside = comm.background(lambda: comm.clock.sleep(0.5))
    with comm.compute(0.1 * comm.rank):
        draws = np.random.random(2)
    beside.join()
    window.Free()
    comm.record(data=float(data[0]), heard=str(heard), draw=float(draws[0]), end=comm.clock.now())


def test_a_run_is_the_same_on_both_carriers():
    """Digest, rows, times and events: bit for bit. Threads are threads, and greenlets are none."""
    found, threads = {}, {}
    for carrier in ("greenlets", "threads"):
        seen = threads[carrier] = set()
        totals, notes = run(
            lambda comm, seen=seen: (seen.add(threading.get_ident()), everything(comm)),
            RANKS,
            carrier=carrier,
        )
        rows = sorted(notes.rows, key=lambda row: row[0])
        found[carrier] = totals.digest, totals.virtual_seconds, totals.scheduled, rows
    assert found["threads"] == found["greenlets"]
    assert len(threads["greenlets"]) == 1
    assert len(threads["threads"]) == RANKS


def test_ends_reach_ranks_in_threads():
    """A deadlock, a time-out, an error and an Abort: each is told, and the `finally` blocks of all ranks run."""
    ended, before = [], sorted(map(id, threading.enumerate()))

    def wait(comm, last):
        try:
            assert threading.current_thread() in threading.enumerate()
            if comm.rank < RANKS - 1:
                comm.recv(source=RANKS - 1)
            last(comm)
        finally:
            ended.append(comm.rank)

    def late(comm):
        with comm.clock.deadline(2.0):
            comm.recv(source=0)

    for last, error in (
        (lambda comm: comm.recv(source=0), Deadlock), (late, Timeout),
        (lambda comm: 1 / 0, RankError), (lambda comm: comm.Abort(3), ProgramAbort),
    ):  # fmt: skip
        ended.clear()
        with pytest.raises(error) as found:
            run(lambda comm, last=last: wait(comm, last), RANKS, carrier="threads")
        assert sorted(ended) == list(range(RANKS))
        if error is Deadlock:
            assert "test_carriers.py:" in str(found.value)
    time.sleep(0.1)
    assert sorted(map(id, threading.enumerate())) == before


def test_a_rank_in_a_thread_dies_and_another_that_ignores_its_end_is_left():
    """Death unwinds its program; who catches everything is left where it stands, and the process can end."""
    unwound, calls = [], []

    def main(comm):
        try:
            while True:
                with comm.compute(0.3):
                    pass
                comm.Barrier()
        finally:
            unwound.append(comm.rank)

    with pytest.raises(RankError, match="rank 3 has failed"):
        run(main, RANKS, faults="crash:3@1s", carrier="threads")
    assert sorted(unwound) == list(range(RANKS))

    def stubborn(comm):
        while comm.rank == 0:
            try:
                comm.recv(source=1)
            except BaseException:  # noqa: BLE001 - that is what is tried here
                calls.append(comm.rank)

    with pytest.raises(Deadlock):
        run(stubborn, 2, carrier="threads")
    assert len(calls) > 30


def test_torch_modes_of_ranks_in_threads_do_not_leak():
    """A rank that waits within no_grad switches gradients off for nobody else."""
    torch = pytest.importorskip("torch")

    def main(comm):
        with torch.no_grad() if comm.rank % 2 else torch.enable_grad():
            comm.Barrier()
            assert torch.is_grad_enabled() == (comm.rank % 2 == 0)
        assert torch.is_grad_enabled()

    run(main, 4, carrier="threads")


INTERRUPTED = """
import signal, sys, spawnsim
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
from spawnsim.scenario import Scenario
from spawnsim.virtual import simulate
class Notes:
    row = event = lambda *_: None
def main(comm):
    comm.Barrier()
    if comm.rank == 2:
        print("begun", flush=True)
        while True:
            pass
    comm.Barrier()
try:
    simulate(main, Scenario(4), recorder=Notes(), carrier="threads")
except KeyboardInterrupt:
    print("stopped", flush=True)
"""


def test_an_interrupt_ends_the_rank_that_computes():
    """Python hands Ctrl-C to the main thread, which waits for its turn."""
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "begun\n"
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=120)[0] == "stopped\n"
    assert child.returncode == 0


def test_a_task_is_found_in_its_thread_alone():
    """A thread that a rank starts by `threading` is a task of that rank; one of another kind is no rank."""
    found = []
    over = _thread.allocate_lock()  # Python's own, on which a rank waits outside of virtual time
    over.acquire()

    def main(comm):
        _thread.start_new_thread(lambda: (found.append(current_task()), over.release()), ())
        assert over.acquire(timeout=60)
        beside = threading.Thread(target=lambda: found.append(current_task().name))
        beside.start()
        beside.join()
        found.append(current_task().name)

    run(main, 1, carrier="threads")
    assert found == [None, "rank 0 (background)", "rank 0"]
