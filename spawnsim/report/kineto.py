"""Traced runs as traces of the PyTorch profiler, one file a rank: what Holistic Trace Analysis opens.

Computing is a kernel on stream 7, each call that waits or moves data one on stream 20, named as NCCL's are, since tools
tell communication by that name. Each has the launch that tools ask for, at its own time: virtual ranks have one time,
not a host's and a device's. Iterations that rows tell of are `ProfilerStep#N`, so `spawnsim import kineto` reads such
files, too.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from spawnsim.plots.experiments import Recorded, ranks_of
from spawnsim.report.trace_reader import Row, Selection, Timeline

COMPUTE, TALK = 7, 20  # streams
HOST, HOST_THREAD = 1_000_000, 1  # the process of the program; devices are processes, too
OWN = {"compute", "sleep", "join"}  # calls that are no communication


def write(run: Recorded, timeline: Timeline, selection: Selection, out: Path) -> list[Path]:
    """Write a traced run, a file for each rank.

    Args:
        run: the run.
        timeline: its calls.
        selection: which ranks, and what time; its limit does not count.
        out: the folder; `rank_N.json` are written in it.

    Returns:
        The files.
    """
    calls: defaultdict[int, list[Row]] = defaultdict(list)
    for row in timeline.rows(selection):
        if "call" in row and not row.get("task"):
            calls[row["rank"]].append(row)
    out.mkdir(parents=True, exist_ok=True)
    paths, ranks = [], ranks_of(run)
    for rank in sorted(calls):
        events = [*_names(rank), *_kernels(calls[rank]), *_steps(run, rank, selection)]
        document = {
            "schemaVersion": 1,
            "distributedInfo": {"backend": "spawnsim", "rank": rank, "world_size": ranks},
            "deviceProperties": [{"id": 0, "name": "virtual rank", "numSms": 1}],
            "traceEvents": events,
        }
        paths.append(out / f"rank_{rank}.json")
        paths[-1].write_text(json.dumps(document), encoding="utf-8")
    return paths


def _names(rank: int) -> Iterator[dict[str, Any]]:
    for process, label in ((0, f"virtual rank {rank}"), (HOST, "program")):
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "ts": 0, "args": {"name": label}}


def _kernels(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield each call as a launch and a kernel."""
    for number, row in enumerate(sorted(rows, key=lambda row: int(row["number"]))):
        if row["call"] in OWN - {"compute"} or not row["end_s"] < float("inf"):
            continue
        talks = row["call"] != "compute"
        begin_us, lasts_us = 1e6 * row["time_s"], 1e6 * (row["end_s"] - row["time_s"])
        stream = TALK if talks else COMPUTE
        facts = {"stream": stream, "correlation": number + 1, "device": 0, "context": 1}
        facts |= {name: row[name] for name in ("comm", "sent", "received", "tag") if name in row}
        name = f"ncclDevKernel_{row['call']}" if talks else "compute"
        when = {"ph": "X", "ts": begin_us, "dur": lasts_us}
        yield when | {"cat": "kernel", "name": name, "pid": 0, "tid": stream, "args": facts}
        launch = {"External id": number + 1, "correlation": number + 1}
        host = when | {"pid": HOST, "tid": HOST_THREAD, "args": launch}
        yield host | {"cat": "cpu_op", "name": f"spawnsim::{row['call']}"}
        yield host | {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": 0.0}


def _steps(run: Recorded, rank: int, selection: Selection) -> Iterator[dict[str, Any]]:
    """Yield the iterations: each row stands at the end of one."""
    table = run.table
    own = table["rank"] == rank
    if "iteration" not in table or not own.any():
        return
    begin_s = 0.0
    for number, end_s in zip(table["iteration"][own].tolist(), table["time_s"][own].tolist(), strict=True):
        if selection.overlaps(begin_s, end_s) and number == number:
            step = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{int(number)}"}
            yield step | {
                "pid": HOST, "tid": HOST_THREAD, "ts": 1e6 * begin_s, "dur": 1e6 * (end_s - begin_s), "args": {}
            }  # fmt: skip
        begin_s = end_s
