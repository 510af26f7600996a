"""Messages that meet: at one receiver's card in turn, on shared links fairly; eager ones and rendezvous data alike."""

import numpy as np
import pytest
from support.virtual_run import BANDWIDTH, LATENCY, platform, run

from spawnsim.errors import ParameterError
from spawnsim.models.collectives import Selection, finish
from spawnsim.models.network import FatTree, Hockney, HomeLinks, Nodes, Switch
from spawnsim.models.platform import Platform
from spawnsim.virtual.engine.completion import ReceivingNic
from spawnsim.virtual.mpi.requests import Request

NBYTES, SENDERS = 10_000, 5
BYTES_S = NBYTES / BANDWIDTH
IN_TURN = [(1 + k) * BYTES_S for k in range(SENDERS)]
TOGETHER = [SENDERS * BYTES_S] * SENDERS


def incast(comm):
    """All send to rank 0 at once, which is ready for all of them and notes when each is there."""
    if comm.rank:
        comm.Send(np.zeros(NBYTES, np.uint8), 0)
        return
    pending = [comm.Irecv(np.zeros(NBYTES, np.uint8), source) for source in range(1, comm.size)]
    for _ in pending:
        Request.Waitany(pending)
        comm.record(at=comm.clock.now())


def arrivals(program=incast, ranks=SENDERS + 1, **how):
    """Return what a program records as `at`, in order."""
    return [values["at"] for _, _, values in run(program, ranks, platform=platform(**how))[1].rows]


@pytest.mark.parametrize(("eager_bytes", "latencies"), [(1 << 30, 1), (0, 3)], ids=["eager", "rendezvous"])
@pytest.mark.parametrize(
    ("contention", "expected"),
    [("none", [BYTES_S] * SENDERS), ("serial", IN_TURN), ("fifo", IN_TURN), ("fair", TOGETHER)],
)
def test_an_incast(eager_bytes, latencies, contention, expected):
    """Five messages to one rank: at once, one after the other, or all slowly, and the last ones at the same time."""
    found = arrivals(eager_bytes=eager_bytes, contention=contention)
    assert found == pytest.approx([latencies * LATENCY + each for each in expected])


@pytest.mark.parametrize("contention", ["none", "serial", "fifo"])
def test_messages_and_dataflow_agree_on_an_incast(contention):
    """The root of a linear gather leaves when it does that takes the same messages by `Recv`."""

    def gather(comm):
        if comm.rank:
            comm.Send(np.zeros(NBYTES, np.uint8), 0)
        else:
            for source in range(1, comm.size):
                comm.Recv(np.zeros(NBYTES, np.uint8), source)
            comm.record(at=comm.clock.now())

    linear, network = Selection(fixed=(("gather", "linear"),)), platform(contention=contention).network
    times = finish("gather", np.zeros(SENDERS + 1), NBYTES, network=network, selection=linear).times
    assert arrivals(gather, contention=contention) == pytest.approx([times[0]], rel=1e-12)


@pytest.mark.parametrize("contention", ["serial", "fifo"])
def test_a_late_message_is_not_charged_for_an_early_one(contention):
    """What came while the rank waited for another is there already; what is small does not wait for what is large."""

    def main(comm):
        if comm.rank == 0:
            for source in (1, 2, 3):
                comm.Recv(np.zeros(NBYTES, np.uint8), source)
                comm.record(at=comm.clock.now())
            return
        with comm.compute({1: 1.0, 2: 0.1, 3: 1.0 - LATENCY / 2}[comm.rank]):
            pass
        comm.Send(np.zeros(0 if comm.rank == 3 else NBYTES, np.uint8), 0)

    late = 1.0 + LATENCY + BYTES_S
    assert arrivals(main, ranks=4, contention=contention) == pytest.approx([late] * 3)


@pytest.mark.parametrize("contention", ["serial", "fifo", "fair"])
def test_messages_of_a_pair_do_not_overtake(contention):
    """A small message behind a large one is received behind it, also by a wildcard."""

    def main(comm):
        if comm.rank:
            comm.Send(np.full(NBYTES, 1, np.uint8), 0)
            comm.Send(np.full(1, 2, np.uint8), 0)
            comm.Send(np.zeros(0, np.uint8), 0)
        else:
            got = np.zeros(NBYTES, np.uint8)
            for _ in range(3):
                comm.Recv(got)
                comm.record(at=int(got[0]))

    assert arrivals(main, ranks=2, contention=contention) == [1, 2, 2]


def test_of_what_comes_at_one_time_the_card_takes_first_what_was_sent_first():
    """Data of a rendezvous start when the answer is back; a small message that is sent just then comes behind them."""
    latency, byte_s = 2.0**-10, 2.0**-20  # sums of these are exact

    def main(comm):
        if comm.rank == 0:
            large = comm.Isend(np.zeros(4096, np.uint8), 1)
            comm.Recv(np.zeros(0, np.uint8), 1)  # comes with the answer to the large one's request
            comm.Send(np.zeros(512, np.uint8), 1)
            large.Wait()
            return
        comm.clock.sleep(1.0)
        comm.Send(np.zeros(0, np.uint8), 0)
        pending = [comm.Irecv(np.zeros(4096, np.uint8), 0) for _ in range(2)]
        for each in pending:
            each.Wait()
            comm.record(at=comm.clock.now())

    network = Switch(Hockney(latency, 1 / byte_s), eager_bytes=1024, contention="fifo")
    rows = run(main, 2, platform=Platform("test", network))[1].rows
    there = 1.0 + 2 * latency + 4096 * byte_s
    assert [values["at"] for _, _, values in rows] == [there, there + 512 * byte_s]


def test_a_card_books_the_first_gap_that_is_long_enough():
    """A message goes before, between or behind those that were let in, never beside them."""
    nic = ReceivingNic()
    assert [nic.admit(10.0, 2.0), nic.admit(20.0, 2.0), nic.admit(5.0, 2.0)] == [10.0, 20.0, 5.0]
    assert nic.admit(9.0, 4.0) == 14.0  # 5 to 9 would do but for 8 to 10
    assert nic.admit(15.0, 4.0) == 18.0
    assert nic.admit(17.0, 1.0) == 21.0  # full from 8 to 20


def test_the_ranks_of_a_node_share_its_card_fairly():
    """Two ranks of a node send to another node at half the speed, and to each other at the speed of memory."""
    nodes = Nodes(Hockney(1e-6, 1e9), Hockney(LATENCY, BANDWIDTH), 2, contention="fair")

    def main(comm):
        if comm.rank < 2:
            comm.Send(np.zeros(NBYTES, np.uint8), comm.rank + 2)
            comm.Send(np.zeros(NBYTES, np.uint8), 1 - comm.rank)
            comm.Recv(np.zeros(NBYTES, np.uint8), 1 - comm.rank)
        else:
            comm.Recv(np.zeros(NBYTES, np.uint8), comm.rank - 2)
        comm.record(now=comm.clock.now())

    found = run(main, 4, platform=Platform("test", nodes))[1].column("now")
    assert [found[rank] for rank in range(4)] == pytest.approx(
        [1e-6 + NBYTES / 1e9] * 2 + [LATENCY + 2 * BYTES_S] * 2
    )


@pytest.mark.parametrize("contention", ["serial", "fifo", "fair"])
def test_home_lines_are_fed_at_the_slower_end(contention):
    """One upload of half the speed of the download, alone: α and the bytes at the speed of the upload."""
    homes = HomeLinks.alike(2, LATENCY, BANDWIDTH / 2, BANDWIDTH)
    homes = HomeLinks(homes.latency_s, homes.up_Bps, homes.down_Bps, contention=contention)

    def main(comm):
        comm.Recv(np.zeros(NBYTES, np.uint8), 0) if comm.rank else comm.Send(np.zeros(NBYTES, np.uint8), 1)
        comm.record(now=comm.clock.now())

    found = run(main, 2, platform=Platform("test", homes))[1].column("now")[1]
    assert found == pytest.approx(LATENCY + 2 * BYTES_S)


def test_contention_is_checked():
    """An unknown word, and fair sharing where it is not modelled, are refused at once."""
    with pytest.raises(ParameterError, match="contention='lifo'"):
        Switch(Hockney(1e-6, 1e9), contention="lifo")
    tree = FatTree(Hockney(1e-6, 1e9), (2, 2), contention="fair")
    with pytest.raises(ParameterError, match="not on a FatTree"):
        run(lambda comm: None, 2, platform=Platform("test", tree))


# ------------------------------------------------------------------------------- collectives where links are shared
PER_NODE, INSIDE, ACROSS = 4, Hockney(1e-6, 1e9), Hockney(1e-3, 1e6)
SHARED = Platform(
    "shared",
    Nodes(INSIDE, ACROSS, PER_NODE, contention="fair", eager_bytes=1 << 30),
    collectives=Selection(fixed=(("allreduce", "recursive_doubling"),)),
)
WIRE_S = 8000 / 1e6  # of one vector between nodes, alone


def test_the_messages_of_a_round_share_the_card_of_their_node():
    """Recursive doubling over 4 nodes of 4: two rounds inside, then two in which 4 vectors leave each node at once."""

    def doubling(comm):
        whole, begin_s = np.ones(1000), comm.clock.now()
        comm.Allreduce(whole, np.zeros(1000))
        middle_s = comm.clock.now()
        for distance in (1, 2, 4, 8):
            comm.Sendrecv(whole, comm.rank ^ distance, recvbuf=np.zeros(1000), source=comm.rank ^ distance)
        comm.record(collective=middle_s - begin_s, messages=comm.clock.now() - middle_s)

    row = run(doubling, 16, platform=SHARED)[1].rows[0][2]
    inside, across = 1e-6 + 8000 / 1e9, 1e-3 + PER_NODE * WIRE_S
    assert row["collective"] == pytest.approx(2 * inside + 2 * across, rel=1e-9)
    assert row["messages"] == pytest.approx(row["collective"], rel=1e-9)  # exact flows, message by message


@pytest.mark.parametrize("later", [0.0, 0.5])
def test_collectives_of_several_groups_share_the_links(later):
    """Each group has a rank on either node, and half of the NIC while both are under way; begun later, half as long."""

    def two(comm):
        group = comm.Split(comm.rank % PER_NODE)
        if comm.rank % PER_NODE > 1:
            return
        with comm.compute(later * WIRE_S * (comm.rank % PER_NODE)):
            pass
        group.Allreduce(np.ones(1000), np.zeros(1000))
        comm.record(at=comm.clock.now())

    ends = run(two, 2 * PER_NODE, platform=SHARED)[1].column("at")
    split = lambda comm: (comm.Split(comm.rank % PER_NODE), comm.record(at=comm.clock.now()))  # noqa: E731
    begun_s = max(run(split, 2 * PER_NODE, platform=SHARED)[1].column("at").values())
    first, second = ends[0] - begun_s, ends[1] - begun_s
    assert first == pytest.approx(1e-3 + (2 - later) * WIRE_S, rel=1e-6)
    assert second == pytest.approx(1e-3 + 2 * WIRE_S, rel=1e-6)
    assert (ends[0], ends[1]) == (ends[PER_NODE], ends[PER_NODE + 1])


def test_a_message_and_a_collective_share_the_link():
    """A message that leaves with a collective's bytes, and an access, take twice as long; so does the collective."""

    def both(comm):
        group = comm.Split(comm.rank % PER_NODE)
        comm.Barrier()
        begin_s = comm.clock.now()
        if comm.rank % PER_NODE == 0:
            group.Allreduce(np.ones(10_000), np.zeros(10_000))
        elif comm.rank == 1:
            comm.Send(np.ones(10_000), PER_NODE + 1)
        elif comm.rank == PER_NODE + 1:
            comm.Recv(np.zeros(10_000), 1)
        comm.record(took=comm.clock.now() - begin_s)

    took = run(both, 2 * PER_NODE, platform=SHARED)[1].column("took")
    # The collective's bytes are on the links from its beginning, the message's from one latency later; the message has
    # one direction alone, and its flow is over last.
    assert took[0] == pytest.approx(1e-3 + 2 * 10 * WIRE_S - 1e-3, rel=1e-3)
    assert took[PER_NODE + 1] == pytest.approx(1e-3 + 2 * 10 * WIRE_S - 1e-3, rel=1e-3)


def test_a_collective_alone_is_not_held_up():
    """Late ranks, roots that leave early, no bytes at all: one collective at a time takes what it takes elsewhere."""

    def alone(comm):
        for size in (0, 10, 5000):
            with comm.compute(1e-3 * (comm.rank % 3)):
                pass
            comm.Bcast(np.ones(size), 2)
            comm.Allreduce(np.ones(size), np.zeros(size))
            comm.Reduce(np.ones(size), np.zeros(size) if comm.rank == 1 else None, root=1)
            comm.record(at=comm.clock.now())

    ends = [
        sorted(
            (rank, values["at"])
            for rank, _, values in run(alone, 7, platform=platform(contention=how))[1].rows
        )
        for how in ("serial", "fair")
    ]
    assert [at for _, at in ends[1]] == pytest.approx([at for _, at in ends[0]], rel=1e-9)
