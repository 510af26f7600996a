"""mpi4py programs, unmodified on virtual ranks, and the same ones under a real mpiexec."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from spawnsim.models.collectives import Timing
from spawnsim.models.platform import load_platform
from spawnsim.record import Recorder
from spawnsim.scenario import Scenario
from spawnsim.virtual.scripts import run_program

SUITE = Path(__file__).parent / "suite"
PROGRAMS = sorted(path.stem for path in SUITE.glob("*.py") if not path.stem.startswith("helper_"))
MPIEXEC = Path(sys.executable).with_name("mpiexec")
ETHERNET = load_platform("ethernet-10g")


def _virtual(name: str, ranks: int, *argv: str) -> None:
    run_program(SUITE / f"{name}.py", argv, Scenario(ranks, ETHERNET), recorder=Recorder(), prefix=False)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 64])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_check_themselves(name: str, ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Each program asserts its own results, and says so at the end."""
    _virtual(name, ranks)
    assert capsys.readouterr().out


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of what all programs print on real ranks: one start, which takes longer than most of them."""
    folder, launcher = tmp_path_factory.mktemp("real"), str(MPIEXEC) if MPIEXEC.exists() else "mpiexec"
    files = [str(SUITE / f"{name}.py") for name in PROGRAMS]
    command = [launcher, "-n", "4", sys.executable, str(SUITE.with_name("in_turn.py")), str(folder), *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.mpi
@pytest.mark.skipif(not MPIEXEC.exists() and shutil.which("mpiexec") is None, reason="no mpiexec")
@pytest.mark.parametrize("name", PROGRAMS)
def test_real_mpi_prints_the_same(name: str, real: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same file under mpiexec -n 4 prints the same lines, in whatever order."""
    printed = [line for rank in range(4) for line in (real / f"{name}.{rank}").read_text().splitlines()]
    _virtual(name, 4)
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(printed)


# -- benchmarks print what the network model says ------------------------------------------------------------


def _printed(name: str, ranks: int, capsys: pytest.CaptureFixture[str], *argv: str) -> dict[int, float]:
    _virtual(name, ranks, "--values", *argv)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    return {int(size): float(value) for size, value in rows}


def _one_way_s(nbytes: int) -> float:
    """Return the time from the call of Send to the end of Recv, for a receive that waits."""
    network = ETHERNET.network
    cost = network.cost(0, 1, nbytes)
    if nbytes <= network.eager_bytes:
        return cost.flight_s + cost.receive_s
    ask, answer = network.cost(0, 1, 0), network.cost(1, 0, 0)
    return ask.flight_s + answer.flight_s + cost.flight_s + ask.receive_s


def test_latency_is_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    """Half a round trip is a flight and what taking it costs; above the eager threshold two envelopes more."""
    for nbytes, microseconds in _printed("osu_latency", 2, capsys).items():
        assert microseconds == pytest.approx(_one_way_s(nbytes) * 1e6, abs=2e-6)


def test_bandwidth_is_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    """A window of eager messages leaves at the card's rate; the last one flies, and the answer comes back."""
    window, nbytes = 16, 1024
    rate = _printed("osu_bw", 2, capsys)[nbytes]
    cost, answer = ETHERNET.network.cost(0, 1, nbytes), ETHERNET.network.cost(1, 0, 4)
    round_s = (window - 1) * max(cost.inject_s, cost.send_s) + cost.flight_s + cost.receive_s
    round_s += answer.flight_s + answer.receive_s
    assert rate == pytest.approx(nbytes * window / round_s / 1e6, rel=0.02)


@pytest.mark.parametrize("count", [2, 4096, 262144])
@pytest.mark.parametrize("ranks", [2, 5, 8, 64])
def test_allreduce_is_the_models(ranks: int, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The slowest rank's mean latency is that of the dataflows: barrier, allreduce, barrier, …"""
    timing, everyone = Timing(ETHERNET.network, ETHERNET.collectives), np.arange(ranks)
    for nbytes, microseconds in _printed("osu_allreduce", ranks, capsys, str(count)).items():
        now_s, spent_s = np.zeros(ranks), np.zeros(ranks)
        for _ in range(4):
            begin_s = timing.finish("barrier", now_s, 0, ranks=everyone).times
            now_s = timing.finish("allreduce", begin_s, nbytes, ranks=everyone).times
            spent_s += now_s - begin_s
        assert microseconds == pytest.approx(float(spent_s.max()) / 4 * 1e6, abs=1e-3)
