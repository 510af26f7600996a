"""Models on torch's meta device: every policy decides, waits and sends as with data, and needs no memory."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import spawnsim
from spawnsim import (
    AsyncModelAveragePolicy,
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    DecentralizedAverager,
    DecentralizedAveragingPolicy,
)
from spawnsim.policies import (
    HALOS,
    AsyncServerPolicy,
    DecoupledDiLoCoPolicy,
    EASGDPolicy,
    EDiTPolicy,
    GossipPolicy,
    NoLoCoPolicy,
    OneRoundLatePolicy,
    OneSidedSelectiveAveragingPolicy,
    OuterOptimizerPolicy,
    PopulationBasedTrainingPolicy,
    ServerOptions,
    ServerRule,
    SPARTAPolicy,
    StateScope,
    StreamingDiLoCoPolicy,
    Tier,
    WAGMAPolicy,
    WindowOptions,
    graphs,
)

COPY, MEAN = StateScope(optimizer_state="copy"), StateScope(optimizer_state="average")
POLICIES = {
    "all": lambda build: AverageAllPolicy(average_every=2),
    "all, momentum": lambda build: AverageAllPolicy(average_every=2, momentum=0.2),
    "all, Adam": lambda build: AverageAllPolicy(average_every=2, travels=MEAN),
    "selective": lambda build: AsyncSelectiveAveragingPolicy(build, 3, replacement_ratio=0.3),
    "selective, delta": lambda build: AsyncSelectiveAveragingPolicy(
        None, 3, replacement_ratio=0.3, momentum=0.1
    ),
    "selective, Adam": lambda build: AsyncSelectiveAveragingPolicy(
        None, 3, replacement_ratio=0.3, travels=COPY
    ),
    "selective, float16": lambda build: AsyncSelectiveAveragingPolicy(
        build, 3, replacement_ratio=0.3, compression="float16"
    ),
    "selective, blockwise8": lambda build: AsyncSelectiveAveragingPolicy(
        build, 3, replacement_ratio=0.3, compression="blockwise8"
    ),
    "one-sided": lambda build: OneSidedSelectiveAveragingPolicy(build, None, 3, age_range=(2, 5)),
    "one-sided, worst": lambda build: OneSidedSelectiveAveragingPolicy(
        build, None, 3, replacement_ratio=0.3, replacement_mode="worst_ratio"
    ),
    "one-sided, per parameter": lambda build: OneSidedSelectiveAveragingPolicy(
        build,
        None,
        3,
        age_range=(2, 5),
        compression="uniform8",
        windows=WindowOptions(layout="per_parameter"),
    ),
    "outer": lambda build: OuterOptimizerPolicy.diloco(2),
    "outer, sparse": lambda build: OuterOptimizerPolicy.sparseloco(2),
    "outer, streaming": lambda build: StreamingDiLoCoPolicy(4, fragments=2),
    "outer, late": lambda build: OneRoundLatePolicy(4, fragments=2),
    "outer, decoupled": lambda build: DecoupledDiLoCoPolicy(2, fragments=2, quorum=6),
    "outer, pairs": lambda build: NoLoCoPolicy(2),
    "outer, springs": lambda build: EASGDPolicy(2),
    "outer, blocks": lambda build: EDiTPolicy(2),
    "outer, few": lambda build: SPARTAPolicy(),
    "groups": lambda build: DecentralizedAveragingPolicy(average_every=3, target_group_size=4),
    "gossip": lambda build: GossipPolicy(graph=graphs.BaseGraph(1), global_every=3),
    "wagma": lambda build: WAGMAPolicy(group_size=4, sync_every=3),
    "push-sum": lambda build: GossipPolicy(graph=graphs.exponential, push_sum=True, delay=1),
    "server": lambda build: AsyncServerPolicy(ServerOptions(ServerRule(0.7, 0.9, 3, delayed=True)), steps=2),
    "server, tiers": lambda build: AsyncServerPolicy(
        HALOS, steps=1, dylu=True, tier=Tier(lambda size: [rank * 3 // size for rank in range(size)], every=2)
    ),
    "population, Adam": lambda build: PopulationBasedTrainingPolicy(3),
    "clock": lambda build: AsyncModelAveragePolicy(sync_interval_ms=30),
    "clock, ring": lambda build: AsyncModelAveragePolicy(sync_interval_ms=30, peer_selection_mode="ring"),
}


def build(device, adam):
    """Return a model above the eager threshold, of mixed dtypes, and an optimizer with state."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 500), torch.nn.BatchNorm1d(500), torch.nn.Linear(500, 10).bfloat16()]
    model = torch.nn.Sequential(*layers).to(device)
    if not adam:
        return model, torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return model, optimizer


def main(comm, device, name):
    """Train nothing, but change the weights where there are any."""
    make = lambda: build(device, "Adam" in name)  # noqa: E731
    model, optimizer = make()
    policy, rng = POLICIES[name](make), np.random.default_rng(comm.rank)
    for iteration in range(8):
        with comm.compute(0.01):
            if device == "cpu":
                with torch.no_grad():
                    model[0].weight += comm.rank * 1e-3
        metric = float(rng.standard_normal())
        model, optimizer, info = policy(iteration, model, optimizer, local_metric=metric, group=comm)
        comm.record(
            now=comm.clock.now(), **{k: v for k, v in info.items() if isinstance(v, (bool, int, float))}
        )
    policy.shutdown()
    comm.record(end=comm.clock.now())


@pytest.mark.parametrize("name", POLICIES)
def test_models_without_memory_are_treated_as_those_with_data(name):
    """Decisions, bytes and clocks are the same, to the bit."""
    real, meta = (
        spawnsim.run(lambda comm, device=device: main(comm, device, name), ranks=12, seed=3)
        for device in ("cpu", "meta")
    )
    assert list(real.table) == list(meta.table)
    for column in real.table:
        np.testing.assert_array_equal(real.table[column], meta.table[column], column)
    assert real.events == meta.events
    for total in ("virtual_seconds", "bytes", "messages", "events", "replacements"):
        assert real.totals[total] == meta.totals[total]
    assert real.totals["bytes"] > 100_000


def test_a_newcomer_downloads_a_model_without_memory():
    """The state that is loaded lies on the meta device, and took as long."""

    def newcomer(comm, device):
        model, _ = build(device, adam=False)
        averager = DecentralizedAverager(
            [*model.parameters()],
            comm,
            prefix="model",
            start=True,
            target_group_size=4,
            allow_state_sharing=True,
        )
        comm.clock.sleep(1.0 + 0.01 * comm.rank)
        found = averager.load_state_from_peers(timeout=20) if comm.rank == 11 else None
        if found is not None:
            assert {tensor.device.type for tensor in found[1]} == {device}
            comm.record(loaded=sum(tensor.nbytes for tensor in found[1]), at=comm.clock.now())
        comm.clock.sleep(30.0 - comm.clock.now())
        averager.shutdown()

    real, meta = (
        spawnsim.run(lambda comm, device=device: newcomer(comm, device), ranks=12)
        for device in ("cpu", "meta")
    )
    assert real.table["at"].tolist() == meta.table["at"].tolist()
    assert meta.table["loaded"][0] > 100_000


LARGE = """
import resource, spawnsim, torch
from spawnsim import AverageAllPolicy, AsyncSelectiveAveragingPolicy
from spawnsim.policies import OneSidedSelectiveAveragingPolicy

def build():
    model = torch.nn.Sequential(*(torch.nn.Linear(1000, 125_000, device="meta") for _ in range(2)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

def main(comm, policy):
    (model, optimizer), policy = build(), policy()
    for iteration in range(6):
        with comm.compute(0.01):
            pass
        model, optimizer, _ = policy(iteration, model, optimizer, local_metric=-comm.rank, group=comm)
    policy.shutdown()

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

def run(policy, ranks):
    return spawnsim.run(lambda comm: main(comm, policy), ranks=ranks, deadline_s=1e6).totals["bytes"]

policies = (
    (lambda: AverageAllPolicy(4), 1000),
    (lambda: AsyncSelectiveAveragingPolicy(build, 2, replacement_ratio=0.05), 100),
    (lambda: OneSidedSelectiveAveragingPolicy(build, None, 3, age_range=(2, 4)), 20),
)
for policy, _ in policies:
    run(policy, 2)  # torch loads parts of itself when they are first used
before = peak()
sent = [run(policy, ranks) for policy, ranks in policies]
assert min(sent) > 1e10, sent
print(peak() - before)
"""


def test_a_thousand_models_of_a_gigabyte_need_no_memory():
    """1 TB of models in 150 MB, over what two ranks need: policies, greenlets and optimizers of 1,000 ranks."""
    reported = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LARGE], capture_output=True, text=True, check=True
    )
    assert int(reported.stdout) < 150
