"""Studies: keys, the store that resumes, sweeps through executors, and the command."""

from __future__ import annotations

import dataclasses
import os
import re
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support import synthetic

from spawnsim import study
from spawnsim.cli import listing, serve
from spawnsim.cli import sweep as commands
from spawnsim.errors import ParameterError, StudyError, UsageError
from spawnsim.record import manifest
from spawnsim.run import process_setup
from spawnsim.study import Cell, Cost, Store, executors, grid, sweeping
from spawnsim.study import store as cell_module
from spawnsim.study import sweeping as execution

PROGRAM = """
def main(comm, policy="none", iterations=3):
    if policy == "bad" and comm.Get_rank() == 1:
        raise ValueError("no such luck")
    for iteration in range(iterations):
        with comm.compute(0.01):
            value = float(comm.rng.normal())
        comm.record(iteration=iteration, loss=value)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Return a small program's file."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def cells_of(program: Path, **more: Any) -> list[Cell]:
    """Return four cells: two policies, two seeds."""
    over = {"policy": ["none", "average"]}
    return grid(program, ranks=[2], seeds=[1, 2], over=over, **more)


class Recorder:
    """Stands in for `execute`: counts the runs, and fails those asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: tuple[int, ...] = ()) -> None:
        self.ran: list[str] = []
        self.fails = fails
        monkeypatch.setattr(sweeping, "execute", self)

    def __call__(self, cell: Cell, root: Path, how: Any = None, limit_s: float | None = None) -> Cost:
        self.ran.append(cell.name)
        if cell.seed in self.fails:
            raise UsageError(f"seed {cell.seed} is not liked")
        cost = Cost(wall_s=0.5, peak_memory_B=2**20, load=0.1)
        with Store(root).draft(cell) as folder:
            synthetic.run("none", ranks=2, iterations=2, seed=cell.seed).save(folder)
            study.store.write_cost(folder, cost)
        return cost


# ------------------------------------------------------------------------------------------------ the key


def test_the_key_covers_what_changes_a_result(program: Path):
    """Seed, ranks, parameters, world and the program's text change the key; the order of parameters does not."""
    base = Cell(file=program, ranks=2, seed=1, parameters={"a": 1, "b": 2}, world={"platform": "x"})
    others = [
        Cell(file=program, ranks=3, seed=1, parameters={"a": 1, "b": 2}, world={"platform": "x"}),
        Cell(file=program, ranks=2, seed=2, parameters={"a": 1, "b": 2}, world={"platform": "x"}),
        Cell(file=program, ranks=2, seed=1, parameters={"a": 1, "b": 3}, world={"platform": "x"}),
        Cell(file=program, ranks=2, seed=1, parameters={"a": 1, "b": 2}, world={"platform": "y"}),
        Cell(
            file=program, ranks=2, seed=1, parameters={"a": 1, "b": 2}, world={"platform": "x"}, backend="mpi"
        ),
    ]
    same = Cell(file=program, ranks=2, seed=1, parameters={"b": 2, "a": 1}, world={"platform": "x"})
    keys = [base.key, *(cell.key for cell in others)]
    assert len(set(keys)) == len(keys)
    assert same.key == base.key
    program.write_text(PROGRAM + "# changed\n")
    assert dataclasses.replace(base).key != keys[0]


HELPED = """
import importlib
import helper, pack.inner
from spawnsim import errors

def main(comm, plugin="plug" + "in"):
    with comm.compute():
        value = helper.VALUE + importlib.import_module(plugin).VALUE
    comm.record(value=value)
"""
PLATFORM = '[network]\ntopology = "switch"\n[network.link]\nlatency = "9 us"\nbandwidth = "1 GB/s"\n'


@pytest.fixture
def world(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """Return a program that stands on other modules, and circumstances that stand in files."""
    texts = {
        "program.py": HELPED, "helper.py": "from deep import VALUE\n", "deep.py": "VALUE = 1\n",
        "pack/__init__.py": "", "pack/inner.py": "from . import inmost\n", "pack/inmost.py": "",
        "plugin.py": "VALUE = 1\n", "net.toml": PLATFORM, "plan.json": "[]", "unrelated.py": "",
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    synthetic.run("none", ranks=2, iterations=5).save(tmp_path / "recorded")
    named = {"platform": "net.toml", "faults": "plan.json", "compute": "recorded"}
    return tmp_path / "program.py", {role: str(tmp_path / name) for role, name in named.items()}


@pytest.mark.parametrize(
    "edited",
    [
        "helper.py",
        "deep.py",
        "pack/__init__.py",
        "pack/inmost.py",
        "net.toml",
        "plan.json",
        "recorded/metrics.npz",
    ],
)
def test_the_key_covers_the_files_that_a_result_depends_on(world: tuple[Path, dict[str, Any]], edited: str):
    """Modules of the program's folder, whoever imports them; platform, plan and recorded run by what they say."""
    program, circumstances = world
    before = Cell(file=program, ranks=2, world=circumstances).key
    with (program.parent / edited).open("ab") as file:
        file.write(b"\n")
    assert Cell(file=program, ranks=2, world=circumstances).key != before


def test_the_key_covers_the_library_and_nothing_beside(world: tuple[Path, dict[str, Any]]):
    """Presets and every package that can change a result count; a module that is never imported does not."""
    program, circumstances = world
    before = Cell(file=program, ranks=2, world=circumstances).key
    program.with_name("unrelated.py").write_text("VALUE = 3")
    assert Cell(file=program, ranks=2, world=circumstances).key == before
    root = manifest.PACKAGE
    covered = {path.relative_to(root).as_posix() for path in cell_module._sources(root)}
    assert {"errors.py", "bagua.py", "models/platform/presets/laptop.toml", "cli/run.py"} <= covered
    assert {"torchgfn", "run", "policies", "comm"} <= {path.split("/")[0] for path in covered}
    assert not any(path.startswith(("plots/", "report/")) for path in covered)


class Seventh:
    """A straggler of a user's own."""

    def __init__(self, factor: float) -> None:
        self.factor = factor


def test_the_key_covers_objects_by_what_they_are(program: Path):
    """Equal objects give one key, whatever their addresses; other attributes, or another text of the class, do not."""
    keys = [
        Cell(file=program, ranks=2, world={"stragglers": Seventh(factor)}).key for factor in (2.0, 2.0, 3.0)
    ]
    assert (keys[0] == keys[1], keys[0] == keys[2]) == (True, False)
    assert (
        "stragglers/test_study.py" in Cell(file=program, ranks=2, world={"stragglers": Seventh(2.0)}).inputs()
    )


def test_a_module_imported_by_a_computed_name_is_looked_at_again(
    world: tuple[Path, dict[str, Any]], tmp_path: Path
):
    """No key can know it, so the run says what it has loaded, and is made again once that is edited."""
    program, circumstances = world
    cells = [Cell(file=program, ranks=2, world=circumstances)]
    context = study.Context("trial", tmp_path, tmp_path / "out", jobs=1)
    for value in (1, 1, 5):
        program.with_name("plugin.py").write_text(
            "\n" * value + f"VALUE = {value}\n"
        )  # Python tells edits of one second by size
        (result,) = context.sweep(cells)
        assert result.run.table["value"].tolist() == [1 + value] * 2
    found = result.run.what["inputs"]
    assert {"program/plugin.py", "program/deep.py", "program/pack/inmost.py", "platform/net.toml"} <= set(
        found
    )
    kept = tmp_path / "out" / "runs" / f"{cells[0].name}-{cells[0].key}" / "inputs"
    assert {name: manifest.file_digest(kept / name) for name in found} == found
    assert (kept / "program" / "plugin.py").read_text() == "\n" * 5 + "VALUE = 5\n"


def test_a_program_edited_while_a_study_runs_is_refused(program: Path, tmp_path: Path):
    """What it gives now must not lie under the key of what it was."""
    cell = cells_of(program)[0]
    assert cell.key
    program.write_text(PROGRAM + "# changed\n")
    with pytest.raises(ParameterError, match="edited since the study began"):
        execution.execute(cell, tmp_path / "runs")


def test_the_key_does_not_depend_on_where_the_file_lies(program: Path, tmp_path: Path):
    """A checkout elsewhere finds the same runs."""
    keys = []
    for folder in (tmp_path / "one", tmp_path / "other"):
        folder.mkdir()
        (folder / "program.py").write_text(PROGRAM)
        (folder / "net.toml").write_text(PLATFORM)
        keys.append(
            Cell(file=folder / "program.py", ranks=2, world={"platform": str(folder / "net.toml")}).key
        )
    assert keys[0] == keys[1]


def test_a_cell_without_a_file_or_ranks_is_refused(program: Path):
    """One clear error each, before anything runs."""
    with pytest.raises(ParameterError, match="not a file"):
        Cell(file=program.with_name("nowhere.py"), ranks=2)
    with pytest.raises(ParameterError, match="ranks=0"):
        Cell(file=program, ranks=0)


def test_a_grid_has_one_cell_per_combination(program: Path):
    """Two policies, two sizes, three seeds: twelve runs, seeds fastest."""
    found = grid(program, ranks=[2, 4], seeds=range(3), over={"policy": ["a", "b"]}, platform="p")
    assert len({cell.key for cell in found}) == 12
    assert [cell.name for cell in found[:2]] == ["program-a-n2-s0", "program-a-n2-s1"]
    assert found[0].world == {"platform": "p"}


# ------------------------------------------------------------------------------------- the store and sweeps


def test_what_is_done_is_not_done_again(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A second sweep runs only what a larger grid adds."""
    recorder, said = Recorder(monkeypatch), []
    first = sweeping.sweep(cells_of(program)[:3], Store(tmp_path / "runs"), say=said.append)
    again = sweeping.sweep(cells_of(program), Store(tmp_path / "runs"), say=said.append)
    assert len(recorder.ran) == 4
    assert again[:3] == first
    assert "3 of 4 runs are already done" in said


def test_equal_cells_run_once(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The same cell twice is one run, given twice."""
    recorder = Recorder(monkeypatch)
    cell = cells_of(program)[0]
    folders = sweeping.sweep([cell, cell], Store(tmp_path), say=str)
    assert (len(recorder.ran), folders[0]) == (1, folders[1])


def test_a_failed_run_spoils_no_other(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """All others finish; the error counts the failures and shows the first; a second sweep tries only those."""
    recorder = Recorder(monkeypatch, fails=(2,))
    with pytest.raises(StudyError, match="2 of 4 runs failed; the first: none, seed 2: seed 2 is not liked"):
        sweeping.sweep(cells_of(program), Store(tmp_path), say=str)
    recorder.fails = ()
    sweeping.sweep(cells_of(program), Store(tmp_path), say=str)
    assert recorder.ran.count("program-none-n2-s1") == 1
    assert recorder.ran.count("program-none-n2-s2") == 2


def test_a_draft_that_fails_never_looks_done(program: Path, tmp_path: Path):
    """An exception in the middle leaves what was recorded aside, under a name that says whether it was an error."""
    store, cell = Store(tmp_path / "runs"), cells_of(program)[0]
    for error, why in ((ValueError, "failed"), (KeyboardInterrupt, "stopped"), (ValueError, "failed")):
        with pytest.raises(error), store.draft(cell) as folder:
            (folder / "run.json").write_text("{}")
            raise error
        assert not store.done(cell)
        assert [path.name.partition("-")[0] for path in store.root.iterdir()] == [why]


def test_a_run_that_was_stopped_since_it_took_too_long_has_failed(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its process is told to stop, as when the whole sweep is; but the sweep goes on without it."""

    def ended(cell: Cell, root: Path) -> Cost:
        with suppress(KeyboardInterrupt), Store(root).draft(cell):
            raise KeyboardInterrupt
        raise executors.out_of_time(1.0)

    monkeypatch.setattr(sweeping, "execute", ended)
    with pytest.raises(StudyError, match="took longer than 1 s"):
        sweeping.sweep(cells_of(program)[:1], Store(tmp_path / "runs"), say=str)
    assert [path.name.partition("-")[0] for path in (tmp_path / "runs").iterdir()] == ["failed"]


def test_two_studies_at_once_agree(program: Path, tmp_path: Path):
    """Who finishes second finds the place taken, and leaves the first one's run."""
    store, cell = Store(tmp_path), cells_of(program)[0]
    with store.draft(cell) as folder:
        (folder / "mine").touch()
        store.folder(cell).mkdir()
        (store.folder(cell) / "run.json").write_text('{"what": {}, "totals": {}, "outcome": "finished"}')
        cell_module.write_cost(store.folder(cell), Cost(1.0, 1, 0.0))
    assert {path.name for path in store.folder(cell).iterdir()} == {"run.json", "cost.json"}


def test_any_executor_carries_a_sweep(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Threads, or a home-made executor: only `submit` is used, and progress has an ETA."""
    recorder, said = Recorder(monkeypatch), []

    class Calling(Executor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_result(fn(*args, **kwargs))
            return future

    sweeping.sweep(cells_of(program), Store(tmp_path / "a"), executor=Calling(), say=said.append)
    with ThreadPoolExecutor(2) as workers:
        sweeping.sweep(cells_of(program), Store(tmp_path / "b"), executor=workers, say=said.append)
    assert len(recorder.ran) == 8
    assert re.match(r"\[1/4\] (none|average), seed [12]: 0.5 s, about .* left", said[0])
    assert said[3].endswith(" in all")


# ------------------------------------------------------------------------------------------- real programs


def test_a_cell_runs_on_virtual_ranks(program: Path, tmp_path: Path):
    """The program really runs, in a fresh process, and again from the store; the cost is kept beside the run."""
    context = study.Context("trial", tmp_path, tmp_path / "out", jobs=2)
    results = context.sweep(context.grid("program.py", ranks=[3], seeds=[1, 2], over={"policy": ["none"]}))
    assert [result.run.table.rows for result in results] == [9, 9]
    assert {result.run.outcome for result in results} == {"finished"}
    assert all(result.cost.peak_memory_B > 2**20 for result in results)
    assert (results[0].run.table["loss"] != results[1].run.table["loss"]).all()


def test_a_program_that_raises_is_one_failed_run(program: Path, tmp_path: Path):
    """The rank and its exception are in the message, and what it recorded is kept."""
    context = study.Context("trial", tmp_path, tmp_path / "out", jobs=0)
    with pytest.raises(StudyError, match="no such luck"):
        context.sweep(context.grid("program.py", ranks=[3], seeds=[1], over={"policy": ["bad", "none"]}))
    assert sorted(path.name.partition("-")[0] for path in (tmp_path / "out" / "runs").iterdir()) == [
        "failed",
        "program",
    ]


def test_real_ranks_are_started_with_the_users_command(program: Path, tmp_path: Path):
    """Launched cells use `spawnsim run`; text stays text, also when it reads like a word for nothing."""
    cell = Cell(file=program, ranks=4, seed=7, backend="mpi", parameters={"policy": "none", "iterations": 5})
    line = execution.command_line(cell, tmp_path)
    assert line[1:4] == ["-m", "spawnsim", "run"]
    assert line[-4:] == ["--set", "policy=none", "--set", "iterations=5"]


# --------------------------------------------------------------------------------------------- the command


def test_the_command_runs_a_study_from_a_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """`spawnsim study PATH --quick` hands over what the user asked for."""
    path = tmp_path / "mine.py"
    path.write_text(
        "def study(context):\n    context.say(f'{context.name} {context.quick} {context.jobs} {context.out}')\n"
    )
    assert serve("study", [str(path), "--quick", "--jobs", "3", "--out", "here"]) == 0
    assert capsys.readouterr().out == "mine True 3 here\n"


def test_the_user_says_how_many_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The study's own, or so many: its first ones, and then those after its last."""
    path = tmp_path / "mine.py"
    path.write_text("def study(context):\n    context.say(f'{context.seeds((7, 9))}')\n")
    for asked in ([], ["--quick"], ["--seeds", "1"], ["--quick", "--seeds", "2"], ["--seeds", "4"]):
        assert serve("study", [str(path), *asked, "--out", "here"]) == 0
    assert capsys.readouterr().out == "[7, 9]\n[7]\n[7]\n[7, 9]\n[7, 9, 10, 11]\n"
    with pytest.raises(ParameterError, match=r"--seeds 0: give how many seeds to run, at least 1"):
        serve("study", [str(path), "--seeds", "0"])


def test_an_unknown_study_is_answered_with_those_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The names are listed; a file without `study` is no study."""
    with pytest.raises(ParameterError, match=r"no study 'nonsense'; studies here: .*demo"):
        listing.find("nonsense")
    path = tmp_path / "empty.py"
    path.touch()
    with pytest.raises(ParameterError, match=r"no function `study\(context\)`$"):
        commands.load(path)
    path.write_text("def main(comm):\n    pass\n")
    with pytest.raises(ParameterError, match=r"it has `main`, so run it: spawnsim run .*empty.py"):
        commands.load(path)


def test_workers_use_one_thread_each_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch):
    """The pool's processes tell numeric libraries so before they are loaded."""
    monkeypatch.setattr(executors.signal, "signal", lambda *_: None)
    for told, used in (("7", "7"), (None, "1")):
        for name in process_setup.VARIABLES:
            monkeypatch.setenv(name, told) if told else monkeypatch.delenv(name)
        executors.prepare()
        assert {os.environ[name] for name in process_setup.VARIABLES} == {used}


# ------------------------------------------------------------------------------------------- what studies draw


def test_a_pool_tells_its_processes_to_use_one_thread_and_leaves_the_environment_alone(monkeypatch):
    """Libraries ask when they are loaded, which is before a process gets its run."""
    for name in process_setup.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with executors.pool(1) as executor:
        assert executor.submit(os.getenv, "OMP_NUM_THREADS").result() == "1"
        first, second = (executor.submit(os.getpid).result() for _ in range(2))
    assert first != second and "OMP_NUM_THREADS" not in os.environ


def test_a_study_gets_each_result_as_soon_as_it_is_there(program, tmp_path, monkeypatch):
    """Once each, while the next has not begun; at a second call those that are there already come first."""
    ran = Recorder(monkeypatch, fails=(2,))
    context = study.Context("trial", tmp_path, tmp_path / "out", jobs=0)
    cells, came = cells_of(program), []

    def note(result: study.Result) -> None:
        came.append((result.cell.key, len(ran.ran)))
        assert result.run.table.rows == 4 and result.cost.wall_s == 0.5

    with pytest.raises(StudyError, match="2 of 5"):
        context.sweep([*cells, cells[0]], each=note)
    assert came == [(cells[0].key, 1), (cells[2].key, 3)]
    ran.fails, came[:] = (), []
    ran.ran.clear()
    results = context.sweep([cells[0], *cells], each=note)
    assert [result.cell for result in results] == [cells[0], *cells]
    assert came == [(cells[0].key, 0), (cells[2].key, 0), (cells[1].key, 1), (cells[3].key, 2)]
