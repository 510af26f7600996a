"""Random policies with random parameters, and models in which every number can be accounted for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from spawnsim import policies
from spawnsim.policies import (
    AsyncModelAveragePolicy,
    AsyncSelectiveAveragingPolicy,
    AsyncServerPolicy,
    AverageAllPolicy,
    DecentralizedAveragingPolicy,
    DecoupledDiLoCoPolicy,
    GossipPolicy,
    OneRoundLatePolicy,
    OneSidedSelectiveAveragingPolicy,
    OuterOptimizerPolicy,
    PopulationBasedTrainingPolicy,
    ReplayPolicy,
    ServerOptions,
    ServerRule,
    SpawnPolicy,
    StreamingDiLoCoPolicy,
    Tier,
    WAGMAPolicy,
    Windows,
    Wiring,
    graphs,
)
from spawnsim.policies.averaging import Everyone, Exponential, Grid, RandomGroups


class Draw:
    """Draws that are functions of a key."""

    def __init__(self, *key: int, hurried: bool = False, damaged: bool = False, mortal: bool = False) -> None:
        self.key, self.rng = key, np.random.default_rng(key)
        self.hurried, self.damaged, self.mortal = hurried, damaged, mortal

    def one(self, *choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def patience(self, seconds: float) -> float | None:
        """Draw a deadline of a policy: so many seconds, or the one that it learns, which begins with half a minute."""
        return seconds if self.one(True, False) or self.hurried else None

    def ranks(self) -> int:
        """Draw a number of ranks: mostly few, since each costs time."""
        return int(self.one(2, 3, 3, 4, 4, 5, 5, 6, 7, 8, 9, 10, 12, 16))

    def count(self) -> int:
        """Draw a number of elements: some are more than any platform sends eagerly."""
        return int(self.one(5, 5, 40, 40, 300, 300, 3000, 40_000))


def _selective(draw: Draw) -> Any:
    mode = draw.one("worst_ratio", "threshold", "age")
    wiring = Wiring(
        quorum=draw.one(1.0, 0.5, 2), deadline=draw.patience(0.05), part_nbytes=draw.one(2**26, 4096),
        shutdown_timeout_s=0.3, coordinator=draw.one(0, 1),
    )  # fmt: skip
    return AsyncSelectiveAveragingPolicy(
        None, 2, 0.3, draw.one("mean", "weighted_mean", "best_only"), cooldown=0, wiring=wiring,
        threshold=2.0 if mode == "threshold" else None, replacement_mode=mode, age_range=(2, 6),
        compression=draw.one(None, None, "float16"),
    )  # fmt: skip


def _one_sided(draw: Draw) -> Any:
    windows = Windows(
        draw.one("flat", "flat" if draw.damaged else "per_parameter"), deadline=draw.patience(0.2), board_timeout_s=0.2,
        shutdown_timeout_s=0.5, holder=draw.one(0, 1), slots=draw.one(2, 4),
    )  # fmt: skip
    return OneSidedSelectiveAveragingPolicy(
        None, None, 2, 2.0, 0.3, draw.one("mean", "weighted_mean", "best_only"), 0.0, (2, 6),
        draw.one("worst_ratio", "threshold", "age"), cooldown=0, windows=windows,
    )  # fmt: skip


def _groups(draw: Draw) -> Any:
    matchmaking = draw.one(None, None, Everyone(), Grid(), RandomGroups(2), Exponential())
    if draw.hurried and draw.mortal and matchmaking is not None:  # a rank's only partners may have died
        matchmaking = Everyone()
    return DecentralizedAveragingPolicy(
        2, asynchronous=draw.one(False, True), target_group_size=draw.one(2, 4, None), matchmaking=matchmaking,
        min_matchmaking_time=0.05, request_timeout=0.02, next_chunk_timeout=0.05, sender_timeout=0.1,
        reducer_timeout=0.25, step_timeout=0.4, shutdown_timeout=0.3, load_state=draw.one(False, True),
        part_size_bytes=draw.one(2**19, 2**14),
    )  # fmt: skip


def _by_clock(draw: Draw, warm_up: int = 0) -> Any:
    mode = draw.one("all", "ring", "shift_one", "random")
    return AsyncModelAveragePolicy(mode, 30, warm_up, patience_s=0.1, background=draw.one(False, False, True))


POLICIES: dict[str, Callable[[Draw], Any]] = {
    "average_all": lambda draw: AverageAllPolicy(draw.one(1, 2, 5), momentum=draw.one(0.0, 0.0, 0.5)),
    "selective": _selective, "one_sided": _one_sided, "groups": _groups, "by_clock": _by_clock,
    "warm_up": lambda draw: _by_clock(draw, 3),
}  # fmt: skip


def _gossip(draw: Draw) -> Any:
    graph = draw.one(graphs.ring, graphs.torus, graphs.exponential, graphs.random_pairs, graphs.BaseGraph(1))
    return GossipPolicy(draw.one(1, 2), graph=graph, global_every=draw.one(None, 4))


def _push_sum(draw: Draw) -> Any:
    graph = draw.one(graphs.one_peer_exponential, graphs.exponential)
    return GossipPolicy(draw.one(1, 2), graph=graph, push_sum=True, delay=draw.one(0, 1, 2))


def _server(draw: Draw) -> Any:
    rule = draw.one(ServerRule(0.5, 0), ServerRule(0.5, 0.5, 2), ServerRule(0.5, 0.9, 3, delayed=True))
    tier = draw.one(None, None, Tier(lambda size: [rank * 2 // size for rank in range(size)], every=3))
    options = ServerOptions(rule, grace_s=draw.one(0.0, 0.005))
    return AsyncServerPolicy(
        options, steps=draw.one(1, 3), dylu=draw.one(False, True), tier=tier, patience_s=0.5
    )


def _wagma(draw: Draw) -> Any:
    return WAGMAPolicy(
        draw.one(1, 2), group_size=draw.one(None, 2, 4), sync_every=draw.one(2, 5), patience_s=0.5
    )


# Of all other policies that are registered, what they are by default, under the names of their files.
TUNED = (
    SpawnPolicy, AsyncModelAveragePolicy, AsyncSelectiveAveragingPolicy, AsyncServerPolicy, AverageAllPolicy,
    DecentralizedAveragingPolicy, DecoupledDiLoCoPolicy, GossipPolicy, OneRoundLatePolicy,
    OneSidedSelectiveAveragingPolicy, OuterOptimizerPolicy, PopulationBasedTrainingPolicy, ReplayPolicy,
    StreamingDiLoCoPolicy, WAGMAPolicy,
)  # fmt: skip
PLAIN: dict[str, Callable[..., Any]] = {
    kind.__module__.rpartition(".")[2]: kind
    for name in policies.__all__
    if name.endswith("Policy") and (kind := getattr(policies, name)) not in TUNED
}
OUTER: dict[str, Callable[..., Any]] = {
    "fedavg": OuterOptimizerPolicy.fedavg, "bmuf": OuterOptimizerPolicy.bmuf, "slowmo": OuterOptimizerPolicy.slowmo,
    "diloco": OuterOptimizerPolicy.diloco, "muloco": OuterOptimizerPolicy.muloco,
    "sparseloco": OuterOptimizerPolicy.sparseloco, "demo": lambda every: OuterOptimizerPolicy.demo(0.01),
    "streaming": lambda every: StreamingDiLoCoPolicy(2 * every, fragments=2, fragmenter="greedy"),
    "eager": OneRoundLatePolicy.eager, "co2": OneRoundLatePolicy.co2,
    "decoupled": lambda every: DecoupledDiLoCoPolicy(2 * every, fragments=2),
    "papa": lambda every: AverageAllPolicy(every, momentum=0.99), **PLAIN,
}  # fmt: skip
OUTER_DRAWN = ("fedavg", "slowmo", "diloco", "streaming", "eager", "edit", "noloco", "easgd")
# Apart, so that a seed's run of the others stays what it is.
ON_GRAPHS_AND_SERVERS: dict[str, Callable[[Draw], Any]] = {
    "gossip": _gossip, "push_sum": _push_sum, "server": _server, "wagma": _wagma,
    "outer": lambda draw: OUTER[draw.one(*OUTER_DRAWN)](draw.one(2, 3)),
    "population": lambda draw: PopulationBasedTrainingPolicy(draw.one(1, 2)),
}  # fmt: skip
EVERY: dict[str, Callable[[Draw], Any]] = {
    **POLICIES, **{name: make for name, make in ON_GRAPHS_AND_SERVERS.items() if name != "outer"},
    **{name: lambda draw, make=make: make(draw.one(1, 2, 4)) for name, make in OUTER.items()},
    "ad_psgd": lambda draw: AsyncModelAveragePolicy("random", 1e-3, patience_s=0.1),
    "papa_by_clock": lambda draw: AsyncModelAveragePolicy("all", 30, share=0.01, patience_s=0.1),
}  # fmt: skip
CHECKED = ("selective", "one_sided", "groups", "by_clock")  # damaged weights are refused
WHOLE = ("selective", "one_sided")  # each replaced rank takes all of its model from the same donors


class Mixed(torch.nn.Module):
    """A model of several dtypes whose every number is the same: what became of it can be read off."""

    def __init__(self, value: float, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((width,), value))
        self.coarse = torch.nn.Parameter(torch.full((width // 4, 2), value, dtype=torch.bfloat16))
        self.logZ = torch.nn.Parameter(torch.tensor(value, dtype=torch.float64))
        self.register_buffer("seen", torch.full((3,), round(value)))

    def ends(self) -> dict[str, tuple[float, float]]:
        return {name: (float(t.min()), float(t.max())) for name, t in self.state_dict().items() if t.numel()}
