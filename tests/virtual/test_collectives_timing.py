"""Collectives' times: against closed forms, against a plain interpreter of messages, and among themselves."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spawnsim.errors import ParameterError
from spawnsim.virtual.collectives import (
    ALGORITHMS,
    Edges,
    Plan,
    Planner,
    Selection,
    Timing,
    depends,
    finish,
    names,
)
from spawnsim.virtual.network import Hockney, LogGP, Network, Nodes, Switch

SIZES = (2, 3, 5, 8, 16, 64, 1000)
ALPHA, BANDWIDTH, GAMMA = 1e-5, 1.25e9, 1e-10
BETA = 1 / BANDWIDTH
NAMED = [(operation, name) for operation, known in ALGORITHMS.items() for name in known]
NAMED += [("bcast", "chain"), ("allreduce", "two_level"), ("allreduce", "two_level:ring")]
REDUCING = {"reduce", "allreduce", "reduce_scatter", "scan", "exscan"}


def switch(overlap=True, gamma=GAMMA, alpha=ALPHA, bandwidth=BANDWIDTH):
    """Return one switch of Hockney links."""
    return Switch(Hockney(alpha, bandwidth, overlap=overlap), gamma_s_per_B=gamma)


def plan(network, operation, name, size, nbytes, root=0, **options) -> Plan:
    """Return the plan of a named algorithm."""
    selection = Selection(fixed=((operation, name),), **options)
    return Planner(network, selection).plan(operation, size, nbytes, root)


def makespan(network, operation, name, size, nbytes, **options):
    """Return when the last rank leaves if all arrive at 0."""
    return plan(network, operation, name, size, nbytes, **options).finish(np.zeros(size), network).times.max()


def _bit(size, bit):
    """Return how many of 0 to P-1 have this bit set."""
    return sum(rank >> bit & 1 for rank in range(size))


def log(size):
    """Return ⌈lg P⌉."""
    return (size - 1).bit_length()


def core(size):
    """Return P', the greatest power of two in P, and whether there is a rest."""
    power = 1 << (size.bit_length() - 1)
    return power, int(power != size)


def rabenseifner(size, n, a, b, c):
    """2 lg P' α + 2(P'-1)/P' nβ + (P'-1)/P' nγ, and 2(α + nβ) + nγ where P is no power of two."""
    power, rest = core(size)
    share = (power - 1) / power * n
    return 2 * log(power) * a + 2 * share * b + share * c + rest * (2 * (a + n * b) + n * c)


def rabenseifner_reduce(size, n, a, b, c):
    """The same with one step less for the rest: nobody has to be told."""
    return rabenseifner(size, n, a, b, c) - core(size)[1] * (a + n * b)


def doubling(size, n, a, b, c):
    """⌊lg P⌋(α + nβ + nγ), and 2(α + nβ) + nγ where P is no power of two."""
    power, rest = core(size)
    return log(power) * (a + n * (b + c)) + rest * (2 * (a + n * b) + n * c)


# With the telephone model (a card is busy for all of α + nβ) the textbook's forms hold for any number of ranks.
# m: bytes of a block; n: bytes of a vector; a, b, c: α, β, γ.
TEXTBOOK = {
    ("barrier", "dissemination"): lambda P, n, a, b, c: log(P) * a,
    ("barrier", "tree"): lambda P, n, a, b, c: 2 * log(P) * a,
    ("bcast", "linear"): lambda P, n, a, b, c: (P - 1) * (a + n * b),
    ("bcast", "binomial"): lambda P, n, a, b, c: log(P) * (a + n * b),
    ("bcast", "scatter_ring"): lambda P, n, a, b, c: (log(P) + P - 1) * a + 2 * (P - 1) / P * n * b,
    ("reduce", "binomial"): lambda P, n, a, b, c: log(P) * (a + n * b + n * c),
    ("reduce", "rabenseifner"): rabenseifner_reduce,
    ("allreduce", "recursive_doubling"): doubling,
    ("allreduce", "rabenseifner"): rabenseifner,
    ("allreduce", "ring"): lambda P, n, a, b, c: 2 * (P - 1) * a + (P - 1) / P * n * (2 * b + c),
    ("allreduce", "reduce_bcast"): lambda P, n, a, b, c: log(P) * (2 * a + n * (2 * b + c)),
    ("gather", "linear"): lambda P, m, a, b, c: (P - 1) * (a + m * b),
    ("scatter", "linear"): lambda P, m, a, b, c: (P - 1) * (a + m * b),
    ("gather", "binomial"): lambda P, m, a, b, c: log(P) * a + (P - 1) * m * b,
    ("scatter", "binomial"): lambda P, m, a, b, c: log(P) * a + (P - 1) * m * b,
    ("allgather", "ring"): lambda P, m, a, b, c: (P - 1) * (a + m * b),
    ("allgather", "bruck"): lambda P, m, a, b, c: log(P) * a + (P - 1) * m * b,
    ("alltoall", "pairwise"): lambda P, m, a, b, c: (P - 1) * (a + m * b),
    ("alltoall", "linear"): lambda P, m, a, b, c: (P - 1) * (a + m * b),
    ("reduce_scatter", "pairwise"): lambda P, m, a, b, c: (P - 1) * (a + m * (b + c)),
    ("reduce_scatter", "ring"): lambda P, m, a, b, c: (P - 1) * (a + m * (b + c)),
    ("scan", "linear"): lambda P, n, a, b, c: (P - 1) * (a + n * (b + c)),
    ("scan", "recursive_doubling"): lambda P, n, a, b, c: log(P) * (a + n * (b + c)),
}
PIPELINED = {  # where cards overlap latency, a star takes one latency only
    ("bcast", "linear"): lambda P, n, a, b, c: a + (P - 1) * n * b,
    ("gather", "linear"): lambda P, m, a, b, c: a + (P - 1) * m * b,
    ("scatter", "linear"): lambda P, m, a, b, c: a + (P - 1) * m * b,
    ("alltoall", "linear"): lambda P, m, a, b, c: a + (P - 1) * m * b,
    ("alltoall", "bruck"): lambda P, m, a, b, c: log(P) * a + sum(_bit(P, k) for k in range(log(P))) * m * b,
    ("bcast", "chain"): lambda P, n, a, b, c: (P - 1) * (a + 65536 * b) + (n / 65536 - 1) * 65536 * b,
}
# α, β, γ. The forms add up arithmetic that really goes on beside other traffic where P is no power of two.
LIMITS = {"both": (ALPHA, BETA, 0.0), "latency": (ALPHA, 1e-30, 0.0), "bandwidth": (0.0, BETA, 0.0)}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("key", TEXTBOOK, ids=" ".join)
@pytest.mark.parametrize("limit", LIMITS)
def test_textbook_form(key, size, limit):
    """Every algorithm takes what its closed form says, in general and in both limits."""
    alpha, beta, gamma = LIMITS[limit]
    network = switch(overlap=False, gamma=gamma, alpha=alpha, bandwidth=1 / beta)
    expected = TEXTBOOK[key](size, 1 << 20, alpha, beta, gamma)
    assert makespan(network, *key, size, 1 << 20) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("size", [2, 8, 16, 64])
@pytest.mark.parametrize("key", TEXTBOOK | PIPELINED, ids=" ".join)
def test_powers_of_two_with_arithmetic(key, size):
    """With cards that overlap latency, as they do by default, the forms still hold where P is a power of two."""
    expected = (TEXTBOOK | PIPELINED)[key](size, 1 << 20, ALPHA, BETA, GAMMA)
    assert makespan(switch(), *key, size, 1 << 20) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("key", TEXTBOOK | PIPELINED, ids=" ".join)
def test_bandwidth_limit_by_default(key, size):
    """Without latency the two kinds of cards are one, for any number of ranks."""
    expected = (TEXTBOOK | PIPELINED)[key](size, 1 << 20, 0.0, BETA, 0.0)
    assert makespan(switch(alpha=0.0, gamma=0.0), *key, size, 1 << 20) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("size", SIZES)
def test_latency_limit_by_default(size):
    """Empty messages leave a card at once: a star takes one latency, a binomial tree its depth."""
    depth = max(rank.bit_count() for rank in range(size))
    expected = {
        ("bcast", "linear"): 1, ("gather", "linear"): 1, ("alltoall", "linear"): 1,
        ("bcast", "binomial"): depth, ("gather", "binomial"): depth, ("reduce", "binomial"): depth,
    }  # fmt: skip
    found = {key: makespan(switch(), *key, size, 0) / ALPHA for key in expected}
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "key", [("allgather", "recursive_doubling"), ("reduce_scatter", "recursive_halving")]
)
def test_blocks_with_a_rest(key, size):
    """Doubling over blocks: the textbook's form for powers of two, two steps and at most twice the bytes else."""
    m, (power, rest) = 4096, core(size)
    least = log(power) * ALPHA + (size - 1) * m * BETA
    found = makespan(switch(gamma=0.0), *key, size, m)
    assert least - 1e-12 <= found <= least + rest * (2 * ALPHA + (1.1 * size + 1) * m * BETA) + 1e-12
    steps = makespan(switch(), *key, size, 0) / ALPHA
    assert log(power) + rest - 1e-9 <= steps <= log(power) + 2 * rest + 1e-9


SMPI = {  # simulated microseconds, SMPI 3.32 in raw mode, 1 MiB, 10 us, 1.25 GB/s
    ("recursive_doubling", 16): 3396.5, ("recursive_doubling", 64): 5094.3,
    ("ring", 16): 1874.3, ("ring", 64): 2914.2,
    ("rabenseifner", 16): 1654.0, ("rabenseifner", 64): 1772.7,
}  # fmt: skip


@pytest.mark.parametrize(("key", "micros"), SMPI.items(), ids=str)
def test_golden_values_of_another_simulator(key, micros):
    """SMPI's message-by-message simulation of the same platform is within 0.5 %."""
    assert makespan(switch(gamma=0.0), "allreduce", *key, 1 << 20) * 1e6 == pytest.approx(micros, rel=0.005)


@pytest.mark.parametrize("size", SIZES)
def test_loggp_forms(size):
    """Under LogGP a step costs L + 2o + (n-1)G, and a star's messages are a gap apart."""
    L, o, g, G = 2.5e-6, 1.5e-6, 1.0e-6, 6e-9  # noqa: N806 - the paper's letters
    network, n = Switch(LogGP(L, o, g, G)), 2048
    step, gap = L + 2 * o + (n - 1) * G, max(g, o) + (n - 1) * G
    assert makespan(network, "bcast", "linear", size, n) == pytest.approx(step + (size - 2) * gap)
    assert makespan(network, "gather", "linear", size, n) == pytest.approx(step + (size - 2) * gap)
    assert makespan(network, "barrier", "dissemination", size, 0) == pytest.approx(log(size) * (L + 2 * o))
    ring = 2 * (size - 1) * (L + 2 * o + max(n / size - 1, 0) * G)
    assert makespan(network, "allreduce", "ring", size, n) == pytest.approx(ring)


def test_neighbours_share_one_card():
    """Averaging with d neighbours takes α + d nβ, on a ring or on any regular graph."""
    rank, shift = np.meshgrid(np.arange(50), [1, 2, 7, 49])
    edges = Edges(rank.ravel(), (rank + shift).ravel() % 50, 10**6)
    found = finish("neighbor_allgather", np.zeros(50), edges, network=switch())
    assert found.times.max() == pytest.approx(ALPHA + 4 * 10**6 * BETA)
    assert (found.messages, found.nbytes) == (200, 200 * 10**6)


# ------------------------------------------------------------------------------------ the plain interpreter


def interpret(one: Plan, network: Network, arrivals, ranks):
    """Run a plan message by message, each rank as far as it gets, and return when each leaves."""
    size = len(arrivals)
    clock, out_free, in_free = list(map(float, arrivals)), [-np.inf] * size, [-np.inf] * size
    queues: dict[tuple[int, int], deque] = {}

    def program(rank):
        me = int(ranks[rank])
        for step in one.rounds_of(rank):
            for dest, nbytes in step.sends:
                send_s, inject_s, flight_s, receive_s = network.cost(me, int(ranks[dest]), nbytes)
                begin = max(clock[rank], out_free[rank])
                out_free[rank] = begin + inject_s
                queues.setdefault((rank, dest), deque()).append((begin + flight_s, receive_s, nbytes))
                clock[rank] += send_s
            for source, nbytes, reduced in step.receives:
                while not queues.get((source, rank)):
                    yield
                arrival, receive_s, sent = queues[source, rank].popleft()
                assert sent == nbytes
                into = network.drain(int(ranks[source]), me, nbytes)
                in_free[rank] = max(arrival, in_free[rank] + into) if into else in_free[rank]
                arrival = in_free[rank] if into else arrival
                clock[rank] = max(clock[rank], arrival) + receive_s + reduced * network.gamma_s_per_B

    going = [program(rank) for rank in range(size)]
    while going:
        still = [each for each in going if next(each, "over") is None]
        assert len(still) < len(going) or any(queues.values()), "stuck"
        going = still
    assert not any(queues.values()), "a message that nobody takes"
    return np.maximum(clock, out_free)


NETWORKS = [
    switch(), switch(overlap=False), Switch(LogGP(2.5e-6, 1.5e-6, 4e-6, 6e-9), gamma_s_per_B=1e-10),
    Nodes(Hockney(1e-6, 1e10), LogGP(1e-5, 1e-6, 2e-6, 1e-9), 4, gamma_s_per_B=1e-10),
]  # fmt: skip


@st.composite
def calls(draw):
    """Draw a collective: who, when, what, how."""
    operation, name = draw(st.sampled_from(NAMED))
    size = draw(st.integers(1, 20))
    if name == "scatter_doubling":
        size = 1 << draw(st.integers(0, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    nbytes = draw(st.sampled_from([0, 1, 7, 1000, 300_000]))
    blocked = (
        operation in ("gather", "scatter", "allgather", "alltoall", "reduce_scatter") and name != "bruck"
    )
    if blocked and draw(st.booleans()):
        nbytes = rng.integers(0, 5000, (size, size) if operation == "alltoall" else size)
    root = draw(st.integers(0, size - 1)) if operation in ("bcast", "reduce", "gather", "scatter") else 0
    ranks = rng.permutation(40)[:size]
    arrivals = rng.choice([0.0, 1e-4, 1e-2]) * rng.random(size) + rng.choice([0.0, 100.0])
    network = draw(st.sampled_from(NETWORKS))
    selection = Selection(fixed=((operation, name),), segment_bytes=50_000)
    return (
        Planner(network, selection).plan(operation, size, nbytes, root, ranks=ranks),
        network,
        arrivals,
        ranks,
    )


@settings(max_examples=400, deadline=None)
@given(calls())
def test_dataflow_equals_messages(call):
    """The vectorised times are those of a plain message-by-message run, for skewed arrivals on any network."""
    one, network, arrivals, ranks = call
    expected = interpret(one, network, arrivals, ranks)
    assert one.finish(arrivals, network, ranks).times == pytest.approx(expected, rel=1e-9, abs=1e-15)


@settings(max_examples=200, deadline=None)
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
    assert np.isnan(one.finish(partial, network, ranks).times[rank])


def test_a_root_leaves_before_the_late():
    """The root of a broadcast leaves when its card is done; a leaf of a gather likewise; nobody waits for strangers."""
    arrivals = np.array([0.0, 5.0, 0.0, 0.0])
    times = finish("bcast", arrivals, 1000, network=switch()).times
    assert times[0] < 1e-4 and times[2] < 1e-4 and times[3] < 1e-4 and times[1] >= 5.0
    assert finish("gather", arrivals, 1000, network=switch()).times[3] < 1e-4
    assert depends("bcast", "binomial", 8, rank=7) == {0, 4, 6, 7}
    assert depends("bcast", "binomial", 8, 1, rank=0) == {1, 5, 7, 0}
    assert depends("allreduce", "ring", 8, rank=3) is None


@pytest.mark.parametrize("time", [0.0, 1.0, 1e6 / 3])
def test_together_is_remembered(time):
    """Ranks that arrive together leave at the very floats at which they left the first time, shifted."""
    timing, arrivals = Timing(switch()), np.full(100, time)
    cold, hot = (timing.finish("allreduce", arrivals, 12345) for _ in range(2))
    assert (cold.times == hot.times).all()
    direct = timing.plan("allreduce", 100, 12345).finish(arrivals, timing.network)
    assert hot.times == pytest.approx(direct.times, rel=1e-12)
    assert (hot.times == direct.times).all() or time
    assert cold[1:] == direct[1:]


def test_counts():
    """Messages and bytes are those of the algorithm: a ring passes 2(P-1)n in 2P(P-1) messages, whatever divides."""
    found = finish("allreduce", np.zeros(7), 1000, network=switch(), selection=Selection.parse("ring"))
    assert (found.messages, found.nbytes) == (84, 12000)
    found = finish("barrier", np.zeros(9), 0, network=switch())
    assert (found.messages, found.nbytes) == (36, 0)


def test_two_levels_cross_the_wire_once():
    """On nodes of 8 the two-level allreduce beats the flat one, and one rank is as good as none."""
    network = Nodes(Hockney(1e-6, 1e11), Hockney(1e-5, 1e9), 8)
    flat = makespan(network, "allreduce", "recursive_doubling", 64, 10**6)
    assert makespan(network, "allreduce", "two_level", 64, 10**6) < 1.1 * flat
    inner = 6 * (1e-6 + 1e6 / 1e11) + 3 * (1e-5 + 1e6 / 1e9)
    assert makespan(network, "allreduce", "two_level", 64, 10**6) == pytest.approx(inner)
    assert makespan(network, "allreduce", "two_level", 1, 10**6) == 0.0


# ------------------------------------------------------------------------------------------------ selection


def test_selection_by_size():
    """Small messages take few steps, large ones send few bytes, as the libraries decide."""
    mpich, openmpi = Planner(switch()), Planner(switch(), Selection.parse("openmpi"))
    assert [mpich.plan("allreduce", 10, n).algorithm for n in (2048, 2049)] == [
        "recursive_doubling",
        "rabenseifner",
    ]
    assert [openmpi.plan("allreduce", 10, n).algorithm for n in (9999, 10000)] == [
        "recursive_doubling",
        "ring",
    ]
    assert [mpich.plan("bcast", 16, n).algorithm for n in (12287, 12288, 524288)] == [
        "binomial", "scatter_doubling", "scatter_ring",
    ]  # fmt: skip
    assert mpich.plan("alltoallv", 3, np.arange(9).reshape(3, 3)).algorithm == "linear"
    assert [mpich.plan("alltoall", 8, n).algorithm for n in (256, 257, 32769)] == [
        "bruck",
        "linear",
        "pairwise",
    ]


@pytest.mark.parametrize("library", ["mpich", "openmpi"])
def test_every_choice_can_be_laid_out(library):
    """Whatever a library decides, for whatever size, is an algorithm that there is."""
    planner = Planner(switch(), Selection.parse(library))
    for operation in ALGORITHMS:
        for size in (1, 2, 7, 8, 16, 100):
            for nbytes in (0, 100, 1000, 20_000, 500_000, 5_000_000):
                one = planner.plan(operation, size, nbytes)
                assert one.algorithm in names(operation)
                assert np.isfinite(one.finish(np.zeros(size), planner.network).times).all()


def test_selection_by_name():
    """One word stands for all operations that know it; what nobody knows is refused."""
    assert dict(Selection.parse("ring").fixed) == {
        "allreduce": "ring",
        "allgather": "ring",
        "reduce_scatter": "ring",
    }
    with pytest.raises(ParameterError, match="no library and no algorithm is called 'rnig'"):
        Selection.parse("rnig")
    with pytest.raises(ParameterError, match="choose one of binomial, linear"):
        Selection.parse("bcast=ring")
    with pytest.raises(ParameterError, match="no collective is called 'bcats'"):
        finish("bcats", np.zeros(2), 0, network=switch())


def test_sizes_that_do_not_fit():
    """A block per rank means as many as ranks; an alltoall by Bruck means equal blocks."""
    with pytest.raises(ParameterError, match="shape"):
        finish("gatherv", np.zeros(3), np.array([1, 2]), network=switch())
    with pytest.raises(ParameterError, match="at least 0"):
        finish("bcast", np.zeros(3), -1, network=switch())
    with pytest.raises(ParameterError, match="pairwise or linear"):
        unequal = np.arange(16).reshape(4, 4)
        finish("alltoall", np.zeros(4), unequal, network=switch(), selection=Selection.parse("bruck"))
