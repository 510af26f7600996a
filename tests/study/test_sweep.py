"""Sweeps without a study's file: the command, its folder, executors, and the table and figures of what is there."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import synthetic

import spawnsim
from spawnsim import cli
from spawnsim.cli.run import RunCommand
from spawnsim.cli.sweep import SweepCommand, cells_of
from spawnsim.errors import ParameterError, StudyError, WorldError
from spawnsim.options import choices, listed
from spawnsim.record import Table
from spawnsim.study import Cost, Store, Sweep, executors, grid, results, sweeping
from spawnsim.study.store import write_cost

PROGRAM = """
import time

def main(comm, policy="none", ratio=0.1, wall_s=0.0):
    if policy == "bad" and comm.Get_rank() == 11:
        raise ValueError("no such luck")
    for iteration in range(3):
        with comm.compute(0.01):
            value = float(comm.rng("value").normal())
        time.sleep(wall_s)
        comm.record(iteration=iteration, accuracy=ratio * iteration + 0.001 * value)
    print("rank", comm.Get_rank())
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a small program's file, in the working folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "prog.py"
    path.write_text(PROGRAM)
    return path


def swept(*words: str) -> int:
    """Run `spawnsim sweep` on it, with 12 ranks, in this process."""
    return cli.main(["sweep", "prog.py", "--ranks", "12", "--jobs", "0", *words])


# ----------------------------------------------------------------------------------------------- lists of values
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a", ["a"]),
        ("a, b", ["a", "b"]),
        ("none,'slow:0.05,10'", ["none", "'slow:0.05,10'"]),
        ('"a,b",it\'s', ['"a,b"', "it's"]),
        ("(32,),(64,[1,2])", ["(32,)", "(64,[1,2])"]),
        ("{'a, b': 1},2", ["{'a, b': 1}", "2"]),
        ("", [""]),
    ],
)
def test_commas_within_quotes_and_brackets_separate_nothing(text: str, found: list[str]):
    """Nor does an apostrophe open a quote in the middle of a word."""
    assert listed(text) == found


@pytest.mark.parametrize("text", ["a,,b", "a,", "(1,2", "'a,b", "1],2"])
def test_a_list_that_is_not_whole_is_refused(text: str):
    """A value is missing, or something is not closed."""
    with pytest.raises(ParameterError, match=r"missing between two commas|not closed"):
        listed(text)


def test_values_of_a_repeated_name_are_put_together():
    """Each is read as `spawnsim run --set` reads it."""
    found = choices(["policy=average,'a,b'", "hidden=(32,),None", "policy=true", "empty="])
    assert found == {"policy": ["average", "a,b", True], "hidden": [(32,), None], "empty": [""]}


# ------------------------------------------------------------------------------------------------- the command
def test_all_combinations_are_listed_then_run_then_kept(program: Path, capsys: pytest.CaptureFixture[str]):
    """Two policies, two ratios, two worlds, two seeds; the second command has nothing left to do."""
    words = ["--set", "policy=a,b", "--set", "ratio=0.1,0.4", "--straggler", "none,'slow:0.25,10'"]
    words += ["--seeds", "2", "--seed", "7", "--out", "q"]
    assert swept(*words, "--dry-run") == 0
    told = capsys.readouterr().out
    assert told.count("to do\n") == 16 and "16 runs, 16 to do, in q/runs" in told
    folders = re.findall(r"\bprog-\S+", told)
    assert "a, ratio 0.1, slow:0.25,10, seed 8" in told
    assert not Path("q").exists()
    assert swept(*words) == 0
    told = capsys.readouterr().out
    assert "[16/16] b, ratio 0.4, slow:0.25,10, seed 8: " in told and " in all" in told
    assert "16 runs: 16 done; figures: spawnsim plot q --x ratio" in told
    assert swept(*words) == 0
    assert "16 of 16 runs are already done" in capsys.readouterr().out
    assert sorted(folders) == sorted(path.name for path in Path("q/runs").iterdir())
    sweep = Sweep.load("q")
    table = sweep.table("final:accuracy", "time_to:accuracy>0.5", "bytes")
    assert table.rows == 16
    assert sweep.varied == ["policy", "ratio", "stragglers"]
    assert table["ratio"].tolist()[:5] == [0.1, 0.1, 0.1, 0.1, 0.4] and table["seed"].tolist()[:2] == [7, 8]
    assert set(table["stragglers"]) == {"none", "slow:0.25,10"} and set(table["state"]) == {"done"}
    np.testing.assert_allclose(table["final:accuracy"], 2 * table["ratio"], atol=0.01)
    assert np.isinf(table["time_to:accuracy>0.5"][table["ratio"] == 0.1]).all()
    assert (table["time_to:accuracy>0.5"][table["ratio"] == 0.4] < 0.31).all()
    assert "16 done" in repr(sweep) and "<td>slow:0.25,10</td>" in sweep._repr_html_()


def test_a_circumstance_that_is_none_is_the_same_run_as_without_it(program: Path):
    """So a sweep that grows keeps what it has."""
    assert swept("--out", "q") == 0
    assert swept("--straggler", "none,exponential:0.1", "--faults", "none", "--out", "q") == 0
    assert sorted(len(list(Path("q/runs").iterdir())) for _ in "1") == [2]


def test_real_seeds_may_be_listed(program: Path):
    """And files of platforms are found by their content, from wherever the command is given."""
    Path("net.toml").write_text(
        '[network]\ntopology = "switch"\n[network.link]\nlatency = "9 us"\nbandwidth = "1 GB/s"\n'
    )
    assert swept("--seed", "3,9", "--platform", "net.toml,laptop", "--out", "q") == 0
    table = Sweep.load("q").table()
    assert table["seed"].tolist() == [3, 9, 3, 9]
    assert table["platform"].tolist() == ["net.toml", "net.toml", "laptop", "laptop"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--set", "polcy=a"], "main takes no parameter polcy; did you mean policy?"),
        (["--set", "ratio=0.1,,0.2"], "a value is missing between two commas"),
        (["--straggler", "none,slow:5,10"], "put a value with commas in quotes"),
        (["--platform", "nowhere"], "nowhere"),
        (["--seeds", "0"], "--seeds 0: give a number"),
        (["--seeds", "2", "--seed", "1,2"], "--seeds 2: give a number"),
        (["--seed", "x"], "--seed x: give whole numbers"),
        (["--jobs", "-1"], "--jobs: -1: give the number"),
        (["--backend", "mpii"], "--backend mpii: choose"),
        (["--backend", "mpi", "--straggler", "exponential:0.1"], "--straggler describes virtual ranks"),
        (["--executor", "dusk", "--jobs", "1"], "argument --executor: invalid choice: 'dusk'"),
        (["--", "--steps"], "unrecognized arguments: --steps"),
    ],
)
def test_bad_words_are_told_before_anything_runs(
    program: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
):
    """One error, and no run."""
    assert swept(*words) == 2
    assert says in capsys.readouterr().err
    assert not list(Path().glob("runs/*/runs/*"))


def test_a_program_is_found_by_name(capsys: pytest.CaptureFixture[str]):
    """Those of the studies, which come along with the package; others that are near are named."""
    assert cli.main(["sweep", "digits", "--ranks", "16", "--set", "policy=none,groups", "--dry-run"]) == 0
    assert "digits-groups-n16-s0" in capsys.readouterr().out
    assert cli.main(["sweep", "digitz", "--ranks", "16"]) == 2
    assert "no file 'digitz'; did you mean digits?" in capsys.readouterr().err


def test_a_folder_of_a_run_is_no_place_for_a_sweep(program: Path):
    """Its files would lie among those of the run."""
    synthetic.run("none", ranks=2, iterations=2).save("taken")
    assert swept("--out", "taken") == 2


def test_failures_are_told_at_the_end_with_a_command_that_repeats_them(
    program: Path, capsys: pytest.CaptureFixture[str]
):
    """The rest is run, the status is 1, and what the failed runs have left is named."""
    assert swept("--set", "policy=bad,none", "--set", "ratio=0.5", "--seeds", "2", "--out", "q") == 1
    told = capsys.readouterr()
    assert "[4/4] none, seed 1: " in told.out
    assert "2 of 4 runs failed; the first: bad, seed 0: rank 11 raised ValueError: no such luck" in told.err
    again = [line.split(":", 1)[1] for line in told.err.splitlines() if line.startswith("  again:")]
    assert len(again) == 2
    options = RunCommand.parse(shlex.split(again[1])[2:])
    assert (options.ranks, options.seed, options.set) == (12, 1, ["policy=bad", "ratio=0.5"])
    sweep = Sweep.load("q")
    assert sweep.says() == "4 runs: 2 done, 2 failed"
    left = [line.split(":", 1)[1].strip() for line in told.err.splitlines() if line.startswith("  left:")]
    assert all((Path(folder) / "run.json").exists() for folder in left)
    program.write_text(PROGRAM.replace("raise ValueError", "str"))
    assert swept("--set", "policy=bad,none", "--set", "ratio=0.5", "--seeds", "2", "--out", "q") == 0


def test_two_sweeps_of_one_folder_share_its_plan_or_the_second_is_refused(
    program: Path, capsys: pytest.CaptureFixture[str]
):
    """While the first goes on; afterwards the plan is the last one's, and what is no longer in it is told."""
    cells = grid("prog.py", ranks=[2], seeds=[0, 1])
    told: list[str] = []

    def meanwhile(line: str) -> None:
        if line.startswith("[1/2]"):
            assert Sweep.plan(cells, "q").says() == "2 runs: 1 done, 1 missing"
            with pytest.raises(ParameterError, match=r"another sweep with other runs is active in q .*--out"):
                Sweep.run(cells[:1], "q", jobs=0)
            told.append(Sweep.load("q").says())

    Sweep.run(cells, "q", jobs=0, say=meanwhile)
    assert told == ["2 runs: 1 done, 1 missing"] and Sweep.load("q").says() == "2 runs: 2 done"
    assert cli.main(["sweep", "prog.py", "--ranks", "2", "--jobs", "0", "--out", "q"]) == 0
    assert "1 run of an earlier command, or of files that were edited" in capsys.readouterr().out
    assert Sweep.load("q").says() == "1 run: 1 done"


def test_a_folder_that_is_removed_or_cannot_be_written_is_one_line(
    program: Path, capsys: pytest.CaptureFixture[str]
):
    """The runs that are made after it has gone can be read."""
    program.write_text("import shutil\ndef main(comm):\n    shutil.rmtree('q')\n    comm.record(loss=1.0)\n")
    assert cli.main(["sweep", "prog.py", "--ranks", "1", "--jobs", "0", "--out", "q"]) == 0
    assert Sweep.load("q").says() == "1 run: 1 done"
    program.write_text(
        "import shutil\ndef main(comm):\n    shutil.rmtree('q/runs')\n    open('q/runs', 'w')\n"
    )
    assert cli.main(["sweep", "prog.py", "--ranks", "1", "--jobs", "0", "--out", "q"]) == 1
    assert cli.main(["sweep", "prog.py", "--ranks", "1", "--jobs", "0", "--out", "q"]) == 2
    told = capsys.readouterr().err
    assert "prog-n1-s0: cannot" in told and "cannot make the run folder q/runs: File exists" in told
    assert "Traceback" not in told


# ---------------------------------------------------------------------------------------------------- executors
def test_a_run_that_takes_longer_than_its_limit_fails_alone(program: Path, monkeypatch: pytest.MonkeyPatch):
    """Its process is ended, and in other executors its command."""
    # Of a machine that does much else, a process may take half a second to begin.
    with executors.pool(1, limit_s=4) as pool:
        late, fine = pool.submit(time.sleep, 600), pool.submit(pow, 2, 5)
        with pytest.raises(WorldError, match=r"took longer than 4 s and was stopped"):
            late.result(timeout=240)
        assert fine.result(timeout=240) == 32
    cells = grid("prog.py", ranks=[2], seeds=[0])
    line = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(sweeping, "command_line", lambda *_: line)
    with (
        ThreadPoolExecutor(1) as threads,
        pytest.raises(StudyError, match=r"prog-n2-s0: the run took longer"),
    ):
        Sweep.run(cells, "q", executor=threads, limit_s=0.3)


def test_a_limit_that_cannot_be_held_is_refused_before_anything_is_written(
    program: Path, capsys: pytest.CaptureFixture[str]
):
    """Without processes to end, and for longer than the system waits: a run of such a limit failed when it began."""
    assert swept("--limit", "10 min", "--out", "q") == 2  # in this process
    assert swept("--limit", "soon", "--out", "q") == 2
    assert swept("--limit", "1000h", "--jobs", "1", "--out", "q") == 2
    told = capsys.readouterr().err
    assert "limit of 600 s: give more than 0 and at most 576 h, and processes" in told
    assert "'soon' is not a duration" in told and "limit of 3.6e+06 s" in told
    with pytest.raises(ParameterError, match="limit of 5 s"):
        Sweep.run(grid("prog.py", ranks=[2], seeds=[0]), "q", jobs=0, limit_s=5)
    assert not Path("q").exists()


def test_a_process_that_is_killed_fails_its_own_task_alone():
    """Others go on; an error comes back with its traceback, whatever can be pickled of it."""
    with executors.pool(2) as pool:
        killed = pool.submit(signal.raise_signal, signal.SIGKILL)
        fine = [pool.submit(os.getpid) for _ in range(2)]
        wrong = pool.submit(int, "x")
        with pytest.raises(
            WorldError, match=r"ended by SIGKILL; the system kills processes when memory runs out"
        ):
            killed.result()
        with pytest.raises(ValueError, match="invalid literal") as caught:
            wrong.result()
        assert len({each.result() for each in fine} | {os.getpid()}) == 3
    assert "Traceback" in caught.value.__dict__["remote"]


def test_what_is_printed_and_a_killed_sweep(program: Path, tmp_path: Path):
    """Killed by SIGKILL in the middle, it loses the runs that went on, whose processes stop; then it is finished."""
    line = [
        sys.executable,
        "-m",
        "spawnsim",
        "sweep",
        "prog.py",
        "--ranks",
        "12",
        "--jobs",
        "1",
        "--out",
        "q",
    ]
    line += ["--set", "policy=a", "--set", "wall_s=0.0,0.01,2.0"]  # the third takes 72 s
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        next(word for word in started.stdout if word.startswith("[2/3]"))
        runs = tmp_path / "q" / "runs"
        _wait(lambda: [path for path in runs.iterdir() if path.name.startswith(".")])
        started.kill()
    assert len(Sweep.load("q").of_state("done")) == 2
    # The orphan ends, and leaves what it had recorded aside. It has not failed: it was told to stop.
    _wait(lambda: Sweep.load("q").says() == "3 runs: 2 done, 1 stopped")
    printed = [path for path in runs.iterdir() if not path.name.startswith(("stopped-", "."))]
    assert all((path / "output.txt").read_text().count("rank") == 12 for path in printed)
    before = {path.name: (path / "run.json").stat().st_mtime_ns for path in printed}
    line[-1] = "wall_s=0.0,0.01"
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
    assert {name: (runs / name / "run.json").stat().st_mtime_ns for name in before} == before
    assert Sweep.load("q").says() == "2 runs: 2 done"


def _wait(met: Any) -> None:
    due_s = time.monotonic() + 240
    while not met():
        assert time.monotonic() < due_s
        time.sleep(0.05)


def test_drafts_of_processes_that_are_gone_are_removed(tmp_path: Path):
    """Those of processes that live, or of other machines, stay."""
    store = Store(tmp_path)
    gone = subprocess.Popen(["true"])
    gone.wait()
    here = platform.node()
    names = [f".a.{here}.{gone.pid}", f".b.{here}.{os.getpid()}", f".c.elsewhere.{gone.pid}"]
    for name in names:
        (tmp_path / name).mkdir()
    store.tidy()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])
    (tmp_path / names[0]).mkdir()
    store.tidy(aside=True)
    assert (tmp_path / "failed-a").is_dir()


def test_threads_carry_a_sweep_by_commands_of_their_own(program: Path, capsys: pytest.CaptureFixture[str]):
    """As does any executor but ours: its processes may be threads, or serve for many runs."""
    cells = grid(
        "prog.py", ranks=[12], seeds=[1], over={"policy": ["none", "bad"]}, stragglers="exponential:0.1"
    )
    with (
        ThreadPoolExecutor(2) as threads,
        pytest.raises(StudyError, match="1 of 2 runs failed; the first: bad"),
    ):
        Sweep.run(cells, "q", executor=threads)
    assert "failed: bad: rank 11 raised ValueError: no such luck" in str(_notes(cells))
    ((_, run),) = Sweep.load("q").runs()
    assert (run.what["stragglers"], run.what["seed"], run.table.rows) == ("exponential:0.1", 1, 36)
    same = Sweep.run(cells[:1], "again", jobs=0)
    assert next(same.runs())[1].totals["digest"] == run.totals["digest"]


def _notes(cells: Any) -> list[str]:
    try:
        Sweep.run(cells, "q", jobs=0)
    except StudyError as error:
        return error.__notes__
    return []


def test_mpi4py_futures_carries_a_sweep(program: Path):
    """Rank 0 is the sweep, the others carry its runs; a rank's MPI does not hinder a virtual run below it."""
    line = [
        "mpiexec",
        "-n",
        "2",
        sys.executable,
        "-m",
        "mpi4py.futures",
        "-m",
        "spawnsim",
        "sweep",
        "prog.py",
    ]
    line += ["--ranks", "12", "--set", "ratio=0.1,0.2", "--executor", "mpi", "--jobs", "1", "--out", "q"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=240, env=os.environ | {"PATH": path}, check=False
    )
    assert (done.returncode, Sweep.load("q").says()) == (0, "2 runs: 2 done"), done.stderr


def test_circumstances_that_are_objects_are_for_our_own_processes(program: Path):
    """No command line can hold them, which is told with the name."""

    class Slow:
        pass

    cells = grid("prog.py", ranks=[12], seeds=[0], around={"stragglers": [Slow()]})
    with (
        ThreadPoolExecutor(1) as threads,
        pytest.raises(StudyError, match=r"stragglers=.*cannot be passed on a command"),
    ):
        Sweep.run(cells, "q", executor=threads)


# ------------------------------------------------------------------------------------------------------- figures
@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a sweep of 24 cells: one failed, one was stopped, one is missing, the others are synthetic runs."""
    home = tmp_path_factory.mktemp("half")
    program = home / "prog.py"
    program.write_text(PROGRAM)
    over = {"policy": ["none", "average", "selective"], "ratio": [0.1, 0.4]}
    cells = grid(program, ranks=[12], seeds=[1, 2], over=over, around={"stragglers": [None, "pareto:1.5"]})
    sweep = Sweep.plan(cells, home / "half")
    for planned in sweep.cells[1:]:
        run = synthetic.run(planned.values["policy"], ranks=12, iterations=40, seed=planned.values["seed"])
        folder = sweep.store.root / planned.folder
        run.save(folder)
        write_cost(folder, Cost(1.0, 2**20, 0.5))
    for at, why in ((-1, "failed"), (-2, "stopped")):
        name = sweep.cells[at].folder
        (sweep.store.root / name).rename(sweep.store.root / f"{why}-{name}")
    return home / "half"


@pytest.fixture
def half(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return that sweep, in the working folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(built, "half")
    return Path("half")


@pytest.mark.parametrize(
    ("words", "stem"),
    [
        ([], "accuracy-over-time_s"),
        (
            ["--x", "iteration", "--y", "loss", "--facet", "ratio,straggler"],
            "loss-over-iteration",
        ),
        (
            ["--x", "ratio", "--y", "time_to:accuracy>0.7", "--hue", "policy"],
            "time_to-accuracy-0.7-over-ratio",
        ),
        (["--x", "ratio"], "final-accuracy-over-ratio"),
        (["--x", "time_s", "--hue", "ratio"], "accuracy-over-time_s"),
        (["--x", "straggler", "--y", "accuracy", "--where", "ratio=0.1"], "accuracy-over-stragglers"),
        (["--x", "ratio", "--y", "accuracy", "--against", "none"], "accuracy-against-none-over-ratio"),
        (["--x", "bytes", "--y", "highest:accuracy"], "highest-accuracy-over-bytes"),
        (["--x", "ratio", "--hue", "policy", "--y", "lowest:loss", "--heat"], "lowest-loss-heat-over-ratio"),
    ],
)
def test_an_unfinished_sweep_is_drawn_and_says_what_is_missing(
    half: Path, words: list[str], stem: str, capsys: pytest.CaptureFixture[str]
):
    """With its data, and the commands that make it again."""
    assert cli.main(["plot", str(half), "--format", "svg", "--out", "fig", *words]) == 0
    told = capsys.readouterr()
    assert {f"fig/{stem}.{ending}" for ending in ("svg", "csv", "sh")} <= set(told.out.split())
    assert ("1 of 24 runs not done yet" in told.err) == ("--where" not in words)
    assert ("1 of 24 runs stopped: " in told.err) == ("--where" not in words)
    picture = Path(f"fig/{stem}.svg").read_text()
    assert "12 ranks" in picture and ("1 of 24 runs not done yet" in picture) == ("--where" not in words)
    with Path(f"fig/{stem}.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 10
    assert len(Path(f"fig/{stem}.sh").read_text().splitlines()) in (1, 2)


def test_what_one_policy_alone_has_recorded_is_drawn_of_it(half: Path, capsys: pytest.CaptureFixture[str]):
    """Others have none; a column that no run has is an error."""
    sweep = Sweep.load(half)
    planned = sweep.cells[3]
    run = synthetic.run("none", ranks=12, iterations=4)
    rows = dict(run.table) | {"extra": run.table["loss"]}
    dataclasses.replace(run, table=Table(rows)).save(sweep.store.root / planned.folder)
    found = sweep.table("final:extra")["final:extra"]
    assert np.flatnonzero(~np.isnan(found)).tolist() == [3]
    assert cli.main(["plot", str(half), "--y", "extra", "--x", "bytes", "--format", "svg"]) == 0
    for x in ("ratio", "time_s"):
        assert cli.main(["plot", str(half), "--y", "extra", "--x", x, "--format", "svg"]) == 0
        # What is drawn blank is not what is missing, nor what has failed.
        assert "20 of 24 runs have no number of extra: none, " in capsys.readouterr().err
        assert (
            "20 of 24 runs have no number of extra: none, " in Path(f"figures/extra-over-{x}.svg").read_text()
        )
        assert cli.main(["plot", str(half), "--y", "extre", "--x", x, "--format", "svg"]) == 2
        assert "column 'extre' was not recorded" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--y", "time_to:accuracy"], "in quotes, or the shell interprets the >"),
        (["--y", "accuracy>0.8"], "write time_to:accuracy>0.8"),
        (["--y", "first:accuracy"], "it begins with one of final"),
        (["--y", "acuracy"], "column 'acuracy' was not recorded; did you mean accuracy?"),
        (["--y", "final:consensus.accuracy"], "no event 'consensus' with 'accuracy' was recorded"),
        (
            ["--y", "accuracy", "--hue", "polcy"],
            "--hue polcy: the sweep has no such column; did you mean policy?",
        ),
        (["--y", "accuracy", "--x", "ratio", "--facet", "policy", "--hue", "policy"], "stragglers also vary"),
        (["--y", "accuracy", "--where", "ratio=7"], "ratio is one of 0.1, 0.4"),
        (["--y", "accuracy", "--x", "ratio", "--against", "best"], "--against best: policy is one of"),
        (["--y", "accuracy", "--x", "time_s", "--heat"], "--x time_s with --heat: give a column that varies"),
        (["--y", "accuracy", "--x", "policy", "--hue", "policy", "--heat"], "two columns that vary"),
        (["--y", "accuracy", "--by", "policy"], "--by is for run folders"),
        (["another"], "one sweep at a time"),
    ],
)
def test_a_figure_that_cannot_be_is_told(
    half: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
):
    """In one line, with what there is."""
    assert cli.main(["plot", str(half), *words, "--out", "fig"]) == 2
    assert says in capsys.readouterr().err
    assert not Path("fig").exists()


def test_options_of_sweeps_are_refused_for_run_folders(program: Path, capsys: pytest.CaptureFixture[str]):
    """They would do nothing."""
    synthetic.run("none", ranks=2, iterations=2).save("run")
    assert cli.main(["plot", "run", "--heat"]) == 2
    assert "--heat is for a sweep's folder (spawnsim sweep); run is not a sweep\n" in capsys.readouterr().err
    assert cli.main(["plot", "runn"]) == 2
    assert "runn: this folder does not exist" in capsys.readouterr().err


def test_a_report_shows_the_finished_runs_of_a_sweep(
    half: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Beside other runs; other commands say where its runs lie."""
    shown: list[list[int]] = []
    page = lambda found, _title: str(shown.append([len(group.runs) for group in found]))  # noqa: E731
    monkeypatch.setattr("spawnsim.cli.results.render", page)
    synthetic.run("average", ranks=12, iterations=4).save("run")
    assert cli.main(["report", str(half), "run", "--by", "policy", "--out", "page.html"]) == 0
    assert "1 of 24 runs not done yet" in capsys.readouterr().err
    assert [len(group) for group in shown] == [3] and Path("page.html").is_file()
    for cell in Sweep.load(half).cells:
        shutil.rmtree(half / "runs" / cell.folder, ignore_errors=True)
    assert [cli.main(["report", str(half)]), cli.main(["trace", str(half)])] == [2, 2]
    told = capsys.readouterr().err
    assert (
        "no run has finished yet (24 runs: 1 failed, 1 stopped, 22 missing)" in told
        and f"its runs are in {half}/runs" in told
    )


def test_a_run_whose_cost_is_damaged_is_told_and_made_again(program: Path):
    """By its file."""
    assert swept("--out", "q") == 0
    (place,) = Path("q/runs").glob("*/cost.json")
    place.write_text("{")
    with pytest.raises(ParameterError, match=r"cost.json is not a run's cost"):
        Sweep.load("q").table()
    assert swept("--out", "q") == 0
    assert Sweep.load("q").table()["wall_s"][0] > 0


def test_a_damaged_plan_is_told(half: Path):
    """By its file."""
    assert spawnsim.Sweep.load(half).says() == "24 runs: 21 done, 1 failed, 1 stopped, 1 missing"
    (half / results.PLAN).write_text(json.dumps({"cells": [{"label": 1}]}))
    with pytest.raises(ParameterError, match=r"half/sweep.json is not a sweep's"):
        Sweep.load(half)
    with pytest.raises(ParameterError, match=r"nowhere is not a sweep's folder"):
        Sweep.load("nowhere")


def test_a_straggler_needs_no_quotes_within_those_of_the_shell(program: Path) -> None:
    """The commas of its parameters are followed by numbers, and its name begins with a letter."""
    shown = [
        cell.world.get("stragglers")
        for cell in _cells("none,slow:0.05,10,markov:10,1,.5+speed:0.3,'slow:0.1,2'")
    ]
    assert shown == [None, "slow:0.05,10", "markov:10,1,.5+speed:0.3", "slow:0.1,2"]


def _cells(stragglers: str) -> list[Any]:
    line = ["prog.py", "-n", "12", "--straggler", stragglers]
    return cells_of(SweepCommand.parse(line))
