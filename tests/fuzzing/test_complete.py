"""`spawnsim fuzz --exhaustive` misses no outcome: random programs under drawn delays, faults and priorities end in none
that the exploration has not seen.
"""

import math
import random

import numpy as np
import pytest

from spawnsim.comm import ANY_SOURCE, LOCK_EXCLUSIVE, LOCK_SHARED, SUM
from spawnsim.fuzzing import exploring
from spawnsim.fuzzing.campaign import Target, attempt
from spawnsim.fuzzing.cases import Calm, Case, Space
from spawnsim.fuzzing.exploring import Exhaustion

RUNS = 400  # at most, of one exploration
DRAWN = (
    {"faults": "none", "stragglers": (None, "lognormal:1")},
    {"faults": "delay; slow; reorder; pause"},
    {"faults": "", "depth": 4},  # randomized priorities
)


def receive(draw, comm, count, tag):
    """Receive messages from any source in a drawn way; return all that the rank learns."""
    how = draw.choice(("recv", "probe", "iprobe", "waitany", "waitsome", "testany", "testall", "wait"))
    if how == "recv":
        return [comm.recv(source=ANY_SOURCE, tag=tag) for _ in range(count)]
    if how == "probe":
        return [comm.mprobe(ANY_SOURCE, tag).recv() for _ in range(count)]
    if how == "iprobe":
        return [(comm.iprobe(ANY_SOURCE, tag), comm.recv(source=ANY_SOURCE, tag=tag)) for _ in range(count)]
    requests = [comm.irecv(source=ANY_SOURCE, tag=tag) for _ in range(count)]
    calls = type(requests[0])
    if how == "waitany":
        return [calls.waitany(requests) for _ in requests]
    first = {"waitsome": calls.waitsome, "testany": calls.testany, "testall": calls.testall}
    known = first[how](requests) if how in first else None
    return [known, *(each.wait() for each in reversed(requests) if each)]


def gathering(draw, comm, tag):
    """Most ranks send to one, once or twice."""
    root = draw.randrange(comm.size)
    counts = [0 if rank == root else draw.choice((0, 1, 1, 2)) for rank in range(comm.size)]
    if comm.rank == root:
        return receive(draw, comm, min(sum(counts), 3), tag) if sum(counts) else []
    before = sum(counts[: comm.rank])
    for number in range(max(min(counts[comm.rank], 3 - before), 0)):
        comm.send((comm.rank, number), root, tag)
    return []


def arbitration(draw, comm, tag):
    """One rank receives from the others in turn; the first of them sends to one that has been waiting."""
    judge, waiting = draw.sample(range(comm.size), 2)
    others = [rank for rank in range(comm.size) if rank not in (judge, waiting)]
    if comm.rank == judge:
        order = [comm.recv(source=ANY_SOURCE, tag=tag) for _ in others]
        for place, rank in enumerate(order):
            comm.send(place, rank, tag)
        return order
    if comm.rank == waiting:
        return receive(draw, comm, 1, tag)
    comm.send(comm.rank, judge, tag)
    place = comm.recv(source=judge, tag=tag)
    if not place:
        comm.send(comm.rank, waiting, tag)
    return [place]


def accesses(draw, comm, tag):
    """Ranks add to a number in a window, under shared and exclusive locks."""
    window, found = comm.Win.Allocate(8, comm=comm), []
    np.frombuffer(window.tomemory(), np.int64)[:] = 0
    comm.Barrier()
    plans = [[draw.choice((LOCK_SHARED, LOCK_EXCLUSIVE)) for _ in range(draw.randrange(3))] for _ in range(3)]
    for lock in plans[comm.rank] if comm.rank < len(plans) else ():
        old = np.zeros(1, np.int64)
        window.Lock(0, lock)
        window.Fetch_and_op(np.full(1, 10**comm.rank, np.int64), old, 0, 0, SUM)
        window.Unlock(0)
        found.append(int(old[0]))
    comm.Barrier()
    window.Free()
    return found


def program_of(seed):
    """Return the number of ranks, and a program that leaves the outcome of each rank in a dictionary."""
    draw = random.Random(seed)
    ranks = draw.choice((3, 3, 4))
    phases = [
        (draw.choice((gathering, gathering, arbitration, accesses)), draw.random())
        for _ in range(draw.randint(1, 6 - ranks))
    ]

    def program(comm, outcome):
        outcome[comm.rank] = [
            phase(random.Random(key), comm, tag) for tag, (phase, key) in enumerate(phases, 1)
        ]

    return ranks, program


@pytest.mark.parametrize("first", range(0, 48, 6))
def test_drawn_outcomes_are_among_the_explored_ones(first, monkeypatch):
    """Those of six programs; explorations that end early say nothing."""
    explore, outcome, seen, complete = exploring._explore, {}, set(), 0

    def noted(*arguments):
        outcome.clear()
        found = explore(*arguments)
        if found.schedule is not None:
            seen.add(repr(sorted(outcome.items())))
        return found

    monkeypatch.setattr(exploring, "_explore", noted)
    for seed in range(first, first + 6):
        ranks, program = program_of(seed)
        target, world = Target(program), {"deadline_s": math.inf}
        case = Case(seed=0, ranks=ranks, choices="", parameters={"outcome": outcome}, world=world)
        seen.clear()
        found = Exhaustion(target, runs=RUNS).run([case])
        assert found.failures == {}
        if found.left:
            continue
        complete += 1
        for how in DRAWN:
            space = Space(ranks=[ranks], parameters=case.parameters, world=world, **how)
            _, watch, _ = attempt(target, space.calm(ranks), census=True)
            calm = Calm(
                max(task.clock for task in watch.world.kernel.tasks),
                watch.longest_gap_s(),
                False,
                watch.steps,
            )
            for number in range(12):
                drawn = space.case(number, lambda _, calm=calm: calm)
                outcome.clear()
                assert attempt(target, drawn)[0] is None
                assert repr(sorted(outcome.items())) in seen, (seed, drawn)
    assert complete >= 3
