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


@pytest.mark.parametrize(("change", "said"), NCCL_FAULTS)
def test_reports_that_lack_something(tmp_path: Path, change: Callable[[Any], Any], said: str) -> None:
    """The error names the file and the field."""
    document = json.loads(json.dumps(_nccl()))  # a copy in which no two results are one object
    change(document)
    path = _written(tmp_path, document)
    with pytest.raises(ParameterError, match=f"given.json: .*{said}"):
        inputs.read_nccl(path)


@pytest.mark.parametrize("read", [inputs.read_nccl, inputs.read_wan])
def test_files_that_cannot_be_read(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    """No file, no text, nothing in it, nested deeper than the stack; a folder."""
    with pytest.raises(ParameterError, match="is a folder: give its files"):
        read(tmp_path)
    with pytest.raises(ParameterError, match="cannot be read"):
        read(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ParameterError, match="bytes: "):
        read(tmp_path / "bytes")
    for name, text in (("empty", ""), ("list", "[1, 2]"), ("deep", "[" * 60_000 + "]" * 60_000)):
        with pytest.raises(ParameterError, match=f"{name}: "):
            read(_written(tmp_path, text, name))


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
    assert (
        main(["import", "wan", str(path), "--set", "members=4,8,4", "--out", str(tmp_path / "aws.toml")]) == 0
    )
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


def test_the_command_writes_platforms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A report becomes a file that loads, with the largest error of its fit; misuse is refused."""
    path, out = str(_written(tmp_path, _nccl())), str(tmp_path / "nccl.toml")
    assert main(["import", "nccl", path, "--out", out]) == 0
    assert isinstance(load_platform(out).network, Switch)
    assert "off by up to 0% of 14 times" in capsys.readouterr().out
    for wrong, said in (
        (["wan", path, "--set", "members=a", "--out", "wan.toml"], "--set members=a: give whole numbers"),
        (["nccl", path, path, "--out", out], "give one file"),
        (["wan", path, "--out", "plan.json"], "a platform is a .toml file"),
    ):
        assert main(["import", *wrong]) == 2
        assert said in capsys.readouterr().err
