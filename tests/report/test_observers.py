"""Loggers: which steps they are told, and what each makes of them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support import synthetic

from spawnsim.cli import main as command
from spawnsim.record import Table
from spawnsim.record.folder import RUNNING
from spawnsim.record.journal import RankStates
from spawnsim.report.observers import LOGGERS, Logging, Step, Steps, follow
from spawnsim.run import Run
from spawnsim.run.watched import OBSERVERS


def rows(*each: tuple[int, int, float]) -> Run:
    """Return a run of three ranks that goes on, with these rows of (rank, iteration, loss)."""
    rank, iteration, loss = (np.array(column) for column in zip(*sorted(each), strict=True))
    columns = {"rank": rank.astype(np.int32), "time_s": iteration * 1.0, "iteration": iteration, "loss": loss}
    return Run({"ranks": 3}, Table(columns), [], {}, RUNNING)


class Kept:
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.totals: list[dict[str, float]] = []

    def step(self, step: Step) -> None:
        """Keep a step."""
        self.steps.append(step)

    def close(self, totals: Mapping[str, float]) -> None:
        """Keep the totals."""
        self.totals.append(dict(totals))


# ------------------------------------------------------------------------------------------------------- steps
def test_an_iteration_is_told_once_all_ranks_have_come_past_it() -> None:
    """Not before: the slowest would be missing in its median; and not again, when later rows come."""
    steps, early = Steps(), [(0, 0, 1.0), (1, 0, 2.0), (2, 0, 6.0), (0, 1, 1.0), (1, 1, 2.0), (0, 2, 0.0)]
    assert [step.iteration for step in steps.new(rows(*early[:2]), ended=False)] == []
    assert [step.iteration for step in steps.new(rows(*early), ended=False)] == []
    later = [*early, (2, 1, 3.0)]
    (first,) = steps.new(rows(*later), ended=False)
    assert (first.iteration, first.values["loss/median"], first.values["loss/p90"]) == (
        0,
        2.0,
        pytest.approx(5.2),
    )
    assert [*steps.new(rows(*later), ended=False)] == []
    rest = [*steps.new(rows(*later), ended=True)]
    assert [(step.iteration, step.values["loss/median"]) for step in rest] == [(1, 2.0), (2, 0.0)]
    assert [*steps.new(rows(*later), ended=True)] == []


def test_nobody_waits_for_the_dead() -> None:
    """A rank that has crashed records no more; of what is not finite there is no quantile."""
    run = rows(
        (0, 0, 1.0), (1, 0, np.nan), (2, 0, 6.0), (0, 1, np.nan), (1, 1, np.nan), (0, 2, 1.0), (1, 2, 1.0)
    )
    dead = dataclasses.replace(run, events=[{"kind": "crash", "rank": 2, "time_s": 0.5}])
    told = [*Steps().new(dead, ended=False)]
    assert [step.iteration for step in told] == [0, 1]
    assert told[0].values["loss/median"] == 3.5
    assert [name for name in told[1].values if name.startswith("loss")] == []


def test_rows_without_iterations_are_numbered() -> None:
    """By how many a rank has recorded before; texts are left out."""
    table = Table(
        {
            "rank": np.array([0, 0, 1, 1, 1], np.int32), "time_s": np.arange(5.0), "phase": np.array([*"abcde"]),
            "loss": np.array([1.0, 2.0, 3.0, 4.0, 5.0]),
        }
    )  # fmt: skip
    told = [*Steps().new(Run({"ranks": 2}, table, [], {}), ended=True)]
    assert [(step.iteration, step.values["loss/median"]) for step in told] == [(0, 2.0), (1, 3.0), (2, 5.0)]
    assert {name.partition("/")[0] for name in told[0].values} == {"time_s", "loss", "replacements"}
    assert [
        *Steps().new(
            Run({}, Table({"rank": np.empty(0, np.int32), "time_s": np.empty(0)}), [], {}), ended=True
        )
    ] == []


def test_a_whole_run_of_1000_ranks_is_told_by_its_medians(tmp_path: Path) -> None:
    """The curve is numpy's, replacements add up, and the totals come last."""
    run = synthetic.run(ranks=1000, iterations=30)
    run.save(tmp_path)
    kept = Kept()
    looks = iter([False, False, True])
    follow(tmp_path, [Logging(kept)], lambda _wait_s, _run: next(looks))
    assert [step.iteration for step in kept.steps] == list(range(30))
    wanted = np.quantile(run.table["accuracy"].reshape(1000, 30), (0.1, 0.5, 0.9), axis=0)
    found = [[step.values[f"accuracy/{name}"] for step in kept.steps] for name in ("p10", "median", "p90")]
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    assert kept.steps[-1].values["replacements"] == len(run.events)
    assert kept.steps[9].values["replacements"] == 0
    assert kept.totals == [{name: value for name, value in run.totals.items() if not isinstance(value, str)}]


def test_observers_are_shown_a_run_until_it_is_over(tmp_path: Path) -> None:
    """A folder that is about to begin is waited for; one that has left nothing ends without a word."""
    shown: list[str] = []

    class Seen:
        def show(self, run: Run, _states: RankStates | None) -> None:
            shown.append(run.outcome)

        def end(self, run: Run) -> None:
            shown.append(f"end: {run.outcome}")

    looks = iter([False, True])
    follow(tmp_path / "none", [Seen()], lambda *_: next(looks))
    assert shown == []
    waits = []

    def over(wait_s: float, run: Run | None) -> bool:
        waits.append((wait_s, run is None))
        if len(waits) == 2:
            synthetic.run(ranks=12, iterations=3).save(tmp_path)
        return len(waits) == 4

    follow(tmp_path, [Seen()], over)
    assert shown == ["finished", "finished", "end: finished"]
    assert (waits[0], waits[1]) == ((0.0, True), (1.0, True))
    assert all(wait_s >= 1.0 for wait_s, _ in waits[1:])


# ------------------------------------------------------------------------------------------------------- loggers
RUN = synthetic.run("selective", ranks=12, iterations=25)
CURVE = np.median(RUN.table["loss"].reshape(12, 25), axis=0)


def watch(name: str, tmp_path: Path) -> None:
    """Let `spawnsim watch` tell a logger a finished run."""
    RUN.save(tmp_path / "run")
    assert command(["watch", str(tmp_path / "run"), "--observe", name]) == 0


def installed(monkeypatch: pytest.MonkeyPatch, name: str, **modules: Any) -> None:
    """Put stand-ins for a library's modules in place; their functions have the library's own signatures."""
    monkeypatch.setitem(OBSERVERS, name, OBSERVERS[name]._replace(package="json"))
    for module, contents in modules.items():
        made = ModuleType(module.replace("__", "."))
        made.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, made.__name__, made)


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    """By the library itself: a curve of each metric over iterations, and the totals."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    watch("tensorboard", tmp_path)
    found = events.EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"tensors": 0})
    found.Reload()
    told = found.Tensors("loss/median")
    assert [each.step for each in told] == list(range(25))
    np.testing.assert_allclose([each.tensor_proto.float_val[0] for each in told], CURVE, rtol=1e-6)
    assert found.Tensors("totals/messages")[0].tensor_proto.float_val[0] == 54321


def test_weights_and_biases_is_told_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `wandb.init`, `Run.log`, `Run.summary` and `Run.finish` take it; offline."""
    logged: dict[int, dict[str, Any]] = {}
    given: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    over: list[int | None] = []

    class WandbRun:
        def __init__(self) -> None:
            self.summary = summary

        def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
            assert step is not None
            assert list(logged) == list(range(step))  # wandb drops what comes for an earlier step
            logged[step] = dict(data)

        def finish(self, exit_code: int | None = None) -> None:
            over.append(exit_code)

    def init(*, project: str, name: str, config: Any, mode: str, settings: Any, **more: Path) -> WandbRun:
        assert set(more) == {"dir"}  # a name that ruff would have us change
        given.update(more, project=project, name=name, config=config, mode=mode, settings=settings)
        return WandbRun()

    monkeypatch.delenv("WANDB_MODE", raising=False)
    installed(
        monkeypatch, "wandb", wandb={"init": init, "Settings": lambda *, silent, console: (silent, console)}
    )
    watch("wandb", tmp_path)
    assert (given["mode"], given["dir"], given["name"]) == ("offline", tmp_path / "run", "run")
    assert given["config"]["platform"] == "ethernet-10g"
    np.testing.assert_allclose([logged[step]["loss/median"] for step in range(25)], CURVE)
    assert (summary["messages"], over) == (54321, [None])


def test_each_observer_has_a_logger_and_an_extra() -> None:
    """The table that commands check names the loggers that are made; each has its line of pyproject.toml."""
    assert set(OBSERVERS) == {"live", *LOGGERS}
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert all(f'\n{known.extra} = ["{known.package}' in text for known in OBSERVERS.values())
