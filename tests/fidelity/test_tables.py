"""Platforms from tables of collectives: what is recovered, what is not determined, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spawnsim.cli import main
from spawnsim.errors import ParameterError
from spawnsim.fidelity.tablefit import fit_table, report
from spawnsim.fidelity.tables import Sample, read_table
from spawnsim.models.collectives import Selection, Timing
from spawnsim.models.collectives.nccl import Nccl
from spawnsim.models.network import Hockney, Piecewise, Switch
from spawnsim.models.platform import load_platform

MEASURED = Path(__file__).parents[2] / "studies" / "data" / "pico_fit.csv"
KIB = 1 << 10
LINK = Piecewise(((0, Hockney(2e-6, 5e9)), (16 * KIB, Hockney(9e-6, 12e9))))
CLUSTER = Switch(LINK, gamma_s_per_B=2e-10, gamma_beyond=((32 << 20) + 1, 4e-10))
SIZES = [1 << k for k in range(8, 30, 2)]


def rows(network: Switch, algorithms: tuple[str, ...], ranks: int = 16, dtype: str = "") -> list[Sample]:
    """Return what a machine with this network measures."""
    found = []
    for algorithm in algorithms:
        timing = Timing(network, Selection(fixed=(("allreduce", algorithm),)))
        for nbytes in SIZES:
            seconds = float(timing.finish("allreduce", np.zeros(ranks), nbytes, dtype=dtype).times.max())
            where = f"row {nbytes}"
            found.append(Sample("allreduce", algorithm, "", ranks, ranks, nbytes, seconds, where, dtype))
    return found


def test_links_and_reductions_are_recovered_and_predict_other_sizes_and_ranks() -> None:
    """From a ring and recursive doubling on 16 ranks: Rabenseifner's algorithm on 64."""
    samples = rows(CLUSTER, ("ring", "recursive_doubling"))
    found = fit_table(samples, "found", cache_bytes=32 << 20)
    assert found.undetermined == ()
    network = found.platform.network
    assert network.gamma_s_per_B == pytest.approx(2e-10, rel=0.01)
    assert network.gamma_beyond == pytest.approx(((32 << 20) + 1, 4e-10), rel=0.01)
    assert np.nanmax(np.abs(found.errors)) < 0.02
    choice = Selection(fixed=(("allreduce", "rabenseifner"),))
    for nbytes in (512, 4096, 1 << 24, 1 << 28):
        predicted, expected = (
            Timing(each, choice).finish("allreduce", np.zeros(64), nbytes).times.max()
            for each in (network, CLUSTER)
        )
        assert predicted == pytest.approx(expected, rel=0.05)


def test_what_rows_do_not_determine_is_reported_and_not_fitted() -> None:
    """A ring alone: half of its rounds reduce, whatever the size, so the link's and the reduction's speeds are one."""
    samples = rows(Switch(Hockney(2e-6, 5e9), gamma_s_per_B=2e-10), ("ring",))
    found = fit_table(samples, "found")
    assert [each.partition(":")[0] for each in found.undetermined] == ["reduction per byte from 0 B"]
    assert found.platform.network.gamma_s_per_B == 0.0
    assert "not determined: reduction per byte from 0 B: " in report(samples, found)
    timing = Timing(found.platform.network, Selection(fixed=(("allreduce", "ring"),)))
    again = timing.finish("allreduce", np.zeros(16), 1 << 26).times.max()
    assert again == pytest.approx(samples[SIZES.index(1 << 26)].seconds, rel=0.01)


def test_each_dtype_of_a_table_has_its_speed_of_reductions(tmp_path: Path) -> None:
    """From a column dtype to a platform file: a dtype without rows is as slow as the slowest. Gaps are refused."""
    truth = (("bfloat16", 6e-10), ("float32", 2e-10))
    cluster = Switch(LINK, gamma_s_per_B=6e-10, gamma_of=truth)
    samples = [
        each for dtype, _ in truth for each in rows(cluster, ("ring", "recursive_doubling"), dtype=dtype)
    ]
    table, out = tmp_path / "table.csv", tmp_path / "found.toml"
    lines = [f"{s.nodes},{s.algorithm},{s.nbytes},{s.seconds!r},{s.dtype}" for s in samples]
    table.write_text("\n".join(["nodes,algorithm,bytes,seconds,dtype", *lines]))
    assert main(["calibrate", "--from", str(table), "--out", str(out)]) == 0
    network = load_platform(out).network
    assert dict(network.gamma_of) == pytest.approx(dict(truth), rel=0.01)
    assert network.gamma_s_per_B == pytest.approx(6e-10, rel=0.01)
    with pytest.raises(ParameterError, match=r"several dtypes \(none given, float32\)"):
        fit_table([samples[0]._replace(dtype=""), *samples[-5:]], "found")
    with pytest.raises(ParameterError, match="leave out cache="):
        fit_table(samples, "found", cache_bytes=32 << 20)


def test_rows_that_disagree_are_reported_by_line() -> None:
    """Errors are those of a fit to the other rows: a wrong row cannot pull its own prediction along."""
    samples = rows(CLUSTER, ("ring", "recursive_doubling"))
    wrong = 5
    samples[wrong] = samples[wrong]._replace(seconds=2 * samples[wrong].seconds, where="table.csv, line 7")
    found = fit_table(samples, "found", cache_bytes=32 << 20)
    assert found.errors[wrong] == pytest.approx(-0.5, abs=0.05)
    line = next(each for each in report(samples, found).splitlines() if each.startswith("table.csv, line 7"))
    assert "ring" in line and "predicted -5" in line


def test_nccl_factors_are_recovered() -> None:
    """Latency and bandwidth of each protocol; one factor where a single row cannot separate them."""
    truth = Nccl(96e9, factors=(("ring-LL", 1.4, 1.1), ("ring-LL128", 1.2, 0.9), ("ring-Simple", 1.0, 1.1)))
    samples = []
    for nbytes in (1024, 4096, 65536, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 25, 1 << 28, 1 << 29, 1 << 30):
        one = Nccl(**{**truth.__dict__, "algorithm": "ring"})
        seconds = one.seconds("allreduce", nbytes, ranks=16, nodes=4)
        samples.append(Sample("allreduce", "ring", "nccl", 4, 16, nbytes, seconds, f"row {nbytes}"))
    found = fit_table(samples, "found", machine=Nccl(96e9))
    nccl = found.platform.collectives.nccl
    assert nccl is not None
    for pair, alpha, beta in nccl.factors:
        assert (alpha, beta) == pytest.approx(truth.factor(pair), rel=0.01)
    assert nccl.seconds("allreduce", 1 << 30, ranks=64, nodes=16) == pytest.approx(
        truth.seconds("allreduce", 1 << 30, ranks=64, nodes=16), rel=0.01
    )


NCCL_TESTS = """# nThread 1 nGpus 1 minBytes 8 maxBytes 1024
#  Rank  0 Group  0 Pid  11 on     node1 device  0 [0x1b] NVIDIA H100
#  Rank  1 Group  0 Pid  12 on     node1 device  1 [0x1c] NVIDIA H100
#  Rank  2 Group  0 Pid  13 on     node2 device  0 [0x1b] NVIDIA H100
#  Rank  3 Group  0 Pid  14 on     node2 device  1 [0x1c] NVIDIA H100
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
           8             2     float     sum      -1    20.50    0.00    0.00      0    20.10    0.00    0.00      0
     1048576        262144     float     sum      -1    98.70   10.62   15.94      0    97.10   10.80   16.20      0
"""
OSU = """# OSU MPI Allreduce Latency Test v7.4
# Datatype: MPI_INT.
# Size       Avg Latency(us)
4                       2.50
1024                    6.25
"""


def test_reports_of_the_common_benchmarks_are_read(tmp_path: Path) -> None:
    """nccl-tests names its hosts; the OSU benchmarks do not."""
    file = tmp_path / "report.txt"
    file.write_text(NCCL_TESTS)
    assert [tuple(each[:7]) for each in read_table(file)] == [
        ("allreduce", "", "nccl", 2, 4, 8, pytest.approx(20.5e-6)),
        ("allreduce", "", "nccl", 2, 4, 1 << 20, pytest.approx(98.7e-6)),
    ]
    file.write_text(OSU)
    assert [tuple(each[:7]) for each in read_table(file, nodes=8, ranks=8)] == [
        ("allreduce", "", "", 8, 8, 4, pytest.approx(2.5e-6)),
        ("allreduce", "", "", 8, 8, 1024, pytest.approx(6.25e-6)),
    ]
    with pytest.raises(ParameterError, match="do not print their ranks: give --set nodes=N"):
        read_table(file)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("nodes,bytes\n2,8\n", "no column 'seconds'"),
        ("nodes,bytes,seconds\n2,8,fast\n", "line 2: seconds is 'fast', not a number"),
        ("nodes,bytes,seconds\n2,0,1\n", "line 2: bytes is 0: give a number above 0"),
        ("nodes,bytes,seconds\n", "no rows"),
        ("machine,nodes,bytes,seconds\na,2,8,1\nb,2,8,1\n", "the file has a, b: give --set machine=NAME"),
    ],
)
def test_a_bad_table_is_refused(tmp_path: Path, text: str, error: str) -> None:
    """With its line."""
    file = tmp_path / "table.csv"
    file.write_text(text)
    with pytest.raises(ParameterError, match=error):
        read_table(file)


def test_rows_that_no_fit_describes_are_refused() -> None:
    """Several ranks per node, two libraries, and too few."""
    samples = rows(CLUSTER, ("ring",))
    with pytest.raises(ParameterError, match="one rank per node"):
        fit_table([each._replace(nodes=4) for each in samples], "x")
    with pytest.raises(ParameterError, match="rows of NCCL and of MPI"):
        fit_table([*samples, samples[0]._replace(library="nccl")], "x")
    with pytest.raises(ParameterError, match="3 rows: a fit needs at least 4"):
        fit_table(samples[:3], "x")


def test_the_command_writes_a_platform(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The fit of a large machine: intervals, errors of unseen rows, and a file that loads."""
    out = tmp_path / "lumi.toml"
    words = ["calibrate", "--from", str(MEASURED), "--set", "machine=lumi", "--set", "cache=32MiB"]
    assert main([*words, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "17 rows, each predicted by a fit to the others: median error" in shown
    assert f"written: {out}" in shown
    platform = load_platform(str(out))
    assert 3e9 < 1 / platform.network.gamma_s_per_B < 6e9
    assert main(["calibrate", "--set", "machine=lumi"]) == 2
    assert "give --from TABLE" in capsys.readouterr().err
