"""`spawnsim replay`: a run stopped at a time or a condition, every rank looked at, and changed from there on."""

import io
import shutil
from pathlib import Path

import pytest

import spawnsim
from spawnsim.cli.replay import replay
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
        assert replay([str(folder), *options]) == 0
        return capsys.readouterr().out

    return run


def test_at_a_time_every_rank_can_be_looked_at(at_prompt):
    """Clock, call and line of all; stack, variables, rows of one; and it ends as recorded."""
    out = at_prompt(
        ["ranks 11", "where 11", "p 11 loss", "rows 11", "loss + 1", "messages", "c"], "--until", "0.05s"
    )
    assert "stopped at 0.05 s" in out
    assert "since" not in out  # a rank that computes has a clock that is ahead of the time
    assert "rank 11 " in out
    assert "train.py:" in out
    assert "in main" in out
    assert "'rank': 11" in out
    assert "ended as recorded" in out


def test_at_a_condition_on_recorded_values(at_prompt):
    """It stops where the row was recorded, on that rank, and nowhere else."""
    out = at_prompt(
        ["p loss > 90", "p comm.rank, iteration", "locals", "events", "c"],
        "--break",
        "rank == 11 and loss > 50",
    )
    assert "stopped at rank 11 at" in out
    assert "True\n(11, 5)" in out
    assert "iterations = 20" in out


def test_on_from_a_stop_to_the_next_and_out(at_prompt):
    """`until`, `break`, `quit`; what is nonsense is said, and the prompt stays."""
    out = at_prompt(
        ["until soon", "p 3 nothing", "break loss >", "until 0.1s", "ranks", "q"], "--until", "0.05s"
    )
    assert "'soon' is not a duration" in out
    assert "NameError: name 'nothing' is not defined" in out
    assert "write 'rank == 17 and loss > 3'" in out
    assert out.index("stopped at 0.05 s") < out.index("stopped at 0.1 s")
    assert "ended" not in out


def test_a_time_that_is_past_is_refused_and_after_the_end_one_may_quit(at_prompt):
    """The prompt stays at the first, and leaving a run that has ended is no fault."""
    out = at_prompt(["until 0.01s", "until 100s", "ranks", "q"], "--until", "0.05s")
    assert "until 0.01s: it is 0.05" in out
    assert "all ranks have ended" in out
    assert "stopped at 0.01 s" not in out


def test_a_run_can_be_changed_at_the_prompt(at_prompt):
    """And is told to be another one."""
    out = at_prompt(["set 3 loss = 50.0", "p 3 loss", "c"], "--until", "0.05s")
    assert "50.0" in out
    assert "another digest than recorded" in out


def test_what_the_prompt_does_not_know_is_said(at_prompt):
    """No name that is not there is set, no rank guessed; and the run stays what it was."""
    out = at_prompt(
        ["where x", "set 3 lss=5", "set 3 loss", "set 3 rate.velue=2", "break lss > 3", "c"],
        "--until",
        "0.05s",
    )
    for words in (
        "where x: give the number of a rank", "main has no variable lss", "set 3 loss: write NAME=VALUE",
        "rate.velue cannot be changed", "nothing that was recorded is called lss",
    ):  # fmt: skip
        assert words in out
    assert "ended as recorded" in out


def test_what_if_a_fault_struck_or_a_parameter_changed(at_prompt, folder):
    """From the time on; before it all is as recorded."""
    out = at_prompt([], "--until", "0.1s", "--what-if", "slow:3@0.1s+1s,5")
    assert "what if" in out
    was = spawnsim.Run.load(folder).totals["virtual_seconds"]
    shown = next(line.split() for line in out.splitlines() if line.startswith("virtual_seconds"))
    assert float(shown[1]) == pytest.approx(was, rel=1e-5)
    assert float(shown[2]) > was
    out = at_prompt(
        [],
        "--until",
        "0.1s",
        "--what-if",
        "step=0.0",
        "--what-if",
        "rate.value=3.0",
        "--what-if",
        "iterations=15",
    )
    losses = next(line.split() for line in out.splitlines() if line.startswith("last loss"))
    assert float(losses[2]) < float(losses[3])  # steps stopped halfway
    assert "staleness" not in out  # no row has a number of it


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "where to stop"),
        (["--what-if", "step=1"], "from when on"),
        (["--until", "1s", "--what-if", "crash:3@0.5s"], "it begins before 1 s"),
        (["--until", "1s", "--what-if", "crash:99@2s"], "no rank 99"),
        (["--until", "1s", "--what-if", "nonsense"], "write a fault such as"),
        (["--until", "0.1s", "--what-if", "lr=1"], "main has no variable lr"),
        (["--until", "0.1s", "--what-if", "rate.valeu=1"], "rate.valeu cannot be changed: .*no attribute"),
        (["--until", "0.1s", "--what-if", "rota.value=1"], "rota.value cannot be changed: name 'rota'"),
        (["--break", "loss >"], "write 'rank == 17"),
        (["--break", "lss > 3"], "nothing that was recorded is called lss; did you mean loss"),
        (
            ["--break", "rank == 3 and weight > abs(time_s)"],
            "called weight; recorded were: .*iteration, loss",
        ),
    ],
)
def test_what_has_no_meaning_is_refused(folder, options, message):
    """In one line."""
    with pytest.raises(ParameterError, match=message):
        replay([str(folder), *options])


def test_unmodified_programs_are_replayed_too(tmp_path, monkeypatch, capsys):
    """Their frames are there as well."""
    (tmp_path / "script.py").write_text(
        "from mpi4py import MPI\ncomm = MPI.COMM_WORLD\nfor step in range(5):\n    total = comm.allreduce(step)\n"
    )
    spawnsim.run(tmp_path / "script.py", ranks=12, out=tmp_path / "run", compute="10 ms")
    monkeypatch.setattr("sys.stdin", io.StringIO("p 11 step\nc\n"))
    assert replay([str(tmp_path / "run"), "--until", "0.025s"]) == 0
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
        assert replay([str(tmp_path / "run"), "--until", "0.003s"]) == 0
        assert "ended as recorded" in capsys.readouterr().out
