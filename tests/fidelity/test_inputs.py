"""What clusters write is read: files are made here from known numbers, which come back; faults name file and field."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spawnsim
from spawnsim.cli import main
from spawnsim.errors import ParameterError
from spawnsim.fidelity import inputs
from spawnsim.models.collectives import Timing
from spawnsim.models.faults import Crash, FaultPlan, Restart
from spawnsim.models.network import Hockney, Regions, Switch
from spawnsim.models.platform import load_platform


def _written(folder: Path, document: Any, name: str = "given.json") -> Path:
    path = folder / name
    path.write_text(document if isinstance(document, str) else json.dumps(document), encoding="utf-8")
    return path


def _nccl(ranks: int = 16, latency_s: float = 20e-6, bandwidth: float = 20e9) -> dict[str, Any]:
    """A report of as many processes, of one GPU each, as nccl-tests writes it."""
    results = []
    for nbytes in (0, *(8 << 2 * step for step in range(14))):
        time_us = 1e6 * (2 * (ranks - 1) * latency_s + 2 * (ranks - 1) / ranks * nbytes / bandwidth)
        body = {"time": time_us, "alg_bw": 1.0, "bus_bw": 1.0, "nwrong": 0}
        results.append(
            {"size": nbytes, "count": nbytes // 4, "type": "float", "out_of_place": body, "in_place": body}
        )
    devices = [{"rank": rank, "hostname": f"node{rank}"} for rank in range(ranks)]
    return {"version": 1, "config": {"nthreads": 1, "ngpus": 1, "devices": devices}, "results": results}


def test_nccl_tests(tmp_path: Path) -> None:
    """Latency and bandwidth of a ring come back; the platform predicts the times; GPUs of one process count."""
    platform = inputs.read_nccl(_written(tmp_path, _nccl()))
    assert isinstance(platform.network, Switch)
    assert isinstance(platform.network.link, Hockney)
    assert platform.network.link.latency_s == pytest.approx(20e-6)
    assert platform.network.link.bandwidth_Bps == pytest.approx(20e9)
    document = _nccl()
    document["config"] |= {"ngpus": 8, "devices": [{"rank": 0}, {"rank": 8}]}
    assert inputs.read_nccl(_written(tmp_path, document)) == platform
    document["devices"] = document["config"].pop("devices")  # as older versions have it
    document["results"][3]["out_of_place"] = None  # in place alone
    assert inputs.read_nccl(_written(tmp_path, document)) == platform
    assert dict(platform.fitted) == {"ranks": "16", "largest_error": "0% of 14 times"}
    assert Timing(platform.network, platform.collectives) is not None
    times = []

    def program(comm: Any) -> None:
        began_s = comm.clock.now()
        comm.Allreduce(spawnsim.comm.IN_PLACE, spawnsim.PhantomArray(1 << 24, "float32"))
        times.append(comm.clock.now() - began_s)

    spawnsim.run(program, ranks=16, platform=platform)
    assert max(times) == pytest.approx(30 * 20e-6 + 30 / 16 * (1 << 26) / 20e9, rel=0.01)


def _iperf() -> dict[str, Any]:
    sender = {"mean_rtt": 300}
    return {
        "start": {"test_start": {"protocol": "TCP"}},
        "end": {
            "streams": [{"sender": sender}, {"sender": {"mean_rtt": 500}}],
            "sum_received": {"bits_per_second": 9.4e9},
        },
    }


def test_iperf3(tmp_path: Path) -> None:
    """Goodput as received; half of the mean round trip of the streams."""
    platform = inputs.read_iperf3(_written(tmp_path, _iperf()))
    assert isinstance(platform.network, Switch)
    assert isinstance(platform.network.link, Hockney)
    assert (platform.network.link.latency_s, platform.network.link.bandwidth_Bps) == pytest.approx(
        (2e-4, 1.175e9)
    )


def _growing_quicker(document: Any) -> None:
    for place, result in enumerate(document["results"]):
        result["out_of_place"]["time"] = 5 - place / 9


NCCL_FAULTS = [
    (lambda d: d["results"][2]["out_of_place"].pop("time"), r"results\[2\].out_of_place.time is missing"),
    (lambda d: d["results"][4]["out_of_place"].update(time="x"), r"results\[4\].out_of_place.time is 'x'"),
    (lambda d: d.pop("results"), "results is missing"),
    (lambda d: d.update(results=[]), "fewer than two sizes"),
    (lambda d: d["config"].update(devices=[{}]), "devices: 1 rank"),
    (lambda d: d["config"].update(ngpus=0), "config.ngpus is 0"),
    (_growing_quicker, "larger sizes"),
]
IPERF_FAULTS = [
    (lambda d: d["end"].pop("sum_received"), "end.sum_received is missing"),
    (lambda d: d["end"]["streams"][1]["sender"].clear(), r"end.streams\[1\].sender.mean_rtt is missing"),
    (lambda d: d["end"].update(streams=[]), r"end.streams\[0\] is missing"),
    (lambda d: d.update(error="unable to connect"), "error: the test failed: unable"),
    (lambda d: d["start"]["test_start"].update(protocol="UDP"), "start.test_start.protocol is not TCP"),
    (lambda d: d["end"]["sum_received"].update(bits_per_second=0), "bits_per_second is 0"),
]


@pytest.mark.parametrize(
    ("read", "made", "change", "said"),
    [(inputs.read_nccl, _nccl, *fault) for fault in NCCL_FAULTS]
    + [(inputs.read_iperf3, _iperf, *fault) for fault in IPERF_FAULTS],
)
def test_reports_that_lack_something(
    tmp_path: Path,
    read: Callable[[Path], Any],
    made: Callable[[], Any],
    change: Callable[[Any], Any],
    said: str,
) -> None:
    """The error names the file and the field."""
    document = json.loads(json.dumps(made()))  # a copy in which no two results are one object
    change(document)
    path = _written(tmp_path, document)
    with pytest.raises(ParameterError, match=f"given.json: .*{said}"):
        read(path)


@pytest.mark.parametrize("read", [inputs.read_nccl, inputs.read_iperf3, inputs.read_spot])
def test_a_file_that_is_nested_too_deep(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    """The reader of JSON stops at the depth of the stack."""
    with pytest.raises(ParameterError, match="deep: not valid JSON"):
        read(_written(tmp_path, "[" * 100_000 + "]" * 100_000, "deep"))


@pytest.mark.parametrize("read", [inputs.read_nccl, inputs.read_iperf3, inputs.read_wan, inputs.read_sacct])
def test_files_that_cannot_be_read(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    """No file, no text, nothing in it; a folder."""
    with pytest.raises(ParameterError, match="is a folder: give its files"):
        read(tmp_path)
    with pytest.raises(ParameterError, match="cannot be read"):
        read(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ParameterError, match="bytes: "):
        read(tmp_path / "bytes")
    with pytest.raises(ParameterError, match="empty: "):
        read(_written(tmp_path, "", "empty"))
    with pytest.raises(ParameterError, match="list: "):
        read(_written(tmp_path, "[1, 2]", "list"))


WAN = "region,Oregon,Virginia,Tokyo\nOregon,2.5/2,33.5/0.79,48/0.523\nVirginia,,2.5/2,\nTokyo,,71.5/0.524,2.5/2\n"


def test_a_wan_matrix(tmp_path: Path) -> None:
    """Pairs both ways; written as a platform file and read back; as the preset of the same source has them."""
    path = _written(tmp_path, WAN, "aws.csv")
    network = inputs.read_wan(path, [4, 8, 4]).network
    assert isinstance(network, Regions)
    assert network.members == (4, 8, 4)
    assert network.joins[1][2] == network.joins[2][1] == Hockney(0.0715, 65.5e6)
    preset = load_platform("wan-aws").network
    assert isinstance(preset, Regions)
    assert network.joins[0][:2] == preset.joins[0][:2]
    assert main(["import", "wan", str(path), "--members", "4,8,4", "--out", str(tmp_path / "aws.toml")]) == 0
    with pytest.raises(ParameterError, match=r"aws\.csv: region: 3 of them, and members of 2"):
        inputs.read_wan(path, [4, 8])
    assert inputs.read_wan(_written(tmp_path, "\ufeff" + WAN, "aws.csv"), [4, 8, 4]).network == network
    read = load_platform(tmp_path / "aws.toml").network
    assert read.cost(0, 15, 10**6) == pytest.approx(network.cost(0, 15, 10**6), rel=1e-8)
    for change, said in (
        (("48/0.523", "48;0.523"), "line 2: Tokyo is '48;0.523'"),
        (("48/0.523", "-48/0.523"), "0 ms or more"),
        (("48/0.523", "4.8.1/1"), "write milliseconds"),
        (("33.5/0.79", ""), "line 2: Virginia is empty"),
        (("region", "name"), "no column 'region'"),
        ((",Tokyo\n", ",Kyoto\n"), "no column 'Tokyo'"),
    ):
        with pytest.raises(ParameterError, match=f"aws.csv.*{said}"):
            inputs.read_wan(_written(tmp_path, WAN.replace(*change), "aws.csv"))


def _event(name: str, cat: str, begin_ms: float, length_ms: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": cat,
        "ts": 1e3 * begin_ms,
        "dur": 1e3 * length_ms,
        "pid": 0,
        "tid": 0,
    }


def test_kineto_traces(tmp_path: Path) -> None:
    """A step less what it communicates beside no other kernel; ranks from the files; the folder runs as --compute."""
    paths = []
    for rank in (1, 0):
        events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}]
        for step in range(3):
            at = 100.0 * step
            events += [
                _event(f"ProfilerStep#{step}", "user_annotation", at, 80.0),
                _event(f"ProfilerStep#{step}", "gpu_user_annotation", at + 1, 80.0),
                _event("gemm", "kernel", at, 40.0 + 5 * rank),
                _event("ncclDevKernel_AllReduce_Sum", "kernel", at + 30.0, 20.0),
                _event(
                    "nccl:all_reduce", "cpu_op", at + 10, 50.0
                ),  # the call, not the time that it takes on the GPU
                _event("ncclDevKernel_AllReduce_Sum", "kernel", at + 45.0, 15.0),
            ]
        document = {"distributedInfo": {"rank": rank}, "traceEvents": events}
        paths.append(_written(tmp_path, document, f"rank{rank}.json"))
    trace = inputs.read_kineto(paths)
    # From 30 to 60 it communicates, and computes meanwhile until 40 and 45.
    assert [list(row) for row in map(np.asarray, trace.rows)] == [
        pytest.approx([0.06] * 3),
        pytest.approx([0.065] * 3),
    ]
    assert main(["import", "kineto", *map(str, paths), "--out", str(tmp_path / "times")]) == 0

    def program(comm: Any) -> None:
        with comm.compute() as block:
            pass
        comm.record(seconds=block.seconds)

    run = spawnsim.run(program, ranks=2, compute=f"{tmp_path / 'times'},cycle")
    assert run.table["seconds"].tolist() == pytest.approx([0.06, 0.065])
    packed = tmp_path / "rank0.json.gz"
    packed.write_bytes(gzip.compress(paths[1].read_bytes()))
    assert np.array_equal(inputs.read_kineto([packed]).rows[0], trace.rows[0])
    packed.write_bytes(packed.read_bytes()[:40])
    with pytest.raises(ParameterError, match=r"rank0.json.gz: cannot be read"):
        inputs.read_kineto([packed])
    with pytest.raises(ParameterError, match=r"rank1.json: distributedInfo.rank is 1"):
        inputs.read_kineto([paths[0], paths[0]])
    with pytest.raises(ParameterError, match="no file is of rank 0"):
        inputs.read_kineto(paths[:1])
    for document, said in (
        ({"traceEvents": []}, "no ProfilerStep"),
        ({}, "traceEvents is missing"),
        ({"traceEvents": [{"ph": "X", "name": "a", "ts": None}]}, "ts, dur of complete event 0"),
    ):
        with pytest.raises(ParameterError, match=f"bad.json: .*{said}"):
            inputs.read_kineto([_written(tmp_path, document, "bad.json")])


PROFILED = """
import sys, torch
from torch.profiler import ProfilerActivity, profile, record_function
with profile(activities=[ProfilerActivity.CPU]) as profiler:
    for step in range(3):
        with record_function(f"ProfilerStep#{step}"):
            torch.ones(64, 64) @ torch.ones(64, 64)
profiler.export_chrome_trace(sys.argv[1])
"""


def test_a_trace_of_the_profiler_itself(tmp_path: Path) -> None:
    """What this torch writes on a CPU is read: as many steps as were made, each longer than nothing."""
    # In a process of its own: here the profiler has ended the process of the tests, for a reason that is not known.
    path = tmp_path / "cpu.json"
    subprocess.run([sys.executable, "-c", PROFILED, str(path)], check=True, capture_output=True, timeout=300)
    (row,) = map(np.asarray, inputs.read_kineto([path]).rows)
    assert len(row) == 3
    assert (row > 0).all()


SACCT = """JobID|State|Start|End|NodeList|FailedNode
77|NODE_FAIL|2026-03-01T10:00:00|2026-03-01T11:30:00|gpu[09-11],big|gpu11
77.batch|CANCELLED|2026-03-01T10:00:00|2026-03-01T11:30:00|gpu09|
77|NODE_FAIL|2026-03-01T11:40:00|2026-03-01T12:00:00|gpu[09-10,12],big|big
77|COMPLETED|2026-03-01T12:10:00|2026-03-01T20:00:00|gpu[09-12]|
"""


def test_sacct(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All ranks of a failed node crash when the run ends, and are back when the job is; text that --faults takes."""
    path = _written(tmp_path, SACCT, "sacct.txt")
    found = set(inputs.read_sacct(path, ranks_per_node=4).faults)
    first = {kind(rank, at) for rank in range(8, 12) for kind, at in ((Crash, 5400.0), (Restart, 6000.0))}
    then = {kind(rank, at) for rank in range(12, 16) for kind, at in ((Crash, 7200.0), (Restart, 7800.0))}
    assert found == first | then
    out = tmp_path / "plan.json"
    assert main(["import", "sacct", str(path), "--ranks-per-node", "4", "--out", str(out)]) == 0
    assert set(FaultPlan.parse(str(out)).faults) == found
    for change, said in (
        (("|gpu11\n", "|gpu13\n"), "line 2: FailedNode is 'gpu13'"),
        (("T11:30:00|gpu[", "T11h30|gpu["), "line 2: End is '2026-03-01T11h30'"),
        (("[09-11]", "[x-11]"), "'x-11' is no range"),
        (("|FailedNode", "|Reason"), "no column 'FailedNode'"),
        (("77|COMPLETED", "78|COMPLETED"), r"JobID: 2 jobs \(77, 78\)"),
    ):
        with pytest.raises(ParameterError, match=f"sacct.txt.*{said}"):
            inputs.read_sacct(_written(tmp_path, SACCT.replace(*change), "sacct.txt"))
    waited = "77|CANCELLED by 0|None|Unknown|None assigned|\n"
    with pytest.raises(ParameterError, match="no run of job"):
        inputs.read_sacct(_written(tmp_path, SACCT.split("\n")[0] + "\n" + waited, "sacct.txt"))
    with pytest.raises(ParameterError, match="no run of job 5"):
        inputs.read_sacct(_written(tmp_path, SACCT, "sacct.txt"), "5")
    for wrong, said in (
        (["sacct", str(path), "--out", "plan.txt"], ".json file"),
        (["wan", str(path), "--members", "a", "--out", "wan.toml"], "--members 'a'"),
        (["nccl", str(path), str(path), "--out", str(out)], "give one file"),
        (["wan", str(path), "--out", str(out)], "a platform is a .toml file"),
    ):
        assert main(["import", *wrong]) == 2
        assert said in capsys.readouterr().err


def test_spot_instances(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three nodes of two ranks at most: who is not there at first, goes, and comes back, the last one first."""
    path = _written(tmp_path, {"metadata": {"gap_seconds": 60}, "data": [2, 3, 3, 1, 2]}, "spot.json")
    plan, ranks = inputs.read_spot(path, ranks_per_node=2)
    assert ranks == 6
    expected = [
        (Crash, (4, 5), 0.0),
        (Restart, (4, 5), 60.0),
        (Crash, (2, 3, 4, 5), 180.0),
        (Restart, (2, 3), 240.0),
    ]
    assert set(plan.faults) == {kind(rank, at) for kind, who, at in expected for rank in who}
    out = tmp_path / "plan.json"
    assert main(["import", "spot", str(path), "--ranks-per-node", "2", "--out", str(out)]) == 0
    assert "--ranks 6 --faults" in capsys.readouterr().out
    plan = FaultPlan.parse(str(out))
    alive = spawnsim.run(lambda comm: (comm.clock.sleep(100.0), comm.record(at=1)), ranks=6, faults=plan)
    assert sorted(set(alive.table["rank"].tolist())) == [0, 1, 2, 3, 4, 5]
    for document, said in (
        ({"data": [1]}, "metadata is missing"),
        ({"metadata": {"gap_seconds": 0}, "data": [1]}, "metadata.gap_seconds is 0"),
        ({"metadata": {"gap_seconds": 60}, "data": [1, -1]}, r"data\[1\] is -1"),
        ({"metadata": {"gap_seconds": 60}, "data": [0]}, "data: there never is a node"),
        ({"metadata": {"gap_seconds": 60}, "data": "x"}, "data is .x., no list of numbers of nodes"),
        ({"metadata": {"gap_seconds": 60}, "data": 5}, "data is 5, no list"),
    ):
        with pytest.raises(ParameterError, match=f"spot.json: {said}"):
            inputs.read_spot(_written(tmp_path, document, "spot.json"))
    assert main(["import", "spot", str(path), "--ranks-per-node", "0", "--out", str(out)]) == 2


def test_the_command_writes_platforms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both reports become files that load; how far a fit is off is told."""
    for kind, document in (("nccl", _nccl()), ("iperf3", _iperf())):
        out = tmp_path / f"{kind}.toml"
        assert main(["import", kind, str(_written(tmp_path, document)), "--out", str(out)]) == 0
        assert isinstance(load_platform(out).network, Switch)
    assert "off by up to 0% of 14 times" in capsys.readouterr().out
