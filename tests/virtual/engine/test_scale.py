"""Many ranks: they end, and stay small; what they lend to a collective is not copied, and still theirs to change."""

import gc
from pathlib import Path

import numpy as np
import pytest
from support.virtual_run import run

from spawnsim.comm import IN_PLACE, ops
from spawnsim.errors import Timeout
from spawnsim.virtual.interpreter import FEW_BLOCKS

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


def plain_tree(parts):
    """Sum by levels, as recursive doubling does: folded to a power of two first."""
    extra = len(parts) - (1 << (len(parts).bit_length() - 1))
    level = [parts[i] + parts[i + 1] for i in range(0, 2 * extra, 2)] + parts[2 * extra :]
    while len(level) > 1:
        level = [level[i] + level[i + 1] for i in range(0, len(level), 2)]
    return level[0]


@pytest.mark.parametrize("size", [*range(1, 18), 63, 64, 100])
def test_depth_first_sums_like_level_by_level(size):
    """The order in which memory is visited does not change the order of the additions, bit for bit."""
    rng = np.random.default_rng(size)
    parts = [rng.normal(size=5).astype(np.float32) for _ in range(size)]
    kept = [part.copy() for part in parts]
    found = ops.reduce_tree(parts, np.add)
    assert found.tobytes() == plain_tree(parts).tobytes()
    assert all((part == copy).all() for part, copy in zip(parts, kept, strict=True))
    assert not any(np.shares_memory(found, part) for part in parts)


def test_a_rank_that_gives_up_a_collective_may_write_what_it_lent():
    """The others get what it contributed when it came, although it left by its deadline and wrote to the buffer."""

    def main(comm):
        mine, total = np.full(3, comm.rank + 1.0), np.zeros(3)
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


def test_many_runs_in_one_process_leave_nothing_behind():
    """Each run is a cycle of a thousand objects and more, frozen while the next one runs; in time all are collected."""
    counts = []
    for _ in range(250):
        run(lambda comm: comm.Barrier(), 60)
        counts.append(len(gc.get_objects()))
    assert max(counts) < counts[0] * 3 // 2 + FEW_BLOCKS  # each object is one piece of memory or more
    assert min(counts[len(counts) // 3 :]) < counts[0] * 11 // 10
