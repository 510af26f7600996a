"""Vector clocks: which events of ranks happen before which, along messages and collectives."""

from __future__ import annotations

from typing import Any

import numpy as np

from spawnsim.comm.constants import ANY_SOURCE
from spawnsim.record import Recorder
from spawnsim.scenario import Scenario
from spawnsim.virtual.cluster import Cluster
from spawnsim.virtual.engine.causality import Clocks, before, concurrent, joined
from spawnsim.virtual.ordering import Ordering


def known(program: Any, ranks: int = 4) -> list[list[bool]]:
    """Run a program between a first and a last event of each rank; return whose first event each last one follows."""
    cluster = Cluster(Scenario(ranks=ranks), Recorder())
    ordering = Ordering(cluster.world)
    first: dict[int, int] = {}
    last: dict[int, Any] = {}

    def whole(rank: int) -> None:
        first[rank] = ordering.clocks.count(rank)
        program(cluster.comm_world(rank))
        last[rank] = ordering.event(rank)

    for rank in range(ranks):
        cluster.start(rank, whole)
    with ordering.followed():
        cluster.run()
    return [[before(other, first[other], last[rank]) for other in range(ranks)] for rank in range(ranks)]


def test_clocks() -> None:
    """A stamp carries what happened before."""
    clocks = Clocks(2)
    number = clocks.count(0)
    sent = clocks.stamp(0)
    clocks.count(1)
    assert concurrent((0, sent), (1, clocks.stamp(1)))
    clocks.learn(1, sent)
    assert before(0, number, clocks.stamp(1))
    assert clocks.known_to_all(0) == 1
    assert clocks.known_to_all(1) == 0
    assert joined([None, sent, clocks.stamp(1)]).tolist() == [1, 1]
    assert joined([None]) is None
    assert clocks.known(1) == (1, [1, 1])


def test_along_a_chain_of_messages() -> None:
    """Each rank follows the ranks before it alone."""

    def chain(comm: Any) -> None:
        if comm.rank:
            comm.recv(source=comm.rank - 1)
        if comm.rank + 1 < comm.size:
            comm.send(0, comm.rank + 1)

    assert known(chain) == [[other <= rank for other in range(4)] for rank in range(4)]


def test_a_probe_orders_nothing_and_a_wait_does() -> None:
    """The message was there, and nothing received it."""

    def probing(comm: Any) -> None:
        buf = np.zeros(1)
        if comm.rank == 0:
            comm.Isend(buf, 1).Wait()
            comm.Isend(buf, 2).Wait()
        elif comm.rank == 1:
            comm.Probe(ANY_SOURCE)
        elif comm.rank == 2:
            comm.Irecv(buf, 0).Wait()

    assert known(probing, 3)[1:] == [[False, True, False], [True, False, True]]


def test_collectives_order_what_their_results_depend_on() -> None:
    """A root that only sends waits for nobody."""
    everyone, own = [True] * 4, [[rank == other for other in range(4)] for rank in range(4)]
    assert known(lambda comm: comm.Barrier()) == [everyone] * 4
    assert known(lambda comm: comm.Ibarrier().Wait()) == [everyone] * 4
    assert known(lambda comm: comm.allreduce(1)) == [everyone] * 4
    assert known(lambda comm: comm.bcast(1, root=2)) == [
        [other in (rank, 2) for other in range(4)] for rank in range(4)
    ]
    assert known(lambda comm: comm.reduce(1, root=1)) == [own[0], everyone, *own[2:]]
    assert known(lambda comm: comm.exscan(1)) == [[other <= rank for other in range(4)] for rank in range(4)]
