"""The dataflow of collectives against messages: of a plain interpreter, and of virtual ranks on the kernel's wire."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.collective_messages import Performer, steps_of
from support.collective_plans import calls, switch
from support.collective_programs import MessageRun, Program, Run, fault_plan
from support.effort import tried

from spawnsim.models.collectives import CollectivePlan, Planner, Selection, catalogue, depends, finish
from spawnsim.models.collectives.dataflow import Evaluation
from spawnsim.models.network import Hockney, Network, Nodes
from spawnsim.models.platform.files import Platform
from spawnsim.record import Recorder
from spawnsim.scenario import Scenario
from spawnsim.virtual.cluster import Cluster
from spawnsim.virtual.mpi.context import Context


def interpret(one: CollectivePlan, network: Network, arrivals, ranks, free=None):
    """Run a plan message by message, each rank as far as it gets.

    Returns when each leaves, and when its card has sent its last message.
    """
    size = len(arrivals)
    clock, out_free, in_free = list(map(float, arrivals)), [-np.inf] * size, [-np.inf] * size
    out_free, stays = out_free if free is None else list(map(float, free)), [-np.inf] * size
    queues: dict[tuple[int, int], deque] = {}

    def program(rank):
        me = int(ranks[rank])
        for step in steps_of(one, rank):
            posted = clock[rank]
            for dest, nbytes in step.sends:
                begin, to = max(clock[rank], out_free[rank]), int(ranks[dest])
                cost = (
                    network.cost_at(me, to, nbytes, begin)
                    if network.changes
                    else network.cost(me, to, nbytes)
                )
                send_s, inject_s, flight_s, receive_s, into = cost
                out_free[rank] = begin + inject_s
                alone = max(clock[rank], stays[rank]) + inject_s
                asks = network.collective_rendezvous and nbytes > network.eager_bytes
                trip_s = network.cost(me, to, 0).flight_s if asks else 0.0
                stays[rank] = out_free[rank] + 2 * trip_s if nbytes > network.eager_bytes else alone
                message = (begin, trip_s, flight_s, receive_s, into, nbytes)
                queues.setdefault((rank, dest), deque()).append(message)
                clock[rank] += send_s
            for source, nbytes, reduced in step.receives:
                while not queues.get((source, rank)):
                    yield
                begin, trip_s, flight_s, receive_s, into, sent = queues[source, rank].popleft()
                assert sent == nbytes
                arrival = (max(begin + trip_s, posted) + trip_s if trip_s else begin) + flight_s
                in_free[rank] = max(arrival, in_free[rank] + into) if into else in_free[rank]
                arrival = in_free[rank] if into else arrival
                clock[rank] = (
                    max(clock[rank], arrival) + receive_s + network.reduce_s(reduced, one.amounts.dtype)
                )

    going = [program(rank) for rank in range(size)]
    while going:
        still = [each for each in going if next(each, "over") is None]
        assert len(still) < len(going) or any(queues.values()), "stuck"
        going = still
    assert not any(queues.values()), "a message that nobody takes"
    return np.maximum(clock, stays), np.array(out_free)


@st.composite
def busy_cards(draw, arrivals):
    """Draw when each rank's card is free: idle, or busy with what was sent before for longer or shorter."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    late = rng.choice([0.0, 1e-5, 1e-3]) * rng.random(len(arrivals))
    return np.where(
        rng.random(len(arrivals)) < draw(st.sampled_from([0.0, 0.3, 1.0])), arrivals + late, -np.inf
    )


@tried(60)
@given(calls(), st.data())
def test_dataflow_equals_messages(call, data):
    """The vectorised times are those of a plain message-by-message run, for skewed arrivals on any network.

    So are the times at which cards are free again; some are busy at the beginning.
    """
    one, network, arrivals, ranks = call
    free = data.draw(busy_cards(arrivals))
    times, left = interpret(one, network, arrivals, ranks, free)
    found = one.finish(arrivals, network, ranks, out_free=free)
    assert found.times == pytest.approx(times, rel=1e-9, abs=1e-15)
    assert found.out_free == pytest.approx(left, rel=1e-9, abs=1e-15)


@tried(40)
@given(calls(), st.randoms(use_true_random=False))
def test_leaving_depends_only_on_those_named(call, random):
    """A rank's time is the same whether ranks outside its dependencies have arrived, are late, or are missing."""
    one, network, arrivals, ranks = call
    everybody = frozenset(range(len(arrivals)))
    rank = random.randrange(len(arrivals))
    needed = one.depends(rank)
    needed = everybody if needed is None else needed
    full, partial = one.finish(arrivals, network, ranks).times, arrivals.copy()
    partial[list(everybody - needed)] = np.nan
    assert rank in needed
    assert one.finish(partial, network, ranks).times[rank] == full[rank]
    partial[random.choice(sorted(needed))] = np.nan
    times = one.finish(partial, network, ranks).times
    assert np.isnan(times[rank])
    assert (one.free_to_leave(~np.isnan(partial)) == ~np.isnan(times)).all()


@pytest.mark.parametrize(
    "operation", ["barrier", "bcast", "allreduce", "allgather", "alltoall", "reduce_scatter", "scan"]
)
@pytest.mark.parametrize("network", [switch(), Nodes(Hockney(1e-6, 1e10), Hockney(1e-5, 1.25e9), 4)])
def test_ranks_that_are_alike_are_timed_as_one_to_the_last_bit(monkeypatch, operation, network):
    """As long as all have done the same, one number stands for them; from then on the same as without."""
    begin = Evaluation.__init__

    def apart(self, *args):
        begin(self, *args)
        self.separate()

    for algorithm in catalogue.names(operation):
        for size in (12, 13, 16):
            plan = Planner(network, Selection(fixed=((operation, algorithm),))).plan(operation, size, 70_001)
            found = plan.finish(np.full(size, 0.1234567), network)
            monkeypatch.setattr(Evaluation, "__init__", apart)
            plain = plan.finish(np.full(size, 0.1234567), network)
            monkeypatch.setattr(Evaluation, "__init__", begin)
            assert found.times.tobytes() == plain.times.tobytes()
            assert found.out_free.tobytes() == plain.out_free.tobytes()
            assert found[1:3] == plain[1:3]


def test_a_ring_of_ranks_in_step_is_no_work_that_grows_with_their_square(monkeypatch):
    """131,071 rounds of one number; as vectors of 131,072 they took two minutes."""
    widths, send = set(), Evaluation.send

    def counted(self, *args):
        widths.add(len(self.clock))
        return send(self, *args)

    monkeypatch.setattr(Evaluation, "send", counted)
    size = 20_000
    plan = Planner(switch(), Selection(fixed=(("allgather", "ring"),))).plan("allgather", size, 8)
    found = plan.finish(np.zeros(size), switch())
    assert (found.messages, widths) == (size * (size - 1), {1})


def test_a_root_leaves_before_the_late():
    """The root of a broadcast leaves when its card is done; a leaf of a gather likewise; nobody waits for strangers."""
    arrivals = np.array([0.0, 5.0, 0.0, 0.0])
    times = finish("bcast", arrivals, 1000, network=switch()).times
    assert times[0] < 1e-4 and times[2] < 1e-4 and times[3] < 1e-4 and times[1] >= 5.0
    assert finish("gather", arrivals, 1000, network=switch()).times[3] < 1e-4
    assert depends("bcast", "binomial", 8, rank=7) == {0, 4, 6, 7}
    assert depends("bcast", "binomial", 8, 1, rank=0) == {1, 5, 7, 0}
    assert depends("allreduce", "ring", 8, rank=3) is None


def on_the_wire(one: CollectivePlan, network: Network, arrivals, members):
    """Run a plan as real messages of virtual ranks; return when each leaves, and the run's totals."""
    platform = Platform("test", network)
    cluster = Cluster(Scenario(ranks=max(members) + 1, platform=platform, deadline_s=np.inf), Recorder())
    group, left = Context(cluster.world, (tuple(members),)), np.zeros(len(members))

    def program(rank):
        me = members.index(rank)
        Performer(group, me).perform(one)
        left[me] = cluster.world.kernel.current.clock

    members = list(members)
    for me, rank in enumerate(members):
        cluster.crashes.begin(cluster.world.ranks[rank], program, float(arrivals[me]))
    totals = cluster.run()
    return left, totals


@tried(20)
@given(calls(), st.integers(0, 3))
def test_dataflow_equals_the_kernel(call, factor):
    """Performed by virtual ranks on the kernel's wire, a collective takes what its dataflow says."""
    one, network, _, ranks = call
    network = replace(network, collective_rendezvous=False)  # these messages are buffered
    arrivals = 1e-4 * factor * np.random.default_rng(factor).random(len(ranks))
    times, messages, nbytes, *_ = one.finish(arrivals, network, ranks)
    left, totals = on_the_wire(one, network, arrivals, ranks.tolist())
    whole = one.amounts.each is None or float(one.amounts.each).is_integer()
    assert left == pytest.approx(times, rel=1e-9 if whole else 1e-3, abs=1e-15)
    assert totals.messages == messages
    assert totals.bytes == nbytes or not whole


def same(first: Run, second: Run) -> bool:
    """Run both; return whether all ranks came equally far, at the same times."""
    pairs = list(zip(first.run(), second.run(), strict=True))
    assert first.stopped == second.stopped
    return all(len(a) == len(b) and a == pytest.approx(b, rel=1e-9, abs=1e-13) for a, b in pairs)


@tried(16)
@given(st.integers(0, 2**32 - 1))
def test_programs_equal_those_of_messages_alone(seed):
    """Collectives in a row, computing, and messages that keep the cards busy: all clocks are those of bare messages."""
    program = Program.draw(seed)
    assert same(Run(program), MessageRun(program))


def over_faulty_links_equal(program: Program, seed: int) -> None:
    """Assert that both ways tell the same under faults: who is late, by how much, who never gets on; and the events."""
    faults = fault_plan(seed, program.size)
    first, second = Run(program, faults, seed), MessageRun(program, faults, seed)
    assert same(first, second)
    if not first.stopped:
        assert first.told() == second.told()


@tried(12)
@given(st.integers(0, 2**32 - 1))
def test_programs_over_faulty_links_equal_those_of_messages_alone(seed):
    """Where receivers take in anything at once; else a late message also holds up those of the next collective."""
    program = Program.draw(seed)
    over_faulty_links_equal(program.without_drains(), seed)


@tried(12)
@given(st.integers(0, 2**32 - 1))
def test_a_collective_over_faulty_links_equals_its_messages(seed):
    """On any network, behind messages that keep cards busy."""
    over_faulty_links_equal(Program.draw(seed).of_one_call(), seed)


def test_programs_meet_what_they_are_to_test():
    """Among the first programs are many whose collectives find busy cards, and many that each kind of fault strikes."""
    struck = Counter()
    busy = stopped = 0
    for seed in range(60):
        program = Program.draw(seed)
        run = Run(program, fault_plan(seed, program.size), seed)
        run.run()
        struck.update(word for _, _, what, _ in run.told(whole=True) for word in what.split("+"))
        stopped += bool(run.stopped)
        busy += run.busy
    assert busy > 20
    assert stopped > 1
    assert set(struck) == {"lost", "resent", "corrupt", "delayed", "doubled"}
