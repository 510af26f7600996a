"""Runs of more ranks than memory holds are refused when the first of them have begun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.virtual_run import run

from spawnsim import scenario
from spawnsim.errors import ParameterError
from spawnsim.scenario import Scenario, available_B
from spawnsim.virtual import memory_estimate

RANKS = 12_000


@pytest.fixture
def taken(monkeypatch):
    """Memory that grows by 100 kB a rank: what this process takes depends on the tests before."""
    looks = iter((100_000_000, 190_000_000))
    monkeypatch.setattr(memory_estimate, "resident_B", lambda: next(looks))


def holding(elements: int):
    """Return a program whose ranks hold that many numbers while they wait for each other."""

    def main(comm):
        kept = np.ones(elements)
        comm.barrier()
        assert kept.size == elements

    return main


def test_what_the_first_ranks_take_is_too_much_for_all(monkeypatch, taken):
    """Nobody has passed the first wait; one line names the number, what there is, and what to use instead."""
    monkeypatch.setattr(memory_estimate, "available_B", lambda: 200_000_000)
    passed = []

    def main(comm):
        holding(10)(comm)
        passed.append(comm.rank)

    said = r"ranks=12,000: they would need about 1\.3 GB, estimated from the first 1,000.*`spawnsim columnar`"
    with pytest.raises(ParameterError, match=said) as caught:
        run(main, RANKS)
    assert not passed
    assert not getattr(caught.value, "__notes__", [])


def test_a_run_that_fits_continues_and_very_many_ranks_are_reported(monkeypatch, taken):
    """One note says what they will take."""
    monkeypatch.setattr(memory_estimate, "NOTED", RANKS)
    notes = []
    run(holding(10), RANKS, on_note=notes.append)
    assert len(notes) == 1
    assert notes[0].startswith("12,000 ranks will need about 1.3 GB of ")
    assert "`spawnsim columnar`" in notes[0]


def test_more_ranks_than_fit_in_what_is_available_are_refused_before_anything_is_built(monkeypatch):
    """A rank that does nothing takes 10 kB."""
    monkeypatch.setattr(scenario, "available_B", lambda: 1_000_000_000)
    with pytest.raises(
        ParameterError, match=r"2 GB in all, and 1\.0 GB are available; give fewer ranks, or time the policy"
    ):
        Scenario(200_000)


def test_a_control_group_limits_what_is_available(monkeypatch, tmp_path: Path):
    """Of both versions; files in memory give way, and no limit is none."""
    two, one, free = tmp_path / "two", tmp_path / "one", tmp_path / "free"
    for group, files in (
        (
            two,
            {
                "memory.max": "5000000",
                "memory.current": "3000000",
                "memory.stat": "anon 1\ninactive_file 1000000",
            },
        ),
        (
            one,
            {
                "memory.limit_in_bytes": "9",
                "memory.usage_in_bytes": "7",
                "memory.stat": "total_inactive_file 0",
            },
        ),
        (free, {"memory.max": "max", "memory.current": "3000000", "memory.stat": "anon 1"}),
    ):
        group.mkdir()
        for name, text in files.items():
            (group / name).write_text(text)
    whole = available_B()
    assert whole > 10_000_000
    for groups, left in (([two], 3_000_000), ([two, one], 2), ([free, tmp_path / "none"], None)):
        monkeypatch.setattr(scenario, "_control_groups", lambda groups=groups: groups)
        assert available_B() == left or (left is None and available_B() > 10_000_000)


def test_the_command_ends_with_one_line(tmp_path: Path):
    """Status and words, as of any other parameter."""
    program = tmp_path / "program.py"
    program.write_text("def main(comm):\n    kept = bytearray(10**7)\n    comm.barrier()\n")
    line = (
        "import sys\nfrom spawnsim.virtual import memory_estimate\n"
        "memory_estimate.available_B = lambda: 10**9\nmemory_estimate.SECOND = 120\n"
        "from spawnsim.cli import main\nsys.exit(main())"
    )
    command = [sys.executable, "-c", line, "run", str(program), "--ranks", str(RANKS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("spawnsim: ranks=12,000: they would need about ")
    assert len(done.stderr.splitlines()) == 1
