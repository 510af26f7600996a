"""The cost of recording: 1,000 ranks, 1,000 rows each, 8 values per row; and the memory at the end of a long run.

    python -m pytest benchmarks/bench_record.py
    python benchmarks/bench_record.py 10000000

The second command writes this number of rows, of two shapes, from 100 ranks to a journal, as a run does. It then
merges them, saves the folder, loads it and compares digests. After each step it prints processor seconds and peak
memory so far.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path

from spawnsim import Run
from spawnsim.record import Journal, Recorder, journal, merge
from spawnsim.run.result import totals_of

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
    assert row_us < 4  # twice the promise: the machine may be busy


def end_of_a_run(rows: int, ranks: int = 100) -> None:
    """Record, merge, save and load; print the cost of each."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        shard = Journal(journal.shard(folder), prompt=False)
        for row in range(rows):
            rank, iteration = row % ranks, row // ranks
            values = {
                "iteration": iteration,
                "loss": rank + 0.5 * iteration,
                "why": "age" if row % 3 else "no",
            }
            shard.row(
                rank, 0.1 * iteration, values if rank % 10 else {"iteration": iteration, "loss": None, "n": 3}
            )
        shard.close()
        report("recorded")
        recorder = merge(folder).recorder
        table = recorder.table()
        report("put together")
        Run({"file": "a.py"}, table, [], totals_of(table, [], {"digest": "x"})).save(folder)
        report("saved, with its totals")
        journal.discard(folder)
        assert Run.load(folder).table.digest() == table.digest()
        report("loaded, and compared")


def report(what: str) -> None:
    """Print the resources that the process has used."""
    most_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{what:24} {time.process_time():8.1f} s {most_mib:8.0f} MiB", flush=True)


if __name__ == "__main__":
    end_of_a_run(int(sys.argv[1]))
