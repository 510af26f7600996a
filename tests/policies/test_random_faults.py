"""Random programs under random fault plans (`random_faults.py`, which has the campaign); and what that would notice."""

from __future__ import annotations

from typing import Any

import pytest
from support import random_calls
from support.random_faults import KINDS, broken

from spawnsim.policies.exchange.coordinator import Coordinator
from spawnsim.policies.exchange.group_mean import GroupMean

RUNS = dict.fromkeys(KINDS, 20) | {"liveness": 6}


@pytest.mark.parametrize("kind", KINDS)
def test_random_programs_keep_their_promises_under_random_faults(kind: str) -> None:
    """Each ends in time, for a reason that its plan gives, with right results; the same again has the same digest."""
    assert [reported for seed in range(RUNS[kind]) if (reported := broken(kind, seed))] == []


def _no_mean(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        GroupMean, "__call__", lambda self, comm, live, momentum=0.0: type("", (), {"numbers": 0})()
    )


def _twice(patch: pytest.MonkeyPatch) -> None:
    def call(given: Any) -> Any:
        got, wanted = random_calls._accumulate(given)
        return got * 2, wanted

    patch.setitem(random_calls.CALLS, "Accumulate", call)


def _late_is_lost(patch: pytest.MonkeyPatch) -> None:
    decide = Coordinator._decide

    def forgetful(self: Any, round_: int, now_s: float) -> Any:
        self._late = {}
        return decide(self, round_, now_s)

    patch.setattr(Coordinator, "_decide", forgetful)


@pytest.mark.parametrize(
    ("defect", "kind", "seeds", "words"),
    [
        (_no_mean, "recovering", range(20), "instead of the mean"),
        (_twice, "collectives", range(20), "Accumulate returned"),
        (_late_is_lost, "liveness", [26, 44], "left behind"),
    ],
)  # fmt: skip
def test_defects_are_noticed(
    defect: Any, kind: str, seeds: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An average that is none, an accumulation done twice, a rank that is left out for good."""
    defect(monkeypatch)
    assert any(words in broken(kind, seed) for seed in seeds)
