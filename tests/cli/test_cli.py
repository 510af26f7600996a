"""`spawnsim.run` and the command line, over a stand-in for the simulator, where ranks run one after another."""

from __future__ import annotations

import errno
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import spawnsim.policies
from spawnsim import cli, options
from spawnsim.errors import (
    Deadlock,
    InternalError,
    Livelock,
    ParameterError,
    RankError,
    RankFailed,
    SpawnsimError,
    Timeout,
)
from spawnsim.run import virtual
from spawnsim.run.program import ProgramFile, load, program
from spawnsim.run.result import whole_digest
from spawnsim.run.watched import Bar
from spawnsim.scenario import Scenario

PROGRAM = '''
"""Counts."""
def main(comm, iterations=3, fail_on=-1):
    print("hello")
    for iteration in range(iterations):
        comm.record(iteration=iteration, loss=1.0 / (iteration + 1))
    comm.event("replacement", donors=[0])
    if comm.rank == fail_on:
        raise ValueError("no such luck")
'''


@dataclass(frozen=True)
class PaperTotals:
    virtual_seconds: float = 1.5
    wall_seconds: float = 0.1
    events: int = 9
    messages: int = 4
    bytes: int = 4096
    digest: str = "ab12"


def _paper(
    main: Callable[..., object], scenario: Scenario, *, recorder: Any, progress: Any, **_rest: Any
) -> PaperTotals:
    ranks = scenario.ranks
    for rank in range(ranks):
        comm = SimpleNamespace(
            rank=rank,
            clock=lambda: 0.5,
            record=lambda rank=rank, **values: recorder.row(rank, 0.5, values),
            event=lambda kind, rank=rank, **fields: recorder.event(rank, 1.0, kind, fields),
        )
        try:
            main(comm)
        except Exception as cause:
            error = RankError(rank, 0.5, f"rank {rank} raised {cause!r} at 0.5 virtual s")
            error.totals = PaperTotals(virtual_seconds=0.5)  # type: ignore[attr-defined]
            raise error from cause
        if progress is not None:
            progress(0.5, rank + 1, ranks)
    return PaperTotals()


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the virtual cluster."""
    monkeypatch.setattr(virtual, "_simulate", _paper)


@pytest.fixture
def train(tmp_path: Path) -> Path:
    """A training file."""
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


def _ending_with(error: BaseException) -> Callable[..., PaperTotals]:
    def simulate(_main: object, _scenario: Scenario, **_rest: object) -> PaperTotals:
        raise error

    return simulate


# ------------------------------------------------------------------------------------------------- in Python
@pytest.mark.usefixtures("paper")
def test_run_returns_what_was_recorded() -> None:
    """Rows, events and totals of all ranks, with iterations and replacements counted."""

    def main(comm: Any) -> None:
        comm.record(loss=float(comm.rank))
        comm.event("replacement", donors=[0])

    run = spawnsim.run(main, ranks=3)
    assert run.table["loss"].tolist() == [0.0, 1.0, 2.0]
    assert run.totals == {
        "ranks": 3, "iterations": 1, "virtual_seconds": 1.5, "wall_seconds": 0.1, "events": 9, "messages": 4,
        "bytes": 4096, "replacements": 3, "digest": whole_digest("ab12", run.table, run.events),
    }  # fmt: skip
    assert run.outcome == "finished"


@pytest.mark.usefixtures("paper")
def test_the_folder_holds_what_run_returns(train: Path, tmp_path: Path) -> None:
    """`out` writes the same run, with parameters (defaults included), seed and versions."""
    run = spawnsim.run(
        train, ranks=2, seed=7, compute="5 ms", out=tmp_path / "a", parameters={"iterations": 5}
    )
    loaded = spawnsim.Run.load(tmp_path / "a")
    assert (loaded.totals, loaded.what, list(loaded.events)) == (run.totals, run.what, run.events)
    assert loaded.totals["iterations"] == 5
    assert loaded.what["file"] == "train.py"
    assert loaded.what["parameters"] == {"iterations": 5, "fail_on": -1}
    assert (loaded.what["seed"], loaded.what["compute"]) == (7, "5 ms")
    assert "torch" in loaded.what["versions"]


@pytest.mark.usefixtures("paper")
def test_a_failed_run_keeps_what_was_recorded(train: Path, tmp_path: Path) -> None:
    """Rank 1 raises: rows until then, the totals and the outcome are in the folder, and the error says so."""
    with pytest.raises(RankError) as caught:
        spawnsim.run(train, ranks=3, out=tmp_path / "a", parameters={"fail_on": 1})
    run = spawnsim.Run.load(tmp_path / "a")
    assert sorted(set(run.table["rank"].tolist())) == [0, 1]
    assert run.totals["virtual_seconds"] == 0.5
    assert run.outcome.startswith("RankError: rank 1 raised ValueError")
    assert "Recorded until then" in caught.value.__notes__[0]


def test_an_interrupted_run_keeps_what_was_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ctrl-C is an outcome too."""
    monkeypatch.setattr(virtual, "_simulate", _ending_with(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        spawnsim.run(lambda _comm: None, ranks=1, out=tmp_path)
    assert spawnsim.Run.load(tmp_path).outcome == "interrupted"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 0}, "ranks=0: give an integer of at least 1"),
        ({"ranks": 2.0}, "ranks=2.0"),
        ({"ranks": 1, "seed": -1}, "seed=-1"),
        ({"ranks": 1, "deadline_s": 0}, "deadline_s=0"),
        ({"ranks": 1, "parameters": {"lr": 1}}, "takes no parameter lr; its parameters: none"),
    ],
)
def test_bad_parameters_are_refused_before_anything_runs(
    arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """One message says what to give, and no folder appears."""
    with pytest.raises(ParameterError, match=message):
        spawnsim.run(lambda _comm: None, out=tmp_path / "a", **arguments)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"straggler": "none"}, r"run\(\) takes no straggler=; did you mean stragglers\?"),
        ({"iterations": 3}, r"takes no iterations=; .*: parameters=\{'iterations': 3\}"),
    ],
)
def test_a_keyword_that_run_does_not_take_is_told_where_it_belongs(given: dict[str, Any], said: str) -> None:
    """It stays a TypeError, as of any function."""
    with pytest.raises(TypeError, match=said):
        spawnsim.run(lambda _comm: None, ranks=1, **given)


def test_a_run_takes_a_scenario_or_its_fields(tmp_path: Path) -> None:
    """As one value, by name, as a number of ranks, or one value with a field replaced; one of them is needed."""

    def main(comm: Any) -> None:
        comm.record(drawn=comm.rng("x").random(), size=comm.size)

    by_name = spawnsim.run(main, ranks=3, seed=4, stragglers="lognormal:0.3")
    for how in (
        spawnsim.run(main, Scenario(3, seed=4, stragglers="lognormal:0.3")),
        spawnsim.run(main, 3, seed=4, stragglers="lognormal:0.3"),
        spawnsim.run(main, Scenario(3, seed=5), seed=4, stragglers="lognormal:0.3"),
    ):
        assert how.totals["digest"] == by_name.totals["digest"]
        assert how.what["seed"] == 4
    with pytest.raises(TypeError, match="give ranks=N, or a Scenario"):
        spawnsim.run(main, out=tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_main_must_take_a_communicator() -> None:
    """A `main()` without arguments, or no function at all, is told at once."""
    with pytest.raises(ParameterError, match="needs one, the communicator"):
        program(lambda: None)
    with pytest.raises(ParameterError, match=r"main\(iterations=3\): .* write main\(comm, iterations=3\)"):
        program(lambda iterations=3: iterations)
    with pytest.raises(ParameterError, match="main is a int"):
        program(3)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="needs a value for lr"):
        program(lambda comm, lr: (comm, lr))


def test_a_program_finds_its_neighbours(tmp_path: Path) -> None:
    """A file imports modules of its own folder, may use dataclasses, and is not run as `__main__`."""
    (tmp_path / "neighbour_of_train.py").write_text("rate = 0.5\n")
    (tmp_path / "train.py").write_text(
        "from dataclasses import dataclass\nfrom neighbour_of_train import rate\n"
        "@dataclass\nclass Plan:\n    rate: float = rate\n"
        "def main(comm):\n    return Plan().rate\n"
        "if __name__ == '__main__':\n    raise SystemExit(3)\n"
    )
    assert load(tmp_path / "train.py")(None) == 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", r"has no main\(comm\)"),
        ("def main(comm:\n", "is not a Python program"),
        (None, "cannot read"),
    ],
)
def test_files_that_are_no_program(tmp_path: Path, text: str | None, message: str) -> None:
    """No `main`, no Python, no file: one message each, and nothing was run."""
    path = tmp_path / "train.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ParameterError, match=message):
        load(path)


@pytest.mark.parametrize(
    "head", [b"\xef\xbb\xbf", b"# -*- coding: latin-1 -*-\r\n# gr\xfc\xdfe\r\n"], ids=["marked", "latin-1"]
)
def test_a_program_may_be_in_any_encoding_that_python_reads(tmp_path: Path, head: bytes) -> None:
    """With the byte order mark of editors on Windows, or with an encoding that its first line names."""
    path = tmp_path / "train.py"
    path.write_bytes(head + b"def main(comm):\r\n    return 3\r\n")
    assert load(path)(None) == 3
    path.write_bytes(head + b"from mpi4py import MPI\r\n")
    assert ProgramFile.read(path).is_whole


def test_the_bar_counts_rows_where_it_knows_how_many_there_will_be() -> None:
    """With a parameter `iterations` the bar is about rows, else about finished ranks."""
    recorder = SimpleNamespace(rows=30, time_s=0.5)
    for iterations, expected in ((10, (30, 40)), (None, (3, 4))):
        bar = Bar(recorder, ranks=4, iterations=iterations)  # type: ignore[arg-type]
        with bar as tell:
            tell(0.25, 3, 4)
            bar.draw()
            assert (bar._bar.n, bar._bar.total) == expected
            assert bar._bar.desc == "0.5 virtual s, 3/4 ranks done"


# ---------------------------------------------------------------------------------------- runs that are there already
@pytest.mark.usefixtures("paper")
def test_a_run_is_overwritten_only_on_demand(train: Path, tmp_path: Path) -> None:
    """A folder that holds a run is refused before anything happens to it; `--overwrite` takes it."""
    command = ["run", str(train), "-n", "2", "--quiet", "--out", str(tmp_path / "a")]
    assert cli.main([*command, "--seed", "9"]) == 0
    assert cli.main(command) == 2
    assert spawnsim.Run.load(tmp_path / "a").what["seed"] == 9
    assert cli.main([*command, "--overwrite"]) == 0
    assert spawnsim.Run.load(tmp_path / "a").what["seed"] == 0
    with pytest.raises(ParameterError, match="already holds a run"):
        spawnsim.run(train, ranks=2, out=tmp_path / "a")


def test_a_run_that_failed_with_nothing_recorded_is_in_nobodys_way(
    train: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The corrected run takes its folder; one that has recorded an event is kept, and so is one that finished."""
    out = tmp_path / "a"
    command = ["run", str(train), "-n", "2", "--out", str(out), "--quiet"]
    train.write_text("def main(comm):\n    undefined\n")
    for _ in range(2):
        assert cli.main(command) == 1
        told = capsys.readouterr().err
        assert told.endswith(f"Nothing was recorded until then; how the run ended: {out}\n")
        assert "Recorded until then" not in told
    assert "recorded" not in spawnsim.Run.load(out).outcome
    train.write_text("def main(comm):\n    comm.record.event('begun')\n    undefined\n")
    assert cli.main(command) == 1
    assert capsys.readouterr().err.endswith(f"\nRecorded until then: {out}\n")
    assert cli.main(command) == 2
    train.write_text("def main(comm): ...\n")
    assert cli.main([*command, "--overwrite"]) == 0
    assert cli.main(command) == 2


@pytest.mark.parametrize("backend", ["mpi", "torch"])
def test_the_launcher_refuses_a_folder_that_holds_a_run(
    train: Path, tmp_path: Path, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, before any process is started."""
    (tmp_path / "metrics.npz").touch()
    command = ["run", str(train), "--backend", backend, "-n", "2", "--out", str(tmp_path)]
    assert cli.main(command) == 2
    assert "already holds a run (metrics.npz)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "typo",
    [
        ["--platform", "nosuch"],
        ["--faults", "crash:9@1s"],
        ["--straggler", "nosuch:1"],
        ["--compute", "soon"],
    ],
)
@pytest.mark.parametrize("text", [PROGRAM, "from mpi4py import MPI\n"])
def test_a_run_that_is_refused_leaves_the_old_one(tmp_path: Path, typo: list[str], text: str) -> None:
    """Whatever an option names that does not exist, `--overwrite` has not begun yet; no new folder is made either."""
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "old").mkdir()
    for name in ("run.json", "metrics.npz", "events.jsonl"):
        (tmp_path / "old" / name).write_text("old")
    for place in ("old", "new"):
        command = [
            "run",
            str(tmp_path / "train.py"),
            "-n",
            "2",
            "--overwrite",
            "--out",
            str(tmp_path / place),
        ]
        assert cli.main([*command, *typo]) == 2
    assert {path.read_text() for path in (tmp_path / "old").iterdir()} == {"old"}
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("paper")
@pytest.mark.parametrize("command", ["run", "study", "plot", "report", "trace"])
def test_a_place_without_a_name_is_refused(
    train: Path,
    tmp_path: Path,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`--out ""` was this folder."""
    monkeypatch.chdir(tmp_path)
    train.write_text(PROGRAM + "def study(context): ...\n")
    spawnsim.run(train, ranks=1, out="a")
    given = {"run": [str(train), "-n", "2"], "study": [str(train)]}.get(command, ["a"])
    before = sorted(path for path in tmp_path.rglob("*") if path.suffix != ".pyc")
    assert cli.main([command, *given, "--out", ""]) == 2
    assert "--out ''" in capsys.readouterr().err
    assert sorted(path for path in tmp_path.rglob("*") if path.suffix != ".pyc") == before


@pytest.mark.usefixtures("paper")
@pytest.mark.parametrize("command", ["report", "trace", "study"])
def test_no_command_writes_over_a_run(
    train: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A page or a trace named as a run's file, a study in a run's folder: one line, and the run is whole."""
    train.write_text(PROGRAM + "def study(context): ...\n")
    spawnsim.run(train, ranks=2, out=tmp_path / "a")
    out = tmp_path / "a" / ("" if command == "study" else "run.json")
    given = train if command == "study" else tmp_path / "a"
    assert cli.main([command, str(given), "--out", str(out)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert spawnsim.Run.load(tmp_path / "a").table.rows == 6


# ------------------------------------------------------------------------------------------- on the command line
@pytest.mark.usefixtures("paper")
def test_totals_are_printed_or_with_json_are_all_that_is_printed(
    train: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `--json` what the program prints goes to standard error."""
    assert cli.main(["run", str(train), "--ranks", "2", "--out", str(tmp_path / "a")]) == 0
    out = capsys.readouterr().out
    assert "virtual_seconds  1.5" in out
    assert f"folder           {tmp_path / 'a'}" in out
    assert cli.main(["run", str(train), "-n", "2", "--json", "--set", "iterations=4"]) == 0
    captured = capsys.readouterr()
    totals = json.loads(captured.out)
    assert (totals["ranks"], totals["iterations"], len(totals["digest"])) == (2, 4, 32)
    assert captured.err == "hello\nhello\n"


def test_what_all_ranks_log_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of 12 ranks that shut down while one is dead each said so; also where the run fails, and there as a note."""
    path = tmp_path / "train.py"
    path.write_text(
        "import logging\n"
        "def main(comm, fails=False):\n"
        "    logging.getLogger('spawnsim.policies').warning('rank %d: odd', comm.rank)\n"
        "    logging.getLogger('spawnsim.policies').info('rank %d: even', comm.rank)\n"
        "    if comm.rank == 11:\n"
        "        logging.getLogger('spawnsim.policies').warning('the last one')\n"
        "        assert not fails\n"
    )
    said = ["rank 0: odd (and 11 more like it)", "the last one"]
    for fails, status in (("false", 0), ("true", 1)):
        out = tmp_path / fails
        assert (
            cli.main(["run", str(path), "-n", "12", "--set", f"fails={fails}", "--out", str(out)]) == status
        )
        told = [
            line.partition("warning: ")[2]
            for line in capfd.readouterr().err.splitlines()
            if "warning:" in line
        ]
        assert told == said
        assert spawnsim.Run.load(out).what["warnings"] == said


def test_warnings_of_a_run_are_printed_once_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Events "warning" of 12 ranks, of which two say the same; a row without `iteration` leaves the total alone."""
    file = tmp_path / "warns.py"
    file.write_text(
        "def main(comm):\n    for iteration in range(4):\n        comm.record(iteration=iteration)\n"
        "    comm.record(score=1.0)\n    if comm.rank > 9:\n        comm.record.event('warning', text='too long')\n"
    )
    assert cli.main(["run", str(file), "-n", "12", "--out", str(tmp_path / "a")]) == 0
    captured = capsys.readouterr()
    assert captured.err == "spawnsim: warning: too long\n"
    assert "iterations       4\n" in captured.out
    assert spawnsim.Run.load(tmp_path / "a").what["warnings"] == ["too long"]
    assert cli.main(["run", str(file), "-n", "12", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "spawnsim: warning: too long\n")


def test_donors_that_no_figure_can_read_are_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were drawn as nothing, without a word. A list of ranks is read, one rank, and that nobody answered."""
    file = tmp_path / "own.py"
    file.write_text(
        "def main(comm, told=None):\n    if comm.rank:\n        comm.record.event('replacement', **(told or {}))\n"
    )
    for given, said in (
        ("{'donors': [0, 2]}", None), ("{'donor': 2}", None), ("{'donors': []}", None), ("{}", None),
        ("{'donors': 'best'}", "donors='best'"), ("{'donors': 2}", "donors=2"), ("{'donor': [2]}", "donor=[2]"),
        ("{'donors': [0.5]}", "donors=[0.5]"),
    ):  # fmt: skip
        assert cli.main(["run", str(file), "-n", "3", "--set", f"told={given}"]) == 0
        expected = (
            f'spawnsim: warning: event "replacement" of rank 1 at 0 s: figures cannot read {said}; give a list of '
            "ranks, donors=[3, 17], or one, donor=3; and 1 more\n"
        )
        assert capsys.readouterr().err == ("" if said is None else expected)


def test_a_run_does_not_fill_a_folder_with_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--out .` put run.json, metrics.npz and more among the user's programs."""
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("mine")
    Path("train.py").write_text("def main(comm):\n    comm.record(loss=1.0)\n")
    run = ["run", "train.py", "-n", "2", "--out"]
    before = sorted(Path().iterdir())
    for backend in ("virtual", "mpi"):
        assert cli.main([*run, ".", "--backend", backend]) == 2
        assert "give a new folder, such as run" in capsys.readouterr().err
    assert sorted(Path().iterdir()) == before
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / ".gitkeep").touch()
    assert cli.main([*run, "new"]) == 0
    assert cli.main([*run, "new", "--overwrite"]) == 0
    assert cli.main([*run, ".", "--overwrite"]) == 0
    assert Path("notes.txt").read_text() == "mine"


def test_a_program_that_records_nothing_has_no_iterations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of an mpi4py program the totals said "iterations 0, replacements 0"; for programs the names remain."""
    file = tmp_path / "plain.py"
    file.write_text("from mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\n")
    assert cli.main(["run", str(file), "-n", "2", "--out", str(tmp_path / "a")]) == 0
    out = capsys.readouterr().out
    assert "iterations" not in out and "replacements" not in out and "virtual_seconds" in out
    assert (_json_of(capsys, ["run", str(file), "-n", "2", "--json"])["iterations"]) == 0
    assert cli.main(["report", str(tmp_path / "a"), "--out", str(tmp_path / "page.html")]) == 0
    assert "<th>iterations</th>" not in (tmp_path / "page.html").read_text()


def test_totals_tell_of_deaths_and_faults_where_there_were_any(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They said nothing of them. A program's own events of these names count for nothing."""
    file = tmp_path / "sends.py"
    file.write_text(
        "def main(comm):\n    for iteration in range(10):\n        with comm.compute(0.1):\n            pass\n"
        "        if comm.rank == 0:\n            comm.send(iteration, 1)\n        comm.record(iteration=iteration)\n"
        "    comm.record.event('pause')\n    comm.record.event('crash')\n"
    )
    command = ["run", str(file), "-n", "4", "--json", "--quiet", "--out", str(tmp_path / "a"), "--overwrite"]
    faults = "crash:3@0.55s; drop:0>1@0s+0.35s; pause:2@0.1s+0.1s"
    plain = _json_of(capsys, command)
    assert not {"deaths", "faults"} & {*plain}
    file.write_text(file.read_text().partition("    comm.record.event")[0])
    struck = _json_of(capsys, [*command, "--faults", faults])
    assert (struck["deaths"], struck["faults"], [*struck][-3:]) == (1, 4, ["deaths", "faults", "digest"])
    run = spawnsim.Run.load(tmp_path / "a")
    assert run.totals == struck and "<th>deaths</th><td>1</td>" in run._repr_html_()
    assert cli.main(["report", str(tmp_path / "a"), "--out", str(tmp_path / "page.html")]) == 0
    assert "<th>deaths</th><th>faults</th><th>digest</th>" in (tmp_path / "page.html").read_text()


def _json_of(capsys: pytest.CaptureFixture[str], command: list[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.main(command) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.usefixtures("paper")
def test_a_raising_program_shows_its_own_traceback_once(
    train: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The traceback begins in the program; the message names rank and time; the exit code is 1."""
    command = ["run", str(train), "-n", "3", "--set", "fail_on=1", "--out", str(tmp_path / "a")]
    assert cli.main(command) == 1
    err = capsys.readouterr().err
    assert err.count("ValueError: no such luck") == 1
    assert 'raise ValueError("no such luck")' in err
    assert "spawnsim: rank 1 raised" in err
    assert "Recorded until then" in err


def test_a_program_that_outlives_no_rank_is_told_where_it_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The traceback ends in the program, and the last line does not date the death by the call that met it."""
    file = tmp_path / "train.py"
    file.write_text(
        "def main(comm):\n    while True:\n        comm.clock.sleep(0.2)\n        comm.Barrier()\n"
    )
    assert cli.main(["run", str(file), "-n", "3", "--faults", "crash:2@0.3s"]) == 122
    said = capsys.readouterr().err.splitlines()
    assert sum(line.lstrip().startswith("File ") for line in said) == 1
    assert "(train.py:4): rank 0 was in Barrier" in said[-1]
    assert said[-1].endswith("and rank 2 has failed")


@pytest.mark.parametrize(
    ("line", "code", "last"),
    [
        ("import no_such_module", 1, "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise OSError('stale')", 1, "OSError: stale"),
        ("import sys; sys.exit(3)", 3, "SystemExit: 3"),
        ("import sys; sys.exit()", 1, "SystemExit"),
    ],
)
def test_a_file_that_raises_while_it_is_loaded_is_its_users_fault(
    tmp_path: Path, line: str, code: int, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The traceback begins in the file, and nobody asks for a report."""
    file = tmp_path / "train.py"
    file.write_text(f"{line}\ndef main(comm): ...\n")
    assert cli.main(["run", str(file), "-n", "2"]) == code
    said = capsys.readouterr().err.splitlines()
    assert said[:2] == ["Traceback (most recent call last):", f'  File "{file}", line 1, in <module>']
    kind = last.partition(":")[0]
    assert said[-2:] == [last, f"spawnsim: {file} raised {kind} while it was loaded"]


def _from_rank(cause: BaseException) -> RankError:
    error = RankError(3, 0.5, "rank 3 raised")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ParameterError("unknown platform"), 2),
        (Deadlock("rank 0 waits for rank 1"), 121),
        (Livelock("rank 0 polls"), 121),
        (Timeout([1], "Recv"), 122),
        (RankFailed([2]), 122),
        (_from_rank(Timeout([1], "Recv")), 122),
        (_from_rank(ValueError("mine")), 1),
        (InternalError("a promise"), 123),
        (ZeroDivisionError("ours"), 123),
        (OSError("no word of the system's"), 123),
        (OSError(28, "No space left on device"), 2),
        (FileExistsError(17, "File exists", "figures"), 2),
        (KeyboardInterrupt(), 130),
    ],
    ids=repr,
)
def test_each_ending_has_its_exit_code(
    error: BaseException,
    code: int,
    train: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Errors end in one message on standard error, and standard output stays empty."""
    monkeypatch.setattr(virtual, "_simulate", _ending_with(error))
    assert cli.main(["run", str(train), "-n", "1", "--json"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    if isinstance(error, SpawnsimError) and error.__cause__ is None:
        assert captured.err == f"spawnsim: {error}\n"  # without a traceback
    assert captured.err


def _barrier(folder: Path) -> Path:
    """Write a program that only computes and meets."""
    file = folder / "meets.py"
    file.write_text("def main(comm):\n    with comm.compute(0.5):\n        pass\n    comm.Barrier()\n")
    return file


def test_a_deadline_is_a_duration_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a unit or without, or none at all; a wrong one names the option."""
    train = _barrier(tmp_path)
    for text in ("200ms", "5", "2 min", "inf"):
        assert cli.main(["run", str(train), "-n", "2", "--deadline", text]) == 0
    capsys.readouterr()
    for command in (["run", "-n", "2"], ["fuzz", "--runs", "1"], ["sweep", "--ranks", "2"]):
        assert cli.main([command[0], str(train), *command[1:], "--deadline", "5x"]) == 2
        assert "--deadline: '5x' is not a duration: write a number and one of ns," in capsys.readouterr().err


def test_faults_that_come_after_the_end_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan of which nothing has struck is a mistake; one of which some has, is none."""
    train = _barrier(tmp_path)
    late = "no fault took effect: crash:1@100s, the first of 2 faults, begins after the end of the run, at "
    assert cli.main(["run", str(train), "-n", "2", "--faults", "crash:1@100s; pause:0@200s+1s"]) == 0
    assert late in capsys.readouterr().err
    assert cli.main(["run", str(train), "-n", "2", "--faults", "pause:0@0s+1s; crash:1@100s"]) == 0
    assert "no fault took effect" not in capsys.readouterr().err


def test_compute_times_that_change_nothing_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that states all durations, or computes nothing, is not what was asked for."""
    stated, none, asks = tmp_path / "stated.py", tmp_path / "none.py", tmp_path / "asks.py"
    block = "def main(comm):\n    with comm.compute({}):\n        comm.rank\n"
    stated.write_text(block.format(0.5))
    asks.write_text(block.format(""))
    none.write_text("def main(comm):\n    comm.Barrier()\n")
    for file, option, told in (
        (stated, "--compute=5s", "compute=5s had no effect"),
        (none, "--compute=5s", "compute=5s had no effect"),
        (none, "--straggler=speed:0.1", "stragglers had no effect"),
        (stated, "--straggler=speed:0.1", ""),
        (asks, "--compute=5s", ""),
    ):
        assert cli.main(["run", str(file), "-n", "2", option]) == 0
        said = capsys.readouterr().err
        assert told in said
        assert ("no effect" in said) == bool(told)


def test_a_run_that_nobody_outlives_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing raises where all ranks die; a run of which one has ended, or that begins again, is no such run."""
    train, ends_late = _barrier(tmp_path), tmp_path / "late.py"
    ends_late.write_text("def main(comm):\n    with comm.compute(0.5 + comm.rank):\n        pass\n")
    nobody = "no rank reached the end of its program: all were dead at 0.2 s"
    for file, faults, dead in (
        (train, "crash:*@0.2s", True),
        (train, "crash:0@0.1s; crash:1@0.2s", True),
        (train, "crash:*@0.2s; restart:*@1s", False),
        (ends_late, "crash:*@0.8s", False),
    ):
        for quiet in ([], ["--quiet"]):
            status = cli.main(["run", str(file), "-n", "2", "--faults", faults, *quiet])
            assert status == (122 if dead else 0)
            told = capsys.readouterr().err
            assert (nobody in told) == dead
            assert told.count("no rank reached") == dead


def test_a_run_that_all_died_in_is_resumed_without_its_faults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fault plan is one of the run's circumstances, so it strikes again; the command says how it does not."""
    file, out = tmp_path / "train.py", tmp_path / "out"
    file.write_text(
        "def main(comm):\n    saved = comm.restore()\n"
        "    for done in range(saved.iteration if saved else 0, 6):\n        comm.clock.sleep(0.1)\n"
        "        comm.checkpoint(iteration=done + 1)\n"
    )
    assert cli.main(["run", str(file), "-n", "2", "--faults", "crash:*@0.35s", "--out", str(out)]) == 122
    assert spawnsim.Run.load(out).what["all_dead"]
    hint = f"its fault plan would take effect again; without it: spawnsim resume {out} --faults ''\n"
    for faults, status in (([], 122), (["--faults", ""], 0)):
        capsys.readouterr()
        assert cli.main(["resume", str(out), *faults]) == status
        assert (hint in capsys.readouterr().err) == (not faults)


def test_help_lists_commands_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """The first page shows what there is."""
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert "exit codes:" in out
    assert all(f"  {name} " in out for name in cli.COMMANDS)


def test_settings_are_literals_words_or_text() -> None:
    """Numbers, lists, true/false/none and plain text; they survive a second command line; all else is refused."""
    settings = ["lr=1e-3", "n=4", "flag=true", "off=None", "sizes=[1, 2]", "mode=worst", "path=a=b"]
    values = options.parameters(settings)
    assert values == {
        "lr": 1e-3, "n": 4, "flag": True, "off": None, "sizes": [1, 2], "mode": "worst", "path": "a=b",
    }  # fmt: skip
    assert options.parameters(options.arguments_of(values)[1::2]) == values
    for setting in ("lr", "=3", "2x=3"):
        with pytest.raises(ParameterError, match="write --set name=value"):
            options.parameters([setting])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "arguments are required: COMMAND, ...; see `spawnsim --help`"),
        ("studdy", "'doctor'); did you mean study? See `spawnsim --help`"),
        ("run", "are required: FILE; see `spawnsim run --help`"),
        ("run train.py --rank-count x", "did you mean --ranks? See `spawnsim run --help`"),
        ("run FILE", "virtual ranks need their number: give --ranks N"),
        ("run FILE -n 2 --survive", "virtual ranks always survive the death of others"),
        ("run FILE -n 2 --survive --backend torch", "ends when a rank dies; give --backend mpi"),
        ("run FILE -n 2 --check-calls", "virtual ranks always check their calls"),
        ("run FILE -n 2 --check-calls --survive --backend mpi", "waits for dead ranks; give one"),
        ("list fish", "fish: choose among platforms, stragglers, faults, policies, workloads, studies"),
        (
            "run FILE --rank 3",
            "unrecognized arguments: --rank 3; did you mean --ranks? See `spawnsim run --help`",
        ),
        ("run FILE -n 3 --zzz", "unrecognized arguments: --zzz; see `spawnsim run --help`"),
        ("run FILE -n 3 --backend mpii", "; did you mean mpi? See `spawnsim run --help`"),
        ("run FILE -n 3 --set iteration=3", "main takes no parameter iteration; did you mean iterations?"),
        (
            "run FILE -n 3 -- --steps 4",
            "arguments: --steps 4; main(comm) has parameters: give --set NAME=VALUE",
        ),
        ("run digitz -n 3", "no file 'digitz'; did you mean digits?"),
        ("run FILE -n 100000000", "1,000 GB in all, and "),
        (
            "advise -n 4 --model 1MB --compute -3s",
            "4 ranks, 1000000 bytes, steps of -3.0 s, 4 rounds: give at least 2 ranks, 4 bytes, a duration above 0 and "
            "2 rounds",
        ),
        ("doctor foo", "unrecognized arguments: foo; see `spawnsim doctor --help`"),
        (
            "study --list",
            "arguments are required: NAME|PATH; `spawnsim list studies` lists them. See `spawnsim",
        ),
        (
            "run FILE -n 3 --set iterations=3 fail_on=1 x=2",
            "unrecognized arguments: fail_on=1 x=2; repeat --set for each: --set fail_on=1 --set x=2. See `spawnsim",
        ),
        ("run FILE -n 4 --record-ranks 9", "record_ranks='9': the run has ranks 0 to 3, but no rank 9"),
        ("run FILE -n 4 --record-ranks 2,7-9", "the run has ranks 0 to 3, but no rank 7"),
        ("run FILE -n 4 --record-ranks 9 --backend mpi", "ranks 0 to 3, but no rank 9"),
        (
            "run FILE -n 4 --faults kill:3@1",
            "no kind 'kill'; did you mean crash? kinds: crash, restart, pause, slow,",
        ),
        ("run FILE -n 4 --faults crahs:3@1", "did you mean crash? kinds: crash,"),
        ("run FILE -n 4 --faults zzz:3@1", ", mtbf, requeue\n"),
        (
            "run FILE -n 4 --backend mpi --platform laptop --faults crash:1@1s --straggler none",
            "--platform, --straggler, --faults describe virtual ranks; --backend mpi takes real time",
        ),
        (
            "columnar average -n 4 --set replacement_ratio=3",
            "AverageAllPolicy takes no replacement_ratio; its parameters: average_every",
        ),
        (
            "columnar selective -n 4 --set replacement_ratios=3",
            "AsyncSelectiveAveragingPolicy takes no replacement_ratios; did you mean replacement_ratio? its",
        ),
        ("study FILE --jobs -2", "--jobs: -2: give the number of runs at once, or 0 for this process"),
    ],
)
def test_a_wrong_option_is_told_in_one_line(
    train: Path, line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line says what is wrong, what may have been meant, and where to look; the status is 2."""
    assert cli.main(line.replace("FILE", str(train)).split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "started"),
    [
        ("from mpi4py import MPI\n", "mpiexec -n 2 python FILE\n"),
        ("import torch.distributed\n", "torchrun --nproc-per-node 2 FILE\n"),
        (
            "print(1)\n",
            "On virtual ranks a program without it runs as a whole if it uses MPI, or with --whole\n",
        ),
    ],
)
def test_real_ranks_do_not_run_unmodified_programs(
    train: Path, text: str, started: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message does not say that they do, but how such a program is started."""
    train.write_text(text)
    assert cli.main(["run", str(train), "-n", "2", "--backend", "mpi"]) == 2
    assert capsys.readouterr().err.endswith(started.replace("FILE", str(train)))


TYPED = """
from __future__ import annotations
from typing import TYPE_CHECKING, Literal
if TYPE_CHECKING:
    from elsewhere import Thing

def main(comm, n=3, lr=0.1, flag=False, k: int = 2, x: float | None = 0.3, h: tuple[int, ...] = (32,),
         how: Literal["mean", "best", "worst"] = "mean", thing: Thing = None, any: int | str = 3, *, name: str = "a"):
    comm.record(n=1)
"""


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "flag=no",
            "flag='no': give true or false; if main also takes text, annotate it: flag: bool | str",
        ),
        ("k=1e3", "k=1000.0: give a whole number"),
        ("x=a", "x='a': give a number or None"),
        ("h=64", "h=64: give values in brackets, such as (64,)"),
        ("how=average", "how='average': give mean, best or worst"),
        ("any=3.5", "any=3.5: give a whole number or text (in quotes, if it reads as a number)"),
        ("name=7", "name=7: give text (in quotes, if it reads as a number)"),
    ],
)
def test_a_value_of_another_type_is_told_before_anything_runs(
    setting: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended as a TypeError on each rank, or `flag=no` was taken for true."""
    path = tmp_path / "train.py"
    path.write_text(TYPED)
    assert cli.main(["run", str(path), "-n", "2", "--set", setting]) == 2
    assert capsys.readouterr().err == f"spawnsim: {said}\n"
    # A sweep does not load the program, and says the same.
    assert cli.main(["sweep", str(path), "-n", "2", "--set", setting, "--out", str(tmp_path / "sweep")]) == 2
    assert capsys.readouterr().err == f"spawnsim: {said}\n"


def test_values_of_the_type_that_main_names_are_taken(tmp_path: Path) -> None:
    """Also a whole number for a float, a list for a tuple, None for a default of None, and what no annotation tells."""
    path = tmp_path / "train.py"
    path.write_text(TYPED)
    settings = [
        "n=ten",
        "lr=(1,2)",
        "flag=true",
        "k=4",
        "x=None",
        "h=[1,2]",
        "how=best",
        "thing=5",
        "any=auto",
    ]
    assert cli.main(["run", str(path), "-n", "2", *(each for s in settings for each in ("--set", s))]) == 0


def test_a_text_for_a_number_is_told_where_the_program_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is refused nowhere, for programs may take one."""
    path = tmp_path / "train.py"
    path.write_text("def main(comm, n=3, lr=0.1, other=1):\n    list(range(n))\n")
    assert cli.main(["run", str(path), "-n", "2", "--set", "n=ten", "--set", "lr=(0,1)"]) == 1
    told = "\nn was given 'ten'; its default is 3\nlr was given (0, 1); its default is 0.1\n"
    assert told in capsys.readouterr().err
    assert cli.main(["run", str(path), "-n", "2", "--set", "lr=fast"]) == 0


def test_a_program_of_the_studies_is_run_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    """As `sweep` has always found it, and `list` tells it."""
    assert cli.main(["run", "digits", "-n", "2", "--set", "policy=none", "--set", "iterations=1"]) == 0
    assert "digest " in capsys.readouterr().out


def test_a_main_without_its_argument_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It ran as an mpi4py program on every rank, recorded nothing and ended with 0; one that speaks MPI still does."""
    path = tmp_path / "train.py"
    path.write_text("def main():\n    print('hello')\n")
    assert cli.main(["run", str(path), "-n", "2"]) == 2
    assert "write def main(comm)" in capsys.readouterr().err
    path.write_text("from mpi4py import MPI\n" + path.read_text())
    assert cli.main(["run", str(path), "-n", "2"]) == 0


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [("list platforms", "1"), ("list platforms", ""), ("--help", ""), ("list --help", ""), ("--version", "")],
)
def test_a_reader_that_has_gone_is_no_error(words: str, unbuffered: str) -> None:
    """`spawnsim list | head -1` ends as a process that SIGPIPE ends, without a word."""
    reading, writing = os.pipe()
    os.close(reading)
    done = _written_to(writing, words, unbuffered)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_told(unbuffered: str) -> None:
    """In one line, whether it is met at the print or at the end."""
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = _written_to(full.fileno(), "list platforms", unbuffered)
    assert (done.returncode, done.stderr) == (2, b"spawnsim: No space left on device\n")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--stragler slow:0.5,4", "--stragler is passed to the program; did you mean --straggler?"),
        ("--seeds=3", "--seeds is passed to the program; did you mean --seed?"),
        ("--epochs 3 stragler", ""),
        ("-- --stragler slow:0.5,4", ""),
        ("--quiet --stragler slow:0.5,4", ""),
    ],
)
def test_an_option_that_is_mistyped_is_told_of(
    words: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unmodified program takes any, and the run would be another one without a word."""
    program = tmp_path / "program.py"
    program.write_text("from mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\n")
    assert cli.main(["run", str(program), "--ranks", "2", *words.split()]) == 0
    err = capsys.readouterr().err
    assert (told in err) if told else ("is passed to the program" not in err)


@pytest.mark.parametrize("words", [["--help"], ["plot", "--help"], ["list"], ["doctor"]])
def test_a_terminal_may_know_few_characters(words: list[str]) -> None:
    """What it has no character for is a question mark, and no error of ours."""
    command, environ = [sys.executable, "-m", "spawnsim", *words], os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environ, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"?" in done.stdout


def _written_to(place: int, words: str, unbuffered: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "spawnsim", *words.split()]
    environ = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    return subprocess.run(command, stdout=place, stderr=subprocess.PIPE, env=environ, check=False, timeout=60)


def test_a_broken_pipe_elsewhere_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Such as that to a process of the run's."""

    def serve(*_: object) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(cli, "serve", serve)
    assert cli.main(["list"]) == 2
    assert capfd.readouterr().err == "spawnsim: Broken pipe\n"


def test_list_prints_names_that_other_commands_take(capsys: pytest.CaptureFixture[str]) -> None:
    """Each section has its names with one line each."""
    assert cli.main(["list"]) == 0
    out = capsys.readouterr().out
    for name in [
        "ethernet-10g",
        "lognormal:SIGMA",
        "pause:RANKS@START[+LENGTH]",
        "AverageAllPolicy",
        "Digits",
    ]:
        assert f"  {name} " in out
    assert "\n  demo " in out and "/studies/" not in out  # by the name that `spawnsim study` takes
    kinds = [
        getattr(spawnsim.policies, name) for name in spawnsim.policies.__all__ if name.endswith("Policy")
    ]
    firsts = [(inspect.getdoc(kind) or "").partition("\n")[0] for kind in kinds]
    assert [line for line in firsts if not line.endswith(".")] == []  # cut where the docstring wraps
