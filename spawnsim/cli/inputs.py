"""`spawnsim import`: files from clusters, as platforms and compute times that other commands take."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from spawnsim.errors import ParameterError
from spawnsim.fidelity import inputs
from spawnsim.models.compute import Trace
from spawnsim.models.platform import to_toml
from spawnsim.options import Parser

KINDS = {
    "nccl": "report of all_reduce_perf -J: a platform file",
    "wan": "CSV of milliseconds/Gbit/s between regions: a platform file",
    "kineto": "PyTorch profiler traces, one a rank: a folder for --compute",
}


def main(argv: Sequence[str]) -> int:
    """Read, write, and say what was written and how it is used."""
    options = parser().parse_args(argv)
    paths: list[Path] = options.files
    out: Path = options.out
    if options.kind == "kineto":
        use = write_times(inputs.read_kineto(paths), out)
    else:
        if len(paths) != 1:
            raise ParameterError(f"import {options.kind}: give one file, not {len(paths)}")
        if out.suffix != ".toml":
            raise ParameterError(f"--out {out}: a platform is a .toml file")
        if options.kind == "nccl":
            platform = inputs.read_nccl(paths[0])
        else:
            counts = _members(options.members)
            platform = inputs.read_wan(paths[0], counts if len(counts) > 1 else counts[0])
        out.write_text(to_toml(platform), encoding="utf-8")
        error = dict(platform.fitted).get("largest_error")
        use = f"--platform {out}" + (f" (one link for all: off by up to {error})" if error else "")
    sys.stdout.write(f"written: {out}; use it as {use}\n")
    return 0


def _members(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ParameterError(f"--members {text!r}: give whole numbers, such as 8 or 4,4,8") from None


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


def parser() -> Parser:
    """Return the options of `spawnsim import`.

    Returns:
        The parser.
    """
    kinds = "; ".join(f"{kind}: {what}" for kind, what in KINDS.items())
    parser = Parser(
        prog="spawnsim import", description=f"Read files from a cluster. {kinds}. See docs/clusters.md."
    )
    add = parser.add_argument
    add("kind", choices=KINDS, help="what the file is")
    add("files", nargs="+", type=Path, metavar="FILE", help="kineto: one for each rank; else one")
    add("--out", type=Path, required=True, metavar="PATH", help="a .toml file; kineto: a folder")
    add("--members", default="1", metavar="LIST", help="wan: ranks in each region; default: 1")
    return parser
