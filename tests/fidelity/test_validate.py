"""Validation: what is watched, and that a prediction of a run whose truth is known comes out right."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spawnsim.cli import fidelity as command
from spawnsim.errors import ParameterError
from spawnsim.fidelity import (
    Prediction,
    Repeat,
    Seen,
    Setting,
    Times,
    differences,
    error_table,
    predict,
    summary,
    times,
    watched,
)
from spawnsim.fidelity.predicting import MEASURES, Row, Validated, case_table, read_cases
from spawnsim.fidelity.scoring import NullRecorder
from spawnsim.models.compute import Fixed
from spawnsim.models.network import Hockney, Switch
from spawnsim.models.platform import Cores, Platform
from spawnsim.scenario import Scenario
from spawnsim.virtual import simulate

TRUTH = Platform("truth", Switch(Hockney(50e-6, 1e9)), step=Fixed(0.002))


def _program(comm: Any) -> None:
    own, total = np.ones(50_000), np.empty(50_000)
    for iteration in range(120):
        with comm.compute():
            pass
        if iteration % 4 == 0:
            comm.Allreduce(own, total)
        comm.record(iteration=iteration)


def _run(program: Any, ranks: int = 4, **arguments: Any) -> list[Seen]:
    found: dict[int, Seen] = {}

    def watching(comm: Any) -> None:
        found[comm.Get_rank()] = watched(program, comm)

    simulate(watching, Scenario(ranks, **arguments), recorder=NullRecorder())
    return [found[rank] for rank in range(ranks)]


def test_a_watched_block_says_what_it_took() -> None:
    """`with comm.compute() as block` gives the block, under a watch as without one."""
    took: list[float] = []

    def program(comm: Any) -> None:
        with comm.compute() as block:
            pass
        took.append(block.seconds)

    _run(program, ranks=2, platform=TRUTH, stragglers="constant")
    assert took == [0.002, 0.002]


def test_a_watch_tells_computing_from_communicating() -> None:
    """On virtual ranks nothing else takes time."""
    seen = _run(_program, platform=TRUTH, stragglers="constant")[0]
    assert seen.blocks_s == pytest.approx(np.full(120, 0.002))
    assert seen.local_s == pytest.approx(np.zeros(120), abs=1e-12)
    assert (seen.inside_s[::4] > 1e-4).all()
    assert not seen.inside_s[1::4].any()


def test_a_watch_follows_requests_windows_and_communicators() -> None:
    """Waiting counts wherever it happens; what background tasks wait does not."""

    def program(comm: Any) -> None:
        with comm.compute():
            pass
        window = comm.Win.Allocate(8, comm=comm)
        comm.Ibarrier().Wait()
        half = comm.Split(comm.Get_rank() % 2, 0)
        half.Barrier()
        with comm.compute(0.5):
            pass
        task = comm.background(lambda: comm.clock.sleep(0.25))
        task.join()
        window.Free()

    seen = _run(program, platform=TRUTH)[0]
    assert seen.inside_s[0] == pytest.approx(seen.gaps_s[0], abs=1e-4)
    assert seen.local_s[0] < 1e-4
    assert seen.blocks_s[1] == 0.5


def test_a_run_is_predicted_from_its_own_compute_times() -> None:
    """Replayed on the true platform nothing is lost; fitted stragglers come near; the mean alone misses the waiting."""
    seen = _run(_program, platform=TRUTH, stragglers="lognormal:0.4", seed=3)
    found = {each.name: each for each in predict(Setting(_program, Scenario(4, seed=3), 4), seen, TRUTH)}
    repeat = Repeat(times(seen, 4), tuple(found.values()))
    assert repeat.error("replayed", "total") == pytest.approx(0.0, abs=1e-3)
    assert abs(repeat.error("fitted", "total")) < 0.05
    assert repeat.error("constant", "total") < -0.1
    assert repeat.error("constant", "waiting share") < -0.05


def test_ranks_that_shared_cores_are_predicted_by_their_processors_time() -> None:
    """Each needs 2 ms of a core for a step, which took 4 ms of four on two; what was slept after it is no work."""
    began = np.arange(20) * 0.005
    shared = Seen(began, began + 0.004, np.zeros(20), 0.1, np.full(20, 0.002), np.zeros(20))
    setting = Setting(_lonely, Scenario(4), 5, Cores(2, 4))
    assert predict(setting, [shared] * 4, TRUTH)[0].median()["iteration"] == pytest.approx(0.004)
    assert predict(Setting(_lonely, Scenario(2), 5), [shared] * 2, TRUTH)[0].median()[
        "iteration"
    ] == pytest.approx(0.004)
    assert command.shared_cores(["here"]) is None
    many = ["here"] * ((os.cpu_count() or 1) + 1)
    assert command.shared_cores([*many, "there"]) == Cores(os.cpu_count() or 1, len(many))


def test_a_watch_tells_working_from_sleeping() -> None:
    """By the processor's clock: in blocks, after them, and in calls, which do not count."""
    ticks = iter(np.arange(100) * 1.0)

    def program(comm: Any) -> None:
        for _ in range(3):
            with comm.compute(0.001):
                pass
            comm.Barrier()

    found: dict[int, Seen] = {}

    def watching(comm: Any) -> None:
        found[comm.Get_rank()] = watched(program, comm, processor=lambda: next(ticks))

    simulate(watching, Scenario(1, TRUTH), recorder=NullRecorder())
    seen = found[0]
    assert seen.worked_s is not None
    assert seen.worked_s.tolist() == [1.0] * 3
    assert seen.local_s.tolist() == [2.0] * 3


def test_own_work_outside_of_blocks_is_part_of_the_prediction() -> None:
    """A rank that works between blocks, which costs nothing on virtual ranks."""
    began = np.arange(20) * 0.01
    seen = [Seen(began, began + 0.006, np.full(20, 0.001), 0.2)] * 2
    found = predict(Setting(_lonely, Scenario(2), 5), seen, TRUTH)[0].median()
    assert found["iteration"] == pytest.approx(0.009, rel=0.01)
    assert found["policy"] == pytest.approx(0.003, rel=0.05)


def _lonely(comm: Any) -> None:
    for _ in range(20):
        with comm.compute():
            pass


def test_too_few_blocks_are_refused() -> None:
    """A program without comm.compute() has nothing to fit."""
    seen = _run(lambda comm: comm.Barrier(), platform=TRUTH)
    with pytest.raises(ParameterError, match=r"0 comm.compute\(\) blocks: validation needs at least 7"):
        predict(Setting(_program, Scenario(4), 5), seen, TRUTH)


def test_the_summary_takes_medians_over_repeats() -> None:
    """A row for each measure, and the range of its errors."""
    predicted = Prediction("replayed", (Times(1.1, 0.2, 0.3, 11.0),))
    repeats = [Repeat(Times(i, 0.2, 0.2, 10 * i), (predicted,)) for i in (1.0, 1.1, 1.2)]
    rows = {row.measure: row for row in summary(repeats)}
    assert tuple(rows) == MEASURES
    assert rows["total"].measured == 11.0
    assert rows["total"].errors["replayed"] == pytest.approx((0.0, 11 / 12 - 1, 0.1))
    assert rows["waiting share"].errors["replayed"][0] == pytest.approx(0.1)
    assert "+10.0 points" in error_table(tuple(rows.values()), 3)


def test_several_programs_are_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each, whichever job it comes from; what --json printed is read back."""
    rows = tuple(
        Row(measure, 0.25, dict.fromkeys(("replayed", "fitted", "constant"), (0.01, -0.02, 0.03)))
        for measure in ("iteration", "policy", "waiting share", "total")
    )
    cases = [Validated("2 ranks, size=1", rows), Validated("4 ranks, size=1", rows)]
    command.judge_all(cases, as_json=True, picture=None)
    (tmp_path / "two.json").write_text(capsys.readouterr().out, encoding="utf-8")
    assert read_cases(tmp_path / "two.json") == cases
    lines = case_table(cases).splitlines()
    assert lines[2].startswith("4 ranks, size=1")
    assert lines[2].count("+1.0% [-2 +3]") == 6
    assert "+1.0 points [-2 +3]" in lines[2]
    for text in ("{}", "[", '{"cases": [{"name": "x", "rows": [3]}]}'):
        (tmp_path / "bad.json").write_text(text, encoding="utf-8")
        with pytest.raises(ParameterError, match=r"bad.json: not the output of validate"):
            read_cases(tmp_path / "bad.json")
    (tmp_path / "train.py").write_text("def main(comm, size=1, mode='a', rate=1): pass\n", encoding="utf-8")
    asked = command.Validate.parse(
        [str(tmp_path / "train.py"), "--set", "size=1,2", "--set", "mode=a,b", "--set", "rate=3"]
    )
    names = ["size=1 mode=a", "size=1 mode=b", "size=2 mode=a", "size=2 mode=b"]
    assert list(asked.tasks(2)[0]) == names
    asked.set = ["size"]
    with pytest.raises(ParameterError, match="write --set name=value"):
        asked.tasks(2)


def test_another_software_is_noticed() -> None:
    """A platform that was measured says on what; one from a preset does not."""
    there = Platform(
        "there", TRUTH.network, fitted=(("library", "MPICH 4"), ("ranks", "2"), ("backend", "mpi"))
    )
    here = (("library", "MPICH 5"), ("ranks", "2"), ("backend", "virtual"))
    assert differences(there, here) == ["library was MPICH 4, is MPICH 5"]
    assert differences(TRUTH, here) == []
