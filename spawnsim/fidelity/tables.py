"""Published measurements of collectives: rows from CSV files, nccl-tests and the OSU benchmarks.

A row is one collective: its operation, algorithm or library, ranks, nodes, bytes and seconds. `tablefit` fits
platforms to rows.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from spawnsim.errors import ParameterError
from spawnsim.fidelity.inputs import read_text


class Sample(NamedTuple):
    """One measured collective.

    Attributes:
        operation: "allreduce" and so on.
        algorithm: "ring" and so on; "" if the library chose it.
        library: "nccl", or "" for messages of MPI.
        nodes: number of nodes.
        ranks: number of ranks.
        nbytes: bytes of the vector (allreduce, bcast, reduce) or of one rank's block.
        seconds: how long it took.
        where: file and line.
        dtype: "float32" and so on; "" if the table does not say.
    """

    operation: str
    algorithm: str
    library: str
    nodes: int
    ranks: int
    nbytes: int
    seconds: float
    where: str
    dtype: str = ""


OPTIONAL = ("collective", "algorithm", "library", "ranks", "ranks_per_node", "dtype")
_SECONDS = ("seconds", "median_s")
_NCCL_LINE = re.compile(r"\s*(\d+)\s+\d+\s+\w+\s+\w+\s+-?\d+\s+([\d.]+)\s")
_NCCL_RANK = re.compile(r"#\s+Rank\s+\d+.*?\bon\s+(\S+)")
_OSU_TITLE = re.compile(r"#\s*OSU\s+MPI.*?\s(\w+)\s+Latency", re.IGNORECASE)
_OSU_LINE = re.compile(r"\s*(\d+)\s+([\d.]+)")


def read_table(
    path: Path, *, machine: str | None = None, nodes: int | None = None, ranks: int | None = None
) -> list[Sample]:
    """Return the rows of a file.

    Args:
        path: a CSV file with the columns nodes, bytes, seconds (or median_s) and, optionally, collective (default:
            allreduce), algorithm, library, ranks or ranks_per_node (default: 1), dtype and machine; the output of an
            nccl-tests program; or the output of a collective of the OSU benchmarks, which names no ranks.
        machine: the value of the column `machine`, if the file has several.
        nodes: number of nodes, for the OSU benchmarks.
        ranks: number of ranks, for the OSU benchmarks.

    Raises:
        ParameterError: the file cannot be read, a column is missing, or a value is not a number above 0.
    """
    text = read_text(path)
    if title := _OSU_TITLE.search(text):
        if nodes is None or ranks is None:
            raise ParameterError(
                f"{path}: the OSU benchmarks do not print their ranks: give --set nodes=N ranks=N"
            )
        # They time in microseconds, by bytes of one rank's vector or block.
        found = [*_lines(path, text, _OSU_LINE, title[1].lower(), library="", nodes=nodes, ranks=ranks)]
    elif hosts := _NCCL_RANK.findall(text):
        name = re.search(r"(all_?reduce|all_?gather|reduce_?scatter)", text)
        operation = name[1] if name else "allreduce"
        operation = {"all_reduce": "allreduce", "all_gather": "allgather"}.get(operation, operation)
        found = [
            *_lines(path, text, _NCCL_LINE, operation, library="nccl", nodes=len({*hosts}), ranks=len(hosts))
        ]
    else:
        found = [*_csv(path, text, machine)]
    if not found:
        raise ParameterError(
            f"{path}: no rows: give a CSV file, or the output of nccl-tests or the OSU benchmarks"
        )
    return found


def _lines(
    path: Path, text: str, pattern: re.Pattern[str], operation: str, *, library: str, nodes: int, ranks: int
) -> Iterator[Sample]:
    for at, line in enumerate(text.splitlines(), start=1):
        match = pattern.match(line)
        if match and int(match[1]):
            where = f"{path}, line {at}"
            yield Sample(operation, "", library, nodes, ranks, int(match[1]), 1e-6 * float(match[2]), where)


def _csv(path: Path, text: str, machine: str | None) -> Iterator[Sample]:
    reader = csv.DictReader(text.splitlines())
    columns = reader.fieldnames or ()
    seconds = next((name for name in _SECONDS if name in columns), _SECONDS[0])
    for name in ("nodes", "bytes", seconds):
        if name not in columns:
            raise ParameterError(
                f"{path}: no column {name!r}: a table has nodes, bytes, seconds, and may have {', '.join(OPTIONAL)}"
            )
    rows = [(f"{path}, line {reader.line_num}", row) for row in reader]
    machines = [*dict.fromkeys(row["machine"] for _, row in rows)] if "machine" in columns else []
    if (machine is None and len(machines) > 1) or (machine is not None and machine not in machines):
        known = f"the file has {', '.join(machines)}" if machines else "the file has no column machine"
        raise ParameterError(
            f"{path}: machine={machine}: {known}: give --set machine=NAME for one of several"
        )
    for where, row in rows:
        if machine is not None and row["machine"] != machine:
            continue
        nodes = int(_number(where, row, "nodes"))
        ranks = int(_number(where, row, "ranks")) if "ranks" in columns else nodes
        if "ranks_per_node" in columns and "ranks" not in columns:
            ranks = nodes * int(_number(where, row, "ranks_per_node"))
        library = (row.get("library") or "").strip().lower()
        yield Sample(
            (row.get("collective") or "allreduce").strip(),
            (row.get("algorithm") or "").strip(),
            "nccl" if library == "nccl" else "",
            nodes, ranks, int(_number(where, row, "bytes")), _number(where, row, seconds), where,
            (row.get("dtype") or "").strip(),
        )  # fmt: skip


def _number(where: str, row: Mapping[str, str | None], name: str) -> float:
    text = row[name] or ""
    try:
        value = float(text)
    except ValueError:
        raise ParameterError(f"{where}: {name} is {text!r}, not a number") from None
    if not 0.0 < value < float("inf"):
        raise ParameterError(f"{where}: {name} is {text}: give a number above 0")
    return value
