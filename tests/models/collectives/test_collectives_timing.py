"""Collectives' times against closed forms, golden values of another simulator, and each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.collective_plans import ALPHA, BETA, GAMMA, SIZES, makespan, plan, switch

from spawnsim.models.collectives import Edges, Selection, Timing, finish
from spawnsim.models.network import Hockney, LogGP, Nodes, Switch


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


def double_tree(size, n, a, b, c, segments=8):
    """(⌈lg P⌉ + S - 1)(2α + s(4β + γ)) - 2sβ with segments of s = n/2S; less for 2 and 3 ranks: one child."""
    rounds, segment = log(size) + segments - 1, n / (2 * segments)
    return 2 * rounds * a + segment * (rounds * (4 * b + c) - {2: 2 * rounds, 3: 4}.get(size, 2) * b)


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
    ("allreduce", "segmented_ring"): lambda P, n, a, b, c: (
        2 * (P - 1) * a + (P - 1) / P * n * (2 * b + c / 2 + max(c - b, 0) / 2)
    ),
    ("allreduce", "double_tree"): double_tree,
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


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64, 256, 1024])
@pytest.mark.parametrize("segments", [1, 2, 5, 16])
def test_a_double_tree_takes_its_closed_form(size, segments):
    """Every rank is inner in one tree at most, and no card has more than two segments to send or receive in a round."""
    nbytes = 2 * segments * 65536
    expected = double_tree(size, nbytes, ALPHA, BETA, GAMMA, segments)
    assert makespan(switch(), "allreduce", "double_tree", size, nbytes) == pytest.approx(expected, rel=1e-9)
    rounds = plan(switch(), "allreduce", "double_tree", size, nbytes).schedule.rounds
    assert len(rounds) == 2 * (log(size) + segments - 1)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 12, 31, 100])
def test_both_trees_of_a_double_tree_add_all_ranks_at_all_ranks(size):
    """Followed block by block, every rank ends with the sum of all ranks, each once."""
    schedule = plan(switch(), "allreduce", "double_tree", size, 6 * 65536).schedule
    sums = np.broadcast_to(np.eye(size, dtype=int)[:, None], (size, schedule.parts, size)).copy()
    for each in schedule.rounds:
        before = sums.copy()
        for lane in each.lanes:
            source, dest, block = lane.pattern.source, lane.pattern.dest, lane.first
            assert len(set(source)) == len(source) and len(set(dest)) == len(dest)
            sums[dest, block] = before[source, block] + (sums[dest, block] if each.reduces else 0)
    assert (sums == 1).all()


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64, 256, 1024])
@pytest.mark.parametrize("name", ["ring", "recursive_doubling", "rabenseifner", "reduce_bcast"])
def test_each_dtype_is_reduced_at_its_own_speed(name, size):
    """γ in the closed form is that of the dtype; other dtypes take the default. The cache tells them apart."""
    speeds = {"float32": 2 * GAMMA, "bfloat16": 5 * GAMMA, "int64": GAMMA, "": GAMMA}
    network = replace(switch(), gamma_of=(("float32", 2 * GAMMA), ("bfloat16", 5 * GAMMA)))
    timing = Timing(network, Selection(fixed=(("allreduce", name),)))
    for dtype, gamma in speeds.items():
        expected = TEXTBOOK["allreduce", name](size, 1 << 20, ALPHA, BETA, gamma)
        found = timing.finish("allreduce", np.zeros(size), 1 << 20, dtype=dtype).times.max()
        assert found == pytest.approx(expected, rel=1e-9)


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


@pytest.mark.parametrize("time", [0.0, 1.0, 1e6 / 3])
def test_together_is_remembered(time):
    """Ranks that arrive together leave at the very floats at which they left the first time, shifted."""
    timing, arrivals = Timing(switch()), np.full(100, time)
    cold, hot = (timing.finish("allreduce", arrivals, 12345) for _ in range(2))
    assert (cold.times == hot.times).all()
    direct = timing.plan("allreduce", 100, 12345).finish(arrivals, timing.network)
    assert hot.times == pytest.approx(direct.times, rel=1e-12)
    assert (hot.times == direct.times).all() or time
    assert cold[1:3] == direct[1:3]
    assert hot.out_free == pytest.approx(direct.out_free, rel=1e-12)


def test_long_messages_ask_first():
    """α there and α back before each, once its receiver has come; short ones leave at once; own blocks are copied."""
    network = replace(switch(gamma=0.0), eager_bytes=1000, collective_rendezvous=True, copy_s_per_B=1e-10)
    for size, rounds in ((2, 1), (16, 4)):
        for nbytes, trips in ((1000, 1), (1001, 3)):
            took = makespan(network, "bcast", "binomial", size, nbytes)
            assert took == pytest.approx(rounds * (trips * ALPHA + nbytes * BETA), rel=1e-9)
            took = makespan(network, "allgather", "ring", size, nbytes)
            assert took == pytest.approx(
                (size - 1) * (trips * ALPHA + nbytes * BETA) + nbytes * 1e-10, rel=1e-9
            )
    one = plan(network, "bcast", "binomial", 2, 2000)
    late = one.finish(np.array([0.0, 1.0]), network).times  # the root does not stay for who comes later
    assert late == pytest.approx((2 * ALPHA + 2000 * BETA, 1.0 + 2 * ALPHA + 2000 * BETA))
    early = one.finish(np.array([1.0, 0.0]), network).times
    assert early[1] == pytest.approx(1.0 + 3 * ALPHA + 2000 * BETA)
    plain = replace(network, copy_s_per_B=0.0)
    gather = plan(network, "gather", "linear", 4, 100)
    copies = gather.finish(np.zeros(4), network).times - gather.finish(np.zeros(4), plain).times
    assert copies == pytest.approx([100e-10, 0.0, 0.0, 0.0], abs=1e-15)


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


@pytest.mark.parametrize("operation", ["bcast", "reduce", "gather", "scatter", "scan", "exscan"])
def test_who_leaves_early_leaves_at_the_same_time_to_the_last_bit(operation):
    """Whether the others have come at that time too, come later, or are not known to come."""
    rng, network, left = np.random.default_rng(1), switch(), 0
    for size in (2, 5, 13, 31):
        for nbytes in (8, 3000, 100_000):
            timing, root = Timing(network), int(rng.integers(size))
            arrivals = np.full(size, rng.random())
            some = rng.random(size) < 0.7
            found = timing.plan(operation, size, nbytes, root).finish(
                np.where(some, arrivals, np.nan), network
            )
            early = ~np.isnan(found.times)
            left += early.sum()
            for others in (arrivals, np.where(some, arrivals, arrivals + 1.0)):
                whole = timing.finish(operation, others, nbytes, root)
                assert np.array_equal(whole.times[early], found.times[early])
    assert left
