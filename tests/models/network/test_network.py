"""Networks: what a message costs, on which link, and how links are shared."""

from __future__ import annotations

import math
import timeit

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.effort import tried
from support.virtual_run import run

from spawnsim.errors import ParameterError
from spawnsim.models.network import (
    Dragonfly,
    FatTree,
    Flow,
    FlowNetwork,
    Hockney,
    HomeLinks,
    LogGP,
    Network,
    Nodes,
    Piecewise,
    Regions,
    SharedLinks,
    Switch,
    Torus,
    fair_share,
)
from spawnsim.models.platform import Platform

SLOW, FAST = Hockney(1e-5, 1e9), Hockney(1e-6, 1e10)
LOGGP = LogGP(L=2.5e-6, o=1.5e-6, g=1e-6, G=6e-9)
STEPS = Piecewise(((0, LOGGP), (1000, FAST), (4096, SLOW)))
NETWORKS = [
    Switch(SLOW), Switch(LOGGP), Switch(STEPS), Nodes(FAST, LOGGP, 4), Nodes(STEPS, SLOW, 8),
    FatTree(SLOW, (4, 4, 4), 1e-6, 2.0), Torus(LOGGP, (4, 4, 2), 1e-7, 2), Torus(STEPS, (5, 13), 1e-7),
    Dragonfly(SLOW, 4, 4, 4, 1e-7, 1e-6, 0.5),
    Regions.between((20, 44), [[1e-4, 0.05], [0.06, 1e-4]], [[1e9, 1e7], [2e7, 1e9]]),
    HomeLinks.alike(64, 0.02, 1e6, 1e7),
]  # fmt: skip


# ------------------------------------------------------------------------------------------------ one link


def test_hockney():
    """T = α + nβ; the card is busy for nβ, or for all of it in the telephone model; processors are free."""
    assert Switch(SLOW).cost(0, 1, 1000) == pytest.approx((0.0, 1e-6, 1.1e-5, 0.0, 1e-6))
    telephone = Switch(Hockney(1e-5, 1e9, overlap=False))
    assert telephone.cost(0, 1, 1000) == pytest.approx((0.0, 1.1e-5, 1.1e-5, 0.0, 1.1e-5))
    assert Switch(Hockney(1e-5, 1e9, serial_receive=False)).cost(0, 1, 1000).drain_s == 0.0


@pytest.mark.parametrize("nbytes", [1, 2, 1000, 10**6])
def test_loggp(nbytes):
    """T = L + 2o + (n-1)G, and the next message may start after max(g, o) + (n-1)G."""
    cost = Switch(LOGGP).cost(0, 1, nbytes)
    assert cost.flight_s + cost.receive_s == pytest.approx(2.5e-6 + 3e-6 + (nbytes - 1) * 6e-9)
    assert cost.inject_s == pytest.approx(1.5e-6 + (nbytes - 1) * 6e-9)
    assert cost.send_s == cost.receive_s == 1.5e-6


def test_loggp_empty_message_costs_one_byte():
    """No message is faster than one of a byte, and no cost is negative."""
    assert Switch(LOGGP).cost(0, 1, 0) == pytest.approx(Switch(LOGGP).cost(0, 1, 1))


def test_piecewise():
    """Each size is priced by the link of its own range; a range may begin inside another model's pieces."""
    network = Switch(STEPS)
    for nbytes, link in [(0, LOGGP), (999, LOGGP), (1000, FAST), (4095, FAST), (4096, SLOW), (10**9, SLOW)]:
        assert network.cost(0, 1, nbytes) == Switch(link).cost(0, 1, nbytes)


def test_to_oneself():
    """A message to oneself costs nothing, on every network."""
    assert all(network.cost(3, 3, 10**6) == (0, 0, 0, 0, 0) for network in NETWORKS)


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: type(network).__name__)
def test_one_and_many_cost_the_same(network):
    """Vectorised costs equal single ones to the last bit, whatever the sizes and pairs."""
    rng = np.random.default_rng(1)
    source = rng.integers(0, 64, 300)
    dest = (source + rng.integers(1, 64, 300)) % 64
    assert isinstance(network, Network)
    for nbytes in (rng.choice([0, 1, 5, 999, 1000, 5000, 10**7], 300), np.full(300, 77), 0, 4096):
        each = np.broadcast_to(nbytes, 300)
        many = [np.broadcast_to(column, 300) for column in network.costs(source, dest, nbytes)]
        for i in range(300):
            pair = int(source[i]), int(dest[i]), int(each[i])
            assert network.cost(*pair) == tuple(column[i] for column in many)


@pytest.mark.parametrize("network", NETWORKS[:2] + NETWORKS[3:4], ids=lambda network: type(network).__name__)
def test_a_known_cost_is_quick(network):
    """The kernel asks once per message: a cost that was asked before takes well under a microsecond."""
    network.cost(1, 40, 800)
    assert min(timeit.repeat(lambda: network.cost(1, 40, 800), number=2000, repeat=10)) / 2000 < 2e-6


# ---------------------------------------------------------------------------------------------- topologies


def latency(network, source, dest):
    """Return the flight time of an empty message in microseconds."""
    return round(network.cost(source, dest, 0).flight_s * 1e6, 6)


def test_a_window_in_mapped_memory_costs_its_copy():
    """α + nβ of the origin's processor within a node, and no message; between nodes, a message there and one back."""
    network = Nodes(FAST, SLOW, 2, window=Piecewise(((0, Hockney(1e-6, 1e9)), (4096, Hockney(2e-6, 4e9)))))

    def program(comm):
        window = comm.Win.Allocate(1 << 20, comm=comm)
        window.Lock_all()
        took = []
        for rank, nbytes, call in [
            (1, 1000, "Get"),
            (1, 1 << 20, "Get"),
            (1, 1 << 20, "Put"),
            (2, 1 << 20, "Get"),
        ]:
            comm.Barrier()
            if comm.rank == 0:
                begun_s = comm.clock.now()
                getattr(window, call)(np.zeros(nbytes, np.uint8), rank)
                called_s = comm.clock.now()
                window.Flush(rank)
                took += [called_s - begun_s, comm.clock.now() - begun_s]
        comm.Barrier()
        window.Unlock_all()
        window.Free()
        comm.record(took=took)

    how = {"platform": Platform("nodes", network, progress="hardware")}
    (took, *_) = run(program, 4, **how)[1].column("took").values()
    copies = (
        2e-6,
        2e-6,
        2e-6 + (1 << 20) / 4e9,
        2e-6 + (1 << 20) / 4e9,
        2e-6 + (1 << 20) / 4e9,
        2e-6 + (1 << 20) / 4e9,
    )
    assert took[:6] == pytest.approx(copies)
    assert took[6:] == pytest.approx((0.0, 2e-5 + (1 << 20) / 1e9))
    assert Switch(SLOW, window=FAST).copy_s(0, 1, 1000) == pytest.approx(1.1e-6)
    assert Switch(SLOW, window=FAST).copy_s(1, 1, 1000) is None
    assert Switch(SLOW).copy_s(0, 1, 1000) is None


def test_nodes():
    """Ranks of one node talk over the inner link, others over the outer; places are node numbers."""
    network = Nodes(FAST, SLOW, 4)
    assert [latency(network, 5, dest) for dest in (3, 4, 7, 8)] == [10, 1, 1, 10]
    assert network.place(np.arange(9)).tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2]


def test_fat_tree():
    """Paths that meet h levels higher cross 2h more switches, at the share that oversubscription leaves."""
    tree = FatTree(SLOW, (4, 4, 2), hop_latency_s=1e-6, oversubscription=4.0)
    assert [latency(tree, 0, dest) for dest in (3, 4, 15, 16, 31)] == [10, 12, 12, 14, 14]
    assert tree.cost(0, 16, 1000).inject_s == pytest.approx(16 * tree.cost(0, 1, 1000).inject_s)
    assert tree.capacity() == 32


def test_torus():
    """Hops are counted the shorter way round, in each dimension."""
    torus = Torus(SLOW, (4, 5), hop_latency_s=1e-6, ranks_per_node=2, intra=FAST)
    hops = [latency(torus, 0, 2 * node) - 9 for node in range(1, 20)]
    expected = [min(x, 4 - x) + min(y, 5 - y) for x in range(4) for y in range(5)][1:]
    assert hops == expected
    assert latency(torus, 0, 1) == 1 and torus.capacity() == 40
    assert torus.place(np.array([0, 1, 2])).tolist() == [0, 0, 1]


def test_a_few_ranks_need_little_of_a_large_network():
    """What is kept for a sender reaches as far as its receivers; more regions than two bytes can number their pairs."""
    large = Torus(SLOW, (200, 200, 200), hop_latency_s=1e-6)
    assert [latency(large, 1, dest) for dest in (0, 2, 3, 199, 200)] == [10, 10, 11, 11, 11]
    assert sum(map(len, large._rows.values())) <= 256
    many = 300
    regions = Regions((1,) * many, ((SLOW,) * many,) * (many - 1) + ((FAST,) * many,))
    assert [latency(regions, source, 0) for source in (1, many - 1)] == [10, 1]


def test_dragonfly():
    """One router, one local hop within a group, local-global-local between groups."""
    network = Dragonfly(SLOW, 2, 3, 4, local_latency_s=1e-6, global_latency_s=5e-6, global_share=0.5)
    assert [latency(network, 0, dest) for dest in (1, 2, 5, 6, 23)] == [10, 11, 11, 17, 17]
    assert network.cost(0, 23, 1000).inject_s == pytest.approx(2e-6)
    assert network.capacity() == 24


def test_regions():
    """Joins between regions may differ by direction; inside, the diagonal holds."""
    network = Regions.between((2, 3), [[1e-4, 0.05], [0.06, 2e-4]], [[1e9, 1e7], [2e7, 1e9]])
    found = [latency(network, *pair) for pair in [(0, 1), (1, 2), (2, 1), (4, 2)]]
    assert found == [100, 50_000, 60_000, 200]
    assert network.cost(4, 0, 10**6).inject_s == pytest.approx(0.05)


def test_home_links():
    """The slower of the sender's upload and the receiver's download decides; each line is busy at its own speed."""
    home = HomeLinks((0.0, 0.01, 0.03), up_Bps=(1e9, 1e6, 2e6), down_Bps=(1e9, 8e6, 4e6))
    assert home.cost(0, 1, 8_000_000) == pytest.approx((0.0, 0.008, 0.005 + 1.0, 0.0, 1.0))  # 1 s into a home
    assert home.cost(1, 2, 10**6)[:4] == pytest.approx((0.0, 1.0, 0.02 + 1.0, 0.0))  # 1 s out of one


# -------------------------------------------------------------------------------------------- bad input

BAD = [
    (lambda: Hockney(1e-6, 0.0), "bandwidth_Bps=0.0: give a finite number above 0"),
    (lambda: Hockney(1e-6, -1e9), "bandwidth_Bps"),
    (lambda: Hockney(-1e-6, 1e9), "latency_s"),
    (lambda: Hockney(math.nan, 1e9), "latency_s"),
    (lambda: LogGP(1e-6, -1e-6, 1e-6, 1e-9), "o=-1e-06"),
    (lambda: Piecewise(((10, SLOW),)), "begin with 0"),
    (lambda: Piecewise(((0, SLOW), (0, FAST))), "let the sizes rise"),
    (lambda: Switch(SLOW, call_overhead_s=0.0), "call_overhead_s"),
    (lambda: Switch(SLOW, eager_bytes=-1), "eager_bytes"),
    (lambda: Nodes(FAST, SLOW, 0), "ranks_per_node"),
    (lambda: FatTree(SLOW, ()), "radices"),
    (lambda: FatTree(SLOW, (4, 4), oversubscription=0.5), "oversubscription"),
    (lambda: Torus(SLOW, (4, 0)), "shape"),
    (lambda: Dragonfly(SLOW, 4, 4, 4, global_share=0.0), "global_share"),
    (lambda: Regions((2, 2), ((SLOW,),)), "2 regions need 2 rows"),
    (lambda: HomeLinks((0.0,), (1e6,), (0.0,)), r"down_Bps\[0\]"),
    (lambda: HomeLinks((0.0,), (1e6,), (1e6, 1e6)), "give each of them every rank"),
    (lambda: Nodes(FAST, SLOW, 4, nodes=2).check(9), "9 ranks do not fit on this Nodes: it has room for 8"),
    (lambda: Torus(SLOW, (4, 4)).check(17), "room for 16"),
    (lambda: HomeLinks.alike(3, 0.0, 1.0, 1.0).check(4), "room for 3"),
    (lambda: FlowNetwork([1.0, 0.0]), "capacities"),
    (lambda: FlowNetwork([1.0]).start(0.0, Flow((1,), 1.0)), "links 0 to 0"),
]


@pytest.mark.parametrize(("build", "words"), BAD, ids=[words for _, words in BAD])
def test_bad_input_is_reported(build, words):
    """A network that cannot be says which number is wrong and what to give."""
    with pytest.raises(ParameterError, match=words):
        build()


def test_networks_are_plain_values():
    """Equal descriptions are equal networks; all fit any number of ranks that they have room for."""
    assert Nodes(FAST, SLOW, 4) == Nodes(FAST, SLOW, 4) != Nodes(FAST, SLOW, 5)
    for network in NETWORKS:
        network.check(64)


# ---------------------------------------------------------------------------------------- shared links


def test_fair_share_by_hand():
    """The textbook's line of links, an incast with a slow sender, and a flow that crosses nothing."""
    line = fair_share([(0, 1), (0,), (1,), (1,)], np.array([1.0, 2.0]))
    assert line.tolist() == [0.5, 0.5, 0.75, 0.75]
    incast = fair_share([(0, 3), (1, 3), (2, 3)], np.array([1.0, 10.0, 10.0, 10.0]))
    assert incast.tolist() == [1.0, 4.5, 4.5]
    assert fair_share([(), (0,)], np.array([2.0])).tolist() == [math.inf, 2.0]
    assert fair_share([], np.array([2.0])).tolist() == []


@tried(45)
@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(1, 10))
def test_fair_share_is_fair(seed, count, links):
    """No link carries too much, and every flow has a full link on which nobody gets more than it does."""
    rng = np.random.default_rng(seed)
    capacities = rng.choice([1.0, 2.0, 10.0, rng.random() + 0.1], links)
    flows = [
        tuple(rng.choice(links, rng.integers(1, links + 1), replace=False).tolist()) for _ in range(count)
    ]
    rates = fair_share(flows, capacities)
    load = [
        sum(rate for rate, flow in zip(rates, flows, strict=True) if link in flow) for link in range(links)
    ]
    assert all(used <= room * (1 + 1e-9) for used, room in zip(load, capacities, strict=True))
    for rate, flow in zip(rates, flows, strict=True):
        assert any(
            load[link] >= capacities[link] * (1 - 1e-9)
            and all(other <= rate * (1 + 1e-9) for other, f in zip(rates, flows, strict=True) if link in f)
            for link in flow
        )


def test_flows_by_hand():
    """Two flows share a link, one joins late and slows both, the short one ends and the other speeds up."""
    network = FlowNetwork([100.0])
    network.start(0.0, Flow((0,), 400.0, "long"))
    assert network.next_change() == 4.0
    assert network.advance(2.0) == []
    network.start(2.0, Flow((0,), 50.0, "short"))  # the long one has 200 left; each gets 50 a second
    assert network.rates().tolist() == [50.0, 50.0]
    assert network.next_change() == 3.0
    ((time_s, flow),) = network.advance(3.0)
    assert (time_s, flow.tag) == (3.0, "short")
    ((time_s, flow),) = network.advance(100.0)  # 150 left at full speed
    assert (time_s, flow.tag) == (4.5, "long")
    assert network.next_change() == math.inf


def test_an_incast_takes_as_long_as_one_card_needs():
    """P - 1 equal flows into one rank end together, after (P-1)nβ; the serial card's closed form."""
    shared = SharedLinks.switch([1e9] * 64, [1e9] * 64)
    network = FlowNetwork(shared.capacities)
    for rank in range(1, 64):
        network.start(0.0, Flow(shared.path(rank, 0), 1e6, rank))
    done = network.advance(1.0)
    assert [each.flow.tag for each in done] == list(range(1, 64))
    assert {round(each.time_s, 12) for each in done} == {0.063}


def test_ranks_of_a_node_share_its_card():
    """Sixteen ranks that send out of one node get a sixteenth each; within it they cross no link."""
    shared = SharedLinks.nodes(32, 16, 1.6e9)
    assert shared.path(0, 1) == ()
    network = FlowNetwork(shared.capacities)
    for rank in range(16):
        network.start(0.0, Flow(shared.path(rank, 16 + rank), 1e8, rank))
    assert network.rates().tolist() == [1e8] * 16
    assert network.next_change() == 1.0


def test_time_goes_forward_only():
    """A flow that starts before now, or after another has ended unseen, is refused."""
    network = FlowNetwork([1.0])
    network.start(1.0, Flow((0,), 1.0))
    with pytest.raises(ParameterError, match="call advance first"):
        network.start(0.5, Flow((0,), 1.0))
    with pytest.raises(ParameterError, match="call advance first"):
        network.start(2.5, Flow((0,), 1.0))
    with pytest.raises(ParameterError, match="only moves forward"):
        network.advance(0.5)


@tried(30)
@given(st.integers(0, 2**32))
def test_bytes_are_conserved(seed):
    """Whatever starts when, each flow ends once, and a link is never faster than its capacity."""
    rng = np.random.default_rng(seed)
    shared = SharedLinks.switch(rng.random(6) + 0.1, rng.random(6) + 0.1)
    network = FlowNetwork(shared.capacities)
    starts, done = np.cumsum(rng.exponential(0.3, 40)), []
    sizes = rng.random(40)
    for i, time_s in enumerate(starts):
        done += network.advance(time_s)
        source = int(rng.integers(6))
        network.start(time_s, Flow(shared.path(source, (source + int(rng.integers(1, 6))) % 6), sizes[i], i))
    done += network.advance(1e9)
    assert sorted(each.flow.tag for each in done) == list(range(40))
    for link, capacity in enumerate(shared.capacities):
        own = [each for each in done if link in each.flow.links]
        if own:
            span = max(each.time_s for each in own) - min(starts[each.flow.tag] for each in own)
            assert sum(each.flow.nbytes for each in own) <= capacity * span * (1 + 1e-9)
