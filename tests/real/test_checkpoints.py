"""Real ranks that are killed go on from their checkpoint, on as many ranks, fewer or more."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import spawnsim
from spawnsim import checkpoints
from spawnsim.real.runtime.rank import Checkpoints

PROGRAM = """
import os, signal, time
from pathlib import Path
import numpy as np

def main(comm, iterations=30, die=""):
    saved = comm.restore()
    value = saved.extra if saved else np.full(100_000, float(comm.rank))
    for iteration in range(saved.iteration if saved else 0, iterations):
        if die and iteration == 25 and comm.rank == 1 and not Path(die).exists():
            Path(die).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        with comm.compute():
            value = value + comm.rng("step").random()
        mean = np.empty_like(value)
        comm.Allreduce(value, mean)
        value = 0.5 * value + 0.5 * mean / comm.size
        comm.record(iteration=iteration, value=value[0], donor=saved.donor if saved else -1)
        if (iteration + 1) % 10 == 0:
            comm.checkpoint(iteration=iteration + 1, extra=value)
            if iteration == 19:
                comm.runtime.checkpoints.finish()  # the test kills soon after it
                comm.Barrier()
"""


def spawn(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of spawnsim."""
    return subprocess.run(
        [sys.executable, "-m", "spawnsim", *words],
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_survivors_are_known_by_their_ranks_in_the_world(tmp_path: Path) -> None:
    """Rows are: a run that goes on keeps those of each rank until its own clock at the checkpoint."""
    for rank, world in enumerate((0, 2, 3)):
        comm = SimpleNamespace(rank=rank, size=3, members=(0, 2, 3))
        saving = Checkpoints(tmp_path)
        saving.write(comm, 10, checkpoints.Shard(), save="a", clock_s=1.0 + world)
        saving.finish()
    assert checkpoints.clocks_s(checkpoints.newest(tmp_path)) == {0: 1.0, 2: 3.0, 3: 4.0}


@pytest.mark.parametrize("error", [MemoryError("none left"), ValueError("too long")])
def test_whatever_keeps_a_shard_from_being_written_is_reported(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that writes has nobody to raise to: the job ended well, with a checkpoint that misses a shard."""

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(checkpoints, "write", refuse)
    saving = Checkpoints(tmp_path)
    comm = SimpleNamespace(rank=0, size=1, members=(0,))
    saving.write(comm, 10, checkpoints.Shard(), save="a", clock_s=1.0)
    with pytest.raises(type(error), match=str(error)):
        saving.finish()
    saving.finish()  # told once


DYING = """
import os, signal
from spawnsim.errors import RankFailed, Revoked, Timeout

def main(comm, iterations=10):
    saved, me = comm.restore(), comm.rank
    value, iteration = (saved.extra, saved.iteration) if saved else (me, 0)
    comm.record.event("took", value=value, donor=saved.donor if saved else -1)
    while iteration < iterations:
        try:
            if me == 1 and iteration == 3 and not saved:
                comm.clock.sleep(0.6)  # its rows are on the disk by then
                os.kill(os.getpid(), signal.SIGKILL)
            comm.allreduce(1)
            comm.record(iteration=iteration)
            iteration += 1
            if iteration % 5 == 0:
                comm.checkpoint(iteration=iteration, extra=value)
        except (RankFailed, Revoked, Timeout):
            found = comm.recover(iteration)
            comm, iteration = found.comm, found.step
"""


@pytest.mark.parametrize(("words", "donors"), [
    (("-n", "4"), [0, 2, 2, 3]),
    (("-n", "3"), [0, 2, 3]),
    (("-n", "6", "--backend", "virtual"), [0, 2, 2, 3, 2, 3]),
])  # fmt: skip
def test_survivors_keep_their_states_and_the_dead_their_rows(
    words: tuple[str, ...], donors: list[int], survived: Path, tmp_path: Path
) -> None:
    """By the rule of virtual ranks: each takes its own state, and not that of its place among the survivors."""
    out = tmp_path / "run"
    shutil.copytree(survived, out)
    resumed = spawn("resume", str(out), *words, "--set", "iterations=12", "--quiet")
    assert resumed.returncode == 0, resumed.stderr
    run = spawnsim.Run.load(out)
    taken = {event["rank"]: event for event in run.events if event["kind"] == "took" and event["donor"] >= 0}
    assert [taken[rank]["donor"] for rank in range(len(donors))] == donors
    assert [taken[rank]["value"] for rank in range(len(donors))] == donors
    for rank in range(4):
        first = range(3 if rank == 1 else 10)
        last = range(10, 12 if rank < len(donors) else 10)
        assert run.table.of_rank(rank)["iteration"].tolist() == [*first, *last], rank


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a job whose rank 1 of 4 has died, and whose survivors have saved."""
    folder = tmp_path_factory.mktemp("survived")
    (folder / "dying.py").write_text(DYING)
    own = (str(folder / "dying.py"), "--backend", "mpi", "-n", "4", "--survive", "--quiet")
    ended = spawn("run", *own, "--out", str(folder / "run"))
    assert ended.returncode == 0, ended.stderr
    return folder / "run"


def test_a_killed_job_resumes_to_the_bit_and_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    """The rows of before, those of after, one clock; and a rank more takes the state of its donor."""
    (tmp_path / "program.py").write_text(PROGRAM)
    own = (str(tmp_path / "program.py"), "--backend", "mpi", "-n", "3", "--seed", "5")
    whole, out = tmp_path / "whole", tmp_path / "killed"
    assert spawn("run", *own, "--out", str(whole)).returncode == 0
    killed = spawn("run", *own, "--out", str(out), "--set", f"die={str(tmp_path / 'died')!r}")
    assert killed.returncode == 137, killed.stderr
    assert checkpoints.newest(out).iteration == 20
    resumed = spawn("resume", str(out), "--quiet")
    assert resumed.returncode == 0, resumed.stderr
    expected, found = spawnsim.Run.load(whole).table, spawnsim.Run.load(out).table
    for name in ("rank", "iteration", "value"):
        np.testing.assert_array_equal(expected[name], found[name], err_msg=name)
    assert all((np.diff(found.of_rank(rank)["time_s"]) > 0).all() for rank in range(3)), "one clock"
    more = spawn("resume", str(out), "-n", "4", "--set", "iterations=32", "--quiet")
    assert more.returncode == 0, more.stderr
    run = spawnsim.Run.load(out)
    late = run.table.where(run.table["iteration"] >= 30)
    assert sorted(zip(late["rank"].tolist(), late["donor"].tolist(), strict=True)) == [
        (0, 0), (0, 0), (1, 1), (1, 1), (2, 2), (2, 2), (3, 0), (3, 0),
    ]  # fmt: skip
    assert run.what["made"]["resumed_at"] == [20, 30] and run.table.rows == 98


SAVING = """
def main(comm):
    comm.restore()
    for iteration in (1, 2):
        comm.checkpoint(iteration=iteration, extra=comm.rank)
"""


def test_shards_that_were_not_saved_together_are_refused_in_one_line(tmp_path: Path) -> None:
    """Another rank's, iteration's or job's, a damaged one, another seed; and the folder stays as it is."""
    (tmp_path / "saving.py").write_text(SAVING)
    out, other = tmp_path / "a", tmp_path / "b"
    for folder in (out, other):
        own = (str(tmp_path / "saving.py"), "--backend", "mpi", "-n", "2", "--out", str(folder))
        assert spawn("run", *own).returncode == 0
    os.utime(out / "run.json", (time.time() + 60.0,) * 2)  # as new as the files of a job that starts at once
    shard = checkpoints.shard_path(out, 2, 2, 1)
    whole, manifest = shard.read_bytes(), (out / "run.json").read_bytes()
    foreign = {
        "is of rank 0, not of 1": checkpoints.shard_path(out, 2, 2, 0),
        "is of iteration 1, not of 2": checkpoints.shard_path(out, 1, 2, 1),
        "were not saved together": checkpoints.shard_path(other, 2, 2, 1),
    }
    cases = [(why, path.read_bytes(), ()) for why, path in foreign.items()]
    cases += [("its checksum is wrong", whole[:-1] + bytes([whole[-1] ^ 1]), ())]
    cases += [("cannot continue with seed 9", whole, ("--seed", "9"))]
    for why, data, words in cases:
        shard.write_bytes(data)
        refused = spawn("resume", str(out), "--quiet", *words)
        assert refused.returncode == 2, refused.stderr
        _, *reported = refused.stderr.splitlines()
        assert len(reported) == 1 and why in reported[0], refused.stderr
        assert (out / "run.json").read_bytes() == manifest
    shard.write_bytes(whole)
    assert spawn("resume", str(out), "--quiet").returncode == 0


LONG = """
import time
def main(comm, limit_s=60.0):
    comm.restore()
    comm.checkpoint(iteration=1, extra=comm.rank)
    comm.record(iteration=0)
    comm.runtime.checkpoints.finish()
    comm.Barrier()
    time.sleep(limit_s)
"""


def test_a_folder_in_use_is_refused_and_a_signal_before_the_end_of_the_time_is_reported(
    tmp_path: Path,
) -> None:
    """A second job in the folder of one that runs would destroy both; SIGUSR1 stops a job as SIGTERM does."""
    (tmp_path / "long.py").write_text(LONG)
    out = tmp_path / "a"
    words = ("run", str(tmp_path / "long.py"), "--backend", "mpi", "-n", "2", "--quiet", "--out", str(out))
    first = subprocess.Popen([sys.executable, "-m", "spawnsim", *words], stderr=subprocess.PIPE, text=True)
    try:
        limit_s = time.monotonic() + 60
        while not checkpoints.whole(out):
            assert first.poll() is None and time.monotonic() < limit_s
            time.sleep(0.05)
        for words in (("--backend", "mpi", "-n", "2"), ("--backend", "virtual", "--ranks", "2")):
            second = spawn("resume", str(out), *words, "--quiet", "--set", "limit_s=0.0")
            assert second.returncode == 2 and "another run writes to it" in second.stderr, second.stderr
            assert "Traceback" not in second.stderr
        first.send_signal(signal.SIGUSR1)
        _, reported = first.communicate(timeout=30)
    finally:
        first.kill()
        first.wait()
    assert first.returncode == 128 + signal.SIGUSR1
    assert reported.count("\n") == 1 and "stopped by SIGUSR1" in reported
    assert spawnsim.Run.load(out).table.rows == 2
    assert spawn("resume", str(out), "--quiet", "--set", "limit_s=0.0").returncode == 0
