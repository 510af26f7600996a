"""`spawnsim replay`: a run stopped at a time or a condition, every rank looked at, and changed from there on."""

import io
import shutil
from pathlib import Path

import pytest

import spawnsim
from spawnsim.cli import serve
from spawnsim.errors import ParameterError

PROGRAM = """
class Rate:
    def __init__(self):
        self.value = 1.0


def main(comm, iterations=20, step=1.0):
    rate, loss = Rate(), 10.0
    iteration = 0
    while iteration < iterations:
        with comm.compute(0.01):
            loss -= 0.1 * step * rate.value
        if comm.rank == 11 and iteration == 5:
            loss += 100.0
        comm.isend(iteration, (comm.rank + 1) % comm.size)
        comm.recv(source=(comm.rank - 1) % comm.size)
        comm.record(iteration=iteration, loss=loss, staleness=float("nan"))
        iteration += 1
"""


@pytest.fixture
def folder(tmp_path):
    """A recorded run of twelve ranks."""
    (tmp_path / "train.py").write_text(PROGRAM)
    spawnsim.run(tmp_path / "train.py", ranks=12, out=tmp_path / "run", stragglers="lognormal:0.3", seed=2)
    return tmp_path / "run"


@pytest.fixture
def at_prompt(folder, monkeypatch, capsys):
    """Replay the folder with commands from a pipe; return what is printed."""

    def run(commands, *options):
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(commands) + "\n"))
        assert serve("replay", [str(folder), *options]) == 0
        return capsys.readouterr().out

    return run


def test_at_a_time_every_rank_can_be_looked_at(at_prompt):
    """Clock, call and line of all; frames, variables, rows of one; and it ends as recorded."""
    out = at_prompt(
        [
            "ranks 11",
            "rank x",
            "rank 11",
            "w",
            "p loss > 0",
            "rows",
            "loss - loss",
            "p nothing",
            "messages",
            "c",
        ],
        "--until",
        "0.05s",
    )
    assert "stopped at 0.05 s" in out
    assert "since" not in out  # a rank that computes has a clock that is ahead of the time
    for words in (
        "rank 11 ", "rank x: give the number of a running rank", "train.py(", "main()", "True\n{'rank': 11",
        "\n0.0\n", "NameError: name 'nothing' is not defined", "ended as recorded",
    ):  # fmt: skip
        assert words in out


def test_at_a_condition_on_recorded_values(at_prompt):
    """It stops where the row was recorded, on that rank, and nowhere else."""
    out = at_prompt(["p loss > 90", "p comm.rank, iteration", "c"], "--break", "rank == 11 and loss > 50")
    assert "stopped at rank 11 at" in out
    assert "True\n(11, 5)" in out


@pytest.mark.parametrize("commands", [["q"], []])
def test_one_may_leave_before_the_end(at_prompt, commands):
    """By a command, or at the end of the commands."""
    assert "ended" not in at_prompt(commands, "--until", "0.05s")


def test_after_the_end_there_is_nothing_to_look_at(at_prompt):
    """The run has ended as recorded."""
    out = at_prompt(["ranks"], "--until", "100s")
    assert "all ranks have ended" in out
    assert "ended as recorded" in out


def test_a_statement_changes_the_run_from_there_on(at_prompt):
    """A variable of the rank's function, or an attribute; the run is another one then."""
    commands = ["rank 3", "loss = 50.0", "rate.value = 0.0", "rank 4", "rank 3", "p loss, rate.value", "c"]
    out = at_prompt(commands, "--until", "0.05s")
    assert "(50.0, 0.0)" in out
    assert "a different digest than recorded" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "needs a place to stop"),
        (["--break", "loss >"], "write 'rank == 17"),
        (["--break", "lss > 3"], "no recorded column is called lss; did you mean loss"),
        (
            ["--break", "rank == 3 and weight > abs(time_s)"],
            "called weight; recorded columns: .*iteration, loss",
        ),
    ],
)
def test_what_has_no_meaning_is_refused(folder, options, message):
    """In one line."""
    with pytest.raises(ParameterError, match=message):
        serve("replay", [str(folder), *options])


def test_unmodified_programs_are_replayed_too(tmp_path, monkeypatch, capsys):
    """Their frames are there as well."""
    (tmp_path / "script.py").write_text(
        "from mpi4py import MPI\ncomm = MPI.COMM_WORLD\nfor step in range(5):\n    total = comm.allreduce(step)\n"
    )
    spawnsim.run(tmp_path / "script.py", ranks=12, out=tmp_path / "run", compute="10 ms")
    monkeypatch.setattr("sys.stdin", io.StringIO("rank 11\np step\nc\n"))
    assert serve("replay", [str(tmp_path / "run"), "--until", "0.025s"]) == 0
    out = capsys.readouterr().out
    assert "script.py:4" in out
    assert "ended as recorded" in out


def test_a_replay_of_gathers_and_checkpoints_ends_as_recorded(tmp_path, monkeypatch, capsys):
    """What a campaign has found: a rank left a gather of unequal lengths when the next one happened to have come."""
    (tmp_path / "gathers.py").write_text(
        "def main(comm):\n"
        "    for step in range(4):\n"
        "        with comm.compute(0.001 * (1 + comm.rank * 7 % 5)):\n            pass\n"
        "        comm.gather('x' * comm.rank, root=step)\n"
        "        comm.record(left_s=comm.clock.now())\n"
    )
    shutil.copy(Path(__file__).parents[1] / "programs" / "resumable.py", tmp_path)
    for name, parameters in (("gathers.py", {}), ("resumable.py", {"policy": "selective", "iterations": 14})):
        spawnsim.run(
            tmp_path / name, ranks=12, out=tmp_path / "run", stragglers="lognormal:0.3", parameters=parameters,
            overwrite=True,
        )  # fmt: skip
        monkeypatch.setattr("sys.stdin", io.StringIO("c\n"))
        assert serve("replay", [str(tmp_path / "run"), "--until", "0.003s"]) == 0
        assert "ended as recorded" in capsys.readouterr().out
