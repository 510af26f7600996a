"""The recorder, tables, journals and run folders: what a run leaves behind."""

from __future__ import annotations

import csv
import dataclasses
import gc
import io
import math
import os
import pickle
import shutil
import sys
import tempfile
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import spawnsim
from spawnsim.errors import ParameterError, StorageError
from spawnsim.models.compute import Trace as ComputeTrace
from spawnsim.plots.measures import Measure
from spawnsim.record import Journal, Recorder, Table, folder, journal, manifest, merge
from spawnsim.report.page import render
from spawnsim.run import Run
from spawnsim.run.result import SECONDS, results_digest, shown, totals_of, warnings_of


def test_rows_are_ordered_by_rank_then_as_recorded() -> None:
    """Rows of interleaved ranks come out rank by rank, each in its own order, with rank and time."""
    recorder = Recorder()
    for rank, time_s, loss in ((1, 0.5, 10.0), (0, 0.2, 1.0), (1, 0.1, 11.0), (0, 0.9, 2.0)):
        recorder.row(rank, time_s, {"loss": loss})
    table = recorder.table()
    assert table["rank"].tolist() == [0, 0, 1, 1]
    assert table["loss"].tolist() == [1.0, 2.0, 10.0, 11.0]
    assert table["time_s"].tolist() == [0.2, 0.9, 0.5, 0.1]
    assert (table["rank"].dtype, table["time_s"].dtype) == (np.int32, np.float64)


def test_columns_keep_their_types() -> None:
    """Integers stay int64 (beyond 2**53 too), bools bool, texts unicode."""
    recorder = Recorder()
    for number in (2**62 + 1, 3):
        recorder.row(0, 0.0, {"n": number, "ok": number > 5, "mode": str(number)[:2], "x": 0.5})
    table = recorder.table()
    assert table["n"].tolist() == [2**62 + 1, 3]
    assert table["ok"].dtype == np.bool_
    assert table["mode"].tolist() == ["46", "3"]
    assert table["mode"].dtype.kind == "U"


def test_a_column_of_numbers_and_texts_is_told_once(tmp_path: Path) -> None:
    """All of it becomes text: the run says which column, and where it began; None and other numbers are no mixture."""

    def main(comm: Any) -> None:
        comm.record(v=1.0, w=None, n=1, t="a")
        comm.clock.sleep(0.5)
        comm.record(v="x" if comm.rank else 2, w="a", n=0.5, t=None)
        comm.record(v=True, w=None, n=False, t="b")

    said = (
        "column 'v' mixes texts and numbers, and is now all text: rank 1 recorded a str at 0.5 s, and rows before it a "
        "float"
    )
    for out in (None, tmp_path / "a"):
        assert spawnsim.run(main, ranks=2, out=out).what["warnings"] == [said]
    assert Run.load(tmp_path / "a").what["warnings"] == [said]


def test_missing_values_are_nan_or_empty_text() -> None:
    """A name that a row lacks, or None, is NaN in a column of numbers and "" in one of texts."""
    recorder = Recorder()
    recorder.row(0, 0.0, {"loss": 1.0, "donor": 3, "why": "age"})
    recorder.row(0, 1.0, {"loss": None})
    recorder.row(0, 2.0, {"late": None})
    table = recorder.table()
    np.testing.assert_array_equal(table["loss"], [1.0, np.nan, np.nan])
    np.testing.assert_array_equal(table["donor"], [3.0, np.nan, np.nan])
    np.testing.assert_array_equal(table["late"], [np.nan] * 3)
    assert table["why"].tolist() == ["age", "", ""]


def test_numbers_of_other_libraries_become_plain() -> None:
    """0-dim tensors (bf16 and with gradient too) and numpy scalars are recorded by their value."""
    recorder = Recorder()
    loss = torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True)
    recorder.row(0, 0.0, {"a": loss, "b": np.float32(0.25), "c": np.int64(7), "d": torch.tensor([True])})
    table = recorder.table()
    assert [table[name].tolist() for name in "abcd"] == [[0.5], [0.25], [7], [True]]


def test_a_tensor_is_read_when_it_is_recorded() -> None:
    """A later change of a recorded tensor does not reach the table."""
    recorder, loss = Recorder(), torch.tensor(1.0)
    recorder.row(0, 0.0, {"loss": loss})
    loss += 1
    assert recorder.table()["loss"].tolist() == [1.0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"weights": np.zeros(3)}, r"record\(weights=...\): a ndarray is not one number"),
        ({"rank": 3}, "spawnsim adds rank itself"),
        ({"time_s": 3.0}, "spawnsim adds time_s itself"),
        ({"big": 2**63}, "must fit 64 bits"),
    ],
)
def test_what_cannot_be_a_row_is_refused(values: dict[str, object], message: str) -> None:
    """The message names the value, and nothing half-written stays behind."""
    recorder = Recorder()
    with pytest.raises(ParameterError, match=message):
        recorder.row(0, 0.0, values)
    assert recorder.table().rows == recorder.rows == 0


def test_too_large_an_integer_is_refused_on_the_fast_path_too() -> None:
    """A shape that was seen before gives the same message."""
    recorder = Recorder()
    recorder.row(0, 0.0, {"big": 1})
    with pytest.raises(ParameterError, match="64 bits"):
        recorder.row(0, 0.0, {"big": -(2**63) - 1})
    assert recorder.table()["big"].tolist() == [1]


def test_an_event_takes_no_reserved_field() -> None:
    """Kind, time and rank are added by themselves, so a field cannot shadow them."""
    with pytest.raises(ParameterError, match=r"event\('fault', rank=...\)"):
        Recorder().event(0, 0.0, "fault", {"rank": 3})


def test_events_are_ordered_by_time_and_hold_arrays() -> None:
    """Events of all ranks form one log; arrays become lists, and what is not finite null."""
    recorder = Recorder()
    recorder.event(1, 2.0, "replacement", {"donors": np.array([3, 4]), "metric": float("nan")})
    recorder.event(0, 1.0, "fault", {"what": ("crash", 2)})
    assert recorder.events() == [
        {"kind": "fault", "time_s": 1.0, "rank": 0, "what": ["crash", 2]},
        {"kind": "replacement", "time_s": 2.0, "rank": 1, "donors": [3, 4], "metric": None},
    ]


def test_a_row_is_quick_and_lean() -> None:
    """Eight numbers take 84 bytes a row, and a few times as long as looking them up: two microseconds on a laptop."""
    recorder = Recorder()
    values = dict.fromkeys("abcdefgh", 0.5)
    row_s, look_s = _seconds(
        lambda count: recorder.row(count % 7, 0.0, values), lambda _: [values[name] for name in "abcdefgh"]
    )
    (block,) = recorder._blocks.values()
    assert len(block.data) == 84 * recorder.rows
    assert row_s < 8 * look_s  # twice what it is


def test_a_text_costs_little_more_than_a_number() -> None:
    """A row with a text takes under twice what one without takes: it was five times as much once."""
    plain, mixed = Recorder(), Recorder()
    numbers = dict.fromkeys("abcdefgh", 0.5)
    texts = numbers | {"h": "age"}
    plain_s, text_s = _seconds(
        lambda count: plain.row(count % 7, 0.0, numbers), lambda count: mixed.row(count % 7, 0.0, texts)
    )
    assert text_s < 2.5 * plain_s


def _seconds(*calls: Callable[[int], object]) -> list[float]:
    """Return each call's seconds of this thread, which others' load does not add to; the best of seven turns."""
    best_s = [math.inf] * len(calls)
    for _ in range(7):
        for index, call in enumerate(calls):
            begin_s = time.thread_time()
            for count in range(2000):
                call(count)
            best_s[index] = min(best_s[index], (time.thread_time() - begin_s) / 2000)
    return best_s


names = st.sampled_from(["loss", "n", "why", "ok"])
values = (
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text("abc")
)


@given(st.lists(st.tuples(st.integers(0, 3), st.dictionaries(names, values))))
def test_any_rows_fit_one_table(rows: list[tuple[int, dict[str, object]]]) -> None:
    """Whatever mixture of names and types is recorded, each row is there, in order, with its numbers."""
    recorder = Recorder()
    for rank, row in rows:
        recorder.row(rank, 0.0, row)
    table = recorder.table()
    in_order = sorted(rows, key=lambda entry: entry[0])
    assert table["rank"].tolist() == [rank for rank, _ in in_order]
    for name in set(table) - {"rank", "time_s"}:
        if table[name].dtype.kind != "U":
            expected = [np.nan if row.get(name) is None else float(row[name]) for _, row in in_order]  # type: ignore[arg-type]
            np.testing.assert_array_equal(table[name].astype(float), expected)


def test_a_table_chooses_rows() -> None:
    """`of_rank` and `where` return tables."""
    table = Table({"rank": np.array([0, 1, 1]), "loss": np.array([1.0, 2.0, 3.0])})
    assert table.of_rank(1)["loss"].tolist() == [2.0, 3.0]
    assert table.where(table["loss"] < 3).rows == 2
    assert repr(table) == "Table(3 rows: rank, loss)"
    assert "<th>loss</th>" in table._repr_html_()


def test_a_table_names_its_columns_when_one_is_missing() -> None:
    """The KeyError lists what there is."""
    with pytest.raises(KeyError, match="no column 'los'; the columns are: loss"):
        Table({"loss": np.zeros(1)})["los"]


def test_a_table_has_columns_of_one_length() -> None:
    """Columns that do not fit together are refused."""
    with pytest.raises(ParameterError, match="equal lengths"):
        Table({"a": np.zeros(1), "b": np.zeros(2)})


def test_a_notebook_shows_text_and_runs_none_of_it() -> None:
    """Names of columns and recorded texts are escaped."""
    table = Table(
        {"<img src=x onerror=alert(1)>": np.ones(1), "note": np.array(["<script>alert(2)</script>"])}
    )
    html = table._repr_html_()
    assert "<img" not in html
    assert "<script" not in html
    assert "&lt;script&gt;alert(2)" in html
    assert "<td>1</td>" in html


# --------------------------------------------------------------------------------------------------- run folders
def _run() -> Run:
    recorder = Recorder()
    recorder.row(0, 0.5, {"loss": 1.0, "why": "age"})
    recorder.row(1, 0.5, {"loss": float("inf")})
    recorder.event(1, 0.75, "replacement", {"donors": [0]})
    return Run(
        {"file": "train.py"}, recorder.table(), recorder.events(), {"ranks": 2, "virtual_seconds": 0.75}
    )


def test_a_run_folder_reads_as_it_was_written(tmp_path: Path) -> None:
    """Save and load give the same table, events, totals and outcome; nothing else is left in the folder."""
    _run().save(tmp_path / "deep" / "a")
    loaded = Run.load(tmp_path / "deep" / "a")
    assert {name: column.tolist() for name, column in loaded.table.items()} == {
        name: column.tolist() for name, column in _run().table.items()
    }
    assert (loaded.what, loaded.events, loaded.totals, loaded.outcome) == (
        {"file": "train.py"}, _run().events, {"ranks": 2, "virtual_seconds": 0.75}, "finished",
    )  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "deep" / "a").iterdir()) == [
        "events.jsonl", "metrics.npz", "run.json",
    ]  # fmt: skip


def test_seconds_of_real_ranks_are_not_called_virtual(tmp_path: Path) -> None:
    """Folders of earlier versions say "virtual_seconds" of them; they are read, measured and shown like new ones."""
    virtual = dataclasses.replace(_run(), table=Recorder().table(), events=[])
    old = dataclasses.replace(virtual, what={"file": "train.py", "backend": "mpi"})
    old.save(tmp_path / "old")
    new = Run.load(tmp_path / "old")
    assert new.totals == {"ranks": 2, "run_seconds": 0.75}
    assert "0.75 s" in repr(new) and "run_seconds" in new._repr_html_() and "virtual" not in new._repr_html_()
    for run in (virtual, new):
        for name in SECONDS:
            assert Measure.of(name).value(None, run.totals) == 0.75
    page = render([virtual, new])
    assert "<th>virtual seconds</th><th>run seconds</th>" in page
    assert "virtual seconds" not in render([new])


def test_equal_runs_give_equal_bytes(tmp_path: Path) -> None:
    """No time stamp hides in a run folder."""
    for name in "ab":
        _run().save(tmp_path / name)
    assert (tmp_path / "a/metrics.npz").read_bytes() == (tmp_path / "b/metrics.npz").read_bytes()


def test_numpy_reads_metrics_by_itself(tmp_path: Path) -> None:
    """metrics.npz needs neither spawnsim nor pickles."""
    _run().save(tmp_path)
    with np.load(tmp_path / "metrics.npz", allow_pickle=False) as archive:
        assert sorted(archive) == ["loss", "rank", "time_s", "why"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.json", "{", "run.json is not JSON"),
        ("run.json", "[]", "its 'what' is missing"),
        ("metrics.npz", "PK", "cannot read .*metrics.npz"),
        ("events.jsonl", '{"kind": "x", "time_s": 0, "rank": 0}\n{"ki', "line 2"),
    ],
)
def test_a_damaged_folder_is_told(tmp_path: Path, name: str, content: str, message: str) -> None:
    """The error names the file, and the line where there are lines."""
    _run().save(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ParameterError, match=message):
        Run.load(tmp_path)


def test_a_folder_without_a_run_is_told(tmp_path: Path) -> None:
    """Loading something else ends in one message."""
    with pytest.raises(ParameterError, match="is not a run folder"):
        Run.load(tmp_path)


def test_an_interrupted_write_leaves_the_former_file(tmp_path: Path) -> None:
    """A file is replaced whole or not at all."""
    whole = {"what": {}, "totals": {}, "outcome": "running"}
    folder.write_manifest(tmp_path, whole)
    with pytest.raises(RuntimeError), folder._replacing(tmp_path / "run.json") as file:
        file.write(b"{")
        raise RuntimeError
    assert folder.read_manifest(tmp_path) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_run_says_what_it_is() -> None:
    """The repr holds facts, and the notebook's view the totals."""
    assert repr(_run()) == "Run(train.py, 2 ranks, 2 rows, 1 events, 0.75 virtual s, finished)"
    assert "<th>virtual_seconds</th><td>0.75</td>" in _run()._repr_html_()


# ------------------------------------------------------------------------------------------------------- journals
def _shards(tmp_path: Path, ranks: int) -> list[Journal]:
    journals = [Journal(journal.shard(tmp_path, rank)) for rank in range(ranks)]
    for rank, each in enumerate(journals):
        each.row(rank, 0.1, {"loss": torch.tensor(float(rank)), "n": rank})
        each.event(rank, 0.2, "replacement", {"donors": np.array([rank])})
    return journals


def test_shards_merge_into_what_one_recorder_would_hold(tmp_path: Path) -> None:
    """Types survive the journal; discarding leaves no trace."""
    for each in _shards(tmp_path, 3):
        each.close()
    recorder, counted = merge(tmp_path)
    assert list(counted) == [0, 1, 2]
    assert recorder.table()["loss"].tolist() == [0.0, 1.0, 2.0]
    assert recorder.table()["n"].dtype == np.int64
    assert [event["donors"] for event in recorder.events()] == [[0], [1], [2]]
    journal.discard(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("torn", [1, 30, -1])
def test_a_killed_ranks_shard_counts_up_to_its_torn_frame(tmp_path: Path, torn: int) -> None:
    """What a dead rank wrote whole is kept; a frame that it was writing is left out; a rank may have no shard."""
    for each in _shards(tmp_path, 3):
        each.close()
    journal.shard(tmp_path, 0).unlink()
    late = Journal()
    late.row(1, 0.3, {"loss": 5.0, "n": 1})
    late.flush()
    with journal.shard(tmp_path, 1).open("ab") as file:
        file.write(late.frames[0][:torn])
    recorder, counted = merge(tmp_path)
    assert list(counted) == [1, 2]
    assert recorder.table()["loss"].tolist() == [1.0, 2.0]


def test_the_last_counts_of_a_rank_are_kept(tmp_path: Path) -> None:
    """What a rank has counted is written with each frame, so a killed one has counted until its last."""
    each, counted = Journal(journal.shard(tmp_path, 4)), {"messages": 0}
    each.counted = lambda: counted
    for counted["messages"] in (3, 7):
        each.flush()
    assert merge(tmp_path).counted == {4: {"messages": 7}}


@given(st.lists(st.tuples(st.integers(0, 3), st.dictionaries(names, values), st.booleans())))
def test_journals_hold_what_one_recorder_would(rows: list[tuple[int, dict[str, object], bool]]) -> None:
    """Whatever is recorded, and whenever it is flushed: merged journals and one recorder make equal tables."""
    recorder, journals = Recorder(), [Journal() for _ in range(4)]
    for rank, row, flushed in sorted(rows, key=lambda entry: entry[0]):
        recorder.row(rank, 0.5, row)
        journals[rank].row(rank, 0.5, row)
        if flushed:
            journals[rank].flush()
    for each in journals:
        each.close()
    merged = journal.merge_frames([each.frames for each in journals]).recorder
    assert merged.rows == recorder.rows
    assert merged.table().digest() == recorder.table().digest()


@given(st.lists(st.tuples(st.integers(0, 3), st.dictionaries(names, values)), min_size=1))
def test_rows_that_do_not_fit_are_sorted_on_disk(rows: list[tuple[int, dict[str, object]]]) -> None:
    """Whatever is recorded: a recorder that may hold no rows in memory gives the table of one that holds all."""
    recorder, journals = Recorder(), {rank: Journal() for rank in range(4)}
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr("spawnsim.record.recorder.HELD_B", 0)
        patch.setattr("spawnsim.record.sorting.MERGED", 2)
        patch.setattr("spawnsim.record.sorting.LEAST", 1)
        filed = Recorder(Path(place))
        for rank, row in rows:
            recorder.row(rank, 0.5, row)
            journals[rank].row(rank, 0.5, row)
            journals[rank].flush()
        for each in journals.values():
            journal.replay(io.BytesIO(b"".join(each.frames)), filed)
        found, expected = filed.table(), recorder.table()
        assert found.digest() == expected.digest()
        assert (found.rows, totals_of(found, [], {}), list(found)) == (
            expected.rows, totals_of(expected, [], {}), list(filed.table()),
        )  # fmt: skip
        folder.write_table(Path(place), found)
        patch.setattr("spawnsim.record.folder.HELD_B", 0)
        patch.setattr("spawnsim.columns.PIECE", 3)
        assert folder.read_table(Path(place)).digest() == expected.digest()


def test_memory_does_not_grow_with_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run's end and a reader take of four times the rows is what they take of one: counted, by tracemalloc."""
    for module in ("recorder", "folder"):
        monkeypatch.setattr(f"spawnsim.record.{module}.HELD_B", 400_000)
    for name, rows in (
        ("record.sorting.MERGED", 8_000),
        ("record.sorting.LEAST", 10),
        ("columns.PIECE", 8_000),
    ):
        monkeypatch.setattr(f"spawnsim.{name}", rows)
    peaks = []
    for rows in (40_000, 160_000):
        each = Journal(journal.shard(tmp_path / str(rows)), prompt=False)
        for row in range(rows):
            each.row(row % 20, row * 0.1, {"iteration": row // 20, "local_metric": row * 0.5, "why": "age"})
            if row % 1000 == 999:
                each.flush()
        each.close()
        replaced = [
            {"kind": "replacement", "rank": rank, "time_s": 1.0, "iteration": 10, "mode": "min"}
            for rank in range(20)
        ]
        gc.collect()  # else what earlier tests have left may be finalized meanwhile, and counted
        tracemalloc.start()
        try:
            table = merge(tmp_path / str(rows)).recorder.table()
            totals = totals_of(table, [], {"digest": "x"})
            assert "after 20 of 20 replacements" in str(warnings_of(table, replaced))
            Run({"file": "a.py"}, table, [], totals).save(tmp_path / str(rows))
            loaded = Run.load(tmp_path / str(rows))
            assert (loaded.table.rows, loaded.totals["iterations"]) == (rows, rows // 20)
            assert loaded.table.digest() == table.digest()
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        np.testing.assert_array_equal(loaded.table["iteration"], np.tile(np.arange(rows // 20), 20))
    assert peaks[1] < 1.25 * peaks[0]
    assert peaks[1] < 160_000 * (8 + 8 + 8 + 4 + 12) / 2  # of the columns alone


def test_a_large_table_outlives_its_file_and_names_what_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns that are read late are those of the file that was loaded; a damaged one is told."""
    monkeypatch.setattr("spawnsim.record.folder.HELD_B", 0)
    _run().save(tmp_path)
    loaded = Run.load(tmp_path)
    (tmp_path / "metrics.npz").unlink()
    assert loaded.table["why"].tolist() == ["age", ""]
    assert "loss" in loaded.table and loaded.table.dtype("loss") == np.float64
    assert loaded.table.of_rank(0)["loss"].tolist() == [1.0]
    assert pickle.loads(pickle.dumps(loaded)).table.digest() == loaded.table.digest() == _run().table.digest()
    with zipfile.ZipFile(tmp_path / "metrics.npz", "w") as archive:
        for name, column in _run().table.items():
            data = io.BytesIO()
            np.save(data, column)
            archive.writestr(f"{name}.npy", data.getvalue())
    data = bytearray((tmp_path / "metrics.npz").read_bytes())
    data[data.index(np.float64(1.0).tobytes() + np.float64(np.inf).tobytes())] ^= 1
    (tmp_path / "metrics.npz").write_bytes(data)
    with pytest.raises(ParameterError, match=r"cannot read .*metrics.npz.*CRC"):
        Run.load(tmp_path).table["loss"]


def test_a_run_that_was_killed_loads_from_its_shards(tmp_path: Path) -> None:
    """Without a final merge, `Run.load` shows what the ranks had written."""
    folder.write_manifest(tmp_path, {"what": {}, "totals": {}, "outcome": "running"})
    _shards(tmp_path, 2)  # never closed, but an event was written at once
    run = Run.load(tmp_path)
    assert (run.outcome, run.table["loss"].tolist()) == ("running", [0.0, 1.0])


def test_a_new_run_clears_the_former_ones_files(tmp_path: Path) -> None:
    """A folder never shows an old run's rows under a new run's manifest; a killed run says that it has none."""
    _run().save(tmp_path)
    folder.begin(tmp_path, {"file": "new.py"})
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    with pytest.raises(ParameterError, match="has not ended yet, or was killed"):
        Run.load(tmp_path)


def test_a_journal_without_a_file_keeps_its_frames() -> None:
    """Ranks that write no folder can send their frames to one that merges."""
    each = Journal(None)
    each.row(3, 0.5, {"loss": 1})
    each.close()
    assert journal.merge_frames([each.frames]).recorder.table()["rank"].tolist() == [3]


def test_rows_reach_the_disk_while_the_rank_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that comes after the flush period takes all pending ones along."""
    monkeypatch.setattr(journal, "FLUSH_S", 0.0)
    each = Journal(journal.shard(tmp_path, 0))
    each.row(0, 0.1, {"loss": 1.0})
    assert merge(tmp_path).recorder.table()["loss"].tolist() == [1.0]


def test_a_rare_row_reaches_the_disk_before_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread beside the program sees to it; what is there is not written again, and a full disk is no end."""
    each = Journal(journal.shard(tmp_path, 0))
    each.row(0, 0.1, {"loss": 1.0})
    each.keep_up()
    assert not journal.shard(tmp_path, 0).stat().st_size
    monkeypatch.setattr(each, "_due_s", 0.0)
    with monkeypatch.context() as full:
        full.setattr(journal, "_append", Mock(side_effect=StorageError("full")))
        each.keep_up()
    for _ in range(2):
        monkeypatch.setattr(each, "_due_s", 0.0)
        each.keep_up()
    assert merge(tmp_path).recorder.table()["loss"].tolist() == [1.0]
    assert not each.frames


def test_a_real_runs_digest_leaves_times_out() -> None:
    """Two real runs that recorded equal results have one digest, however long they took."""
    digests = []
    for time_s, loss in ((0.1, 1.0), (0.2, 1.0), (0.1, 2.0)):
        recorder = Recorder()
        recorder.row(0, time_s, {"loss": loss, "compute_s": time_s})
        digests.append(results_digest(recorder.table()))
    assert digests[0] == digests[1] != digests[2]
    assert results_digest(Recorder().table()) is None


def test_what_is_not_known_is_a_dash() -> None:
    """No None is shown to people."""
    run = Run({"file": "a.py"}, Recorder().table(), [], {"ranks": 2})
    assert "None" not in run._repr_html_()
    assert [shown(value) for value in (None, 1234, 0.5, "x")] == ["–", "1,234", "0.5", "x"]


# ------------------------------------------------------------------------------------------------------ manifests
def test_the_manifest_names_versions_and_the_program() -> None:
    """It holds what can change a result, and no path of this machine."""
    found = manifest.versions()
    assert {"python", "spawnsim", "numpy", "torch", "simpy", "greenlet"} <= set(found)
    program = manifest.program(_run)
    assert (program["file"], program["main"]) == ("test_record.py", "_run")
    assert len(program["file_digest"]) == 16


def test_what_is_installed_or_edited_between_two_runs_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is read again for each run of a process: a folder's change, and another text, tell that there is more."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(manifest, "PACKAGES", ("numpy", "own-package"))
    assert set(manifest.versions()) == {"python", "numpy"}
    for number in ("1.0", "1.1"):  # installed, and then replaced by another
        for old in tmp_path.glob("*.dist-info"):
            shutil.rmtree(old)
        folder = tmp_path / f"own_package-{number}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: own-package\nVersion: {number}\n")
        assert manifest.versions()["own-package"] == number
    for name in ("program", "one", "two"):
        (tmp_path / f"{name}.py").write_text("")
    program, times = tmp_path / "program.py", []
    for name in ("one", "two"):
        program.write_text(f"import {name}")
        os.utime(program, ns=(1, 1))
        times.append(program.stat().st_mtime_ns)
        assert set(manifest.own_files(program)) == {"program/program.py", f"program/{name}.py"}
    assert times == [1, 1], "as a file that is edited twice within one tick of the clock"


def test_the_revision_is_read_from_the_checkout(tmp_path: Path) -> None:
    """A branch is followed to its commit, without starting git; elsewhere there is none."""
    assert manifest.revision(tmp_path) is None
    (tmp_path / ".git/refs/heads").mkdir(parents=True)
    (tmp_path / ".git/HEAD").write_text("ref: refs/heads/main\n")
    (tmp_path / ".git/refs/heads/main").write_text("abc123\n")
    (tmp_path / "sub").mkdir()
    assert manifest.revision(tmp_path / "sub") == "abc123"


# ----------------------------------------------------------------------------- folders that are torn, or somebody's
def _npy(claims: str, body: bytes = bytes(16), dtype: str = "<f8") -> bytes:
    head = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {claims}, }}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + body


def _saved(place: Path, **columns: bytes | np.ndarray) -> Path:
    """Save a run of two ranks, with columns of its archive replaced."""
    _run().save(place)
    plain = {"rank": np.zeros(2, np.int32), "time_s": np.ones(2), "loss": np.ones(2)}
    with zipfile.ZipFile(place / "metrics.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, column in (plain | columns).items():
            data = io.BytesIO()
            if isinstance(column, np.ndarray):
                np.lib.format.write_array(data, column)
            archive.writestr(f"{name}.npy", column if isinstance(column, bytes) else data.getvalue())
    return place


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"loss": _npy("(10000000000000000,)")}, "claims 10,000,000,000,000,000 rows"),
        ({"loss": np.ones(400)}, "differ in length"),
        ({"loss": _npy("(2, 3)", bytes(48))}, "not a column of numbers"),
        ({"loss": _npy("(2,)", dtype="|O")}, "not a column of numbers"),
        ({"loss": np.zeros(2, "datetime64[s]")}, "not a column of numbers"),
        ({"loss": b"hello"}, "metrics.npz"),
        ({"loss": b"\x93NUMPY\x09\x00" + bytes(80)}, "metrics.npz"),
        ({"rank": np.array([0, 2**31 - 1], np.int32)}, "2147483647 is not a rank of 2 ranks"),
        ({"rank": np.array([0, -5], np.int32)}, "-5 is not a rank"),
        ({"rank": np.array([0.0, 1.0])}, "does not hold integers"),
        ({"time_s": np.array([0.0, np.nan])}, "values that are not times"),
        ({"time_s": np.array([0.0, -1.0])}, "values that are not times"),
        ({"time_s": np.array(["a", "b"])}, "values that are not times"),
    ],
)  # fmt: skip
def test_a_damaged_table_is_told_in_one_line(
    tmp_path: Path, columns: dict[str, bytes | np.ndarray], says: str
) -> None:
    """Nothing that an archive claims is believed before it is looked at; what it raises names the file."""
    with pytest.raises(ParameterError, match=says):
        Run.load(_saved(tmp_path / "a", **columns))


@pytest.mark.parametrize("at", [0, 30, 60, 200, 300])
def test_a_torn_archive_is_told_in_one_line(tmp_path: Path, at: int) -> None:
    """Whatever zipfile, zlib and numpy raise for it."""
    path = _saved(tmp_path / "a", loss=np.random.default_rng(0).normal(size=2)) / "metrics.npz"
    data = bytearray(path.read_bytes())
    data[at : at + 8] = bytes(8)
    path.write_bytes(data)
    with pytest.raises(ParameterError, match=r"metrics\.npz"):
        Run.load(tmp_path / "a")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("run.json", "{}", "its 'what' is missing"),
        ("run.json", '{"what": [], "totals": {}, "outcome": "finished"}', "its 'what'"),
        ("run.json", '{"what": {}, "totals": 3, "outcome": "finished"}', "its 'totals'"),
        ("run.json", '{"what": {}, "totals": {}, "outcome": null}', "its 'outcome'"),
        (
            "run.json",
            '{"what": {}, "totals": {"ranks": 1e308}, "outcome": ""}',
            r"1e\+308 is not a number of ranks",
        ),
        ("run.json", '{"what": {"file": "\\ud800"}, "totals": {}, "outcome": ""}', "not JSON"),
        ("run.json", "[" * 100_000, "nested too deep"),
        ("events.jsonl", "[" * 100_000, "line 1: not JSON"),
        ("events.jsonl", '{"kind": "x", "time_s": NaN, "rank": 0}', "NaN is not a JSON number"),
        ("events.jsonl", '{"kind": "x", "time_s": 1e999, "rank": 0}', "line 1: not an event"),
        ("events.jsonl", '{"kind": "x", "time_s": 1.0, "rank": 2}', "line 1: not an event"),
        ("events.jsonl", '{"kind": "x", "time_s": 1.0, "rank": true}', "line 1: not an event"),
        ("events.jsonl", '"replacement"', "line 1: not an event"),
    ],
)
def test_damaged_texts_are_told_in_one_line(tmp_path: Path, name: str, text: str, says: str) -> None:
    """Types, nesting, numbers that are none; events of ranks that the run has not."""
    _run().save(tmp_path / "a")
    (tmp_path / "a" / name).write_text(text)
    with pytest.raises(ParameterError, match=says):
        Run.load(tmp_path / "a")


def test_an_event_file_of_other_bytes_is_told_in_one_line(tmp_path: Path) -> None:
    """It need not be UTF-8."""
    _run().save(tmp_path / "a")
    (tmp_path / "a" / "events.jsonl").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ParameterError, match="line 1: not JSON"):
        Run.load(tmp_path / "a")


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({}, "lacks the column 'compute_s'"),
        ({"compute_s": np.array(["a", "b"])}, "holds no durations"),
        (
            {"compute_s": np.ones(2), "rank": np.array([0, 9_999_999], np.int32)},
            "no duration of rank 1 was recorded",
        ),
        ({"compute_s": np.ones(2), "rank": np.array([0, 2**31 - 1], np.int32)}, "is not a rank"),
        ({"compute_s": _npy("(10000000000000000,)")}, "claims"),
    ],
)
def test_compute_times_are_read_as_carefully(
    tmp_path: Path, columns: dict[str, bytes | np.ndarray], says: str
) -> None:
    """A recorded run that gives its compute times is somebody's file, too."""
    with pytest.raises(ParameterError, match=says):
        ComputeTrace.of_run(_saved(tmp_path / "a", **columns))


def test_a_table_is_written_as_csv_that_reads_back(tmp_path: Path) -> None:
    """Every number to its last digit, texts with commas and line breaks, and more rows than one block."""
    rows = 100_003
    numbers = np.random.default_rng(0).normal(size=rows)
    table = Table(
        {"a, b": numbers, "text": np.array(["x,\ny"] * rows), "n": np.arange(rows), "f": numbers > 0}
    )
    table.to_csv(tmp_path / "t.csv")
    with (tmp_path / "t.csv").open(newline="") as file:
        head, *found = list(csv.reader(file))
    assert head == ["a, b", "text", "n", "f"] and len(found) == rows
    assert [float(row[0]) for row in found] == numbers.tolist()
    assert found[-1][1:] == ["x,\ny", str(rows - 1), str(numbers[-1] > 0)]


@pytest.mark.parametrize(("call", "package"), [("to_pandas", "pandas"), ("to_parquet", "pyarrow")])
def test_a_table_says_what_other_formats_need(
    call: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line."""
    table = Table({"a": np.arange(3)})
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ParameterError, match=rf'{call}\(\) needs {package}: pip install "spawnsim\[tables\]"'
    ):
        getattr(table, call)(*([tmp_path / "t.parquet"] if call == "to_parquet" else []))


def test_pandas_and_parquet_hold_what_a_table_holds(tmp_path: Path) -> None:
    """Names, order, dtypes and every number; texts as texts."""
    numbers = np.random.default_rng(0).normal(size=1003)
    table = Table(
        {"rank": np.arange(1003), "loss": numbers, "text": np.array(["é, x"] * 1003), "late": numbers > 1}
    )
    frame = table.to_pandas()
    assert list(frame.columns) == list(table)
    assert frame["loss"].tolist() == numbers.tolist() and frame["rank"].dtype == np.int64
    table.to_parquet(tmp_path / "t.parquet")
    back = pandas.read_parquet(tmp_path / "t.parquet")
    assert list(back.columns) == list(table)
    assert back["loss"].tolist() == numbers.tolist() and back["late"].tolist() == (numbers > 1).tolist()
    assert set(back["text"]) == {"é, x"}


def test_a_frame_that_a_full_disk_refuses_leaves_nothing(tmp_path: Path) -> None:
    """Half a frame would end the reading of all that comes after it."""

    class FullDisk(io.FileIO):
        def write(self, data: Any, /) -> int:
            super().write(memoryview(data)[:3])
            raise OSError(28, "No space left on device")

    path = tmp_path / "shard"
    path.write_bytes(b"whole")
    with FullDisk(path, "a") as file, pytest.raises(StorageError):
        journal._append(file, b"frame")
    assert path.read_bytes() == b"whole"
