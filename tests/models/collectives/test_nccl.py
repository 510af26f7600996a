"""NCCL's tuner: its estimates, its choice, the machine's corrections, and its collectives in a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.collective_plans import switch

from spawnsim.errors import ParameterError
from spawnsim.models.collectives import Planner, Selection, Timing
from spawnsim.models.collectives.nccl import Nccl
from spawnsim.models.network import Hockney, Nodes
from spawnsim.models.platform import load_platform, to_toml

MACHINE = Nccl(96e9)
NETWORK = Nodes(Hockney(1e-6, 2e11), Hockney(5e-6, 24e9), 4)
GROUPS = [(8, 2), (12, 3), (16, 4), (20, 5), (32, 8), (64, 16), (128, 32), (1024, 256)]


def ring(protocol: str, ranks: int, nodes: int, nbytes: int) -> float:
    """Return the time of a ring on Hopper with Intel, written out for 96 GB/s and at least three nodes."""
    outer = 2 * (nodes - 1)
    inner = 2 * (ranks - 1) - outer
    if protocol == "LL":
        return 1e-6 * (6.6 + inner * 1.0 + outer * 2.7) + nbytes * 2 * (ranks - 1) / ranks / (
            20.4e9 if nodes > 2 else 39e9
        )
    if protocol == "LL128":
        return 1e-6 * (14.0 + inner * 1.9 + outer * 4.0) + nbytes * 2 * (ranks - 1) / ranks / 88.32e9
    alpha_us = 8.4 + inner * 3.4 + outer * 14.0
    return 1e-6 * alpha_us * (1.4 if nbytes >= 512 * ranks else 1.0) + nbytes * 2 * (ranks - 1) / ranks / 96e9


@pytest.mark.parametrize(("ranks", "nodes"), GROUPS)
def test_a_ring_takes_its_closed_form(ranks: int, nodes: int) -> None:
    """α from the hops within and between nodes, β from the bus, for each protocol."""
    for nbytes in (64, 4096, 1 << 20, 1 << 30):
        found = {
            each.protocol: each.seconds(nbytes)
            for each in MACHINE.estimates("allreduce", nbytes, ranks=ranks, nodes=nodes)
            if each.algorithm == "ring"
        }
        expected = {protocol: ring(protocol, ranks, nodes, nbytes) for protocol in ("LL", "LL128", "Simple")}
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("ranks", "nodes"), GROUPS)
def test_a_tree_takes_its_closed_form(ranks: int, nodes: int) -> None:
    """Twice the depth within a node and between nodes; half the bus, times the tuner's share for the size."""
    depth = int(np.log2(nodes))
    inner = ranks // nodes - 1
    shares = {1 << 10: (0.9, 1.0, 0.9), 1 << 20: (0.5, 0.6, 0.5), 1 << 30: (1.0, 1.0, 1.0)}
    most_ll = 39.0 if nodes == 2 else 20.4
    for nbytes, (ll, ll128, simple) in shares.items():
        bus = 96e9 * 0.92
        expected = {
            "LL": 1e-6 * (6.8 + 2 * (inner * 0.6 + depth * 5.0))
            + 2 * nbytes / (min(bus / 3.8, most_ll * 1e9) * ll),
            "LL128": 1e-6 * (14.0 + 2 * (inner * 1.25 + depth * 8.5))
            + 2 * nbytes / (bus * 120 / 128 * ll128),
            "Simple": 1e-6 * (8.4 + 2 * (inner * 4.0 + depth * 14.0)) + 2 * nbytes / (bus * simple),
        }
        found = {
            each.protocol: each.seconds(nbytes)
            for each in MACHINE.estimates("allreduce", nbytes, ranks=ranks, nodes=nodes)
            if each.algorithm == "tree"
        }
        assert found == pytest.approx(expected, rel=1e-9)


def test_small_vectors_take_a_tree_and_large_ones_a_ring() -> None:
    """The protocols by size: LL, LL128, Simple; a fixed algorithm excludes the other."""
    pairs = []
    for nbytes in (256, 1 << 17, 1 << 20, 1 << 30):
        chosen = MACHINE.choice("allreduce", nbytes, ranks=16, nodes=4)
        pairs.append(f"{chosen.algorithm} {chosen.protocol}")
    assert pairs == ["tree LL", "tree LL", "tree LL128", "ring Simple"]
    fixed = Nccl(96e9, algorithm="ring").choice("allreduce", 256, ranks=16, nodes=4)
    assert (fixed.algorithm, fixed.protocol) == ("ring", "LL")
    assert Nccl(96e9, ll128=False).choice("allreduce", 1 << 20, ranks=16, nodes=4).protocol != "LL128"
    assert MACHINE.choice("allgather", 256, ranks=16, nodes=4).algorithm == "ring"


def test_factors_correct_the_time_and_not_the_choice() -> None:
    """Twice the latency of the pair that runs, and one value for small vectors in one chunk."""
    slow = Nccl(96e9, algorithm="ring", factors=(("ring-LL", 2.0, 1.0), ("ring-LL-one-chunk", 1.5, 1.0)))
    plain = Nccl(96e9, algorithm="ring")

    def of(machine: Nccl, nbytes: int) -> float:
        return machine.seconds("allreduce", nbytes, ranks=16, nodes=4)

    alpha_s = plain.choice("allreduce", 8, ranks=16, nodes=4).alpha_s
    assert of(slow, 4096) - of(plain, 4096) == pytest.approx(alpha_s)
    assert of(slow, 256) - of(plain, 256) == pytest.approx(0.5 * alpha_s)
    assert of(slow, 1 << 30) == of(plain, 1 << 30)


def test_all_ranks_leave_after_the_last_has_arrived() -> None:
    """Also if they arrive apart; an absent rank keeps all; other operations run MPICH's algorithms."""
    selection = Selection("nccl", nccl=MACHINE)
    timing = Timing(NETWORK, selection)
    lasts = MACHINE.seconds("allreduce", 1 << 20, ranks=16, nodes=4)
    arrivals = np.linspace(0.0, 1.0, 16)
    found = timing.finish("allreduce", arrivals, 1 << 20)
    assert found.times == pytest.approx(np.full(16, 1.0 + lasts))
    assert timing.finish("allreduce", np.zeros(16), 1 << 20).times == pytest.approx(np.full(16, lasts))
    arrivals[3] = np.nan
    assert np.isnan(timing.finish("allreduce", arrivals, 1 << 20).times).all()
    planner = Planner(NETWORK, selection)
    names = ("allreduce", "allgather", "reduce_scatter", "bcast", "alltoall")
    assert [planner.plan(name, 16, 1 << 20).algorithm for name in names] == [
        "nccl tree LL128", "nccl ring LL128", "nccl ring LL128", "scatter_ring", "pairwise",
    ]  # fmt: skip
    blocks = np.arange(16) * 1000
    assert planner.plan("allgather", 16, blocks).seconds == MACHINE.seconds(
        "allgather", 120_000, ranks=16, nodes=4
    )
    fixed = Selection("nccl", fixed=(("allreduce", "rabenseifner"),), nccl=MACHINE)
    assert Planner(NETWORK, fixed).plan("allreduce", 16, 1 << 20).algorithm == "rabenseifner"
    assert Timing(NETWORK, selection).finish("allreduce", np.zeros(1), 8).times == 0.0


def test_the_traffic_is_that_of_the_ring() -> None:
    """2(P-1) messages from each rank, n/P bytes each."""
    found = Timing(NETWORK, Selection("nccl", nccl=Nccl(96e9, algorithm="ring"))).finish(
        "allreduce", np.zeros(16), 1 << 20
    )
    assert (found.messages, found.nbytes) == (16 * 30, 30 << 20)


def test_a_platform_file_holds_the_machine(tmp_path: Path) -> None:
    """Written and read back; errors name the line."""
    text = """
[network]
topology = "nodes"
ranks_per_node = 4
[network.intra]
latency = "1 us"
bandwidth = "200 GB/s"
[network.inter]
latency = "5 us"
bandwidth = "24 GB/s"
[collectives]
library = "nccl"
[collectives.nccl]
bus = "96 GB/s"
gpu = "hopper"
algorithm = "tree"
[collectives.nccl.factors]
tree-LL = [0.75, 1.0]
"""
    file = tmp_path / "machine.toml"
    file.write_text(text)
    read = load_platform(str(file))
    assert read.collectives.nccl == Nccl(96e9, algorithm="tree", factors=(("tree-LL", 0.75, 1.0),))
    file.write_text(to_toml(read))
    assert load_platform(str(file)).collectives == read.collectives
    for old, new, error in (
        ('gpu = "hopper"', 'gpu = "hoper"', r"line 15.*hoper.*write one of volta, ampere, hopper"),
        ("tree-LL =", "tree-L =", r"line 13.*'tree-L', .*for one of tree-LL, tree-LL128"),
        ("[0.75, 1.0]", "0.75", r"line 18.*write the factors of α and β, such as \[1.3, 1.0\]"),
        ('bus = "96 GB/s"', "", r"line 13.*bus: missing"),
        ('library = "nccl"', 'library = "mpich"', r"line 11.*no other, needs the machine"),
    ):
        file.write_text(text.replace(old, new))
        with pytest.raises(ParameterError, match=error):
            load_platform(str(file))


def test_nccl_without_a_machine_is_refused() -> None:
    """By the name alone, with links that are shared, and with values out of range."""
    with pytest.raises(ParameterError, match=r"\[collectives.nccl\] and its bus"):
        Selection.parse("nccl")
    with pytest.raises(ParameterError, match="bandwidth above 0"):
        Nccl(0.0)
    from dataclasses import replace

    shared = Planner(replace(switch(), contention="fair"), Selection("nccl", nccl=MACHINE))
    with pytest.raises(ParameterError, match='contention="fair"'):
        shared.plan("allreduce", 4, 100)
