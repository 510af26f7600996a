"""After the faults: everybody averages again, with models that travel in several parts, under every matchmaking."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

import spawnsim
from spawnsim.models import faults
from spawnsim.models.faults import FaultPlan
from spawnsim.policies.averaging import Everyone, Exponential, Grid, Matchmaking, RandomGroups
from spawnsim.policies.decentralized import DecentralizedAveragingPolicy

IMPATIENT = {
    "min_matchmaking_time": 0.05, "request_timeout": 0.02, "sender_timeout": 0.1, "reducer_timeout": 0.25,
    "step_timeout": 0.4, "shutdown_timeout": 0.3,
}  # fmt: skip
FAULTS_END_S, QUIET_S, END_S = 0.25, 0.6, 0.8


class Seen:
    """What the policies of all ranks told: times of averages, and how whole they were."""

    def __init__(self) -> None:
        self.last_s: dict[int, float] = {}
        self.counts: Counter[int] = Counter()
        self.partial: list[dict[str, Any]] = []
        self.ended_s: dict[int, float] = {}
        self.models: dict[int, torch.Tensor] = {}


def train(
    ranks: int, matchmaking: Matchmaking | None, plan: Any, *, asynchronous: bool = False, **how: Any
) -> Seen:
    """Let ranks train blocks of 10 ms and average every second one, until `end_s`; return what they saw."""
    seen, end_s, size = Seen(), how.pop("end_s", END_S), how.pop("size", 30_000)
    parameters = IMPATIENT | how

    def main(comm: Any) -> None:
        rank = comm.rank
        model = torch.nn.Linear(size - 1, 1).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float(rank))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policy = DecentralizedAveragingPolicy(
            2, matchmaking=matchmaking, asynchronous=asynchronous, **parameters
        )
        iteration = 0
        while comm.clock.now() < end_s:
            with comm.compute(0.01):
                pass
            _, _, info = policy(iteration, model, optimizer, group=comm)
            iteration += 1
            assert info["complete"] == (info["received"] == 1 and not info["missing"])
            if info["averaged_this_iteration"]:
                seen.last_s[rank] = comm.clock.now()
                seen.counts[rank] += 1
                if not info["complete"]:
                    seen.partial.append(info)
        policy.shutdown()
        seen.ended_s[rank], seen.models[rank] = comm.clock.now(), model.weight.detach()

    spawnsim.run(main, ranks=ranks, platform="ethernet-10g", faults=plan, seed=1)
    return seen


def check(seen: Seen, ranks: int, since_s: float = QUIET_S) -> None:
    """Hold that all who live have averaged since, and that no weight is beyond what ranks began with."""
    assert {rank for rank in seen.ended_s if seen.last_s.get(rank, 0.0) < since_s} == set()
    for weights in seen.models.values():
        assert ((weights >= -1e-9) & (weights <= ranks - 1 + 1e-9)).all()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "fault",
    [
        "pause:2@0.2s+40ms",
        "pause:2@0.15s+0.3s",
        "drop:*>0@0.2s+0.05s,0.5",
        "slow:2@0.1s+0.3s,3",
    ],
)
def test_nobody_is_left_behind_for_good(fault: str, asynchronous: bool) -> None:
    """A pause, lost messages, a straggler: all four are together again, and lose no more time than the fault took."""
    quiet = train(4, Everyone(), None, asynchronous=asynchronous)
    seen = train(4, Everyone(), fault, asynchronous=asynchronous)
    check(seen, 4, since_s=END_S - 0.1)
    least = 0.5 * min(quiet.counts.values())
    assert all(count >= least for count in seen.counts.values()), (quiet.counts, seen.counts)


def plan_of(seed: int, ranks: int) -> FaultPlan:
    """Return a random plan of faults that end at `FAULTS_END_S`."""
    draw = random.Random(seed)

    def window() -> tuple[float, float]:
        begin_s = draw.uniform(0, FAULTS_END_S - 0.01)
        return begin_s, draw.uniform(0.005, FAULTS_END_S - begin_s)

    def link() -> tuple[int | None, int | None]:
        one, other = (None if draw.random() < 0.3 else rank for rank in draw.sample(range(ranks), 2))
        return one, other

    kinds = {
        "Pause": lambda: (draw.randrange(ranks), *window()),
        "SlowDown": lambda: (draw.randrange(ranks), *window(), draw.randint(2, 6)),
        "LinkDown": lambda: (*link(), *window()),
        "Drop": lambda: (*link(), *window(), draw.random()),
        "Duplicate": lambda: (*link(), *window(), draw.random()),
        "Corrupt": lambda: (*link(), *window(), draw.random()),
        "Delay": lambda: (*link(), *window(), draw.uniform(0, 0.01), draw.uniform(0, 0.05)),
        "Partition": lambda: (tuple(draw.sample(range(ranks), ranks // 2)), *window()),
        "Crash": lambda: (ranks - 1, draw.uniform(0, FAULTS_END_S)),
    }
    chosen = draw.sample(sorted(kinds), draw.randint(1, 4))
    return FaultPlan(tuple(getattr(faults, kind)(*kinds[kind]()) for kind in chosen), seed)


@pytest.mark.parametrize(
    ("seed", "ranks", "matchmaking"),
    [
        (0, 3, Everyone()), (1, 6, Everyone()), (2, 6, None), (3, 4, Grid()), (4, 10, Grid()), (5, 4, RandomGroups(2)),
        (6, 5, Exponential()), (7, 8, Exponential()), (8, 7, RandomGroups(3)), (9, 11, None), (10, 7, Everyone()),
        (11, 3, None),
    ],
)  # fmt: skip
def test_random_faults_end_and_averaging_goes_on(
    seed: int, ranks: int, matchmaking: Matchmaking | None
) -> None:
    """Under several kinds of faults at once."""
    seen = train(ranks, matchmaking, plan_of(seed, ranks), asynchronous=seed % 3 == 2)
    check(seen, ranks)


def test_damage_is_refused_and_reported() -> None:
    """A fifth of all messages is damaged: no weight leaves the hull, and who was not averaged is named."""
    seen = train(6, None, "corrupt:*>*@0s,0.2", end_s=0.5)
    check(seen, 6, since_s=0.2)
    assert len(seen.partial) > 5
    for info in seen.partial:
        assert info["received"] < 1 or info["missing"]
        assert 0 <= info["missing"] < 6
