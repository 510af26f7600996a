"""Collectives' times beside those of SMPI (SimGrid), live, where its package is installed (libsimgrid-dev).

Its raw flow model, no software overheads: 10 us, 1.25 GB/s, one switch. It sends large messages by rendezvous, so that
a blocking sender is busy until arrival: our telephone model; where an algorithm posts all its sends, cards overlap.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from support.collective_plans import makespan, switch

SOURCE = Path(__file__).with_name("smpi_collective.c")
PLATFORM = """<?xml version="1.0"?><!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">
<platform version="4.1"><cluster id="c" prefix="n" suffix="" radical="0-15" speed="1Gf" bw="1.25GBps" lat="5us"
sharing_policy="SPLITDUPLEX"/></platform>"""
RAW = (
    "smpi/simulate-computation:no network/model:CM02 network/bandwidth-factor:1 network/latency-factor:1 "
    "network/weight-S:0 network/TCP-gamma:0 network/crosstraffic:no smpi/os:0:0:0 smpi/or:0:0:0 smpi/ois:0:0:0 "
    "smpi/wtime:0 smpi/test:0"
)
ALGORITHMS = [  # operation, ours, SMPI's
    ("allreduce", "recursive_doubling", "rdb"), ("allreduce", "ring", "lr"), ("allreduce", "rabenseifner", "rab_rdb"),
    ("allgather", "ring", "ring"), ("allgather", "recursive_doubling", "rdb"), ("allgather", "bruck", "bruck"),
    ("alltoall", "pairwise", "ring"), ("alltoall", "linear", "basic_linear"), ("alltoall", "bruck", "bruck"),
    ("bcast", "binomial", "binomial_tree"), ("bcast", "scatter_ring", "scatter_LR_allgather"),
    ("bcast", "scatter_doubling", "scatter_rdb_allgather"), ("reduce", "binomial", "binomial"),
    ("reduce", "rabenseifner", "scatter_gather"), ("reduce", "linear", "flat_tree"),
    ("gather", "binomial", "ompi_binomial"), ("gather", "linear", "ompi_basic_linear"),
    ("scatter", "linear", "ompi_basic_linear"), ("reduce_scatter", "pairwise", "mpich_pair"),
    ("reduce_scatter", "recursive_halving", "ompi_basic_recursivehalving"), ("reduce_scatter", "ring", "ompi_ring"),
]  # fmt: skip
# SMPI's ring hands what does not divide to a second allreduce; its doubling of blocks does not fold.
POWERS_ONLY = {("allreduce", "ring"), ("allgather", "recursive_doubling"), ("bcast", "scatter_doubling")}
CASES = [(size, *row) for size in (5, 16) for row in ALGORITHMS if size == 16 or row[:2] not in POWERS_ONLY]

pytestmark = pytest.mark.skipif(shutil.which("smpirun") is None, reason="SMPI is not installed")


@pytest.fixture(scope="module")
def smpi(tmp_path_factory):
    """Compile the program once; return a function that asks it for microseconds."""
    folder = tmp_path_factory.mktemp("smpi")
    subprocess.run(
        ["smpicc", "-O1", str(SOURCE), "-o", str(folder / "collective")], check=True, capture_output=True
    )
    (folder / "platform.xml").write_text(PLATFORM)
    (folder / "hosts").write_text("\n".join(f"n{i}" for i in range(16)))

    def ask(size: int, operation: str, algorithm: str, nbytes: int) -> float:
        options = [f"--cfg={option}" for option in (*RAW.split(), f"smpi/{operation}:{algorithm}")]
        where = [
            "-np",
            str(size),
            "-platform",
            "platform.xml",
            "-hostfile",
            "hosts",
            "--log=root.thres:error",
        ]
        call = ["smpirun", *where, *options, "./collective", operation, str(nbytes)]
        return float(subprocess.run(call, cwd=folder, check=True, capture_output=True, text=True).stdout)

    return ask


@pytest.mark.parametrize(("size", "operation", "name", "theirs"), CASES)
def test_smpi_agrees(smpi, size, operation, name, theirs):
    """At 1 MiB both simulators agree to half a per cent, for powers of two and others."""
    network = switch(overlap=name == "linear" and operation == "alltoall", gamma=0.0)
    ours = makespan(network, operation, name, size, 1 << 20) * 1e6
    assert ours == pytest.approx(smpi(size, operation, theirs, 1 << 20), rel=0.005)
