"""Readers of cluster files: nccl-tests reports and WAN tables become platforms, profiler traces become compute times.

Every error names the file and the field.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spawnsim.errors import ParameterError
from spawnsim.models.collectives import Selection
from spawnsim.models.compute import Trace
from spawnsim.models.network import Hockney, Regions, Switch
from spawnsim.models.platform import Platform

Intervals = list[tuple[float, float]]


# ------------------------------------------------------------------------------------------------------------ reading
def read_text(path: Path) -> str:
    """Return a file's text; the PyTorch profiler compresses files (.gz), spreadsheets begin with a byte order mark."""
    if path.is_dir():
        raise ParameterError(f"{path} is a folder: give its files, such as {path}/*")
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return data.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ParameterError(f"{path}: cannot be read ({error})") from error


def _json(path: Path) -> Any:
    try:
        return json.loads(read_text(path))
    except ParameterError:
        raise
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"{path}: not valid JSON ({error})") from error


def _field(path: Path, document: Any, *keys: str | int) -> Any:
    """Return a value deep in a document, or raise an error that names the missing field."""
    at = ""
    for key in keys:
        at += f"[{key}]" if isinstance(key, int) else f".{key}" if at else key
        try:
            document = document[key]
        except (KeyError, IndexError, TypeError):
            raise ParameterError(f"{path}: {at} is missing") from None
    return document


def _above_zero(path: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ParameterError(f"{path}: {name} is {value!r}, not a number above 0")
    return float(value)


# ---------------------------------------------------------------------------------------------------------- platforms
def read_nccl(path: Path) -> Platform:
    """Return the platform of an nccl-tests report of `all_reduce_perf -J FILE`.

    A ring of P ranks takes 2(P - 1)·α + 2(P - 1)/P · n/B for n bytes (Thakur, Rabenseifner and Gropp 2005). Least
    squares of relative errors fit this to the times. So one link represents NVLink and the network together, and
    NCCL's other algorithms are not modelled.

    Args:
        path: the report, with at least two sizes.

    Returns:
        A switch of Hockney links whose all-reduce is a ring; `fitted` holds the largest error.

    Raises:
        ParameterError: the file cannot be read, a field is missing or not a number, or no link explains the times.
    """
    document = _json(path)
    ranks = _ranks_of(path, document)
    results = _field(path, document, "results")
    points: list[tuple[float, float]] = []
    for place in range(len(results) if isinstance(results, list) else 0):
        nbytes = _field(path, results, place, "size")
        body = "out_of_place" if results[place].get("out_of_place") else "in_place"
        time_us = _field(path, document, "results", place, body, "time")
        if nbytes:
            points.append(
                (
                    _above_zero(path, f"results[{place}].size", nbytes),
                    1e-6 * _above_zero(path, f"results[{place}].{body}.time", time_us),
                )
            )
    if len({nbytes for nbytes, _ in points}) < 2:
        raise ParameterError(f"{path}: results has fewer than two sizes: run with -b 8 -e 1G -f 2")
    sizes, times = map(np.array, zip(*points, strict=True))
    columns = np.stack([np.full(len(points), 2.0 * (ranks - 1)), 2.0 * (ranks - 1) / ranks * sizes]) / times
    latency_s, per_byte_s = (
        float(each) for each in np.linalg.lstsq(columns.T, np.ones(len(points)), rcond=None)[0]
    )
    if per_byte_s <= 0:
        raise ParameterError(
            f"{path}: results: times do not grow with sizes: larger sizes are needed (-e 1G)"
        )
    latency_s = max(latency_s, 0.0)
    worst = float(np.max(np.abs(np.array([latency_s, per_byte_s]) @ columns - 1.0)))
    return Platform(
        path.stem,
        Switch(Hockney(latency_s, 1.0 / per_byte_s)),
        collectives=Selection(fixed=(("allreduce", "ring"),)),
        description=f"nccl-tests of all_reduce on {ranks} ranks, as a ring",
        fitted=(("ranks", str(ranks)), ("largest_error", f"{worst:.0%} of {len(points)} times")),
    )


def _ranks_of(path: Path, document: Any) -> int:
    """Return the ranks of a report; the report lists one device per process, whatever number of devices it drives."""
    config = _field(path, document, "config")
    devices = (
        _field(path, document, "config", "devices")
        if "devices" in config
        else _field(path, document, "devices")
    )
    per_process = [_above_zero(path, f"config.{key}", config.get(key, 1)) for key in ("nthreads", "ngpus")]
    ranks = len(devices) * round(math.prod(per_process))
    if ranks < 2:
        raise ParameterError(f"{path}: devices: {ranks} rank; an all-reduce of at least 2 is needed")
    return ranks


_CELL = re.compile(r"\s*([\d.eE+-]+)\s*/\s*([\d.eE+-]+)\s*")


def read_wan(path: Path, members: int | Sequence[int] = 1) -> Platform:
    """Return the regions of a CSV: a column `region`, then one column per region, cells "ms/Gbit/s" such as "67/0.79".

    A cell may be empty if the mirrored cell is not. Milliseconds are one way.

    Args:
        path: the table.
        members: number of ranks in each region, or one number for all regions.

    Returns:
        The platform.

    Raises:
        ParameterError: the file cannot be read; a row, column or pair is missing; or a pair does not consist of
            numbers.
    """
    reader = csv.DictReader(read_text(path).splitlines())
    if "region" not in (reader.fieldnames or ()):
        raise ParameterError(f"{path}: no column 'region'")
    rows = {row["region"].strip(): (reader.line_num, row) for row in reader if row["region"]}
    pairs: dict[tuple[str, str], tuple[float, float]] = {}
    for source, (line, row) in rows.items():
        for dest in rows:
            if dest not in row:
                raise ParameterError(f"{path}: no column {dest!r}: each region needs a row and a column")
            words = row[dest] or ""
            if not words.strip():
                continue
            match = _CELL.fullmatch(words)
            try:
                latency, rate = (float(word) for word in match.groups())  # type: ignore[union-attr]
            except (AttributeError, ValueError):
                raise ParameterError(
                    f"{path}, line {line}: {dest} is {words!r}; write milliseconds and Gbit/s, such as 67/0.79"
                ) from None
            if not 0 <= latency < math.inf or not 0 < rate < math.inf:
                raise ParameterError(
                    f"{path}, line {line}: {dest} is {words!r}; give 0 ms or more, and Gbit/s above 0"
                )
            pairs[source, dest] = latency / 1e3, rate * 1e9 / 8
    if not rows:
        raise ParameterError(f"{path}: region: no rows")

    def link(source: str, dest: str) -> Hockney:
        found = pairs.get((source, dest)) or pairs.get((dest, source))
        if found is None:
            raise ParameterError(f"{path}, line {rows[source][0]}: {dest} is empty, and so is its mirror")
        return Hockney(*found)

    each = (members,) * len(rows) if isinstance(members, int) else tuple(members)
    if len(each) != len(rows):
        raise ParameterError(
            f"{path}: region: {len(rows)} of them, and members of {len(each)}: give one number for each"
        )
    joins = tuple(tuple(link(source, dest) for dest in rows) for source in rows)
    return Platform(path.stem, Regions(each, joins), description=f"regions {', '.join(rows)}")


# ------------------------------------------------------------------------------------------------------ compute times
_COMMUNICATION = re.compile(
    r"nccl|gloo|all_?reduce|all_?gather|reduce_?scatter|broadcast|c10d", re.IGNORECASE
)
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")


def read_kineto(paths: Sequence[Path]) -> Trace:
    """Return compute times of ranks from traces of the PyTorch profiler, one file per rank.

    The time of a step (`ProfilerStep#N`; the program calls `profiler.step()`) is its length, less the time in which
    only communication runs. Without GPU kernels, all communication calls count.

    Args:
        paths: files from `export_chrome_trace`; `distributedInfo.rank` gives the rank of each, else the order does.

    Returns:
        A row of durations in seconds per rank.

    Raises:
        ParameterError: a file cannot be read or has no steps, or two files are of one rank, or a rank is missing.
    """
    rows: dict[int, list[float]] = {}
    for place, path in enumerate(paths):
        document = _json(path)
        events = _field(path, document, "traceEvents")
        info = document.get("distributedInfo") or {}
        rank = info.get("rank", place)
        if not isinstance(rank, int) or rank in rows:
            raise ParameterError(
                f"{path}: distributedInfo.rank is {rank!r}, which is not a rank, or belongs to another file"
            )
        rows[rank] = _steps_s(
            path, [event for event in events if isinstance(event, dict) and event.get("ph") == "X"]
        )
    if sorted(rows) != list(range(len(rows))) or not rows:
        missing = next(rank for rank in range(len(rows) + 1) if rank not in rows)
        raise ParameterError(
            f"{paths[0] if paths else 'no file'}: distributedInfo.rank: no file is of rank {missing}"
        )
    return Trace([rows[rank] for rank in range(len(rows))], source=", ".join(map(str, paths)))


def _steps_s(path: Path, events: Sequence[Mapping[str, Any]]) -> list[float]:
    spans = {id(event): _span(path, place, event) for place, event in enumerate(events)}
    steps = sorted(
        {
            spans[id(e)]
            for e in events
            if str(e.get("name")).startswith("ProfilerStep#") and e.get("cat") != "gpu_user_annotation"
        }
    )
    if not steps:
        raise ParameterError(
            f"{path}: traceEvents: no ProfilerStep: call profiler.step() after each training step"
        )
    on_gpu = [event for event in events if event.get("cat") in _KERNELS]
    talks = [bool(_COMMUNICATION.search(str(event.get("name")))) for event in on_gpu or events]
    sorted_out = list(zip(on_gpu or events, talks, strict=True))
    waits = _union([spans[id(event)] for event, talk in sorted_out if talk])
    # Calls in a CPU trace are nested: only GPU kernels run in parallel with communication.
    works = _union([spans[id(event)] for event, talk in sorted_out if not talk]) if on_gpu else []
    return [
        1e-6 * (end - begin - _covered(waits, begin, end) + _both(waits, works, begin, end))
        for begin, end in steps
    ]


def _span(path: Path, place: int, event: Mapping[str, Any]) -> tuple[float, float]:
    begin, length = event.get("ts"), event.get("dur", 0)
    if not isinstance(begin, (int, float)) or not isinstance(length, (int, float)) or length < 0:
        raise ParameterError(
            f"{path}: traceEvents: ts, dur of complete event {place} are {begin!r}, {length!r}"
        )
    return float(begin), float(begin + length)


def _union(spans: Sequence[tuple[float, float]]) -> Intervals:
    found: Intervals = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _covered(spans: Intervals, begin: float, end: float) -> float:
    return sum(max(min(last, end) - max(first, begin), 0.0) for first, last in spans)


def _both(spans: Intervals, others: Intervals, begin: float, end: float) -> float:
    cut = [(max(first, begin), min(last, end)) for first, last in spans]
    return sum(_covered(others, first, last) for first, last in cut if last > first)
