"""Calibration gives back what a virtual cluster was made of, fits stragglers, and judges itself."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spawnsim import random
from spawnsim.cli import fidelity, serve
from spawnsim.errors import ParameterError, RankError, WorldError
from spawnsim.fidelity import (
    Effort,
    Measured,
    compare,
    fit,
    fit_stragglers,
    measure,
    measuring,
    score_table,
    scores,
)
from spawnsim.fidelity.fitting import copy_s_per_B, fit_lines, overheads
from spawnsim.fidelity.measuring import doubts
from spawnsim.fidelity.microbenchmarks import Point, held_out, measure_points
from spawnsim.fidelity.scoring import ALL, NullRecorder
from spawnsim.models.collectives import Selection
from spawnsim.models.compute import Bimodal, Exponential, Fixed, Gamma, Lognormal, Noise, SlowRank, Speed
from spawnsim.models.network import Hockney, LogGP, Nodes, Piecewise, Switch
from spawnsim.models.platform import Cores, Platform, load_platform, to_toml
from spawnsim.scenario import Scenario
from spawnsim.virtual import simulate

EFFORT = Effort(least=3, most=3, passes=1, largest_nbytes=1 << 20)
MEDIUM = Effort(least=3, most=3, passes=1, largest_nbytes=1 << 18)
SMALL = Effort(least=2, most=2, passes=1, largest_nbytes=1 << 10)


@pytest.fixture(autouse=True)
def small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """What virtual ranks compute takes no virtual time: large products were nine tenths of a measurement here."""
    monkeypatch.setattr(measuring, "SIDE", 2)


@functools.cache
def _measured(
    platform: Platform, ranks: int = 4, per_node: int = 64, effort: Effort = EFFORT, cores: int | None = None
) -> Measured:
    found: list[Measured] = []

    def program(comm: Any) -> None:
        found.append(measure(comm, effort, host=f"node {comm.Get_rank() // per_node}", cores=cores))

    simulate(program, Scenario(ranks, platform), recorder=NullRecorder())
    return found[0]


def test_a_switch_is_given_back() -> None:
    """Latency, bandwidth, eager limit, overhead of a probe and speed of reductions, from times alone."""
    truth = Platform(
        "truth",
        Switch(Hockney(20e-6, 1.176e9), eager_bytes=16384, call_overhead_s=2e-6, gamma_s_per_B=2.5e-10),
        step=Fixed(0.004),
    )
    measured = _measured(truth)
    found = fit(measured)
    assert 16384 * 63 / 64 <= found.network.eager_bytes <= 16384
    assert found.network.call_overhead_s == pytest.approx(2e-6)
    assert isinstance(found.network, Switch)
    assert isinstance(found.network.link, LogGP)
    assert pytest.approx(20e-6, rel=0.01) == found.network.link.L
    assert pytest.approx(1.176e9, rel=0.01) == 1.0 / found.network.link.G
    assert found.network.gamma_s_per_B == pytest.approx(2.5e-10, rel=0.02)
    assert isinstance(found.step, Fixed)
    assert found.step.duration_s == pytest.approx(0.004)
    assert found.stragglers == ()
    assert {score.operation: score for score in scores(compare(measured, found))}[ALL].held_out < 0.001


def test_ranks_that_share_cores_are_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of four ranks on two cores two are measured, and that is said; the file has how many share them."""
    network = Switch(Hockney(20e-6, 1e9))
    truth = Platform("truth", network, step=Fixed(0.004), cores=Cores(2, 4))
    measured = _measured(truth, effort=SMALL, cores=2)
    assert (measured.ranks, measured.ranks_per_node, measured.sharing) == (2, 2, 4)
    found = fit(measured)
    assert found.cores == Cores(2, 4)
    assert isinstance(found.step, Fixed)
    assert found.step.duration_s == pytest.approx(0.004, rel=1e-3)
    path = tmp_path / "measured.toml"
    monkeypatch.setattr(fidelity, "measure_here", lambda *_: measured)
    assert serve("calibrate", ["--out", str(path)]) == 0
    assert "measured 2 of the 4 ranks on a node" in capsys.readouterr().err
    assert load_platform(path).cores == found.cores


def test_what_collectives_add_is_found(tmp_path: Path) -> None:
    """Whether their long messages ask first, and what a window in mapped memory takes: from times, and on file."""
    window = Piecewise(((0, Hockney(2e-6, 2e10)), (65536, Hockney(5e-6, 1e10))))
    network = Switch(
        LogGP(1e-6, 1e-6, 1e-6, 1e-10), eager_bytes=8100, collective_rendezvous=True, window=window
    )
    truth = Platform("truth", network, step=Fixed(0.001), progress="hardware")
    measured = _measured(truth, ranks=3, effort=MEDIUM)
    assert 8100 - 127 <= measured.eager_nbytes <= 8100
    path = tmp_path / "measured.toml"
    path.write_text(to_toml(fit(measured)), encoding="utf-8")
    found = load_platform(path)
    assert found.network.collective_rendezvous
    for nbytes in (100, 30_000, 200_000):
        assert found.network.copy_s(0, 1, nbytes) == pytest.approx(network.copy_s(0, 1, nbytes), rel=0.02)
    by_name = {score.operation: score for score in scores(compare(measured, found))}
    assert max(by_name[name].held_out for name in ("p2p", "get", "bcast", "allgather", ALL)) < 0.02


CALLS = ("Get_rank", "Get_size", "Send", "Recv", "Barrier", "Allgather", "bcast", "allgather")


def test_own_blocks_and_late_clocks() -> None:
    """Made-up times: copies give a speed; a rank whose clock is ahead, and that comes late, changes no sample."""
    times = [Point("copy", nbytes, 5e-7 + nbytes / 2e10, 0.0, 9) for nbytes in (5096, 17384, 66536, 263144)]
    assert copy_s_per_B(times) == pytest.approx(1 / 2e10, rel=0.01)
    assert copy_s_per_B([dataclasses.replace(each, seconds=0.0) for each in times]) == 0.0

    def program(comm: Any) -> None:
        late = comm.Get_rank() == 2
        comm.clock.sleep(0.3 * late)
        calls = {name: getattr(comm, name) for name in CALLS}
        own: Any = SimpleNamespace(**calls, clock=SimpleNamespace(now=lambda: comm.clock.now() + 7.5 * late))
        found.append(measure_points(own, [("allgather", 40_000)], SMALL))

    found: list[tuple[Point, ...]] = []
    platform = Platform(
        "truth", Switch(Hockney(1e-5, 1e9)), collectives=Selection(fixed=(("allgather", "ring"),))
    )
    simulate(program, Scenario(3, platform), recorder=NullRecorder())
    assert found[0][0].seconds == pytest.approx(2 * (1e-5 + 40_000 / 1e9), rel=1e-6)


def test_overheads_pieces_and_algorithms_are_given_back() -> None:
    """LogGP's o, a slower lane for large messages, and a ring that the library would not have chosen."""
    link = Piecewise(((0, LogGP(5e-6, 1e-6, 2e-6, 1e-10)), (65536, LogGP(30e-6, 1e-6, 2e-6, 5e-10))))
    truth = Platform(
        "truth",
        Switch(link, eager_bytes=1 << 30),
        step=Fixed(0.001),
        collectives=Selection("mpich", (("allreduce", "ring"), ("bcast", "chain"))),
    )
    measured = _measured(truth, ranks=6)
    found = fit(measured)
    for nbytes in (8, 2048, 32768, 1 << 17, 1 << 20):
        wanted, got = (p.network.cost(0, 1, nbytes).flight_s for p in (truth, found))
        assert got == pytest.approx(wanted, rel=0.05)
    assert found.network.cost(0, 1, 8).send_s == pytest.approx(1e-6, rel=0.05)
    assert ("allreduce", "ring") in found.collectives.fixed
    assert {score.operation: score for score in scores(compare(measured, found))}[ALL].held_out < 0.05


@pytest.mark.parametrize("operation", ["stream", "p2p"])
def test_one_disturbed_point_does_not_make_all_messages_slow(operation: str) -> None:
    """The smallest of a kind, ten times too long: the gap between two sends is that of the others."""
    link = LogGP(5e-6, 1e-6, 2e-6, 1e-10)
    times = _measured(Platform("truth", Switch(link, eager_bytes=1 << 30), step=Fixed(0.001)), ranks=2).points
    least = min((point for point in times if point.operation == operation), key=lambda point: point.nbytes)
    found = overheads([dataclasses.replace(p, seconds=10 * p.seconds) if p is least else p for p in times])
    assert found.gap_s == pytest.approx(2e-6, rel=0.1)
    assert found.send_s == pytest.approx(1e-6, rel=0.1)


def test_two_levels_are_given_back() -> None:
    """Ranks on one node and on two have links of their own."""
    truth = Platform(
        "truth", Nodes(Hockney(1e-6, 10e9), Hockney(30e-6, 1e9), ranks_per_node=2), step=Fixed(0.001)
    )
    measured = _measured(truth, ranks=4, per_node=2)
    fitted = fit(measured)
    found = fitted.network
    assert isinstance(found, Nodes)
    assert found.ranks_per_node == 2
    assert found.cost(0, 1, 4096).flight_s == pytest.approx(truth.network.cost(0, 1, 4096).flight_s, rel=0.05)
    assert found.cost(0, 2, 4096).flight_s == pytest.approx(truth.network.cost(0, 2, 4096).flight_s, rel=0.05)
    pairs = compare(measured, fitted)
    assert any(pair.where == "apart" for pair in pairs)


@pytest.mark.parametrize("progress", ["poll", "hardware"])
def test_it_is_found_out_whether_a_busy_rank_answers(progress: Any) -> None:
    """Reading the window of a rank that computes waits for the end of its block, or does not."""
    truth = Platform("truth", Switch(Hockney(1e-5, 1e9)), step=Fixed(0.001), progress=progress)
    assert fit(_measured(truth, ranks=2, effort=SMALL)).progress == progress


def test_wild_samples_do_not_bend_the_line() -> None:
    """Robust: two of twenty points five times too high."""
    nbytes = 2.0 ** np.arange(20)
    seconds = 5e-6 + nbytes * 1e-9
    seconds[[7, 13]] *= 5.0
    lines = fit_lines(nbytes, seconds)
    assert lines[-1].beta_s_per_B == pytest.approx(1e-9, rel=0.05)
    assert lines[0].alpha_s == pytest.approx(5e-6, rel=0.1)


@pytest.mark.parametrize("noise", [Lognormal(0.3), Gamma(0.2), Exponential(0.4)], ids=str)
def test_noise_is_recognised(noise: Noise) -> None:
    """The family by its distribution function, its parameter within a tenth, and the mean block exactly."""
    rows = [0.02 * noise.draw(random.generator(1, rank, "t"), 4000) for rank in range(4)]
    found = fit_stragglers(rows)
    assert [type(straggler) for straggler in found.stragglers] == [type(noise)]
    value, wanted = (float(str(s).partition(":")[2]) for s in (found.stragglers[0], noise))
    assert value == pytest.approx(wanted, rel=0.1)
    assert found.step_s == pytest.approx(np.mean(rows))
    assert found.distance < 0.03


def test_transient_stragglers_and_slow_ranks_are_recognised() -> None:
    """Rare long blocks are an event; few ranks keep their own speed, many have a distribution of speeds."""
    rows = []
    for rank in range(4):
        draws = [
            k.draw(random.generator(2, rank, str(k)), 4000) for k in (Lognormal(0.02), Bimodal(0.02, 6.0))
        ]
        rows.append(0.01 * draws[0] * draws[1] * (1.5 if rank == 3 else 1.0))
    found = fit_stragglers(rows)
    slow = [s for s in found.stragglers if isinstance(s, SlowRank)]
    assert slow[3].slowdown / slow[0].slowdown == pytest.approx(1.5, rel=0.05)
    assert any(isinstance(s, Bimodal) and abs(s.slowdown - 6.0) < 0.5 for s in found.stragglers)
    samplers = [found.model.open(0, rank) for rank in range(4)]
    drawn = np.mean([sample(None, 0.0) for sample in samplers for _ in range(20_000)])
    assert drawn == pytest.approx(np.mean(rows), rel=0.02)
    assert any(isinstance(s, Speed) for s in fit_stragglers(rows, same_ranks=False).stragglers)


def test_steady_steps_have_no_stragglers() -> None:
    """Half a percent is not worth a model."""
    found = fit_stragglers([np.full(50, 0.01), np.full(50, 0.01001)])
    assert found.model.open(0, 1)(None, 0.0) == pytest.approx(0.010005)
    assert str(found) == "constant"


@pytest.mark.parametrize(
    ("attempt", "says"),
    [
        (lambda: fit_stragglers([np.array([0.1])]), "at least 2 compute blocks"),
        (lambda: fit_stragglers([np.array([0.1, 0.0])]), "longer than 0 s"),
        (lambda: simulate(measure, Scenario(1), recorder=NullRecorder()), "at least 2 ranks: mpiexec -n 2"),
        (lambda: Effort(most=0), "above 0"),
    ],
)
def test_nothing_to_fit_is_refused(attempt: Callable[[], object], says: str) -> None:
    """Too few or empty blocks, a rank that is alone, no samples."""
    with pytest.raises((ParameterError, RankError), match=says):
        attempt()


def test_doubtful_measurements_are_said_to_be() -> None:
    """More ranks than cores, or a busy machine."""
    assert doubts(2, 2, 0.3) == []
    assert "4 ranks share 2 cores" in doubts(4, 2, 0.0)[0]
    assert "load 9.0 on 2 cores" in doubts(2, 2, 9.0)[0]


def test_scores_tell_fitted_from_held_out() -> None:
    """A table with one line for each operation and one for all."""
    truth = Platform("truth", Switch(Hockney(1e-5, 1e9)), step=Fixed(0.001))
    measured = _measured(truth, ranks=2, effort=SMALL)
    wrong = Platform("wrong", Switch(Hockney(2e-5, 1e9)), step=Fixed(0.001))
    found = {score.operation: score for score in scores(compare(measured, wrong))}
    assert found["p2p"].fitted == pytest.approx(1.0, abs=0.1)
    assert "p2p" in score_table(tuple(found.values()))


def _spoiled(measured: Measured, seconds: Callable[[Point], float]) -> Measured:
    points = tuple(dataclasses.replace(point, seconds=seconds(point)) for point in measured.points)
    return dataclasses.replace(measured, points=points)


@pytest.mark.parametrize(
    ("seconds", "says"),
    [
        (lambda point: 0.02 + 0.1 * (point.nbytes < 4096), "the longest messages have no bandwidth"),
        (lambda point: point.seconds * (1.0, 100.0)[held_out(point.nbytes)], "of p2p half is off by more than 99%"),
        (lambda point: 1e-9 * max(point.nbytes, 1) ** 1.5, "of p2p half is off by more than"),
    ],
)  # fmt: skip
def test_measurements_that_fit_no_network_are_refused(
    seconds: Callable[[Point], float], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times of a busy machine gave 1.5e19 MB/s and 0 us with status 0: no file, and one line that says what to do."""
    truth = Platform("truth", Switch(Hockney(1e-5, 1e9), eager_bytes=1 << 30), step=Fixed(0.001))
    spoiled = _spoiled(_measured(truth, ranks=2), seconds)
    monkeypatch.setattr(fidelity, "measure_here", lambda *_: spoiled)
    with pytest.raises(
        WorldError, match=rf"({says}).*no file was written: measure again while the machine is idle"
    ):
        serve("calibrate", ["--out", str(tmp_path / "here.toml")])
    assert not (tmp_path / "here.toml").exists()


def test_a_flat_stretch_of_short_messages_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where times do not grow a piece has no bandwidth of its own; the file then has the largest that links reach."""
    steps = ((0, LogGP(L=2e-5, o=1e-6, g=1e-6, G=0.0)), (4096, LogGP(L=2e-5, o=1e-6, g=1e-6, G=1e-9)))
    truth = Platform("truth", Switch(Piecewise(steps), eager_bytes=1 << 30), step=Fixed(0.001))
    measured = _measured(truth, ranks=2)
    monkeypatch.setattr(fidelity, "measure_here", lambda *_: measured)
    assert serve("calibrate", ["--out", str(tmp_path / "here.toml")]) == 0
    link = load_platform(tmp_path / "here.toml").network.link  # type: ignore[attr-defined]
    bandwidths = [1.0 / step.G for _, step in link.steps]
    assert bandwidths[-1] == pytest.approx(1e9, rel=0.05)
    assert max(bandwidths) <= 1.001e13
