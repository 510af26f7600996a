"""The same policies on virtual ranks and on real MPI: bit-equal where they are synchronous, replayed where not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import spawnsim

pytestmark = pytest.mark.mpi

PROGRAM = Path(__file__).parents[1] / "programs" / "policy_steps.py"
SYNCHRONOUS = (
    "average",
    "average-momentum",
    "average-optimizer",
    "average@halves",
    "average@three",
    "average-poisoned",
    "average-poisoned-momentum-optimizer@three",
    "average-equal@three",
    "neighbours",
    "outer-diloco",
    "outer-diloco@three",
    "outer-sparseloco",
    "outer-demo",
    "outer-streaming",
    "outer-eager",
    "outer-noloco@three",
    "outer-easgd",
    "outer-edit",
    "outer-sparta",
    "gossip-ring",
    "gossip-base@three",
    "gossip-pairs-global",
    "gossip-push-sum",
    "gossip-push-sum-delay",
)
JUDGED = ("worst-rising", "worst-falling")
ASYNCHRONOUS = (
    "mean",
    "weighted_mean",
    "best_only",
    "reset_weights",
    "windows-flat",
    "windows-per_parameter",
)
DECISION = (
    "iteration",
    "round",
    "replaced",
    "donors",
    "weights",
    "versions",
    "asked",
    "strategy",
    "momentum",
    "rule",
)


@dataclass(frozen=True)
class Part:
    """What a run recorded under one of its policies."""

    events: list[dict[str, Any]]

    @property
    def digests(self) -> dict[int, str]:
        """Each rank's final parameters."""
        return {event["rank"]: event["digest"] for event in self.events if event["kind"] == "end"}

    @property
    def decisions(self) -> list[tuple[Any, ...]]:
        """All replacements, in an order that does not depend on time."""
        found = [
            tuple(event[name] for name in DECISION) for event in self.events if event["kind"] == "replacement"
        ]
        return sorted(found, key=lambda each: (each[2], each[0]))


def parts(run: spawnsim.Run, policies: tuple[str, ...]) -> dict[str, Part]:
    """Return what was recorded under each policy: a rank's events up to its own next end."""
    found = {policy: Part([]) for policy in policies}
    at = Counter()
    for event in run.events:
        found[policies[at[event["rank"]]]].events.append(event)
        at[event["rank"]] += event["kind"] == "end"
    return found


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Part]:
    """Run the program on four real ranks, one policy after the other."""
    out, policies = tmp_path_factory.mktemp("real") / "run", SYNCHRONOUS + ASYNCHRONOUS + JUDGED
    line = [sys.executable, "-m", "spawnsim", "run", PROGRAM, "--backend", "mpi", "-n", "4", "--seed", "7"]
    line += ["--out", out, "--set", f"policies={','.join(policies)}"]
    done = subprocess.run(list(map(str, line)), capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    return parts(spawnsim.Run.load(out), policies)


def on_virtual(policies: tuple[str, ...], events: Path | str = "") -> dict[str, Part]:
    """Run the program on four virtual ranks."""
    given = {"policies": ",".join(policies), "events": str(events)}
    return parts(spawnsim.run(PROGRAM, ranks=4, seed=7, parameters=given), policies)


def test_averaging_gives_the_same_bits_on_both_buildings(real: dict[str, Part]) -> None:
    """Twenty steps end in equal parameters on every rank, for float32, bfloat16, 0-dim, frozen, large and buffers.

    With momentum, with the optimizer's state, in groups of two and of three that average apart, and where one rank's
    weights turn into NaN, large tensors included, which real ranks sum where they lie: nobody ends with one.
    """
    virtual = on_virtual(SYNCHRONOUS)
    for policy in SYNCHRONOUS:
        assert len(real[policy].digests) == 4
        assert real[policy].digests == virtual[policy].digests, policy
        assert all(event["finite"] for event in real[policy].events if event["kind"] == "end")


def test_equal_models_stay_what_they_are_on_real_ranks(real: dict[str, Part]) -> None:
    """In a group of three, where sums are rounded."""
    events = real["average-equal@three"].events
    assert len({event["digest"] for event in events if event["kind"] in ("start", "end")}) == 1


def test_real_ranks_are_judged_at_one_iteration(real: dict[str, Part]) -> None:
    """Whether metrics rise or fall for all: rank 0 is the worst in every round, and nobody else is replaced."""
    for policy in JUDGED:
        replaced = [event["replaced"] for event in real[policy].events if event["kind"] == "replacement"]
        assert set(replaced) == {0}, policy


def test_a_real_run_replayed_on_virtual_ranks_takes_the_same_decisions(
    real: dict[str, Part], tmp_path: Path
) -> None:
    """Who, when, from whom, which version, how much: equal; and so are the parameters, bit for bit."""
    events = tmp_path / "events.jsonl"
    for policy in ASYNCHRONOUS:
        assert real[policy].decisions, policy
        events.write_text("\n".join(json.dumps(event) for event in real[policy].events))
        again = on_virtual((f"replay-{policy}",), events)[f"replay-{policy}"]
        assert again.decisions == real[policy].decisions, policy
        assert again.digests == real[policy].digests, policy
