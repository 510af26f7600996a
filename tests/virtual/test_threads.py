"""Threads that ranks start, in virtual time: locks, queues, pools, and a policy that communicates in the background."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spawnsim.errors import Deadlock, MismatchError

HEAD = """
import queue, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import torch, torch.distributed as dist
dist.init_process_group("gloo")
R, N = dist.get_rank(), dist.get_world_size()
"""


@pytest.fixture
def program(torch_program: Any) -> Any:
    """Run a text behind HEAD; return the run and its lines, sorted."""
    return partial(torch_program, HEAD)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_threads_wait_and_sleep_in_virtual_time(program: Any) -> None:
    """Locks, recursive ones too, events, queues, semaphores, barriers, timers and pools; each wait has its limit."""
    text = """
began = time.time()
def took(call, *args, **how):
    since = time.time()
    found = call(*args, **how)
    return found, round(time.time() - since, 6)
lock, event, box = threading.Lock(), threading.Event(), queue.Queue(2)
assert took(lock.acquire) == (True, 0) and took(lock.acquire, timeout=0.5) == (False, 0.5) and not lock.acquire(False)
threading.Timer(1.0, lock.release).start()
assert took(lock.acquire) == (True, 1.0)
assert took(event.wait, 2.0) == (False, 2.0)
threading.Timer(0.25, event.set).start()
assert took(event.wait, 2.0) == (True, 0.25)
try:
    took(box.get, timeout=1.5)
    raise AssertionError
except queue.Empty:
    assert abs(time.time() - began - 5.25) < 1e-6
assert took(threading.Semaphore(0).acquire, timeout=0.25) == (False, 0.25)
nested = threading.RLock()
def twice(name):
    with nested, nested:
        time.sleep(0.1)
        order.append((name, threading.current_thread().name))
order = []
threads = [threading.Thread(target=twice, args=(each,), name=f"T{each}") for each in range(5)]
for each in threads:
    each.start()
assert all(each.is_alive() for each in threads)
assert took(threads[0].join, 0.05) == (None, 0.05) and threads[0].is_alive()
for each in threads:
    each.join()
assert order == [(each, f"T{each}") for each in range(5)] and not threads[0].is_alive()
def fill():
    for each in range(5):
        box.put(each)
        time.sleep(0.1)
threading.Thread(target=fill, daemon=True).start()
assert [box.get() for _ in range(5)] == list(range(5))
with ThreadPoolExecutor(2) as pool:
    def work(number):
        time.sleep(0.5)
        return number * number
    assert took(lambda: list(pool.map(work, range(4)))) == ([0, 1, 4, 9], 1.0)
left = ThreadPoolExecutor(1).submit(time.sleep, 1.0)  # nobody shuts it down
def fails():
    1 / 0
bad = threading.Thread(target=fails)
bad.start()
bad.join()
def last():
    time.sleep(50)
    print(R, "last")
threading.Thread(target=last).start()
print(R, "done")
"""
    found, lines = program(text, 11)
    assert lines == sorted(f"{rank} {word}" for rank in range(11) for word in ("done", "last"))
    assert found.totals["virtual_seconds"] == pytest.approx(57.4, abs=0.01)
    assert program(text, 11)[0].totals["digest"] == found.totals["digest"]


BACKGROUND = """
class Replacing:
    # Reports go to rank 0, whose thread tells the worst rank to take the best one's weights; threads send and receive.
    def __init__(self, model):
        self.model, self.stop, self.lock, self.new = model, threading.Event(), threading.Lock(), None
        self.thread = threading.Thread(target=self.decide if R == 0 else self.obey, daemon=True)
        self.thread.start()
    def report(self, step, metric):
        if R and not step:
            dist.isend(torch.tensor([metric]), 0, tag=1)
        with self.lock:
            if self.new is not None:
                self.model.weight.data.copy_(self.new)
                self.new = None
                print(R, "replaced", self.model.weight[0, 0].item())
    def decide(self):
        told = {rank: torch.zeros(1) for rank in range(1, N)}
        works = {rank: dist.irecv(into, rank, tag=1) for rank, into in told.items()}
        while not self.stop.is_set():
            if works and all(work.is_completed() for work in works.values()):
                works = {}
                order = sorted(told, key=lambda rank: told[rank].item())
                for rank, peer, role in ((order[0], order[-1], 0), (order[-1], order[0], 1)):
                    dist.send(torch.tensor([role, peer]), rank, tag=2)
            time.sleep(0.05)
    def obey(self):
        word = torch.zeros(2, dtype=torch.int64)
        work = dist.irecv(word, 0, tag=2)
        while not self.stop.is_set():
            if work is not None and work.is_completed():
                work, (role, peer) = None, word.tolist()
                if role:
                    dist.isend(self.model.weight.data.clone(), peer, tag=3)
                else:
                    into = torch.zeros(1, 1)
                    dist.recv(into, peer, tag=3)
                    with self.lock:
                        self.new = into
            time.sleep(0.05)
model = torch.nn.Linear(1, 1, bias=False)
model.weight.data.fill_(float(R))
policy = Replacing(model)
for step in range(10):
    time.sleep(0.1)
    policy.report(step, -float(abs(R - N // 3)))
policy.stop.set()
policy.thread.join(timeout=1.0)
assert not policy.thread.is_alive()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("ranks", [8, 200])
def test_a_policy_communicates_in_threads_beside_training(ranks: int, program: Any) -> None:
    """Polling in the background, as policies of torch.distributed do: the worst rank takes the best one's weight."""
    found, lines = program(BACKGROUND, ranks)
    assert lines == [f"{ranks - 1} replaced {ranks // 3:.1f}"]
    assert found.totals["virtual_seconds"] < 1.2


def test_checkpoints_are_saved_beside_training(program: Any, tmp_path: Path) -> None:
    """`async_save` writes in a thread, with collectives of its own."""
    text = """
import torch.distributed.checkpoint as checkpoint
state = {f"of {R}": torch.full((10,), float(R))}
saving = checkpoint.async_save({"model": state}, checkpoint_id=sys.argv[1])
time.sleep(0.5)
saving.result()
dist.barrier()
state[f"of {R}"].zero_()
checkpoint.load({"model": state}, checkpoint_id=sys.argv[1])
print(R, state[f"of {R}"].sum().item())
"""
    assert program(text, 3, str(tmp_path / "saved"))[1] == [f"{rank} {10.0 * rank}" for rank in range(3)]


def test_mistakes_in_threads_end_the_run(program: Any) -> None:
    """A collective that meets another one, and locks that nobody gives back."""
    thread = (
        "t = threading.Thread(target=lambda: dist.all_reduce(torch.ones(3 + (R == 1))))\nt.start(); t.join()"
    )
    with pytest.raises(MismatchError, match=r"shape=\[4\]"):
        program(thread, 3)
    with pytest.raises(Deadlock, match="a lock, event or queue of threading"):
        program("a = threading.Lock()\na.acquire(); a.acquire()", 2)
