"""Processes of a main program as virtual ranks: spawn, Process, and the objects that processes share."""

from __future__ import annotations

import math
import multiprocessing
import multiprocessing.connection
import os
import queue
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from spawnsim.errors import Deadlock, UnsupportedError
from spawnsim.scenario import Scenario
from spawnsim.virtual.scripts.main_program import processes_as_ranks
from spawnsim.virtual.scripts.spawning import Session

METHODS = ("fork", "spawn", "forkserver")
WRITTEN = ["by the main program"]
COUNT = 0


@pytest.fixture
def session() -> Iterator[Session]:
    """The processes of the test are ranks."""
    with processes_as_ranks() as each:
        yield each


def _meet(rank: int, size: int, how: str) -> None:
    if how == "env://":
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500", RANK=str(rank), WORLD_SIZE=str(size))
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", rank=rank, world_size=size, init_method=how)


def _trains(rank: int, size: int, how: str, results: Any) -> None:
    _meet(rank, size, how)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    model(torch.full((2, 3), float(rank))).sum().backward()
    gradient = model.module.weight.grad
    assert gradient is not None
    results.put((dist.get_rank(), gradient.tolist()))
    dist.destroy_process_group()


@pytest.mark.parametrize("how", ["env://", "tcp://localhost:29501", "file:///tmp/nothing-is-written"])
@pytest.mark.parametrize("size", [2, 11])
def test_spawned_ranks_train_with_ddp(session: Session, how: str, size: int) -> None:
    """Gradients are the mean over ranks, by each way to meet; no file is written, and no environment changed."""
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_trains, args=(size, how, results), nprocs=size)
    mean = (size - 1) / 2
    assert sorted(results.get() for _ in range(size)) == [(rank, [[2 * mean] * 3]) for rank in range(size)]
    assert results.empty()
    assert "RANK" not in os.environ and not os.path.exists("/tmp/nothing-is-written")
    assert [each.virtual_seconds > 0 for each in session.totals] == [True]


@pytest.mark.parametrize("method", METHODS)
def test_processes_of_each_start_method_meet(session: Session, method: str) -> None:
    """A list of processes, started and then joined."""
    context = mp.get_context(method)
    results = context.Queue()
    started = [context.Process(target=_trains, args=(rank, 3, "env://", results)) for rank in range(3)]
    for each in started:
        each.start()
    for each in started:
        each.join()
    assert [each.exitcode for each in started] == [0] * 3
    assert sorted(results.get() for _ in range(3)) == [(rank, [[2.0] * 3]) for rank in range(3)]


def _fails(rank: int) -> None:
    _meet(rank, 3, "env://")
    if rank == 2:
        raise ValueError("an error of rank 2")
    dist.barrier()


def _leaves(rank: int, way: str) -> None:
    if rank == 1:
        if way == "sys.exit":
            sys.exit(3)
        if way == "os._exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGABRT)
    dist.init_process_group("gloo", rank=rank, world_size=3, init_method="tcp://localhost:1")


def test_an_exception_arrives_as_torchs(session: Session) -> None:
    """With the index of the rank and its traceback; the other ranks are ended."""
    with pytest.raises(
        mp.ProcessRaisedException, match=r"(?s)Process 2 terminated.*an error of rank 2"
    ) as caught:
        mp.spawn(_fails, nprocs=3)
    assert caught.value.error_index == 2


@pytest.mark.parametrize(("way", "code"), [("sys.exit", 3), ("os._exit", 3), ("kill", -signal.SIGABRT)])
def test_an_exit_code_arrives_as_torchs(session: Session, way: str, code: int) -> None:
    """Of sys.exit, os._exit, and of a signal."""
    with pytest.raises(mp.ProcessExitedException) as caught:
        mp.spawn(_leaves, args=(way,), nprocs=3)
    assert (caught.value.error_index, caught.value.exit_code) == (1, code)
    assert (caught.value.signal_name == "SIGABRT") == (way == "kill")


def _sleeps(rank: int) -> None:
    time.sleep(10.0 * rank)


def _sleeps_for_hours(rank: int) -> None:
    time.sleep(10_000.0 * rank)


def test_join_has_a_timeout_in_virtual_time(session: Session) -> None:
    """A real wait of hours would end the test."""
    context = mp.spawn(_sleeps_for_hours, nprocs=3, join=False)
    assert not context.join(timeout=5_000.0)  # rank 0 has ended
    assert not context.join(timeout=5_000.0)
    assert session.now_s == pytest.approx(5_000.0)
    assert [each.is_alive() for each in context.processes] == [False, True, True]
    while not context.join():
        pass
    assert session.now_s == pytest.approx(20_000.0)


def test_a_process_joins_in_time_or_not(session: Session) -> None:
    """Exit code, `is_alive` and `active_children` before, during and after a run."""
    process = mp.Process(target=_sleeps, args=(1,))
    assert process.exitcode is None and not process.is_alive()
    process.start()
    process.join(3.0)
    assert process.exitcode is None and process.is_alive() and process in mp.active_children()
    process.join()
    assert process.exitcode == 0 and not process.is_alive() and not mp.active_children()
    process.close()


def test_a_process_is_terminated(session: Session) -> None:
    """Its exit code is the signal's; the others continue."""
    started = [mp.Process(target=_sleeps, args=(1 + rank,)) for rank in range(3)]
    for each in started:
        each.start()
    started[0].terminate()
    started[1].kill()
    for each in started:
        each.join()
    assert [each.exitcode for each in started] == [-signal.SIGTERM, -signal.SIGKILL, 0]
    assert session.now_s == pytest.approx(30.0)


def _answers(requests: Any, answers: Any) -> None:
    while (request := requests.get()) is not None:
        time.sleep(1.0)
        answers.put((multiprocessing.current_process().name, request * 2))


@pytest.mark.parametrize("method", METHODS)
def test_the_main_program_talks_to_processes_that_run(session: Session, method: str) -> None:
    """Requests and answers, each of which takes a virtual second."""
    context = mp.get_context(method)
    asked, given = context.Queue(), context.Queue()
    worker = context.Process(target=_answers, args=(asked, given), name="worker")
    worker.start()
    for number in range(3):
        asked.put(number)
        assert given.get() == ("worker", 2 * number)
        assert session.now_s == pytest.approx(number + 1.0)
    with pytest.raises(queue.Empty):
        given.get(timeout=0.5)
    with pytest.raises(queue.Empty):
        given.get_nowait()
    asked.put(None)
    worker.join()
    assert multiprocessing.current_process().name == "MainProcess"


def test_a_bounded_queue_makes_its_writers_wait(session: Session) -> None:
    """And so does `join` until all items have been processed."""
    context = multiprocessing.get_context("fork")
    items = context.JoinableQueue(2)

    def writes() -> None:
        for number in range(5):
            items.put(number)
        items.join()

    writer = context.Process(target=writes)
    writer.start()
    time.sleep(1.0)
    assert items.full() and items.qsize() == 2
    with pytest.raises(queue.Full):
        items.put(9, timeout=1.0)
    for number in range(5):
        assert items.get() == number
        assert writer.is_alive()
        items.task_done()
    writer.join(1.0)
    assert writer.exitcode == 0
    with pytest.raises(ValueError, match="too many"):
        items.task_done()


def test_events_barriers_conditions_and_locks(session: Session) -> None:
    """Between the main program and its processes."""
    context = multiprocessing.get_context("fork")
    go, barrier, lock, done = context.Event(), context.Barrier(4), context.RLock(), context.Semaphore(0)
    total, numbers, condition = context.Value("i", 0), context.Array("d", 4), context.Condition()

    def works(rank: int) -> None:
        assert go.wait()
        with total.get_lock(), lock, lock:
            total.value += rank
        numbers[rank] = rank / 2
        barrier.wait()
        assert list(numbers) == [0.0, 0.5, 1.0, 1.5]
        with condition:
            assert condition.wait(timeout=100.0)
        done.release()

    started = [context.Process(target=works, args=(rank,)) for rank in range(4)]
    for each in started:
        each.start()
    time.sleep(2.0)
    assert total.value == 0 and not go.is_set() and not go.wait(1.0)
    go.set()
    time.sleep(1.0)
    assert total.value == 6 and not done.acquire(block=False)
    with condition:
        condition.notify_all()
    for _ in started:
        assert done.acquire(timeout=1.0)
    for each in started:
        each.join()
    assert [each.exitcode for each in started] == [0] * 4


def test_a_broken_barrier_raises_in_all(session: Session) -> None:
    """After a timeout in one of them."""
    context = multiprocessing.get_context("fork")
    barrier, broken = context.Barrier(3), context.Value("i", 0)

    def waits() -> None:
        try:
            barrier.wait(timeout=1.0)
        except Exception as error:  # noqa: BLE001
            with broken:
                broken.value += type(error).__name__ == "BrokenBarrierError"

    started = [context.Process(target=waits) for _ in range(2)]
    for each in started:
        each.start()
    for each in started:
        each.join()
    assert broken.value == 2 and barrier.broken


def test_pipes(session: Session) -> None:
    """Both directions, `connection.wait`, and the end of a file."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def echoes() -> None:
        while True:
            try:
                there.send(there.recv() + 1)
            except EOFError:
                break

    process = context.Process(target=echoes)
    process.start()
    for number in range(3):
        here.send(number)
        assert multiprocessing.connection.wait([here, process.sentinel]) == [here]
        assert here.poll() and here.recv() == number + 1
    assert not here.poll(1.0)
    here.close()
    process.join()
    assert process.exitcode == 0


def _writes_globally(rank: int, results: Any) -> None:
    global COUNT
    COUNT += rank + 1
    WRITTEN.append(f"by rank {rank}")
    results.put(rank)
    time.sleep(1.0)
    results.put((COUNT, list(WRITTEN)))


@pytest.mark.parametrize("method", METHODS)
def test_names_of_a_module_belong_to_each_rank(session: Session, method: str) -> None:
    """A rank that sets a global name, or changes its value, changes it for itself."""
    context = mp.get_context(method)
    results = context.Queue()
    mp.start_processes(_writes_globally, args=(results,), nprocs=3, start_method=method)
    assert [results.get() for _ in range(3)] == [0, 1, 2]
    expected = [(rank + 1, ["by the main program", f"by rank {rank}"]) for rank in range(3)]
    assert [results.get() for _ in range(3)] == expected
    assert (COUNT, WRITTEN) == (0, ["by the main program"])


def _adds(rank: int, tensor: Any, shared: Any) -> None:
    tensor += 1.0
    shared += 1.0


@pytest.mark.parametrize(("method", "expected"), [("spawn", 3.0), ("fork", 0.0)])
def test_tensors_share_memory_as_between_processes(session: Session, method: str, expected: float) -> None:
    """Spawned processes share the tensors they receive, forked ones only those in shared memory."""
    tensor, shared = torch.zeros(2), torch.zeros(2).share_memory_()
    mp.start_processes(_adds, args=(tensor, shared), nprocs=3, start_method=method)
    assert tensor.tolist() == [expected] * 2
    assert shared.tolist() == [3.0] * 2


def test_a_forked_process_has_the_generators_of_its_parent(session: Session) -> None:
    """Each begins with the same state."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    torch.manual_seed(7)
    random.seed(7)

    def draws() -> None:
        results.put((torch.rand(1).item(), random.random()))

    started = [context.Process(target=draws) for _ in range(2)]
    for each in started:
        each.start()
    for each in started:
        each.join()
    expected = torch.rand(1).item(), random.random()
    assert [results.get(), results.get()] == [expected, expected]


def _starts(rank: int) -> None:
    mp.spawn(_sleeps, nprocs=2)


def _starts_one(rank: int) -> None:
    multiprocessing.Process(target=_sleeps, args=(1,)).start()


@pytest.mark.parametrize("function", [_starts, _starts_one])
def test_nested_processes_are_refused_by_name(session: Session, function: Callable[[int], None]) -> None:
    """By torch's spawn and by Process."""
    with pytest.raises(mp.ProcessRaisedException, match=r"UnsupportedError: rank 0 starts a process \("):
        mp.spawn(function, nprocs=2)


def test_a_late_process_is_refused_by_name(session: Session) -> None:
    """The number of ranks is fixed once the main program has waited."""
    first, late = (mp.Process(target=_sleeps, args=(1,)) for _ in range(2))
    first.start()
    first.join(1.0)
    with pytest.raises(UnsupportedError, match="start all processes of a group before"):
        late.start()


def test_groups_run_one_after_the_other_in_one_time(session: Session) -> None:
    """The second group begins when the first has ended."""
    for _ in range(3):
        mp.spawn(_sleeps, nprocs=2)
    assert [each.virtual_seconds for each in session.totals] == pytest.approx([10.0, 20.0, 30.0])


def _stuck(rank: int) -> None:
    _meet(rank, 2, "env://")
    if rank == 0:
        dist.barrier()


def test_a_deadlock_is_named() -> None:
    """With the call of the rank that waits."""
    with pytest.raises(Deadlock, match=r"rank 0 .*barrier"), processes_as_ranks():
        mp.spawn(_stuck, nprocs=2)


def test_an_endless_wait_of_the_main_program_is_named() -> None:
    """No process runs."""
    with pytest.raises(Deadlock, match=r"the main program waits in Queue.get\(\)"), processes_as_ranks():
        mp.Queue().get()


def test_all_is_as_before_after_the_block() -> None:
    """Also after an exception, with a process that has not run."""
    before = multiprocessing.Queue, multiprocessing.queues.Queue, os.kill, time.sleep, os.environ.copy()
    with processes_as_ranks():
        mp.spawn(_sleeps, nprocs=2)
    assert before == (
        multiprocessing.Queue,
        multiprocessing.queues.Queue,
        os.kill,
        time.sleep,
        os.environ.copy(),
    )
    with pytest.raises(ZeroDivisionError), processes_as_ranks():
        mp.Process(target=_sleeps, args=(1,)).start()
        raise ZeroDivisionError
    assert os.kill is before[2]
    assert not mp.active_children()


def _faulty(rank: int, results: Any) -> None:
    _meet(rank, 3, "env://")
    try:
        for _ in range(10):
            time.sleep(1.0)
            dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        results.put((rank, str(error)[:24]))


def test_faults_and_platforms_apply() -> None:
    """A planned crash ends a process by SIGKILL, and the other ranks get gloo's error."""
    scenario = Scenario(ranks=1, faults="crash:1@2.5s", platform="ethernet-10g", deadline_s=math.inf)
    with processes_as_ranks(scenario):
        results = mp.Queue()
        context = mp.spawn(_faulty, args=(results,), nprocs=3, join=False)
        with pytest.raises(mp.ProcessExitedException, match="signal SIGKILL"):
            while not context.join(grace_period=10.0):
                pass
        found = sorted([results.get(), results.get()])
        assert found == [(0, "[gloo] Connection closed"), (2, "[gloo] Connection closed")]


def test_runs_repeat() -> None:
    """The digests of two runs are equal."""
    digests = []
    for _ in range(2):
        with processes_as_ranks() as session:
            results = mp.Queue()
            mp.spawn(_trains, args=(5, "env://", results), nprocs=5)
        digests.append(session.totals[0].digest)
    assert digests[0] == digests[1]


@pytest.mark.parametrize("method", METHODS)
def test_managers_share_dictionaries_and_lists(session: Session, method: str) -> None:
    """Their values are copies: changes of a value that was read are lost, as with a server."""
    with mp.get_context(method).Manager() as manager:
        found, order, state = manager.dict({"begin": [0]}), manager.list(), manager.Namespace(total=0)
        mp.start_processes(_registers, args=(found, order, state), nprocs=3, start_method=method)
        assert dict(found) == {"begin": [0], 0: [0], 1: [1], 2: [4]} and len(found) == 4
        assert list(order) == [2, 1, 0] and order[0] == 2 and 1 in order
        assert state.total == 3


def _registers(rank: int, found: Any, order: Any, state: Any) -> None:
    time.sleep(3.0 - rank)
    found[rank] = [rank * rank]
    found["begin"].append(rank)
    order.append(rank)
    state.total += rank


def test_a_pool_of_the_main_program_is_real(session: Session) -> None:
    """Its workers are processes of the operating system, whatever the start method."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(abs, [-1, -2]) == [1, 2]
    assert not session.totals


def _waits(rank: int, event: Any) -> None:
    event.wait()


def test_waits_for_nobody_are_no_cycle() -> None:
    """All ranks wait for the main program, which waits for them."""
    with (
        pytest.raises(Deadlock, match=r"2 of 2 ranks wait.*\n.*\n.*Event.wait\(\)") as caught,
        processes_as_ranks(),
    ):
        mp.spawn(_waits, args=(mp.Event(),), nprocs=2)
    assert "cycle" not in str(caught.value)
