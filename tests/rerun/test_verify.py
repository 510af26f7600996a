"""`spawnsim verify`: a run that repeats, and six that do not, each for a reason that is found."""

import json
import re
from pathlib import Path

import pytest

import spawnsim
from spawnsim.cli import serve
from spawnsim.errors import ParameterError
from spawnsim.models.faults import Crash, FaultPlan, Partition, Pause
from spawnsim.rerun import Again

PROGRAMS = Path(__file__).parent.parent / "programs"
LEAKS = {  # the reason that is named, and the rank that differs first; None: any
    "wall_clock": ("the wall clock was read", None),
    "entropy": ("the system's entropy was read by rank 1", 1),
    "set_order": ("the order of a set", 1),
    "threads": ("a thread was started by rank 1", 1),
    "generators": (r"created without a seed when the file was loaded.*generators\.py:5", None),
    "addresses": (r"addresses \(id\(\)", 1),
}


def line_of(program: Path, text: str) -> int:
    """Return the number of the line that holds a text."""
    return next(at for at, line in enumerate(program.read_text().splitlines(), 1) if text in line)


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_located_and_explained(name, tmp_path, capsys):
    """The first event that differs: its rank, its time, its call, its line; and the likely reason."""
    program, (reason, rank) = PROGRAMS / "leaking" / f"{name}.py", LEAKS[name]
    spawnsim.run(program, ranks=3, out=tmp_path / "run")
    assert serve("verify", [str(tmp_path / "run"), "--json"]) == 1
    verdict = json.loads(capsys.readouterr().out)
    assert re.search(reason, verdict["hint"])
    assert rank in (None, verdict["rank"])
    assert 0.03 <= verdict["time_s"] < 0.031  # the third iteration
    assert verdict["call"] in ("allreduce", "allgather", "bcast")
    assert verdict["line"] == f"{name}.py:{line_of(program, 'comm.' + verdict['call'])}"


def test_a_run_that_repeats(tmp_path, capsys, monkeypatch):
    """With faults, stragglers, a platform, parameters and an order of ties, all from the folder; nothing warns."""
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    spawnsim.run(
        PROGRAMS / "planted" / "off_by_one_age.py", ranks=12, out=tmp_path / "run", faults="slow:11@0.02s+0.1s,3",
        stragglers="lognormal:0.3", platform="ethernet-10g", ties="random:5", seed=3,
        sums="gloo", parameters={"fixed": True},
    )  # fmt: skip
    assert serve("verify", [str(tmp_path / "run")]) == 0
    assert "the same digest three times" in capsys.readouterr().out


def test_a_run_that_kept_some_rows_repeats(tmp_path):
    """Rows that were left out are no difference; one that is not repeated still is."""
    program = tmp_path / "train.py"
    program.write_text(
        "import time\n\ndef main(comm, leak=False):\n    for iteration in range(9):\n"
        "        comm.record(iteration=iteration, value=time.time() if leak else 0.5)\n"
    )
    some = {"ranks": 11, "record_every": 4, "record_ranks": "0-2,10"}
    run = spawnsim.run(program, out=tmp_path / "run", **some)
    assert run.table.rows == 4 * 3
    assert serve("verify", [str(tmp_path / "run")]) == 0
    spawnsim.run(program, out=tmp_path / "leaking", parameters={"leak": True}, **some)
    assert serve("verify", [str(tmp_path / "leaking")]) == 1


def test_what_is_not_a_number_is_no_difference(tmp_path, capsys):
    """NaN, recorded as such or for a row without the value, is equal to itself: the value that changed is named."""
    program, read = tmp_path / "train.py", tmp_path / "read.txt"
    program.write_text(
        "from pathlib import Path\n\ndef main(comm, read):\n    for iteration in range(4):\n"
        "        with comm.compute(0.1):\n            pass\n"
        "        late = {'value': float(Path(read).read_text())} if iteration == 3 else {}\n"
        "        comm.record(iteration=iteration, metric=float('nan'), **late)\n"
    )
    read.write_text("1.0")
    spawnsim.run(program, ranks=2, out=tmp_path / "run", parameters={"read": str(read)})
    read.write_text("2.0")
    assert serve("verify", [str(tmp_path / "run")]) == 1
    assert "First recorded value that differs: value of rank 0 at 0.4 s" in capsys.readouterr().out


def test_a_run_that_went_on_with_other_ranks_is_said_to_be_resumed(tmp_path, capsys):
    """It cannot be run again from its beginning as the run that it has become."""
    (tmp_path / "train.py").write_text(
        "def main(comm, iterations=2):\n    saved = comm.restore()\n"
        "    for iteration in range(saved.iteration if saved else 0, iterations):\n"
        "        comm.record(ranks=comm.size)\n        comm.checkpoint(iteration=iteration + 1)\n"
    )
    run = {"out": tmp_path / "run", "resume": True}
    spawnsim.run(tmp_path / "train.py", ranks=12, **run)
    spawnsim.run(tmp_path / "train.py", ranks=5, parameters={"iterations": 4}, **run)
    assert serve("verify", [str(tmp_path / "run")]) == 1
    assert "it was resumed at iteration 2, perhaps with another program, ranks" in capsys.readouterr().out


def test_the_program_of_the_folder_is_run_not_what_became_of_it(tmp_path):
    """An edit since changes nothing, unless the file is named."""
    program = tmp_path / "train.py"
    program.write_text("def main(comm):\n    comm.record(loss=1.5)\n")
    spawnsim.run(program, ranks=2, out=tmp_path / "run")
    # Longer, for Python takes a file of the same length and second for the one that it has compiled.
    program.write_text("def main(comm):\n    comm.record(loss=22.5)\n")
    assert serve("verify", [str(tmp_path / "run")]) == 0
    assert serve("verify", [str(tmp_path / "run"), "--program", str(program)]) == 1


def test_a_plan_that_was_an_object_comes_back(tmp_path):
    """With faults that last for ever, and members."""
    plan = FaultPlan((Crash(2, 0.5), Pause(1, 0.1, 0.2), Partition((0, 3), 9.0, float("inf"))), seed=4)
    program = PROGRAMS / "planted" / "world_size.py"
    spawnsim.run(program, ranks=4, out=tmp_path / "run", faults=plan, parameters={"fixed": True})
    assert Again.of(tmp_path / "run").scenario.faults == plan


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", "\u0000"), ("seed", None), ("ranks", []), ("deadline_s", {}), ("faults", {"faults": 3})],
)
def test_a_damaged_description_is_one_clear_error(name, value, tmp_path):
    """run.json may have been edited, or cut."""
    spawnsim.run(PROGRAMS / "planted" / "world_size.py", ranks=2, out=tmp_path, parameters={"fixed": True})
    manifest = json.loads((tmp_path / "run.json").read_text())
    manifest["what"][name] = value
    (tmp_path / "run.json").write_text(json.dumps(manifest))
    with pytest.raises(ParameterError, match=r"run\.json: 'what' does not describe a run"):
        Again.of(tmp_path)


def test_what_cannot_be_run_again_is_refused(tmp_path):
    """A function has no file; a folder without a run is none."""
    spawnsim.run(lambda comm: None, ranks=2, out=tmp_path / "run")
    with pytest.raises(ParameterError, match="its program was a function"):
        serve("verify", [str(tmp_path / "run")])
    with pytest.raises(ParameterError):
        serve("verify", [str(tmp_path)])
