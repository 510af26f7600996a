"""`spawnsim import`: what clusters write, as platforms, compute times and fault plans that other commands take."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spawnsim.errors import ParameterError
from spawnsim.fidelity import chakra, inputs, whatif
from spawnsim.models.compute import Trace
from spawnsim.models.platform import Platform, to_toml
from spawnsim.options import Parser

KINDS = {
    "nccl": "report of all_reduce_perf -J: a platform file",
    "iperf3": "report of iperf3 -J: a platform file",
    "wan": "CSV of milliseconds/Gbit/s between regions: a platform file",
    "kineto": "PyTorch profiler traces, one a rank: a folder for --compute",
    "bytedance": "operations of a job (Parquet or CSV): a folder for --compute, and slowdowns",
    "spot": "JSON of how many spot instances there were: a fault plan for --faults",
    "chakra": "execution traces NAME.RANK.et, one a rank: a program to run, of timing alone",
    "sacct": "table of sacct -P -D: a fault plan for --faults",
}


def main(argv: Sequence[str]) -> int:
    """Read, write, and say what was written and how it is used."""
    options = parser().parse_args(argv)
    paths: list[Path] = options.files
    if options.kind not in ("kineto", "chakra") and len(paths) != 1:
        raise ParameterError(f"import {options.kind}: give one file, not {len(paths)}")
    out: Path = options.out
    if options.kind == "kineto":
        use = write_times(inputs.read_kineto(paths), out)
    elif options.kind == "chakra":
        use = write_program(chakra.read_traces(paths), out)
    elif options.kind == "bytedance":
        trace, found = whatif.read_bytedance(paths[0])
        use = write_times(trace, out)
        sys.stdout.write(f"{_slowdowns(found)}\n")
    elif options.kind in ("sacct", "spot"):
        if out.suffix != ".json":
            raise ParameterError(f"--out {out}: a fault plan is a .json file")
        if options.kind == "sacct":
            plan = inputs.read_sacct(paths[0], options.job, ranks_per_node=options.ranks_per_node or 8)
            use = f"--faults {out} ({len(plan.faults)} faults, {options.ranks_per_node or 8} ranks on each node)"
        else:
            plan, ranks = inputs.read_spot(paths[0], ranks_per_node=options.ranks_per_node or 1)
            use = f"--ranks {ranks} --faults {out} ({len(plan.faults)} faults)"
        out.write_text(plan.to_json(), encoding="utf-8")
    else:
        if out.suffix != ".toml":
            raise ParameterError(f"--out {out}: a platform is a .toml file")
        platform = _platform(options.kind, paths[0], options.members)
        out.write_text(to_toml(platform), encoding="utf-8")
        use = f"--platform {out}"
        known = dict(platform.fitted)
        if "largest_error" in known:
            use += f" (one link for all: off by up to {known['largest_error']})"
    sys.stdout.write(f"written: {out}; use it as {use}\n")
    return 0


def _slowdowns(found: whatif.WhatIf) -> str:
    worst = sorted(range(len(found.by_worker)), key=lambda worker: -found.by_worker[worker])[:3]
    each = ", ".join(f"rank {found.workers[worker]} {found.by_worker[worker]:.3f}" for worker in worst)
    lines = [f"slowdown {found.slowdown:.3f} over equal operations; with one worker alone as it was: {each}"]
    if len(found.by_stage) > 1:
        stages = ", ".join(f"{stage} {value:.3f}" for stage, value in enumerate(found.by_stage))
        lines.append(
            f"with one stage alone as it was: {stages}; the last stage explains {found.last_stage:.0%}"
        )
    return "\n".join(lines)


def _platform(kind: str, path: Path, members: str) -> Platform:
    if kind == "wan":
        try:
            counts = [int(word) for word in members.split(",")]
        except ValueError:
            raise ParameterError(f"--members {members!r}: give whole numbers, such as 8 or 4,4,8") from None
        return inputs.read_wan(path, counts if len(counts) > 1 else counts[0])
    return inputs.read_nccl(path) if kind == "nccl" else inputs.read_iperf3(path)


def write_times(trace: Trace, out: Path) -> str:
    """Write compute times as the columns of a run.

    Args:
        trace: a row for each rank.
        out: the folder.

    Returns:
        The option that reads them.
    """
    rows = [np.asarray(row, dtype=np.float64) for row in trace.rows]
    out.mkdir(parents=True, exist_ok=True)
    ranks = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    np.savez(out / "metrics.npz", rank=ranks, compute_s=np.concatenate(rows))
    return f"--compute {out},cycle ({len(rows)} ranks, {len(ranks)} steps)"


def write_program(operations: dict[str, Any], out: Path) -> str:
    """Write operations, and a program that carries them out.

    Args:
        operations: as `chakra.read_traces` returns them.
        out: the program; the operations are beside it, as JSON.

    Returns:
        The command that runs it.
    """
    if out.suffix != ".py":
        raise ParameterError(f"--out {out}: a program is a .py file")
    text = json.dumps(operations)
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    out.with_suffix(".json").write_text(text, encoding="utf-8")
    ranks = len(operations["ranks"])
    out.write_text(chakra.PROGRAM.format(count=ranks, digest=digest), encoding="utf-8")
    return f"spawnsim run {out} --ranks {ranks} ({sum(map(len, operations['ranks']))} operations)"


def _count(words: str) -> int:
    """Return a whole number above 0."""
    if not words.isdecimal() or not int(words):
        raise ParameterError(f"{words!r}: give a whole number above 0")
    return int(words)


def parser() -> Parser:
    """Return the options of `spawnsim import`.

    Returns:
        The parser.
    """
    kinds = "; ".join(f"{kind}: {what}" for kind, what in KINDS.items())
    parser = Parser(
        prog="spawnsim import", description=f"Read what a cluster wrote. {kinds}. See docs/clusters.md."
    )
    add = parser.add_argument
    add("kind", choices=KINDS, help="what the file is")
    add("files", nargs="+", type=Path, metavar="FILE", help="kineto, chakra: one for each rank; else one")
    add(
        "--out",
        type=Path,
        required=True,
        metavar="PATH",
        help="a .toml, .json or .py file; kineto, bytedance: a folder",
    )
    add("--members", default="1", metavar="LIST", help="wan: ranks in each region; default: 1")
    add("--job", metavar="ID", help="sacct: which job; default: the only one")
    add("--ranks-per-node", type=_count, metavar="N", help="sacct, spot; default: 8, 1")
    return parser
