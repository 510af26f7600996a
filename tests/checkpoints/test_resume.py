"""A run that is killed and resumed is the run that was not: its digest, rows, events and totals."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spawnsim
from spawnsim import checkpoints, cli
from spawnsim.errors import ParameterError, RankError, RankFailed, Revoked, UsageError
from spawnsim.models.faults import Crash, FaultPlan, Restart
from spawnsim.models.faults.plan import Setting, from_toml
from spawnsim.plots.experiments import ranks_of

PROGRAM = Path(__file__).parents[1] / "programs" / "resumable.py"
RANKS = 12
POLICIES = (
    "all", "selective", "age", "one-sided", "one-sided age", "groups", "groups beside", "clock", "pairs", "background",
    "diloco", "decoupled",
)  # fmt: skip
OWN = ("wall_seconds",)


def run(
    out: Path, *, resume: bool = False, ranks: int = RANKS, faults: str | None = None, **parameters: Any
) -> Any:
    """Run the program on virtual ranks."""
    return spawnsim.run(
        PROGRAM, ranks=ranks, stragglers="lognormal:0.3+markov:50ms,20ms,3", seed=7, out=out, resume=resume,
        faults=faults, parameters=parameters,
    )  # fmt: skip


def cut(whole: Path, part: Path, iteration: int) -> None:
    """Copy a run folder as it would be if the run had ended after the checkpoint of an iteration."""
    shutil.copytree(whole, part)
    checkpoints.discard(part, after=iteration)


def same(one: Any, other: Any) -> None:
    """Both runs are equal to the bit."""
    assert set(one.table) == set(other.table)
    for name in one.table:
        np.testing.assert_array_equal(one.table[name], other.table[name], err_msg=name)
    assert one.events == other.events
    totals = [
        {name: value for name, value in each.totals.items() if name not in OWN} for each in (one, other)
    ]
    assert totals[0] == totals[1]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_resumed_run_is_the_run_that_was_not_interrupted(policy: str, tmp_path: Path) -> None:
    """With every policy, stragglers, streams of all kinds, and messages on their way at the cut."""
    whole = run(tmp_path / "whole", policy=policy)
    cut(tmp_path / "whole", tmp_path / "part", 12)
    same(whole, run(tmp_path / "part", resume=True, policy=policy))
    acted = whole.table["averaged_this_iteration"].astype(bool) | whole.table["is_replaced"].astype(bool)
    assert acted[whole.table["iteration"] > 12].any() and acted[whole.table["iteration"] < 12].any()


def test_steps_that_are_carried_out_together_resume_to_the_bit(tmp_path: Path) -> None:
    """Also where models are computed in one call."""
    whole = run(tmp_path / "whole", policy="selective", eager=False)
    assert str(whole.totals["digest"]).startswith("batched-")
    cut(tmp_path / "whole", tmp_path / "part", 12)
    same(whole, run(tmp_path / "part", resume=True, policy="selective", eager=False))


def test_faults_of_links_strike_a_resumed_run_alike(tmp_path: Path) -> None:
    """Draws go on where they were."""
    faults = "drop:*>*@0.05s+1s,0.1; delay:*>3@0s,5ms,5ms; duplicate:*>*@0.1s+1s,0.3; slow:4@0.1s+0.1s,3; skew:2@0s,1s"
    whole = run(tmp_path / "whole", policy="selective", faults=faults, greets=False)
    cut(tmp_path / "whole", tmp_path / "part", 12)
    same(whole, run(tmp_path / "part", resume=True, policy="selective", faults=faults, greets=False))


def test_a_killed_process_leaves_rows_and_goes_on_by_one_command(tmp_path: Path) -> None:
    """SIGKILL amid an iteration; `spawnsim resume`, twice."""
    whole = run(tmp_path / "whole", policy="selective", die="")
    flag, out = tmp_path / "died", tmp_path / "killed"
    command = [
        sys.executable, "-m", "spawnsim", "run", str(PROGRAM), "--ranks", str(RANKS), "--seed", "7", "--out", str(out),
        "--straggler", "lognormal:0.3+markov:50ms,20ms,3", "--set", "policy='selective'", "--set", f"die={str(flag)!r}",
    ]  # fmt: skip
    killed = subprocess.run(command, env=os.environ, capture_output=True, check=False)
    assert killed.returncode == -9
    left = spawnsim.Run.load(out)
    assert left.outcome == "running"
    resumed = subprocess.run(
        [sys.executable, "-m", "spawnsim", "resume", str(out), "--json"],
        env=os.environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["digest"] == whole.totals["digest"]
    found = spawnsim.Run.load(out)
    same(whole, found)
    assert found.what["made"]["resumed_at"] == [12]
    # A second time: what was resumed can be resumed.
    checkpoints.discard(out, after=12)
    same(whole, run(out, resume=True, policy="selective", die=str(flag)))


def test_a_checkpoint_before_the_first_error_is_there_and_the_earliest_error_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks run ahead of each other: what comes before the error in virtual time has happened."""
    monkeypatch.chdir(tmp_path)
    text = (
        "def main(comm):\n"
        "    comm.restore()\n"
        "    comm.checkpoint(iteration=1)\n"
        "    for each in range(4):\n"
        "        with comm.compute(0.1 if comm.Get_rank() == 10 else 0.5):\n            pass\n"
        "        comm.record(each=each)\n"
        "    raise ValueError('no luck')\n"
    )
    Path("prog.py").write_text(text)
    with pytest.raises(RankError, match=r"rank 10 raised ValueError: no luck at 0\.4"):
        spawnsim.run("prog.py", ranks=RANKS, out="part")
    assert [found.iteration for found in checkpoints.whole(Path("part"))] == [1]
    # The program is mended, which the folder's own is not.
    Path("prog.py").write_text(text.replace("raise ", ""))
    for words, says in (
        (
            [],
            "continues at iteration 1, with the program in the folder, part/inputs/program/prog.py; another: --prog",
        ),
        (["--backend", "mpii"], "mpii"),
        (["--backend", "mpi", "--straggler", "exponential:1"], "--straggler describes virtual ranks"),
        (["--backend", "mpi", "-n", "0"], "0"),
    ):
        assert cli.main(["resume", "part", *words]) > 0
        told = capsys.readouterr().err
        assert says in told and "--ties" not in told
    assert cli.main(["resume", "part", "--program", "prog.py"]) == 0
    assert "with the program" not in capsys.readouterr().err


def test_more_and_fewer_ranks_take_over_by_the_stated_rule(tmp_path: Path) -> None:
    """A rank of which nothing was saved begins as its number modulo those saved."""
    run(tmp_path / "whole", policy="all", iterations=12, greets=False)
    for ranks in (5, 30):
        part = tmp_path / f"{ranks}"
        cut(tmp_path / "whole", part, 6)
        found = run(part, resume=True, ranks=ranks, policy="all", iterations=12, greets=False)
        first = found.table.where(found.table["iteration"] == 6)
        assert sorted(first["rank"]) == list(range(ranks))
        if ranks > RANKS:  # all have other data from here on, and the totals of their donors
            whole = found.table.where(found.table["iteration"] == 5)
            for rank in range(RANKS, ranks):
                donor = whole["total"][whole["rank"] == rank % RANKS][0]
                assert donor < first["total"][first["rank"] == rank][0] < donor + 3
        assert len(set(first["loss"].tolist())) == ranks
        read = spawnsim.Run.load(part)  # also with rows of ranks that are no more
        assert (read.table.rows, read.totals["ranks"]) == (found.table.rows, ranks)
        assert ranks_of(read) == max(RANKS, ranks)


def test_rows_of_ranks_that_are_no_more_outlive_every_resumption(tmp_path: Path) -> None:
    """The second resumption with fewer ranks dropped them; those behind the checkpoint go, whoever's they are."""

    def main(comm: Any, until: int) -> None:
        saved = comm.restore()
        for iteration in range(saved.iteration if saved else 0, until):
            comm.clock.sleep(1.0)
            comm.record(iteration=iteration)
            comm.record.event("mark", iteration=iteration)
            if (iteration + 1) % 4 == 0:
                comm.checkpoint(iteration=iteration + 1)

    steps = ((4, 4, (4, 4, 4, 4)), (2, 8, (8, 8, 4, 4)), (2, 12, (12, 12, 4, 4)), (4, 15, (15, 15, 7, 7)))
    again = ((4, 16, (16, 16, 8, 8)), (1, 20, (20, 16, 8, 8)), (3, 23, (23, 19, 11, 8)))
    for ranks, until, rows in (*steps, *again):
        run = spawnsim.run(main, ranks=ranks, out=tmp_path, resume=True, parameters={"until": until})
        marks = [event["rank"] for event in run.events if event["kind"] == "mark"]
        for rank, count in enumerate(rows):
            iterations = run.table.of_rank(rank)["iteration"].tolist()
            assert len(iterations) == len(set(iterations)) == marks.count(rank) == count, (ranks, until, rank)


@pytest.mark.parametrize("ranks", [3, 4])
def test_what_survivors_have_saved_is_taken_once(ranks: int, tmp_path: Path) -> None:
    """As many ranks as have survived take all states, more ranks first those of their numbers; draws differ."""
    found: dict[int, tuple[int, float]] = {}

    def main(comm: Any, stop: bool = False) -> None:
        saved = comm.restore()
        if saved:
            found[comm.rank] = saved.extra, comm.rng("draws").random()
        comm.rng("draws").random()
        group, iteration = comm, saved.iteration if saved else 0
        while iteration < 6:
            try:
                with comm.compute(1.0):
                    pass
                group.Barrier()
                iteration += 1
                if iteration == 4:
                    group.checkpoint(iteration=4, extra=comm.rank)
                if stop and iteration == 5:
                    raise KeyboardInterrupt
            except (RankFailed, Revoked):
                recovery = group.recover(iteration)
                group, iteration = recovery.comm, recovery.step

    with pytest.raises(KeyboardInterrupt):
        spawnsim.run(main, ranks=4, out=tmp_path, faults="crash:1@1.5s", parameters={"stop": True})
    spawnsim.run(main, ranks=ranks, out=tmp_path, resume=True)
    donors = {3: [0, 2, 3], 4: [0, 2, 2, 3]}[ranks]
    assert [found[rank][0] for rank in range(ranks)] == donors
    assert len({draw for _, draw in found.values()}) == ranks


def test_what_cannot_be_saved_or_resumed_is_said(tmp_path: Path) -> None:
    """In one error, before anything is lost."""

    def saves(comm: Any, **states: Any) -> None:
        comm.checkpoint(**states)

    for states, words in (
        ({"iteration": -1}, "whole number"),
        ({"iteration": 1, "extra": object()}, "object"),
        ({"iteration": 1, "extra": 1j}, "complex"),
    ):
        with pytest.raises(ParameterError, match=words):
            spawnsim.run(lambda comm, states=states: saves(comm, **states), ranks=2)

    def cuts_through(comm: Any) -> None:
        request = comm.Isend(np.ones(100_000), (comm.rank + 1) % comm.size)
        comm.checkpoint(iteration=1)
        request.Wait()

    with pytest.raises(UsageError, match="receive it before"):
        spawnsim.run(cuts_through, ranks=3)
    with pytest.raises(ParameterError, match="--out"):
        spawnsim.run(saves, ranks=2, resume=True)
    run(tmp_path / "a", policy="all", iterations=7)
    with pytest.raises(ParameterError, match="seed"):
        spawnsim.run(PROGRAM, ranks=RANKS, seed=8, out=tmp_path / "a", resume=True)
    assert spawnsim.Run.load(tmp_path / "a").table.rows == 7 * RANKS, "a refused run touches nothing"


def test_a_run_that_goes_on_with_an_edited_program_says_so(tmp_path: Path) -> None:
    """By its contents; the same program, touched, is no other one."""
    program = tmp_path / "train.py"
    text = (
        "def main(comm):\n    saved = comm.restore()\n    for i in range(saved.iteration if saved else 0, 4):\n"
        "        comm.record(iteration=i)\n        comm.checkpoint(iteration=i + 1)\n"
    )
    program.write_text(text)
    spawnsim.run(program, ranks=2, out=tmp_path / "a")
    cut(tmp_path / "a", tmp_path / "b", 3)
    program.write_text(text)
    assert "warnings" not in spawnsim.run(program, ranks=2, out=tmp_path / "a", resume=True).what
    program.write_text(text + "\n\nRATE = 2\n")
    told: list[str] = []
    found = spawnsim.run(program, ranks=2, out=tmp_path / "b", resume=True, on_note=told.append)
    assert found.what["warnings"] == told
    assert "iteration 3 with another program than before: train.py was edited" in told[0]


KILLED = """
import os, signal, sys
from pathlib import Path
import spawnsim

def main(comm):
    saved = comm.restore()
    for i in range(saved.iteration if saved else 0, 8):
        if sys.argv[2] == "step" and i == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        with comm.compute(0.4):
            comm.record(iteration=i)
        if i % 4 == 3:
            comm.checkpoint(iteration=i + 1)

if sys.argv[2].isdigit():
    moves = iter(range(100))
    rename = Path.rename
    def dying(path, target):
        if "shards" in path.name and next(moves) == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(path, target)
    Path.rename = dying
spawnsim.run(main, ranks=2, out=Path(sys.argv[1]), resume=sys.argv[2] != "step")
"""


@pytest.mark.parametrize("move", [0, 1])
def test_a_resumption_that_is_killed_keeps_what_was_recorded(move: int, tmp_path: Path) -> None:
    """SIGKILL before it moves the old rows away, and before it moves what is kept of them to their place."""
    (tmp_path / "killed.py").write_text(KILLED)
    for when in ("step", str(move), "no"):
        ended = subprocess.run(
            [sys.executable, str(tmp_path / "killed.py"), str(tmp_path / "a"), when],
            env=os.environ, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ended.returncode == (0 if when == "no" else -9), ended.stderr
    found = spawnsim.Run.load(tmp_path / "a")
    assert found.table.of_rank(1)["iteration"].tolist() == list(range(8))
    assert "warnings" not in found.what and not list((tmp_path / "a").glob(".*"))


@pytest.mark.parametrize("name", ["metrics.npz", "events.jsonl"])
def test_a_run_that_goes_on_without_its_earlier_rows_says_so(name: str, tmp_path: Path) -> None:
    """A damaged file of rows or events ends no training, and is not passed over in silence."""

    def main(comm: Any) -> None:
        saved = comm.restore()
        for i in range(saved.iteration if saved else 0, 4):
            comm.record(iteration=i)
            comm.checkpoint(iteration=i + 1)

    spawnsim.run(main, ranks=2, out=tmp_path / "a")
    checkpoints.discard(tmp_path / "a", after=3)
    (tmp_path / "a" / name).write_bytes(b"damaged")
    found = spawnsim.run(main, ranks=2, out=tmp_path / "a", resume=True)
    assert found.table["iteration"].tolist() == [3, 3]
    assert "are lost" in found.what["warnings"][0] and name in found.what["warnings"][0]


def test_a_checkpoint_costs_what_the_platform_says(tmp_path: Path) -> None:
    """Latency, and bytes by bandwidth."""
    platform = tmp_path / "slow.toml"
    text = '[network]\ntopology = "switch"\n[network.link]\nlatency = "1 us"\nbandwidth = "10 Gbit/s"\n'
    ends = []
    for storage in ("", '[storage]\nlatency = "2 s"\nbandwidth = "1 MB/s"\n'):
        platform.write_text(text + storage)

        def saves(comm: Any) -> None:
            comm.checkpoint(iteration=1, extra=np.ones(250_000))

        ends.append(spawnsim.run(saves, ranks=3, platform=str(platform)).totals["virtual_seconds"])
    assert ends[0] == pytest.approx(1e-3 + 2e6 / 1e9, rel=0.05)
    assert ends[1] == pytest.approx(2 + 2.0, rel=0.01)


def test_a_restarted_rank_goes_on_from_its_own_checkpoint() -> None:
    """Also without a run folder: the latest is kept in memory."""

    def main(comm: Any) -> None:
        from spawnsim.errors import RankFailed, Revoked, Timeout

        saved = comm.restore()
        group, iteration, value = comm, 0, np.zeros(4)
        if saved is not None:
            iteration, value = saved.iteration, saved.extra
            comm.record.event("restored", iteration=iteration, value=value[0])
            found = comm.recover(iteration)
            group, iteration = found.comm, found.step
        while iteration < 30:
            try:
                with comm.compute(0.01):
                    value = value + 1
                group.Barrier()
                iteration += 1
                if iteration == 10:
                    group.checkpoint(iteration=iteration, extra=value)
            except (RankFailed, Revoked, Timeout):
                found = group.recover(iteration)
                group, iteration = found.comm, found.step

    found = spawnsim.run(main, ranks=4, faults="crash:2@0.15s; restart:2@0.2s")
    restored = [event for event in found.events if event["kind"] == "restored"]
    assert [(event["rank"], event["iteration"], event["value"]) for event in restored] == [(2, 10, 10.0)]
    assert sum(event["kind"] == "checkpoint" for event in found.events) == 4


def synchronous(comm: Any, iterations: int = 30) -> None:
    """Sum what ranks draw; knows of no failures but that it may begin with what was saved."""
    saved = comm.restore()
    total = np.zeros(1) if saved is None else saved.extra
    for iteration in range(0 if saved is None else saved.iteration, iterations):
        last = iteration == iterations - 1
        if last and comm.rank == 0:
            return  # it has ended before the others
        with comm.compute(0.1):
            step = comm.rng("step").normal(size=1)
        total = total + (step if last else comm.allreduce(step))
        comm.record(iteration=iteration, total=total[0], size=comm.size)
        if (iteration + 1) % 5 == 0 and not last:
            comm.checkpoint(iteration=iteration + 1, extra=total)


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize(
    ("faults", "jobs"),
    [
        ("crash:*@1.33s; restart:*@4s", 1),
        ("crash:*@0.2s; restart:*@1s; crash:*@2.55s; restart:*@5s", 2),  # before there is a checkpoint, too
        ("crash:*@2.97s; restart:*@5s", 1),  # rank 0 has ended by then: the job has not
    ],
)
def test_a_job_that_loses_all_ranks_begins_again_from_its_checkpoint(
    faults: str, jobs: int, folder: bool, tmp_path: Path
) -> None:
    """Within the run, each rank with its random streams: the sums are those of a run without failures, only later."""
    out = tmp_path / "run" if folder else None
    found, calm = (
        spawnsim.run(synchronous, ranks=12, faults=faults, out=out),
        spawnsim.run(synchronous, ranks=12),
    )
    last = [run.table.where(run.table["iteration"] == 29) for run in (found, calm)]
    np.testing.assert_array_equal(*(each["total"] for each in last))
    assert last[0]["time_s"].min() > last[1]["time_s"].max() + 2
    assert [event["ranks"] for event in found.events if event["kind"] == "requeue"] == [12] * jobs
    assert set(found.table["size"]) == {12}


def test_each_failure_of_a_node_ends_the_job_that_is_queued_for_a_spare() -> None:
    """One spare: the second failure waits until the first machine is repaired. Nothing fails meanwhile."""
    plan = FaultPlan.parse("requeue:*@0s+1000s,900s,100s,1,7s", ranks=12, seed=3)
    crashes, restarts = (
        [fault for fault in plan.faults if isinstance(fault, kind)] for kind in (Crash, Restart)
    )
    assert len(crashes) == len(restarts) > 36
    ends, begins = (sorted({fault.at_s for fault in each}) for each in (crashes, restarts))
    assert len(ends) * 12 == len(crashes), "all at once"
    assert all(end < begin for end, begin in zip(ends, begins, strict=True))
    assert all(begin < end for begin, end in zip(begins, ends[1:], strict=False))
    free_s = 0.0
    for end, begin in zip(ends, begins, strict=True):
        assert begin == pytest.approx(max(end, free_s) + 7.0)
        free_s = end + 100.0
    toml = '[[faults]]\nkind = "requeue"\nwhere = "*"\nat_s = 0\nfor_s = 1000\nmtbf_s = 900\nrepair_s = 100\n'
    assert from_toml(toml + "spares = 1\nswap_s = 7", Setting(12, None, 3))[0] == plan.faults
    with pytest.raises(ParameterError, match=r"requeue:RANKS@START\+LENGTH,MTBF"):
        FaultPlan.parse("requeue:*@0s+10s", ranks=12)


def test_an_unmodified_program_begins_again_as_a_whole(tmp_path: Path) -> None:
    """With a COMM_WORLD that works: it knows of nothing."""
    (tmp_path / "script.py").write_text(
        "import time\nfrom mpi4py import MPI\ncomm = MPI.COMM_WORLD\n"
        "for step in range(5):\n    time.sleep(0.1)\n    assert comm.allreduce(1) == comm.size == 5\n"
    )
    found = spawnsim.run(tmp_path / "script.py", ranks=5, faults="crash:*@0.25s; restart:*@2s")
    assert found.totals["virtual_seconds"] == pytest.approx(2.5, abs=0.01)
