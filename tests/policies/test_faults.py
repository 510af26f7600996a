"""The asynchronous policy under random faults: crashes, pauses, losses, duplicates, delays, damage, partitions."""

from __future__ import annotations

from typing import Any

import pytest
from support.policy_ranks import numbers, walk

from spawnsim.models.faults import Swarm
from spawnsim.policies import AsyncSelectiveAveragingPolicy, ExchangeOptions

RANKS, STEPS, HORIZON_S = 10, 60, 0.3
KINDS = ("crash", "pause", "slow", "down", "drop", "delay", "duplicate", "corrupt", "partition")


def policy(comm: Any) -> AsyncSelectiveAveragingPolicy:
    """Return a policy with a short deadline that checks every byte."""
    wiring = ExchangeOptions(deadline=0.05, checksum=True, shutdown_timeout_s=0.1)
    return AsyncSelectiveAveragingPolicy(None, 2, 0.3, cooldown=0, wiring=wiring)


@pytest.mark.parametrize("seed", range(25))
def test_faults_cost_messages_never_models_or_time(seed: int) -> None:
    """Every surviving rank ends in time, models stay within the hull of the first ones, no replaced rank gives.

    After the faults, replacements go on unless the coordinating rank has died.
    """
    plan = Swarm(RANKS, HORIZON_S, KINDS).plan(seed)
    found = walk(policy, ranks=RANKS, steps=STEPS, seed=seed, faults=plan)
    crashed = {event["rank"] for event in found.events("crash")}
    assert {rank for rank, step in found.infos if step == STEPS - 1} == set(range(RANKS)) - crashed
    for model in found.models.values():
        assert all(0 <= number <= RANKS - 1 for number in numbers(model))
    rounds: dict[int, set[int]] = {}
    for event in found.events("decision"):
        rounds[event["round"]] = set(event["replaced"])
    for event in found.events("replacement"):
        assert not set(event["donors"]) & rounds[event["round"]]
    if 0 not in crashed and len(crashed) < RANKS - 1:
        assert max(event["time_s"] for event in found.events("decision") if event["replaced"]) > HORIZON_S


@pytest.mark.parametrize("quorum", [1.0, 0.5])
def test_who_has_fallen_behind_takes_part_again(quorum: float) -> None:
    """A rank that was paused reports too late for every round that follows, and is still replaced, and a donor."""

    def patient(comm: Any) -> AsyncSelectiveAveragingPolicy:
        return AsyncSelectiveAveragingPolicy(
            None, 2, 0.3, "best_only", cooldown=0, wiring=ExchangeOptions(quorum=quorum, deadline=0.02)
        )

    def metric(rank: int, step: int) -> float:
        return float(rank) if rank != 3 else -1.0 if step < 40 else 99.0

    found = walk(patient, ranks=RANKS, steps=70, faults="pause:3@0.05s+0.2s", metric=metric)
    after = [event for event in found.events("replacement") if event["time_s"] > 0.3]
    assert any(event["rank"] == 3 for event in after)
    assert any(3 in event["donors"] for event in after)
