"""The same policies on virtual ranks and on real MPI: bit-equal where they are synchronous, replayed where not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import spawnsim

pytestmark = pytest.mark.mpi

PROGRAM = Path(__file__).parents[1] / "programs" / "policy_steps.py"
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


def on_mpi(out: Path, **parameters: Any) -> spawnsim.Run:
    """Run the program on four real ranks."""
    settings = [word for name, value in parameters.items() for word in ("--set", f"{name}={value}")]
    line = [sys.executable, "-m", "spawnsim", "run", PROGRAM, "--backend", "mpi", "-n", "4", "--seed", "7"]
    done = subprocess.run(
        [*map(str, line), "--out", str(out), *settings],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return spawnsim.Run.load(out)


def on_virtual(**parameters: Any) -> spawnsim.Run:
    """Run the program on four virtual ranks."""
    return spawnsim.run(PROGRAM, ranks=4, seed=7, parameters=parameters)


def digests(run: spawnsim.Run) -> dict[int, str]:
    """Return each rank's final parameters."""
    return {event["rank"]: event["digest"] for event in run.events if event["kind"] == "end"}


def decisions(run: spawnsim.Run) -> list[tuple[Any, ...]]:
    """Return all replacements in an order that does not depend on time."""
    found = [
        tuple(event[name] for name in DECISION) for event in run.events if event["kind"] == "replacement"
    ]
    return sorted(found, key=lambda each: (each[2], each[0]))


@pytest.mark.parametrize("policy", ["average", "average-momentum", "average-optimizer"])
def test_averaging_gives_the_same_bits_on_both_buildings(policy: str, tmp_path: Path) -> None:
    """Twenty steps end in equal parameters on every rank, for float32, bfloat16, 0-dim, frozen and buffers."""
    real, virtual = digests(on_mpi(tmp_path, policy=policy)), digests(on_virtual(policy=policy))
    assert real == virtual
    assert len(real) == 4


def test_averaging_over_subgroups_gives_the_same_bits(tmp_path: Path) -> None:
    """Two groups of two average among themselves."""
    real, virtual = digests(on_mpi(tmp_path, subgroup="true")), digests(on_virtual(subgroup=True))
    assert real == virtual


@pytest.mark.parametrize(
    "policy", ["mean", "weighted_mean", "best_only", "reset_weights", "windows-flat", "windows-per_parameter"]
)
def test_a_real_run_replayed_on_virtual_ranks_takes_the_same_decisions(policy: str, tmp_path: Path) -> None:
    """Who, when, from whom, which version, how much: equal; and so are the parameters, bit for bit."""
    real = on_mpi(tmp_path, policy=policy)
    assert decisions(real)
    virtual = on_virtual(policy="replay", events=str(tmp_path / "events.jsonl"))
    assert decisions(virtual) == decisions(real)
    assert digests(virtual) == digests(real)
