"""Each kind of fault fires and shows in the events; failures of machines, by draw and by trace, in each notation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spawnsim
from spawnsim.errors import ParameterError, RankFailed, Revoked, Timeout
from spawnsim.models.faults import KINDS, Clog, Corrupt, Crash, Failures, FaultPlan, Restart
from spawnsim.models.faults.failures import machines
from spawnsim.models.platform import load_platform

RANKS = 12
NODES = """
[network]
topology = "nodes"
ranks_per_node = 4
[network.intra]
latency = "1 us"
bandwidth = "10 GB/s"
[network.inter]
latency = "5 us"
bandwidth = "10 Gbit/s"
"""
RACKS = """
[network]
topology = "fat-tree"
radices = [6, 4]
[network.link]
latency = "1 us"
bandwidth = "10 GB/s"
"""


def gossip(comm: Any) -> None:
    """Compute and pass a vector around; whoever is left goes on."""
    group, iteration = comm, 0
    while iteration < 30:
        try:
            with comm.compute(0.01):
                value = np.full(2000, float(comm.rank))
            request = group.Isend(value, (group.rank + 1) % group.size)
            with comm.clock.deadline(0.5):
                got = np.empty(2000)
                group.Recv(got, (group.rank - 1) % group.size)
                request.Wait()
                group.Allreduce(value, got)
            iteration += 1
            comm.record(iteration=iteration, now=comm.clock.now(), wrong=int(np.isnan(got).sum()))
        except (RankFailed, Revoked, Timeout):
            found = group.recover(iteration)
            group, iteration = found.comm, found.step


FIRES = {
    "crash": ("crash:3@0.1s", "crash", {}),
    "restart": ("crash:3@0.1s; restart:3@0.2s", "restart", {}),
    "pause": ("pause:3@0.1s+0.1s", "pause", {"for_s": 0.1}),
    "slow": ("slow:3@0.1s+0.1s,4", "slow", {"factor": 4.0}),
    "skew": ("skew:3@0.1s,0.5s", "skew", {"offset_s": 0.5}),
    "down": ("down:3>4@0.1s+0.05s", "link", {"what": "delayed"}),
    "drop": ("drop:3>4@0.1s+0.05s", "link", {"what": "lost"}),
    "duplicate": ("duplicate:3>4@0.1s+0.1s", "link", {"what": "doubled"}),
    "corrupt": ("corrupt:3>4@0.1s+0.1s", "link", {"what": "corrupt"}),
    "nan": ("corrupt:*>*@0.1s+0.1s,0.2,nan", "link", {"what": "nan"}),
    "delay": ("delay:3>4@0.1s+0.1s,1ms", "link", {"what": "delayed"}),
    "partition": ("partition:0-3@0.1s+0.1s", "link", {"what": "delayed"}),
    "clog": ("clog:3@0.1s+0.1s", "link", {"what": "delayed"}),
    "reorder": ("reorder:*>*@0.1s+0.1s,2ms", "link", {"what": "delayed"}),
}


def test_each_kind_is_tried() -> None:
    """A new kind needs a line here."""
    assert set(KINDS) <= set(FIRES)


@pytest.mark.parametrize("name", FIRES)
def test_a_fault_fires_and_shows(name: str) -> None:
    """In the events, in the digest, and in what ranks see."""
    text, kind, fields = FIRES[name]
    found = spawnsim.run(gossip, ranks=RANKS, faults=text)
    reported = [event for event in found.events if event["kind"] == kind]
    assert any(fields.items() <= event.items() for event in reported), f"{kind}: {reported[:3]}"
    assert all(event["time_s"] >= 0.1 for event in reported)
    plain = spawnsim.run(gossip, ranks=RANKS)
    assert found.totals["digest"] != plain.totals["digest"]
    if name == "nan":
        assert found.table["wrong"].max() > 0
    if name == "skew":
        mine = found.table.of_rank(3)
        late = mine["time_s"] > 0.11
        np.testing.assert_allclose((mine["now"] - mine["time_s"])[late], 0.5)
        np.testing.assert_allclose((mine["now"] - mine["time_s"])[~late][:5], 0.0)
    # The same plan in JSON and TOML, and as the text that it prints.
    plan = FaultPlan.parse(text)
    assert FaultPlan.parse(str(plan)) == plan
    assert FaultPlan.parse(plan.to_json()) == plan


def test_plans_in_toml_and_recorded_traces(tmp_path: Path) -> None:
    """With the names of JSON, and as rank,down_s,up_s."""
    toml = tmp_path / "plan.toml"
    toml.write_text(
        'seed = 3\n[[faults]]\nkind = "crash"\nwhere = "node1"\nat_s = 2.0\n'
        '[[faults]]\nkind = "corrupt"\nsource = 0\nat_s = 0\nfor_s = 1\ndest = 1\ndamage = "nan"\n'
        '[[faults]]\nkind = "mtbf"\nwhere = "node*"\nat_s = 10\nfor_s = 100\nmtbf_s = 50\nrepair_s = 5\n'
    )
    (tmp_path / "nodes.toml").write_text(NODES)
    network = load_platform(str(tmp_path / "nodes.toml")).network
    with pytest.raises(ParameterError, match=r"alive|dead"):  # node 1 is dead when the draws begin
        FaultPlan.parse(str(toml), ranks=RANKS, network=network)
    toml.write_text(toml.read_text().replace("2.0", "2.0\nfor_s = 1").replace('"crash"', '"clog"'))
    plan = FaultPlan.parse(str(toml), ranks=RANKS, network=network)
    assert plan.seed == 3 and plan.faults[:2] == (
        Clog((4, 5, 6, 7), 2.0, 1.0),
        Corrupt(0, 1, 0, 1, damage="nan"),
    )
    assert {
        len([each for each in plan.faults if getattr(each, "at_s", 0) == at_s])
        for at_s in {fault.at_s for fault in plan.faults if isinstance(fault, Crash)}
    } == {4}, "nodes fail as one"
    toml.write_text("a = = 1\n")
    with pytest.raises(ParameterError, match=r"plan\.toml: fault plan: not valid TOML"):
        FaultPlan.parse(str(toml))
    trace = tmp_path / "trace.csv"
    trace.write_text("rank,down_s,up_s\n3,0.1,0.2\n5,0.15,\n")
    plan = FaultPlan.parse(str(trace))
    assert plan.faults == (Crash(3, 0.1), Restart(3, 0.2), Crash(5, 0.15))
    found = spawnsim.run(gossip, ranks=RANKS, faults=str(trace))
    assert [event["rank"] for event in found.events if event["kind"] in ("crash", "restart")] == [3, 5, 3]
    for text, words in (("rank,down_s\n", "on top"), ("rank,down_s,up_s\n1,x,2\n", "line 2"), ("", "on top")):
        trace.write_text(text)
        with pytest.raises(ParameterError, match=words):
            FaultPlan.parse(str(trace))


def test_parts_of_the_platform_fail_together(tmp_path: Path) -> None:
    """Nodes, racks, the whole job; what is not there is said."""
    (tmp_path / "nodes.toml").write_text(NODES)
    (tmp_path / "racks.toml").write_text(RACKS)
    nodes, racks = (load_platform(str(tmp_path / f"{name}.toml")).network for name in ("nodes", "racks"))
    assert machines("node1", RANKS, nodes) == [(4, 5, 6, 7)]
    assert machines("node*", 10, nodes) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    assert machines("rack1", RANKS, racks) == [tuple(range(6, 12))]
    assert machines("job", 3) == [(0, 1, 2)] and machines("*", 3) == [(0,), (1,), (2,)]
    plan = FaultPlan.parse("crash:node1@1s", ranks=RANKS, network=nodes)
    assert [fault.rank for fault in plan.faults] == [4, 5, 6, 7]
    for text, words in (
        ("crash:node9@1s", "node0 to node2"), ("crash:region0@1s", "has no regions"), ("crash:nodex@1s", "node0"),
        ("mtbf:*@0s,5s", "LENGTH"), ("mtbf:*@0s+5s,0s", "above 0"), ("mtbf:*@0s+1e9s,1ms", "more than"),
        ("corrupt:0>1@0s,1,zero", "bit or nan"), ("crash:0-999999999@1s", "more than"),
    ):  # fmt: skip
        with pytest.raises(ParameterError, match=words):
            FaultPlan.parse(text, ranks=RANKS, network=nodes)
    with pytest.raises(ParameterError, match="only a run"):
        FaultPlan.parse("crash:*@1s")
    found = spawnsim.run(
        gossip,
        ranks=RANKS,
        platform=str(tmp_path / "nodes.toml"),
        faults="crash:node1@0.1s; restart:node1@0.15s",
    )
    assert sorted(event["rank"] for event in found.events if event["kind"] == "crash") == [4, 5, 6, 7]
    assert sorted(event["rank"] for event in found.events if event["kind"] == "restart") == [4, 5, 6, 7]


def test_failures_are_poisson_and_wait_for_spares() -> None:
    """The number, the streams, and the queue for a spare."""
    units = [(rank,) for rank in range(200)]
    faults = Failures(0.0, 1000.0, mtbf_s=100.0, repair_s=1e-6).faults(units, seed=3)
    crashes = [fault for fault in faults if isinstance(fault, Crash)]
    assert len(crashes) == pytest.approx(2000, abs=4 * math.sqrt(2000))
    assert faults == Failures(0.0, 1000.0, mtbf_s=100.0, repair_s=1e-6).faults(units, seed=3)
    assert len(FaultPlan(faults).faults) == 2 * len(crashes)
    gaps = np.diff([fault.at_s for fault in crashes if fault.rank == 0])
    assert len(gaps) > 3
    # One more machine leaves the draws of the others as they were.
    more = Failures(0.0, 1000.0, mtbf_s=100.0, repair_s=1e-6).faults([*units, (200,)], seed=3)
    assert [fault for fault in more if fault.rank < 200] == list(faults)
    # Two machines, a spare: the second failure waits until the first machine is repaired.
    queue = Failures(0.0, 10.0, mtbf_s=0.5, repair_s=100.0, spares=1, swap_s=0.25).faults(
        [(0, 1), (2, 3)], seed=1
    )
    downs = [fault.at_s for fault in queue if isinstance(fault, Crash)][::2]
    ups = sorted(fault.at_s for fault in queue if isinstance(fault, Restart))[::2]
    assert ups[0] == downs[0] + 0.25
    assert ups[1] == pytest.approx(max(downs[0] + 100.0, downs[1]) + 0.25)
    alone = Failures(0.0, 10.0, mtbf_s=0.5).faults([(0,)], seed=1)
    assert len(alone) == 1, "without repair a machine fails once"


def test_failures_in_text_and_json_are_the_same() -> None:
    """One plan, two notations."""
    text = FaultPlan.parse("mtbf:*@1s+20s,5s,1s,2,0.1s", seed=4, ranks=6)
    entry = {"kind": "mtbf", "where": "*", "at_s": 1, "for_s": 20, "mtbf_s": 5, "repair_s": 1, "spares": 2}
    document = json.dumps({"seed": 4, "faults": [entry | {"swap_s": 0.1}]})
    assert text == FaultPlan.parse(document, ranks=6)
    assert text.restarts and text.mortal
    with pytest.raises(ParameterError, match="give"):
        FaultPlan.parse(json.dumps([entry | {"spare": 2}]), ranks=6)
