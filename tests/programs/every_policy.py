"""Every policy × strategy × mode, one after the other, on models that show what became of them.

Rank r's model is r in every number, so that any mixture lies between the least and the greatest rank, and a torn one
shows two numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch

from spawnsim import policies
from spawnsim.policies import (
    AsyncSelectiveAveragingPolicy,
    AsyncServerPolicy,
    DecoupledDiLoCoPolicy,
    GossipPolicy,
    OneSidedSelectiveAveragingPolicy,
    OuterOptimizerPolicy,
    ServerOptions,
    ServerRule,
    SpawnPolicy,
    StreamingDiLoCoPolicy,
    Windows,
    graphs,
)

STRATEGIES = ("mean", "weighted_mean", "best_only", "reset_weights")
MODES = ("worst_ratio", "threshold", "age")
FRESH = 2.5  # what a model builder's models are made of
ENOUGH = 400  # iterations in which a replacement must have happened

# Policies whose first argument is not how often they act, or of which one call of `kind(2)` says too little.
SPECIAL: dict[str, Callable[[], SpawnPolicy]] = {
    "diloco": lambda: OuterOptimizerPolicy.diloco(2),
    "sparseloco": lambda: OuterOptimizerPolicy.sparseloco(2),
    "StreamingDiLoCoPolicy": lambda: StreamingDiLoCoPolicy(4, fragments=2, fragmenter="greedy"),
    "DecoupledDiLoCoPolicy": lambda: DecoupledDiLoCoPolicy(2, fragments=2),
    "GossipPolicy": lambda: GossipPolicy(2, graph=graphs.BaseGraph(1)),
    "push_sum": lambda: GossipPolicy(2, graph=graphs.one_peer_exponential, push_sum=True, delay=1),
    "AsyncServerPolicy": lambda: AsyncServerPolicy(
        ServerOptions(ServerRule(0.5, 0.0)), steps=2, patience_s=10
    ),
}
# With cases of their own here or elsewhere: by the clock, groups, a recorded run.
APART = {
    "SpawnPolicy", "AsyncSelectiveAveragingPolicy", "OneSidedSelectiveAveragingPolicy", "OuterOptimizerPolicy",
    "AsyncModelAveragePolicy", "DecentralizedAveragingPolicy", "ReplayPolicy",
}  # fmt: skip
ALONE: dict[str, Callable[[], SpawnPolicy]] = {
    name: partial(getattr(policies, name), 2)
    for name in policies.__all__
    if name.endswith("Policy") and name not in APART
} | SPECIAL
Case = tuple[str, str, str]
CASES: tuple[Case, ...] = (
    *((name, "alone", "none") for name in ALONE),
    *product(("selective", "flat", "per_parameter"), STRATEGIES, MODES),
)


class Plain(torch.nn.Module):
    """Three tensors of one number: a row of weights, a 0-dim parameter, a buffer."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((300,), value))
        self.logZ = torch.nn.Parameter(torch.tensor(value, dtype=torch.float64))
        self.register_buffer("seen", torch.tensor([value]))


def plain(value: float) -> tuple[Plain, torch.optim.Optimizer]:
    """Return a model and its optimizer."""
    model = Plain(value)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def policy_of(case: Case, comm: Any) -> SpawnPolicy:
    """Return the policy of a case."""
    name, strategy, mode = case
    if name in ALONE:
        return ALONE[name]()
    how: dict[str, Any] = {
        "averaging_strategy": strategy,
        "replacement_mode": mode,
        "cooldown": 0,
        "age_range": (2, 4),
    }
    build = lambda: plain(FRESH)  # noqa: E731
    if name == "selective":
        return AsyncSelectiveAveragingPolicy(build, 2, threshold=0.5, **how)
    windows = Windows(name)  # type: ignore[arg-type]
    return OneSidedSelectiveAveragingPolicy(build, None, 2, 0.5, group=comm, windows=windows, **how)


def walk(case: Case, comm: Any) -> tuple[torch.nn.Module, int]:
    """Take steps until a replacement (or an averaging) has happened somewhere; return model and steps."""
    model: torch.nn.Module
    rank, policy = comm.Get_rank(), policy_of(case, comm)
    model, optimizer = plain(float(rank))
    happened, iteration = 0, 0
    while not happened or iteration < 6:
        with comm.compute(0.001):
            pass
        comm.clock.sleep(0.001)
        model, optimizer, info = policy(iteration, model, optimizer, float(rank), comm)
        happened += comm.allreduce(int(info["averaged_this_iteration"] or info["is_replaced"]))
        iteration += 1
        assert iteration < ENOUGH, f"{case}: nothing happened in {ENOUGH} iterations"
    policy.shutdown()
    policy.shutdown()
    return model, iteration


def numbers(model: torch.nn.Module) -> set[float]:
    """Return the distinct numbers in a model, to single precision."""
    return {round(float(x), 5) for tensor in model.state_dict().values() for x in tensor.reshape(-1)}


def check(case: Case, comm: Any) -> None:
    """Hold one case to what every case must keep."""
    model, _ = walk(case, comm)
    values = comm.allgather(numbers(model))
    assert all(len(each) == 1 for each in values), f"{case}: a torn model: {values}"
    flat = [each.pop() for each in values]
    assert all(0 <= value <= comm.Get_size() - 1 for value in flat), f"{case}: outside the hull: {flat}"
    assert case[0] != "AverageAllPolicy" or set(flat) == {(comm.Get_size() - 1) / 2}
    places = {tensor.data_ptr() for tensor in model.state_dict().values()}
    model.state_dict()["weight"].fill_(-1.0 - comm.Get_rank())
    comm.Barrier()
    assert set(model.state_dict()["weight"].tolist()) == {-1.0 - comm.Get_rank()}, f"{case}: shared memory"
    assert len(places) == 3


def main(comm: Any) -> None:
    torch.set_num_threads(1)
    for case in CASES:
        group = comm.Dup()
        check(case, group)
        comm.record.event("held", case=" ".join(case))
        comm.Barrier()
