"""What recording costs: 1,000 ranks, 1,000 rows each, 8 values a row."""

from __future__ import annotations

import time

from spawnsim.record import Recorder

RANKS, ROWS = 1_000, 1_000
VALUES = {"iteration": 3, "loss": 0.5, "ok": True, "wait_s": 0.25, "stale": 1, "a": 1.5, "b": 2.5, "c": 3.5}


def test_recording_a_million_rows():
    """A row takes at most 2 µs and 84 bytes, and the table is ready within a second."""
    recorder, begin_s = Recorder(), time.perf_counter()
    for _ in range(ROWS):
        for rank in range(RANKS):
            recorder.row(rank, 0.5, VALUES)
    row_us = (time.perf_counter() - begin_s) / (RANKS * ROWS) * 1e6
    begin_s = time.perf_counter()
    table = recorder.table()
    table_s = time.perf_counter() - begin_s
    nbytes = sum(len(block.data) for block in recorder._blocks.values()) / recorder.rows
    print(
        f"\nrecord: {row_us:.2f} us and {nbytes:.0f} bytes a row, table of {table.rows:,} rows in {table_s:.2f} s"
    )
    assert nbytes <= 84
    assert row_us < 4  # twice the promise: a busy machine
