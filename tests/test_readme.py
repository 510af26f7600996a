"""The README's programs run as it says, on virtual ranks and on real ones."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import spawnsim
from spawnsim import cli
from spawnsim.errors import Deadlock

README = Path(__file__).resolve().parent.parent / "README.md"


@pytest.fixture
def hello(tmp_path: Path) -> Path:
    """The training loop that the README has written."""
    assert "spawnsim new program hello" in README.read_text(encoding="utf-8")
    assert cli.main(["new", "program", str(tmp_path / "hello")]) == 0
    return tmp_path / "hello.py"


def _totals(hello: Path, *arguments: str, hash_seed: str = "0") -> dict[str, Any]:
    line = [
        sys.executable,
        "-m",
        "spawnsim",
        "run",
        str(hello),
        "--json",
        "--set",
        "iterations=30",
        *arguments,
    ]
    env = os.environ | {"PYTHONHASHSEED": hash_seed}
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=200, env=env)
    assert done.returncode == 0, done.stderr
    totals: dict[str, Any] = json.loads(done.stdout)
    return totals


def test_the_program_gives_one_digest_per_seed(hello: Path) -> None:
    """Two processes with different hash seeds agree on everything but wall time; another seed differs."""
    world = ("--ranks", "20", "--platform", "ethernet-10g", "--straggler", "lognormal:0.3")
    first = _totals(hello, *world, "--seed", "7", hash_seed="1")
    again = _totals(hello, *world, "--seed", "7", hash_seed="2")
    how = {"platform": "ethernet-10g", "stragglers": "lognormal:0.3", "parameters": {"iterations": 30}}
    other = spawnsim.run(hello, ranks=20, seed=8, **how)
    assert first | {"wall_seconds": 0} == again | {"wall_seconds": 0}
    assert first["digest"] != other.totals["digest"]
    assert first["replacements"] > 0


def test_the_program_exchanges_again_and_again(hello: Path) -> None:
    """Replacements come in most rounds, and nothing is to be warned of: its settings fit its length."""
    run = spawnsim.run(hello, ranks=20, seed=7, stragglers="lognormal:0.3")
    rounds = {event["round"] for event in run.events if event["kind"] == "replacement"}
    assert rounds >= {10, 20, 30, 40, 50, 60, 70, 80}
    assert "warnings" not in run.what


def test_the_deadlock_is_found(tmp_path: Path) -> None:
    """All ranks send before they receive; shorter messages leave at once."""
    ring = tmp_path / "ring.py"
    ring.write_text(README.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0])
    with pytest.raises(Deadlock, match=r"33 of 33 ranks wait"):
        spawnsim.run(ring, ranks=33)
    ring.write_text(ring.read_text().replace("20_000", "2_000"))
    spawnsim.run(ring, ranks=33)


def test_the_script_for_torchrun_is_the_example(tmp_path: Path) -> None:
    """`spawnsim new` writes the file that tests/test_examples.py runs."""
    assert cli.main(["new", "torchrun", str(tmp_path / "ddp")]) == 0
    assert (tmp_path / "ddp.py").read_text() == (README.parent / "docs/examples/ddp.py").read_text()


@pytest.mark.mpi
def test_the_same_file_runs_on_real_ranks(hello: Path) -> None:
    """Unchanged, under mpiexec."""
    totals = _totals(hello, "--backend", "mpi", "-n", "2")
    assert (totals["ranks"], totals["iterations"]) == (2, 30)


def test_its_commands_work_one_after_another() -> None:
    """No two of them write the same place, which would be refused, and `plot` names runs that were made."""
    text = README.read_text(encoding="utf-8")
    made = re.findall(r"--out (\S+)", text)
    assert len(set(made)) == len(made) > 1
    assert set(re.findall(r"runs/\w+", text)) == set(made)
