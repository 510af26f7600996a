"""Many ranks: they end, and stay small; what they lend to a collective is not copied, and still theirs to change."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.virtual_run import run

import spawnsim
from spawnsim import TrainingStep
from spawnsim.comm import IN_PLACE, ops
from spawnsim.comm.buffers import Buffer
from spawnsim.comm.datatypes import BY_DTYPE, DOUBLE_INT
from spawnsim.comm.layouts import BF16
from spawnsim.errors import Timeout
from spawnsim.policies import OneSidedSelectiveAveragingPolicy
from spawnsim.virtual.engine.event_queue import EventQueue
from spawnsim.virtual.mpi.instance import CollectiveInstance
from spawnsim.virtual.mpi.module import MPI

RANKS = 10_000


def resident_kB():
    """Return the memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_ten_thousand_ranks_end_and_take_less_than_50_kB_each():
    """A little of everything on 10,000 ranks: computing, recording, messages, collectives."""
    before = resident_kB()

    def main(comm):
        with comm.compute(0.01):
            pass
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        assert comm.sendrecv(comm.rank, right, source=left) == left
        total = np.zeros(1)
        comm.Allreduce(np.ones(1), total)
        comm.record(total=total[0])
        comm.Barrier()
        if comm.rank == 0:
            comm.record(kB=(resident_kB() - before) / comm.size)

    totals, notes = run(main, RANKS)
    assert (totals.messages >= RANKS, set(notes.column("total").values())) == (True, {float(RANKS)})
    assert notes.column("kB")[0] < 50


# -- what must not grow with the ranks ---------------------------------------------------------------------------


def test_a_collective_is_no_work_for_the_collector():
    """All ranks' objects live until the last rank has come: looking for garbage among them is what once grew."""
    looks = []

    def main(comm):
        total = np.zeros(1)
        for _ in range(10):
            with comm.compute(0.01):
                pass
            comm.Allreduce(np.ones(1), total)

    def note(phase, _):
        looks.append(phase)

    gc.collect()
    gc.callbacks.append(note)
    try:
        run(main, 3000)
    finally:
        gc.callbacks.remove(note)
    assert len(looks) <= 4  # two looks, each with its beginning and its end


def test_steps_that_are_put_off_are_no_work_for_the_collector():
    """Eight steps of each rank wait together: looking through their tensors took a tenth of a run."""
    looks, seen = [], []

    def main(comm):
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = TrainingStep(lambda model, x: model(x).mean())
        for iteration in range(33):
            if comm.rank == 0 and iteration in (9, 32):
                seen.append(len(looks))
            with comm.compute(0.01):
                loss = step(model, optimizer, torch.ones(2, 4))
            comm.record(loss=loss)

    def note(phase, _):
        looks.append(phase)

    gc.callbacks.append(note)
    try:
        spawnsim.run(main, ranks=600)
    finally:
        gc.callbacks.remove(note)
    assert seen[1] - seen[0] <= 2  # one look, with its beginning and its end


@pytest.mark.parametrize("call", ["Allreduce", "Reduce", "Gather"])
def test_a_collective_that_is_over_is_gone_without_the_collector(call):
    """A rank's departure knows the collective; were it known in turn, each collective would be a cycle.

    Nor is one kept in which some might have left early, where all are in step and no event is ever due.
    """
    left = []

    def main(comm):
        total = np.zeros(12 if call == "Gather" else 1)
        for _ in range(20):
            getattr(comm, call)(np.ones(1), total)
        if comm.rank == 11:
            left.append(sum(type(each) is CollectiveInstance for each in gc.get_objects()))

    gc.disable()
    try:
        run(main, 12)
    finally:
        gc.enable()
    assert left[0] <= 2


def test_a_rank_has_no_mailbox_nor_comm_self_before_it_uses_them():
    """Both are made when they are first used; the number of COMM_SELF is as if all had been made in order of ranks."""
    seen = {}

    def main(comm):
        world = comm._world
        comm.Barrier()
        if comm.rank == 13:
            seen["before"] = len(world.open_contexts), len(comm._context.mailboxes)
            own = MPI.COMM_SELF
            seen["number"], seen["self"] = own._context.number, own.allreduce(7)
            seen["after"] = len(world.open_contexts)
        new = comm.Dup()
        seen["next"] = new._context.number

    run(main, 20)
    assert seen == {"before": (1, 0), "number": 15, "self": 7, "after": 2, "next": 22}


def test_one_event_stands_for_all_default_deadlines():
    """Hundreds of ranks wait, and the heap holds one event; each wait still ends at its own deadline."""
    scheduled, ended = [], {}

    def main(comm):
        with comm.compute(0.001 * (comm.rank % 7)):
            pass
        if comm.rank == 299:
            comm.clock.sleep(1.0)
            scheduled.append(len(list(comm._world.kernel.env.events())))
            for rank in range(20, 299):
                comm.send(None, rank)
            comm.clock.sleep(20.0)
        elif comm.rank < 20:
            with pytest.raises(Timeout):
                comm.recv(source=299)
            ended[comm.rank] = comm.clock.now()
        else:
            comm.recv(source=299)

    run(main, 300, deadline_s=15.0)
    assert scheduled == [1]
    assert ended == {rank: pytest.approx(15.0 + 0.001 * (rank % 7), abs=1e-9) for rank in range(20)}


def test_a_poll_makes_no_new_event(monkeypatch):
    """A rank's turn is scheduled again and again, as one event."""
    made, at = [], EventQueue.at

    def counted(self, *args):
        made.append(args)
        return at(self, *args)

    monkeypatch.setattr(EventQueue, "at", counted)

    def main(comm):
        for _ in range(100):
            with comm.compute(0.01):
                pass
            comm.Iprobe()

    assert run(main, 12)[0].scheduled >= 11 * 100
    assert not made


@pytest.mark.parametrize("call", ["Allgather", "Allgatherv"])
def test_contributions_are_listed_once_for_all_ranks(monkeypatch, call):
    """Each rank's own list of all contributions would be quadratic in the ranks."""
    listed, parts = [], CollectiveInstance.parts

    def counted(self):
        listed.append(self)
        return parts(self)

    monkeypatch.setattr(CollectiveInstance, "parts", counted)

    def main(comm):
        found = np.empty(comm.size)
        getattr(comm, call)(np.full(1, float(comm.rank)), found)
        assert found.tolist() == list(range(comm.size))

    run(main, 50)
    assert len(listed) == 1


@pytest.mark.parametrize("call", ["Gather", "Gatherv", "Allgatherv", "Alltoall", "Alltoallv"])
def test_blocks_in_a_row_are_copied_by_one_call(monkeypatch, call):
    """A copy for each block of each rank would be a million among 1,000; blocks with gaps still need one each."""
    unpacked, unpack = [], Buffer.unpack

    def counted(self, data):
        unpacked.append(len(data))
        return unpack(self, data)

    monkeypatch.setattr(Buffer, "unpack", counted)

    def among(ranks, gap):
        def main(comm):
            mine = np.arange(2.0 * comm.size) if call.startswith("Alltoall") else np.full(2, float(comm.rank))
            found = np.full((comm.size, 2 + gap), -1.0)
            places = [found, [2] * comm.size, [(2 + gap) * rank for rank in range(comm.size)], MPI.DOUBLE]
            getattr(comm, call)(mine, places if call.endswith("v") else found)
            if call.startswith("Alltoall"):
                expected = np.tile(mine.reshape(-1, 2)[comm.rank], (comm.size, 1))
            else:
                expected = np.repeat(np.arange(float(comm.size)), 2).reshape(-1, 2)
            if comm.rank == 0 or not call.startswith("Gather"):
                assert found[:, :2].tolist() == expected.tolist()
                assert (found[:, 2:] == -1.0).all()

        unpacked.clear()
        run(main, ranks)
        return len(unpacked)

    assert among(20, gap=0) == 0
    if call.endswith("v"):
        assert among(20, gap=1) == (20 if call == "Gatherv" else 400)


def test_ranks_that_never_look_at_the_board_hold_no_table_of_all_ranks():
    """In mode "age" a rank reads the board when it is replaced; before, it knows nothing of the others."""
    known = {}

    def main(comm):
        def build():
            model = torch.nn.Linear(2, 1)
            return model, torch.optim.SGD(model.parameters(), lr=0.1)

        model, optimizer = build()
        young = comm.rank == 3
        policy = OneSidedSelectiveAveragingPolicy(
            build, model=model, average_every=2, age_range=(3, 3) if young else (50, 60)
        )
        for iteration in range(8):
            with comm.compute(0.01):
                pass
            model, optimizer, _ = policy(
                iteration, model, optimizer, local_metric=float(comm.rank), group=comm
            )
        table = policy._opened.board._known
        known[comm.rank] = None if table is None else table.shape[0]
        policy.shutdown()

    run(main, 12)
    assert known == {rank: 12 if rank == 3 else None for rank in range(12)}


@pytest.mark.parametrize("name", ["SUM", "PROD", "MAX", "MIN", "LAND", "BXOR", "MAXLOC"])
def test_merging_into_other_memory_is_reducing_in_place(name):
    """The same bits wherever the result goes; what is merged stays as it was."""
    rng, op = np.random.default_rng(3), ops.BY_NAME[name]
    if name == "MAXLOC":
        pairs = np.zeros((2, 40), DOUBLE_INT.dtype)
        pairs["value"], pairs["index"] = rng.integers(0, 3, (2, 40)), rng.integers(0, 9, (2, 40))
        cases = [(pairs, DOUBLE_INT)]
    elif name in ("LAND", "BXOR"):
        cases = [(rng.integers(0, 3, (2, 40)).astype(np.int16), BY_DTYPE[np.dtype(np.int16)])]
    else:
        halves = rng.integers(0, 1 << 14, (2, 40)).astype(np.uint16).view(BF16)
        cases = [(rng.normal(size=(2, 40)), BY_DTYPE[np.dtype(float)]), (halves, BY_DTYPE[BF16])]
    for (a, b), datatype in cases:
        kept, expected = (a.copy(), b.copy()), op.reduce(a, b.copy(), datatype)
        out = np.empty_like(b)
        assert op.merging(datatype)(a, b, out) is out
        assert out.tolist() == expected.tolist()  # by value: pairs are padded, and no padding counts
        assert [a.tobytes(), b.tobytes()] == [each.tobytes() for each in kept]
        assert op.merging(datatype)(a, b, b).tolist() == expected.tolist()


def plain_tree(parts):
    """Sum by levels, as recursive doubling does: folded to a power of two first."""
    extra = len(parts) - (1 << (len(parts).bit_length() - 1))
    level = [parts[i] + parts[i + 1] for i in range(0, 2 * extra, 2)] + parts[2 * extra :]
    while len(level) > 1:
        level = [level[i] + level[i + 1] for i in range(0, len(level), 2)]
    return level[0]


@pytest.mark.parametrize("length", [0, 1, 5, 300])  # 300: too long to be copied into one array
@pytest.mark.parametrize("size", [*range(1, 18), 63, 64, 100])
def test_depth_first_sums_like_level_by_level(size, length):
    """The order in which memory is visited does not change the order of the additions, bit for bit."""
    rng = np.random.default_rng(size)
    parts = [rng.normal(size=length).astype(np.float32) for _ in range(size)]
    kept = [part.copy() for part in parts]
    found = ops.reduce_tree(parts, np.add)
    assert found.tobytes() == plain_tree(parts).tobytes()
    assert all((part == copy).all() for part, copy in zip(parts, kept, strict=True))
    assert not any(np.shares_memory(found, part) for part in parts)


@pytest.mark.parametrize("length", [3, 300])
def test_a_rank_that_gives_up_a_collective_may_write_what_it_lent(length):
    """The others get what it contributed when it came, although it left by its deadline and wrote to the buffer."""

    def main(comm):
        mine, total = np.full(length, comm.rank + 1.0), np.zeros(length)
        if comm.rank == 1:
            with comm.compute(1.0):
                pass
        if comm.rank == 0:
            with pytest.raises(Timeout), comm.clock.deadline(0.5):
                comm.Allreduce(mine, total)
            mine[:] = 100.0
        else:
            comm.Allreduce(mine, total)
            comm.record(total=total[0])

    assert run(main, 3)[1].column("total") == {1: 6.0, 2: 6.0}


def test_in_place_sums_do_not_see_each_other():
    """The first to leave writes over what it contributed; the others still get the sum of all."""

    def main(comm):
        both = np.full(2, 1.0 + comm.rank)
        comm.Allreduce(IN_PLACE, both)
        gathered = np.full(comm.size, float(comm.rank))
        comm.Allgather(IN_PLACE, gathered)
        comm.record(sum=both[0], all=str(gathered.tolist()))

    notes = run(main, 5)[1]
    assert set(notes.column("sum").values()) == {15.0}
    assert set(notes.column("all").values()) == {"[0.0, 1.0, 2.0, 3.0, 4.0]"}


MANY_RUNS = """
import gc
from support.virtual_run import run
from spawnsim.virtual.interpreter import FEW_BLOCKS

counts = []
for _ in range(120):
    run(lambda comm: comm.Barrier(), 240)
    counts.append(len(gc.get_objects()))
assert max(counts) < counts[0] * 3 // 2 + FEW_BLOCKS, counts  # each object is one piece of memory or more
assert min(counts[len(counts) // 3 :]) < counts[0] * 11 // 10, counts
"""


LARGE_RUNS = """
import weakref
import numpy as np
from support.virtual_run import run

class Holder:
    pass

def main(comm):
    holder = Holder()
    holder.itself, holder.weights = holder, np.ones(1 << 20)  # a cycle of few objects and 8 MiB
    held.append(weakref.ref(holder))

held, most = [], 0
for _ in range(12):
    run(main, 12)
    most = max(most, sum(each() is not None for each in held))
assert most < 7 * 12, most
"""


@pytest.mark.parametrize("runs", ["many", "large"])
def test_runs_in_one_process_leave_nothing_behind(runs):
    """Each run is a cycle of a thousand objects and more, frozen while the next one runs; in time all are collected."""
    # A process of its own: how much may gather before all is collected depends on what a process has done before.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    program = MANY_RUNS if runs == "many" else LARGE_RUNS
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
