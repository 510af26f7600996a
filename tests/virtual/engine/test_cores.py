"""Ranks that share cores: who computes shares them, who waits does not; against closed forms and a plain simulation."""

from dataclasses import replace

import numpy as np
import pytest
from support.virtual_run import platform, run

from spawnsim import columnar
from spawnsim.comm import constants
from spawnsim.errors import ParameterError, UnsupportedError
from spawnsim.models.compute import Fixed
from spawnsim.models.network import Hockney, Nodes
from spawnsim.models.platform import Cores, load_platform, to_toml
from spawnsim.policies import AverageAllPolicy


def crowded(cores=2, ranks_per_node=4, **how):
    """Return the test platform, nodes of so many ranks with fewer cores."""
    return replace(platform(**how), cores=Cores(cores, ranks_per_node), step=Fixed(1.0))


def ends(blocks, cores, ranks_per_node=None, **how):
    """Let each rank compute its blocks, and wait a given time before each; return when each block ends, by rank."""

    def program(comm):
        for pause_s, work_s in blocks[comm.rank]:
            comm.clock.sleep(pause_s)
            with comm.compute(work_s):
                pass
            comm.record(at=comm.clock.now())

    there = crowded(cores, ranks_per_node or len(blocks))
    rows = run(program, len(blocks), platform=there, **how)[1].rows
    return [[values["at"] for rank, _, values in rows if rank == own] for own in range(len(blocks))]


def test_equal_blocks_take_ranks_over_cores_as_long():
    """Four ranks on two cores take two seconds for one of work; two of a second node do not notice."""
    assert ends([[(0.0, 1.0)]] * 4, 2) == [[2.0]] * 4
    assert ends([[(0.0, 1.0)]] * 6, 2, 4) == [[2.0]] * 4 + [[1.0]] * 2
    assert ends([[(0.0, 1.0), (0.0, 1.0)]] * 10, 3) == [[pytest.approx(10 / 3), pytest.approx(20 / 3)]] * 10


def test_unequal_blocks_by_hand():
    """1 to 4 s on two cores: four at 1/2, three at 2/3, then two at full speed."""
    assert ends([[(0.0, float(work))] for work in (1, 2, 3, 4)], 2) == [
        [2.0],
        [pytest.approx(3.5)],
        [pytest.approx(4.5)],
        [pytest.approx(5.5)],
    ]


def plainly(blocks, cores):
    """Share cores in small steps of a plain list: from change to change, all at one speed."""
    at_s, going, coming = 0.0, {}, {rank: (own[0][0], 0) for rank, own in enumerate(blocks) if own}
    found = [[] for _ in blocks]
    while going or coming:
        speed = min(1.0, cores / max(len(going), 1))
        step = min(
            [left / speed for left, _ in going.values()] + [begin - at_s for begin, _ in coming.values()]
        )
        at_s += step
        going = {rank: (left - step * speed, number) for rank, (left, number) in going.items()}
        for rank, (left, number) in list(going.items()):
            if left < 1e-12:
                del going[rank]
                found[rank].append(at_s)
                if number + 1 < len(blocks[rank]):
                    coming[rank] = (at_s + blocks[rank][number + 1][0], number + 1)
        for rank, (begin, number) in list(coming.items()):
            if begin <= at_s + 1e-12:
                del coming[rank]
                going[rank] = (blocks[rank][number][1], number)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_random_blocks_end_as_in_a_plain_simulation(seed):
    """Ten ranks on three cores, which begin and end as they come."""
    rng = np.random.default_rng(seed)
    blocks = [[(float(rng.random()), float(rng.exponential())) for _ in range(12)] for _ in range(10)]
    for own, other in zip(ends(blocks, 3), plainly(blocks, 3), strict=True):
        assert own == pytest.approx(other, rel=1e-9)


def test_who_waits_leaves_its_core_to_others():
    """Ranks 2 and 3 wait for messages of 0 and 1, which so have a core each; then they compute, alone."""

    def program(comm):
        if comm.rank > 1:
            comm.Recv(np.zeros(1), comm.rank - 2)
        with comm.compute():
            pass
        if comm.rank < 2:
            comm.Send(np.zeros(1), comm.rank + 2)
        comm.record(at=comm.clock.now())

    at = run(program, 4, platform=crowded())[1].column("at")
    assert at[0] == at[1] == 1.0
    assert at[2] == at[3] == pytest.approx(2.0 + 1e-3 + 8e-6)


def test_deadlines_do_not_end_computing_and_deaths_do():
    """A block is no call that waits; a rank that dies amid it is gone at its time. Twice gives the same digest."""

    def program(comm):
        with comm.clock.deadline(0.1), comm.compute(1.0):
            pass
        comm.record(at=comm.clock.now())

    totals, notes = run(program, 4, platform=crowded())
    assert set(notes.column("at").values()) == {2.0}
    assert run(program, 4, platform=crowded())[0].digest == totals.digest
    at = run(program, 4, platform=crowded(), faults="crash:3@0.5s")[1].column("at")
    assert sorted(at) == [0, 1, 2]


def test_who_dies_amid_a_block_leaves_its_core_to_others():
    """One core: two of three go on at 1/2 from 0.9 s on, one alone from 1.5 s on; who begins again takes part anew."""
    blocks = [[(0.0, 10.0)], [(0.0, 0.6)], [(0.0, 2.0)]]
    assert ends(blocks, 1, faults="crash:0@0.9s") == [[], [pytest.approx(1.5)], [pytest.approx(2.9)]]
    again = ends([[(0.0, 1.0)]] * 2, 1, faults="crash:0@0.5s; restart:0@1s")
    assert again == [[pytest.approx(2.25)], [pytest.approx(1.5)]]


def test_a_paused_rank_leaves_its_core_and_a_slowed_one_keeps_its_share():
    """One core, two ranks of one second each, by hand; and far more ranks than cores, twice with one digest."""
    two = [[(0.0, 1.0)]] * 2
    # Alone from 0.5 to 1.0 s: 0.25 + 0.5 done, the last quarter shared; then the paused one is alone.
    assert ends(two, 1, faults="pause:0@0.5s+0.5s") == [[2.0], [1.5]]
    assert ends(two, 1, faults="pause:0@0.5s+9s") == [[10.25], [1.25]]
    assert ends(two, 1, faults="pause:0@0s+0.5s; pause:0@0.25s+0.75s") == [[2.0], [1.0]]
    # Half of the core, and half as fast on it: half done when the other ends, the rest alone at half speed.
    assert ends(two, 1, faults="slow:0@0s,2") == [[3.0], [2.0]]
    assert ends(two, 1, faults="slow:0@0s+1s,2") == [[pytest.approx(2.0 + 0.25)], [2.0]]
    assert ends(two, 1, faults="slow:0@0s,2; slow:0@0s+1s,2") == [[pytest.approx(3.25)], [2.0]]
    # Cores for all: as without.
    assert ends(two, 2, faults="pause:0@0.5s+0.5s; slow:1@0.5s,2") == [[1.5], [1.5]]
    # Paused for ever, and dead amid a pause.
    assert ends(two, 1, faults="pause:0@0.5s") == [[], [1.25]]
    assert ends(two, 1, faults="pause:0@0.5s+9s; crash:0@1s") == [[], [1.25]]

    def program(comm):
        for _ in range(3):
            with comm.compute(1.0):
                pass
            comm.Barrier()
        comm.record(at=comm.clock.now())

    faults = "pause:3@0.5s+1s; slow:0-5@0.7s+3s,3; pause:11@2s+0.1s; slow:11@2s+0.1s,5"
    (totals, notes), (again, _) = (run(program, 12, platform=crowded(3, 12), faults=faults) for _ in "ab")
    assert totals.digest == again.digest and max(notes.column("at").values()) > 12.0


@pytest.mark.parametrize(("progress", "served_s"), [("poll", 2.0), ("async", 0.0)])
def test_accesses_wait_for_the_end_of_a_shared_block(progress, served_s):
    """Whose end nobody knows as they come: the target computes for one second, with three others on its two cores."""

    def program(comm):
        window = comm.Win.Allocate(8, comm=comm)
        comm.Barrier()
        begin_s = comm.clock.now()
        if comm.rank < 4:
            with comm.compute():
                pass
        else:
            window.Lock(1, constants.LOCK_SHARED)
            window.Get(np.zeros(8, np.uint8), 1)
            window.Unlock(1)
            comm.record(took=comm.clock.now() - begin_s)
        comm.Barrier()
        window.Free()

    took = run(program, 5, platform=crowded(progress=progress))[1].column("took")[4]
    assert took == pytest.approx(served_s, abs=0.01)


def test_files_and_what_cannot_share(tmp_path):
    """Written and read back; a core for each rank costs nothing; columns have no events."""
    there = crowded()
    path = tmp_path / "mine.toml"
    path.write_text(to_toml(there), encoding="utf-8")
    assert load_platform(path).cores == Cores(2, 4)
    assert not there.crowded(2)
    assert there.crowded(3)
    nodes = replace(there, network=Nodes(Hockney(1e-6, 1e9), Hockney(1e-3, 1e6), 2), cores=Cores(1))
    assert nodes.places(5) == [0, 0, 1, 1, 2]
    plain = [
        run(lambda comm: comm.compute().spend(None), 2, platform=p)[0].digest
        for p in (there, replace(there, cores=None))
    ]
    assert plain[0] == plain[1]
    with pytest.raises(UnsupportedError, match="3 ranks share 2 cores"):
        columnar.run(AverageAllPolicy(1), ranks=3, iterations=2, model_nbytes=100, platform=there)
    path.write_text(path.read_text().replace("cores = 2", ""), encoding="utf-8")
    with pytest.raises(
        ParameterError, match=r"mine.toml, line \d+: compute.ranks_per_node: say how many cores"
    ):
        load_platform(path)
    with pytest.raises(ParameterError, match="at least one core"):
        Cores(0)
