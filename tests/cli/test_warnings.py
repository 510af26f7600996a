"""Warnings of runs reach whoever uses the runs: each kind once, on standard error, with the number of runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from spawnsim import Run, cli
from spawnsim.run.result import warnings_of_runs
from spawnsim.study import Sweep

PROGRAM = """
def main(comm, ratio=0.1):
    for iteration in range(3):
        with comm.compute(0.01):
            pass
        comm.record(iteration=iteration, loss=ratio)
    if comm.rank == 1 and ratio > 0.1:
        comm.record.event("warning", text=f"rank {comm.rank} doubts {ratio}")
"""
STUDY = """
def study(context):
    cells = context.grid("prog.py", ranks=[2], seeds=[0, 1], over={"ratio": [0.1, 0.2, 0.3]})
    context.sweep(cells[:3])
    context.sweep(cells)
"""


def _warnings(capsys: pytest.CaptureFixture[str]) -> list[str]:
    lines = capsys.readouterr().err.splitlines()
    return [line.removeprefix("spawnsim: warning: ") for line in lines if "warning" in line]


def test_kinds_differ_in_more_than_numbers() -> None:
    """Ranks, times and counts make no other kind; words do."""
    said = {
        "a": ["rank 3: late by 1.5e-3 s (and 62 more like it)", "odd"],
        "b": [],
        "c": ["rank 12: late by 20 s", "rank 4: early by 20 s"],
    }
    assert warnings_of_runs({name: {"warnings": found} for name, found in said.items()}) == [
        "2 of 3 runs, the first is a: rank 3: late by 1.5e-3 s (and 62 more like it)",
        "1 of 3 runs, the first is a: odd",
        "1 of 3 runs, the first is c: rank 4: early by 20 s",
    ]
    assert warnings_of_runs({"a": {"warnings": said["a"]}}) == said["a"]


def test_a_sweep_and_what_is_made_of_it_show_the_warnings_of_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sweep, begun and complete, its figures, and its report, which has them on the page, too."""
    monkeypatch.chdir(tmp_path)
    Path("prog.py").write_text(PROGRAM)
    sweep = ["sweep", "prog.py", "-n", "2", "--set", "ratio=0.1,0.2,0.3", "--out", "q", "--jobs", "0"]
    plot = ["plot", "q", "--y", "final:loss", "--format", "svg"]
    told = ["2 of 3 runs, the first is ratio 0.2: rank 1 doubts 0.2"]
    for command in (sweep, sweep, plot, ["report", "q"]):
        assert cli.main(command) == 0
        assert _warnings(capsys) == told
    assert Sweep.load("q").warnings() == told
    page = Path("report.html").read_text()
    assert "rank 1 doubts 0.2" in page[: page.index('id="ranks"')]
    assert cli.main(["plot", "q", "--y", "loss", "--x", "time_s", "--where", "ratio=0.1"]) == 0
    assert _warnings(capsys) == []


def test_figures_and_timelines_of_runs_show_their_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one run as it was printed when it ended; of several with their number."""
    monkeypatch.chdir(tmp_path)
    Path("prog.py").write_text(PROGRAM)
    for ratio in (0.1, 0.2, 0.3):
        command = ["run", "prog.py", "-n", "2", "--set", f"ratio={ratio}", "--out", f"r{ratio}", "--quiet"]
        assert cli.main(command) == 0
    assert _warnings(capsys) == ["rank 1 doubts 0.2", "rank 1 doubts 0.3"]
    for command in (["plot", "--format", "svg"], ["report"], ["trace", "--out", "t.json"]):
        assert cli.main([command[0], "r0.2", *command[1:]]) == 0
        assert _warnings(capsys) == ["rank 1 doubts 0.2"]
        assert cli.main([command[0], "r0.1", "r0.2", "r0.3", *command[1:]]) == 0
        told = _warnings(capsys)
        assert len(told) == 1
        assert told[0].startswith("2 of 3 runs, the first is ")
        assert told[0].endswith(": rank 1 doubts 0.2")


def test_a_study_shows_each_kind_of_warning_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its sweeps share runs, and each run counts once."""
    monkeypatch.chdir(tmp_path)
    Path("prog.py").write_text(PROGRAM)
    Path("my.py").write_text(STUDY)
    assert cli.main(["study", "my.py", "--jobs", "0", "--out", "mine"]) == 0
    told = _warnings(capsys)
    assert len(told) == 1
    assert told[0].startswith("4 of 6 runs, the first is mine/runs/prog-n2-s0-")
    assert told[0].endswith(": rank 1 doubts 0.2")


def test_quiet_keeps_the_warning_of_a_metric_that_is_no_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--quiet` printed nothing, with status 0, of a run whose metrics were all NaN."""
    torch = pytest.importorskip("torch")
    assert torch
    file = tmp_path / "nan.py"
    file.write_text(
        "import torch\nfrom spawnsim import AsyncSelectiveAveragingPolicy\n\ndef main(comm):\n"
        "    def build():\n        model = torch.nn.Linear(1, 1)\n"
        "        return model, torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    model, optimizer = build()\n"
        "    with AsyncSelectiveAveragingPolicy(build, average_every=2, replacement_ratio=0.5) as policy:\n"
        "        for iteration in range(6):\n            with comm.compute(0.01):\n                pass\n"
        "            model, optimizer, info = policy(iteration, model, optimizer, float('nan'), comm)\n"
    )
    command = ["run", str(file), "-n", "4", "--out", str(tmp_path / "a")]
    assert cli.main([*command, "--quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    said = Run.load(tmp_path / "a").what["warnings"]
    assert any("local_metric" in sentence for sentence in said), said
    assert captured.err == "".join(f"spawnsim: warning: {sentence}\n" for sentence in said)
