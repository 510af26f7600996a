"""What-if analysis of stragglers: slowdowns of replicas and pipelines follow closed forms; faults are named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import spawnsim
from spawnsim.cli import main
from spawnsim.errors import ParameterError, UnsupportedError
from spawnsim.fidelity import whatif
from spawnsim.fidelity.whatif import read_bytedance
from spawnsim.models.network import Hockney, Switch


def _written(folder: Path, text: str, name: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


OPERATIONS = """rank,stage,step,optype,start_ts,duration
0,0,1,forward-compute,0.0,2.0
0,0,1,backward-compute,2.0,2.0
1,0,1,forward-compute,0.0,4.0
1,0,1,backward-compute,4.0,4.0
2,0,1,forward-compute,0.0,1.5
2,0,1,backward-compute,1.5,1.5
0,0,1,grads-reduce-scatter,8.0,9.0
0,0,2,forward-compute,20.0,1.5
0,0,2,backward-compute,21.5,1.5
1,0,2,forward-compute,20.0,3.0
1,0,2,backward-compute,23.0,3.0
2,0,2,forward-compute,20.0,3.0
2,0,2,backward-compute,23.0,3.0
"""


def test_operations_of_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """Three workers, two steps: 4, 8, 3 and 3, 6, 6 s, means of 5; slowdowns by hand. Parquet by its own reader."""
    path = _written(tmp_path, OPERATIONS, "ops.csv")
    trace, found = read_bytedance(path)
    assert [np.asarray(row).tolist() for row in trace.rows] == [[4.0, 3.0], [8.0, 6.0], [3.0, 6.0]]
    assert found.slowdown == pytest.approx((8 + 6) / 10)
    assert found.by_worker == pytest.approx(((5 + 5) / 10, (8 + 6) / 10, (5 + 6) / 10))
    assert main(["import", "bytedance", str(path), "--out", str(tmp_path / "times")]) == 0
    assert (
        "slowdown 1.400 over equal operations; with one worker alone as it was: rank 1 1.400"
        in capsys.readouterr().out
    )
    # Replayed with a Barrier a step, the job takes what the analysis starts from: 8 s and 6 s.
    both = spawnsim.run(_steps, ranks=3, compute=str(tmp_path / "times"), platform=Switch(Hockney(0.0, 1e12)))
    assert both.totals["virtual_seconds"] == pytest.approx(14.0)
    for change, said in (
        (("optype", "type"), "no column 'optype'"),
        (("compute", "wait"), "optype: no forward-compute or backward-compute"),
        (("0.0,4.0", "0.0,-4.0"), "duration of row 2 is -4.0"),
        (("0.0,4.0", "0.0,long"), "duration: could not convert"),
        (("2,0,2,", "2,0,3,"), "step: rank 0 computes nothing in step 3"),
        (("2,0,", "2,1,"), "no column 'dp_rank'"),
        (("1,0,2,", "1,0,2.5,"), "step of row 9 is 2.5"),
    ):
        with pytest.raises(ParameterError, match=f"ops.csv: {said}"):
            read_bytedance(_written(tmp_path, OPERATIONS.replace(*change), "ops.csv"))
    rows = [line.split(",") for line in OPERATIONS.split()]
    columns = {name: [row[at] for row in rows[1:]] for at, name in enumerate(rows[0])}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "ops.parquet")
    assert read_bytedance(tmp_path / "ops.parquet")[1] == found

    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(whatif, "import_module", absent)
    with pytest.raises(UnsupportedError, match=r"ops.parquet: Parquet needs pyarrow: pip install"):
        read_bytedance(tmp_path / "ops.parquet")


def _steps(comm: Any) -> None:
    for _ in range(2):
        with comm.compute():
            pass
        comm.Barrier()


Table = dict[str, list[Any]]


def _pipeline(
    forward_s: Sequence[Sequence[float]], backward_s: Sequence[Sequence[float]], batches: int, *, early: bool
) -> Table:
    """Return the trace of one step, in the published columns; durations are of (replica, stage).

    Every other global rank is of another shard of the same worker, and not in the trace. The order of a worker is all
    forward passes, then all backward passes; or, `early`, one forward and one backward pass in turns (1F1B).
    """
    rows: Table = {
        name: [] for name in ("rank", "dp_rank", "stage", "step", "optype", "start_ts", "duration")
    }
    rows |= {"seq_id": [], "mc": [], "gmc": [], "mb_id": []}
    stages = len(forward_s[0])
    for replica, of_stages in enumerate(forward_s):
        for stage, forward in enumerate(of_stages):
            ahead = min(stages - stage, batches) if early else batches
            order = [("forward-compute", batch) for batch in range(ahead)]
            for batch in range(batches):
                order += [("backward-compute", batch)]
                order += [("forward-compute", batch + ahead)] * (batch + ahead < batches)
            order += [("grads-reduce-scatter", None)]
            for place, (kind, batch) in enumerate(order):
                lasts_s = {"f": forward, "b": backward_s[replica][stage], "g": 99.0}[kind[0]]
                for name, value in (
                    ("rank", 2 * (replica * stages + stage)), ("dp_rank", replica), ("stage", stage), ("step", 7),
                    ("optype", kind), ("start_ts", float(place)), ("duration", lasts_s), ("seq_id", place), ("mc", 0),
                    ("gmc", stage), ("mb_id", batch),
                ):  # fmt: skip
                    rows[name].append(value)
    return rows


def _parquet(folder: Path, rows: Mapping[str, list[Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(dict(rows)), folder / "trace.parquet")
    return folder / "trace.parquet"


@pytest.mark.parametrize("early", [False, True])
def test_equal_stages_of_a_pipeline(tmp_path: Path, early: bool) -> None:
    """(M + P - 1)(f + b) under either schedule: no slowdown, and all that a worker computes is in the trace."""
    trace, found = read_bytedance(
        _parquet(tmp_path, _pipeline([[1.0] * 4] * 2, [[2.0] * 4] * 2, 8, early=early))
    )
    assert [np.asarray(row).tolist() for row in trace.rows] == [[24.0]] * 8
    assert found.workers == tuple(range(0, 16, 2))
    assert (found.slowdown, *found.by_worker, *found.by_stage) == pytest.approx([1.0] * 13)
    assert found.last_stage == 0.0


def test_a_long_last_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All forward passes, then all backward ones: (P - 1)(f + b) + M(f' + b') for a last stage that is longer."""
    stages, batches, first, last = 4, 6, 1.0 + 2.0, 1.5 + 4.0
    rows = _pipeline([[1.0] * 3 + [1.5]], [[2.0] * 3 + [4.0]], batches, early=False)
    path = _parquet(tmp_path, rows)
    found = read_bytedance(path)[1]
    mean = (3 * first + last) / 4
    recorded, ideal = (stages - 1) * first + batches * last, (stages - 1 + batches) * mean
    assert found.slowdown == pytest.approx(recorded / ideal)
    # One stage short, of which the others never wait but once in each direction.
    short = first + (stages - 2) * mean + batches * mean
    assert found.by_stage[0] == pytest.approx(short / ideal)
    assert found.by_stage[3] == pytest.approx(((stages - 1) * mean + batches * last) / ideal)
    assert found.by_stage == found.by_worker
    assert found.last_stage == pytest.approx(
        (recorded - (stages - 1) * first - batches * mean) / (recorded - ideal)
    )
    assert main(["import", "bytedance", str(path), "--out", str(tmp_path / "times")]) == 0
    told = capsys.readouterr().out
    assert f"slowdown {found.slowdown:.3f} over equal operations" in told
    assert f"rank 6 {found.by_worker[3]:.3f}" in told
    assert f"the last stage explains {found.last_stage:.0%}" in told


def test_one_slow_worker_of_several_replicas(tmp_path: Path) -> None:
    """Of 3 replicas x 2 stages one worker is slow in its second stage: the step is that replica's."""
    slow, usual, batches = 3.0, 1.0, 5
    durations = [[usual, usual], [usual, slow], [usual, usual]]
    found = read_bytedance(_parquet(tmp_path, _pipeline(durations, durations, batches, early=False)))[1]
    mean = (5 * usual + slow) / 6
    ideal = 2 * mean * (1 + batches)
    assert found.slowdown == pytest.approx((2 * usual + 2 * batches * slow) / ideal)
    assert found.by_worker[3] == pytest.approx((2 * mean + 2 * batches * slow) / ideal)
    # With any other worker as it was, the others at the mean hold the step up.
    assert [value for place, value in enumerate(found.by_worker) if place != 3] == pytest.approx([1.0] * 5)
    assert max(found.by_worker) == found.by_worker[3] == found.by_stage[1]


def test_pipelines_that_make_no_sense(tmp_path: Path) -> None:
    """A column that is missing, a micro-batch without a number, an order in which nobody can begin."""
    rows = _pipeline([[1.0, 1.0]], [[1.0, 1.0]], 2, early=False)
    for change, said in (
        ({"gmc": None}, "no column 'gmc'"),
        ({"mb_id": [None] * len(rows["rank"])}, "mb_id of row 0 is nan, no whole number"),
        (
            {"start_ts": [-start for start in rows["start_ts"]]},
            "step 7: backward-compute of dp_rank 0, mb_id 1, gmc 1 waits for one that comes after it",
        ),
    ):
        wrong = {name: values for name, values in (rows | change).items() if values is not None}
        with pytest.raises(ParameterError, match=f"trace.parquet: {said}"):
            read_bytedance(_parquet(tmp_path, wrong))
    with pytest.raises(ParameterError, match="cannot be read as Parquet"):
        read_bytedance(_written(tmp_path, "no table", "x.parquet"))
