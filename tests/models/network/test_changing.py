"""Links that change with time, traffic of others, and TCP: all against closed forms."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.virtual_run import BANDWIDTH, LATENCY, platform, run

from spawnsim.errors import ParameterError, UnsupportedError
from spawnsim.models.collectives import Selection
from spawnsim.models.collectives.timing import finish
from spawnsim.models.network import BandwidthTrace, Changing, Hockney, HomeLinks, Nodes, Regions, Switch, Tcp
from spawnsim.models.network.changing import Capacity, Constant, OnOff, PoissonFlows
from spawnsim.models.platform import Platform, load_platform, to_toml
from spawnsim.record import manifest

QUARTER = BandwidthTrace(((0.0, BANDWIDTH, LATENCY), (4e-3, BANDWIDTH / 4, LATENCY)))


KEPT = ("call_overhead_s", "eager_bytes", "contention")  # of the test platform's network


def on(link, **how):
    """Return the test platform with another link."""
    plain = platform(**how)
    return replace(plain, network=replace(plain.network, link=link))


def test_work_is_the_integral_of_what_is_left():
    """Whole, a quarter, nothing, whole again: when work is done that begins here and there."""
    steps = [(0.0, 1.0, 0.0), (10.0, 0.25, 0.5), (20.0, 0.0, 0.0), (30.0, 1.0, 0.0)]
    begins = np.array([0.0, 0.0, 5.0, 12.0, 19.0, 20.0, 25.0, 40.0, math.nan])
    work = np.array([3.0, 10.0, 6.0, 2.0, 1.25, 1.0, 0.0, 7.0, 1.0])
    expected = [3.0, 10.0, 9.0, 8.0, 12.0, 11.0, 0.0, 7.0]
    one = Capacity(iter(steps))
    alone = [one.lasts(*pair) for pair in zip(begins[:-1].tolist(), work[:-1].tolist(), strict=True)]
    assert alone == pytest.approx(expected)
    together = Capacity(iter(steps)).all_last(begins, work)
    assert together[:-1].tolist() == alone
    assert math.isnan(together[-1])
    assert [one.latency_at(at) for at in (9.9, 10.0, 20.0)] == [0.0, 0.5, 0.0]
    assert one.next_change(10.0) == 20.0
    assert one.next_change(31.0) == math.inf


@pytest.mark.parametrize("source", [PoissonFlows(3.0, 0.4), OnOff(0.5, 1.5, 0.8)], ids=str)
def test_one_and_many_are_equal_to_the_bit(source):
    """However the steps are drawn: all at once, or as they are asked for."""
    rng = np.random.default_rng(1)
    begins, work = 50 * rng.random(300), rng.random(300) * rng.choice([0.0, 0.01, 3.0], 300)
    link = Changing(Hockney(0.0, 1.0), background=(source,))
    together = link.open().all_last(begins, work)
    one = link.open()
    assert [
        one.lasts(*pair) for pair in zip(begins.tolist(), work.tolist(), strict=True)
    ] == together.tolist()
    assert link.open(1).all_last(begins, work).tolist() != together.tolist()  # another link, other traffic
    assert replace(link, seed=1).open().all_last(begins, work).tolist() != together.tolist()


def test_traffic_takes_on_average_what_its_closed_form_says():
    """Bursts: 1 - s·on/(on + off). Flows that come at random: the mean of 1/(1 + K), K Poisson, is (1 - e^-a)/a."""
    whole = 40_000.0  # seconds of work: long enough for a mean within 2 %
    for source, left in (
        (Constant(0.3), 0.7),
        (OnOff(2.0, 6.0, 0.8), 1 - 0.8 * 2 / 8),
        (PoissonFlows(1.5, 0.8), (1 - math.exp(-1.2)) / 1.2),
    ):
        lasts = Changing(Hockney(0.0, 1.0), background=(source,)).open().lasts(0.0, whole)
        assert whole / lasts == pytest.approx(left, rel=0.02), source


def exchange(comm):
    """Rank 0 sends 10 kB at 0 s."""
    data = np.zeros(10_000, np.uint8)
    if comm.rank == 0:
        comm.Send(data, 1)
    elif comm.rank == 1:
        comm.Recv(data, 0)
        comm.record(at=comm.clock.now())


@pytest.mark.parametrize(
    ("contention", "at"),
    [("none", 29e-3), ("serial", 29e-3), ("fifo", 29e-3), ("fair", 32e-3)],
)
@pytest.mark.parametrize(
    ("eager_bytes", "later"), [(1 << 30, 0.0), (0, 2 * LATENCY)], ids=["eager", "rendezvous"]
)
def test_a_message_meets_the_change(contention, at, eager_bytes, later):
    """4 ms at 1 MB/s, the rest at a quarter. Flows (under "fair") begin after the latency, NICs inject before it."""
    link = Changing(Hockney(LATENCY, BANDWIDTH), QUARTER)
    found = run(exchange, 2, platform=on(link, contention=contention, eager_bytes=eager_bytes))[1].rows
    # What begins d later loses d at full speed, and makes up for it at a quarter.
    assert found[0][2]["at"] == pytest.approx(at + 4 * later, rel=1e-9)


@pytest.mark.parametrize("contention", ["serial", "fair"])
def test_flows_share_what_is_left(contention):
    """Two senders to one rank, half of whose link others take: twice as long again."""

    def incast(comm):
        data = np.zeros(10_000, np.uint8)
        if comm.rank:
            comm.Send(data, 0)
        else:
            comm.Recv(data, 1)
            comm.Recv(data, 2)
            comm.record(at=comm.clock.now())

    link = Changing(Hockney(LATENCY, BANDWIDTH), background=(Constant(0.5),))
    found = run(incast, 3, platform=on(link, contention=contention))[1].rows
    assert found[0][2]["at"] == pytest.approx(LATENCY + 2 * 20e-3)


@pytest.mark.parametrize("contention", ["serial", "fifo", "fair"])
def test_one_sided_accesses_meet_the_change(contention):
    """A Get whose answer of 10 kB begins after one latency: 3 ms at full speed, 7 kB at a quarter."""

    def fetch(comm):
        from spawnsim.comm import constants

        window = comm.Win.Allocate(10_000, comm=comm)
        comm.Barrier()
        begin_s = comm.clock.now()
        if comm.rank == 0:
            window.Lock(1, constants.LOCK_SHARED)
            window.Get(np.zeros(10_000, np.uint8), 1)
            window.Unlock(1)
            comm.record(took=comm.clock.now() - begin_s)
        comm.Barrier()
        window.Free()

    plain = run(fetch, 2, platform=on(Hockney(LATENCY, BANDWIDTH), contention=contention))[1].rows
    half = Changing(Hockney(LATENCY, BANDWIDTH), background=(Constant(0.5),))
    slow = run(fetch, 2, platform=on(half, contention=contention))[1].rows
    assert slow[0][2]["took"] - plain[0][2]["took"] == pytest.approx(10_000 / BANDWIDTH, rel=1e-3)


def test_a_link_that_is_down_holds_messages_until_it_is_back():
    """Nothing passes from 2 ms to 1 s; the digest is the same on a second run."""
    down = BandwidthTrace(((0.0, BANDWIDTH, LATENCY), (2e-3, 0.0, LATENCY), (1.0, BANDWIDTH, LATENCY)))
    for contention, at in (("serial", 1.0 + 8e-3 + LATENCY), ("fair", 1.0 + 9e-3)):
        there = on(Changing(Hockney(LATENCY, BANDWIDTH), down), contention=contention)
        totals, notes = run(exchange, 2, platform=there)
        assert notes.rows[0][2]["at"] == pytest.approx(at)
        assert run(exchange, 2, platform=there)[0].digest == totals.digest


# -------------------------------------------------------------------- against a simulation that shares no code
ROWS = (
    (0.0, 1.0, 0.0),
    (0.02, 0.25, 0.004),
    (0.04, 0.0, 0.0),
    (0.05, 0.0, 0.001),
    (0.08, 1.0, 0.0),
    (0.1, 0.5, 0.002),
)
SHARES = BandwidthTrace(tuple((at, share * BANDWIDTH, LATENCY + late) for at, share, late in ROWS))
FAST = 4e-3  # seconds that 20 kB take within a node, without latency


def row_at(time_s):
    """Return share, added latency and end of the row that holds at a time."""
    held = max(number for number, row in enumerate(ROWS) if row[0] <= time_s)
    return *ROWS[held][1:], ROWS[held + 1][0] if held + 1 < len(ROWS) else math.inf


def max_min(flows, capacity):
    """Return the rate of each flow, a pair of nodes: the fullest link first, then what it leaves to others."""
    rates, open_ = {}, {link: capacity for pair in flows.values() for link in pair}
    while len(rates) < len(flows):
        users = {
            link: [flow for flow, pair in flows.items() if link in pair and flow not in rates]
            for link in open_
        }
        level, link = min((open_[link] / len(who), link) for link, who in users.items() if who)
        for flow in users[link]:
            rates[flow] = level
            for each in flows[flow]:
                open_[each] -= level
    return rates


def fluid(messages, node):
    """Let bytes flow from change to change; return when each message is there, behind those of its pair before it."""
    coming, flows, left, there, at_s = [], {}, {}, {}, 0.0
    for number, (begin_s, source, dest, nbytes) in enumerate(messages):
        if node(source) == node(dest):
            there[number] = begin_s + LATENCY + nbytes / 20_000 * FAST
        else:
            coming.append((begin_s + LATENCY + row_at(begin_s)[1], number, source, dest, nbytes))
    while coming or flows:
        share, _, until_s = row_at(at_s)
        rates = max_min(flows, share * BANDWIDTH)
        ends = [at_s + left[flow] / rate for flow, rate in rates.items() if rate]
        next_s = min([until_s, *ends, *(each[0] for each in coming)])
        left = {flow: left[flow] - rates[flow] * (next_s - at_s) for flow in flows}
        at_s = next_s
        for flow in [flow for flow in flows if left[flow] < 1e-6]:
            there[flow] = at_s
            del flows[flow]
        for _, number, source, dest, nbytes in [each for each in coming if each[0] <= at_s]:
            flows[number], left[number] = ((node(source), "out"), (node(dest), "in")), nbytes
        coming = [each for each in coming if each[0] > at_s]
    last = {}
    for number, (_, source, dest, _) in enumerate(messages):
        there[number] = last[source, dest] = max(there[number], last.get((source, dest), 0.0))
    return there


@pytest.mark.parametrize("seed", range(5))
def test_random_flows_come_as_in_a_plain_simulation(seed):
    """Twelve ranks on four nodes; messages begin when links change, within nodes while those between are down, too."""
    rng = np.random.default_rng(seed)
    begins = np.sort(rng.choice(np.arange(0, 0.12, 0.005), 60))
    messages = [
        (float(begin_s), *map(int, rng.choice(12, 2, replace=False)), int(rng.integers(1, 20_000)))
        for begin_s in begins
    ]

    def program(comm):
        coming = {n: m for n, m in enumerate(messages) if m[2] == comm.rank}
        receives = [comm.Irecv(np.zeros(20_000, np.uint8), m[1], n) for n, m in coming.items()]
        sends = []
        for number, (begin_s, source, dest, nbytes) in enumerate(messages):
            if source == comm.rank:
                comm.clock.sleep(begin_s - comm.clock.now())
                sends.append(comm.Isend(np.zeros(nbytes, np.uint8), dest, number))
        for request in sends:
            request.Wait()
        for number, request in zip(coming, receives, strict=True):
            request.Wait()
            comm.record(number=number, at=comm.clock.now())

    plain = platform(contention="fair")
    links = {"intra": Hockney(LATENCY, 20_000 / FAST), "inter": Changing(Hockney(LATENCY, BANDWIDTH), SHARES)}
    nodes = Nodes(**links, ranks_per_node=3, **{name: getattr(plain.network, name) for name in KEPT})
    found = run(program, 12, platform=replace(plain, network=nodes))[1].rows
    expected, clock = fluid(messages, lambda rank: rank // 3), dict[int, float]()
    for rank, _, values in found:  # a rank looks at its messages in turn, after its own last one has begun
        own = max((m[0] for m in messages if m[1] == rank), default=0.0)
        clock[rank] = max(clock.get(rank, own), expected[values["number"]])
        assert values["at"] == pytest.approx(clock[rank], rel=1e-9), values
    assert len(found) == len(messages)


@pytest.mark.parametrize("eager_bytes", [1 << 30, 2000], ids=["eager", "rendezvous"])
@pytest.mark.parametrize("contention", ["none", "serial", "fifo", "fair"])
def test_half_of_a_link_is_a_link_of_half_the_bandwidth(contention, eager_bytes):
    """Whatever takes the other half, or adds latency: for collectives and messages of ranks that come as they come."""

    def program(comm):
        comm.clock.sleep(float(np.random.default_rng(comm.rank).random()) * 0.02)
        comm.Allreduce(np.ones(2000), np.zeros(2000))
        comm.Bcast(np.ones(1000), 3)
        comm.Sendrecv(np.ones(500), (comm.rank + 1) % 12, recvbuf=np.ones(500), source=(comm.rank - 1) % 12)
        comm.Alltoall(np.ones(120), np.ones(120))
        comm.record(at=comm.clock.now())

    def ends(link):
        there = on(link, contention=contention, eager_bytes=eager_bytes)
        return run(program, 12, platform=there)[1].column("at")

    trace, whole = BandwidthTrace(((0.0, BANDWIDTH / 2, LATENCY),)), Hockney(LATENCY, BANDWIDTH)
    half = ends(Hockney(LATENCY, BANDWIDTH / 2))
    for link in (
        Changing(whole, background=(Constant(0.5),)),
        Changing(whole, trace),
        Changing(Hockney(LATENCY / 2, BANDWIDTH), trace),
    ):
        assert ends(link) == pytest.approx(half, rel=1e-9)


def test_little_work_waits_like_more_while_nothing_passes():
    """Also where it is lost in the sum of what was done, and nothing passes in two steps one after the other."""
    steps = [(0.0, 1.0, 0.0), (1e6, 0.0, 0.0), (1e6 + 1, 0.0, 0.5), (1e6 + 2, 1.0, 0.0)]
    begins = np.array([1e6, 1e6 + 1.5])
    alone = [Capacity(iter(steps)).lasts(begin_s, 1e-12) for begin_s in begins.tolist()]
    assert alone == pytest.approx([2.0, 0.5])
    assert Capacity(iter(steps)).all_last(begins, 1e-12).tolist() == alone


def test_a_link_that_does_not_change_is_as_it_was():
    """Constant traffic of nothing: the same times to the bit, so that nothing else has changed."""
    link = Hockney(LATENCY, BANDWIDTH)

    def program(comm):
        comm.Allreduce(np.ones(1000), np.zeros(1000))
        comm.Bcast(np.ones(5000), 2)
        comm.record(at=comm.clock.now())

    plain = run(program, 7, platform=on(link))[1].rows
    assert run(program, 7, platform=on(Changing(link, background=(Constant(0.0),))))[1].rows == plain


# ------------------------------------------------------------------------------------------------------------- TCP
def slow_start(nbytes, link):
    """Send a message segment by segment: windows that double, each begun when the first of the last is acknowledged."""
    rate, trip_s = link.goodput_Bps, 2 * link.latency_s
    at_s, window = 0.0, link.initial_window * link.mss
    while nbytes > window:
        nbytes -= window
        at_s = max(at_s + window / rate, at_s + link.mss / rate + trip_s)
        window *= 2
    return at_s + nbytes / rate + link.latency_s


@pytest.mark.parametrize("nbytes", [0, 1, 2920, 2921, 8760, 8761, 100_000, 10**6, 10**7, 10**9])
@pytest.mark.parametrize("window", [None, 500_000])
def test_slow_start(nbytes, window):
    """To the byte, as a simulation by windows has it."""
    link = Tcp(0.04, 1.25e8, window=window, initial_window=2)
    assert Switch(link).cost(0, 1, nbytes).flight_s == pytest.approx(slow_start(nbytes, link), rel=1e-12)


@pytest.mark.parametrize("nbytes", [1, 14_600, 14_601, 10**5, 10**6, 10**8])
@pytest.mark.parametrize("trip_s", [0.0, 1e-4, 0.01, 0.2])
def test_rounds_of_a_slow_start(nbytes, trip_s):
    """Kurose and Ross: Q stalls of S/R + RTT, less the time in which their windows are sent, (2^Q - 1) wS/R.

    Q is the least of two counts: stalls until the window covers a round trip, and windows that the bytes fill.
    """
    link = Tcp(trip_s / 2, 1.25e8, initial_window=10)
    segment_s = link.mss / link.goodput_Bps
    until_open = max(0, math.ceil(math.log2((trip_s + segment_s) / (10 * segment_s))))
    needed = math.ceil(math.log2(nbytes / 14_600 + 1)) - 1
    stalls = min(until_open, needed)
    expected = stalls * (segment_s + trip_s) - (2**stalls - 1) * 10 * segment_s
    assert link.slow_start_s(nbytes) == pytest.approx(expected, rel=1e-9, abs=1e-15)
    assert replace(link, initial_window=None).slow_start_s(nbytes) == 0.0


def ring_on_connections(size, nbytes, link, *, cold):
    """Return the time of a ring all-reduce whose connections keep their windows, window by window."""
    rate, trip_s = link.goodput_Bps, 2 * link.latency_s
    at_s, window = 0.0, link.initial_window * link.mss
    left = window if cold else math.inf
    for _ in range(2 * (size - 1)):
        block = nbytes / size
        while block > left:  # the rest of a window, then a pause until its first segment is acknowledged
            block -= left
            at_s = max(at_s + left / rate, at_s + link.mss / rate + trip_s)
            window *= 2
            left = window if window / rate < link.mss / rate + trip_s else math.inf
        left -= block
        at_s += block / rate + link.latency_s
    return at_s


@pytest.mark.parametrize("size", [2, 4, 9])
@pytest.mark.parametrize("trip_s", [0.001, 0.04, 0.2])
def test_a_cold_all_reduce_and_a_warm_one(size, trip_s):
    """The first block of a long ring opens the window: only it begins slowly; the other rounds are warm."""
    link = Tcp(trip_s / 2, 1.25e8, initial_window=10)
    warm = Switch(replace(link, initial_window=None))
    nbytes, ring = 1e8 * size, Selection(fixed=(("allreduce", "ring"),))
    warm_s = finish("allreduce", np.zeros(size), int(nbytes), network=warm, selection=ring).times.max()
    assert warm_s == pytest.approx(ring_on_connections(size, nbytes, link, cold=False), rel=1e-9)
    cold_s = warm_s + link.slow_start_s(nbytes / size)
    assert cold_s == pytest.approx(ring_on_connections(size, nbytes, link, cold=True), rel=1e-9)
    every_s = finish(
        "allreduce", np.zeros(size), int(nbytes), network=Switch(link), selection=ring
    ).times.max()
    assert every_s == pytest.approx(warm_s + 2 * (size - 1) * link.slow_start_s(nbytes / size), rel=1e-9)


def test_goodput_is_the_least_of_line_window_and_loss():
    """1460 of 1538 bytes; a window each round trip; Mathis, Semke, Mahdavi and Ott (1997)."""
    line = Tcp(0.05, 1.25e8)
    assert line.goodput_Bps == pytest.approx(1.25e8 * 1460 / 1538)
    assert replace(line, window=1 << 20).goodput_Bps == pytest.approx((1 << 20) / 0.1)
    assert replace(line, loss=1e-4).goodput_Bps == pytest.approx(1460 / 0.1 * math.sqrt(1.5e4))
    assert replace(line, latency_s=0.0, window=1, loss=0.5).goodput_Bps == line.goodput_Bps
    assert line.farther(0.05, 0.5) == Tcp(0.1, 6.25e7)
    assert len(line.pieces()) == 1


# ------------------------------------------------------------------------------------------------------------ files
SWITCH = """
[network]
topology = "switch"
[network.link]
latency = "1 ms"
bandwidth = "8 Mbit/s"
"""


def write(folder: Path, text: str, name: str = "mine.toml") -> Path:
    """Write a file; return its path."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_files_say_how_links_change(tmp_path: Path) -> None:
    """A trace beside the platform file or within it, traffic, TCP; each is written and read back."""
    write(tmp_path, "time,bandwidth,latency\n0 s,8 Mbit/s,1 ms\n4 ms,2 Mbit/s,1 ms\n", "link.csv")
    csv = load_platform(write(tmp_path, SWITCH + 'trace = "link.csv"\n')).network
    rows = 'trace = [["0 s", "8 Mbit/s"], ["4 ms", "2 Mbit/s"]]\nrepeat = "1 h"\n'
    traffic = 'background = ["poisson:3,400ms", "onoff:1s,2s,0.5", "constant:0.1"]\nseed = 3\n'
    named = manifest.inputs(
        None, platform=str(tmp_path / "mine.toml")
    )  # what a study's key and a folder must hold
    assert sorted(named) == ["platform/link.csv", "platform/mine.toml"]
    inside = load_platform(write(tmp_path, SWITCH + rows + traffic))
    assert isinstance(csv, Switch)
    assert csv.link == Changing(Hockney(LATENCY, BANDWIDTH), QUARTER)
    both = Changing(
        Hockney(LATENCY, BANDWIDTH),
        replace(QUARTER, repeat_s=3600.0),
        (PoissonFlows(3.0, 0.4), OnOff(1.0, 2.0, 0.5), Constant(0.1)),
        seed=3,
    )
    assert inside.network == Switch(both)
    tcp = Platform("t", Nodes(both, Tcp(0.04, 1.25e8, window=1 << 20, loss=1e-5, initial_window=10), 4))
    for each in (inside, tcp):
        assert load_platform(write(tmp_path, to_toml(each))).network == each.network


def test_regions_over_tcp_and_pairs_that_change(tmp_path: Path) -> None:
    """Connections between regions are TCP's; one pair has traffic, in both directions."""
    text = """
[network]
topology = "regions"
members = [2, 2, 1]
latency = [["1 us", "40 ms", "40 ms"], ["40 ms", "1 us", "40 ms"], ["40 ms", "40 ms", "1 us"]]
bandwidth = [["1 GB/s", "1 GB/s", "1 GB/s"], ["1 GB/s", "1 GB/s", "1 GB/s"], ["1 GB/s", "1 GB/s", "1 GB/s"]]
[network.tcp]
initial_window = 10
[[network.changes]]
between = [0, 2]
background = "constant:0.5"
"""
    network = load_platform(write(tmp_path, text)).network
    assert isinstance(network, Regions)
    tcp, traffic = Tcp(0.04, 1e9, initial_window=10), (Constant(0.5),)
    joins = [[Hockney(1e-6, 1e9) if a == b else tcp for b in range(3)] for a in range(3)]
    joins[0][2] = joins[2][0] = Changing(tcp, background=traffic)  # type: ignore[assignment,call-overload]
    assert network.joins == tuple(map(tuple, joins))
    whole, half = network.cost(0, 2, 10**6), network.cost_at(0, 4, 10**6, 1.0)
    assert half.flight_s - whole.flight_s == pytest.approx(10**6 / tcp.goodput_Bps)
    with pytest.raises(UnsupportedError):
        to_toml(Platform("r", network))
    bad = text.replace("[0, 2]", "[0, 3]")
    with pytest.raises(ParameterError, match=r"mine.toml, line 10: .*between: \[0, 3\]: write two regions"):
        load_platform(write(tmp_path, bad))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('trace = "none.csv"', "trace: {folder}/none.csv: cannot be read"),
        ('trace = "bad.csv"', "trace: {folder}/bad.csv, line 3: bandwidth: 'fast' is not a bandwidth"),
        ('trace = "head.csv"', "trace: {folder}/head.csv, line 1: the columns of a trace are time,bandwidth"),
        ('trace = "rows.csv"', "trace: {folder}/rows.csv: the trace has no rows"),
        ("trace = 3", "trace: 3: write a list of rows"),
        ('trace = [["0 s"]]', "trace: row 0: ['0 s']: write"),
        ('trace = [["1 s", "8 Mbit/s"]]', "begin at 0 s and rise"),
        ('trace = [["0 s", "8 Mbit/s"], ["1 s", "0 Mbit/s"]]', "the bandwidth ends at 0"),
        ('trace = [["0 s", "8 Mbit/s", "1 us"]]', "the link's own, 0.001 s, is the least"),
        ('trace = [["0 s", "8 Mbit/s"], ["2 s", "1 Mbit/s"]]\nrepeat = "1 s"', "repeat=1 s: must be after"),
        ('repeat = "1 s"', "repeat: nothing repeats"),
        ('background = "poisson:1e9,1s"', "changes the link 2e+09 times a second, and at most 10,000"),
        ('background = "poisson:1e9,1ns"', "mean share, constant:0.367879441"),
        ('background = "onoff:1ns,3ns,0.5"', "mean share, constant:0.125"),
        ('trace = [["0 s", "1 Gbit/s"], ["1 ns", "2 Gbit/s"]]\nrepeat = "3 ns"', "changes a second"),
        ('background = "rain:3"', "background 'rain:3' is not of a known form: constant:SHARE"),
        ('background = "constant:1"', "background 'constant:1': share 1.0"),
        ('model = "tcp"\nmss = "0 B"', "mss=0"),
        ('model = "tcp"\nloss = 1.0', "loss=1.0"),
        ("initial_window = 3", "no such key"),
    ],
)
def test_bad_files_are_reported(tmp_path: Path, lines: str, words: str) -> None:
    """File, line and key."""
    write(tmp_path, "time,bandwidth\n0 s,8 Mbit/s\n1 s,fast\n", "bad.csv")
    write(tmp_path, "when,rate\n", "head.csv")
    write(tmp_path, "\ufefftime,bandwidth\n\n", "rows.csv")  # with a byte order mark, as of a spreadsheet
    expected = words.replace("{folder}", str(tmp_path))
    with pytest.raises(ParameterError, match=r"mine.toml, line \d+: .*" + re.escape(expected)):
        load_platform(write(tmp_path, f"{SWITCH}{lines}\n"))


def test_what_cannot_change_says_so() -> None:
    """Without a reason a link is a plain one; home lines have none."""
    with pytest.raises(ParameterError, match="a trace or background"):
        Changing(Hockney(1e-3, 1e6))
    with pytest.raises(UnsupportedError, match="HomeLinks do not change"):
        HomeLinks.alike(2, 0.01, 1e6, 1e7).cost_at(0, 1, 1, 0.0)
